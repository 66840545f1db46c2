"""The command line: `lightning-dpsparse COMMAND ...`.

Three kinds of commands share one entry point. `fit`, `validate`, `test` and `predict` run a recipe
and belong to LightningCLI (`recipe.py`). `calibrate`, `account` and `report` answer questions about
privacy without training (`calculator.py`), and `audit` attacks a model that it trains
(`audit/command.py`). The rest are small tools whose options are in this file. Each command imports
what it needs when it is called, so that `--help` is quick and `doctor` can speak where torch is
broken.

A user's mistake ends in one line: an error of argparse with exit code 2, or a `Refused` that `main`
prints with exit code 1. Every other exception is a fault of the program or of a user's own module,
and keeps its traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from lightning_dpsparse.checks import shown
from lightning_dpsparse.command_line import CommandParser, some_path
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.version import __version__

_DESCRIPTION = """Train sharded TorchRec recommenders with differential privacy, from YAML recipes.

recipes:
  fit, validate, test, predict     run a recipe, for example: fit --config dlrm_lazydp
  recipes                          list the recipes that come with the package
privacy:
  calibrate --epsilon E --examples N --batch B --steps T    say how much noise a target needs
  account --noise-multiplier S --examples N --batch B --steps T    say what a run costs
  report RUN_DIR                         print what the privacy report of a run says
  audit one-run, audit secret-sharer     train with canaries and measure what leaks
tools:
  prepare criteo FILE... --output DIR    turn Criteo's text files into arrays, once
  consolidate CHECKPOINT FILE            turn a sharded checkpoint into one ordinary file
  doctor                                 say what is installed and what is wrong with it

--config takes the path of a YAML file or the name of a recipe that comes with the package.
Add --help to any command to see its options."""

_RECIPE_COMMANDS = ("fit", "validate", "test", "predict")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lightning-dpsparse` and `python -m lightning_dpsparse`."""
    argv = list(sys.argv[1:] if args is None else args)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(f"usage: lightning-dpsparse COMMAND ...\n\n{_DESCRIPTION}")
        elif argv[0] == "--version":
            print(f"lightning_dpsparse {__version__}")
        elif argv[0] in _TOOLS:
            _TOOLS[argv[0]](argv[1:])
        elif argv[0] in _RECIPE_COMMANDS or argv[0].startswith("-"):
            _run_recipe(args)
        else:
            _refuse_command(argv[0])
    except Refused as refusal:
        sys.exit(f"error: {refusal}")


def _refuse_command(command: str) -> None:
    commands = (*_RECIPE_COMMANDS, *_TOOLS)
    close = get_close_matches(command, commands, n=1)
    parser = CommandParser(prog="lightning-dpsparse", usage="lightning-dpsparse COMMAND ...")
    parser.error(
        f"unknown command {command!r}. "
        + (f"Did you mean {close[0]}? " if close else "")
        + f"The commands are {', '.join(commands)}."
    )


def _run_recipe(args: Sequence[str] | None) -> None:
    """Run `fit`, `validate`, `test` or `predict`."""
    from lightning_dpsparse.recipe import RecipeCLI, recipe_session

    with recipe_session():
        RecipeCLI(description=_DESCRIPTION, args=args)


def _recipes(argv: list[str]) -> None:
    parser = CommandParser(
        prog="lightning-dpsparse recipes",
        description="List the recipes that come with the package. Run one by its name: "
        "lightning-dpsparse fit --config NAME. To change one, print it into a file of your own: "
        "lightning-dpsparse recipes NAME > my_recipe.yaml.",
    )
    parser.add_argument("name", nargs="?", help="print the YAML of this recipe instead of the list")
    options = parser.parse_args(argv)

    from lightning_dpsparse.recipe_files import list_recipes, recipe_text

    if options.name is None:
        print(list_recipes())
    else:
        print(recipe_text(options.name), end="")


