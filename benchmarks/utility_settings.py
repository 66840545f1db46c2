"""What `benchmarks.utility` trains on, and the ways to train that it compares.

A `Task` is a data set with a model and the settings of its recipe as they were before any lever was
tried: they stay here when the recipe gets better ones. A `Variant` says what is changed of these
settings, and `Task.setting` puts the two together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.eana import movielens
from benchmarks.tradeoff import InMemory
from lightning_dpsparse.data.batch import ClickData, ClickDataset
from lightning_dpsparse.data.criteo import META_FILE, CriteoData, Part
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS, SyntheticClicks
from lightning_dpsparse.models import DLRMModule, PCTRModule, TwoTowerModule
from lightning_dpsparse.models.base import RecommenderModule

# ---- ways to train ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is changed of a task's own settings. None leaves a setting as it is."""

    over: str = "demo"
    """Variant that the gain is told against: this one differs from it in one lever."""
    privacy: Literal["epsilon", "clipping", "none"] = "epsilon"
    """epsilon: LazyDP with noise for a target. clipping: the same without noise. none: plain
    training with the settings of the task's recipe without privacy."""
    epochs: int | None = None
    batch_size: int | None = None
    """Learning rates grow with it: SGD's in proportion, Adagrad's as its square root. With users it
    counts users, and learning rates stay."""
    clip_norm: float | None = None
    table_rate: float = 1.0
    """Factor of the tables' learning rate."""
    rate_exponent: float = 0.0
    """Power of epsilon by which the tables' learning rate grows: less noise bears larger steps."""
    dense_rate: float = 1.0
    """Factor of the dense layers' learning rate."""
    schedule: Literal["constant", "linear"] = "constant"
    """linear: both learning rates fall to zero at the last step."""
    average: float | None = None
    """Last part of the steps whose weights are averaged."""
    clipping: Literal["flat", "automatic", "quantile", "quantile_scaled"] = "flat"
    """quantile: the clip norm follows the median norm. quantile_scaled: so it does, and gradients
    are scaled by its inverse, so that steps stay as long (`utility_levers.py`)."""
    dense_scale: float = 1.0
    """Noise on dense layers over noise on tables."""
    dense_optimizer: Literal["adagrad", "adam", "dp_adam"] = "adagrad"
    momentum: float = 0.0
    """Momentum of the tables, with DP-SGD in place of LazyDP (`utility_levers.py`)."""
    calibrated: bool = False
    """Whether a private query calibrates the logits after the last step."""
    base_rate: float | None = None
    """Public share of clicks that the last bias begins with."""
    users: int | None = None
    """Most examples of a user, where users are protected; None protects examples."""


_EPOCHS4 = Variant(epochs=4)
_SHORT = Variant(epochs=2, schedule="linear", calibrated=True)
"""What the levers of clipping are tried on, each by itself."""
_SCALED = replace(_SHORT, over="short_scale2", clip_norm=2.0, table_rate=5.0, dense_scale=2.0)
"""The same for optimizers, at a clip norm that suits."""

