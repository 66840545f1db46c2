"""DPAdam is Adam without noise, and takes exactly the noise off the second moment with it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse import DPAdam
from lightning_dpsparse.refused import Refused

SHAPES = [(5, 3), (7,), ()]


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    """Of one step, and of very different sizes: those of the last parameter are tiny."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        size * torch.randn(shape, generator=generator)
        for shape, size in zip(SHAPES, (1.0, 0.1, 1e-6))
    ]


def take(optimizer: Any, values: list[Tensor], grads: list[Tensor | None]) -> None:
    for value, grad in zip(values, grads):
        value.grad = None if grad is None else grad.to(value.dtype)
    optimizer.step()


def moment_stddev(beta2: float, step: int) -> float:
    """r_t: the standard deviation of the second moment of pure noise, over its mean.

    By the weights themselves, not by the sum that the optimizer uses.
    """
    weights = [(1 - beta2) * beta2**i / (1 - beta2**step) for i in range(step)]
    return math.sqrt(2 * sum(weight**2 for weight in weights))


# ---- without noise --------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [None, 0.3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_noise_it_is_adam(weight_decay: float, floor: float | None) -> None:
    """AdamW, with weight decay: in groups, with settings of their own, and by a schedule."""
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    ends = []
    for make, more in ((DPAdam, {"floor": floor, "noise_stddev": 0.0}), (kind, {})):
        values = parameters()
        groups = [
            {"params": values[:1], "betas": (0.5, 0.9), "lr": 0.02},
            {"params": values[1:], "eps": 1e-6},
        ]
        optimizer: Any = make(groups, lr=0.01, weight_decay=weight_decay, **more)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        for step in range(50):
            take(optimizer, values, list(gradients(step)))
            schedule.step()
        ends.append(values)
    for found, expected, start in zip(*ends, parameters()):
        assert (expected - start).abs().max() > 0.01
        # 50 steps of at most 0.02, each with a few roundings of 6e-8; and the weights' own.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=5e-7)


# ---- with noise -----------------------------------------------------------------------------


