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
from whence.instrument.torch.tensor_content import Sighting
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.forward_calls import Edge
from whence.instrument.torch.training.gradient_changes import GradientChanges, TakenGradients
from whence.instrument.torch.training.gradient_hooks import Gradient, SeenGradients
from whence.instrument.torch.training.parameter_names import ParameterName, ParameterNames
from whence.records import Operation, Program, Ref
from whence.records.program import identified
from whence.records.training import sum_of

_SUMS = "AccumulateGrad"


class GradientsBefore(NamedTuple):
    """The gradients of parameters before a backward pass, by identity of the parameter. taken: how
    the gradients of an earlier pass changed since, None if there was none.
    """

    each: dict[int, Gradient]
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
        before: dict[int, Gradient] = {}
        parameters: list[tuple[ParameterName, Any]] = []
        for identity, reference in leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or (name := self._names.of(leaf)) is None:
                continue
            before[identity] = self._gradient(leaf, name, "input.sum")
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
            left = self._gradient(leaf, name, "output.grad")
            self._changes.left(leaf, name.path, left)
            self._write(name, before.each.get(identity), sent, left, region)

    def _gradient(self, leaf: Any, name: ParameterName, slot: str) -> Gradient:
        """Record the gradient that a parameter has now."""
        sighting = Sighting(name.scope, _SUMS, keep=self._session.elements_on)
        record, edge, form = self._registry.record_of(leaf.grad, slot, sighting)
        return Gradient(record, edge, form[0], 0, sighting.placements.get(slot))

    def _write(
        self,
        name: ParameterName,
        start: Gradient | None,
        sent: Sequence[Gradient],
        total: Gradient,
        region: Any,
    ) -> None:
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
                self._session,
                scope=name.scope,
                root=name.root.name,
                op=sum_of(name.name),
                occurrence=region.occurrence,
                op_type=_SUMS,
                refs=(*refs, Ref("output.grad", total.record, total.edge)),
                program=program,
                no_program=no_program,
                placements={s: p for s, p in placements.items() if p is not None},
            )
        )


def _program_of(start: Gradient | None, sent: Sequence[Gradient], total: Gradient) -> Program:
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
