"""Fused calls of the target in dumps of graphs: which of their inputs belong to calls of the
reference before their namesakes.

A kernel that normalises, scales and adds is recorded as the addition. It is given what the first of
the operators that it carries out is given, under slots that the reference's addition has for what
the operators between have made of it. Paired by their slots, both would differ by all that lies
between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from whence.align.call_sites import LastWriters
from whence.align.layout.distances import AGREES, distance
from whence.align.plan_editor import PlanEditor
from whence.dtypes import Array
from whence.records import Call
from whence.records.slots import is_input, is_output
from whence.results import CallPair

Content = str | int
"""What stands for the elements of a record, in whatever shape: their hash, or the record."""


def content_of(editor: PlanEditor, side: str, record: int) -> Content:
    """What stands for the elements of a record of one side, or of one made of the target's."""
    return editor.record(side, record).hash or record


def part_inputs(editor: PlanEditor) -> None:
    """Leave inputs of fused calls without partners where calls before their namesakes, which have
    no partner either, are given these tensors.

    What a fused call makes is what its namesake makes, as far as a fault may be off: one that was
    left out, a scale, say, shows there.
    """
    if not editor.free_reference:
        return
    makers = LastWriters(
        (call, content_of(editor, "reference", ref.record))
        for call in editor.reference.calls
        if call.leaf
        for ref in call.slots("output")
    )
    same = _same_contents(editor)
    for pair in list(editor.pairs.values()):
        call, partner = editor.calls(pair)
        before = _before(editor, call, makers)
        if not call.leaf or editor.is_fixed(call.id) or not before.read:
            continue
        own = {ref.slot: content_of(editor, "reference", ref.record) for ref in call.refs}
        fused = set()
        for ref in partner.slots("input"):
            alike = same[tensor := content_of(editor, "target", ref.record)] | {tensor}
            across = {own[s.reference_slot] for s in pair.slots if s.target_slot == ref.slot}
            if alike & before.read and not alike & across:
                fused.add(ref.slot)
        if fused and _makes_the_same(editor, pair):
            # none of them is left over: they belong to the calls before
            editor.pairs[call.id] = replace(
                pair,
                slots=tuple(
                    s
                    for s in pair.slots
                    if not (is_input(s.reference_slot) and s.target_slot in fused)
                ),
                only_reference=tuple(
                    s for s in pair.only_reference if not (is_input(s) and own[s] in before.made)
                ),
                only_target=tuple(s for s in pair.only_target if s not in fused),
            )


def _makes_the_same(editor: PlanEditor, pair: CallPair) -> bool:
    """Are the outputs of a pair roughly the same? False where elements are missing."""
    outputs = [slot for slot in pair.slots if is_output(slot.reference_slot)]
    return bool(outputs) and all(
        _are_alike(
            editor.array("reference", slot.reference_record),
            editor.array("target", slot.target_record),
        )
        for slot in outputs
    )


def _are_alike(reference: Array | None, target: Array | None) -> bool:
    """Of the elements that differ alone: what a mask fills in would drown the others."""
    if reference is None or target is None or reference.size != target.size:
        return False
    a, b = reference.reshape(-1), target.reshape(-1)
    differs = a != b
    return not differs.any() or distance(a[differs], b[differs]) < AGREES


class _Before(NamedTuple):
    """What the calls without a partner that lead into a call are given, and make."""

    read: set[Content]
    made: set[Content]


def _before(editor: PlanEditor, call: Call, makers: LastWriters) -> _Before:
    before = _Before(set(), set())
    visited: set[int] = set()
    todo = [call]
    while todo:
        reader = todo.pop()
        contents = {content_of(editor, "reference", r.record) for r in reader.slots("input")}
        if reader is not call:
            before.read.update(contents)
        for content in contents:
            # of several that made the same, a sum with zeros say, the last before the reader
            maker = makers.before(reader, content)
            if maker is None or maker.id not in editor.free_reference:
                continue
            before.made.add(content)
            if maker.id not in visited:
                visited.add(maker.id)
                todo.append(maker)
    return before


def _same_contents(editor: PlanEditor) -> Mapping[Content, set[Content]]:
    """Contents of the target -> those of the reference that are outputs of the same calls."""
    same: defaultdict[Content, set[Content]] = defaultdict(set)
    for pair in editor.pairs.values():
        for slot in pair.slots:
            if is_output(slot.reference_slot):
                tensor = content_of(editor, "target", slot.target_record)
                same[tensor].add(content_of(editor, "reference", slot.reference_record))
    return same
