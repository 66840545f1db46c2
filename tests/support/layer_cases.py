"""Layers as models have them: attention, recurrent and convolutional ones, and computed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from tests.support.dense_cases import B, images, many_positions, positions, vectors

Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
"""How to build a model, and its input."""


class Attention(nn.Module):
    """Attention of positions to themselves, or to others that are made of them."""

    def __init__(
        self, to: str = "itself", need_weights: bool = False, mask: str = "", **settings: Any
    ) -> None:
        super().__init__()
        self.to, self.need_weights, self.mask = to, need_weights, mask
        self.is_batch_first = settings.get("batch_first", False)
        self.attention = nn.MultiheadAttention(4, 2, **settings)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = {
            "itself": (x, x, x),
            "another": (x, torch.tanh(x), torch.tanh(x)),
            "two others": (x, torch.tanh(x), torch.sin(x)),
            "wider": (x, torch.cat([x, x.square()], 2), torch.sin(x)),
        }[self.to]
        if not self.is_batch_first:
            turned = {id(v): v.transpose(0, 1) for v in (query, key, value)}
            query, key, value = (turned[id(v)] for v in (query, key, value))
        length = x.shape[1]
        attn_mask = padding = None
        if "causal" in self.mask:
            attn_mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        if "each" in self.mask:  # one for every example and head
            by_head = torch.linspace(-1, 1, 2 * length**2, dtype=x.dtype)
            attn_mask = by_head.view(2, length, length).repeat(len(x), 1, 1)
        if "padding" in self.mask:
            padding = torch.zeros(len(x), length, dtype=torch.bool)
            padding[:, -1] = True
        out, weights = self.attention(
            query,
            key,
            value,
            need_weights=self.need_weights,
            attn_mask=attn_mask,
            key_padding_mask=padding,
        )
        if not self.is_batch_first:
            out = out.transpose(0, 1)
        return out.flatten(1) if weights is None else torch.cat([out, weights], 2).flatten(1)


class Recurrent(nn.Module):
    """All that a recurrent layer gives: outputs, and states at the end."""

    def __init__(self, layer: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.is_batch_first = settings.get("batch_first", False)
        self.layer = layer(4, 3, **settings)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x if self.is_batch_first else x.transpose(0, 1))
        if not self.is_batch_first:
            out = out.transpose(0, 1)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


class Stepwise(nn.Module):
    """A recurrent cell, one position after the other."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


class Calls(nn.Module):
    """Parameters by name, and a function of them and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **shapes: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, shape in shapes.items():
            if isinstance(shape, nn.Module):
                self.add_module(name, shape)
            elif isinstance(shape, Tensor):
                self.register_buffer(name, shape)
            else:
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Decoder(nn.Module):
    """A decoder reads what an encoder wrote."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.tanh(x)).flatten(1)


def flat(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten())


def sequences() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 3, 6, dtype=torch.float64, generator=generator)


def volumes() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 2, 3, 4, 3, dtype=torch.float64, generator=generator)


_STILL = {"dropout": 0.0, "batch_first": True}  # dropout would differ from one pass to the next

_ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {"batch_first": True},
    "attention, positions first": {},
    "attention with weights": {"batch_first": True, "need_weights": True},
    "attention to another": {"batch_first": True, "to": "another"},
    "attention to two others": {"to": "two others", "need_weights": True},
    "attention of three widths": {"batch_first": True, "to": "wider", "kdim": 8, "vdim": 4},
    "attention without biases": {"batch_first": True, "bias": False, "to": "another"},
    "attention, causal": {"batch_first": True, "mask": "causal"},
    "attention with a mask each": {"mask": "each", "need_weights": True},
    "attention, causal and padded": {"batch_first": True, "mask": "causal padding"},
    "attention with a bias position": {
        "batch_first": True,
        "add_bias_kv": True,
        "mask": "causal padding",
    },
    "attention with a zero position": {
        "batch_first": True,
        "add_zero_attn": True,
        "need_weights": True,
    },
}

