"""Mode exact: a line behind each kernel in the Python code that calls the kernels, before the next
kernel, which may use a buffer again. The kernels are those of an uninstrumented compile.

Each of `PATCHES` takes a method of inductor's and returns what is put in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from whence.instrument.torch.compiled.collected import Collected, Site, compiling
from whence.instrument.torch.compiled.fx_nodes import Named, flat, is_value, named, origin_of

_SEEN = "seen as _whence_seen"
_NO_CHANGE = {"expand", "view", "reshape", "slice", "alias", "detach"}
"""Views that have the elements of their input in the same order when they have its shape."""


def is_whole(graph: Any) -> bool:
    """Is this the graph itself, not one of a branch or of constants?"""
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
    """Of devices with kernels of their own: torch's stock flag writes the line, with the node's
    name; what it is is noted here.
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
    """Note which values a kernel leaves. nodes: of the scheduler, that it computes. live: buffers
    that outlast it, None for all. lines: write the line that shows each.
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
    """(buffer, node or None) of the values that are whole behind a kernel. Parameters as of
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
    """Names of the graph's nodes that a kernel computes: they lead from what it reads to its own
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
    """The buffer of the graph's own that the kernel leaving `name` changed in place, where none
    does after it; else `name`.
    """
    scheduler = graph.scheduler
    whole = getattr(scheduler, "mutation_real_name", {}).get(name, name)
    last = getattr(scheduler, "mutation_renames", {}).get(whole, name)
    return name if last != name or whole in graph.graph_inputs else str(whole)


def _unfinished(graph: Any, buffer: Any, collected: Collected) -> bool:
    """Is this filled now, and given the value of its node by a later kernel, which changes it in
    place?
    """
    changed = getattr(graph.scheduler, "mutation_renames", {}).get(buffer.get_name())
    changer = getattr(graph.scheduler, "name_to_buf", {}).get(changed)
    node = _node_of(buffer, collected)
    return (
        changer is not None and node is not None and node.name in _origins(changer.node, collected)
    )


def _between(starts: set[str], ends: list[Any]) -> set[str]:
    """Names of the nodes that lead to `ends` from the values `starts`, these left out. What an end
    is made of that is not known counts.
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
    """The node whose value lies in this buffer, None where none is known."""
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
    """The buffer that this one is a part of: what is joined by a cat is written in its place at
    once.
    """
    view = getattr(getattr(buffer, "layout", None), "view", None)
    whole = (
        _buffer(graph, view.get_name()) if view is not None and hasattr(view, "get_name") else None
    )
    return whole if type(whole).__name__ == "ConcatKernel" else None


def _handed(graph: Any, buffer: Any, collected: Collected) -> Any:
    """The node whose value was written into this buffer for an operator that is no kernel of
    inductor's and wants it in memory.
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
