"""Ranks that stop together, and fail together.

A strategy with several ranks must not leave one of them waiting. Signals stop all ranks between two
batches (`stopping`). A rank that fails tells the others (`sharded.peers`). And what takes all ranks
(a checkpoint on an exception, say) is done after an error only if all of them have come to the same
point; otherwise this rank is *alone*, and everything that would wait for others returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_dpsparse.plugin.sharded_strategy import ShardedStrategy
from lightning_dpsparse.plugin.stopping import Stop
from lightning_dpsparse.plugin.trainer_internals import replace_signal_handlers
from lightning_dpsparse.sharded.peers import Peers


class RanksTogether(ShardedStrategy):
    """Sharded training in which no rank waits for one that has failed or was told to stop."""

    _peers: Peers | None = None
    _stop: Stop | None = None
    _is_alone = False
    """Whether this rank is ending with an error that the others do not share."""

    # ---- the beginning and the end --------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.module.trainer
        self._is_alone = False
        self._stop = replace_signal_handlers(trainer)
        self._stop.begin()
        self._peers = Peers()
        self._peers.start()
        trainer.callbacks.insert(0, _ExceptionNotice(self))  # type: ignore[attr-defined]

    @override
    def teardown(self) -> None:
        if self._peers is not None:  # it is None where ranks were only started from, in Python
            self._peers.stop()
            callbacks = self.module.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [c for c in callbacks if not isinstance(c, _ExceptionNotice)]
        super().teardown()

    def note_exception(self, exception: BaseException) -> None:
        """An exception ends the run on this rank. Called before anybody else hears of it."""
        assert self._stop is not None
        assert self._peers is not None
        if self._stop.is_agreed:
            self._peers.stop()
            return
        self._is_alone = not (self._peers.announce(exception) and self._peers.all_are_here())

    @contextmanager
    def taking_long(self) -> Iterator[None]:
        """Around what must not be cut short when ranks were told to stop: saving, say."""
        assert self._peers is not None
        self._peers.is_saving = True
        try:
            yield
        finally:
            self._peers.is_saving = False

    # ---- between two batches --------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._between_batches("training")

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._between_batches("validation")
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._between_batches("test")
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._between_batches("predict")
        return super().predict_step(*args, **kwargs)

    def _between_batches(self, phase: str) -> None:
        assert self._stop is not None
        self._stop.between_batches(phase)

    # ---- what waits for the other ranks ---------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_alone:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._is_alone else super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if self._is_alone else super().reduce(tensor, *args, **kwargs)


class _ExceptionNotice(Callback):
    """Hears of an exception first, because it stands first among the callbacks."""

    def __init__(self, strategy: RanksTogether) -> None:
        self._strategy = strategy

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._strategy.note_exception(exception)
