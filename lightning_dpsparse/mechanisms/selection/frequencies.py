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

import numpy as np
import torch
from torch import Tensor

from lightning_dpsparse.accounting.events import DpEvent, composed, gaussian, gumbel
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# R rows of a table: its whole public range of ids, whether they occur or not


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

    @property
    def trusted(self) -> str:
        """What the report says of the file."""
        return f"The frequencies in {self.path}, by which rows were selected: taken to be public."

    def event(self, tables: Sequence[Table]) -> None:
        return None

    def scores(self, tables: Sequence[Table]) -> dict[str, Tensor]:
        path = Path(self.path)
        if not path.is_file():
            raise Refused(
                f"Expected public frequencies in {self.path!r}, found no such file. Write one with "
                "numpy.savez: an array of counts for every table, under its name."
            )
        with np.load(path) as arrays:
            found = {t.name: arrays[t.short_name] for t in tables if t.short_name in arrays}
        for table in tables:
            if table.name not in found or found[table.name].shape != (table.num_rows,):
                shape = found[table.name].shape if table.name in found else "nothing"
                raise Refused(
                    f"Expected {table.num_rows:,} counts for table {table.short_name!r} in "
                    f"{self.path!r}, found {shape}."
                )
        return {name: torch.from_numpy(counts.astype(np.float64)) for name, counts in found.items()}


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
        if min([self.max_ids_per_bag, *self.max_ids_of.values()]) < 1:
            raise Refused("Expected at least one id of a bag to be counted, found fewer.")

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
    are selected.
    """

    noise_multiplier: float = 50.0
    """Standard deviation of the noise on each count, divided by the most that one unit may move all
    counts together (in L2 norm)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.noise_multiplier < math.inf:
            raise Refused(f"Expected noise_multiplier > 0, found {self.noise_multiplier}.")

    def event(self, tables: Sequence[Table]) -> DpEvent:
        return gaussian(self.noise_multiplier)

    def scale(self, tables: Sequence[Table], examples_per_unit: int) -> float:
        norm = examples_per_unit * math.sqrt(self.counts_per_example(tables))
        return self.noise_multiplier * norm

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
        if not 0 < self.epsilon < math.inf:
            raise Refused(f"Expected epsilon > 0, found {self.epsilon}.")

    def event(self, tables: Sequence[Table]) -> DpEvent:
        return composed([(gumbel(self.epsilon), self.counts_per_example(tables))])

    def scale(self, tables: Sequence[Table], examples_per_unit: int) -> float:
        assert examples_per_unit == 1  # the plan refuses this noise for users
        return 1.0 / self.epsilon

    def draw(
        self, count: int, scale: float, source: NoiseSource, stream: Stream, device: torch.device
    ) -> Tensor:
        return (-source.uniform(count, stream, device).log()).log_().mul_(-scale)
