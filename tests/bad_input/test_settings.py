"""Settings of plans, mechanisms, optimizers, placements and the strategy that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_dpsparse import (
    DPSGD,
    FEST,
    LSG,
    RGP,
    AdaFEST,
    AdaFESTPlus,
    AutomaticClipping,
    AverageWeights,
    DPSparseStrategy,
    ExponentialSelection,
    FlatClipping,
    FusedOptimizer,
    GroupClipping,
    GumbelHistogram,
    LazyDP,
    LogitCalibration,
    NoisyHistogram,
    Placement,
    PrivacyPlan,
    PublicFrequencies,
    SecretSharer,
    Selection,
    SparseDPSGD,
    TablePlacement,
    Users,
)
from tests.support.bad_input import (
    HUGE,
    HUGER,
    INF,
    NAN,
    NEGATIVE,
    NOT_CHOICES,
    NOT_COUNTS,
    NOT_FINITE,
    NOT_FLAGS,
    NOT_PATHS,
    NOT_POSITIVE,
    NOT_SIZES,
    NOT_WHOLE,
    refused,
    rows,
)

NOISY = {"noise_multiplier": 1.0}
PUBLIC = PublicFrequencies(path="counts.npz")
SELECTION = Selection(frequencies=PUBLIC, rows_per_table=3)


def but(values: tuple[Any, ...], *legal: Any) -> tuple[Any, ...]:
    """The values without those that are legal for a field. None and NaN are told by identity."""
    return tuple(v for v in values if not any(v is good for good in legal))


def with_items(bad: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is no mapping from names to numbers: the wrong things, and the wrong values."""
    return (3, "x", [1], None, {1: 1.0}, {"": 1.0}, *({"a": value} for value in bad))


PLANS = [
    *rows(PrivacyPlan, NOISY, "mechanism", ["dpsgd", None, 3, DPSGD, FlatClipping()], "mechanism"),
    *rows(PrivacyPlan, NOISY, "dense", ["x", None, 3, DPSGD()], "dense"),
    *rows(PrivacyPlan, NOISY, "clipping", ["flat", None, 3, FlatClipping], "clipping"),
    *rows(PrivacyPlan, NOISY, "clip_norm", NOT_POSITIVE, "clip_norm"),
    *rows(PrivacyPlan, NOISY, "dense_scale", (*NOT_POSITIVE, 1e7), "dense_scale"),
    *rows(PrivacyPlan, NOISY, "epsilon", but(NOT_POSITIVE, None), "epsilon"),
    *rows(PrivacyPlan, NOISY, "delta", but(NOT_FINITE, None), "delta between 0 and 1"),
    *rows(PrivacyPlan, NOISY, "delta", (-1.0, 0.0, 1.0, 2), "delta between 0 and 1"),
    *rows(PrivacyPlan, {}, "noise_multiplier", but(NEGATIVE, None), "noise_multiplier"),
    *rows(PrivacyPlan, {}, "noise_multiplier", (None,), "epsilon or noise_multiplier"),
    *rows(PrivacyPlan, {}, "noise_multiplier", (1e-300, 1e-30), "float32 has no such noise"),
    *rows(PrivacyPlan, NOISY, "unit", ("user", "", 3, None, Users, "examples"), "unit"),
    *rows(PrivacyPlan, NOISY, "sampling", (*NOT_CHOICES, None), "sampling 'poisson'"),
    *rows(PrivacyPlan, NOISY, "noise_source", (*NOT_CHOICES, None), "noise_source 'fast'"),
    *rows(PrivacyPlan, NOISY, "by_day", NOT_FLAGS, "by_day"),
    *rows(PrivacyPlan, NOISY, "days_per_period", NOT_COUNTS, "days_per_period"),
    *rows(PrivacyPlan, NOISY, "expected_batch_size", but(NOT_COUNTS, None), "expected_batch_size"),
    *rows(PrivacyPlan, NOISY, "max_batch_size", but(NOT_COUNTS, None), "max_batch_size"),
    *rows(PrivacyPlan, NOISY, "fixed_key", (NAN, 1.5, "7", True, [1], HUGER, -1), "fixed_key"),
    *rows(PrivacyPlan, NOISY, "assume_post_processing", (3, "", " ", True, b"x"), "a reason in"),
    *rows(PrivacyPlan, NOISY, "assume_independent_examples", ("None", "null", []), "a reason in"),
    *rows(PrivacyPlan, NOISY, "taints", ("text", 3, None, [3], [None], [""], {"a": 1}), "taints"),
    *rows(PrivacyPlan, NOISY, "calibration", ("x", 3, True, LogitCalibration, {}), "calibration"),
    *rows(Users, {}, "max_examples", NOT_COUNTS, "max_examples"),
    *rows(Users, {"drawn": "examples"}, "max_examples", (10_001,), "Draw whole users"),
    *rows(Users, {"max_examples": 3}, "drawn", (*NOT_CHOICES, None), "drawn 'examples' or 'users'"),
    *rows(Users, {"max_examples": 3}, "in_one_day", NOT_FLAGS, "in_one_day"),
]

