"""A whole FX graph as a program for the sizes of one call: data, no code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from whence.frameworks.torch_arrays import NAMES
from whence.frameworks.torch_schema import UNINITIALISED, draws, schema_of
from whence.instrument.torch.compiled.fx_nodes import Named, flat, named
from whence.records import Operation, Program
from whence.records.slots import is_param


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
        program = _GraphProgram(gm, slots, sizes, constant, scope)
        return program.of(inputs), ""
    except Unknown as why:
        return None, str(why)


class _GraphProgram:
    """Reads the nodes of a graph one by one. Arguments as of `program_of`."""

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
        """The program. inputs: of the call. Raises Unknown where there is none."""
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


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