_RECURRENT: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{layer.__name__}{', deep' if deep else ''}": (
        layer,
        {"num_layers": 2, "bidirectional": True, "batch_first": True} if deep else {},
    )
    for layer in (nn.RNN, nn.GRU, nn.LSTM)
    for deep in (False, True)
} | {
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu"}),
    "GRU without biases": (nn.GRU, {"bias": False}),
    "LSTM that projects": (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
    "LSTM that projects, without biases": (nn.LSTM, {"proj_size": 2, "bias": False}),
}

_CELLS = {
    "RNNCell": lambda: nn.RNNCell(4, 3),
    "RNNCell with relu": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
    "GRUCell": lambda: nn.GRUCell(4, 3),
    "LSTMCell": lambda: nn.LSTMCell(4, 3, bias=False),
}

LAYERS: dict[str, Case] = {
    **{name: (partial(Attention, **given), many_positions) for name, given in _ATTENTION.items()},
    **{
        name: (partial(Recurrent, layer, **given), positions)
        for name, (layer, given) in _RECURRENT.items()
    },
    **{
        name: (lambda cell=cell: Stepwise(cell()), positions)  # type: ignore[misc]
        for name, cell in _CELLS.items()
    },
    "encoder layer": (lambda: flat(nn.TransformerEncoderLayer(4, 2, 6, **_STILL)), positions),
    "encoder": (
        lambda: flat(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 6, norm_first=True, **_STILL),
                num_layers=2,
                enable_nested_tensor=False,
            )
        ),
        positions,
    ),
    "decoder layer": (
        lambda: Decoder(nn.TransformerDecoderLayer(4, 2, 6, **_STILL)),
        positions,
    ),
    "transformer": (lambda: Decoder(nn.Transformer(4, 2, 1, 1, 6, **_STILL)), positions),
    "sequence convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 2, stride=2, padding=1, dilation=2),
            nn.Tanh(),
            nn.Conv1d(4, 2, 2, padding="valid", bias=False),
        ),
        sequences,
    ),
    "sequence convolution, reflected": (
        lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect"),
        sequences,
    ),
    "sequence convolution in groups": (lambda: nn.Conv1d(3, 6, 2, groups=3), sequences),
    "convolution in groups, with a bias": (lambda: nn.Conv2d(2, 4, 2, groups=2), images),
    "convolution of volumes": (lambda: nn.Conv3d(2, 3, 2, padding=1), volumes),
    "transposed convolution": (
        lambda: nn.ConvTranspose1d(3, 2, 2, stride=2, output_padding=1),
        sequences,
    ),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(1, 2), nn.GroupNorm(2, 2)), images),
    "group norm of vectors": (lambda: nn.GroupNorm(2, 4), vectors),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), images),
    "rms norm": (lambda: flat(nn.RMSNorm(4)), positions),
    "bilinear": (
        lambda: Calls(lambda m, x: m.layer(x, torch.tanh(x)), layer=nn.Bilinear(4, 4, 3)),
        vectors,
    ),
    "bilinear on positions": (
        lambda: Calls(
            lambda m, x: m.layer(x, torch.tanh(x)).flatten(1),
            layer=nn.Bilinear(4, 4, 3, bias=False),
        ),
        positions,
    ),
    "matrix products": (
        lambda: Calls(
            lambda m, x: (x @ m.w + torch.matmul(x, m.w) ** 2 + F.linear(x[..., :3], m.w)[..., :3])
            .flatten(1),
            w=(4, 3),
        ),
        positions,
    ),
    "one matrix product": (lambda: Calls(lambda m, x: x.mm(m.w), w=(4, 3)), vectors),
    "a vector as a weight": (lambda: Calls(lambda m, x: F.linear(x, m.w)[:, None], w=4), vectors),
    "two parameters in a call": (
        lambda: Calls(lambda m, x: torch.addmm(m.b, x, m.w), w=(4, 3), b=3),
        vectors,
    ),
    "a product of three": (
        lambda: Calls(lambda m, x: torch.einsum("bti,ioj->btoj", x, m.w).flatten(1), w=(4, 3, 2)),
        positions,
    ),
}  # fmt: skip


