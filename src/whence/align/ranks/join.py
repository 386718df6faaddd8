"""Joins the ranks of a run before anything is compared: calls of several ranks become one call,
their tensors one tensor.

How a tensor is distributed over the ranks is proposed by its shapes against the other side's and by
what the ranks have in common, and confirmed by elements.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from whence.align import derived_run
from whence.align.calls.match import plan
from whence.align.derived_run import DerivedTensors
from whence.align.dims import Unfit
from whence.align.layout.permutations import located
from whence.align.module_names import starred
from whence.align.ranks import gradients, shards
from whence.align.ranks.child_numbers import number_children
from whence.align.ranks.groups import (
    Key,
    RankGroups,
    RankTensor,
    Side,
    between,
    record_and_roundoff,
)
from whence.align.ranks.partial_sums import choose, unreduced
from whence.align.ranks.shards import FITS, Layout, Level, Shape, Shard
from whence.display import listed
from whence.dtypes import Array
from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Record, Ref, Run, Sketch, Statistics, in_order, marks
from whence.records.program import side_by_side
from whence.records.slots import is_input, is_output, is_param, slot_kind
from whence.records.training import BACKWARD, GRADIENTS, is_of_step


def joined(
    reference: Run, target: Run, declared: Sequence[Shard] = ()
) -> tuple[Run, Run, tuple[str, ...]]:
    """Both runs with their ranks joined, and sentences on what was done. Runs of one rank are
    unchanged.

    Ranks that hold the same tensors on both sides stay separate and are paired one by one. Raises
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
    """A run of a single rank under another rank number: with one rank the number has no meaning."""
    own_rank = next((c.rank for c in run.calls), rank)
    if own_rank == rank:
        return run, ()
    calls = [replace(c, rank=rank) for c in run.calls]
    return DerivedTensors(run).done(calls), (f"target: rank {own_rank} is paired with rank {rank}",)


def _same_shapes(reference: Run, target: Run) -> bool:
    """Whether calls with the same key in both runs, rank included, hold tensors of the same
    shapes.
    """
    by_key = {c.key(): c for c in target.calls}
    met = False
    for call in reference.calls:
        partner = by_key.get(call.key())
        if partner is None:
            continue
        met = True
        slots = partner.by_slot
        for ref in call.refs:
            if (
                ref.slot in slots
                and reference.records[ref.record].shape != target.records[slots[ref.slot]].shape
            ):
                return False
    return met


def _decide(groups: RankGroups) -> None:
    """Decide how every tensor is distributed over the ranks of both sides, and note what the user
    should know.
    """
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
# A stage receives the gradient of its output from the next stage, not from code of the model. In
# the joined run this gradient is the one that the calls of the next stage made, as on one rank. A
# gradient that was not sent, or another one that was, then does not follow from them.

_GIVEN = "input.grad."


