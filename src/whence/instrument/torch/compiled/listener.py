"""Records compiled graphs: every execution of an inductor graph with the tensors inside it, along
with the modules that stay eager.

`torch.compile` is instrumented by letting its backend pass each graph to whence instead of inductor
(`inductor_taps` has the patches). Each execution is a call of kind "graph" below the module that
ran it, each tensor in it a call of kind "operator" below that. The first execution of a graph is
also run on clones with no tensor taken: whether the bits differ is the observer effect.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from whence.errors import CaptureError
from whence.instrument.call_frames import CallFrames
from whence.instrument.guard import Replacements
from whence.instrument.session import Session
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled import inductor_taps as inductor
from whence.instrument.torch.compiled import what_returned
from whence.instrument.torch.compiled.collected import Collected
from whence.instrument.torch.compiled.fx_interpreter import interpreted
from whence.instrument.torch.compiled.graph import Graph, RunsGraphs
from whence.instrument.torch.compiled.graph_runs import GraphRuns, GraphThread
from whence.instrument.torch.compiled.module_paths import ModulePaths
from whence.instrument.torch.compiled.observer_effect import Cannot, difference, silently
from whence.instrument.torch.compiled.results import Results
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.program_cache import ProgramCache
from whence.instrument.torch.regions import Region, Regions
from whence.instrument.wording import raised
from whence.records.observed import SWITCHED


class GraphListener(Listener):
    """A `Listener` that also records what compiled graphs compute.

    folder: of the run, for the texts of graphs. program: instrument every torch.compile of the
    process, not only those asked for.
    """

    def __init__(
        self, session: Session, model: Any = None, *, folder: str, program: bool = False, **how: Any
    ) -> None:
        self._everything = program
        self._replaced = Replacements()
        super().__init__(session, model, thread=GraphThread(), **how)
        self.programs = _ModulePrograms(
            session, self.registry, self.frames, self._compiled_code, self.writer
        )
        paths = ModulePaths(self.frames, self.modules)
        self._compiler = GraphCompiler(session, self.frames, paths, folder)
        self.instrumenting = self._compiler.instrumenting
        self._regions = Regions(session, self.registry, self.thread)
        self._runs = GraphRuns(
            session,
            self.registry,
            self.frames,
            self.writer,
            paths=paths,
            region=self._region,
            tell_mode=self._compiler.tell_mode,
        )
        self._compiler.runs = self._runs
        wanted = what_returned.asked() if program else None
        self._results = Results(*wanted) if wanted is not None else None

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

        self._replaced.put(kind, "__call__", __call__)
        wrapper = getattr(torch, "_TorchCompileWrapper", None)
        if wrapper is not None:
            original = wrapper.__call__

            @functools.wraps(original)
            def __call__(wrapper: Any, gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
                if not listener.active or isinstance(
                    getattr(wrapper, "compiler_fn", None), _Inductor
                ):
                    return original(wrapper, gm, inputs, *args, **kwargs)
                compiles = listener._compiler.compiles
                with listener.instrumenting(gm):
                    out = original(wrapper, gm, inputs, *args, **kwargs)
                    return (
                        out
                        if listener._compiler.compiles > compiles
                        else listener._compiler.other_backend(wrapper, gm, inputs, out)
                    )

            self._replaced.put(wrapper, "__call__", __call__)
        if self._results is not None:
            self._results.install()

    def remove(self) -> None:
        """Stop listening. What was compiled meanwhile keeps its code, which takes nothing any
        more.
        """
        if not self._removed:
            self.active = False
            if self._results is not None:
                self._results.finish(self._compiler.switched)
            self._replaced.remove()
            if not self.session.failed:
                with self.frames.lock:
                    self._regions.close_all()
            self._runs.clear()
        super().remove()

    def abandon(self) -> None:
        """Stop without writing more: in a forked child, whose own listener watches its results."""
        if self._results is not None:
            self._results.remove()
        super().abandon()

    def _begin_root(self, frame: ModuleFrame, root: ModuleRoot) -> None:
        self._regions.close()
        super()._begin_root(frame, root)
        if frame.phase != "recompute":
            self.thread.last = root, frame.step, frame.micro, frame.counts

    def _optimizer_stepped(self, optimizer: Any, is_skipped: bool) -> None:
        with self.frames.lock:
            self._regions.close()
        super()._optimizer_stepped(optimizer, is_skipped)

    def _region(self, kind: str) -> Region:
        """The region of a graph that runs outside any module."""
        thread, roots = self.thread, self.modules.roots
        if thread.last is None and len(roots) == 1:  # a backward pass on a thread of its own
            root = next(iter(roots.values()))
            thread.last = root, root.trained_step, max(0, root.micro - 1), {}
        elif thread.last is None:
            thread.last = self._regions.nowhere, 0, 0, {}
        return self._regions.enter(kind, *thread.last)


class _ModulePrograms(ProgramCache):
    """Programs of modules, except modules that run graphs."""

    def program_of(self, frame: ModuleFrame, error: str) -> tuple[str, str]:
        if frame.operators and not frame.note:
            return "", "its graphs are calls of their own"
        return super().program_of(frame, error)


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
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    kind = type(compiled)

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
    compiled.__class__ = Compiled
    backend.listener = listen(compiled)
    atexit.register(compiled.close)
    return compiled


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
    """A backend for `torch.compile`: inductor, with its graphs instrumented while a listener is
    active.

    Equal only to itself: otherwise dynamo would take code compiled for one capture for another.
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


