"""Hosts on one machine are apart, reach each other, and fall silent when they are cut off."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from tests.support.lossy_disk import LossyDisk, why_no_fuse
from tests.support.net_hosts import CARD, Hosts, why_no_hosts
from tests.support.packet_capture import streams

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

# Sends back what it gets, line by line.
ECHO = """
import socket
server = socket.create_server(("", 7000))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    for line in connection.makefile("rb"):
        connection.sendall(line)
"""
# Sends the lines of its input to a host, and prints what comes back; or why nothing does.
TALK = """
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
    connection.settimeout(30)
    for line in sys.stdin:
        connection.sendall(line.encode())
        print(connection.makefile().readline().strip(), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
REDUCE = """
import datetime, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
for step in range(10**9):
    value = torch.full((1000,), float(step + dist.get_rank()))
    dist.all_reduce(value)
    assert value[-1] == 2 * step + 1
    print(step, flush=True)
"""


class Lines:
    """A program on a host, and what it prints."""

    def __init__(self, hosts: Hosts, host: int, *command: str, **env: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = (sys.executable, "-c", *command)
        self.process = hosts.start(host, command, env=env, text=True, bufsize=1, **pipes)
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line.strip())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def next(self, patience: float = 30.0) -> str | None:
        """The next line, or None if none comes."""
        try:
            return self._lines.get(timeout=patience)
        except Empty:
            return None

    def drain(self) -> int:
        """How many lines there are without waiting."""
        number = 0
        while self.next(0.0) is not None:
            number += 1
        return number


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        assert Lines(hosts, 1, ECHO).next() == "up"
        yield hosts


def asked(hosts: Hosts, host: int, program: str) -> str:
    process = hosts.start(host, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    return process.communicate()[0].strip()


def test_each_host_has_its_own_name_and_nothing_but_its_own_card(hosts: Hosts) -> None:
    cards = "import socket; print(socket.gethostname(), *(n for _, n in socket.if_nameindex()))"
    assert asked(hosts, 0, cards) == f"host0 lo {CARD}"
    assert asked(hosts, 2, cards) == f"host2 lo {CARD}"
    find = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert asked(hosts, 2, find) == hosts.address(2)
    assert socket.gethostname() != "host2"


@pytest.mark.parametrize("by", ["address", "name"])
def test_hosts_reach_each_other(hosts: Hosts, by: str) -> None:
    talk = Lines(hosts, 0, TALK, getattr(hosts, by)(1), "10")
    talk.say("hello")
    assert talk.next() == "hello"


def test_a_host_that_is_cut_off_is_silent_and_goes_on_where_it_was(hosts: Hosts) -> None:
    talk = Lines(hosts, 0, TALK, hosts.address(1), "10")
    talk.say("one")
    assert talk.next() == "one"
    hosts.cut_off(0)
    talk.say("two")
    assert talk.next(1.0) is None  # neither an answer nor an error
    hosts.reconnect(0)
    assert talk.next() == "two"


@pytest.mark.slow
def test_a_new_connection_to_a_silent_host_times_out_and_is_not_refused(hosts: Hosts) -> None:
    hosts.cut_off(1)
    talk = Lines(hosts, 0, TALK, hosts.address(1), "4")  # an unknown card would be an error after 3
    assert talk.next() == "TimeoutError"
    hosts.reconnect(1)
    assert asked(hosts, 0, "import socket; socket.create_connection(('host1', 7000)); print(1)")


def test_only_the_host_that_is_cut_off_is_silent(hosts: Hosts) -> None:
    hosts.cut_off(0)
    talk = Lines(hosts, 2, TALK, hosts.address(1), "10")
    talk.say("hello")
    assert talk.next() == "hello"


def test_a_host_does_not_see_the_folders_of_another(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "own" / "a" / "shared"
    shared.mkdir(parents=True)
    (own / "hidden").touch()
    look = (
        f"import os; open('{own}/' + os.uname().nodename, 'w'); print(*sorted(os.listdir('{own}')))"
    )
    with Hosts(2, own_folders=[own], shared_folders=[shared]) as hosts:
        assert asked(hosts, 0, look) == "a host0"
        assert asked(hosts, 1, look) == "a host1"
        assert hosts.seen_by(1, own / "host1").exists()
        asked(hosts, 0, f"open('{shared}/x', 'w').write('from host 0')")
        assert asked(hosts, 1, f"print(open('{shared}/x').read())") == "from host 0"
    assert sorted(os.listdir(own)) == ["a", "hidden"]
    assert os.listdir(shared) == ["x"]


def test_a_host_sees_a_folder_of_the_machine_in_the_place_of_another(tmp_path: Path) -> None:
    for name in ("seen", "0", "1"):
        (tmp_path / name).mkdir()
    sources = [tmp_path / "0", tmp_path / "1"]
    with Hosts(2, own_folders={tmp_path / "seen": sources}) as hosts:
        asked(hosts, 1, f"open('{tmp_path}/seen/x', 'w')")
    assert [len(os.listdir(folder)) for folder in (tmp_path / "seen", *sources)] == [0, 0, 1]


def test_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="full path of a folder"):
        Hosts(1, own_folders=[tmp_path / "missing"])
    with pytest.raises(ValueError, match="a folder for each of 2 hosts"):
        Hosts(2, own_folders={tmp_path: [tmp_path]})


@pytest.mark.skipif(why_no_fuse() is not None, reason=str(why_no_fuse()))
def test_a_host_sees_the_reboot_of_a_disk() -> None:
    with LossyDisk() as disk, Hosts(1) as hosts:
        asked(hosts, 0, f"open('{disk.path}/file', 'w')")
        assert os.listdir(disk.path) == ["file"]
        disk.cut()
        broken = f"import os\ntry: os.listdir('{disk.path}')\nexcept OSError as e: print(e.errno)"
        assert asked(hosts, 0, broken) == "5"
        disk.reboot()
        assert asked(hosts, 0, f"import os; print(os.listdir('{disk.path}'))") == "[]"


def test_what_goes_over_the_wire_is_captured_and_nothing_else(hosts: Hosts) -> None:
    sent, kept = secrets.token_hex(50_000), secrets.token_hex(100)
    talk = Lines(hosts, 0, TALK, hosts.address(1), "10", KEPT=kept)
    capture = hosts.capture()
    talk.say(sent)
    assert talk.next() == sent
    seen = capture.stop()
    assert seen.count(sent.encode()) >= 2  # there and back, in one piece each
    assert kept.encode() not in seen
    talk.say("later")
    assert talk.next() == "later"
    assert capture.stop() == seen


def test_a_stream_is_put_together_from_packets_in_any_order() -> None:
    def packet(sequence: int, payload: bytes) -> bytes:
        ip = struct.pack(">BBHHHBBH4s4s", 69, 0, 40 + len(payload), 0, 0, 9, 6, 0, b"from", b"to__")
        tcp = struct.pack(">HHIIBBHHH", 1, 2, sequence % 2**32, 0, 5 << 4, 0, 0, 0, 0)
        return bytes(12) + b"\x08\x00" + ip + tcp + payload + b"padding"

    start = 2**32 - 3  # sequence numbers wrap around
    said = [(0, b"My "), (8, b"cret"), (3, b"se"), (3, b"secre"), (5, b"cre"), (12, b"."), (8, b"")]
    packets = [packet(start + place, payload) for place, payload in said]
    assert streams(packets) == [b"My secrecret."]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, 5])
