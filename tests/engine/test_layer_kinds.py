"""Every kind of layer, and weights that are computed, against autograd one example at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_dpsparse.engine import built_gradients
from lightning_dpsparse.engine.ghost import DenseCapture
from tests.support.dense_cases import B, autograd, capture_step, clipped_sum, loss_of, positions
from tests.support.layer_cases import COMPUTED, LAYERS, Calls

UNITS = torch.tensor([0, 0, 2, 3, 3])  # examples 0 and 1 are one user's, 3 and 4 another's


def norms_of(capture: DenseCapture, first_of_unit_B: Tensor | None = None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, squares in capture.square_norms(B, first_of_unit_B):
        found[name] = found.get(name, torch.zeros(B, dtype=torch.float64)) + squares
    return found


@pytest.fixture(params=["at once", "some at a time"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "some at a time":
        monkeypatch.setattr(built_gradients, "MOST_NUMBERS", 1)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", [*LAYERS, *COMPUTED])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_norms_and_sums_match_autograd(name: str) -> None:
    torch.manual_seed(0)
    build, data = (LAYERS | COMPUTED)[name]
    model, x = build().double(), data()
    plain, expected = model(x).detach(), autograd(model, x)
    capture = capture_step(model, x)
    with capture:
        torch.testing.assert_close(model(x).detach(), plain, rtol=1e-12, atol=1e-12)
    capture = capture_step(model, x)
    norms, norms_of_units = norms_of(capture), norms_of(capture, UNITS)
    factors = torch.linspace(0.1, 1.0, B, dtype=torch.float64)
    for parameter, each in expected.items():
        each_B = torch.stack(each).unsqueeze(-1).flatten(1)
        of_units = torch.zeros_like(each_B).index_add_(0, UNITS, each_B)
        # Norms may be larger by what rounding could hide in terms that cancel (norms.py): a key's
        # bias never changes what attention gives, and all of its gradient cancels.
        close = {"rtol": 1e-6, "atol": 1e-12}
        torch.testing.assert_close(norms[parameter], each_B.square().sum(1), **close)
        torch.testing.assert_close(norms_of_units[parameter], of_units.square().sum(1), **close)
        total = (factors @ each_B).view_as(each[0])
        found = clipped_sum(capture, parameter, factors)
        torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [*LAYERS, *COMPUTED])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_empty_batch_has_empty_norms_and_zero_sums(name: str) -> None:
    build, data = (LAYERS | COMPUTED)[name]
    model = build().double()
    capture = capture_step(model, data()[:0])
    assert all(squares.shape == (0,) for _, squares in capture.square_norms(0))
    for parameter, value in model.named_parameters():
        zero = clipped_sum(capture, parameter, torch.zeros(0, dtype=torch.float64))
        assert torch.equal(zero, torch.zeros_like(value))


@pytest.mark.parametrize("name", ["attention", "LSTM, deep", "encoder layer"])
def test_evaluation_runs_the_kernels_of_torch(name: str) -> None:
    build, data = LAYERS[name]
    model, x = build().double().eval(), data()
    with torch.no_grad(), DenseCapture(dict(model.named_parameters())) as capture:
        seen = model(x)
    assert not capture.recorded()
    torch.testing.assert_close(seen, model(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.5, batch_first=True),
        nn.GRU(4, 3, num_layers=2, dropout=0.5, batch_first=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_dropout_left_out_is_left_out_of_the_gradient(layer: nn.Module) -> None:
    """Against differences of losses with the same draws, example by example."""
    torch.manual_seed(0)
    model, x = layer.double(), positions()
    parameters = dict(model.named_parameters())
    capture = DenseCapture(parameters)

    def losses() -> Tensor:
        torch.manual_seed(5)
        capture.clear()
        with capture:
            out = model(x)
            return (out[0] if isinstance(out, tuple) else out).flatten(1).square().sum(1)

    way = {name: torch.randn_like(p) for name, p in parameters.items()}
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter += sign * 1e-5 * way[name]
        ends.append(losses().detach())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= sign * 1e-5 * way[name]
    losses().sum().backward()
    for b in range(B):
        only = torch.zeros(B, dtype=torch.float64)
        only[b] = 1.0
        slope = sum((clipped_sum(capture, n, only) * v).sum() for n, v in way.items())
        torch.testing.assert_close(slope, ((ends[0] - ends[1]) / 2e-5)[b], rtol=1e-6, atol=1e-8)


def test_what_is_made_of_itself_many_times_is_computed_once_each() -> None:
    """Sixty doublings are sixty calls, and not 2^60."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        w = m.w
        for _ in range(60):
            w = (w + w) * 0.5
        return F.linear(x, w)

    torch.manual_seed(0)
    model, x = Calls(forward, w=(3, 4)).double(), positions()[:, 0]
    expected = torch.stack([g.square().sum() for g in autograd(model, x)["w"]])
    torch.testing.assert_close(norms_of(capture_step(model, x))["w"], expected)


# ---- what has no gradient for each example, or another one when it is computed again ----------


