"""A model small enough to check by hand, with everything that goes wrong in tables.

Repeated ids, empty bags, a table that two features share, a feature that two tables share, MEAN and
SUM pooling. Tables may also be read as sequences, whose positions count differently.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import DPSparseStrategy, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.sharded.collections import (
    sharded_collections,
    sharded_tables,
    weight_path,
)
from lightning_dpsparse.sharded.shards import local_kernels

# name, rows, width, features
TABLES = [
    ("t0", 40, 8, ["f0", "f1"]),
    ("t1", 30, 16, ["f2"]),
    ("t2", 21, 8, ["f3"]),
    ("t3", 40, 8, ["f0"]),
]
SEQUENCES = ("t0", "t1", "t2", "t3")
"""All tables in an EmbeddingCollection, where they have one width."""
SEQUENCE_WIDTH = 8
BAGS_OR_SEQUENCES = pytest.mark.parametrize("sequences", [(), SEQUENCES], ids=["bags", "sequences"])


def name_of(value: Any) -> str:
    """Of a parameter, for the test's name."""
    if isinstance(value, tuple):
        return "sequences" if value else "bags"
    return str(getattr(value, "kind", value))


FEATURES = {"f0": 40, "f1": 40, "f2": 30, "f3": 21}
NUM_COUNTS = 3
_SCRATCH = tempfile.TemporaryDirectory()


def width_of(name: str, sequences: tuple[str, ...]) -> int:
    return SEQUENCE_WIDTH if name in sequences else {n: w for n, _, w, _ in TABLES}[name]


def head_width(sequences: tuple[str, ...]) -> int:
    return sum(width_of(name, sequences) * len(features) for name, _, _, features in TABLES)


def sequence_tables(names: tuple[str, ...]) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=SEQUENCE_WIDTH,
            feature_names=features,
        )
        for name, rows, _, features in TABLES
        if name in names
    ]


def fold(values_LD: Tensor, lengths_B: Tensor) -> Tensor:
    """Sequences as one vector each, to which every position adds something else."""
    example_L = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    first_B = lengths_B.cumsum(0) - lengths_B
    position_L = torch.arange(len(values_LD)) - first_B[example_L]
    values_LD = torch.tanh(values_LD) * torch.cos(position_L.to(values_LD.dtype))[:, None]
    folded_BD = values_LD.new_zeros(len(lengths_B), values_LD.shape[1])
    return folded_BD.index_add(0, example_L, values_LD)


def tables(*, mean: bool = False) -> list[EmbeddingBagConfig]:
    """With `mean`, t1 and t3 average their bags."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=width,
            feature_names=features,
            pooling=PoolingType.MEAN if mean and name in ("t1", "t3") else PoolingType.SUM,
        )
        for name, rows, width, features in TABLES
    ]


class Bags(Dataset[Any]):
    """Examples with bags of 0 to 4 ids, a function of the index alone."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.examples = []
        for _ in range(size):
            bags = {
                name: (torch.rand(length, generator=generator) ** 2 * rows).long()
                for (name, rows), length in zip(
                    FEATURES.items(), torch.randint(0, 5, (4,), generator=generator).tolist()
                )
            }
            counts = torch.rand(NUM_COUNTS, generator=generator)
            label = torch.randint(0, 2, (1,), generator=generator).float()
            self.examples.append((counts, bags, label))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def weight_of(ids: Tensor) -> Tensor:
    """A weight for each id in a bag, its own function of it."""
    return 0.5 + (ids % 5).float() / 4


def collate_weighted(examples: list[Any]) -> Batch:
    batch = collate(examples)
    features = batch.sparse_features
    batch.sparse_features = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=weight_of(features.values()),
        lengths=features.lengths(),
        stride=features.stride(),
    )
    return batch


def collate(examples: list[Any]) -> Batch:
    counts = [e[0] for e in examples]
    bags = [e[1][name] for name in FEATURES for e in examples]
    return Batch(
        dense_features=torch.stack(counts) if counts else torch.zeros(0, NUM_COUNTS),
        sparse_features=KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat(bags) if bags else torch.zeros(0, dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            stride=len(examples),
        ),
        labels=torch.cat([e[2] for e in examples]) if examples else torch.zeros(0),
    )


