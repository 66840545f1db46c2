"""The facts of a private run: what the privacy report shows and a reviewer signs.

They follow from the resolved plan (`RunPlan`) and the ledger alone; the plugin adds what it saw of
the run (taints, history). `report/` turns them into a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_dpsparse.accounting.events import describe_event
from lightning_dpsparse.accounting.ledger import Entry, Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.plan import Users
from lightning_dpsparse.run_plan import RunPlan

_PACKAGES = ("lightning-dpsparse", "torch", "torchrec", "fbgemm-gpu", "lightning", "dp-accounting")
_POINTS = 12
"""Number of points of epsilon over time."""

NOT_COVERED = (
    "Anything else that is made from the same data: other models, statistics, validation results.",
    "Choices made by looking at the data or at results on it, such as hyper-parameters, the number "
    "of steps or the architecture, unless listed as a taint or accounted elsewhere.",
    "Whoever can read the training process: its memory, the noise key, un-noised gradients, or "
    "what the user's code prints, keeps or writes to files of its own.",
    "Whoever can read the network between the ranks of a run: un-noised gradients and the data's "
    "ids cross it unencrypted. Run on one host, or in a network that is trusted or encrypted.",
    "Side channels: how long a step takes, which rows of a table it reads, and an error that ends "
    "the run.",
    "A data set that puts one unit's data into the examples of others: mixing, or features counted "
    "over many.",
    "Weights that were copied into the model by hand, tensor by tensor: they bring no history.",
    "Code that couples examples in some steps only, and along the same path through the model as "
    "in the steps in which the probe looked.",
    "What is left of floating-point arithmetic: float32 sums over a batch of B are taken to err by "
    "at most B 2^-22 C, which is kept back from C; that is argued and searched for, not proved. A "
    "draw of noise has the stated law to a factor of 1 ± 2e-5.",
)


def make_facts(
    run: RunPlan,
    ledger: Ledger,
    ranks: int,
    taints: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    audits: Sequence[dict[str, Any]] = (),
    faults: Sequence[str] = (),
    history: Sequence[dict[str, Any]] = (),
    rounding_price: float = 0.0,
    averaged: str | None = None,
    calibrated_tasks: int = 1,
) -> dict[str, Any]:
    """Everything about a run that can be released. Holds no value of any example.

    `averaged` says over what the weights are averaged; None if they are not. `faults` are reasons
    why the weights are not private whatever this run did. `calibrated_tasks` is how many counts of
    a calibration an example is in, by whose square root their noise grows.
    """
    deltas = sorted({run.delta, *(10.0**-k for k in range(5, 11))}, reverse=True)
    epsilons = ledger.epsilons(deltas)
    epsilon = epsilons[deltas.index(run.delta)]
    faults = [*run.plan.faults(), *faults]
    is_private = not faults and math.isfinite(epsilon)
    return {
        "format": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "run": ledger.run,
        "guarantee": {
            "sentence": _sentence(run, epsilon, is_private),
            "is_private": is_private,
            "epsilon": _finite(epsilon) if not faults else None,
            "delta": run.delta,
            "unit": "user" if isinstance(run.plan.unit, Users) else "example",
            "adjacency": run.plan.adjacency,
            "threat_model": run.plan.mechanism.threat_model,
            "faults": faults,
        },
        "target": None
        if run.plan.epsilon is None
        else {"epsilon": run.plan.epsilon, "delta": run.delta},
        "ran": {
            **_ran(run, ledger, ranks),
            "rounding_price": rounding_price,
            **({} if averaged is None else {"averaged": averaged}),
            **({} if calibrated_tasks == 1 else {"calibrated_tasks": calibrated_tasks}),
        },
        "ledger": [
            {"event": _said(e), "steps": e.steps, "partition": e.partition} for e in ledger.entries
        ],
        "epsilon_over_time": _over_time(run, ledger, epsilon),
        "epsilon_for_delta": [[d, _finite(e)] for d, e in zip(deltas, epsilons)],
        "cross_check": {
            "accountant": "privacy loss distributions (dp-accounting)",
            "epsilon": _finite(epsilon),
            "rdp_epsilon": _finite(ledger.rdp_epsilon(run.delta)),
        },
        "taints": [*run.plan.taints, *taints],
        "assumptions": run.plan.assumptions(),
        "not_covered": [*NOT_COVERED, *not_covered],
        "history": list(history),
        "audits": list(audits),
        "versions": _versions(),
    }


def _ran(run: RunPlan, ledger: Ledger, ranks: int) -> dict[str, Any]:
    plan = run.plan
    rates = sorted({phase.rate for phase in run.phases})
    return {
        "mechanism": type(plan.mechanism).__name__,
        "mechanism_settings": _settings(plan.mechanism),
        "dense": type(plan.dense).__name__,
        "dense_settings": _settings(plan.dense),
        "calibration_settings": _settings(plan.calibration),
        "clipping": type(plan.clipping).__name__,
        "clip_norm": _finite(plan.clip_norm),
        "noise_multiplier": run.noise_multiplier,
        "noise_stddev": _finite(
            plan.mechanism.gradient_noise(run.noise_multiplier) * plan.clip_norm
        )
        if run.noise_multiplier
        else 0.0,
        "dense_scale": plan.dense_scale,
        "noise_source": plan.noise_source,
        "sampling": _sampling(run),
        "num_units": run.num_units,
        "sampling_rate": rates[0] if plan.sampling == "poisson" and len(rates) == 1 else None,
        "expected_batch": run.expected_batch,
        "batch_counts": _batch_counts(run),
        "max_batch": plan.max_batch_size,
        "steps": ledger.steps,
        "steps_lost": ledger.lost,
        "steps_planned": run.planned_steps,
        "ranks": ranks,
    }


def _sentence(run: RunPlan, epsilon: float, is_private: bool) -> str:
    if not is_private:
        return "This run is not differentially private. Make no claim of privacy from it."
    one = "any one user" if isinstance(run.plan.unit, Users) else "any one training example"
    return (
        f"The trained model is ({_up(epsilon)}, {run.delta:.3g})-differentially private: whether "
        f"{one} was in the data changes the odds of any outcome by a factor of at most "
        f"{_up(math.exp(epsilon))}, up to a probability of {run.delta:.3g}."
    )


def _up(value: float) -> str:
    """The value in four digits, never rounded down."""
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{math.ceil(round(value * 10.0**digits, 6)) / 10.0**digits:.4g}"


def _sampling(run: RunPlan) -> str:
    plan = run.plan
    if plan.sampling == "fixed_order":
        return "fixed order: no amplification, one event per pass over the data"
    if plan.sampling == "unamplified":
        return "a loader of the user's: no amplification, one event per step"
    what = "users" if plan.draws_whole_users else "examples"
    days = ", one day after the other" if plan.by_day else ""
    return f"Poisson samples of {what}{days}, drawn from the run's secret key"


def _batch_counts(run: RunPlan) -> str:
    """What the batch size is a number of."""
    unit = run.plan.unit
    if isinstance(unit, Users) and unit.drawn == "users":
        return f"users, each with up to {unit.max_examples:,} examples"
    return "examples"


def _settings(mechanism: Any, prefix: str = "") -> dict[str, Any]:
    """The settings of a mechanism and of what it is made of, as plain values by name."""
    if not is_dataclass(mechanism):
        return {}
    found: dict[str, Any] = {}
    for field in fields(mechanism):
        name, value = f"{prefix}{field.name}", getattr(mechanism, field.name)
        if is_dataclass(value):
            found |= {name: type(value).__name__, **_settings(value, f"{name}.")}
        elif isinstance(value, tuple):
            found[name] = ", ".join(value)
        elif value is not None and value != {}:
            found[name] = dict(value) if isinstance(value, Mapping) else value
    return found


def _said(entry: Entry) -> str:
    """An entry's event in words, and how often it was run if that is not once in each step."""
    said = describe_event(entry.event)
    times = "once" if entry.count == 1 else f"{entry.count:,} times"
    if entry.count == entry.steps:
        return said
    if entry.steps == 0:
        return f"{said}; {times}, beside the steps"
    return f"{said}; {times} for all these steps together"


def _over_time(run: RunPlan, ledger: Ledger, last: float) -> list[list[float]]:
    """Epsilon after some numbers of steps, up to all of them."""
    if not ledger.entries or math.isinf(last):
        return []
    counts = sorted({max(1, ledger.steps * i // _POINTS) for i in range(1, _POINTS)})
    points = [
        [n, min(last, run.ledger_after(ledger, n).epsilon(run.delta, COARSE))]
        for n in counts
        if n < ledger.steps
    ]
    return [*points, [ledger.steps, last]]


def _finite(value: float | None) -> float | None:
    """The value, or None for what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
