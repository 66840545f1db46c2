"""Small dense models of every kind that is captured, and their gradients by autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)

from lightning_dpsparse.engine.constants import Constants
from lightning_dpsparse.engine.ghost import DenseCapture

B = 5


class Attention(nn.Module):
    """Self-attention from Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        score = torch.softmax(self.q(x) @ self.k(x).mT, dim=-1)
        return (score @ self.v(x)).flatten(1)


class Twice(nn.Module):
    """One Linear used twice, on one and on several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))).mean(1) + self.layer(x[:, 0])


class Tied(nn.Module):
    """One matrix as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.rows(ids).mean(1), self.rows.weight)


class Raw(nn.Module):
    """Parameters in bare arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(3, 4))
        self.matrix = nn.Parameter(torch.rand(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.scale * x + self.shift) @ self.matrix).flatten(1)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)  # computed, but not part of the loss
        return self.used(x)


class SharedGradient(nn.Module):
    """Two layers whose outputs have one gradient, which is a single number for all of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 7), nn.Linear(2, 7)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) + self.narrow(x[:, :2])).sum(1, keepdim=True)


class Hooked(nn.Module):
    """Gradients that are changed on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x.register_hook(lambda gradient: 3 * gradient)
        return x


class Spelled(nn.Module):
    """Calls that name their arguments, ask for sizes and types, and swap parameters in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.layer.weight, self.layer.bias
        x = x[:, : w.shape[1]].to(w).view(-1, w.size(1))
        x = F.linear(bias=b, input=x, weight=w)
        x = torch.mul(input=x, other=self.scale)
        own = dict(self.layer.named_parameters())
        x = torch.func.functional_call(self.layer, own, (F.pad(x, (0, 1)),))
        return x + torch.zeros(len(x), 3).to(x).expand_as(x.detach() * self.scale)


class Kept(nn.Parameter):
    """A parameter whose class is somebody else's business."""


class OfAnotherClass(VectorCrossNet):
    """Slices and products of such parameters."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        for values in (self.kernels, self.bias):
            for i, value in enumerate(values):
                values[i] = Kept(value.detach().double())


def vectors() -> Tensor:
    return torch.randn(B, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def positions() -> Tensor:
    return torch.randn(B, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def many_positions() -> Tensor:
    return torch.randn(B, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(B, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ids() -> Tensor:
    return torch.tensor([[0, 0, 0], [1, 2, 1], [6, 5, 4], [3, 3, 0], [2, 2, 2]])


CASES: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(True), nn.Linear(6, 2)), vectors),
    "no bias": (lambda: nn.Linear(4, 6, bias=False), vectors),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Flatten()), positions),
    "many positions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Flatten()), many_positions),
    "four dimensions": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Flatten()),
                        lambda: positions().view(B, 3, 2, 2)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), vectors),
    "layer norm on positions": (lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.LayerNorm(4)),
                                positions),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)), ids),
    "attention": (Attention, positions),
    "used twice": (Twice, positions),
    "tied": (Tied, ids),
    "bare arithmetic": (Raw, positions),
    "unused": (WithUnused, vectors),
    "shared gradient": (SharedGradient, vectors),
    "hooked": (Hooked, vectors),
    "spelled out": (Spelled, vectors),
    "parameters of another class": (OfAnotherClass, vectors),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2)), images),
    "convolution with all settings": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), images),
    "convolution, padded to the same": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), images),
    "convolution, not padded": (lambda: nn.Conv2d(2, 3, 2, padding="valid", bias=False), images),
    "convolution, reflected": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), images),
    "convolution of many positions": (lambda: nn.Conv2d(2, 1, 1), images),
    "convolution in groups": (lambda: nn.Conv2d(2, 4, 2, groups=2, bias=False), images),
    "cross network": (lambda: CrossNet(4, 2), vectors),
    "low-rank cross network": (lambda: LowRankCrossNet(4, 2, 2), vectors),
    "vector cross network": (lambda: VectorCrossNet(4, 2), vectors),
    "mixture cross network": (lambda: LowRankMixtureCrossNet(4, 2, 2, 2), vectors),
}  # fmt: skip


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per example, of a shape that makes gradients differ between examples."""
    out = model(x).flatten(1)
    return (out.square() * torch.arange(1, out.shape[1] + 1)).sum(1)


def autograd(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
    gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for b in range(len(x)):
        loss = loss_of(model, x[b : b + 1])[0]
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for (name, parameter), gradient in zip(model.named_parameters(), found):
            gradients[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return gradients


def capture_step(model: nn.Module, x: Tensor) -> DenseCapture:
    capture = DenseCapture(dict(model.named_parameters()), Constants(model.buffers()))
    capture.expect(len(x))
    with capture:
        loss = loss_of(model, x)
    loss.sum().backward()
    capture.check_nothing_escaped()
    return capture


def clipped_sum(capture: DenseCapture, name: str, factors: Tensor) -> Tensor:
    """Into memory that holds something else."""
    return capture.clipped_sum(name, factors, torch.full_like(capture.parameters[name], torch.nan))