class Head(nn.Module):
    """What lies above the tables; the order of the inputs does not depend on their placement."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(width + NUM_COUNTS, 12), nn.Linear(12, 1)

    def forward(self, embedded: dict[str, Tensor], counts: Tensor) -> Tensor:
        x = torch.cat([embedded[name] for name in sorted(embedded)] + [counts], dim=1)
        return self.out(torch.tanh(self.hidden(x))).squeeze(1)


class SmallModule(LightningModule):
    def __init__(
        self,
        *,
        mean: bool = False,
        weighted: bool = False,
        schedule: str = "",
        scalar_loss: bool = False,
        lr: float = 0.1,
        sequences: tuple[str, ...] = (),
        head: Callable[[int], nn.Module] = Head,
    ) -> None:
        super().__init__()
        self.sequences, self.make_head = sequences, head
        self.mean, self.schedule, self.scalar_loss, self.lr = mean, schedule, scalar_loss, lr
        self.weighted = weighted
        self.ebc: Any = None
        self.ec: Any = None
        self.losses: list[float] = []
        self.predictions: list[Tensor] = []

    def configure_model(self) -> None:
        if self.ebc is None and self.ec is None:
            bags = [t for t in tables(mean=self.mean) if t.name not in self.sequences]
            if bags:
                self.ebc = EmbeddingBagCollection(tables=bags, is_weighted=self.weighted)
            if self.sequences:
                self.ec = EmbeddingCollection(tables=sequence_tables(self.sequences))
            self.head = self.make_head(head_width(self.sequences))

    def forward(self, batch: Batch) -> Tensor:
        embedded: dict[str, Tensor] = {}
        if self.ebc is not None:
            embedded |= self.ebc(batch.sparse_features).to_dict()
        if self.ec is not None:
            for name, found in self.ec(batch.sparse_features).items():
                embedded[f"sequence {name}"] = fold(found.values(), found.lengths())
        return self.head(embedded, batch.dense_features)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self(batch), batch.labels, reduction="none")
        self.losses.append(float(loss.detach().sum()))
        return loss.mean() if self.scalar_loss else loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", self(batch).sum(), batch_size=max(1, len(batch.labels)), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if not self.schedule:
            return optimizer
        scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
            if self.schedule == "cosine"
            else torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False
            )
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def make_trainer(
    world_size: int,
    placement: Placement | None = None,
    optimizer: FusedOptimizer | None = None,
    uneven_loaders: Any = "raise",
    hosts: int = 1,
    privacy: PrivacyPlan | None = None,
    max_physical_batch: int | None = None,
    resume: Any = None,
    trust_checkpoints: bool = False,
    **kwargs: Any,
) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": _SCRATCH.name,
    }
    return Trainer(
        strategy=DPSparseStrategy(
            privacy=privacy,
            max_physical_batch=max_physical_batch,
            placement=placement,
            fused_optimizer=optimizer or FusedOptimizer(kind="sgd", learning_rate=0.1),
            uneven_loaders=uneven_loaders,
            resume=resume,
            trust_checkpoints=trust_checkpoints,
        ),
        accelerator="cpu",
        devices=world_size // hosts,
        num_nodes=hosts,
        **(settings | kwargs),
    )


def loader(size: int, global_batch: int, world_size: int, **kwargs: Any) -> DataLoader[Any]:
    """A plain loader: Lightning splits its examples over the ranks."""
    return DataLoader(
        Bags(size), batch_size=global_batch // world_size, collate_fn=collate, **kwargs
    )


def snapshot(module: LightningModule) -> dict[str, Any]:
    """This rank's tables with their optimizer state, and the dense state dict."""
    pieces = []
    for path, kernel in local_kernels(module):
        tables = kernel.module.config.embedding_tables
        states = (
            [{}] * len(tables)
            if kernel.optimizer is EmbOptimType.EXACT_SGD
            else kernel.module.emb_module.get_optimizer_state()
        )
        for table, weight, state in zip(tables, kernel.table_weights(), states):
            place = table.local_metadata
            pieces.append(
                (
                    weight_path(path, sharded_collections(module)[path], table.name),
                    (table.num_embeddings, table.embedding_dim),
                    tuple(place.shard_offsets),
                    weight.clone(),
                    {name: value.clone() for name, value in state.items()},
                )
            )
    kept = {path for path, _ in sharded_tables(module)}
    dense = {name: value.clone() for name, value in module.state_dict().items() if name not in kept}
    return {"pieces": pieces, "dense": dense}


def assemble(snapshots: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tables and optimizer states from the pieces of all ranks; every cell written once."""
    whole: dict[str, Tensor] = dict(snapshots[0]["dense"])
    for other in snapshots[1:]:
        for name, value in other["dense"].items():
            assert torch.equal(value, whole[name]), f"ranks disagree on {name}"
    for piece in (piece for snap in snapshots for piece in snap["pieces"]):
        key, shape, (row, column), weight, states = piece
        rows = slice(row, row + weight.shape[0])
        columns = slice(column, column + weight.shape[1])
        table = whole.setdefault(key, torch.full(shape, float("nan")))
        assert table[rows, columns].isnan().all(), f"{key} has overlapping pieces"
        table[rows, columns] = weight
        for name, value in states.items():
            if value.dim() == 2:
                state = whole.setdefault(f"{key}:{name}", torch.full(shape, float("nan")))
                state[rows, columns] = value
            elif value.numel() == weight.shape[0]:  # row-wise: one number per row and column piece
                state = whole.setdefault(
                    f"{key}:{name}:{column}", torch.full(shape[:1], float("nan"))
                )
                state[rows] = value
    assert not any(value.isnan().any() for value in whole.values())
    return whole


class Recording(SmallModule):
    """Remembers how it started."""

    start: dict[str, Any]

    def on_train_start(self) -> None:
        self.start = snapshot(self)


def run_training(
    world_size: int,
    placement: Placement,
    optimizer: FusedOptimizer,
    steps: int = 4,
    global_batch: int = 8,
    hosts: int = 1,
    module_settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on every rank; runs inside a rank."""
    torch.manual_seed(0)
    module = Recording(**(module_settings or {}))
    trainer = make_trainer(world_size, placement, optimizer, hosts=hosts, max_steps=steps)
    trainer.fit(module, loader(global_batch * steps, global_batch, world_size))
    return {"start": module.start, "end": snapshot(module), "losses": module.losses}


def paths(sequences: tuple[str, ...] = ()) -> dict[str, str]:
    """The weight of each table in a state dict."""
    return {
        name: f"ec.embeddings.{name}.weight"
        if name in sequences
        else f"ebc.embedding_bags.{name}.weight"
        for name, *_ in TABLES
    }
