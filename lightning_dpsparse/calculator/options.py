"""The options of calibrate and account that describe a run.

A mechanism's own settings are given as in a recipe, by the names of its fields: `--mechanism fest
--set selection.rows_per_table=1000`. No option has to be written here for a new mechanism: it is
offered when `lightning_dpsparse/mechanisms/__init__.py` lists it.
"""

from __future__ import annotations

import argparse

from lightning_dpsparse.command_line import positive_number, probability, whole_number
from lightning_dpsparse.mechanisms import TABLE_MECHANISMS

MECHANISMS = {name.lower(): name for name in TABLE_MECHANISMS}
"""Names on the command line, with the public names behind them."""

_MOST, _MOST_STEPS, _MOST_FEATURES, _MOST_DAYS = 10**15, 10**12, 1_000_000, 100_000
_MOST_EPOCHS = 1_000_000

_EXAMPLES_OF_SETTINGS = """settings of a mechanism, by the names that a recipe uses:
  --mechanism adafest --set noise_ratio=5 --set false_positives=100 --rows 1000000
  --mechanism exponentialselection --set num_rows=1000
  --mechanism fest --set selection.rows_per_table=1000 --set selection.frequencies=NoisyHistogram
    --set selection.frequencies.noise_multiplier=50"""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a run."""
    parser.epilog = _EXAMPLES_OF_SETTINGS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--examples",
        type=whole_number(1, _MOST),
        required=True,
        help="number of examples that the data has",
    )
    add(
        "--batch",
        type=whole_number(1, _MOST),
        required=True,
        help="expected batch size, over all ranks",
    )
    length = parser.add_mutually_exclusive_group(required=True)
    steps, epochs = "number of optimizer steps", "number of epochs, instead of --steps"
    length.add_argument("--steps", type=whole_number(1, _MOST_STEPS), help=steps)
    length.add_argument("--epochs", type=whole_number(1, _MOST_EPOCHS), metavar="E", help=epochs)
    add(
        "--delta",
        type=probability,
        help="default: 1 / (10 examples or users), rounded down to a power of ten",
    )
    add("--mechanism", choices=MECHANISMS, default="dpsgd", help="default: %(default)s")
    setting = "a setting of the mechanism, which may be given several times; see below"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=setting)
    ratio = "the same as --set noise_ratio=R: noise on the choice of rows over noise on gradients"
    add("--noise-ratio", type=float, metavar="R", help=ratio)
    add("--map-clip-norm", type=float, metavar="C1", help="the same as --set map_clip_norm=C1")
    rows = "number of rows of all tables, to choose thresholds by and to see what they do"
    add("--rows", type=whole_number(1, _MOST), help=rows)
    features = "number of rows that an example reads, over all tables (default: %(default)s)"
    add("--features", type=whole_number(1, _MOST_FEATURES), default=26, help=features)
    sampling = "how batches are made, as in the privacy plan (default: %(default)s)"
    kinds = ["poisson", "fixed_order", "unamplified"]
    add("--sampling", choices=kinds, default="poisson", help=sampling)
    add("--max-batch", type=int, help="larger Poisson batches are cut to this size")
    per_user = "protect users, who have at most K examples each; see --users"
    add("--examples-per-user", type=int, metavar="K", help=per_user)
    users = "with --examples-per-user: number of users. Both ways to draw are then compared"
    add("--users", type=whole_number(1, _MOST), metavar="U", help=users)
    draw = "with --examples-per-user: draw users with all their examples, so that --batch counts "
    draw += "users, or draw examples one by one (default: users). Without --users, --examples is "
    draw += "the number of what is drawn"
    add("--draw", choices=["examples", "users"], help=draw)
    days = "train on D days of equal size, one after the other, where each unit lives in one day"
    add("--days", type=whole_number(1, _MOST_DAYS), default=1, metavar="D", help=days)
    logits = "calibrate a click model's logits after the last step, with this noise on counts "
    logits += "(default: what takes 1%% of epsilon, or 50 where epsilon is asked for)"
    add("--calibration", type=positive_number, nargs="?", const=0.0, metavar="SIGMA", help=logits)
    add("--json", action="store_true", help="print for programs")