# Has `torch.compile` hand each graph to us in the place of inductor, and compiles it so that its
# tensors are shown.
#
# Graphs that a backend does not compile but has Python run (`eager`, one's own that returns
# `gm.forward`).
#
# What dynamo traced calls functions of torch; it is lowered to operators as AOTAutograd does,
# without decompositions, and run node by node where the first execution shows that the bits are
# the same. Where they are not, the boundary is all there is.

# Compiling patches torch for the whole process: one at a time.
_compiling = threading.RLock()


class GraphCompiler:
    """Compiles graphs so that they show their tensors. folder: of the run, for the texts of graphs.
    runs: runs the graphs; set after construction.
    """

    runs: RunsGraphs

    def __init__(
        self, session: Session, frames: CallFrames, paths: ModulePaths, folder: str
    ) -> None:
        self._session, self._frames, self._paths = session, frames, paths
        self._folder = folder
        self.mode = session.options.graph_mode
        # inductor takes seconds to import: of a whole program not before it compiles
        self._checked = False
        self._ids: dict[str, str] = {}
        self._compiled: dict[str, list[str]] = {}  # frame of dynamo's -> its compiles
        self._notes: set[str] = set()
        self.compiles = 0
        self.switched: dict[str, None] = {}

    def _new_graph(self, modules: dict[str, str], *, backward: bool) -> Graph:
        return Graph(self.runs, self.mode, _name(), self._number(), backward, modules)

    @contextlib.contextmanager
    def instrumenting(self, whole: Any = None) -> Iterator[None]:
        """Context in which graphs passed to inductor on this thread go to whence.

        whole: the graph that dynamo gave to a backend which may have imported `compile_fx` earlier.
        """
        from torch._inductor import compile_fx

        if inductor.is_precompiling():
            self._tell(
                "inside-not-seen",
                "a graph that is compiled to be kept as a package is left as it is: only the "
                "boundary of what it made is captured",
            )
            yield
            return
        if not self._checked:
            try:
                inductor.check(self.mode)
            except CaptureError as why:
                self._tell("inside-not-seen", str(why))
                yield
                return
            self._checked = True
        self._switch(*inductor.switched())
        with _compiling, inductor.outside():
            original, thread = compile_fx.compile_fx, threading.get_ident()

            @functools.wraps(original)
            def compiled(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if args or "inner_compile" in kwargs or threading.get_ident() != thread:
                    return original(gm, example_inputs, *args, **kwargs)
                inner = functools.partial(self._compile, self._paths.of_variables(gm))
                return original(gm, example_inputs, inner_compile=inner, **kwargs)

            def by_default(gm: Any, example_inputs: Any, **how: Any) -> Any:
                if threading.get_ident() != thread:
                    return compile_fx.compile_fx_inner(gm, example_inputs, **how)
                return self._compile(self._paths.of_variables(whole), gm, example_inputs, **how)

            compile_fx.compile_fx = compiled
            try:
                with inductor.inner_compile(original, by_default):
                    yield
            finally:
                if compile_fx.compile_fx is compiled:
                    compile_fx.compile_fx = original

    def _switch(self, *names: str) -> None:
        """Note which settings differ from the program's while its graphs compile. In mode fx its
        graphs do not run its compiled code anyway.
        """
        if self.mode == "fx":
            return
        self._tell(SWITCHED, "compiled graphs show their tensors to the capture")
        for name in names:
            self.switched[name] = None
            self._tell(SWITCHED, f"{name} are off while graphs are captured")

    def other_backend(self, wrapper: Any, gm: Any, inputs: Any, out: Any) -> Any:
        """The code to run in place of what another backend returned: the same code where that is
        not a graph run by Python.
        """
        name = getattr(wrapper, "compiler_name", "") or getattr(
            getattr(wrapper, "compiler_fn", None), "__name__", type(wrapper).__name__
        )
        modules = self._paths.of_variables(gm)

        def take(backward: bool, lowered: Any) -> Any:
            graph = self._new_graph(modules, backward=backward)
            graph.mode = "fx"
            collected = Collected(graph.key, "fx", self._session.options.graph_buffers)
            collected.graph = nodes.copied(lowered)
            graph.learn(collected)
            graph.code["fx"] = interpreted(graph.module, graph.ran)
            self.tell_mode(graph, self._write_texts(graph, nodes.readable(gm)))
            return graph

        instrumented = _shown(out, inputs, name, take, self._tell, self._frames.aside)
        if instrumented is None:
            self._tell(
                "inside-not-seen",
                f"compiled with the backend {name}: only the boundary of what it made is captured",
            )
        return out if instrumented is None else instrumented

    def _tell(self, kind: str, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._session.note(kind, text)

    def _compile(self, modules: dict[str, str], gm: Any, example_inputs: Any, **how: Any) -> Any:
        """Replaces inductor's compile_fx_inner, for forward, backward and inference graphs."""
        from torch._inductor import compile_fx

        self.compiles += 1
        if self._frames.active:
            try:
                code = self._make(modules, gm, example_inputs, how)
            except Exception as error:  # noqa: BLE001 - the compiler's own errors come again, from the uninstrumented compile
                self._session.note(
                    "graph",
                    f"{_name()} could not be instrumented, only its boundary is captured: "
                    f"{raised(error)}",
                )
                code = None
            if code is not None:
                return code
            if reported := _reported_strides():
                reported.clear()
        return compile_fx.compile_fx_inner(gm, example_inputs, **how)

    def _make(
        self, modules: dict[str, str], gm: Any, example_inputs: Any, how: dict[str, Any]
    ) -> Any:
        graph = self._new_graph(modules, backward=bool(how.get("is_backward")))
        if how.get("cudagraphs"):  # options of one torch.compile, unlike a setting of inductor's
            self._switch(inductor.CUDA_GRAPHS)
            how = {**how, "cudagraphs": type(how["cudagraphs"])(False)}
        original = nodes.readable(gm)
        every = self._session.options.graph_buffers
        out: Any = None
        if self.mode == "fx":
            modes: tuple[str, ...] = ("fx",)
        else:
            modes = (
                ("exact", "deep") if self.mode == "deep" or how.get("cpp_wrapper") else ("exact",)
            )
        for mode in modes:
            collected = Collected(graph.key, mode, every)
            code = self._instrumented(graph, _own(gm), example_inputs, collected, how)
            if collected.graph is None or (code is None and mode != "fx"):
                break
            graph.learn(collected)
            graph.mode = mode
            if mode == "fx":
                graph.code[mode], out = interpreted(graph.module, graph.ran), graph
                _report_strides(graph.module)
                break
            graph.code[mode] = getattr(code, "current_callable", None) or code
            out = out or code
        if out is None:
            return None
        if graph.mode != self.mode:
            why = (
                "code in C++ alone (cpp_wrapper) has no place for mode exact"
                if graph.mode == "deep"
                else "mode deep was not possible"
            )
            self._session.note("graph", f"{graph.words} is captured in mode {graph.mode}: {why}")
        self.tell_mode(graph, self._write_texts(graph, original))
        if getattr(out, "current_callable", None) is None:
            return graph
        out.current_callable = graph
        return out

    def _instrumented(
        self, graph: Graph, gm: Any, example_inputs: Any, collected: Collected, how: dict[str, Any]
    ) -> Any:
        reported = _reported_strides()
        warnings = list(reported or ())
        if reported:
            reported.clear()
        try:
            code = inductor.compile_graph(gm, example_inputs, collected, how)
        except Exception as error:  # noqa: BLE001 - the compiler's own errors come again from the uninstrumented compile
            self._session.note(
                "graph",
                f"{graph.words} could not be compiled for mode {collected.mode}: {raised(error)}",
            )
            code = None
        if reported is not None and warnings:
            unchanged = warnings == list(reported)
            reported[:] = warnings
            if code is not None and not unchanged:
                self._session.note(
                    "graph",
                    f"{graph.words}: mode {collected.mode} would lay its outputs out differently, "
                    "mode exact is used",
                )
                code = None
        return code

    def _number(self) -> tuple[str, str]:
        """(id counted within the run, torch's id) of the graph being compiled."""
        compile_id = str(torch._guards.CompileContext.current_compile_id() or "")
        if compile_id not in self._ids:
            frame = self._compiled.setdefault(compile_id.partition("/")[0], [])
            frame.append(compile_id)
            self._ids[compile_id] = f"{list(self._compiled.values()).index(frame)}/{len(frame) - 1}"
        return self._ids[compile_id], compile_id

    def tell_mode(self, graph: Graph, text: str = "") -> None:
        learned = graph.learned[graph.mode]
        sentence = f"{graph.words} is {graph.name}, mode {graph.mode}"
        if graph.mode == "fx":
            sentence += (
                f": {sum(map(nodes.is_value, graph.module.graph.nodes))} nodes run one by one"
            )
        else:
            named = sum(1 for site in learned.sites.values() if site.shape is not None)
            lost = "".join(
                f", {n} {'named by no node' if learned.every else 'not kept'}: {why}"
                for why, n in learned.dropped.items()
            )
            sentence += (
                f": {named} {'kernel buffers' if graph.mode == 'exact' else 'nodes'} named{lost}"
            )
        self._session.note("graph", f"{sentence}; text in {text}" if text else sentence)

    def _write_texts(self, graph: Graph, original: str) -> str:
        """Write the graph before and after optimisation into the run. Returns the name of the
        second file, "" if that failed.
        """
        learned = graph.learned[graph.mode]
        stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S%f")
        tail = f"{graph.name}_rank_{self._session.rank}_pid_{os.getpid()}_ts_{stamp}.txt"
        optimized = nodes.readable(graph.module) + _kernels(learned)
        with contextlib.suppress(OSError):
            self._session.sink()
            for name, text in (("original", original), ("optimized", optimized)):
                (Path(self._folder) / f"dynamo_{name}_graph_{tail}").write_text(text)
            return f"dynamo_optimized_graph_{tail}"
        return ""


def _name() -> str:
    from torch._functorch.aot_autograd import get_graph_being_compiled

    try:
        return str(get_graph_being_compiled())
    except (IndexError, AttributeError):  # compiled without AOT autograd
        return "graph"


def _own(gm: Any) -> Any:
    """A copy of the graph that a compile may change. Subgraphs of branches and loops are changed
    too, so they are copied as well.
    """
    if any(isinstance(child, torch.fx.GraphModule) for child in gm.children()):
        return copy.deepcopy(gm)
    return nodes.copied(gm)


def _reported_strides() -> Any:
    """The list in which a compile reports the strides of its forward outputs to AOT autograd; None
    where there is none.
    """
    return getattr(torch._guards.TracingContext.try_get(), "output_strides", None)


def _report_strides(gm: Any) -> None:
    """Report the strides of the outputs to AOT autograd, as inductor would: the backward graph is
    made for them.
    """
    reported = _reported_strides()
    if reported is None or len(reported):
        return
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    for out in nodes.flat(output.args[0]):
        value = out.meta.get("val") if isinstance(out, torch.fx.Node) else None
        reported.append(tuple(value.stride()) if isinstance(value, torch.Tensor) else None)


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


_Take = Callable[[bool, Any], Any]
"""(is it a backward graph, the lowered graph) -> the code to run for it."""
_Tell = Callable[[str, str], None]


def python_graph(compiled: Any) -> Any:
    """The graph that a backend's result runs, None for any other result."""
    owner = getattr(compiled, "__self__", compiled)
    runs = compiled is owner or getattr(compiled, "__name__", "") in (
        "forward",
        "_lazy_forward",
        "__call__",
    )
    return owner if isinstance(owner, torch.fx.GraphModule) and runs else None


def _shown(
    compiled: Any,
    example_inputs: Sequence[Any],
    name: str,
    take: _Take,
    tell: _Tell,
    quiet: Callable[[], Any],
) -> Any:
    """Code to run in place of what a backend returned; None where that is not a graph run by
    Python, or cannot be lowered.

    name: of the backend. take: makes the code for a lowered graph. tell: notes (kind, text) for the
    run. quiet: a context in which nothing is captured.
    """
    from torch._dynamo.backends.common import aot_autograd

    module = python_graph(compiled)
    if module is None:
        return None
    graphs: list[Any] = []

    def taken(backward: bool, gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return take(backward, gm)

    try:
        lower = aot_autograd(
            fw_compiler=functools.partial(taken, False), bw_compiler=functools.partial(taken, True)
        )
        lowered = lower(module, example_inputs)
    except Exception as error:  # noqa: BLE001 - whatever AOTAutograd cannot lower runs as the backend left it
        tell(
            "graph",
            f"a graph of the backend {name} could not be lowered to operators: "
            f"{type(error).__name__}: {str(error)[:200]}",
        )
        return None
    if not graphs:
        return None
    chosen: list[Any] = []

    def run(*inputs: Any) -> Any:
        if not chosen:
            with quiet():
                chosen.append(
                    lowered
                    if _alike(graphs[0], compiled, lowered, inputs, name, tell)
                    else compiled
                )
        return chosen[0](*inputs)

    return run


def _alike(
    graph: Any, compiled: Any, lowered: Any, inputs: Sequence[Any], name: str, tell: _Tell
) -> bool:
    """Whether both give the same results and leave the same inputs, bit by bit. Both run on
    clones.
    """
    places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(inputs[i].requires_grad for i in places):
        problem = (
            "is captured at its boundary: its gradients would come from another graph; under "
            "torch.no_grad() its nodes are captured"
        )
        tell("inside-not-seen", f"a graph of the backend {name} {problem}")
        return False
    try:
        expected, actual = (
            silently(graph, functools.partial(_on, code), inputs, (), places)
            for code in (compiled, lowered)
        )
        changed = difference(expected, actual)
    except Cannot as why:
        changed = str(why)
    except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
        changed = f"{type(error).__name__}: {str(error)[:200]}"
    if changed:
        tell(
            "inside-not-seen",
            f"a graph of the backend {name} is captured at its boundary: run node by node it "
            f"would differ ({changed})",
        )
    else:
        tell(
            "observer",
            f"observer effect: none (graphs of the backend {name} run node by node, against what "
            "it left)",
        )
    return not changed


def _on(code: Any, inputs: Sequence[Any]) -> Any:
    return code(*inputs)
