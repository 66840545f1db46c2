"""The private step equals a naive one: a loop over examples, float64, plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import DPSGD, EANA, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import RowNoise
from lightning_dpsparse.sharded.fused import kernel_steps
from tests.plugin.test_training import PLACEMENTS, ROWWISE, SGD, assert_close, update
from tests.ranks import Ranks
from tests.small import (
    TABLES,
    Bags,
    Recording,
    Reference,
    assemble,
    collate,
    collate_weighted,
    make_trainer,
    snapshot,
)

# eps keeps Adagrad from blowing rounding up to a full step where gradients cancel in float32.
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.3, eps=1e-3)
EXPECTED = 10
SIZES = {
    "even": [[4, 4], [4, 4], [4, 4]],
    "uneven": [[5, 1], [0, 4], [7, 3]],
    "empty": [[0, 0], [3, 0], [0, 0]],
}


class Batches:
    """A loader of given batches: step s has sizes[s][rank] examples on each rank."""

    def __init__(self, sizes: list[list[int]], rank: int | None, weighted: bool = False) -> None:
        self.batches, start, examples = [], 0, Bags(100)
        put_together = collate_weighted if weighted else collate
        for step in sizes:
            parts = [step[rank]] if rank is not None else step
            skip = sum(step[:rank]) if rank is not None else 0
            first = start + skip
            self.batches.append(
                put_together([examples[i] for i in range(first, first + sum(parts))])
            )
            start += sum(step)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Poisoned(Recording):
    """One example of the second step has an infinite loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 0 and len(loss):
            loss = loss * torch.tensor([math.inf] + [1.0] * (len(loss) - 1))
        return loss


