"""One run's private steps: the engine, joined to sharded tables and a process group.

A step is `start`, then a forward pass inside `capture` and `add_part` for every part of the batch
but the last, then a forward pass inside `capture` and `step`. What a step does is in
`engine/step.py`; here it is given its reads, its losses and the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_dpsparse.engine.ghost import check_layers
from lightning_dpsparse.engine.mechanism import WholeBatch
from lightning_dpsparse.engine.rounding import check_price, price
from lightning_dpsparse.engine.state import Progress
from lightning_dpsparse.engine.step import Clipped, StepConfig, clipped_sums, release
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.backward_paths import BackwardPaths
from lightning_dpsparse.sharded.measurements import StepMeasurements
from lightning_dpsparse.sharded.observation import Observation
from lightning_dpsparse.sharded.private_dense import PrivateDense
from lightning_dpsparse.sharded.private_tables import PrivateTables
from lightning_dpsparse.sharded.process_group import first_of_units, sum_over_ranks
from lightning_dpsparse.sharded.whole_batch import Parts, list_ids


class PrivateSteps:
    """Cuts the lookups of a module's tables and takes private steps on it. `close` must end it.

    Args:
        probe: Looks at a step before anything of it is released, and raises if it finds that
            examples depend on each other. None if the plan says that they do not.
        diagnose: Count what is clipped and read. These counts are not private.
    """

    def __init__(
        self,
        module: nn.Module,
        run: RunPlan,
        key: RunKey,
        *,
        diagnose: bool = False,
        probe: Callable[[], None] | None = None,
    ) -> None:
        check_layers(module)
        plan, self._probe = run.plan, probe
        self._config = StepConfig(
            plan.mechanism,
            plan.clipping,
            plan.clip_norm,
            run.noise_multiplier,
            run.expected_batch,
            plan.make_source(key),
            diagnose,
            plan.dense_scale,
        )
        self.dense = PrivateDense(module, plan.dense)
        check_price(self.rounding_price)
        self.tables = PrivateTables(module)
        self.state = self.tables.open(self._config)
        self.paths = BackwardPaths(module)
        self.measurements = StepMeasurements(diagnose=diagnose)
        self._sums: Clipped | None = None
        self._whole_batch: WholeBatch | None = None
        self._step = 0
        self._unit_sizes: Sequence[int] | None = None
        self._num_examples: int | None = None
        self._is_open = False
        """Whether a step was charged and has not been released yet."""
        self._seen = 0
        """Number of examples of the step so far, on this rank."""

    def close(self) -> None:
        """Make the module an ordinary one again."""
        self.dense.close()
        self.tables.close()

    def start(
        self,
        step: int,
        unit_sizes: Sequence[int] | None = None,
        num_examples: int | None = None,
    ) -> bool:
        """Begin a step, before the first part of its batch. An interrupted step is dropped.

        `step` names the noise, and must not be the same for two batches under one key.
        `unit_sizes` is how many examples each user has in this rank's batch, in order: the examples
        of a user are then clipped together. Without it each is clipped alone. All ranks give it, or
        none. `num_examples` is how many were drawn for this rank, where that is known.

        Returns whether other parameters are trainable than before.
        """
        if unit_sizes is not None and min(unit_sizes, default=1) < 1:
            raise Refused(
                "Expected at least one example of every user, found none of some. Leave out users "
                "without examples."
            )
        self._step, self._sums, self._unit_sizes = step, None, unit_sizes
        self._num_examples, self._seen, self._is_open = num_examples, 0, True
        self._whole_batch = None
        has_changed = self.dense.start_step(step, self._config.noise)
        self.tables.start_step()
        return has_changed

    def read_in_parts(self, parts: Parts) -> None:
        """Announce the parts of this step's batch, before the first of them is read."""
        collections, config, step = self.tables.collections, self._config, self._step
        self._whole_batch = WholeBatch(
            lambda: list_ids(parts, collections, config, sum_over_ranks, step)
        )

    @contextmanager
    def capture(
        self,
        *,
        is_whole: bool = True,
        num_examples: int | None = None,
        is_rehearsal: bool = False,
    ) -> Iterator[None]:
        """Surround the forward pass of a step, or of one part of its batch.

        `num_examples` is how many examples this rank has in it. Without it parameters that are read
        apart from any example, as tables of positions are, cannot be told from others. After two
        rehearsals with different numbers of them they are known, however many a step has; nothing
        else is kept of a rehearsal.
        """
        self._forget()
        self.dense.capture.expect(num_examples, is_rehearsal=is_rehearsal)
        with self.tables.cut(is_whole=is_whole), self.dense.capture:
            yield

    def observe(
        self, forward: Callable[[], Tensor], num_examples: int | None = None
    ) -> Observation:
        """Make one forward pass that is looked at and updates nothing."""
        with self.capture(is_whole=False, num_examples=num_examples):
            loss_n = forward()
        loss_n = self.tables.read_the_rest(loss_n)
        self.tables.ranks(loss_n)  # checks the number of losses
        reads, dense = self.tables.reads(), self.dense.capture
        return Observation(loss_n, reads, dense, self.tables.padded_size)

    def add_part(self, loss_n: Tensor) -> None:
        """Make the backward pass of one part of the batch, and clip it. Nothing is updated yet."""
        if self._unit_sizes is not None:
            raise Refused(
                "Expected the whole batch in one part, found more: a user's examples must be "
                "clipped together. Leave max_physical_batch out, or draw fewer users."
            )
        self._clip(loss_n)

    def step(self, loss_n: Tensor) -> None:
        """Clip the last part of the batch, then add noise and update everything."""
        self._clip(loss_n)
        self._is_open = False
        if self._num_examples is not None and self._seen != self._num_examples:
            raise Refused(
                "Expected the examples that were drawn for this step, found another number of "
                "them. Leave none out and add none: give an example that should not count a loss "
                "of zero."
            )
        sums, reads, ranks = self._sums, self.tables.reads(), self.tables.ranks(loss_n)
        assert sums is not None
        if sums.word and self._probe is not None:
            self._probe()  # before anything is released
        release(sums, reads, self.dense.capture, self.state, ranks, self._step)
        self.dense.note_released()
        self.measurements.add(sums, reads)
        self._sums = None
        self._forget()

    def before_release(self, progress: Progress | None = None) -> None:
        """Do what was put off, because the tables are about to be seen. Ranks need not wait."""
        self.state.before_release(progress)

    @property
    def rounding_price(self) -> float:
        """The fraction of the clip norm that is kept for rounding. Rows of tables add to it."""
        config = self._config
        if config.noise_stddev == 0:
            return 0.0
        sensitivity, size = config.clip_norm / config.expected_batch, self.dense.capture.size
        return price(config.noise_stddev, sensitivity, config.expected_batch, size)

    def _clip(self, loss_n: Tensor) -> None:
        if not self._is_open:
            raise Refused(
                "Expected one backward pass for every step that is charged, found a second one: it "
                "would see the same examples at no price. Return all losses from training_step, "
                "and let the optimizer call its closure once."
            )
        tables, dense = self.tables, self.dense
        dense.forget_gradients()
        loss_n = tables.read_the_rest(loss_n)
        self.paths.check(loss_n, tables.reads(), dense.capture)
        wants_probe = self._probe is not None and self.paths.wants_probe
        ranks = tables.ranks(loss_n, word=float(wants_probe))
        self._seen += loss_n.numel()
        sizes = self._unit_sizes
        try:
            part = clipped_sums(
                loss_n,
                tables.reads(),
                dense.capture,
                self._config,
                self.state,
                ranks,
                self._step,
                None if sizes is None else first_of_units(sizes, loss_n, ranks),
                dense.flat if self._sums is None else None,
                self._whole_batch,
            )
        except CheckpointError as error:
            raise Refused(
                "Expected layers that run once in a step, found activation checkpointing, which "
                "runs them again in the backward pass, where they are not recorded. Leave it out, "
                "and take the batch in parts: max_physical_batch."
            ) from error
        self._sums = part if self._sums is None else self._sums + part

    def _forget(self) -> None:
        self.dense.capture.clear()
        self.tables.forget_reads()
