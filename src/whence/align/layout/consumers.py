"""Does what is computed from a tensor agree? A tensor in a wrong order is a fault, in another order
it is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence.align import dims as ex
from whence.align.layout.axes import applied, candidates
from whence.align.layout.distances import distance
from whence.align.layout.layout_state import Face, Family, LayoutState
from whence.align.plan_editor import spread
from whence.records.slots import is_input, is_output, is_param

# times as far as a turned tensor may be what is made of it, or twice as far as such a tensor may be
# at all
_AS_NEAR = 10.0
_NEAR = 0.05


def outputs_agree(at: LayoutState, call: int) -> bool:
    """Does an output of this call of the reference agree with what it faces?"""
    outputs = [s for s in at.pairs[call].slots if is_output(s.reference_slot)]
    return any(at.agree((s.reference_record, s.target_record)) for s in outputs)


def follows(at: LayoutState, made_by: int) -> bool:
    """Does a tensor agree that was not there before this call: what a later sibling reads, or the
    parent returns?

    Not what the module itself is given again: what a recurrent cell reads at every step need not
    have been made with it.
    """
    call = at.reference.calls[made_by]
    before: set[int] = set()
    earlier: set[int] = set()
    made: set[Face] = set()
    for sibling in at.kids_reference.get(call.parent, ()):
        later = at.reference.calls[sibling].order > call.order
        other = at.reference.calls[sibling].scope != call.scope
        for slot in at.pairs[sibling].slots if sibling in at.pairs else ():
            if (
                is_input(slot.reference_slot)
                and later
                and other
                and slot.reference_record not in before
            ):
                made.add((slot.reference_record, slot.target_record))
            if not is_param(slot.reference_slot):
                before.add(slot.reference_record)
                if not later:
                    earlier.add(slot.reference_record)
    parent = at.pairs.get(call.parent)
    if parent is not None:
        outputs = (
            s
            for s in parent.slots
            if is_output(s.reference_slot) and s.reference_record not in earlier
        )
        made.update((s.reference_record, s.target_record) for s in outputs)
    return any(at.resemble(face) for face in made if not _constant(at, face[0]))


def _constant(at: LayoutState, record: int) -> bool:
    """Has it one value only? A first hidden state agrees with anything."""
    known = at.reference.records[record].statistics
    return known is not None and known.min == known.max


def used_so(
    at: LayoutState, faces: Sequence[Face], node: ex.Node, family: Family, same: bool
) -> bool:
    """Does what reads this tensor agree? A tensor in a wrong order is a fault, in another order it
    is not.
    """
    asked = False
    for face in spread(faces):
        readers = at.readers.get(face[0], [])
        if is_input(family[face][1].reference_slot):
            readers = list(dict.fromkeys([family[face][0], *readers]))
        asked |= bool(readers)
        if same:
            # Nothing but the elements speaks for another order: what is made of it must be as near
            # as it is then.
            arrays = at.arrays(face)
            near = distance(arrays[0], applied(node, arrays[1])) if arrays is not None else math.inf
            if near > _NEAR:
                continue
            call = family[face][0]
            as_near = all(
                _apart(at, reader) <= max(_AS_NEAR * near, 2 * _NEAR) for reader in readers
            )
            if _given_so(at, call, node) or (as_near and (readers or follows(at, call))):
                return True
        elif any(outputs_agree(at, reader) for reader in readers) or follows(at, family[face][0]):
            return True
    return not asked and not same


def _given_so(at: LayoutState, call: int, node: ex.Node) -> bool:
    """Was what this call is given laid in this order too?"""
    given = (s for s in at.pairs[call].slots if is_input(s.reference_slot))
    found = (at.decided.get((s.reference_record, s.target_record)) for s in given)
    return any(how is not None and how[0] == node for how in found)


def _apart(at: LayoutState, call: int) -> float:
    """The largest distance of an output of this call from what it faces, in whatever order of axes
    is nearest.
    """
    out = 0.0
    for slot in at.pairs[call].slots:
        arrays = (
            at.arrays((slot.reference_record, slot.target_record))
            if is_output(slot.reference_slot)
            else None
        )
        if arrays is not None:
            found = candidates(arrays[1].shape, arrays[0].shape)
            out = max(
                out,
                min(
                    (distance(arrays[0], applied(node, arrays[1])) for node in found),
                    default=math.inf,
                ),
            )
    return out