MECHANISMS = [
    *rows(DPSGD, {}, "chunk_rows", NOT_COUNTS, "chunk_rows"),
    *rows(LazyDP, {}, "chunk_rows", NOT_COUNTS, "chunk_rows"),
    *rows(LazyDP, {}, "aggregate", NOT_FLAGS, "aggregate"),
    *rows(AdaFEST, {}, "threshold", (*but(NOT_FINITE, None), 1e308, HUGE), "threshold"),
    *rows(AdaFEST, {}, "threshold", (None,), "Set exactly one"),
    *rows(AdaFEST, {"threshold": 1.0}, "half_survival", (2.0,), "found 2 of them"),
    *rows(AdaFEST, {}, "false_positives", but(NOT_POSITIVE, None), "false_positives"),
    *rows(AdaFEST, {}, "half_survival", but(NOT_POSITIVE, None), "half_survival"),
    *rows(AdaFEST, {"threshold": 1.0}, "map_clip_norm", NOT_POSITIVE, "map_clip_norm"),
    *rows(AdaFEST, {"threshold": 1.0}, "noise_ratio", NOT_POSITIVE, "noise_ratio"),
    *rows(
        AdaFEST, {"threshold": 1.0}, "table_thresholds", with_items(NOT_FINITE), "table_thresholds"
    ),
    *rows(AdaFESTPlus, {"threshold": 1.0}, "selection", ("x", None, 3, PUBLIC), "selection"),
    *rows(FEST, {}, "selection", ("x", None, 3, PUBLIC, Selection), "selection"),
    *rows(ExponentialSelection, {}, "num_rows", (*NOT_COUNTS, 2**40), "num_rows"),
    *rows(ExponentialSelection, {"num_rows": 3}, "noise_ratio", NOT_POSITIVE, "noise_ratio"),
    *rows(ExponentialSelection, {"num_rows": 3}, "score_clip", NOT_POSITIVE, "score_clip"),
    *rows(Selection, {"rows_per_table": 3}, "frequencies", ("x", None, 3, {}), "frequencies"),
    *rows(Selection, {"frequencies": PUBLIC}, "rows_per_table", but(NOT_COUNTS, None), "rows_per"),
    *rows(Selection, {"frequencies": PUBLIC}, "rows_in_total", but(NOT_COUNTS, None), "rows_in"),
    *rows(Selection, vars(SELECTION), "rows_in_total", (3,), "found both"),
    *rows(Selection, vars(SELECTION), "rows_per_table", (None,), "found neither"),
    *rows(Selection, vars(SELECTION), "unselected", (*NOT_CHOICES, None), "unselected 'frozen'"),
    *rows(Selection, vars(SELECTION), "out_of_vocabulary_row", NOT_WHOLE, "out_of_vocabulary_row"),
    *rows(Selection, vars(SELECTION), "renew", NOT_FLAGS, "renew"),
    *rows(PublicFrequencies, {}, "path", (*NOT_PATHS, None), "path"),
    *rows(NoisyHistogram, {}, "noise_multiplier", NOT_POSITIVE, "noise_multiplier"),
    *rows(NoisyHistogram, {}, "max_ids_per_bag", NOT_COUNTS, "max_ids_per_bag"),
    *rows(GumbelHistogram, {}, "epsilon", NOT_POSITIVE, "epsilon"),
    *rows(GumbelHistogram, {}, "max_ids_of", with_items((*NOT_COUNTS, 2.5)), "max_ids_of"),
    *rows(
        LogitCalibration, {}, "noise_multiplier", (*but(NEGATIVE, None), 1e5), "noise_multiplier"
    ),
    *rows(LogitCalibration, {}, "bins", (*NOT_COUNTS, 1, 5000), "bins"),
    *rows(LogitCalibration, {}, "largest_logit", (*NOT_POSITIVE, 1e-6, 1e6), "largest_logit"),
    *rows(LogitCalibration, {}, "fit_slope", NOT_FLAGS, "fit_slope"),
    *rows(AutomaticClipping, {}, "stability", NOT_POSITIVE, "stability"),
    *rows(GroupClipping, {}, "shares", (*with_items(NOT_POSITIVE), {}), "shares"),
    *rows(RGP, {}, "rank", NOT_COUNTS, "rank"),
    *rows(RGP, {"rank": 2}, "layers", (3, None, [3], [""], {"a": 1}), "layers"),
    *rows(RGP, {"rank": 2}, "exclude", (3, [3], {"a": 1}), "exclude"),
    *rows(LSG, {"rank": 2}, "sparsity", (*NEGATIVE, 1.0, 1.5), "sparsity"),
    *rows(LSG, {"rank": 2}, "warmup", NOT_WHOLE, "warmup"),
    *rows(SparseDPSGD, {}, "sparsity", (*NEGATIVE, 1.0, 1.5), "sparsity"),
    *rows(SparseDPSGD, {"sparsity": 0.5}, "warmup", NOT_WHOLE, "warmup"),
]

