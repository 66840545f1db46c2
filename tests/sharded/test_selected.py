"""Counting ids, and sending those that were not selected to one row."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import DPSGD, FEST, NoisyHistogram, PrivacyPlan, Selection
from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.engine.state import StepNoise
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection import Histogram
from lightning_dpsparse.mechanisms.selection.counter import IdCounter
from lightning_dpsparse.mechanisms.selection.state import SelectedRows
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.keystream import hidden_share
from lightning_dpsparse.noise.sources import FastNoise
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from lightning_dpsparse.sharded.features import features_of
from lightning_dpsparse.sharded.shared_rows import OneRowForOthers
from tests.support.paper_kernel import PaperKernel
from tests.support.private_runs import Marked, Watching, marked_loader, strict_collate
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    SEQUENCE_WIDTH,
    Bags,
    Head,
    assemble,
    fold,
    make_trainer,
    paths,
    sequence_tables,
    snapshot,
    tables,
    width_of,
)
from tests.support.tiny_model import TABLES as SMALL

# Two features share table a, one feature is read by two tables: pairs ax, ay, by, cz.
TABLES = [Table("a", 6, ("x", "y")), Table("b", 6, ("y",)), Table("c", 3, ("z",))]
ROWS = {"x": 6, "y": 6, "z": 3}
Example = dict[str, list[int]]


def bags(examples: list[Example], features: tuple[str, ...] = ("x", "y", "z")) -> KeyedJaggedTensor:
    by_bag = [e[f] for f in features for e in examples]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([i for bag in by_bag for i in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in by_bag], dtype=torch.int64),
        stride=len(examples),
    )


def counted(examples: list[Example], histogram: Histogram) -> dict[str, list[int]]:
    counter = IdCounter(TABLES, histogram)
    if examples:
        counter.add(features_of(bags(examples)))
    return {name: count.tolist() for name, count in counter.counts.items()}


def by_hand(examples: list[Example], histogram: Histogram) -> dict[str, list[int]]:
    """A set of rows for every example and table: the smallest m_f distinct ids of each feature."""
    total: dict[str, Counter[int]] = {table.name: Counter() for table in TABLES}
    for e, table in product(examples, TABLES):
        rows: set[int] = set()
        for f in table.features:
            rows |= set(sorted(set(e[f]))[: histogram.most_ids(f)])
        total[table.name].update(rows)
    return {t.name: [total[t.name][row] for row in range(t.num_rows)] for t in TABLES}


ONE_HOT = [{"x": [1], "y": [1], "z": [2]}, {"x": [5], "y": [0], "z": [2]}]
SPARSE = [{"x": [], "y": [3], "z": []}, {"x": [4], "y": [], "z": [0]}]
REPEATED = [{"x": [2, 2, 2], "y": [2, 5, 2], "z": [1, 1]}, {"x": [], "y": [], "z": []}]
MANY = [{"x": [5, 4, 3, 2, 1, 0], "y": [0, 1, 5], "z": [2, 1, 0]}]
HISTOGRAMS = [
    NoisyHistogram(),
    NoisyHistogram(max_ids_per_bag=2),
    NoisyHistogram(max_ids_per_bag=9),
    NoisyHistogram(max_ids_per_bag=1, max_ids_of={"y": 3}),
]


@pytest.mark.parametrize("histogram", HISTOGRAMS)
@pytest.mark.parametrize(
    "examples", [ONE_HOT, SPARSE, REPEATED, MANY, ONE_HOT + SPARSE + REPEATED + MANY]
)
def test_counts_are_those_of_a_loop_over_sets(
    examples: list[Example], histogram: Histogram
) -> None:
    assert counted(examples, histogram) == by_hand(examples, histogram)


def test_an_example_counts_once_for_a_row_whatever_features_lead_there() -> None:
    """By hand, once: id 1 of features x and y of one example is one reader of row 1 of table a."""
    found = counted(ONE_HOT, NoisyHistogram())
    assert found == {"a": [1, 1, 0, 0, 0, 1], "b": [1, 1, 0, 0, 0, 0], "c": [0, 0, 2]}
    found = counted(REPEATED + MANY, NoisyHistogram(max_ids_per_bag=2))
    assert found == {"a": [1, 1, 1, 0, 0, 1], "b": [1, 1, 1, 0, 0, 1], "c": [1, 2, 0]}


def test_batches_add_up_and_may_hold_several_parts() -> None:
    histogram = NoisyHistogram(max_ids_per_bag=2)
    counter = IdCounter(TABLES, histogram)
    batch = {"left": bags(MANY, ("x",)), "right": [bags(MANY, ("z", "y")), torch.ones(1)]}
    counter.add(features_of(batch))
    counter.add(features_of((bags(REPEATED, ("y", "x")), {"more": bags(REPEATED, ("z",))})))
    expected = by_hand(MANY + REPEATED, histogram)
    assert {name: count.tolist() for name, count in counter.counts.items()} == expected


def test_features_that_the_model_adds_are_not_counted() -> None:
    counter = IdCounter(TABLES[:2], NoisyHistogram())
    counter.add(features_of(bags(ONE_HOT, ("y",))))
    assert counter.counts["a"].tolist() == counter.counts["b"].tolist()
    assert counter.counts["a"].sum() == len(ONE_HOT)
    with pytest.raises(ValueError, match=r"of table 'b' in the data, found \['x'\]"):
        counter.add(features_of(bags(ONE_HOT, ("x",))))


def test_rows_that_nobody_reads_have_a_count() -> None:
    """The range is the table's, not the data's."""
    found = counted(ONE_HOT[:1], NoisyHistogram())
    assert [len(count) for count in found.values()] == [6, 6, 3]
    assert found["c"] == [0, 0, 1]


bag = st.lists(st.integers(0, 5), max_size=5)
example = st.fixed_dictionaries({"x": bag, "y": bag, "z": st.lists(st.integers(0, 2), max_size=5)})


def flat(counts: dict[str, list[int]]) -> Tensor:
    return torch.tensor([n for count in counts.values() for n in count])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    examples=st.lists(example, min_size=1, max_size=4),
    removed=st.integers(0, 3),
    histogram=st.sampled_from(HISTOGRAMS),
)
def test_removing_one_example_moves_the_counts_by_at_most_their_sensitivity(
    examples: list[Example], removed: int, histogram: NoisyHistogram
) -> None:
    rest = [e for i, e in enumerate(examples) if i != removed % len(examples)]
    moved = flat(counted(examples, histogram)) - flat(counted(rest, histogram))
    assert set(moved.tolist()) <= {0, 1}
    most = 2 * histogram.most_ids("y") + histogram.most_ids("x") + histogram.most_ids("z")
    assert float(moved.double().norm()) <= math.sqrt(most) + 1e-9
    drawn = histogram.scale(TABLES, 1)
    assert drawn * hidden_share(drawn) >= histogram.noise_multiplier * math.sqrt(most) * (1 - 1e-12)


def test_the_bound_is_reached() -> None:
    wide: Example = {"x": [0, 1, 2], "y": [3, 4, 5], "z": [0, 1, 2]}
    histogram = NoisyHistogram(max_ids_per_bag=3)
    assert flat(counted([wide], histogram)).sum() == 12 == histogram.counts_per_example(TABLES)


# ---- ids that do not fit -------------------------------------------------------------------------

OUTLIER = 987654


class Broken(Marked):
    """One example has an id beyond its table."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.examples[17][1][feature] = torch.tensor([1, OUTLIER])