def handed_back(whole: Run, staged: Run) -> Run:
    """The staged run, with the root's backward calls reading the gradients that the same calls made
    in `whole`.

    Unchanged where a call of `whole` has no partner, or no call made the gradient.
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
    """The record that the corresponding call of the staged run made; None without one."""
    maker = partners.get(source[0]) if source is not None else None
    if maker is None or source is None:
        return None
    return maker.by_slot.get(source[1])


def _reading(call: Call, like: Call, given: dict[str, int]) -> Call:
    """The call with these gradients as inputs in the place of its own."""
    kept = [ref for ref in call.refs if not _is_given(ref)]
    refs = [Ref(slot, record, "content") for slot, record in given.items()]
    outputs = [ref for ref in kept if not is_input(ref.slot)]
    inputs = [ref for ref in kept if is_input(ref.slot)]
    return replace(call, refs=(*inputs, *refs, *outputs), program="", no_program=_OTHER)


_OTHER = "its stage was given the gradient of its output by another rank"


def _key(call: Call) -> Hashable:
    """Identifies a call regardless of the name of its root."""
    return call.step, call.micro, call.phase, call.scope, call.op, call.occurrence


# Ranks with other layers or experts than their neighbours: pipeline stages, local numbers.

_STAGES = 0.02  # largest share of leaf modules that ranks of two pipeline stages have in common


def renumber(groups: RankGroups) -> None:
    """Number the layers and experts of each rank as the other side numbers the same parameters."""
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
    """Find ranks that share no leaf module: they are stages of a pipeline, in the order of the
    other side.
    """
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
            continue  # ranks without a common root are not a pipeline
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
    """Whether a parameter has one value throughout (an untrained norm) and so does not identify a
    layer.
    """
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


# Makes one run of one rank from the calls and tensors of several ranks.

# unit roundoffs by which replicas may differ before a call that reads all of them no longer counts
# as one call
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
    """The program of a joined call: that of its leading rank, or one that applies what each rank
    with other parameters did to its gradients.
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
    for tensor in side.tensors(key):
        slot, place = tensor.slot, tensor.place
        layout = gradients.layout_at(groups, tensor)
        is_own = tensor.where in groups.layouts_at
        if place in groups.sum_of and not is_own:
            record = groups.sum_of[place]
        elif place in groups.unplaced and not is_own:
            record = derived.unknown(tensor.records, marks.unplaced(len(tensor.records)))
        else:
            record = _joined(groups, tensor, derived, layout)
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


def _joined(groups: RankGroups, tensor: RankTensor, derived: DerivedTensors, layout: Layout) -> int:
    side, ranks, records = tensor.side, tensor.ranks, tensor.records
    if not layout or (len(records) == 1 and gradients.divisor(layout) == 1):
        return records[0]
    shown_rank = groups.shown_rank[side.name]
    shown = ranks.index(shown_rank) if shown_rank in ranks else 0
    node = shards.node(layout, tensor.shapes, shown)
    expression, bound = shards.bound_to(node, records)
    try:
        return derived.add(expression, bound, derived_run.on_ranks(shards.words(layout)))
    except Unfit as error:  # ranks of different dtypes
        groups.notes.append(f"{side.name}: {error}; rank {ranks[0]}'s is shown")
        return records[0]


def _position(side: Side, lead: dict[Key, Call]) -> dict[Key, tuple[Any, ...]]:
    """The position of a joined call: as on the shown rank; calls of other ranks follow the last
    call they have in common with it.
    """
    positions: dict[Key, tuple[Any, ...]] = {}
    by_rank: dict[int, list[Call]] = defaultdict(list)
    for call in in_order(side.calls):
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


# How paired tensors are distributed over the ranks: shapes propose, siblings and elements decide.

# a layout is better than another if its distance is below this share of the other's
_CLEARLY = 0.5
# number of confirmed members of a family (layers.*.mlp) that settle the layout of the others of the
# same shape
_CONFIRMED = 2

LayoutPair = tuple[Layout, Layout]
TensorPair = tuple[RankTensor, RankTensor]
# groups of calls that are paired, with their pairs of slots
GroupPair = tuple[Key, Key, tuple[tuple[str, str], ...]]


def place(groups: RankGroups) -> None:
    """Decide the layout of every tensor: paired ones first, and parameters before outputs."""
    reference, target = groups.sides
    paired = _paired_groups(groups)
    partners = {a: b for a, b, _ in paired}, {b: a for a, b, _ in paired}
    paired = [pair for pair in paired if not _is_part(groups, pair, partners)]
    for key, target_key, slots in paired:
        tensors = (
            (RankTensor(reference, key, a), RankTensor(target, target_key, b)) for a, b in slots
        )
        for pair in sorted(tensors, key=lambda pair: _weights_first(pair[0])):
            _place(groups, pair)
    if len(reference.ranks) > 1:
        place_unpaired(groups, reference, target, {a: b for a, b, _ in paired})
    if len(target.ranks) > 1:
        place_unpaired(groups, target, reference, {b: a for a, b, _ in paired})


