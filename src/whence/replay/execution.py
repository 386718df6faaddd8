"""One run of a loaded program: its operations in order, in a working dtype."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, tensors_in, to_host
from whence.records.program import TENSOR_OPERANDS, map_operands
from whence.replay import device_operators, stepwise
from whence.replay.binding import BoundOperation, BoundProgram, Dependencies
from whence.replay.choices import Choices
from whence.replay.derivatives import gradients_of, longest_sum
from whence.replay.dtype_policy import DtypePolicy
from whence.replay.jumps import CallJumps
from whence.replay.memory_bound import MemoryBudget
from whence.replay.optimizers import optimizer_step

_VIEW_LIKE = {"view", "_unsafe_view", "_reshape_alias", "view_as"}


class Watch(Protocol):
    """Sees what a run does: tensors by slot at its begin, every operator with its arguments, then
    its results.
    """

    def given(self, tensors: dict[str, Any]) -> None: ...
    def runs(
        self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...
    def made(self, results: list[Any]) -> None: ...


@dataclass
class Execution:
    """One run of a program. Results are freed after their last use.

    constants, inputs, params: tensors; an input that is not there is None. budget: None where an
    equal run stayed within it. leaves: by id of an input or param that is differentiated and
    written, the leaf that it is a copy of. length: the most terms that one element was summed from
    so far.
    """

    bound: BoundProgram
    policy: DtypePolicy
    constants: Sequence[Any]
    inputs: list[Any]
    params: dict[str, Any]
    note: Callable[[str], None]
    budget: MemoryBudget | None = None
    stepwise: bool = False
    lenient: bool = False
    watch: Watch | None = None
    choices: Choices | None = None
    jumps: CallJumps | None = None
    leaves: Mapping[int, Any] = field(default_factory=dict)
    results: list[list[Any] | None] = field(default_factory=list)
    held_constants: dict[int, Any] = field(default_factory=dict)
    length: int = 1

    def __post_init__(self) -> None:
        if self.watch is not None:
            slots = zip(self.bound.program.inputs, self.inputs)
            self.watch.given({slot: t for slot, t in slots if t is not None} | self.params)

    def run(
        self,
        part: Dependencies,
        enter: Callable[[int], None] | None,
        trace: Callable[[int, Array], None] | None,
    ) -> None:
        """Run what `part` names; `enter` is called where a child's call lies, `trace` with what
        each operation made.
        """
        for place, step in enumerate(self.bound.steps):
            self._enter_children(place, enter)
            if place not in part.operations:
                self.results.append(None)
                continue
            results = self._guarded(place, step)
            self.results.append(results)
            if self.watch is not None:
                self.watch.made(results)
            if trace is not None and results:
                trace(place, to_host(results[0]).copy())
            for finished in step.last_use:
                self.results[finished] = None
        self._enter_children(len(self.bound.steps), enter)

    def _enter_children(self, place: int, enter: Callable[[int], None] | None) -> None:
        if enter is not None:
            for child in self.bound.boundaries.get(place, ()):
                enter(child)

    def _guarded(self, place: int, step: BoundOperation) -> list[Any]:
        try:
            return self.step(place, step)
        except ReplayRefused:
            raise
        except Exception as error:  # a program may hold anything its operators' schemas allow
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise ReplayRefused(f"{step.operation.name} failed: {text}") from error

    def tensor(self, kind: str, place: Any) -> Any:
        if kind == "in":
            if self.inputs[place] is None:
                raise ReplayRefused(
                    f"the program needs {self.bound.program.inputs[place]}, which is not there"
                )
            return self.inputs[place]
        if kind == "param":
            return self.params[place]
        if kind == "const":
            if place not in self.held_constants:
                self.held_constants[place] = self.policy.constant(self.constants[place].clone())
            return self.held_constants[place]
        results = self.results[place[0]]
        if results is None or place[1] >= len(results):
            raise ReplayRefused(f"malformed program: operation {place[0]} has no output {place[1]}")
        return results[place[1]]

    def _shape(self, number: int) -> tuple[int, ...]:
        tensor = self.inputs[number]
        return tuple(tensor.shape) if tensor is not None else ()

    def result(self, operand: dict[str, Any]) -> Any:
        return self.tensor(*next(iter(operand.items())))

    def argument(self, kind: str, value: Any) -> Any:
        """What an operand stands for."""
        if kind in TENSOR_OPERANDS:
            return self.tensor(kind, value)
        if kind == "dim":
            shape = self._shape(value[0])
            if value[1] >= len(shape):
                raise ReplayRefused(
                    f"{self.bound.program.inputs[value[0]]} has no axis {value[1]}: shape {shape}"
                )
            return shape[value[1]]
        if kind == "mul":
            return math.prod(map_operands(self.argument, value))
        if kind == "dtype":
            return TORCH[value]
        if kind == "device":
            return torch.device("cpu")
        if kind == "layout":
            return torch.strided
        if kind == "memory_format":
            return getattr(torch, value)
        if kind == "float":
            return float(value)
        return complex(*map_operands(self.argument, value))

    def step(self, place: int, step: BoundOperation) -> list[Any]:
        operation = step.operation
        args = tuple(map_operands(self.argument, operation.args))
        kwargs = {k: map_operands(self.argument, v) for k, v in operation.kwargs.items()}
        if step.func is None:
            return self.own(place, step, args, kwargs)
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        args, kwargs = self.dtypes(step, args, kwargs)
        named = dict(zip(step.names, args)) | kwargs
        if self.watch is not None:
            self.watch.runs(place, operation.name, args, kwargs)
        self.length = max(self.length, stepwise.reduction_length(step.base, named))
        if self.budget is not None:
            self.budget.spend(step, args, kwargs)
        if self.stepwise and step.base in stepwise.WRITTEN_OUT:
            return list(tensors_in(stepwise.WRITTEN_OUT[step.base](named)))
        jump = self.jumps.before(step.base, named) if self.jumps is not None else None
        with (
            stepwise.other_kernels(next(tensors_in(args), None))
            if self.stepwise
            else contextlib.nullcontext()
        ):
            out = self.call(place, step, args, kwargs, named)
        if jump is not None and self.jumps is not None:
            sides = self.jumps.made(place, jump, out, self.length)
            out = out.copy_(sides) if step.writes and sides is not out else sides
        if self.choices is not None:
            if step.chooses:
                out = self.choices.made(place, step.base, operation, named, out, self.length)
            else:
                self.choices.passes(place, step.base, operation, args, step.func)
        if operation.guard is not None:
            self.guard(step, operation.guard, out)
        results = list(tensors_in(out))
        if self.policy.wide and not step.writes and step.allocates:
            results = [self.policy.widened(t) for t in _exact_ints(step, args, kwargs, results)]
        return results

    def own(
        self, place: int, step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The results of an operation of whence's own."""
        if step.base == "cast":
            cast = self.policy.cast(args[0], args[2])
            if self.choices is not None:
                self.choices.passes(place, step.base, step.operation, args, lambda index: index)
            if self.watch is not None:
                self.watch.runs(place, "aten._to_copy.default", (args[0],), {"dtype": cast.dtype})
            return [cast]
        if self.watch is not None:
            self.watch.runs(place, step.operation.name, args, kwargs)
        if step.base == "gradients":
            return self.gradients(*args)
        return optimizer_step(*args, **kwargs)

    def gradients(self, results: Any, gradients: Any, wanted: Any) -> list[Any]:
        """The gradients of `wanted`, from those of `results`, by torch's own derivatives of the
        operations before this one.
        """
        wanted = [self.leaves.get(id(tensor), tensor) for tensor in wanted]
        self.length = max(self.length, longest_sum(results, gradients))
        return gradients_of(results, gradients, wanted)

    def dtypes(
        self, step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        policy = self.policy
        operand = next(tensors_in([*args, *kwargs.values()]), None)
        has_dtype = False
        out = []
        for value in args:
            if isinstance(value, torch.dtype):
                has_dtype, value = True, policy.argument(value, step, operand)
            out.append(value)
        changed = {}
        for name, value in kwargs.items():
            if isinstance(value, torch.dtype):
                has_dtype, value = True, policy.argument(value, step, operand)
            changed[name] = value
        if (
            not has_dtype
            and operand is None
            and (dtype := policy.constructed(step, args)) is not None
        ):
            changed["dtype"] = dtype
        return tuple(out), changed

    def guard(self, step: BoundOperation, expected: float | bool, out: Any) -> None:
        if self.lenient and not isinstance(out, (bool, int, float)):
            return
        number = (
            out if isinstance(out, (bool, int, float)) else sum(t.numel() for t in tensors_in(out))
        )
        if number != expected:
            verb = "read" if isinstance(out, (bool, int, float)) else "elements"
            raise ReplayRefused(
                f"guard: {step.operation.name} {verb} {number!r} where the recording had "
                f"{expected!r}"
            )

    def call(
        self,
        place: int,
        step: BoundOperation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        named: dict[str, Any],
    ) -> Any:
        if self.policy.wide and step.base in stepwise.WIDE:
            return stepwise.WIDE[step.base](named)
        if step.base in device_operators.HERE:
            return device_operators.HERE[step.base](named)
        try:
            return step.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            return self.fallback(place, step, args, kwargs, error)

    def fallback(
        self,
        place: int,
        step: BoundOperation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> Any:
        name, text = step.operation.name, str(error).split("\n")[0][:200]
        if step.base in _VIEW_LIKE:
            roots = self.bound.roots[place] - {("op", place)}
            if roots & self.bound.written_roots:
                raise ReplayRefused(
                    f"{name}: another layout than in the recording, and what it views is written "
                    f"({text})"
                ) from error
            with contextlib.suppress(RuntimeError):
                return args[0].reshape(
                    args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
                )
        floats = {t.dtype for t in tensors_in([*args, *kwargs.values()]) if t.is_floating_point()}
        if not self.policy.recorded and (floats or self.policy.wide):
            common = torch.float32 if self.policy.wide else None
            for dtype in floats:
                common = dtype if common is None else torch.promote_types(common, dtype)
            attempts = [common] if len(floats) > 1 and common is not None else []
            # No kernel for this dtype: this one operator in float32.
            for attempt in (*attempts, torch.float32):
                with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                    out = _in_dtype(attempt, step, args, kwargs)
                    self.note(f"{name} in {str(attempt).removeprefix('torch.')}: {text}")
                    return out
        raise ReplayRefused(f"{name} failed: {text}") from error


def _in_dtype(
    dtype: Any, step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The operator with every floating tensor in `dtype`, its results back in the run's own."""
    copies: list[tuple[Any, Any]] = []
    complex_dtype = torch.complex64 if dtype is torch.float32 else torch.complex128

    def to(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not (value.is_floating_point() or value.is_complex()):
                return value
            new = value.to(complex_dtype if value.is_complex() else dtype)
            copies.append((value, new))
            return new
        if isinstance(value, (list, tuple)):
            return [to(item) for item in value]
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    floats = [t.dtype for t in tensors_in([*args, *kwargs.values()]) if t.is_floating_point()]
    out = step.func(*(to(a) for a in args), **{k: to(v) for k, v in kwargs.items()})
    if step.writes:
        back = []
        for old, new in copies:
            if old is not new:
                old.copy_(new)
            back.append((old, new))
        return [next((old for old, new in back if new is t), t) for t in tensors_in(out)]
    common = floats[0] if floats and all(f is floats[0] for f in floats) else None
    return [
        t.to(common) if common is not None and t.is_floating_point() else t for t in tensors_in(out)
    ]


def _exact_ints(
    step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]
) -> list[Any]:
    """Integers that an operator turned into the default floating dtype (`positions / 10`), once
    more in float64.
    """
    tensors = list(tensors_in([*args, *kwargs.values()]))
    if not step.pointwise or any(t.is_floating_point() or t.is_complex() for t in tensors):
        return results
    if not tensors or not any(
        t.is_floating_point() and t.dtype is not torch.float64 for t in results
    ):
        return results
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        widened = [
            a.to(torch.float64) if isinstance(a, torch.Tensor) and a.dtype is not torch.bool else a
            for a in args
        ]
        return list(tensors_in(step.func(*widened, **kwargs)))
    return results
