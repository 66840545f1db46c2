"""What is released lies on the noise's grid, on every rank and by every mechanism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse import DPSGD, EANA, AdaFEST, FusedOptimizer, LazyDP, Placement
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.sharded.shards import local_kernels
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import PLACEMENTS
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, make_trainer, snapshot

ONE = FusedOptimizer(kind="sgd", learning_rate=1.0)
SIZES = [[5, 3], [2, 4]]


class FromZero(SmallModule):
    """Tables begin at zero: with a learning rate of one they add up what was released."""

    def configure_model(self) -> None:
        super().configure_model()
        self.grads: list[Tensor] = []

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for _, kernel in local_kernels(self):
                for weight in kernel.table_weights():
                    weight.zero_()

    def on_after_backward(self) -> None:
        self.grads += [p.grad.clone() for p in self.head.parameters() if p.grad is not None]


def released(world: int, placement: Placement, mechanism: Any) -> dict[str, Any]:
    module, rank = FromZero(), torch.distributed.get_rank() if world > 1 else None
    noisy = plan(2.0, noise=1.5, mechanism=mechanism, noise_source="fast")
    trainer = make_trainer(world, placement, ONE, privacy=noisy)
    trainer.fit(module, Batches(SIZES, rank))
    return {"tables": [piece[3] for piece in snapshot(module)["pieces"]], "dense": module.grads}


def is_on(grid: float, values: Tensor) -> bool:
    return torch.equal(values.double(), (values.double() / grid).round() * grid)


MECHANISMS = [DPSGD(), EANA(), AdaFEST(threshold=1.0), LazyDP()]


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: type(m).__name__)
def test_every_rank_releases_multiples_of_the_grid(
    two_ranks: Ranks, mechanism: Any, name: str
) -> None:
    for found in two_ranks.run(released, 2, PLACEMENTS[name], mechanism):
        grid = grid_of(mechanism.gradient_noise(1.5) * 2.0 / 10)
        assert len(found["dense"]) == 4 * len(SIZES)
        assert all(is_on(grid, values) for values in found["dense"])
        moved = torch.cat([values.flatten() for values in found["tables"]])
        assert moved.count_nonzero() > 50
        if not isinstance(mechanism, LazyDP):  # whose rows are on a coarser grid
            assert is_on(grid, moved)
        assert not is_on(2 * grid, torch.cat([g.flatten() for g in found["dense"]]))
