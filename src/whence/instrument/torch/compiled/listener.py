"""Listens to compiled graphs: every execution of a graph of inductor's with the tensors inside it,
beside the modules that stay eager.

`torch.compile` is instrumented by having its backend hand each graph to us instead of to inductor
(`torch_inductor` has the patches). Each execution is a call of kind "graph" below the module that
ran it, each tensor in it a call of kind "operator" below that. The first execution of a graph is
done a second time with nothing taken, on clones: whether the bits differ is the observer effect.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from whence.errors import CaptureError
from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import schema_of
from whence.instrument.session import Session
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled import inductor_taps as inductor
from whence.instrument.torch.compiled import other_backends as others
from whence.instrument.torch.compiled.fx_interpreter import MadeInGraph, interpreted
from whence.instrument.torch.compiled.inductor_taps import Collected, Site
from whence.instrument.torch.compiled.observer_effect import Cannot, difference, silently
from whence.instrument.torch.modes import ModesOff, NoFunctions
from whence.instrument.torch.modules import Listener, _Frame, _Thread
from whence.instrument.torch.operator_call import overload_of
from whence.instrument.torch.weak_registry import Root, StorageRef, address_of, sample, storage_ref
from whence.instrument.wording import raised
from whence.records import Call, Placement, Ref


class Graph:
    """One compiled graph. It stays with the compiled code, also when nobody listens any more; then
    it only runs it.

    name: as torch counts graphs ("model__0_forward_1"). id: "0/0", frame and compile of it, counted
    within the run; torch_id: as torch counts. phase: "forward" or "backward". code: by mode, called
    with the list of inputs. modules: variable -> path of the module that it held.
    """

    def __init__(
        self,
        owner: GraphListener,
        name: str,
        ids: tuple[str, str],
        backward: bool,
        modules: dict[str, str],
    ) -> None:
        self._owner = weakref.ref(owner)
        self._boxed_call = True  # of the object itself: torch wraps it and copies what it holds
        self.name, (self.id, self.torch_id), self.phase, self.modules = (
            name,
            ids,
            "backward" if backward else "forward",
            modules,
        )
        self.key = inductor.new_key(self)
        self.mode = owner.mode
        self.code: dict[str, Callable[[Any], Any]] = {}
        self.learned: dict[str, Collected] = {}
        self.module: Any = None
        self.inputs: list[str] = []
        self.mutated: tuple[int, ...] = ()
        self.examined = False
        self.expected: list[Any] | None = None
        self.slots: list[str] = []
        self.places: dict[int, int] = {}
        self.first: dict[int, str] = {}
        self.moved: tuple[str, str] = ("", "")
        self.programs: dict[Any, tuple[str, str]] = {}

    @property
    def words(self) -> str:
        return f"graph {self.id}" + (f" ({self.phase})" if self.phase == "backward" else "")

    def learn(self, collected: Collected) -> None:
        self.learned[collected.mode] = collected
        if self.module is None and collected.graph is not None:
            self.module = collected.graph
            self.inputs = nodes.inputs_of(self.module)
            self.mutated = _mutated(self.module)

    def __call__(self, inputs: Any) -> Any:
        owner = self._owner()
        if owner is None or not owner.active or self.module is None:
            return self.code[self.mode](inputs)
        return owner.run(self, inputs)

    def seen(self, name: str, value: Any) -> None:
        """A tensor inside is there now."""
        owner = self._owner()
        if owner is not None and owner.active:
            owner.take(self, name, value)

    def ran(self, node: Any, args: Any, kwargs: Any, out: Any, value: Any) -> None:
        """An operator of the graph has run, where it is run node by node."""
        owner = self._owner()
        if owner is not None and owner.active and nodes.is_value(node):
            owner.take_node(self, node, args, kwargs, out, value)

    def scope(self, what: nodes.Named) -> str:
        """The path of the module that a node is in, in this execution: one graph may serve several
        modules.
        """
        if not what.local and not what.scope:
            path = self.modules.get("", "")
        else:
            path = ".".join(
                filter(None, (self.modules.get(what.local, self.modules.get("", "")), what.scope))
            )
        old, new = self.moved
        if not old and new:
            return f"{new}.{path}".rstrip(".")
        if old != new and (path == old or path.startswith(old + ".")):
            path = new + path[len(old) :]
        return path


class Execution:
    """One execution of a graph; also what its tensors are sighted by."""

    __slots__ = (
        "above",
        "graph",
        "keep",
        "micro",
        "mutated",
        "number",
        "numbers",
        "op_type",
        "operators",
        "order",
        "phase",
        "place",
        "placements",
        "program",
        "records",
        "refs",
        "root",
        "scope",
        "state",
        "step",
        "training",
        "wanted",
    )
    graph: Graph
    program: tuple[str, str]

    def __init__(self, graph: Graph, above: Any, order: int) -> None:
        self.graph, self.above, self.order = graph, above, order
        self.operators = 0
        self.op_type, self.phase = "graph", graph.phase
        self.root, self.step, self.micro, self.state = (
            above.root,
            above.step,
            above.micro,
            above.state,
        )
        self.training, self.wanted, self.keep = (
            getattr(above, "training", False),
            above.wanted,
            False,
        )
        above.operators += 1
        self.place = above.operators
        self.number = f"op{self.place}" if above.number == "0" else f"{above.number}_op{self.place}"
        self.scope = getattr(above, "scope", "")
        self.refs: list[Ref] = []
        self.placements: dict[str, Placement] = {}
        self.records: dict[str, tuple[Any, str]] = {}
        self.mutated: list[tuple[str, Any]] = []
        self.numbers: dict[str, Any] = {}
        self.program = "", ""


class _Region:
    """Executions outside any module: of a compiled function, of a backward pass."""

    def __init__(
        self, kind: str, root: Root, step: int, micro: int, state: dict[str, int], order: int
    ) -> None:
        self.kind, self.root, self.step, self.micro, self.state, self.order = (
            kind,
            root,
            step,
            micro,
            state,
            order,
        )
        self.number, self.scope, self.wanted, self.operators, self.training = (
            kind,
            "",
            True,
            0,
            False,
        )


class _Here(_Thread):
    """executions: in progress. last: (root, step, micro, counts) of the last outermost call."""

    def __init__(self) -> None:
        super().__init__()
        self.executions: list[Execution] = []
        self.last: tuple[Root, int, int, dict[str, int]] | None = None
        self.region: _Region | None = None


class GraphListener(Listener):
    """A `Listener` that also records what compiled graphs compute.

    folder: of the run, for the texts of graphs. program: instrument every torch.compile of the
    process, not only what is told to.
    """

    def __init__(
        self, session: Session, model: Any = None, *, folder: str, program: bool = False, **how: Any
    ) -> None:
        self.mode = session.options.graph_mode
        # inductor takes seconds to import: of a whole program not before it compiles
        self._checked = False
        self._folder, self._everything = folder, program
        self._nowhere = Root("region", self)
        self._ids: dict[str, str] = {}
        self._frames: dict[str, list[str]] = {}
        self._held: dict[int, tuple[StorageRef, int | None, bytes, Any]] = {}
        self._regions: dict[int, _Region] = {}
        self._told: set[str] = set()
        self._compiles = 0
        self._patched: list[tuple[Any, Any, Any]] = []
        super().__init__(session, model, **how)
        self._local: _Here = _Here()

    # ---- torch.compile

    def install(self) -> None:
        """Start listening, and of a whole program have its torch.compile instrumented."""
        super().install()
        if not self._everything:
            return
        listener = self
        kind = torch._TorchCompileInductorWrapper
        call = kind.__call__

        @functools.wraps(call)
        def __call__(wrapper: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not listener.active:
                return call(wrapper, *args, **kwargs)
            with listener.instrumenting():
                return call(wrapper, *args, **kwargs)

        kind.__call__ = __call__
        self._patched.append((kind, call, __call__))
        other = getattr(torch, "_TorchCompileWrapper", None)
        if other is not None:
            made = other.__call__

            @functools.wraps(made)
            def __call__(wrapper: Any, gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
                if not listener.active or isinstance(
                    getattr(wrapper, "compiler_fn", None), _Inductor
                ):
                    return made(wrapper, gm, inputs, *args, **kwargs)
                before = listener._compiles
                with listener.instrumenting(gm):
                    out = made(wrapper, gm, inputs, *args, **kwargs)
                    return (
                        out
                        if listener._compiles > before
                        else listener._other_backend(wrapper, gm, inputs, out)
                    )

            other.__call__ = __call__
            self._patched.append((other, made, __call__))

    def remove(self) -> None:
        """Stop listening. What was compiled meanwhile keeps its code, which takes nothing any
        more.
        """
        if not self._removed:
            self.active = False
            for kind, original, ours in self._patched:
                if kind.__call__ is ours:
                    kind.__call__ = original
            if not self.session.failed:
                with self._lock:
                    for region in list(self._regions.values()):
                        self._end_region(region)
            self._held.clear()
        super().remove()

    @contextlib.contextmanager
    def instrumenting(self, whole: Any = None) -> Iterator[None]:
        """While this lasts, graphs that are handed to inductor on this thread come to us.

        whole: what dynamo handed to a backend that may know `compile_fx` since before.
        """
        from torch._inductor import compile_fx, config

        if not self._checked:
            try:
                inductor.check(self.mode)
            except CaptureError as why:
                self._tell("inside-not-seen", str(why))
                yield
                return
            self._checked = True
        if config.triton.cudagraphs:
            self._tell(
                "graph",
                "CUDA graphs are off while graphs are captured: a replay runs no Python that "
                "could take tensors",
            )
        with _compiling, inductor.outside():
            original, mine = compile_fx.compile_fx, threading.get_ident()

            @functools.wraps(original)
            def compiled(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if args or "inner_compile" in kwargs or threading.get_ident() != mine:
                    return original(gm, example_inputs, *args, **kwargs)
                inner = functools.partial(self._compile, self._modules_of(gm))
                return original(gm, example_inputs, inner_compile=inner, **kwargs)

            def by_default(gm: Any, example_inputs: Any, **how: Any) -> Any:
                if threading.get_ident() != mine:
                    return compile_fx.compile_fx_inner(gm, example_inputs, **how)
                return self._compile(self._modules_of(whole), gm, example_inputs, **how)

            compile_fx.compile_fx = compiled
            try:
                with inductor.inner_compile(original, by_default):
                    yield
            finally:
                if compile_fx.compile_fx is compiled:
                    compile_fx.compile_fx = original

    def _other_backend(self, wrapper: Any, gm: Any, inputs: Any, out: Any) -> Any:
        """What runs instead of what another backend returned: the same, where it is not a graph
        that Python runs.
        """
        name = getattr(wrapper, "compiler_name", "") or getattr(
            getattr(wrapper, "compiler_fn", None), "__name__", type(wrapper).__name__
        )
        modules = self._modules_of(gm)

        def take(backward: bool, lowered: Any) -> Any:
            graph = Graph(self, _name(), self._number(), backward, modules)
            graph.mode = "fx"
            collected = Collected(graph.key, "fx", self.session.options.graph_buffers)
            collected.graph = nodes.copied(lowered)
            graph.learn(collected)
            graph.code["fx"] = interpreted(graph.module, graph.ran)
            self._say_what_is_named(graph, self._write_texts(graph, nodes.readable(gm)))
            return graph

        shown = others.shown(out, inputs, name, take, self._tell, self._quiet)
        if shown is None:
            self._tell(
                "inside-not-seen",
                f"compiled with the backend {name}: only the boundary of what it made is captured",
            )
        return out if shown is None else shown

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        before, self._local.busy = self._local.busy, True
        try:
            yield
        finally:
            self._local.busy = before

    def _tell(self, kind: str, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.session.note(kind, text)

    # ---- one graph is compiled

    def _compile(self, modules: dict[str, str], gm: Any, example_inputs: Any, **how: Any) -> Any:
        """In the place of inductor's compile_fx_inner, for forward, backward and inference
        graphs.
        """
        from torch._inductor import compile_fx

        self._compiles += 1
        if self.active:
            try:
                made = self._make(modules, gm, example_inputs, how)
            except Exception as error:  # noqa: BLE001 - the compiler's own errors come again, from the uninstrumented compile
                self.session.note(
                    "graph",
                    f"{_name()} could not be instrumented, only its boundary is captured: "
                    f"{raised(error)}",
                )
                made = None
            if made is not None:
                return made
            if reported := _reported_strides():
                reported.clear()
        return compile_fx.compile_fx_inner(gm, example_inputs, **how)

    def _make(
        self, modules: dict[str, str], gm: Any, example_inputs: Any, how: dict[str, Any]
    ) -> Any:
        graph = Graph(self, _name(), self._number(), bool(how.get("is_backward")), modules)
        before = nodes.readable(gm)
        every = self.session.options.graph_buffers
        out: Any = None
        if self.mode == "fx":
            modes: tuple[str, ...] = ("fx",)
        else:
            modes = (
                ("exact", "deep") if self.mode == "deep" or how.get("cpp_wrapper") else ("exact",)
            )
        for mode in modes:
            taken = Collected(graph.key, mode, every)
            made = self._instrumented(graph, _own(gm), example_inputs, taken, how)
            if taken.graph is None or (made is None and mode != "fx"):
                break
            graph.learn(taken)
            graph.mode = mode
            if mode == "fx":
                graph.code[mode], out = interpreted(graph.module, graph.ran), graph
                _report_strides(graph.module)
                break
            graph.code[mode] = getattr(made, "current_callable", None) or made
            out = out or made
        if out is None:
            return None
        if graph.mode != self.mode:
            why = (
                "code in C++ alone (cpp_wrapper) has no place for mode exact"
                if graph.mode == "deep"
                else "mode deep was not possible"
            )
            self.session.note("graph", f"{graph.words} is captured in mode {graph.mode}: {why}")
        self._say_what_is_named(graph, self._write_texts(graph, before))
        if getattr(out, "current_callable", None) is None:
            return graph
        out.current_callable = graph
        return out

    def _instrumented(
        self, graph: Graph, gm: Any, example_inputs: Any, taken: Collected, how: dict[str, Any]
    ) -> Any:
        reported = _reported_strides()
        kept = list(reported or ())
        if reported:
            reported.clear()
        try:
            made = inductor.compile_graph(gm, example_inputs, taken, how)
        except Exception as error:  # noqa: BLE001 - the compiler's own errors come again from the uninstrumented compile
            self.session.note(
                "graph",
                f"{graph.words} could not be compiled for mode {taken.mode}: {raised(error)}",
            )
            made = None
        if reported is not None and kept:
            same = kept == list(reported)
            reported[:] = kept
            if made is not None and not same:
                self.session.note(
                    "graph",
                    f"{graph.words}: mode {taken.mode} would lay its outputs out differently, "
                    "mode exact is used",
                )
                made = None
        return made

    def _number(self) -> tuple[str, str]:
        """(id counted within the run, id as torch counts it) of what is compiled now."""
        found = str(torch._guards.CompileContext.current_compile_id() or "")
        if found not in self._ids:
            frame = self._frames.setdefault(found.partition("/")[0], [])
            frame.append(found)
            self._ids[found] = f"{list(self._frames.values()).index(frame)}/{len(frame) - 1}"
        return self._ids[found], found

    def _say_what_is_named(self, graph: Graph, text: str = "") -> None:
        learned = graph.learned[graph.mode]
        told = f"{graph.words} is {graph.name}, mode {graph.mode}"
        if graph.mode == "fx":
            told += f": {sum(map(nodes.is_value, graph.module.graph.nodes))} nodes run one by one"
        else:
            named = sum(1 for site in learned.sites.values() if site.shape is not None)
            lost = "".join(
                f", {n} {'named by no node' if learned.every else 'not kept'}: {why}"
                for why, n in learned.dropped.items()
            )
            told += (
                f": {named} {'kernel buffers' if graph.mode == 'exact' else 'nodes'} named{lost}"
            )
        self.session.note("graph", f"{told}; text in {text}" if text else told)

    def _write_texts(self, graph: Graph, before: str) -> str:
        """Write the graph before and after optimisation into the run; the name of the second file,
        "" where that failed.
        """
        learned = graph.learned[graph.mode]
        stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S%f")
        tail = f"{graph.name}_rank_{self.session.rank}_pid_{os.getpid()}_ts_{stamp}.txt"
        after = nodes.readable(graph.module) + _kernels(learned)
        with contextlib.suppress(OSError):
            self.session.sink()
            for name, text in (("original", before), ("optimized", after)):
                (Path(self._folder) / f"dynamo_{name}_graph_{tail}").write_text(text)
            return f"dynamo_optimized_graph_{tail}"
        return ""

    # ---- whose graph it is

    def _modules_of(self, gm: Any) -> dict[str, str]:
        """Variable -> path of the module that it holds, as dynamo traced it; "" -> that of the
        module whose code this is.
        """
        found = {"": self._module_on_the_stack()}
        paths: dict[int, str] | None = None
        for node in getattr(getattr(gm, "graph", None), "nodes", ()):
            given = node.meta.get("grapharg") if node.op == "placeholder" else None
            source, tensor = getattr(given, "source", None), getattr(given, "example", None)
            if source is None or not isinstance(tensor, torch.Tensor):
                continue
            name = source.name() if callable(source.name) else source.name
            tail, local = nodes.module_path(str(name))
            if not tail or local in found:
                continue
            paths = paths if paths is not None else self._paths()
            path = paths.get(address_of(tensor), "")
            if path == tail or path.endswith("." + tail):
                found[local] = path[: len(path) - len(tail)].rstrip(".")
        return found

    def _paths(self) -> dict[int, str]:
        """Address -> path of every parameter and buffer of the roots, the one that is called now
        first.
        """
        stack = self._local.stack
        roots = [stack[0].root] if stack else []
        roots += [r for r in self._roots.values() if r not in roots]
        found: dict[int, str] = {}
        for root in roots:
            module = root.ref()
            if module is None:
                continue
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if address := address_of(tensor):
                    found.setdefault(address, _plain(name))
        return found

    def _module_on_the_stack(self) -> str:
        """The path of the innermost known module whose method runs now, as its variable says."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount and code.co_filename != __file__:
                first = frame.f_locals.get(code.co_varnames[0])
                if (
                    isinstance(first, torch.nn.Module)
                    and (known := self._known.get(id(first))) is not None
                    and known.ref() is first
                ):
                    return _plain(known.scope)
            frame = frame.f_back
        return _plain(self._local.stack[-1].scope) if self._local.stack else ""

    # ---- one execution

    def run(self, graph: Graph, inputs: Any) -> Any:
        """Run a graph and take what it computes."""
        local = self._local
        code = graph.code
        if local.busy or torch._C._get_tracing_state() is not None:
            return code[graph.mode](inputs)
        execution: Execution | None = None
        local.busy = True
        try:
            with self._lock, ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                if not graph.examined:
                    graph.examined = True
                    self._examine(graph, inputs)
                execution = self._open(graph, inputs)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            self._give_up(error)
        finally:
            local.busy = False
        if execution is None:
            return code[graph.mode](inputs)
        depth = len(local.executions)
        local.executions.append(execution)
        try:
            with _stock_hooks(graph) if graph.mode == "exact" else contextlib.nullcontext():
                out = code[graph.mode](inputs)
        except BaseException as error:  # of the program: recorded, and raised again
            del local.executions[depth:]
            self._shut(execution, None, raised(error))
            raise
        del local.executions[depth:]
        self._shut(execution, out, "")
        return out

    def _examine(self, graph: Graph, inputs: Any) -> None:
        """The first execution is done before, with nothing taken, on clones: in deep mode with the
        taps too, to choose the mode.
        """
        if graph.mode == "fx":
            return
        keep = {i for i, n in self._params(graph, inputs).items() if n and i not in graph.mutated}
        try:
            graph.expected = silently(
                graph.module, graph.code["exact"], inputs, keep, graph.mutated
            )
            if graph.mode == "deep":
                changed = difference(
                    graph.expected,
                    silently(graph.module, graph.code["deep"], inputs, keep, graph.mutated),
                )
                if changed and not self.session.options.graph_anyway:
                    graph.mode = "exact"
                    self.session.note(
                        "observer",
                        f"{graph.words}: mode deep changes the result ({changed}), so it is "
                        "captured in mode exact",
                    )
                    self._say_what_is_named(graph)
        except Cannot as why:
            self.session.note("observer", f"observer effect of {graph.words} not measured: {why}")

    def _open(self, graph: Graph, inputs: Any) -> Execution | None:
        session, local = self.session, self._local
        if session.failed:
            self.active = False
            return None
        above: Any = (
            local.executions[-1]
            if local.executions
            else local.stack[-1]
            if local.stack and graph.phase == "forward"
            else None
        )
        if above is None:
            above = self._region("backward" if graph.phase == "backward" else "region")
        elif isinstance(above, _Frame) and above.note.startswith("compiled"):
            above.note = ""
        if not above.wanted:
            return None
        made = Execution(graph, above, session.next_order())
        session.over_budget(made.scope, made.step, self._sights.waiting_bytes)
        made.keep = session.elements_on
        named = self._params(graph, inputs)
        graph.slots = [
            f"param.{named[i]}" if named.get(i) else f"input.{i}" for i in range(len(inputs))
        ]
        made.scope = ""
        for i, (name, value) in enumerate(zip(graph.inputs, inputs)):
            if not isinstance(value, torch.Tensor):
                if isinstance(value, (bool, int, float)):
                    made.numbers[f"input.{i}"] = value
                continue
            slot = graph.slots[i]
            number, edge = (
                self._parameter(value, slot, made)
                if slot.startswith("param.")
                else self._sight(value, slot, made)[:2]
            )
            made.records[name] = number, edge
            if session.selector.slots("input"):
                made.refs.append(Ref(slot, number, edge))
            if i in graph.mutated:
                made.mutated.append((f"mutated.{slot.partition('.')[2]}", value))
        options = session.options
        if not options.programs or options.keep != "full":
            made.program = "", "programs were not recorded"
        else:
            made.program = self._whole(graph, inputs, made)
        return made

    def _params(self, graph: Graph, inputs: Any) -> dict[int, str]:
        """Path of the parameter that each input is, by place; sets which module the graph serves
        now.
        """
        now = {
            i: address_of(value)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
        }
        if graph.slots and all(now.get(i) == at for i, at in graph.places.items()):
            if not graph.places and graph.phase == "forward":
                graph.moved = graph.modules.get("", ""), self._module_on_the_stack()
            return {i: graph.slots[i][6:] for i in graph.places}
        paths = self._paths()
        names = {i: paths[at] for i, at in now.items() if at in paths}
        if not graph.places:
            graph.first = names
        graph.places = {i: now[i] for i in names}
        first = graph.first
        graph.moved = next(
            (_moved(first[i], names[i]) for i in names if i in first and first[i] != names[i]),
            ("", ""),
        )
        return names

    def _parameter(self, tensor: Any, slot: str, made: Execution) -> tuple[Any, str]:
        """The record of a parameter, which is looked at again only when its version or a sample of
        its bytes changed.
        """
        place, version = address_of(tensor), None if tensor.is_inference() else tensor._version
        nbytes = tensor.nbytes if tensor.is_cpu and tensor.is_contiguous() else 0
        probe = sample(place, nbytes)
        held = self._held.get(place)
        if (
            held is not None
            and held[1:3] == (version, probe)
            and not torch.UntypedStorage._expired(held[0].cdata)
        ):
            return held[3], "identity"
        number, edge, _ = self._sight(tensor, slot, made, parameter=True)
        self._held[place] = storage_ref(tensor), version, probe, number
        return number, edge

    def _whole(self, graph: Graph, inputs: Any, made: Execution) -> tuple[str, str]:
        sizes = nodes.Sizes(graph.module, inputs)
        key = (sizes.key, tuple(graph.slots), graph.moved)
        if key not in graph.programs:
            program, why = nodes.program_of(
                graph.module,
                inputs,
                dict(zip(graph.inputs, graph.slots)),
                sizes,
                lambda name, tensor: self._sight(tensor, f"constant.{name}", made)[0],
                graph.scope,
            )
            if program is not None and program.id not in self._programs:
                self._programs.add(program.id)
                new = program
                self._sights.emit(lambda: self.session.program(_settled(new)))
            graph.programs[key] = (program.id, "") if program is not None else ("", why)
        return graph.programs[key]

    def _shut(self, made: Execution, out: Any, error: str) -> None:
        local = self._local
        local.busy = True
        try:
            with self._lock, ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                if not self.session.failed:
                    self._end_execution(made, out, error)
        except Exception as ours:  # noqa: BLE001 - as above
            self._give_up(ours)
        finally:
            local.busy = False

    def _end_execution(self, made: Execution, out: Any, error: str) -> None:
        graph, session = made.graph, self.session
        if not error and session.selector.slots("output"):
            for slot, tensor in made.mutated:
                made.refs.append(Ref(slot, *self._sight(tensor, slot, made)[:2]))
            for i, tensor in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
                if isinstance(tensor, torch.Tensor):
                    slot = f"output.{i}"
                    made.refs.append(Ref(slot, *self._sight(tensor, slot, made)[:2]))
        if graph.expected is not None and not error:
            changed = difference(
                graph.expected,
                [
                    *tensors_in(list(out) if isinstance(out, (list, tuple)) else out),
                    *(t for _, t in made.mutated),
                ],
            )
            graph.expected = None
            what = f"{changed}" if changed else "none"
            session.note(
                "observer",
                f"observer effect: {what} ({graph.words}, mode {graph.mode}, against the same "
                "graph with nothing taken)",
            )
        self._sights.call(
            Call(
                id=made.order,
                scope="",
                root=made.root.name,
                step=made.step,
                order=made.order,
                rank=session.rank,
                micro=made.micro,
                phase=made.phase,
                op=graph.id,
                occurrence=_counted(made.state, f"{made.phase}:<graph>/{graph.id}"),
                kind="graph",
                op_type="graph",
                parent=made.above.order,
                number=made.number,
                training=made.training,
                refs=tuple(made.refs),
                arguments={
                    "mode": graph.mode,
                    "graph": graph.name,
                    "compile_id": graph.torch_id,
                    **made.numbers,
                },
                program=made.program[0],
                no_program=made.program[1],
                error=error,
                placements=made.placements,
            )
        )

    # ---- one tensor of an execution

    def take(self, graph: Graph, name: str, value: Any) -> None:
        """Compiled code says that this tensor is there."""
        site = graph.learned[graph.mode].sites.get(name)
        if site is not None and isinstance(value, torch.Tensor):
            self._taking(graph, lambda made: self._take_tensor(made, site, value))

    def take_node(
        self, graph: Graph, node: Any, args: Any, kwargs: Any, out: Any, value: Any
    ) -> None:
        """A node has run eagerly, on these arguments."""
        self._taking(graph, lambda made: self._take_node(made, node, args, kwargs, out, value))

    def _taking(self, graph: Graph, action: Callable[[Execution], None]) -> None:
        local = self._local
        made = local.executions[-1] if local.executions else None
        if made is None or made.graph is not graph or local.busy:
            return
        local.busy = True
        try:
            with self._lock, ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                if not self.session.failed:
                    action(made)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
        finally:
            local.busy = False

    def _take_tensor(self, made: Execution, site: Site, value: Any) -> None:
        what = site.what
        seer = _Seer(made.graph.scope(what), what.base, made.keep and self.session.elements_on)
        record, edge, _ = self._sight(_logical(value, site.shape), "output.0", seer)
        made.records[site.buffer or what.name] = record, edge
        names = [n for n in site.reads if n in made.records]
        refs = [Ref(f"input.{i}", *made.records[name]) for i, name in enumerate(names)]
        arguments = {"overload": what.overload, **({"kernel": site.kernel} if site.kernel else {})}
        notes = () if site.shape is not None else ("no node of the graph is its value",)
        self._operator(
            made,
            what,
            (*refs, Ref("output.0", record, edge)),
            arguments,
            site.origins,
            ("", "it is in the program of its graph"),
            notes,
        )

    def _take_node(
        self, made: Execution, node: Any, args: Any, kwargs: Any, out: Any, value: Any
    ) -> None:
        what, maker, options = nodes.named(node), nodes.origin_of(node), self.session.options
        scope = made.graph.scope(what)
        seer = _Seer(scope, what.base, made.keep and self.session.elements_on)
        ran = MadeInGraph(
            overload_of(maker.target),
            made.order,
            scope,
            made.phase,
            made,
            -1,
            what.source,
            (args, kwargs),
        )
        ran.take()
        for slot, tensor in ran.inputs:
            ran.see(slot, self._sight(tensor, slot, seer), "")
        if ran.overload.draws(ran.given):
            ran.unseen = ran.unseen or "draws random numbers"
        record, edge, _ = self._sight(value, "output.0", seer)
        program, why = None, "programs were not recorded"
        if options.programs and options.keep == "full":
            program, why = ran.picked(out, None if maker is node else int(node.args[1]))
        if program is not None and program.id not in self._programs:
            self._programs.add(program.id)
            new = program
            self._sights.emit(lambda: self.session.program(new))
        refs = ran.refs if self.session.selector.slots("input") else []
        arguments = {**ran.arguments, "overload": what.overload}
        self._operator(
            made,
            what,
            (*refs, Ref("output.0", record, edge)),
            arguments,
            (what.name,),
            (program.id if program else "", why),
            (),
        )

    def _operator(
        self,
        made: Execution,
        what: nodes.Named,
        refs: tuple[Ref, ...],
        arguments: dict[str, Any],
        origins: tuple[str, ...],
        program: tuple[str, str],
        notes: tuple[str, ...],
    ) -> None:
        session, scope = self.session, made.graph.scope(what)
        made.operators += 1
        number = f"{made.number}_op{made.operators}"
        if not session.takes_all and not session.selector.wants(
            scope, what.base, number.count("_") + 1, number, made.step
        ):
            return
        order = session.next_order()
        self._sights.call(
            Call(
                id=order,
                scope=scope,
                root=made.root.name,
                step=made.step,
                order=order,
                rank=session.rank,
                micro=made.micro,
                phase=made.phase,
                op=what.name,
                occurrence=_counted(made.state, f"{made.phase}:{scope}/{what.name}"),
                kind="operator",
                op_type=what.base,
                source=what.source,
                parent=made.order,
                number=number,
                leaf=True,
                training=made.training,
                refs=refs,
                arguments=arguments,
                program=program[0],
                no_program="" if program[0] else program[1],
                notes=notes,
                origins=origins,
            )
        )

    # ---- modules, and what is outside any

    def _program_of(self, frame: _Frame, error: str) -> tuple[str, str]:
        if frame.operators and not frame.note:
            return "", "its graphs are calls of their own"
        return super()._program_of(frame, error)

    def _begin_root(self, frame: _Frame, root: Root, scope: str) -> None:
        self._close_region()
        super()._begin_root(frame, root, scope)
        if frame.phase != "recompute":
            self._local.last = root, frame.step, frame.micro, frame.state

    def _optimizer_stepped(self) -> None:
        with self._lock:
            self._close_region()
        super()._optimizer_stepped()

    def _region(self, kind: str) -> _Region:
        local, session = self._local, self.session
        last = local.last
        if last is None and len(self._roots) == 1:  # a backward pass on a thread of its own
            root = next(iter(self._roots.values()))
            last = (
                root,
                max(0, root.steps.get("", 0) - (not root.trained)),
                max(0, root.micro - 1),
                {},
            )
        root, step, micro, state = last or (self._nowhere, 0, 0, {})
        region = local.region
        if (
            region is not None
            and region.kind == kind
            and region.root is root
            and (region.step, region.micro) == (step, micro)
        ):
            return region
        self._close_region()
        if last is None:
            local.last = root, step, micro, state
        region = local.region = _Region(kind, root, step, micro, state, session.next_order())
        if root is self._nowhere and not session.begin():
            region.wanted = False
        else:
            region.wanted = session.takes_all or session.selector.wants("", "", 0, "0", step)
        self._regions[id(region)] = region
        return region

    def _close_region(self) -> None:
        if self._local.region is not None:
            self._end_region(self._local.region)
            self._local.region = None

    def _end_region(self, region: _Region) -> None:
        self._regions.pop(id(region), None)
        if region.wanted and not self.session.failed:
            self._sights.call(
                Call(
                    id=region.order,
                    scope="",
                    root=region.root.name,
                    step=region.step,
                    order=region.order,
                    rank=self.session.rank,
                    micro=region.micro,
                    phase="backward" if region.kind == "backward" else "forward",
                    op=region.kind,
                    occurrence=_counted(region.state, f"<{region.kind}>"),
                    kind="region",
                    op_type=region.kind,
                    number=region.number,
                )
            )


