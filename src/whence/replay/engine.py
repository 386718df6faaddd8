"""Executes a program with torch, on the CPU, on any inputs and in any working dtype.

What a program may do was settled when it was loaded; here every operator is bound to its overload
and schema, the bytes it will make are worked out on meta tensors before it runs, and dtypes are
rewritten for the working dtype. Nothing that was given is written: inputs, parameters and constants
are private copies.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host, tensors_in, to_host
from whence.frameworks.torch_schema import draws, schema_of, written
from whence.records import Operation, Program
from whence.records.program import TENSOR_OPERANDS, Operand, map_operands, operands
from whence.replay import allowed_operators, stepwise
from whence.replay.choices import Choices, chooses

WORKING = ("recorded", "float64", "float32", "bfloat16", "float16")

_HALF = (torch.bfloat16, torch.float16)
_VIEW_LIKE = {"view", "_unsafe_view", "_reshape_alias", "view_as"}
_RANGES = {"arange", "range", "linspace", "logspace"}
_CASTS = {"_to_copy", "to", "type_as", "convert_element_type"}
_DEFAULT_DTYPE = {
    "zeros",
    "ones",
    "empty",
    "eye",
    "linspace",
    "logspace",
    "hann_window",
    "hamming_window",
    "fft_fftfreq",
    "fft_rfftfreq",
}
_EITHER_DTYPE = {"full", "arange", "scalar_tensor", "range"}


@dataclass
class _Step:
    """One operation bound to its overload. written: alias groups it writes; group: alias group of
    its result, -1 for new memory.
    """

    operation: Operation
    func: Any
    base: str
    names: tuple[str, ...]
    allocates: bool
    writes: tuple[str, ...]
    pointwise: bool
    last_use: list[int] = field(default_factory=list)


@dataclass
class _Part:
    """What some outputs of a program rest on: operations, inputs, params."""

    outputs: frozenset[str]
    operations: frozenset[int]
    inputs: frozenset[int]
    params: frozenset[str]


class Watch(Protocol):
    """Sees what a run does: tensors by slot at its begin, every operator with its arguments, then
    its results.
    """

    def given(self, tensors: dict[str, Any]) -> None: ...
    def runs(
        self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...
    def made(self, results: list[Any]) -> None: ...


class HeldTensor:
    """Parameters brought to one working dtype and layout, to be used by several runs of one
    program. See `Loaded.hold`.
    """

    __slots__ = ("tensors", "working")

    def __init__(self, tensors: dict[str, Any], working: str) -> None:
        self.tensors, self.working = tensors, working


class Loaded:
    """A program ready to run. notes: what was met while running ("aten.foo.default in float32: no
    float64 kernel"), each once.

    check_note: set by `check` when the recording was reproduced within 1 ulp but not bitwise.
    length: the largest number of terms one element was summed from (matmul, linear, conv, norm,
    sum) in the last run. chooses: does an operator choose among scores?
    """

    def __init__(
        self,
        program: Program,
        constants: Sequence[Array],
        *,
        allow: tuple[str, ...] = (),
        max_bytes: int = 4 << 30,
    ) -> None:
        self.program, self.max_bytes = program, max_bytes
        self.notes: list[str] = []
        self.check_note = ""
        self.length = 1
        self._constants = [from_host(c) for c in constants]
        self.base, self.default = (
            _floating(program.base),
            _floating(program.default_dtype) or torch.float32,
        )
        self._input_dtypes, self._fixed, self._same = (
            program.input_dtypes,
            program.fixed,
            program.equal,
        )
        if any(name and name not in TORCH for name in program.input_dtypes):
            raise ReplayRefused("malformed program: an input dtype that there is not")
        self._steps = [_bind(op, allow) for op in program.operations]
        self._groups, self._written = _aliases(program, self._steps)
        for place, uses in _last_uses(program).items():
            self._steps[place].last_use = uses
        self._inference, self._grad = (
            program.inference,
            frozenset(program.grad if program.inference else ()),
        )
        self._bounded: dict[Any, int] = {}
        self._plans: dict[tuple[str, ...], _Part] = {}
        self._boundaries = {
            at: tuple(k for k, b in program.calls if b == at) for _, at in program.calls
        }
        self.chooses = any(
            step.func is not None and chooses(step.base, len(step.func._schema.returns))
            for step in self._steps
        )

    # ---- running

    def part(self, outputs: Sequence[str] | None = None) -> _Part:
        """What these outputs (None: all) rest on."""
        wanted = (
            tuple(slot for slot, _ in self.program.outputs) if outputs is None else tuple(outputs)
        )
        found = self._plans.get(wanted)
        if found is None:
            found = self._plans[wanted] = _part(self.program, self._steps, set(wanted))
        return found

    def needs(self, output: str) -> frozenset[str]:
        """Slots of the inputs and params that this output rests on."""
        part = self.part((output,))
        return part.params.union(self.program.inputs[k] for k in part.inputs)

    def determined(self, there: Collection[str]) -> list[str]:
        """The outputs for which all that they rest on is there."""
        return [
            slot for slot, _ in self.program.outputs if all(s in there for s in self.needs(slot))
        ]

    def hold(
        self,
        params: Mapping[str, Array],
        *,
        working: str = "recorded",
        strides: Mapping[str, tuple[int, ...]] | None = None,
    ) -> HeldTensor:
        """The params that are there, converted once for several runs with this `working` and
        `strides`.
        """
        if working not in WORKING:
            raise ReplayRefused(f"no working dtype {working!r}")
        policy, layouts = _Policy(working, self.base, self.default), strides or {}
        there = [slot for slot in self.program.params if slot in params]
        return HeldTensor(
            {
                slot: _laid_out(policy.param(from_host(params[slot])), layouts.get(slot))
                for slot in there
            },
            working,
        )

    def run(
        self,
        inputs: Mapping[str, Array],
        params: Mapping[str, Array] | HeldTensor,
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
        lenient: bool = False,
    ) -> dict[str, Array]:
        """Outputs by slot, as the program computes them from these inputs and params (by slot).

        working: "recorded" runs as recorded. "float64", "float32": wide; every floating tensor and
        dtype argument is at least that (float64: exactly that). "bfloat16", "float16": dtypes equal
        to the recording's base dtype become the working one, what the code widens explicitly stays
        wide. Inputs of the recording's base dtype are converted to working (convert=False: kept as
        given, for a target that really hands over another dtype); params are used as given, only
        widened. params: arrays, or what `hold` made of them for the same working dtype. stepwise:
        fused operators are written out, rounding at every step. strides: layout of inputs and
        params in elements, by slot. outputs: only these are computed, from what they need. child:
        called where the recording called its k-th module, if what that left is not among `inputs`;
        takes what it was given ({"input.0": array}) and gives what it left ({"output.0": array}).
        trace: called with every operation's number and its first result, after it ran. watch: sees
        every operator as it is run. choices: sees what operators choose among scores, and tells
        them what to choose. lenient: on other extents than the recording allows and as far as the
        inputs go; what that gives proves something only where it is what somebody else made. Raises
        ReplayRefused with the reason; nothing given is ever written.
        """
        if working not in WORKING:
            raise ReplayRefused(f"working dtype {working!r} is not one of {', '.join(WORKING)}")
        program, part = self.program, self.part(outputs)
        if not isinstance(params, HeldTensor):
            params = self.hold(params, working=working, strides=strides)
        elif params.working != working:
            raise ReplayRefused(f"parameters held for {params.working} given to a run in {working}")
        later = (
            {slot for slot in program.inputs if slot[0].isdigit() and slot not in inputs}
            if child is not None
            else set()
        )
        missing = [
            s
            for k, s in enumerate(program.inputs)
            if k in part.inputs and s not in inputs and s not in later
        ]
        missing += [s for s in part.params if s not in params.tensors]
        if missing and not lenient:
            raise ReplayRefused(f"the program needs {', '.join(missing[:5])}, which is not there")
        there = [slot in inputs for slot in program.inputs]
        shapes = [
            tuple(inputs[slot].shape) if is_there else None
            for slot, is_there in zip(program.inputs, there)
        ]
        if not lenient:
            self._check_shapes(shapes)
        policy = _Policy(working, self.base, self.default)
        layouts = strides or {}

        def tensor(k: int, slot: str, array: Array) -> Any:
            made = _laid_out(
                policy.input(from_host(array), self._dtype_of(k) if convert else ""),
                layouts.get(slot),
            )
            # A clone, since a view of a view would not hand on that it requires grad.
            return (
                made.clone().requires_grad_()
                if slot in self._grad and made.is_floating_point()
                else made
            )

        ins = [
            tensor(k, slot, inputs[slot]) if there[k] else None
            for k, slot in enumerate(program.inputs)
        ]
        # What the program writes is cloned: a held parameter serves other runs too.
        held = {
            slot: t.clone() if ("param", slot) in self._written else t
            for slot, t in params.tensors.items()
        }
        held = {
            slot: t.clone().requires_grad_() if slot in self._grad and t.is_floating_point() else t
            for slot, t in held.items()
        }
        key = (
            tuple((tuple(t.shape), t.dtype) if t is not None else None for t in ins),
            tuple((slot, tuple(t.shape), t.dtype) for slot, t in held.items()),
            stepwise,
            part.outputs,
            child is None,
        )
        execution = _Execution(
            self,
            ins,
            held,
            policy,
            stepwise,
            bounded=child is None and key in self._bounded,
            watch=watch,
        )
        execution.choices, execution.lenient = choices, lenient

        def enter(k: int) -> None:
            assert child is not None
            prefix = f"{k}:"
            if not any(slot.startswith(prefix) for slot in later):
                return
            # What rests on tensors that are not there was not computed; the child may know those by
            # itself.
            wanted = (
                (s, o) for s, o in program.outputs if s in part.outputs and s.startswith(prefix)
            )
            given = {s[len(prefix) :]: to_host(execution.result(o)) for s, o in wanted}
            left = {**given, **child(k, given)}
            for place, slot in enumerate(program.inputs):
                if slot.startswith(prefix) and slot[len(prefix) :] in left:
                    made = ins[place] = tensor(place, slot, left[slot[len(prefix) :]])
                    shapes[place] = execution.shapes[place] = tuple(made.shape)
            self._check_shapes(shapes)

        with self._context():
            execution.all(part, enter if child is not None else None, trace)
            if not execution.data_dependent and child is None:
                self._bounded[key] = execution.length
            self.length = max(execution.length, self._bounded.get(key, 1))
            return {
                slot: to_host(execution.result(operand))
                for slot, operand in program.outputs
                if slot in part.outputs
            }

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        # Recorded whole under inference_mode, a composite operator chooses its way (linear: one mm
        # or many) as it did there.
        mode = torch.inference_mode() if self._inference else torch.no_grad()
        with mode, torch.autocast("cpu", enabled=False):
            yield

    def _dtype_of(self, k: int) -> str:
        return self._input_dtypes[k] if k < len(self._input_dtypes) else ""

    def _check_shapes(self, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Those that are known (not None) must fit the recording."""
        for k, axis, extent in self._fixed:
            one = shapes[k] if k < len(shapes) else None
            if one is not None and (axis >= len(one) or one[axis] != extent):
                raise ReplayRefused(
                    f"recorded for {self.program.inputs[k]} with extent {extent} on axis {axis}, "
                    f"given shape {one}"
                )
        for k, axis, m, other in self._same:
            one, two = (shapes[k], shapes[m]) if max(k, m) < len(shapes) else (None, None)
            if (
                one is not None
                and two is not None
                and (axis >= len(one) or other >= len(two) or one[axis] != two[other])
            ):
                names = self.program.inputs
                raise ReplayRefused(
                    f"recorded with {names[k]} axis {axis} as long as {names[m]} axis {other}; "
                    f"given {one} and {two}"
                )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