def naive(
    start: Tensor,
    history: list[tuple[Tensor | None, float, float]],
    betas: tuple[float, float],
    floor: float | None,
    weight_decay: float,
) -> Tensor:
    """Means as sums over all earlier steps, in float64: of (gradient, noise, learning rate)."""
    weight, seen = start.detach().double(), []
    for gradient, noise, lr in history:
        if gradient is None:
            continue
        seen.append((gradient.double(), noise))
        ages, t = range(len(seen) - 1, -1, -1), len(seen)
        first = [(1 - betas[0]) * betas[0] ** age / (1 - betas[0] ** t) for age in ages]
        second = [(1 - betas[1]) * betas[1] ** age / (1 - betas[1] ** t) for age in ages]
        mean = sum(a * g for a, (g, _) in zip(first, seen))
        square = sum(a * g**2 for a, (g, _) in zip(second, seen))
        variance = sum(a * s**2 for a, (_, s) in zip(second, seen))
        least = moment_stddev(betas[1], t) if floor is None else floor**2
        corrected = torch.as_tensor(square - variance).clamp(min=least * variance)
        weight = weight * (1 - lr * weight_decay) - lr * mean / (corrected.sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("floor", [None, 0.2])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_the_naive_sum_over_all_steps(weight_decay: float, floor: float | None) -> None:
    """The noise changes, rates follow a schedule, and parameters are frozen and thawed."""
    values, betas = parameters(), [(0.9, 0.98), (0.0, 0.9), (0.8, 0.95)]
    groups = [{"params": [value], "betas": pair} for value, pair in zip(values, betas)]
    optimizer = DPAdam(groups, lr=0.02, floor=floor, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    history: list[list[tuple[Tensor | None, float, float]]] = [[] for _ in values]
    for step in range(60):
        noise = 0.5 if step < 20 else 0.2
        lr = optimizer.param_groups[0]["lr"]
        frozen = {1: range(10, 25), 2: range(5)}
        grads = [
            None if step in frozen.get(i, ()) else grad for i, grad in enumerate(gradients(step))
        ]
        optimizer.set_noise_stddev(noise)
        take(optimizer, values, grads)
        for past, grad in zip(history, grads):
            past.append((grad, noise, lr))
        schedule.step()
    for value, start, past, pair in zip(values, parameters(), history, betas):
        expected = naive(start, past, pair, floor, weight_decay)
        # 60 roundings of weights below 2, 6e-8 each in the mean; and steps of at most 0.02, in
        # which a second moment that is 2e-7 off moves a denominator by 1e-6 at the lowest floor.
        torch.testing.assert_close(value.detach().double(), expected, rtol=0, atol=2e-6)


SIZE = 20_000


def corrected(optimizer: DPAdam, value: Tensor) -> Tensor:
    """The second moment without noise, before its floor."""
    state, beta2 = optimizer.state[value], optimizer.param_groups[0]["betas"][1]
    square = state["exp_avg_sq"].double() / (1 - beta2 ** float(state["step"]))
    return square - state["noise_variance"].double()


def denominators(optimizer: DPAdam, value: Tensor, gradient: Tensor) -> Tensor:
    """What the next step divides by. The weights begin at zero, which hides no digit of it."""
    lr, (beta1, _) = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]
    with torch.no_grad():
        value.zero_()
    take(optimizer, [value], [gradient])
    state = optimizer.state[value]
    mean = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
    return (-lr * mean / value.detach()).double()


def test_of_pure_noise_nothing_is_left_on_average() -> None:
    """Its standard deviation is the one that the floor is derived from."""
    torch.manual_seed(0)
    value, noise, beta2 = torch.zeros(SIZE, requires_grad=True), 1e-3, 0.99
    optimizer = DPAdam([value], betas=(0.9, beta2), noise_stddev=noise)
    for step in range(1, 401):
        take(optimizer, [value], [noise * torch.randn(SIZE)])
        if step in (1, 10, 100, 400):
            left, stddev = corrected(optimizer, value) / noise**2, moment_stddev(beta2, step)
            # Five standard deviations of a mean of 20,000.
            assert abs(float(left.mean())) < 5 * stddev / math.sqrt(SIZE)
            # A standard deviation of N squares has a relative error of sqrt(14 / 4 N) at most: 5 of
            # them are 6.6%.
            assert abs(float(left.std()) / stddev - 1) < 0.066
    # As long as noise does not change, what is taken off is exact.
    assert torch.equal(optimizer.state[value]["noise_variance"], torch.tensor(noise**2))


@pytest.mark.parametrize("signal", [1.0, 3.0])
def test_the_denominator_is_the_signal_and_not_the_noise(signal: float) -> None:
    torch.manual_seed(0)
    noise, beta2 = 0.01, 0.999
    value = torch.zeros(SIZE, requires_grad=True)
    plain = value.detach().clone().requires_grad_()
    optimizer = DPAdam([value], betas=(0.9, beta2), noise_stddev=noise)
    adam: Any = torch.optim.Adam([plain], betas=(0.9, beta2))
    for _ in range(500):
        gradient = noise * (signal + torch.randn(SIZE))
        found = denominators(optimizer, value, gradient)
        usual = denominators(adam, plain, gradient)
    # A square of g + N(0, 1) has the variance 2 + 4 g^2: with weights, r_t^2 (1 + 2 g^2). Nothing
    # is at the floor, and a mean of 20,000 may be five standard deviations off. eps adds 2e-6.
    stddev = moment_stddev(beta2, 500) * math.sqrt(1 + 2 * signal**2)
    tolerance = 5 * stddev / math.sqrt(SIZE) + 1e-5
    assert abs(float((found / noise).square().mean()) - signal**2) < tolerance
    assert abs(float((usual / noise).square().mean()) - signal**2 - 1) < tolerance


def test_the_floor_is_one_standard_deviation_of_the_second_moment() -> None:
    """Where a gradient is noise, most numbers are at the floor; it falls with the steps."""
    torch.manual_seed(0)
    value, noise = torch.zeros(SIZE, requires_grad=True), 1e-3
    optimizer = DPAdam([value], noise_stddev=noise, eps=0.0)
    floors = {}
    for step in range(1, 101):
        found = denominators(optimizer, value, noise * torch.randn(SIZE)) / noise
        floors[step] = float(found.min())
        assert floors[step] == pytest.approx(math.sqrt(moment_stddev(0.999, step)), rel=1e-4)
        assert (found < floors[step] * 1.001).double().mean() > 0.6
    assert floors[1] == pytest.approx(1.189, abs=1e-3)
    state = optimizer.state[value]
    state["step"].fill_(1e5)  # the end of the docstring
    state["exp_avg_sq"].zero_()
    found = denominators(optimizer, value, noise * torch.ones(SIZE)) / noise
    assert float(found.min()) == pytest.approx(0.178, abs=1e-3)


def test_a_floor_that_is_given_is_a_fraction_of_the_noise() -> None:
    torch.manual_seed(0)
    value, noise = torch.zeros(SIZE, requires_grad=True), 1e-3
    optimizer = DPAdam([value], noise_stddev=noise, floor=0.5)
    for _ in range(20):
        found = denominators(optimizer, value, noise * torch.randn(SIZE))
    assert float(found.min()) == pytest.approx(0.5 * noise, rel=1e-4)


def test_noise_that_changes_is_taken_off_as_it_was() -> None:
    """A second moment holds old noise and new, and so does what is taken off it."""
    torch.manual_seed(0)
    value, beta2 = torch.zeros(SIZE, requires_grad=True), 0.99
    optimizer = DPAdam([value], betas=(0.9, beta2))
    past = []
    for step in range(1, 121):
        noise = 3.0 if step <= 50 else 1.0
        past.append(noise)
        optimizer.set_noise_stddev(noise)
        take(optimizer, [value], [noise * torch.randn(SIZE)])
        if step in (50, 51, 60, 120):
            weights = [(1 - beta2) * beta2**i / (1 - beta2**step) for i in range(step)]
            variance = sum(a * s**2 for a, s in zip(weights, reversed(past)))
            stddev = math.sqrt(sum(2 * (a * s**2) ** 2 for a, s in zip(weights, reversed(past))))
            found = float(optimizer.state[value]["noise_variance"])
            assert found == pytest.approx(variance, rel=1e-5)
            assert abs(float(corrected(optimizer, value).mean())) < 5 * stddev / math.sqrt(SIZE)


# ---- what is kept ---------------------------------------------------------------------------


def test_a_state_dict_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Of plain tensors, and without the noise, which is told anew."""
    values = parameters()
    optimizer = DPAdam(values, lr=0.05, noise_stddev=0.5)
    for step in range(8):
        take(optimizer, values, [None, *gradients(step)[1:]] if step < 3 else gradients(step))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    others = [value.detach().clone().requires_grad_() for value in values]
    restored = DPAdam(others)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with pytest.raises(Refused, match="found that nobody did"):
        take(restored, others, list(gradients(8)))
    restored.set_noise_stddev(0.5)
    for step in range(8, 16):
        take(optimizer, values, list(gradients(step)))
        take(restored, others, list(gradients(step)))
    for value, other in zip(values, others):
        assert torch.equal(value, other)
        state = optimizer.state[value]
        assert all(torch.equal(found, state[n]) for n, found in restored.state[other].items())
        assert all(type(found) is Tensor for found in state.values())


def test_a_copy_knows_what_its_original_was_told() -> None:
    optimizer = DPAdam(parameters())
    assert copy.deepcopy(optimizer).noise_stddev is None
    optimizer.set_noise_stddev(0.25)
    assert copy.deepcopy(optimizer).noise_stddev == 0.25


def test_the_state_of_another_optimizer_is_refused() -> None:
    values = parameters()
    adam = torch.optim.Adam(values)
    take(adam, values, list(gradients(0)))
    with pytest.raises(Refused, match=r"Expected a state of DPAdam.*noise is in it is not known"):
        DPAdam(values).load_state_dict(adam.state_dict())


def test_the_settings_of_another_optimizer_are_refused() -> None:
    """Of one that took no step, and so has no state to tell it by."""
    values = parameters()
    with pytest.raises(Refused, match=r"Expected the settings of DPAdam.*found \['amsgrad'"):
        DPAdam(values).load_state_dict(torch.optim.Adam(values).state_dict())


def test_a_parameter_counts_its_own_steps() -> None:
    """One that is thawed later begins as it would have begun at first."""
    late, first = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    one = DPAdam([other, late], noise_stddev=0.3)
    two = DPAdam([first], noise_stddev=0.3)
    for step in range(6):
        gradient = gradients(step)[0][:, 0][:3]
        take(one, [other, late], [gradient, None if step < 3 else gradient])
        if step >= 3:
            take(two, [first], [gradient])
    assert torch.equal(late, first)
    assert not torch.equal(late, other)
    assert (float(one.state[late]["step"]), float(one.state[other]["step"])) == (3, 6)


def test_a_step_never_waits_for_the_device() -> None:
    """Tensors on `meta` have no values: whoever asks for one fails."""
    value = torch.zeros(4, 2, device="meta", requires_grad=True)
    optimizer = DPAdam([value], weight_decay=0.1, noise_stddev=0.1)
    for _ in range(2):
        take(optimizer, [value], [torch.zeros(4, 2, device="meta")])
    assert {found.device.type for found in optimizer.state[value].values()} == {"meta"}


# ---- refusals -------------------------------------------------------------------------------


def test_a_step_before_anybody_told_the_noise_is_refused() -> None:
    """Before the closure, which would spend a step."""
    values, called = parameters(), []
    optimizer = DPAdam(values)

    def closure() -> float:
        called.append(torch.is_grad_enabled())
        return 1.5

    with pytest.raises(Refused, match=r"found that nobody did.*set_noise_stddev.*0 means no noise"):
        optimizer.step(closure)
    assert not called
    optimizer.set_noise_stddev(0.0)
    assert optimizer.step(closure) == 1.5
    assert called == [True]


def test_noise_that_was_given_must_be_the_noise() -> None:
    optimizer = DPAdam(parameters(), noise_stddev=0.5)
    optimizer.set_noise_stddev(0.5)
    with pytest.raises(Refused, match=r"that of the gradients, 0, found 0.5. Leave it out"):
        optimizer.set_noise_stddev(0.0)
    assert optimizer.noise_stddev == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr >= 0"),
        ({"lr": math.nan}, "lr >= 0"),
        ({"lr": "0.1"}, "lr >= 0"),
        ({"betas": 0.9}, "betas to be two numbers"),
        ({"betas": (0.9,)}, "betas to be two numbers"),
        ({"betas": (0.9, 1.0)}, "each of betas between 0 and 1"),
        ({"betas": (-0.1, 0.9)}, "each of betas between 0 and 1"),
        ({"eps": -1e-8}, "eps >= 0"),
        ({"floor": 0.0}, "floor > 0"),
        ({"floor": -1.0}, "floor > 0"),
        ({"floor": math.inf}, "floor > 0"),
        ({"floor": True}, "floor > 0"),
        ({"weight_decay": -0.1}, "weight_decay >= 0"),
        ({"noise_stddev": -1.0}, "noise_stddev >= 0"),
        ({"noise_stddev": math.nan}, "noise_stddev >= 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(Refused, match=f"Expected {message}"):
        DPAdam(parameters(), **settings)
    if "noise_stddev" in settings:
        with pytest.raises(Refused, match=f"Expected {message}"):
            DPAdam(parameters()).set_noise_stddev(**{"stddev": settings["noise_stddev"]})
        return
    with pytest.raises(Refused, match=f"Expected {message}"):  # of one group
        DPAdam([{"params": parameters(), **settings}])
    state = DPAdam(parameters()).state_dict()
    state["param_groups"][0].update(settings)
    with pytest.raises(Refused, match=f"Expected {message}"):  # of a file
        DPAdam(parameters()).load_state_dict(state)


def test_sparse_gradients_are_refused() -> None:
    table = torch.zeros(4, 2, requires_grad=True)
    optimizer = DPAdam([table], noise_stddev=0.1)
    with pytest.raises(Refused, match="Expected dense gradients for DPAdam, found a sparse one"):
        take(optimizer, [table], [torch.ones(4, 2).to_sparse()])
