"""Executes a program with torch, on the CPU, on any inputs and in any working dtype.

What a program may do was settled when it was loaded (`validation`). Its operations are bound to
their schemas (`binding`), run one after another (`execution`), their bytes worked out before they
run (`memory_bound`) and their dtypes rewritten for the working dtype (`dtype_policy`). Nothing that
was given is written: inputs, parameters and constants are private copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host, to_host
from whence.records import Program
from whence.records.slots import is_of_child
from whence.replay.allowed_operators import OperatorName
from whence.replay.binding import BoundProgram, Dependencies, bind_program, dependencies
from whence.replay.choices import Choices
from whence.replay.dtype_policy import DtypePolicy, HeldParameters, floating_dtype, hold, laid_out
from whence.replay.execution import Execution, Watch
from whence.replay.jumps import CallJumps, jumps
from whence.replay.memory_bound import MemoryBudget


@dataclass(frozen=True, slots=True)
class _Children:
    """Calls a child with what it was given, and takes in what it left, between two operations.

    awaited: inputs of the program that children leave. prepare: (input, array) -> its tensor.
    check_shapes: raises ReplayRefused for extents that the program does not serve.
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
        # What depends on tensors that are not there was not computed; the child may know those by
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
    """A program ready to run. notes: what was met while running ("aten.foo.default in float32: no
    float64 kernel"), each once.

    check_note: set by `check` when the recording was reproduced within 1 ulp but not bitwise.
    length: the largest number of terms one element was summed from (matmul, linear, conv, norm,
    sum) in the last run. chooses: does an operator choose among scores? writes: does one write in
    place?
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
        """What these outputs (None: all) depend on. only_needed: without what only decides
        whether the program serves other inputs.
        """
        slots = (
            tuple(slot for slot, _ in self.program.outputs) if outputs is None else tuple(outputs)
        )
        key = (slots, only_needed)
        if key not in self._parts:
            self._parts[key] = dependencies(self._bound, set(slots), only_needed=only_needed)
        return self._parts[key]

    def needs(self, output: str) -> frozenset[str]:
        """Slots of the inputs and params that this output depends on."""
        part = self.part((output,))
        return part.params.union(self.program.inputs[k] for k in part.inputs)

    def determined(self, available: Collection[str]) -> list[str]:
        """The outputs whose inputs and params are all available."""
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
        """The params that are there, converted once for several runs with this `working` and
        `strides`.
        """
        policy = DtypePolicy(working, self.base, self.default)
        return hold(params, self.program.params, working, strides or {}, policy.param)

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
        """Outputs by slot, as the program computes them from these inputs and params (by slot).

        working: "recorded" runs as recorded. "float64", "float32": wide; every floating tensor and
        dtype argument is at least that (float64: exactly that). "bfloat16", "float16": dtypes equal
        to the recording's base dtype become the working one, what the code widens explicitly stays
        wide. convert: inputs of the recording's base dtype too; False keeps them as given, for a
        target that really hands over another dtype. params: arrays, or what `hold` returned for the
        same working dtype. stepwise: fused operators are written out, rounding at every step.
        strides: layout of inputs and params in elements, by slot. outputs: only these are computed,
        from what they need. child: called where the recording called its k-th module, if what that
        left is not among `inputs`; takes what it was given ({"input.0": array}) and returns what it
        left ({"output.0": array}). trace: called with every operation's number and first result.
        watch: sees every operator as it runs. choices: sees what operators choose among scores, and
        tells them what to choose. jumps: the same of operators whose result jumps. lenient:
        on other extents than the recording allows and as far as the inputs go; the result proves
        something only where the other run has the same. only_needed: no guard that another result
        has. Raises ReplayRefused with the reason; nothing given is ever written.
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
        """Inputs that children leave and that are not there."""
        slots = (s for s in self.program.inputs if is_of_child(s) and s not in inputs)
        return frozenset(slots)

    def _check_given(
        self,
        part: Dependencies,
        inputs: Mapping[str, Array],
        params: HeldParameters,
        later: Collection[str],
    ) -> None:
        """Raises ReplayRefused when something is missing, or has another shape than recorded."""
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
        """The tensor of the k-th input."""
        slot, dtypes = self.program.inputs[k], self.program.input_dtypes
        recorded = dtypes[k] if convert and k < len(dtypes) else ""
        tensor = laid_out(policy.input(from_host(array), recorded), layouts.get(slot))
        # A clone, since a view of a view would not hand on that it requires grad.
        grad = slot in self._grad and tensor.is_floating_point()
        return tensor.clone().requires_grad_() if grad else tensor

    def _private(self, slot: str, tensor: Any) -> Any:
        """A held parameter for one run: a clone where the program writes it; others use it too."""
        if slot in self._grad and tensor.is_floating_point():
            return tensor.clone().requires_grad_()
        return tensor.clone() if ("param", slot) in self._bound.written_roots else tensor

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        # Recorded whole under inference_mode, a composite operator chooses its way (linear: one mm
        # or many) as it did there.
        if self.program.inference:
            mode: Any = torch.inference_mode()
        else:
            mode = torch.enable_grad() if self.program.under_grad else torch.no_grad()
        with mode, torch.autocast("cpu", enabled=False):
            yield

    def _check_shapes(self, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Those that are known (not None) must fit the recording."""
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
    """Stands for the check of extents where a program is to run on any."""


def _differentiate(
    bound: BoundProgram, inputs: list[Any], params: dict[str, Any]
) -> dict[int, Any]:
    """Have autograd follow what is done with the inputs and params whose gradients are made; one
    that is missing is told elsewhere. Returns the leaf of each that the program writes, by id of
    its copy in `inputs` or `params`. Raises ReplayRefused for one that has no gradient.
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
    """Shape and dtype of each tensor, None for one that is not there."""
    return tuple((tuple(t.shape), t.dtype) if t is not None else None for t in tensors)
