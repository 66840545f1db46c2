"""The cases: every recipe, every mechanism on every placement, and other features once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule

import lightning_dpsparse as dp
from tests.same_weights.recipes import find_recipes, fit_recipe
from tests.same_weights.tiny import TABLES, fit


@dataclass(frozen=True)
class Case:
    """Something to train on the ranks of one group."""

    name: str
    run: Callable[[], LightningModule]
    """Train, and return what was trained. Every rank of the group calls it."""
    world_size: int = 1
    hosts: int = 1


PLACEMENTS = (
    "auto",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
)


def _mechanisms() -> dict[str, Any]:
    """All mechanisms for tables, under names for them."""
    counts = dp.NoisyHistogram(noise_multiplier=1.0, max_ids_per_bag=4)
    selection = dp.Selection(frequencies=counts, rows_in_total=40)
    return {
        "DPSGD": dp.DPSGD(),
        "LazyDP": dp.LazyDP(),
        "LazyDP_stepwise": dp.LazyDP(aggregate=False),
        "FEST": dp.FEST(selection=selection),
        "AdaFEST": dp.AdaFEST(threshold=2.0),
        "AdaFESTPlus": dp.AdaFESTPlus(threshold=1.0, selection=selection),
        "ExponentialSelection": dp.ExponentialSelection(num_rows=20),
        "EANA": dp.EANA(),
    }


def all_cases() -> list[Case]:
    cases = [Case(f"recipe/{name}", partial(fit_recipe, path)) for name, path in find_recipes()]
    cases += [*_placements(), *_features()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def _placements() -> Iterator[Case]:
    """Every mechanism and every dense form, on every placement, on one rank and on two."""
    plans: dict[str, Any] = {"no_privacy": None}
    plans |= {name: {"mechanism": mechanism} for name, mechanism in _mechanisms().items()}
    plans |= {
        "DenseGaussian": {"dense": dp.DenseGaussian()},  # with DP-SGD for the tables, as the others
        "RGP": {"dense": dp.RGP(rank=2)},
        "LSG": {"dense": dp.LSG(rank=2, sparsity=0.3, warmup=3)},
        "SparseDPSGD": {"dense": dp.SparseDPSGD(sparsity=0.3, warmup=3)},
    }
    for world_size in (1, 2):
        for name, plan in plans.items():
            for kind in PLACEMENTS:
                settings = {"plan": plan, "placement": kind}
                yield _case(f"placement/{name}/{kind}/{world_size}", world_size, **settings)


def _features() -> Iterator[Case]:
    """Other features, where not said otherwise on two ranks with tables cut by rows."""
    of = _mechanisms()

    def private(
        feature: str, mechanism: str = "DPSGD", world_size: int = 2, **settings: Any
    ) -> Any:
        plan = {"mechanism": of[mechanism], **settings.pop("plan", {})}
        settings = {"placement": "row_wise", **settings}
        return _case(f"{feature}/{mechanism}/{world_size}", world_size, plan=plan, **settings)

    adagrad = {"kind": "rowwise_adagrad", "learning_rate": 0.05}
    sequences = {"sequences": tuple(TABLES)}
    for name in of:
        yield private("rowwise_adagrad", name, fused=adagrad)
        yield private("sequences", name, model=sequences)
        yield private("weight_decay", name, fused={"weight_decay": 0.01})
        yield private("schedule_and_validation", name, model={"schedule": True}, validate=True)
        yield private("max_physical_batch", name, max_physical_batch=3)
        yield private("resume", name, resume=True)
        yield private("small_batches", name, batch_size=2)
        yield private("many_rows", name, model={"times_rows": 200})  # other ways to draw noise
        for source in ("secure", "row_keyed"):
            yield private(f"{source}_noise", name, plan={"noise_source": source})
    for name in ("DPSGD", "LazyDP", "AdaFEST"):
        yield private("resume", name, world_size=1, resume=True)
        by_columns = {"placement": "column_wise"}
        yield private("rowwise_adagrad_by_columns", name, **by_columns, fused=adagrad)
        yield private("resume_by_columns", name, **by_columns, resume=True)
        yield private("sequences_by_columns", name, **by_columns, model=sequences)
        yield private("bags_and_sequences", name, model={"sequences": ("shared", "odd")})
        yield private("weighted_bags", name, model={"weighted": True})
        yield private("mean_of_bags", name, model={"mean": True}, placement="table_wise")
        few = dp.Users(max_examples=2, drawn="examples")
        yield private("users_with_drawn_examples", name, plan={"unit": few})
        whole = dp.Users(max_examples=3, drawn="users")
        yield private("drawn_users", name, plan={"unit": whole}, batch_size=6)
        groups = dp.GroupClipping(shares={"*shared*": 1.0, "head*": 2.0, "*": 1.0})
        yield private("group_clipping", name, plan={"clipping": groups})
        yield private("automatic_clipping", name, plan={"clipping": dp.AutomaticClipping()})
        yield private("small_clip_norm", name, plan={"clip_norm": 0.01})
        yield private("max_batch_size", name, plan={"max_batch_size": 12})
        yield private("fixed_order", name, plan={"sampling": "fixed_order"})
        yield private("unamplified", name, plan={"sampling": "unamplified"})
        yield private("by_day", name, plan={"by_day": True})
        yield private("probe", name, plan={"assume_independent_examples": None})
        yield private("many_layers", name, model={"many_layers": True})
        mixed = {"shared": "row_wise", "wide": dp.TablePlacement(kind="column_wise", shards=2)}
        mixed["odd"] = dp.TablePlacement(kind="table_wise", ranks=[1])
        yield private("mixed_placement", name, placement=dp.Placement(tables=mixed))
        for kind in ("table_row_wise", "table_column_wise", "grid"):
            yield private(f"two_hosts_{kind}", name, placement=kind, hosts=2)
    for mechanism in (dp.DPSGD(chunk_rows=7), dp.LazyDP(chunk_rows=7)):
        name = type(mechanism).__name__
        yield private("few_rows_at_once", name, plan={"mechanism": mechanism})
    yield private("adagrad", fused={"kind": "adagrad"})
    yield private("no_noise", plan={"noise_multiplier": 0.0})
    yield _case("rowwise_adagrad/no_privacy/2", 2, placement="row_wise", fused=adagrad)
    yield _case("resume/no_privacy/2", 2, placement="row_wise", fused=adagrad, resume=True)
    for dense in (dp.RGP(rank=2), dp.LSG(rank=2), dp.SparseDPSGD(sparsity=0.3)):
        plan = {"plan": {"dense": dense}}
        name = type(dense).__name__
        yield private(f"many_layers_{name}", model={"many_layers": True}, **plan)
        yield private(f"resume_{name}", **plan, resume=True)
        yield private(f"sequences_{name}", **plan, model=sequences)
    yield from _selections()


def _selections() -> Iterator[Case]:
    """Other ways to select rows for FEST, and to say what AdaFEST's threshold is."""
    noisy, settings = dp.NoisyHistogram(noise_multiplier=1.0), {"placement": "row_wise"}
    one_row = dp.Selection(
        frequencies=noisy, rows_in_total=40, unselected="out_of_vocabulary", out_of_vocabulary_row=1
    )
    selections = {
        "per_table": dp.Selection(frequencies=noisy, rows_per_table=8),
        "gumbel": dp.Selection(frequencies=dp.GumbelHistogram(epsilon=1.0), rows_per_table=8),
        "public": dp.Selection(
            frequencies=dp.PublicFrequencies(path="counts.npz"), rows_per_table=8
        ),
        "out_of_vocabulary": one_row,
        "renewed": dp.Selection(frequencies=noisy, rows_per_table=8, renew=True),
    }
    for name, selection in selections.items():
        fest = dp.FEST(selection=selection)
        for mechanism in (fest, dp.AdaFESTPlus(threshold=1.0, selection=selection)):
            plan = {"mechanism": mechanism, "by_day": selection.renew}
            title = f"selection_{name}/{type(mechanism).__name__}/2"
            # A feature of several tables cannot read one row for all that were not selected.
            tables = tuple(TABLES)[:-1] if selection is one_row else tuple(TABLES)
            yield _case(title, 2, plan=plan, model={"tables": tables}, **settings)
    for name, threshold in {
        "false_positives": {"false_positives": 5.0},
        "half_survival": {"half_survival": 4.0},
        "table_thresholds": {"threshold": 2.0, "table_thresholds": {"shared": 0.5}},
    }.items():
        plan = {"mechanism": dp.AdaFEST(**threshold)}
        yield _case(f"{name}/AdaFEST/2", 2, plan=plan, **settings)


def _case(name: str, world_size: int, hosts: int = 1, **settings: Any) -> Case:
    run = partial(fit, world_size=world_size, hosts=hosts, **settings)
    return Case(name, run, world_size, hosts)


def write_counts(path: str) -> None:
    """Write the public frequencies that `selection_public` reads."""
    draws = np.random.default_rng(2)
    np.savez(path, **{name: draws.integers(1, 99, rows) for name, (rows, *_) in TABLES.items()})
