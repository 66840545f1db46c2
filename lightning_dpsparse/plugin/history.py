"""What weights were trained on is kept with the weights, and goes wherever they are copied to.

Epsilon belongs to weights, not to a run. If a module forgot that it had been trained before, the
next run would report an epsilon that is too small. So a module in memory, a checkpoint, a
consolidated file and a state dict each know the history of their weights: a `Span` for every
stretch of training on one data set, charged or not. A module in memory also knows what its last
private run spent, so that a second `fit` goes on with the same ledger.

The record of a module is no attribute of it. It is a state-dict hook: PyTorch keeps hooks in a
registry of every module, copies and pickles them with the module, and calls them for every state
dict. A table outside of the module would be lost by `copy.deepcopy` and by `pickle`, which know
nothing of it, and with it the history.

`lineage` says what a history means for a run that goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_dpsparse.checks import is_whole
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.whole_files import HISTORY_KEY


@dataclass(frozen=True)
class Span:
    """Some steps of training on one data set."""

    data: str | None
    """Digest of the data set (`datasets.digest`); None if it is not known."""
    steps: int
    run: str | None = None
    """The private run that charged these steps; None if no run did."""
    ledger: str | None = None
    """Digest of that run's ledger after these steps."""

    @property
    def is_private(self) -> bool:
        return self.run is not None


History = tuple[Span, ...]


class WeightsRecord:
    """What a module knows of its own weights. It is registered as a state-dict hook of the module.

    Copies of a module that share its weights (`copy.copy`) share its record. Copies that have
    weights of their own (`copy.deepcopy`, `pickle`) get a record of their own.
    """

    def __init__(self) -> None:
        self.history: History = ()
        self.spent: Mapping[str, Any] | None = None
        """What the last private run kept, as in a checkpoint; None without a private run."""

    def __call__(self, module: nn.Module, state: Any, *rest: Any) -> None:
        """Write the history into a state dict's metadata, where loading it is not disturbed."""
        state._metadata[HISTORY_KEY] = history_as_data(self.history)


def _record_of(module: nn.Module) -> WeightsRecord | None:
    hooks = module._state_dict_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, WeightsRecord)), None)


def _new_record(module: nn.Module) -> WeightsRecord:
    record = WeightsRecord()
    module.register_state_dict_post_hook(record)
    return record


def history_of(module: nn.Module) -> History:
    """The history of the weights that a module holds."""
    record = _record_of(module)
    return () if record is None else record.history


def keep_history(module: nn.Module, history: History) -> None:
    """From now on this is the history of the module's weights, and of its state dicts."""
    record = _record_of(module) or _new_record(module)
    record.history = history


def spent_by(module: nn.Module) -> Mapping[str, Any] | None:
    """What the last private run of a module kept; None if there was none."""
    record = _record_of(module)
    return None if record is None else record.spent


def keep_spent(module: nn.Module, spent: Mapping[str, Any]) -> None:
    """A private run on the module ends or pauses, and this is what the next one goes on from."""
    record = _record_of(module) or _new_record(module)
    record.spent = spent


def history_as_data(history: History) -> list[dict[str, Any]]:
    """Plain Python values, for files."""
    return [asdict(span) for span in history]


def history_in(file: Mapping[str, Any]) -> History:
    """The history in a checkpoint or in a state dict."""
    state = file.get("state_dict", file)
    try:
        metadata = getattr(state, "_metadata", None) or {}
        found = file.get(HISTORY_KEY) or metadata.get(HISTORY_KEY) or []
        spans = tuple(Span(**span) for span in found)
    except (TypeError, AttributeError):
        spans = (Span(None, -1),)
    if not all(_is_sound(span) for span in spans):
        raise Refused(
            "Expected weights with the history of their training, found one that this package did "
            "not write. Take the file from whoever trained it again."
        )
    return spans


def _is_sound(span: Span) -> bool:
    texts = (span.data, span.run, span.ledger)
    return (
        is_whole(span.steps)
        and span.steps >= 0
        and all(text is None or isinstance(text, str) for text in texts)
    )


def _joined(history: History, other: History) -> History:
    """The history of weights that may hold both. Steps that both tell of are counted once."""
    found = {(span.data, span.run): span for span in history}
    for span in other:
        known = found.get((span.data, span.run))
        if known is None or known.steps < span.steps:
            found[span.data, span.run] = span
    return tuple(found.values())


def _follow_state_dicts() -> None:
    """From now on a LightningModule that loads a state dict takes over its history.

    Lightning's `load_from_checkpoint` calls this method too. There is no other way to notice such
    weights: tensors forget where they were copied from.
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


_follow_state_dicts()
