"""Windows of items for the retrieval models: contexts, and the item that follows each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ITEMS, NEGATIVES = 30, 5
# context, label: an empty bag, a repeated id, the label in its own context
EXAMPLES = [([3, 3, 7], 7), ([], 2), ([29], 0), ([1, 2, 4, 8, 16], 11), ([7, 0], 29), ([5], 5)]


def collate(examples: list[tuple[list[int], int]]) -> Batch:
    labels = [label for _, label in examples]
    context_ids = [item for context, _ in examples for item in context]
    lengths = [len(context) for context, _ in examples]
    return Batch(
        dense_features=torch.zeros(len(examples), 0),
        sparse_features=KeyedJaggedTensor(
            keys=["context", "label"],
            values=torch.tensor([*context_ids, *labels], dtype=torch.int64),
            lengths=torch.tensor([*lengths, *[1] * len(labels)], dtype=torch.int64),
            stride=len(examples),
        ),
        labels=torch.zeros(len(examples)),
    )


class Windows(Dataset[Any]):
    """Contexts of 0 to 4 items, and the item after the last of them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (size,), generator=generator).tolist()
        contexts = [torch.randint(ITEMS, (n,), generator=generator).tolist() for n in lengths]
        self.examples = [(c, (c[-1] + 1) % ITEMS if c else 0) for c in contexts]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def loader(size: int, batch_size: int, seed: int = 0, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Windows(size, seed), batch_size=batch_size, collate_fn=collate, **kwargs)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def some_negatives() -> Tensor:
    negatives_BK = torch.randint(
        ITEMS, (len(EXAMPLES), NEGATIVES), generator=torch.Generator().manual_seed(1)
    )
    negatives_BK[0, 2] = EXAMPLES[0][1]  # drawn by accident
    negatives_BK[3, :2] = 6  # drawn twice
    return negatives_BK
