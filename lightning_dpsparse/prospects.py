"""Whether a plan leaves anything to learn: what clipping lets through, against the noise.

A plan may be private and useless: too much noise for too little data. That follows from public
numbers, before any step is taken, and whoever starts such a run should hear of it then.

Over T steps, sums of gradients add up to at most T B C, where all units of all batches pull in one
direction. Noise adds up too: its standard deviation is sigma C sqrt(T) in each of the d numbers
that are trained, so its length is sigma C sqrt(d T). The ratio of the two is

    B sqrt(T) / (sigma sqrt(d)).

It is one over the excess loss of private gradient descent on convex losses, up to a constant
(Bassily, Smith and Thakurta 2014, arXiv:1405.7085), and neither C nor the learning rate matters. It
is the largest signal that clipping allows. The gradients of a real model mostly cancel, and leave a
few percent of it: a ratio of one is hopeless, and so is one of ten.

Where the line lies was measured, with the DLRM of the demo on 400,000 synthetic clicks in one pass
(d = 67,000; AUC 0.70 without privacy, each with the table's learning rate in proportion to the
batch): `LEAST` lies between what learned next to nothing and the first that did learn. The table is
in docs/utility.md. All recipes lie above it by a factor of three or more.
"""

from __future__ import annotations

import math

from lightning_dpsparse.plan import Users
from lightning_dpsparse.run_plan import RunPlan

LEAST = 30.0
"""The ratio below which a run learns next to nothing."""


def signal_to_noise(run: RunPlan, num_parameters: int) -> float | None:
    """The largest signal that clipping allows over a run, as a multiple of the noise.

    B sqrt(T) / (sigma sqrt(d)). Where whole users are drawn, B counts users, and a user stands for
    up to k examples. If these pull in different directions, their sum is sqrt(k) times as long as
    one of them, and so is C: the signal is that of B sqrt(k) examples. The largest k is taken, as
    the true number of a user's examples is no public number.

    Args:
        num_parameters: d, how many numbers an example may move: all of the dense layers, and one
            row of a table for every feature.

    Returns None if the run has no end.

    >>> from lightning_dpsparse.plan import PrivacyPlan
    >>> from lightning_dpsparse.run_plan import resolve
    >>> from lightning_dpsparse.sampling.poisson import Phase
    >>> plan = PrivacyPlan(noise_multiplier=2.0)
    >>> run = resolve(plan, [Phase(0, 10_000, 0.01)], 10_000, 100.0, 64)
    >>> signal_to_noise(run, 400)  # 100 * 8 / (2 * 20)
    20.0
    """
    if run.planned_steps is None:
        return None
    noise = run.plan.mechanism.gradient_noise(run.noise_multiplier) if run.noise_multiplier else 0.0
    if noise == 0.0:
        return math.inf
    signal = run.expected_batch * math.sqrt(run.planned_steps)
    if isinstance(run.plan.unit, Users) and run.plan.unit.drawn == "users":
        signal *= math.sqrt(run.plan.unit.max_examples)
    return signal / (noise * math.sqrt(max(1, num_parameters)))


def noise_warning(run: RunPlan, num_parameters: int) -> str | None:
    """A warning for a run that will learn next to nothing; None if it may learn."""
    ratio = signal_to_noise(run, num_parameters)
    if ratio is None or ratio >= LEAST:
        return None
    users, epsilon = isinstance(run.plan.unit, Users), run.plan.epsilon
    remedies = ["larger batches", "more epochs", "more data", "fewer dense parameters"]
    if users and not run.plan.draws_whole_users:
        remedies.append("drawn='users'")
    remedies.append("less noise" if epsilon is None else "a larger epsilon")
    counted = "users" if run.plan.draws_whole_users else "examples"
    return (
        f"Expected at least {LEAST:g} times as much signal as noise over the run, found "
        f"{ratio:.2g}: with a noise multiplier of {run.noise_multiplier:.3g} on batches of "
        f"{run.expected_batch:,.0f} {counted}, in {run.planned_steps:,} steps, a model of "
        f"{num_parameters:,} parameters learns next to nothing. Take {', '.join(remedies[:-1])} or "
        f"{remedies[-1]}."
    )
