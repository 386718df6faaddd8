"""Gradients between a backward pass and the optimiser's step: one call from those that the backward
pass left to those that the optimiser takes, whether something changed them or not.

Functions of torch that clip, and that of the loss scaler that divides, are wrapped, and make the
program of the call, with what code of the program itself does to gradients around them
(`gradient_code`). A gradient that is changed in a way that is not recorded has no program, and is
compared all the same.

The code of a program that works on gradients between a backward pass and the optimiser's step:
gradients divided by the number of micro-batches there, a clipping of its own, weight decay by hand.

Its operators are recorded as those of a loss are, but only those that use a gradient or what was
made of one: the rest of a training loop (logging, moving averages) runs there too.

Functions of torch that do something to gradients, wrapped while a capture listens.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from whence.frameworks.torch_arrays import NAMES, tensors_in
from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard
from whence.instrument.torch.list_operators import one_by_one
from whence.instrument.torch.operand_table import layout
from whence.instrument.torch.operator_listener import OperatorListener
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.program_recorder import Recorder
from whence.instrument.torch.regions import part_of
from whence.instrument.torch.tensor_content import Pending
from whence.instrument.torch.tensor_identity import TensorRegistry, resolved
from whence.instrument.torch.training.gradient_arithmetic import (
    Change,
    Operand,
    ReadBeside,
    RecordedChange,
    Run,
    clip_elements,
    clip_norm,
    composed,
    divide_unless_infinite,
    unscale,
)
from whence.instrument.torch.training.gradient_hooks import Gradient
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Call, Placement, Program, Ref
from whence.records.program import map_operands
from whence.records.slots import FOUND_INF, GRAD_SCALE, INVERSE_SCALE, READ_BESIDE
from whence.records.training import GRADIENTS

_UNRECORDED = "code that is not recorded changed the gradients"


_Ended = Callable[[Any], None]
"""What is to be called with the result when a change has ended."""


class _Left(NamedTuple):
    """The gradient of a parameter as a backward pass left it."""

    tensor: weakref.ref[Any]
    record: Any
    edge: str
    dtype: str
    placement: Placement | None


class _Norm(NamedTuple):
    """A norm that torch computed. result: the tensor; of: the gradients."""

    result: Any
    of: list[weakref.ref[Any]]
    kind: float


class _Changed:
    """The call that is written."""

    scope, op_type = "", GRADIENTS

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.placements: dict[str, Placement] = {}


class _Written(NamedTuple):
    """What is written of the call. reason: why there is no program."""

    refs: tuple[Ref, ...]
    placements: dict[str, Placement]
    program: Program | None
    reason: str


def _settled(expected: list[tuple[Any, Any]], call: Call) -> Call:
    """The call, without its program where records that were to be one are two."""
    if all(resolved(before) == resolved(now) for before, now in expected):
        return call
    return msgspec.structs.replace(call, program="", no_program=_UNRECORDED)


class GradientChanges:
    """Records what changes gradients before the optimiser takes them."""

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        names: ParameterNames,
        compiled_code: CompiledCodeGuard,
    ) -> None:
        self._session, self._frames, self._registry = session, frames, registry
        self._writer, self._names = writer, names
        self._left: dict[int, _Left] = {}
        self._now: dict[int, Any] = {}
        self._unknown: set[int] = set()
        # Records on their way that are one if nothing else changed a gradient.
        self._expected: list[tuple[Any, Any]] = []
        self._recorded: list[RecordedChange] = []
        self._norm: _Norm | None = None
        self._functions = _WrappedFunctions(frames, self.stop_listening, self.listen)
        self._compiled_code = compiled_code
        self._code: _GradientCode | None = None
        self._is_lost = False
        self._held: dict[tuple[Any, ...], str] = {}
        # A mode can be taken off only by the thread that it is on: the one that ends the capture.
        self._thread = threading.get_ident()

    # ---- the functions of torch

    def install(self) -> None:
        """Wrap the functions that change gradients. Programs hold `clip_grad_norm_` from before, so
        what it calls is wrapped.
        """
        clip_grad, utils, wrap = torch.nn.utils.clip_grad, torch.nn.utils, self._functions.wrap
        for module, name in ((clip_grad, "_get_total_norm"), (utils, "get_total_norm")):
            wrap(module, name, self._norm_of, is_whole=False)
        for module, name in (
            (clip_grad, "_clip_grads_with_norm_"),
            (utils, "clip_grads_with_norm_"),
        ):
            wrap(module, name, self._clips_norm)
        for module in (clip_grad, utils):
            wrap(module, "clip_grad_value_", self._clips_values)
        wrap(torch, "_amp_foreach_non_finite_check_and_unscale_", self._unscales)

    def remove(self) -> None:
        """Put the functions back that nobody wrapped in turn."""
        self.drop("the capture has ended")
        self._functions.remove()
        self.clear()
        self._left.clear()

    def _norm_of(self, tensors: list[Any], norm_type: float = 2.0, *_: Any, **__: Any) -> _Ended:
        def ended(result: Any) -> None:
            self._norm = _Norm(result, [weakref.ref(t) for t in tensors], float(norm_type))

        return ended

    def _clips_norm(
        self, parameters: list[Any], max_norm: float, total_norm: Any, *_: Any, **__: Any
    ) -> _Ended:
        norm, self._norm = self._norm, None
        limit = float(max_norm)
        arguments = {"max_norm": limit}
        change = None
        clipped = [p for p in parameters if p.grad is not None]
        if norm is not None and norm.result is total_norm:
            arguments["norm_type"] = norm.kind
            if [id(ref()) for ref in norm.of] == [id(p.grad) for p in clipped]:
                change = clip_norm(limit, norm.kind)
        return self._around("clip_grad_norm_", clipped, change, arguments)

    def _clips_values(self, parameters: list[Any], clip_value: float, *_: Any, **__: Any) -> _Ended:
        limit = float(clip_value)
        clipped = [p for p in parameters if p.grad is not None]
        return self._around(
            "clip_grad_value_", clipped, clip_elements(limit), {"clip_value": limit}
        )

    def _unscales(
        self, gradients: list[Any], _: Any, inverse_scale: Any, *__: Any
    ) -> _Ended | None:
        """A loss scaler takes its scale out of these gradients."""
        scaled = set(map(id, gradients))
        parameters = [
            parameter
            for left in self._left.values()
            if (parameter := left.tensor()) is not None and id(parameter.grad) in scaled
        ]
        if not parameters:
            return None
        read = self._read(INVERSE_SCALE, inverse_scale)
        return self._around("unscale_", parameters, unscale, {}, (read,))

    def divided_by_step(self, parameters: list[Any], scale: Any, found_inf: Any) -> _Ended:
        """A fused step is about to divide these gradients by a loss scaler's scale, unless
        `found_inf` (a tensor or None) says that one is not finite.
        """
        settings = {GRAD_SCALE: scale, FOUND_INF: found_inf}
        read = tuple(self._read(slot, t) for slot, t in settings.items() if t is not None)
        return self._around("step", parameters, divide_unless_infinite, {}, read)

    def _read(self, slot: str, tensor: Any) -> ReadBeside:
        seen = _Changed(keep=self._session.elements_on)
        number, edge, form = self._registry.record_of(tensor, slot, seen)
        return ReadBeside(Ref(slot, number, edge), form[0])

    # ---- code of the program; nothing of the listener is on the thread then

    def listen(self) -> None:
        """What runs from here on may change gradients that a backward pass left."""
        if self._code is not None or self._is_lost:
            return
        if (
            self._left
            and not self._writer.unwanted
            and self._frames.active
            and threading.get_ident() == self._thread
            and torch._C._len_torch_dispatch_stack() == 0
        ):
            parameters = [p for left in self._left.values() if (p := left.tensor()) is not None]
            self._code = _GradientCode(parameters, self._beside)
            self._compiled_code.set()
            self._code.__enter__()
        else:
            self._is_lost = True

    def stop_listening(self) -> None:
        """What runs next is recorded in another way: keep what was recorded until now."""
        code, self._code = self._code, None
        if code is not None:
            code.pause()
            self._frames.guarded(self._keep, code)

    def drop(self, reason: str) -> None:
        """Record the code that runs from here until the next backward pass no longer."""
        code, self._code, self._is_lost = self._code, None, True
        if code is not None:
            code.abandon(reason)

    def _keep(self, code: _GradientCode) -> None:
        program = code.finish()
        if program is None:
            self._is_lost = self._is_lost or code.is_lost
            return
        read = tuple(self._read(slot, tensor) for slot, tensor in program.beside)
        self._recorded.append(RecordedChange("", program.parameters, program.change, {}, read))
        for identity in program.parameters:
            parameter = self._left[identity].tensor()
            self._now[identity] = self._record_of(parameter)

    def _beside(self, tensor: Any) -> str:
        """The slot of a parameter, as code of gradients reads it: itself or its memory."""
        if not self._held:
            self._held = {
                layout(parameter): path
                for i, left in self._left.items()
                if (parameter := left.tensor()) is not None and (path := self._path(i))
            }
        known = self._held.get(layout(tensor))
        return "" if known is None else f"{READ_BESIDE}{known}"

    # ---- what happens between a backward pass and a step

    def clear(self) -> None:
        """A backward pass has run: nothing has changed what it left."""
        self._is_lost = False
        self._held.clear()
        self._now.clear()
        self._unknown.clear()
        self._expected = []
        self._recorded.clear()
        self._norm = None

    def left(self, parameter: Any, gradient: Gradient) -> None:
        """A backward pass left this gradient."""
        self._left[id(parameter)] = _Left(
            weakref.ref(parameter),
            gradient.record,
            gradient.edge,
            gradient.dtype,
            gradient.placement,
        )

    def _around(
        self,
        what: str,
        parameters: list[Any],
        change: Change | None,
        arguments: dict[str, Any],
        read: tuple[ReadBeside, ...] = (),
    ) -> _Ended:
        """A change begins. Returns what is to be called when it has ended."""
        for parameter in parameters:
            self._look(parameter)
        identities = tuple(map(id, parameters))
        self._recorded.append(RecordedChange(what, identities, change, arguments, read))

        def ended(_: Any) -> None:
            for parameter in parameters:
                self._now[id(parameter)] = self._record_of(parameter)

        return ended

    def _look(self, parameter: Any) -> None:
        """Note whether the gradient is what the last change that was recorded made of it."""
        left = self._left_of(parameter)
        if left is None:
            self._unknown.add(id(parameter))
            return
        before, now = self._now.get(id(parameter), left.record), self._record_of(parameter)
        if isinstance(now, Pending) or isinstance(before, Pending):
            self._expected.append((before, now))
        elif now != before:
            self._unknown.add(id(parameter))

    def _left_of(self, parameter: Any) -> _Left | None:
        left = self._left.get(id(parameter))
        return left if left is not None and left.tensor() is parameter else None

    def _record_of(self, parameter: Any) -> Any:
        seen = _Changed(keep=self._session.elements_on)
        return self._registry.record_of(parameter.grad, "output.grad", seen)[0]

    # ---- the call

    def skipped(self) -> None:
        """The optimiser does not take them: its step is left out."""
        self._recorded.append(RecordedChange("step", (), None, {"skipped": True}))

    def write(self, stepped: Sequence[tuple[ParameterName, Any]], region: Any) -> None:
        """An optimiser is about to take the gradients of these parameters: write what became of
        them, in the call of its step.
        """
        known = [
            (name, parameter)
            for name, parameter in stepped
            if (left := self._left_of(parameter)) is not None
            and left.dtype == NAMES.get(parameter.grad.dtype)
        ]
        if not known or not region.selected:
            return
        for _, parameter in known:
            self._look(parameter)
        read = dict.fromkeys(
            [*(id(p) for _, p in known), *(i for r in self._recorded for i in r.parameters)]
        )
        named = {i: path for i in read if i in self._left and (path := self._path(i))}
        changed = _Changed(keep=self._session.elements_on)
        inputs = [Ref(f"input.{named[i]}", self._left[i].record, self._left[i].edge) for i in named]
        inputs += {read.ref.slot: read.ref for r in self._recorded for read in r.read}.values()
        changed.placements = {
            f"input.{named[i]}": placement
            for i in named
            if (placement := self._left[i].placement) is not None
        }
        outputs = []
        for _, parameter in known:
            slot = f"output.{named[id(parameter)]}"
            number, edge, _ = self._registry.record_of(parameter.grad, slot, changed)
            outputs.append(Ref(slot, number, edge))
        dtypes = {i: self._left[i].dtype for i in named}
        taken = [named[id(p)] for _, p in known]
        program = composed(self._recorded, named, dtypes, self._unknown, taken)
        reason = self._writer.unwanted or ("" if program is not None else _UNRECORDED)
        call = _Written(
            (*inputs, *outputs), changed.placements, None if reason else program, reason
        )
        self._write(known[0][0], call, region)

    def _write(self, first: ParameterName, call: _Written, region: Any) -> None:
        session, root = self._session, first.root
        expected, changes = self._expected, self._recorded
        written, no_program = self._writer.put(call.program, call.reason)
        self._registry.call(
            part_of(
                region,
                session,
                scope="",
                root=root.name,
                op=GRADIENTS,
                occurrence=region.occurrence,
                op_type=GRADIENTS,
                refs=call.refs,
                placements=call.placements,
                arguments={f"{r.what}.{k}": v for r in changes for k, v in r.arguments.items()},
                program=written,
                no_program=no_program,
            ),
            functools.partial(_settled, expected) if expected and written else None,
        )

    def _path(self, identity: int) -> str:
        parameter = self._left[identity].tensor()
        name = self._names.of(parameter) if parameter is not None else None
        if name is None:
            return ""
        return f"{name.scope}.{name.name}" if name.scope else name.name


_MOST_OPERATORS = 20_000
"""So many operators are recorded: some for each parameter."""
_FOLLOWED = {"in", "op", "dtype", "device", "layout", "memory_format", "float", "complex"}
"""Arguments of operators that stay what they are when their program becomes a part of another."""


class GradientProgram(NamedTuple):
    """What such code made of gradients.

    parameters: identities of those whose gradients it read or made. beside: slot and tensor of what
    it read of other kinds. change: the same as operations.
    """

    parameters: tuple[int, ...]
    beside: tuple[tuple[str, Any], ...]
    change: Change


class _GradientCode(OperatorListener):
    """Records what runs inside its `with` block as far as it works on the gradients of these
    parameters.

    beside: gives the slot of a tensor of another kind that such code may read, "" for one that is
    not known. is_lost: could what it did not be followed?
    """

    def __init__(self, parameters: Sequence[Any], beside: Callable[[Any], str]) -> None:
        super().__init__()
        self._parameters, self._beside = parameters, beside
        self._read: dict[str, Any] = {}
        self._recorder: Recorder | None = None
        self._took_number = self.is_lost = False

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        if self.over:
            return self.run(func, args, kwargs)
        if self._recorder is None:
            self._begin()
        recorder = self._recorder
        assert recorder is not None
        if not any(map(recorder.knows, tensors_in((args, kwargs)))):
            out = self.run(func, args, kwargs)
            self._took_number = self._took_number or isinstance(out, (bool, int, float))
            return out
        if self._took_number and any(isinstance(value, float) for value in args):
            # It may have been computed from the number, which is another in another run.
            recorder.give_up("works on gradients with a number that came out of a tensor")
        if parts := one_by_one(func, args, kwargs):
            return recorder.operator_as(lambda: self.run(func, args, kwargs), parts)
        return recorder.operator(func, args, kwargs)

    def _begin(self) -> None:
        """The first operator is about to run: gradients are still what they were."""
        gradients = [
            (f"input.{k}", parameter.grad)
            for k, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        self._recorder = Recorder(
            gradients,
            [],
            casts=False,
            find=self._find,
            most=_MOST_OPERATORS,
            watch_versions=False,
        )
        self._recorder.autocast = self.autocast

    def _find(self, tensor: Any) -> str:
        slot = self._beside(tensor)
        if slot:
            self._read.setdefault(slot, tensor)
        return slot

    def finish(self) -> GradientProgram | None:
        """What the code did, None where it did nothing to gradients or is lost."""
        recorder, self._recorder = self._recorder, None
        self.is_lost = self.over
        if recorder is None or self.over:
            return None
        self.over = True
        outputs = [
            (f"output.{k}", parameter.grad)
            for k, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        recording = recorder.finish(outputs)
        if recording.program is None:
            self.is_lost = True
            return None
        return self._program_of(recording.program)

    def _program_of(self, program: Program) -> GradientProgram | None:
        kinds = {o.kind for operation in program.operations for o in operation.operands()}
        if not kinds <= _FOLLOWED:
            self.is_lost = True
            return None
        places = {slot: place for place, slot in enumerate(program.inputs)}
        own = {f"input.{k}": k for k in range(len(self._parameters))}
        left = {f"output.{k}": k for k in own.values()}
        made = {
            left[slot]: operand
            for slot, operand in program.outputs
            if operand != {"in": places.get(f"input.{left[slot]}")}
        }
        if not made:
            return None
        read = {own[slot] for slot in program.inputs if slot in own}
        numbers = sorted(made.keys() | read)
        order = {f"input.{k}": place for place, k in enumerate(numbers)}
        beside = tuple((slot, self._read[slot]) for slot in program.inputs if slot not in own)
        return GradientProgram(
            tuple(id(self._parameters[k]) for k in numbers),
            beside,
            _spliced(program, order, [slot for slot, _ in beside], [made.get(k) for k in numbers]),
        )


def _spliced(
    program: Program,
    gradients: Mapping[str, int],
    beside: Sequence[str],
    made: Sequence[Operand | None],
) -> Change:
    """A recorded program as a change. gradients: the place of each gradient that it reads, by slot;
    beside: slots of what it reads of other kinds; made: what becomes of each gradient, None where
    it stays.
    """

    def change(given: Sequence[Operand], run: Run, read: Sequence[Operand]) -> list[Operand]:
        ran: list[Operand] = []

        def renamed(kind: str, place: Any) -> Operand:
            if kind == "in":
                slot = program.inputs[place]
                at = gradients.get(slot)
                return read[beside.index(slot)] if at is None else given[at]
            if kind == "op":
                return {"op": [ran[place[0]]["op"][0], place[1]]}
            return {kind: place}

        for operation in program.operations:
            ran.append(run(operation.with_operands(renamed)))  # noqa: PERF401 - reads those before
        return [
            before if after is None else map_operands(renamed, after)
            for before, after in zip(given, made, strict=True)
        ]

    return change


class _WrappedFunctions:
    """Functions around which something is called. begins, ends: called around those of which that
    tells all that they do, so that nobody else needs to look at their operators.
    """

    def __init__(
        self, frames: CallFrames, begins: Callable[[], None], ends: Callable[[], None]
    ) -> None:
        self._frames, self._begins, self._ends = frames, begins, ends
        self._undo: list[Callable[[], None]] = []

    def wrap(
        self, module: Any, name: str, around: Callable[..., Any], *, is_whole: bool = True
    ) -> None:
        """Call `around` with the tensors of a function before it runs, and what that returns with
        the result. is_whole: does that tell all that the function does?
        """
        previous = getattr(module, name, None)
        if previous is None:  # of another release of torch
            return
        frames = self._frames

        first = _first_parameter(previous)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if first in kwargs:
                args = (kwargs.pop(first), *args)
            if not frames.active or frames.thread.busy or not args:
                return previous(*args, **kwargs)
            tensors, more = args[0], args[1:]
            # May be an iterator, which can be read once.
            handed_on = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
            listed = [tensors] if isinstance(tensors, torch.Tensor) else handed_on
            if is_whole:
                self._begins()
            ended = frames.guarded(functools.partial(around, listed, *more, **kwargs))
            out = previous(handed_on, *more, **kwargs)
            if ended is not None:
                frames.guarded(ended, out)
            if is_whole:
                self._ends()
            return out

        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(module, name, wrapper)

        def undo() -> None:
            if getattr(module, name) is wrapper:
                setattr(module, name, previous)

        self._undo.append(undo)

    def remove(self) -> None:
        """Put the functions back that nobody wrapped in turn."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def _first_parameter(function: Any) -> str:
    """The name by which a caller may give the first argument, "" where none is known."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # a builtin
        return ""
