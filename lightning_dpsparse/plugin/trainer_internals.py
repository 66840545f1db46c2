"""Lightning's private attributes: everything that this package replaces in a trainer.

Lightning has no public way to choose a checkpoint once the ranks know each other, and none to
change what a signal does. A new version may rename any of these: a missing one is refused, with the
installed versions.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_dpsparse.plugin.stopping import OrderlySignals, Stop
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.upstream import required

_READERS = (
    "fbgemm_gpu", "lightning", "lightning_dpsparse", "packaging", "torch", "torchmetrics",
    "torchrec",
)  # fmt: skip
"""Packages that take values from a checkpoint."""

Choose = Callable[[str | Path | None], str | Path | None]


def choose_what_is_restored(trainer: Trainer, choose: Choose) -> None:
    """Have the next restoring of a trainer begin from what `choose` makes of its `ckpt_path`."""
    connector = required(trainer, "_checkpoint_connector")
    restore = required(connector, "_restore_modules_and_callbacks")

    def restore_chosen(path: str | Path | None = None, *args: Any) -> None:
        connector._restore_modules_and_callbacks = restore
        restore(choose(path), *args)

    connector._restore_modules_and_callbacks = restore_chosen


def explain_failed_restoring(trainer: Trainer) -> None:
    """Have restoring end in words if a checkpoint holds what Lightning and torch do not expect.

    A checkpoint may be whole and still not be what this trainer would have written: somebody made
    it, or it comes from another program. Errors of the user's own hooks stay as they are.
    """
    connector = required(trainer, "_checkpoint_connector")
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        setattr(connector, name, _explained(required(connector, name)))


def _explained(restore: Callable[..., None]) -> Callable[..., None]:
    if hasattr(restore, "__wrapped__"):
        return restore

    @wraps(restore)
    def restore_or_refuse(*args: Any) -> None:
        try:
            restore(*args)
        except (Refused, OSError):
            raise
        except Exception as error:
            if not _is_of_library(error):
                raise
            raise Refused(
                "Expected a checkpoint that this trainer can go on from, found one that it cannot "
                f"restore ({type(error).__name__}: {error}). Take one that a run of the same code "
                "saved, or load its weights alone."
            ) from error

    return restore_or_refuse


def begin_next_epoch(trainer: Trainer) -> None:
    """Have a run that goes on after the last batch of an epoch begin the next one.

    Lightning 2.6 counts the old epoch as done then, and not the new one as begun. A checkpoint of
    the new epoch says that none is under way, and whoever goes on from it takes all of its batches
    again.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    if required(loop, "restarted_mid_epoch") and epochs.ready == epochs.completed:
        loop.reset_restart_stage()


def _is_of_library(error: Exception) -> bool:
    """Whether an error was raised in code that reads a checkpoint for everybody."""
    frames = list(traceback.walk_tb(error.__traceback__))
    package = frames[-1][0].f_globals.get("__name__", "").partition(".")[0]
    return package in _READERS


def is_last_step(trainer: Trainer) -> bool:
    """Whether the step that is being taken is the last one, whatever callbacks say.

    Lightning counts the step once it is over. A time limit may end training earlier.
    """
    loop = trainer.fit_loop
    most_steps, most_epochs = loop.epoch_loop.max_steps, loop.max_epochs
    if most_steps != -1 and trainer.global_step + 1 >= most_steps:
        return True
    is_last_epoch = most_epochs not in (None, -1) and trainer.current_epoch + 1 >= most_epochs
    return is_last_epoch and trainer.is_last_batch


def before_training_ends(trainer: Trainer, act: Callable[[], None]) -> None:
    """Have `act` called when the last batch of a fit is over, before any `on_train_end`.

    Callbacks hear of the end before the strategy does, and would write a report too early.
    """
    loop = trainer.fit_loop
    vars(loop).pop("on_run_end", None)  # of a fit that ended in an error
    end = required(loop, "on_run_end")

    def act_and_end() -> None:
        vars(loop).pop("on_run_end", None)
        act()
        end()

    loop.on_run_end = act_and_end  # type: ignore[method-assign]


def replace_signal_handlers(trainer: Trainer) -> Stop:
    """Have signals leave a note from now on, and return where the notes are."""
    signals = required(trainer, "_signal_connector")
    if not isinstance(signals, OrderlySignals):
        signals = trainer._signal_connector = OrderlySignals(trainer)
        # Lightning has every rank wait for rank 0 before each batch, to hear of its signals.
        required(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return signals.stop
