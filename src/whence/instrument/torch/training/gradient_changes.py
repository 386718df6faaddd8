"""Gradients between a backward pass and the optimiser's step: clipped.

The functions of torch that do it are wrapped. What else changes a gradient there has no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Regions
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.open_region import OpenRegion
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Call, Operation, Placement, Program, Ref
from whence.records.program import identified

Change = Callable[[Sequence[Any]], tuple[list[Operation], list[Any]]]
"""From the operands of gradients: the operations of a change, and the operands after it."""


class _Changed:
    """The parameters whose gradients one call changes."""

    op_type = "gradients"

    def __init__(self, parameters: list[tuple[ParameterName, Any]], *, keep: bool) -> None:
        self.parameters, self.keep, self.scope = parameters, keep, ""
        self.placements: dict[str, Placement] = {}
        self.refs: list[Ref] = []
        self.dtypes: list[str] = []


class GradientChanges:
    """Records what clips and unscales gradients."""

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
        self._regions = Regions(session, registry, OpenRegion())
        self._counts: dict[tuple[str, int], dict[str, int]] = {}
        self._undo: list[Callable[[], None]] = []

    # ---- the functions of torch

    def install(self) -> None:
        """Wrap the functions that change gradients."""
        utils = torch.nn.utils
        for module in (utils, utils.clip_grad):
            self._wrap(module, "clip_grad_norm_", _clip_norm)
            self._wrap(module, "clip_grad_value_", _clip_value)

    def remove(self) -> None:
        """Put the functions back that nobody wrapped in turn."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _wrap(self, module: Any, name: str, meaning: Callable[..., Any]) -> None:
        previous = getattr(module, name)
        frames = self._frames

        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if not frames.active or frames.thread.busy:
                return previous(parameters, *args, **kwargs)
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            changed = frames.guarded(self._begin, given)
            busy, frames.thread.busy = frames.thread.busy, True  # the other name of this function
            try:
                out = previous(given, *args, **kwargs)
            finally:
                frames.thread.busy = busy
            if changed is not None:
                frames.guarded(self._end, changed, name, meaning, args, kwargs)
            return out

        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(module, name, wrapper)

        def undo() -> None:
            if getattr(module, name) is wrapper:
                setattr(module, name, previous)

        self._undo.append(undo)

    # ---- one change

    def _begin(self, parameters: Iterable[Any]) -> _Changed | None:
        named = [
            (name, parameter)
            for parameter in parameters
            if parameter.grad is not None and (name := self._names.of(parameter)) is not None
        ]
        if not named:
            return None
        changed = _Changed(named, keep=self._session.elements_on)
        for name, parameter in named:
            self._take(changed, f"input.{_path(name)}", parameter.grad)
        return changed

    def _take(self, changed: _Changed, slot: str, gradient: Any) -> None:
        number, edge, form = self._registry.record_of(gradient, slot, changed)
        changed.refs.append(Ref(slot, number, edge))
        changed.dtypes.append(form[0])

    def _end(
        self, changed: _Changed, what: str, meaning: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        session, root = self._session, changed.parameters[0][0].root
        step = root.steps.get("", 0)
        counts = self._counts.setdefault((root.name, step), {})
        region = self._regions.enter("optimizer", root, step, 0, counts)
        for name, parameter in changed.parameters:
            self._take(changed, f"output.{_path(name)}", parameter.grad)
        arguments = meaning(*args, **kwargs)
        program = _program_of(changed, arguments.pop("change"))
        written, no_program = self._writer.put(
            None if self._writer.unwanted else program, self._writer.unwanted
        )
        region.operators += 1
        if region.selected:
            self._registry.call(
                Call(
                    id=(order := session.next_order()),
                    scope="",
                    root=root.name,
                    step=step,
                    order=order,
                    rank=session.rank,
                    phase="optimizer",
                    op=what,
                    occurrence=counts.setdefault(what, -1) + 1,
                    kind="module",
                    op_type=what,
                    source=f"torch.nn.utils.{what}",
                    parent=region.order,
                    number=f"{region.number}_{region.operators}",
                    leaf=True,
                    training=True,
                    refs=tuple(changed.refs),
                    arguments=arguments,
                    program=written,
                    no_program=no_program,
                    placements=changed.placements,
                )
            )
            counts[what] += 1
        self._regions.close()


def _path(name: ParameterName) -> str:
    return f"{name.scope}.{name.name}" if name.scope else name.name


def _program_of(changed: _Changed, change: Change) -> Program:
    count = len(changed.parameters)
    operations, results = change([{"in": k} for k in range(count)])
    return identified(
        Program(
            id="",
            operations=tuple(operations),
            inputs=tuple(ref.slot for ref in changed.refs[:count]),
            outputs=tuple(
                (ref.slot, operand) for ref, operand in zip(changed.refs[count:], results)
            ),
            base=changed.dtypes[0],
            input_dtypes=tuple(changed.dtypes[:count]),
            default_dtype=NAMES[torch.get_default_dtype()],
        )
    )


def _clip_norm(
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> dict[str, Any]:
    """What `clip_grad_norm_` does: the norm of all norms, and every gradient times
    min(1, max_norm / (norm + 1e-6)).
    """
    limit, kind = float(max_norm), float(norm_type)
    order: Any = {"float": "inf"} if kind == float("inf") else kind

    def change(gradients: Sequence[Any]) -> tuple[list[Operation], list[Any]]:
        operations: list[Operation] = []

        def run(name: str, *args: Any) -> Any:
            operations.append(Operation(name, args))
            return {"op": [len(operations) - 1, 0]}

        norms = [run("aten.linalg_vector_norm.default", g, order) for g in gradients]
        total = run("aten.linalg_vector_norm.default", run("aten.stack.default", norms), order)
        inverse = run("aten.reciprocal.default", run("aten.add.Tensor", total, 1e-6))
        share = run("aten.mul.Tensor", inverse, limit)
        factor = run("aten.clamp.default", share, None, 1.0)
        return operations, [run("aten.mul.Tensor", g, factor) for g in gradients]

    return {"max_norm": limit, "norm_type": kind, "change": change}


def _clip_value(clip_value: float, foreach: bool | None = None) -> dict[str, Any]:
    """What `clip_grad_value_` does: every element between the value and its negative."""
    limit = float(clip_value)

    def change(gradients: Sequence[Any]) -> tuple[list[Operation], list[Any]]:
        operations = [Operation("aten.clamp.default", (g, -limit, limit)) for g in gradients]
        return operations, [{"op": [k, 0]} for k in range(len(gradients))]

    return {"clip_value": limit, "change": change}