def train(
    world_size: int,
    sizes: list[list[int]],
    placement: Placement,
    optimizer: FusedOptimizer,
    plan: PrivacyPlan,
    hosts: int = 1,
    poisoned: bool = False,
    most: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Private training on every rank; runs inside a rank. A lone rank gets all examples."""
    torch.manual_seed(0)
    module = (Poisoned if poisoned else Recording)(**kwargs)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    trainer = make_trainer(
        world_size, placement, optimizer, hosts=hosts, privacy=plan, max_physical_batch=most
    )
    trainer.fit(module, Batches(sizes, rank, module.weighted))
    return {"start": module.start, "end": snapshot(module)}


def flat(names: list[str], each: Any, clip_norm: float) -> list[float]:
    norm = math.sqrt(sum(float(g.square().sum()) for g in each))
    return [min(1.0, clip_norm / norm)] * len(names)


def automatic(names: list[str], each: Any, clip_norm: float) -> list[float]:
    norm = math.sqrt(sum(float(g.square().sum()) for g in each))
    return [clip_norm / (norm + 0.01)] * len(names)


def grouped(names: list[str], each: Any, clip_norm: float) -> list[float]:
    """Tables t0 and t1 in one group of share 3, all else in another of share 4."""
    first = [name.startswith(("bags.t0", "bags.t1")) for name in names]
    result = {}
    for member, share in ((True, 0.6), (False, 0.8)):
        norm = math.sqrt(sum(float(g.square().sum()) for g, f in zip(each, first) if f is member))
        result[member] = min(1.0, share * clip_norm / norm)
    return [result[f] for f in first]


def add_replayed_noise(model: Reference, batch: Any, noisy: PrivacyPlan, step: int) -> None:
    """The draws that row-keyed noise must make, added to whole gradients."""
    source = RowNoise(noisy.make_key())
    stddev = noisy.noise_multiplier * noisy.clip_norm / EXPECTED
    bags = batch.sparse_features.to_dict() if batch.sparse_features.stride() else {}
    for name, _, _, features in TABLES:
        gradient = model.bags[name].weight.grad
        stream = Stream("gradient", f"ebc.embedding_bags.{name}.weight", step)
        drawn = source.fill_(torch.empty(gradient.shape), stream, stddev)
        if isinstance(noisy.mechanism, EANA):
            read = torch.zeros(len(drawn), dtype=torch.bool)
            for feature in features if bags else []:
                read[bags[feature].values()] = True
            drawn[~read] = 0.0
        gradient += drawn
    dense = list(model.head.parameters())
    flat_noise = torch.empty(1, sum(p.numel() for p in dense))
    source.fill_(flat_noise, Stream("gradient", "dense layers", step), stddev)
    for parameter, piece in zip(dense, flat_noise[0].split([p.numel() for p in dense])):
        parameter.grad += piece.view_as(parameter)


def naive(
    start: dict[str, Tensor],
    sizes: list[list[int]],
    optimizer: FusedOptimizer,
    clip_norm: float,
    *,
    mean: bool = False,
    weighted: bool = False,
    poisoned: bool = False,
    factors: Any = None,
    noisy: PrivacyPlan | None = None,
) -> dict[str, Tensor]:
    """Per-example gradients by autograd, clipped one by one, in float64."""
    model = Reference(start, mean=mean).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    examples, position = Bags(100), 0
    for step, parts in enumerate(sizes):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(sum(parts)):
            batch = (collate_weighted if weighted else collate)([examples[position + i]])
            batch.dense_features = batch.dense_features.double()
            if poisoned and step == 1 and i == 0 and parts[0]:
                continue
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
            each = torch.autograd.grad(loss, list(model.parameters()))
            names = [name for name, _ in model.named_parameters()]
            total = [
                t + f * g for t, f, g in zip(total, (factors or flat)(names, each, clip_norm), each)
            ]
        position += sum(parts)
        for parameter, gradient in zip(model.parameters(), total):
            parameter.grad = gradient / EXPECTED
        if noisy is not None:
            batch = collate([examples[position - sum(parts) + i] for i in range(sum(parts))])
            add_replayed_noise(model, batch, noisy, step)
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, 1.0)
    return model.weights()


def plan(
    clip_norm: float = 0.5, noise: float = 0.0, mechanism: Any = None, **kwargs: Any
) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=mechanism or EANA(),
        clip_norm=clip_norm,
        noise_multiplier=noise,
        expected_batch_size=EXPECTED,
        fixed_key=5,
        **kwargs,
    )


def run(ranks: Ranks, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = ranks.run(train, ranks.world_size, *args, **kwargs)
    return assemble([r["start"] for r in results]), assemble([r["end"] for r in results])


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mean", [False, True])
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, mean: bool
) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, plan(), mean=mean)
    expected = naive(start, SIZES[sizes], optimizer, 0.5, mean=mean)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, optimizer: Any, sizes: str, name: str
) -> None:
    start, end = run(two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan())
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
def test_a_batch_cut_into_parts_is_the_naive_step(
    two_ranks: Ranks, most: int, name: str, optimizer: Any
) -> None:
    """Ranks of unequal size agree on the number of parts; one update, one noise for all of them."""
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS[name], optimizer, plan(), most=most)
    expected = naive(start, sizes, optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


def test_a_batch_cut_into_parts_gets_its_noise_once(two_ranks: Ranks) -> None:
    noisy = plan(noise=1.0, mechanism=DPSGD(chunk_rows=16))
    start, whole = run(two_ranks, SIZES["even"], PLACEMENTS["mixed"], SGD, noisy)
    _, parts = run(two_ranks, SIZES["even"], PLACEMENTS["mixed"], SGD, noisy, most=3)
    assert_close(parts, {key: whole[key] for key in start}, 1e-6)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_two_hosts_are_the_naive_step(two_hosts: Ranks, kind: Any) -> None:
    placement = Placement(default=kind)
    start, end = run(two_hosts, SIZES["uneven"], placement, SGD, plan(), hosts=2)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5), 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_an_example_that_overflows_counts_nothing(two_ranks: Ranks, name: str) -> None:
    start, end = run(two_ranks, SIZES["even"], PLACEMENTS[name], SGD, plan(), poisoned=True)
    assert_close(end, naive(start, SIZES["even"], SGD, 0.5, poisoned=True), 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
def test_weighted_bags_are_the_naive_step(two_ranks: Ranks, optimizer: Any, name: str) -> None:
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], optimizer, plan(), weighted=True)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5, weighted=True)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


GROUPS = GroupClipping({"*.t[01].weight": 3.0, "*": 4.0})


@pytest.mark.parametrize(
    ("clipping", "factors"), [(AutomaticClipping(), automatic), (GROUPS, grouped)]
)
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_other_clipping_is_the_naive_step(
    two_ranks: Ranks, clipping: Any, factors: Any, name: str
) -> None:
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, plan(clipping=clipping))
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=factors), 2e-6)


@pytest.mark.parametrize(
    "kind", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid"]
)
def test_four_ranks_on_two_hosts_are_the_naive_step(four_ranks: Ranks, kind: Any) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    sizes = [[3, 0, 2, 1], [0, 0, 0, 5], [2, 2, 2, 2]]
    start, end = run(four_ranks, sizes, Placement(default=kind), SGD, plan(), hosts=2)
    assert_close(end, naive(start, sizes, SGD, 0.5), 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_infinite_clip_and_zero_noise_is_plain_training(
    two_ranks: Ranks, optimizer: Any, name: str
) -> None:
    sizes = [[5, 5]] * 3  # EXPECTED examples a step, so that both divide by the same number
    start, private = run(two_ranks, sizes, PLACEMENTS[name], optimizer, plan(math.inf))
    _, plain = run(two_ranks, sizes, PLACEMENTS[name], optimizer, None)
    tolerance = 1e-6 if optimizer is SGD else 1e-5
    assert_close(private, {key: plain[key] for key in start}, tolerance)


class EveryStep(Recording):
    """Remembers its weights after every step."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.history: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append(snapshot(self))


def record_noise(world_size: int, placement: Placement, noisy: PrivacyPlan, steps: int) -> Any:
    torch.manual_seed(0)
    module = EveryStep()
    rank = torch.distributed.get_rank()
    sgd = FusedOptimizer(kind="sgd", learning_rate=1.0)
    trainer = make_trainer(world_size, placement, sgd, privacy=noisy)
    trainer.fit(module, Batches([[0] * world_size] * steps, rank))
    return [module.start, *module.history]


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("source", ["fast", "secure"])
def test_noise_has_its_variance_on_every_table_shard_and_layer(
    two_ranks: Ranks, name: str, source: Any
) -> None:
    """Steps without an example: what moves is noise alone, on rows that nobody ever read."""
    steps = 40
    noisy = plan(2.0, noise=1.5, mechanism=DPSGD(chunk_rows=16), noise_source=source)
    results = two_ranks.run(record_noise, 2, PLACEMENTS[name], noisy, steps)
    stddev = 1.5 * 2.0 / EXPECTED
    whole = [assemble([rank[s] for rank in results]) for s in range(steps + 1)]
    for rank in results:
        for i, (key, *_) in enumerate(rank[0]["pieces"]):
            weights = torch.stack([snap["pieces"][i][3] for snap in rank]).double()
            assert_variance(weights.diff(dim=0), stddev, key)
    for key in whole[0]:
        draws = torch.stack([snap[key].double() for snap in whole]).diff(dim=0)
        assert_variance(draws, stddev, key)
        flat = draws.flatten(1)
        lag = (flat[1:] * flat[:-1]).mean() / stddev**2
        assert abs(lag) < 5 / math.sqrt(flat[1:].numel()), f"{key}: steps share noise"
    same_width = [whole[1][k] - whole[0][k] for k in whole[0] if whole[0][k].shape[-1:] == (8,)]
    rows = torch.cat([t for t in same_width if t.dim() == 2])
    assert len(rows.unique(dim=0)) == len(rows)  # no two rows of any table or shard drew alike


def assert_variance(draws: Tensor, stddev: float, key: str) -> None:
    """n draws of known variance: the mean square has standard error sqrt(2 / n)."""
    n = draws.numel()
    ratio = float(draws.square().mean()) / stddev**2
    assert abs(ratio - 1) < 5 * math.sqrt(2 / n), f"{key}: variance is {ratio:.3f} of right"
    assert abs(float(draws.mean())) / stddev < 5 / math.sqrt(n)


def count_steps(mechanism: Any, most: int | None) -> int:
    module = Recording()
    trainer = make_trainer(
        1, Placement(), ROWWISE, privacy=plan(mechanism=mechanism), max_physical_batch=most
    )
    trainer.fit(module, Batches(SIZES["even"], None))
    return kernel_steps(module)


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_the_kernels_count_one_step_a_step(
    one_rank: Ranks, mechanism: Any, most: int | None
) -> None:
    """Adam, on CUDA, corrects its bias by this count; any optimizer but SGD keeps it."""
    assert one_rank.run(count_steps, mechanism, most) == [len(SIZES["even"])]


def test_two_runs_never_share_noise(one_rank: Ranks) -> None:
    """Without a fixed key, the same seed and the same data still give fresh noise."""
    fresh = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1.0, expected_batch_size=EXPECTED)
    one, two = (
        assemble([run[1]])
        for run in (one_rank.run(record_noise, 1, Placement(), fresh, 1)[0] for _ in range(2))
    )
    for key in one:
        assert (one[key] != two[key]).float().mean() > 0.99


