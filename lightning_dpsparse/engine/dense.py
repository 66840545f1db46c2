"""The numbers in which a dense weight's gradient is clipped and released.

By default these are the numbers of the gradient itself, one for each weight. Noise falls on all of
them, so a `DenseMechanism` may choose a form with fewer numbers for some layers, for example the
gradient in a few directions. It chooses them from the current weights: these were released in
earlier steps, so what is computed from them costs nothing (post-processing).

Read next: `mechanisms/lsg.py` and `mechanisms/sparse_dpsgd.py`, two such mechanisms; `ghost.py`,
where forms are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_dpsparse.checks import check_names
from lightning_dpsparse.engine.outer_products import Positions
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# B examples, O and I rows and columns of a weight: outputs, and inputs (times places in a kernel)


class Form(ABC):
    """A linear map from the gradient of one weight to the numbers that a step releases of it.

    Example b has the gradient G_b = sum_t g_bt a_bt^T. It is never built where its
    factors g and a suffice.
    """

    size: int
    """Number of numbers that a step releases."""

    @abstractmethod
    def square_norms(self, positions: Positions, first_of_unit_B: Tensor | None) -> Tensor:
        """Compute || form(G_b) ||^2 for every example, (B,).

        With `first_of_unit_B`, b is a unit: its square stands at the first example of its unit, and
        all other examples have zero.
        """

    @abstractmethod
    def weighted_sum(self, positions: Positions, factors_B: Tensor, out: Tensor) -> None:
        """Write sum_b f_b form(G_b) into `out`, (size,)."""

    @abstractmethod
    def rebuild(self, released: Tensor) -> Tensor:
        """Compute the gradient that the optimizer gets, (O, I), from the released numbers."""


class DenseMechanism:
    """A frozen description of what is released of dense layers.

    Clipping is joint: one norm covers the tables and everything that is released of dense layers.
    So a step costs what the plan's mechanism says, whatever the forms are.
    """

    def layers_of(self, module: nn.Module) -> dict[str, int]:
        """Return how many columns belong to one input, for the path of every layer with a form."""
        return {}

    def form(
        self, name: str, weight_OI: Tensor, columns: int, noise: NoiseSource, step: int
    ) -> Form | None:
        """Return the form of one weight in this step, the same on every rank.

        None means that the weight is released as it is. `noise` draws what is random about the form
        itself; the noise on gradients is added elsewhere.
        """
        return None


class DenseForms:
    """The forms that a dense mechanism gives to the layers of one model, step by step."""

    def __init__(
        self,
        mechanism: DenseMechanism,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._mechanism = mechanism
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layers: dict[str, tuple[Tensor, int]] = {}
        for path, columns in mechanism.layers_of(module).items():
            weight = module.get_parameter(f"{path}.weight")
            self._layers[names[id(weight)]] = weight, columns  # a shared weight is listed once

    @torch.no_grad()
    def at(self, step: int, noise: NoiseSource) -> dict[str, Form]:
        """Return the forms of this step, which are chosen from the weights before the step."""
        forms = {
            name: self._mechanism.form(name, weight.detach().flatten(1), columns, noise, step)
            for name, (weight, columns) in self._layers.items()
        }
        return {name: form for name, form in forms.items() if form is not None}


@dataclass(frozen=True)
class DenseGaussian(DenseMechanism):
    """Adds noise to every number of every dense parameter: DP-SGD (arXiv:1607.00133)."""


@dataclass(frozen=True, kw_only=True)
class OnLayers(DenseMechanism):
    """Chooses linear layers and convolutions by name; others are as with `DenseGaussian`."""

    layers: tuple[str, ...] = ("*",)
    """Patterns (as in a shell) of layers' paths in the module. Convolutions with groups are never
    among them, nor are biases, nor weights that are computed from other parameters."""

    exclude: tuple[str, ...] | None = None
    """Patterns of layers that are left as they are. By default this is the last layer that the
    module lists, because it makes the prediction."""

    def __post_init__(self) -> None:
        for field in ("layers", "exclude"):  # YAML gives lists
            value = getattr(self, field)
            if value is None and field == "exclude":
                continue
            patterns = (value,) if isinstance(value, str) else value
            check_names(field, patterns, remedy="Give patterns of layers' names, in quotes.")
            object.__setattr__(self, field, tuple(patterns))

    def layers_of(self, module: nn.Module) -> dict[str, int]:
        found = {
            path: layer.weight[0, 0].numel()
            for path, layer in module.named_modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d))
            and getattr(layer, "groups", 1) == 1
            and isinstance(layer.weight, nn.Parameter)  # no parametrization computes it
            and layer.weight.requires_grad
        }
        exclude = list(found)[-1:] if self.exclude is None else self.exclude
        for pattern in (*self.layers, *exclude):
            if not any(fnmatchcase(path, pattern) for path in found):
                raise Refused(
                    f"Expected linear layers or convolutions named {pattern!r}, found "
                    f"{sorted(found)}. Give {type(self).__name__} a pattern that matches."
                )
        chosen = {
            path: columns
            for path, columns in found.items()
            if any(fnmatchcase(path, pattern) for pattern in self.layers)
            and not any(fnmatchcase(path, pattern) for pattern in exclude)
        }
        if not chosen:
            raise Refused(
                f"Expected a linear layer or a convolution for {type(self).__name__} to work on, "
                f"found none but those that are excluded, {list(exclude)}. Set exclude to [], or "
                "leave `dense` out."
            )
        return chosen