def _apart(m: Any, x: Tensor) -> Tensor:
    one, two, three = m.w.chunk(3)
    b, c = m.b.split([4, 5])
    y = F.linear(x, one, b[:3]) + F.linear(x, two, c[1:4]) * m.b[3]
    return torch.cat([y, F.linear(x.tanh(), three[:2]), F.linear(x, m.w[8:9])], -1).flatten(1)


def _uncertain(m: Any, x: Tensor) -> Tensor:
    """Losses that are weighted by what is learned (Kendall et al. 2018)."""
    y, s = m.layer(x), m.log_variances
    return torch.cat([y[:, :1] * torch.exp(-s[0]) + s[0], y[:, 1:] * torch.exp(-s[1]) * m.t], 1)


def _with_class_token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
    return m.layer(x + m.places(torch.arange(x.shape[1]))).flatten(1)


COMPUTED: dict[str, Case] = {
    "rows of stacked weights": (lambda: Calls(_apart, w=(9, 4), b=9), positions),
    "one weight after the other": (
        lambda: Calls(
            lambda m, x: torch.cat([F.linear(x, w) for w in m.w], -1).flatten(1), w=(3, 2, 4)
        ),
        positions,
    ),
    "weighted losses": (
        lambda: Calls(_uncertain, layer=nn.Linear(4, 2), log_variances=2, t=()),
        vectors,
    ),
    "a masked weight": (
        lambda: Calls(
            lambda m, x: F.linear(x, m.w * m.mask), w=(5, 4), mask=torch.eye(5)[:, :4]
        ),  # as many rows as examples
        vectors,
    ),
    "a class token and places": (
        lambda: Calls(
            _with_class_token, token=(1, 1, 4), places=nn.Embedding(9, 4), layer=nn.Linear(4, 3)
        ),
        positions,
    ),
    "places that are repeated": (  # as in TorchRec's BERT4Rec
        lambda: Calls(
            lambda m, x: m.layer(x * m.places.unsqueeze(0).repeat(x.size(0), 1, 1)).flatten(1),
            places=(3, 4),
            layer=nn.Linear(4, 3),
        ),
        positions,
    ),
    "layers without examples": (
        lambda: Calls(
            lambda m, x: (m.layer(x) * m.layer(m.places) + m.places.tanh()[0]).flatten(1),
            places=(3, 4),
            layer=nn.Linear(4, 4),
        ),
        positions,
    ),
    "learned queries": (
        lambda: Calls(
            lambda m, x: (torch.softmax(m.layer(m.queries) @ x.mT, -1) @ x).flatten(1),
            queries=(2, 4),
            layer=nn.Linear(4, 4),
        ),
        positions,
    ),
    "transposed": (lambda: Calls(lambda m, x: x @ m.w.T, w=(3, 4)), vectors),
    "transposed, on positions": (
        lambda: Calls(lambda m, x: (x @ -m.w.view(4, 3).contiguous()).flatten(1), w=(3, 4)),
        positions,
    ),
    "stacked and cut": (
        lambda: Calls(
            lambda m, x: F.linear(x, torch.stack([m.w[0], m.w[1]]))
            + x[:, :1] * torch.cat(m.w[0].chunk(2))[:2],
            w=(2, 4),
        ),
        vectors,
    ),
    "weight norm": (
        lambda: nn.Sequential(
            weight_norm(nn.Linear(4, 3)), nn.Tanh(), old_weight_norm(nn.Linear(3, 2))
        ),
        vectors,
    ),
    "convolution with weight norm": (lambda: weight_norm(nn.Conv1d(3, 4, 2)), sequences),
    "an orthogonal weight": (lambda: orthogonal(nn.Linear(4, 3)), vectors),
    "a penalty": (
        lambda: Calls(
            lambda m, x: m.layer(x) + 0.1 * m.layer.weight.square().sum(), layer=nn.Linear(4, 3)
        ),
        vectors,
    ),
    "values in place of others": (
        lambda: Calls(lambda m, x: torch.where(x > 0, x, m.w), w=4),
        vectors,
    ),
    "a mixture": (
        lambda: Calls(
            lambda m, x: x @ torch.stack([m.a, m.b]).T * torch.stack([m.a.sum(), m.b[0]]).exp(),
            a=4,
            b=4,
        ),
        vectors,
    ),
}  # fmt: skip
