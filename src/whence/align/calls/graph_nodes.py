"""Nodes of compiled graphs: their calls, their positions in a program, and the pieces between
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from whence import dtypes
from whence.align.calls.sequence_alignment import blocks
from whence.errors import UsageError
from whence.frameworks.operator_names import base_name
from whence.records import Call, Program
from whence.records.marks import Mark, has_mark, mark
from whence.records.program import map_operands, operands

NodePlace = tuple[int, int]  # index of the operation, index of its result
_ALIKE = 0.9
"""Share of nodes in one order, below which order proves little."""


def kernel(call: Call) -> str:
    """Names the graph node and the kernel of a call, in words; "" for other calls."""
    if is_piece(call):
        return ", ".join(n for n in call.notes if n.startswith((Mark.NODE, Mark.KERNEL)))
    if call.kind == "operator" and "kernel" in call.arguments:
        return f"{mark(Mark.NODE, call.op)}, {kernel_note(call)}"
    return ""


def is_piece(call: Call) -> bool:
    """Whether the call is a node of a graph that was cut at the same nodes in both runs."""
    return has_mark(call, Mark.NODE)


def is_compiled(call: Call) -> bool:
    """Whether compiled code computed this node."""
    return "kernel" in call.arguments


def program_piece(
    program: Program,
    outputs: Mapping[str, Any],
    kinds: Mapping[str, str],
    id_: str,
    cut: Mapping[NodePlace, str] = {},
    shape: Callable[[str], tuple[int, ...]] = lambda _: (),
) -> Program:
    """The part of a program that computes `outputs` from its inputs and from the places where it is
    cut.

    kinds: dtypes by slot. cut: for each place where the program is cut, the name of the value
    there. shape: gives the shape of the tensor in a slot, () where unknown. An input of which only
    extents are used is not an input of the piece: otherwise errors in its elements would seem to
    explain errors of the outputs.
    """
    needed = _needed(program, outputs, cut)
    order = {old: new for new, old in enumerate(sorted(needed))}
    read = {
        key for old in order for kind, key in program.operations[old].operands() if kind == "in"
    }
    inputs: list[str] = []
    params: list[str] = []
    constants: list[int] = []

    def replaced(kind: str, key: Any) -> Any:
        if kind == "op":
            if tuple(key) in cut:
                return {"in": _index(inputs, f"input.{cut[tuple(key)]}")}
            return {"op": [order[key[0]], key[1]]}
        if kind == "in":
            return {"in": _index(inputs, program.inputs[key])}
        if kind == "dim":
            slot, axis = program.inputs[key[0]], key[1]
            extents = shape(slot) if key[0] not in read else ()
            return extents[axis] if axis < len(extents) else {"dim": [_index(inputs, slot), axis]}
        if kind == "mul":
            return {"mul": map_operands(replaced, key)}
        if kind == "const":
            return {"const": _index(constants, program.constants[key])}
        if kind == "param":
            _index(params, key)
        return {kind: key}

    operations = [program.operations[old].with_operands(replaced) for old in order]
    new_outputs = tuple(
        (slot, map_operands(replaced, operand)) for slot, operand in outputs.items()
    )
    floating = [k for s in (*inputs, *params) if dtypes.is_floating(k := kinds.get(s, ""))]
    return replace(
        program,
        id=id_,
        operations=tuple(operations),
        inputs=tuple(inputs),
        outputs=new_outputs,
        params=tuple(params),
        constants=tuple(constants),
        base=floating[0] if floating else program.base,
        input_dtypes=tuple(kinds.get(s, "") for s in inputs),
        fixed=tuple(
            (inputs.index(s), axis, n)
            for i, axis, n in program.fixed
            if (s := program.inputs[i]) in inputs
        ),
        equal=(),
        calls=(),
        same=(),
        lost=(),
        names=tuple(program.names[old] for old in order) if program.names else (),
        scopes=tuple(program.scopes[old] for old in order) if program.scopes else (),
        picks=tuple((n, order[i], k) for n, i, k in program.picks if i in order),
        lines=(),
        call_lines=(),
    )


def _needed(program: Program, outputs: Mapping[str, Any], cut: Mapping[NodePlace, str]) -> set[int]:
    """Indices of the operations that lead to `outputs`, back to the cuts."""
    needed: set[int] = set()
    todo = list(operands(list(outputs.values())))
    while todo:
        kind, key = todo.pop()
        if kind == "op" and tuple(key) not in cut and key[0] not in needed:
            needed.add(key[0])
            todo += program.operations[key[0]].operands()
    return needed


def places_of(program: Program) -> dict[str, NodePlace]:
    """The (operation, result) indices of each node of a graph, by name."""
    return {name: (i, 0) for i, name in enumerate(program.names)} | {
        name: (i, k) for name, i, k in program.picks
    }


def same_nodes(reference: Program | None, target: Program | None) -> dict[str, str]:
    """Node names of one graph -> names of the corresponding nodes of the other.

    Where most nodes have the same modules and operators in the same order, that order pairs them.
    Of graphs that were lowered otherwise, nodes of one module and operator correspond in order,
    where both graphs have equally many.
    """
    if reference is None or target is None:
        places = places_of(reference or target)  # type: ignore[arg-type]
        return {name: name for name in places}
    partners = _nodes_in_order(reference, target)
    if 2 * len(partners) < _ALIKE * (len(reference.names) + len(target.names)):
        target_kinds = nodes_by_kind(target)
        partners = {
            name: other
            for kind, names in nodes_by_kind(reference).items()
            if len(names) == len(others := target_kinds.get(kind, ()))
            for name, other in zip(names, others)
        }
    picked = {(target.names[i], k): name for name, i, k in target.picks}
    for name, i, k in reference.picks:
        other = picked.get((partners.get(reference.names[i], ""), k))
        if other is not None:
            partners[name] = other
    return partners


def _nodes_in_order(reference: Program, target: Program) -> dict[str, str]:
    """Pairs of nodes in the longest common subsequence of modules and operators; empty where the
    graphs have too little in common to be searched.
    """
    kinds, target_kinds = (
        [(scope, base_name(op.name)) for scope, op in zip(p.scopes, p.operations)]
        for p in (reference, target)
    )
    try:
        pieces = blocks(kinds, target_kinds)
    except UsageError:
        return {}
    return {
        name: other
        for start, stop, target_start, target_stop, is_equal in pieces
        if is_equal
        for name, other in zip(
            reference.names[start:stop], target.names[target_start:target_stop], strict=True
        )
    }


def nodes_by_kind(program: Program) -> dict[tuple[str, str], list[str]]:
    """Names of the nodes by (module, operator), in order."""
    nodes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, scope, op in zip(program.names, program.scopes, program.operations):
        nodes[scope, base_name(op.name)].append(name)
    return nodes


def _index(table: list[Any], item: Any) -> int:
    if item not in table:
        table.append(item)
    return table.index(item)


def kernel_note(call: Call) -> str:
    return mark(Mark.KERNEL, f"{call.arguments['kernel']} computes {_listed(call.origins)}")


def _listed(names: Sequence[str]) -> str:
    listed = [n for n in names if not n.startswith(("view", "permute", "getitem"))] or list(names)
    return ", ".join(
        listed if len(listed) <= 6 else [*listed[:3], f"{len(listed) - 4} more", listed[-1]]
    )
