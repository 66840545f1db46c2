"""The three commands: they read options, ask, and print for people or for programs."""

from __future__ import annotations

import json
import sys

from lightning_dpsparse import report
from lightning_dpsparse.calculator import words
from lightning_dpsparse.calculator.options import add_run
from lightning_dpsparse.command_line import CommandParser, positive_number, some_path
from lightning_dpsparse.refused import Refused

# The heavy parts are imported in the commands: `--help` and `report` need not wait for them.


def calibrate_main(argv: list[str]) -> None:
    """From epsilon to noise."""
    parser = CommandParser(
        prog="lightning-dpsparse calibrate",
        description="Find the least noise multiplier (standard deviation over clip norm) for a "
        "target epsilon, and what other batch sizes, numbers of epochs and ways to draw users "
        "would need.",
    )
    parser.add_argument("--epsilon", type=positive_number, required=True, help="the target")
    add_run(parser)
    parser.add_argument("--no-table", action="store_true", help="leave out all tables")
    options = parser.parse_args(argv)

    from lightning_dpsparse.calculator import answers
    from lightning_dpsparse.calculator.questions import asked

    question = asked(options, parser)
    answer = answers.calibrated(question, options.epsilon)
    if not options.no_table:
        noise_multiplier = answer["noise_multiplier"]
        answer["table"] = answers.other_batches(question, options.epsilon, noise_multiplier)
        answer["epochs"] = answers.other_epochs(question, options.epsilon)
        answer["drawings"] = answers.both_drawings(question, epsilon=options.epsilon)
    if answer["warning"] is not None:
        print(f"{parser.prog}: {answer['warning']}", file=sys.stderr)
    print(json.dumps(answer, indent=2) if options.json else words.calibration_in_words(answer))


def account_main(argv: list[str]) -> None:
    """From noise to epsilon."""
    parser = CommandParser(
        prog="lightning-dpsparse account",
        description="Find what a run costs: epsilon at delta, by privacy loss distributions, with "
        "Renyi accounting as a cross-check.",
    )
    noise = "standard deviation over clip norm"
    parser.add_argument("--noise-multiplier", type=positive_number, required=True, help=noise)
    add_run(parser)
    options = parser.parse_args(argv)

    from lightning_dpsparse.calculator import answers
    from lightning_dpsparse.calculator.questions import asked

    question, noise_multiplier = asked(options, parser), options.noise_multiplier
    answer = answers.accounted(question, noise_multiplier)
    answer["drawings"] = answers.both_drawings(question, noise_multiplier=noise_multiplier)
    print(json.dumps(answer, indent=2) if options.json else words.account_in_words(answer))


def report_main(argv: list[str]) -> None:
    """Show the newest privacy report of a run."""
    parser = CommandParser(
        prog="lightning-dpsparse report",
        description="Print what a run's privacy report says, and draw its page anew.",
    )
    parser.add_argument(
        "run_dir", type=some_path, help="the folder of a run's logs, or a checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print the facts, for programs")
    options = parser.parse_args(argv)
    try:
        files = [path for path in options.run_dir.rglob(report.JSON_NAME) if path.is_file()]
    except OSError:  # a name that is too long, and the like
        files = []
    found = sorted(files, key=lambda path: path.stat().st_mtime)
    if not found:
        raise Refused(
            f"Expected {report.JSON_NAME} in {options.run_dir} or below, found none. Every "
            "checkpoint of a private run has one; PrivacyReport writes one beside the logs."
        )
    folder = found[-1].parent
    facts = report.read(folder)
    try:
        report.write(facts, folder)
    except OSError as error:
        raise Refused(
            f"Expected a folder that can be written to, to draw the page anew, found that "
            f"{str(folder)!r} cannot be ({error.strerror}). Copy the report to another folder."
        ) from error
    print(json.dumps(facts, indent=2) if options.json else words.reported_text(facts, folder))
