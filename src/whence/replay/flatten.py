"""One program out of a tree of calls: what a call ran with all that its hidden children ran inside.

A container's program has holes where it calls others. Where the other run shows nothing of a child,
the child's own program is put into the hole, so that the whole reads as one list of operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.records.program import map_operands


@dataclass
class Flat:
    """A program and where its tensors come from. origins: slot of the program -> (call, slot of
    that call). scopes: of every operation, the call that ran it.
    """

    program: Program
    origins: dict[str, tuple[int, str]]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One call with its program. children: ids of all its children; hidden: which of them (from 0)
    are put in. shapes: by slot.
    """

    call: int
    program: Program
    children: Sequence[int]
    hidden: frozenset[int]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class _Builder:
    node_of: Callable[[int], Node]
    operations: list[Operation] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    input_dtypes: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    grad: list[str] = field(default_factory=list)
    fixed: list[tuple[int, int, int]] = field(default_factory=list)
    origins: dict[str, tuple[int, str]] = field(default_factory=dict)

    def external(self, slot: str, origin: tuple[int, str], dtype: str) -> dict[str, Any]:
        if slot not in self.inputs:
            self.inputs.append(slot)
            self.input_dtypes.append(dtype)
            self.origins[slot] = origin
        return {"in": self.inputs.index(slot)}

    def put(self, node: Node, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Append a call's operators; given: operands of its inputs, None for the outermost call.
        Returns the operands of its outputs.
        """
        program, top = node.program, given is None
        made: list[int] = []  # by operation of this program: its place in the whole
        left: dict[str, Any] = {}  # "k:output.0" -> operand
        entering: dict[int, list[int]] = {}
        for k, at in program.calls:
            entering.setdefault(at, []).append(k)
        kept: dict[int, dict[str, Any]] = {}

        def input_of(k: int) -> dict[str, Any]:
            if k in kept:
                return kept[k]
            slot = program.inputs[k]
            if slot in left:
                found: dict[str, Any] = left[slot]
            elif slot[0].isdigit() and int(slot.partition(":")[0]) in node.hidden:
                raise ReplayRefused(f"{slot} is made inside, where it could not be followed")
            elif given is not None and slot in given:
                found = given[slot]
            else:
                name = slot if top else f"{slot}@{node.call}"
                origin = (node.call, slot)
                if slot[0].isdigit():
                    child, _, inner = slot.partition(":")
                    origin = (node.children[int(child)], inner)
                found = self.external(
                    name, origin, program.input_dtypes[k] if k < len(program.input_dtypes) else ""
                )
                self.fixed += [
                    (found["in"], axis, extent) for i, axis, extent in program.fixed if i == k
                ]
                if slot in program.grad:
                    self.grad.append(name)
            kept[k] = found
            return found

        def replaced(kind: str, at: Any) -> Any:
            if kind == "in":
                return input_of(at)
            if kind == "op":
                return {"op": [made[at[0]], at[1]]}
            if kind == "param":
                name = at if top else f"{at}@{node.call}"
                if name not in self.params:
                    self.params.append(name)
                    self.origins[name] = (node.call, at)
                    if at in program.grad:
                        self.grad.append(name)
                return {"param": name}
            if kind == "const":
                record = program.constants[at]
                if record not in self.constants:
                    self.constants.append(record)
                return {"const": self.constants.index(record)}
            if kind == "dim":
                place = input_of(at[0])
                if "in" in place:
                    return {"dim": [place["in"], at[1]]}
                shape = node.shapes.get(program.inputs[at[0]])
                if shape is None or at[1] >= len(shape):
                    raise ReplayRefused(f"the shape of {program.inputs[at[0]]} is not known")
                return shape[at[1]]
            if kind == "mul":
                factors = value(at)
                known = all(isinstance(factor, int) for factor in factors)
                return math.prod(factors) if known else {"mul": factors}
            return {kind: at}

        value = partial(map_operands, replaced)

        outputs = dict(program.outputs)

        def enter(k: int) -> None:
            if k not in node.hidden:
                return
            child = self.node_of(node.children[k])
            handed = {
                slot[len(f"{k}:") :]: value(o)
                for slot, o in outputs.items()
                if slot.startswith(f"{k}:")
            }
            for slot, operand in self.put(child, handed).items():
                left[f"{k}:{slot}"] = operand
            for slot, operand in handed.items():
                left.setdefault(f"{k}:{slot}", operand)

        for place, operation in enumerate(program.operations):
            for k in entering.get(place, ()):
                enter(k)
            made.append(len(self.operations))
            self.operations.append(operation.with_operands(replaced))
            self.places.append(node.call)
        for k in entering.get(len(program.operations), ()):
            enter(k)
        own = {slot: value(o) for slot, o in outputs.items() if not slot[0].isdigit()}
        if top:  # what it hands to children that are seen is an output too
            own |= {
                s: value(o)
                for s, o in outputs.items()
                if s[0].isdigit() and int(s.partition(":")[0]) not in node.hidden
            }
        return own


def flatten(call: int, node_of: Callable[[int], Node]) -> Flat:
    """The program of `call` with those of its hidden children inside. node_of: of a call, raises
    ReplayRefused when it has no program.
    """
    root = node_of(call)
    if not root.hidden:
        names = (*root.program.inputs, *root.program.params)
        origins = {}
        for slot in names:
            child, _, inner = slot.partition(":")
            origins[slot] = (
                (root.children[int(child)], inner) if slot[0].isdigit() else (call, slot)
            )
        return Flat(root.program, origins, (call,) * len(root.program.operations))
    builder = _Builder(node_of)
    outputs = builder.put(root, None)
    base = root.program.base
    program = Program(
        f"flat {root.program.id}",
        tuple(builder.operations),
        tuple(builder.inputs),
        tuple(outputs.items()),
        tuple(builder.params),
        tuple(builder.constants),
        base,
        tuple(builder.input_dtypes),
        root.program.default_dtype,
        tuple(builder.fixed),
        (),
        root.program.inference,
        tuple(builder.grad),
    )
    return Flat(program, builder.origins, tuple(builder.places))


def gather(
    operators: Sequence[Node],
    records: Callable[[int], Mapping[str, int]],
    origins: Mapping[int, tuple[int, str]],
    outputs: Mapping[str, int],
) -> Flat:
    """One program out of operators that were recorded as calls of their own, wired by the records
    that they share.

    operators: in the order of execution, without children. records: slot -> record, of a call.
    origins: of records that came from outside, whose slot they are better known by. outputs: slot
    of the whole -> record.
    """

    def no_child(call: int) -> Node:
        raise ReplayRefused(f"call {call} is no child of an operator")

    builder, known = _Builder(no_child), dict[int, Any]()
    for node in operators:
        own = records(node.call)
        given: dict[str, Any] = {}
        for slot, dtype in zip(node.program.inputs, node.program.input_dtypes, strict=True):
            if slot not in own:
                raise ReplayRefused(f"{slot} of {node.program.operations[0].name} was not captured")
            if own[slot] not in known:
                call, there = origins.get(own[slot], (node.call, slot))
                known[own[slot]] = builder.external(f"{there}@{call}", (call, there), dtype)
            given[slot] = known[own[slot]]
        made = builder.put(node, given)
        written = {
            slot: given["input" + slot[7:]]
            for slot in own
            if slot.startswith("mutated") and "input" + slot[7:] in given
        }
        known |= {
            own[slot]: operand for slot, operand in (*written.items(), *made.items()) if slot in own
        }
    left = tuple((slot, known[record]) for slot, record in outputs.items() if record in known)
    first = operators[0].program
    program = Program(
        "gathered",
        tuple(builder.operations),
        tuple(builder.inputs),
        left,
        tuple(builder.params),
        tuple(builder.constants),
        first.base,
        tuple(builder.input_dtypes),
        first.default_dtype,
        tuple(builder.fixed),
        (),
        first.inference,
        tuple(builder.grad),
    )
    return Flat(program, builder.origins, tuple(builder.places))
