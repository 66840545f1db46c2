"""What cannot be trained right is refused at start, in one message with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_dpsparse import (
    EANA,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    Placement,
    PrivacyPlan,
    TablePlacement,
)
from lightning_dpsparse.refused import Refused
from tests.support.ranks import Ranks
from tests.support.refused_runs import fit, refused
from tests.support.tiny_model import SmallModule, loader, make_trainer


class WithTables(SmallModule):
    """The small model with one thing changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def configure_model(self) -> None:
        if self.ebc is not None:
            return
        super().configure_model()
        configs = self.ebc.embedding_bag_configs()
        if self.change == "fp16":
            configs[0].data_type = DataType.FP16
        if self.change == "width":
            configs[0].embedding_dim = 6
        if self.change == "weighted mean":
            configs[0].pooling = PoolingType.MEAN
            self.ebc = EmbeddingBagCollection(tables=configs, is_weighted=True)
        if self.change == "mean":
            configs[1].pooling = PoolingType.MEAN
        if self.change == "none":
            self.ebc = nn.Identity()
        if self.change == "twice":
            config = EmbeddingBagConfig(
                name="t0", num_embeddings=4, embedding_dim=4, feature_names=["f0"]
            )
            self.other = EmbeddingBagCollection(tables=[config])
        if self.change == "ddp":
            self.head = DistributedDataParallel(self.head)
        if self.change == "sharded":
            clipping = {"gradient_clipping": True, "max_gradient": 1.0}
            self.ebc = DistributedModelParallel(
                nn.Sequential(EmbeddingBagCollection(tables=configs)),
                sharders=[EmbeddingBagCollectionSharder(fused_params=clipping)],
            ).module[0]
        if self.change == "batchnorm":
            self.norm = nn.BatchNorm1d(2)


class TwoDimensionalLoss(SmallModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)[:, None]


class OnlyTables(SmallModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.ebc.parameters(), lr=0.1)


def test_tables_must_be_float32(one_rank: Ranks) -> None:
    refused(
        one_rank, "Expected float32 weights in table 't0' of 'ebc', found FP16", WithTables("fp16")
    )


def test_widths_must_be_multiples_of_four(one_rank: Ranks) -> None:
    refused(one_rank, "multiple of 4 in table 't0' of 'ebc', found 6", WithTables("width"))


def test_weighted_bags_cannot_be_averaged(one_rank: Ranks) -> None:
    refused(one_rank, "found MEAN on a weighted collection", WithTables("weighted mean"))


def test_mean_row_wise_tables_cannot_stand_beside_others(two_ranks: Ranks) -> None:
    placement = Placement(default="table_wise", tables={"t1": "row_wise"})
    refused(two_ranks, "would divide those tables too", WithTables("mean"), placement)


def test_mean_grid_tables_are_refused(two_ranks: Ranks) -> None:
    refused(
        two_ranks,
        "grid table 't1', found MEAN",
        WithTables("mean"),
        Placement(tables={"t1": "grid"}),
    )


def test_a_model_without_tables_is_refused(one_rank: Ranks) -> None:
    message = "Expected an EmbeddingBagCollection or an EmbeddingCollection .* found none"
    refused(one_rank, message, WithTables("none"))


def test_layers_must_not_be_wrapped(one_rank: Ranks) -> None:
    message = "Expected bare layers, found DistributedDataParallel at 'head'"
    refused(one_rank, message, WithTables("ddp"))


def test_tables_that_fbgemm_clips_are_refused(one_rank: Ranks) -> None:
    refused(one_rank, "found 'ebc' sharded before", WithTables("sharded"))


def test_two_tables_cannot_share_a_name(one_rank: Ranks) -> None:
    refused(one_rank, "found 't0' twice", WithTables("twice"))


def test_placement_must_name_real_tables(one_rank: Ranks) -> None:
    refused(one_rank, r"found \['typo'\]", placement=Placement(tables={"typo": "row_wise"}))


