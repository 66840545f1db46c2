"""Layers that hide their products in one call, made of calls that the recorder knows.

`nn.MultiheadAttention`, `nn.GRU` and others hand all their weights to one function of torch. What
an example adds to a weight's gradient cannot be seen from outside. The functions here compute the
same from linear layers and plain arithmetic, with examples in the first dimension, so that the
recorder (`recorder.py`) sees every product. They are called in its place while it is active, and
never without a gradient: evaluation runs torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse.refused import Refused

# B examples, T and S positions, E width, H heads, G gates' widths together, L layers

# ---- attention ----------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward`, which takes and gives positions first."""
    if query.dim() != 3:
        raise Refused(
            "Expected a batch of sequences in nn.MultiheadAttention, found one sequence without a "
            "dimension for examples. Give it (B, T, E) with batch_first=True."
        )
    if static_k is not None or static_v is not None:
        raise Refused(
            "Expected attention over keys that it projects itself, found static_k or static_v. "
            "Leave them out."
        )
    if is_causal and attn_mask is None:
        raise Refused("Expected attn_mask beside is_causal=True, found none. Give both.")
    inputs = [x.transpose(0, 1) for x in (query, key, value)]
    if use_separate_proj_weight:
        weights = [w for w in (q_proj_weight, k_proj_weight, v_proj_weight) if w is not None]
        biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases))
    else:
        assert in_proj_weight is not None
        q, k, v = _projected(inputs, query is key, key is value, in_proj_weight, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = _appended(k, bias_k), _appended(v, bias_v)
    if add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], dim=1) for x in (k, v))
    mask = _mask(attn_mask, key_padding_mask, num_heads, q, k.shape[1])
    q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, T, E/H)
    dropout = dropout_p if training else 0.0
    weight = None
    if need_weights:
        score = (q * q.shape[-1] ** -0.5) @ k.mT
        weight = torch.softmax(score if mask is None else score + mask, dim=-1)
        weight = F.dropout(weight, dropout)
        mixed = weight @ v
        weight = weight.mean(1) if average_attn_weights else weight
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return out.transpose(0, 1), weight


def _projected(
    inputs: list[Tensor],
    query_is_key: bool,
    key_is_value: bool,
    weight: Tensor,
    bias: Tensor | None,
) -> Sequence[Tensor]:
    """Queries, keys and values, by the thirds of one weight."""
    if query_is_key and key_is_value:
        return F.linear(inputs[0], weight, bias).chunk(3, dim=-1)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weight.chunk(3), biases)]


def _appended(x_BTE: Tensor, position_11E: Tensor) -> Tensor:
    """Add one position that every example has in common."""
    return torch.cat([x_BTE, x_BTE.new_zeros(len(x_BTE), 1, 1) + position_11E], dim=1)


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    num_heads: int,
    like: Tensor,
    num_keys: int,
) -> Tensor | None:
    """Both masks in one, as numbers to add to scores; None if there is neither."""
    if attn_mask is not None and attn_mask.dim() == 3:  # one for every example and head
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]]
    numbers = [_as_numbers(mask, like, num_keys) for mask in masks if mask is not None]
    return sum(numbers[1:], numbers[0]) if numbers else None


def _as_numbers(mask: Tensor, like: Tensor, num_keys: int) -> Tensor:
    """A mask that is added to scores. Keys that were appended are masked for nobody."""
    if mask.dtype == torch.bool:
        mask = like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)
    return F.pad(mask.to(like.dtype), (0, num_keys - mask.shape[-1]))


# ---- recurrent layers ---------------------------------------------------------------------------

State = tuple[Tensor, ...]
"""What a cell carries from one position to the next; the output is the first of it."""


