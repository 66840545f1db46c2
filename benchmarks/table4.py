"""How does a step grow with the vocabulary? Table 4 of the AdaFEST paper (Ghazi et al. 2023).

One table of width 64, 1,024 examples with one uniform id each, and nothing but the table: its
lookup, per-example clipping, noise and the fused SGD update, on one thread.

sgd      no privacy: TorchRec's lookup, and FBGEMM's update in the backward pass
adafest  DP-AdaFEST with about 100 false positives a step
dpsgd    noise on every row, chunk by chunk: random numbers are all it waits for

On every table each mode runs by itself, as in training: step_ms is its median step, seconds_100 the
time of 100 of them, reduction dpsgd's time over the mode's. The paper's best reduction is 177, at
ten million rows.

growth is the mode's step over its own on the smallest table, from another run, in which the quick
modes take turns step by step on tables of all heights: a noisy machine hits all alike, and no table
stays in the caches.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Feed, Mode, interleave, print_table, write_json_lines
from benchmarks.step_time import get_ready
from lightning_dpsparse import DPSGD, AdaFEST, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sharded import build
from lightning_dpsparse.sharded.features import public_tables
from lightning_dpsparse.sharded.private import PrivateSteps

WIDTH, BATCH, NUM_BATCHES = 64, 1_024, 100
VOCABULARIES = (100_000, 200_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)
Row = dict[str, Any]


class OneTable(nn.Module):
    """A table, and a loss for every example that gives every column a gradient."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="table", num_embeddings=rows, embedding_dim=WIDTH, feature_names=["id"]
        )
        self.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.tables(batch).values()
        return pooled.sum(1)


def sharded(rows: int) -> OneTable:
    module = OneTable(rows)
    fused = FusedOptimizer(kind="sgd", learning_rate=0.05)
    build.divide_gradients_by_world_size(False)
    build.shard_tables(module, Placement(), fused, torch.device("cpu"), 1)
    return module


def plain(rows: int) -> Mode:
    def run(feed: Feed) -> None:
        module, mine = sharded(rows), batches(rows)
        for turn in feed:
            (module(mine[turn]).sum() / BATCH).backward()

    return run


def private(mechanism: Mechanism) -> Callable[[int], Mode]:
    def make(rows: int) -> Mode:
        def run(feed: Feed) -> None:
            module, mine = sharded(rows), batches(rows)
            plan = PrivacyPlan(
                mechanism=mechanism, noise_multiplier=0.8, sampling="unamplified", delta=1e-6
            )
            tables = public_tables(module)
            settled = resolve(plan, [Phase(0, 0, 1.0)], None, BATCH, None, tables=tables)
            steps = PrivateSteps(module, settled, plan.make_key())
            for step, turn in enumerate(feed):
                steps.start(step)
                with steps.capture():
                    loss_B = module(mine[turn])
                steps.step(loss_B)

        return run

    return make


MODES: dict[str, Callable[[int], Mode]] = {
    "sgd": plain,
    "adafest": private(AdaFEST(false_positives=100)),
    "dpsgd": private(DPSGD()),
}


def batches(rows: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        KeyedJaggedTensor(
            keys=["id"],
            values=torch.randint(0, rows, (BATCH,), generator=generator),
            lengths=torch.ones(BATCH, dtype=torch.int64),
        )
        for _ in range(NUM_BATCHES)
    ]


Times = dict[tuple[str, int], float]
"""Milliseconds of the median step, by mode and vocabulary."""


def measure(modes: list[tuple[str, int]], steps: int, warm_up: int = 10) -> Times:
    """Modes on tables, taking turns."""
    named = {f"{name} {rows}": MODES[name](rows) for name, rows in modes}
    found = interleave(named, range(NUM_BATCHES), steps, warm_up)
    gc.collect()  # modules are full of cycles, and the next table needs the room
    return {mode: times.medians()["cpu_ms"] for mode, times in zip(modes, found.values())}


def table(vocabularies: tuple[int, ...], steps: int, slow_steps: int) -> list[Row]:
    """One row for every vocabulary and mode."""
    quick = ("sgd", "adafest")
    in_turns = measure([(name, rows) for rows in vocabularies for name in quick], steps)
    alone: Times = {}
    for rows in vocabularies:
        print(f"{rows:,} rows", file=sys.stderr)
        for name in quick:
            alone |= measure([(name, rows)], steps)
        alone |= measure([("dpsgd", rows)], slow_steps, warm_up=1)
    return [
        {
            "vocabulary": rows,
            "mode": name,
            "steps": steps if name in quick else slow_steps,
            "step_ms": alone[name, rows],
            "seconds_100": round(alone[name, rows] / 10, 3),
            "reduction": round(alone["dpsgd", rows] / alone[name, rows], 1),
            "growth": round(times[name, rows] / times[name, vocabularies[0]], 3),
        }
        for rows in vocabularies
        for name in MODES
        for times in [in_turns if name in quick else alone]
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table4",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100, help="of sgd and adafest")
    parser.add_argument("--slow-steps", type=int, default=3, help="of dpsgd")
    parser.add_argument("--quick", action="store_true", help="two small tables: under a minute")
    parser.add_argument("--json", type=Path, help="write one JSON object per row to this file")
    return parser


def main() -> None:
    options = parser().parse_args()
    get_ready()
    heights = tuple(rows // 100 for rows in VOCABULARIES[::5]) if options.quick else VOCABULARIES
    rows = table(heights, options.steps, options.slow_steps)
    print_table(rows)
    if options.json:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()
