"""Executes a program with torch, on the CPU, on any inputs and in any working dtype.

`validation` has checked the program when it was loaded. Its operations are bound to their schemas
(`binding`), their dtypes are rewritten for the working dtype (`dtype_policy`), an upper bound of
their bytes is computed before they run (`MemoryBudget`), and they run one after another
(`Execution`). Nothing that the caller passes is written: inputs, parameters and constants are
private copies.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host, tensors_in, to_host
from whence.records import Program
from whence.records.program import TENSOR_OPERANDS, map_operands
from whence.records.slots import is_of_child
from whence.replay import allowed_operators, stepwise
from whence.replay.allowed_operators import OperatorName
from whence.replay.binding import (
    BoundOperation,
    BoundProgram,
    Dependencies,
    bind_program,
    dependencies,
)
from whence.replay.choices import Choices
from whence.replay.derivatives import gradients_of, longest_sum
from whence.replay.dtype_policy import DtypePolicy, HeldParameters, floating_dtype, hold, laid_out
from whence.replay.jumps import CallJumps, jumps
from whence.replay.optimizers import optimizer_step


@dataclass(frozen=True, slots=True)
class _Children:
    """Runs a child call between two operations: passes its inputs and takes over its outputs.

    awaited: inputs of the program that children return. prepare: (number of an input, array) -> its
    tensor. check_shapes: raises ReplayRefused for extents that the program does not serve.
    """

    child: Callable[[int, dict[str, Array]], Mapping[str, Array]]
    awaited: Collection[str]
    part: Dependencies
    execution: Execution
    prepare: Callable[[int, Array], Any]
    check_shapes: Callable[[Sequence[tuple[int, ...] | None]], None]

    def __call__(self, k: int) -> None:
        prefix, execution = f"{k}:", self.execution
        if not any(slot.startswith(prefix) for slot in self.awaited):
            return
        program = execution.bound.program
        # Operands that depend on missing tensors were not computed; the child may have those by
        # itself.
        inputs = {
            slot.removeprefix(prefix): to_host(execution.result(operand))
            for slot, operand in program.outputs
            if slot in self.part.outputs and slot.startswith(prefix)
        }
        results = {**inputs, **self.child(k, inputs)}
        for place, slot in enumerate(program.inputs):
            if slot.startswith(prefix) and slot.removeprefix(prefix) in results:
                execution.inputs[place] = self.prepare(place, results[slot.removeprefix(prefix)])
        self.check_shapes([None if t is None else tuple(t.shape) for t in execution.inputs])


class Loaded:
    """A program ready to run.

    notes: events of its runs ("aten.foo.default in float32: no float64 kernel"), each once.
    check_note: set by `check` when the recording was reproduced within 1 ulp but not bitwise.
    length: the largest number of terms one element was summed from (matmul, linear, conv, norm,
    sum) in the last run. chooses: whether an operator chooses among scores. writes: whether one
    writes in place.
    """

    def __init__(
        self,
        program: Program,
        constants: Sequence[Array],
        names: Sequence[OperatorName | None],
        *,
        max_bytes: int,
    ) -> None:
        self.program, self.max_bytes = program, max_bytes
        self.notes: list[str] = []
        self.check_note = ""
        self.length = 1
        self._constants = [from_host(c) for c in constants]
        self.base = floating_dtype(program.base)
        self.default = floating_dtype(program.default_dtype) or torch.float32
        if any(name and name not in TORCH for name in program.input_dtypes):
            raise ReplayRefused("malformed program: an input dtype that there is not")
        self._bound = bind_program(program, names)
        self.writes = self._bound.writes
        self._grad = frozenset(program.grad if program.inference else ())
        self._within_budget: dict[Any, int] = {}
        self._parts: dict[tuple[tuple[str, ...], bool], Dependencies] = {}
        self.chooses = any(step.chooses for step in self._bound.steps)
        self.jumps = any(jumps(s.base, s.operation.kwargs) for s in self._bound.steps)

    # ---- running

    def part(
        self, outputs: Sequence[str] | None = None, *, only_needed: bool = False
    ) -> Dependencies:
        """Returns what these outputs (None: all) depend on. only_needed: leave out guards and
        writes that do not reach these outputs.
        """
        slots = (
            tuple(slot for slot, _ in self.program.outputs) if outputs is None else tuple(outputs)
        )
        key = (slots, only_needed)
        if key not in self._parts:
            self._parts[key] = dependencies(self._bound, set(slots), only_needed=only_needed)
        return self._parts[key]

    def needs(self, output: str) -> frozenset[str]:
        """Returns the slots of the inputs and params that this output depends on."""
        part = self.part((output,))
        return part.params.union(self.program.inputs[k] for k in part.inputs)

    def determined(self, available: Collection[str]) -> list[str]:
        """Returns the outputs whose inputs and params are all available."""
        return [
            slot
            for slot, _ in self.program.outputs
            if all(s in available for s in self.needs(slot))
        ]

    def hold(
        self,
        params: Mapping[str, Array] | HeldParameters,
        *,
        working: str = "recorded",
        strides: Mapping[str, tuple[int, ...]] | None = None,
    ) -> HeldParameters:
        """Returns the available params, converted once for several runs with this `working` and
        `strides`.
        """
        policy = DtypePolicy(working, self.base, self.default)
        return hold(params, self.program.params, working, strides or {}, policy.widened)

    def run(
        self,
        inputs: Mapping[str, Array],
        params: Mapping[str, Array] | HeldParameters,
        *,
        working: str = "recorded",
        stepwise: bool = False,
        strides: Mapping[str, tuple[int, ...]] | None = None,
        convert: bool = True,
        outputs: Sequence[str] | None = None,
        child: Callable[[int, dict[str, Array]], Mapping[str, Array]] | None = None,
        trace: Callable[[int, Array], None] | None = None,
        watch: Watch | None = None,
        choices: Choices | None = None,
        jumps: CallJumps | None = None,
        lenient: bool = False,
        only_needed: bool = False,
    ) -> dict[str, Array]:
        """Returns outputs by slot, computed by the program from these inputs and params (by slot).

        working: "recorded" runs as recorded. "float64", "float32": wide; every floating tensor and
        dtype argument is at least that (float64: exactly that). "bfloat16", "float16": dtypes equal
        to the recording's base dtype become the working one; tensors that the code widens
        explicitly stay wide. convert: also convert inputs of the recording's base dtype; False
        keeps them as given, for a target that really passes another dtype. params: arrays, or the
        result of `hold` for the same working dtype. stepwise: fused operators are written out and
        round at every step. strides: layout of inputs and params in elements, by slot. outputs:
        only these are computed, from the operations they need. child: called where the recording
        called its k-th module, if that module's outputs are not among `inputs`; receives the
        module's inputs ({"input.0": array}) and returns its outputs ({"output.0": array}). trace:
        called with the number and first result of every operation. watch: observes every operator
        as it runs. choices: records, and may override, choices among scores. jumps: likewise for
        operators whose result jumps. lenient: also run on extents that the recording does not
        allow, and only as far as the inputs permit; such a result is evidence only where the other
        run has the same. only_needed: skip guards of other outputs. Raises ReplayRefused with the
        reason; never writes to an argument.
        """
        params = self.hold(params, working=working, strides=strides)
        part = self.part(outputs, only_needed=only_needed)
        awaited = self._from_children(inputs) if child is not None else frozenset()
        if not lenient:
            self._check_given(part, inputs, params, awaited)
        policy = DtypePolicy(working, self.base, self.default)
        prepare = functools.partial(
            self._input, policy=policy, layouts=strides or {}, convert=convert
        )
        slots = enumerate(self.program.inputs)
        tensors = [prepare(k, inputs[slot]) if slot in inputs else None for k, slot in slots]
        private = {slot: self._private(slot, t) for slot, t in params.tensors.items()}
        leaves = _differentiate(self._bound, tensors, private)
        key = (_forms(tensors), _forms(private.values()), tuple(private), stepwise, part.outputs)
        checked_length = self._within_budget.get(key) if child is None else None
        execution = Execution(
            self._bound,
            policy,
            self._constants,
            tensors,
            private,
            self.note,
            MemoryBudget(self.max_bytes) if checked_length is None else None,
            stepwise,
            lenient,
            watch,
            choices,
            jumps,
            leaves,
        )
        enter = None
        if child is not None:
            check = self._check_shapes if not lenient else _serve_all
            enter = _Children(child, awaited, part, execution, prepare, check)
        with self._context():
            execution.run(part, enter, trace)
            budget = execution.budget
            if budget is not None and not budget.data_dependent and child is None:
                self._within_budget[key] = execution.length
            self.length = max(execution.length, checked_length or 1)
            return {
                slot: to_host(execution.result(operand))
                for slot, operand in self.program.outputs
                if slot in part.outputs
            }

    def _from_children(self, inputs: Collection[str]) -> frozenset[str]:
        """Returns the inputs that children return and that are missing from `inputs`."""
        slots = (s for s in self.program.inputs if is_of_child(s) and s not in inputs)
        return frozenset(slots)

    def _check_given(
        self,
        part: Dependencies,
        inputs: Mapping[str, Array],
        params: HeldParameters,
        later: Collection[str],
    ) -> None:
        """Raises ReplayRefused when a tensor is missing or its shape differs from the
        recorded one.
        """
        slots = self.program.inputs
        needed = [s for k, s in enumerate(slots) if k in part.inputs and s not in later]
        missing = [s for s in needed if s not in inputs]
        missing += [s for s in part.params if s not in params.tensors]
        if missing:
            raise ReplayRefused(f"the program needs {', '.join(missing[:5])}, which is not there")
        self._check_shapes([tuple(inputs[s].shape) if s in inputs else None for s in slots])

    def _input(
        self,
        k: int,
        array: Array,
        policy: DtypePolicy,
        layouts: Mapping[str, tuple[int, ...]],
        convert: bool,
    ) -> Any:
        """Returns the tensor of the k-th input, converted and laid out for this run."""
        slot, dtypes = self.program.inputs[k], self.program.input_dtypes
        recorded = dtypes[k] if convert and k < len(dtypes) else ""
        tensor = laid_out(policy.input(from_host(array), recorded), layouts.get(slot))
        # A clone, since a view of a view would not inherit requires_grad.
        grad = slot in self._grad and tensor.is_floating_point()
        return tensor.clone().requires_grad_() if grad else tensor

    def _private(self, slot: str, tensor: Any) -> Any:
        """Returns a held parameter for one run: a clone where the program writes it, since other
        runs share it.
        """
        if slot in self._grad and tensor.is_floating_point():
            return tensor.clone().requires_grad_()
        return tensor.clone() if ("param", slot) in self._bound.written_roots else tensor

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        # Recorded whole under inference_mode, a composite operator takes its path (linear: one mm
        # or many) as in the recording.
        if self.program.inference:
            mode: Any = torch.inference_mode()
        else:
            mode = torch.enable_grad() if self.program.under_grad else torch.no_grad()
        with mode, torch.autocast("cpu", enabled=False):
            yield

    def _check_shapes(self, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Raises ReplayRefused when a known shape (not None) does not fit the recording."""
        for k, axis, extent in self.program.fixed:
            shape = shapes[k] if k < len(shapes) else None
            if shape is not None and (axis >= len(shape) or shape[axis] != extent):
                raise ReplayRefused(
                    f"recorded for {self.program.inputs[k]} with extent {extent} on axis {axis}, "
                    f"given shape {shape}"
                )
        for k, axis, m, other_axis in self.program.equal:
            shape, other_shape = (shapes[k], shapes[m]) if max(k, m) < len(shapes) else (None, None)
            if (
                shape is not None
                and other_shape is not None
                and (
                    axis >= len(shape)
                    or other_axis >= len(other_shape)
                    or shape[axis] != other_shape[other_axis]
                )
            ):
                names = self.program.inputs
                raise ReplayRefused(
                    f"recorded with {names[k]} axis {axis} as long as {names[m]} axis "
                    f"{other_axis}; given {shape} and {other_shape}"
                )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _serve_all(_: Sequence[tuple[int, ...] | None]) -> None:
    """Accepts any extents: replaces the check where a program runs leniently."""


