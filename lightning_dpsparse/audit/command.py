"""`lightning-dpsparse audit`: train a recipe with canaries, and measure what leaks.

An accountant proves an upper bound on epsilon; a mistake in the code would break the proof without
a sign. An audit looks at the trained model as an attacker would. `audit one-run` gives a lower
bound on epsilon (`one_run.py`, `bound.py`) and fails if it is above the claim. `audit
secret-sharer` measures how well the model remembers single examples (`secret_sharer.py`,
`exposure.py`). Both train a recipe, as `fit` does, and take its settings on the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning.pytorch import Trainer

from lightning_dpsparse import report
from lightning_dpsparse.audit.bound import CONFIDENCE
from lightning_dpsparse.audit.canaries import MOST_CANARIES, auditable
from lightning_dpsparse.audit.one_run import one_run_audit
from lightning_dpsparse.audit.secret_sharer import REPEATS, SecretSharer
from lightning_dpsparse.command_line import (
    CommandParser,
    probability,
    some_path,
    whole_number,
)
from lightning_dpsparse.plugin.callbacks import private_run
from lightning_dpsparse.recipe import RecipeCLI, recipe_session


def run_audit(argv: list[str]) -> None:
    """Run `lightning-dpsparse audit`. Options that the parser does not know go to the recipe."""
    options, overrides = _parser().parse_known_args(argv)
    if options.report is not None:
        report.render(report.read(options.report))  # before it trains
    with recipe_session():
        cli = RecipeCLI(run=False, args=["--config", options.config, *overrides])
        options.audit(cli, options)


def _one_run(cli: RecipeCLI, options: argparse.Namespace) -> None:
    trainer, data = cli.trainer, auditable(cli.datamodule)
    default_canaries = 2_000 if options.black_box else 100_000
    result = one_run_audit(
        trainer,
        cli.model,
        data,
        num_canaries=default_canaries if options.canaries is None else options.canaries,
        is_white_box=not options.black_box,
        confidence=options.confidence,
        seed=options.seed,
    )
    own = private_run(trainer).folder
    if trainer.is_global_zero:
        for folder in (own, options.report):
            if folder is not None and (folder / report.JSON_NAME).is_file():
                report.add_audit(folder, result.for_report())
                print(f"The result was added to {folder / report.HTML_NAME}.")
        print(result)
    if not result.passed:
        sys.exit("AUDIT FAILED: the run is not as private as it claims. Do not release its model.")


def _secret_sharer(cli: RecipeCLI, options: argparse.Namespace) -> None:
    trainer: Trainer = cli.trainer
    trainer.callbacks.append(  # type: ignore[attr-defined]
        SecretSharer(options.repeats, options.canaries, options.references, options.seed)
    )
    trainer.fit(cli.model, datamodule=auditable(cli.datamodule))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="lightning-dpsparse audit",
        description="Train a recipe with canaries in its data, and measure what the model tells "
        "about them. Settings of the recipe may follow, as with fit: --trainer.max_steps 10.",
    )
    audits = parser.add_subparsers(required=True, metavar="{one-run,secret-sharer}")
    one_run = audits.add_parser(
        "one-run",
        help="measure a lower bound on epsilon, and fail if it is above the claim",
        description="A coin decides for each canary whether it is put into the data; an attacker "
        "guesses the coins from the trained model (Steinke, Nasr, Jagielski 2023). The exit code "
        "is 1 if the guesses disprove the claimed epsilon.",
    )
    one_run.set_defaults(audit=_one_run)
    _add_config(one_run, "audit_one_run")
    one_run.add_argument(
        "--canaries",
        type=whole_number(2, MOST_CANARIES),
        help="how many canaries there are (default: 100,000, or 2,000 with --black-box)",
    )
    one_run.add_argument(
        "--black-box",
        action="store_true",
        help="let the attacker see losses only, and not the rows of the canaries",
    )
    one_run.add_argument(
        "--confidence",
        type=probability,
        default=CONFIDENCE,
        help="probability with which the lower bound holds (default: %(default)s)",
    )
    one_run.add_argument(
        "--seed",
        type=whole_number(0),
        help="seed of the coins and the canaries, never of the noise (default: a fresh one)",
    )
    one_run.add_argument(
        "--report",
        type=some_path,
        metavar="RUN_DIR",
        help="add the result to the privacy report in this folder too",
    )
    sharer = audits.add_parser(
        "secret-sharer",
        help="measure how well the model remembers examples that it saw a few times",
        description="Random examples are put into the data a number of times each; their exposure "
        "says how far their loss stands out (Carlini et al. 2019). A table and a plot are written "
        "beside the logs of the run.",
    )
    sharer.set_defaults(audit=_secret_sharer, report=None)
    _add_config(sharer, "two_tower_synthetic")
    sharer.add_argument(
        "--repeats", type=_repeats, default=list(REPEATS), metavar="N[,N...]",
        help="how often canaries occur in the data "
        f"(default: {','.join(str(repeats) for repeats in REPEATS)})",
    )  # fmt: skip
    sharer.add_argument(
        "--canaries",
        type=whole_number(1, MOST_CANARIES),
        default=50,
        help="how many canaries there are for each number of repeats (default: %(default)s)",
    )
    sharer.add_argument(
        "--references",
        type=whole_number(2, MOST_CANARIES),
        default=16384,
        help="how many random examples are kept out of the data, to compare with "
        "(default: %(default)s)",
    )
    sharer.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        help="seed of the canaries and the references (default: %(default)s)",
    )
    return parser


def _add_config(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--config",
        default=default,
        help="the path of a recipe, or the name of one that comes with the package "
        "(default: %(default)s)",
    )


def _repeats(text: str) -> Sequence[int]:
    return [whole_number(1)(word) for word in text.split(",")]