def count_broken(folder: Path, feature: str) -> tuple[str, int]:
    selection = Selection(frequencies=NoisyHistogram(), rows_per_table=3)
    plan = PrivacyPlan(mechanism=FEST(selection=selection), noise_multiplier=1.0, delta=1e-3)
    module = Watching()
    trainer = make_trainer(1, privacy=plan, default_root_dir=str(folder))
    data = DataLoader(Broken(feature), batch_size=12, collate_fn=strict_collate)
    with pytest.raises(ValueError, match="Expected ids within their tables") as caught:
        trainer.fit(module, data)
    return str(caught.value), len(module.drawn)


@pytest.mark.parametrize("feature", ["f1", "f3"])
def test_ids_out_of_range_are_named_without_their_value(
    one_rank: Ranks, tmp_path: Path, feature: str
) -> None:
    message, steps = one_rank.run(count_broken, tmp_path, feature)[0]
    assert f"out of range for '{feature}'" in message
    assert str(OUTLIER) not in message
    assert steps == 0  # while counting, before any step


def halved(examples: list[Any]) -> Any:
    """The features in two parts, which a module would join."""
    batch = strict_collate(examples)
    left, right = batch.sparse_features.split([2, 2])
    return {"left": left, "right": right, "rest": (batch.dense_features, batch.labels)}


