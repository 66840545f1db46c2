"""Several hosts on one machine, whose network can fail.

    with Hosts(2, own_folders=["/data"]) as hosts:
        process = hosts.start(1, ["python", "train.py"], env={"MASTER_ADDR": hosts.address(0)})
        hosts.cut_off(1)      # packets vanish: nobody is told, and nothing is reset
        hosts.reconnect(1)

A host is a network with one card (`CARD`), a hostname and mounts of its own: Linux namespaces,
which a process holds (`tests/support/host_holder.py`). The switch between the hosts is a namespace,
too, so nothing of all this is in the machine's own network. Hosts reach each other, by address or
by name, and nobody else. All that is not network they share with the machine: also its folders,
unless a host has its own, its processes, and its shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.packet_capture import Capture

CARD = "eth0"
"""The network card of each host: what GLOO_SOCKET_IFNAME asks for."""
Folder = str | Path
_REPOSITORY = Path(__file__).parents[2]
_PATIENCE = 30.0  # seconds


class Hosts:
    """`count` hosts, numbered from 0.

    `own_folders`: folders that each host has for itself, empty at first. Or a mapping: for each
    such folder the folders of the machine that hosts 0, 1, ... see in its place. A reboot of a
    disk is seen in a host if the folder above `disk.path` is given, and not the disk itself.
    `shared_folders`: folders, also inside of own folders, that all hosts and the machine share.
    """

    def __init__(
        self,
        count: int,
        own_folders: Sequence[Folder] | Mapping[Folder, Sequence[Folder]] = (),
        shared_folders: Sequence[Folder] = (),
    ) -> None:
        sources = own_folders if isinstance(own_folders, Mapping) else {}
        for folder in (*own_folders, *shared_folders):
            if not Path(folder).is_absolute() or not Path(folder).is_dir():
                raise ValueError(f"Expected the full path of a folder, found {folder}. Create it.")
        if any(len(folders) != count for folders in sources.values()):
            raise ValueError(f"Expected a folder for each of {count} hosts, found {own_folders}.")
        self._count, self._own = count, [str(folder) for folder in own_folders]
        self._sources = {str(own): list(map(str, those)) for own, those in sources.items()}
        self._shared = [str(folder) for folder in shared_folders]

    def __enter__(self) -> Hosts:
        self._holders: list[subprocess.Popen[str]] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._captures: list[Capture] = []
        with contextlib.ExitStack() as closing:
            closing.callback(self._stop)
            for host in (*range(self._count), None):
                self._hold(host)
            for holder in self._holders:
                assert holder.stdout is not None
                if (said := holder.stdout.readline().strip()) != "ready":
                    raise OSError(f"its namespaces could not be made: {said}")
            self._connect()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._closing.close()

    def address(self, host: int) -> str:
        return f"192.0.2.{host + 1}"

    def name(self, host: int) -> str:
        return f"host{host}"

    def start(
        self,
        host: int,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Folder | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host; `env` is in addition to the environment of this process.

        The process is the program itself, and can be signalled. `options` are those of
        `subprocess.Popen`. When the hosts end, programs that still run are killed, with all that
        they started, and pipes of all are closed.
        """
        enter = ["nsenter", "--target", str(self._holders[host].pid), "--net", "--uts", "--mount"]
        enter += ["--", "env", f"--chdir={cwd or Path.cwd()}", "--"]
        process: subprocess.Popen[Any] = subprocess.Popen(
            [*enter, *map(str, command)], env={**os.environ, **(env or {})}, **options
        )
        self._processes.append(process)
        return process

    def seen_by(self, host: int, path: Folder) -> Path:
        """A path by which this process reaches what a host sees at `path`."""
        return Path(f"/proc/{self._holders[host].pid}/root", str(path).lstrip("/"))

    def cut_off(self, host: int) -> None:
        """Drop all packets from and to a host, without a word to anybody.

        Its cable ends in a port that belongs to no switch: the card itself notices nothing.
        """
        self._run_ip(-1, [f"link set port{host} nomaster"])

    def reconnect(self, host: int) -> None:
        self._run_ip(-1, [f"link set port{host} master switch"])

    def capture(self) -> Capture:
        """Record, from now on, all that hosts send; also what a cut then drops."""
        self._captures.append(Capture(f"/proc/{self._holders[-1].pid}/ns/net"))
        return self._captures[-1]

    def _hold(self, host: int | None) -> None:
        """Start the holder of a host, or of the switch."""
        names = [f"{self.address(other)} {self.name(other)}" for other in range(self._count)]
        order: dict[str, Any] = {"name": "switch", "names": names, "own": [], "shared": []}
        if host is not None:
            own = [
                (path, self._sources[path][host] if self._sources else None) for path in self._own
            ]
            order |= {"name": self.name(host), "own": own, "shared": self._shared}
        self._holders.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.host_holder", json.dumps(order)],
                cwd=_REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )

    def _connect(self) -> None:
        self._run_ip(-1, ["link add switch type bridge", "link set switch up"])
        for host, holder in enumerate(self._holders[:-1]):
            cable = f"link add port{host} type veth peer name {CARD} address {_card(host)}"
            ours = [f"{cable} netns {holder.pid}", f"link set port{host} master switch up"]
            self._run_ip(-1, ours)
            theirs = [f"addr add {self.address(host)}/24 dev {CARD}", f"link set {CARD} up"]
            # Cards are known beforehand: a host that is cut off need not ask for them, and so it
            # gets no error when nobody answers.
            theirs += [
                f"neigh add {self.address(other)} lladdr {_card(other)} dev {CARD} nud permanent"
                for other in range(self._count)
                if other != host
            ]
            self._run_ip(host, ["link set lo up", *theirs])

    def _run_ip(self, holder: int, lines: list[str]) -> None:
        target = str(self._holders[holder].pid)
        command = ["nsenter", "--target", target, "--net", "--", "ip", "-batch", "-"]
        text = "".join(line + "\n" for line in lines)
        ended = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if ended.returncode != 0:
            raise OSError(f"its network could not be made: {ended.stderr.strip()}")

    def _stop(self) -> None:
        for capture in self._captures:
            capture.close()
        for holder in self._holders:
            try:
                holder.communicate(timeout=_PATIENCE)  # it ends, and kills who is on its host
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.communicate()
        for process in self._processes:
            process.wait(_PATIENCE)
            for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
                with contextlib.suppress(OSError):  # what it did not read
                    stream.close()


def _card(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


@lru_cache(maxsize=1)
def why_no_hosts() -> str | None:
    """Why this machine cannot have such hosts; None if it can. For `pytest.mark.skipif`."""
    for program in ("ip", "nsenter", "env"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need root on Linux"
    try:
        with Hosts(1) as hosts:
            hosts.cut_off(0)
    except OSError as failure:
        return f"no host can be made here: {failure}"
    return None
