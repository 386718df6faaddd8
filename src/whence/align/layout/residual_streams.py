"""A residual stream that one run keeps as one tensor and the other as two, to be added later:
`hidden + residual`.

Serving engines hand both through the layers and add them inside the next norm, in place.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout.distances import clear_best, distance
from whence.align.layout.projection_groups import across as _across
from whence.align.module_names import starred
from whence.align.plan_editor import PlanEditor, identifier, voted
from whence.records import Call
from whence.records.slots import slot_kind
from whence.results import SlotPair

_MOST = 4  # tensors of one call that are tried

Chosen = tuple[int, ...]  # which of the target's tensors are added


class _Place(NamedTuple):
    """A tensor of one call of a pair, and the (slot, record) of those of the other that it may be
    the sum of. call: the reference's.
    """

    call: int
    slot: str
    record: int
    fits: tuple[tuple[str, int], ...]


def streams(editor: PlanEditor) -> None:
    """Where a call has more tensors of one size than its partner: which of them, or which sum."""
    decided = _decided(editor, "target")
    _set_sums(editor, decided)
    sums = sum(len(picked) > 1 for _, picked in decided)
    if sums:
        editor.notes.append(
            f"{sums} tensors of the reference are sums of two of the target (a residual kept apart)"
        )
    _split_reference(editor)


def _decided(editor: PlanEditor, many: str) -> list[tuple[_Place, Chosen]]:
    """What is chosen for every place. many: the side that has more tensors.

    Where a fault blurs the data: as in the same classes elsewhere, then as that tensor was made
    where it was met before.
    """
    families: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for place in _places(editor, many):
        call, target_call = _calls(editor, place)
        shape = editor.run(_across(many)).records[place.record].shape
        families[
            starred(call.scope),
            starred(target_call.scope),
            place.slot,
            tuple(n for n, _ in place.fits),
            shape,
        ].append(place)
    chosen = {key: _chosen(editor, places, many) for key, places in families.items()}
    by_kind: defaultdict[tuple[object, ...], Counter[Chosen]] = defaultdict(Counter)
    for key, picked in chosen.items():
        if picked is not None:
            by_kind[_kind(editor, families[key][0])][picked] += 1
    out: list[tuple[_Place, Chosen]] = []
    undecided: list[_Place] = []
    for key, places in families.items():
        alike = by_kind.get(_kind(editor, places[0]))
        picked = chosen[key] or (alike.most_common(1)[0][0] if alike else None)
        if picked is None:
            undecided += places
        else:
            out += [(place, picked) for place in places]
    sums = {
        (place.record, frozenset(place.fits[i][1] for i in picked))
        for place, picked in out
        if len(picked) > 1
    }
    for place in undecided:
        pairs = itertools.combinations(range(len(place.fits)), 2)
        addends = next(
            (
                pair
                for pair in pairs
                if (place.record, frozenset(place.fits[i][1] for i in pair)) in sums
            ),
            None,
        )
        out += [(place, addends)] if addends is not None else []
    return out


def _places(editor: PlanEditor, many: str) -> Iterator[_Place]:
    few = _across(many)
    records = {side: editor.run(side).records for side in (few, many)}
    for pair in editor.pairs.values():
        has_more = pair.only_target if many == "target" else pair.only_reference
        if not has_more or editor.is_fixed(pair.reference):
            continue
        calls = dict(zip(("reference", "target"), editor.calls(pair)))
        for kind in ("input", "output"):
            candidates = _floats(editor, many, calls[many], kind)
            if len(candidates) < 2:
                continue
            tensors = _floats(editor, few, calls[few], kind)
            counts = Counter(records[few][record].count for _, record in tensors)
            for slot, record in tensors:
                count = records[few][record].count
                fits = tuple(t for t in candidates if records[many][t[1]].count == count)
                if max(1, counts[count]) < len(fits) <= _MOST:
                    yield _Place(pair.reference, slot, record, fits)


def _floats(editor: PlanEditor, side: str, call: Call, kind: str) -> list[tuple[str, int]]:
    records = [(r.slot, editor.run(side).records[r.record]) for r in call.slots(kind)]
    return [
        (slot, record.id)
        for slot, record in records
        if dtypes.is_floating(record.dtype) and record.count > 1
    ]


def _calls(editor: PlanEditor, place: _Place) -> tuple[Call, Call]:
    return editor.calls(editor.pairs[place.call])


def _kind(editor: PlanEditor, place: _Place) -> tuple[object, ...]:
    call, target_call = _calls(editor, place)
    return call.op_type, target_call.op_type, place.slot, tuple(name for name, _ in place.fits)


def _chosen(editor: PlanEditor, places: Sequence[_Place], many: str) -> Chosen | None:
    """Which tensor or sum of two is the other side's, by the data of a few siblings."""
    count = len(places[0].fits)
    candidates: list[Chosen] = [
        *((i,) for i in range(count)),
        *itertools.combinations(range(count), 2),
    ]

    def nearest(place: _Place) -> int | None:
        tensor = editor.array(_across(many), place.record)
        arrays = [editor.array(many, r) for _, r in place.fits]
        if tensor is None or any(t is None for t in arrays):
            return None
        flat = [np.asarray(t).reshape(tensor.shape).astype(np.float64) for t in arrays]
        return clear_best(
            [distance(tensor, np.sum([flat[i] for i in chosen], axis=0)) for chosen in candidates]
        )

    best = voted(places, nearest)
    return candidates[best] if best is not None else None


