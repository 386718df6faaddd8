"""Traces a program on given inputs, operator by operator, with real tensors; `isolate` and scripts
work on the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from whence.records.program import GRADIENTS, OPTIMIZER_STEP
from whence.records.slots import is_param, param_name
from whence.replay.derivatives import gradients_of
from whence.replay.optimizers import optimizer_step

_OWN: dict[str, Callable[..., list[Any]]] = {
    GRADIENTS: gradients_of,
    OPTIMIZER_STEP: optimizer_step,
}


class Value(NamedTuple):
    """A tensor of a trace, identified by number."""

    number: int


@dataclass
class Step:
    """One operator as it ran.

    args, kwargs: with `Value` for tensors. results: numbers of the tensors it computed.
    read_tensors: its operands, as they were when it ran. place: its operation in the program.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int
    read_tensors: dict[int, Any] = field(default_factory=dict)
    results: tuple[int, ...] = ()

    @property
    def reads(self) -> list[int]:
        """The numbers of the tensors that it reads, each once, in order."""
        return list(dict.fromkeys(numbers([*self.args, *self.kwargs.values()])))

    @property
    def is_own(self) -> bool:
        """Whether it is one of whence's own operations, not an operator of torch."""
        return self.name in _OWN

    @property
    def title(self) -> str:
        """The name of the torch function that runs it."""
        if self.name == OPTIMIZER_STEP:
            return f"torch.optim.{self.args[0]}"
        return "torch.autograd.grad" if self.name == GRADIENTS else self.name


def numbers(value: Any) -> Iterator[int]:
    """Returns the numbers of the `Value`s in arguments."""
    if isinstance(value, Value):
        yield value.number
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item)


class Trace:
    """A `Watch` that keeps every operator and tensor.

    tensors: by number, in their final state. slots: slot of each input and parameter -> number.
    copies: keep a copy of every operand as it was when it was read, for a program that writes in
    place.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.steps: list[Step] = []
        self.slots: dict[str, int] = {}
        self.tensors: list[Any] = []
        self.by_place: dict[int, list[int]] = {}
        self._copies = copies
        self._number_of: dict[int, int] = {}
        self._pending: Step | None = None

    def given(self, tensors: dict[str, Any]) -> None:
        for slot, tensor in tensors.items():
            self.slots[slot] = self._number(tensor)

    def runs(self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = Step(
            name,
            tuple(self._encode(a) for a in args),
            {k: self._encode(v) for k, v in kwargs.items()},
            place,
        )
        step.read_tensors = {
            n: self.tensors[n].clone() if self._copies else self.tensors[n] for n in step.reads
        }
        self._pending = step

    def made(self, results: Sequence[Any]) -> None:
        step, self._pending = self._pending, None
        if step is None:
            return
        count = len(self.tensors)
        step.results = tuple(self._number(t) for t in results)
        self.by_place[step.place] = list(step.results)
        # a cast that had nothing to do
        if len(self.tensors) > count or not step.name.startswith("aten._to_copy"):
            self.steps.append(step)

    def _number(self, tensor: Any) -> int:
        number = self._number_of.get(id(tensor))
        if number is None:
            number = self._number_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)  # kept, so that no other tensor gets its id
        return number

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Value(self._number(value))
        if isinstance(value, (list, tuple)):
            return [self._encode(item) for item in value]
        return value


@dataclass
class Piece:
    """Consecutive operators of a trace, to run alone.

    inputs: number -> tensor that they read from outside. results: numbers of the tensors that are
    judged. slots: number -> name, for inputs that are parameters of a module.
    """

    steps: list[Step]
    inputs: dict[int, Any]
    results: tuple[int, ...]
    slots: dict[int, str] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results on these inputs, in the order of `inputs` and `results`; the given
        tensors may be overwritten.
        """
        env = dict(zip(self.inputs, inputs))
        leaves = {n: env[n].detach().requires_grad_() for n in self.differentiated}
        with torch.enable_grad() if leaves else contextlib.nullcontext():
            # torch refuses an in-place write to a leaf
            env |= {n: t.clone() for n, t in leaves.items()} if self.writes else leaves
            for step in self.steps:
                args = _decoded(step.args, env)
                if step.name == GRADIENTS:
                    args[2] = [leaves[value.number] for value in step.args[2]]
                kwargs = {k: _decoded(v, env) for k, v in step.kwargs.items()}
                function = _OWN.get(step.name) or overload(step.name)
                env.update(zip(step.results, flat_results(function(*args, **kwargs))))
        return [env[n] for n in self.results]

    @property
    def differentiated(self) -> list[int]:
        """The numbers of the inputs whose gradients it computes."""
        wanted = [step.args[2] for step in self.steps if step.name == GRADIENTS]
        return list(dict.fromkeys(numbers(wanted)))

    @property
    def writes(self) -> bool:
        """Whether any of its operators writes in place."""
        return any(not s.is_own and overload(s.name)._schema.is_mutable for s in self.steps)


def _decoded(value: Any, env: Mapping[int, Any]) -> Any:
    """Returns an argument, or several, with each `Value` replaced by its tensor."""
    if isinstance(value, Value):
        return env[value.number]
    return [_decoded(v, env) for v in value] if isinstance(value, (list, tuple)) else value


def overload(name: str) -> Any:
    """Returns the torch overload of a step's operator; its name was checked when the program was
    loaded.
    """
    namespace, base, over = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), over)


def flat_results(out: Any) -> list[Any]:
    """Returns the tensors of a result in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for item in out for t in flat_results(item)] if isinstance(out, (list, tuple)) else []


def piece(trace: Trace, begin: int, end: int, results: Sequence[int] = ()) -> Piece:
    """Returns operators [begin, end) as a piece. results: numbers of the tensors that are judged;
    () for the results of the last operator and all that later operators read.
    """
    steps = trace.steps[begin:end]
    produced: set[int] = set()
    inputs: dict[int, Any] = {}
    for step in steps:
        for n in step.reads:
            if n not in produced and n not in inputs:
                inputs[n] = step.read_tensors[n]
        produced.update(step.results)
    if not results:
        later = {n for step in trace.steps[end:] for n in step.reads}
        results = tuple(
            n for step in steps for n in step.results if n in later or step is steps[-1]
        )
    slots = {
        n: param_name(slot.partition("@")[0]) for slot, n in trace.slots.items() if is_param(slot)
    }
    return Piece(steps, inputs, tuple(dict.fromkeys(results)), slots)
