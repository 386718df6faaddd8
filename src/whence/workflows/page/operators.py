"""The recorded programs of a finding's operator side by side, an operator a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from whence import extras
from whence.records import Operation, Program
from whence.records.slots import param_name, split_child
from whence.results.page import PageOperators

_MOST = 48  # lines
_AROUND = 3  # equal operators shown beside one that differs
_LONGEST = 260  # characters of a line
_DIFFERS = "differs"


class _Line(NamedTuple):
    """An operator, or a call inside: what it is apart from which operators it reads, and of which
    it reads.
    """

    name: str
    settings: tuple[tuple[str, str], ...]
    reads: tuple[tuple[int, int], ...]
    text: str
    place: int


class _Paired(NamedTuple):
    """Places of a line on both sides, -1 where one has none."""

    reference: int
    target: int


class Listed(NamedTuple):
    """A program, and names of the calls inside that it hands tensors to and takes them from."""

    program: Program
    inside: Sequence[str] = ()


def side_by_side(reference: Listed, target: Listed) -> tuple[PageOperators, ...]:
    """Both programs in lines; where they are long, what differs and what stands beside it."""
    sides = _lines(reference), _lines(target)
    pairs = list(_paired(*sides))
    rows = [
        PageOperators(
            sides[0][pair.reference].text if pair.reference >= 0 else "",
            sides[1][pair.target].text if pair.target >= 0 else "",
            mark,
        )
        for pair, mark in zip(pairs, _marks(pairs, *sides), strict=True)
    ]
    return tuple(_shortened(rows))


def first_differing(reference: Listed, target: Listed) -> int:
    """Place in the reference's program of the first operator that differs, -1 for none."""
    sides = _lines(reference), _lines(target)
    pairs = list(_paired(*sides))
    marks = _marks(pairs, *sides)
    line = next((p.reference for p, mark in zip(pairs, marks) if mark == _DIFFERS), -1)
    return sides[0][line].place if line >= 0 else -1


def _lines(listed: Listed) -> list[_Line]:
    """The operators of a program in order, and between them the calls inside."""
    program, names = listed
    given: dict[int, list[Any]] = {}
    for slot, operand in program.outputs:
        if (child := _child(slot)) is not None:
            given.setdefault(child, []).append(operand)
    out = []
    pending = [(before, child) for child, before in program.calls if child < len(names)]
    for place, operation in enumerate(program.operations):
        while pending and pending[0][0] <= place:
            out.append(_call(pending.pop(0)[1], given, listed))
        out.append(_line(place, operation, listed))
    out += [_call(child, given, listed) for _, child in pending]
    return out


def _call(child: int, given: Mapping[int, Sequence[Any]], listed: Listed) -> _Line:
    """A call inside, with what the code around it hands to it."""
    operands = given.get(child, ())
    arguments = ", ".join(_text(operand, listed) for operand in operands)
    reads = tuple(tuple(operand["op"]) for operand in operands if "op" in operand)
    name = listed.inside[child]
    return _Line(f"call {name}", _taken(operands, listed), reads, f"{name}({arguments})", -1)


def _line(place: int, operation: Operation, listed: Listed) -> _Line:
    names: tuple[str, ...] = ()
    settings: dict[str, str] = {}
    if extras.is_here("torch"):
        from whence.frameworks.torch_schema import schema_named

        schema = schema_named(operation.name)
        if schema is not None:
            names = schema.positional
            settings = {k: str(v) for k, v in schema.defaults.items() if _is_number(v)}
    arguments = [
        (names[i] if i < len(names) else "", value) for i, value in enumerate(operation.args)
    ] + list(operation.kwargs.items())
    parts = []
    for number, (name, value) in enumerate(arguments):
        word = _text(value, listed)
        parts.append(f"{name}={word}" if name and not _is_tensor(value) else word)
        if not _is_tensor(value):
            settings[name or str(number)] = word
    reads = tuple(
        (content[0], content[1]) for kind, content in operation.operands() if kind == "op"
    )
    short = operation.name.removeprefix("aten.").removesuffix(".default")
    inputs = [{kind: content} for kind, content in operation.operands() if kind == "in"]
    return _Line(
        operation.name,
        (*sorted(settings.items()), *_taken(inputs, listed)),
        reads,
        f"%{place} = {short}({', '.join(parts)})"[:_LONGEST],
        place,
    )


