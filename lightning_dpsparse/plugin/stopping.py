"""Signals end a step, not a line of code: all ranks stop together, between two steps.

A scheduler that wants its machine back sends SIGTERM, to one rank or to all. A person presses
Ctrl+C. If a rank stopped where it happens to be, the others would wait for it in a collective, and
a checkpoint could not be saved, which takes all ranks. So a signal only leaves a note. Between two
batches the ranks ask each other whether one of them has such a note (`Stop.between_batches`), and
then all of them stop at the same point: with SIGTERM's exit code, with a KeyboardInterrupt, or, if
SLURM wants to put the job back into its queue, with a checkpoint.

Asking takes a small all-reduce. It is made about twice a second, or every 16 batches if these take
longer than they did. A second Ctrl+C is not waited for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_dpsparse.sharded.process_group import largest_over_ranks

_NOTHING, _REQUEUE, _TERMINATE, _INTERRUPT = range(4)
_PERIOD = 0.5
"""Seconds between two questions, about."""
_MOST_BATCHES = 16
"""Most batches between two questions: they may take longer than those before them did."""
_EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended. Launchers start such a job again."""


class Stop:
    """What this rank was asked to do, and what all ranks have agreed on.

    Args:
        requeue: Saves a checkpoint and has SLURM start the job again; all ranks call it together.
        is_alone: Whether there is one rank only, which need not wait for anybody's answer.
    """

    def __init__(self, requeue: Callable[[], None], *, is_alone: bool) -> None:
        self._requeue, self._is_alone = requeue, is_alone
        self._asked = _NOTHING
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.is_agreed = False
        """Whether all ranks have agreed to stop, and are doing so."""
        self._phase = ""
        self._until_question = 0
        """Number of batches until the ranks ask each other again. It is the same on all ranks."""
        self._batches = 0
        """Number of batches since the last question."""
        self._last_question = time.monotonic()

    def ask(self, what: int) -> None:
        """Leave a note. Called in a signal handler: it does nothing else."""
        self._asked = max(self._asked, what)

    def between_batches(self, phase: str) -> None:
        """Ask the other ranks, if it is time to, and stop if any of them was asked to.

        The batches of another phase may take longer, so that its first one always asks.
        """
        self._batches += 1
        if self._batches <= self._until_question and phase == self._phase:
            return
        elapsed = time.monotonic() - self._last_question
        asked, each = largest_over_ranks([float(self._asked), elapsed / self._batches])
        # The slowest rank's batches decide, so that all ranks come to the same number.
        if not self._is_alone:
            self._until_question = min(int(_PERIOD / max(each, 1e-4)), _MOST_BATCHES)
        self._last_question, self._batches, self._phase = time.monotonic(), 0, phase
        self._act(int(asked))

    def _act(self, asked: int) -> None:
        if asked == _NOTHING:
            return
        self._asked = _NOTHING
        if asked == _REQUEUE:
            self._requeue()
            return
        self.is_agreed = True
        if asked == _TERMINATE:
            rank_zero_info("Training ends between two steps, on all ranks, because of SIGTERM.")
            raise SIGTERMException(_EXIT_CODE)
        if asked == _INTERRUPT:
            raise KeyboardInterrupt


class OrderlySignals(_SignalConnector):
    """Lightning's signal handlers, which leave a note and do nothing else.

    (Lightning's own broadcasts from inside the handler of one rank, where no other rank listens.)
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.stop = Stop(self._requeue, is_alone=trainer.world_size == 1)
        self._process = os.getpid()

    @override
    def register_signal_handlers(self) -> None:
        super().register_signal_handlers()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._register_signal(signal.SIGINT, self._interrupt)

    @override
    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        if os.getpid() != self._process:  # a child that was forked ends as it should
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)  # the ranks that this process has started
        self.stop.ask(_TERMINATE)

    @override
    def _slurm_sigusr_handler_fn(self, signum: Any, frame: Any) -> None:
        self.stop.ask(_REQUEUE)

    def _requeue(self) -> None:
        super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]

    def _interrupt(self, signum: Any, frame: Any) -> None:
        # Whoever presses Ctrl+C again does not want to wait.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getpid() != self._process:
            raise KeyboardInterrupt
        self.stop.ask(_INTERRUPT)
