"""Operators that only one run has and that compute nothing: a change of layout or dtype. They are
held against what they were given.

A graph compiler puts them where a kernel wants its tensor in blocks. Nothing faces them; yet what
they hand on must be what came in. So the other run gets a call that hands on, and a fault in one is
named like any other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from whence.align.call_sites import match_roots, selected
from whence.align.calls.fused_operators import Fused
from whence.align.calls.tensor_slots import fitted
from whence.align.derived_run import Derived, renumbered
from whence.records import Call, Ref, Run
from whence.records.marks import Mark, has_mark, mark
from whence.records.slots import is_output

_MOVES = frozenset({"TransData", "Cast", "Identity", "FormatTransfer"})


def is_handed_on(call: Call) -> bool:
    """Did its run not have this call, which stands for a move of elements that only the other
    has?
    """
    return has_mark(call, Mark.MOVES)


def faced(found: Fused) -> Fused:
    """Give every such operator without a partner one, in both directions, where calls face each
    other by what they carry out.
    """
    if not found.faced:
        return found
    found = _across(found, True)
    return _across(found, False)


def _across(found: Fused, in_target: bool) -> Fused:
    """in_target: the operators are the target's, and the reference gets calls that hand on."""
    here, there = (found.target, found.reference) if in_target else (found.reference, found.target)
    known = {(b if in_target else a) for a, b, _ in found.faced}
    names = {c.scope for c in there.calls if c.leaf}
    moves = [
        c
        for c in selected(here.calls)
        if c.leaf
        and c.op_type in _MOVES
        and c.id not in known
        and c.scope not in names
        and len(c.slots("input")) == len(c.slots("output")) == 1
    ]
    if not moves:
        return found
    partners = _partners(found, in_target)
    contents: dict[Hashable, int] = {}
    for record in there.records:
        if record.hash and record.count > 1:
            contents.setdefault((record.hash, record.dtype, record.shape), record.id)
    makers = {r.record: c for c in there.calls if c.leaf for r in c.slots("output")}
    readers: dict[int, Call] = {}
    for call in sorted((c for c in there.calls if c.leaf), key=lambda c: -c.order):
        readers.update((r.record, call) for r in call.slots("input"))
    roots = match_roots(here.calls, there.calls)
    behind: dict[int, list[Call]] = defaultdict(list)
    before: dict[int, list[Call]] = defaultdict(list)
    pairs: list[tuple[int, int]] = []
    for move in sorted(moves, key=lambda c: c.order):
        (given,), (made,) = move.slots("input"), move.slots("output")
        record = here.records[given.record]
        like = partners.get(given.record)
        if like is None and record.hash:
            like = contents.get((record.hash, record.dtype, record.shape))
        if like is None or there.records[like].count != here.records[made.record].count:
            continue
        partners.setdefault(made.record, like)
        at = makers.get(like) or readers.get(like)
        if at is None or (at.step, at.micro) != (move.step, move.micro):
            continue
        number = len(there.calls) + len(pairs)
        handing = msgspec.structs.replace(
            move,
            id=number,
            root=roots.get(move.root, at.root),
            rank=at.rank,
            parent=at.parent,
            number=at.number,
            origins=(),
            refs=(Ref(given.slot, like), Ref(made.slot, like)),
            notes=(mark(Mark.MOVES),),
            files={},
        )
        (behind if like in makers else before)[at.id].append(handing)
        pairs.append((move.id, number))
    if not pairs:
        return found
    ordered: list[Call] = []
    for call in sorted(there.calls, key=lambda c: c.order):
        ordered += [*before[call.id], call, *behind[call.id]]
    calls, new = renumbered(ordered)
    return _with_moves(found, in_target, Derived(there, (), (), calls), new, pairs)


def _with_moves(
    found: Fused,
    in_target: bool,
    there: Run,
    new: Mapping[int, int],
    pairs: Sequence[tuple[int, int]],
) -> Fused:
    """The runs with the calls that were added. there: the run that got them; new: its new numbers
    by the old; pairs: (the operator, the call paired with it by its old number).
    """
    here = found.target if in_target else found.reference
    if in_target:
        paired = [(new[a], b, why) for a, b, why in found.faced]
        paired += [(new[n], move, mark(Mark.MOVES)) for move, n in pairs]
    else:
        paired = [(a, new[b], why) for a, b, why in found.faced]
        paired += [(move, new[n], mark(Mark.MOVES)) for move, n in pairs]
    counts = Counter(here.calls[move].scope for move, _ in pairs)
    side = "target" if in_target else "reference"
    notes = (*found.notes, *(_told(name, count, side) for name, count in counts.items()))
    return Fused(there if in_target else here, here if in_target else there, tuple(paired), notes)


def _told(name: str, count: int, side: str) -> str:
    return f"{name} of the {side} only moves elements: it is held against what it was given" + (
        f" ({count} calls)" if count > 1 else ""
    )


def _partners(found: Fused, in_target: bool) -> dict[int, int]:
    """Tensors of the one run -> what faces them in the other, of calls that carry out the same."""
    out: dict[int, int] = {}
    for a, b, _ in found.faced:
        slots, _, _ = fitted(
            found.reference.calls[a], found.target.calls[b], found.reference, found.target
        )
        for slot in slots:
            one, other = (
                (slot.target_record, slot.reference_record)
                if in_target
                else (slot.reference_record, slot.target_record)
            )
            # What a call made is believed before what another read.
            if one not in out or is_output(slot.reference_slot):
                out[one] = other
    return out
