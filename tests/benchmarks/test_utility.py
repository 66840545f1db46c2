"""The utility benchmark goes on where it stopped, and its table says what its runs say."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import utility, utility_table
from benchmarks.harness import append_json_line, markdown
from benchmarks.tradeoff import read_json_lines
from benchmarks.utility_settings import VARIANTS, tasks
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS, SyntheticClicks
from lightning_dpsparse.refused import Refused

ROOT = Path(__file__).parents[2]


def options(path: Path, *words: str) -> argparse.Namespace:
    return utility.parse(["--json", str(path), *words])


def run(
    variant: str, seed: int, auc: float, target: float | None = 8.0, **changes: Any
) -> utility.Row:
    """A made-up run of the demo, which claims a little less than was asked for."""
    task = tasks(options(Path("none")))["demo"]
    return {
        "data": "demo",
        "variant": variant,
        "target": target,
        "seed": seed,
        "generator_seed": seed,
        "settings": asdict(task.setting(VARIANTS[variant])),
        "epsilon": None if target is None else target - 0.00011 * (1 + seed),
        "noise_multiplier": None if target is None else 0.5,
        "epochs": 1,
        "steps": 244,
        "auc": auc,
        "log_loss": 0.5,
        "calibration": 0.9,
        "recall@10": None,
        "seconds": 60.0,
        **changes,
    }


def no_training(monkeypatch: pytest.MonkeyPatch, refused: str = "") -> list[tuple[Any, ...]]:
    """Runs end at once. The list has what was trained: privacy, epochs, target, both seeds."""
    made: list[tuple[Any, ...]] = []

    def train(task: Any, setting: Any, target: Any, seed: int, generator_seed: Any) -> utility.Row:
        if setting.schedule == refused:
            raise Refused("Expected something else.")
        made.append((setting.privacy, setting.epochs, target, seed, generator_seed))
        return {"epsilon": target, "auc": 0.7}

    monkeypatch.setattr(utility, "train", train)
    return made


def test_runs_that_are_there_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said, path = no_training(monkeypatch), [], tmp_path / "runs.jsonl"
    append_json_line(run("demo", 1, 0.72), path)
    append_json_line(run("demo", 0, 0.72, settings={"epochs": 1}), path)  # of other settings
    words = ["--variants=clipping,demo,epochs4", "--epsilons=1,8", "--seeds=2"]
    utility.run_all(options(path, *words), said.append)
    ran = [("clipping", 1, None)] + [("epsilon", n, e) for n in (1, 4) for e in (1.0, 8.0)]
    expected = [(*each, seed, seed) for seed in (0, 1) for each in ran]
    expected.remove(("epsilon", 1, 8.0, 1, 1))
    assert made == expected
    assert len(read_json_lines(path)) == 2 + len(expected)
    made.clear()
    utility.run_all(options(path, *words), said.append)
    assert made == []
    # The data that settings are chosen on is other data.
    utility.run_all(options(path, *words, "--generator-seed=101"), said.append)
    assert {each[-1] for each in made} == {101}
    assert len(made) == len(ran) * 2


def test_what_cannot_be_run_is_said_and_the_rest_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said, path = no_training(monkeypatch, refused="linear"), [], tmp_path / "runs.jsonl"
    words = ["--data=movielens,criteo,demo", f"--movielens={tmp_path}", "--epsilons=8"]
    utility.run_all(options(path, *words, "--variants=users,linear,demo", "--seeds=1"), said.append)
    assert made == [("epsilon", 1, 8.0, 0, 0)]
    assert sum("no ratings.csv" in line for line in said) == 3
    assert sum("--criteo" in line for line in said) == 3
    assert "Skipped demo, users: its clicks belong to no users." in said
    assert "Skipped demo, linear, ε 8.0, seed 0: Expected something else." in said
    assert len(read_json_lines(path)) == 1


def test_a_generator_seeds_synthetic_data_alone(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").touch()
    words = ["--data=movielens,demo", f"--movielens={tmp_path}", "--variants=users,demo"]
    found = [row for _, row in utility.planned(options(tmp_path, *words), lambda line: None)]
    seeds = {(row["data"], row["seed"], row["generator_seed"]) for row in found}
    assert seeds == {("movielens", s, None) for s in range(3)} | {("demo", s, s) for s in range(3)}


def test_other_generator_seeds_are_other_clicks(tmp_path: Path) -> None:
    demo = tasks(options(tmp_path, "--quick"))["demo"]
    setting = demo.setting(VARIANTS["demo"])
    data = {seed: demo.data(setting, seed) for seed in (0, 101)}
    for part in ("train_set", "val_set"):
        ids = [getattr(each, part).__getitems__(range(100)).ids_L for each in data.values()]
        assert (ids[0] != ids[1]).any()
    # What is validated on comes after what is trained on, and is not part of it.
    stream = SyntheticClicks(0, 12_288, ADAFEST_NUM_ROWS, examples_per_day=1_000_000, seed=101)
    held_out = data[101].val_set.__getitems__(range(4_096))
    assert (held_out.ids_L == stream.__getitems__(range(8_192, 12_288)).ids_L).all()


def test_the_table_has_means_errors_and_gains_at_the_same_seed(tmp_path: Path) -> None:
    rows = [run("demo", seed, auc) for seed, auc in enumerate((0.70, 0.72, 0.74))]
    rows += [run("epochs4", seed, auc) for seed, auc in enumerate((0.72, 0.74))]
    rows += [run("epochs4", 2, 0.79, target=1.0), run("no_privacy", 0, 0.78, target=None)]
    rows += [run("demo", seed, 0.5, generator_seed=101) for seed in range(2)]
    table = utility_table.summary(rows)
    assert [(row["data"], row["variant"], row["target"], row["seeds"]) for row in table] == [
        ("demo", "no_privacy", None, 1),
        ("demo", "epochs4", 1.0, 1),
        ("demo", "demo", 8.0, 3),
        ("demo", "epochs4", 8.0, 2),
        ("demo, generator 101", "demo", 8.0, 2),
    ]
    _, alone, demo, epochs4, chosen_on = table
    assert demo["auc"] == pytest.approx((0.72, 0.02 / 3**0.5))
    assert demo["gain"] is None
    assert epochs4["gain"] == pytest.approx((0.02, 0.0), abs=1e-9)  # seeds move both alike
    assert alone["gain"] is None  # no run of the demo has this target
    assert chosen_on["auc"][0] == 0.5
    shown = utility_table.as_shown(table)
    assert [row["auc"] for row in shown[:3]] == ["0.7800", "0.7900", "0.7200 ± 0.0115"]
    assert [row["epsilon"] for row in shown[:3]] == ["", "0.9997", "7.9999"]  # claims, rounded up
    assert (shown[3]["gain"], shown[3]["over"]) == ("+0.0200 ± 0.0000", "demo")
    utility_table.plot(table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_a_gain_is_over_what_differs_in_one_lever() -> None:
    names = ("demo", "epochs4", "averaged", "short_adam")
    table = utility_table.summary([run(name, 0, 0.7 + 0.01 * i) for i, name in enumerate(names)])
    gains = {row["variant"]: (row["gain"], row["over"]) for row in table}
    assert gains["averaged"] == ((pytest.approx(0.01), 0.0), "epochs4")
    assert gains["short_adam"] == (None, "")  # no run of short_scale2, which it is told against
    for name, variant in VARIANTS.items():
        assert variant.over in VARIANTS, name


def test_documents_have_a_line_for_each_variant_and_a_column_for_each_epsilon() -> None:
    rows = [run("demo", seed, auc) for seed, auc in enumerate((0.70, 0.72, 0.74))]
    rows += [run("demo", 0, 0.69, target=1.0), run("no_privacy", 0, 0.78, target=None)]
    rows += [run("demo", 0, 0.5, generator_seed=101)]
    text = f"before\n{utility_table.BEGIN}\nold\n{utility_table.END}\nafter\n"
    once = utility_table.in_document(utility_table.summary(rows), text)
    assert once.splitlines()[:9] == [
        "before",
        utility_table.BEGIN,
        "",
        "**demo**: AUC",
        "",
        "| variant | ε = 1 | ε = 8 |",
        "| --- | --- | --- |",
        "| `no_privacy` | 0.780 (1 seed) | 0.780 (1 seed) |",
        "| `demo` | 0.690 (1 seed) | 0.720 ± 0.012 |",
    ]
    assert once.endswith(f"{utility_table.END}\nafter\n")
    assert "old" not in once
    assert "generator" not in once  # settings were chosen there
    assert utility_table.in_document(utility_table.summary(rows), once) == once


def test_what_is_published_is_what_the_results_say() -> None:
    rows = read_json_lines(utility.RESULTS / "utility.jsonl")
    known = list(tasks(options(Path("none"))).values())
    table = utility_table.summary(utility.up_to_date(rows, known))
    document = (ROOT / "docs" / "utility.md").read_text()
    assert utility_table.in_document(table, document) == document
    full = (utility.RESULTS / "utility.md").read_text().splitlines()
    assert full == markdown(utility_table.as_shown(table))


def test_a_group_with_a_run_that_claims_nothing_claims_nothing() -> None:
    (row,) = utility_table.summary([run("demo", 0, 0.7), run("demo", 1, 0.7, epsilon=None)])
    assert row["epsilon"] is None
    assert utility_table.as_shown([row])[0]["epsilon"] == ""


def test_doubled_and_outdated_runs_do_not_count() -> None:
    row = run("demo", 0, 0.7)
    known = list(tasks(options(Path("none"))).values())
    changes: list[dict[str, Any]] = [{"settings": {}}, {"data": "demo-quick"}]
    others = [run("demo", 0, 0.9, **change) for change in changes]
    assert utility.up_to_date([row, row, *others], known) == [row]


def test_learning_rates_follow_the_batch() -> None:
    demo = tasks(options(Path("none")))["demo"]
    own, large = (demo.setting(VARIANTS[name]) for name in ("demo", "batch32k"))
    assert (own.batch_size, own.table_rate, own.dense_rate) == (8_192, 8.0, 0.02)
    assert (large.batch_size, large.table_rate, large.dense_rate) == (32_768, 32.0, 0.04)
    assert tasks(options(Path("none")))["movielens"].setting(VARIANTS["users"]).table_rate == 200.0


def test_the_best_combination_is_of_each_data_set_and_epsilon() -> None:
    known = tasks(options(Path("none")))
    at = [known["demo"].setting(VARIANTS["best"], target).table_rate for target in (1.0, 4.0)]
    assert at == [pytest.approx(46.0), pytest.approx(92.0)]
    assert known["criteo"].setting(VARIANTS["best"], 8.0).batch_size == 4_096
    assert not known["movielens"].setting(VARIANTS["best"], 8.0).calibrated
    assert (
        tasks(options(Path("none"), "--quick"))["demo"].setting(VARIANTS["best"]).batch_size == 1024
    )


def test_names_that_nobody_knows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(Path("none"), "--variants=demo,epochs5")
    assert "found epochs5" in capsys.readouterr().err


@pytest.mark.slow  # it runs the whole command
def test_the_command_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks.utility", "--json", str(out), "--quick"]

    def call(*words: str) -> tuple[str, str]:
        done = subprocess.run(
            [*command, *words], check=True, capture_output=True, cwd=ROOT, timeout=200, text=True
        )
        return done.stdout, done.stderr

    stdout, stderr = call()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["demo", "best"]
    for row in rows:
        assert 15.9 < row["epsilon"] < row["target"] == 16.0  # the claim, not the wish
        assert 0.4 < row["auc"] < 0.8
        assert row["data"] == "demo-quick"
    assert [row["steps"] for row in rows] == [16, 64]
    assert rows[1]["noise_multiplier"] > rows[0]["noise_multiplier"]  # more steps, and a query
    again, quiet = call()
    assert "best" in stderr
    assert "best" not in quiet  # nothing was run
    assert again == stdout
    assert sum(line.startswith("| demo-quick |") for line in again.splitlines()) == 2
    assert call("--table", "--plot", str(plot))[0] == stdout
    assert plot.stat().st_size > 0