def _weights_first(tensor: RankTensor) -> tuple[bool, int]:
    """Sort key of tensors: parameters first, and weights before their biases."""
    return not is_param(tensor.slot), -len(tensor.shapes[0]) if tensor.records else 0


def _paired_groups(groups: RankGroups) -> list[GroupPair]:
    """Paired groups of calls with their pairs of slots, in the order of the reference."""
    reference, target = groups.sides
    whole = combined_figures(reference, target), combined_figures(target, reference)
    pairs: dict[Key, GroupPair] = {}
    used: set[Key] = set()
    for a in reference.ranks:
        for b in target.ranks:
            is_open = any(a in ranks and k not in pairs for k, ranks in reference.groups.items())
            if not is_open or all(b not in r or k in used for k, r in target.groups.items()):
                continue
            view, target_view = reference.view(a, whole[0]), target.view(b, whole[1])
            for pair in plan(view, target_view).pairs:
                key = reference.key_of[reference.viewed[pair.reference].id]
                target_key = target.key_of[target.viewed[pair.target].id]
                if key not in pairs and target_key not in used:
                    slots = tuple((s.reference_slot, s.target_slot) for s in pair.slots)
                    pairs[key] = (key, target_key, slots)
                    used.add(target_key)
    order = {key: min(c.order for c in ranks.values()) for key, ranks in reference.groups.items()}
    return sorted(pairs.values(), key=lambda item: order[item[0]])


def _is_part(
    groups: RankGroups, pair: GroupPair, partners: tuple[dict[Key, Key], dict[Key, Key]]
) -> bool:
    """Whether one of two calls is only a part of the other, which is fused and distributed over
    several ranks.
    """
    for i, side in enumerate(groups.sides):
        other = groups.sides[1 - i]
        for slots in pair[2]:
            tensor = RankTensor(side, pair[i], slots[i])
            partner = RankTensor(other, pair[1 - i], slots[1 - i])
            shapes = set(tensor.shapes)
            if (
                not is_param(tensor.slot)
                or len(tensor.records) < 2
                or shapes != set(partner.shapes)
                or any(len(s) != 2 for s in shapes)
                or any(
                    groups.distance_between(side.name, tensor.records[0], r) == 0.0
                    for r in tensor.records[1:]
                )
            ):
                continue
            others = {k: v for k, v in partners[i].items() if v != partner.key}
            if fused_parts(tensor, other, others):
                return True
    return False


def _place(groups: RankGroups, pair: TensorPair) -> None:
    """Decide the layouts of two paired tensors."""
    places = [tensor.place for tensor in pair]
    are_gradients = all(tensor.is_gradient for tensor in pair)
    are_known = all(place in groups.layouts for place in places)
    if not all(tensor.records for tensor in pair) or (are_known and not are_gradients):
        return
    if any(map(groups.cannot_join, pair)):
        return
    for tensor, place, other in zip(pair, places, places[::-1], strict=True):
        groups.first.setdefault(place, tensor)
        groups.partner.setdefault(place, other)
    options = [*map(groups.options, pair)]
    layouts = _that_fit(
        [option for option in own if groups.layouts.get(place, option[0]) == option[0]]
        for own, place in zip(options, places, strict=True)
    )
    if not layouts and are_gradients:
        _place_here(groups, pair, _that_fit(options))
    if not layouts or are_known:
        return
    # If both sides hold pieces, joining both along the same wrong axis agrees too; so the simplest
    # layouts that agree are taken.
    layouts = sorted(_likely(groups, pair, layouts), key=_complexity)
    for place, layout in zip(places, _pick(groups, layouts, pair), strict=True):
        groups.layouts.setdefault(place, layout)
        groups.note_differing(place, groups.layouts[place])
    for tensor in pair:
        gradients.note_loss(groups, tensor)


