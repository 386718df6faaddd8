"""Records executions of compiled graphs and the operators inside them as calls, with their tensors
as records.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES, address_of, encoded_setting, tensors_in
from whence.frameworks.torch_schema import UNINITIALISED, draws, schema_of
from whence.instrument.call_frames import CallFrames, ThreadCalls, count
from whence.instrument.session import Session
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled.collected import Site
from whence.instrument.torch.compiled.fx_interpreter import MadeInGraph
from whence.instrument.torch.compiled.fx_nodes import Named, flat, named
from whence.instrument.torch.compiled.graph import Execution, Graph
from whence.instrument.torch.compiled.module_paths import ModulePaths
from whence.instrument.torch.compiled.observer_effect import Cannot, difference, silently
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.overload import overload_of
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Region, part_of
from whence.instrument.torch.tensor_content import Sighting, StorageRef, sample, storage_ref
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.wording import raised
from whence.records import Call, Operation, Program, Ref
from whence.records.marks import NoProgram
from whence.records.slots import is_param


class GraphThread(ThreadCalls):
    """Thread-local state of a graph listener.

    executions: in progress. last: (root, step, micro, counts) of the last outermost call. region:
    the open region.
    """

    def __init__(self) -> None:
        super().__init__()
        self.executions: list[Execution] = []
        self.last: tuple[ModuleRoot, int, int, dict[str, int]] | None = None
        self.region: Region | None = None


class GraphRuns:
    """Runs graphs and records what they compute.

    paths: finds the module that a graph belongs to. region: returns the open region of a kind.
    tell_mode: notes in which mode a graph is captured.
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
        """Whether anything is recorded."""
        return self._frames.active

    def clear(self) -> None:
        """Forget all parameters."""
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
        """Run the first execution beforehand on clones, without taking tensors, to have its results
        for comparison; in deep mode also with the taps, to choose the mode.
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
        """The record of a parameter. The parameter is recorded again only if its version or a
        sample of its bytes changed.
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
        """Record a tensor that compiled code shows."""
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
    """Context in which torch's own hooks after kernels call this graph, on devices where torch
    provides them.
    """
    if not graph.learned["exact"].stock:
        yield
        return
    from torch._inductor.hooks import intermediate_hook

    with intermediate_hook(graph.seen):
        yield


