"""What the probe may find, in words. No message has a value of an example in it."""

from __future__ import annotations

_ESCAPE = (
    "If that cannot be so, and you know why, say it in the plan: assume_independent_examples=..."
)


def coupled(where: str, how: str) -> str:
    return (
        "Expected every example's loss to depend on that example alone, found that others change "
        f"when some are {how}, first in {where}. Clipping would not bound what one example does. "
        "Draw negatives for each example by itself (no in-batch softmax), use LayerNorm for "
        "statistics of a batch, and weights instead of filters."
    )


def counted(where: str) -> str:
    return (
        "Expected every example's loss to depend on that example alone, found that it changes with "
        f"the number of examples, first in {where}. Divide by no batch size: the strategy divides "
        "sums by the expected one."
    )


def crossed(where: str) -> str:
    return (
        "Expected the loss of an example to send gradients to that example's own lookups and "
        f"layers, found that it reaches others', in {where}. Sum over no other examples, and keep "
        "them in one order from the tables to the losses."
    )


def reordered() -> str:
    return (
        "Expected loss i to be that of example i, found that replacing some examples changes the "
        "losses of others and not their own. Keep examples in one order from the batch to the "
        "losses."
    )


def scaled(where: str) -> str:
    return (
        "Expected an example's gradient to be the same whatever other losses are sent back with "
        f"it, found another in {where}. Leave out hooks that scale gradients by their batch."
    )


def remembered() -> str:
    return (
        "Expected a step to depend on its own batch and on released weights alone, found that what "
        "an earlier batch left behind changes the losses of the next one: it would reach the model "
        "without noise. Keep nothing of a batch (no memory bank, running mean or loss history)."
    )


def unseen() -> str:
    return (
        "Expected training_step to train on the batch that was drawn for it, found that other "
        "examples in that batch change nothing. Use the batch that is handed to training_step, and "
        "read no other data in it."
    )


def unrepeatable(what: str) -> str:
    return (
        "Expected the same examples to have the same losses every time, with the same random "
        f"numbers, found {what}: whether examples depend on each other cannot be measured. Draw "
        f"with torch, and read no other data in training_step. {_ESCAPE}"
    )


def failed(error: BaseException) -> str:
    return (
        "Expected training_step to run on some of a batch's examples, and on empty ones, found "
        f"{type(error).__name__}: whether examples depend on each other cannot be measured. "
        f"{_ESCAPE}"
    )
