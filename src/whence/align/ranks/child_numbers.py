"""Numbers the calls below a module the same way on all ranks, where ranks call different children.

Slots and operations of a backward pass name the children of a module by their position
("2:output.0", "backward of 2"). Ranks with other layers or experts than their neighbours count
differently; in the joined run every child has one position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from whence.align.ranks.groups import Key, Side
from whence.records import Call, in_order
from whence.records.slots import is_of_child, split_child
from whence.records.training import backward_child, backward_of

_NO_PROGRAM = "its ranks call different modules"


def number_children(side: Side) -> None:
    """Renumber the children of every call by their positions over all ranks of a side."""
    if len(side.ranks) < 2:
        return
    below: dict[int, list[Call]] = defaultdict(list)
    for call in in_order(side.calls):
        if call.phase == "forward" and call.parent >= 0 and not call.op:
            below[call.parent].append(call)
    by_order = {(call.rank, call.order): call.id for call in side.calls}
    places = _places(side, below)
    for number, call in enumerate(side.calls):
        owner = by_order.get((call.rank, call.forward), -1) if call.forward >= 0 else call.id
        if (new := places.get(owner)) is not None:
            side.calls[number] = _renumbered(call, new)
    side.group()


def _places(side: Side, below: dict[int, list[Call]]) -> dict[int, dict[int, int]]:
    """By id of a call: position of each child on its rank -> position over all ranks. Only for
    calls whose ranks have different children.
    """
    places: dict[int, dict[int, int]] = {}
    for group in side.groups.values():
        own = {rank: below[call.id] for rank, call in group.items() if below.get(call.id)}
        ranks = sorted(own, key=lambda rank: (side.stage[rank], rank))
        listed = {rank: [_name(side, call) for call in own[rank]] for rank in ranks}
        if len({tuple(names) for names in listed.values()}) < 2:
            continue
        whole = merged([listed[rank] for rank in ranks])
        for rank in ranks:
            new = {place: whole.index(name) for place, name in enumerate(listed[rank])}
            places[group[rank].id] = new
    return places


def _name(side: Side, call: Call) -> Key:
    return side.scope[call.id], call.occurrence


def merged(lists: Sequence[Sequence[Key]]) -> list[Key]:
    """Merges several lists into one in which each keeps its order. Items that only a later list has
    come before the next item in common.
    """
    whole: list[Key] = []
    for names in lists:
        place = 0
        for k, name in enumerate(names):
            if name in whole:
                place = whole.index(name) + 1
                continue
            following = next((whole.index(n) for n in names[k + 1 :] if n in whole), len(whole))
            place = max(place, following)
            whole.insert(place, name)
            place += 1
    return whole


def _renumbered(call: Call, new: dict[int, int]) -> Call:
    refs = tuple(
        replace(ref, slot=_slot(ref.slot, new)) if ":" in ref.slot else ref for ref in call.refs
    )
    child = backward_child(call.op)
    op = call.op if child is None else backward_of(new.get(child, child))
    return replace(call, refs=refs, op=op, program="", no_program=_NO_PROGRAM)


def _slot(slot: str, new: dict[int, int]) -> str:
    """ "input.grad.2:input.0" with another place in the place of the 2."""
    before = next((start for start in _BEFORE if is_of_child(slot.removeprefix(start))), None)
    if before is None:
        return slot
    child, inner = split_child(slot.removeprefix(before))
    return f"{before}{new.get(child, child)}:{inner}"


_BEFORE = ("input.grad.", "output.grad.", "input.", "")
