"""Operators that only one run has and that only change layout or dtype: their output is compared
with their input.

A graph compiler inserts them where a kernel needs its tensor in blocks. They have no partner, but
their output must equal their input. So the other run gets a call that passes its input on, and a
fault in such an operator is named like any other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from msgspec.structs import replace

from whence.align.call_sites import match_roots, selected
from whence.align.calls.fused_operators import Fused
from whence.align.calls.tensor_slots import pair_in_order
from whence.align.derived_run import Derived, renumbered
from whence.records import Call, Ref, in_order
from whence.records.marks import Mark, has_mark, mark
from whence.records.slots import is_output

_MOVES = frozenset({"TransData", "Cast", "Identity", "FormatTransfer"})


def is_handed_on(call: Call) -> bool:
    """Whether this call was added as the partner of an operator that only moves elements."""
    return has_mark(call, Mark.MOVES)


def pair_moves(fused: Fused) -> Fused:
    """Give operators of either run that only move elements a partner in the other."""
    if not fused.pairs:
        return fused
    fused = _turned(_with_partners(_turned(fused), "target"))
    return _with_partners(fused, "reference")


def _turned(fused: Fused) -> Fused:
    """The two runs exchanged."""
    pairs = tuple((b, a, why) for a, b, why in fused.pairs)
    return Fused(fused.target, fused.reference, pairs, fused.notes)


def _with_partners(fused: Fused, side: str) -> Fused:
    """The runs, in which the second gets partners for the first's operators that only move
    elements. side: the name of the first run.
    """
    owner, receiver = fused.reference, fused.target
    moves = _moves(fused)
    if not moves:
        return fused
    partners = _partners(fused)
    contents: dict[Hashable, int] = {}
    for record in receiver.records:
        if record.hash and record.count > 1:
            contents.setdefault((record.hash, record.dtype, record.shape), record.id)
    makers = {r.record: c for c in receiver.calls if c.leaf for r in c.slots("output")}
    readers: dict[int, Call] = {}
    for call in sorted((c for c in receiver.calls if c.leaf), key=lambda c: -c.order):
        readers.update((r.record, call) for r in call.slots("input"))
    roots = match_roots(owner.calls, receiver.calls)
    following: dict[int, list[Call]] = defaultdict(list)
    preceding: dict[int, list[Call]] = defaultdict(list)
    pairs: list[tuple[int, int]] = []
    for move in moves:
        (source,), (output,) = move.slots("input"), move.slots("output")
        record = owner.records[source.record]
        like = partners.get(source.record)
        if like is None and record.hash:
            like = contents.get((record.hash, record.dtype, record.shape))
        if like is None or receiver.records[like].count != owner.records[output.record].count:
            continue
        partners.setdefault(output.record, like)
        anchor = makers.get(like) or readers.get(like)
        if anchor is None or (anchor.step, anchor.micro) != (move.step, move.micro):
            continue
        number = len(receiver.calls) + len(pairs)
        partner = _passing(move, anchor, number, roots.get(move.root, anchor.root), like)
        (following if like in makers else preceding)[anchor.id].append(partner)
        pairs.append((move.id, number))
    if not pairs:
        return fused
    ordered: list[Call] = []
    for call in in_order(receiver.calls):
        ordered += [*preceding[call.id], call, *following[call.id]]
    calls, new = renumbered(ordered)
    paired = [(a, new[b], why) for a, b, why in fused.pairs]
    paired += [(move, new[n], mark(Mark.MOVES)) for move, n in pairs]
    counts = Counter(owner.calls[move].scope for move, _ in pairs)
    notes = (*fused.notes, *(_sentence(name, count, side) for name, count in counts.items()))
    return Fused(owner, Derived(receiver, (), (), calls), tuple(paired), notes)


def _moves(fused: Fused) -> list[Call]:
    """The first run's operators without a partner that only move elements, in order."""
    paired = {a for a, _, _ in fused.pairs}
    names = {c.scope for c in fused.target.calls if c.leaf}
    moves = (
        c
        for c in selected(fused.reference.calls)
        if c.leaf
        and c.op_type in _MOVES
        and c.id not in paired
        and c.scope not in names
        and len(c.slots("input")) == len(c.slots("output")) == 1
    )
    return in_order(moves)


def _passing(move: Call, anchor: Call, number: int, root: str, record: int) -> Call:
    """The partner of a move: a call, next to `anchor`, that passes a record on."""
    slots = (move.slots("input")[0].slot, move.slots("output")[0].slot)
    return replace(
        move,
        id=number,
        root=root,
        rank=anchor.rank,
        parent=anchor.parent,
        number=anchor.number,
        origins=(),
        refs=tuple(Ref(slot, record) for slot in slots),
        notes=(mark(Mark.MOVES),),
        files={},
    )


def _sentence(name: str, count: int, side: str) -> str:
    return f"{name} of the {side} only moves elements: it is compared with its own input" + (
        f" ({count} calls)" if count > 1 else ""
    )


def _partners(fused: Fused) -> dict[int, int]:
    """By tensor of the first run, its partner, from calls that carry out the same operators."""
    out: dict[int, int] = {}
    reference, target = fused.reference, fused.target
    for a, b, _ in fused.pairs:
        for slot in pair_in_order(reference.calls[a], target.calls[b], reference, target)[0]:
            # An output counts before an input that another call read.
            if slot.reference_record not in out or is_output(slot.reference_slot):
                out[slot.reference_record] = slot.target_record
    return out
