"""Makes inductor's code show its tensors: by a call after each kernel (exact), after each node
(deep), or by running the graph itself (fx).

Inductor is patched while a graph is compiled for whence, and restored afterwards. Its caches are
bypassed, since their keys do not include the patch.

Mode deep: an operator that only reads is added after each node of the graph that inductor lowers.
It prevents the value from being fused away, which may round it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from whence.errors import CaptureError
from whence.instrument.torch.compiled.collected import Collected, Got, Site, compiling, find, seen
from whence.instrument.torch.compiled.fx_nodes import (
    Named,
    copied,
    flat,
    is_value,
    named,
    origin_of,
    reads_of,
)

CACHES, CUDA_GRAPHS = "the caches of whole graphs", "CUDA graphs"
SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    CACHES: {
        "torch._inductor.config": (
            "fx_graph_cache",
            "fx_graph_remote_cache",
            "bundle_triton_into_fx_graph_cache",
        ),
        "torch._functorch.config": (
            "enable_autograd_cache",
            "enable_remote_autograd_cache",
            "bundled_autograd_cache",
        ),
    },
    CUDA_GRAPHS: {"torch._inductor.config": ("triton.cudagraphs",)},
}
"""Settings that are off while graphs are captured: name in words -> module -> its settings. No
cache may supply or keep an instrumented graph, and no CUDA graph may replay without the Python code
of whence.
"""
_INSTEAD = (
    "mode='deep' (--graph-mode deep) needs none of it, mode='fx' runs the graph without "
    "inductor's code"
)

# (module, class in it or "", name) of everything that is patched or called, by mode.
_POINTS = {
    "": [
        ("torch._inductor.compile_fx", "", "compile_fx"),
        ("torch._inductor.compile_fx", "", "compile_fx_inner"),
        ("torch._inductor.graph", "GraphLowering", "run"),
        ("torch._inductor.config", "", "fx_graph_cache"),
    ],
    "exact": [
        ("torch._inductor.codegen.cpp", "CppScheduling", "flush"),
        ("torch._inductor.codegen.cpp", "CppScheduling", "define_kernel"),
        ("torch._inductor.scheduler", "Scheduler", "codegen_extern_call"),
    ],
    "deep": [
        ("torch._inductor.config", "", "post_grad_custom_post_pass"),
        ("torch.library", "", "Library"),
    ],
}
_NONE = object()
_lock = threading.RLock()


def check(mode: str) -> None:
    """Raise CaptureError when this torch lacks what the mode needs, saying what was looked for."""
    missing = [
        ".".join(filter(None, point))
        for point in (*_POINTS[""], *_POINTS.get(mode, ()))
        if not _has(find(*point[:2]), point[2])
    ]
    if missing:
        instead = (
            f"; {_INSTEAD}"
            if mode == "exact"
            else "; capture at module level instead (whence.capture, --level modules)"
        )
        raise CaptureError(
            f"torch {torch.__version__} cannot be captured in graph mode {mode}: it has no "
            f"{', '.join(missing)}{instead}"
        )


def _has(kind: Any, name: str) -> bool:
    # What a class inherits cannot be patched in it.
    return name in vars(kind) if isinstance(kind, type) else hasattr(kind, name)


@contextlib.contextmanager
def off(names: Iterable[str]) -> Iterator[None]:
    """Context in which these `SWITCHES` are off; settings that this torch lacks are skipped."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for module, settings in SWITCHES[name].items():
                config = find(module)
                changes = {s: False for s in settings if _setting(config, s) is not _NONE}
                if changes:
                    stack.enter_context(config.patch(changes))
        yield


def switched() -> list[str]:
    """The `SWITCHES` that are on now, which a capture turns off."""
    if getattr(find("torch._inductor.config"), "force_disable_caches", False):
        return [name for name in SWITCHES if name != CACHES and _is_on(name)]
    return [name for name in SWITCHES if _is_on(name)]


def _is_on(name: str) -> bool:
    return any(
        _setting(find(module), s) not in (None, False, _NONE)
        for module, settings in SWITCHES[name].items()
        for s in settings
    )


def _setting(config: Any, path: str) -> Any:
    """Value of a setting, `_NONE` where this torch lacks it."""
    for part in path.split("."):
        config = getattr(config, part, _NONE)
    return config


