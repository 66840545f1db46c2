"""All ranks come to know one key, unless somebody stands between them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.key_exchange import SECRET, SECRET_FILE, agree_on_key
from tests.support.ranks import Ranks

LONG, OTHER = "a" * 32, "b" * 32


def agree(settings: list[dict[str, str]]) -> tuple[bytes, bool]:
    """The key of this rank, with an environment of its own."""
    mine = settings[dist.get_rank()]
    os.environ.update(mine)
    try:
        key = agree_on_key(lambda: RunKey(bytes([dist.get_rank()]) * 16, is_fixed=True))
    finally:
        for name in mine:
            del os.environ[name]
    return key.secret, key.is_fixed


@pytest.mark.parametrize("settings", [{}, {SECRET: LONG}])
def test_the_key_of_rank_zero_is_everybodys(two_ranks: Ranks, settings: dict[str, str]) -> None:
    assert two_ranks.run(agree, [settings] * 2) == [(bytes(16), True)] * 2


def test_a_secret_may_be_in_a_file(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{LONG}\n")
    settings = [{SECRET_FILE: str(tmp_path / "secret")}, {SECRET: LONG}]
    assert two_ranks.run(agree, settings) == [(bytes(16), True)] * 2


@pytest.mark.parametrize("settings", [[{SECRET: LONG}, {SECRET: OTHER}], [{SECRET: LONG}, {}]])
def test_a_rank_with_another_secret_gets_no_key(
    two_ranks: Ranks, settings: list[dict[str, str]]
) -> None:
    with pytest.raises(Refused, match="found a message under another secret"):
        two_ranks.run(agree, settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({SECRET: "short"}, "a secret of at least 16 characters"),
        ({SECRET_FILE: "/nowhere/secret"}, "found none"),
        ({SECRET_FILE: os.devnull}, "a secret of at least 16 characters"),
    ],
)
def test_a_secret_that_is_none_is_refused(
    two_ranks: Ranks, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        two_ranks.run(agree, [settings] * 2)
