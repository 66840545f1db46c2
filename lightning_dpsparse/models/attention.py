"""Causal self-attention, built of linear layers. `sasrec.py` uses it.

Private training knows what each example does to a linear layer from what goes into it and comes out
of it. (`nn.MultiheadAttention` trains privately too: `engine/decomposed.py`.)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

# B examples, T positions, D width, H heads, h = D / H


class CausalAttention(nn.Module):
    """Every position reads itself and those before it.

    Each head computes softmax(q k^T / sqrt(h)) v.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.num_heads, self.dropout = num_heads, dropout

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            layer(x_BTD).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, h)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        read_BHTh = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed_BTD: Tensor = self.output(read_BHTh.transpose(1, 2).flatten(2))
        return mixed_BTD


class Block(nn.Module):
    """Attention and a feed-forward layer, each computed as x + dropout(f(norm(x)))."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width)
        )
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        changed_BTD: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return x_BTD + changed_BTD
