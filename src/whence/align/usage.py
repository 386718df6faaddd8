"""Does what is computed from a tensor agree? A tensor in a wrong order is a fault, in another order it is not."""

from __future__ import annotations

from collections.abc import Sequence

from whence.align import expressions as ex
from whence.align.laying import Face, Family, Laying
from whence.align.matching import spread


def outputs_agree(at: Laying, call: int) -> bool:
    """Does an output of this call of the reference agree with what it faces?"""
    outputs = [s for s in at.pairs[call].slots if s.reference_slot.startswith("output")]
    return any(at.agree((s.reference_record, s.target_record)) for s in outputs)


def follows(at: Laying, made_by: int) -> bool:
    """Does a tensor agree that was made after this call and was not there before: what a later sibling reads, or the parent returns?"""
    call = at.reference.calls[made_by]
    before: set[int] = set()
    earlier: set[int] = set()
    for sibling in at.kids_reference.get(call.parent, ()):
        later = at.reference.calls[sibling].order > call.order
        for slot in at.pairs[sibling].slots if sibling in at.pairs else ():
            if slot.reference_slot.startswith("input") and later and slot.reference_record not in before:
                face = slot.reference_record, slot.target_record
                if at.resemble(face):
                    return True
            if not slot.reference_slot.startswith("param"):
                before.add(slot.reference_record)
                if not later:
                    earlier.add(slot.reference_record)
    parent = at.pairs.get(call.parent)
    return parent is not None and any(
        at.agree((s.reference_record, s.target_record))
        for s in parent.slots
        if s.reference_slot.startswith("output") and s.reference_record not in earlier
    )


def used_so(at: Laying, faces: Sequence[Face], node: ex.Node, family: Family, same: bool) -> bool:
    """Does what reads this tensor agree? A tensor in a wrong order is a fault, in another order it is not."""
    asked = False
    for face in spread(faces):
        readers = at.readers.get(face[0], [])
        if family[face][1].reference_slot.startswith("input"):
            readers = list(dict.fromkeys([family[face][0], *readers]))
        asked |= bool(readers)
        if any(outputs_agree(at, reader) for reader in readers) or follows(at, family[face][0]):
            return True
    return not asked and not same