def _likely(groups: RankGroups, pair: TensorPair, layouts: list[LayoutPair]) -> list[LayoutPair]:
    """The layouts that agree with what is known beside the shapes. A rule that none of them meets
    counts for nothing.
    """
    places, is_parameter = [tensor.place for tensor in pair], is_param(pair[0].slot)

    def is_no_sum(layout: LayoutPair) -> bool:
        return not any(level.how == "sum" for part in layout for level in part)

    def is_possible(layout: LayoutPair) -> bool:
        return all(gradients.is_possible(groups, t, p) for t, p in zip(pair, layout))

    rules: list[tuple[bool, Callable[[LayoutPair], bool]]] = [
        (is_parameter, is_no_sum),
        (True, lambda layout: all(map(groups.summable, places, layout))),
        (
            any(gradients.is_of_own_loss(groups, tensor) for tensor in pair),
            lambda layout: all(map(groups.copies, places, layout)),
        ),
        (not (pair[0].shapes[0] or is_parameter), is_possible),
    ]
    for applies, is_met in rules:
        layouts = (applies and [*filter(is_met, layouts)]) or layouts
    return layouts


def _that_fit(options: Iterable[Sequence[tuple[Layout, Any]]]) -> list[LayoutPair]:
    """The pairs of layouts for which the shapes of the joined tensors fit best."""
    first, second = options
    combos = [(a, b, shards.fits(s, t)) for a, s in first for b, t in second]
    best = max((fit for _, _, fit in combos), default=0)
    return [(a, b) for a, b, fit in combos if fit == best > 0]


def _place_here(groups: RankGroups, pair: TensorPair, layouts: list[LayoutPair]) -> None:
    """Decide the layouts of two gradients for these calls alone, where elements confirm them.

    One tensor may serve as two gradients: with one row per rank, the gradient of the token
    embeddings, of which each rank has its row, and that of the position embeddings, of which each
    rank has a summand.
    """
    try:
        arrays = [tensor.arrays() for tensor in pair]
    except ElementsMissing:
        return
    for proposed in sorted(layouts, key=_complexity):
        if _distance(groups, proposed, pair, arrays) <= FITS:
            for tensor, layout in zip(pair, proposed, strict=True):
                if groups.layouts.setdefault(tensor.place, layout) != layout:
                    groups.layouts_at[tensor.where] = layout
            return


def _pick(groups: RankGroups, layouts: list[LayoutPair], pair: TensorPair) -> LayoutPair:
    """The layouts whose joined elements are closest; where elements do not decide, the layouts
    known from siblings.
    """
    if all(groups.is_declared(tensor) or len(tensor.records) == 1 for tensor in pair):
        return layouts[0]
    levels = [level.how for p in layouts for part in p for level in part]
    if len(layouts) == 1 and set(levels) <= {"replicated"}:
        return layouts[0]
    votes = groups.families[(*pair[0].family, *pair[1].family)]
    settled, count = votes.most_common(1)[0] if votes else (layouts[0], 0)
    is_settled = count >= _CONFIRMED and len(votes) == 1
    if is_settled and not {"sum", "replicated"} & set(levels):
        return settled
    try:
        arrays = [tensor.arrays() for tensor in pair]
    except ElementsMissing:
        likely = (
            p
            for p in layouts
            if all(groups.copies(tensor.place, part) for tensor, part in zip(pair, p, strict=True))
        )
        return settled if votes else next(likely, settled)
    tried = [
        (a, b)
        for proposed, proposed_across in layouts
        for a in shards.orders(proposed, pair[0].shapes)
        for b in shards.orders(proposed_across, pair[1].shapes)
    ]
    errors = [_distance(groups, tried_pair, pair, arrays) for tried_pair in tried]
    more: list[LayoutPair] = []
    if is_param(pair[0].slot) and all(error > 0 for error in errors):
        more += _by_parts(layouts, arrays)
    if is_output(pair[0].slot) or is_param(pair[0].slot):
        more += _as_parameters(groups, layouts, pair)
    tried += more
    errors += [_distance(groups, tried_pair, pair, arrays) for tried_pair in more]
    best = 0
    for i, error in enumerate(errors):
        if error < _CLEARLY * errors[best]:
            best = i
    if errors[best] <= FITS:
        votes[tried[best]] += 1
        return tried[best]
    return settled


