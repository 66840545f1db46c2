"""Runs on selected rows, and the selection that they must come to."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse import FEST, AdaFESTPlus, NoisyHistogram, PrivacyPlan, Selection
from lightning_dpsparse.engine.step_inputs import Table
from tests.support.private_runs import Watching, fit
from tests.support.tiny_model import TABLES, paths, snapshot

COUNTED = NoisyHistogram(noise_multiplier=5.0, max_ids_per_bag=2)


def whole(sequences: tuple[str, ...] = ()) -> list[Table]:
    """All tables, as they are before they are cut."""
    path = paths(sequences)
    return [Table(path[name], rows, tuple(features)) for name, rows, _, features in TABLES]


def fest(frequencies: Any = COUNTED, k: int = 6, **selection: Any) -> FEST:
    return FEST(selection=Selection(frequencies=frequencies, rows_per_table=k, **selection))


def plan(mechanism: Any = None, **settings: Any) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=mechanism or fest(), delta=1e-3, **({"noise_multiplier": 1.0} | settings)
    )


class Selecting(Watching):
    """Remembers how its tables started, and which rows its run selected before each step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start: Any = None
        self.rows: list[dict[str, list[int]]] = []

    def on_train_start(self) -> None:
        self.start = snapshot(self)

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.rows.append(rows_in(self.trainer.strategy.private_run.checkpoint()))  # type: ignore[attr-defined]


def rows_in(saved: Any) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in saved["selection"]["rows"].items()}


def select(world: int, privacy: PrivacyPlan, folder: Path, **settings: Any) -> dict[str, Any]:
    """Runs inside a rank."""
    module = settings.pop("module", None) or Selecting()
    result = fit(world, privacy, folder, module=module, **settings)
    return result | {"rows": module.rows, "start": module.start}


def counts(examples: Any, tables: list[Table]) -> dict[str, Tensor]:
    """A set of rows for every example and table, in a plain loop."""
    total: dict[str, Counter[int]] = {table.name: Counter() for table in tables}
    for (_, bags, _), table in product(examples, tables):
        rows: set[int] = set()
        for feature in table.features:
            rows |= set(sorted(set(bags[feature].tolist()))[: COUNTED.most_ids(feature)])
        total[table.name].update(rows)
    return {t.name: torch.tensor([total[t.name][r] for r in range(t.num_rows)]) for t in tables}


REPLAYED = {"fixed_key": 4, "noise_source": "row_keyed"}


def selected_by(
    privacy: PrivacyPlan,
    parts: list[tuple[int, Any]],
    units: int = 1,
    sequences: tuple[str, ...] = (),
) -> Any:
    """What the run must select: noisy counts of these parts of the data, added up."""
    assert isinstance(privacy.mechanism, (FEST, AdaFESTPlus))
    tables, source = whole(sequences), privacy.make_source(privacy.make_key())
    total = {table.name: 0.0 for table in tables}
    for step, examples in parts:
        noisy = COUNTED.noisy(counts(examples, tables), tables, units, source, step)
        total = {name: total[name] + noisy[name] for name in noisy}
    found = privacy.mechanism.selection.largest(total)  # type: ignore[arg-type]
    return {name: rows.tolist() for name, rows in found.items()}
