"""How often every id occurs: public counts from a file, or counts of the data with noise.

Counts of the data must not show that one example was there. So every row of every table gets noise,
rows that nobody reads included, and one example may move few counts only. The noise is Gaussian or,
as in the paper, Gumbel noise. `selection.py` selects the rows with the largest counts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lightning_dpsparse.accounting.events import DpEvent, composed, gaussian, gumbel
from lightning_dpsparse.checks import check_mapping, check_number, check_path, check_whole
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.files import has_numbers, is_readable_file, read_npz
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.keystream import SMALLEST_HIDDEN_SHARE
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# R rows of a table: its whole public range of ids, whether they occur or not

_MOST_IDS = 1_000_000
"""Most ids of one bag that may be counted."""


class Frequencies(ABC):
    """A source of counts, one for every row of every table."""

    @abstractmethod
    def event(self, tables: Sequence[Table]) -> DpEvent | None:
        """What one release of all counts costs; None means that it costs nothing."""


@dataclass(frozen=True, kw_only=True)
class PublicFrequencies(Frequencies):
    """Counts from a file. The report names the file, because nobody can check that it is public."""

    path: str
    """Path of an .npz file. It holds an array for every table, under the table's name, with a count
    for every row."""

    def __post_init__(self) -> None:
        check_path("path", self.path, remedy="Name an .npz file of public counts.")

    @property
    def trusted(self) -> str:
        """What the report says of the file."""
        return f"The frequencies in {self.path}, by which rows were selected: taken to be public."

    def event(self, tables: Sequence[Table]) -> None:
        return None

    def scores(self, tables: Sequence[Table]) -> dict[str, Tensor]:
        path = Path(self.path)
        if not is_readable_file(path):
            raise Refused(
                f"Expected public frequencies in {self.path!r}, found no such file. Write one with "
                "numpy.savez: an array of counts for every table, under its name."
            )
        found = read_npz(path, [table.short_name for table in tables], "public frequencies")
        for table in tables:
            counts = found.get(table.short_name)
            if counts is None or counts.shape != (table.num_rows,) or not has_numbers(counts):
                seen = "nothing"
                if counts is not None:
                    seen = f"{counts.shape} of {counts.dtype}, or numbers that are not finite"
                raise Refused(
                    f"Expected {table.num_rows:,} counts for table {table.short_name!r} in "
                    f"{self.path!r}, found {seen}. Give each row of the table one finite number."
                )
        return {t.name: torch.from_numpy(found[t.short_name].astype("f8")) for t in tables}


@dataclass(frozen=True, kw_only=True)
class Histogram(Frequencies):
    """Counts of the training data with noise on every row of every table.

    An example counts once for every row that it reads, by whatever features, and with at most m_f
    distinct ids of a bag of feature f. So it moves at most sum_f m_f counts, each by one.
    """

    max_ids_per_bag: int = 1
    """m_f: number of distinct ids of one bag that are counted. Further ids are left out."""

    max_ids_of: Mapping[str, int] = field(default_factory=dict)
    """m_f of single features, by name. All other features use max_ids_per_bag."""

    def __post_init__(self) -> None:
        check_mapping("max_ids_of", self.max_ids_of)
        counted = {"max_ids_per_bag": self.max_ids_per_bag}
        counted |= {f"max_ids_of[{name!r}]": most for name, most in self.max_ids_of.items()}
        for name, most in counted.items():
            expected = f"at least one id of a bag to be counted in {name}"
            check_whole(name, most, most=_MOST_IDS, expected=expected)

    def most_ids(self, feature: str) -> int:
        return self.max_ids_of.get(feature, self.max_ids_per_bag)

    def counts_per_example(self, tables: Sequence[Table]) -> int:
        """sum_f m_f: how many counts one example may move by one."""
        return sum(self.most_ids(feature) for table in tables for feature in table.features)

    def noisy(
        self,
        counts: Mapping[str, Tensor],
        tables: Sequence[Table],
        examples_per_unit: int,
        source: NoiseSource,
        release: int,
    ) -> dict[str, Tensor]:
        """Add noise to the counts of all rows. `release` names the draws, and must be new.

        Guarantees: counts and noise are multiples of one public power of two, at most one, so that
        no digit of a noisy count belongs to its noise alone (`noise/grid.py`).
        """
        scale = self.scale(tables, examples_per_unit)
        if grid_of(scale) > 1.0:
            raise Refused(
                f"Expected noise of less than {2**20:,} on counts, found {scale:,.0f}. Use a "
                "smaller noise_multiplier."
            )
        noisy = {}
        for table in tables:
            count_R, stream = counts[table.name], Stream("selection", table.name, release)
            drawn_R = self.draw(table.num_rows, scale, source, stream, count_R.device)
            noisy[table.name] = count_R + round_to_(drawn_R.double(), grid_of(scale))
        return noisy

    @abstractmethod
    def scale(self, tables: Sequence[Table], examples_per_unit: int) -> float:
        """Scale of the noise on each count."""

    @abstractmethod
    def draw(
        self, count: int, scale: float, source: NoiseSource, stream: Stream, device: torch.device
    ) -> Tensor:
        """Draw noise of this scale for `count` rows."""


@dataclass(frozen=True, kw_only=True)
class NoisyHistogram(Histogram):
    """Gaussian noise of standard deviation noise_multiplier * k * sqrt(sum_f m_f).

    k is the largest number of examples that a unit has. The cost does not depend on how many rows
    are selected. Of a draw only its Gaussian part is relied on (`noise/keystream.py`), so that
    draws are larger by what is not: by a part in 3,000.
    """

    noise_multiplier: float = 50.0
    """Standard deviation of the noise on each count, divided by the most that one unit may move all
    counts together (in L2 norm)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("noise_multiplier", self.noise_multiplier, above=0)

    def event(self, tables: Sequence[Table]) -> DpEvent:
        return gaussian(self.noise_multiplier)

    def scale(self, tables: Sequence[Table], examples_per_unit: int) -> float:
        norm = examples_per_unit * math.sqrt(self.counts_per_example(tables))
        return self.noise_multiplier * norm / SMALLEST_HIDDEN_SHARE

    def draw(
        self, count: int, scale: float, source: NoiseSource, stream: Stream, device: torch.device
    ) -> Tensor:
        return source.fill_(torch.empty(count, 1, device=device), stream, scale).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class GumbelHistogram(Histogram):
    """Gumbel noise of scale 1 / epsilon, as in the paper, charged at its true cost.

    A count that moves by one has a privacy loss of -e + (exp(e) - 1) E or e - (1 - exp(-e)) E with
    E ~ Exp(1), for any number of selected rows, and an example moves sum_f m_f counts.
    """

    epsilon: float = 0.01
    """One over the scale of the noise on each count. It is not what the release costs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon, above=0)

    def event(self, tables: Sequence[Table]) -> DpEvent:
        return composed([(gumbel(self.epsilon), self.counts_per_example(tables))])

    def scale(self, tables: Sequence[Table], examples_per_unit: int) -> float:
        assert examples_per_unit == 1  # the plan refuses this noise for users
        return 1.0 / self.epsilon

    def draw(
        self, count: int, scale: float, source: NoiseSource, stream: Stream, device: torch.device
    ) -> Tensor:
        return (-source.uniform(count, stream, device).log()).log_().mul_(-scale)
