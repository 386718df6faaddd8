"""Recognises differences of two programs that are two ways to write the same function.

Two stretches of sums, products and quotients between corresponding values are the same function if
they agree at a random point, since two different rational functions agree at few points. Other
operators, and differing attributes and weights, are never excused here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from whence import dtypes
from whence.comparison.programs.operator_pairing import operators, plain
from whence.comparison.programs.program_diff import (
    Difference,
    ProgramDiff,
    across_pairs,
    weights_beside,
)
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call, Run, in_order
from whence.records.marks import taken_parameters
from whence.records.slots import param_name, split_slot
from whence.replay.paddle_translation import Operand, program
from whence.replay.validation import load

_RATIONAL = frozenset((
    "add", "subtract", "multiply", "divide", "scale", "matmul", "bmm", "mean", "sum", "cast",
    "reshape", "transpose", "squeeze", "unsqueeze", "flatten",
))  # fmt: skip
_FORM = "removed", "inserted", "wiring"
_ONLY_WIRED = "comes from another operator in the target"
_MOST = 24  # operators of one stretch
_EXTENT = 3  # of an axis that a program leaves open
_EXACT = 1e-9  # largest distance of results in float64, relative to the largest element
_NAMES = {"multiply": "the scale", "divide": "the scale", "scale": "the scale", "add": "the bias",
          "matmul": "the product", "bmm": "the product"}  # fmt: skip


def is_rewritten(diff: ProgramDiff) -> bool:
    """Does each program run operators that the other does without? One of the same name in both,
    at another place, is none.
    """
    removed, inserted = (
        {d.name for d in diff.differences if d.kind == kind} for kind in ("removed", "inserted")
    )
    return not (removed <= inserted or inserted <= removed)


def told_by_form(
    diff: ProgramDiff,
    reference: Run,
    target: Run,
    weights: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
) -> ProgramDiff:
    """The diff of two programs, in which differences that are another form of the same function are
    moved to `forms`. weights: as for `diff_programs`; parameters without hashes are identified by
    name.
    """
    if not is_rewritten(diff):
        return diff
    hashes = weights if weights is not None else (weights_beside(reference), weights_beside(target))
    forms = _Forms(diff, _Side(reference, hashes[0]), _Side(target, hashes[1]))
    words = Counter(_in_words(*stretches) for stretches in forms.stretches)
    kept = tuple(d for d in map(forms.left_of, diff.differences) if d is not None)
    texts = tuple(f"{text} ({n} times)" if n > 1 else text for text, n in words.items())
    return diff._replace(differences=kept, forms=texts)


def _is_form(difference: Difference) -> bool:
    """Whether other operators may compensate for this difference."""
    clauses = difference.words.split("; ")
    is_wired = all(clause.endswith(_ONLY_WIRED) for clause in clauses)
    return difference.kind in _FORM and (difference.kind != "wiring" or is_wired)


class _Forms:
    """Finds stretches of operators that compute the same in different ways. stretches: (operators
    of the reference, of the target).
    """

    def __init__(self, diff: ProgramDiff, side: _Side, target: _Side) -> None:
        self._sides = side, target
        self._equal = dict(zip(side.given, target.given))  # records that correspond
        self._wired: set[int] = set()  # calls that read what corresponds
        self.stretches: list[tuple[list[Call], list[Call]]] = []
        partner, differing = dict(diff.pairs), {d.call for d in diff.differences if not _is_form(d)}
        for call in side.calls:
            if call.id in partner:
                self._follow(call, target.run.calls[partner[call.id]], call.id in differing)
        if len(side.ends) == len(target.ends):
            for ends in zip(side.ends, target.ends):
                self._correspond(*ends)
        self._same = {call.id for part, _ in self.stretches for call in part}
        self._inserted = {call.scope for _, part in self.stretches for call in part}

    def _follow(self, call: Call, other: Call, is_differing: bool) -> None:
        inputs, others = call.slots("input"), other.slots("input")
        if len(inputs) == len(others):
            pairs = zip(inputs, others)
            unlike = [1 for a, b in pairs if not self._correspond(a.record, b.record)]
            if not unlike:
                self._wired.add(call.id)
        if call.id in self._wired or is_differing:  # a reported difference is not reported again
            self._equal.update(across_pairs([(call, other)]))

    def _correspond(self, record: int, other: int) -> bool:
        if self._equal.get(record, -1) != other:
            known: tuple[Iterable[int], ...] = (self._equal.keys(), self._equal.values())
            a, b = (side.behind(n, k) for side, n, k in zip(self._sides, (record, other), known))
            if not a or not b or not _agree(self._sides, (a, b), (record, other), self._equal):
                return False
            self.stretches.append((a, b))
            self._equal[record] = other
        return True

    def left_of(self, difference: Difference) -> Difference | None:
        """The part of a difference that is a different function; None if there is none."""
        if difference.kind in ("removed", "inserted"):
            is_same = difference.call in self._same or (
                difference.call < 0 and difference.name in self._inserted
            )
            return None if is_same else difference
        if difference.call not in self._wired:
            return difference
        clauses = [c for c in difference.words.split("; ") if not c.endswith(_ONLY_WIRED)]
        kind = "attributes" if len(clauses) == difference.attributes else difference.kind
        return difference._replace(words="; ".join(clauses), kind=kind) if clauses else None


class _Side:
    """One program. hashes: of its parameters, by name. given: records that operators read and none
    writes (inputs). ends: outputs that no operator reads.
    """

    def __init__(self, run: Run, hashes: Mapping[str, str]) -> None:
        self.run, self.calls, self.hashes = run, operators(run), hashes
        self.maker = {ref.record: c for c in self.calls for ref in c.slots("output")}
        read = dict.fromkeys(ref.record for c in self.calls for ref in c.slots("input"))
        self.given = sorted(record for record in read if record not in self.maker)
        self.ends = [
            ref.record
            for c in self.calls
            for ref in c.slots("output")[:1]
            if ref.record not in read
        ]

    def behind(self, end: int, stops: Iterable[int]) -> list[Call]:
        """The operators that compute the record `end` from the records `stops`, in order."""
        known = set(stops)
        calls: dict[int, Call] = {}
        todo = [end]
        while todo and len(calls) <= _MOST:
            call = self.maker.get(todo.pop())
            if call is not None and call.id not in calls:
                calls[call.id] = call
                todo += [r.record for r in call.slots("input") if r.record not in known]
        return in_order(calls.values())

    def result(self, calls: Sequence[Call], end: int, values: dict[int, Array]) -> Array:
        """The array of record `end` after running these operators on `values` (by record), which
        gets all results. Raises ReplayRefused.
        """
        for call in calls:
            reads = [ref for kind in ("input", "param") for ref in call.slots(kind)]
            places = {f"param.{name}": place for name, place in taken_parameters(call)}
            arrays = {ref.slot: self._value(ref.slot, ref.record, values) for ref in reads}
            operands = {
                places.get(slot, split_slot(slot)[1]): Operand(slot, "float64", array.shape)
                for slot, array in arrays.items()
            }
            (made, *_) = call.slots("output")
            place = split_slot(made.slot)[1]
            shapes = {place: self._shape(made.record)}
            arguments = {k: v for k, v in call.arguments.items() if k != "dtype"}
            if call.op_type == "cast":
                values[made.record] = next(iter(arrays.values()))
                continue
            own = program(call.op_type, arguments, operands, {place: made.slot}, shapes)
            params = {slot: array for slot, array in arrays.items() if slot in own.params}
            values[made.record] = load(own).run(arrays, params, working="float64")[made.slot]
        return values[end]

    def _shape(self, record: int) -> tuple[int, ...]:
        return tuple(_EXTENT if n < 0 else n for n in self.run.records[record].shape)

    def _value(self, slot: str, record: int, values: dict[int, Array]) -> Array:
        """The value of a record. A parameter gets random numbers, equal ones for equal content.
        Raises ReplayRefused for any other unknown record.
        """
        if record not in values:
            name = param_name(slot)
            if not name:
                raise ReplayRefused(f"nothing that corresponds makes {slot}")
            seed = list(self.hashes.get(name, name).encode())
            values[record] = np.random.default_rng(seed).standard_normal(self._shape(record))
        return values[record]


def _agree(
    sides: tuple[_Side, _Side],
    stretches: tuple[list[Call], list[Call]],
    ends: tuple[int, int],
    equal: Mapping[int, int],
) -> bool:
    """Whether two stretches give the same result on the same random inputs."""
    if max(map(len, stretches)) > _MOST or not all(_is_rational(c) for s in stretches for c in s):
        return False
    read = dict.fromkeys(r.record for c in stretches[0] for r in c.slots("input"))
    rng = np.random.default_rng(0)
    values: tuple[dict[int, Array], dict[int, Array]] = {}, {}
    for record in read:
        if record in equal:
            shape = tuple(_EXTENT if n < 0 else n for n in sides[0].run.records[record].shape)
            values[0][record] = values[1][equal[record]] = rng.standard_normal(shape)
    try:
        a, b = (
            side.result(stretch, end, held)
            for side, stretch, end, held in zip(sides, stretches, ends, values)
        )
    except (ReplayRefused, ValueError, KeyError):
        return False
    far = np.abs(np.subtract(a, b)) if a.shape == b.shape else np.full(1, math.inf)
    return bool(np.max(far, initial=0.0) <= _EXACT * np.max(np.abs(a), initial=0.0))


def _is_rational(call: Call) -> bool:
    kind = str(call.arguments.get("dtype", "float32"))
    return plain(call.op_type) in _RATIONAL and (
        call.op_type != "cast" or (kind in dtypes.DTYPES and dtypes.is_floating(kind))
    )


def _in_words(part: Sequence[Call], other: Sequence[Call]) -> str:
    """How the second stretch (of the target) differs in form from the first."""
    kinds, others = (
        [plain(c.op_type) for c in side if c.op_type != "cast"] for side in (part, other)
    )
    moved = [k for k in kinds if k in others and kinds.index(k) != others.index(k)]
    if sorted(kinds) == sorted(others) and len(moved) >= 2:
        first, second = moved[0], moved[1]
        subject, object_ = _NAMES.get(first, first), _NAMES.get(second, second)
        return f"{subject} is applied behind {object_} in the target: same function"
    return f"{' + '.join(kinds)} is {' + '.join(others)} in the target: same function"