VARIANTS = {
    "no_privacy": Variant(privacy="none"),
    "no_privacy_epochs4": Variant(privacy="none", epochs=4),
    "clipping": Variant(privacy="clipping"),
    "clipping_epochs4": Variant(privacy="clipping", epochs=4),
    "demo": Variant(),
    "epochs4": _EPOCHS4,
    "epochs16": Variant(epochs=16),
    "batch32k": Variant(batch_size=32_768),
    "batch32k_epochs4": replace(_EPOCHS4, over="epochs4", batch_size=32_768),
    "linear": replace(_EPOCHS4, over="epochs4", schedule="linear"),
    "averaged": replace(_EPOCHS4, over="epochs4", average=0.25),
    "calibrated": replace(_EPOCHS4, over="epochs4", calibrated=True),
    "base_rate": replace(_EPOCHS4, over="epochs4", base_rate=0.25),  # Criteo's published logs
    "users": Variant(over="users", batch_size=256, users=32),
    "users_epochs4": Variant(over="users", epochs=4, batch_size=256, users=32),
    "users_best": Variant(over="users", epochs=16, batch_size=512, users=32, schedule="linear"),
    "short": _SHORT,
    "short_averaged": replace(_SHORT, over="short", average=0.25),
    "short_base_rate": replace(_SHORT, over="short", base_rate=0.25),
    "short_clip3": replace(_SHORT, over="short", clip_norm=3.0, table_rate=10 / 3),
    "short_clip1.5": replace(_SHORT, over="short", clip_norm=1.5, table_rate=20 / 3),
    "short_scale2": replace(_SCALED, over="short"),
    "short_scale4": replace(
        _SCALED, over="short", clip_norm=1.5, table_rate=20 / 3, dense_scale=4.0
    ),
    "short_scale2_averaged": replace(_SCALED, average=0.25),
    "short_automatic": replace(_SCALED, clipping="automatic"),
    "short_quantile": replace(_SCALED, clipping="quantile"),
    "short_quantile_scaled": replace(_SCALED, clipping="quantile_scaled"),
    "short_adam": replace(_SCALED, dense_optimizer="adam", dense_rate=0.05),
    "short_dp_adam": replace(_SCALED, dense_optimizer="dp_adam", dense_rate=0.025),
    "short_momentum": replace(_SCALED, momentum=0.9),
    # The best combination that was found on generator seed 101. Factors of learning rates come on
    # top of those for the larger batch.
    "best": replace(
        _SHORT,
        epochs=8,
        batch_size=16_384,
        clip_norm=1.5,
        table_rate=2.875,  # 46 x sqrt(epsilon) on the demo's data
        rate_exponent=0.5,
        dense_rate=1.06,
        dense_scale=3.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a run is made with but epsilon and seeds. Results of another do not count."""

    privacy: str
    epochs: int
    batch_size: int
    clip_norm: float
    table_optimizer: Literal["sgd", "adagrad", "rowwise_adagrad"]
    table_rate: float
    dense_rate: float
    schedule: str
    average: float | None
    clipping: str
    dense_scale: float
    dense_optimizer: str
    momentum: float
    calibrated: bool
    base_rate: float | None
    users: int | None


# ---- what is trained on -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Batch size, and optimizers with their learning rates. Dense layers have Adagrad."""

    batch_size: int
    table_optimizer: Literal["sgd", "adagrad", "rowwise_adagrad"]
    table_rate: float
    dense_rate: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set and a model."""

    name: str
    data: Callable[[Setting, int | None], ClickData]
    """Makes the data, of a generator's seed if it is synthetic."""
    model: Callable[..., RecommenderModule]
    """Makes the model, from the rows of every feature's table and settings by name."""
    private: Learning
    plain: Learning
    """Without privacy, and with optimizers that noise would not suit."""
    clip_norm: float = 10.0
    epochs: int = 1
    is_synthetic: bool = False
    predicts_clicks: bool = True
    missing: str | None = None
    """Why there is no data, in words."""
    best: Mapping[str, Any] = field(default_factory=dict)
    """What is different of the variant `best` on this data."""

    def setting(self, variant: Variant, target: float | None = None) -> Setting:
        """How a variant is trained to a target epsilon."""
        variant = self._own(variant)
        learning = self.plain if variant.privacy == "none" else self.private
        batch_size = variant.batch_size or learning.batch_size
        growth = 1.0 if variant.users else batch_size / learning.batch_size
        table_growth = growth if learning.table_optimizer == "sgd" else growth**0.5
        return Setting(
            privacy=variant.privacy,
            epochs=variant.epochs or self.epochs,
            batch_size=batch_size,
            clip_norm=variant.clip_norm or self.clip_norm,
            table_optimizer=learning.table_optimizer,
            table_rate=learning.table_rate
            * variant.table_rate
            * table_growth
            * (target or 1.0) ** variant.rate_exponent,
            dense_rate=learning.dense_rate * variant.dense_rate * growth**0.5,
            schedule=variant.schedule,
            average=variant.average,
            clipping=variant.clipping,
            dense_scale=variant.dense_scale,
            dense_optimizer=variant.dense_optimizer,
            momentum=variant.momentum,
            calibrated=variant.calibrated,
            base_rate=variant.base_rate,
            users=variant.users,
        )

    def _own(self, variant: Variant) -> Variant:
        return replace(variant, **self.best) if variant is VARIANTS["best"] else variant

    def why_not(self, variant: Variant) -> str | None:
        """Why this variant cannot be run here, in words; None if it can."""
        variant = self._own(variant)
        if self.missing is not None:
            return self.missing
        if variant.users and self.predicts_clicks:
            return "its clicks belong to no users"
        if (variant.calibrated or variant.base_rate) and not self.predicts_clicks:
            return "it ranks items, and has no clicks to calibrate"
        return None


class HeldData(ClickData):
    """Loaders over data sets that are held in memory, and are the same for many runs."""

    def __init__(self, sets: tuple[ClickDataset, ClickDataset], batch_size: int) -> None:
        super().__init__(batch_size, num_workers=0)
        self.train_set, self.val_set = sets


@lru_cache(maxsize=1)  # one stream is 0.3 GB
def _clicks(examples: int, held_out: int, generator_seed: int) -> tuple[InMemory, InMemory]:
    """Clicks to train on, and the first ones of the day after."""
    train, val = (
        InMemory(
            SyntheticClicks(
                start, stop, ADAFEST_NUM_ROWS, examples_per_day=1_000_000, seed=generator_seed
            )
        )
        for start, stop in ((0, examples), (examples, examples + held_out))
    )
    return train, val


def _synthetic(quick: bool) -> Callable[[Setting, int | None], ClickData]:
    examples, held_out = (8_192, 4_096) if quick else (2_000_000, 204_800)  # 25 batches of 8,192

    def make(setting: Setting, generator_seed: int | None) -> ClickData:
        assert generator_seed is not None
        return HeldData(_clicks(examples, held_out, generator_seed), setting.batch_size)

    return make


def _two_tower(num_rows: list[int], **settings: Any) -> TwoTowerModule:
    return TwoTowerModule(
        num_rows[0],
        embedding_dim=128,
        context_layers=[],
        num_negatives=16,
        temperature=0.1,
        normalize=True,
        **settings,
    )


_dlrm = partial(DLRMModule, embedding_dim=16, dense_arch=[128, 64, 16], over_arch=[128, 64, 1])


def _movielens(folder: Path) -> Task:
    """recipes/two_tower_movielens_lazydp.yaml, and with users what its neighbour says of them."""

    def make(setting: Setting, generator_seed: int | None) -> ClickData:
        data = movielens(
            str(folder), batch_size=setting.batch_size, examples_per_user=setting.users
        )
        data.setup("fit")
        return data

    has_files = any((folder / f"ratings.{end}").is_file() for end in ("csv", "dat"))
    learning = Learning(batch_size=8_192, table_optimizer="sgd", table_rate=200.0, dense_rate=0.01)
    return Task(
        name="movielens",
        data=make,
        model=_two_tower,
        private=learning,
        plain=learning,
        clip_norm=1.0,
        epochs=2,
        predicts_clicks=False,
        best={
            "calibrated": False,
            "clip_norm": 1.0,
            "table_rate": 3.0,
            "dense_rate": 1.0,
            "rate_exponent": 0.0,
        },
        missing=None if has_files else f"no ratings.csv or ratings.dat in {str(folder)!r}",
    )


def _criteo(folder: Path | None) -> Task:
    """The demo's model on Criteo's logs. Its learning rates are the demo's, for smaller batches."""

    def make(setting: Setting, generator_seed: int | None) -> ClickData:
        train, val = Part(path=str(folder), stop=0.857), Part(path=str(folder), start=0.857)
        data = CriteoData([train], [val], [val], batch_size=setting.batch_size)
        data.setup("fit")
        return data

    missing = None
    if folder is None or not (folder / META_FILE).is_file():
        missing = "no folder that `lightning-dpsparse prepare criteo` wrote: name it by --criteo"
    return Task(
        name="criteo",
        data=make,
        model=_dlrm,
        private=Learning(batch_size=2_048, table_optimizer="sgd", table_rate=2.0, dense_rate=0.01),
        plain=_PLAIN,
        missing=missing,
        best={"batch_size": 4_096, "table_rate": 6.0, "dense_rate": 2.0},  # of 64,000 lines
    )


_PLAIN = Learning(
    batch_size=2_048, table_optimizer="rowwise_adagrad", table_rate=0.05, dense_rate=0.01
)
"""As in recipes/dlrm_synthetic.yaml and recipes/dlrm_criteo_kaggle.yaml."""


def tasks(options: argparse.Namespace) -> dict[str, Task]:
    """All data sets. A quick one is another data set, and has another name in the results."""
    quick, batch = options.quick, 512 if options.quick else 8_192
    suffix = "-quick" if quick else ""
    found = [
        Task(  # recipes/dlrm_lazydp.yaml
            name=f"demo{suffix}",
            data=_synthetic(quick),
            model=_dlrm,
            private=Learning(
                batch_size=batch, table_optimizer="sgd", table_rate=8.0, dense_rate=0.02
            ),
            plain=_PLAIN,
            is_synthetic=True,
            best={"batch_size": 2 * batch},
        ),
        Task(  # recipes/pctr_adafest.yaml
            name=f"pctr{suffix}",
            data=_synthetic(quick),
            model=partial(PCTRModule, hidden=[128, 64]),
            private=Learning(
                batch_size=2 * batch, table_optimizer="sgd", table_rate=16.0, dense_rate=0.02
            ),
            plain=_PLAIN,
            is_synthetic=True,
            best={"batch_size": 2 * batch},
        ),
        _movielens(options.movielens),
        _criteo(options.criteo),
    ]
    return {task.name.removesuffix(suffix): task for task in found}
