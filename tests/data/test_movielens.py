"""MovieLens's files become timelines and windows: nobody's watches shape anybody else's."""

from __future__ import annotations

import logging
import pickle
import random
import tarfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lightning.pytorch import seed_everything

from lightning_dpsparse.data import (
    ClickDataset,
    Clicks,
    MovieLensData,
    MovieLensWindows,
    Ratings,
    SyntheticClicks,
    SyntheticMovieLens,
    Timelines,
    join,
    read_ratings,
)
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.plugin.deliveries import Deliveries
from lightning_dpsparse.plugin.private_data import RankContext, private_loader
from lightning_dpsparse.refused import Refused

Line = tuple[int, int, str, int]

# User 7 has ties in time and a movie twice, user 3 a single watch; nothing is in order.
LINES: list[Line] = [
    (7, 50, "3.5", 900), (12, 10, "1", 400), (7, 10, "4.0", 100), (3, 999, "5.0", 1),
    (7, 999, "0.5", 100), (12, 50, "2", 300), (7, 50, "3", 100),
]  # fmt: skip
MOVIES = [999, 10, 50, 4]  # rows 0 to 3: the order of the file, not of the numbers
CSV_MOVIES = (
    "movieId,title,genres\r\n"
    '999,"American President, The (1995)",Comedy|Drama\r\n'
    '10,"Misérables, Les, 2,3 (1995)",Drama\r\n'
    "50,Heat (1995),Action\r\n4,Nobody's (1995),War\r\n"
)
DAT_MOVIES = "999::A: B (1995)::War\n10::Misérables, Les (1995)::War\n50::X::War\n4::Y\x85::War\n"


def write(folder: Path, kind: str, lines: list[Line] = LINES, *, movies: bool = True) -> Path:
    separator, header = ("::", "") if kind == "dat" else (",", "userId,movieId,rating,timestamp\n")
    text = "".join(separator.join(map(str, line)) + "\n" for line in lines)
    (folder / f"ratings.{kind}").write_text(header + text)
    if movies:
        content = CSV_MOVIES.encode() if kind == "csv" else DAT_MOVIES.encode("latin-1")
        (folder / f"movies.{kind}").write_bytes(content)
    return folder


