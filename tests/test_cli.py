"""The command line: help, tools, recipes that parse, and one clear error each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_dpsparse import __version__
from lightning_dpsparse.cli import main
from lightning_dpsparse.doctor import diagnose, package_problems, show_diagnosis
from lightning_dpsparse.recipe import RecipeCLI
from lightning_dpsparse.recipe_files import shipped_recipes
from tests.support.command import run_command
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[1]
RECIPES = list(shipped_recipes().values())
DEMO = ROOT / "recipes" / "dlrm_synthetic.yaml"

SMALL = [
    "--data.init_args.num_rows=[50,20,10]",
    "--model.init_args.num_rows=[50,20,10]",
    "--data.init_args.examples_per_day=512",
    "--data.init_args.batch_size=64",
    "--model.init_args.dense_arch=[8,16]",
    "--trainer.enable_progress_bar=false",
]


def run(*args: str, launcher: tuple[str, ...] = (), cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real command, as a launcher starts it."""
    command = [sys.executable, "-m", *launcher, "lightning_dpsparse", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120, check=False
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"lightning_dpsparse {__version__}\n"


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_names_every_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(args)
    printed = capsys.readouterr().out
    recipes = ("fit", "validate", "test", "predict", "recipes")
    tools = ("calibrate", "account", "report", "audit", "prepare", "consolidate", "doctor")
    for command in recipes + tools:
        assert command in printed


@pytest.mark.parametrize(
    "tool",
    [
        *(
            [name]
            for name in ("calibrate", "account", "report", "consolidate", "doctor", "recipes")
        ),
        ["prepare", "criteo"],
    ],
)
def test_tools_have_help(tool: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*tool, "--help"])
    assert end.value.code == 0
    assert "usage: lightning-dpsparse" in capsys.readouterr().out


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("lightning-dpsparse")
    found = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"lightning_dpsparse {__version__}\n"


@pytest.fixture(scope="module")
def diagnosis() -> dict[str, Any]:
    return diagnose()


def test_doctor_finds_this_installation_healthy(diagnosis: dict[str, Any]) -> None:
    found = diagnosis
    assert found["problems"] == []
    assert "gloo" in found["backends"]
    assert found["versions"]["torchrec"] == "1.8.0"
    text = show_diagnosis(found)
    assert "No problem found." in text
    assert "Supported sets of versions:\n  torch 2.13.*, torchrec 1.8.*, fbgemm 1.8.*," in text
    assert "The installed set is supported: yes." in text
    assert "supported: NO." in show_diagnosis(found | {"is_supported": False})
    assert json.loads(json.dumps(found)) == found


HEALTHY: dict[str, str | None] = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "lightning": "2.6.6",
    "fbgemm-gpu": "1.8.0+cpu",
    "fbgemm-gpu-cpu": "1.8.0",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, None),
        ({"fbgemm-gpu": "1.8.0"}, "Both fbgemm-gpu 1.8.0 (CUDA) and fbgemm-gpu-cpu 1.8.0"),
        ({"torch": "2.12.1"}, "built for torch 2.13, found torch 2.12.1"),
        ({"fbgemm-gpu": None, "fbgemm-gpu-cpu": None}, "No fbgemm is installed"),
        ({"torchrec": None}, "torchrec is not installed"),
        ({"torchrec": "1.9.2"}, "Expected a supported set of versions (torch 2.13.*, torchrec"),
        ({"lightning": "2.5.6"}, "found torch 2.13.0+cpu, torchrec 1.8.0, fbgemm 1.8.0, lightning"),
    ],
)
def test_doctor_names_what_is_wrong(
    change: dict[str, str | None], message: str | None, diagnosis: dict[str, Any]
) -> None:
    problems = package_problems(HEALTHY | change)
    assert len(problems) == (0 if message is None else 1)
    if message is not None:
        assert message in problems[0]
        assert "- " + problems[0] in show_diagnosis(diagnosis | {"problems": problems})


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_the_real_signatures(recipe: Path) -> None:
    settings: dict[str, Any] = yaml.safe_load(recipe.read_text())
    flat = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    cli = RecipeCLI(args=["--config", str(recipe), *flat], run=False)
    assert type(cli.trainer.strategy).__name__ == "DPSparseStrategy"
    assert settings["model"]["class_path"].endswith(type(cli.model).__name__)
    assert cli.datamodule.batch_size == settings["data"]["init_args"]["batch_size"]
    assert cli.trainer.strategy.fused_optimizer.learning_rate > 0


