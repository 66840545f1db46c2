"""A text classifier over word embeddings: sequences in, and attention on top."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# B texts, T words of the longest, D width of a word


class Texts(Dataset[Any]):
    """Words of 60, none to ten of them; the label is whether more are from the first half."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.texts = []
        for _ in range(size):
            length = int(torch.randint(0, 11, (1,), generator=generator))
            words = (torch.rand(length, generator=generator) ** 2 * 30).long()  # some are common
            side = torch.rand(length, generator=generator) < torch.rand(1, generator=generator)
            label = float(side.sum() * 2 < length)
            self.texts.append((words + 30 * side, torch.tensor([label])))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return self.texts[index]


def collate_texts(texts: list[Any]) -> tuple[KeyedJaggedTensor, Tensor]:
    nothing = torch.zeros(0, dtype=torch.int64)
    words = KeyedJaggedTensor(
        keys=["words"],
        values=torch.cat([words for words, _ in texts] or [nothing]),
        lengths=torch.tensor([len(words) for words, _ in texts], dtype=torch.int64),
        stride=len(texts),
    )
    return words, torch.cat([label for _, label in texts] or [nothing.float()])


class Classifier(LightningModule):
    """Words -> attention from nn.Linear -> mean -> logit."""

    def __init__(self) -> None:
        super().__init__()
        self.words: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.words is None:
            config = EmbeddingConfig(
                name="word",
                num_embeddings=60,
                embedding_dim=16,
                feature_names=["words"],
                init_fn=partial(nn.init.normal_, std=0.3),
            )
            self.words = EmbeddingCollection(tables=[config])
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
            self.out = nn.Linear(16, 1)

    def forward(self, words: KeyedJaggedTensor) -> Tensor:
        found = self.words(words)["words"]
        x_BTD = found.to_padded_dense(10)
        is_word_BT = torch.arange(10) < found.lengths()[:, None]
        score_BTT = self.query(x_BTD) @ self.key(x_BTD).mT / 4
        score_BTT = score_BTT.masked_fill(~is_word_BT[:, None], -1e9)
        x_BTD = x_BTD + score_BTT.softmax(2) @ self.value(x_BTD)
        mean_BD = (x_BTD * is_word_BT[:, :, None]).sum(1) / found.lengths().clamp_min(1)[:, None]
        return self.out(mean_BD).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(words), labels, reduction="none")
        self.losses.append(float(loss.detach().sum()) / max(1, len(labels)))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)
