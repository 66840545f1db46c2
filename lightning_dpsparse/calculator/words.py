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
        lines += ["", "   batch       steps   noise_multiplier   noise per example"]
        lines += [
            f"{r['batch']:8,}  {r['steps']:10,}   {r['noise_multiplier']:16.4f}   "
            f"{r['noise_per_example']:17.3g}"
            for r in rows
        ]
        times = rows[0]["noise_per_example"] / rows[-1]["noise_per_example"]
        lines += [
            "",
            f"All rows see as many examples in all. From a batch of {rows[0]['batch']:,} to "
            f"{rows[-1]['batch']:,} the noise per example falls {times:,.0f} times: prefer large "
            "batches.",
        ]
    return "\n".join(lines)


def account_in_words(answer: dict[str, Any]) -> str:
    """What account found."""
    rdp = answer["rdp_epsilon"]
    lines = [
        f"epsilon {answer['epsilon']:.4f} at delta {answer['delta']:g}",
        f"by Renyi accounting {rdp:.4f}" if rdp is not None else "no Renyi accounting for this",
        *_shares(answer),
        "",
        *(f"  at delta {delta:g}: {eps:.4f}" for delta, eps in answer["epsilon_for_delta"]),
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
