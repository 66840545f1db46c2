"""How a rank that fails takes the others along.

Ranks meet in collectives, and a rank that has failed never comes. With gloo the others notice when
its process has ended, with NCCL when a timeout has passed, and neither says why. So a rank that
fails leaves word in the store through which the ranks found each other, before it does anything
else. A thread of every other rank looks there twice a second. It gives its own rank some seconds to
notice and to end in order, and then ends the process: by then nothing else could.

The same thread hears of SIGTERM while the main thread waits in a collective and hears nothing. If
the ranks have not stopped in order some time later, because one of them hangs, it ends them too.

Nothing is lost by that: what was charged is on disk before a step begins, and a checkpoint has its
name when it is whole.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

_PERIOD = 0.5
"""Seconds between two looks into the store."""
_GRACE = 5.0
"""Seconds that a rank has to end in order when another one has failed."""
_MEETING = 2.0
"""Seconds that a rank waits for the others after an error, to do something together."""
_SIGTERM_GRACE = 30.0
"""Seconds that all ranks have to stop in order after SIGTERM, if they are not saving."""
_EXIT_CODE = 1
_CONNECTION_LOST = (
    "Connection closed", "Connection reset", "Broken pipe", "Socket Timeout", "Timed out waiting",
)  # fmt: skip

T = TypeVar("T")

_sessions = 0
"""Number of sessions that this process has had: all ranks count alike."""


@dataclass(frozen=True)
class Failure:
    """What a rank said when it failed."""

    rank: int
    words: str


class Peers:
    """Watches over the other ranks, from `start` to `stop`; nothing to do for one rank alone."""

    def __init__(self) -> None:
        global _sessions
        _sessions += 1
        self._prefix = f"lightning_dpsparse/{_sessions}"
        self._key = f"{self._prefix}/failure"
        self._store: dist.Store | None = None
        self._leaving = threading.Event()
        """Set when this rank's main thread is on its way out, or has ended its work."""
        self._first: Failure | None = None
        """What the first rank that failed said, once this rank knows."""
        self._signals: _SignalPipe | None = None
        self._thread: threading.Thread | None = None
        self.is_saving = False
        """Whether something goes on that takes long and must not be cut short."""

    def start(self) -> None:
        """Begin to watch. The process group has been joined. In the main thread."""
        if dist.get_world_size() > 1:
            # A connection of its own: the main thread may be waiting at the other one.
            self._store = _get_default_store().clone()  # type: ignore[attr-defined]
            self._signals = _SignalPipe()
            self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """All ranks have come to the end, or this one is on its way out."""
        self._leaving.set()
        if self._thread is not None and self._signals is not None:
            self._thread.join(_PERIOD)
            self._signals.close()
            self._thread = self._signals = self._store = None

    def _watch(self) -> None:
        assert self._signals is not None
        told_at: float | None = None
        while not self._leaving.wait(_PERIOD):
            if self._signals.has_seen(signal.SIGTERM):
                told_at = told_at or time.monotonic()
            is_late = told_at is not None and time.monotonic() - told_at > _SIGTERM_GRACE
            if is_late and not self.is_saving:
                self._tell("SIGTERM came, and not all ranks have stopped in time")
            # What is seen is kept: the store goes with the process that holds it.
            self._first = self._first or self._look()
            if self._first is not None and not self._leaving.wait(_GRACE):
                _say(f"ends, because rank {self._first.rank} has failed: {self._first.words}")
                sys.stdout.flush()
                os._exit(_EXIT_CODE)

    def _look(self) -> Failure | None:
        """What the first rank that failed said; None if none has, or if the store is gone."""
        if self._store is None:
            return None
        try:
            if not self._store.check([self._key]):
                return None
            rank, _, words = self._store.get(self._key).decode().partition(" ")
        except RuntimeError:
            self._store = None
            return None
        return Failure(int(rank), words)

    # ---- a rank has failed ----------------------------------------------------------------------

    def announce(self, error: BaseException) -> bool:
        """Tell all ranks that this one is ending with an error, and show it before anything else.

        Returns whether it is an error of this rank's own. Otherwise the rank has only lost its
        connection to one that ended before, and says whose fault it is.
        """
        self._leaving.set()
        if self._thread is None:
            return True
        if _is_connection_lost(error):
            first = self._first or _in_time(self._look, 1.0)
            if first is not None:
                _say(f"ends, because rank {first.rank} has failed: {first.words}")
            else:
                _say(
                    "ends, because it has lost the connection to another rank, which said nothing: "
                    "it was killed, perhaps, or the network is cut."
                )
            return False
        _say("has failed:\n" + "".join(traceback.format_exception(error)))
        _in_time(lambda: self._tell(f"{type(error).__name__}: {error}"), 1.0)
        return True

    def _tell(self, words: str) -> None:
        """Leave word that this rank has failed, unless another one has failed before it."""
        self._first = self._first or Failure(dist.get_rank(), words)
        if self._store is not None:
            with suppress(RuntimeError):  # nobody is left to be told
                self._store.compare_set(self._key, "", f"{dist.get_rank()} {words}")

    def all_are_here(self) -> bool:
        """Whether all ranks have come to this point within some seconds, each in the same state.

        Asked before something is done together after an error. Ranks are in the same state if they
        have taken part in the same number of collectives: otherwise the next one would never end.
        """
        return self._thread is None or bool(_in_time(self._meet, _MEETING + 1.0))

    def _meet(self) -> bool:
        if self._store is None:
            return False
        rank, world_size = dist.get_rank(), dist.get_world_size()
        keys = [f"{self._prefix}/here/{other}" for other in range(world_size)]
        count = _get_default_group()._get_sequence_number_for_group()  # type: ignore[attr-defined]
        try:
            self._store.set(keys[rank], str(count))
            self._store.wait(keys, timedelta(seconds=_MEETING))
            return len({bytes(self._store.get(key)) for key in keys}) == 1
        except RuntimeError:
            return False


class _SignalPipe:
    """Hears of signals at once, whatever the main thread is doing. Made in the main thread."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_set = threading.current_thread() is threading.main_thread()
        if self._is_set:
            before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
            if before != -1:  # somebody else listens, an event loop, say: leave it to them
                signal.set_wakeup_fd(before)
                self._is_set = False

    def has_seen(self, signum: int) -> bool:
        """Whether a signal has come since the last call."""
        try:
            return signum in os.read(self._out, 64)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Stop listening."""
        if self._is_set:
            signal.set_wakeup_fd(-1)
        os.close(self._in)
        os.close(self._out)


def _in_time(act: Callable[[], T], seconds: float) -> T | None:
    """What comes of an act, or None if it takes longer: a cut network says nothing."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _is_connection_lost(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloo and any(words in str(error) for words in _CONNECTION_LOST)


def _say(words: str) -> None:
    """Write to the terminal at once, in one piece."""
    sys.stderr.write(f"[rank {dist.get_rank()}] {words.rstrip()}\n")
    sys.stderr.flush()
