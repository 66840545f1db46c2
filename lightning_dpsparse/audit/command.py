"""`lightning-dpsparse audit`: train a recipe with canaries, and measure what leaks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from lightning_dpsparse import report
from lightning_dpsparse.audit.bound import CONFIDENCE
from lightning_dpsparse.audit.canaries import auditable
from lightning_dpsparse.audit.one_run import one_run_audit
from lightning_dpsparse.audit.secret_sharer import REPEATS, SecretSharer
from lightning_dpsparse.recipe import RecipeCLI, quiet
from lightning_dpsparse.refused import Refused

_RECIPES = Path(__file__).parents[2] / "recipes"


def main(argv: list[str]) -> None:
    """Everything that the parser does not know goes to the recipe: --trainer.max_steps 10."""
    parser = _parser()
    options, overrides = parser.parse_known_args(argv)
    if not options.config.is_file():
        raise Refused(f"Expected a recipe, found no file {options.config}. Name one with --config.")
    quiet()
    ours = not torch.distributed.is_initialized()
    try:
        cli = RecipeCLI(run=False, args=["--config", str(options.config), *overrides])
        options.audit(cli, options)
    finally:
        if ours and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _one_run(cli: RecipeCLI, options: argparse.Namespace) -> None:
    trainer, data = cli.trainer, auditable(cli.datamodule)
    result = one_run_audit(
        trainer,
        cli.model,
        data,
        num_canaries=options.canaries or (2_000 if options.black_box else 100_000),
        is_white_box=not options.black_box,
        confidence=options.confidence,
        seed=options.seed,
    )
    own = Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks
    if trainer.is_global_zero:
        for folder in (own, options.report):
            if folder is not None and (folder / report.JSON_NAME).is_file():
                report.add_audit(folder, result.for_report())
                print(f"added to {folder / report.HTML_NAME}")
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
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse audit",
        description="Train a recipe with canaries in its data, and measure what the model tells "
        "about them. Settings of the recipe may follow, as with fit: --trainer.max_steps 10.",
    )
    audits = parser.add_subparsers(required=True)
    one_run = audits.add_parser(
        "one-run",
        help="a lower bound on epsilon, with confidence; fails if it is above the claim",
        description="Each canary is put into the data by a coin; an attacker guesses the coins "
        "from the trained model (Steinke, Nasr, Jagielski 2023). Exits with 1 if the guesses "
        "disprove the claimed epsilon.",
    )
    one_run.set_defaults(audit=_one_run)
    _recipe(one_run, "audit_one_run.yaml")
    one_run.add_argument("--canaries", type=int, help="100,000, or 2,000 with --black-box")
    one_run.add_argument(
        "--black-box", action="store_true", help="look at losses only, not at the canaries' rows"
    )
    one_run.add_argument("--confidence", type=float, default=CONFIDENCE)
    one_run.add_argument("--seed", type=int, help="of coins and canaries; by default a fresh one")
    one_run.add_argument(
        "--report", type=Path, metavar="RUN_DIR", help="also add the result to this run's report"
    )
    sharer = audits.add_parser(
        "secret-sharer",
        help="how well the model remembers examples that it saw a few times",
        description="Random examples are put into the data a number of times each; their exposure "
        "says how far their loss stands out (Carlini et al. 2019). Writes a table and a plot "
        "beside the run's logs.",
    )
    sharer.set_defaults(audit=_secret_sharer)
    _recipe(sharer, "two_tower_synthetic.yaml")
    sharer.add_argument(
        "--repeats", type=_numbers, default=list(REPEATS), metavar="N[,N...]",
        help="how often canaries occur in the data",
    )  # fmt: skip
    sharer.add_argument("--canaries", type=int, default=50, help="for each number of repeats")
    sharer.add_argument("--references", type=int, default=16384, help="random examples not put in")
    sharer.add_argument("--seed", type=int, default=0, help="of canaries and references")
    return parser


def _recipe(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--config", type=Path, default=_RECIPES / default, help=f"a recipe (default: {default})"
    )


def _numbers(text: str) -> Sequence[int]:
    return [int(word) for word in text.split(",")]