def test_ranks_must_exist(one_rank: Ranks) -> None:
    pinned = TablePlacement(kind="table_wise", ranks=[3])
    refused(one_rank, "Expected ranks from 0 to 0", placement=Placement(tables={"t0": pinned}))


def test_row_wise_tables_take_no_ranks(one_rank: Ranks) -> None:
    pinned = TablePlacement(kind="row_wise", ranks=[0])
    refused(
        one_rank,
        "ranks with table_wise or column_wise only",
        placement=Placement(tables={"t0": pinned}),
    )


def test_table_wise_takes_one_rank(two_ranks: Ranks) -> None:
    pinned = TablePlacement(kind="table_wise", ranks=[0, 1])
    refused(
        two_ranks, "Expected one rank for table_wise", placement=Placement(tables={"t0": pinned})
    )


def test_column_pieces_must_fit_the_kernel(one_rank: Ranks) -> None:
    cut = TablePlacement(kind="column_wise", shards=4)
    refused(one_rank, r"found 4 pieces. Choose from", placement=Placement(tables={"t0": cut}))


def test_fused_adam_needs_cuda(one_rank: Ranks) -> None:
    refused(
        one_rank, "found adam, which FBGEMM has on CUDA only", fused=FusedOptimizer(kind="adam")
    )


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_weight_decay_that_the_kernel_ignores_is_refused(one_rank: Ranks, kind: Any) -> None:
    refused(
        one_rank, f"{kind} kernel ignores it", fused=FusedOptimizer(kind=kind, weight_decay=0.1)
    )


def test_weight_decay_on_cpu_is_refused(one_rank: Ranks) -> None:
    fused = FusedOptimizer(kind="rowwise_adagrad", weight_decay=0.1)
    refused(one_rank, "applies it only to tables that several features share", fused=fused)


NOT_PRIVATE = PrivacyPlan(mechanism=EANA(), noise_multiplier=1.0)


def test_weight_decay_of_rows_that_are_left_out_is_refused(one_rank: Ranks) -> None:
    fused = FusedOptimizer(kind="sgd", weight_decay=0.1)
    refused(one_rank, "only rows that were read would decay", fused=fused, privacy=NOT_PRIVATE)


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad"])
def test_lazydp_needs_an_optimizer_without_memory(one_rank: Ranks, kind: Any) -> None:
    refused(
        one_rank,
        f"found '{kind}': its steps depend on past noise.*Use sgd .*, or DPSGD",
        fused=FusedOptimizer(kind=kind),
        privacy=PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0),
    )


def test_rows_that_owe_noise_are_not_averaged(one_rank: Ranks) -> None:
    plan = PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0)
    averaging = [StochasticWeightAveraging(swa_lrs=0.1)]
    words = "found StochasticWeightAveraging.*Use lightning_dpsparse.AverageWeights"
    refused(one_rank, words, privacy=plan, callbacks=averaging)


def fit_twice() -> None:
    module = SmallModule()
    fit(module, None, FusedOptimizer(kind="sgd"), {})
    fit(module, None, FusedOptimizer(kind="adagrad"), {})


def test_sharded_tables_keep_their_optimizer(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="with adagrad fused in, found EXACT_SGD"):
        one_rank.run(fit_twice)


def test_accumulated_gradients_are_refused(one_rank: Ranks) -> None:
    refused(one_rank, "Expected accumulate_grad_batches=1, found 2", accumulate_grad_batches=2)


