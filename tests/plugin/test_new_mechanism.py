"""A mechanism with a state of its own trains, is saved and goes on, from one file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_dpsparse
from lightning_dpsparse import Placement
from tests.support.alternating import Alternating
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.tiny_model import Recording, assemble, make_trainer, snapshot

PLAN = plan(noise=2.0, mechanism=Alternating(), noise_source="row_keyed")


class OnlyNoise(Recording):
    """Examples have no gradient: a step is its noise. The same rows are read in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.first, batch_idx) * 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first = getattr(self, "first", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def train(
    world: int, placement: Placement, steps: int, folder: Path, resume: str | None = None
) -> dict[str, Any]:
    """Runs inside a rank. Returns the weights at the start and at the end."""
    torch.manual_seed(0)
    module, rank = OnlyNoise(), torch.distributed.get_rank() if world > 1 else None
    settings = {"max_epochs": -1, "max_steps": steps, "default_root_dir": str(folder)}
    trainer = make_trainer(world, placement, SGD, privacy=PLAN, **settings)
    ckpt_path = None if resume is None else str(folder / resume)
    trainer.fit(module, Batches([[3, 2]] * 2, rank), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"after-{steps}.ckpt")
    return {"start": module.start, "end": snapshot(module)}


def run(ranks: Ranks, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = ranks.run(train, ranks.world_size, *args, **kwargs)
    return assemble([r["start"] for r in results]), assemble([r["end"] for r in results])


def largest_move(start: dict[str, Tensor], end: dict[str, Tensor]) -> list[float]:
    return [float((end[key] - start[key]).abs().max()) for key in start]


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
def test_two_steps_cancel_on_every_placement(
    one_rank: Ranks, two_ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """After one step tables and dense layers are off by their noise; after two they are back."""
    for ranks in (one_rank, two_ranks):
        start, end = run(ranks, PLACEMENTS[name], 1, tmp_path / str(ranks.world_size))
        assert min(largest_move(start, end)) > 0.001  # noise of 0.125 times a rate of 0.1 or more
        start, end = run(ranks, PLACEMENTS[name], 2, tmp_path / str(ranks.world_size))
        assert_close(end, start, 1e-6)


def test_the_state_is_saved_and_goes_on(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """One step, a checkpoint, and the second step elsewhere: forgetting would double the noise."""
    start, _ = run(two_ranks, PLACEMENTS["row_wise"], 1, tmp_path)
    _, end = run(one_rank, Placement(), 2, tmp_path, resume="after-1.ckpt")
    assert_close(end, start, 1e-6)


def test_it_touches_no_file_of_the_package() -> None:
    package = Path(lightning_dpsparse.__file__).parent
    assert not [p for p in package.rglob("*.py") if "Alternating" in p.read_text()]