def norms_are_refused(model: nn.Module, x: Tensor, message: str) -> None:
    def run() -> None:
        list(capture_step(model.double(), x).square_norms(len(x)))

    with pytest.raises(ValueError, match=message):
        run()


def test_weights_that_are_dropped_at_random_are_refused() -> None:
    model = Calls(lambda m, x: F.linear(x, F.dropout(m.w, 0.5).tanh()).flatten(1), w=(3, 4))
    norms_are_refused(model, positions(), "to give the same result when it is computed again")


def test_a_constant_that_is_written_to_is_refused() -> None:
    def forward(m: Calls, x: Tensor) -> Tensor:
        out = F.linear(x, m.w * m.mask)
        m.mask.mul_(0.5)
        return out.flatten(1)

    model = Calls(forward, w=(3, 4), mask=torch.ones(3, 4))
    norms_are_refused(model, positions(), "'mul' of 'w' reads to stay as it was")


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda m, x: F.linear(x, m.w[:2]) + F.linear(x, m.w[1:]), r"'w\[0:2\]' beside 'w\[1:3\]'"),
        (lambda m, x: F.linear(x, m.w)[..., :2] + F.linear(x, m.w[:2]), "'w' beside"),
        (lambda m, x: F.linear(x, m.w[:2]) + x[..., :2] * m.w[1][0], r"'w\[0:2\]' beside 'w\[1, 0"),
    ],
    ids=["two ranges", "the whole and a range", "a range and a number"],
)
def test_rows_that_are_read_twice_in_slices_are_refused(
    forward: Callable[[Calls, Tensor], Tensor], found: str
) -> None:
    model = Calls(lambda m, x: forward(m, x).flatten(1), w=(3, 4))
    norms_are_refused(model, positions(), f"slices that have no rows in common, found {found}")


def test_a_packed_sequence_is_refused() -> None:
    lengths = torch.tensor([3, 3, 2, 1, 1])
    model = Calls(
        lambda m, x: m.gru(pack_padded_sequence(x, lengths, batch_first=True))[1][0],
        gru=nn.GRU(4, 3, batch_first=True),
    )
    norms_are_refused(model, positions(), r"padded sequences in nn\.GRU, found a PackedSequence")


def test_positions_first_are_refused_where_examples_must_be() -> None:
    model = Calls(
        lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1).flatten(1),
        layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
    )
    norms_are_refused(model, positions().requires_grad_(), r"of 'layer_norm' .* found sizes \[3\]")


def test_a_sum_over_all_examples_is_refused() -> None:
    model = Calls(lambda m, x: x * torch.dot(x.flatten(), m.w), w=4 * B)
    norms_are_refused(model, torch.randn(B, 4).double(), "found 'dot' on .*, which joins all")


def test_a_number_that_depends_on_examples_is_refused() -> None:
    x = torch.randn(B, 4).double().requires_grad_()
    model = Calls(lambda m, x: x * (m.w * x.mean()), w=4)
    norms_are_refused(model, x, "found 'mul' on .*, which joins all")


# ---- a number of rows that is the batch's by chance -------------------------------------------


def places_of(size: int) -> Calls:
    return Calls(
        lambda m, x: (x + m.places(torch.arange(size))).flatten(1), places=nn.Embedding(9, 4)
    )


def step(capture: DenseCapture, model: nn.Module, size: int, length: int) -> dict[str, Tensor]:
    x = torch.randn(size, length, 4, dtype=torch.float64)
    capture.clear()
    capture.expect(size)
    with capture:
        loss = loss_of(model, x)
    loss.sum().backward()
    expected = autograd(model, x)["places.weight"]
    (found,) = (squares for _, squares in capture.square_norms(size))
    torch.testing.assert_close(found, torch.stack([g.square().sum() for g in expected]))
    return {"places.weight": found}


def test_as_many_places_as_examples_are_places_once_that_is_known() -> None:
    model = places_of(3).double()
    capture = DenseCapture(dict(model.named_parameters()))
    step(capture, model, size=5, length=3)
    step(capture, model, size=3, length=3)


def test_places_that_were_taken_for_examples_are_refused_before_long() -> None:
    model = places_of(3).double()
    capture = DenseCapture(dict(model.named_parameters()))
    capture.expect(3)
    with capture:
        model(torch.randn(3, 3, 4, dtype=torch.float64))
    capture.clear()
    with pytest.raises(ValueError, match="one row for each example in every batch or in none"):
        step(capture, model, size=5, length=3)


def test_copies_that_were_taken_for_one_each_are_refused_before_long() -> None:
    model = Calls(lambda m, x: (x + m.bias.expand(3, 4)).flatten(1), bias=4).double()
    capture = DenseCapture(dict(model.named_parameters()))
    for size in (3, 5):
        capture.expect(size)
        with capture:
            if size == 3:
                model(torch.randn(3, 3, 4, dtype=torch.float64))
            else:
                with pytest.raises(ValueError, match="'expand' on 'bias' to read one row"):
                    model(torch.randn(5, 3, 4, dtype=torch.float64))