class Joining(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("the ids should have been refused before")


def count_broken_halves(folder: Path) -> str:
    selection = Selection(frequencies=NoisyHistogram(max_ids_per_bag=2), rows_per_table=3)
    plan = PrivacyPlan(mechanism=FEST(selection=selection), noise_multiplier=1.0, delta=1e-3)
    trainer = make_trainer(1, privacy=plan, default_root_dir=str(folder))
    data = DataLoader(Broken("f3"), batch_size=12, collate_fn=halved)
    with pytest.raises(ValueError, match="Expected ids within their tables") as caught:
        trainer.fit(Joining(), data)
    return str(caught.value)


def test_ids_are_checked_too_where_a_batch_holds_features_in_parts(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Unchecked, an id beyond the table counts for another example, past the cap on its ids."""
    assert "out of range for 'f3'" in one_rank.run(count_broken_halves, tmp_path)[0]


# ---- one row for all others ----------------------------------------------------------------------

CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=6, embedding_dim=4, feature_names=["x", "y"]),
    EmbeddingBagConfig(name="c", num_embeddings=3, embedding_dim=4, feature_names=["z"]),
]
CHOSEN = [torch.tensor([1, 2, 5]), torch.tensor([1])]


def test_unselected_ids_and_no_others_are_sent_to_one_row() -> None:
    features = KeyedJaggedTensor(
        keys=["z", "y", "x"],
        values=torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 5, 5]),
        lengths=torch.tensor([2, 1, 0, 6, 2, 0]),
        weights=torch.arange(11.0),
    )
    (mapped,) = OneRowForOthers(CONFIGS, CHOSEN, 1)(nn.Identity(), (features,))
    assert mapped.values().tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 5, 5, 5]
    assert mapped.keys() == ["z", "y", "x"]
    assert torch.equal(mapped.lengths(), features.lengths())
    assert torch.equal(mapped.weights(), features.weights())
    assert mapped.stride() == 2
    assert features.values().tolist()[0] == 0  # the batch itself is left alone


def test_features_that_no_table_reads_are_left_alone() -> None:
    """Whatever their ids are: nothing says that these are numbers of rows."""
    features = KeyedJaggedTensor(
        keys=["x", "country"],
        values=torch.tensor([3, 2, 0, 8, 10**12, -4]),
        lengths=torch.tensor([1, 1, 2, 2]),
    )
    (mapped,) = OneRowForOthers(CONFIGS, CHOSEN, 1)(nn.Identity(), (features,))
    assert mapped.values().tolist() == [1, 2, 0, 8, 10**12, -4]
    assert mapped.weights_or_none() is None


def test_nobody_can_be_mapped() -> None:
    features = KeyedJaggedTensor(
        keys=["x", "z"],
        values=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int64),
        stride=0,
    )
    (mapped,) = OneRowForOthers(CONFIGS, CHOSEN, 0)(nn.Identity(), (features,))
    assert mapped.values().numel() == 0
    assert mapped.stride() == 0


def test_selected_rows_are_found_in_every_piece_of_a_table() -> None:
    """A kernel with rows 4 to 9 of one table and rows 0 to 2 of another."""
    layout = Layout((0, 1), (4, 4), (6, 3))
    rows = {"a": torch.tensor([0, 3, 4, 9, 10]), "b": torch.tensor([0, 2])}
    assert selected(rows, layout, [(4, 0), (0, 0)]) == [0, 5, 6, 8]
    assert selected(rows, layout, [(20, 0), (5, 0)]) == []


def selected(
    rows: dict[str, Tensor], layout: Layout, shard_offsets: list[tuple[int, int]]
) -> list[int]:
    noise = StepNoise(FastNoise(RunKey.fixed(0)), 0.0)
    state = SelectedRows(PaperKernel(layout, ["a", "b"], shard_offsets), noise)
    state.set_selected_rows(rows)
    assert state.selected_R is not None
    return state.selected_R.tolist()


# ---- read after training -------------------------------------------------------------------------


class Apart(Watching):
    """Without the table that reads another one's feature."""

    names = ("t0", "t1", "t2")

    def configure_model(self) -> None:
        if self.ebc is None:
            configs = [c for c in tables() if c.name in self.names]
            self.ebc = EmbeddingBagCollection(tables=configs)
            self.head = Head(sum(c.embedding_dim * len(c.feature_names) for c in configs))
            self.tested: list[Tensor] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested.append(self(batch))


class ApartSequences(Apart):
    """The same tables, read as sequences."""

    def configure_model(self) -> None:
        if self.ec is None:
            self.ec = EmbeddingCollection(tables=sequence_tables(self.names))
            self.head = Head(4 * SEQUENCE_WIDTH)
            self.tested = []


class Sharing(Apart):
    names = ("t0", "t1", "t2", "t3")


UNSEEN = DataLoader(Bags(30, seed=1), batch_size=10, collate_fn=strict_collate)
ONE_FOR_OTHERS = FEST(
    selection=Selection(
        frequencies=NoisyHistogram(noise_multiplier=5.0),
        rows_per_table=7,
        unselected="out_of_vocabulary",
        out_of_vocabulary_row=2,
    )
)


def trained(folder: Path, make: type[Apart], mechanism: Any) -> tuple[Apart, Tensor, Path]:
    """The module, its predictions for unseen data right after training, and a checkpoint."""
    torch.manual_seed(0)
    plan = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, delta=1e-3, clip_norm=5.0)
    trainer = make_trainer(1, privacy=plan, default_root_dir=str(folder))
    module, path = make(), folder / f"{type(mechanism).__name__}.ckpt"
    trainer.fit(module, marked_loader(1))
    trainer.save_checkpoint(path)
    return module, torch.cat(trainer.predict(module, UNSEEN)), path  # type: ignore[arg-type]


def read_again(folder: Path, make: type[Apart]) -> dict[str, Any]:
    module, after, path = trained(folder, make, ONE_FOR_OTHERS)
    torch.manual_seed(1)
    fresh = make()
    make_trainer(1, default_root_dir=str(folder)).test(fresh, UNSEEN, ckpt_path=path, verbose=False)
    rows = torch.load(path / "meta.pt", weights_only=True)[CHECKPOINT_KEY]["selection"]["rows"]
    return {
        "after": after,
        "tested": torch.cat(fresh.tested),
        "state": assemble([snapshot(module)]),
        "rows": rows,
    }


def test_a_feature_of_two_tables_cannot_read_one_row_for_others(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """An id would have to be two: selected in one table, and not in the other."""
    with pytest.raises(Exception, match=r"read by one table.*found \['f0'\] in several"):
        one_rank.run(read_again, tmp_path, Sharing)


@pytest.mark.parametrize("make", [Apart, ApartSequences])
def test_other_ids_read_one_row_after_training_too(
    one_rank: Ranks, tmp_path: Path, make: type[Apart]
) -> None:
    """In validation and prediction, and from a checkpoint in a new process: a loop over ids."""
    result = one_rank.run(read_again, tmp_path, make)[0]
    sequences = Apart.names if make is ApartSequences else ()
    mine = [t for t in SMALL if t[0] in Apart.names]
    head = Head(sum(width_of(name, sequences) * len(features) for name, _, _, features in mine))
    head.load_state_dict(
        {k.removeprefix("head."): v for k, v in result["state"].items() if k.startswith("head.")}
    )
    expected, unmapped = [], 0
    for counts, by_feature, _ in Bags(30, seed=1).examples:
        embedded = {}
        for name, _, width, features in mine:
            path = paths(sequences)[name]
            selected = set(result["rows"][path].tolist())
            assert 2 in selected
            for f in features:
                ids = [i if i in selected else 2 for i in by_feature[f].tolist()]
                unmapped += by_feature[f].tolist() == ids
                rows = result["state"][path][ids]
                embedded[f] = (
                    fold(rows, torch.tensor([len(ids)]))
                    if sequences
                    else torch.zeros(1, width) + rows.sum(0)
                )
        expected.append(head(embedded, counts[None]))
    assert unmapped < 60  # of 120 or 150 bags: the map matters here
    torch.testing.assert_close(result["after"], torch.cat(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result["tested"], result["after"], rtol=0, atol=0)


def read_another(folder: Path) -> tuple[Tensor, Tensor]:
    _, expected, path = trained(folder, Apart, DPSGD())
    module, _, _ = trained(folder, Apart, ONE_FOR_OTHERS)
    make_trainer(1, default_root_dir=str(folder)).test(
        module, UNSEEN, ckpt_path=path, verbose=False
    )
    return expected, torch.cat(module.tested)


def test_a_checkpoint_without_selection_maps_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    """Though the module that reads it was trained on selected rows before."""
    expected, found = one_rank.run(read_another, tmp_path)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
