"""A tiny model with made-up examples, and ten steps of training on them.

The examples have empty bags and repeated ids, and two features share a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import lightning_dpsparse as dp

# B examples, T positions, D row width

STEPS, BATCH_SIZE, NUM_EXAMPLES, NUM_COUNTS, MAX_LENGTH = 10, 16, 64, 3, 4

TABLES = {  # rows, width, features
    "shared": (40, 8, ["a", "b"]),
    "wide": (30, 16, ["c"]),
    "odd": (21, 8, ["d"]),
    "again": (40, 8, ["a"]),
}
ROWS = {feature: rows for rows, _, features in TABLES.values() for feature in features}
SEQUENCE_WIDTH = 8


class Examples(Dataset[Any]):
    """Bags of zero to four ids for every feature, three examples to a user, in two days."""

    def __init__(self) -> None:
        draws = np.random.default_rng(1)
        self.users = np.arange(NUM_EXAMPLES) // 3
        self.day_starts = [0, NUM_EXAMPLES // 2]
        self._examples = [
            (
                {
                    name: (draws.random(draws.integers(MAX_LENGTH + 1)) ** 2 * rows).astype(int)
                    for name, rows in ROWS.items()
                },
                draws.random(NUM_COUNTS),
                draws.integers(2),
            )
            for _ in range(NUM_EXAMPLES)
        ]

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]


def collate(examples: list[Any], weighted: bool = False) -> Batch:
    bags = [torch.from_numpy(ids[name]) for name in ROWS for ids, _, _ in examples]
    ids_L = torch.cat(bags)
    return Batch(
        dense_features=torch.tensor(np.array([counts for _, counts, _ in examples])).float(),
        sparse_features=KeyedJaggedTensor(
            keys=list(ROWS),
            values=ids_L,
            lengths=torch.tensor([len(bag) for bag in bags]),
            weights=0.5 + (ids_L % 5) / 4 if weighted else None,
        ),
        labels=torch.tensor([float(label) for _, _, label in examples]),
    )


def collate_weighted(examples: list[Any]) -> Batch:
    return collate(examples, weighted=True)


class ManyLayers(nn.Module):
    """Every kind of dense layer that private training knows, and a weight that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 16)
        self.picture = nn.Conv2d(1, 3, 3, padding=1)
        self.out_of = nn.Linear(48, 16)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.bin = nn.Embedding(4, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 1)

    def forward(self, x_BE: Tensor) -> Tensor:
        picture = self.picture(self.into(x_BE).view(-1, 1, 4, 4))
        hidden = self.norm(torch.tanh(self.out_of(picture.flatten(1))))
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        return self.last((hidden + self.bin((x_BE[:, -1] * 4).long())) * self.scale)