class _GraphOperators:
    """Records the tensors inside an execution of a graph, each as a call of the operator that made
    it.
    """

    def __init__(self, session: Session, registry: TensorRegistry, writer: ProgramWriter) -> None:
        self._session, self._registry, self._writer = session, registry, writer

    def take_tensor(self, execution: Execution, site: Site, value: Any) -> None:
        """Record a tensor that compiled code has computed."""
        name = site.node
        seer = Sighting(
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
        seer = Sighting(scope, name.base, execution.keep and self._session.elements_on)
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
        number = f"{execution.number}_op{execution.operators + 1}"
        if not session.takes_all and not session.selector.wants(
            scope, name.base, number.count("_") + 1, number, execution.step
        ):
            execution.operators += 1
            return
        self._registry.call(
            part_of(
                execution,
                session,
                scope=scope,
                op=name.name,
                occurrence=count(execution.counts, f"{execution.phase}:{scope}/{name.name}"),
                kind="operator",
                op_type=name.base,
                source=name.source,
                number=number,
                training=execution.training,
                refs=refs,
                arguments=arguments,
                program=program[0],
                no_program="" if program[0] else program[1],
                notes=notes,
                origins=origins,
            )
        )


def _logical(value: Any, shape: Any) -> Any:
    """The buffer reshaped to the node's shape. Its elements are already in the node's order; only
    extents may be folded together.
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


# A whole FX graph as a program for the sizes of one call: data, no code.


class Unknown(Exception):
    """The graph has no program; the text is the reason, for example a size that the inputs do not
    determine.
    """


class Sizes:
    """The concrete sizes of one call of a graph: the values that its inputs bind to the symbols in
    its nodes.
    """

    def __init__(self, gm: Any, inputs: Sequence[Any]) -> None:
        self._bound: dict[Any, int] = {}
        for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs):
            traced = node.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
                for size, extent in (
                    *zip(traced.shape, value.shape),
                    *zip(traced.stride(), value.stride()),
                ):
                    self._bind(size, extent)
            elif isinstance(value, int):
                self._bind(traced, value)

    def _bind(self, size: Any, extent: int) -> None:
        if isinstance(size, torch.SymInt) and (symbol := size.node.expr).is_Symbol:
            self._bound.setdefault(symbol, int(extent))

    def of(self, value: Any) -> Any:
        """The number for a symbolic value; other values unchanged. Raises Unknown where the inputs
        do not determine it.
        """
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            solved = (
                value.node.expr.subs(self._bound)
                if hasattr(value.node.expr, "subs")
                else value.node.expr
            )
            if getattr(solved, "free_symbols", None):
                raise Unknown(f"size {solved} depends on the data")
            return (
                bool(solved)
                if isinstance(value, torch.SymBool)
                else float(solved)
                if isinstance(value, torch.SymFloat)
                else int(solved)
            )
        return value

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """A key that identifies these sizes."""
        return tuple(sorted((str(s), n) for s, n in self._bound.items()))


def program_of(
    gm: Any,
    inputs: Sequence[Any],
    slots: Mapping[str, str],
    sizes: Sizes,
    constant: Callable[[str, Any], int],
    scope: Callable[[Named], str] = lambda node: node.scope,
) -> tuple[Program | None, str]:
    """The graph as a program for these sizes, or the reason why there is none.

    slots: of the graph's call, by placeholder ("input.0", "param.fc.weight"). constant: returns the
    record of a tensor that the graph holds. scope: the module path of a node.
    """
    try:
        program = _GraphProgram(gm, slots, sizes, constant, scope)
        return program.of(inputs), ""
    except Unknown as why:
        return None, str(why)


class _GraphProgram:
    """Translates the nodes of a graph one by one. Arguments as for `program_of`."""

    def __init__(
        self,
        gm: Any,
        slots: Mapping[str, str],
        sizes: Sizes,
        constant: Callable[[str, Any], int],
        scope: Callable[[Named], str],
    ) -> None:
        self._gm, self._slots, self._sizes = gm, slots, sizes
        self._constant, self._scope = constant, scope
        self._operand: dict[Any, Any] = {}
        self._mutated: dict[Any, Any] = {}
        self._inputs: list[str] = []
        self._params: list[str] = []
        self._dtypes: list[str] = []
        self._fixed: list[tuple[int, int, int]] = []
        self._constants: list[int] = []
        self._operations: list[Operation] = []
        self._named: list[tuple[str, str]] = []
        self._picks: list[tuple[str, int, int]] = []
        self._outputs: list[tuple[str, Any]] = []
        self._notes: set[str] = set()
        self._base = ""

    def of(self, inputs: Sequence[Any]) -> Program:
        """The program for the inputs of a call. Raises Unknown where there is none."""
        values = iter(inputs)
        for node in self._gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, next(values, None))
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "output":
                for i, out in enumerate(flat(node.args[0])):
                    if isinstance(out, torch.fx.Node) and out in self._operand:
                        self._outputs.append((f"output.{i}", self._operand[out]))
            elif node.op != "call_function":
                raise Unknown(f"has a {node.op} node ({node.target})")
            elif _is_getitem(node) and node.args[0] in self._operand:
                position, k = self._operand[node.args[0]]["op"]
                self._operand[node] = {"op": [position, k + int(node.args[1])]}
                self._picks.append((node.name, position, k + int(node.args[1])))
            elif not isinstance(node.meta.get("val"), _NUMBERS):  # worked out where it is used
                self._operation(node)
        for node, operand in self._mutated.items():
            if node.op == "placeholder" and node in self._operand:
                slot = f"mutated.{self._slots[node.name].partition('.')[2]}"
                self._outputs.append((slot, operand))
        if not self._outputs:
            raise Unknown("returns no tensor")
        return self._program()

    def _placeholder(self, node: Any, value: Any) -> None:
        slot, place = self._slots[node.name], len(self._inputs)
        if not isinstance(value, torch.Tensor):
            return
        if is_param(slot):
            self._operand[node] = {"param": slot}
            self._params.append(slot)
            return
        self._operand[node] = {"in": place}
        self._fixed += [(place, axis, n) for axis, n in enumerate(value.shape)]
        self._inputs.append(slot)
        self._dtypes.append(NAMES.get(value.dtype, ""))
        if not self._base and value.is_floating_point():
            self._base = NAMES.get(value.dtype, "")

    def _attribute(self, node: Any) -> None:
        attribute = functools.reduce(getattr, str(node.target).split("."), self._gm)
        if not isinstance(attribute, torch.Tensor):
            raise Unknown(f"holds {node.target}, a {type(attribute).__name__}")
        self._operand[node] = {"const": len(self._constants)}
        self._constants.append(self._constant(str(node.target), attribute))

    def _operation(self, node: Any) -> None:
        schema = _allowed(node, self._notes)
        args = tuple(_operand(a, self._operand, self._sizes) for a in node.args)
        kwargs = {
            k: _operand(v, self._operand, self._sizes)
            for k, v in node.kwargs.items()
            if not (k == "pin_memory" or v is None)
        }
        self._operand[node] = {"op": [len(self._operations), 0]}
        if schema.writes:
            target = dict(zip(schema.positional, node.args)) | node.kwargs
            for written in _nodes(target.get(schema.writes[0])):
                self._mutated[written] = self._operand[node]
        self._operations.append(Operation(schema.name, args, kwargs))
        self._named.append((node.name, self._scope(named(node))))

    def _program(self) -> Program:
        program = Program(
            id="",
            operations=tuple(self._operations),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            params=tuple(self._params),
            constants=tuple(self._constants),
            base=self._base,
            input_dtypes=tuple(self._dtypes),
            default_dtype=NAMES[torch.get_default_dtype()],
            fixed=tuple(self._fixed),
            notes=tuple(sorted(self._notes)),
            names=tuple(name for name, _ in self._named),
            scopes=tuple(scope for _, scope in self._named),
            picks=tuple(self._picks),
        )
        return msgspec.structs.replace(
            program, id=xxhash.xxh3_128_hexdigest(msgspec.json.encode(program, order="sorted"))
        )


def _is_getitem(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _allowed(node: Any, notes: set[str]) -> Any:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise Unknown(f"runs {node.target}, a higher-order operator")
    facts = schema_of(node.target)
    if draws(facts, dict(zip(facts.positional, node.args)) | node.kwargs) or (
        facts.namespace == "prims" and "inductor_" in facts.base
    ):
        raise Unknown(f"draws random numbers ({node.name})")
    if facts.base in UNINITIALISED:
        notes.add("memory that is not written")
    if facts.writes:
        notes.add("in-place")
    return facts


def _nodes(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def _operand(value: Any, operand: Mapping[Any, Any], sizes: Sizes) -> Any:
    if isinstance(value, torch.fx.Node):
        if value in operand:
            return operand[value]
        value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            raise Unknown("an input that is not a tensor")
    value = sizes.of(value)
    if isinstance(value, (list, tuple)):
        return [_operand(item, operand, sizes) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    encoded = encoded_setting(value)
    if encoded is None:
        raise Unknown(f"takes a {type(value).__name__}")
    return encoded


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
