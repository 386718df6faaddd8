"""Nodes of compiled graphs: their calls, their places in a program, the pieces between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from msgspec.structs import replace

from whence import dtypes
from whence.records import Call, Program
from whence.records.marks import Mark, has_mark, mark
from whence.records.program import map_operands, operands

# of the operators of two graphs in the same order; below, they were lowered otherwise, and order
# proves little
_ALIKE = 0.9


_MOST = 20_000  # operations of two graphs that differ; beyond, they are matched by name


NodePlace = tuple[int, int]  # operation, result


def kernel(call: Call) -> str:
    """The node of a graph that a call is and its kernel, in words; "" for other calls."""
    if is_piece(call):
        return ", ".join(n for n in call.notes if n.startswith((Mark.NODE, Mark.KERNEL)))
    if call.kind == "operator" and "kernel" in call.arguments:
        return f"{mark(Mark.NODE, call.op)}, {kernel_note(call)}"
    return ""


def is_piece(call: Call) -> bool:
    """Is this a node of a graph that was cut alike in both runs?"""
    return has_mark(call, Mark.NODE)


def is_compiled(call: Call) -> bool:
    """Did compiled code compute this node?"""
    return "kernel" in call.arguments


def program_piece(
    program: Program,
    outputs: Mapping[str, Any],
    kinds: Mapping[str, str],
    id_: str,
    cut: Mapping[NodePlace, str] = {},
    shape: Callable[[str], tuple[int, ...]] = lambda _: (),
) -> Program:
    """What leads to `outputs` from the inputs of a program and the places where it is cut.

    kinds: dtypes by slot. cut: the name of what is made there. shape: of the tensor in a slot, ()
    where unknown: an input of which nothing but extents is taken is none of the piece's own, for
    what it makes would seem to be made of it, wrong where that is wrong.
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
    """The operations that lead to `outputs`, up to where the graph is cut."""
    needed: set[int] = set()
    todo = list(operands(list(outputs.values())))
    while todo:
        kind, key = todo.pop()
        if kind == "op" and tuple(key) not in cut and key[0] not in needed:
            needed.add(key[0])
            todo += program.operations[key[0]].operands()
    return needed


def places_of(program: Program) -> dict[str, NodePlace]:
    """Where each node of a graph is in its program: operation and result."""
    return {name: (i, 0) for i, name in enumerate(program.names)} | {
        name: (i, k) for name, i, k in program.picks
    }


def same_nodes(reference: Program | None, target: Program | None) -> dict[str, str]:
    """Names of the nodes of one graph -> of the other's that stand in the same place."""
    if reference is None or target is None:
        places = places_of(reference or target)  # type: ignore[arg-type]
        return {name: name for name in places}
    ops, target_ops = ([o.name for o in p.operations] for p in (reference, target))
    if (ops, reference.names) == (target_ops, target.names) or len(ops) + len(target_ops) > _MOST:
        partners = {name: name for name in reference.names if name in set(target.names)}
    else:
        partners = {}
        matcher = SequenceMatcher(None, ops, target_ops, autojunk=False)
        single = _single_nodes(reference) if matcher.ratio() < _ALIKE else None
        across = _single_nodes(target) if single is not None else {}
        if single is not None:
            partners = {name: across[key] for key, name in single.items() if key in across}
        for block in matcher.get_matching_blocks() if single is None else ():
            for k in range(block.size):
                partners[reference.names[block.a + k]] = target.names[block.b + k]
    picked = {(i, k): name for name, i, k in target.picks}
    index = {name: i for i, name in enumerate(target.names)}
    for name, i, k in reference.picks:
        maker = partners.get(reference.names[i])
        if maker is not None and (index[maker], k) in picked:
            partners[name] = picked[index[maker], k]
    return partners


def _single_nodes(program: Program) -> dict[tuple[str, str], str]:
    """By module path and operator, the node that is the only such one."""
    nodes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, scope, op in zip(program.names, program.scopes, program.operations):
        nodes[scope, op.name].append(name)
    return {key: names[0] for key, names in nodes.items() if len(names) == 1}


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
