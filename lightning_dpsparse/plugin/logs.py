"""Which values were logged, and whether the report must list them.

A value that is made of training data and logged without noise is a release that nobody charges.
Its name says nothing: a training loss may be called `val_loss`, or `rows_updated`. So everything
that reaches Lightning's results or a logger while training data is in use is noted, and the report
lists it. Only what this package itself makes of released quantities is exempt: it is logged inside
`Logs.ours`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import Logger

_RELAYS = "logger_connector"
"""The module of Lightning that passes results on to loggers: they have been noted as results."""
_RATES = "lr_monitor"
"""The module of Lightning that logs learning rates, as the optimizers have them."""


class Logs:
    """Watches what one run logs, from `open` to `close`.

    Ranks without a logger see what reaches Lightning's results.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._in_training: dict[str, None] = {}
        self._known: set[str] = set()
        self._sent: dict[str, None] = {}
        self._is_ours = False
        self._undo: list[Callable[[], None]] = []
        self._watches_validation = False

    def open(self) -> None:
        """Begin to watch: training is about to start."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._watch_results(epoch_loop._results, lambda: True)
        self._watch_results(epoch_loop.val_loop._results, lambda: self._watches_validation)
        for logger in self._trainer.loggers:
            self._watch_logger(logger)

    def watch_validation(self) -> None:
        """Validation reads training data: note what it logs, too."""
        self._watches_validation = True

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Around what is made of released quantities alone, by this package."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before

    def is_from_training(self, name: str) -> bool:
        """Whether a metric, under Lightning's name for it, was logged by training."""
        return not {name, _base(name)}.isdisjoint(self._in_training)

    def taints(self) -> list[str]:
        """What the report must say of metrics: those that were logged, and those that decided."""
        found = []
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, EarlyStopping):
                whose = self._whose(callback.monitor)
                found.append(f"Training may have been stopped early by a metric of {whose} data.")
        timed = any(isinstance(callback, (EarlyStopping, Timer)) for callback in callbacks)
        if self._trainer.should_stop and not timed:
            found.append(
                "Training was stopped before its planned end. If training data decided when, that "
                "is not accounted for."
            )
        for saver in self._trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint) and saver.monitor:
                whose = self._whose(saver.monitor)
                found.append(f"The checkpoint may have been chosen by a metric of {whose} data.")
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.monitor:
                whose = self._whose(config.monitor)
                found.append(f"The learning rate followed a metric of {whose} data.")
        self._note_written()
        if self._in_training:
            found.append(f"Logged without noise: {', '.join(sorted(self._in_training))}.")
        if self._sent:
            found.append(
                f"Sent to a logger by code other than this package's: {', '.join(self._sent)}."
            )
        return found

    def _whose(self, name: str | None) -> str:
        return "training" if name and self.is_from_training(name) else "validation"

    def close(self) -> None:
        """Stop watching: leave Lightning's results and loggers as they were."""
        for undo in self._undo:
            undo()
        self._undo = []

    # ---- where values pass ----------------------------------------------------------------------

    def _watch_results(self, results: Any, is_private: Callable[[], bool]) -> None:
        log = results.log

        def noted(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
            self._known.add(name)
            if is_private() and not self._is_ours:
                self._in_training[name] = None
            log(fx, name, *args, **kwargs)

        results.log = noted
        self._undo.append(lambda: delattr(results, "log"))

    def _note_written(self) -> None:
        """Note metrics that were written into Lightning's results without a call of `log`."""
        rates: set[str] = set()
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateMonitor):
                rates |= {*callback.lrs, *callback.last_momentum_values}
                rates |= {*callback.last_weight_decay_values}
        for shown in (self._trainer.callback_metrics, self._trainer.progress_bar_metrics):
            for name in shown:
                if {name, _base(name)}.isdisjoint(self._known | rates):
                    self._in_training[name] = None

    def _watch_logger(self, logger: Logger) -> None:
        kind, watch = type(logger), self

        def watched(name: str) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                watch._note_sent(name, args, kwargs)
                return getattr(super(Watched, self), name)(*args, **kwargs)

            return method

        class Watched(kind):  # type: ignore[misc, valid-type]
            @property
            def experiment(self) -> Any:
                watch._note_sent("experiment", (), {})
                return super().experiment

        for name in dir(kind):
            if name.startswith("log_") and callable(getattr(kind, name, None)):
                setattr(Watched, name, watched(name))
        Watched.__name__, Watched.__qualname__ = kind.__name__, kind.__qualname__
        logger.__class__ = Watched
        self._undo.append(lambda: setattr(logger, "__class__", kind))

    def _note_sent(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_ours or not self._trainer.training or _caller() in (_RELAYS, _RATES):
            return
        if method == "experiment":
            if not _is_called_by_lightning():
                self._sent["through the logger's experiment"] = None
            return
        if method != "log_metrics":
            self._sent[f"{method}(...)"] = None
            return
        metrics = kwargs.get("metrics", args[0] if args else {})
        self._sent |= dict.fromkeys(str(name) for name in metrics)


def _base(name: str) -> str:
    """The name that a metric was logged by, of the longer one that Lightning gave it."""
    return name.split("/dataloader_idx_")[0].removesuffix("_step").removesuffix("_epoch")


def _frames() -> Iterator[str]:
    """Modules of the functions that led here, from the innermost outside this file on."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__:
            yield name
        frame = frame.f_back


def _caller() -> str:
    """Last part of the module that sends; wrappers of Lightning's utilities are looked through."""
    for name in _frames():
        if "utilities" not in name and not name.startswith(("contextlib", "functools")):
            return name.rpartition(".")[2]
    return ""


def _is_called_by_lightning() -> bool:
    return next(_frames(), "").startswith("lightning.")