def test_gloo_ranks_on_two_hosts_go_on_after_a_cut(seconds: int) -> None:
    with Hosts(2) as hosts:
        env = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "7100", "WORLD_SIZE": "2"}
        env |= {"GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"}
        ranks = [Lines(hosts, rank, REDUCE, **env, RANK=str(rank)) for rank in range(2)]
        for rank in ranks:
            assert [rank.next(60.0) for _ in range(3)] == ["0", "1", "2"]
        hosts.cut_off(1)
        time.sleep(0.2)  # a step may be under way
        for rank in ranks:
            rank.drain()
        time.sleep(seconds)
        assert [rank.drain() for rank in ranks] == [0, 0]
        assert all(rank.process.poll() is None for rank in ranks)
        hosts.reconnect(1)
        for rank in ranks:
            assert all(rank.next() for _ in range(3))


@pytest.mark.parametrize("killed", [False, True])
def test_nobody_is_left_on_a_host_also_if_its_test_was_killed(killed: bool) -> None:
    """Not even a daemon, which has left its parent, its session and its streams."""
    daemon = "import os, time; print(os.getpid(), flush=True); os.setsid(); time.sleep(1000)"
    program = (
        "import subprocess, sys; from tests.support.net_hosts import Hosts\n"
        "with Hosts(1) as hosts:\n"
        f"    command = ['sh', '-c', sys.executable + ' -c \"{daemon}\" &']\n"
        "    hosts.start(0, command).wait(); sys.stdin.read()"
    )
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        left = Path("/proc", process.stdout.readline().strip())
        assert is_running(left)
        if killed:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_running(left) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(left)


def is_running(process: Path) -> bool:
    """Whether it is there, and not only waits for somebody to ask how it has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
