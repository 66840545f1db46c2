"""Refuses ids that do not fit their table with a clear error, before they are sent anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse.refused import Refused

# F features, L lookups


class IdCheck:
    """Forward pre-hook of a sharded collection that refuses ids out of range.

    Without it an id beyond the table's end would train row 0, or another rank's row. The message
    names the feature and never an example's value.
    """

    def __init__(self, tables: list[BaseEmbeddingConfig]) -> None:
        self._num_rows: dict[str, int] = {}
        for table in tables:
            for feature in table.feature_names:
                known = self._num_rows.get(feature, table.num_embeddings)
                self._num_rows[feature] = min(known, table.num_embeddings)
        self._limits_F: tuple[list[str], Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        features: KeyedJaggedTensor = args[0]
        if features.variable_stride_per_key():
            raise Refused(
                "Expected one batch size for all features, found a KeyedJaggedTensor with a stride "
                "per key, which is not supported here. Repeat the shorter features' bags."
            )
        ids_L = features.values()
        lengths_F = features.lengths().view(len(features.keys()), -1).sum(1)
        limits_L = torch.repeat_interleave(
            self._limits(features, ids_L), lengths_F, output_size=ids_L.numel()
        )
        wrong_L = (ids_L < 0) | (ids_L >= limits_L)
        if bool(wrong_L.any()):
            raise Refused(self._message(features, wrong_L))

    def _limits(self, features: KeyedJaggedTensor, ids_L: Tensor) -> Tensor:
        keys = features.keys()
        if self._limits_F is None or self._limits_F[0] != keys:
            missing = sorted(set(self._num_rows) - set(keys))
            if missing:
                raise Refused(
                    f"Expected a bag for every feature of the tables, found none for {missing}. "
                    f"The batch has {keys}."
                )
            no_limit = torch.iinfo(ids_L.dtype).max  # a feature that no table reads
            limits = [self._num_rows.get(key, no_limit) for key in keys]
            self._limits_F = keys, torch.tensor(limits, device=ids_L.device)
        return self._limits_F[1]

    def _message(self, features: KeyedJaggedTensor, wrong_L: Tensor) -> str:
        bounds = features.offset_per_key()
        found = [
            f"{key!r} (0 to {self._num_rows[key] - 1})"
            for key, start, stop in zip(features.keys(), bounds, bounds[1:])
            if bool(wrong_L[start:stop].any())
        ]
        return (
            f"Expected ids within their tables, found ids out of range for {', '.join(found)}. "
            "Hash the feature into the table's rows, or give the table more rows."
        )
