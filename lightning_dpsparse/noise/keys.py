"""The secret that all randomness of a run is derived from, and names for what is drawn from it.

A run has one secret key. Every sequence of draws is derived from the key and from a name, its
`Stream`: another name gives independent draws, and the same name gives the same draws again. So
ranks can draw the same numbers without sending them, and noise that must be independent needs
different names. `sources.py` turns a key and a stream into draws.
"""

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
    """What the draws are for: gradient noise, sampling or a mask, for example."""
    table: str
    """Table or dense parameter that the draws are for."""
    step: int
    """Step of the run that the draws are for."""
    shard: tuple[int, int] = (0, 0)
    """First row and first column of the piece of the table. Only its owner draws for it."""
    part: int = 0
    """Number of the chunk, if the piece is filled in chunks."""


@dataclass(frozen=True)
class RunKey:
    """A secret of 128 bits that come from the operating system's entropy.

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
        """Make a key that anyone can write down. A run that uses it is not private."""
        return cls(number.to_bytes(KEY_BYTES, "big"), is_fixed=True)

    def bytes_for(self, stream: Stream, size: int) -> bytes:
        """Derive `size` bytes that only this key and this stream give."""
        # repr keeps fields apart: ("ab", "c") and ("a", "bc") must not meet.
        fields = (stream.purpose, stream.table, stream.step, stream.shard, stream.part)
        return hashlib.shake_128(self.secret + repr(fields).encode()).digest(size)