def naive_timelines(lines: list[Line]) -> dict[int, list[int]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for user, movie, _, time in lines:
        found.setdefault(user, []).append((time, MOVIES.index(movie)))
    for watches in found.values():
        watches.sort(key=lambda watch: watch[0])
    return {user: [row for _, row in found[user]] for user in sorted(found)}


def as_dict(timelines: Timelines) -> dict[int, list[int]]:
    pieces = np.split(timelines.rows_N, timelines.offsets_U1[1:-1])
    return {user: rows.tolist() for user, rows in zip(timelines.users_U.tolist(), pieces)}


def as_examples(clicks: Clicks) -> list[tuple[list[int], list[int]]]:
    """Context and label of every example."""
    bags = np.split(clicks.ids_L, np.cumsum(clicks.lengths_FB.reshape(-1))[:-1])
    size = clicks.labels_B.size
    return [(bags[i].tolist(), bags[size + i].tolist()) for i in range(size)]


def many_timelines() -> Timelines:
    """Users of up to 30 watches, whose numbers are far apart."""
    draws = np.random.default_rng(0)
    users_N = np.repeat(np.arange(60) * 1_000_003, draws.integers(31, size=60))
    rows_N = draws.integers(100, size=users_N.size)
    return Timelines.of(Ratings(users_N, rows_N, np.arange(users_N.size), 100))


@pytest.mark.parametrize("kind", ["csv", "dat"])
def test_files_become_timelines_in_order_of_time(tmp_path: Path, kind: str) -> None:
    draws = random.Random(0)
    number = draws.randrange
    more = [(number(40), draws.choice(MOVIES), "3", number(50)) for _ in range(700)]
    folder = write(tmp_path, kind, [*LINES, *more])
    for path in (folder, folder / f"ratings.{kind}"):
        timelines = Timelines.of(read_ratings(path))
        assert as_dict(timelines) == naive_timelines([*LINES, *more])
        assert timelines.num_items == 4
    assert naive_timelines(LINES)[7] == [1, 0, 2, 2]  # 10, 999 and 50 in the same second


def fails(path: Path, num_items: int | None = None) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read_ratings(path, num_items)
    return "".join(traceback.format_exception(error.value)) + repr(error.value.__context__)


@pytest.mark.parametrize("kind", ["csv", "dat"])
@pytest.mark.parametrize(
    "bad",
    [
        "66613,10,3.0", "66613,10,3.0,5,6", "x66613,10,3.0,5", "66613,,3.0,5", "-66613,10,3.0,5",
        "66613,10,good,5", "66613,10,3.0,1.5", "66613,99999999999999999999,3.0,5",
        '66613,"10",3.0,5', "",
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_by_its_number_and_never_quoted(
    tmp_path: Path, kind: str, bad: str
) -> None:
    file = write(tmp_path, kind) / f"ratings.{kind}"
    lines = file.read_text().splitlines()
    lines.insert(4, bad.replace(",", "::") if kind == "dat" else bad)
    file.write_text("\n".join(lines))
    said = fails(tmp_path)
    assert "found something else in line 5" in said
    assert "66613" not in said


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("ratings.dat", "1::10::3::5\n1,10::3::5\n", "something else in line 2"),
        ("ratings.csv", "1,10,3,5\n1,10,3,5\n", "something else in line 1"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n", "none"),
        ("ratings.dat", "", "none"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, content: str, found: str) -> None:
    (tmp_path / name).write_text(content)
    assert f"found {found}. Unpack" in fails(tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere", "ratings.txt"])
def test_where_movielens_is_to_be_had(tmp_path: Path, name: str) -> None:
    (tmp_path / "ratings.txt").write_text("")
    data = MovieLensData(str(tmp_path / name))
    with pytest.raises(Refused, match=r"https://grouplens\.org/datasets/movielens/"):
        data.setup("fit")


def test_the_catalogue_is_given_and_never_read_off_the_ratings(tmp_path: Path) -> None:
    write(tmp_path, "dat", [(1, 2, "3", 10), (1, 5, "3", 20)], movies=False)
    ratings = read_ratings(tmp_path, num_items=9)
    assert (ratings.rows_N.tolist(), ratings.num_items) == ([1, 4], 9)
    assert "or num_items, found none and None" in fails(tmp_path)
    assert "found another in line 2" in fails(tmp_path, num_items=4)


@pytest.mark.parametrize("movie", [0, 11, 1000, 10**9])
def test_a_movie_outside_of_the_catalogue_is_refused(tmp_path: Path, movie: int) -> None:
    write(tmp_path, "csv", [*LINES[:2], (1, movie, "3", 10), *LINES[2:]])
    assert "found another in line 4" in fails(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("movieId,title,genres\n", "found 0 in 0 lines"),
        ("movieId,title,genres\n1,a,b\n1,c,d\n", "found 1 in 2 lines"),
        ("movieId,title,genres\n1,a,b\nsecond,c,d\n", "beginning of line 3"),
        ("number,title,genres\n1,a,b\n", "beginning of line 1"),
        (CSV_MOVIES, "Expected 5 movies"),
    ],
)
def test_a_broken_catalogue_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (write(tmp_path, "csv") / "movies.csv").write_text(content)
    assert message in fails(tmp_path, num_items=5 if content == CSV_MOVIES else None)


def test_a_users_side_is_fixed_and_nobody_elses_matter() -> None:
    """These sides may never change: a later run would test on whom an earlier one trained on."""
    everyone = Timelines.of(Ratings(*(np.arange(10_000) for _ in range(3)), num_items=10_000))
    train, rest = everyone.split(0.8)
    # Binomial: 8,000 expected, standard deviation 40.
    assert abs(train.users_U.size - 8000) < 4 * 40
    assert sorted([*train.users_U.tolist(), *rest.users_U.tolist()]) == list(range(10_000))
    assert train.rows_N.tolist() == train.users_U.tolist()  # with their own watches
    assert rest.users_U[:5].tolist() == [2, 8, 23, 26, 29]
    seed_everything(2, verbose=False)
    some, _ = everyone.only(everyone.users_U % 3 == 0).split(0.8)
    assert some.users_U.tolist() == train.users_U[train.users_U % 3 == 0].tolist()


def naive_windows(timelines: Timelines, context_length: int) -> Iterator[tuple[int, object]]:
    for user, rows in as_dict(timelines).items():
        for position in range(1, len(rows)):
            yield user, (rows[:position][-context_length:], [rows[position]])


def drawn(data: MovieLensWindows, epoch: int = 0) -> list[tuple[list[int], list[int]]]:
    data.set_epoch(epoch)
    return as_examples(data.__getitems__(range(len(data))))


@pytest.mark.parametrize("context_length", [1, 3, 20])
def test_every_watch_but_the_first_is_an_example(context_length: int) -> None:
    timelines = many_timelines()
    assert 1 in timelines.lengths_U
    data = MovieLensWindows(timelines, context_length)
    expected = list(naive_windows(timelines, context_length))
    assert list(zip(data.users.tolist(), drawn(data))) == expected
    order = np.random.default_rng(0).permutation(len(data)).tolist() * 2
    assert as_examples(data.__getitems__(order)) == [expected[i][1] for i in order]
    assert drawn(data, epoch=3) == drawn(data, epoch=0)


@pytest.mark.parametrize("examples_per_user", [None, 4])
def test_a_context_is_in_order_of_time(examples_per_user: int | None) -> None:
    """For models of sequences. Rows count upwards with time here, and the file is in any order."""
    times_N = np.random.default_rng(0).permutation(40)
    ratings = Ratings(np.zeros_like(times_N), times_N, times_N, 40)
    data = MovieLensWindows(Timelines.of(ratings), 20, examples_per_user)
    features = MovieLensData.collate(data.__getitems__(range(len(data)))).sparse_features
    contexts = features["context"].to_dense()
    for context, label in zip(contexts, features["label"].values().tolist(), strict=True):
        assert context.tolist() == list(range(max(0, label - 20), label))


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("examples_per_user", [None, 2])
def test_a_batch_has_two_features_and_no_counts(size: int, examples_per_user: int | None) -> None:
    data = MovieLensWindows(many_timelines(), 20, examples_per_user)
    clicks = data.__getitems__(range(size))
    assert data.num_rows == [100, 100]
    assert [array.dtype for array in clicks] == [np.float32, np.float32, np.int64, np.int64]
    batch = MovieLensData.collate(clicks)
    assert batch.labels.tolist() == [1.0] * size
    assert batch.dense_features.shape == (size, 0)
    assert batch.sparse_features.keys() == ["context", "label"]
    assert batch.sparse_features.stride() == size
    assert batch.sparse_features["label"].lengths().tolist() == [1] * size


def test_users_have_exactly_so_many_examples_of_their_own() -> None:
    timelines = many_timelines()
    data = MovieLensWindows(timelines, 5, examples_per_user=4)
    watchers = timelines.users_U[timelines.lengths_U > 1]
    assert data.users.tolist() == np.repeat(watchers, 4).tolist()
    assert (len(data), data.users.dtype) == (data.users.size, np.int64)
    windows = list(naive_windows(timelines, 5))
    assert all(example in windows for example in zip(data.users.tolist(), drawn(data)))


def test_windows_are_drawn_anew_every_epoch_and_the_same_in_the_same() -> None:
    timelines = many_timelines()
    data = MovieLensWindows(timelines, 5, examples_per_user=4, seed=1)
    first, second = drawn(data, 0), drawn(data, 1)
    # Two draws of 30 watches or less agree once in 15 times or so.
    assert np.mean([a == b for a, b in zip(first, second)]) < 0.4
    assert drawn(data, 0) == first
    seed_everything(5, verbose=False)
    assert drawn(pickle.loads(pickle.dumps(data)), 1) == second
    assert drawn(MovieLensWindows(timelines, 5, 4, seed=2)) != first


def test_windows_are_uniform() -> None:
    rows_N = np.arange(11)
    one = Timelines.of(Ratings(np.zeros_like(rows_N), rows_N, rows_N, 11))
    labels = MovieLensWindows(one, examples_per_user=10_000).__getitems__(range(10_000)).ids_L
    # 1,000 of each label expected, standard deviation 30.
    assert np.abs(np.bincount(labels[-10_000:])[1:] - 1000).max() < 5 * 30


@pytest.mark.parametrize("examples_per_user", [None, 3])
def test_without_a_user_everyone_else_has_the_same_examples(examples_per_user: int | None) -> None:
    timelines = many_timelines()
    gone = timelines.users_U[7]

    def examples(timelines: Timelines) -> list[object]:
        data = MovieLensWindows(timelines, 5, examples_per_user)
        return [pair for pair in zip(data.users.tolist(), drawn(data)) if pair[0] != gone]

    assert examples(timelines.only(timelines.users_U != gone)) == examples(timelines)


@pytest.mark.parametrize("settings", [{"context_length": 0}, {"examples_per_user": 0}])
def test_settings_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="of at least 1, found"):
        MovieLensWindows(many_timelines(), **settings)
    with pytest.raises(ValueError, match="Expected train_share between 0 and 1, found 1"):
        many_timelines().split(1.0)


def test_workers_that_live_on_see_the_epoch_move() -> None:
    data = SyntheticMovieLens(num_users=20, batch_size=8, examples_per_user=2, num_workers=1)
    data.setup("fit")
    data.val_set = data.train_set  # in order, unlike training
    loader = data.val_dataloader()
    assert loader.persistent_workers
    found = []
    for epoch in range(3):
        data.set_epoch(epoch)
        found.append([batch.sparse_features.values().tolist() for batch in loader])
        parts = np.array_split(np.arange(len(data.train_set)), range(8, len(data.train_set), 8))
        assert found[-1] == [data.train_set.__getitems__(part).ids_L.tolist() for part in parts]
    assert found[0] != found[1] != found[2]


def test_set_up_twice_is_set_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MovieLensData(str(write(tmp_path, "csv")), examples_per_user=2, train_share=0.5)
    with caplog.at_level(logging.INFO):
        data.setup("fit")
        train_set = data.train_set
        data.setup("test")
    assert data.train_set is train_set
    assert data.val_set is data.test_set
    assert caplog.messages == ["Watches of 4 movies, up to 20 before each."]
    assert not set(train_set.users.tolist()) & set(data.val_set.users.tolist())


def test_evaluation_stays_as_it_is() -> None:
    data = SyntheticMovieLens(num_users=100, examples_per_user=3)
    data.setup("fit")
    assert len(data.train_set) == 3 * np.unique(data.train_set.users).size
    assert len(data.val_set) == 10 * (100 - np.unique(data.train_set.users).size)
    before = data.val_set.__getitems__(range(30))
    data.set_epoch(4)
    assert all(np.array_equal(a, b) for a, b in zip(before, data.val_set.__getitems__(range(30))))


@pytest.mark.parametrize("num_items", [3, 10, 27, 1000])
def test_synthetic_watches_have_a_structure_and_depend_on_the_seed_alone(num_items: int) -> None:
    data, again, other = (SyntheticMovieLens(num_items=num_items, seed=s) for s in (1, 1, 2))
    rows_UT = data.timelines().rows_N.reshape(2000, 50)
    assert np.array_equal(rows_UT.reshape(-1), again.timelines().rows_N)
    assert (rows_UT.reshape(-1) != other.timelines().rows_N).mean() > 0.5
    genres = min(10, num_items)
    assert 0 <= rows_UT.min() <= rows_UT.max() < num_items
    stays = (rows_UT[:, 1:] % genres == rows_UT[:, :-1] % genres).mean()
    # Both at home, or both away and there by chance; 98,000 pairs of 2,000 users.
    home = 0.9 + 0.1 / genres
    assert stays == pytest.approx(home**2 + (1 - home) ** 2 / max(genres - 1, 1), abs=0.01)
    top = (rows_UT // genres == 0).mean()
    assert top == pytest.approx(np.log(2) / np.log(num_items // genres + 1), abs=0.01)


def test_random_windows_are_nobodys() -> None:
    data = MovieLensWindows(many_timelines(), context_length=7)
    clicks = data.random_examples(500, seed=1)
    assert clicks.lengths_FB.tolist() == [[7] * 500, [1] * 500]
    assert [array.dtype for array in clicks] == [array.dtype for array in data[0]]
    assert (clicks.counts_BC.shape, clicks.labels_B.mean()) == ((500, 0), 1.0)
    assert np.unique(clicks.ids_L).tolist() == list(range(100))
    assert np.array_equal(clicks.ids_L, data.random_examples(500, seed=1).ids_L)
    assert (clicks.ids_L != data.random_examples(500, seed=2).ids_L).mean() > 0.9


def test_random_clicks_have_the_shape_of_the_data() -> None:
    data: ClickDataset = SyntheticClicks(0, 10, num_rows=[50, 3], examples_per_day=10)
    clicks, other = data.random_examples(2000, seed=1), data.random_examples(2000, seed=2)
    for found, real in zip(clicks, data.__getitems__(range(2000))):
        assert (found.shape, found.dtype) == (real.shape, real.dtype)
    assert np.unique(clicks.ids_L[:2000]).tolist() == list(range(50))
    assert np.unique(clicks.ids_L[2000:]).tolist() == [0, 1, 2]
    assert abs(clicks.labels_B.sum() - 1000) < 5 * 22.4  # a fair coin's standard deviation
    assert 0 == clicks.counts_BC.min() < 140 < clicks.counts_BC.max() < np.exp(5)
    assert all((one != two).any() for one, two in zip(clicks, other) if one.ndim < 2)


@pytest.mark.parametrize(("first", "second"), [(3, 2), (0, 4), (4, 0), (0, 0)])
def test_joined_batches_are_the_batch_of_both(first: int, second: int) -> None:
    data = SyntheticClicks(0, 99, num_rows=[50, 3, 9], examples_per_day=10, max_ids_per_bag=3)
    both = join(data.__getitems__(range(first)), data.__getitems__(range(9, 9 + second)))
    expected = data.__getitems__([*range(first), *range(9, 9 + second)])
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(both, expected))


def test_a_plan_draws_whole_users() -> None:
    data = SyntheticMovieLens(num_users=50, batch_size=10, examples_per_user=4)
    data.setup("fit")
    plan = PrivacyPlan(noise_multiplier=1.0, unit=Users(max_examples=3, drawn="users"))
    place = RankContext(
        0,
        1,
        RunKey.fixed(0),
        lambda: 0,
        planned_steps=5,
        is_one_epoch=True,
        deliveries=Deliveries(),
    )
    loader, shape = private_loader(data.train_dataloader(), plan, place)
    assert shape.num_units == len(data.train_set) // 4
    assert shape.sampler is not None
    examples, sizes = shape.sampler.draw(0)
    assert sizes == [3] * (examples.size // 3)  # of each one's four examples
    assert (np.unique(data.train_set.users[examples], return_counts=True)[1] == 3).all()
    batch = next(iter(loader))  # type: ignore[call-overload]
    assert batch.sparse_features.keys() == ["context", "label"]
    assert batch.sparse_features.stride() == examples.size > 0


def test_the_real_file_is_read_whole(real_data: Path, tmp_path: Path) -> None:
    archive = pa.OSFile(str(real_data / "ml-latest-small-2016.tar.zst"))
    with (
        pa.CompressedInputStream(archive, "zstd") as stream,
        tarfile.open(fileobj=stream, mode="r|") as files,
    ):
        files.extractall(tmp_path, filter="data")
    folder = tmp_path / "ml-latest-small"
    timelines = Timelines.of(read_ratings(folder))
    assert (timelines.rows_N.size, timelines.num_items) == (100_004, 9125)
    data = MovieLensData(str(folder))
    data.setup("fit")
    held_out = len(data.val_set) // 10
    # Binomial: 134 of 671 expected, standard deviation 10.
    assert abs(held_out - 134) < 4 * 10
    assert np.unique(data.train_set.users).size == 671 - held_out
    assert next(iter(data.train_dataloader())).sparse_features["context"].lengths().max() == 20