def _distance(
    groups: RankGroups, layouts: LayoutPair, pair: TensorPair, arrays: Sequence[Sequence[Array]]
) -> float:
    """Distance of two tensors, each joined by its layout."""
    a, b = (gradients.as_seen(groups, t, p) for t, p in zip(pair, layouts, strict=True))
    return between(a, arrays[0], b, arrays[1])


def _by_parts(
    layouts: Sequence[LayoutPair], arrays: Sequence[Sequence[Array]]
) -> Iterator[LayoutPair]:
    """Layouts of parameters whose parts (q, k, v) were cut one by one."""
    for pair in layouts:
        for i in (0, 1):
            pieces, whole = arrays[i], arrays[1 - i]
            is_cut = len(pair[i]) == 1 and pair[i][0].how == "cat" and not pair[1 - i]
            if (
                is_cut
                and len({a.shape for a in pieces}) == 1
                and whole[0].ndim == pieces[0].ndim
                and (blocks := shards.part_order(pieces, whole, pair[i][0].axis))
            ):
                cut = (Level("cat", len(pieces), pair[i][0].axis, blocks),)
                yield (cut, pair[1]) if i == 0 else (pair[0], cut)


def _as_parameters(
    groups: RankGroups, layouts: Sequence[LayoutPair], tensors: TensorPair
) -> Iterator[LayoutPair]:
    """Layouts of outputs, and of a bias, cut in the same parts as the weight of their call."""
    for pair in layouts:
        for i, tensor in enumerate(tensors):
            blocks = groups.blocks_of(tensor.side, tensor.key)
            if (
                blocks
                and len(pair[i]) == 1
                and pair[i][0].how == "cat"
                and (pair[i][0].axis == 0 or not is_param(tensor.slot))
            ):
                cut = (Level("cat", pair[i][0].size, pair[i][0].axis, blocks),)
                yield (cut, pair[1]) if i == 0 else (pair[0], cut)


def _complexity(pair: LayoutPair) -> tuple[int, ...]:
    levels = [level.how for part in pair for level in part]
    return levels.count("sum"), len(levels), len(levels) - levels.count("replicated")


# How tensors without a partner are distributed over the ranks: as their call's weight, or as fused
# parts.


def place_unpaired(
    groups: RankGroups, side: Side, other: Side, partners: Mapping[Key, Key]
) -> None:
    """Decide the layouts of a side's tensors without a partner: equal on all ranks, cut as their
    call's weight is, or unknown. partners: this side's groups of calls -> the other side's.
    """
    for key in side.groups:
        for tensor in sorted(side.tensors(key), key=_weights_first):
            records, place = tensor.records, tensor.place
            if not records or place in groups.layouts:
                continue
            groups.first.setdefault(place, tensor)
            layout = _layout(groups, tensor, other, partners)
            if layout is None:
                groups.unplaced[place] = str(tensor)
                layout = (Level("replicated", len(records)),) if len(records) > 1 else ()
            groups.layouts[place] = layout


