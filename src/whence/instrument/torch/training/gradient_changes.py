"""Gradients between a backward pass and the optimiser's step: one call from those that the backward
pass left to those that the optimiser takes, whether something changed them or not.

Functions of torch that clip, and that of the loss scaler that divides, are wrapped, and make the
program of the call. What else changes a gradient there is not recorded: such a gradient has no
program, and is compared all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import part_of
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.gradient_arithmetic import (
    Change,
    Operand,
    clip_elements,
    clip_norm,
    divide_unless_infinite,
    unscale,
)
from whence.instrument.torch.training.gradient_hooks import Gradient
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Operation, Placement, Program, Ref
from whence.records.program import identified
from whence.records.slots import FOUND_INF, GRAD_SCALE, INVERSE_SCALE
from whence.records.training import GRADIENTS

_UNRECORDED = "code that is not recorded changed the gradients"


class _Left(NamedTuple):
    """The gradient of a parameter as a backward pass left it."""

    tensor: weakref.ref[Any]
    record: Any
    edge: str
    dtype: str
    placement: Placement | None


class _Read(NamedTuple):
    """A tensor that a change reads beside the gradients."""

    ref: Ref
    dtype: str


class _Recorded(NamedTuple):
    """A change that was recorded. parameters: by identity; change: None where it depends on what is
    not known. reads: what it reads beside the gradients.
    """

    what: str
    parameters: tuple[int, ...]
    change: Change | None
    arguments: dict[str, Any]
    reads: tuple[_Read, ...] = ()


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


class GradientChanges:
    """Records what changes gradients before the optimiser takes them."""

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        names: ParameterNames,
    ) -> None:
        self._session, self._frames, self._registry = session, frames, registry
        self._writer, self._names = writer, names
        self._left: dict[int, _Left] = {}
        self._now: dict[int, Any] = {}
        self._unknown: set[int] = set()
        self._recorded: list[_Recorded] = []
        self._norm: _Norm | None = None
        self._undo: list[Callable[[], None]] = []

    # ---- the functions of torch

    def install(self) -> None:
        """Wrap the functions that change gradients. Programs hold `clip_grad_norm_` from before, so
        what it calls is wrapped.
        """
        clip_grad, utils = torch.nn.utils.clip_grad, torch.nn.utils
        for module, name in ((clip_grad, "_get_total_norm"), (utils, "get_total_norm")):
            self._wrap(module, name, self._norm_of)
        for module, name in (
            (clip_grad, "_clip_grads_with_norm_"),
            (utils, "clip_grads_with_norm_"),
        ):
            self._wrap(module, name, self._clips_norm)
        for module in (clip_grad, utils):
            self._wrap(module, "clip_grad_value_", self._clips_values)
        self._wrap(torch, "_amp_foreach_non_finite_check_and_unscale_", self._unscales)

    def remove(self) -> None:
        """Put the functions back that nobody wrapped in turn."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.clear()
        self._left.clear()

    def _wrap(self, module: Any, name: str, around: Callable[..., Any]) -> None:
        previous = getattr(module, name, None)
        if previous is None:  # of another release of torch
            return
        frames = self._frames

        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not frames.active or frames.thread.busy:
                return previous(tensors, *args, **kwargs)
            # May be an iterator, which can be read once.
            handed_on = tensors if isinstance(tensors, torch.Tensor) else list(tensors)
            listed = [tensors] if isinstance(tensors, torch.Tensor) else handed_on
            ended = frames.guarded(around, listed, *args, **kwargs)
            out = previous(handed_on, *args, **kwargs)
            if ended is not None:
                frames.guarded(ended, out)
            return out

        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(module, name, wrapper)

        def undo() -> None:
            if getattr(module, name) is wrapper:
                setattr(module, name, previous)

        self._undo.append(undo)

    def _norm_of(
        self, tensors: list[Any], norm_type: float = 2.0, *_: Any, **__: Any
    ) -> Callable[[Any], None]:
        def ended(result: Any) -> None:
            self._norm = _Norm(result, [weakref.ref(t) for t in tensors], float(norm_type))

        return ended

    def _clips_norm(
        self, parameters: list[Any], max_norm: float, total_norm: Any, *_: Any, **__: Any
    ) -> Callable[[Any], None]:
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

    def _clips_values(
        self, parameters: list[Any], clip_value: float, *_: Any, **__: Any
    ) -> Callable[[Any], None]:
        limit = float(clip_value)
        clipped = [p for p in parameters if p.grad is not None]
        return self._around(
            "clip_grad_value_", clipped, clip_elements(limit), {"clip_value": limit}
        )

    def _unscales(
        self, gradients: list[Any], _: Any, inverse_scale: Any, *__: Any
    ) -> Callable[[Any], None] | None:
        """A loss scaler takes its scale out of these gradients."""
        scaled = set(map(id, gradients))
        parameters = [
            parameter
            for left in self._left.values()
            if (parameter := left.tensor()) is not None and id(parameter.grad) in scaled
        ]
        if not parameters:
            return None
        return self._around(
            "unscale_", parameters, unscale, {}, (self._read(INVERSE_SCALE, inverse_scale),)
        )

    def divided_by_step(
        self, parameters: list[Any], scale: Any, found_inf: Any
    ) -> Callable[[Any], None]:
        """A fused step is about to divide these gradients by the scale of a loss scaler, unless
        `found_inf`, a tensor or None, says that one is not finite. Returns what is to be called
        when it has stepped.
        """
        reads = [self._read(GRAD_SCALE, scale)]
        if found_inf is not None:
            reads.append(self._read(FOUND_INF, found_inf))
        return self._around("step", parameters, divide_unless_infinite, {}, tuple(reads))

    def _read(self, slot: str, tensor: Any) -> _Read:
        changed = _Changed(keep=self._session.elements_on)
        number, edge, form = self._registry.record_of(tensor, slot, changed)
        return _Read(Ref(slot, number, edge), form[0])

    # ---- what happens between a backward pass and a step

    def clear(self) -> None:
        """A backward pass has run: nothing has changed what it left."""
        self._now.clear()
        self._unknown.clear()
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
        reads: tuple[_Read, ...] = (),
    ) -> Callable[[Any], None]:
        """A change begins. Returns what is to be called when it has ended."""
        for parameter in parameters:
            self._look(parameter)
        identities = tuple(map(id, parameters))
        self._recorded.append(_Recorded(what, identities, change, arguments, reads))

        def ended(_: Any) -> None:
            for parameter in parameters:
                self._now[id(parameter)] = self._record_of(parameter)

        return ended

    def _look(self, parameter: Any) -> None:
        """Note whether the gradient is what the last change that was recorded made of it."""
        left = self._left.get(id(parameter))
        if (
            left is None
            or left.tensor() is not parameter
            or self._record_of(parameter) != self._now.get(id(parameter), left.record)
        ):
            self._unknown.add(id(parameter))

    def _left_of(self, parameter: Any) -> _Left | None:
        left = self._left.get(id(parameter))
        return left if left is not None and left.tensor() is parameter else None

    def _record_of(self, parameter: Any) -> Any:
        seen = _Changed(keep=self._session.elements_on)
        return self._registry.record_of(parameter.grad, "output.grad", seen)[0]

    # ---- the call

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
        inputs += {read.ref.slot: read.ref for r in self._recorded for read in r.reads}.values()
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
        program = self._program_of(named, [id(p) for _, p in known])
        reason = self._writer.unwanted or ("" if program is not None else _UNRECORDED)
        call = _Written(
            (*inputs, *outputs), changed.placements, None if reason else program, reason
        )
        self._write(known[0][0], call, region)

    def _write(self, first: ParameterName, call: _Written, region: Any) -> None:
        session, root = self._session, first.root
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
                arguments={
                    f"{r.what}.{key}": value
                    for r in self._recorded
                    for key, value in r.arguments.items()
                },
                program=written,
                no_program=no_program,
            )
        )

    def _path(self, identity: int) -> str:
        parameter = self._left[identity].tensor()
        name = self._names.of(parameter) if parameter is not None else None
        if name is None:
            return ""
        return f"{name.scope}.{name.name}" if name.scope else name.name

    def _program_of(self, named: dict[int, str], taken: Iterable[int]) -> Program | None:
        """All changes that were recorded as one program, None where it has nothing to make.

        named: paths of what it reads, by identity. taken: identities of what the optimiser takes.
        """
        operations: list[Operation] = []

        def run(name: str, *args: Any) -> Operand:
            operations.append(Operation(name, args))
            return {"op": [len(operations) - 1, 0]}

        operands: dict[int, Operand | None] = {
            i: {"in": k} if i not in self._unknown else None for k, i in enumerate(named)
        }
        reads = {read.ref.slot: read.dtype for r in self._recorded for read in r.reads}
        places = {slot: {"in": len(named) + k} for k, slot in enumerate(reads)}
        for recorded in self._recorded:
            before = [operands.get(i) for i in recorded.parameters]
            whole = [operand for operand in before if operand is not None]
            if recorded.change is None or len(whole) < len(before):
                operands.update(dict.fromkeys(recorded.parameters))
            else:
                beside = [places[read.ref.slot] for read in recorded.reads]
                changed = recorded.change(whole, run, beside)
                operands.update(zip(recorded.parameters, changed, strict=True))
        outputs = [
            (f"output.{named[i]}", operand)
            for i in taken
            if (operand := operands.get(i)) is not None
        ]
        if not outputs:
            return None
        dtypes = (*(self._left[i].dtype for i in named), *reads.values())
        return identified(
            Program(
                id="",
                operations=tuple(operations),
                inputs=(*(f"input.{path}" for path in named.values()), *reads),
                outputs=tuple(outputs),
                base=dtypes[0],
                input_dtypes=dtypes,
                default_dtype=NAMES[torch.get_default_dtype()],
            )
        )
