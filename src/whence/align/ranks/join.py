"""Runs of several ranks brought to one form: calls of the ranks become one call, their tensors one
tensor, before anything is compared.

How a tensor lies on the ranks is proposed by shapes against the other side, by what the ranks
share, and confirmed on elements.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from whence.align import derived_run
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Unfit
from whence.align.module_names import starred
from whence.align.ranks import gradients, shards
from whence.align.ranks.child_numbers import number_children
from whence.align.ranks.groups import Key, RankGroups, Side, record_and_roundoff
from whence.align.ranks.partial_sums import choose, unreduced
from whence.align.ranks.placement import place
from whence.align.ranks.shards import Layout, Shard
from whence.display import listed
from whence.errors import UsageError
from whence.records import Call, Record, Ref, Run, marks
from whence.records.program import side_by_side
from whence.records.slots import is_input, is_output
from whence.records.training import BACKWARD, GRADIENTS, is_of_step


def joined(
    reference: Run, target: Run, declared: Sequence[Shard] = ()
) -> tuple[Run, Run, tuple[str, ...]]:
    """Both runs with the calls of their ranks joined, and sentences on what was done. Runs of one
    rank are as they were.

    Ranks that hold the same tensors on both sides stay apart and are paired one by one. Raises
    UsageError for declarations that contradict each other or do not fit a tensor.
    """
    for shard in declared:
        if shard.how not in shards.HOW:
            raise UsageError(
                f"{shard}: {shard.how!r} is not known; there are {', '.join(shards.HOW)}"
            )
    ranks, target_ranks = ({c.rank for c in run.calls} for run in (reference, target))
    if len(ranks) < 2 and len(target_ranks) < 2:
        return (
            (reference, target, ())
            if ranks == target_ranks or not ranks or not target_ranks
            else (reference, *_renumbered(target, min(ranks)))
        )
    if ranks == target_ranks and not declared and _same_shapes(reference, target):
        return reference, target, ()
    sides = Side("reference", reference), Side("target", target)
    groups = RankGroups(*sides, declared)
    _decide(groups)
    runs = [side.run if len(side.ranks) < 2 else joined_run(groups, side) for side in sides]
    rank = min(
        sides[0].ranks
        if len(sides[0].ranks) == 1
        else sides[1].ranks
        if len(sides[1].ranks) == 1
        else [0]
    )
    if len(sides[0].ranks) > 1 or len(sides[1].ranks) > 1:
        runs = [_renumbered(run, rank)[0] for run in runs]
    for i in (0, 1):
        if len(set(sides[i].stage.values())) > 1:
            runs[i] = handed_back(runs[1 - i], runs[i])
    return runs[0], runs[1], tuple(groups.notes)


def _renumbered(run: Run, rank: int) -> tuple[Run, tuple[str, ...]]:
    """A run of one rank under another number: numbers say nothing where there is only one."""
    own_rank = next((c.rank for c in run.calls), rank)
    if own_rank == rank:
        return run, ()
    calls = [replace(c, rank=rank) for c in run.calls]
    return DerivedTensors(run).done(calls), (f"target: rank {own_rank} is paired with rank {rank}",)


def _same_shapes(reference: Run, target: Run) -> bool:
    """Does every call that both have by its key, rank included, hold tensors of the same shapes?"""
    by_key = {c.key(): c for c in target.calls}
    met = False
    for call in reference.calls:
        partner = by_key.get(call.key())
        if partner is None:
            continue
        met = True
        slots = {r.slot: r.record for r in partner.refs}
        for ref in call.refs:
            if (
                ref.slot in slots
                and reference.records[ref.record].shape != target.records[slots[ref.slot]].shape
            ):
                return False
    return met


def _decide(groups: RankGroups) -> None:
    """How every tensor lies on the ranks of both sides, and what is to be told of it."""
    renumber(groups)
    find_stages(groups)
    for side in groups.sides:
        number_children(side)
    place(groups)
    for side in groups.sides:
        unreduced(groups, side)
        choose(groups, side)
        _note_layouts(groups, side)


def _note_layouts(groups: RankGroups, side: Side) -> None:
    if len(side.ranks) < 2:
        return
    counted = Counter(
        shards.words(layout)
        for (name, records), layout in groups.layouts.items()
        if name == side.name and layout
    )
    layouts = ", ".join(f"{count} {words}" for words, count in counted.most_common())
    groups.notes.insert(
        0, f"{side.name}: {len(side.ranks)} ranks joined{f': {layouts}' if layouts else ''}"
    )
    if unknown := list(
        dict.fromkeys(name for place, name in groups.unplaced.items() if place[0] == side.name)
    ):
        groups.notes.append(
            f"{side.name}: how {listed(unknown, 3)} are split over the ranks is not "
            "known: the ranks differ and they have no partner; they are not compared"
        )


# Gradients between the stages of a pipeline.
#
# A stage is given the gradient of its output by the next one, not by code of the model. In the
# joined run this gradient is what the calls of the next stage made, as it is on one rank: a
# gradient that was not sent, or is another one, then does not follow from them.

_GIVEN = "input.grad."


def handed_back(whole: Run, staged: Run) -> Run:
    """The staged run, whose backward calls of the root read what the same calls made as in `whole`.

    Of a call of `whole` without a partner, or a gradient that no call made, nothing is changed.
    """
    partners = {_key(call): call for call in staged.calls if call.phase == BACKWARD}
    made = {
        ref.record: (_key(call), ref.slot)
        for call in whole.calls
        if call.phase == BACKWARD
        for ref in call.refs
        if is_output(ref.slot)
    }
    calls = list(staged.calls)
    for call in whole.calls:
        partner = partners.get(_key(call))
        if call.phase != BACKWARD or call.scope or partner is None:
            continue
        given = {
            ref.slot: record
            for ref in call.refs
            if ref.slot.startswith(_GIVEN)
            and (record := _made(partners, made.get(ref.record))) is not None
        }
        if given and not all(ref.slot in given for ref in partner.refs if _is_given(ref)):
            calls[partner.id] = _reading(partner, call, given)
    return DerivedTensors(staged).done(calls)


def _is_given(ref: Ref) -> bool:
    return ref.slot.startswith(_GIVEN)


def _made(partners: dict[Hashable, Call], source: tuple[Hashable, str] | None) -> int | None:
    """The record that the same call of the staged run made."""
    maker = partners.get(source[0]) if source is not None else None
    if maker is None or source is None:
        return None
    return next((ref.record for ref in maker.refs if ref.slot == source[1]), None)


def _reading(call: Call, like: Call, given: dict[str, int]) -> Call:
    """The call, given these gradients in the place of its own."""
    kept = [ref for ref in call.refs if not _is_given(ref)]
    refs = [Ref(slot, record, "content") for slot, record in given.items()]
    outputs = [ref for ref in kept if not is_input(ref.slot)]
    inputs = [ref for ref in kept if is_input(ref.slot)]
    return replace(call, refs=(*inputs, *refs, *outputs), program="", no_program=_OTHER)


_OTHER = "its stage was given the gradient of its output by another rank"


def _key(call: Call) -> Hashable:
    """A call, whatever its root is called."""
    return call.step, call.micro, call.phase, call.scope, call.op, call.occurrence


# Ranks with other layers or experts than their neighbours: pipeline stages, local numbers.

_STAGES = 0.02  # ranks of two pipeline stages share at most this share of their leaf modules


def renumber(groups: RankGroups) -> None:
    """Number layers and experts of each rank as the other side numbers the same parameters."""
    for side, other_side in (
        (groups.sides[0], groups.sides[1]),
        (groups.sides[1], groups.sides[0]),
    ):
        if len(side.ranks) < 2:
            continue
        numbers_of: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
        for call in other_side.calls:
            for ref in call.slots("param"):
                if print_ := _fingerprint(other_side.run.records[ref.record]):
                    numbers_of[starred(call.scope), print_].add(_numbers(call.scope))
        for rank in side.ranks:
            votes: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
            for call in side.calls:
                numbers = _numbers(call.scope)
                for ref in call.slots("param") if call.rank == rank and numbers else ():
                    print_ = _fingerprint(side.run.records[ref.record])
                    places = (
                        numbers_of.get((starred(call.scope), print_), set()) if print_ else set()
                    )
                    if len(places) == 1:
                        for i, (a, b) in enumerate(zip(next(iter(places)), numbers, strict=True)):
                            votes[_prefix(starred(call.scope), i), i][a - b] += 1
            for (prefix, i), counted in votes.items():
                offset, count = counted.most_common(1)[0]
                if offset and count > 0.6 * counted.total():
                    _shift(groups, side, rank, prefix, i, offset)
        side.group()


def _shift(groups: RankGroups, side: Side, rank: int, prefix: str, place: int, offset: int) -> None:
    for call in side.calls:
        if call.rank == rank and _prefix(starred(call.scope), place) == prefix:
            side.scope[call.id] = _with_number(side.scope[call.id], place, offset)
    groups.notes.append(f"{side.name}: rank {rank} counts {prefix} from 0 again: {offset:+d}")


def find_stages(groups: RankGroups) -> None:
    """Ranks that share no leaf module are stages of a pipeline, ordered as on the other side."""
    for side, other_side in (
        (groups.sides[0], groups.sides[1]),
        (groups.sides[1], groups.sides[0]),
    ):
        leaves = {
            rank: {
                side.scope[c.id]
                for c in side.calls
                if c.leaf and c.rank == rank and not is_of_step(c.phase, c.op)
            }
            for rank in side.ranks
        }
        clusters: list[list[int]] = []
        for rank in side.ranks:
            for cluster in clusters:
                shared = leaves[rank] & leaves[cluster[0]]
                fewest = min(len(leaves[rank]), len(leaves[cluster[0]]))
                # one may be shared by both ends: a tied embedding
                if len(shared) > max(fewest > 3, _STAGES * fewest):
                    cluster.append(rank)
                    break
            else:
                clusters.append([rank])
        if len(clusters) < 2 or not any(len(g) > 1 for g in side.groups.values()):
            continue  # ranks without a common root are no pipeline
        order = {other_side.scope[c.id]: c.order for c in reversed(other_side.calls)}
        firsts = [
            min((order[s] for s in leaves[cluster[0]] if s in order), default=math.inf)
            for cluster in clusters
        ]
        ranked = sorted(range(len(clusters)), key=lambda i: (firsts[i], clusters[i][0]))
        for stage, i in enumerate(ranked):
            side.stage.update(dict.fromkeys(clusters[i], stage))
        listed = ", then ".join(_ranks(clusters[i]) for i in ranked)
        groups.notes.append(f"{side.name}: stages of a pipeline: {listed}")


def _fingerprint(record: Record) -> str:
    return (
        record.hash and f"{record.hash} {record.shape}"
        if record.count > 1 and not _constant(record)
        else ""
    )


def _constant(record: Record) -> bool:
    """Parameters of one value throughout (untrained norms) tell no layer from another."""
    return record.statistics is not None and record.statistics.min == record.statistics.max


def _numbers(scope: str) -> tuple[int, ...]:
    return tuple(int(part) for part in scope.split(".") if part.isdigit())


def _prefix(scope: str, place: int) -> str:
    """The starred scope up to its number at `place`; "" when it has none."""
    parts = scope.split(".")
    stars = [i for i, part in enumerate(parts) if part == "*"]
    return ".".join(parts[: stars[place] + 1]) if place < len(stars) else ""


def _with_number(scope: str, place: int, offset: int) -> str:
    parts = scope.split(".")
    index = [i for i, part in enumerate(parts) if part.isdigit()][place]
    parts[index] = str(int(parts[index]) + offset)
    return ".".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = list(range(ranks[0], ranks[-1] + 1)) == list(ranks) and len(ranks) > 2
    return f"ranks {ranks[0]} to {ranks[-1]}" if listed else f"ranks {', '.join(map(str, ranks))}"


# The run of one rank that the calls and tensors of several become.

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