def _prepare(argv: list[str]) -> None:
    parser = CommandParser(
        prog="lightning-dpsparse prepare",
        description="Turn text files into memory-mapped arrays, once. Each input file becomes a "
        "directory of its own under the output directory.",
    )
    formats = parser.add_subparsers(dest="format", required=True)
    criteo = formats.add_parser(
        "criteo",
        help="read Criteo's display-advertising logs: the Kaggle training file or 1TB day files",
        description="Turn Criteo's logs into arrays. Tokens are hashed by a fixed public function "
        "into --num-rows rows per feature; row 0 stands for a missing token. A vocabulary that was "
        "counted from the data would leak it.",
    )
    criteo.add_argument(
        "files",
        nargs="+",
        type=some_path,
        help="text files; their names may end in .gz, .zst, .bz2 or .lz4",
    )
    criteo.add_argument("--output", type=some_path, required=True, help="the directory to write to")
    criteo.add_argument(
        "--num-rows", type=_num_rows, default="table3", metavar="N[,N...]",
        help="rows per feature: one number for all 26 features, 26 numbers, or 'table3' for the "
        "vocabulary sizes of the AdaFEST paper (default: table3)",
    )  # fmt: skip
    options = parser.parse_args(argv)

    from lightning_dpsparse.data.prepare import prepare_criteo

    outputs = {file: options.output / file.name.lstrip(".").split(".")[0] for file in options.files}
    if len(set(outputs.values())) < len(options.files):
        raise Refused(
            "Expected files whose names differ before their endings, found two that would be "
            f"written to one directory among {shown([str(file) for file in options.files])}. "
            "Prepare them with an --output of their own."
        )
    for file, output in outputs.items():
        prepared = prepare_criteo(file, output, options.num_rows)
        print(f"{prepared.summary()} -> {output}")


def _num_rows(text: str) -> list[int]:
    """The value of `--num-rows` as one number of rows for each of Criteo's 26 features."""
    if text == "table3":
        from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS

        return ADAFEST_NUM_ROWS
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected one number, 26 numbers with commas between them, or 'table3', found "
            f"{shown(text)}"
        ) from None
    return numbers * 26 if len(numbers) == 1 else numbers


def _consolidate(argv: list[str]) -> None:
    parser = CommandParser(
        prog="lightning-dpsparse consolidate",
        description="Turn a sharded checkpoint directory into one file in Lightning's layout, "
        "whose state_dict loads into the same model with ordinary, unsharded tables. A name that "
        "ends in .safetensors gives a file of tensors alone.",
    )
    parser.add_argument("checkpoint", type=Path, help="the directory that training saved")
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read objects of the checkpoint too, which can run code of whoever wrote them",
    )
    options = parser.parse_args(argv)
    if options.output.is_dir() or not os.access(options.output.parent, os.W_OK):
        found = "a directory" if options.output.is_dir() else "that its directory is not"
        raise Refused(
            f"Expected {str(options.output)!r} to be a file, in a directory that exists and can be "
            f"written to, found {found}. Name a file, and make its directory first."
        )

    from lightning_dpsparse.sharded.checkpoint import consolidate
    from lightning_dpsparse.sharded.whole_files import write_whole

    checkpoint = consolidate(options.checkpoint, trust=options.trust)
    try:
        write_whole(checkpoint, options.output)
    except OSError as error:
        raise Refused(
            f"Expected to write {str(options.output)!r}, found that it failed: {error.strerror}. "
            "Make room, or name another place."
        ) from error
    print(f"The checkpoint was written to {options.output}.")


def _doctor(argv: list[str]) -> None:
    parser = CommandParser(
        prog="lightning-dpsparse doctor",
        description="Say what is installed, which versions are supported, and what is wrong. The "
        "exit code is 1 if there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(argv)

    from lightning_dpsparse.doctor import diagnose, show_diagnosis

    found = diagnose()
    print(json.dumps(found, indent=2) if options.json else show_diagnosis(found))
    sys.exit(1 if found["problems"] else 0)


def _calibrate(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import calibrate_main

    calibrate_main(argv)


def _account(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import account_main

    account_main(argv)


def _audit(argv: list[str]) -> None:
    from lightning_dpsparse.audit.command import run_audit

    run_audit(argv)


def _report(argv: list[str]) -> None:
    from lightning_dpsparse.calculator import report_main

    report_main(argv)


_TOOLS: dict[str, Callable[[list[str]], None]] = {
    "recipes": _recipes,
    "calibrate": _calibrate,
    "account": _account,
    "report": _report,
    "audit": _audit,
    "prepare": _prepare,
    "consolidate": _consolidate,
    "doctor": _doctor,
}