def _set_sums(editor: PlanEditor, chosen: Iterable[tuple[_Place, Chosen]]) -> None:
    """Pair the slot of the reference with what was chosen instead."""
    for (call, slot, record, fits), picked in chosen:
        bound = {identifier(fits[i][0]): [fits[i][1]] for i in picked}
        node: ex.Node = (
            ex.Name(next(iter(bound)))
            if len(picked) == 1
            else ex.Sum(tuple(ex.Name(n) for n in bound))
        )
        try:
            new_record = editor.derived.add(
                node, bound, "streams whose sum is the reference's one; confirmed on data"
            )
        except ex.Unfit:
            continue
        used = {fits[i][0] for i in picked}
        unchanged = [
            s
            for s in editor.pairs[call].slots
            if s.reference_slot != slot and s.target_slot not in used
        ]
        editor.set_slots(call, [*unchanged, SlotPair(slot, fits[picked[0]][0], record, new_record)])


# ---- the reference keeps two


def _split_reference(editor: PlanEditor) -> None:
    """Where the reference has more: pair its tensors as elsewhere, or with equal ones."""
    split: defaultdict[int, set[str]] = defaultdict(set)
    for place, picked in _decided(editor, "reference"):
        if len(picked) > 1:
            split[place.call].add(slot_kind(place.slot))
    if not split:
        return
    dropped = {
        call: [
            s
            for s in editor.pairs[call].slots
            if slot_kind(s.reference_slot) not in (*kinds, "mutated")
        ]
        for call, kinds in split.items()
    }
    for call, slots in dropped.items():
        editor.set_slots(call, slots)
    alike = _alike(editor, split)
    # What a leaf makes is in its partner's call; what it is given may be in none but the one that
    # made it.
    leaves = [call for call in split if editor.reference.calls[call].leaf]
    for calls, kinds_now in (
        (leaves, ("output",)),
        (split, ("input", "output", "mutated")),
        (split, ("input", "output", "mutated")),
    ):
        partners = editor.partners()
        for call in calls:
            pair = editor.pairs[call]
            slots = list(pair.slots)
            for slot, record in _all_floats(editor, "reference", editor.reference.calls[call]):
                if slot in pair.only_reference and slot.startswith(kinds_now):
                    partner = partners.get(record) or alike.get((call, slot))
                    slots += (
                        [SlotPair(slot, partner[1], record, partner[0])]
                        if partner is not None
                        else []
                    )
            editor.set_slots(call, slots)
    editor.notes.append(
        f"{len(split)} calls of the reference get the residual as an input of its own, which the "
        "target has added: each summand is paired with its own"
    )


def _alike(
    editor: PlanEditor, split: Mapping[int, set[str]]
) -> dict[tuple[int, str], tuple[int, str]]:
    """Which tensor of the target's call each slot holds, by data, for siblings together."""
    families: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for call in split:
        pair = editor.pairs[call]
        reference_call, target_call = editor.reference.calls[call], editor.target.calls[pair.target]
        for slot, record in _all_floats(editor, "reference", reference_call):
            count = editor.reference.records[record].count
            fits = tuple(
                (n, r)
                for n, r in _all_floats(editor, "target", target_call)
                if editor.target.records[r].count == count
            )
            if slot in pair.only_reference and fits:
                families[
                    reference_call.op_type, target_call.op_type, slot, tuple(n for n, _ in fits)
                ].append(_Place(call, slot, record, fits))
    out: dict[tuple[int, str], tuple[int, str]] = {}

    def nearest(member: _Place) -> int | None:
        array = editor.array("reference", member.record)
        arrays = [editor.array("target", r) for _, r in member.fits]
        if array is None or any(t is None for t in arrays):
            return None
        return clear_best([distance(array, np.asarray(t).reshape(array.shape)) for t in arrays])

    for members in families.values():
        if (best := voted(members, nearest)) is not None:
            out.update(((m.call, m.slot), m.fits[best][::-1]) for m in members)
    return out


def _all_floats(editor: PlanEditor, side: str, call: Call) -> list[tuple[str, int]]:
    return [
        tensor
        for kind in ("input", "output", "mutated")
        for tensor in _floats(editor, side, call, kind)
    ]
