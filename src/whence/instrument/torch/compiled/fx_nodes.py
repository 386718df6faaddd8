"""Nodes of an FX graph as a run names them: module path, source line, overload; and the whole graph
as a program, data and no code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES
from whence.frameworks.torch_schema import UNINITIALISED, draws, schema_of
from whence.instrument.torch.sources import is_the_program
from whence.records import Operation, Program

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LOCAL = re.compile(r"^[LG]\['([^']*)'\]\.?")
_MODULES = re.compile(r"(?:\.?_modules)?\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


class Named(NamedTuple):
    """What a run says of a node. local: the variable that its module path starts from ("self"), ""
    where it has no path.
    """

    name: str
    overload: str
    base: str
    scope: str
    local: str
    source: str


def named(node: Any) -> Named:
    """Of a call_function node. A result picked out of several is named by its own node, its
    overload is that of the operator.
    """
    maker = origin_of(node)
    place = node if _stack(node) else maker
    source = _source(node) or _source(maker)
    if not _stack(place):
        place, source = _neighbour(maker), source or _source(_neighbour(maker))
    scope, local = _module_path(place)
    target = maker.target
    if isinstance(target, torch._ops.OpOverload):
        facts = schema_of(target)
        overload, base = facts.name, facts.base
    else:
        overload = base = getattr(target, "__name__", str(target))
    return Named(node.name, overload, base, scope, local, source)


def _neighbour(node: Any) -> Any:
    """A node that a pass put in has no origin: the nearest one before it with an origin, when those
    before and behind are of one module.
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
    """The node whose operator ran: of a getitem, the one with several results that it picks
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
    """Does this node make a tensor of its own: no view of another, nothing written in place, one
    tensor and not several?
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
    """Names of the inputs of the graph and of the nodes with a value of their own that this one
    reads, through views.
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
    """A graph module over a copy of the graph, with the same names and without taps of ours; what
    it holds is shared.
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
    """("blocks.0.fc", "self") of "L['self']._modules['blocks']._modules['0'].fc"; also of a
    parameter below it.
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


def _source(node: Any) -> str:
    """ "file:line" of the program: the innermost frame that is neither torch's nor ours, else the
    innermost.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if is_the_program(file):
            return f"{file}:{line}"
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


# ---- sizes


class Unknown(Exception):
    """A size that the inputs do not tell."""


class Sizes:
    """The sizes of one call of a graph, whose nodes may hold symbols: what its inputs bind them
    to.
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
        """A plain number for a symbolic one, other values as they are. Raises Unknown for what the
        inputs do not tell.
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
        """These sizes, to tell them from others."""
        return tuple(sorted((str(s), n) for s, n in self._bound.items()))


# ---- the graph as a program


def inputs_of(gm: Any) -> list[str]:
    """Names of the placeholders, in order."""
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def program_of(
    gm: Any,
    inputs: Sequence[Any],
    slots: Mapping[str, str],
    sizes: Sizes,
    constant: Callable[[str, Any], int],
    scope: Callable[[Named], str] = lambda node: node.scope,
) -> tuple[Program | None, str]:
    """The graph as a program for these sizes, or why there is none.

    slots: of the graph's call, by placeholder ("input.0", "param.fc.weight"). constant: gives the
    record of a tensor that the graph holds. scope: the module path of a node.
    """
    try:
        return _program(gm, inputs, slots, sizes, constant, scope), ""
    except Unknown as why:
        return None, str(why)


