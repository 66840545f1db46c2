"""Whether a plan leaves anything to learn: what clipping lets through, against the noise.

A plan may be private and useless: too much noise for too little data. That follows from public
numbers, before any step is taken, and whoever starts such a run should hear of it then.

Over T steps, sums of gradients add up to at most T B C in one direction, where all units of all
batches pull in it. Noise adds up too, to a standard deviation of sigma C sqrt(T) in any direction.
The ratio of the two is

    B sqrt(T) / sigma.

Neither C nor the learning rate matters, nor, to first order, how many parameters there are: what a
model says of an example moves with the weights along that example's gradient, which is one
direction, and the noise in all others passes it by.

The ratio is for the largest signal that clipping allows. Gradients of a real model mostly cancel,
and leave a small part of it: so the ratio must be large. How large was measured, on 400,000
synthetic clicks in one pass, at clip norm 10, one seed each. Without privacy the DLRM of the demo,
with 67,000 dense parameters, has an AUC of 0.70, and one with 3,400 has 0.72:

    ratio     AUC of the DLRM     of the small one
     2,000    0.506               0.493
     2,700    0.504
     3,000    0.504
     6,000    0.498 to 0.585      0.566    (by learning rate and batch size)
    12,000    0.637
    23,000    0.663
    29,000    0.663

Below `LEAST` nothing was learned. The lowest ratio of a recipe that is there to learn is 42,000.
docs/utility.md has the plans behind these numbers.
"""

from __future__ import annotations

import math

from lightning_dpsparse.plan import Users
from lightning_dpsparse.run_plan import RunPlan

LEAST = 4_000.0
"""The ratio below which a run learns next to nothing."""


def signal_to_noise(run: RunPlan) -> float | None:
    """The largest signal that clipping allows over a run, as a multiple of the noise.

    B sqrt(T) / sigma. Where whole users are drawn, B counts users, and a user stands for up to k
    examples. If these pull in different directions, their sum is sqrt(k) times as long as one of
    them, and so is C: there the signal is that of B sqrt(k) examples. k is the cap, since the
    number of examples that users really have is not public.

    Returns None if nobody knows how many steps the run has.

    >>> from lightning_dpsparse.plan import PrivacyPlan
    >>> from lightning_dpsparse.run_plan import resolve
    >>> from lightning_dpsparse.sampling.poisson import Phase
    >>> plan = PrivacyPlan(noise_multiplier=2.0)
    >>> run = resolve(plan, [Phase(0, 10_000, 0.01)], 10_000, 100.0, 64)
    >>> signal_to_noise(run)  # 100 * 8 / 2
    400.0
    """
    if run.planned_steps is None or run.planned_steps < 1:  # of a stream whose end is not known
        return None
    noise = run.plan.mechanism.gradient_noise(run.noise_multiplier) if run.noise_multiplier else 0.0
    if noise == 0.0:
        return math.inf
    signal = run.expected_batch * math.sqrt(run.planned_steps)
    if isinstance(run.plan.unit, Users) and run.plan.unit.drawn == "users":
        signal *= math.sqrt(run.plan.unit.max_examples)
    return signal / noise


def noise_warning(run: RunPlan) -> str | None:
    """A warning for a run that will learn next to nothing; None if it may learn."""
    ratio = signal_to_noise(run)
    if ratio is None or ratio >= LEAST:
        return None
    remedies = ["larger batches", "more epochs", "more data"]
    if isinstance(run.plan.unit, Users) and not run.plan.draws_whole_users:
        remedies.append("drawn='users'")
    last = "less noise" if run.plan.epsilon is None else "a larger epsilon"
    counted = "users" if run.plan.draws_whole_users else "examples"
    return (
        f"Expected at least {LEAST:,.0f} times as much signal as noise over the run, found "
        f"{ratio:,.0f}: with a noise multiplier of {run.noise_multiplier:.3g} on batches of "
        f"{run.expected_batch:,.0f} {counted}, in {run.planned_steps:,} steps, a model learns next "
        f"to nothing. Take {', '.join(remedies)} or {last}."
    )
