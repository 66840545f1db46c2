"""DPAdam in private runs: it is told the plan's noise, whatever run it is in, and on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_dpsparse import (
    EANA,
    LSG,
    RGP,
    DPAdam,
    FusedOptimizer,
    LazyDP,
    Placement,
    PrivacyPlan,
    SparseDPSGD,
)
from lightning_dpsparse.recipe import RecipeCLI
from lightning_dpsparse.recipe_files import shipped_recipes
from lightning_dpsparse.refused import Refused
from tests.support.alternating import Alternating
from tests.support.naive_step import EXPECTED, SIZES, Batches, plan
from tests.support.plain_training import PLACEMENTS, SGD
from tests.support.private_runs import NOISY, REPLAYED, Watching, fit
from tests.support.ranks import Ranks
from tests.support.tiny_model import Recording, assemble, make_trainer, snapshot


class Adaptive(Recording):
    """Trains its dense layers with DPAdam, and can freeze one of them for the first steps."""

    def __init__(self, freeze: int = 0, plain: bool = False, **settings: Any) -> None:
        super().__init__()
        self.freeze, self.plain, self.settings = freeze, plain, settings

    def configure_optimizers(self) -> Any:
        if self.plain:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return DPAdam(self.parameters(), lr=0.01, **self.settings)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.hidden.weight.requires_grad_(batch_idx >= self.freeze)


def train(
    world: int, private: PrivacyPlan | None, placement: Placement | None = None, **module: Any
) -> dict[str, Any]:
    """Runs inside a rank. Three steps, of which one is empty on some rank."""
    torch.manual_seed(0)
    model, rank = Adaptive(**module), torch.distributed.get_rank() if world > 1 else None
    trainer = make_trainer(world, placement, SGD, privacy=private)
    trainer.fit(model, Batches(SIZES["uneven"], rank))
    optimizer: Any = trainer.optimizers[0]
    return {
        "told": getattr(optimizer, "noise_stddev", None),
        "steps": [float(state["step"]) for state in optimizer.state.values()],
        "variances": [
            state["noise_variance"]
            for state in optimizer.state.values()
            if "noise_variance" in state
        ],
        "start": model.start,
        "state": snapshot(model),
    }


@pytest.mark.parametrize("mechanism", [EANA(), LazyDP()], ids=lambda m: type(m).__name__)
def test_it_is_told_the_noise_of_the_plan(one_rank: Ranks, mechanism: Any) -> None:
    private = plan(clip_norm=0.5, noise=2.0, mechanism=mechanism)
    result = one_rank.run(train, 1, private)[0]
    assert result["told"] == pytest.approx(2.0 * 0.5 / EXPECTED)
    assert len(result["variances"]) == 4  # weights and biases of two layers
    for found in result["variances"]:
        assert float(found) == pytest.approx((2.0 * 0.5 / EXPECTED) ** 2)


class OnlyNoise(Adaptive):
    """Examples have no gradient. Keeps the gradients that its optimizer gets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 0.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [*getattr(self, "seen", []), self.head.hidden.weight.grad.flatten().clone()]


def noise_and_told(private: PrivacyPlan) -> tuple[torch.Tensor, float]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module, trainer = OnlyNoise(), make_trainer(1, None, SGD, privacy=private)
    trainer.fit(module, Batches(SIZES["uneven"], None))
    optimizer: Any = trainer.optimizers[0]
    return torch.cat(module.seen), optimizer.noise_stddev


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_what_it_is_told_is_the_noise_that_there_is(one_rank: Ranks, scale: float) -> None:
    """Where dense layers are clipped in a unit of their own, too."""
    noise, told = one_rank.run(noise_and_told, plan(noise=2.0, dense_scale=scale))[0]
    assert told == pytest.approx(scale * 2.0 * 0.5 / EXPECTED)
    # Five standard deviations of the standard deviation of so many normal numbers.
    assert float(noise.std()) == pytest.approx(told, rel=5 / (2 * noise.numel()) ** 0.5)
    assert noise.numel() > 1000


@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_two_ranks_have_equal_weights_and_are_one_rank(
    one_rank: Ranks, two_ranks: Ranks, name: str
) -> None:
    private = plan(noise=0.5, noise_source="row_keyed")
    alone = one_rank.run(train, 1, private)
    both = two_ranks.run(train, 2, private, PLACEMENTS[name])
    assert [result["told"] for result in both] == [alone[0]["told"]] * 2
    expected = assemble([result["state"] for result in alone])
    for key, value in assemble([result["state"] for result in both]).items():  # equal on both
        # A step is 0.01 and at most eight times that at its floor, where rounding of sums shows.
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


def test_a_layer_that_thaws_later_counts_its_own_steps(one_rank: Ranks) -> None:
    result = one_rank.run(train, 1, plan(noise=0.5), freeze=2)[0]
    assert sorted(result["steps"]) == [1, 3, 3, 3]


@pytest.mark.parametrize("private", [None, plan()], ids=["no plan", "no noise"])
def test_without_noise_it_trains_as_adam(one_rank: Ranks, private: Any) -> None:
    found, usual = (one_rank.run(train, 1, private, plain=plain)[0] for plain in (False, True))
    assert found["told"] == 0.0
    expected = assemble([usual["state"]])
    for key, value in assemble([found["state"]]).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6)


