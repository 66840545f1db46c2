"""A small model, and many ways to change it: some treat examples apart, some couple them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dpsparse.sharded.examples import take_examples
from tests.support.private_runs import SIZE, Marked
from tests.support.tiny_model import SmallModule, collate


class Model(SmallModule):
    """A small model whose losses go through `change`."""

    def __init__(self, change: str = "as_it_is") -> None:
        super().__init__()
        self.change = change
        self.calls, self.bank, self.mean, self.history = 0, [], 0.0, 0.0
        self.dropout, self.train_loss = nn.Dropout(0.3), MeanMetric()
        self.generator = torch.Generator().manual_seed(3)

    def configure_model(self) -> None:
        super().configure_model()
        if self.change.startswith("zero_head"):
            nn.init.zeros_(self.head.out.weight)

    def logits_and_hidden(self, batch: Any, hidden_change: Any = None) -> tuple[Tensor, Tensor]:
        embedded = self.ebc(batch.sparse_features).to_dict()
        x = torch.cat([*(embedded[k] for k in sorted(embedded)), batch.dense_features], dim=1)
        hidden = torch.tanh(self.head.hidden(x))
        hidden = hidden if hidden_change is None else hidden_change(hidden)
        return self.head.out(hidden).squeeze(1), hidden

    def loss_n(self, batch: Any, hidden_change: Any = None, labels: Tensor | None = None) -> Tensor:
        logits, _ = self.logits_and_hidden(batch, hidden_change)
        labels = batch.labels if labels is None else labels
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return getattr(self, self.change)(batch)

    # ---- nothing wrong with these --------------------------------------------------------------

    def as_it_is(self, batch: Any) -> Tensor:
        return self.loss_n(batch)

    def with_dropout(self, batch: Any) -> Tensor:
        return self.loss_n(batch, self.dropout) + 0.1 * self.losses_again(batch)

    def losses_again(self, batch: Any) -> Tensor:
        return F.dropout(batch.dense_features, 0.5).sum(1)

    def with_noise(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: h + torch.randn_like(h) + torch.rand(len(h), 1))

    def with_own_generator(self, batch: Any) -> Tensor:
        drawn = torch.rand(len(batch.labels), generator=self.generator)
        return self.loss_n(batch) * (drawn < 0.7)

    def with_random_labels(self, batch: Any) -> Tensor:
        flip = torch.bernoulli(torch.full_like(batch.labels, 0.1))
        keep = torch.randint(0, 5, (len(flip), 3)).float().mean(1)
        return self.loss_n(batch, labels=(batch.labels - flip).abs()) * keep

    def with_numpy(self, batch: Any) -> Tensor:
        drawn = torch.from_numpy(np.random.rand(len(batch.labels), 2).astype(np.float32))
        return self.loss_n(batch) * drawn.sum(1)

    def with_schedule(self, batch: Any) -> Tensor:
        return self.loss_n(batch) * (1.0 + 0.1 * self.calls)

    def with_metric(self, batch: Any) -> Tensor:
        losses = self.loss_n(batch)
        self.train_loss.update(losses.detach())
        self.bank.append(float(losses.detach().sum()))
        return losses

    def with_weights(self, batch: Any) -> Tensor:
        return self.loss_n(batch) * (batch.labels * 3 + 1) * (batch.dense_features[:, 1] > 0.5)

    def with_two_tasks(self, batch: Any) -> Tensor:
        logits, hidden = self.logits_and_hidden(batch)
        click = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        dwell = (hidden.mean(1) - batch.dense_features[:, 1]).square()
        return click + 0.5 * batch.labels * dwell

    def zero_head(self, batch: Any) -> Tensor:
        return self.loss_n(batch)

    def with_in_place(self, batch: Any) -> Tensor:
        batch.dense_features.clamp_(max=1.0)
        return self.loss_n(batch)

    def with_checkpointed_sum(self, batch: Any) -> Tensor:
        return self.loss_n(
            batch, lambda h: torch.utils.checkpoint.checkpoint(torch.sin, h, use_reentrant=False)
        )

    # ---- these couple examples -------------------------------------------------------------------

    def in_batch_softmax(self, batch: Any) -> Tensor:
        _, hidden = self.logits_and_hidden(batch)
        scores = hidden @ hidden.t()
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")

    def minus_mean(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: h - h.mean(0))

    def minus_detached_mean(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: h - h.mean(0).detach())

    def zero_head_minus_detached_mean(self, batch: Any) -> Tensor:
        return self.minus_detached_mean(batch)

    def from_one_to_one(self, batch: Any) -> Tensor:
        """Forwards only, and from one example to one other."""

        def handed_on(hidden: Tensor) -> Tensor:
            changed = hidden.clone()
            changed[-2:-1] = changed[-2:-1] + hidden[-1:].detach()
            return changed if len(hidden) > 1 else hidden

        return self.loss_n(batch, handed_on)

    def where_all_clicked(self, batch: Any) -> Tensor:
        losses = self.loss_n(batch)
        return losses * 2 if bool((batch.labels > 0).all()) else losses

    def by_empty_examples(self, batch: Any) -> Tensor:
        lengths = batch.sparse_features.lengths().view(-1, len(batch.labels)).sum(0)
        return self.loss_n(batch) * (1.0 + (lengths == 0).sum())

    def small_regulariser(self, batch: Any) -> Tensor:
        _, hidden = self.logits_and_hidden(batch)
        return self.losses_of(hidden, batch) + 1e-3 * (hidden @ hidden.t()).mean(1)

    def losses_of(self, hidden: Tensor, batch: Any) -> Tensor:
        logits = self.head.out(hidden).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")

    def batch_norm(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: F.batch_norm(h, None, None, training=True))

    def over_batch_size(self, batch: Any) -> Tensor:
        return self.loss_n(batch) / len(batch.labels)

    def by_class_share(self, batch: Any) -> Tensor:
        share = batch.labels.mean().clamp(0.1, 0.9)
        return self.loss_n(batch) * torch.where(batch.labels > 0, 1 / share, 1 / (1 - share))

    def hard_examples(self, batch: Any) -> Tensor:
        losses = self.loss_n(batch)
        return losses * (losses >= losses.detach().median())

    def running_sum(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: h.cumsum(0) / 10)

    def recentred_gradient(self, batch: Any) -> Tensor:
        def hooked(h: Tensor) -> Tensor:
            h.register_hook(lambda g: g - g.mean(0))
            return h

        return self.loss_n(batch, hooked)

    def normed_gradient(self, batch: Any) -> Tensor:
        def hooked(h: Tensor) -> Tensor:
            h.register_hook(lambda g: g / (g.norm() + 1e-6))
            return h

        return self.loss_n(batch, hooked)

    def gradient_by_others(self, batch: Any) -> Tensor:
        scale = float(batch.dense_features.sum())

        def hooked(h: Tensor) -> Tensor:
            h.register_hook(lambda g: g * scale)
            return h

        return self.loss_n(batch, hooked)

    def by_position(self, batch: Any) -> Tensor:
        return self.loss_n(batch) * torch.linspace(0.5, 1.5, len(batch.labels))

    def flipped(self, batch: Any) -> Tensor:
        return self.loss_n(batch, lambda h: h.flip(0))

    def rolled_loss(self, batch: Any) -> Tensor:
        return self.loss_n(batch).roll(1)

    def sorted_by_label(self, batch: Any) -> Tensor:
        return self.loss_n(batch)[batch.labels.argsort()]

    def labelled_only(self, batch: Any) -> Tensor:
        return self.loss_n(batch)[batch.labels > 0]

    def memory_bank(self, batch: Any) -> Tensor:
        _, hidden = self.logits_and_hidden(batch)
        losses = self.losses_of(hidden, batch)
        if self.bank:
            losses = losses + (hidden @ self.bank[-1].t()).logsumexp(1)
        self.bank.append(hidden.detach())
        return losses

    def running_mean(self, batch: Any) -> Tensor:
        mean, self.mean = self.mean, 0.9 * self.mean + 0.1 * float(batch.labels.mean())
        return self.loss_n(batch) * (1.0 + mean)

    def loss_history(self, batch: Any) -> Tensor:
        losses = self.loss_n(batch)
        weight, self.history = 1.0 + self.history, float(losses.detach().mean())
        return losses * weight

    def rate_by_loss(self, batch: Any) -> Tensor:
        losses = self.loss_n(batch)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * float(losses.detach().mean())
        return losses

    def other_data(self, batch: Any) -> Tensor:
        if not hasattr(self, "others"):
            self.others = [collate([e]) for e in Marked(SIZE).examples]
        self.calls += 1
        extra = self.others[np.random.randint(SIZE)].labels + self.next_of_others()
        return self.loss_n(batch) * (1 + extra)

    def next_of_others(self) -> Tensor:
        _CURSOR[0] += 1
        return self.others[_CURSOR[0] % SIZE].dense_features.sum()

    def stored_batch(self, batch: Any) -> Tensor:
        if not _STORED:
            _STORED.append(collate([Marked(SIZE).examples[i] for i in range(40)]))

        return self.loss_n(
            take_examples(_STORED[0], 40, [i % 40 for i in range(len(batch.labels))])
        )

    def numpy_twice(self, batch: Any) -> Tensor:
        drawn = [np.random.rand(len(batch.labels)) for _ in range(2)]
        return self.loss_n(batch) * torch.from_numpy(sum(drawn)).float()


_CURSOR, _STORED = [0], []

FINE = [
    "as_it_is", "with_dropout", "with_noise", "with_own_generator", "with_random_labels",
    "with_numpy", "with_schedule", "with_metric", "with_weights", "with_two_tasks", "zero_head",
    "with_in_place", "with_checkpointed_sum",
]  # fmt: skip

OTHERS_CHANGE = "others change when some are|reaches others"
COUPLED = {
    "in_batch_softmax": OTHERS_CHANGE,
    "minus_mean": OTHERS_CHANGE,
    "minus_detached_mean": OTHERS_CHANGE,
    "zero_head_minus_detached_mean": OTHERS_CHANGE,
    "from_one_to_one": "others change when some are replaced",
    "where_all_clicked": "others change when some are replaced",
    "by_empty_examples": "others change when some are emptied",
    "small_regulariser": OTHERS_CHANGE,
    "batch_norm": OTHERS_CHANGE,
    "over_batch_size": "changes with the number of examples",
    "by_class_share": "others change when some are",
    "hard_examples": "others change when some are|changes with the number of examples",
    "running_sum": OTHERS_CHANGE,
    "recentred_gradient": "reaches others",
    "normed_gradient": "whatever other losses are sent back with it",
    "gradient_by_others": "others change when some are",
    "by_position": "changes with the number of examples",
    "flipped": "reaches others|losses of others and not their own",
    "rolled_loss": "reaches others|losses of others and not their own",
    "sorted_by_label": "reaches others|losses of others",
    "labelled_only": "Expected one loss for each of the",
    "memory_bank": "what an earlier batch left behind",
    "running_mean": "what an earlier batch left behind",
    "loss_history": "what an earlier batch left behind",
    "rate_by_loss": "what an earlier batch left behind",
    "other_data": "Expected the same examples to have the same losses",
    "stored_batch": "train on the batch that was drawn|changes with the number",
    "numpy_twice": "draws of numpy or random",
}
