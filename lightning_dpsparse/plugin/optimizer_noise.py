"""Optimizers that reckon with noise are told how much of it there is.

The noise on dense gradients is known once the plan has met its data: sigma C / expected batch,
times the plan's dense scale. An optimizer that has a method `set_noise_stddev` is told at the start
of every run, and of training without a plan, where it is zero. It is told anew when a run goes on
from a checkpoint: the noise may be another then. What is told is public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.optim import Optimizer

from lightning_dpsparse.engine.dense import DenseGaussian
from lightning_dpsparse.engine.state import MechanismState
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.refused import Refused


def check_noise_fits(optimizers: Iterable[Optimizer], plan: PrivacyPlan | None) -> None:
    """Refuse to tell an optimizer one number where the plan's noise is not one for all numbers.

    A dense mechanism that releases other numbers than the gradient's makes gradients of them, in
    which noise differs from number to number.
    """
    if plan is None or type(plan.dense) is DenseGaussian:
        return
    for optimizer, _ in _listening(optimizers):
        raise Refused(
            f"Expected dense=DenseGaussian with {type(optimizer).__name__}, found "
            f"{type(plan.dense).__name__}: the noise in its gradients is not the same for every "
            "number. Leave `dense` out of the plan, or use torch.optim.Adam."
        )


def tell_noise(optimizers: Iterable[Optimizer], state: MechanismState | None) -> None:
    """Tell the standard deviation of the noise on every number of the dense gradients.

    `state` is that of the run's mechanism; None means training without a plan.
    """
    for optimizer, tell in _listening(optimizers):
        if state is None:
            tell(0.0)
        elif type(state).add_dense_noise_ is not MechanismState.add_dense_noise_:
            raise Refused(
                f"Expected a mechanism with independent noise of one size on dense layers with "
                f"{type(optimizer).__name__}, found {type(state.mechanism).__name__}, which adds "
                "noise in a way of its own. Use torch.optim.Adam."
            )
        else:
            tell(state.noise.dense_stddev)


def _listening(
    optimizers: Iterable[Optimizer],
) -> Iterator[tuple[Optimizer, Callable[[float], None]]]:
    """The optimizers that want to be told, without Lightning's wrapper, and how they are told."""
    for wrapped in optimizers:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        tell = getattr(optimizer, "set_noise_stddev", None)
        if tell is not None:
            yield optimizer, tell
