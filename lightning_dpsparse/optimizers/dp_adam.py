"""Adam for noisy gradients: the noise is taken off its second moment.

Adam divides the mean gradient m by the root of the mean square v. Released gradients are g + N(0,
s^2), so v estimates g^2 + s^2. Where noise dominates, all denominators are about s: Adam has become
SGD with momentum. But s is public, so s^2 can be taken off again. What is left estimates g^2, with
an error of its own, so denominators have a floor that this error gives (`DPAdam`).

Reference: Tang, Panda, Sehwag, Mittal 2023, DP-AdamBC (arXiv:2312.14334).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_dpsparse.checks import check_number, is_list, shown
from lightning_dpsparse.refused import Refused

_STATE = ("step", "exp_avg", "exp_avg_sq", "noise_variance")
"""What is kept of a parameter: two numbers, and two tensors of its shape."""

_SETTINGS = ("lr", "betas", "eps", "floor", "weight_decay")
"""What a group of parameters has settings of."""


class DPAdam(Optimizer):
    """Adam that divides by the root of the squared gradient, without the squared noise.

    m = mean of g~, v = mean of g~^2, n = mean of s^2, all with Adam's weights and bias correction
    w -= lr m / (sqrt(max(v - n, floor^2 n)) + eps)

    In gradients of noise alone, v - n has a mean of 0 and after t steps a standard deviation of

        r_t n,   r_t^2 = 2 sum_i a_i^2 = 2 (1 - beta2) (1 + beta2^t) / ((1 + beta2) (1 - beta2^t))

    where a_i are the weights in v, and 2 s^4 is the variance of one square. A squared gradient
    below r_t n cannot be told from nothing. So by default floor^2 = r_t: with beta2 = 0.999 the
    denominator is at least 1.19 s in the first step and 0.18 s in the end.

    n is a mean because noise may change, when a run goes on with another sigma. Each parameter
    counts its own steps. Without noise this is torch.optim.Adam; weight decay is that of AdamW.

    Guarantees: an update is computed from released gradients, earlier updates and public numbers
    alone (post-processing). It costs no privacy and causes no event.
    Reference: Tang et al. 2023, DP-AdamBC (arXiv:2312.14334), whose floor is an absolute number.

    Args:
        params: Parameters, or groups of them. Every group may have settings of its own.
        lr: Learning rate. A weight whose gradient is noise moves up to 1 / floor times as far as
            with Adam, so the best rate is often smaller than Adam's.
        betas: Factors by which the mean and the mean square decay in a step.
        eps: Number that is added to the denominator.
        floor: Smallest denominator, as a fraction of the noise's standard deviation. By default it
            follows from beta2 and the number of steps, as above.
        weight_decay: Factor of the weights that is taken off them, times lr, in every step.
        noise_stddev: Standard deviation of the noise on each number of the gradient. Leave it out
            with DPSparseStrategy, which knows it: see `set_noise_stddev`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        floor: float | None = None,
        weight_decay: float = 0.0,
        noise_stddev: float | None = None,
    ) -> None:
        if noise_stddev is not None:
            _check_noise(noise_stddev)
        self._given = self._noise_stddev = noise_stddev
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "floor": floor,
            "weight_decay": weight_decay,
        }
        _check_settings(settings)
        super().__init__(params, settings)

    @property
    def noise_stddev(self) -> float | None:
        """Standard deviation of the noise on each number of the gradient; None until it is told."""
        return self._noise_stddev

    def set_noise_stddev(self, stddev: float) -> None:
        """Tell the noise on the gradients from now on; 0 means that there is none.

        DPSparseStrategy tells it at the start of every run: only then does the plan know it.
        """
        _check_noise(stddev)
        if self._given is not None and not math.isclose(self._given, stddev, rel_tol=1e-6):
            raise Refused(
                f"Expected DPAdam's noise_stddev to be that of the gradients, {stddev:g}, found "
                f"{self._given:g}. Leave it out: it is told when a run starts."
            )
        self._noise_stddev = stddev

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient."""
        if self._noise_stddev is None:  # before a closure spends anything
            raise Refused(
                "Expected DPAdam to be told the noise on its gradients before its first step, "
                "found that nobody did. Train with DPSparseStrategy, or call "
                "set_noise_stddev(sigma * clip_norm / expected_batch); 0 means no noise."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group, self._noise_stddev**2)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check_settings(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave. The noise of the steps to come is not part of it."""
        for state in state_dict["state"].values():
            if set(state) != set(_STATE):
                raise Refused(
                    f"Expected a state of DPAdam, which has {list(_STATE)} of each parameter, "
                    f"found {shown(sorted(state))}: which noise is in it is not known. Go on with "
                    "the optimizer that saved it, or load the weights alone."
                )
        for group in state_dict["param_groups"]:
            if not set(_SETTINGS) <= set(group):
                raise Refused(
                    f"Expected the settings of DPAdam, {list(_SETTINGS)}, in each group of a "
                    f"checkpoint, found {shown(sorted(set(group) - {'params'}))}. Go on with the "
                    "optimizer that saved it, or load the weights alone."
                )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            _check_settings(group)
        for parameter, state in self.state.items():  # torch leaves this one where the file had it
            state["step"] = state["step"].to(parameter.device)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_given": self._given, "_noise_stddev": self._noise_stddev}
        return super().__getstate__() | kept

    def _update(
        self, parameters: list[Tensor], group: dict[str, Any], noise_variance: float
    ) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [self._state_of(p, noise_variance) for p in parameters]
        steps, means, squares, variances = ([s[name] for s in states] for name in _STATE)
        lr, (beta1, beta2) = group["lr"], group["betas"]

        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        # n += (s^2 - n) (1 - beta2) / (1 - beta2^t): v's weights, bias correction included. As long
        # as noise does not change, n is s^2 to the last bit.
        weights = _sum_of_weights(steps, beta2)
        changes = torch._foreach_sub(variances, noise_variance)
        torch._foreach_mul_(changes, 1 - beta2)
        torch._foreach_div_(changes, weights)
        torch._foreach_sub_(variances, changes)

        denominators = torch._foreach_div(squares, weights)
        torch._foreach_sub_(denominators, variances)
        floors = _squared_floors(group["floor"], beta2, weights)
        torch._foreach_mul_(floors, variances)
        torch._foreach_maximum_(denominators, floors)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(denominators, _sum_of_weights(steps, beta1))
        torch._foreach_addcdiv_(parameters, means, denominators, -lr)

    def _state_of(self, parameter: Tensor, noise_variance: float) -> dict[str, Tensor]:
        """The state of a parameter, which begins when it first has a gradient."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise Refused(
                    "Expected dense gradients for DPAdam, found a sparse one: noise falls on "
                    "every number. Give tables to the fused optimizer."
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["noise_variance"] = parameter.new_full((), noise_variance)
        return state


def _sum_of_weights(steps: list[Tensor], beta: float) -> list[Tensor]:
    """1 - beta^t, exact where it is small."""
    weights = torch._foreach_mul(steps, math.log(beta) if beta else -math.inf)
    torch._foreach_expm1_(weights)
    torch._foreach_neg_(weights)
    return list(weights)


def _squared_floors(floor: float | None, beta2: float, weights: list[Tensor]) -> list[Tensor]:
    """Smallest squared denominator over the noise's variance: floor^2, or r_t of `DPAdam`."""
    if floor is not None:
        return [weight.new_full((), floor**2) for weight in weights]
    # 1 + beta2^t = 2 - (1 - beta2^t)
    floors = torch._foreach_reciprocal(weights)
    torch._foreach_mul_(floors, 2.0)
    torch._foreach_sub_(floors, 1.0)
    torch._foreach_mul_(floors, 2 * (1 - beta2) / (1 + beta2))
    torch._foreach_sqrt_(floors)
    return list(floors)


def _check_noise(stddev: float) -> None:
    check_number("noise_stddev", stddev, least=0, remedy="Without noise it is 0.")


def _check_settings(group: dict[str, Any]) -> None:
    check_number("lr", group["lr"], least=0, remedy="The default is 0.001.")
    betas = group["betas"]
    if not is_list(betas) or len(betas) != 2:
        raise Refused(
            f"Expected betas to be two numbers, found {shown(betas)}. The default is (0.9, 0.999)."
        )
    for beta in betas:
        check_number("each of betas", beta, least=0, below=1, remedy="The default is 0.9, 0.999.")
    check_number("eps", group["eps"], least=0, remedy="The default is 1e-8.")
    if group["floor"] is not None:
        remedy = "Leave it out to have it follow from beta2."
        check_number("floor", group["floor"], above=0, remedy=remedy)
    check_number("weight_decay", group["weight_decay"], least=0, remedy="The default is 0.")
