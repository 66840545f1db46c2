"""Small files of every kind that is read, whole, so that a test can spoil one thing in them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.data.criteo import Part, PreparedCriteo
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection import PublicFrequencies
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.report.facts import make_facts
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase

LINE = "\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26]) + "\n"
"""A line of Criteo's."""
META: dict[str, Any] = {"num_rows": [10] * 26}
HEADER, RATING = "userId,movieId,rating,timestamp\n", "1,2,3.5,100\n"
MOVIES = "movieId,title,genres\n1,A,B\n2,C,D\n"
RECIPE = """
seed_everything: 7
trainer:
  devices: 1
  accelerator: cpu
  max_steps: 1
  max_epochs: -1
  limit_val_batches: 0
  enable_progress_bar: false
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_dpsparse.DPSparseStrategy
    init_args:
      privacy: {mechanism: {class_path: lightning_dpsparse.DPSGD}, noise_multiplier: 1.0}
      fused_optimizer: {kind: sgd, learning_rate: 2.0}
model:
  class_path: lightning_dpsparse.models.DLRMModule
  init_args: {num_rows: [5, 6], embedding_dim: 16, dense_arch: [16], over_arch: [8, 1]}
data:
  class_path: lightning_dpsparse.data.SyntheticData
  init_args: {num_rows: [5, 6], examples_per_day: 200, batch_size: 20}
"""
"""A recipe that takes one step on a small model."""
TABLES = [Table("net.t.weight", 4, ("f",)), Table("net.u.weight", 3, ("g",))]


def examples(column: int = 0, value: Any = 1, dtype: Any = np.int32) -> NDArray[Any]:
    """Eight prepared examples, of which the fourth has this value in a column."""
    rows = np.ones((8, 40), dtype=dtype)
    rows[3, column] = value
    return rows


def as_npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def as_npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def read_prepared(folder: Path, array: bytes | None, meta: bytes | None) -> PreparedCriteo:
    """What training reads of a prepared folder: it is opened, and every example is read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("examples.npy", array), ("meta.json", meta)):
        if content is not None:
            (folder / name).write_bytes(content)
    found = PreparedCriteo([Part(path=str(folder))])
    found.__getitems__(range(len(found)))
    return found


def read_frequencies(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    PublicFrequencies(path=str(path)).scores(TABLES)


def small_facts() -> dict[str, Any]:
    """The facts of a small run, with one of everything."""
    run = resolve(PrivacyPlan(noise_multiplier=1.0), [Phase(0, 1000, 0.01)], 1000, 10.0, 10)
    ledger = Ledger()
    run.charge(ledger, 0, 10)
    audit = {"name": "a", "claimed_epsilon": 1.0, "measured_epsilon": 0.5, "confidence": 0.95}
    facts = make_facts(
        run,
        ledger,
        ranks=1,
        taints=["a taint"],
        audits=[audit | {"passed": True}],
        history=[{"data": "d", "steps": 3, "run": None, "ledger": None}],
    )
    sizes = {"repeats": 1, "canaries": 2, "interpolation": 1.0, "low": 1.0, "high": 2.0}
    more: dict[str, Any] = {
        "exposures": [sizes | {"extrapolation": 1.0}],
        "target": {"epsilon": 3.0, "delta": 0.1},
    }
    more |= {"created": "2026-11-16T06:30:00+00:00", "run": "3f2a9c0d"}  # the same in every run
    return json.loads(json.dumps(facts)) | more


def small_ledger() -> Ledger:
    run = resolve(PrivacyPlan(noise_multiplier=1.0), [Phase(0, 1000, 0.01)], 1000, 10.0, 10)
    ledger = Ledger("run")
    run.charge(ledger, 0, 10)
    return ledger