def _taken(operands: Sequence[Any], listed: Listed) -> tuple[tuple[str, str], ...]:
    """What is read of calls inside: these have names, inputs may have others on the other side."""
    slots = [_slot(operand["in"], listed.program) for operand in operands if "in" in operand]
    return tuple(
        ("", _text({"in": operand["in"]}, listed))
        for operand, slot in zip([o for o in operands if "in" in o], slots)
        if _child(slot) is not None
    )


def _child(slot: str) -> int | None:
    """Which call inside a slot is of ("2:output.0"), None where it is of the call itself."""
    number, colon, _ = slot.partition(":")
    return int(number) if colon and number.isdecimal() else None


def _slot(place: int, program: Program) -> str:
    return program.inputs[place] if 0 <= place < len(program.inputs) else f"input {place}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and next(iter(value)) in ("in", "param", "op", "const")


def _text(value: Any, listed: Listed) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, listed) for item in value)}]"
    if not isinstance(value, dict):
        return str(value)
    kind, content = next(iter(value.items()))
    if kind == "op":
        return f"%{content[0]}" + (f"[{content[1]}]" if content[1] else "")
    if kind == "in":
        slot = _slot(content, listed.program)
        child = _child(slot)
        if child is None or child >= len(listed.inside):
            return slot
        return f"{listed.inside[child]}.{split_child(slot)[1]}".removesuffix(".output.0")
    if kind == "param":
        return param_name(str(content))
    if kind == "const":
        return f"constant {content}"
    if kind in ("dtype", "float", "layout", "memory_format"):
        return str(content)
    if kind == "complex":
        return f"{content[0]}+{content[1]}j"
    if kind == "mul":
        return " * ".join(_text(factor, listed) for factor in content)
    return f"{kind} {content}".strip()


def _paired(reference: list[_Line], target: list[_Line]) -> Iterator[_Paired]:
    """Operators that stand for each other: in order, and where others stand in between those of one
    name.
    """
    names = [[line.name for line in side] for side in (reference, target)]
    matcher = SequenceMatcher(None, names[0], names[1], autojunk=False)
    for _, a0, a1, b0, b1 in matcher.get_opcodes():
        for k in range(max(a1 - a0, b1 - b0)):
            yield _Paired(a0 + k if a0 + k < a1 else -1, b0 + k if b0 + k < b1 else -1)


def _marks(pairs: list[_Paired], reference: list[_Line], target: list[_Line]) -> Iterator[str]:
    partner = {
        reference[pair.reference].place: target[pair.target].place
        for pair in pairs
        if pair.reference >= 0 and pair.target >= 0
    }
    for pair in pairs:
        if pair.reference < 0 or pair.target < 0:
            yield "only target" if pair.reference < 0 else "only reference"
            continue
        a, b = reference[pair.reference], target[pair.target]
        same_reads = tuple((partner.get(i, -1), j) for i, j in a.reads) == b.reads
        is_same = (a.name, a.settings) == (b.name, b.settings) and same_reads
        yield "" if is_same else _DIFFERS


def _shortened(rows: list[PageOperators]) -> Iterator[PageOperators]:
    """All rows of a short table; of a long one what differs, with its neighbours."""
    telling = [k for k, row in enumerate(rows) if row.mark]
    if len(rows) <= 2 * _AROUND + 4:
        yield from rows
        return
    near = {n for k in telling for n in range(k - _AROUND, k + _AROUND + 1)}
    kept = sorted(n for n in near or range(2 * _AROUND) if 0 <= n < len(rows))[:_MOST]
    before = -1
    for place in [*kept, len(rows)]:
        if (left_out := place - before - 1) > 0:
            yield PageOperators(str(left_out), str(left_out), "left out")
        if place < len(rows):
            yield rows[place]
        before = place