class Resumed(Watching):
    """Shows what its optimizer holds at the end."""

    def configure_optimizers(self) -> Any:
        return DPAdam(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        (optimizer,) = self.trainer.optimizers
        self.told = optimizer.noise_stddev
        self.moments = [dict(state) for state in optimizer.state.values()]


def go(world: int, privacy: PrivacyPlan, folder: Path, **settings: Any) -> dict[str, Any]:
    """Runs inside a rank."""
    module = Resumed()
    result = fit(world, privacy, folder, module=module, with_facts=True, **settings)
    return {**result, "told": module.told, "moments": module.moments}


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_an_unbroken_one(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    ranks = one_rank if world == 1 else two_ranks
    whole = ranks.run(go, world, REPLAYED, tmp_path, save_every=3, max_epochs=2)
    resumed = ranks.run(
        go, world, REPLAYED, tmp_path, resume=tmp_path / "step=3.ckpt", max_epochs=2
    )
    assert resumed[0]["told"] == whole[0]["told"] > 0
    expected, found = (assemble([r["state"] for r in results]) for results in (whole, resumed))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for one, other in zip(whole[0]["moments"], resumed[0]["moments"]):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_goes_on_with_other_noise_is_told_so(one_rank: Ranks, tmp_path: Path) -> None:
    """Five steps with sigma 1, five with 0.7: the second moment holds both."""
    first = one_rank.run(go, 1, NOISY, tmp_path, save_every=5)[0]
    less = PrivacyPlan(noise_multiplier=0.7, delta=1e-3)
    second = one_rank.run(
        _warned, 1, less, tmp_path, resume=tmp_path / "step=5.ckpt", max_epochs=2
    )[0]
    assert second["told"] == pytest.approx(0.7 * first["told"])
    old, beta2 = first["told"] ** 2, 0.999
    share = (1 - beta2**5) / (1 - beta2**10)  # of the five new steps in ten
    for state in second["moments"]:
        assert float(state["step"]) == 10
        expected = share * 0.49 * old + (1 - share) * old
        assert float(state["noise_variance"]) == pytest.approx(expected, rel=1e-4)


def _warned(*args: Any, **kwargs: Any) -> dict[str, Any]:
    with pytest.warns(UserWarning, match="goes on with other noise"):
        return go(*args, **kwargs)


def test_being_told_is_no_change_by_hand(one_rank: Ranks, tmp_path: Path) -> None:
    """The report lists settings that other code changes."""
    assert one_rank.run(go, 1, NOISY, tmp_path)[0]["facts"]["taints"] == []


@pytest.mark.parametrize(
    "dense", [LSG(2, 0.25), RGP(2), SparseDPSGD(0.3)], ids=lambda d: type(d).__name__
)
def test_other_dense_forms_are_refused(one_rank: Ranks, dense: Any) -> None:
    name = type(dense).__name__
    message = f"Expected dense=DenseGaussian with DPAdam, found {name}: .*Leave `dense` out"
    with pytest.raises(Refused, match=message):
        one_rank.run(train, 1, plan(noise=0.5, dense=dense))
    one_rank.run(train, 1, plan(noise=0.5, dense=dense), plain=True)


def test_a_mechanism_with_dense_noise_of_its_own_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(Refused, match=r"independent noise.* with DPAdam, found Alternating"):
        one_rank.run(train, 1, plan(noise=0.5, mechanism=Alternating()))


def test_noise_that_contradicts_the_plan_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(Refused, match=r"that of the gradients, 0\.05, found 0\.1\. Leave it out"):
        one_rank.run(train, 1, plan(noise=1.0), noise_stddev=0.1)
    one_rank.run(train, 1, plan(noise=1.0), noise_stddev=0.05)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")
def test_a_recipe_can_name_it(tmp_path: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(shipped_recipes()["dlrm_lazydp"].read_text())
    named = {"class_path": "lightning_dpsparse.DPAdam", "init_args": {"lr": 0.002, "floor": 0.25}}
    recipe["model"]["init_args"]["optimizer"] = named
    recipe["trainer"] |= {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    cli = RecipeCLI(args=["--config", str(tmp_path / "recipe.yaml")], run=False)
    optimizer = cli.model._optimizer([torch.zeros(3, requires_grad=True)])
    assert type(optimizer) is DPAdam
    (group,) = optimizer.param_groups
    assert (group["lr"], group["floor"], group["betas"]) == (0.002, 0.25, (0.9, 0.999))


def test_the_tables_keep_their_optimizer(one_rank: Ranks) -> None:
    """The fused optimizer is told nothing: what it takes is its mechanism's business."""
    result = one_rank.run(_with_adagrad, plan(noise=0.5))[0]
    assert result == pytest.approx(0.5 * 0.5 / EXPECTED)


def _with_adagrad(private: PrivacyPlan) -> float:
    torch.manual_seed(0)
    trainer = make_trainer(1, None, FusedOptimizer(kind="adagrad"), privacy=private)
    trainer.fit(Adaptive(), Batches(SIZES["even"], None))
    optimizer: Any = trainer.optimizers[0]
    return float(optimizer.noise_stddev)
