"""A text classifier over word embeddings learns privately: sequences in and attention on top."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dpsparse import AdaFEST, FusedOptimizer, LazyDP, PrivacyPlan
from tests.support.ranks import Ranks
from tests.support.text_classifier import Classifier, Texts, collate_texts
from tests.support.tiny_model import make_trainer


def classify(mechanism: Any) -> list[float]:
    torch.manual_seed(0)
    privacy = PrivacyPlan(
        mechanism=mechanism, noise_multiplier=0.5, delta=1e-4, clip_norm=1.0, fixed_key=3
    )
    sgd = FusedOptimizer(kind="sgd", learning_rate=2.0)
    trainer = make_trainer(1, None, sgd, privacy=privacy, max_steps=60, max_epochs=-1)
    module, texts = Classifier(), Texts(600)
    trainer.fit(module, DataLoader(texts, batch_size=60, collate_fn=collate_texts))
    return module.losses


@pytest.mark.parametrize(
    "mechanism", [LazyDP(), AdaFEST(threshold=2.0)], ids=lambda m: type(m).__name__
)
def test_a_text_classifier_learns(one_rank: Ranks, mechanism: Any) -> None:
    losses = torch.tensor(one_rank.run(classify, mechanism)[0])
    assert losses[-10:].mean() < losses[:10].mean() - 0.1
