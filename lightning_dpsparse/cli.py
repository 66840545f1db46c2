"""The command line: LightningCLI for recipes, and a few tools beside it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.version import __version__

_DESCRIPTION = """Train sharded TorchRec recommenders from YAML recipes.

recipes:
  fit, validate, test, predict     run a recipe: fit --config recipes/dlrm_synthetic.yaml
privacy:
  calibrate --epsilon E --examples N --batch B --steps T    how much noise a target needs
  account --noise-multiplier S --examples N --batch B --steps T    what a run costs
  report RUN_DIR                         what a run's privacy report says
  audit one-run, audit secret-sharer     train with canaries, and measure what leaks
tools:
  prepare criteo FILE... --output DIR    turn Criteo's text files into arrays, once
  consolidate CHECKPOINT FILE            turn a sharded checkpoint into one ordinary file
  doctor                                 say what is installed and what is wrong with it

Add --help to any of them."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lightning-dpsparse` and `python -m lightning_dpsparse`."""
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: lightning-dpsparse COMMAND ...\n\n{_DESCRIPTION}")
    elif argv[0] == "--version":
        print(f"lightning_dpsparse {__version__}")
    elif argv[0] in _TOOLS:
        try:
            _TOOLS[argv[0]](argv[1:])
        except Refused as error:
            sys.exit(f"error: {error}")
    else:
        _run_recipe(args)


def _run_recipe(args: Sequence[str] | None) -> None:
    """fit, validate, test or predict."""
    import torch

    from lightning_dpsparse.recipe import RecipeCLI, quiet

    quiet()
    ours = not torch.distributed.is_initialized()
    try:
        RecipeCLI(description=_DESCRIPTION, args=args)
    except Refused as error:
        sys.exit(f"error: {error}")
    finally:
        if ours and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _prepare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse prepare",
        description="Turn text files into memory-mapped arrays, once. Each input file becomes a "
        "directory of its own under the output directory.",
    )
    formats = parser.add_subparsers(dest="format", required=True)
    criteo = formats.add_parser(
        "criteo",
        help="Criteo's display-advertising logs: the Kaggle training file or 1TB day files",
        description="Tokens are hashed by a fixed public function into --num-rows rows per feature "
        "(row 0 stands for a missing token). A vocabulary counted from the data would leak it.",
    )
    criteo.add_argument(
        "files", nargs="+", type=Path, help="text files, may end in .gz .zst .bz2 .lz4"
    )
    criteo.add_argument("--output", type=Path, required=True, help="directory to write to")
    criteo.add_argument(
        "--num-rows", default="table3", metavar="N[,N...]",
        help="rows per feature: one number for all 26, 26 numbers, or 'table3' for the vocabulary "
        "sizes of the AdaFEST paper (default)",
    )  # fmt: skip
    options = parser.parse_args(argv)

    from lightning_dpsparse.data.prepare import prepare_criteo

    num_rows = _parse_num_rows(options.num_rows)
    for file in options.files:
        output = options.output / file.name.split(".")[0]
        prepared = prepare_criteo(file, output, num_rows)
        print(f"{prepared.summary()} -> {output}")


def _parse_num_rows(text: str) -> list[int]:
    from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS

    if text == "table3":
        return ADAFEST_NUM_ROWS
    numbers = [int(word) for word in text.split(",")]
    return numbers * 26 if len(numbers) == 1 else numbers


def _consolidate(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse consolidate",
        description="Turn a sharded checkpoint directory into one file in Lightning's layout, "
        "whose state_dict loads into the same model with ordinary, unsharded tables.",
    )
    parser.add_argument("checkpoint", type=Path, help="directory that training saved")
    parser.add_argument("output", type=Path, help="file to write")
    options = parser.parse_args(argv)

    import torch

    from lightning_dpsparse.sharded.checkpoint import consolidate

    torch.save(consolidate(options.checkpoint), options.output)
    print(f"written to {options.output}")


def _doctor(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-dpsparse doctor",
        description="Say what is installed and what is wrong with it. Exits with 1 on a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print it for programs")
    options = parser.parse_args(argv)

    from lightning_dpsparse.doctor import diagnose, report

    found = diagnose()
    print(json.dumps(found, indent=2) if options.json else report(found))
    sys.exit(1 if found["problems"] else 0)


def _calibrate(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import calibrate_main

    calibrate_main(argv)


def _account(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import account_main

    account_main(argv)


def _audit(argv: list[str]) -> None:
    from lightning_dpsparse.audit.command import main as audit_main

    audit_main(argv)


def _report(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import report_main

    report_main(argv)


_TOOLS: dict[str, Callable[[list[str]], None]] = {
    "calibrate": _calibrate,
    "account": _account,
    "report": _report,
    "audit": _audit,
    "prepare": _prepare,
    "consolidate": _consolidate,
    "doctor": _doctor,
}
