"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

# Two workers on two cores: threads that wait for each other's turn make small products many times
# slower. Torch and NumPy read this when they are imported, which is after this file; ranks and
# commands inherit it.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

LAUNCHED = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def _ranks(world_size: int, per_host: int | None = None, **settings: Any) -> Iterator[Ranks]:
    ranks = Ranks(world_size, per_host, **settings)
    yield ranks
    ranks.stop()


@pytest.fixture(autouse=True)
def _no_launcher_left() -> Iterator[None]:
    """Lightning's launcher tells its children by this process's environment, and leaves it so."""
    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    yield from _ranks(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Two hosts of two ranks."""
    yield from _ranks(4, per_host=2)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Ranks]:
    """Two ranks that believe to be alone on their host, each in an interpreter of its own."""
    yield from _ranks(2, per_host=1, own_interpreters=True)


@pytest.fixture
def real_data() -> Path:
    """Directory of real samples, which the product does not carry."""
    if not SHARED_DATA.is_dir():
        pytest.skip("samples of real data are not on this machine")
    return SHARED_DATA
