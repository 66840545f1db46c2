"""Privacy events: descriptions of what was done to the data, from which epsilon follows.

The types are dp-accounting's, so that its accountants can check ours. Two are added here, for which
it has none. `privacy_loss.py` says what each event costs. Two data sets are always adjacent if one
has one unit (an example, or a user) more than the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attr
import numpy as np
from dp_accounting import dp_event
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    MixtureOfGaussiansDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from scipy.stats import binom

from lightning_dpsparse.checks import check_kind, check_number, check_share, check_whole, shown
from lightning_dpsparse.refused import Refused

_EXACT = 1_000
"""Most examples of a user for which the binomial coefficients fit into float64."""
_DEEPEST = 20
"""Most events inside of one another in a file."""
_OTHER = "Take the ledger of another checkpoint of the run."


@attr.s(frozen=True)
class ExponentialDpEvent(DpEvent):
    """One choice by the exponential mechanism, of range epsilon.

    P(r) ~ exp(epsilon score_r / Delta) where a unit raises every score by 0 to Delta, so that
    log P(r) / P'(r), over all r, lies in an interval of length epsilon.
    """

    epsilon: float = attr.ib(converter=float)


@attr.s(frozen=True)
class GumbelDpEvent(DpEvent):
    """Gumbel noise of scale 1/epsilon on all counts of a histogram, of which one moves by one.

    Whatever number of largest counts is then released costs no more. (Top-k by Gumbel noise is
    often sold as epsilon-DP for all k; as pure DP it costs k epsilon.)
    """

    epsilon: float = attr.ib(converter=float)


def not_private() -> DpEvent:
    """The event that guarantees nothing."""
    return NonPrivateDpEvent()


def exponential(epsilon: float) -> DpEvent:
    """The event of one choice by the exponential mechanism, of range epsilon."""
    return ExponentialDpEvent(epsilon)


def gumbel(epsilon: float) -> DpEvent:
    """The event of a histogram with Gumbel noise of scale 1 / epsilon: a unit moves one count."""
    return GumbelDpEvent(epsilon)


def composed(counts: Sequence[tuple[DpEvent, int]]) -> DpEvent:
    """One event for several, each of which is run so many times."""
    parts = [SelfComposedDpEvent(event, times) for event, times in counts]
    return parts[0] if len(parts) == 1 else ComposedDpEvent(tuple(parts))


def gaussian(noise_multiplier: float) -> DpEvent:
    """The event of a sum that a unit moves by at most C, with noise of deviation sigma C."""
    if noise_multiplier == 0:
        return NonPrivateDpEvent()
    return GaussianDpEvent(float(noise_multiplier))  # RDP is wrong with integers


def is_private(event: DpEvent) -> bool:
    """Whether the event guarantees anything at all."""
    return not isinstance(event, NonPrivateDpEvent)


def is_gaussian(event: DpEvent) -> bool:
    """Whether the event is one noisy sum, with or without noise."""
    return isinstance(event, (GaussianDpEvent, NonPrivateDpEvent))


def counts_examples_of_user(event: DpEvent) -> bool:
    """Whether the event is one of examples that were drawn one by one, to protect users."""
    return isinstance(event, MixtureOfGaussiansDpEvent)


def poisson(rate: float, event: DpEvent) -> DpEvent:
    """An event on a Poisson sample of the units. It must hold everything that sees this sample."""
    if isinstance(event, NonPrivateDpEvent):
        return event
    return PoissonSampledDpEvent(float(rate), event)


def poisson_gaussian(rate: float, noise_multiplier: float) -> DpEvent:
    """The event of a noisy sum over a Poisson sample."""
    return poisson(rate, gaussian(noise_multiplier))


def truncated_poisson_gaussian(
    num_units: int, rate: float, max_batch: int, noise_multiplier: float
) -> DpEvent:
    """The event of a noisy sum over a Poisson sample that is cut to `max_batch` units at random."""
    if noise_multiplier == 0:
        return NonPrivateDpEvent()
    return TruncatedSubsampledGaussianDpEvent(
        int(num_units), float(rate), int(max_batch), float(noise_multiplier)
    )


@lru_cache(maxsize=256)  # it is asked for in every step, and has a number for every example
def poisson_examples_of_user(max_examples: int, rate: float, noise_multiplier: float) -> DpEvent:
    """The event of a noisy sum over a Poisson sample of examples, where users are protected.

    The number of a user's examples in a batch is Binomial(k, q), and each moves the sum by up to C.
    """
    if noise_multiplier == 0:
        return NonPrivateDpEvent()
    counts = range(max_examples + 1)
    if max_examples <= _EXACT:
        chances = [
            math.comb(max_examples, n) * rate**n * (1.0 - rate) ** (max_examples - n)
            for n in counts
        ]
    else:
        chances = binom.pmf(np.arange(max_examples + 1), max_examples, rate).tolist()
    return MixtureOfGaussiansDpEvent(
        float(noise_multiplier), tuple(float(count) for count in counts), tuple(chances)
    )


def combined_noise(*noise_multipliers: float) -> float:
    """The noise multiplier of one query that costs as much as several queries of the same batch.

    sigma = (sum sigma_i^-2)^(-1/2). The queries see the same sample: subsample the combination, and
    never combine subsampled events.

    >>> round(combined_noise(1.1216, 1.1216), 4)
    0.7931
    """
    return float(sum(s**-2.0 for s in noise_multipliers) ** -0.5)


def split_noise(noise_multiplier: float, ratio: float) -> tuple[float, float]:
    """Two noise multipliers in the given ratio (first over second) that cost as much as one.

    >>> [round(s, 4) for s in split_noise(0.7931, ratio=5.0)]
    [4.044, 0.8088]
    """
    second = noise_multiplier * (1.0 + ratio**-2.0) ** 0.5
    return ratio * second, second


# ---- plain data: what a checkpoint and a report can hold -----------------------------------------


def event_to_data(event: DpEvent) -> dict[str, Any]:
    """The event as a dictionary of plain Python values."""
    named = event.to_named_tuple()
    return {key: _plain(value) for key, value in named._asdict().items()}


def event_from_data(data: Mapping[str, Any]) -> DpEvent:
    """The event that `event_to_data` wrote. Classes come from modules of events only.

    Ledgers are handed around in files. Whatever else is found in one is refused.
    """
    try:
        return _event(data, depth=0)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            "Expected the description of a privacy event, found something else "
            f"({type(error).__name__}). {_OTHER}"
        ) from error


def _event(data: Any, depth: int) -> DpEvent:
    if not isinstance(data, Mapping) or depth > _DEEPEST:
        raise Refused(f"Expected a privacy event by its fields, found {shown(data)}. {_OTHER}")
    module, name = data.get("module_name"), data.get("class_name")
    if module not in ("dp_accounting.dp_event", __name__):
        raise Refused(f"Expected an event of dp_accounting, found {shown(module)}. {_OTHER}")
    cls = globals().get(name) or getattr(dp_event, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, DpEvent):
        raise Refused(f"Expected the name of an event's class, found {shown(name)}. {_OTHER}")
    fields = {
        key: _event_or_value(value, depth + 1)
        for key, value in data.items()
        if key not in ("module_name", "class_name")
    }
    for key, value in fields.items():
        _check_field(key, value)
    event: DpEvent = cls(**fields)
    if isinstance(event, MixtureOfGaussiansDpEvent):
        _check_mixture(event)
    return event


def _check_field(name: str, value: Any) -> None:
    """Refuse a number of an event that no event of this package has."""
    if name in ("noise_multiplier", "standard_deviation"):
        check_number(name, value, least=0, remedy=_OTHER)
    elif name == "epsilon":
        check_number(name, value, above=0, remedy=_OTHER)
    elif name == "sampling_probability":
        check_share(name, value, remedy=_OTHER)
    elif name in ("count", "dataset_size", "truncated_batch_size"):
        check_whole(name, value, remedy=_OTHER)
    elif name == "event":
        check_kind(name, value, DpEvent, remedy=_OTHER)
    elif name == "events":
        for part in value:
            check_kind(name, part, DpEvent, remedy=_OTHER)


def _check_mixture(event: MixtureOfGaussiansDpEvent) -> None:
    shifts, chances = event.sensitivities, event.sampling_probs
    check_number("standard_deviation", event.standard_deviation, above=0, remedy=_OTHER)
    for shift, chance in zip(shifts, chances):
        check_number("sensitivities", shift, least=0, remedy=_OTHER)
        check_share("sampling_probs", chance, remedy=_OTHER)
    if not 0 < len(shifts) == len(chances) or not max(shifts) > 0 or abs(sum(chances) - 1) > 1e-6:
        raise Refused(
            "Expected as many sensitivities as probabilities, which add up to one, found others. "
            f"{_OTHER}"
        )


def describe_event(event: DpEvent) -> str:
    """The event in words, for people."""
    if isinstance(event, PoissonSampledDpEvent):
        return f"{_what(event.event)}, on a Poisson sample of rate {event.sampling_probability:.6g}"
    if isinstance(event, TruncatedSubsampledGaussianDpEvent):
        return (
            f"Gaussian, noise multiplier {event.noise_multiplier:.6g}, on a Poisson sample of rate "
            f"{event.sampling_probability:.6g}, truncated at {event.truncated_batch_size:,}"
        )
    if isinstance(event, MixtureOfGaussiansDpEvent):
        return (
            f"Gaussian, noise multiplier {event.standard_deviation:.6g}, on a Poisson sample of "
            f"examples, up to {len(event.sensitivities) - 1} of them of one user"
        )
    if isinstance(event, NonPrivateDpEvent):
        return "not private"
    return f"{_what(event)}, without amplification"


def _what(event: DpEvent) -> str:
    """What is done with the units that take part, in words."""
    if isinstance(event, GaussianDpEvent):
        return f"Gaussian, noise multiplier {event.noise_multiplier:.6g}"
    if isinstance(event, ExponentialDpEvent):
        return f"choice of range {event.epsilon:.6g}"
    if isinstance(event, GumbelDpEvent):
        return f"Gumbel noise of scale 1/{event.epsilon:.6g}"
    if isinstance(event, SelfComposedDpEvent):
        return _what(event.event) if event.count == 1 else f"{event.count:,} x {_what(event.event)}"
    if isinstance(event, ComposedDpEvent):
        return " and ".join(_what(part) for part in event.events)
    return repr(event)


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {key: _plain(v) for key, v in value._asdict().items()}
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return value
    return [_plain(v) for v in value]


def _event_or_value(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return _event(value, depth)
    if isinstance(value, (list, tuple)):
        if depth > _DEEPEST:
            raise Refused(f"Expected numbers or events in an event, found lists. {_OTHER}")
        return tuple(_event_or_value(v, depth + 1) for v in value)
    return value
