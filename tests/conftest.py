"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Ranks

# Files that take longest begin first, so that two workers end together.
SLOW = (
    "plugin/test_lazydp.py",
    "test_cli.py",
    "plugin/test_private_step.py",
    "plugin/test_private_resume.py",
    "audit/test_command.py",
    "audit/test_gallery.py",
    "plugin/test_adafest.py",
)

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    order = {folder / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def _ranks(world_size: int, per_host: int | None = None) -> Iterator[Ranks]:
    ranks = Ranks(world_size, per_host)
    yield ranks
    ranks.stop()


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
    """Two ranks that believe to be alone on their host."""
    yield from _ranks(2, per_host=1)


@pytest.fixture
def real_data() -> Path:
    """Directory of real samples, which the product does not carry."""
    if not SHARED_DATA.is_dir():
        pytest.skip("samples of real data are not on this machine")
    return SHARED_DATA