def _layout(
    groups: RankGroups, tensor: RankTensor, other: Side, partners: Mapping[Key, Key]
) -> Layout | None:
    side, key, slot = tensor.side, tensor.key, tensor.slot
    place, records, shapes = tensor.place, tensor.records, tensor.shapes
    n = len(records)
    if n == 1:
        return ()
    if groups.cannot_join(tensor):
        return None
    if groups.is_declared(tensor):
        return groups.options(tensor)[0][0]
    if all(groups.distance_between(side.name, records[0], r) == 0.0 for r in records[1:]):
        return (Level("replicated", n),)
    names = (s for s in side.slots(key) if is_param(s) and "weight" in s)
    weight = RankTensor(side, key, next(names, ""))
    levels = groups.layouts.get(weight.place) if weight.slot else None
    cut = levels[0] if levels and len(levels) == 1 else None
    is_cut = cut is not None and cut.how == "cat" and cut.axis == 0
    if is_param(slot):
        extents = [s[:1] for s in weight.shapes] if weight.slot else []
        if slot != weight.slot and is_cut and extents == [s[:1] for s in shapes]:
            return levels
        blocks = fused_parts(tensor, other, partners) if len(set(shapes)) == 1 else ()
        if blocks or _is_part_of(tensor, other, partners):
            return (Level("cat", n, 0, blocks),)
        return None
    if is_output(slot) and cut is not None and is_cut and shapes[0]:
        return (Level("cat", n, len(shapes[0]) - 1, cut.blocks),)
    layout = (Level("replicated", n),)
    if groups.copies(place, layout):
        groups.note_differing(place, layout)
        return layout
    return None


def _siblings(tensor: RankTensor, other: Side, partners: Mapping[Key, Key]) -> Iterator[Key]:
    """Unpaired groups of the other side that have this slot and lie below the partner of the
    tensor's parent.
    """
    parent = tensor.side.parent(tensor.key)
    across = partners.get(parent) if parent is not None else None
    used = set(partners.values())
    for key in other.groups if across is not None else ():
        if key not in used and other.parent(key) == across and tensor.slot in other.slots(key):
            yield key


def _is_part_of(tensor: RankTensor, other: Side, partners: Mapping[Key, Key]) -> bool:
    """Whether the rows of all pieces, rank by rank, occur in order in a larger fused parameter of
    the other side.
    """
    keys = list(_siblings(tensor, other, partners))
    if not keys:
        return False
    try:
        pieces = tensor.arrays()
        if any(a.ndim != 2 or a.shape[1] != pieces[0].shape[1] for a in pieces):
            return False
        rows = np.concatenate(pieces)
        for key in keys:
            records = RankTensor(other, key, tensor.slot).records
            places = located(rows, other.run.array(records[0])) if len(records) == 1 else None
            if places is not None:
                # pieces on the wrong ranks are a fault
                return bool(np.all(np.diff(places[places >= 0]) > 0))
    except ElementsMissing:
        pass
    return False


def fused_parts(
    tensor: RankTensor, other: Side, partners: Mapping[Key, Key]
) -> tuple[tuple[int, int, int], ...]:
    """The blocks of a fused parameter, found by unpaired parameters below the same parent; ()
    without any.
    """
    keys = list(_siblings(tensor, other, partners))
    if not keys or not tensor.shapes[0]:
        return ()
    keys.sort(key=lambda k: min(c.order for c in other.groups[k].values()))
    try:
        pieces = tensor.arrays()
        like = pieces[0]
        candidates = [RankTensor(other, key, tensor.slot) for key in keys]
        parts = [
            other.run.array(c.records[0])
            for c in candidates
            if len(c.records) == 1
            and len(c.shapes[0]) == like.ndim
            and c.shapes[0][1:] == like.shape[1:]
        ]
    except ElementsMissing:
        return ()
    whole = sum(a.shape[0] for a in pieces)
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            if sum(p.shape[0] for p in parts[start:stop]) == whole:
                blocks = shards.part_order(pieces, parts[start:stop], 0)
                if blocks:
                    return blocks
    return ()


# Combines checksums and norms over ranks, so that sharded modules can be paired before their layout
# is known.
#
# Checksums and sums of magnitudes of pieces add up, so a weight cut over the ranks is recognised
# under any name, and in its shape.

_NEAR = 1e-3  # relative difference of norm and sum of magnitudes that rounding stays below
_ASKED = 8  # members of a family of siblings that vote on their shape
_CHECKSUMS = 1 << 64

