"""SASRec's losses and answers against a loop over examples and positions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse.engine.ghost import DenseCapture, check_layers
from lightning_dpsparse.models import SASRecModule
from tests.support.item_windows import EXAMPLES, ITEMS, NEGATIVES, collate, some_negatives
from tests.support.plain_sasrec import TABLE, Plain, sasrec

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's turn make small products many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(**settings: Any) -> SASRecModule:
    torch.manual_seed(0)
    module = sasrec(**settings)
    module.configure_model()
    with torch.no_grad():  # norms that do something
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.rand_like(parameter)
    return module


# ---- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_a_loop(
    tmp_path: Path, weighted: bool, normalize: bool
) -> None:
    settings: dict[str, Any] = {"normalize": normalize}
    log_q = None
    if weighted:
        weights = np.arange(1, ITEMS + 1)
        np.save(tmp_path / "weights.npy", weights)
        settings["negatives"] = str(tmp_path / "weights.npy")
        log_q = torch.from_numpy(np.log(weights / weights.sum()))
    module, negatives_BK = built(**settings), some_negatives()
    negatives_BK[3, 4] = 4  # what comes third in its context
    loss_B = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    plain = Plain(module.state_dict(), normalize=normalize)
    expected = [plain.loss(e, n, log_q) for e, n in zip(EXAMPLES, negatives_BK.tolist())]
    torch.testing.assert_close(loss_B.double(), torch.stack(expected), **CLOSE)
    loss_B.sum().backward()
    torch.stack(expected).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad.double(), plain.weights[name].grad, rtol=1e-4, atol=1e-5
        )


def test_a_loss_depends_neither_on_other_examples_nor_on_padding() -> None:
    """Nor does its gradient: alone, an example is not padded; with others, up to five places."""
    module, negatives_BK = built(), some_negatives()
    parameters = list(module.parameters())
    together = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    for i, example in enumerate(EXAMPLES):
        alone = module.sampled_losses(collate([example]), negatives_BK[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], **CLOSE)
        one = torch.autograd.grad(alone[0], parameters)
        other = torch.autograd.grad(together[i], parameters, retain_graph=True)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_position_knows_nothing_of_what_comes_later() -> None:
    module, context = built(), [3, 9, 27, 9, 1]
    before = module(collate([(context, 2)])).output_BTD[0]
    for t in range(len(context)):
        changed = [*context[:t], 14, *context[t + 1 :]]
        after = module(collate([(changed, 5)])).output_BTD[0]
        torch.testing.assert_close(after[:t], before[:t], **CLOSE)
        assert ((after[t:] - before[t:]).abs().amax(1) > 1e-3).all()


def test_every_position_is_told_what_comes_next() -> None:
    found = built()(collate([([3, 9, 3], 7), ([], 2), ([5], 5)]))
    assert found.is_real_BT.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert found.item_BT[found.is_real_BT].tolist() == [9, 3, 7, 2, 5]
    assert found.item_BT[found.is_last_BT].tolist() == [7, 2, 5]


def test_a_negative_that_comes_next_counts_nothing() -> None:
    module = built()
    examples = [([7, 7], 7), ([], 2), ([5], 5)]
    negatives_BK = torch.tensor([[label] * NEGATIVES for _, label in examples])
    loss_B = module.sampled_losses(collate(examples), negatives_BK)
    loss_B.sum().backward()
    assert torch.equal(loss_B, torch.zeros(3))
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)
    # It counts where something else comes next.
    loss_B = module.sampled_losses(collate([([7, 3], 7)]), negatives_BK[:1])
    assert loss_B.item() > 0


def test_only_the_latest_ids_are_read() -> None:
    module, negatives_BK = built(max_length=3), torch.full((2, NEGATIVES), 20)
    long, short = ([9, 4, 1, 2, 3], 8), ([1, 2, 3], 8)
    loss_B = module.sampled_losses(collate([long, short]), negatives_BK)
    torch.testing.assert_close(loss_B[0], loss_B[1], **CLOSE)
    loss_B.sum().backward()
    gradient = module.get_parameter(TABLE).grad
    assert gradient is not None
    assert gradient.any(1).nonzero().flatten().tolist() == [1, 2, 3, 8, 20]


@pytest.mark.parametrize("normalize", [False, True])
def test_empty_contexts_train(normalize: bool) -> None:
    """By the first position alone."""
    module = built(normalize=normalize)
    negatives_BK = torch.zeros(2, NEGATIVES, dtype=torch.int64)
    loss_B = module.sampled_losses(collate([([], 4), ([], 9)]), negatives_BK)
    assert torch.isfinite(loss_B).all()
    loss_B.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    moved = module.positions.weight.grad
    assert moved is not None
    assert moved.any(1).tolist() == [True, *[False] * 4]


def test_dropout_is_for_training_alone() -> None:
    module, batch = built(dropout=0.5), collate(EXAMPLES)
    assert not torch.equal(module(batch).output_BTD, module(batch).output_BTD)
    module.eval()
    expected = built().eval()(batch).output_BTD
    torch.testing.assert_close(module(batch).output_BTD, expected, **CLOSE)


# ---- private training can see every layer -------------------------------------------------------


def test_norms_of_dense_layers_are_those_of_a_loop() -> None:
    module, negatives_BK = built(), some_negatives()
    check_layers(module)
    dense = {name: p for name, p in module.named_parameters() if name != TABLE}
    expected: dict[str, list[Tensor]] = {name: [] for name in dense}
    for i, example in enumerate(EXAMPLES):
        loss_B = module.sampled_losses(collate([example]), negatives_BK[i : i + 1])
        for name, gradient in zip(dense, torch.autograd.grad(loss_B[0], list(dense.values()))):
            expected[name].append(gradient.square().sum())
    capture = DenseCapture(dense)
    with capture:
        loss_B = module.sampled_losses(collate(EXAMPLES), negatives_BK)
    loss_B.sum().backward()
    capture.check_nothing_escaped()
    found = dict(capture.square_norms(len(EXAMPLES)))
    assert set(found) == set(dense)
    for name, square_B in found.items():
        torch.testing.assert_close(square_B, torch.stack(expected[name]), rtol=1e-3, atol=1e-6)


# ---- learning -----------------------------------------------------------------------------------


def test_it_learns_what_the_last_item_alone_does_not_tell() -> None:
    """After x, y comes y + 1 if y is x + 1, else x: of y alone, one half can be guessed."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(ITEMS, (256,), generator=generator)
    follows = torch.rand(256, generator=generator) < 0.5
    second = torch.where(follows, (first + 1) % ITEMS, (first + 7) % ITEMS)
    label = torch.where(follows, (second + 1) % ITEMS, first)
    examples = [([x, y], z) for x, y, z in zip(first.tolist(), second.tolist(), label.tolist())]
    batch = collate(examples)
    module = built(embedding_dim=16, num_negatives=16, temperature=1.0)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)

    def recall() -> float:
        query_BD, _ = module._queries_and_labels(batch)
        best_B = (query_BD @ module.get_parameter(TABLE).T).argmax(1)
        return float((best_B == label).float().mean())

    assert recall() < 0.2
    for _ in range(50):
        optimizer.zero_grad()
        module._training_losses(batch).mean().backward()
        optimizer.step()
    assert recall() > 0.9


