"""What calibrate and account answer, as plain values for programs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning_dpsparse.accounting.events import describe_event, split_noise
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE, FINE
from lightning_dpsparse.calculator.questions import Question
from lightning_dpsparse.mechanisms.adafest import AdaFEST, survival, threshold_for_half_survival
from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
from lightning_dpsparse.prospects import noise_warning, signal_to_noise
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan

_BATCH_FACTORS = (0.25, 1, 4, 16, 64)
"""Batch sizes of the table that calibrate prints, over the one that was asked for."""
_EPOCHS = (1, 2, 4, 8, 16)
"""Numbers of epochs of the table that calibrate prints."""
_MOST_STEPS = 10**7
"""Most steps of a row of that table. To price more takes long."""
_ENOUGH_FOR_COARSE = 4.0
"""The coarse grid prices an epsilon from here on to a part in a thousand. Small ones that are made
of many steps come out several times too large on it."""
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
        "signal_to_noise": signal_to_noise(run),
        "warning": noise_warning(run),
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
            found = other.resolve(epsilon=epsilon, grid=_grid(epsilon)).noise_multiplier
        rows.append(
            {
                "batch": batch,
                "steps": steps,
                "noise_multiplier": found,
                "noise_per_example": found / batch,
            }
        )
    return rows


def other_epochs(question: Question, epsilon: float) -> list[dict[str, Any]]:
    """Noise for several numbers of epochs, at the batch size that was asked for.

    The noise of a run is that of the sum of all steps, sigma C sqrt(T), over the most that the
    steps can add up to, T B C.
    """
    rows: list[dict[str, Any]] = []
    for epochs in _EPOCHS:
        steps = question.steps_per_epoch * epochs
        if steps > _MOST_STEPS:
            break
        try:
            run = replace(question, steps=steps).resolve(epsilon=epsilon, grid=_grid(epsilon))
        except Refused:  # so few or so many steps that no noise fits
            break
        noise = run.noise_multiplier
        per_step, per_run = noise / question.batch, noise / question.batch / math.sqrt(steps)
        first = rows[0] if rows else {"noise_of_a_step": per_step, "noise_of_the_run": per_run}
        rows.append(
            {
                "epochs": epochs,
                "steps": steps,
                "noise_multiplier": noise,
                "noise_of_a_step": per_step,
                "step_over_one_epoch": per_step / first["noise_of_a_step"],
                "noise_of_the_run": per_run,
                "run_over_one_epoch": per_run / first["noise_of_the_run"],
            }
        )
    return rows


def both_drawings(
    question: Question, *, epsilon: float | None = None, noise_multiplier: float | None = None
) -> list[dict[str, Any]]:
    """Users drawn whole against their examples drawn one by one, with as many examples in a step.

    Empty if the two cannot be compared. Noise per example is sigma over the number of examples in a
    step, times the clip norm over that of an example. A user with m examples has a summed gradient
    of sqrt(m) to m times the length of an example's: the first if they pull in different
    directions, the second if all pull in one. So two numbers are given for whole users.
    """
    other = question.drawn_otherwise()
    if other is None or question.users is None:
        return []
    assert question.unit is not None
    rows = []
    pair = (question, other) if question.unit.drawn == "users" else (other, question)
    for drawn, one in zip(("users", "examples"), pair):
        grid = FINE if epsilon is None else _grid(epsilon)
        run = one.resolve(epsilon=epsilon, noise_multiplier=noise_multiplier, grid=grid)
        per_user = question.users.examples_per_user if drawn == "users" else 1.0
        examples = one.batch * per_user
        row: dict[str, Any] = {
            "drawn": drawn,
            "batch": one.batch,
            "examples_per_step": examples,
            "noise_multiplier": run.noise_multiplier,
            "noise_per_example": [
                run.noise_multiplier * longer / examples for longer in (per_user**0.5, per_user)
            ],
        }
        if noise_multiplier is not None:
            ledger = Ledger()
            run.charge(ledger, 0, one.steps, to_end=True)
            row["epsilon"] = ledger.epsilon(run.delta)
        rows.append(row)
    return rows


def _grid(epsilon: float) -> float:
    """The grid of losses for the tables, of which each row is a calibration of its own."""
    return COARSE if epsilon >= _ENOUGH_FOR_COARSE else FINE


def _sampled(run: RunPlan) -> dict[str, Any]:
    """How units are drawn; the largest rate where days have several."""
    schedule = run.schedule
    if schedule.sampling != "poisson":
        return {"sampling": schedule.sampling}
    more: dict[str, Any] = {"days": len(run.phases)} if run.plan.by_day else {}
    if run.plan.draws_whole_users:
        more["drawn"] = "users"
    return {"sampling_rate": max(phase.rate for phase in run.phases), **more}


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
