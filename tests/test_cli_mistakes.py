"""Mistakes on the command line: one line for a user's, a traceback for a programmer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_dpsparse.cli import main
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.refused import Refused

ROOT = Path(__file__).parents[1]
PRIVACY = "--trainer.strategy.init_args.privacy"

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")


def refusal_of(*words: str) -> str:
    """The one line in which a command ends, with exit code 1."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert isinstance(end.value.code, str), f"exit code {end.value.code}"
    assert end.value.code.startswith("error: Expected ")
    assert "\n" not in end.value.code
    return end.value.code


def usage_error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What argparse or jsonargparse says of a command's words, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


# ---- mistakes of users ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes", "dlrm"], "found 'dlrm': there is no such name. Did you mean dlrm_l"),
        (["prepare", "criteo", "nowhere.txt", "--output", "out"], "a Criteo file at 'nowhere.txt'"),
        (["consolidate", "nowhere", "whole.ckpt"], "found no such directory at 'nowhere'"),
        (["consolidate", "nowhere", "no_folder/whole.ckpt"], "found that its directory is not"),
        (["consolidate", "nowhere", "."], "found a directory"),
        (["report", "nowhere"], "privacy_report.json in nowhere or below, found none"),
        (["fit", "--config", "nowhere.yaml"], "found 'nowhere.yaml': there is no such file"),
        (["fit", "--config", "."], "found '.': there is no such file"),
        (["validate", "-c=dlrm_lazydpp"], "Did you mean dlrm_lazydp"),
    ],
)
def test_what_is_not_there_is_named(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal_of(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fti"], "unknown command 'fti'. Did you mean fit? The commands are fit, validate,"),
        (["frobnicate"], "unknown command 'frobnicate'. The commands are fit, validate,"),
        (
            ["prepare", "criteo", "x", "--output", "o", "--num-rows", "x"],
            "--num-rows: expected one",
        ),
        (["prepare", "avazu"], "invalid choice: 'avazu'"),
        (["doctor", "--yaml"], "unrecognized arguments: --yaml"),
        (["calibrate", "--epsilon", "x"], "argument --epsilon: invalid float value: 'x'"),
        (["fit", "--config"], "expected one argument"),
        (["fit", "--config", "dlrm_lazydp", "--trainer.max_steps", "many"], "trainer.max_steps"),
        (["fit", "--config", "dlrm_lazydp", "--trainer.max_stepz", "2"], "max_stepz"),
        (["fit", "--config", "dlrm_lazydp", f"{PRIVACY}.mechanism", "Nosuch"], "Nosuch"),
        (["fit", "--config", "dlrm_lazydp", "--model", "nosuch.Model"], "nosuch.Model"),
    ],
)
def test_words_that_are_wrong_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in usage_error_of(capsys, *words)


def test_a_broken_recipe_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    for text in ("trainer: [1, 2\nmodel: {", "", "just words"):
        recipe.write_text(text)
        assert "error: " in usage_error_of(capsys, "fit", "--config", str(recipe))
    recipe.write_bytes(b"\x80\x81\xff")
    assert "a recipe that can be read as text" in refusal_of("fit", "--config", str(recipe))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{PRIVACY}.epsilon=-1", "Expected epsilon > 0, found -1.0"),
        (f"{PRIVACY}.clip_norm=-1", "Expected clip_norm > 0"),
        ("--model.init_args.embedding_dim=4", "Expected dense_arch to end in embedding_dim=4"),
        ("--model.init_args.num_rows=[]", "Expected num_rows"),
        ("--data.init_args.batch_size=0", "Expected batch_size of at least 1, found 0"),
        ("--data.init_args.click_rate=1", "Expected click_rate between 0 and 1"),
        ("--data.init_args.num_rows=[5,0]", "Expected num_rows of at least 1"),
        ("--data.init_args.examples_per_day=0", "Expected examples_per_day"),
        ("--data.init_args.max_ids_per_bag=0", "max_ids_per_bag of at least 1"),
        ("--data.init_args.val_days=-1", "Expected numbers of days of at least 0"),
        (
            "--trainer.strategy.init_args.fused_optimizer.learning_rate=-2",
            "Expected learning_rate",
        ),
    ],
)
def test_a_bad_value_in_a_recipe_is_one_line(setting: str, message: str) -> None:
    """jsonargparse would turn what a constructor refuses into a page about types."""
    assert message in refusal_of("fit", "--config", "dlrm_dpsgd", setting)


