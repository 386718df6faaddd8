"""Locates each finding in the user's code and in the programs of both runs.

Lines of the user's code are read when the page is created. A path comes from an untrusted run: only
a few lines of Python files on this machine are read.

The recorded programs of a finding's operator are shown side by side, one operator a line.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from whence import align, extras
from whence.comparison.replays.program_difference import (
    differing_arguments,
    operator_blocks,
    source_line,
)
from whence.comparison.verdicts import source_lines
from whence.records import Call, Operation, Program, Run, children
from whence.records.slots import param_name, split_child
from whence.results import Comparison, Finding
from whence.results.page import PageExcerpt, PageOperators, PagePlace

_MOST = 30  # findings


def page_places(compared: Comparison, aligned: align.Aligned) -> tuple[PagePlace, ...]:
    """Places of the first findings, in their order."""
    return _Places(compared, aligned).listed()


class _Places:
    """Looks up code and programs of findings."""

    def __init__(self, compared: Comparison, aligned: align.Aligned) -> None:
        self.compared, self.aligned = compared, aligned
        self.below = children(aligned.reference.calls)
        self.target_below = children(aligned.target.calls)

    def listed(self) -> tuple[PagePlace, ...]:
        return tuple(self._place(finding) for finding in self.compared.findings[:_MOST])

    def _place(self, finding: Finding) -> PagePlace:
        if not 0 <= finding.pair < len(self.aligned.plan.pairs):
            return PagePlace()
        pair = self.aligned.plan.pairs[finding.pair]
        reference = call_at(self.aligned.reference, pair.reference)
        target = call_at(self.aligned.target, pair.target)
        program = _program(self.aligned.reference, reference, self.below)
        of_target = _program(self.aligned.target, target, self.target_below)
        rows: tuple[PageOperators, ...] = ()
        arguments = ""
        if program is not None and of_target is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):  # of a run by hand
                rows = side_by_side(program, of_target)
            with contextlib.suppress(LookupError, TypeError, ValueError):
                arguments = _arguments(program, of_target, finding.operator)
        return PagePlace(
            tuple(self._excerpts(finding, reference, target, (program, of_target))),
            rows,
            bool(rows) and not any(row.mark not in ("", "left out") for row in rows),
            arguments,
        )

    def _excerpts(
        self,
        finding: Finding,
        reference: Call | None,
        target: Call | None,
        programs: tuple[Listed | None, Listed | None],
    ) -> Iterator[PageExcerpt]:
        """Code excerpts: of the target, and of the reference when its lines are different."""
        sources = {"reference": "", "target": "", finding.side: finding.source}
        if reference is not None and not sources["reference"]:
            sources["reference"] = self._line_of_reference(reference, programs, finding.operator)
        if target is not None and not sources["target"]:
            sources["target"] = source_lines.of_call(self.aligned.target, self.target_below, target)
        of_target = excerpt(sources["target"], self.aligned.target, "target")
        of_reference = excerpt(sources["reference"], self.aligned.reference, "reference")
        if of_target is not None:
            yield of_target
        if of_reference is not None and (of_target is None or not _alike(of_reference, of_target)):
            yield of_reference

    def _line_of_reference(
        self, call: Call, programs: tuple[Listed | None, Listed | None], operator: str
    ) -> str:
        program, other = programs
        if program is not None and other is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):
                place, _ = differing(program, other, operator)
                if line := source_line(call, program.program, place):
                    return line
        return source_lines.of_call(self.aligned.reference, self.below, call)


def _arguments(reference: Listed, target: Listed, operator: str) -> str:
    """Describe the arguments in which the operator at fault differs, with both values; ""
    for none.
    """
    places = differing(reference, target, operator) if operator else (-1, -1)
    if min(places) < 0:
        return ""
    a, b = reference.program.operations[places[0]], target.program.operations[places[1]]
    clauses = differing_arguments(a, b) if a.name == b.name else []
    name = a.name.removeprefix("aten.").removesuffix(".default")
    return f"{name}: {' and '.join(clauses)}" if clauses else ""


def _alike(a: PageExcerpt, b: PageExcerpt) -> bool:
    return (a.file, a.lines) == (b.file, b.lines) and abs(a.line - b.line) <= 1


def call_at(run: Run, number: int) -> Call | None:
    """The call of this number, None where there is none."""
    return run.calls[number] if 0 <= number < len(run.calls) else None


def _program(run: Run, call: Call | None, below: Mapping[int, list[int]]) -> Listed | None:
    """The program of a call, with the names of inner calls."""
    program = run.programs.get(call.program) if call is not None and call.program else None
    if call is None or program is None:
        return None
    inside = [run.calls[number] for number in below.get(call.id, ())]
    return Listed(program, [c.scope.rpartition(".")[2] or c.op or c.op_type for c in inside])


_AROUND = 3  # lines before and behind the one that is meant
_LARGEST = 4_000_000  # bytes of a file of code
_WIDEST = 200  # characters of a line
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d{1,7})")


def excerpt(source: str, run: Run, side: str) -> PageExcerpt | None:
    """The lines around `source` ("file:line"); None when the file is not available."""
    match = _PLACE.fullmatch(source)
    if match is None or (run.info.host and run.info.host != socket.gethostname()):
        return None
    line = int(match["line"])
    try:
        path = Path(run.info.cwd) / match["file"]
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        lines = path.read_text(encoding="utf-8").splitlines()
        modified = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if not 1 <= line <= len(lines):
        return None
    first = max(1, line - _AROUND)
    return PageExcerpt(
        side,
        _short(path, run),
        line,
        first,
        tuple(text[:_WIDEST] for text in lines[first - 1 : line + _AROUND]),
        _is_newer(modified, run.info.started),
    )


def _short(path: Path, run: Run) -> str:
    """The path relative to the folder in which the run was started."""
    folder = Path(run.info.cwd) if run.info.cwd else Path.cwd()
    resolved = path.resolve()
    return resolved.relative_to(folder).as_posix() if resolved.is_relative_to(folder) else str(path)


def _is_newer(modified: float, started: str) -> bool:
    try:
        return modified > datetime.fromisoformat(started).timestamp() + 1
    except ValueError:
        return False


_MOST_LINES = 48  # lines
_LONGEST = 260  # characters of a line
_DIFFERS = "differs"
_SHAPE = re.compile(r"[^\s\[,]+\.shape\[")
"""The size of an input's dimension, independent of the input's name."""


class _Line(NamedTuple):
    """One line of a program: an operator or an inner call.

    name, settings: its identity apart from inputs. reads: the operators whose results it reads.
    """

    name: str
    settings: tuple[tuple[str, str], ...]
    reads: tuple[tuple[int, int], ...]
    text: str
    place: int


class _Paired(NamedTuple):
    """Positions of a line in both programs, -1 when a side lacks it."""

    reference: int
    target: int


class Listed(NamedTuple):
    """A program, and the names of the inner calls with which it exchanges tensors."""

    program: Program
    inside: Sequence[str] = ()


def side_by_side(reference: Listed, target: Listed) -> tuple[PageOperators, ...]:
    """Both programs line by line; long ones are reduced to differences and their neighbours."""
    sides = _operator_lines(reference), _operator_lines(target)
    pairs = list(_paired(*sides))
    rows = [
        PageOperators(
            sides[0][pair.reference].text if pair.reference >= 0 else "",
            sides[1][pair.target].text if pair.target >= 0 else "",
            mark,
        )
        for pair, mark in zip(pairs, _marked(pairs, *sides), strict=True)
    ]
    return tuple(_shortened(rows))


def differing(reference: Listed, target: Listed, operator: str = "") -> tuple[int, int]:
    """Positions in both programs of the first operator that differs, -1 for none.

    operator: its name, when known.
    """
    sides = _operator_lines(reference), _operator_lines(target)
    pairs = list(_paired(*sides))
    lines = [
        (sides[0][pair.reference], sides[1][pair.target])
        for pair, mark in zip(pairs, _marked(pairs, *sides), strict=True)
        if mark == _DIFFERS
    ]
    places = (
        (a.place, b.place) for a, b in lines if a.place >= 0 and operator in ("", a.name, b.name)
    )
    return next(places, (-1, -1))


def _operator_lines(listed: Listed) -> list[_Line]:
    """The operators of a program in order, with inner calls between them."""
    program, names = listed
    given: dict[int, list[Any]] = {}
    for slot, operand in program.outputs:
        if (child := _child(slot)) is not None:
            given.setdefault(child, []).append(operand)
    out = []
    pending = [(before, child) for child, before in program.calls if child < len(names)]
    for place, operation in enumerate(program.operations):
        while pending and pending[0][0] <= place:
            out.append(_line_of_call(pending.pop(0)[1], given, listed))
        out.append(_operator_line(place, operation, listed))
    out += [_line_of_call(child, given, listed) for _, child in pending]
    return out


def _line_of_call(child: int, given: Mapping[int, Sequence[Any]], listed: Listed) -> _Line:
    """The line of an inner call, with the operands that the surrounding code passes."""
    operands = given.get(child, ())
    arguments = ", ".join(_value_text(operand, listed) for operand in operands)
    reads = tuple(tuple(operand["op"]) for operand in operands if "op" in operand)
    name = listed.inside[child]
    return _Line(f"call {name}", _taken(operands, listed), reads, f"{name}({arguments})", -1)


def _operator_line(place: int, operation: Operation, listed: Listed) -> _Line:
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
        word = _value_text(value, listed)
        parts.append(f"{name}={word}" if name and not _is_tensor(value) else word)
        if not _is_tensor(value):
            settings[name or str(number)] = _SHAPE.sub("shape[", word)
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
    """Operands that come from inner calls; inputs are left out, because their names may differ by
    side.
    """
    slots = [_slot(operand["in"], listed.program) for operand in operands if "in" in operand]
    return tuple(
        ("", _value_text({"in": operand["in"]}, listed))
        for operand, slot in zip([o for o in operands if "in" in o], slots)
        if _child(slot) is not None
    )


def _child(slot: str) -> int | None:
    """Index of the inner call that a slot belongs to ("2:output.0"); None for a slot of the call
    itself.
    """
    number, colon, _ = slot.partition(":")
    return int(number) if colon and number.isdecimal() else None


def _slot(place: int, program: Program) -> str:
    return program.inputs[place] if 0 <= place < len(program.inputs) else f"input {place}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and next(iter(value)) in ("in", "param", "op", "const")


def _value_text(value: Any, listed: Listed) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value_text(item, listed) for item in value)}]"
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
    if kind == "dim":
        return f"{_value_text({'in': content[0]}, listed)}.shape[{content[1]}]"
    if kind == "mul":
        return " * ".join(_value_text(factor, listed) for factor in content)
    return f"{kind} {content}".strip()


def _paired(reference: list[_Line], target: list[_Line]) -> Iterator[_Paired]:
    """Pair corresponding lines: equal names in order; in between, unequal lines are paired by
    position.
    """
    names = [[line.name for line in side] for side in (reference, target)]
    for a0, a1, b0, b1, _ in operator_blocks(*names):
        for k in range(max(a1 - a0, b1 - b0)):
            yield _Paired(a0 + k if a0 + k < a1 else -1, b0 + k if b0 + k < b1 else -1)


def _marked(pairs: list[_Paired], reference: list[_Line], target: list[_Line]) -> Iterator[str]:
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
    """All rows of a short table; for a long one, the rows that differ and their neighbours."""
    telling = [k for k, row in enumerate(rows) if row.mark]
    if len(rows) <= 2 * _AROUND + 4:
        yield from rows
        return
    near = {n for k in telling for n in range(k - _AROUND, k + _AROUND + 1)}
    kept = sorted(n for n in near or range(2 * _AROUND) if 0 <= n < len(rows))[:_MOST_LINES]
    before = -1
    for place in [*kept, len(rows)]:
        if (left_out := place - before - 1) > 0:
            yield PageOperators(str(left_out), str(left_out), "left out")
        if place < len(rows):
            yield rows[place]
        before = place