def _program(
    gm: Any,
    inputs: Sequence[Any],
    slots: Mapping[str, str],
    sizes: Sizes,
    constant: Callable[[str, Any], int],
    scope: Callable[[Named], str],
) -> Program:
    operand: dict[Any, Any] = {}
    order: list[str] = []
    params: list[str] = []
    dtypes: list[str] = []
    fixed: list[tuple[int, int, int]] = []
    constants: list[int] = []
    operations: list[Operation] = []
    names: list[str] = []
    scopes: list[str] = []
    picks: list[tuple[str, int, int]] = []
    outputs: list[tuple[str, Any]] = []
    notes: set[str] = set()
    encoded: dict[Any, Any] = {}
    base = ""
    values = iter(inputs)
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            value, slot = next(values, None), slots[node.name]
            if not isinstance(value, torch.Tensor):
                continue
            if slot.startswith("param."):
                operand[node] = {"param": slot}
                params.append(slot)
                continue
            operand[node] = {"in": len(order)}
            fixed += [(len(order), axis, n) for axis, n in enumerate(value.shape)]
            order.append(slot)
            dtypes.append(NAMES.get(value.dtype, ""))
            if not base and value.is_floating_point():
                base = NAMES.get(value.dtype, "")
        elif node.op == "get_attr":
            attribute = functools.reduce(getattr, str(node.target).split("."), gm)
            if not isinstance(attribute, torch.Tensor):
                raise Unknown(f"holds {node.target}, a {type(attribute).__name__}")
            operand[node] = {"const": len(constants)}
            constants.append(constant(str(node.target), attribute))
        elif node.op == "output":
            for i, out in enumerate(flat(node.args[0])):
                if isinstance(out, torch.fx.Node) and out in operand:
                    outputs.append((f"output.{i}", operand[out]))
        elif node.op != "call_function":
            raise Unknown(f"has a {node.op} node ({node.target})")
        elif getattr(node.target, "__name__", "") == "getitem" and node.args[0] in operand:
            position, k = operand[node.args[0]]["op"]
            operand[node] = {"op": [position, k + int(node.args[1])]}
            picks.append((node.name, position, k + int(node.args[1])))
        elif isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            continue  # worked out where it is used
        else:
            facts = _allowed(node, notes)
            args = tuple(_operand(a, operand, sizes) for a in node.args)
            kwargs = {
                k: _operand(v, operand, sizes)
                for k, v in node.kwargs.items()
                if not (k == "pin_memory" or v is None)
            }
            operand[node] = {"op": [len(operations), 0]}
            if facts.writes:
                target = dict(zip(facts.positional, node.args)) | node.kwargs
                for place in _nodes(target.get(facts.writes[0])):
                    encoded[place] = operand[node]
            operations.append(Operation(facts.name, args, kwargs))
            names.append(node.name)
            scopes.append(scope(named(node)))
    for place, by in encoded.items():
        if place.op == "placeholder" and place in operand:
            outputs.append((f"mutated.{slots[place.name].partition('.')[2]}", by))
    if not outputs:
        raise Unknown("returns no tensor")
    program = Program(
        id="",
        operations=tuple(operations),
        inputs=tuple(order),
        outputs=tuple(outputs),
        params=tuple(params),
        constants=tuple(constants),
        base=base,
        input_dtypes=tuple(dtypes),
        default_dtype=NAMES[torch.get_default_dtype()],
        fixed=tuple(fixed),
        notes=tuple(sorted(notes)),
        names=tuple(names),
        scopes=tuple(scopes),
        picks=tuple(picks),
    )
    return msgspec.structs.replace(
        program, id=xxhash.xxh3_128_hexdigest(msgspec.json.encode(program, order="sorted"))
    )


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


def flat(value: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def _operand(value: Any, operand: Mapping[Any, Any], sizes: Sizes) -> Any:
    if isinstance(value, torch.fx.Node):
        if value in operand:
            return operand[value]
        value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            raise Unknown("an input that is no tensor")
    value = sizes.of(value)
    if isinstance(value, (list, tuple)):
        return [_operand(item, operand, sizes) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return (
            value
            if value - value == 0
            else {"float": "nan" if value != value else "inf" if value > 0 else "-inf"}
        )
    if isinstance(value, torch.dtype):
        return {"dtype": NAMES.get(value, str(value).removeprefix("torch."))}
    if isinstance(value, torch.device):
        return {"device": ""}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise Unknown(f"takes a {type(value).__name__}")