def _differentiate(
    bound: BoundProgram, inputs: list[Any], params: dict[str, Any]
) -> dict[int, Any]:
    """Makes autograd record the inputs and params whose gradients the program computes; missing
    ones are skipped here and reported elsewhere.

    Returns id of the copy in `inputs` or `params` -> its leaf, for each of them that the program
    writes in place. Raises ReplayRefused for a tensor whose dtype has no gradient.
    """
    leaves: dict[int, Any] = {}
    for kind, place in bound.differentiated:
        tensors: Any = inputs if kind == "in" else params
        tensor = inputs[place] if kind == "in" else params.get(place)
        if tensor is None:
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ReplayRefused(f"{kind} {place} has no gradient: it is {tensor.dtype}")
        leaf = tensors[place] = tensor.detach().requires_grad_()
        if (kind, place) in bound.written_roots:  # torch writes into no leaf
            with torch.enable_grad():
                tensors[place] = leaf.clone()
            leaves[id(tensors[place])] = leaf
    return leaves


def _forms(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Returns shape and dtype of each tensor, None for a missing one."""
    return tuple((tuple(t.shape), t.dtype) if t is not None else None for t in tensors)


# One run of a loaded program: its operations in order, in a working dtype.

_VIEW_LIKE = {"view", "_unsafe_view", "_reshape_alias", "view_as"}


class Watch(Protocol):
    """Observes a run: tensors by slot at its start, every operator with its arguments, then its
    results.
    """

    def given(self, tensors: dict[str, Any]) -> None: ...
    def runs(
        self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...
    def made(self, results: list[Any]) -> None: ...


@dataclass
class Execution:
    """One run of a program. Results are freed after their last use.

    constants, inputs, params: tensors; a missing input is None. budget: None where an earlier run
    with the same shapes stayed within it. leaves: id of a differentiated input or param that the
    program writes -> the leaf it is a copy of. length: the largest number of terms that one element
    was summed from so far.
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
        """Runs the operations in `part`. enter: called at the place of each child call. trace:
        called with the place and the first result of each operation.
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
        """Returns the value that an operand refers to."""
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
        """Runs one of whence's own operations (cast, gradients, optimizer step) and returns its
        results.
        """
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
        """Returns the gradients of `wanted`, given those of `results`, by torch's own derivatives
        of the earlier operations.
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
        if step.base in HERE:
            return HERE[step.base](named)
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
    """Runs the operator with every floating tensor converted to `dtype`, and converts its results
    back to the dtype of its operands.
    """
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
    """Repeats in float64 an elementwise operator that turned integers into the default floating
    dtype (`positions / 10`); returns `results` for every other operator.
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


# Operators whose kernel exists on another device only, replaced by operators that run here.
#
# A program that was recorded on a GPU calls what torch chose there. Replays run on the processor,
# so each is computed by torch's own operator of the same function, with its rounding: in the
# working dtype, and with a derivative. Each function takes the operator's arguments by schema
# name and returns its outputs in schema order, as far as a program reads them.

Named = dict[str, Any]


def attention(named: Named) -> list[Any]:
    """softmax(q kᵀ scale + mask) v by the fused kernel of the processor. query (batch, heads,
    query, dim); key, value may have fewer heads. The log of the summed exponentials is left out.
    """
    query, key, value = (named[name] for name in ("query", "key", "value"))
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return [
        torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=named.get("attn_mask", named.get("attn_bias")),
            is_causal=bool(named.get("is_causal")),
            scale=named.get("scale"),
        )
    ]


def batch_norm(named: Named) -> list[Any]:
    """Batch norm of cuDNN and MIOpen: (x - mean) / sqrt(var + eps) * weight + bias, with the
    statistics of the batch in training. input (batch, channel, *); writes running statistics.
    """
    return list(
        torch.native_batch_norm(
            named["input"],
            named["weight"],
            named.get("bias"),
            named.get("running_mean"),
            named.get("running_var"),
            named["training"],
            named["exponential_average_factor"],
            named["epsilon"],
        )
    )


def lstm_cell(named: Named) -> list[Any]:
    """One step of an LSTM from the products of its input and state: h, c. input_gates, hidden_gates
    (batch, 4 hidden), in the order input, forget, cell, output.
    """
    gates = _with_bias(named, "input") + _with_bias(named, "hidden")
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * named["cx"] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def gru_cell(named: Named) -> list[Any]:
    """One step of a GRU from the products of its input and state: h. input_gates, hidden_gates
    (batch, 3 hidden), in the order reset, update, new.
    """
    of_input, of_hidden = _with_bias(named, "input"), _with_bias(named, "hidden")
    (r, z, n), (r_hidden, z_hidden, n_hidden) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    update = (z + z_hidden).sigmoid()
    new = (n + (r + r_hidden).sigmoid() * n_hidden).tanh()
    return [new + update * (named["hx"] - new)]


def histogram(named: Named) -> list[Any]:
    """Counts the elements of a tensor of any dtype, in its dtype; the CPU kernel takes
    floats only.
    """
    x = named["self"]
    values = x if x.is_floating_point() else x.double()
    counts = torch.histc(values, named.get("bins", 100), named.get("min", 0), named.get("max", 0))
    return [counts.to(x.dtype)]


def _with_bias(named: Named, of: str) -> Any:
    gates, bias = named[f"{of}_gates"], named.get(f"{of}_bias")
    return gates if bias is None else gates + bias


HERE: dict[str, Callable[[Named], list[Any]]] = {
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "cudnn_batch_norm": batch_norm,
    "miopen_batch_norm": batch_norm,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "histc": histogram,
}
"""Operator name without its namespace -> the function that computes it here."""


# Upper bounds of the bytes that an operator allocates, computed before it runs.

# Views by their schema that copy when they must.
_MAY_COPY = {
    "reshape", "reshape_as", "ravel", "flatten", "contiguous", "to", "type_as", "resolve_conj",
    "resolve_neg", "view_as", "unflatten",
}  # fmt: skip
# The results of these operators are no larger than their largest operand.
_NEVER_GROW = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod",
    "var", "std", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "sort",
    "topk", "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm",
    "native_batch_norm", "_native_batch_norm_legit_no_training", "clone", "contiguous",
    "_to_copy", "to", "relu", "flip", "roll", "tril", "triu", "_unsafe_view",
}  # fmt: skip
_ATTENTIONS = {
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
}
_FILLED = frozenset({"zeros", "ones", "full", "empty", "scalar_tensor"})


class MemoryBudget:
    """Refuses operators that would allocate too much.

    max_result: bytes that one result may have; all results together may have 16 times as many.
    data_dependent: whether the bytes of some operator depend on the elements of its operands.
    """

    def __init__(self, max_result: int) -> None:
        self.max_result, self.total, self.data_dependent = max_result, 0, False

    def spend(self, step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts the bytes of an operator before it runs. Raises ReplayRefused when they exceed the
        budget.
        """
        largest, by_data = _largest_result(step, args, kwargs)
        self.data_dependent |= by_data
        self.total += largest
        if largest > self.max_result or self.total > 16 * self.max_result:
            raise ReplayRefused(
                f"operator {step.operation.name} would make {largest} bytes; at most "
                f"{self.max_result} are allowed"
            )


def _largest_result(
    step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, bool]:
    """Returns (upper bound of the bytes that the operator allocates, whether the bound depends on
    the elements of its operands).
    """
    if not step.allocates and step.base not in _MAY_COPY:
        return 0, False
    largest = _from_shapes(step, args, kwargs)
    if largest is None:
        largest = _measured(step, args, kwargs)
    if largest is not None:
        return largest, False
    if step.base in allowed_operators.DATA_DEPENDENT:
        return _bound_by_data(step.base, dict(zip(step.names, args)) | kwargs), True
    # No meta kernel, or operands of mixed dtypes: the result grows at most by its integers.
    read_bytes = sum(t.untyped_storage().nbytes() for t in tensors_in([*args, *kwargs.values()]))
    return 8 * read_bytes * max([1, *(_product(v) for v in (*args, *kwargs.values()))]), False


def _from_shapes(step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Returns an upper bound in bytes for the common operators; None for the others.

    Loads nothing, whereas meta kernels load a compiler.
    """
    tensors = list(tensors_in([*args, *kwargs.values()]))
    widest = 16  # bytes of a complex128
    if step.base == "arange":
        numbers = [a for a in args if isinstance(a, (int, float))]
        start, end, by = {1: (0, *numbers, 1), 2: (*numbers, 1)}.get(
            len(numbers), tuple(numbers[:3]) or (0, 0, 1)
        )
        return widest * max(0, math.ceil((end - start) / by)) if by else None
    if not tensors:
        sizes = [a for a in args if isinstance(a, list)] or [[]] * (step.base == "scalar_tensor")
        return widest * math.prod(sizes[0]) if step.base in _FILLED and len(sizes) == 1 else None
    try:
        if step.pointwise:
            return widest * math.prod(np.broadcast_shapes(*(tuple(t.shape) for t in tensors)))
        if step.base in _NEVER_GROW:
            return int(widest * max(t.numel() for t in tensors))
        if step.base in ("cat", "stack"):
            return int(widest * sum(t.numel() for t in tensors))
        if step.base == "embedding":
            return int(widest * tensors[1].numel() * tensors[0].shape[-1])
        if step.base == "linear":
            return int(
                widest * (tensors[0].numel() // max(1, tensors[0].shape[-1])) * tensors[1].shape[0]
            )
        if step.base in _ATTENTIONS:
            rows, keys, width = (
                tensors[0].numel() // max(1, tensors[0].shape[-1]),
                tensors[1].shape[-2],
                tensors[2].shape[-1],
            )
            # written out, it allocates all scores and masks them
            return int(widest * rows * (width + 2 * keys + 2))
        if step.base in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = tensors[-2:]
            return int(widest * math.prod(a.shape[:-1]) * b.shape[-1])
    except (ValueError, IndexError):  # shapes that do not fit: the operator itself will say so
        return None
    return None


def _measured(step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Returns the bytes of the largest tensor that the operator allocates, including intermediate
    ones, by running it on meta tensors; None when that fails.
    """

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        if isinstance(value, (list, tuple)):
            return [meta(item) for item in value]
        return torch.device("meta") if isinstance(value, torch.device) else value

    shadow = {k: meta(v) for k, v in kwargs.items()}
    if next(tensors_in([*args, *kwargs.values()]), None) is None:
        shadow["device"] = torch.device("meta")
    try:
        with _LargestStorage() as storages:
            step.func(*(meta(a) for a in args), **shadow)
        return int(storages.largest)
    except Exception:  # noqa: BLE001 - meta kernels are Python and raise anything; whoever asked has another bound
        return None


def _bound_by_data(base: str, named: dict[str, Any]) -> int:
    """Returns an upper bound of the bytes of an operator whose result size depends on the elements
    of its operands, computed from these elements.
    """
    tensors = list(tensors_in(list(named.values())))
    first = tensors[0]
    if base in ("one_hot", "bincount"):
        classes = max(
            int(first.max()) + 1 if first.numel() else 0,
            named.get("num_classes", -1),
            named.get("minlength", 0),
        )
        return 8 * int(classes) * (int(first.numel()) if base == "one_hot" else 1)
    if base == "repeat_interleave":
        counts = named["repeats"]
        return 8 * int(counts.sum()) * max(1, int(first.numel()) // max(1, int(counts.numel())))
    return sum(8 * t.numel() * max(1, t.dim()) for t in tensors)


def _product(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return math.prod(_product(item) for item in value)
    return max(1, value) if type(value) is int else 1


class _LargestStorage(TorchDispatchMode):  # type: ignore[misc]
    """Measures the largest storage that an operator allocates, including the intermediate ones of a
    composite operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            # The storage, not the extents: an expanded view allocates nothing.
            self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out