Option = tuple[Shape, Record]  # a shape that the whole tensor may have, with its statistics


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a side. family: identifies siblings with the same layout. options: the likeliest
    first.
    """

    slot: tuple[Key, str]
    family: tuple[object, ...]
    options: tuple[Option, ...]


def combined_figures(side: Side, other_side: Side) -> dict[tuple[Key, str], Record]:
    """By slot, a record that describes the whole tensor instead of its pieces, as far as statistics
    tell. Reads no elements; tensors that every rank holds whole are left out.

    Of the shapes that the pieces allow, the one counts under which siblings have the statistics of
    a tensor of the other side; without one, a shape that occurs there.
    """
    across = _OtherSide(other_side)
    tensors = list(_tensors(side))
    votes: dict[tuple[object, ...], Counter[Shape]] = defaultdict(Counter)
    voters: Counter[tuple[object, ...]] = Counter()
    for tensor in tensors:
        if len(tensor.options) > 1 and voters[tensor.family] < _ASKED:
            voters[tensor.family] += 1
            for shape, figures in tensor.options:
                votes[tensor.family][shape] += across.has(tensor.slot[1], shape, figures)
    out: dict[tuple[Key, str], Record] = {}
    for tensor in tensors:
        if len(tensor.options) < 2:
            continue
        voted = votes[tensor.family].most_common(1)[0]
        picked = (
            voted[0]
            if voted[1]
            else across.occurring(tensor.slot[1], [shape for shape, _ in tensor.options])
        )
        # Siblings may have a shape that the statistics of this tensor rule out.
        shape, figures = next((o for o in tensor.options if o[0] == picked), tensor.options[-1])
        own_shape = tensor.options[-1][0]
        if shape != own_shape:
            out[tensor.slot] = replace(figures, shape=shape)
    _constants(side, out)
    return out


def _tensors(side: Side) -> Iterator[_Tensor]:
    for key in side.groups:
        for tensor in side.tensors(key):
            records = [side.run.records[r] for r in tensor.records]
            if is_input(tensor.slot) or not records:
                continue
            pieces, slot = _distinct(records), tensor.slot
            shapes = tuple(tensor.shapes)
            family = *tensor.family, key[5]
            options: list[Option] = []
            if len(pieces) > 1 and (figures := _summed(pieces)) is not None:
                whole = sum(p.count for p in pieces)
                wholes = dict.fromkeys(
                    shape for _, shape in shards.candidates(shapes) if math.prod(shape) == whole
                )
                options = [(shape, figures) for shape in wholes if shape not in shapes]
            yield _Tensor((key, slot), family, (*options, (records[0].shape, records[0])))


def _distinct(records: Sequence[Record]) -> list[Record]:
    """The records without those whose bytes equal an earlier one's."""
    unique: dict[object, Record] = {}
    for index, record in enumerate(records):
        unique.setdefault(
            (record.hash, record.dtype, record.shape) if record.hash else index, record
        )
    return list(unique.values())


def _summed(pieces: Sequence[Record]) -> Record | None:
    """Statistics of all pieces together, without the shape of the whole; None for several
    dtypes.
    """
    first = pieces[0]
    if any(p.dtype != first.dtype for p in pieces):
        return None
    out = Record(first.id, first.dtype, first.shape, device=first.device)
    parts = [
        p.statistics for p in pieces if p.statistics is not None and p.statistics.norm is not None
    ]
    if len(parts) == len(pieces):
        count = sum(s.count for s in parts)
        norm, mean = (
            math.hypot(*(s.norm or 0.0 for s in parts)),
            sum((s.mean or 0.0) * s.count for s in parts) / count,
        )
        low, high = min(s.min or 0.0 for s in parts), max(s.max or 0.0 for s in parts)
        spread = math.sqrt(max(norm**2 / count - mean**2, 0.0)) if low != high else 0.0
        counts = (sum(s.nan for s in parts), sum(s.inf for s in parts), sum(s.zero for s in parts))
        out = replace(out, statistics=Statistics(count, low, high, mean, spread, norm, *counts))
    sketches = [p.sketch for p in pieces if p.sketch is not None]
    if len(sketches) == len(pieces):
        sums = [
            [s.abs_sum for s in sketches],
            [s.cube_sum for s in sketches],
            [s.fourth_sum for s in sketches],
        ]
        checksum = sum(s.checksum for s in sketches) % _CHECKSUMS
        out = replace(out, sketch=Sketch(checksum, *map(_total, sums)))
    return out