# ---- loading


def _floating(name: str) -> Any:
    """The torch dtype of this name, None for ""; only real floating ones."""
    if not name:
        return None
    dtype = TORCH.get(name)
    if dtype is None or not dtype.is_floating_point:
        raise ReplayRefused(f"malformed program: base or default dtype {name[:40]!r}")
    return dtype


def _bind(operation: Operation, allow: tuple[str, ...]) -> _Step:
    if operation.name == allowed_operators.CAST:
        return _Step(operation, None, "cast", (), False, (), False)
    namespace, base, overload = allowed_operators.split(operation.name, allow)
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), base), overload)
        schema = func._schema
    except (AttributeError, RuntimeError):
        raise ReplayRefused(
            f"operator {operation.name} does not exist in torch {torch.__version__}"
        ) from None
    _fits(operation, schema)
    positional = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    named = dict(zip(positional, operation.args)) | operation.kwargs
    if draws(schema_of(func), named):
        raise ReplayRefused(f"operator {operation.name} draws random numbers")
    writes = written(schema_of(func), named)
    view = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    # to, contiguous, reshape may alias or copy: a copy as large as their operand at most, so
    # nothing to bound.
    return _Step(
        operation, func, base, positional, not view, writes, torch.Tag.pointwise in func.tags
    )


