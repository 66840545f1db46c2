"""The secret that all randomness of a run is derived from, and names for what is drawn from it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from lightning_dpsparse.refused import Refused

KEY_BYTES = 16


@dataclass(frozen=True)
class Stream:
    """The name of one sequence of draws. Two streams that differ in any field are independent."""

    purpose: str
    """What the draws are for: gradient noise, sampling, a mask."""
    table: str
    """Table or dense parameter."""
    step: int
    """Step of the run."""
    shard: tuple[int, int] = (0, 0)
    """First row and column of the piece of the table: its owner draws for it, nobody else."""
    part: int = 0
    """Chunk of the piece, where it is filled in chunks."""


@dataclass(frozen=True)
class RunKey:
    """128 secret bits, from the operating system's entropy.

    Guarantees: no generator that a user can seed (torch, numpy, random) has a say in it, and it
    never shows in a log. `fixed` keys are for tests and replay: a run that uses one is not private.
    """

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    is_fixed: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise Refused(f"Expected a key of {KEY_BYTES} bytes, found {len(self.secret)}.")

    @classmethod
    def fixed(cls, number: int) -> RunKey:
        """A key that anyone can write down."""
        return cls(number.to_bytes(KEY_BYTES, "big"), is_fixed=True)

    def bytes_for(self, stream: Stream, size: int) -> bytes:
        """`size` bytes that only this key and this stream give."""
        # repr keeps fields apart: ("ab", "c") and ("a", "bc") must not meet.
        fields = (stream.purpose, stream.table, stream.step, stream.shard, stream.part)
        return hashlib.shake_128(self.secret + repr(fields).encode()).digest(size)
