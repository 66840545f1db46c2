"""Training that begins with weights from public data.

What public data has taught costs no privacy, and far less is left to learn from private data. The
weights come from a file. Their history comes with them (`history`), so that weights which this
private data went into are refused as public ones.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_dpsparse.plugin.history import history_in, history_of, keep_history
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint import load_whole_state
from lightning_dpsparse.sharded.whole_files import read_whole, weights_in


class PublicWeights(Callback):
    """Loads weights before the first step of `fit`, sharded tables included.

    Nothing is charged for them: the report lists the data behind them as not covered. Where
    training is resumed from a checkpoint, the checkpoint's weights count.

    Args:
        path: A `.safetensors` file, or a file of `torch.save`: a state dict, or a Lightning
            checkpoint in one file. Nothing but plain values is read from it.
        into: Path of the submodule that the file holds; by default it holds the whole module.
        fresh: Patterns (as in a shell) of weights that keep their initial values, whether the file
            lacks them or has others, of whatever shape: `["head.*"]`, say.
    """

    def __init__(self, path: str, into: str = "", fresh: list[str] | None = None) -> None:
        self.path, self.into, self.fresh = Path(path), into, fresh or []
        self._is_loaded = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = getattr(trainer.strategy, "private_run", None)
        if isinstance(run, PrivateRun):
            run.evidence.declare_public(
                f"The data behind the weights of {self.path.name!r}, taken to be public."
            )
        if self._is_loaded:  # fit, and fit again: what was learned stays
            return
        found = self._read()
        history = history_in(found)
        if isinstance(run, PrivateRun):
            run.evidence.take_as_public(history, self.path.name)
        keep_history(pl_module, (*history_of(pl_module), *history))
        prefix = f"{self.into}." if self.into else ""
        state = {
            f"{prefix}{key}": value
            for key, value in weights_in(found, self.path).items()
            if not self._is_fresh(key)
        }
        self._check(state, pl_module.state_dict(), prefix)
        load_whole_state(pl_module, state)
        self._is_loaded = True

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise Refused(
                f"Expected a file of weights, found none at {str(self.path)!r}. Save a state dict "
                "there with torch.save; for a sharded checkpoint use `lightning-dpsparse "
                "consolidate`."
            )
        return read_whole(self.path)

    def _is_fresh(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.fresh)

    def _check(self, state: dict[str, Tensor], mine: dict[str, Any], prefix: str) -> None:
        unknown = [key for key in state if key not in mine]
        lacking = [
            key
            for key in mine
            if key.startswith(prefix)
            and key not in state
            and not self._is_fresh(key.removeprefix(prefix))
        ]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        misshapen = [k for k, v in tensors.items() if k in mine and mine[k].size() != v.size()]
        unusable = [key for key, value in tensors.items() if not value.isfinite().all()]
        for keys, fault, remedy in (
            (unknown, "has weights that the model has not", "Set `into`, or rename them"),
            (lacking, "lacks weights of the model", "Name what starts anew in `fresh`"),
            (misshapen, "has weights of other shapes", "Build the model that they were saved from"),
            (unusable, "has weights that are infinite or no number", "Save them before they grew"),
        ):
            if keys:
                raise Refused(
                    f"Expected {str(self.path)!r} to fit {prefix[:-1] or 'the model'!r}, found "
                    f"that it {fault}: {sorted(keys)}. {remedy}."
                )