def _fits(operation: Operation, schema: Any) -> None:
    """Raises ReplayRefused when the arguments are not of the kinds the schema asks for."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(operation.args) > len(positional):
        raise ReplayRefused(
            f"malformed program: {operation.name} takes {len(positional)} positional arguments, "
            f"has {len(operation.args)}"
        )
    known = {a.name: a for a in schema.arguments}
    pairs = list(zip(positional, operation.args))
    for name, value in operation.kwargs.items():
        if name not in known or any(a.name == name for a, _ in pairs):
            raise ReplayRefused(
                f"malformed program: {operation.name} takes no further argument {name!r}"
            )
        pairs.append((known[name], value))
    given = {a.name for a, _ in pairs}
    for argument in schema.arguments:
        if argument.name not in given and not argument.has_default_value():
            raise ReplayRefused(
                f"malformed program: {operation.name} lacks the argument {argument.name!r}"
            )
        if argument.is_out:
            raise ReplayRefused(
                f"operator {operation.name} is not on the list of replayable operators (it "
                "writes `out=`)"
            )
    for argument, value in pairs:
        if not _kind(str(argument.real_type), value):
            raise ReplayRefused(
                f"malformed program: {operation.name} takes {argument.real_type} as "
                f"{argument.name!r}, not {str(value)[:60]}"
            )


_NUMERIC: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "number": (int, float, bool),
    "bool": (bool, int),
}
_TAGGED = {
    "Tensor": {"in", "param", "op", "const", "float", "complex"}, "int": {"dim", "mul"},
    "SymInt": {"dim", "mul"}, "float": {"float"}, "number": {"float", "complex", "dim", "mul"},
    "ScalarType": {"dtype"}, "Layout": {"layout"}, "Device": {"device"},
    "MemoryFormat": {"memory_format"},
}  # fmt: skip


def _kind(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _kind(kind[9:-1], value)
    if kind.startswith("List["):
        inner = kind[5:-1]
        if isinstance(value, (list, tuple)):
            return all(_kind(inner, item) for item in value)
        return inner in ("int", "SymInt", "float") and _kind(inner, value)
    if isinstance(value, dict):
        return next(iter(value)) in _TAGGED.get(kind, ())
    if kind == "Tensor":  # a Python number in the place of a tensor
        return isinstance(value, (bool, int, float))
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, _NUMERIC.get(kind, ())) and value is not None


def _aliases(program: Program, steps: list[_Step]) -> tuple[list[set[Any]], set[Any]]:
    """(roots of memory each operation's result may share, roots that some operation writes)."""
    groups: list[set[Any]] = []
    written: set[Any] = set()

    def roots(tensors: Iterator[Operand]) -> set[Any]:
        roots: set[Any] = set()
        for kind, at in tensors:
            if kind in TENSOR_OPERANDS:
                roots |= groups[at[0]] if kind == "op" else {(kind, at)}
        return roots

    for place, step in enumerate(steps):
        group = {("op", place)} if step.allocates else set()
        if not step.allocates or step.writes:
            group |= roots(step.operation.operands())
        groups.append(group)
        named = dict(zip(step.names, step.operation.args)) | step.operation.kwargs
        written |= roots(operands([named.get(name) for name in step.writes]))
    return groups, written


def _part(program: Program, steps: list[_Step], outputs: set[str]) -> _Part:
    wanted = [operand for slot, operand in program.outputs if slot in outputs]
    if any(step.writes for step in steps) or any(op.guard is not None for op in program.operations):
        # What is written in place, or decided by a number read, may reach anything.
        todo = list(range(len(steps)))
    else:
        todo = [o["op"][0] for o in wanted if "op" in o]
    operations: set[int] = set()
    inputs = {o["in"] for o in wanted if "in" in o}
    params = {o["param"] for o in wanted if "param" in o}
    while todo:
        place = todo.pop()
        if place in operations:
            continue
        operations.add(place)
        for kind, at in program.operations[place].operands():
            if kind == "op":
                todo.append(at[0])
            elif kind == "param":
                params.add(at)
            elif kind in ("in", "dim"):
                inputs.add(at if kind == "in" else at[0])
    return _Part(frozenset(outputs), frozenset(operations), frozenset(inputs), frozenset(params))


def _last_uses(program: Program) -> dict[int, list[int]]:
    """By operation: results that nothing needs after it."""
    last: dict[int, int] = {}
    for place, operation in enumerate(program.operations):
        last[place] = place
        for kind, at in operation.operands():
            if kind == "op":
                last[at[0]] = place
    for _, operand in program.outputs:
        if "op" in operand:
            last.pop(operand["op"][0], None)
    table: dict[int, list[int]] = {}
    for made, place in last.items():
        table.setdefault(place, []).append(made)
    return table


# ---- dtypes


class _Policy:
    """Which dtype a tensor or a dtype argument has in this run."""

    def __init__(self, working: str, base: Any, default: Any) -> None:
        self.recorded = working == "recorded"
        self.base, self.default = base, default
        self.working: Any = None if self.recorded else TORCH[working]
        self.wide = working == "float64"

    def input(self, tensor: Any, recorded: str) -> Any:
        if self.recorded or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if self.working not in _HALF:
            return self.widened(tensor)
        same = recorded and TORCH[recorded] is self.base
        return tensor.to(self.working) if same and tensor.is_floating_point() else tensor

    def param(self, tensor: Any) -> Any:
        return tensor if self.recorded or self.working in _HALF else self.widened(tensor)

    def constant(self, tensor: Any) -> Any:
        if self.recorded:
            return tensor
        if self.working not in _HALF:
            return self.widened(tensor)
        # One without elements is what something grows from (a cache), in the dtype of what follows.
        return (
            tensor.to(self.working) if tensor.numel() == 0 and tensor.dtype is self.base else tensor
        )

    def widened(self, tensor: Any) -> Any:
        if tensor.is_complex():
            return tensor.to(torch.complex128) if self.wide else tensor
        if not tensor.is_floating_point():
            return tensor
        if (
            self.wide
            or tensor.dtype in _HALF
            or (self.base is torch.float64 and tensor.dtype is torch.float64)
        ):
            return tensor.to(self.working)
        return tensor

    def argument(self, dtype: Any, step: _Step, operand: Any) -> Any:
        """dtype: what the recording asked for. operand: the first tensor the operator reads, None
        for a constructor.
        """
        if self.recorded or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        if self.wide:
            return torch.complex128 if dtype.is_complex else torch.float64
        if dtype is not self.base:
            return self.working if self.working is torch.float32 and dtype in _HALF else dtype
        if self.working not in _HALF or dtype in _HALF:
            return self.working
        if step.base in _RANGES:
            return dtype
        if operand is None or step.base.startswith("new_") or step.base.endswith("_like"):
            return self.working
        if not operand.is_floating_point():
            return self.working if operand.dtype is torch.bool and step.base in _CASTS else dtype
        return (
            self.working
            if step.base in _CASTS
            else torch.promote_types(self.working, operand.dtype)
        )

    def constructed(self, step: _Step, args: tuple[Any, ...]) -> Any:
        """The dtype of a constructor that was not told one: the default dtype of the recording, not
        that of this process.
        """
        if step.base in _EITHER_DTYPE:
            numbers = [a for a in args if isinstance(a, (bool, int, float, complex))]
            if not any(isinstance(a, float) for a in numbers) or any(
                isinstance(a, complex) for a in numbers
            ):
                return None
        elif step.base not in _DEFAULT_DTYPE:
            return None
        if self.wide:
            return torch.float64
        return (
            torch.promote_types(self.default, torch.float32)
            if self.working is torch.float32
            else self.default
        )

    def cast(self, tensor: Any, way: str) -> Any:
        """A cast point: up to float32, or back to the working dtype."""
        if self.recorded:
            return tensor.to(torch.float32)
        if self.working not in _HALF:
            return tensor.to(self.working)
        return tensor.to(self.working) if way == "back" else tensor.to(torch.float32)


def _laid_out(tensor: Any, strides: tuple[int, ...] | None) -> Any:
    """The same values with these strides; contiguous when they are not given, do not fit, or would
    need far more memory.
    """
    if (
        strides is None
        or len(strides) != tensor.dim()
        or tensor.numel() == 0
        or tuple(strides) == tuple(tensor.stride())
    ):
        return tensor
    axes = [a for a in range(tensor.dim()) if strides[a] != 0 and tensor.shape[a] > 1]
    expanded = [a for a in range(tensor.dim()) if strides[a] == 0 and tensor.shape[a] > 1]
    core = tensor
    for axis in expanded:
        first = core.narrow(axis, 0, 1)
        if not torch.equal(
            first.expand_as(core).contiguous().view(torch.uint8),
            core.contiguous().view(torch.uint8),
        ):
            return tensor  # this tensor is not constant along that axis
        core = first
    span, reach = 1, 1
    for axis in sorted(axes, key=lambda a: strides[a]):
        if strides[axis] < span:
            return tensor  # windows that overlap
        reach += (core.shape[axis] - 1) * strides[axis]
        span = strides[axis] * core.shape[axis]
    if any(s < 0 for s in strides) or reach > 64 * core.numel() + 1024:
        return tensor
    out = torch.empty_strided(core.shape, strides, dtype=core.dtype)
    out.copy_(core)
    return out.as_strided(tensor.shape, strides) if expanded else out


# ---- execution


class _Bytes(TorchDispatchMode):  # type: ignore[misc]
    """The largest thing an operator makes, also on the way when it is a composite one."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            # What an expanded view covers costs nothing.
            self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


# Views by their schema that copy when they must.
_MAY_COPY = {
    "reshape",
    "reshape_as",
    "ravel",
    "flatten",
    "contiguous",
    "to",
    "type_as",
    "resolve_conj",
    "resolve_neg",
    "view_as",
    "unflatten",
}


# Results of these are no larger than their largest operand.
_NEVER_GROW = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod",
    "var", "std", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "sort",
    "topk", "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm",
    "native_batch_norm", "_native_batch_norm_legit_no_training", "clone", "contiguous",
    "_to_copy", "to", "relu", "flip", "roll", "tril", "triu",
}  # fmt: skip


_ATTENTIONS = {
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
}
_FILLED = frozenset({"zeros", "ones", "full", "empty"})


class _Execution:
    """One run: an environment of results, freed after their last use."""

    def __init__(
        self,
        loaded: Loaded,
        ins: list[Any],
        params: dict[str, Any],
        policy: _Policy,
        stepwise: bool,
        *,
        bounded: bool,
        watch: Watch | None = None,
    ) -> None:
        self.watch = watch
        self.loaded, self.ins, self.params, self.policy, self.stepwise, self.bounded = (
            loaded,
            ins,
            params,
            policy,
            stepwise,
            bounded,
        )
        self.env: list[list[Any] | None] = []
        self.constants: dict[int, Any] = {}
        self.length = 1
        self.total = 0
        self.data_dependent = False
        self.choices: Choices | None = None
        self.lenient = False
        self.shapes = [tuple(t.shape) if t is not None else () for t in ins]
        if watch is not None:
            watch.given(
                {slot: t for slot, t in zip(loaded.program.inputs, ins) if t is not None} | params
            )

    def all(
        self,
        part: _Part,
        enter: Callable[[int], None] | None,
        trace: Callable[[int, Array], None] | None,
    ) -> None:
        """Run what `part` names; `enter` is called where a child's call lies, `trace` with what
        each operation made.
        """
        boundaries = self.loaded._boundaries if enter is not None else {}
        for place, step in enumerate(self.loaded._steps):
            for k in boundaries.get(place, ()):
                enter(k)  # type: ignore[misc]
            if place not in part.operations:
                self.env.append(None)
                continue
            try:
                self.env.append(self.step(place, step))
            except ReplayRefused:
                raise
            except Exception as error:  # a program may hold anything its operators' schemas allow
                text = f"{type(error).__name__}: {str(error)[:200]}"
                raise ReplayRefused(f"{step.operation.name} failed: {text}") from error
            if self.watch is not None:
                self.watch.made(self.env[place] or [])
            if trace is not None and (made := self.env[place]):
                trace(place, to_host(made[0]).copy())
            for done in step.last_use:
                self.env[done] = None
        for k in boundaries.get(len(self.loaded._steps), ()):
            enter(k)  # type: ignore[misc]

    def tensor(self, kind: str, at: Any) -> Any:
        if kind == "in":
            if self.ins[at] is None:
                raise ReplayRefused(
                    f"the program needs {self.loaded.program.inputs[at]}, which is not there"
                )
            return self.ins[at]
        if kind == "param":
            return self.params[at]
        if kind == "const":
            if at not in self.constants:
                self.constants[at] = self.policy.constant(self.loaded._constants[at].clone())
            return self.constants[at]
        made = self.env[at[0]]
        if made is None or at[1] >= len(made):
            raise ReplayRefused(f"malformed program: operation {at[0]} has no output {at[1]}")
        return made[at[1]]

    def result(self, operand: dict[str, Any]) -> Any:
        return self.tensor(*next(iter(operand.items())))

    def argument(self, kind: str, at: Any) -> Any:
        """What an operand stands for."""
        if kind in TENSOR_OPERANDS:
            return self.tensor(kind, at)
        if kind == "dim":
            shape = self.shapes[at[0]]
            if at[1] >= len(shape):
                raise ReplayRefused(
                    f"{self.loaded.program.inputs[at[0]]} has no axis {at[1]}: shape {shape}"
                )
            return shape[at[1]]
        if kind == "mul":
            return math.prod(map_operands(self.argument, at))
        if kind == "dtype":
            return TORCH[at]
        if kind == "device":
            return torch.device("cpu")
        if kind == "layout":
            return torch.strided
        if kind == "memory_format":
            return getattr(torch, at)
        if kind == "float":
            return float(at)
        return complex(*map_operands(self.argument, at))

    def step(self, place: int, step: _Step) -> list[Any]:
        operation = step.operation
        args = tuple(map_operands(self.argument, operation.args))
        if step.func is None:
            cast = self.policy.cast(args[0], args[2])
            if self.choices is not None:
                self.choices.passes(place, step.base, operation, args, lambda index: index)
            if self.watch is not None:
                self.watch.runs(place, "aten._to_copy.default", (args[0],), {"dtype": cast.dtype})
            return [cast]
        kwargs = {k: map_operands(self.argument, v) for k, v in operation.kwargs.items()}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        args, kwargs = self.dtypes(step, args, kwargs)
        named = dict(zip(step.names, args)) | kwargs
        if self.watch is not None:
            self.watch.runs(place, operation.name, args, kwargs)
        self.length = max(self.length, stepwise.reduction_length(step.base, named))
        if not self.bounded:
            self.bound(step, args, kwargs)
        if self.stepwise and step.base in stepwise.WRITTEN_OUT:
            return list(tensors_in(stepwise.WRITTEN_OUT[step.base](named)))
        with (
            stepwise.other_kernels(next(tensors_in(args), None))
            if self.stepwise
            else contextlib.nullcontext()
        ):
            out = self.call(place, step, args, kwargs, named)
        if self.choices is not None:
            if chooses(step.base, len(step.func._schema.returns)):
                out = self.choices.made(place, step.base, operation, named, out, self.length)
            else:
                self.choices.passes(place, step.base, operation, args, step.func)
        if operation.guard is not None:
            self.guard(step, operation.guard, out)
        made = list(tensors_in(out))
        if self.policy.wide and not step.writes and step.allocates:
            made = [self.policy.widened(t) for t in self.exact_ints(step, args, kwargs, made)]
        return made

    def dtypes(
        self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        policy = self.policy
        operand = next(tensors_in([*args, *kwargs.values()]), None)
        told = False
        out = []
        for value in args:
            if isinstance(value, torch.dtype):
                told, value = True, policy.argument(value, step, operand)
            out.append(value)
        changed = {}
        for name, value in kwargs.items():
            if isinstance(value, torch.dtype):
                told, value = True, policy.argument(value, step, operand)
            changed[name] = value
        if not told and operand is None and (dtype := policy.constructed(step, args)) is not None:
            changed["dtype"] = dtype
        return tuple(out), changed

    def guard(self, step: _Step, expected: float | bool, out: Any) -> None:
        if self.lenient and not isinstance(out, (bool, int, float)):
            return
        found = (
            out if isinstance(out, (bool, int, float)) else sum(t.numel() for t in tensors_in(out))
        )
        if found != expected:
            what = "read" if isinstance(out, (bool, int, float)) else "elements"
            raise ReplayRefused(
                f"guard: {step.operation.name} {what} {found!r} where the recording had "
                f"{expected!r}"
            )

    def bound(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operator that would make too much, before it runs."""
        if not step.allocates and step.base not in _MAY_COPY:
            return
        largest = self.from_shapes(step, args, kwargs)
        if largest is None:
            largest = self.measured(step, args, kwargs)
        if largest is None and step.base in allowed_operators.DATA_DEPENDENT:
            self.data_dependent = True
            largest = _bound_by_data(step.base, dict(zip(step.names, args)) | kwargs)
        elif largest is None:
            # No meta kernel, or operands of mixed dtypes. Grown at most by its integers.
            given = sum(t.untyped_storage().nbytes() for t in tensors_in([*args, *kwargs.values()]))
            largest = 8 * given * max([1, *(_product(v) for v in (*args, *kwargs.values()))])
        self.total += largest
        if largest > self.loaded.max_bytes or self.total > 16 * self.loaded.max_bytes:
            raise ReplayRefused(
                f"operator {step.operation.name} would make {largest} bytes; at most "
                f"{self.loaded.max_bytes} are allowed"
            )

    def from_shapes(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """An upper bound in bytes for the everyday operators; None for the others. Loads nothing,
        where meta kernels load a compiler.
        """
        given = list(tensors_in([*args, *kwargs.values()]))
        widest = 16  # bytes of a complex128
        if step.base == "arange":
            numbers = [a for a in args if isinstance(a, (int, float))]
            start, end, by = {1: (0, *numbers, 1), 2: (*numbers, 1)}.get(
                len(numbers), tuple(numbers[:3]) or (0, 0, 1)
            )
            return widest * max(0, math.ceil((end - start) / by)) if by else None
        if not given:
            sizes = [a for a in args if isinstance(a, list)]
            return (
                widest * math.prod(sizes[0]) if step.base in _FILLED and len(sizes) == 1 else None
            )
        try:
            if step.pointwise:
                return widest * math.prod(np.broadcast_shapes(*(tuple(t.shape) for t in given)))
            if step.base in _NEVER_GROW:
                return int(widest * max(t.numel() for t in given))
            if step.base in ("cat", "stack"):
                return int(widest * sum(t.numel() for t in given))
            if step.base == "embedding":
                return int(widest * given[1].numel() * given[0].shape[-1])
            if step.base == "linear":
                return int(
                    widest * (given[0].numel() // max(1, given[0].shape[-1])) * given[1].shape[0]
                )
            if step.base in _ATTENTIONS:
                rows, keys, width = (
                    given[0].numel() // max(1, given[0].shape[-1]),
                    given[1].shape[-2],
                    given[2].shape[-1],
                )
                return int(
                    widest * rows * (width + 2 * keys + 2)
                )  # written out it makes all scores, and masks them
            if step.base in ("mm", "bmm", "addmm", "baddbmm"):
                a, b = given[-2:]
                return int(widest * math.prod(a.shape[:-1]) * b.shape[-1])
        except (ValueError, IndexError):  # shapes that do not fit: the operator itself will say so
            return None
        return None

    def measured(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Bytes of the largest tensor the operator makes, on the way too, found on meta tensors;
        None when meta cannot tell.
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
            with _Bytes() as seen:
                step.func(*(meta(a) for a in args), **shadow)
            return int(seen.largest)
        except Exception:  # noqa: BLE001 - meta kernels are Python and raise anything; whoever asked has another bound
            return None

    def call(
        self,
        place: int,
        step: _Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        named: dict[str, Any],
    ) -> Any:
        if self.policy.wide and step.base in stepwise.WIDE:
            return stepwise.WIDE[step.base](named)
        try:
            return step.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            return self.fallback(place, step, args, kwargs, error)

    def fallback(
        self,
        place: int,
        step: _Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> Any:
        name, text = step.operation.name, str(error).split("\n")[0][:200]
        if step.base in _VIEW_LIKE:
            roots = self.loaded._groups[place] - {("op", place)}
            if roots & self.loaded._written:
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
                    out = self.in_dtype(attempt, step, args, kwargs)
                    self.loaded.note(f"{name} in {str(attempt).removeprefix('torch.')}: {text}")
                    return out
        raise ReplayRefused(f"{name} failed: {text}") from error

    def in_dtype(
        self, dtype: Any, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        wanted = floats[0] if floats and all(f is floats[0] for f in floats) else None
        return [
            t.to(wanted) if wanted is not None and t.is_floating_point() else t
            for t in tensors_in(out)
        ]

    def exact_ints(
        self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]
    ) -> list[Any]:
        """Integers that an operator turned into the default floating dtype (`positions / 10`), once
        more in float64.
        """
        given = list(tensors_in([*args, *kwargs.values()]))
        if not step.pointwise or any(t.is_floating_point() or t.is_complex() for t in given):
            return made
        if not given or not any(
            t.is_floating_point() and t.dtype is not torch.float64 for t in made
        ):
            return made
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
            widened = [
                a.to(torch.float64)
                if isinstance(a, torch.Tensor) and a.dtype is not torch.bool
                else a
                for a in args
            ]
            return list(tensors_in(step.func(*widened, **kwargs)))
        return made


def _bound_by_data(base: str, named: dict[str, Any]) -> int:
    """Bytes that an operator whose size depends on its elements makes at most, read off the
    elements.
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
