"""The process that holds the namespaces of one host: it makes them, says so, and waits.

When its standard input ends it kills all programs on the host, and the namespaces end with it. The
input ends with the test, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.kernel_mounts import bind, leave_namespaces, mount


def hold(order: dict[str, Any]) -> None:
    leave_namespaces()
    Path("/proc/sys/kernel/hostname").write_text(order["name"])
    for interfaces in ("all", "default"):  # so that a host has one address
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{interfaces}/disable_ipv6").write_text("1")
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as names:  # it stays where it is shown
        names.write("\n".join(["127.0.0.1 localhost", *order["names"], ""]))
        names.flush()
        os.fchmod(names.fileno(), 0o644)
        bind(Path(names.name), Path("/etc/hosts"))
    # Opened before anything lies upon them; by these descriptors they can be reached, nevertheless.
    shared = [(Path(path), os.open(path, os.O_PATH)) for path in order["shared"]]
    sources = {own: os.open(source, os.O_PATH) for own, source in order["own"] if source}
    for own, _ in order["own"]:
        if own in sources:
            bind(Path(f"/proc/self/fd/{sources[own]}"), Path(own))
        else:
            mount("own-folder", Path(own), "tmpfs")
    for path, descriptor in shared:
        path.mkdir(parents=True, exist_ok=True)
        bind(Path(f"/proc/self/fd/{descriptor}"), path)


def kill_inhabitants() -> None:
    """Kill until nobody is left: a program may start another one meanwhile."""
    while inhabitants := _inhabitants():
        for process in inhabitants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def _inhabitants() -> list[int]:
    """The processes in this network, except for this one."""
    mine, numbers = os.readlink("/proc/self/ns/net"), []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if path.name.isdigit() and os.readlink(path / "ns" / "net") == mine:
                numbers.append(int(path.name))
    return [number for number in numbers if number != os.getpid()]


if __name__ == "__main__":
    try:
        hold(json.loads(sys.argv[1]))
    except OSError as failure:
        print(failure, flush=True)
        sys.exit(1)
    print("ready", flush=True)
    sys.stdin.read()
    kill_inhabitants()
