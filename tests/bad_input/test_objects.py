"""Arguments of data modules, models, audits and estimators that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from lightning_dpsparse.audit.bound import lower_bound, measure, p_value
from lightning_dpsparse.audit.secret_sharer import exposures
from lightning_dpsparse.data import CriteoData, MovieLensData, Part, SyntheticData
from lightning_dpsparse.data.movielens import SyntheticMovieLens
from lightning_dpsparse.estimators import (
    DPLinearModel,
    Levels,
    draw_sketch,
    event_of_mean,
    noise_multiplier_for,
    noisy_mean,
    perturbed_minimiser,
    projected_mean,
    sketched_mean,
    spent_epsilon,
)
from lightning_dpsparse.models import (
    DLRMDCNModule,
    DLRMModule,
    PCTRModule,
    SASRecModule,
    TwoTowerModule,
)
from tests.support.bad_input import (
    HUGE,
    INF,
    NAN,
    NEGATIVE,
    NOT_A_SHARE,
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

LOADED = {"batch_size": NOT_COUNTS, "num_workers": (*NOT_WHOLE, 10_000)}
CLICKS = {"num_rows": [10], "examples_per_day": 100, "batch_size": 10}
WATCHES = {"num_users": 50, "num_items": 20, "watches_per_user": 5, "batch_size": 4}


def without_none(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in values if value is not None)


DATA = [
    *(row for f, bad in LOADED.items() for row in rows(SyntheticData, CLICKS, f, bad, f)),
    *(row for f, bad in LOADED.items() for row in rows(SyntheticMovieLens, WATCHES, f, bad, f)),
    *rows(SyntheticData, CLICKS, "num_rows", (*NOT_SIZES, []), "num_rows"),
    *rows(SyntheticData, CLICKS, "examples_per_day", NOT_COUNTS, "examples_per_day"),
    *rows(SyntheticData, CLICKS, "train_days", NOT_WHOLE, "train_days"),
    *rows(SyntheticData, CLICKS, "val_days", NOT_WHOLE, "val_days"),
    *rows(SyntheticData, CLICKS, "train_days", (2**62,), "examples in all days"),
    *rows(SyntheticData, CLICKS, "seed", (NAN, 1.5, True, "3", None, [3]), "seed"),
    *rows(SyntheticData, CLICKS, "zipf", NEGATIVE, "zipf"),
    *rows(SyntheticData, CLICKS, "max_ids_per_bag", NOT_COUNTS, "max_ids_per_bag"),
    *rows(SyntheticData, CLICKS, "drift", NOT_A_SHARE, "drift between 0 and 1"),
    *rows(SyntheticData, CLICKS, "signal", (*NOT_FINITE, 1e308), "signal"),
    *rows(SyntheticData, CLICKS, "click_rate", (*NOT_A_SHARE, 0.0, 1.0), "click_rate"),
    *rows(SyntheticMovieLens, WATCHES, "num_users", NOT_COUNTS, "num_users"),
    *rows(SyntheticMovieLens, WATCHES, "num_items", NOT_COUNTS, "num_items"),
    *rows(SyntheticMovieLens, WATCHES, "watches_per_user", NOT_COUNTS, "watches_per_user"),
    *rows(SyntheticMovieLens, WATCHES, "watches_per_user", (2**30,), "watches in all"),
    *rows(SyntheticMovieLens, WATCHES, "context_length", NOT_COUNTS, "context_length"),
    *rows(
        SyntheticMovieLens, WATCHES, "examples_per_user", without_none(NOT_COUNTS), "examples_per"
    ),
    *rows(SyntheticMovieLens, WATCHES, "train_share", (*NOT_A_SHARE, 0.0, 1.0), "train_share"),
    *rows(SyntheticMovieLens, WATCHES, "seed", (NAN, 1.5, -1, True, "3", None, [3]), "seed"),
    *rows(MovieLensData, {}, "folder", (*NOT_PATHS, None), "folder"),
    *rows(MovieLensData, {"folder": "x"}, "num_items", without_none(NOT_COUNTS), "num_items"),
    *rows(
        CriteoData,
        {"train": [], "val": [], "test": []},
        "train",
        ("x", 3, None, ["x"], [None], {"path": "x"}),
        "a list of Part in train",
    ),
    *rows(Part, {}, "path", (*NOT_PATHS, None), "path"),
    *rows(Part, {"path": "x"}, "start", NOT_A_SHARE, "start between 0 and 1"),
    *rows(Part, {"path": "x"}, "stop", NOT_A_SHARE, "stop between 0 and 1"),
    *rows(Part, {"path": "x", "start": 0.5}, "stop", (0.5, 0.1), "0 <= start < stop <= 1"),
]

TABLES = {"num_rows": [5, 6]}
ITEMS = {"num_items": 10, "embedding_dim": 8}
TOWERS = ITEMS | {"context_layers": [8]}
DCN = TABLES | {"embedding_dim": 16, "dense_arch": [16], "over_arch": [8, 1]}

MODELS = [
    *rows(DLRMModule, {}, "num_rows", (*NOT_SIZES, [], None), "num_rows"),
    *rows(DLRMModule, TABLES, "embedding_dim", NOT_COUNTS, "embedding_dim"),
    *rows(DLRMModule, TABLES, "dense_arch", (*NOT_SIZES, [], None, [16, 0, 16]), "dense_arch"),
    *rows(DLRMModule, TABLES, "dense_arch", ([15],), "Change the last sizes"),
    *rows(DLRMModule, TABLES, "over_arch", (*NOT_SIZES, [], None, [1], [0, 1]), "over_arch"),
    *rows(DLRMModule, TABLES, "num_counts", NOT_COUNTS, "num_counts"),
    *rows(DLRMModule, TABLES, "optimizer", ("adam", None, 3), "such as functools.partial"),
    *rows(DLRMModule, TABLES, "lr_scheduler", ("x", 3), "such as functools.partial"),
    *rows(DLRMModule, TABLES, "log_train_loss", ("yes", 2, []), "log_train_loss"),
    *rows(DLRMModule, TABLES, "base_rate", (*without_none(NOT_POSITIVE), 1.0, 2), "base_rate"),
    *rows(PCTRModule, TABLES, "base_rate", (0.0, 1.0, NAN, "x"), "base_rate"),
    *rows(DLRMModule, TABLES, "slice_feature", (3, "", " ", True, ["cat_0"]), "slice_feature"),
    *rows(DLRMDCNModule, DCN, "cross_layers", NOT_COUNTS, "cross_layers"),
    *rows(DLRMDCNModule, DCN, "cross_rank", NOT_COUNTS, "cross_rank"),
    *rows(PCTRModule, {}, "num_rows", (*NOT_SIZES, [], None), "num_rows"),
    *rows(PCTRModule, TABLES, "hidden", (*NOT_SIZES, None), "hidden"),
    *rows(PCTRModule, TABLES, "num_counts", NOT_WHOLE, "num_counts"),
    *rows(TwoTowerModule, TOWERS, "num_items", (*NOT_COUNTS, 1), "num_items"),
    *rows(TwoTowerModule, ITEMS, "context_layers", (*NOT_SIZES, None, [0, 8]), "context_layers"),
    *rows(TwoTowerModule, TOWERS, "num_negatives", NOT_COUNTS, "num_negatives"),
    *rows(TwoTowerModule, TOWERS, "negatives", (*NOT_PATHS, None, "x", "x.npy"), "negatives"),
    *rows(TwoTowerModule, TOWERS, "temperature", NOT_POSITIVE, "temperature"),
    *rows(TwoTowerModule, TOWERS, "normalize", NOT_FLAGS, "normalize"),
    *rows(SASRecModule, ITEMS, "embedding_dim", NOT_COUNTS, "embedding_dim"),
    *rows(SASRecModule, ITEMS, "max_length", NOT_COUNTS, "max_length"),
    *rows(SASRecModule, ITEMS, "num_blocks", NOT_WHOLE, "num_blocks"),
    *rows(SASRecModule, ITEMS, "num_heads", (*NOT_COUNTS, 3), "num_heads"),
    *rows(SASRecModule, ITEMS, "dropout", (*NEGATIVE, 1.0), "dropout"),
    *rows(SASRecModule, ITEMS, "num_negatives", NOT_COUNTS, "num_negatives"),
]


def fit(X: Any = None, y: Any = None, **settings: Any) -> None:
    rows_ND = np.eye(4) if X is None else X
    labels_N = np.array([0.0, 1.0, 0.0, 1.0]) if y is None else y
    DPLinearModel(**{"num_examples": 1000, **settings}).fit(rows_ND, labels_N)


MEAN = {"vectors_ND": np.eye(3), "divisor": 1.0, "clip_norm": 1.0, "noise_multiplier": 1.0}
POINT = {"minimiser_D": np.ones(3), "sensitivity": 1.0, "radius": 1.0, "noise_multiplier": 1.0}
OUTPUT = {"estimator": "output"}

ESTIMATORS = [
    *rows(fit, {}, "loss", (*NOT_CHOICES, None), "loss to be one of"),
    *rows(fit, {}, "estimator", (*NOT_CHOICES, None), "estimator to be one of"),
    *rows(fit, {}, "epsilon", NOT_POSITIVE, "epsilon"),
    *rows(fit, {}, "delta", (*without_none(NOT_FINITE), -1.0, 1.0, 2), "delta"),
    *rows(fit, {}, "feature_norm", NOT_POSITIVE, "feature_norm"),
    *rows(fit, {}, "max_nonzeros", NOT_COUNTS, "max_nonzeros"),
    *rows(fit, {}, "max_residual", NOT_POSITIVE, "max_residual"),
    *rows(fit, {}, "steps", (*NOT_COUNTS, 10**10), "steps"),
    *rows(fit, {}, "learning_rate", NOT_POSITIVE, "learning_rate"),
    *rows(fit, {}, "regularisation", without_none(NEGATIVE), "regularisation"),
    *rows(fit, OUTPUT, "regularisation", (0.0,), "regularisation > 0"),
    *rows(fit, {}, "sampling_rate", (*NOT_FINITE, -1.0, 0.0, 1.5), "sampling_rate"),
    *rows(fit, {}, "radius", NOT_POSITIVE, "radius"),
    *rows(fit, {}, "fit_intercept", NOT_FLAGS, "fit_intercept"),
    *rows(fit, {}, "num_examples", without_none(NOT_COUNTS), "num_examples"),
    *rows(fit, {}, "X", ("x", 3, [], [["a"]], np.eye(3), np.eye(4) + 1j, {"a": 1}), "found"),
    *rows(fit, {}, "X", ([[1], [1, 2]], np.zeros((4, 4), dtype=object), np.ones((4, 4, 4))), "X"),
    *rows(fit, {}, "y", ("x", 3, [], [0, 1], [[0, 1, 0, 1]], ["a"] * 4, [None] * 4), "found"),
    *rows(noisy_mean, MEAN, "divisor", NOT_POSITIVE, "divisor"),
    *rows(noisy_mean, MEAN, "clip_norm", NOT_POSITIVE, "clip_norm"),
    *rows(noisy_mean, MEAN, "noise_multiplier", NEGATIVE, "noise_multiplier"),
    *rows(noisy_mean, MEAN, "kind", (*NOT_CHOICES, None), "kind 'gaussian'"),
    *rows(noisy_mean, MEAN, "noise", ("x", 3), "noise to be a Generator"),
    *rows(noisy_mean, MEAN, "vectors_ND", (None, "x", 3, [], [["a"]], np.ones(3)), "found"),
    *rows(projected_mean, MEAN, "max_nonzeros", NOT_COUNTS, "max_nonzeros"),
    *rows(sketched_mean, MEAN | {"sketch_MD": np.ones((1, 3))}, "divisor", NOT_POSITIVE, "divisor"),
    *rows(draw_sketch, {"num_columns": 4}, "num_measurements", NOT_COUNTS, "measurements"),
    *rows(event_of_mean, {"noise_multiplier": 1.0}, "rate", NOT_A_SHARE, "rate"),
    *rows(event_of_mean, {}, "noise_multiplier", NEGATIVE, "noise_multiplier"),
    *rows(Levels, {"last": 2}, "num_examples", NOT_COUNTS, "num_examples"),
    *rows(Levels, {"num_examples": 16}, "last", (*NOT_WHOLE, 9), "last"),
    *rows(Levels, {"num_examples": 16, "last": 2}, "stops_early", NOT_POSITIVE, "stops_early"),
    *rows(
        noise_multiplier_for,
        {"event_of": event_of_mean, "delta": 1e-6},
        "epsilon",
        NOT_POSITIVE,
        "epsilon",
    ),
    *rows(spent_epsilon, {"event": event_of_mean(1.0)}, "delta", (*NOT_A_SHARE, 1.0), "delta"),
    *rows(spent_epsilon, {"delta": 1e-6}, "event", ("x", None, 3), "event"),
    *rows(perturbed_minimiser, POINT, "sensitivity", NOT_POSITIVE, "sensitivity"),
    *rows(perturbed_minimiser, POINT, "radius", (NAN, -INF, -1.0, 0.0, "x", True), "radius"),
]

GUESSES = {"num_canaries": 10, "num_guesses": 4, "num_right": 3}
CLAIM = {"epsilon": 1.0, "delta": 1e-6} | GUESSES
SCORES = {"scores": {"down": np.zeros(4)}, "is_included_M": np.ones(4, bool), "delta": 1e-6}

AUDITS = [
    *rows(p_value, CLAIM, "epsilon", NEGATIVE, "epsilon"),
    *rows(p_value, CLAIM, "delta", (*NEGATIVE, 1.0), "delta"),
    *rows(p_value, CLAIM, "num_right", (5, -1), "right guesses"),
    *rows(lower_bound, GUESSES | {"delta": 0.0}, "confidence", (*NOT_POSITIVE, 2.0), "confidence"),
    *rows(measure, SCORES, "confidence", (*NOT_POSITIVE, 2.0), "confidence"),
    *rows(measure, SCORES, "scores", ({"a": np.zeros(3)}, {"a": np.full(4, NAN)}), "score of"),
    *rows(
        exposures,
        {"repeats_C": np.ones(2, int), "reference_R": np.ones(3)},
        "canary_C",
        (np.array([1.0, NAN]), np.array([1.0, INF])),
        "has diverged",
    ),
]


@pytest.mark.parametrize(("make", "arguments", "words"), DATA + MODELS + ESTIMATORS + AUDITS)
def test_a_bad_argument_is_refused(
    make: Callable[..., Any], arguments: Mapping[str, Any], words: str
) -> None:
    refused(lambda: make(**arguments), words)


def test_no_value_of_an_example_is_in_a_refusal() -> None:
    secret = "name of a patient"
    for arguments in ({"X": [[secret] * 4] * 4}, {"y": [secret] * 4}, {"X": [[secret], [1, 2]]}):
        with pytest.raises(ValueError, match="Expected") as caught:
            fit(**arguments)
        assert secret not in str(caught.value)


LEGAL: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (SyntheticData, CLICKS | {"seed": -1, "zipf": 0, "signal": -1.5, "train_days": 0}),
    (SyntheticMovieLens, WATCHES | {"seed": HUGE, "examples_per_user": None}),
    (DLRMModule, TABLES),
    (DLRMDCNModule, DCN),
    (PCTRModule, TABLES | {"hidden": [], "num_counts": 0}),
    (TwoTowerModule, ITEMS | {"context_layers": []}),
    (SASRecModule, ITEMS | {"num_blocks": 0}),
    (fit, {"delta": None, "regularisation": 0, "X": np.eye(4, dtype=bool)}),
    (perturbed_minimiser, POINT | {"radius": INF, "noise_multiplier": 0.0}),
]


@pytest.mark.parametrize(("make", "arguments"), LEGAL)
def test_what_is_legal_stays_legal(make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    make(**arguments)