TRAINING = [
    *rows(FusedOptimizer, {}, "kind", (*NOT_CHOICES, None, "lamb"), "kind 'sgd'"),
    *rows(FusedOptimizer, {}, "learning_rate", NEGATIVE, "learning_rate"),
    *rows(FusedOptimizer, {}, "eps", (*NEGATIVE, 0.0), "eps"),
    *rows(FusedOptimizer, {}, "beta1", (*NEGATIVE, 1.0, 1.5), "beta1"),
    *rows(FusedOptimizer, {}, "beta2", (*NEGATIVE, 1.0, 1.5), "beta2"),
    *rows(FusedOptimizer, {}, "weight_decay", NEGATIVE, "weight_decay"),
    *rows(FusedOptimizer, {"kind": "sgd"}, "weight_decay", (200.0,), "weight_decay below 2"),
    *rows(FusedOptimizer, {}, "follow_schedule", NOT_FLAGS, "follow_schedule"),
    *rows(TablePlacement, {}, "kind", (*NOT_CHOICES, None), "kind 'auto'"),
    *rows(TablePlacement, {"kind": "table_wise"}, "ranks", (*NOT_SIZES[1:], []), "ranks"),
    *rows(TablePlacement, {"kind": "column_wise"}, "shards", but(NOT_COUNTS, None), "shards"),
    *rows(TablePlacement, {"kind": "row_wise"}, "shards", (2,), "Leave shards out"),
    *rows(TablePlacement, {"kind": "grid", "ranks": [0]}, "shards", (2,), "Leave shards out"),
    *rows(Placement, {}, "default", (*NOT_CHOICES, None), "default 'auto'"),
    *rows(Placement, {}, "tables", with_items(("nosuch", 3, None, {})), "tables"),
    *rows(DPSparseStrategy, {}, "privacy", ("x", 3, {}, PrivacyPlan, DPSGD()), "privacy"),
    *rows(DPSparseStrategy, {}, "placement", ("row_wise", 3, {}), "placement"),
    *rows(DPSparseStrategy, {}, "fused_optimizer", ("sgd", 3, {}), "fused_optimizer"),
    *rows(DPSparseStrategy, {}, "max_physical_batch", but(NOT_COUNTS, None), "max_physical_batch"),
    *rows(DPSparseStrategy, {}, "max_physical_batch", (8,), "found no plan"),
    *rows(DPSparseStrategy, {}, "uneven_loaders", (*NOT_CHOICES, None), "uneven_loaders 'raise'"),
    *rows(DPSparseStrategy, {}, "process_group_backend", NOT_CHOICES, "process_group_backend"),
    *rows(DPSparseStrategy, {}, "timeout", (3, "x", NAN, True), "timeout"),
    *rows(DPSparseStrategy, {}, "write_ahead", NOT_COUNTS, "write_ahead"),
    *rows(DPSparseStrategy, {}, "resume", but(NOT_CHOICES, None), "resume 'auto'"),
    *rows(DPSparseStrategy, {}, "trust_checkpoints", NOT_FLAGS, "trust_checkpoints"),
    *rows(DPSparseStrategy, {}, "start_method", (*NOT_CHOICES, None), "start_method 'popen'"),
    *rows(AverageWeights, {}, "fraction", (*but(NOT_POSITIVE, None), 1.5), "fraction"),
    *rows(AverageWeights, {}, "half_life", (*but(NOT_POSITIVE, None), 0.9), "half_life"),
    *rows(AverageWeights, {}, "half_life", (None,), "found none. Set exactly one"),
    *rows(AverageWeights, {"fraction": 0.5}, "half_life", (3.0,), "found both. Set exactly one"),
    *rows(SecretSharer, {}, "repeats", (*NOT_SIZES, [], None), "repeats"),
    *rows(SecretSharer, {}, "repeats", ([10**9],), "copies of canaries"),
    *rows(SecretSharer, {}, "canaries_per_repeat", NOT_COUNTS, "canaries_per_repeat"),
    *rows(SecretSharer, {}, "references", (*NOT_COUNTS, 1), "references"),
    *rows(SecretSharer, {}, "seed", NOT_WHOLE, "seed"),
    *rows(SecretSharer, {}, "folder", NOT_PATHS, "folder"),
]


