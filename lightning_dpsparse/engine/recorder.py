"""Records every torch call that reads a dense parameter in a forward pass.

Any module may make the call: `nn.Linear`, a cross network with its own `F.linear`, or two layers
that share a weight. The call runs on a detached parameter, so that the backward pass computes no
weight gradient at all; it only leaves behind the gradient of the call's output.

Read next: `parameter_calls.py`, what is recorded; `ghost.py`, which clips with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_dpsparse.engine.built_gradients import General
from lightning_dpsparse.engine.computed_parameters import Call, copies_of, spread
from lightning_dpsparse.engine.constants import Constants
from lightning_dpsparse.engine.decomposed import DECOMPOSED
from lightning_dpsparse.engine.known_calls import KNOWN_CALLS
from lightning_dpsparse.engine.parameter_calls import Use
from lightning_dpsparse.engine.read_tensors import ReadTensors
from lightning_dpsparse.refused import Refused

T = TypeVar("T", bound=Tensor)

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]


class Recorder:
    """Records how each parameter is used while it is active. Use it around one forward pass.

    While it is active, parameters belong to a class of their own that sends every torch call on
    them here, and calls without a parameter cost nothing. A use that is not seen leaves a gradient
    in `.grad`, which `check_nothing_escaped` finds.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], constants: Constants | None = None
    ) -> None:
        self.parameters = dict(parameters)
        self._constants = constants or Constants(())
        self._watched = _watched(nn.Parameter, self), _watched(Tensor, self)
        self._all_calls: _AllCalls | None = None
        self.clear()

    def __enter__(self) -> Self:
        if all(type(parameter) is nn.Parameter for parameter in self.parameters.values()):
            for parameter in self.parameters.values():
                parameter.__class__ = self._watched[0]
        else:  # a parameter has a class of its own, which it must keep
            self._all_calls = _AllCalls(self)
            self._all_calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._all_calls is not None:
            self._all_calls.__exit__(*error)
            self._all_calls = None
            return
        for parameter in self.parameters.values():
            parameter.__class__ = nn.Parameter
        for value in self.read.values().values():
            value.__class__ = Tensor

    def expect(self, num_examples: int | None, *, is_rehearsal: bool = False) -> None:
        """Tell how many examples the next forward pass has; None if that is not known.

        A rehearsal only shows what is the same for all examples. Nothing of it is used.
        """
        self._constants.expect(num_examples, is_rehearsal=is_rehearsal)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call that may read a parameter, and record it.

        Torch calls that are made in here are not recorded again: they go straight to torch.
        """
        if func == _DATA:  # `detach` does the same, but torch counts writes to its result
            return args[0].detach()
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        known = KNOWN_CALLS.get(func)
        if known is not None and self._has_examples(Call(func, args, kwargs)):
            return known(self, *args, **kwargs)
        return self.other(func, args, kwargs)

    def clear(self) -> None:
        """Forget the calls of a step."""
        self._uses: dict[str, list[tuple[str, Use]]] = {}
        self.read = ReadTensors(self.parameters, self._watch)

    def check_nothing_escaped(self) -> None:
        """Refuse a step in which autograd reached a parameter, because a use of it was not seen."""
        for name, parameter in (self.parameters | self.read.values()).items():
            if parameter.grad is not None:
                raise Refused(
                    f"Expected every use of {name!r} to pass through a torch function, found a "
                    "gradient that did not. Do not cache views of parameters between steps."
                )

    def made(self, leaf: Tensor) -> bool:
        """Whether a leaf of the graph is one that recording put there."""
        return any(leaf is use.reason for uses in self._uses.values() for _, use in uses)

    @property
    def path(self) -> tuple[tuple[str, str, str], ...]:
        """The parameters that were read, and how. An ordinary model has the same in every step."""
        return tuple(
            (name, role, use.what) for name, uses in self._uses.items() for role, use in uses
        )

    def recorded(self) -> dict[str, list[tuple[str, Use]]]:
        """Return every call, by the name of the parameter that it read."""
        return self._uses

    def has_gradients(self) -> bool:
        """Whether a backward pass has left gradients here."""
        return any(use.gradient is not None for uses in self._uses.values() for _, use in uses)

    def is_read(self, value: object) -> bool:
        """Whether this is a parameter, or made of parameters."""
        return value in self.read

    def reads_parameter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter is among the arguments, or in a list among them."""
        given = [*args, *kwargs.values()]
        lists = [value for value in given if type(value) in (list, tuple)]
        return any(value in self.read for values in (given, *lists) for value in values)

    def record(self, parameter: Tensor, role: str, use: Use) -> Tensor:
        """Note the use, and return what the call may read instead of the parameter."""
        if parameter not in self.read:
            return parameter
        self._uses.setdefault(self.read.name(parameter), []).append((role, use))
        return parameter.detach()

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run any other call, and record it for every parameter that it reads."""
        call = Call(func, args, kwargs)
        tensors = {id(v): v for v in call.tensors()}
        mine = [v for v in tensors.values() if v in self.read]
        others = [v for v in tensors.values() if v not in self.read]
        kind = call.what, *map(self.read.name, mine)
        versions = [v._version for v in tensors.values()]
        out = func(*args, **kwargs)  # on the parameters themselves: it may ask for their state
        if [v._version for v in tensors.values()] != versions:
            raise Refused(
                f"Expected operations that leave their inputs as they are, found {call.what!r} "
                f"with {list(kind[1:])}: its gradient needs the input that it overwrites. Write "
                "the result to a tensor of its own."
            )
        made = out if isinstance(out, (list, tuple)) else [out]
        if not any(isinstance(v, Tensor) and v.is_floating_point() for v in made):
            return out
        if func is Tensor.detach or any(out is v for v in others):  # nothing to do in `x.to(w)`
            return out
        out = call.run({id(parameter): parameter.detach() for parameter in mine})
        copies = copies_of(call)
        if copies is not None and self._constants.spreads(copies, kind):
            return self._general(call.what, mine[0], spread(call), out, [out.new_empty(copies, 0)])
        batched = [v for v in others if v.dim() and not self._constants.holds(v, kind)]
        if not batched and not any(v.requires_grad for v in others):
            return self.read.add(call, out)
        if not batched or not isinstance(out, Tensor) or not out.dim():
            raise Refused(
                "Expected operations on parameters that have examples in the first dimension, "
                f"found {call.what!r} on {list(kind[1:])}, which joins all of them. Compute a "
                "value for each example, or freeze the parameter."
            )
        for parameter in mine:

            def run(value: Tensor, inputs: list[Tensor], parameter: Tensor = parameter) -> Tensor:
                given = {id(v): x for v, x in zip(batched, inputs)} | {id(parameter): value}
                result: Tensor = call.run(given, value.dtype)
                return result

            out = self._general(call.what, parameter, run, out, batched)
        return out

    def _has_examples(self, call: Call) -> bool:
        """Whether the first argument of a call holds examples, as far as that can be told."""
        first = call.args[0] if call.args else None
        if not isinstance(first, Tensor):  # it was named, and must hold examples
            return True
        kind = call.what, *self.read.names(call)
        return first not in self.read and not (first.dim() and self._constants.holds(first, kind))

    def _general(
        self,
        what: str,
        parameter: Tensor,
        run: Callable[[Tensor, list[Tensor]], Tensor],
        out: Tensor,
        batched: Sequence[Tensor],
    ) -> Tensor:
        inputs = tuple(value.detach() for value in batched)
        use = General(what, run=run, parameter=parameter.detach(), inputs=inputs)
        self.record(parameter, "general", use)
        return use.watch(out)

    def _watch(self, value: Tensor) -> None:
        if self._all_calls is None:
            value.__class__ = self._watched[1]


def _watched(kind: type[T], capture: Recorder) -> type[T]:
    """Make a class of tensors that sends every torch call on them through the capture."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)  # a copy, by deepcopy for example, is not watched

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func in DECOMPOSED and torch.is_grad_enabled():
                return DECOMPOSED[func](*args, **(kwargs or {}))  # its parts come here again
            with torch._C.DisableTorchFunctionSubclass():
                return capture.call(func, args, kwargs or {})

    return Watched


class _AllCalls(TorchFunctionMode):
    """Looks at every torch call, for parameters whose class must stay as it is."""

    def __init__(self, capture: Recorder) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._capture.reads_parameter(args, kwargs):
            return func(*args, **kwargs)
        if func in DECOMPOSED and torch.is_grad_enabled():
            with self:  # its parts are looked at, too
                return DECOMPOSED[func](*args, **kwargs)
        return self._capture.call(func, args, kwargs)
