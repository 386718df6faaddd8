"""Has inductor say what its code computes: a call of ours behind each kernel (exact), behind each
node (deep), or the graph itself (fx).

Patched while a graph of ours is compiled and restored after; the caches are bypassed, since no key
of theirs knows of the patch.

Mode deep: an operator that only looks behind each node of the graph that inductor lowers. It
keeps a value from being fused away, and that may round it.
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
from whence.instrument.torch.compiled.fx_nodes import copied, is_value, named, origin_of, reads_of
from whence.instrument.torch.compiled.kernel_lines import PATCHES, is_whole

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
"""What is off while graphs are captured, in words, and the settings that say so, by the module that
has them: no cache may answer or keep a graph of ours, and no CUDA graph may replay without our
Python code.
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
    """While this lasts, these `SWITCHES` are off; what this torch has not is passed over."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for module, settings in SWITCHES[name].items():
                config = find(module)
                changes = {s: False for s in settings if _setting(config, s) is not _NONE}
                if changes:
                    stack.enter_context(config.patch(changes))
        yield


def switched() -> list[str]:
    """The `SWITCHES` that are on now: a capture changes them."""
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
    """Its value, `_NONE` where this torch has no such setting."""
    for part in path.split("."):
        config = getattr(config, part, _NONE)
    return config


def is_precompiling() -> bool:
    """Is a graph compiled now to be kept as a package (`aot_compile`, AOTInductor, dynamo's
    `caching_precompile`)? It is written as it is, and nothing of ours may be in it.
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
    """Around everything that compiles a graph of ours: `SWITCHES` are off. Caches of kernels stay:
    they go by the kernel's source, and that is unchanged.
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
    """While this lasts, `compile_fx` compiles by `instead` when not told by what: for those who
    imported it before.
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
    """Compile with what `collected.mode` shows; of mode "fx" only the graph is taken, and None
    returned. Raises what inductor raises.
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
    """The generated code is there, and with it what inductor knows of its kernels; both are gone
    after the compile.
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
    """A pass that puts a tap behind every node with a value of its own, after the pass that the
    user set.
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
    """Put a tap behind every node with a value of its own, and note what it is."""
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
