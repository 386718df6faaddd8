"""Accumulation of parameter gradients: the gradients that the calls of a backward pass sent, added
to the gradient that was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.session import Session
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import part_of
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.forward_calls import Edge
from whence.instrument.torch.training.gradient_changes import GradientChanges, TakenGradients
from whence.instrument.torch.training.gradient_hooks import Gradient, SeenGradients
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Operation, Placement, Program, Ref
from whence.records.program import identified
from whence.records.training import sum_of


class _Summed:
    """One parameter whose gradient a backward pass has changed."""

    def __init__(self, name: ParameterName, *, keep: bool) -> None:
        self.name, self.keep = name, keep
        self.scope, self.op_type = name.scope, "AccumulateGrad"
        self.placements: dict[str, Placement] = {}


class GradientBefore(NamedTuple):
    """The gradient of a parameter before a backward pass."""

    record: Any
    edge: str
    dtype: str
    placement: Placement | None


class GradientsBefore(NamedTuple):
    """The gradients of parameters before a backward pass, by identity of the parameter. taken: how
    the gradients of an earlier pass changed since, None if there was none.
    """

    each: dict[int, GradientBefore]
    taken: TakenGradients | None


class GradientSums:
    """Writes one call for each parameter: its inputs are the earlier gradient and the gradients
    that calls sent, its output is the gradient after the pass.

    The call is written also where nothing is added up, so that a run that forgets to accumulate, or
    to reset the gradients, can be compared with one that does.
    """

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        writer: ProgramWriter,
        names: ParameterNames,
        changes: GradientChanges,
    ) -> None:
        self._session, self._registry, self._writer, self._names = session, registry, writer, names
        self._changes = changes

    def before(self, leaves: Mapping[int, Any]) -> GradientsBefore:
        """Record the gradients that the leaves of a graph have before the pass."""
        before: dict[int, GradientBefore] = {}
        parameters: list[tuple[ParameterName, Any]] = []
        for identity, reference in leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or (name := self._names.of(leaf)) is None:
                continue
            summed = _Summed(name, keep=self._session.elements_on)
            number, edge, form = self._registry.record_of(leaf.grad, "input.sum", summed)
            before[identity] = GradientBefore(
                number, edge, form[0], summed.placements.get("input.sum")
            )
            parameters.append((name, leaf))
        return GradientsBefore(before, self._changes.taken_by_pass(parameters))

    def write(
        self,
        leaves: Mapping[int, Any],
        before: GradientsBefore,
        seen: Sequence[SeenGradients],
        region: Any,
    ) -> None:
        """Write the calls of all parameters after a pass. seen: gradients of the pass and of the
        passes nested in it. region: the call of the backward pass.
        """
        if before.taken is not None:
            self._changes.write(before.taken, region)
        self._changes.clear()
        for identity, reference in leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or (name := self._names.of(leaf)) is None:
                continue
            edge_of_leaf = Edge(-1, identity)
            sent = [g for some in seen for _, g in some.sent.get(edge_of_leaf, ())]
            sent.sort(key=lambda gradient: gradient.turn)
            summed = _Summed(name, keep=self._session.elements_on)
            total, edge, form = self._registry.record_of(leaf.grad, "output.grad", summed)
            left = Gradient(total, edge, form[0], 0, summed.placements.get("output.grad"))
            self._changes.left(leaf, name.path, left)
            self._write(summed, before.each.get(identity), sent, left, region)

    def _write(
        self,
        summed: _Summed,
        start: GradientBefore | None,
        sent: Sequence[Gradient],
        total: Gradient,
        region: Any,
    ) -> None:
        name, session = summed.name, self._session
        refs = [
            Ref(f"input.{k}", gradient.record, gradient.edge) for k, gradient in enumerate(sent)
        ]
        placements = {"input.sum": start.placement if start is not None else None}
        placements |= {f"input.{k}": gradient.placement for k, gradient in enumerate(sent)}
        placements |= {"output.grad": total.placement}
        if start is not None:
            refs.append(Ref("input.sum", start.record, start.edge))
        no_program = self._writer.unwanted or ("" if sent else "no module sent a gradient")
        program, no_program = self._writer.put(
            None if no_program else _program_of(start, sent, total), no_program
        )
        self._registry.call(
            part_of(
                region,
                session,
                scope=name.scope,
                root=name.root.name,
                op=sum_of(name.name),
                occurrence=region.occurrence,
                op_type="AccumulateGrad",
                refs=(*refs, Ref("output.grad", total.record, total.edge)),
                program=program,
                no_program=no_program,
                placements={s: p for s, p in placements.items() if p is not None},
            )
        )


def _program_of(start: GradientBefore | None, sent: Sequence[Gradient], total: Gradient) -> Program:
    """The program that adds up the sent gradients and the earlier one in autograd's order."""
    operations: list[Operation] = []
    result: dict[str, Any] = {"in": 0}

    def add(first: Any, second: Any) -> Any:
        operations.append(Operation("aten.add.Tensor", (first, second)))
        return {"op": [len(operations) - 1, 0]}

    for place in range(1, len(sent)):
        result = add(result, {"in": place})
    if sent[0].dtype != total.dtype:  # autograd gives a leaf the gradient in its own dtype
        operations.append(
            Operation("aten._to_copy.default", (result,), {"dtype": {"dtype": total.dtype}})
        )
        result = {"op": [len(operations) - 1, 0]}
    if start is not None:
        result = add({"in": len(sent)}, result)
    return identified(
        Program(
            id="",
            operations=tuple(operations),
            inputs=(
                *(f"input.{k}" for k in range(len(sent))),
                *(("input.sum",) if start is not None else ()),
            ),
            outputs=(("output.grad", result),),
            base=total.dtype,
            input_dtypes=(
                *(gradient.dtype for gradient in sent),
                *((start.dtype,) if start is not None else ()),
            ),
            default_dtype=NAMES[torch.get_default_dtype()],
        )
    )