def _tanh(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    return (torch.tanh(x_BG + h_BG),)


def _relu(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    return (torch.relu(x_BG + h_BG),)


def _gru(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    """Cho et al. 2014 (arXiv:1406.1078), with the reset gate behind the product, as in torch."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_BG.chunk(3, 1), h_BG.chunk(3, 1)
    new = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (new + torch.sigmoid(x_z + h_z) * (state[0] - new),)


def _lstm(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    """Hochreiter and Schmidhuber 1997, with forget gates."""
    i, f, g, o = (x_BG + h_BG).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


Cell = Callable[[Tensor, Tensor, State], State]


def _one_step(cell: Cell, has_memory: bool) -> Callable[..., Any]:
    """Make a function like torch.gru_cell, or like torch.lstm_cell if a cell has a memory."""

    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state: State = tuple(hx) if has_memory else (hx,)
        state = cell(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return state if has_memory else state[0]

    return run


def _layers(cell: Cell, has_memory: bool, name: str) -> Callable[..., Any]:
    """Make a function like torch.gru, or like torch.lstm if a cell has a memory."""

    def run(input: Tensor, hx: Any, params: Any, *settings: Any) -> Any:
        if not isinstance(params, (list, tuple)):  # data, batch_sizes, hx, params, ...
            raise Refused(
                f"Expected padded sequences in nn.{name}, found a PackedSequence, in which rows "
                "are no examples. Leave packing out, and read the output at each one's length."
            )
        return _run_layers(cell, has_memory, input, hx, params, *settings)

    return run


def _run_layers(
    cell: Cell,
    has_memory: bool,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    x_BTE = input if batch_first else input.transpose(0, 1)
    starts_SLBE = tuple(hx) if has_memory else (hx,)
    directions = 2 if bidirectional else 1
    size = len(params) // (num_layers * directions)
    ends: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            start = tuple(value_LBE[at] for value_LBE in starts_SLBE)
            weights = params[at * size : (at + 1) * size]
            output, end = _one_way(cell, x_BTE, start, weights, has_biases, direction == 1)
            outputs.append(output)
            ends.append(end)
        x_BTE = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        if layer < num_layers - 1:
            x_BTE = F.dropout(x_BTE, dropout, train)
    out = x_BTE if batch_first else x_BTE.transpose(0, 1)
    return (out, *(torch.stack(values) for values in zip(*ends)))


def _one_way(
    cell: Cell,
    x_BTE: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, State]:
    """The outputs of one layer in one direction, in the order of positions, and its last state."""
    w_ih, w_hh, *others = weights
    b_ih, b_hh = others[:2] if has_biases else (None, None)
    shrunk = others[2 if has_biases else 0 :]  # the projection of an LSTM with proj_size
    gates_BTG = F.linear(x_BTE, w_ih, b_ih)
    positions = range(x_BTE.shape[1])
    outputs = []
    for t in reversed(positions) if backwards else positions:
        state = cell(gates_BTG[:, t], F.linear(state[0], w_hh, b_hh), state)
        if shrunk:
            state = (F.linear(state[0], shrunk[0]), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, dim=1), state


# ---- norms over channels ------------------------------------------------------------------------


def _normalised(
    normalise: Callable[..., Tensor], x_BC: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Scale and shift the channels of what is normalised."""
    out = normalise(x_BC).movedim(1, -1)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.movedim(-1, 1)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _normalised(lambda x: F.group_norm(x, num_groups, eps=eps), input, weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    def normalise(x: Tensor) -> Tensor:
        return F.instance_norm(
            x,
            running_mean,
            running_var,
            use_input_stats=use_input_stats,
            momentum=momentum,
            eps=eps,
        )

    return _normalised(normalise, input, weight, bias)


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: attention,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    torch.rnn_tanh: _layers(_tanh, False, "RNN"),
    torch.rnn_relu: _layers(_relu, False, "RNN"),
    torch.gru: _layers(_gru, False, "GRU"),
    torch.lstm: _layers(_lstm, True, "LSTM"),
    torch.rnn_tanh_cell: _one_step(_tanh, False),
    torch.rnn_relu_cell: _one_step(_relu, False),
    torch.gru_cell: _one_step(_gru, False),
    torch.lstm_cell: _one_step(_lstm, True),
}
