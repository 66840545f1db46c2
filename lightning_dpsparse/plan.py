"""The privacy plan: one object that says what is promised and how the step keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping, GroupClipping
from lightning_dpsparse.mechanisms.dpsgd import DPSGD
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise

_SOURCES: dict[str, Callable[[RunKey], NoiseSource]] = {
    "fast": FastNoise,
    "secure": SecureNoise,
    "row_keyed": RowNoise,
}


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """How training is made private."""

    mechanism: DPSGD | EANA = field(default_factory=DPSGD)
    """Where noise goes."""

    clip_norm: float = 1.0
    """C: the most that one example may move the sum of gradients."""

    noise_multiplier: float
    """sigma: the noise's standard deviation over C. Zero is allowed, and is not private."""

    clipping: FlatClipping | AutomaticClipping | GroupClipping = field(default_factory=FlatClipping)
    """How examples are held to C."""

    expected_batch_size: int | None = None
    """What sums are divided by: a constant. By default the loader's batch size times the ranks."""

    noise_source: Literal["fast", "secure", "row_keyed"] = "fast"
    """Where noise comes from. Speed and cryptography only: all three are exact Gaussians."""

    fixed_key: int | None = None
    """For tests and replay: noise that anyone can draw again. A run with it is not private."""

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise ValueError(f"Expected clip_norm > 0, found {self.clip_norm}.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"Expected noise_multiplier >= 0, found {self.noise_multiplier}.")
        if math.isinf(self.clip_norm) and self.noise_multiplier > 0:
            raise ValueError(
                f"Expected a finite clip_norm with noise, found {self.clip_norm}: the noise would "
                "be infinite. Set noise_multiplier to 0 to compare with plain training."
            )
        if self.expected_batch_size is not None and self.expected_batch_size < 1:
            raise ValueError(
                f"Expected expected_batch_size >= 1, found {self.expected_batch_size}."
            )

    def make_key(self) -> RunKey:
        return RunKey() if self.fixed_key is None else RunKey.fixed(self.fixed_key)

    def make_source(self, key: RunKey) -> NoiseSource:
        return _SOURCES[self.noise_source](key)

    def warnings(self) -> list[str]:
        """What a reader of the log must not miss."""
        found = [
            "This version adds noise but computes no epsilon: honest sampling and accounting are "
            "not part of it yet. Make no claim of privacy from it."
        ]
        if not self.mechanism.is_private:
            found.append(f"{type(self.mechanism).__name__} is not differentially private.")
        if self.noise_multiplier == 0:
            found.append("noise_multiplier=0: not private.")
        if self.fixed_key is not None:
            found.append("Fixed noise key: not private.")
        return found
