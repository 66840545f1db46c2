"""Lightning's private attributes: everything that this package replaces in a trainer.

Lightning has no public way to choose a checkpoint once the ranks know each other, and none to
change what a signal does. A new version may rename any of these: a missing one is refused, with the
installed versions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_dpsparse.plugin.stopping import OrderlySignals, Stop
from lightning_dpsparse.sharded.upstream import required

Choose = Callable[[str | Path | None], str | Path | None]


def choose_what_is_restored(trainer: Trainer, choose: Choose) -> None:
    """Have the next restoring of a trainer begin from what `choose` makes of its `ckpt_path`."""
    connector = required(trainer, "_checkpoint_connector")
    restore = required(connector, "_restore_modules_and_callbacks")

    def restore_chosen(path: str | Path | None = None, *args: Any) -> None:
        del connector._restore_modules_and_callbacks  # the class's own is back
        restore(choose(path), *args)

    connector._restore_modules_and_callbacks = restore_chosen


def replace_signal_handlers(trainer: Trainer) -> Stop:
    """Have signals leave a note from now on, and return where the notes are."""
    signals = required(trainer, "_signal_connector")
    if not isinstance(signals, OrderlySignals):
        signals = trainer._signal_connector = OrderlySignals(trainer)
        # Lightning has every rank wait for rank 0 before each batch, to hear of its signals.
        required(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return signals.stop
