"""The operators of a run, grouped by signature: which ran, how often, with which values,
how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from whence.errors import UsageError
from whence.records import OVERWRITTEN, Call, Run
from whence.records.slots import is_input, is_written

KIND = "operators"
"""Of the note in which a capture that writes each signature once counts them all."""


class Tensor(NamedTuple):
    """One tensor of a signature. stride: () when contiguous."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()


class Range:
    """The finite values of a slot over all calls.

    min and max: None when there was no finite value. Also the number of NaN and Inf.
    """

    __slots__ = ("inf", "max", "min", "nan")

    def __init__(self) -> None:
        self.min: float | None = None
        self.max: float | None = None
        self.nan = self.inf = 0

    def add(self, low: float | None, high: float | None, nan: int = 0, inf: int = 0) -> None:
        """Extend the range by the values of one or several more calls."""
        if low is not None:
            self.min = low if self.min is None else min(self.min, low)
        if high is not None:
            self.max = high if self.max is None else max(self.max, high)
        self.nan += nan
        self.inf += inf


class Group:
    """All calls of one operator with equal dtypes, shapes, strides and non-tensor arguments.

    op: overload name. key: identifies the group within its run. tensors: inputs in the order of the
    schema, then outputs. arguments: as `Call.arguments`. calls: ids of the calls that the run
    holds; with_elements: those of which all inputs that are read have elements. count: of calls in
    the program, written or not; seconds: what they took together. ranges: by slot. scopes, phases:
    where, with counts. source: "file:line" of the first.
    """

    def __init__(
        self, op: str, key: str, tensors: tuple[Tensor, ...], arguments: dict[str, Any]
    ) -> None:
        self.op, self.key, self.tensors, self.arguments = op, key, tensors, arguments
        self.calls: list[int] = []
        self.with_elements: list[int] = []
        self.count = 0
        self.seconds = 0.0
        self.ranges: dict[str, Range] = {}
        self.scopes: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.source = ""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The input tensors."""
        return tuple(t for t in self.tensors if is_input(t.slot))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The output tensors, and the inputs that the operator changed."""
        return tuple(t for t in self.tensors if is_written(t.slot))


def signatures(run: Run) -> list[Group]:
    """The operator calls of a run by signature (op, dtypes, shapes, strides, non-tensor arguments),
    in the order of their first call.

    Counts of calls that were not written, because their signature had been, come from the notes
    that the capture left.
    """
    groups: dict[str, Group] = {}
    counted = [note for note in run.notes if note.kind == KIND]
    for call in sorted(
        (c for c in run.calls if c.kind == "operator"), key=lambda c: (c.rank, c.order)
    ):
        tensors = _tensors(run, call)
        key = key_of(call.op, tensors, call.arguments)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(call.op, key, tensors, dict(call.arguments))
        group.calls.append(call.id)
        group.source = group.source or call.source
        records = [run.records[ref.record] for ref in call.refs if is_input(ref.slot)]
        if all(
            not record.why or not record.count or record.why == OVERWRITTEN for record in records
        ):
            group.with_elements.append(call.id)
        if counted:
            continue
        group.count += 1
        group.seconds += call.seconds
        group.scopes[call.scope] = group.scopes.get(call.scope, 0) + 1
        group.phases[call.phase] = group.phases.get(call.phase, 0) + 1
        for ref in call.refs:
            if (figures := run.records[ref.record].statistics) is not None:
                group.ranges.setdefault(ref.slot, Range()).add(
                    figures.min, figures.max, figures.nan, figures.inf
                )
    for note in counted:
        _add_counts(groups, msgspec.json.decode(note.text))
    return list(groups.values())


def chosen_operators(
    groups: Sequence[Group],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sort: str = "time",
) -> list[Group]:
    """The groups whose operator is wanted, all of one operator together: most time first, or most
    calls, or by name.

    include, exclude: patterns (shell style, or `re:` and a regular expression) on the overload name
    ("aten.mm.default"), the name without overload ("aten.mm") or the base name ("mm"). Raises
    UsageError when they leave nothing of what there was, or are no patterns.
    """
    from whence.instrument.option_values import check_pattern
    from whence.instrument.selection import matcher

    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            check_pattern(pattern, option)
    included, excluded = [matcher(p) for p in include], [matcher(p) for p in exclude]
    chosen = []
    for group in groups:
        whole = group.op.rpartition(".")[0]
        names = (group.op, whole, whole.partition(".")[2])
        if any(m(n) for m in excluded for n in names) or (
            included and not any(m(n) for m in included for n in names)
        ):
            continue
        chosen.append(group)
    if groups and not chosen:
        raise UsageError(
            f"no operator is left of {len({g.op for g in groups})}; they are named like "
            f"{groups[0].op}"
        )
    weight: dict[str, float] = {}
    for group in chosen:
        weight[group.op] = weight.get(group.op, 0) + (
            group.seconds if sort == "time" else group.count if sort == "count" else 0
        )
    key = (
        (lambda g: -g.seconds)
        if sort == "time"
        else (lambda g: -g.count)
        if sort == "count"
        else (lambda g: 0)
    )
    return sorted(chosen, key=lambda g: (-weight[g.op], g.op, key(g)))


def key_of(op: str, tensors: Iterable[Tensor], arguments: dict[str, Any]) -> str:
    """The text that identifies a signature."""
    going_in = [list(t) for t in tensors if is_input(t.slot)]
    return msgspec.json.encode([op, going_in, arguments], order="deterministic").decode()


def _tensors(run: Run, call: Call) -> tuple[Tensor, ...]:
    tensors = []
    for ref in call.refs:
        record = run.records[ref.record]
        tensors.append(Tensor(ref.slot, record.dtype, record.shape, record.stride))
    return tuple(tensors)


def _add_counts(groups: dict[str, Group], counts: Sequence[dict[str, Any]]) -> None:
    """Add the counts since the previous note, one entry a signature: op, tensors, arguments, count,
    seconds, scopes, phases, ranges.
    """
    for entry in counts:
        tensors = tuple(
            Tensor(slot, dtype, tuple(shape), tuple(stride))
            for slot, dtype, shape, stride in entry["tensors"]
        )
        key = key_of(entry["op"], tensors, entry["arguments"])
        group = groups.get(key)
        if group is None:  # its call was left out, or lost
            group = groups[key] = Group(entry["op"], key, tensors, entry["arguments"])
        group.count += entry["count"]
        group.seconds += entry["seconds"]
        for table, counts_by_name in (
            (group.scopes, entry["scopes"]),
            (group.phases, entry["phases"]),
        ):
            for name, n in counts_by_name.items():
                table[name] = table.get(name, 0) + n
        for slot, (low, high, nan, inf) in entry["ranges"].items():
            group.ranges.setdefault(slot, Range()).add(low, high, nan, inf)
