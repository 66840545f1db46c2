"""All bytes that go over a switch, for tests that look for what must not be there."""

from __future__ import annotations

import socket
import struct
import threading

from tests.support.kernel_mounts import enter_namespace

_ALL_PROTOCOLS, _OUTGOING = 0x0003, 4
_SOL_PACKET, _STATISTICS, _RCVBUFFORCE = 263, 6, 33
_ROOM = 1 << 28  # bytes that may wait to be read
_IPV4, _TCP, _SYN = 0x0800, 6, 2


class Capture:
    """Records every frame that a host sends into the switch, from its start until `stop`."""

    def __init__(self, network: str) -> None:
        self._network, self._frames = network, list[bytes]()
        self._failure: BaseException | None = None
        self._ready, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> bytes:
        """All frames in their order, and then every TCP stream in one piece.

        What is split between two packets is found in the stream; what is in a header or in another
        protocol is found in the frames.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return b"".join([*self._frames, *streams(self._frames)])

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            enter_namespace(self._network)  # of this thread alone
            packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        except OSError as failure:
            self._failure = failure
            self._ready.set()
            return
        with packets:
            packets.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _ROOM)
            packets.settimeout(0.02)
            self._ready.set()
            while True:
                done = self._stopped.is_set()
                try:
                    frame, (card, _, direction, *_) = packets.recvfrom(1 << 20)
                except TimeoutError:
                    if done:
                        break
                    continue
                # What leaves a port has entered by another.
                if card.startswith("port") and direction != _OUTGOING:
                    self._frames.append(frame)
            lost = struct.unpack("II", packets.getsockopt(_SOL_PACKET, _STATISTICS, 8))[1]
            if lost:
                self._failure = RuntimeError(f"{lost} packets were not recorded: read less at once")


def streams(frames: list[bytes]) -> list[bytes]:
    """What each side of each TCP connection has sent, in order; gaps are closed up."""
    parts: dict[bytes, list[tuple[int, bytes]]] = {}
    finished: list[list[tuple[int, bytes]]] = []
    for frame in frames:
        if len(frame) < 54 or struct.unpack_from(">H", frame, 12)[0] != _IPV4 or frame[23] != _TCP:
            continue
        tcp = 14 + 4 * (frame[14] & 15)
        end = 14 + struct.unpack_from(">H", frame, 16)[0]
        connection, sequence = frame[26:34] + frame[tcp : tcp + 4], frame[tcp + 4 : tcp + 8]
        if frame[tcp + 13] & _SYN and connection in parts:
            finished.append(parts.pop(connection))  # the same ports again
        payload = frame[tcp + 4 * (frame[tcp + 12] >> 4) : end]
        parts.setdefault(connection, []).append((int.from_bytes(sequence, "big"), payload))
    return [_in_order(part) for part in (*finished, *parts.values())]


def _in_order(parts: list[tuple[int, bytes]]) -> bytes:
    first = parts[0][0]
    # Sequence numbers wrap around: they count from the first one.
    places = sorted(((seq - first + (1 << 31)) % (1 << 32), payload) for seq, payload in parts)
    stream, reached = bytearray(), 0
    for place, payload in places:
        if place + len(payload) > reached:
            stream += payload[max(0, reached - place) :]
            reached = place + len(payload)
    return bytes(stream)