def test_lightnings_gradient_clipping_is_refused(one_rank: Ranks) -> None:
    refused(one_rank, "Expected no gradient_clip_val, found 1.0", gradient_clip_val=1.0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_are_refused(one_rank: Ranks, precision: Any) -> None:
    refused(one_rank, f"Expected precision='32-true', found '{precision}'", precision=precision)


def test_synchronised_batchnorm_is_refused(one_rank: Ranks) -> None:
    refused(one_rank, "Expected sync_batchnorm=False", WithTables("batchnorm"), sync_batchnorm=True)


def test_a_loss_of_two_dimensions_is_refused(one_rank: Ranks) -> None:
    refused(one_rank, r"one loss per example \(1-D\), found 2 dimensions", TwoDimensionalLoss())


def test_an_optimizer_over_tables_alone_is_refused(one_rank: Ranks) -> None:
    refused(one_rank, "optimizer got an empty parameter list", OnlyTables())


class Newton(SmallModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.head.parameters())


def test_lbfgs_is_refused(one_rank: Ranks) -> None:
    refused(one_rank, "found LBFGS: each of its evaluations would update", Newton())


PLAN = PrivacyPlan(noise_multiplier=1.0)


def test_a_private_loss_must_be_one_per_example(one_rank: Ranks) -> None:
    scalar = SmallModule(scalar_loss=True)
    refused(one_rank, r"one loss per example \(1-D\), found 0 dimensions", scalar, privacy=PLAN)


class Skipping(SmallModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def test_a_private_step_cannot_be_skipped(one_rank: Ranks) -> None:
    refused(one_rank, "a skipped step depends on the data", Skipping(), privacy=PLAN)


def test_batchnorm_is_refused_privately(one_rank: Ranks) -> None:
    message = "found BatchNorm1d at 'norm', which mixes the examples of a batch. Use LayerNorm"
    refused(one_rank, message, WithTables("batchnorm"), privacy=PLAN)


class Halved(SmallModule):
    """Twice as many losses as examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return torch.cat([loss, loss])


def test_losses_must_match_the_examples(one_rank: Ranks) -> None:
    refused(one_rank, "one loss for each of the", Halved(), privacy=PLAN)


class ReadTwice(SmallModule):
    def forward(self, batch: Any) -> Any:
        self.ebc(batch.sparse_features).to_dict()
        return super().forward(batch)


def test_tables_are_read_once_in_a_private_step(one_rank: Ranks) -> None:
    message = "Expected the tables of 'ebc' to be read once in a private step"
    refused(one_rank, message, ReadTwice(), privacy=PLAN)


class Loader:
    """No batch size to read off."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter(loader(8, 8, 1))


def fit_without_batch_size() -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, sampling="unamplified", delta=1e-6)
    make_trainer(1, privacy=plan).fit(SmallModule(), Loader())


def test_the_divisor_must_be_known(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="Set expected_batch_size in the privacy plan"):
        one_rank.run(fit_without_batch_size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm > 0"),
        ({"clip_norm": float("nan")}, "clip_norm > 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier >= 0"),
        ({"clip_norm": float("inf")}, "finite clip_norm with noise"),
        ({"expected_batch_size": 0}, "expected_batch_size >= 1"),
    ],
)
def test_a_plan_is_checked_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(**({"noise_multiplier": 1.0} | settings))


@pytest.mark.parametrize(("privacy", "most"), [(None, 4), (PLAN, 0)])
def test_parts_of_a_batch_need_a_plan_and_an_example(privacy: Any, most: int) -> None:
    with pytest.raises(ValueError, match="max_physical_batch of at least 1, and a privacy plan"):
        DPSparseStrategy(privacy=privacy, max_physical_batch=most)


def test_a_plan_says_what_is_not_private() -> None:
    assert "EANA is not" in PrivacyPlan(mechanism=EANA(), noise_multiplier=1.0).faults()[0]
    assert "noise_multiplier=0" in PrivacyPlan(noise_multiplier=0.0).faults()[0]
    assert "Fixed noise key" in PrivacyPlan(noise_multiplier=1.0, fixed_key=1).faults()[0]
    assert PLAN.faults() == []


def fit_other_lightning() -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        pass

    make_trainer(1).strategy.connect(Other())  # type: ignore[arg-type]


def test_modules_of_the_other_package_are_named(one_rank: Ranks) -> None:
    with pytest.raises(Refused, match=r"import both from `lightning\.pytorch`"):
        one_rank.run(fit_other_lightning)