@pytest.mark.parametrize(("make", "settings", "words"), PLANS + MECHANISMS + TRAINING)
def test_a_bad_setting_is_refused_where_it_is_set(
    make: Callable[..., Any], settings: Mapping[str, Any], words: str
) -> None:
    refused(lambda: make(**settings), words)


def test_one_row_for_others_needs_ranks_that_lightning_starts_by_itself() -> None:
    selection = Selection(frequencies=PUBLIC, rows_per_table=3, unselected="out_of_vocabulary")
    plan = PrivacyPlan(noise_multiplier=1.0, mechanism=FEST(selection=selection))
    refused(lambda: DPSparseStrategy(privacy=plan, start_method="spawn"), "torchrun")
    assert DPSparseStrategy(privacy=plan).privacy is plan


LEGAL: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (PrivacyPlan, {"noise_multiplier": 0}),
    (PrivacyPlan, {"noise_multiplier": 0.0, "clip_norm": INF}),
    (PrivacyPlan, {"epsilon": 1, "delta": 1e-30, "taints": ["tuned"], "clip_norm": 1e-7}),
    (PrivacyPlan, {"noise_multiplier": 1e-6, "fixed_key": 2**128 - 1}),
    (Users, {"max_examples": 10**9, "drawn": "users"}),
    (AdaFEST, {"threshold": -20.0, "table_thresholds": {"a*": -1}}),
    (FusedOptimizer, {"learning_rate": 0, "eps": 1e-30}),
    (FusedOptimizer, {"kind": "sgd", "learning_rate": 100.0, "weight_decay": 0.01}),
    (TablePlacement, {"kind": "column_wise", "ranks": [1, 1]}),
    (Placement, {"tables": {"a": "row_wise", "b": TablePlacement()}}),
    (RGP, {"rank": 2, "layers": "net.*", "exclude": []}),
    (AverageWeights, {"fraction": 1}),
    (AverageWeights, {"half_life": 1}),
    (DPSparseStrategy, {"process_group_backend": "cpu:gloo,cuda:nccl", "timeout": None}),
]


@pytest.mark.parametrize(("make", "settings"), LEGAL)
def test_what_is_legal_stays_legal(make: Callable[..., Any], settings: dict[str, Any]) -> None:
    make(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    plan = PrivacyPlan(noise_multiplier=numpy.float32(1.0), max_batch_size=numpy.int64(3))
    assert (plan.noise_multiplier, plan.max_batch_size) == (1.0, 3)
    refused(lambda: PrivacyPlan(noise_multiplier=numpy.float32("nan")), "found nan")
    refused(lambda: PrivacyPlan(noise_multiplier=numpy.ones(2)), "found ndarray")
    refused(lambda: PrivacyPlan(noise_multiplier=1.0, by_day=numpy.True_), "by_day")
