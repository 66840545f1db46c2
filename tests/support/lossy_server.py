"""The process behind a `LossyDisk`: answers the kernel, and takes orders of the test in between.

An order is done before its answer is sent, and no request of the kernel is served meanwhile. So a
cut is an instant: what was answered before it happened, and all that comes later fails.
"""

from __future__ import annotations

import os
import select
import sys
from multiprocessing.connection import Connection as Pipe
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from tests.support.fuse_wire import Connection
from tests.support.lossy_volume import Volume


class Server:
    """Methods without an underscore are the orders of a test."""

    def __init__(self, orders: Pipe, capacity: int | None) -> None:
        self._orders = orders
        self._volume = Volume(capacity)
        self._owner = os.getppid()
        self._connections: dict[int, Connection] = {}  # the dead ones, too: they answer EIO
        self._poll = select.poll()
        self._poll.register(orders.fileno(), select.POLLIN)

    def _run(self) -> None:
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor in self._connections:
                        if not self._connections[descriptor].serve():
                            self._close(descriptor)
                    elif not self._obey():
                        return
        finally:
            for descriptor in list(self._connections):
                self._close(descriptor)

    def _obey(self) -> bool:
        try:
            name, args = self._orders.recv()
        except EOFError:  # the test has closed the disk, or is gone
            return False
        try:
            self._orders.send((True, getattr(self, name)(*args)))
        except Exception as failure:
            self._orders.send((False, failure))
        return True

    def _close(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        os.close(descriptor)

    def attach(self) -> None:
        """Serve a new mount, whose descriptor follows on the pipe."""
        descriptor = recv_handle(self._orders)
        os.set_blocking(descriptor, False)
        self._connections[descriptor] = Connection(descriptor, self._volume, self._is_ours)
        self._poll.register(descriptor, select.POLLIN)

    def _is_ours(self, process: int) -> bool:
        """Whether the test started it: a stranger's `sync` is no part of the test."""
        while process not in (0, 1, self._owner):
            try:
                status = Path(f"/proc/{process}/stat").read_text()
            except OSError:
                return False
            process = int(status.rpartition(")")[2].split()[1])
        return process == self._owner

    def cut(self, after: int | None) -> None:
        self._volume.dies_after = after
        self._volume.dead |= after is None

    def reboot(self, seed: int | None) -> None:
        self._volume = self._volume.reboot(seed)

    def set(self, name: str, value: Any) -> None:
        setattr(self._volume, name, value)

    def get(self, name: str) -> Any:
        return getattr(self._volume, name)

    def limit(self, bytes_free: int | None) -> None:
        self._volume.limit(bytes_free)

    def fail(self, operation: str, number: int, after: int) -> None:
        self._volume.faults[operation] = (number, after)

    def syncs_heard(self) -> int:
        return sum(connection.syncs_heard for connection in self._connections.values())


if __name__ == "__main__":
    _pipe, _capacity = sys.argv[1:]
    Server(Pipe(int(_pipe)), int(_capacity) if _capacity else None)._run()
