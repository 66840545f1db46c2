"""The two towers' losses, answers and metrics against loops over examples in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import Placement
from lightning_dpsparse.models import TwoTowerModule
from lightning_dpsparse.models.retrieval import retrieval_metrics
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble, make_trainer, snapshot

ITEMS, WIDTH, NEGATIVES = 30, 8, 5
TABLE = "tables.embedding_bags.{}.weight"

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


def two_towers(**settings: Any) -> TwoTowerModule:
    default: dict[str, Any] = {
        "num_items": ITEMS,
        "embedding_dim": WIDTH,
        "context_layers": [6, WIDTH],
        "num_negatives": NEGATIVES,
        "temperature": 0.2,
        "optimizer": sgd,
    }
    return TwoTowerModule(**(default | settings))


def built(**settings: Any) -> TwoTowerModule:
    torch.manual_seed(0)
    module = two_towers(**settings)
    module.configure_model()
    return module


def some_negatives() -> Tensor:
    negatives_BK = torch.randint(
        ITEMS, (len(EXAMPLES), NEGATIVES), generator=torch.Generator().manual_seed(1)
    )
    negatives_BK[0, 2] = EXAMPLES[0][1]  # drawn by accident
    negatives_BK[3, :2] = 6  # drawn twice
    return negatives_BK


class Plain:
    """The same model of one example, in float64: `nn.EmbeddingBag`, `nn.Linear`, a loop."""

    def __init__(self, weights: dict[str, Tensor], *, normalize: bool = False) -> None:
        self.bag = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean").double()
        self.items = nn.Embedding(ITEMS, WIDTH).double()
        self.linear = [nn.Linear(WIDTH, 6).double(), nn.Linear(6, WIDTH).double()]
        self.normalize = normalize
        values = [weights[TABLE.format(name)] for name in ("context", "item")]
        values += [weights[f"mlp.{i}.{kind}"] for i in (0, 2) for kind in ("weight", "bias")]
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)

    def parameters(self) -> list[Tensor]:
        linear = [tensor for layer in self.linear for tensor in (layer.weight, layer.bias)]
        return [self.bag.weight, self.items.weight, *linear]

    def scores(self, context: list[int], items: list[int], temperature: float = 0.2) -> Tensor:
        pooled = self.bag(torch.tensor(context, dtype=torch.int64), torch.tensor([0]))[0]
        output = self.linear[1](torch.relu(self.linear[0](pooled)))
        rows = self.items(torch.tensor(items))
        if self.normalize:
            output, rows = output / output.norm(), rows / rows.norm(dim=1, keepdim=True)
        return rows @ output / temperature

    def loss(self, example: Any, negatives: list[int], log_q: Tensor | None = None) -> Tensor:
        context, label = example
        items = [label, *(item for item in negatives if item != label)]
        scores = self.scores(context, items)
        if log_q is not None:
            scores = scores - log_q[items]
        return scores.exp().sum().log() - scores[0]


# ---- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("suffix", ["", ".npy", ".npz"])
def test_a_loss_is_that_of_plain_pytorch(tmp_path: Path, suffix: str, normalize: bool) -> None:
    settings: dict[str, Any] = {"normalize": normalize}
    log_q = None
    if suffix:
        weights = np.arange(1, ITEMS + 1)
        path = tmp_path / f"weights{suffix}"
        np.save(path, weights) if suffix == ".npy" else np.savez(path, item=weights)
        settings["negatives"] = str(path)
        log_q = torch.from_numpy(np.log(weights / weights.sum()))
    module, negatives_BK = built(**settings), some_negatives()
    loss_B = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    plain = Plain(module.state_dict(), normalize=normalize)
    expected = [plain.loss(e, n, log_q) for e, n in zip(EXAMPLES, negatives_BK.tolist())]
    torch.testing.assert_close(loss_B.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    if log_q is not None:  # the correction is no small thing
        other = [plain.loss(e, n) for e, n in zip(EXAMPLES, negatives_BK.tolist())]
        assert (loss_B - torch.stack(other)).abs().min() > 1e-3


def test_a_loss_does_not_depend_on_other_examples() -> None:
    module, negatives_BK = built(), some_negatives()
    together = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    for i, example in enumerate(EXAMPLES):
        alone = module.sampled_losses(collate([example]), negatives_BK[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-6)


def test_a_negative_that_is_the_label_counts_nothing() -> None:
    module = built()
    negatives_BK = torch.tensor([[label] * NEGATIVES for _, label in EXAMPLES])
    loss_B = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    loss_B.sum().backward()
    assert torch.equal(loss_B, torch.zeros(len(EXAMPLES)))
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_negatives_are_drawn_by_their_weights(tmp_path: Path) -> None:
    """20,000 draws: the share of an item of probability q has standard error sqrt(q / 20,000)."""
    weights = np.linspace(0.1, 3.0, ITEMS)
    np.save(tmp_path / "weights.npy", weights)
    batch = collate(EXAMPLES[:2] * 100)
    for negatives, share in (
        ("uniform", np.full(ITEMS, 1 / ITEMS)),
        (str(tmp_path / "weights.npy"), weights / weights.sum()),
    ):
        module = built(negatives=negatives, num_negatives=100)
        drawn = np.bincount(module.draw_negatives(batch).flatten(), minlength=ITEMS) / 20_000
        assert len(drawn) == ITEMS
        assert (np.abs(drawn - share) < 5 * np.sqrt(share / 20_000)).all()


def test_tables_start_within_the_root_of_their_width() -> None:
    for name in ("context", "item"):
        weight = built().state_dict()[TABLE.format(name)]
        assert weight.shape == (ITEMS, WIDTH)
        assert 0.95 * WIDTH**-0.5 < weight.abs().max() <= WIDTH**-0.5


# ---- evaluation ---------------------------------------------------------------------------------


def exact_losses(plain: Plain, examples: list[Any]) -> Tensor:
    scores = [plain.scores(context, list(range(ITEMS))) for context, _ in examples]
    losses = [s.exp().sum().log() - s[label] for s, (_, label) in zip(scores, examples)]
    return torch.stack(losses).detach()


@pytest.mark.parametrize("normalize", [False, True])
def test_an_exact_loss_is_over_all_items(normalize: bool) -> None:
    module = built(normalize=normalize)
    expected = exact_losses(Plain(module.state_dict(), normalize=normalize), EXAMPLES)
    found = module.example_losses(collate(EXAMPLES))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


def evaluate(world_size: int, placement: Placement) -> dict[str, Any]:
    """Runs inside a rank: two passes of validation, and a rank's own losses and answers."""
    torch.manual_seed(0)
    module = two_towers(normalize=True)
    trainer = make_trainer(world_size, placement)
    for _ in range(2):
        [logged] = trainer.validate(module, loader(23, 5), verbose=False)
    first = 4 * torch.distributed.get_rank()
    mine = collate(EXAMPLES[first : first + 4] if world_size > 1 else EXAMPLES)
    with torch.no_grad():
        return {
            "logged": logged,
            "state": snapshot(module),
            "losses": module.example_losses(mine),
            "best": module.predict_step(mine, 0),
            "drawn": module.draw_negatives(collate(EXAMPLES)),
        }


