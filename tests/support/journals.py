"""What a journal on disk charges for."""

from __future__ import annotations

from pathlib import Path

from lightning_dpsparse.accounting.journal import read_journal
from lightning_dpsparse.accounting.ledger import Ledger


def charged_in(path: Path) -> Ledger:
    """The ledger in a journal, or in the only journal of a folder."""
    if path.is_dir():
        (path,) = path.glob("*.journal")
    state = read_journal(path)
    assert state is not None
    return state.ledger