def is_precompiling() -> bool:
    """Whether the graph being compiled is kept as a package (`aot_compile`, AOTInductor, dynamo's
    `caching_precompile`). It is stored as compiled, so it must not contain calls into whence.
    """
    return any(
        getattr(holder, setting, False) is True
        for holder, setting in (
            (find("torch._functorch.config"), "force_autograd_cache"),
            (find("torch._dynamo.config"), "caching_precompile"),
            (find("torch._inductor.virtualized", "V"), "aot_compilation"),
        )
    )


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Context for compiling an instrumented graph: `SWITCHES` are off. Kernel caches stay on: their
    key is the kernel's source, which is unchanged.
    """
    from torch._inductor import config

    changes: dict[str, Any] = {}
    # Kernels to nodes to lines. Older torch has another name for it, or none.
    if hasattr(config.trace, "provenance_tracking_level"):
        changes["trace.provenance_tracking_level"] = max(1, config.trace.provenance_tracking_level)
    with off(SWITCHES), config.patch(changes):
        yield


@contextlib.contextmanager
def inner_compile(function: Any, instead: Callable[..., Any]) -> Iterator[None]:
    """Context in which `compile_fx` uses `instead` as its default `inner_compile`, also for code
    that imported it earlier.
    """
    names = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
    defaults = function.__defaults__ if "inner_compile" in names else None
    if not defaults:
        yield
        return
    position = names.index("inner_compile") - function.__code__.co_argcount
    changed = list(defaults)
    changed[position] = instead
    function.__defaults__ = tuple(changed)
    try:
        yield
    finally:
        function.__defaults__ = defaults


def compile_graph(gm: Any, example_inputs: Any, collected: Collected, how: dict[str, Any]) -> Any:
    """Compile a graph so that it shows its tensors as `collected.mode` says. In mode "fx" only the
    graph is kept, and None is returned. Raises what inductor raises.
    """
    from torch._inductor import compile_fx, config

    changes: dict[str, Any] = {}
    if collected.mode == "deep":
        changes["post_grad_custom_post_pass"] = _taps(config.post_grad_custom_post_pass, collected)
    if collected.mode == "exact" and any(
        isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in example_inputs
    ):
        changes["generate_intermediate_hooks"] = collected.stock = True
    with _lock, outside(), config.patch(changes), _patched(collected):
        outer, compiling.collected = compiling.collected, collected
        try:
            return compile_fx.compile_fx_inner(gm, example_inputs, **how)
        except Got:
            return None
        finally:
            compiling.collected = outer


@contextlib.contextmanager
def _patched(collected: Collected) -> Iterator[None]:
    undo: list[tuple[Any, str, Any]] = []

    def put(where: Any, name: str, make: Callable[[Any], Any]) -> None:
        if where is None or (original := where.__dict__.get(name)) is None:
            return
        undo.append((where, name, original))
        setattr(where, name, functools.wraps(original)(make(original)))

    lowering = find("torch._inductor.graph", "GraphLowering")
    saved = getattr(lowering, "save_output_code", None)
    try:
        put(lowering, "run", _run)
        for module, kind, name, replacement in PATCHES if collected.mode == "exact" else ():
            put(find(module, kind), name, replacement)
        if hasattr(lowering, "save_output_code"):
            lowering.save_output_code = staticmethod(functools.partial(_code, collected, saved))
        yield
    finally:
        if hasattr(lowering, "save_output_code"):
            lowering.save_output_code = saved if saved is None else staticmethod(saved)
        for where, name, original in reversed(undo):
            setattr(where, name, original)


def _code(collected: Collected, previous: Any, text: str) -> None:
    """Keep what inductor knows of its kernels when the code is generated, since it is gone after
    the compile.
    """
    if previous is not None:
        previous(text)
    debug = find("torch._inductor.debug")
    for name in (
        "_inductor_triton_kernel_to_post_grad_node_info",
        "_inductor_kernel_stack_trace",
        "_inductor_post_to_pre_grad_nodes",
    ):
        value = getattr(debug, name, None)
        if isinstance(value, dict):
            collected.mapping[name] = {str(k): v for k, v in value.items()}


def _run(original: Any) -> Any:
    def run(self: Any, *args: Any) -> Any:
        collected = compiling.collected
        if collected is not None and collected.graph is None and is_whole(self):
            collected.graph = copied(self.module)
            names = (n.name for n in collected.graph.graph.nodes if n.op == "call_function")
            collected.nodes = {name: place for place, name in enumerate(names)}
            if collected.mode == "fx":
                raise Got
        return original(self, *args)

    return run


def _taps(previous: Any, collected: Collected) -> Any:
    """A graph pass that adds a tap after every node with a tensor of its own. previous: the user's
    pass, which runs first.
    """
    _define_tap()
    base = find("torch._inductor.custom_graph_pass", "CustomGraphPass") or object

    class Taps(base):  # type: ignore[misc, valid-type]
        def __call__(self, graph: Any) -> None:
            if previous is not None:
                previous(graph)
            # not of the graphs of patterns and constants that are lowered on the way
            if compiling.collected is not None:
                _put_taps(graph, collected)

        def uuid(self) -> Any:
            return None  # no cache may keep it

    return Taps()


def _put_taps(graph: Any, collected: Collected) -> None:
    """Add a tap after every node with a tensor of its own, and note its `Site`."""
    collected.sites.clear()
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node in list(graph.nodes):
        if not is_value(node):
            continue
        name = named(node)
        collected.sites[node.name] = Site(
            name, "", "", (node.name,), reads_of(node), node.meta["val"].shape
        )
        with graph.inserting_before(_after(node, last)):
            tap = graph.call_function(
                torch.ops.whence.tap.default, (node, f"{collected.key}:{node.name}")
            )
            tap.meta["val"] = None


def _after(node: Any, last: Any) -> Any:
    following = node.next
    while (
        following is not last
        and origin_of(following) is origin_of(node)
        and following.op == "call_function"
    ):
        following = following.next  # the results of one operator stay together
    return following


_tap: list[Any] = []


def _define_tap() -> None:
    if _tap:
        return
    library = torch.library.Library("whence", "FRAGMENT")
    tags = tuple(
        getattr(torch.Tag, n)
        for n in ("cudagraph_unsafe", "flexible_layout")
        if hasattr(torch.Tag, n)
    )
    library.define("tap(Tensor value, str name) -> ()", tags=tags)
    library.impl("tap", _look, "CompositeExplicitAutograd")
    library.impl("tap", lambda value, name: None, "Meta")
    torch.fx.node.has_side_effect(torch.ops.whence.tap.default)
    _tap.append(library)


def _look(value: Any, name: str) -> None:
    key, _, node = name.partition(":")
    seen(key, node, value)


# Mode exact: a line behind each kernel in the Python code that calls the kernels, before the next
# kernel, which may use a buffer again. The kernels are those of an uninstrumented compile.
#
# Each of `PATCHES` takes a method of inductor's and returns what is put in its place.

_SEEN = "seen as _whence_seen"
_NO_CHANGE = {"expand", "view", "reshape", "slice", "alias", "detach"}
"""Views that keep the order of elements when they have the shape of their input."""


def is_whole(graph: Any) -> bool:
    """Whether this is the main graph, not that of a branch or of constants."""
    return type(graph).__name__ == "GraphLowering" and not getattr(graph, "is_const_graph", False)


def _define_kernel(original: Any) -> Any:
    def define_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if compiling.collected is not None:
            compiling.collected.kernel = str(name)
        return name

    return define_kernel


def _flush(original: Any) -> Any:
    def flush(self: Any) -> Any:
        collected = compiling.collected
        nodes = list(self.kernel_group.scheduled_nodes) if collected is not None else []
        live = set(self.kernel_group.args.live_output_buffers()) if nodes else set()
        out = original(self)
        if collected is not None and nodes:
            _show(collected, nodes, live, collected.kernel)
        return out

    return flush


def _template(original: Any) -> Any:
    def codegen_template(
        self: Any, template_node: Any, epilogue_nodes: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = original(self, template_node, epilogue_nodes, *args, **kwargs)
        if (collected := compiling.collected) is not None:
            _show(collected, [template_node, *epilogue_nodes], None, collected.kernel)
        return out

    return codegen_template


def _extern(original: Any) -> Any:
    def codegen_extern_call(self: Any, scheduler_node: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, scheduler_node, *args, **kwargs)
        if (collected := compiling.collected) is not None:
            node = getattr(scheduler_node, "node", None)
            kernel = (
                getattr(node, "python_kernel_name", None)
                or getattr(node, "op_overload", None)
                or type(node).__name__
            )
            _show(collected, [scheduler_node], None, str(kernel))
        return out

    return codegen_extern_call


def _schedule(original: Any) -> Any:
    """For devices where a flag of torch makes inductor write a hook after each kernel, with the
    node's name: only the description of the tensor is noted here.
    """

    def codegen_node_schedule(self: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, features, *args, **kwargs)
        if (collected := compiling.collected) is not None:
            nodes = (
                list(features.scheduler_nodes())
                if hasattr(features, "scheduler_nodes")
                else [n for n in features if hasattr(n, "node")]
            )
            _show(collected, nodes, None, collected.kernel, lines=False)
        return out

    return codegen_node_schedule


def _show(
    collected: Collected,
    nodes: list[Any],
    live: set[str] | None,
    kernel: str,
    *,
    lines: bool = True,
) -> None:
    """Note which tensors a kernel computes. nodes: the scheduler's nodes in the kernel. live:
    buffers that outlive the kernel, None for all. lines: write the line of code that shows each
    tensor.
    """
    from torch._inductor.virtualized import V

    graph, wrapper = V.graph, V.graph.wrapper_code
    if not is_whole(graph):
        collected.drop("inside a branch or loop of the graph")
        return
    if not getattr(wrapper, "supports_intermediate_hooks", True):
        return
    own_buffers = {name for node in nodes for name in _buffers(node)}
    reads = dict.fromkeys(
        name for node in nodes for name in _reads(node) if name not in own_buffers
    )
    values = _values(collected, graph, nodes, live, lines)
    names = {node.name for _, node in values if node is not None}
    names |= _computed(collected, graph, nodes, own_buffers, reads)
    origins = sorted(names & collected.nodes.keys(), key=collected.nodes.__getitem__)
    for name, node in values:
        named_node = named(node) if node is not None else Named(name, kernel, kernel, "", "", "")
        shape = node.meta["val"].shape if node is not None else None
        key = name if lines else named_node.name
        collected.sites[key] = Site(named_node, name, kernel, tuple(origins), tuple(reads), shape)
        if lines:
            wrapper.add_import_once(f"from {__name__.rpartition('.')[0]}.collected import {_SEEN}")
            wrapper.writeline(f"_whence_seen({collected.key!r}, {name!r}, {name})")


def _values(
    collected: Collected, graph: Any, nodes: list[Any], live: set[str] | None, lines: bool
) -> list[tuple[str, Any]]:
    """(buffer, node or None) of the tensors that are complete after a kernel. Parameters as for
    `_show`.
    """
    removed = set(graph.removed_buffers) | set(getattr(graph, "inplaced_to_remove", ()))
    values: list[tuple[str, Any]] = []
    for own_name in (name for node in nodes for name in _buffers(node)):
        name = _changed(graph, own_name)
        if name in removed or (live is not None and name == own_name and name not in live):
            continue
        buffer = _buffer(graph, name)
        if (
            buffer is None
            or not _is_tensor(buffer)
            or (name == own_name and _unfinished(graph, buffer, collected))
        ):
            continue
        node = _node_of(buffer, collected) or _handed(graph, buffer, collected)
        whole = _joined(graph, buffer)
        if whole is not None:
            collected.parts.add(name)
            names = [part.get_name() for part in whole.inputs]
            if (
                lines
                and collected.parts.issuperset(names)
                and (joined := _node_of(whole, collected)) is not None
            ):
                values.append((whole.get_name(), joined))
            if node is None:
                continue  # a part of what is taken when all parts are there
        if node is None:
            collected.drop("no node of the graph is its value")
            if not collected.every:
                continue
        values.append((name, node))
    return values


def _computed(
    collected: Collected, graph: Any, nodes: list[Any], own_buffers: set[str], reads: Iterable[str]
) -> set[str]:
    """Names of the graph's nodes that a kernel computes: those between what it reads and its own
    buffers.
    """

    def nodes_of(names: Iterable[str]) -> list[Any]:
        buffers = [b for name in names if (b := _buffer(graph, name)) is not None]
        return [n for b in buffers if (n := _node_of(b, collected)) is not None]

    between = _between({n.name for n in nodes_of(reads)}, nodes_of(own_buffers))
    return between & {n for node in nodes for n in _origins(node.node, collected)}


def _buffer(graph: Any, name: str) -> Any:
    find = getattr(graph, "try_get_buffer", None) or graph.name_to_buffer.get
    return find(name)


def _changed(graph: Any, name: str) -> str:
    """The buffer inside the graph that the kernel with output `name` changed in place, if no later
    kernel changes it; else `name`.
    """
    scheduler = graph.scheduler
    whole = getattr(scheduler, "mutation_real_name", {}).get(name, name)
    last = getattr(scheduler, "mutation_renames", {}).get(whole, name)
    return name if last != name or whole in graph.graph_inputs else str(whole)


def _unfinished(graph: Any, buffer: Any, collected: Collected) -> bool:
    """Whether a later kernel changes this buffer in place and only then gives it its node's
    value.
    """
    changed = getattr(graph.scheduler, "mutation_renames", {}).get(buffer.get_name())
    changer = getattr(graph.scheduler, "name_to_buf", {}).get(changed)
    node = _node_of(buffer, collected)
    return (
        changer is not None and node is not None and node.name in _origins(changer.node, collected)
    )


def _between(starts: set[str], ends: list[Any]) -> set[str]:
    """Names of the nodes on the way from the values `starts`, excluded, to `ends`. Inputs of an end
    that are not among `starts` are included.
    """
    inner: dict[str, None] = {}
    todo = [*ends]
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node.name not in inner and node.name not in starts:
            inner[node.name] = None
            todo += node.all_input_nodes
    return set(inner)


def _buffers(node: Any) -> list[str]:
    outputs = getattr(node, "get_outputs", None)
    return [o.get_name() for o in outputs()] if outputs is not None else [node.get_name()]


def _reads(node: Any) -> list[str]:
    return [d.name for d in node.read_writes.reads if type(d).__name__ != "WeakDep"]


def _origins(node: Any, collected: Collected) -> list[str]:
    return [n.name for n in getattr(node, "origins", ()) if n.name in collected.nodes]


def _is_tensor(buffer: Any) -> bool:
    layout = getattr(buffer, "layout", None)
    return type(layout).__name__ not in ("NoneLayout", "MultiOutputLayout", "NoneType")


def _node_of(buffer: Any, collected: Collected) -> Any:
    """The node whose value is in this buffer, None where none is known."""
    node = buffer.get_origin_node() if hasattr(buffer, "get_origin_node") else None
    if (
        node is None
        or node.name not in collected.nodes
        or not isinstance(node.meta.get("val"), torch.Tensor)
    ):
        return None
    # A view that changes nothing took over the buffer of what it is a view of.
    while not is_value(node) and _same(node):
        node = node.args[0]
    return node


def _joined(graph: Any, buffer: Any) -> Any:
    """The buffer that this one is a part of, None for none: the operands of a cat are written
    directly into its result.
    """
    view = getattr(getattr(buffer, "layout", None), "view", None)
    whole = (
        _buffer(graph, view.get_name()) if view is not None and hasattr(view, "get_name") else None
    )
    return whole if type(whole).__name__ == "ConcatKernel" else None


def _handed(graph: Any, buffer: Any, collected: Collected) -> Any:
    """The node whose value was written to this buffer as the input of an operator that is not an
    inductor kernel; None where none is known.
    """
    name = buffer.get_name()
    scheduled = getattr(graph.scheduler, "name_to_buf", {}).get(name)
    for user in getattr(scheduled, "users", ()):
        taker = getattr(user.node, "node", None)
        if not getattr(user.node, "is_extern", bool)() or taker is None:
            continue
        origins = [n for n in getattr(taker, "origins", ()) if n.name in collected.nodes]
        if not origins:
            continue
        node = max(origins, key=lambda n: collected.nodes[n.name])
        arguments = [
            n
            for n in flat([*node.args, *node.kwargs.values()])
            if isinstance(getattr(n, "meta", {}).get("val"), torch.Tensor)
        ]
        inputs = [
            "" if type(i).__name__ == "ReinterpretView" else i.get_name()
            for i in getattr(taker, "inputs", ())
        ]
        if (
            len(arguments) == len(inputs)
            and inputs.count(name) == 1
            and _looks_like(buffer, node := arguments[inputs.index(name)])
        ):
            while not is_value(node) and _same(node):
                node = node.args[0]
            return node
    return None


def _looks_like(buffer: Any, node: Any) -> bool:
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(value, torch.Tensor)
        or value.dtype != buffer.get_dtype()
    ):
        return False
    return [str(n) for n in buffer.get_size()] == [str(n) for n in value.shape]


def _same(node: Any) -> bool:
    if getattr(origin_of(node).target, "_opname", "") not in _NO_CHANGE or not isinstance(
        node.args[0], torch.fx.Node
    ):
        return False
    source = node.args[0].meta.get("val")
    return (
        node.args[0].op == "call_function"
        and isinstance(source, torch.Tensor)
        and source.shape == node.meta["val"].shape
    )


# (module of inductor, class, method, what makes its replacement)
PATCHES = (
    ("torch._inductor.codegen.cpp", "CppScheduling", "define_kernel", _define_kernel),
    ("torch._inductor.codegen.cpp", "CppScheduling", "flush", _flush),
    ("torch._inductor.codegen.cpp", "CppScheduling", "codegen_template", _template),
    ("torch._inductor.scheduler", "Scheduler", "codegen_extern_call", _extern),
    ("torch._inductor.codegen.triton", "TritonScheduling", "define_kernel", _define_kernel),
    ("torch._inductor.codegen.simd", "SIMDScheduling", "codegen_node_schedule", _schedule),
)
