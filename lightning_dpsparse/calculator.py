"""Privacy on the command line, without training: calibrate, account, report."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpsparse import report
from lightning_dpsparse.refused import Refused

_MECHANISMS = ("dpsgd", "lazydp", "adafest")
_TIMES = (0.25, 1, 4, 16, 64)
_EXAMPLES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Readers of a row in one batch, for a table of thresholds."""
_DELTAS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9)


def calibrate_main(argv: list[str]) -> None:
    """From epsilon to noise."""
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse calibrate",
        description="The least noise multiplier (standard deviation over clip norm) for a target "
        "epsilon, and what other batch sizes would need.",
    )
    parser.add_argument("--epsilon", type=float, required=True, help="the target")
    _add_run(parser)
    parser.add_argument("--no-table", action="store_true", help="leave out other batch sizes")
    options = parser.parse_args(argv)
    run = _run(options, parser)
    if not options.epsilon > 0:
        parser.error(f"argument --epsilon: expected more than 0, found {options.epsilon}")
    answer = _calibrated(run, options.epsilon)
    if not options.no_table:
        answer["table"] = _table(run, options.epsilon, answer["noise_multiplier"])
    print(json.dumps(answer, indent=2) if options.json else _calibrated_text(answer))


def account_main(argv: list[str]) -> None:
    """From noise to epsilon."""
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse account",
        description="What a run costs: epsilon at delta, by privacy loss distributions, with Renyi "
        "accounting as a cross-check.",
    )
    parser.add_argument("--noise-multiplier", type=float, required=True, help="as of calibrate")
    _add_run(parser)
    options = parser.parse_args(argv)
    run = _run(options, parser)
    if not options.noise_multiplier > 0:
        parser.error(
            f"argument --noise-multiplier: expected more than 0, found {options.noise_multiplier}"
        )

    from lightning_dpsparse.accounting.calibration import epsilons_of, rdp_epsilon_of

    charges = [(_event(run, options.noise_multiplier), run["steps"])]
    deltas = [run["delta"], *(d for d in _DELTAS if d != run["delta"])]
    epsilon, *others = epsilons_of(charges, deltas)
    answer = {
        "epsilon": epsilon,
        "delta": run["delta"],
        "rdp_epsilon": rdp_epsilon_of(charges, run["delta"]),
        "noise_multiplier": options.noise_multiplier,
        **_split(run, options.noise_multiplier),
        "sampling_rate": run["rate"],
        "steps": run["steps"],
        "epsilon_for_delta": [[d, e] for d, e in zip(deltas[1:], others)],
    }
    print(json.dumps(answer, indent=2) if options.json else _account_text(answer))


def report_main(argv: list[str]) -> None:
    """Show the newest privacy report of a run."""
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse report",
        description="Print what a run's privacy report says, and draw its page anew.",
    )
    parser.add_argument("run_dir", type=Path, help="a run's logs, or a checkpoint")
    parser.add_argument("--json", action="store_true", help="print the facts")
    options = parser.parse_args(argv)
    found = sorted(options.run_dir.rglob(report.JSON_NAME), key=lambda p: p.stat().st_mtime)
    if not found:
        raise Refused(
            f"Expected {report.JSON_NAME} in {options.run_dir} or below, found none. Every "
            "checkpoint of a private run has one; PrivacyReport writes one beside the logs."
        )
    folder = found[-1].parent
    facts = report.read(folder)
    report.write(facts, folder)
    print(json.dumps(facts, indent=2) if options.json else _report_text(facts, folder))


