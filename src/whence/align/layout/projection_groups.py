"""Proposes calls of one run that may together be one call of the other, by parents, inputs and
extents.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from whence.align.plan_editor import MOST_PARTS, PlanEditor
from whence.records import Call, in_order
from whence.records.marks import is_unplaced
from whence.results import CallPair


@dataclass(frozen=True, slots=True)
class Group:
    """Calls of one run that may together be one call of the other. parts: in execution order."""

    parts: tuple[Call, ...]
    whole: Call
    parts_side: str  # "reference" or "target"

    @property
    def whole_side(self) -> str:
        return across(self.parts_side)


def across(side: str) -> str:
    """The name of the other side."""
    return "target" if side == "reference" else "reference"


def extent(editor: PlanEditor, side: str, call: Call) -> int:
    """Number of output channels of a call; 0 where it is not a single number."""
    outputs = call.slots("output")
    if not outputs:
        return 0
    output = editor.record(side, outputs[0].record)
    return output.shape[-1] if len(output.shape) > 1 and not is_unplaced(output) else 0


def weight(editor: PlanEditor, side: str, call: Call) -> int | None:
    """The record of a call's first 2-D parameter; None without one."""
    params = (r.record for r in call.slots("param"))
    return next((r for r in params if len(editor.record(side, r).shape) == 2), None)


def groups(editor: PlanEditor) -> Iterator[Group]:
    """Groups of leaf calls that have no partner, or a partner of another extent, below paired
    parents.
    """
    loose = [p for p in editor.pairs.values() if _is_loose(editor, p)]
    leaves = {i for i in editor.free_reference if _is_leaf(editor, "reference", i)}
    free = leaves | {p.reference for p in loose}
    free.update(editor.ambiguous)
    target_leaves = {i for i in editor.free_target if _is_leaf(editor, "target", i)}
    free_target = target_leaves | {p.target for p in loose}
    free_target.update(call for others in editor.ambiguous.values() for call in others)
    if not free or not free_target:
        return
    under: defaultdict[int, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for i in free:
        above = _above(editor.reference.calls, i, editor.pairs)
        under[above][0].append(editor.reference.calls[i])
    for i in free_target:
        above = _above(editor.target.calls, i, editor.paired_with)
        for parent in editor.paired_with[above] if above >= 0 else [-1]:
            under[parent][1].append(editor.target.calls[i])
    for calls, target_calls in under.values():
        yield from _sums_of(editor, "reference", calls, target_calls)
        yield from _sums_of(editor, "target", target_calls, calls)


def _is_leaf(editor: PlanEditor, side: str, call: int) -> bool:
    return not editor.kids(side).get(call)


def _above(calls: Sequence[Call], call: int, paired: Container[int]) -> int:
    """The innermost enclosing call that is paired; -1 for none."""
    parent = calls[call].parent
    while parent >= 0 and parent not in paired:
        parent = calls[parent].parent
    return parent


def _is_loose(editor: PlanEditor, pair: CallPair) -> bool:
    """Whether two paired leaf calls differ in their number of output channels, so that the pairing
    may be wrong.
    """
    if editor.is_fixed(pair.reference):
        return False
    calls = {
        "reference": editor.reference.calls[pair.reference],
        "target": editor.target.calls[pair.target],
    }
    if not all(_is_leaf(editor, side, call.id) for side, call in calls.items()):
        return False
    extents = [extent(editor, side, call) for side, call in calls.items()]
    if not all(extents) or extents[0] == extents[1]:
        return False
    counts = []
    for (side, call), n in zip(calls.items(), extents, strict=True):
        record = weight(editor, side, call)
        counts.append(editor.record(side, record).count if record is not None else n)
    return 3 * min(counts) <= 2 * max(counts)


def _sums_of(
    editor: PlanEditor, side: str, parts: Sequence[Call], wholes: Sequence[Call]
) -> Iterator[Group]:
    """Neighbouring calls that read one tensor, or labels of one layer, and together make as many
    channels as one call of the other run.
    """
    by_input: defaultdict[object, list[Call]] = defaultdict(list)
    for call in in_order(parts):
        inputs = call.slots("input")
        if extent(editor, side, call) and (inputs or call.kind == "label"):
            by_input[inputs[0].record if inputs else _layer(call)].append(call)
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for whole in in_order(wholes):
        width = extent(editor, across(side), whole)
        for chosen in (c for members in by_input.values() for c in _neighbours(members)):
            if not width or sum(extent(editor, side, c) for c in chosen) != width:
                continue
            if not chosen[0].slots("input") and _layer(chosen[0]) != _layer(whole):
                continue
            # A module is called many times under one parent: its k-th call is paired with the k-th.
            name = whole.scope, tuple(c.scope for c in chosen)
            if {c.occurrence for c in chosen} == {whole.occurrence} or not counts[name]:
                counts[name] += 1
                yield Group(chosen, whole, side)


def _layer(call: Call) -> tuple[object, ...]:
    """The place of a label whose input is not known: when it was computed, and its numbers."""
    return call.rank, call.step, call.micro, *re.findall(r"\d+", call.scope)


def _neighbours(members: Sequence[Call]) -> Iterator[tuple[Call, ...]]:
    for count in range(2, MOST_PARTS + 1):
        for first in range(len(members) - count + 1):
            yield tuple(members[first : first + count])