def test_all_recipes_of_the_readme_exist() -> None:
    names = {path.name for path in RECIPES}
    assert names >= {
        "dlrm_lazydp.yaml",
        "dlrm_dpsgd.yaml",
        "dlrm_lsg.yaml",
        "dlrm_adafest_lsg.yaml",
        "dlrm_synthetic.yaml",
        "dlrm_criteo_kaggle.yaml",
        "dlrm_dcn_criteo_1tb.yaml",
        "pctr_criteo_kaggle.yaml",
        "pctr_adafest.yaml",
        "pctr_fest.yaml",
        "pctr_adafest_plus.yaml",
        "pctr_exponential.yaml",
        "pctr_streaming.yaml",
        "pctr_streaming_criteo.yaml",
        "sasrec_movielens_adafest.yaml",
        "sasrec_synthetic_adafest.yaml",
    }


def test_a_typo_in_a_recipe_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(DEMO.read_text().replace("embedding_dim:", "embeding_dim:"))
    found = run_command("fit", "--config", str(bad))
    assert found.returncode != 0
    assert "embeding_dim" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    found = run_command(
        "fit", "--config", str(DEMO), *SMALL, "--trainer.gradient_clip_val=1.0", cwd=tmp_path
    )
    assert found.returncode == 1
    assert "error: Expected no gradient_clip_val, found 1.0" in found.stderr
    assert "Traceback" not in found.stderr


def test_ids_out_of_range_are_one_line(tmp_path: Path) -> None:
    rows = "--model.init_args.num_rows=[50,20,9]"
    found = run_command("fit", "--config", str(DEMO), *SMALL, rows, cwd=tmp_path)
    assert "error: Expected ids within their tables" in found.stderr
    assert "'cat_2' (0 to 8)" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_recipe_fits_validates_tests_and_predicts(one_rank: Ranks, tmp_path: Path) -> None:
    common = ["--config", str(DEMO), *SMALL, f"--trainer.logger.init_args.save_dir={tmp_path}"]
    one_rank.run(main, ["fit", *common])
    checkpoint = next(tmp_path.glob("**/*.ckpt"))
    common.append(f"--ckpt_path={checkpoint}")
    one_rank.run(main, ["validate", *common])
    one_rank.run(main, ["test", *common])
    writer = "--trainer.callbacks=lightning_dpsparse.PredictionWriter"
    output = f"--trainer.callbacks.output={tmp_path / 'p.npy'}"
    one_rank.run(main, ["predict", *common, writer, output])
    assert np.load(tmp_path / "p.npy").shape == (512,)
    assert "val_auroc" in next(tmp_path.glob("**/metrics.csv")).read_text()


PRIVACY = "--trainer.strategy.init_args.privacy"
TINY = {
    "dlrm": [
        *SMALL,
        "--model.init_args.over_arch=[32,16,1]",  # wide enough for factors of rank 8
        f"{PRIVACY}.dense.init_args.warmup=1",
    ],
    "sasrec": [
        "--data.init_args.num_users=40",
        "--data.init_args.num_items=50",
        "--model.init_args.num_items=50",
        "--data.init_args.watches_per_user=10",
        "--data.init_args.batch_size=64",
        "--model.init_args.embedding_dim=8",
    ],
}


def fit_recipe(args: list[str]) -> dict[str, Any]:
    """Runs inside a rank: the command `fit`, and what it did."""
    cli = RecipeCLI(args=["fit", *args])
    strategy, metrics = cli.trainer.strategy, cli.trainer.callback_metrics
    return {
        "ran": strategy.private_run.facts()["ran"],
        "layers": list(strategy.privacy.dense.layers_of(cli.model)),
        "rows_updated": float(metrics.get("rows_updated", -1)),
    }


