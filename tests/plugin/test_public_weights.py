"""Private fine-tuning of small models from weights in files: convolutions and a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import (
    LSG,
    AdaFEST,
    FusedOptimizer,
    LazyDP,
    Placement,
    PrivacyPlan,
    PublicWeights,
)
from tests.support.ranks import Ranks
from tests.support.text_classifier import Classifier, Texts, collate_texts
from tests.support.tiny_model import assemble, make_trainer, snapshot

SGD = FusedOptimizer(kind="sgd", learning_rate=0.5)


class Pictures(Dataset[Any]):
    """Items with a picture each; a click depends on how bright its left half is."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.items = torch.randint(20, (size,), generator=generator)
        self.pictures = torch.randn(size, 2, 6, 6, generator=generator)
        self.labels = (self.pictures[:, 0, :, :3].mean((1, 2)) > 0).float()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index], self.pictures[index], self.labels[index]


def collate_pictures(examples: list[Any]) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    items = KeyedJaggedTensor(
        keys=["item"],
        values=torch.tensor([int(item) for item, _, _ in examples], dtype=torch.int64),
        lengths=torch.ones(len(examples), dtype=torch.int64),
        stride=len(examples),
    )
    pictures = torch.stack([e[1] for e in examples]) if examples else torch.zeros(0, 2, 6, 6)
    return items, pictures, torch.tensor([float(label) for _, _, label in examples])


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
    )


