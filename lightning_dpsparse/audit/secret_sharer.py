"""Secret sharer: how well does a model remember examples that it saw a few times?

Random examples (canaries) are put into the training data, each a number of times. After training,
the exposure of a canary says, in bits, how far its loss stands out from the losses of random
examples that were not in the data (`exposure.py`; Carlini et al. 2019). Exposure is no bound on
epsilon: `one_run.py` measures that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dpsparse.audit.canaries import (
    MOST_CANARIES,
    auditable,
    insert_canaries,
    mark_as_audited,
)
from lightning_dpsparse.audit.example_losses import losses_on_examples
from lightning_dpsparse.audit.exposure import exposure_by_fit, exposure_by_rank
from lightning_dpsparse.checks import check_path, check_whole, check_whole_list, shown
from lightning_dpsparse.data.batch import Clicks, select
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report import add_exposures

REPEATS = (1, 2, 3, 4, 5, 10, 20, 50, 100)
"""How often canaries occur in the data: the numbers of the EANA paper (Ning et al. 2022)."""

JSON_NAME, PLOT_NAME = "secret_sharer.json", "secret_sharer.png"

# C canaries, R references


@dataclass(frozen=True)
class Exposure:
    """Exposure in bits of the canaries that occur equally often.

    `interpolation` and `extrapolation` are means, by rank and by fit; `low` and `high` are the
    quartiles by rank.
    """

    repeats: int
    canaries: int
    interpolation: float
    extrapolation: float
    low: float
    high: float


def exposures(
    repeats_C: NDArray[np.int64],
    canary_C: NDArray[np.float64],
    reference_R: NDArray[np.float64],
) -> list[Exposure]:
    """The exposure for each number of repeats, from the losses of canaries and of references."""
    if not (np.isfinite(canary_C).all() and np.isfinite(reference_R).all()):
        raise Refused(
            "Expected a finite loss on every canary and reference, found others: the model has "
            "diverged. Lower the learning rate."
        )
    by_rank_C = exposure_by_rank(canary_C, reference_R)
    by_fit_C = exposure_by_fit(canary_C, reference_R)
    found = []
    for repeats in np.unique(repeats_C).tolist():
        here_C = repeats_C == repeats
        low, high = np.quantile(by_rank_C[here_C], [0.25, 0.75])
        found.append(
            Exposure(
                repeats,
                int(here_C.sum()),
                float(by_rank_C[here_C].mean()),
                float(by_fit_C[here_C].mean()),
                float(low),
                float(high),
            )
        )
    return found


class SecretSharer(Callback):
    """Puts random examples into the training data, and measures how well the model remembers them.

    After training it prints the mean exposure for every number of repeats, writes
    `secret_sharer.json` and `.png` (where matplotlib is installed) beside the run's logs, and adds
    the exposures to the privacy report, if there is one. A model that was trained with canaries is
    for study: they are in the data, and cost utility.

    Args:
        repeats: How often canaries occur in the data.
        canaries_per_repeat: How many canaries there are for each number of repeats.
        references: Random examples that are not put in, to compare with.
        seed: Seed of canaries and references. The seed of training does not change them.
        folder: Where the files are written. By default beside the logs of the run.
    """

    def __init__(
        self,
        repeats: list[int] = list(REPEATS),  # noqa: B006 (never written to)
        canaries_per_repeat: int = 50,
        references: int = 16384,
        seed: int = 0,
        folder: str | None = None,
    ) -> None:
        check_whole_list("repeats", repeats, remedy="Give a list of numbers of copies.")
        if not repeats:
            raise Refused("Expected at least one number of repeats, found none. Give a list.")
        check_whole("canaries_per_repeat", canaries_per_repeat, most=MOST_CANARIES)
        check_whole("references", references, 2, MOST_CANARIES)
        check_whole("seed", seed, 0)
        if folder is not None:
            check_path("folder", folder)
        if sum(repeats) * canaries_per_repeat > MOST_CANARIES:
            raise Refused(
                f"Expected at most {MOST_CANARIES:,} copies of canaries in all, found "
                f"{canaries_per_repeat:,} canaries for each of repeats {shown(repeats)}. Lower "
                "one of them."
            )
        self.repeats_C = np.repeat(np.array(sorted(repeats)), canaries_per_repeat)
        self.references, self.seed, self.folder = references, seed, folder
        self.found: list[Exposure] = []
        self._examples: tuple[Clicks, Clicks] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data = auditable(trainer.datamodule)  # type: ignore[attr-defined]
        count = len(self.repeats_C)
        # Canaries and references are drawn alike, so that they differ by the insertion only.
        examples = data.train_set.random_examples(count + self.references, self.seed)
        self._examples = _halves(examples, count)
        insert_canaries(data, self._examples[0], np.repeat(np.arange(count), self.repeats_C))
        mark_as_audited(trainer.strategy)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data, device = auditable(trainer.datamodule), trainer.strategy.root_device  # type: ignore[attr-defined]
        assert self._examples is not None
        canary_C, reference_R = (
            losses_on_examples(pl_module, data, device, e) for e in self._examples
        )
        self.found = exposures(self.repeats_C, canary_C, reference_R)
        run = getattr(trainer.strategy, "private_run", None)
        own = trainer.log_dir or trainer.default_root_dir if run is None else run.folder
        folder = Path(self.folder or own)
        if trainer.is_global_zero:
            write_exposures(self.found, folder)
        rank_zero_info(show_exposures(self.found))


def _halves(examples: Clicks, count: int) -> tuple[Clicks, Clicks]:
    index = np.arange(len(examples.labels_B))
    return select(examples, index[:count]), select(examples, index[count:])


def show_exposures(found: list[Exposure]) -> str:
    """The exposures as a table of text."""
    lines = ["Exposure of canaries, in bits (random examples have about 1.4):"]
    lines.append("repeats  canaries  by rank  by fit")
    for e in found:
        lines.append(
            f"{e.repeats:7,}  {e.canaries:8,}  {e.interpolation:7.2f}  {e.extrapolation:6.2f}"
        )
    return "\n".join(lines)


def write_exposures(found: list[Exposure], folder: Path) -> None:
    """Write exposures as JSON and as a plot, and add them to the privacy report if there is one.

    The plot is left out where matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data: list[dict[str, Any]] = [asdict(exposure) for exposure in found]
    (folder / JSON_NAME).write_text(json.dumps(data, indent=2) + "\n")
    add_exposures(folder, data)
    try:
        import matplotlib
    except ImportError:
        rank_zero_info(f"{PLOT_NAME} was not drawn: matplotlib is not installed.")
        return
    matplotlib.use("Agg", force=False)
    plot_exposures({"this run": found}, folder / PLOT_NAME)


def plot_exposures(runs: dict[str, list[Exposure]], path: Path) -> None:
    """Plot exposure over repeats, by rank and by fit, as Figure 5 of the EANA paper does."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for name, found in runs.items():
        repeats = [e.repeats for e in found]
        axes[0].plot(repeats, [e.interpolation for e in found], marker="o", label=name)
        axes[0].fill_between(repeats, [e.low for e in found], [e.high for e in found], alpha=0.12)
        axes[1].plot(repeats, [e.extrapolation for e in found], marker="o", label=name)
    for axis, title in zip(axes, ("interpolation", "extrapolation")):
        axis.set(xscale="log", xlabel="times in the data", ylabel="exposure (bits)", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
