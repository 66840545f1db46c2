"""Rows that a step updates are logged, table by table, where they are no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_dpsparse import EANA, AdaFEST, LazyDP, Placement, PrivacyMonitor
from lightning_dpsparse.plugin.callbacks import private_run
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import PLACEMENTS, SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    SEQUENCES,
    TABLES,
    Recording,
    assemble,
    make_trainer,
    paths,
    snapshot,
    width_of,
)

SIZES = [[4, 4]]  # one step: what moved is what was updated


def train(
    world_size: int,
    folder: Path,
    placement: Placement,
    mechanism: Any,
    sequences: tuple[str, ...] = (),
) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Recording(sequences=sequences)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    logger = CSVLogger(str(folder), name="", version="")
    trainer = make_trainer(
        world_size,
        placement,
        SGD,
        privacy=plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed"),
        callbacks=[PrivacyMonitor()],
        logger=logger,
        log_every_n_steps=1,
    )
    trainer.fit(module, Batches(SIZES, rank))
    return {
        "start": module.start,
        "end": snapshot(module),
        "shown": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "written": (folder / "metrics.csv").read_text() if rank in (None, 0) else "",
        "taints": private_run(trainer).evidence.taints(),
    }


@pytest.mark.parametrize(
    ("name", "sequences"),
    [
        *((name, ()) for name in ("alone", "row_wise", "column_wise", "mixed")),
        ("column_wise", SEQUENCES),
    ],
)
def test_rows_updated_are_the_rows_that_moved(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, name: str, sequences: tuple[str, ...]
) -> None:
    ranks, placement = (one_rank, Placement()) if name == "alone" else (two_ranks, PLACEMENTS[name])
    results = ranks.run(
        train, ranks.world_size, tmp_path, placement, AdaFEST(threshold=0.5), sequences
    )
    start, end = (assemble([result[key] for result in results]) for key in ("start", "end"))
    moved = {}
    for table, *_ in TABLES:
        key = paths(sequences)[table]
        moved[table] = int((start[key] != end[key]).any(1).sum())
    numbers = sum(moved[table] * width_of(table, sequences) for table, *_ in TABLES)
    in_all = sum(rows * width_of(table, sequences) for table, rows, *_ in TABLES)
    assert 0 < numbers < in_all
    header, *lines = results[0]["written"].splitlines()
    columns = header.split(",")
    for table, count in moved.items():
        at = columns.index(f"rows_updated/{table}")
        assert [float(cell) for line in lines if (cell := line.split(",")[at])] == [count]
    assert results[0]["shown"]["rows_updated"] == sum(moved.values())
    assert results[0]["shown"]["gradient_reduction"] == pytest.approx(in_all / numbers)
    assert not any("rows_updated" in taint for taint in results[0]["taints"])


@pytest.mark.parametrize("mechanism", [EANA(), LazyDP()], ids=lambda m: type(m).__name__)
def test_rows_that_would_tell_of_the_data_are_not_logged(
    one_rank: Ranks, tmp_path: Path, mechanism: Any
) -> None:
    result = one_rank.run(train, 1, tmp_path, Placement(), mechanism)[0]
    assert "rows_updated" not in result["shown"]
    assert "rows_updated" not in result["written"]
