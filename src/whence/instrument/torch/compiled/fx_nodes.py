"""Nodes of an FX graph as a run names them: module path, source line, overload."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_schema import UNINITIALISED, schema_of
from whence.instrument.torch.sources import is_the_program

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LOCAL = re.compile(r"^[LG]\['([^']*)'\]\.?")
_MODULES = re.compile(r"(?:\.?_modules)?\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


class Named(NamedTuple):
    """How a run names a node. local: the variable that its module path starts from ("self"), ""
    without a path.
    """

    name: str
    overload: str
    base: str
    scope: str
    local: str
    source: str


def named(node: Any) -> Named:
    """The name of a call_function node. One of several results has its own node's name and the
    operator's overload.
    """
    maker = origin_of(node)
    place = node if _stack(node) else maker
    source = source_of(node) or source_of(maker)
    if not _stack(place):
        place, source = _neighbour(maker), source or source_of(_neighbour(maker))
    scope, local = _module_path(place)
    target = maker.target
    if isinstance(target, torch._ops.OpOverload):
        facts = schema_of(target)
        overload, base = facts.name, facts.base
    else:
        overload = base = getattr(target, "__name__", str(target))
    return Named(node.name, overload, base, scope, local, source)


def _neighbour(node: Any) -> Any:
    """The node whose module path a node without origin gets: the nearest producer with an origin,
    if the nearest producers and users are all in one module; else the node itself.
    """
    producers, users = (
        _nearest(node, lambda n: n.all_input_nodes),
        _nearest(node, lambda n: n.users),
    )
    paths = {_module_path(n) for n in (*producers, *users)}
    return producers[0] if producers and users and len(paths) == 1 else node


def _nearest(node: Any, step: Callable[[Any], Iterable[Any]]) -> list[Any]:
    nearest: list[Any] = []
    todo, met = list(step(node)), {node}
    while todo:
        candidate = todo.pop()
        if candidate in met or candidate.op != "call_function":
            continue
        met.add(candidate)
        if _stack(candidate):
            nearest.append(candidate)
        else:
            todo += step(candidate)
    return nearest


def origin_of(node: Any) -> Any:
    """The node whose operator ran: for a getitem, the node with several results that it picks
    from.
    """
    while (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], torch.fx.Node)
    ):
        node = node.args[0]
    return node


def is_value(node: Any) -> bool:
    """Whether this node makes a single new tensor: no view, no in-place write, not several
    tensors.
    """
    maker = origin_of(node)
    if (
        node.op != "call_function"
        or not isinstance(node.meta.get("val"), torch.Tensor)
        or not isinstance(maker.target, torch._ops.OpOverload)
    ):
        return False
    facts = schema_of(maker.target)
    return (
        not facts.view
        and not facts.writes
        and facts.base not in UNINITIALISED
        and facts.namespace != "whence"
    )


def reads_of(node: Any) -> tuple[str, ...]:
    """Names of the graph inputs, and of the nodes with a tensor of their own, that this node reads
    directly or through views.
    """
    names: dict[str, None] = {}

    def walk(value: Any) -> None:
        for arg in value.all_input_nodes:
            if arg.op == "placeholder" or is_value(arg):
                names[arg.name] = None
            else:
                walk(arg)

    walk(origin_of(node))
    return tuple(names)


def copied(gm: Any) -> Any:
    """A graph module with a copy of the graph: same names, without taps of whence. Its modules and
    tensors are shared.
    """
    graph = torch.fx.Graph()
    values: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("whence.tap"):
            continue
        values[node] = graph.node_copy(node, lambda n: values[n])
    module = torch.fx.GraphModule(gm, graph)
    module.meta = dict(getattr(gm, "meta", {}))
    return module


def readable(gm: Any) -> str:
    """The graph as Python text with dtypes, shapes, strides and source lines as comments."""
    try:
        return str(gm.print_readable(print_output=False, include_stride=True, include_device=True))
    except TypeError:  # an older torch knows neither strides nor devices
        return str(gm.print_readable(print_output=False))


def _stack(node: Any) -> Any:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")


def _module_path(node: Any) -> tuple[str, str]:
    """(path from the variable that holds the outermost module, name of that variable)."""
    stack = _stack(node)
    if not stack:
        return "", ""
    path = list(stack.values())[-1][0]
    return module_path(path if isinstance(path, str) else "")


@functools.lru_cache(maxsize=1 << 14)
def module_path(text: str) -> tuple[str, str]:
    """(module path, variable) of dynamo's source text: ("blocks.0.fc", "self") for
    "L['self']._modules['blocks']._modules['0'].fc". Also accepts the text of a parameter.
    """
    match = _LOCAL.match(text)
    local = match[1] if match else ""
    path = text[match.end() :] if match else text
    path = _INDEX.sub(r".\1", _MODULES.sub(r".\1", path))
    path = path.replace("_parameters.", ".").replace("_buffers.", ".")
    parts = [
        part
        for part in path.split(".")
        if part and part not in ("_modules", "_parameters", "_buffers")
    ]
    while parts and (parts[0] in ("__self__", "__wrapped__", "__closure__", "cell_contents")):
        # the module that a method or a wrapper of one holds
        parts = parts[2 if parts[0] == "__closure__" else 1 :]
    return ".".join(parts), local


def source_of(node: Any) -> str:
    """ "file:line" of the program: the innermost frame that is neither torch's nor ours, else the
    innermost.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if is_the_program(file):
            return f"{file}:{line}"
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def inputs_of(gm: Any) -> list[str]:
    """Names of the placeholders, in order."""
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def flat(value: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]
