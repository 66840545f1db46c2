"""Ten steps of a recipe, with small tables, small layers and small data."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_dpsparse
from tests.same_weights.tiny import STEPS

NUM_ITEMS, NUM_USERS = 50, 40
CRITEO_ROWS, CRITEO_FEATURES, CRITEO_DAY = 20, 26, 48

SMALL = {  # for settings that a recipe has, by the first pattern that fits
    "trainer.val_check_interval": 1.0,
    "*.fused_optimizer.learning_rate": 0.1,
    "*.mechanism.*.half_survival": 4.0,
    "*.mechanism.*.threshold": 1.0,
    "*.mechanism.*.num_rows": 10,
    "*.selection.rows_in_total": 30,
    "*.dense.init_args.warmup": 3,
    "*.init_args.num_rows": [50, 20, 10],
    "*.init_args.num_items": NUM_ITEMS,
    "model.init_args.embedding_dim": 16,
    "model.init_args.dense_arch": [8, 16],
    "model.init_args.over_arch": [32, 16, 1],  # wide enough for factors of rank 8
    "model.init_args.cross_rank": 4,
    "model.init_args.hidden": [12, 8],
    "data.init_args.batch_size": 16,
    "data.init_args.num_workers": 0,
    "data.init_args.num_users": NUM_USERS,
    "data.init_args.watches_per_user": 10,
    "data.init_args.examples_per_day": 256,
}


def find_recipes() -> list[tuple[str, Path]]:
    """Names and files of all recipes, beside the package or inside it."""
    package = Path(lightning_dpsparse.__file__).parent
    paths = [*package.parent.glob("recipes/*.yaml"), *package.rglob("recipes/*.yaml")]
    found = list({path.resolve(): path for path in paths}.values())  # one may link to the other
    return [(path.stem, path) for path in sorted(found, key=lambda path: path.stem)]


def fit_recipe(path: Path) -> LightningModule:
    """Run the recipe as the command line does, in a folder that has the data of `write_data`."""
    recipe = _made_small(yaml.safe_load(path.read_text()))
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        save_config_callback=None,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=["fit", "--config", "recipe.yaml"],
    )
    return cli.model


def _made_small(recipe: dict[str, Any]) -> dict[str, Any]:
    small = dict(SMALL)
    if recipe["data"]["class_path"].endswith("CriteoData"):
        small["*.init_args.num_rows"] = [CRITEO_ROWS] * CRITEO_FEATURES
    if recipe["data"]["init_args"].get("train_days", 1) > 2:
        small["data.init_args.examples_per_day"] = CRITEO_DAY  # ten steps see several days

    def replaced(value: Any, name: str) -> Any:
        pattern = next((pattern for pattern in small if fnmatchcase(name, pattern)), None)
        if pattern is not None:
            return small[pattern]
        if isinstance(value, dict):
            return {key: replaced(inner, f"{name}.{key}") for key, inner in value.items()}
        return value

    recipe = {key: replaced(value, key) for key, value in recipe.items()}
    recipe["trainer"] |= {"accelerator": "cpu", "devices": 1, "max_steps": STEPS}
    recipe["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    plan = recipe["trainer"]["strategy"]["init_args"].get("privacy")
    if plan is not None:  # epsilon goes: nothing can be promised with a fixed key
        plan |= {"fixed_key": 7, "noise_multiplier": 1.0, "epsilon": None}
    return recipe


def write_data(folder: Path) -> None:
    """Write the files that recipes read, in the formats of MovieLens and Criteo."""
    draws = np.random.default_rng(3)
    movielens = folder / "ml-1m"
    movielens.mkdir(parents=True)
    with (movielens / "ratings.dat").open("w") as file:
        for user in range(1, NUM_USERS + 1):
            for time, movie in enumerate(draws.integers(1, NUM_ITEMS + 1, size=12)):
                file.write(f"{user}::{movie}::5::{time}\n")
    sizes = {"train": 400} | {f"day_{day}": CRITEO_DAY for day in range(24)}
    for name, size in sizes.items():
        with (folder / f"{name}.txt").open("w") as file:
            for _ in range(size):
                label, counts = draws.integers(2), draws.integers(0, 50, size=13)
                tokens = [f"{token:08x}" for token in draws.integers(0, 99, size=CRITEO_FEATURES)]
                file.write("\t".join(map(str, [label, *counts, *tokens])) + "\n")
    files = [f"{name}.txt" for name in sizes]
    command = [sys.executable, "-m", "lightning_dpsparse", "prepare", "criteo", *files]
    command += ["--output", "criteo", "--num-rows", str(CRITEO_ROWS)]
    package = Path(lightning_dpsparse.__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    for name in ("criteo_kaggle", "criteo_1tb"):
        (folder / name).symlink_to(folder / "criteo")
