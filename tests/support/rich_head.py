"""A head with what recommenders are made of: attention, a recurrent layer, computed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.tiny_model import NUM_COUNTS

# B examples, T tokens: one for every feature, one for the counts, one for the class

WIDTH = 8


class RichHead(nn.Module):
    """Features as tokens with places, a class token in front, a transformer, and a GRU behind it.

    The logit is divided by a learned temperature, and a learned penalty comes on top.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = width // WIDTH
        self.counts = weight_norm(nn.Linear(NUM_COUNTS, WIDTH))
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Embedding(self.tokens + 3, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.smooth = nn.Conv1d(WIDTH, WIDTH, 2)
        self.reader = nn.GRU(WIDTH, 6, batch_first=True)
        self.out = nn.Linear(6, 1)
        self.log_variance = nn.Parameter(torch.zeros(1))

    def forward(self, embedded: dict[str, Tensor], counts: Tensor) -> Tensor:
        x = torch.cat([embedded[name] for name in sorted(embedded)], dim=1)
        x = x.view(len(x), self.tokens, WIDTH)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x, self.counts(counts)[:, None]], 1)
        x = self.encoder(x + self.places(torch.arange(x.shape[1], device=x.device)))
        x = self.smooth(self.norm(x.mT)).mT
        logit = self.out(self.reader(x)[0][:, -1]).squeeze(1)
        return logit * torch.exp(-self.log_variance[0])