def _total(parts: Sequence[float | None]) -> float | None:
    sums = [p for p in parts if p is not None]
    return sum(sums) if len(sums) == len(parts) else None


def _constants(side: Side, combined: dict[tuple[Key, str], Record]) -> None:
    """Give cut constant parameters (a bias of zeros) the layout of the other parameters of their
    call.
    """
    for key, slot in list(combined):
        if not is_param(slot):
            continue
        piece, whole = RankTensor(side, key, slot).shapes[0], combined[key, slot].shape
        for beside in side.tensors(key):
            record = side.run.records[beside.records[0]]
            constant = record.statistics is not None and record.statistics.std == 0.0
            if (
                is_param(beside.slot)
                and (key, beside.slot) not in combined
                and constant
                and record.shape[:1] == piece[:1] != whole[:1]
            ):
                combined[key, beside.slot] = replace(
                    record, shape=(*whole[:1], *record.shape[1:]), hash="", sketch=None
                )


class _OtherSide:
    """The tensors of the other side by kind and count, each in every shape it may have."""

    def __init__(self, side: Side) -> None:
        self._figures: dict[tuple[str, int], list[tuple[float, int, Option]]] = defaultdict(list)
        self._shapes: set[tuple[str, Shape]] = set()
        for index, tensor in enumerate(_tensors(side)):
            kind = slot_kind(tensor.slot[1])
            for shape, figures in tensor.options:
                self._shapes.add((kind, tuple(sorted(shape))))
                if norm := _norm(figures):
                    self._figures[kind, math.prod(shape)].append((norm, index, (shape, figures)))
        for entries in self._figures.values():
            entries.sort(key=lambda item: item[:2])

    def has(self, slot: str, shape: Shape, figures: Record) -> int:
        """Whether the other side has a tensor with these statistics: 2 in this shape, 1 with its
        axes in another order, 0 not at all.
        """
        norm, best = _norm(figures), 0
        among = self._figures.get((slot_kind(slot), math.prod(shape)), []) if norm else []
        for size, _, (other_shape, other_figures) in among[
            bisect.bisect_left(among, norm * (1 - _NEAR), key=lambda item: item[0]) :
        ]:
            if size > norm * (1 + _NEAR) or best == 2:
                break
            if sorted(other_shape) == sorted(shape) and _alike(figures, other_figures):
                best = max(best, 2 if other_shape == shape else 1)
        return best

    def occurring(self, slot: str, shapes: Sequence[Shape]) -> Shape:
        """The first of these shapes that the other side has; the last where it has none."""
        return next(
            (s for s in shapes if (slot_kind(slot), tuple(sorted(s))) in self._shapes), shapes[-1]
        )


def _norm(figures: Record) -> float:
    """The 2-norm; 0 for a constant or where it is unknown."""
    return (
        (figures.statistics.norm or 0.0)
        if figures.statistics is not None and figures.statistics.std
        else 0.0
    )


def _alike(first: Record, second: Record) -> bool:
    """Whether sums of magnitudes are near as well, where they are known."""
    a, b = (r.sketch.abs_sum if r.sketch is not None else None for r in (first, second))
    return a is None or b is None or abs(a - b) <= _NEAR * max(a, b)
