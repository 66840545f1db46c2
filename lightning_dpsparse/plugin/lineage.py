"""What the history of weights means for a private run that goes on from them.

Weights carry their history with them (`history`). Before a run takes its first step, it asks here
whether the data that it is about to train on went into the weights before. If another private run
did that, the run is refused, since nobody would add up the two prices. If training without privacy
did that, the run claims no privacy. A data set is known by a digest of what it is and of its size
(`datasets.digest`), never by its examples.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from lightning.pytorch import LightningModule

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.datasets import digest, may_share
from lightning_dpsparse.plugin.history import History, Span
from lightning_dpsparse.refused import Refused


def after_steps(
    history: History, data: str | None, steps: int, ledger: Ledger | None = None
) -> History:
    """The history after so many further steps on a data set, charged to a ledger or not."""
    run = None if ledger is None else ledger.run
    span = Span(data, steps, run, None if ledger is None else digest_of(ledger))
    last = history[-1] if history else None
    if last is not None and (last.data, last.run) == (data, run):
        return (*history[:-1], replace(span, steps=last.steps + steps))
    return (*history, span) if steps else history


def digest_of(ledger: Ledger) -> str:
    """A short name for a ledger as it is now."""
    return hashlib.sha256(json.dumps(ledger.to_data(), sort_keys=True).encode()).hexdigest()[:16]


def unprotected_steps(history: History, data: str | None) -> int:
    """How many steps on this data set, or on one that may be the same, nobody charged."""
    return sum(span.steps for span in history if not span.is_private and may_share(span.data, data))


def not_covered(history: History, data: str | None, run: str) -> list[str]:
    """What else went into the weights. The report says that its epsilon does not cover it."""
    found = []
    elsewhere = sum(s.steps for s in history if not s.is_private and not may_share(s.data, data))
    if elsewhere:
        found.append(
            f"Another data set, on which the weights were trained without privacy for {elsewhere:,}"
            " steps."
        )
    others = sorted({s.run for s in history if s.run not in (None, run)} - {None})
    if others:
        found.append(
            "Other private runs behind the weights, which have reports of their own: "
            f"{', '.join(str(name) for name in others)}."
        )
    return found


def unprotected_taint(steps: int) -> str:
    """What the report says of weights that were trained on the data without privacy."""
    return (
        f"The weights were trained on this data set without privacy for {steps:,} steps: no claim "
        "of privacy can be made for them."
    )


def check_charged(history: History, data: str | None, run: str) -> None:
    """Refuse weights that another private run trained on this data: nobody adds up the prices."""
    for span in history:
        if span.is_private and span.run != run and may_share(span.data, data):
            raise Refused(
                f"Expected weights that only this run has trained on this data set, found some "
                f"that private run {span.run} trained on it for {span.steps:,} steps: they would "
                "not be charged. Go on from that run's checkpoint, with ckpt_path, or start anew."
            )


def check_public(history: History, data: str | None, name: str) -> None:
    """Refuse to take weights as public that this private data went into."""
    touched = [span for span in history if may_share(span.data, data)]
    if touched:
        how = "privately" if all(span.is_private for span in touched) else "without privacy"
        raise Refused(
            f"Expected public weights in {name!r}, found weights that were trained {how} on this "
            "data set: nothing would be charged for them. Go on from their checkpoint with "
            "ckpt_path, or start from weights that this data did not touch."
        )


def earlier_trainer(module: LightningModule) -> History:
    """Steps that another Trainer took on this module, with a strategy that keeps no history."""
    trainer = module._trainer
    if trainer is None or not getattr(trainer, "global_step", 0):
        return ()
    if hasattr(trainer.strategy, "private_run"):
        return ()
    loader = trainer.train_dataloader
    return (Span(digest(getattr(loader, "dataset", None)), int(trainer.global_step)),)
