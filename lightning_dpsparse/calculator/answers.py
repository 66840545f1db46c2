"""What calibrate and account answer, as plain values for programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dpsparse.accounting.events import describe_event, split_noise
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.calculator.questions import Question
from lightning_dpsparse.mechanisms.adafest import AdaFEST, survival, threshold_for_half_survival
from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
from lightning_dpsparse.run_plan import RunPlan

_BATCH_FACTORS = (0.25, 1, 4, 16, 64)
"""Batch sizes of the table that calibrate prints, over the one that was asked for."""
_READERS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Numbers of examples of one batch that read a row, for the table of thresholds."""
_DELTAS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
"""Other deltas that account gives epsilon for."""


def calibrated(question: Question, epsilon: float) -> dict[str, Any]:
    """The noise that a target needs."""
    run = question.resolve(epsilon=epsilon)
    return {
        "noise_multiplier": run.noise_multiplier,
        **_shares(question, run),
        "epsilon": epsilon,
        "delta": run.delta,
        **_sampled(run),
        "steps": question.steps,
    }


def accounted(question: Question, noise_multiplier: float) -> dict[str, Any]:
    """The epsilon that some noise gives."""
    run = question.resolve(noise_multiplier=noise_multiplier)
    ledger = Ledger()
    run.charge(ledger, 0, question.steps, to_end=True)
    deltas = [run.delta, *(d for d in _DELTAS if d != run.delta)]
    epsilon, *others = ledger.epsilons(deltas)
    return {
        "epsilon": epsilon,
        "delta": run.delta,
        "rdp_epsilon": ledger.rdp_epsilon(run.delta),
        "noise_multiplier": noise_multiplier,
        **_shares(question, run),
        **_sampled(run),
        "steps": question.steps,
        "epsilon_for_delta": [[d, e] for d, e in zip(deltas[1:], others)],
    }


def other_batches(question: Question, epsilon: float, noise: float) -> list[dict[str, Any]]:
    """Noise for other batch sizes that see as many examples in all.

    `noise` is the noise multiplier for the batch size that was asked for.
    """
    rows = []
    for factor in _BATCH_FACTORS:
        batch = round(question.batch * factor)
        steps = max(1, round(question.steps / factor))
        is_cut = question.max_batch is not None and factor != 1
        if batch < 1 or batch > question.largest_batch or is_cut:
            continue
        found = noise
        if factor != 1:
            other = replace(question, batch=batch, steps=steps)
            found = other.resolve(epsilon=epsilon, grid=COARSE).noise_multiplier
        rows.append(
            {
                "batch": batch,
                "steps": steps,
                "noise_multiplier": found,
                "noise_per_example": found / batch,
            }
        )
    return rows


def _sampled(run: RunPlan) -> dict[str, Any]:
    """How units are drawn; the largest rate where days have several."""
    schedule = run.schedule
    if schedule.sampling != "poisson":
        return {"sampling": schedule.sampling}
    days = {"days": len(run.phases)} if run.plan.by_day else {}
    return {"sampling_rate": max(phase.rate for phase in run.phases), **days}


def _shares(question: Question, run: RunPlan) -> dict[str, Any]:
    """What the parts of a step get of its noise, and what else is released."""
    mechanism, noise = run.plan.mechanism, run.noise_multiplier
    found: dict[str, Any] = {}
    if run.release is not None:
        found["selection"] = describe_event(run.release)
    if run.calibration is not None:
        found["calibration"] = describe_event(run.calibration)
    if isinstance(mechanism, AdaFEST):
        first, second = split_noise(noise, mechanism.noise_ratio)
        found["contribution_noise_multiplier"] = first
        found["gradient_noise_multiplier"] = second
        if question.has_threshold:
            found["threshold"] = mechanism.threshold
        if question.has_rows:
            found["thresholds"] = _thresholds(question, mechanism, noise)
    elif isinstance(mechanism, ExponentialSelection):
        found["choice_epsilon"] = mechanism.epsilon_per_row(noise)
        found["gradient_noise_multiplier"] = mechanism.gradient_noise(noise)
    return found


def _thresholds(question: Question, mechanism: AdaFEST, noise: float) -> list[dict[str, float]]:
    """What a row needs to pass a threshold, and how many pass without it."""
    stddev = mechanism.map_stddev(noise)
    (table,) = question.tables
    rows = []
    for examples in _READERS:
        threshold = threshold_for_half_survival(
            examples, len(table.features), mechanism.map_clip_norm
        )
        false = mechanism.rows_that_may_pass(question.tables) * survival(threshold, stddev)
        rows.append({"threshold": threshold, "half_survival": examples, "false_positives": false})
    return rows