def test_eana_moves_only_rows_that_were_read(one_rank: Ranks) -> None:
    noisy = plan(noise=1.0)
    start, end = run(one_rank, [[3, 0]], Placement(), SGD, noisy)
    read = collate([Bags(100)[i] for i in range(3)]).sparse_features["f2"].values().unique()
    key = "ebc.embedding_bags.t1.weight"
    moved = (start[key] != end[key]).any(1).nonzero().squeeze(1)
    assert torch.equal(moved, read)


def test_clipping_matters_here(one_rank: Ranks) -> None:
    """The tests above would pass without clipping if nothing were clipped."""
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, plan())
    unclipped = naive(start, SIZES["even"], SGD, math.inf)
    with pytest.raises(AssertionError):
        assert_close(end, unclipped, 1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_dpsgd_without_noise_is_the_naive_step(one_rank: Ranks, optimizer: Any) -> None:
    """All rows are updated, in chunks smaller than the tables: untouched ones must not move."""
    everything = plan(mechanism=DPSGD(chunk_rows=16))
    start, end = run(one_rank, SIZES["uneven"], Placement(), optimizer, everything)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_the_optimizer_sees_sum_and_noise_as_one_gradient(
    two_ranks: Ranks, optimizer: Any, mechanism: Any, name: str
) -> None:
    """Adagrad's state would tell two calls from one, and noise that came too late."""
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], optimizer, noisy)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5, noisy=noisy)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise", "mixed"])
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_row_keyed_noise_is_the_same_on_one_rank_and_two(
    one_rank: Ranks, two_ranks: Ranks, name: str, mechanism: Any
) -> None:
    """Noise is drawn once for each row by its owner, and once for the job in dense layers."""
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    start, one = run(one_rank, SIZES["uneven"], Placement(), SGD, noisy)
    _, two = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, noisy)
    assert_close(two, {key: one[key] for key in start}, 1e-6)
    quiet = naive(start, SIZES["uneven"], SGD, 0.5)
    assert all((one[key] - quiet[key]).abs().max() > 1e-3 for key in quiet)