class Tiny(LightningModule):
    """Clicks from bags, from sequences, or from both.

    Args:
        tables: Names of the tables that there are.
        times_rows: How many times as many rows these have. No example reads the further ones.
        sequences: Names of those that are not pooled.
        mean: Pool the bags of some tables by their mean.
        weighted: Weigh the ids of every bag.
        schedule: Lower the learning rate from step to step.
        many_layers: Put `ManyLayers` above the tables, and not two linear layers.
    """

    def __init__(
        self,
        *,
        tables: tuple[str, ...] = tuple(TABLES),
        times_rows: int = 1,
        sequences: tuple[str, ...] = (),
        mean: bool = False,
        weighted: bool = False,
        schedule: bool = False,
        many_layers: bool = False,
    ) -> None:
        super().__init__()
        self.tables, self.times_rows, self.sequences = tables, times_rows, sequences
        self.mean, self.weighted = mean, weighted
        self.schedule, self.many_layers = schedule, many_layers
        self.bags: Any = None
        self.lists: Any = None
        self.head: Any = None

    def configure_model(self) -> None:
        if self.head is not None:
            return
        width, bags, lists = NUM_COUNTS, [], []
        for name in self.tables:
            rows, table_width, features = TABLES[name]
            table: dict[str, Any] = {"name": name, "feature_names": features}
            table["num_embeddings"] = rows * self.times_rows
            if name in self.sequences:
                table_width = SEQUENCE_WIDTH  # a collection of sequences has one width
                lists.append(EmbeddingConfig(embedding_dim=table_width, **table))
            else:
                pooling = PoolingType.MEAN if self.mean and name != "odd" else PoolingType.SUM
                bags.append(EmbeddingBagConfig(embedding_dim=table_width, pooling=pooling, **table))
            width += len(features) * table_width
        if bags:
            self.bags = EmbeddingBagCollection(tables=bags, is_weighted=self.weighted)
        if lists:
            self.lists = EmbeddingCollection(tables=lists)
            self.token = nn.Linear(SEQUENCE_WIDTH, SEQUENCE_WIDTH)
        if self.many_layers:
            self.head = ManyLayers(width)
        else:
            self.head = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, batch: Batch) -> Tensor:
        found: dict[str, Tensor] = {}
        if self.bags is not None:
            found |= self.bags(batch.sparse_features).to_dict()
        if self.lists is not None:
            for name, rows in self.lists(batch.sparse_features).items():
                hidden_BTD = torch.tanh(self.token(rows.to_padded_dense(MAX_LENGTH)))
                order_T = torch.arange(MAX_LENGTH).cos()
                found[f"list of {name}"] = (hidden_BTD * order_T[:, None]).sum(1)
        # Sorted: placements order the features differently.
        x_BE = torch.cat([*(found[name] for name in sorted(found)), batch.dense_features], dim=1)
        return self.head(x_BE).squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch), batch.labels, reduction="none")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    *,
    world_size: int,
    hosts: int = 1,
    plan: dict[str, Any] | None = None,
    placement: Any = "auto",
    fused: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    batch_size: int = BATCH_SIZE,
    max_physical_batch: int | None = None,
    resume: bool = False,
    validate: bool = False,
) -> LightningModule:
    """Take ten steps on this rank and the others.

    Args:
        world_size: The number of ranks.
        hosts: The number of hosts that these ranks are spread over.
        plan: Settings of the privacy plan beyond the usual ones. None trains without privacy.
        placement: A kind for all tables, or a `Placement`.
        fused: Settings of the fused optimizer.
        model: Settings of `Tiny`.
        batch_size: Examples in a batch of all ranks.
        max_physical_batch: As the strategy has it.
        resume: Save a checkpoint after five steps, and go on from it with another trainer.
        validate: Validate after every epoch.
    """
    seed_everything(7, verbose=False)
    usual = {"noise_multiplier": 1.0, "delta": 1e-3, "fixed_key": 7}
    # The probe of independence takes a second: recipes have it, and the cases named after it.
    usual |= {"assume_independent_examples": "The losses are those of single examples."}
    privacy = None if plan is None else dp.PrivacyPlan(**(usual | plan))
    if isinstance(placement, str):
        placement = dp.Placement(default=placement)
    optimizer = {"kind": "sgd", "learning_rate": 0.1, **(fused or {})}
    for max_steps in (STEPS // 2, STEPS) if resume else (STEPS,):
        module = Tiny(**(model or {}))
        trainer = Trainer(
            strategy=dp.DPSparseStrategy(
                privacy=privacy,
                placement=placement,
                fused_optimizer=dp.FusedOptimizer(**optimizer),
                max_physical_batch=max_physical_batch,
            ),
            accelerator="cpu",
            devices=world_size // hosts,
            num_nodes=hosts,
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=1.0 if validate else 0,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=resume,
            callbacks=[ModelCheckpoint(".", "half", every_n_train_steps=STEPS // 2)] * resume,
        )
        data = DataLoader(
            Examples(),
            batch_size=batch_size // world_size,
            collate_fn=collate_weighted if module.weighted else collate,
        )
        half = "half.ckpt" if resume and max_steps == STEPS else None
        trainer.fit(module, data, data if validate else None, ckpt_path=half)
    return module