def test_a_bad_value_of_a_model_of_items_is_one_line(tmp_path: Path) -> None:
    recipe = ("fit", "--config", "two_tower_synthetic")
    negatives = "--model.init_args.negatives"
    assert "an existing .npy or .npz" in refusal_of(*recipe, f"{negatives}={tmp_path / 'no.npy'}")
    broken = tmp_path / "broken.npy"
    broken.write_bytes(b"not an array")
    assert "can be read as numbers" in refusal_of(*recipe, f"{negatives}={broken}")
    assert "of at least 1" in refusal_of(*recipe, "--data.init_args.num_users=0")


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    report = tmp_path / "run" / "privacy_report.json"
    report.parent.mkdir()
    for text, found in (("{", "something else"), ("[]", "something else"), ("{}", "found None")):
        report.write_text(text)
        assert found in refusal_of("report", str(report.parent))
    report.write_text(json.dumps({"format": 1}))
    assert "found one without" in refusal_of("report", str(report.parent))
    checkpoint = tmp_path / "saved.ckpt"
    checkpoint.mkdir()
    for damaged in (b"", b"not a checkpoint", b"PK\x03\x04 cut off"):
        (checkpoint / "meta.pt").write_bytes(damaged)
        found = refusal_of("consolidate", str(checkpoint), str(tmp_path / "whole.ckpt"))
        assert "found no manifest.json in it" in found


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    source, in_the_way = tmp_path / "train.txt", tmp_path / "file"
    source.write_text("\t".join(["1", *["0"] * 39]) + "\n")
    in_the_way.write_text("")
    words = ["prepare", "criteo", str(source), "--output", str(in_the_way), "--num-rows", "10"]
    assert "Expected a directory to write to" in refusal_of(*words)
    assert "26 table sizes" in refusal_of(*words[:-1], "10,10,10")


# ---- mistakes of programmers ---------------------------------------------------------------------


@pytest.mark.parametrize("mistake", [TypeError("ours"), KeyError("ours"), ValueError("ours")])
def test_a_fault_of_the_program_keeps_its_traceback(
    mistake: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_it(*args: Any, **kwargs: Any) -> None:
        raise mistake

    monkeypatch.setattr("lightning_dpsparse.data.prepare.prepare_criteo", raise_it)
    with pytest.raises(type(mistake), match="ours"):
        main(["prepare", "criteo", "x", "--output", "o", "--num-rows", "10"])
    monkeypatch.setattr("lightning_dpsparse.sharded.checkpoint.consolidate", raise_it)
    with pytest.raises(type(mistake), match="ours"):
        main(["consolidate", "x", "whole.ckpt"])
    monkeypatch.setattr("lightning_dpsparse.recipe.RecipeCLI.before_instantiate_classes", raise_it)
    with pytest.raises(type(mistake), match="ours"):
        main(["fit", "--config", "dlrm_dpsgd"])


class FaultyModel(DLRMModule):
    """A user's model with a fault in its constructor."""

    def __init__(self, num_rows: list[int]) -> None:
        super().__init__(num_rows)
        raise TypeError("a fault of the model's author")


class FaultyCallback(Callback):
    """A user's callback with a fault in its constructor, which looks up a key that is not there."""

    def __init__(self, name: str = "a") -> None:
        {}[name]


def test_a_fault_in_a_users_constructor_keeps_its_traceback() -> None:
    common = ["fit", "--config", "dlrm_dpsgd"]
    model = f"--model={__name__}.FaultyModel"
    with pytest.raises(ValueError, match="a fault of the model's author") as caught:
        main([*common, model, "--model.init_args.num_rows=[4]"])
    assert not isinstance(caught.value, Refused)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ValueError, match="Does not validate") as caught:
        main([*common, f"--trainer.callbacks={__name__}.FaultyCallback"])
    assert isinstance(caught.value.__cause__, KeyError)
