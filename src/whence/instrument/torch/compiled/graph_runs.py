"""Executions of compiled graphs, with the tensors inside them, as records and calls.

Operators inside compiled graphs, as records and calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whence.frameworks.torch_arrays import address_of, tensors_in
from whence.instrument.call_frames import CallFrames, ThreadCalls, count
from whence.instrument.session import Session
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled.collected import Site
from whence.instrument.torch.compiled.fx_interpreter import MadeInGraph
from whence.instrument.torch.compiled.fx_program import Sizes, program_of
from whence.instrument.torch.compiled.graph import Execution, Graph
from whence.instrument.torch.compiled.module_paths import ModulePaths
from whence.instrument.torch.compiled.observer_effect import Cannot, difference, silently
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.overload import overload_of
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Region
from whence.instrument.torch.tensor_content import StorageRef, sample, storage_ref
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.wording import raised
from whence.records import Call, Placement, Ref
from whence.records.marks import NoProgram
from whence.records.slots import is_param


class GraphThread(ThreadCalls):
    """What a thread has of its own where graphs are listened to.

    executions: in progress. last: (root, step, micro, counts) of the last outermost call. region:
    the open one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.executions: list[Execution] = []
        self.last: tuple[ModuleRoot, int, int, dict[str, int]] | None = None
        self.region: Region | None = None


