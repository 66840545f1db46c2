"""Tables start the same however they are cut, keep given values, and never sit in memory twice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_dpsparse import Placement, TablePlacement
from lightning_dpsparse.sharded.placement import Placement as SamePlacement
from lightning_dpsparse.sharded.shards import tables_on_meta
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, assemble, loader, make_trainer, snapshot

BIG = 40_000  # more than two blocks of initial values

PLACEMENTS = [
    Placement(default="table_wise"),
    Placement(default="row_wise"),
    Placement(tables={"big": TablePlacement(kind="column_wise", shards=2)}),
]


def tables() -> list[EmbeddingBagConfig]:
    initial = {
        "big": None,
        "normal": partial(nn.init.normal_, std=3.0),
        "shape": nn.init.xavier_uniform_,
    }
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=BIG, embedding_dim=8, feature_names=[name], init_fn=init_fn
        )
        for name, init_fn in initial.items()
    ]


class Tables(LightningModule):
    def configure_model(self) -> None:
        self.ebc = EmbeddingBagCollection(tables=tables())

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def start(world_size: int, placement: Placement, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = Tables()
    make_trainer(world_size, placement).validate(module, loader(2, 2, world_size), verbose=False)
    return snapshot(module)


def test_initial_values_depend_on_the_seed_and_not_on_the_placement(
    one_rank: Ranks, two_ranks: Ranks
) -> None:
    expected = assemble(one_rank.run(start, 1, Placement(), 3))
    names = ["ebc.embedding_bags.big.weight", "ebc.embedding_bags.normal.weight"]
    for placement in PLACEMENTS:
        found = assemble(two_ranks.run(start, 2, placement, 3))
        assert all(torch.equal(found[name], expected[name]) for name in names)
    other = assemble(one_rank.run(start, 1, Placement(), 4))
    assert all((other[name] != expected[name]).float().mean() > 0.99 for name in names)


def test_initial_values_follow_the_tables_own_initialiser(two_ranks: Ranks) -> None:
    found = assemble(two_ranks.run(start, 2, Placement(default="row_wise"), 3))
    big = found["ebc.embedding_bags.big.weight"]
    normal = found["ebc.embedding_bags.normal.weight"]
    assert big.abs().max() <= BIG**-0.5
    # 320,000 draws: the standard deviation is known to one part in 800.
    assert big.std() == pytest.approx(BIG**-0.5 / 3**0.5, rel=0.01)
    assert normal.std() == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("name", ["big", "normal", "shape"])
def test_no_two_rows_start_alike(two_ranks: Ranks, name: str) -> None:
    """Equal seeds on two ranks would make the halves of a row-wise table copies of each other."""
    found = assemble(two_ranks.run(start, 2, Placement(default="row_wise"), 3))
    assert len(found[f"ebc.embedding_bags.{name}.weight"].unique(dim=0)) == BIG


class BuiltEarly(SmallModule):
    """Builds its tables in __init__, with values in them."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()
        with torch.no_grad():
            for config in self.ebc.embedding_bag_configs():
                weight = self.ebc.embedding_bags[config.name].weight
                weight.copy_(torch.arange(weight.numel()).view_as(weight))


def keep_values(world_size: int, placement: Placement) -> dict[str, Any]:
    module = BuiltEarly()
    make_trainer(world_size, placement).validate(module, loader(8, 8, world_size), verbose=False)
    return snapshot(module)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_tables_that_hold_values_keep_them(two_ranks: Ranks, kind: Any) -> None:
    found = assemble(two_ranks.run(keep_values, 2, SamePlacement(default=kind)))
    weights = {key: value for key, value in found.items() if "embedding_bags" in key}
    assert len(weights) == 4
    for value in weights.values():
        assert torch.equal(value, torch.arange(value.numel()).view_as(value).float())


def test_tables_take_no_memory_before_they_are_sharded() -> None:
    with tables_on_meta():
        collection = EmbeddingBagCollection(tables=tables())
        dense = nn.Linear(2, 2)
    assert all(weight.is_meta for weight in collection.parameters())
    assert not dense.weight.is_meta
    assert not any(w.is_meta for w in EmbeddingBagCollection(tables=tables()).parameters())


class Eager(SmallModule):
    """Its dense optimizer makes its state at once, for every parameter that it is given."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def dense_optimizer() -> tuple[list[int], list[int], int]:
    module = Eager()
    trainer = make_trainer(1, max_steps=1)
    trainer.fit(module, loader(8, 8, 1))
    optimizer = trainer.optimizers[0]
    given = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    state: list[Tensor] = [entry["sum"] for entry in optimizer.state.values()]
    return given, [s.numel() for s in state], sum(1 for _ in module.ebc.parameters())


def test_the_dense_optimizer_never_meets_the_tables(one_rank: Ranks) -> None:
    given, state, tables = one_rank.run(dense_optimizer)[0]
    head = [12 * (8 + 8 + 16 + 8 + 8 + 3), 12, 12, 1]
    assert given == head
    assert state == head
    assert tables > 0  # they are back among the module's parameters afterwards
