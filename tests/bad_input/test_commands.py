"""Words on the command line, and recipes, that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bad_files import RECIPE
from tests.support.bad_input import ends_in_one_line

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")

RUN = ("--examples=1000", "--batch=10", "--steps=10")
COMMANDS = {
    "calibrate": ("calibrate", "--epsilon=3", "--no-table", *RUN),
    "account": ("account", "--noise-multiplier=1", *RUN),
}
DIGITS = "9" * 5000

NUMBERS = ("nan", "inf", "-inf", "-1", "0", "x", "", "True", "1,5", "0x10", DIGITS)
WHOLE = ("nan", "-1", "0", "1.5", "x", "", "True", "1e3", DIGITS)
OPTIONS = {
    "epsilon": NUMBERS,
    "noise-multiplier": NUMBERS,
    "delta": (*NUMBERS, "1", "1e308"),
    "examples": (*WHOLE, str(10**30), "5"),
    "batch": (*WHOLE, str(10**30), "1001"),
    "steps": (*WHOLE, str(10**30)),
    "rows": (*WHOLE, str(10**30)),
    "features": (*WHOLE, str(10**30)),
    "days": (*WHOLE, str(10**30), "1000"),
    "max-batch": (*WHOLE, str(10**30)),
    "users": (*WHOLE, str(10**30), "5"),
    "epochs": (*WHOLE, str(10**30), "2"),
    "examples-per-user": (*WHOLE, str(10**30), "10001"),
    "mechanism": ("nosuch", "", "3", "eana"),
    "sampling": ("nosuch", "", "3"),
    "draw": ("nosuch", "", "3", "users"),
    "noise-ratio": ("3",),
    "nosuch": ("3",),
}
VALUES = ("nan", ".nan", ".inf", "-1", "1e308", "x", "", "true", "[1]", str(10**30), "*x", "{")
ADAFEST = ("--mechanism=adafest", "--rows=1000")
CHOOSES = ("--mechanism=exponentialselection",)
FEST = ("--mechanism=fest", "--set=selection.rows_per_table=9")
GUMBEL = (*FEST, "--set=selection.frequencies=GumbelHistogram")
SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "threshold": (ADAFEST, tuple(v for v in VALUES if v != "-1")),
    "false_positives": (ADAFEST, (*VALUES, "0", "2000")),
    "half_survival": (ADAFEST, (*VALUES, "0")),
    "noise_ratio": (ADAFEST, (*VALUES, "0")),
    "map_clip_norm": (ADAFEST, (*VALUES, "0")),
    "table_thresholds": (ADAFEST, (*VALUES, "{a: .nan}", "{a: x}", "{1: 2}")),
    "num_rows": (CHOOSES, (*VALUES, "0")),
    "score_clip": ((*CHOOSES, "--set=num_rows=3"), (*VALUES, "0")),
    "chunk_rows": ((), (*VALUES, "0")),
    "selection.rows_per_table": (("--mechanism=fest",), ("0", "-1", "x")),
    "selection.frequencies": (FEST, ("nosuch", "3", "[1]", "")),
    "selection.frequencies.epsilon": (GUMBEL, (*VALUES, "0")),
    "selection.frequencies.max_ids_per_bag": (GUMBEL, (*VALUES, "0")),
    "nosuch": (ADAFEST, ("3",)),
    "__class__": (ADAFEST, ("3",)),
}


OTHER_WORDS = {
    "max-batch": "max",
    "examples-per-user": "examples",
    "false_positives": "false",
    "selection.rows_per_table": "selection",
}
"""Words of the message, where they are not the name of the option or setting."""


def said(name: str) -> str:
    return OTHER_WORDS.get(name, name.split(".")[-1])


def calculations() -> list[tuple[tuple[str, ...], str]]:
    found = [
        ((*words, f"--{option}={value}"), said(option))
        for command, words in COMMANDS.items()
        for option, values in OPTIONS.items()
        for value in values
        if (option, command) not in (("epsilon", "account"), ("noise-multiplier", "calibrate"))
    ]
    found += [
        ((*COMMANDS["account"], *words, f"--set={setting}={value}"), said(setting))
        for setting, (words, values) in SETTINGS.items()
        for value in values
    ]
    account, calibrate = COMMANDS["account"], COMMANDS["calibrate"]
    for odd in ("=3", "threshold", "", "threshold==1", "help", "threshold=!!python/name:os.system"):
        found.append(((*account, *ADAFEST, f"--set={odd}"), "argument --set"))
    return [
        *found,
        ((*account, *ADAFEST, "--set=threshold=1", "--set=threshold=2"), "each setting once"),
        ((*account, *ADAFEST, "--set=threshold=1", "--set=half_survival=2"), "found 2 of them"),
        ((*account, *ADAFEST, "--set=noise_ratio=2", "--noise-ratio=3"), "each setting once"),
        ((*account, "--sampling=fixed_order", "--days=2"), "Leave sampling out"),
        ((*account, "--sampling=unamplified", "--max-batch=5"), "Leave sampling out"),
        ((*account, *CHOOSES, "--set=num_rows=3", "--max-batch=5"), "plain Poisson samples"),
        (
            (*account, "--max-batch=5", "--examples-per-user=2", "--draw=examples"),
            "no accounting for both",
        ),
        ((*account, "--examples-per-user=2"), "expected --users, the number of users, or --draw"),
        ((*account, "--examples-per-user=2", "--users=1001"), "argument --users: expected 1000"),
        ((*account, "--examples-per-user=2", "--users=499"), "1 to 2 for each user, found 499"),
        (
            (*account, "--batch=501", "--examples-per-user=2", "--users=500"),
            "argument --batch: expected at most 500 users, found 501",
        ),
        ((*account, "extra"), "unrecognized arguments: extra"),
        (("account", *RUN), "--noise-multiplier"),
        (("calibrate", *RUN), "--epsilon"),
        (calibrate[:-1], "--steps"),
    ]


@pytest.mark.parametrize(
    ("argv", "words"), [pytest.param(*row, id=" ".join(row[0])[-60:]) for row in calculations()]
)
def test_a_calculator_answers_nonsense_in_one_line(argv: tuple[str, ...], words: str) -> None:
    ends_in_one_line(argv, words)


def test_a_line_of_an_error_stays_one_line_and_short() -> None:
    for words in (("--nosuch=a\nb\x1b[31m",), ("a\nb",), ("--mechanism=a\nb",), (f"--{DIGITS}",)):
        ends_in_one_line((*COMMANDS["account"], *words), "")
    ends_in_one_line(("no\nsuch",), "unknown command")


# ---- audits --------------------------------------------------------------------------------------

AUDITS = [
    ("one-run", "--canaries", "--canaries", WHOLE),
    ("one-run", "--confidence", "--confidence", (*NUMBERS, "1", "2")),
    ("one-run", "--seed", "--seed", ("nan", "-1", "1.5", "x", "", str(10**30))),
    ("one-run", "--config", "the path of a recipe", ("nowhere", "", ".", "a\0b", "a" * 5000)),
    ("one-run", "--report", "", ("nowhere", "", "a\0b", "a" * 5000)),
    ("one-run", "--trainer.max_steps", "expected int", ("many",)),
    ("secret-sharer", "--repeats", "--repeats", ("0", "-1", "x", "", "1,,2", "1.5", str(10**30))),
    ("secret-sharer", "--canaries", "--canaries", WHOLE),
    ("secret-sharer", "--references", "--references", (*WHOLE, "1")),
    ("nosuch", "--canaries", "invalid choice", ("3",)),
]


@pytest.mark.parametrize(
    ("kind", "option", "value", "words"),
    [(kind, option, value, words) for kind, option, words, bad in AUDITS for value in bad],
    ids=lambda text: text[:20],
)
def test_an_audit_of_nonsense_is_one_line(kind: str, option: str, value: str, words: str) -> None:
    ends_in_one_line(("audit", kind, f"{option}={value}"), words)


# ---- recipes -------------------------------------------------------------------------------------

STRATEGY = "trainer.strategy.init_args"
PRIVACY = f"{STRATEGY}.privacy"

SPOILT = {
    f"{PRIVACY}.clip_norm": (".nan", "-1", "0", "1e308", "x", "true", "[1]", "''", "1e400"),
    f"{PRIVACY}.epsilon": (".inf", "-1", "x", "1e400"),
    f"{PRIVACY}.delta": ("2", "x", ".nan"),
    f"{PRIVACY}.noise_multiplier": (".nan", "-1", "1e308", str(10**30), "x"),
    f"{PRIVACY}.max_batch_size": ("0", "1.5", "x", "true", str(10**30)),
    f"{PRIVACY}.fixed_key": ("-1", "x"),
    f"{PRIVACY}.sampling": ("nosuch", "3", "null"),
    f"{PRIVACY}.noise_source": ("nosuch",),
    f"{PRIVACY}.mechanism": ("nosuch", "3", "[1]"),
    f"{PRIVACY}.assume_independent_examples": ("null", "''"),
    f"{PRIVACY}.taints": ("text", "[1]", "3"),
    f"{PRIVACY}.nosuch": ("3",),
    f"{STRATEGY}.fused_optimizer.kind": ("lamb", "3"),
    f"{STRATEGY}.fused_optimizer.learning_rate": (".nan", ".inf", "-1", "x", "1e308"),
    f"{STRATEGY}.fused_optimizer.eps": (".nan", "-1", "0"),
    f"{STRATEGY}.fused_optimizer.weight_decay": (".nan", ".inf", "-1"),
    f"{STRATEGY}.placement.tables": (
        "{a: x}",
        "[1]",
        "{nosuch: row_wise}",
        "{table_0: {kind: column_wise, shards: 0}}",
    ),
    f"{STRATEGY}.max_physical_batch": ("0", "x"),
    f"{STRATEGY}.process_group_backend": ("nosuch",),
    f"{STRATEGY}.timeout": ("x",),
    f"{STRATEGY}.start_method": ("x",),
    "trainer.max_steps": ("x", "-5"),
    "trainer.max_epochs": ("-5",),
    "trainer.devices": ("0", "-1", "x", "1.5"),
    "trainer.accelerator": ("x",),
    "trainer.precision": ("x", "64-true"),
    "trainer.strategy": ("x", "ddp", "null"),
    "trainer.callbacks": ("x", "[x]", "[{class_path: x}]"),
    "trainer.limit_train_batches": ("-1",),
    "trainer.val_check_interval": ("-1", "x"),
    "trainer.max_time": ("x",),
    "trainer.num_nodes": ("0",),
    "trainer.nosuch": ("3",),
    "model": ("x", "3", "lightning_dpsparse.data.SyntheticData"),
    "model.init_args.num_rows": ("[]", "x", "[0]", "[1.5]", "null"),
    "model.init_args.over_arch": ("[]", "[1]", "[2]"),
    "model.init_args.num_counts": ("-1", "12"),
    "model.init_args.optimizer": (
        "x",
        "{class_path: torch.optim.SGD, init_args: {lr: .nan}}",
        "{class_path: torch.optim.SGD, init_args: {lr: .inf}}",
        "{class_path: torch.optim.SGD, init_args: {lr: -1}}",
    ),
    "data": ("x", "torch.nn.Linear"),
    "data.init_args.num_rows": ("[9, 9]", "x"),
    "data.init_args.batch_size": ("0", "1.5", "1000000"),
    "data.init_args.num_workers": ("-1", "x"),
    "data.init_args.zipf": (".nan", "-1"),
    "data.init_args.nosuch": ("1",),
    "seed_everything": ("-5", str(10**20), "x"),
    "nosuch": ("3",),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=[pytest.mark.slow] if number else [])
        for name, values in SPOILT.items()
        for number, value in enumerate(values)
    ],
    ids=lambda text: text[-40:],
)
def test_a_recipe_with_one_bad_setting_is_one_line(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = MESSAGES.get(f"{name}={value}", name.split(".")[-1])
    ends_in_one_line(("fit", "--config", str(tmp_path / "recipe.yaml"), f"--{name}={value}"), words)


MESSAGES = {
    "trainer.strategy=ddp": "found DDPStrategy",
    "data.init_args.num_rows=[9, 9]": "ids within their tables",
    "trainer.max_time=x": "not a valid duration",
    f"{STRATEGY}.placement.tables={{table_0: {{kind: column_wise, shards: 0}}}}": "shards >= 1",
    **dict.fromkeys(
        (
            f"model.init_args.optimizer={value}"
            for value in SPOILT["model.init_args.optimizer"][1:3]
        ),
        "learning rate of the dense layers",
    ),
}
"""Words of the messages in which the setting goes by another name."""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdef", "bcdefg")
)
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", ""),
    "words": ("just words", ""),
    "list": ("- 1\n- 2", ""),
    "number": ("3", ""),
    "unclosed": ("trainer: [1", ""),
    "tab": ("trainer:\n\tmax_steps: 3", ""),
    "one setting twice": (RECIPE + "seed_everything: 8\n", "'seed_everything' twice"),
    "one setting twice, further in": ("trainer: {max_steps: 1, max_steps: 2}", "'max_steps' twice"),
    "unknown": ("nosuch: 3\n", "nosuch"),
    "code": ("!!python/object/apply:os.system ['true']", ""),
    "class that is none": ("model: {class_path: os.system, init_args: {command: 'true'}}", ""),
    "unknown reference": ("a: *x", ""),
    "refers to itself": ("a: &x [*x]", "refer to themselves"),
    "unfolds without end": (BOMB, "values"),
    "bytes": (b"\x80\x81", "read as text"),
    "zero byte": (b"a: \0", ""),
    "deep": ("[" * 5000, "without end"),
    "many digits": (f"trainer: {{max_steps: {DIGITS}}}", "5,000 characters"),
    "no data": ("model: {class_path: lightning_dpsparse.models.DLRMModule}", ""),
    "model of 3": ("model: 3", ""),
    "trainer of a date": ("trainer: 2020-01-01", ""),
    "two documents": ("a: 1\n---\nb: 2", ""),
    "numbers for names": ("3: 4", ""),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_that_is_none_is_one_line(name: str, tmp_path: Path) -> None:
    text, words = TEXTS[name]
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "recipe.yaml").write_bytes(content)
    ends_in_one_line(("fit", "--config", str(tmp_path / "recipe.yaml")), words)


@pytest.mark.parametrize("path", ["", ".", "a\0b", "a" * 5000, "nowhere.yaml"])
def test_a_recipe_that_is_not_there_is_one_line(path: str) -> None:
    ends_in_one_line(("fit", f"--config={path}"), "")
    ends_in_one_line(("recipes", path), "") if path else None


NO_CHECKPOINTS: dict[str, bytes] = {
    "text": b"seed_everything: 7\n",
    "nothing": b"",
    "half an archive": b"PK\x03\x04",
    "a pickle of a number": b"\x80\x02K\x03.",
}


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_file_that_is_no_checkpoint_is_one_line(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "x.ckpt").write_bytes(NO_CHECKPOINTS[name])
    given = f"--ckpt_path={tmp_path / 'x.ckpt'}"
    ends_in_one_line((command, "--config", str(tmp_path / "recipe.yaml"), given), "checkpoint")
