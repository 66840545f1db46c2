"""Answers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpsparse import report
from lightning_dpsparse.refused import spell_out

_SAMPLING = {
    "fixed_order": "data in fixed order without amplification",
    "unamplified": "batches in any order without amplification",
}


_WORTH_IT = 0.02
"""Least part of a run's noise that more epochs are recommended for."""
_NUMBERS = {2: "Two", 4: "Four"}


def calibration_in_words(answer: dict[str, Any]) -> str:
    """What calibrate found."""
    lines = [
        f"noise_multiplier {answer['noise_multiplier']:.4f}",
        *_shares(answer),
        f"for epsilon {answer['epsilon']:g} at delta {answer['delta']:g}, {_sampling(answer)}, "
        f"{answer['steps']:,} steps",
    ]
    if len(answer.get("table", [])) > 1:
        rows = answer["table"]
        one = "   noise per user" if "drawn" in answer else "noise per example"
        lines += ["", f"   batch       steps   noise_multiplier   {one}"]
        lines += [
            f"{r['batch']:8,}  {r['steps']:10,}   {r['noise_multiplier']:16.4f}   "
            f"{r['noise_per_example']:17.3g}"
            for r in rows
        ]
        times = rows[0]["noise_per_example"] / rows[-1]["noise_per_example"]
        lines += [
            "",
            f"All rows see as many {'users' if 'drawn' in answer else 'examples'} in all. From a "
            f"batch of {rows[0]['batch']:,} to {rows[-1]['batch']:,} the {one.strip()} falls "
            f"{times:,.0f} times: prefer large batches.",
        ]
    lines += [*_epochs(answer.get("epochs", [])), *_drawings(answer.get("drawings", []))]
    return "\n".join(lines)


def _epochs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What more epochs cost."""
    if len(rows) < 2:
        return []
    lines = ["", "  epochs       steps   noise_multiplier   noise of a step   noise of the run"]
    lines += [
        f"{r['epochs']:8,}  {r['steps']:10,}   {r['noise_multiplier']:16.4f}   "
        f"{r['noise_of_a_step']:15.3g}   {r['noise_of_the_run']:16.3g}"
        for r in rows
    ]
    row = next((r for r in rows if r["epochs"] == 4), rows[-1])
    less = 1 - row["run_over_one_epoch"]
    over_the_run = (
        f"noise is {_percent(less)} less against the largest signal that clipping allows: prefer "
        "several epochs, as long as the model does not over-fit."
        if less >= _WORTH_IT
        else "noise is no less against the largest signal that clipping allows: more epochs cost "
        "as much as they bring, as they do where a batch is nearly all of the data."
    )
    return [
        *lines,
        "",
        f"{_NUMBERS[row['epochs']]} epochs cost {_percent(row['step_over_one_epoch'] - 1)} more "
        f"noise per step than one. Over the run, {over_the_run}",
    ]


def _drawings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whole users against single examples."""
    if len(rows) < 2:
        return []
    has_epsilon = "epsilon" in rows[0]
    title = "drawn          batch   examples a step   noise_multiplier      noise per example"
    lines = ["", f"{title}{'      epsilon' if has_epsilon else ''}"]
    for r in rows:
        low, high = (f"{noise:.3g}" for noise in r["noise_per_example"])
        between = low if low == high else f"{low} to {high}"
        end = f"   {r['epsilon']:10.4f}" if has_epsilon else ""
        lines.append(
            f"{r['drawn']:8}  {r['batch']:10,}   {r['examples_per_step']:15,.0f}   "
            f"{r['noise_multiplier']:16.4f}   {between:>20}{end}"
        )
    users, examples = (r["noise_per_example"] for r in rows)
    if has_epsilon:
        return lines
    return [
        *lines,
        "",
        "Both see as many examples. With whole users a step has "
        f"{_times(examples[0] / users[0])} if a user's examples pull in different directions, as "
        f"they mostly do, and {_times(examples[0] / users[1])} if all pull in one direction: draw "
        f"{'users' if users[0] <= examples[0] else 'examples'}.",
    ]


def _percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"


def _times(ratio: float) -> str:
    times = f"{max(ratio, 1 / ratio):.2g}"
    if times == "1":
        return "about as much noise"
    return f"{times} times {'less' if ratio >= 1 else 'more'} noise"


def account_in_words(answer: dict[str, Any]) -> str:
    """What account found."""
    rdp = answer["rdp_epsilon"]
    lines = [
        f"epsilon {answer['epsilon']:.4f} at delta {answer['delta']:g}",
        f"by Renyi accounting {rdp:.4f}" if rdp is not None else "no Renyi accounting for this",
        *_shares(answer),
        "",
        *(f"  at delta {delta:g}: {eps:.4f}" for delta, eps in answer["epsilon_for_delta"]),
        *_drawings(answer.get("drawings", [])),
    ]
    return "\n".join(lines)


def reported_text(facts: dict[str, Any], folder: Path) -> str:
    """What a privacy report says, in short."""
    guarantee, ran = facts["guarantee"], facts["ran"]
    epsilon = math.inf if guarantee["epsilon"] is None else guarantee["epsilon"]
    delta = "none" if guarantee["delta"] is None else f"{guarantee['delta']:g}"
    lines = [
        guarantee["sentence"],
        f"epsilon {epsilon:.4g} at delta {delta}; unit: {guarantee['unit']}; "
        f"{guarantee['adjacency']}",
        f"{ran['mechanism']}, noise multiplier {ran['noise_multiplier']:.4g}, {ran['steps']:,} "
        f"steps charged ({ran['steps_lost']:,} of them lost)",
        *(f"taint: {taint}" for taint in facts["taints"]),
        f"page: {folder / report.HTML_NAME}",
    ]
    # A report may come from anybody: no text of it may end a line, or steer the terminal.
    return "\n".join(spell_out(line) for line in lines)


def _sampling(answer: dict[str, Any]) -> str:
    """How units are drawn."""
    if "sampling" in answer:
        return _SAMPLING[answer["sampling"]]
    days = f" from one of {answer['days']} days at a time" if "days" in answer else ""
    return f"Poisson sampling at rate {answer['sampling_rate']:.3g}{days}"


def _shares(answer: dict[str, Any]) -> Sequence[str]:
    """What the parts of a step get of its noise, and what else is released."""
    lines = []
    if "selection" in answer:
        lines.append(f"  beside a selection of rows: {answer['selection']}")
    if "calibration" in answer:
        lines.append(f"  beside a calibration of logits: {answer['calibration']}")
    if "contribution_noise_multiplier" in answer:
        lines.append(f"  on the contribution map {answer['contribution_noise_multiplier']:.4f}")
    if "choice_epsilon" in answer:
        lines.append(f"  on each choice of a row epsilon {answer['choice_epsilon']:.4g}")
    if "gradient_noise_multiplier" in answer:
        lines.append(f"  on gradients {answer['gradient_noise_multiplier']:.4f}")
    if "threshold" in answer:
        lines.append(f"  threshold {answer['threshold']:.4g}")
    if "thresholds" in answer:
        lines += [
            "",
            "A row that so many examples of a batch read passes the threshold every other time; so",
            "many rows that nobody read pass it in a step, as expected:",
            "  threshold   half_survival   false_positives",
        ]
        lines += [
            f"  {r['threshold']:9.4g}   {r['half_survival']:13,}   {r['false_positives']:15,.4g}"
            for r in answer["thresholds"]
        ]
        lines.append("")
    return lines