# ---- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_evaluation_is_a_loop_over_all_items(normalize: bool) -> None:
    module, batch = built(normalize=normalize), collate(EXAMPLES)
    plain = Plain(module.state_dict(), normalize=normalize)
    scores = [plain.scores(plain.outputs(c)[-1], list(range(ITEMS))) for c, _ in EXAMPLES]
    expected = [s.exp().sum().log() - s[label] for s, (_, label) in zip(scores, EXAMPLES)]
    found = module.example_losses(batch)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert not found.requires_grad
    best = [s.argsort(descending=True)[:20].tolist() for s in scores]
    assert module.predict_step(batch, 0).tolist() == best


# ---- refusals -----------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="that divide embedding_dim=8, found 3"):
        sasrec(num_heads=3)
    with pytest.raises(ValueError, match="max_length >= 1, found 0"):
        sasrec(max_length=0)
    with pytest.raises(ValueError, match="dropout between 0 and 1, found 1"):
        sasrec(dropout=1.0)
    with pytest.raises(ValueError, match="couple the examples"):
        sasrec(negatives="in_batch")


def test_batches_of_another_form_are_refused() -> None:
    batch = collate([([1], 2), ([3], 4)])
    features = batch.sparse_features
    batch.sparse_features = KeyedJaggedTensor(
        ["label", "context"], features.values(), lengths=features.lengths(), stride=2
    )
    with pytest.raises(ValueError, match="in this order"):
        built()(batch)
