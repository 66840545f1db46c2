"""LazyDP: DP-SGD whose noise waits until a row is read (Lim et al. 2024, arXiv:2404.08847).

DP-SGD puts noise on every row of every table in every step, although a batch reads few of them.
LazyDP gives a row its noise when somebody is about to see it. A row that takes part in a step gets
the step's noise with its gradient, at once. All other rows *owe* the step's noise. They *pay*
before they are read, and all rows pay before anything is released. What a row owes for many steps
is one Gaussian, so paying costs one draw, however long the row was not read.

That a row owes noise says nothing about anybody, but nobody may see that it did. So what is paid
late lands on a grid of its own, on which weights add up without rounding, and so does a step's
update (`noise/regrid.py`): nobody can tell a row that was read, and paid in between, from one that
was not. (The paper also defers the noise of rows that were read. Their gradient is then rounded to
float32 before its noise arrives, and low bits of a weight tell how many examples there were.)

Read next: `clock.py`, how much a row owes; `weight_grid.py`, where payments land; `debts.py`, the
rows of one stack of tables; `state.py`, a batch on one kernel, step by step. For the average of
weights: `gap_maps.py` and `averages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dpsparse.checks import check_flag, check_whole
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.state import StepNoise, TableKernel
from lightning_dpsparse.mechanisms.lazydp.state import LazyTables
from lightning_dpsparse.refused import Refused


@dataclass(frozen=True)
class LazyDP(Mechanism):
    """Releases the same model as DP-SGD, and updates only the rows that are read.

    A row pays what it owes before it is read, in training and in evaluation, and all rows pay
    before anything is released. So what can be seen has the distribution that DP-SGD gives it. The
    fused optimizer must be SGD.
    """

    aggregate: bool = True
    """Whether a row pays all that it owes with one draw. Otherwise it pays with a draw for every
    step, which is for study: it is slow, and takes memory for every step that the rows of a batch
    or chunk owe. With noise_source=row_keyed these are the very draws of DP-SGD."""

    chunk_rows: int = 1 << 14
    """Number of rows that pay at a time when all rows pay."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees what is released (checkpoints, the final model, evaluations) and knows "
        "all other data. Not covered: one who watches the memory of the running job, where rows "
        "still owe noise."
    )

    def __post_init__(self) -> None:
        check_flag("aggregate", self.aggregate)
        check_whole("chunk_rows", self.chunk_rows)

    def check_optimizer(self, kind: str, weight_decay: float) -> None:
        if kind != "sgd":
            raise Refused(
                f"Expected fused_optimizer kind 'sgd' with {type(self).__name__}, found "
                f"{kind!r}: its steps depend on past noise, so that noise cannot be put off. "
                "Use sgd (schedules and weight decay are fine), or DPSGD with any optimizer."
            )

    def check_weight_copies(self, copier: str) -> None:
        raise Refused(
            f"Expected no weight averaging with {type(self).__name__}, found {copier}: it would "
            "average rows that still owe noise. Use lightning_dpsparse.AverageWeights, which has "
            "them pay."
        )

    def open_table(self, kernel: TableKernel, noise: StepNoise) -> LazyTables:
        return LazyTables(kernel, noise, aggregate=self.aggregate, chunk_rows=self.chunk_rows)