class GraphRuns:
    """Runs graphs and records what they compute.

    paths: which module a graph belongs to. region: the open region of a kind. tell_mode: says in
    which mode a graph is captured.
    """

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        frames: CallFrames,
        writer: ProgramWriter,
        *,
        paths: ModulePaths,
        region: Callable[[str], Region],
        tell_mode: Callable[[Graph], None],
    ) -> None:
        self._session, self._registry, self._frames = session, registry, frames
        self._thread, self._writer, self._paths = frames.thread, writer, paths
        self._region, self._tell_mode = region, tell_mode
        self._operators = _GraphOperators(session, registry, writer)
        self._parameters: dict[int, tuple[StorageRef, int | None, bytes, Any]] = {}

    @property
    def active(self) -> bool:
        """Is anything recorded?"""
        return self._frames.active

    def clear(self) -> None:
        """Forget parameters that were met."""
        self._parameters.clear()

    def run(self, graph: Graph, inputs: Any) -> Any:
        """Run a graph and record what it computes."""
        thread, code = self._thread, graph.code
        if thread.busy or torch._C._get_tracing_state() is not None:
            return code[graph.mode](inputs)
        execution = self._frames.guarded(self._begin, graph, inputs)
        if execution is None:
            return code[graph.mode](inputs)
        depth = len(thread.executions)
        thread.executions.append(execution)
        try:
            with _stock_hooks(graph) if graph.mode == "exact" else contextlib.nullcontext():
                out = code[graph.mode](inputs)
        except BaseException as error:  # of the program: recorded, and raised again
            del thread.executions[depth:]
            self._frames.guarded(self._end, execution, None, raised(error))
            raise
        del thread.executions[depth:]
        self._frames.guarded(self._end, execution, out, "")
        return out

    def _begin(self, graph: Graph, inputs: Any) -> Execution | None:
        if not graph.examined:
            graph.examined = True
            self._examine(graph, inputs)
        return self._open(graph, inputs)

    def _examine(self, graph: Graph, inputs: Any) -> None:
        """The first execution is done before, with nothing taken, on clones: in deep mode with the
        taps too, to choose the mode.
        """
        if graph.mode == "fx":
            return
        keep = {
            i
            for i, n in self._paths.of_inputs(graph, inputs).items()
            if n and i not in graph.mutated
        }
        try:
            graph.expected = silently(
                graph.module, graph.code["exact"], inputs, keep, graph.mutated
            )
            if graph.mode == "deep":
                changed = difference(
                    graph.expected,
                    silently(graph.module, graph.code["deep"], inputs, keep, graph.mutated),
                )
                if changed and not self._session.options.graph_anyway:
                    graph.mode = "exact"
                    self._session.note(
                        "observer",
                        f"{graph.words}: mode deep changes the result ({changed}), so it is "
                        "captured in mode exact",
                    )
                    self._tell_mode(graph)
        except Cannot as why:
            self._session.note("observer", f"observer effect of {graph.words} not measured: {why}")

    def _open(self, graph: Graph, inputs: Any) -> Execution | None:
        session, thread = self._session, self._thread
        if session.failed:
            self._frames.active = False
            return None
        above: Any = (
            thread.executions[-1]
            if thread.executions
            else thread.stack[-1]
            if thread.stack and graph.phase == "forward"
            else None
        )
        if above is None:
            above = self._region("backward" if graph.phase == "backward" else "region")
        elif isinstance(above, ModuleFrame) and above.note.startswith("compiled"):
            above.note = ""
        if not above.selected:
            return None
        execution = Execution(graph, above, session.next_order())
        session.over_budget(execution.scope, execution.step, self._registry.staging.waiting_bytes)
        execution.keep = session.elements_on
        named = self._paths.of_inputs(graph, inputs)
        graph.slots = [
            f"param.{named[i]}" if named.get(i) else f"input.{i}" for i in range(len(inputs))
        ]
        execution.scope = ""
        for i, (name, value) in enumerate(zip(graph.inputs, inputs)):
            if not isinstance(value, torch.Tensor):
                if isinstance(value, (bool, int, float)):
                    execution.numbers[f"input.{i}"] = value
                continue
            slot = graph.slots[i]
            number, edge = (
                self._parameter(value, slot, execution)
                if is_param(slot)
                else self._registry.record_of(value, slot, execution)[:2]
            )
            execution.records[name] = number, edge
            if session.selector.slots("input"):
                execution.refs.append(Ref(slot, number, edge))
            if i in graph.mutated:
                execution.mutated.append((f"mutated.{slot.partition('.')[2]}", value))
        unwanted = self._writer.unwanted
        execution.program = ("", unwanted) if unwanted else self._whole(graph, inputs, execution)
        return execution

    def _parameter(self, tensor: Any, slot: str, execution: Execution) -> tuple[Any, str]:
        """The record of a parameter, which is looked at again only when its version or a sample of
        its bytes changed.
        """
        place, version = address_of(tensor), None if tensor.is_inference() else tensor._version
        nbytes = tensor.nbytes if tensor.is_cpu and tensor.is_contiguous() else 0
        probe = sample(place, nbytes)
        parameter = self._parameters.get(place)
        if (
            parameter is not None
            and parameter[1:3] == (version, probe)
            and not torch.UntypedStorage._expired(parameter[0].cdata)
        ):
            return parameter[3], "identity"
        number, edge, _ = self._registry.record_of(tensor, slot, execution, parameter=True)
        self._parameters[place] = storage_ref(tensor), version, probe, number
        return number, edge

    def _whole(self, graph: Graph, inputs: Any, execution: Execution) -> tuple[str, str]:
        sizes = Sizes(graph.module, inputs)
        key = (sizes.key, tuple(graph.slots), graph.moved)
        if key not in graph.programs:
            program, why = program_of(
                graph.module,
                inputs,
                dict(zip(graph.inputs, graph.slots)),
                sizes,
                lambda name, tensor: self._registry.record_of(
                    tensor, f"constant.{name}", execution
                )[0],
                graph.scope,
            )
            graph.programs[key] = self._writer.put(program, why)
        return graph.programs[key]

    def _end(self, execution: Execution, out: Any, error: str) -> None:
        graph, session = execution.graph, self._session
        if session.failed:
            return
        if not error and session.selector.slots("output"):
            for slot, tensor in execution.mutated:
                execution.refs.append(
                    Ref(slot, *self._registry.record_of(tensor, slot, execution)[:2])
                )
            for i, tensor in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
                if isinstance(tensor, torch.Tensor):
                    slot = f"output.{i}"
                    execution.refs.append(
                        Ref(slot, *self._registry.record_of(tensor, slot, execution)[:2])
                    )
        if graph.expected is not None and not error:
            changed = difference(
                graph.expected,
                [
                    *tensors_in(list(out) if isinstance(out, (list, tuple)) else out),
                    *(t for _, t in execution.mutated),
                ],
            )
            graph.expected = None
            effect = f"{changed}" if changed else "none"
            session.note(
                "observer",
                f"observer effect: {effect} ({graph.words}, mode {graph.mode}, against the same "
                "graph without a capture)",
            )
        self._registry.call(
            Call(
                id=execution.order,
                scope="",
                root=execution.root.name,
                step=execution.step,
                order=execution.order,
                rank=session.rank,
                micro=execution.micro,
                phase=execution.phase,
                op=graph.id,
                occurrence=count(execution.counts, f"{execution.phase}:<graph>/{graph.id}"),
                kind="graph",
                op_type="graph",
                parent=execution.above.order,
                number=execution.number,
                training=execution.training,
                refs=tuple(execution.refs),
                arguments={
                    "mode": graph.mode,
                    "graph": graph.name,
                    "compile_id": graph.torch_id,
                    **execution.numbers,
                },
                program=execution.program[0],
                no_program=execution.program[1],
                error=error,
                placements=execution.placements,
            )
        )

    def take(self, graph: Graph, name: str, value: Any) -> None:
        """Compiled code says that this tensor is there."""
        site = graph.learned[graph.mode].sites.get(name)
        if site is not None and isinstance(value, torch.Tensor):
            self._taking(
                graph, lambda execution: self._operators.take_tensor(execution, site, value)
            )

    def take_node(
        self, graph: Graph, node: Any, args: Any, kwargs: Any, out: Any, value: Any
    ) -> None:
        """A node has run eagerly, on these arguments."""
        self._taking(
            graph,
            lambda execution: self._operators.take_node(execution, node, args, kwargs, out, value),
        )

    def _taking(self, graph: Graph, action: Callable[[Execution], None]) -> None:
        thread = self._thread
        execution = thread.executions[-1] if thread.executions else None
        if execution is None or execution.graph is not graph or thread.busy:
            return
        if not self._session.failed:
            self._frames.guarded(action, execution)


@contextlib.contextmanager
def _stock_hooks(graph: Graph) -> Iterator[None]:
    """On devices whose kernels torch itself puts hooks behind: they are ours while this graph
    runs.
    """
    if not graph.learned["exact"].stock:
        yield
        return
    from torch._inductor.hooks import intermediate_hook

    with intermediate_hook(graph.seen):
        yield


class _GraphOperators:
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