# ---- questions -----------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--examples", type=int, required=True, help="how many units the data has")
    add("--batch", type=int, required=True, help="expected batch size, over all ranks")
    add("--steps", type=int, required=True, help="optimizer steps")
    add("--delta", type=float, help="default: 1 / (10 examples), rounded down to a power of ten")
    add("--mechanism", choices=_MECHANISMS, default="dpsgd", help="default: %(default)s")
    ratio = "adafest: noise on the contribution map over noise on gradients (default: 5)"
    add("--noise-ratio", type=float, default=5.0, metavar="R", help=ratio)
    add("--rows", type=int, help="adafest: rows of all tables, to see what thresholds do")
    add("--features", type=int, default=26, help="adafest: rows that an example reads")
    add("--map-clip-norm", type=float, default=1.0, metavar="C1", help="adafest: default 1")
    add("--max-batch", type=int, help="batches are cut to this size")
    users = "protect users, who have at most K of the examples"
    add("--examples-per-user", type=int, metavar="K", help=users)
    add("--json", action="store_true", help="print for programs")


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    from lightning_dpsparse.accounting.calibration import default_delta, delta_warning

    for name in ("examples", "batch", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: expected 1 or more, found {getattr(options, name)}")
    if options.batch > options.examples:
        parser.error(f"argument --batch: expected at most {options.examples} examples")
    delta = default_delta(options.examples) if options.delta is None else options.delta
    if not 0 < delta < 1:
        parser.error(f"argument --delta: expected between 0 and 1, found {delta}")
    warning = delta_warning(delta, options.examples)
    if warning is not None:  # training would refuse what is far too large
        print(f"{parser.prog}: argument --delta: {warning}", file=sys.stderr)
    if options.max_batch is not None and options.examples_per_user is not None:
        parser.error("--max-batch and --examples-per-user: there is no accounting for both")
    return {
        "examples": options.examples,
        "batch": options.batch,
        "steps": options.steps,
        "rate": options.batch / options.examples,
        "delta": delta,
        "max_batch": options.max_batch,
        "per_user": options.examples_per_user,
        "ratio": options.noise_ratio if options.mechanism == "adafest" else None,
        "rows": options.rows if options.mechanism == "adafest" else None,
        "features": options.features,
        "map_clip_norm": options.map_clip_norm,
    }


def _event(run: dict[str, Any], noise_multiplier: float) -> Any:
    from lightning_dpsparse.accounting import events

    if run["per_user"] is not None:
        return events.poisson_examples_of_user(run["per_user"], run["rate"], noise_multiplier)
    if run["max_batch"] is not None:
        return events.truncated_poisson_gaussian(
            run["examples"], run["rate"], run["max_batch"], noise_multiplier
        )
    return events.poisson_gaussian(run["rate"], noise_multiplier)


def _noise(run: dict[str, Any], epsilon: float, **search: float) -> float:
    from lightning_dpsparse.accounting.calibration import calibrate, epsilon_of

    return calibrate(
        lambda noise, grid: epsilon_of([(_event(run, noise), run["steps"])], run["delta"], grid),
        epsilon,
        **search,
    )


def _split(run: dict[str, Any], noise_multiplier: float) -> dict[str, Any]:
    if run["ratio"] is None:
        return {}
    from lightning_dpsparse.accounting.events import split_noise

    first, second = split_noise(noise_multiplier, run["ratio"])
    found = {"contribution_noise_multiplier": first, "gradient_noise_multiplier": second}
    return found | ({} if run["rows"] is None else {"thresholds": _thresholds(run, first)})


def _thresholds(run: dict[str, Any], noise_multiplier: float) -> list[dict[str, float]]:
    """What a row needs to pass a threshold, and how many pass without it."""
    from lightning_dpsparse.mechanisms.adafest import survival, threshold_for_half_survival

    stddev = noise_multiplier * run["map_clip_norm"]
    rows = []
    for examples in _EXAMPLES:
        threshold = threshold_for_half_survival(examples, run["features"], run["map_clip_norm"])
        false = run["rows"] * survival(threshold, stddev)
        rows.append({"threshold": threshold, "half_survival": examples, "false_positives": false})
    return rows


def _calibrated(run: dict[str, Any], epsilon: float) -> dict[str, Any]:
    noise = _noise(run, epsilon)
    return {
        "noise_multiplier": noise,
        **_split(run, noise),
        "epsilon": epsilon,
        "delta": run["delta"],
        "sampling_rate": run["rate"],
        "steps": run["steps"],
    }


def _table(run: dict[str, Any], epsilon: float, noise: float) -> list[dict[str, Any]]:
    """Other batch sizes that see as many examples in all."""
    from lightning_dpsparse.accounting.privacy_loss import COARSE

    rows = []
    for times in _TIMES:
        batch = round(run["batch"] * times)
        steps = max(1, round(run["steps"] / times))
        if batch < 1 or batch > run["examples"] or (run["max_batch"] and times != 1):
            continue
        other = run | {"batch": batch, "steps": steps, "rate": batch / run["examples"]}
        found = noise if times == 1 else _noise(other, epsilon, grid=COARSE)
        rows.append(
            {
                "batch": batch,
                "steps": steps,
                "noise_multiplier": found,
                "noise_per_example": found / batch,
            }
        )
    return rows


# ---- answers for people --------------------------------------------------------------------------


def _calibrated_text(answer: dict[str, Any]) -> str:
    lines = [
        f"noise_multiplier {answer['noise_multiplier']:.4f}",
        *_split_lines(answer),
        f"for epsilon {answer['epsilon']:g} at delta {answer['delta']:g}, Poisson sampling at rate "
        f"{answer['sampling_rate']:.3g}, {answer['steps']:,} steps",
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


def _account_text(answer: dict[str, Any]) -> str:
    rdp = answer["rdp_epsilon"]
    lines = [
        f"epsilon {answer['epsilon']:.4f} at delta {answer['delta']:g}",
        f"by Renyi accounting {rdp:.4f}" if rdp is not None else "no Renyi accounting for this",
        *_split_lines(answer),
        "",
        *(f"  at delta {delta:g}: {eps:.4f}" for delta, eps in answer["epsilon_for_delta"]),
    ]
    return "\n".join(lines)


def _split_lines(answer: dict[str, Any]) -> Sequence[str]:
    if "gradient_noise_multiplier" not in answer:
        return ()
    lines = [
        f"  on the contribution map {answer['contribution_noise_multiplier']:.4f}",
        f"  on gradients {answer['gradient_noise_multiplier']:.4f}",
    ]
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


def _report_text(facts: dict[str, Any], folder: Path) -> str:
    guarantee, ran = facts["guarantee"], facts["ran"]
    epsilon = math.inf if guarantee["epsilon"] is None else guarantee["epsilon"]
    lines = [
        guarantee["sentence"],
        f"epsilon {epsilon:.4g} at delta {guarantee['delta']:g}; unit: {guarantee['unit']}; "
        f"{guarantee['adjacency']}",
        f"{ran['mechanism']}, noise multiplier {ran['noise_multiplier']:.4g}, {ran['steps']:,} "
        f"steps charged ({ran['steps_lost']:,} of them lost)",
        *(f"taint: {taint}" for taint in facts["taints"]),
        f"page: {folder / report.HTML_NAME}",
    ]
    return "\n".join(lines)