class PictureClicks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = None
        self.losses: list[float] = []
        self.starts: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.tables is None:
            table = EmbeddingBagConfig(
                name="item", num_embeddings=20, embedding_dim=8, feature_names=["item"]
            )
            self.tables = EmbeddingBagCollection(tables=[table])
            self.pictures, self.out = conv_net(), nn.Linear(16, 1)

    def on_train_start(self) -> None:
        self.starts.append({n: value.clone() for n, value in self.pictures.state_dict().items()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        items, pictures, labels = batch
        rows = self.tables(items).to_dict()["item"]
        logits = self.out(torch.cat([rows, self.pictures(pictures)], dim=1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        self.losses.append(float(loss.detach().sum()) / max(1, len(labels)))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class RecordingClassifier(Classifier):
    start: dict[str, Any]

    def on_train_start(self) -> None:
        self.start = snapshot(self)


def plan(mechanism: Any, dense: Any) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=mechanism, dense=dense, noise_multiplier=0.5, delta=1e-4, clip_norm=1.0
    )


def tune_pictures(path: str) -> dict[str, Any]:
    """Fit, and fit again with the same callback."""
    torch.manual_seed(0)
    callback, module, data = PublicWeights(path, "pictures"), PictureClicks(), Pictures(400)
    facts: list[Any] = []
    for steps in (40, 1):
        trainer = make_trainer(
            1,
            None,
            SGD,
            privacy=plan(LazyDP(), LSG(4, 0.25, layers=("pictures.*",), exclude=())),
            max_steps=steps,
            max_epochs=-1,
            callbacks=[callback],
        )
        trainer.fit(module, DataLoader(data, batch_size=50, collate_fn=collate_pictures))
        facts.append(trainer.strategy.private_run.facts())
    return {"starts": module.starts, "losses": module.losses, "facts": facts}


def tune_text(
    world_size: int,
    path: str,
    fresh: list[str],
    save: str | None = None,
    resume: str | None = None,
) -> Any:
    """What the first step began with."""
    torch.manual_seed(0)
    trainer = make_trainer(
        world_size,
        Placement(default="row_wise"),
        SGD,
        privacy=plan(AdaFEST(threshold=2.0), LSG(2, 0.25)),
        max_steps=2 if resume is None else 3,
        max_epochs=-1,
        callbacks=[PublicWeights(path, fresh=fresh)] if path else [],
    )
    module, data = RecordingClassifier(), Texts(600)
    trainer.fit(module, DataLoader(data, batch_size=60, collate_fn=collate_texts), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        return snapshot(module)
    return module.start


@pytest.fixture
def pictures_file(tmp_path: Path) -> str:
    torch.manual_seed(3)
    path = tmp_path / "conv.pt"
    torch.save(conv_net().state_dict(), path)
    return str(path)


@pytest.mark.slow  # a transformer is tuned in the quick tests
def test_convolutions_are_tuned_from_public_weights(one_rank: Ranks, pictures_file: str) -> None:
    found = one_rank.run(tune_pictures, pictures_file)[0]
    for name, weight in torch.load(pictures_file).items():
        assert torch.equal(found["starts"][0][name], weight)
        assert not torch.equal(found["starts"][1][name], weight)  # what was learned stays
    losses = torch.tensor(found["losses"][:40])
    assert losses[-8:].mean() < losses[:8].mean() - 0.05
    for facts in found["facts"]:  # of both runs: the second goes on from the same weights
        assert any("'conv.pt', taken to be public" in line for line in facts["not_covered"])
        assert facts["ran"]["dense"] == "LSG"


def text_state() -> dict[str, Tensor]:
    torch.manual_seed(4)
    model = Classifier()
    model.configure_model()
    return model.state_dict()


@pytest.mark.parametrize("layout", ["state dict", "lightning"])
def test_a_transformer_is_tuned_from_public_weights_and_rows(
    two_ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    state = text_state()
    del state["out.weight"], state["out.bias"]
    path = tmp_path / "text.pt"
    torch.save({"state_dict": state} if layout == "lightning" else state, path)
    start = assemble(two_ranks.run(tune_text, 2, str(path), ["out.*"]))
    assert set(start) == {*state, "out.weight", "out.bias"}
    for name, weight in state.items():
        assert torch.equal(start[name], weight)


def test_fresh_weights_keep_their_initial_values_whatever_the_file_has(
    one_rank: Ranks, tmp_path: Path
) -> None:
    state = text_state()
    state["out.weight"], state["out.bias"] = torch.ones(5, 3), state["out.bias"] + 1.0
    path = tmp_path / "text.pt"
    torch.save(state, path)
    initial = assemble(one_rank.run(tune_text, 1, "", []))
    start = assemble(one_rank.run(tune_text, 1, str(path), ["out.*"]))
    for name in initial:
        expected = initial[name] if name.startswith("out.") else state[name]
        assert torch.equal(start[name], expected)


def test_the_weights_of_a_checkpoint_count_where_training_is_resumed(
    one_rank: Ranks, tmp_path: Path
) -> None:
    path, checkpoint = tmp_path / "text.pt", str(tmp_path / "checkpoint")
    torch.save(text_state(), path)
    learned = assemble(one_rank.run(tune_text, 1, str(path), [], checkpoint))
    start = assemble(one_rank.run(tune_text, 1, str(path), [], None, checkpoint))
    assert not torch.equal(learned["key.weight"], text_state()["key.weight"])
    for name, weight in learned.items():
        assert torch.equal(start[name], weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("key.bias"), r"lacks weights of the model: \['key.bias'\]"),
        (lambda state: state.update(other=torch.zeros(1)), r"has not: \['other'\]"),
        (lambda state: state.update({"out.bias": torch.zeros(2)}), "other shapes: .*out.bias"),
        (
            lambda state: state.update({"words.embeddings.word.weight": torch.zeros(61, 16)}),
            "other shapes: .*words.embeddings.word.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    one_rank: Ranks, tmp_path: Path, change: Any, message: str
) -> None:
    state = text_state()
    change(state)
    path = tmp_path / "text.pt"
    torch.save(state, path)
    with pytest.raises(Exception, match=message):
        one_rank.run(tune_text, 1, str(path), [])


def test_a_file_that_is_not_there_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Expected a file of weights, found none"):
        one_rank.run(tune_text, 1, str(tmp_path / "nothing.pt"), [])
