"""Weights carry their history: what they were trained on, and whether that was charged.

Epsilon belongs to weights, not to a run. A module in memory, a checkpoint, a consolidated file and
a state dict each know which data sets went into them, privately or not, so that going on from any
of them charges, refuses or says so. A data set is known by a digest of what it is and its size
(`datasets.digest`), never by its examples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.datasets import digest, may_share
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint import HISTORY_KEY
from lightning_dpsparse.sharded.shards import register_state_hook

_ATTRIBUTE = "_lightning_dpsparse_history"


@dataclass(frozen=True)
class Span:
    """Some steps of training on one data set."""

    data: str | None
    """Digest of the data set; None if it is not known."""
    steps: int
    run: str | None = None
    """The private run that charged them; None if nobody did."""
    ledger: str | None = None
    """Digest of that run's ledger after them."""

    @property
    def is_private(self) -> bool:
        return self.run is not None


History = tuple[Span, ...]


def history_of(module: nn.Module) -> History:
    found: History = getattr(module, _ATTRIBUTE, ())
    return found


def keep_history(module: nn.Module, history: History) -> None:
    """On the module itself, and in every state dict that it gives out."""
    if not hasattr(module, _ATTRIBUTE):
        register_state_hook(module, HISTORY_KEY, _as_data)
    object.__setattr__(module, _ATTRIBUTE, history)


def _as_data(module: nn.Module) -> list[dict[str, Any]]:
    return to_data(history_of(module))


def follow_state_dicts() -> None:
    """From now on a LightningModule that loads a state dict takes over its history.

    Lightning's load_from_checkpoint passes here too. It is the one way to see such weights: tensors
    forget where they were copied from.
    """
    plain = nn.Module.load_state_dict

    @wraps(plain)
    def load_state_dict(
        self: LightningModule, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        done = plain(self, state_dict, *args, **kwargs)
        loaded = history_in(state_dict)
        if loaded:
            keep_history(self, _joined(history_of(self), loaded))
        return done

    LightningModule.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]


def _joined(history: History, other: History) -> History:
    """Of weights that may hold both. Steps that both tell of are counted once."""
    found = {(span.data, span.run): span for span in history}
    for span in other:
        known = found.get((span.data, span.run))
        if known is None or known.steps < span.steps:
            found[span.data, span.run] = span
    return tuple(found.values())


def to_data(history: History) -> list[dict[str, Any]]:
    return [asdict(span) for span in history]


def history_in(file: Mapping[str, Any]) -> History:
    """Of a checkpoint or a state dict."""
    state = file.get("state_dict", file)
    metadata = getattr(state, "_metadata", None) or {}
    found = file.get(HISTORY_KEY) or metadata.get(HISTORY_KEY) or []
    return tuple(Span(**span) for span in found)


def after_steps(
    history: History, data: str | None, steps: int, ledger: Ledger | None = None
) -> History:
    """The same with so many steps more on a data set, charged to a ledger or not."""
    run = None if ledger is None else ledger.run
    span = Span(data, steps, run, None if ledger is None else digest_of(ledger))
    last = history[-1] if history else None
    if last is not None and (last.data, last.run) == (data, run):
        return (*history[:-1], replace(span, steps=last.steps + steps))
    return (*history, span) if steps else history


def digest_of(ledger: Ledger) -> str:
    return hashlib.sha256(json.dumps(ledger.to_data(), sort_keys=True).encode()).hexdigest()[:16]


# ---- what it means -----------------------------------------------------------------------------


def unprotected_steps(history: History, data: str | None) -> int:
    """Steps on this data set, or on one that may be this, that nobody charged."""
    return sum(span.steps for span in history if not span.is_private and may_share(span.data, data))


def not_covered(history: History, data: str | None, run: str) -> list[str]:
    """What else went into the weights, for the report."""
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
    return (
        f"The weights were trained on this data set without privacy for {steps:,} steps: no claim "
        "of privacy can be made for them."
    )


def check_charged(history: History, data: str | None, run: str) -> None:
    """Refuse weights that another private run trained on this data, which nobody would add up."""
    for span in history:
        if span.is_private and span.run != run and may_share(span.data, data):
            raise Refused(
                f"Expected weights that only this run has trained on this data set, found some "
                f"that private run {span.run} trained on it for {span.steps:,} steps: they would "
                "not be charged. Go on from that run's checkpoint, with ckpt_path, or start anew."
            )


def check_public(history: History, data: str | None, name: str) -> None:
    """Refuse weights that the same private data went into as public ones."""
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


follow_state_dicts()
