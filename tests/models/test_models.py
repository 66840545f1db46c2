"""The click models are what they say, and train like the same layers in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_dpsparse import FusedOptimizer, Placement
from lightning_dpsparse.data import SyntheticClicks, SyntheticData, collate
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS
from lightning_dpsparse.models import ClickModule, DLRMDCNModule, DLRMModule, PCTRModule
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble, make_trainer, snapshot

NUM_ROWS = [50, 7, 3, 200]
STEPS, BATCH = 4, 16


def data() -> SyntheticData:
    return SyntheticData(
        batch_size=BATCH,
        num_rows=NUM_ROWS,
        examples_per_day=STEPS * BATCH,
        max_ids_per_bag=3,
        zipf=0.5,
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def dlrm() -> DLRMModule:
    return DLRMModule(NUM_ROWS, 8, dense_arch=[12, 8], over_arch=[10, 1], optimizer=sgd)


def dcn() -> DLRMDCNModule:
    return DLRMDCNModule(NUM_ROWS, 8, [12, 8], [10, 1], cross_layers=2, cross_rank=3, optimizer=sgd)


def pctr() -> PCTRModule:
    return PCTRModule(NUM_ROWS, hidden=[9, 7], optimizer=sgd)


class Record(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.start: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = snapshot(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"].sum()))


def train(build: Any, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, record = build(), Record()
    trainer = make_trainer(
        world_size,
        Placement(),
        FusedOptimizer(kind="sgd", learning_rate=0.1),
        callbacks=[record],
        limit_val_batches=1,
    )
    trainer.fit(module, datamodule=data())
    return {"start": record.start, "end": snapshot(module), "losses": record.losses}


class PlainDLRM(nn.Module):
    """DLRM from its paper: bottom MLP, dot products of all pairs, top MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in NUM_ROWS)
        self.bottom = nn.Sequential(nn.Linear(13, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        pairs = (len(NUM_ROWS) + 1) * len(NUM_ROWS) // 2
        self.top = nn.Sequential(nn.Linear(8 + pairs, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, batch: Any) -> Tensor:
        dense = self.bottom(torch.log1p(batch.dense_features))
        features = [batch.sparse_features[f"cat_{i}"] for i in range(len(NUM_ROWS))]
        pooled = [bag(f.values(), f.offsets()[:-1]) for bag, f in zip(self.bags, features)]
        stacked = torch.stack([dense, *pooled], dim=1)
        dots = stacked @ stacked.transpose(1, 2)
        row, column = torch.triu_indices(dots.shape[1], dots.shape[1], offset=1)
        return self.top(torch.cat([dense, dots[:, row, column]], dim=1)).squeeze(1)

    def weights(self) -> list[Tensor]:
        layers = [m for m in self.modules() if isinstance(m, nn.Linear)]
        linear = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
        return [*linear, *(bag.weight for bag in self.bags)]


def in_order(whole: dict[str, Tensor]) -> list[Tensor]:
    """Linear layers as they lie in the model, then the tables."""
    linear = [
        value for key, value in whole.items() if key.startswith("net.") and "embedding" not in key
    ]
    path = "net.sparse_arch.embedding_bag_collection.embedding_bags.table_{}.weight"
    return [*linear, *(whole[path.format(i)] for i in range(len(NUM_ROWS)))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_dlrm_is_plain_pytorch_step_by_step(
    one_rank: Ranks, two_ranks: Ranks, world_size: int
) -> None:
    results = {1: one_rank, 2: two_ranks}[world_size].run(train, dlrm, world_size)
    start = assemble([result["start"] for result in results])
    end = assemble([result["end"] for result in results])
    plain = PlainDLRM()
    with torch.no_grad():
        for weight, value in zip(plain.weights(), in_order(start)):
            weight.copy_(value)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    order = torch.randperm(STEPS * BATCH, generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(STEPS):
        batch = collate(data().train_set.__getitems__(order[step * BATCH : (step + 1) * BATCH]))
        loss = F.binary_cross_entropy_with_logits(plain(batch), batch.labels, reduction="none")
        found = sum(result["losses"][step] for result in results)
        assert found == pytest.approx(loss.sum().item(), abs=1e-4)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    for weight, value, before in zip(plain.weights(), in_order(end), in_order(start)):
        assert (weight - value).abs().max() <= 1e-6
        assert (value - before).abs().max() > 0


@pytest.mark.parametrize("build", [dcn, pctr])
def test_the_other_models_train_the_same_on_one_rank_and_two(
    one_rank: Ranks, two_ranks: Ranks, build: Any
) -> None:
    one = one_rank.run(train, build, 1)
    two = two_ranks.run(train, build, 2)
    start, end = assemble([one[0]["start"]]), assemble([one[0]["end"]])
    for key, value in assemble([result["end"] for result in two]).items():
        assert (end[key] - value).abs().max() <= 1e-6
    assert any((end[key] - start[key]).abs().max() > 1e-4 for key in end)


def test_pctr_has_the_papers_shape() -> None:
    module = PCTRModule(ADAFEST_NUM_ROWS)
    module.configure_model()
    linear = [layer for layer in module.mlp if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [598, 598, 598, 598, 1]
    assert linear[0].in_features == 13 + sum(int(2 * rows**0.25) for rows in ADAFEST_NUM_ROWS)
    assert sum(ADAFEST_NUM_ROWS) == 338_782


def test_pctr_reads_no_column_beyond_its_width() -> None:
    """Tables are stored wider than the paper says; what is beyond must not matter."""
    torch.manual_seed(0)
    module = PCTRModule([1472, 3], hidden=[5])
    module.configure_model()
    assert module.tables is not None
    assert module.widths == [12, 2]
    batch = collate(SyntheticClicks(0, 4, [1472, 3], 10).__getitems__(range(4)))
    before = module(batch)
    with torch.no_grad():
        module.tables.embedding_bags["table_1"].weight[:, 2:] = 1e6
    assert torch.equal(module(batch), before)


@pytest.mark.parametrize("build", [dlrm, dcn, pctr])
def test_training_returns_one_loss_per_example(build: Any) -> None:
    module: ClickModule = build()
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    clicks = SyntheticClicks(0, 10, NUM_ROWS, 10, max_ids_per_bag=2)
    assert module.training_step(collate(clicks.__getitems__(range(5))), 0).shape == (5,)


def test_architectures_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="dense_arch to end in embedding_dim=16"):
        DLRMModule(NUM_ROWS, 16, dense_arch=[8])
