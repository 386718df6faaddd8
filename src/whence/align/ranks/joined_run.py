"""The run of one rank that the calls and tensors of several become."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from whence.align import derived_run
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Unfit
from whence.align.ranks import gradients, shards
from whence.align.ranks.groups import Key, RankGroups, Side, record_and_roundoff
from whence.align.ranks.shards import Layout
from whence.records import Call, Ref, Run, marks
from whence.records.program import side_by_side
from whence.records.slots import is_input
from whence.records.training import GRADIENTS

# unit roundoffs by which replicas may part before a call that reads all of them is no longer one
# call
_MIXED = 8


def joined_run(groups: RankGroups, side: Side) -> Run:
    """One run of one rank."""
    derived, shown_rank = DerivedTensors(side.run), groups.shown_rank[side.name]
    lead = {key: group.get(shown_rank) or group[min(group)] for key, group in side.groups.items()}
    keys = sorted(side.groups, key=_position(side, lead).__getitem__)
    place = {key: i for i, key in enumerate(keys)}
    orders = {(call.rank, call.order): place[side.key_of[call.id]] for call in side.calls}
    calls = []
    for key in keys:
        call, parent = lead[key], side.parent(key)
        refs, pieces, parted = _refs(groups, side, derived, key, call)
        notes = (*call.notes, *([marks.of_pieces(len(side.groups[key]))] if pieces else []))
        if parted and shown_rank in side.groups[key]:
            notes = (*notes, marks.shown(shown_rank))
        calls.append(
            replace(
                call,
                id=place[key],
                order=place[key],
                forward=orders.get((call.rank, call.forward), -1),
                rank=0,
                scope=key[4],
                placements={},
                refs=refs,
                program=_program(side, derived, call, side.groups[key].values()),
                notes=notes,
                parent=place[parent] if parent is not None else -1,
                leaf=all(c.leaf for c in side.groups[key].values()),
            )
        )
    return derived.done(calls)


def _program(side: Side, derived: DerivedTensors, lead: Call, calls: Iterable[Call]) -> str:
    """The program of a joined call: that of its lead, or what ranks with other parameters each did
    to their gradients.
    """
    names = list(dict.fromkeys(call.program for call in calls))
    programs = [program for name in names if (program := side.run.programs.get(name)) is not None]
    made = [slot for program in programs for slot, _ in program.outputs]
    if lead.op != GRADIENTS or len(programs) < 2 or len(set(made)) < len(made):
        return lead.program
    if len(programs) < len(names):
        return ""
    merged = side_by_side(programs)
    derived.programs[merged.id] = merged
    return merged.id


def _refs(
    groups: RankGroups, side: Side, derived: DerivedTensors, key: Key, lead: Call
) -> tuple[tuple[Ref, ...], bool, bool]:
    edges = {r.slot: r.edge for r in lead.refs}
    refs: list[tuple[Ref, Layout, float]] = []
    for slot in side.slots(key):
        ranks, records = side.holders(key, slot)
        place = (side.name, records)
        layout = gradients.layout_at(groups, side, key, slot)
        if (side.name, key, slot) in groups.layouts_at:
            record = _joined(groups, side, derived, ranks, records, layout)
        elif place in groups.sum_of:
            record = groups.sum_of[place]
        elif place in groups.unplaced:
            record = derived.unknown(records, marks.unplaced(len(records)))
        else:
            record = _joined(groups, side, derived, ranks, records, layout)
        refs.append(
            (Ref(slot, record, edges.get(slot, "")), layout, groups.differing.get(place, 0.0))
        )
    # A call whose ranks worked on different inputs and left pieces is not one call on one input.
    pieces = any(level.how != "replicated" for _, layout, _ in refs for level in layout)
    limit = _MIXED * max(
        (
            record_and_roundoff(side.run, r.record)[1]
            for _, call in side.groups[key].items()
            for r in call.refs
        ),
        default=0.0,
    )
    joined_refs = tuple(
        r for r, _, difference in refs if not (pieces and difference > limit and is_input(r.slot))
    )
    return joined_refs, pieces, any(difference > limit for _, _, difference in refs)


def _joined(
    groups: RankGroups,
    side: Side,
    derived: DerivedTensors,
    ranks: Sequence[int],
    records: Sequence[int],
    layout: Layout,
) -> int:
    if not layout or (len(records) == 1 and gradients.divisor(layout) == 1):
        return records[0]
    shown_rank = groups.shown_rank[side.name]
    node = shards.node(
        layout,
        [side.run.records[r].shape for r in records],
        ranks.index(shown_rank) if shown_rank in ranks else 0,
    )
    expression, bound = shards.bound_to(node, records)
    try:
        return derived.add(expression, bound, derived_run.on_ranks(shards.words(layout)))
    except Unfit as error:  # ranks of different dtypes
        groups.notes.append(f"{side.name}: {error}; rank {ranks[0]}'s is shown")
        return records[0]


def _position(side: Side, lead: dict[Key, Call]) -> dict[Key, tuple[Any, ...]]:
    """Where joined calls stand: as on the shown rank; others behind the last call they share."""
    positions: dict[Key, tuple[Any, ...]] = {}
    by_rank: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(side.calls, key=lambda c: c.order):
        by_rank[call.rank].append(call)
    main = lead[next(iter(side.groups))].rank
    roots: dict[Key, int] = {}
    for rank in sorted(by_rank, key=lambda r: (r != main, side.stage[r], r)):
        root, last = -1, -1
        for k, call in enumerate(by_rank[rank]):
            key = side.key_of[call.id]
            if call.parent < 0:
                root = roots.setdefault(
                    key,
                    call.order if rank == main else max([*roots.values(), root], default=-1) + 1,
                )
            if key in positions:
                last = positions[key][3]
            else:
                positions[key] = (
                    root,
                    call.parent >= 0,
                    side.stage[rank],
                    call.order if rank == main else last,
                    rank if rank != main else -1,
                    k,
                )
    return positions
