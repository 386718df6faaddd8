"""Operators inside compiled graphs, as records and calls."""

from __future__ import annotations

from typing import Any

from whence.instrument.call_frames import count
from whence.instrument.session import Session
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled.collected import Site
from whence.instrument.torch.compiled.fx_interpreter import MadeInGraph
from whence.instrument.torch.compiled.graph import Execution
from whence.instrument.torch.overload import overload_of
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Call, Placement, Ref
from whence.records.marks import NoProgram


class GraphOperators:
    """Records what an execution of a graph computes on the way, each tensor as a call of the
    operator that made it.
    """

    def __init__(self, session: Session, registry: TensorRegistry, writer: ProgramWriter) -> None:
        self._session, self._registry, self._writer = session, registry, writer

    def take_tensor(self, execution: Execution, site: Site, value: Any) -> None:
        """Compiled code has computed this tensor."""
        name = site.node
        seer = _Looker(
            execution.graph.scope(name), name.base, execution.keep and self._session.elements_on
        )
        record, edge, _ = self._registry.record_of(_logical(value, site.shape), "output.0", seer)
        execution.records[site.buffer or name.name] = record, edge
        names = [n for n in site.reads if n in execution.records]
        refs = [Ref(f"input.{i}", *execution.records[name]) for i, name in enumerate(names)]
        arguments = {"overload": name.overload, **({"kernel": site.kernel} if site.kernel else {})}
        notes = () if site.shape is not None else ("no node of the graph is its value",)
        self._operator(
            execution,
            name,
            (*refs, Ref("output.0", record, edge)),
            arguments,
            site.origins,
            ("", "it is in the program of its graph"),
            notes,
        )

    def take_node(
        self, execution: Execution, node: Any, args: Any, kwargs: Any, out: Any, value: Any
    ) -> None:
        """A node has run eagerly, on these arguments."""
        name, maker = nodes.named(node), nodes.origin_of(node)
        scope = execution.graph.scope(name)
        seer = _Looker(scope, name.base, execution.keep and self._session.elements_on)
        ran = MadeInGraph(
            overload_of(maker.target),
            execution.order,
            (execution, scope, execution.phase, -1, name.source),
            (args, kwargs),
        )
        ran.take()
        for slot, tensor in ran.inputs:
            ran.see(slot, self._registry.record_of(tensor, slot, seer), "")
        if ran.overload.draws(ran.named_arguments):
            ran.unseen = ran.unseen or NoProgram.RANDOM.value
        record, edge, _ = self._registry.record_of(value, "output.0", seer)
        program = "", self._writer.unwanted
        if not self._writer.unwanted:
            place = None if maker is node else int(node.args[1])
            program = self._writer.put(*ran.picked(out, place))
        refs = ran.refs if self._session.selector.slots("input") else []
        arguments = {**ran.arguments, "overload": name.overload}
        self._operator(
            execution,
            name,
            (*refs, Ref("output.0", record, edge)),
            arguments,
            (name.name,),
            program,
            (),
        )

    def _operator(
        self,
        execution: Execution,
        name: nodes.Named,
        refs: tuple[Ref, ...],
        arguments: dict[str, Any],
        origins: tuple[str, ...],
        program: tuple[str, str],
        notes: tuple[str, ...],
    ) -> None:
        session, scope = self._session, execution.graph.scope(name)
        execution.operators += 1
        number = f"{execution.number}_op{execution.operators}"
        if not session.takes_all and not session.selector.wants(
            scope, name.base, number.count("_") + 1, number, execution.step
        ):
            return
        order = session.next_order()
        self._registry.call(
            Call(
                id=order,
                scope=scope,
                root=execution.root.name,
                step=execution.step,
                order=order,
                rank=session.rank,
                micro=execution.micro,
                phase=execution.phase,
                op=name.name,
                occurrence=count(execution.counts, f"{execution.phase}:{scope}/{name.name}"),
                kind="operator",
                op_type=name.base,
                source=name.source,
                parent=execution.order,
                number=number,
                leaf=True,
                training=execution.training,
                refs=refs,
                arguments=arguments,
                program=program[0],
                no_program="" if program[0] else program[1],
                notes=notes,
                origins=origins,
            )
        )


class _Looker:
    """What a tensor inside a graph is recorded for."""

    __slots__ = ("keep", "op_type", "placements", "scope")

    def __init__(self, scope: str, op_type: str, keep: bool) -> None:
        self.scope, self.op_type, self.keep = scope, op_type, keep
        self.placements: dict[str, Placement] = {}


def _logical(value: Any, shape: Any) -> Any:
    """The buffer in the shape of the node. A buffer has the node's order of elements; only its
    extents may be folded.
    """
    if shape is None or len(shape) == value.dim():
        return value
    extents = [int(n) if isinstance(n, int) else -1 for n in shape]
    if extents.count(-1) > 1:
        return value
    try:
        return value.reshape(extents)
    except RuntimeError:
        return value
