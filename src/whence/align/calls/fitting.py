"""Tensors of two calls of which only order and shapes can be trusted: one counts numbers among its inputs, the other does not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from whence import dtypes
from whence.align.calls.tensor_slots import face
from whence.records import Call, Record, Ref, Run
from whence.results import SlotPair

_MOST = 250_000  # ways to look at


def fitted(call: Call, other: Call, reference: Run, target: Run) -> tuple[list[SlotPair], list[str], list[str]]:
    """(pairs, slots only the reference's call has, slots only the target's has), as `face` gives them.

    Inputs and outputs face each other in order; one that has no like across is passed over. Inputs without axes (numbers) are
    passed over first. Where the order leaves a tensor out that content or shape would place, `face` decides.
    """
    pairs: list[SlotPair] = []
    for kind in ("input", "output"):
        mine, theirs = call.slots(kind), other.slots(kind)
        a, b = [reference.records[r.record] for r in mine], [target.records[r.record] for r in theirs]
        pairs += [_pair(mine[i], theirs[j]) for i, j in _in_order(a, b)]
    left, right = {p.reference_slot for p in pairs}, {p.target_slot for p in pairs}
    # What order did not place, names and content may.
    rest, _, _ = face(_without(call, left), _without(other, right), reference, target)
    kept = [p for p in rest if not _clash(p, reference, target)]
    again = {p.reference_slot for p in kept}, {p.target_slot for p in kept}
    return (
        sorted([*pairs, *kept], key=lambda p: [r.slot for r in call.refs].index(p.reference_slot)),
        [r.slot for r in call.refs if r.slot not in left | again[0]],
        [r.slot for r in other.refs if r.slot not in right | again[1]],
    )


def _pair(one: Ref, other: Ref) -> SlotPair:
    return SlotPair(one.slot, other.slot, one.record, other.record)


def _without(call: Call, slots: set[str]) -> Call:
    return msgspec.structs.replace(call, refs=tuple(r for r in call.refs if r.slot not in slots))


def _clash(pair: SlotPair, reference: Run, target: Run) -> bool:
    return not _worth(reference.records[pair.reference_record], target.records[pair.target_record])


def _in_order(ours: Sequence[Record], theirs: Sequence[Record]) -> list[tuple[int, int]]:
    """The pairs, in order on both sides, that agree best in all; the k-th with the k-th where that is too much to search."""
    if len(ours) * len(theirs) > _MOST:
        return [(k, k) for k in range(min(len(ours), len(theirs))) if _worth(ours[k], theirs[k])]
    best = [[0.0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i in range(len(ours) - 1, -1, -1):
        for j in range(len(theirs) - 1, -1, -1):
            worth = _worth(ours[i], theirs[j])
            best[i][j] = max(best[i + 1][j], best[i][j + 1], worth + best[i + 1][j + 1] if worth else 0.0)
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        worth = _worth(ours[i], theirs[j])
        if worth and best[i][j] == worth + best[i + 1][j + 1]:
            out.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return out


def _worth(one: Record, other: Record) -> float:
    """How well two tensors fit: 0 not at all; the same number of elements at least, and numbers of one kind before others."""
    if one.count != other.count or _is_float(one) != _is_float(other):
        return 0.0
    same = one.shape == other.shape
    alike = bool(one.hash) and one.hash == other.hash and one.dtype == other.dtype
    return 1.0 + 0.5 * same + 0.25 * alike + (0.1 if one.dtype == other.dtype else 0.0) - (0.5 if not one.shape else 0.0)


def _is_float(record: Record) -> bool:
    found = dtypes.DTYPES.get(record.dtype)
    return found is None or found.is_floating
