"""What does a training step cost, as a ratio to the first mode?

bare      a TorchRec loop without Lightning: sharded DLRM, fused SGD
torchrec  the same model through Trainer and DPSparseStrategy(privacy=None)
clip      private without noise: clipping alone
eana      clipping, and noise on the rows that were read (not private)
lazydp    clipping, and noise on rows before they are read
averaged  lazydp, with an average of the weights that counts every step
adafest   clipping, and noise on about 300 rows that pass a threshold
lsg       adafest, with LSG of rank 8 and sparsity 0.3 for all dense layers but the last
dpsgd     clipping, and noise on every row
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Generator, Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import (
    Feed,
    Mode,
    bar_plot,
    interleave,
    peak_rss_alone,
    peak_rss_mb,
    print_table,
    write_json_lines,
)
from lightning_dpsparse import (
    DPSGD,
    EANA,
    LSG,
    AdaFEST,
    AverageWeights,
    DenseGaussian,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    PrivacyPlan,
)
from lightning_dpsparse.engine.dense import DenseMechanism
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.recipe import hide_upstream_warnings
from lightning_dpsparse.sharded.shards import tables_on_meta

NUM_COUNTS = 13
LEARNING_RATE = 0.05
HOT_ACCESSES = 0.9
_STRIDE = 6_180_341  # a prime: multiples of it visit every row once


@dataclass(frozen=True)
class Workload:
    """The DLRM of the speed targets: 26 tables, one uniform id per feature, unless told."""

    rows: int
    batch: int
    dim: int
    tables: int = 26
    pooling: int = 1
    """Ids per feature."""
    hot_rows: int | None = None
    """Rows of each table that get 90% of the accesses; None is all alike."""

    def module(self) -> DLRMModule:
        return DLRMModule(
            num_rows=[self.rows] * self.tables,
            embedding_dim=self.dim,
            dense_arch=[512, 256, self.dim],
            over_arch=[512, 256, 1],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        )

    def batches(self, count: int = 8) -> list[Batch]:
        generator = torch.Generator().manual_seed(0)
        bags = self.tables * self.batch
        return [
            Batch(
                dense_features=torch.randint(
                    0, 100, (self.batch, NUM_COUNTS), generator=generator
                ).float(),
                sparse_features=KeyedJaggedTensor(
                    keys=[f"cat_{i}" for i in range(self.tables)],
                    values=self._ids(bags * self.pooling, generator),
                    lengths=torch.full((bags,), self.pooling),
                ),
                labels=torch.randint(0, 2, (self.batch,), generator=generator).float(),
            )
            for _ in range(count)
        ]

    def _ids(self, count: int, generator: Generator) -> Tensor:
        if self.hot_rows is None:
            return torch.randint(0, self.rows, (count,), generator=generator)
        is_hot = torch.rand(count, generator=generator) < HOT_ACCESSES
        hot = torch.randint(0, self.hot_rows, (count,), generator=generator)
        cold = torch.randint(self.hot_rows, self.rows, (count,), generator=generator)
        return self.row_of(torch.where(is_hot, hot, cold))

    def row_of(self, rank: Tensor) -> Tensor:
        """Rows in order of heat, hottest first: they lie scattered, as hashed ids do."""
        return rank * _STRIDE % self.rows


ModeMaker = Callable[[Workload], Mode]


def bare(workload: Workload) -> Mode:
    """TorchRec as its own examples use it."""

    def run(feed: Feed) -> None:
        module = workload.module()
        with tables_on_meta():
            module.configure_model()
        settings = FusedOptimizer(kind="sgd", learning_rate=LEARNING_RATE).fused_params()
        sharder = EmbeddingBagCollectionSharder(fused_params=settings)
        path = "net.sparse_arch.embedding_bag_collection"
        tables = construct_module_sharding_plan(
            module.get_submodule(path),
            {
                f"table_{i}": table_wise(rank=0, compute_kernel="fused")
                for i in range(workload.tables)
            },
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        model = DistributedModelParallel(
            module,
            device=torch.device("cpu"),
            plan=ShardingPlan({path: tables}),
            sharders=[sharder],
            init_data_parallel=False,
        )
        dense = [p for name, p in module.named_parameters() if not name.startswith(path)]
        optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)
        for batch in feed:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
            loss.backward()
            optimizer.step()

    return run


def through_lightning(
    mechanism: Mechanism | None,
    noise: float = 0.8,
    callbacks: Sequence[Callback] = (),
    dense: DenseMechanism = DenseGaussian(),  # noqa: B008 (frozen)
) -> ModeMaker:
    """The same through Lightning; without a mechanism, the yardstick of every private mode."""

    def make(workload: Workload) -> Mode:
        def run(feed: Feed) -> None:
            plan = None
            if mechanism is not None:
                plan = PrivacyPlan(
                    mechanism=mechanism,
                    dense=dense,
                    noise_multiplier=noise,
                    expected_batch_size=workload.batch,
                    sampling="unamplified",  # the same batches for every mode
                    delta=1e-6,
                )
            strategy = DPSparseStrategy(
                privacy=plan,
                fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=LEARNING_RATE),
            )
            with TemporaryDirectory() as folder:  # for the run's journal
                trainer_for(strategy, folder, callbacks).fit(workload.module(), feed)

        return run

    return make


def trainer_for(
    strategy: DPSparseStrategy, folder: str, callbacks: Sequence[Callback] = (), epochs: int = 1
) -> Trainer:
    """Nothing but training on what it is fed, and validation if it is given any."""
    return Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


MODES: dict[str, ModeMaker] = {
    "bare": bare,
    "torchrec": through_lightning(None),
    "clip": through_lightning(EANA(), noise=0.0),
    "eana": through_lightning(EANA()),
    "lazydp": through_lightning(LazyDP()),
    "averaged": through_lightning(LazyDP(), callbacks=[AverageWeights(half_life=200)]),
    "adafest": through_lightning(AdaFEST(false_positives=300)),
    "lsg": through_lightning(AdaFEST(false_positives=300), dense=LSG(8, 0.3)),
    "dpsgd": through_lightning(DPSGD()),
}


def measure(modes: list[str], workload: Workload, steps: int) -> list[dict[str, Any]]:
    """One row per mode."""
    times = interleave({name: MODES[name](workload) for name in modes}, workload.batches(), steps)
    first = times[modes[0]].medians()["cpu_ms"]
    return [
        {
            "mode": name,
            "rows": workload.rows,
            "batch": workload.batch,
            "dim": workload.dim,
            **times[name].medians(),
            "ratio": round(times[name].medians()["cpu_ms"] / first, 4),
            "peak_rss_mb": peak_rss_of(name, workload),
        }
        for name in modes
    ]


def peak_rss_of(mode: str, workload: Workload) -> float:
    """In a process of its own."""
    numbers = {"--rows": workload.rows, "--batch": workload.batch, "--dim": workload.dim}
    words = [str(word) for pair in numbers.items() for word in pair]
    return peak_rss_alone("benchmarks.step_time", ["--memory-of", mode, *words])


def one_thread() -> None:
    """FBGEMM's CPU kernels gain nothing from a second thread, and an idle one may spin."""
    os.environ["OMP_NUM_THREADS"] = "1"  # where Lightning looks before it sets a number of its own
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def start_process_group() -> None:
    """A process group of one, for modes that do not come with Lightning."""
    if not dist.is_initialized():
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def get_ready() -> None:
    """What a process that measures needs, once."""
    warnings.filterwarnings("ignore")
    hide_upstream_warnings()
    one_thread()
    start_process_group()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--modes", default="bare,torchrec", help=f"from {', '.join(MODES)}")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 26 tables")
    parser.add_argument("--batch", type=int, default=2048, help="examples per step")
    parser.add_argument("--dim", type=int, default=16, help="width of the tables")
    parser.add_argument("--steps", type=int, default=30, help="measured steps per mode")
    parser.add_argument(
        "--quick", action="store_true", help="small tables, few steps: under a minute"
    )
    parser.add_argument("--json", type=Path, help="write one JSON object per mode to this file")
    parser.add_argument("--plot", type=Path, help="write a bar plot to this PNG file")
    parser.add_argument("--memory-of", metavar="MODE", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.rows, options.steps = min(options.rows, 10_000), min(options.steps, 5)
    get_ready()
    workload = Workload(options.rows, options.batch, options.dim)
    if options.memory_of:
        interleave({"alone": MODES[options.memory_of](workload)}, workload.batches(), steps=5)
        print(peak_rss_mb())
        return
    rows = measure(options.modes.split(","), workload, options.steps)
    print_table(rows)
    if options.json:
        write_json_lines(rows, options.json)
    if options.plot:
        bar_plot(rows, "ratio", f"CPU time per step over {rows[0]['mode']}", options.plot)


if __name__ == "__main__":
    main()
