"""The two towers' losses, answers and metrics against loops over examples in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import Placement
from lightning_dpsparse.models import TwoTowerModule
from lightning_dpsparse.models.retrieval import retrieval_metrics
from tests.support.item_windows import (
    EXAMPLES,
    ITEMS,
    NEGATIVES,
    Windows,
    collate,
    loader,
    some_negatives,
)
from tests.support.plain_two_tower import TABLE, WIDTH, Plain, two_towers
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble, make_trainer, snapshot


def built(**settings: Any) -> TwoTowerModule:
    torch.manual_seed(0)
    module = two_towers(**settings)
    module.configure_model()
    return module


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
    with pytest.raises(ValueError, match=r"of shape \(0,\)"):
        two_towers(negatives=str(tmp_path / "other.npz"))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="to end in embedding_dim=8"):
        two_towers(context_layers=[8, 6])
    with pytest.raises(ValueError, match="positive temperature, found 0"):
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