@pytest.mark.parametrize(
    ("name", "mechanism", "few", "dense"),
    [
        ("dlrm_lsg", "LazyDP", None, "LSG"),
        ("dlrm_adafest_lsg", "AdaFEST", "half_survival=15", "LSG"),
        ("sasrec_synthetic_adafest", "AdaFEST", "threshold=3", "DenseGaussian"),
    ],
)
def test_a_recipe_takes_two_private_steps(
    one_rank: Ranks, tmp_path: Path, name: str, mechanism: str, few: str | None, dense: str
) -> None:
    """On tiny data. Where rows are chosen, `few` says by how few readers."""
    args = [
        *(f"--config={ROOT / 'recipes' / name}.yaml", *TINY[name.split("_")[0]]),
        f"{PRIVACY}.noise_multiplier=1.0",  # to calibrate it for epsilon would take long
        *("--trainer.max_steps=2", "--trainer.limit_val_batches=1"),
        *("--trainer.val_check_interval=1.0", "--trainer.log_every_n_steps=1"),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    ]
    if few is not None:
        args.append(f"{PRIVACY}.mechanism.init_args.{few}")
    [found] = one_rank.run(fit_recipe, args)
    assert found["ran"]["steps"] == 2
    assert (found["ran"]["mechanism"], found["ran"]["dense"]) == (mechanism, dense)
    assert (found["rows_updated"] > 0) is (few is not None)
    # All layers of the over-arch but the last.
    over_arch = [f"net.over_arch.model.0._mlp.{i}._linear" for i in range(2)]
    assert found["layers"] == (over_arch if dense == "LSG" else [])


def test_a_saved_recipe_names_its_mechanism(tmp_path: Path) -> None:
    """A config that is run again must not become another mechanism."""
    recipe = str(ROOT / "recipes" / "dlrm_dpsgd.yaml")
    plan = {"mechanism": "lightning_dpsparse.EANA", "epsilon": None, "noise_multiplier": 0.5}
    strategy = {"class_path": "lightning_dpsparse.DPSparseStrategy", "init_args": {"privacy": plan}}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    printed = run_command(
        "fit", "--config", recipe, "--config", str(other), "--print_config"
    ).stdout
    plan = yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["privacy"]
    assert plan["mechanism"]["class_path"] == "lightning_dpsparse.EANA"
    assert plan["clipping"]["class_path"].endswith("FlatClipping")


@pytest.mark.slow  # four processes start from nothing; Lightning starts ranks in the test below
def test_the_private_recipe_runs_under_torchrun(tmp_path: Path) -> None:
    """`devices: auto` takes torchrun's processes. A target, a report, the same from `report`."""
    recipe = str(ROOT / "recipes" / "dlrm_dpsgd.yaml")
    settings = ["--trainer.limit_val_batches=1", "--trainer.val_check_interval=1.0"]
    settings.append("--trainer.log_every_n_steps=1")
    # Logits of a model this small depend on their place in the batch, and the report would say so.
    other = tmp_path / "other.yaml"
    other.write_text("trainer: {strategy: {init_args: {privacy: {calibration: null}}}}")
    settings += ["--config", str(other)]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    done = run("fit", "--config", recipe, *SMALL, *settings, launcher=launcher, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Tables, sgd fused into backward" in done.stdout + done.stderr
    assert "Privacy: DPSGD, noise multiplier" in done.stdout + done.stderr
    assert len(list(next(tmp_path.glob("runs/**/*.ckpt")).glob("*.distcp"))) == 2
    told = run_command("report", "runs", cwd=tmp_path)
    assert "-differentially private" in told.stdout
    assert "taint" not in told.stdout
    page = next((tmp_path / "runs").rglob("privacy_report.html")).read_text()
    assert "TAINTED" not in page
    metrics = next((tmp_path / "runs").rglob("metrics.csv")).read_text()
    columns = metrics.splitlines()[0].split(",")
    assert "epsilon" in columns
    assert "train_loss" not in columns


def test_lightning_starts_the_ranks_itself(tmp_path: Path) -> None:
    """`--trainer.devices 2` without torchrun."""
    args = (
        "fit",
        "--config",
        str(DEMO),
        *SMALL,
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
    )
    found = run(*args, "--trainer.max_steps=2", "--trainer.val_check_interval=null", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert len(list(next(tmp_path.glob("runs/**/*.ckpt")).glob("*.distcp"))) == 2


def test_the_strategy_is_known_by_name() -> None:
    from lightning.pytorch import Trainer

    trainer = Trainer(strategy="dpsparse", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy).__name__ == "DPSparseStrategy"