@pytest.mark.parametrize("kind", ["one rank", "table_wise", "row_wise", "column_wise"])
def test_evaluation_is_a_loop_over_all_items(one_rank: Ranks, two_ranks: Ranks, kind: Any) -> None:
    results = (
        one_rank.run(evaluate, 1, Placement())
        if kind == "one rank"
        else two_ranks.run(evaluate, 2, Placement(default=kind))
    )
    plain = Plain(assemble([result["state"] for result in results]), normalize=True)
    found = torch.cat([result["losses"] for result in results])
    torch.testing.assert_close(found.double(), exact_losses(plain, EXAMPLES), rtol=1e-5, atol=1e-5)

    def best(context: list[int]) -> list[int]:
        order: list[int] = plain.scores(context, list(range(ITEMS))).argsort(descending=True)
        return [int(row) for row in order]

    answers = torch.cat([result["best"] for result in results]).tolist()
    assert answers == [best(context)[:20] for context, _ in EXAMPLES]
    examples = Windows(23).examples
    places = [best(context).index(label) for context, label in examples]
    expected = {}
    for k in (1, 5, 10, 20):
        hits = sum(place < k for place in places)
        expected[f"val_recall@{k}"] = hits / len(examples)
        expected[f"val_precision@{k}"] = hits / k / len(examples)
    assert expected["val_recall@5"] != expected["val_recall@20"]
    for result in results:
        assert result["logged"] == pytest.approx(expected)


def test_ranks_of_one_seed_draw_different_negatives(two_ranks: Ranks) -> None:
    one, two = two_ranks.run(evaluate, 2, Placement())
    assert not torch.equal(one["drawn"], two["drawn"])


def test_metrics_that_agree_at_first_stay_apart() -> None:
    """torchmetrics merges metrics whose sums are equal after the first batch."""
    metrics = retrieval_metrics("", answer_size=7)
    metrics.update(torch.arange(7)[None], torch.tensor([20]))  # in no answer
    metrics.update(torch.arange(7)[None], torch.tensor([3]))  # in the fourth place
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found == pytest.approx(
        {"recall@1": 0.0, "recall@5": 0.5, "precision@1": 0.0, "precision@5": 0.1}
    )


def test_few_items_make_short_answers() -> None:
    module = built(num_items=12)
    recalls = {name for name in module.val_metrics if "recall" in name}
    assert recalls == {"val_recall@1", "val_recall@5", "val_recall@10"}
    assert module.predict_step(collate([([3], 2)]), 0).shape == (1, 12)


# ---- refusals -----------------------------------------------------------------------------------


def test_negatives_that_couple_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"couple the examples.*Use 'uniform', or a file"):
        two_towers(negatives="in_batch")


def test_weights_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"existing \.npy or \.npz file"):
        two_towers(negatives=str(tmp_path / "none.npy"))
    for name, weights in (("short", np.ones(ITEMS - 1)), ("zero", np.arange(ITEMS))):
        np.save(tmp_path / f"{name}.npy", weights)
        with pytest.raises(ValueError, match="Expected 30 positive weights"):
            two_towers(negatives=str(tmp_path / f"{name}.npy"))
    np.savez(tmp_path / "other.npz", something=np.ones(ITEMS))
    with pytest.raises(ValueError, match=r"found shape \(0,\)"):
        two_towers(negatives=str(tmp_path / "other.npz"))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="to end in embedding_dim=8"):
        two_towers(context_layers=[8, 6])
    with pytest.raises(ValueError, match="positive temperature, found 30, 5 and 0"):
        two_towers(temperature=0)


def test_batches_of_another_form_are_refused() -> None:
    module = built()
    two_labels = collate([([1], 2), ([3], 4)])
    features = two_labels.sparse_features
    two_labels.sparse_features = KeyedJaggedTensor(
        features.keys(), features.values(), lengths=torch.tensor([1, 1, 2, 0]), stride=2
    )
    with pytest.raises(ValueError, match="one label for every example"):
        module.example_losses(two_labels)
    two_labels.sparse_features = KeyedJaggedTensor(
        ["label", "context"], features.values(), lengths=features.lengths(), stride=2
    )
    with pytest.raises(ValueError, match=r"in this order"):
        module.example_losses(two_labels)
