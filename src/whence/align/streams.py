"""A residual stream that one run keeps as one tensor and the other as two, to be added later: `hidden + residual`.

Serving engines hand both through the layers and add them inside the next norm, in place.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from whence import dtypes
from whence.align import expressions as ex
from whence.align.layouts import clear_best, distance, spread
from whence.align.matching import Matching, identifier
from whence.align.names import starred
from whence.records import Call
from whence.results import SlotPair

_READ = 3
_MOST = 4  # tensors of one call that are tried

Chosen = tuple[int, ...]  # which of the target's tensors are added


class _Place(NamedTuple):
    """A tensor of a call of the reference, and the (slot, record) of those of its partner that it may be made of."""

    call: int
    slot: str
    record: int
    fits: tuple[tuple[str, int], ...]


def streams(at: Matching) -> None:
    """Where the target's call has more tensors of one size than the reference's: which of them, or which sum, is the reference's."""
    families: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for place in _places(at):
        call, other = _calls(at, place)
        shape = at.reference.records[place.record].shape
        families[starred(call.scope), starred(other.scope), place.slot, tuple(n for n, _ in place.fits), shape].append(place)
    chosen = {key: _chosen(at, places) for key, places in families.items()}
    known: defaultdict[tuple[object, ...], Counter[Chosen]] = defaultdict(Counter)
    for key, picked in chosen.items():
        if picked is not None:
            known[_kind(at, families[key][0])][picked] += 1
    left: list[_Place] = []
    for key, places in families.items():
        # Where a fault blurs the data: as in the same classes elsewhere, then as that tensor was made where it was met before.
        alike = known.get(_kind(at, places[0]))
        picked = chosen[key] or (alike.most_common(1)[0][0] if alike else None)
        if picked is None:
            left += places
        else:
            _put(at, ((place, picked) for place in places))
    made = _made(at)
    for place in left:
        for pair in itertools.combinations(range(len(place.fits)), 2):
            if (place.record, frozenset(place.fits[i][1] for i in pair)) in made:
                _put(at, [(place, pair)])
                break
    sums = sum(len(operands) > 1 for _, operands in _made(at))
    if sums:
        at.notes.append(f"{sums} tensors of the reference are sums of two of the target (a residual kept apart)")


def _places(at: Matching) -> Iterator[_Place]:
    for pair in at.pairs.values():
        call, other = at.reference.calls[pair.reference], at.target.calls[pair.target]
        for kind in ("input", "output"):
            theirs = _floats(at, "target", other, kind)
            if len(theirs) < 2:
                continue
            mine = _floats(at, "reference", call, kind)
            counts = Counter(at.reference.records[record].count for _, record in mine)
            for slot, record in mine:
                count = at.reference.records[record].count
                fits = tuple(t for t in theirs if at.target.records[t[1]].count == count)
                if max(1, counts[count]) < len(fits) <= _MOST:
                    yield _Place(call.id, slot, record, fits)


def _floats(at: Matching, side: str, call: Call, kind: str) -> list[tuple[str, int]]:
    run = at.reference if side == "reference" else at.target
    found = [(r.slot, run.records[r.record]) for r in call.slots(kind)]
    return [(slot, record.id) for slot, record in found if dtypes.named(record.dtype).is_floating and record.count > 1]


def _calls(at: Matching, place: _Place) -> tuple[Call, Call]:
    pair = at.pairs[place.call]
    return at.reference.calls[pair.reference], at.target.calls[pair.target]


def _kind(at: Matching, place: _Place) -> tuple[object, ...]:
    call, other = _calls(at, place)
    return call.op_type, other.op_type, place.slot, tuple(name for name, _ in place.fits)


def _chosen(at: Matching, places: Sequence[_Place]) -> Chosen | None:
    """Which of the target's tensors, or of their sums, is the reference's, by the data of a few siblings."""
    count = len(places[0].fits)
    candidates: list[Chosen] = [*((i,) for i in range(count)), *itertools.combinations(range(count), 2)]
    votes: Counter[int] = Counter()
    for place in spread(places, _READ):
        mine = at.array("reference", place.record)
        theirs = [at.array("target", r) for _, r in place.fits]
        if mine is None or any(t is None for t in theirs):
            continue
        flat = [np.asarray(t).reshape(mine.shape).astype(np.float64) for t in theirs]
        best = clear_best([distance(mine, np.sum([flat[i] for i in chosen], axis=0)) for chosen in candidates])
        if best is not None:
            votes[best] += 1
    return candidates[votes.most_common(1)[0][0]] if votes else None


def _made(at: Matching) -> set[tuple[int, frozenset[int]]]:
    """(record of the reference, records of the target whose sum faces it), of all pairs so far."""
    first = len(at.target.records)
    slots = [s for pair in at.pairs.values() for s in pair.slots if s.target_record >= first]
    made = [(s.reference_record, at.making.made[s.target_record - first]) for s in slots]
    return {(record, frozenset(r for _, ids in m.operands for r in ids)) for record, m in made if isinstance(ex.parse(m.dims), ex.Sum)}


def _put(at: Matching, chosen: Iterable[tuple[_Place, Chosen]]) -> None:
    """Put what was chosen in the place of what the slot of the reference faced."""
    for (call, slot, record, fits), picked in chosen:
        bound = {identifier(fits[i][0]): [fits[i][1]] for i in picked}
        node: ex.Node = ex.Name(next(iter(bound))) if len(picked) == 1 else ex.Sum(tuple(ex.Name(n) for n in bound))
        try:
            made = at.making.add(node, bound, "streams whose sum is the reference's one; confirmed on data")
        except ex.Unfit:
            continue
        pair = at.pairs[call]
        used = {fits[i][0] for i in picked}
        kept = [s for s in pair.slots if s.reference_slot != slot and s.target_slot not in used]
        order = [r.slot for r in at.reference.calls[call].refs]
        slots = sorted([*kept, SlotPair(slot, fits[picked[0]][0], record, made)], key=lambda s: order.index(s.reference_slot))
        faced = {s.reference_slot for s in slots}
        used |= {s.target_slot for s in slots}
        mine, theirs = at.reference.calls[pair.reference].refs, at.target.calls[pair.target].refs
        at.pairs[call] = msgspec.structs.replace(
            pair, slots=tuple(slots), only_reference=tuple(r.slot for r in mine if r.slot not in faced),
            only_target=tuple(r.slot for r in theirs if r.slot not in used),
        )  # fmt: skip