class _Seer:
    """What a tensor inside a graph is sighted by."""

    __slots__ = ("keep", "op_type", "placements", "scope")

    def __init__(self, scope: str, op_type: str, keep: bool) -> None:
        self.scope, self.op_type, self.keep = scope, op_type, keep
        self.placements: dict[str, Placement] = {}


# Compiling patches torch for the whole process: one at a time.
_compiling = threading.RLock()


def _name() -> str:
    from torch._functorch.aot_autograd import get_graph_being_compiled

    try:
        return str(get_graph_being_compiled())
    except (IndexError, AttributeError):  # compiled without AOT autograd
        return "graph"


def _counted(table: dict[str, int], key: str) -> int:
    count = table[key] = table.get(key, -1) + 1
    return count


def _plain(path: str) -> str:
    """A module path without the wrapper that torch.compile puts around a model."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _moved(old: str, new: str) -> tuple[str, str]:
    """("blocks.0", "blocks.1") of "blocks.0.fc.weight" and "blocks.1.fc.weight"."""
    a, b = old.split("."), new.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return ".".join(a), ".".join(b)


def _logical(value: Any, shape: Any) -> Any:
    """The buffer in the shape of the node. A buffer has the node's order of elements; only its
    extents may be folded.
    """
    if shape is None or len(shape) == value.dim():
        return value
    wanted = [int(n) if isinstance(n, int) else -1 for n in shape]
    if wanted.count(-1) > 1:
        return value
    try:
        return value.reshape(wanted)
    except RuntimeError:
        return value


def _own(gm: Any) -> Any:
    """A copy that a compile may change. Graphs of branches and loops are changed too, so they are
    copied with it.
    """
    if any(isinstance(child, torch.fx.GraphModule) for child in gm.children()):
        return copy.deepcopy(gm)
    return nodes.copied(gm)


def _mutated(gm: Any) -> tuple[int, ...]:
    """Places of the inputs that the graph writes into."""
    places = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    found: set[int] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        facts = schema_of(node.target)
        for name in facts.writes:
            value = (dict(zip(facts.positional, node.args)) | node.kwargs).get(name)
            for at in nodes.flat(value):
                while (
                    isinstance(at, torch.fx.Node)
                    and at.op == "call_function"
                    and at.args
                    and not nodes.is_value(at)
                ):
                    at = at.args[0]
                if at in places:
                    found.add(places[at])
    return tuple(sorted(found))


def _settled(program: Any) -> Any:
    return msgspec.structs.replace(
        program, constants=tuple(int(getattr(c, "id", c)) for c in program.constants)
    )


def _reported_strides() -> Any:
    """The list in which a compile tells AOT autograd how the outputs of its forward graph lie; None
    where none is kept.
    """
    return getattr(torch._guards.TracingContext.try_get(), "output_strides", None)


def _report_strides(gm: Any) -> None:
    """Tell AOT autograd how the outputs lie, as inductor would have: the backward graph is made for
    it.
    """
    reported = _reported_strides()
    if reported is None or len(reported):
        return
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    for out in nodes.flat(output.args[0]):
        value = out.meta.get("val") if isinstance(out, torch.fx.Node) else None
        reported.append(tuple(value.stride()) if isinstance(value, torch.Tensor) else None)


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


def _kernels(learned: Collected) -> str:
    """Which nodes and source lines each kernel computes, as comments below the text of a graph."""
    kernels: dict[str, dict[str, None]] = {}
    for site in learned.sites.values():
        if site.kernel:
            kernels.setdefault(site.kernel, {}).update(dict.fromkeys(site.origins))
    if not kernels:
        return ""
    sources = {
        n.name: nodes.named(n).source for n in learned.graph.graph.nodes if n.op == "call_function"
    }
    lines = ["", "# kernels: the nodes that each computes, and their source lines"]
    for kernel, origins in kernels.items():
        lines.append(f"# {kernel}: {', '.join(origins)}")
        lines += [
            f"#     {line}"
            for line in dict.fromkeys(sources.get(name, "") for name in origins)
            if line
        ]
    return "\n".join(lines) + "\n"


def compiled_by(
    model: Any,
    listen: Callable[[Any], GraphListener],
    *,
    torch_mode: str | None = None,
    options: Any = None,
    dynamic: Any = None,
    fullgraph: bool = False,
) -> Any:
    """`torch.compile(model)` with what `listen(compiled)` returns listening. The result is a
    context manager and has `close()`.
    """
    backend = _Inductor(torch_mode, options, dynamic)
    made = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    kind = type(made)

    class Compiled(kind):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            """End the capture. The module goes on as it was compiled. Idempotent."""
            atexit.unregister(self.close)
            backend.close()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            self.close()

    Compiled.__name__, Compiled.__qualname__, Compiled.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    made.__class__ = Compiled
    backend.listener = listen(made)
    atexit.register(made.close)
    return made


def backend_with(listener: GraphListener, ended: Callable[[], None] | None = None) -> Any:
    """Inductor for `torch.compile`, its graphs told to a listener that is installed; `close()` ends
    it, with its session.

    ended: called then, in the process that made it.
    """
    backend = _Inductor(None, None, None)
    backend.listener, backend.ended, backend.process = listener, ended, os.getpid()
    atexit.register(backend.close)
    return backend


class _Inductor(torch._TorchCompileInductorWrapper):  # type: ignore[misc]
    """What `torch.compile` takes as backend: inductor, its graphs instrumented as long as a
    listener is there.

    Equal to itself only: dynamo would take code compiled for one capture for another.
    """

    listener: GraphListener | None = None
    ended: Callable[[], None] | None = None
    process = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listener = self.listener
        if listener is None or not listener.active:
            return super().__call__(*args, **kwargs)
        with listener.instrumenting():
            return super().__call__(*args, **kwargs)

    def close(self) -> None:
        """End the capture. What was compiled goes on as it is. Idempotent."""
        if self.listener is not None:
            atexit.unregister(self.close)
            listener, self.listener = self.listener, None
            listener.remove()
            listener.session.close()
            if self.ended is not None and self.process == os.getpid():
                self.ended()

    def __eq__(self, other: Any) -> bool:
        return self is other

    __hash__ = object.__hash__
