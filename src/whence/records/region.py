"""Regions of a run, and operators that return their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from whence.records.run import Call, Run
from whence.records.slots import is_own_input, is_read, is_written


def hands_on(run: Run, call: Call) -> bool:
    """Whether an operator returns the elements of its input in their order. Without a partner it
    hides no difference, since they are compared where they were computed.
    """
    records = run.records
    inputs = {
        (records[r.record].hash, records[r.record].dtype)
        for r in call.slots("input")
        if records[r.record].hash
    }
    outputs = [(records[r.record].hash, records[r.record].dtype) for r in call.slots("output")]
    return call.kind == "operator" and bool(outputs) and inputs.issuperset(outputs)


class Region(NamedTuple):
    """A piece of the run that is judged as one: a leaf call, or one stretch of a container between
    two of its child calls.

    call: id of the call whose code runs. stretch: -1 for a leaf call, else the number of the
    stretch (0 = before the first child). inputs: record ids that became visible at its start; a
    stretch also sees those of the earlier stretches of its call. outputs: records that it computed.
    A record that was already visible to the region is not an output.
    """

    call: int
    stretch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def in_order(calls: Iterable[Call]) -> list[Call]:
    """Returns calls in the order in which they ran."""
    return sorted(calls, key=lambda call: call.order)


def children(calls: Sequence[Call]) -> dict[int, list[int]]:
    """Returns ids of the direct children of every call, in execution order; key -1 holds the root
    calls.
    """
    table: dict[int, list[int]] = {}
    for call in in_order(calls):
        table.setdefault(call.parent, []).append(call.id)
    return table


def outwards(calls: Sequence[Call], number: int) -> Iterator[Call]:
    """Yields the call with this id and those around it, innermost first; none for -1."""
    while number >= 0:
        call = calls[number]
        yield call
        number = call.parent


def inwards(kids: Mapping[int, Sequence[int]], number: int) -> Iterator[int]:
    """Yields the ids of a call and of all calls below it. kids: as `children` returns them."""
    todo = [number]
    while todo:
        number = todo.pop()
        todo += kids.get(number, ())
        yield number


def renumbered(calls: Sequence[Call]) -> list[Call]:
    """Returns calls with their positions as ids; a call whose parent is not among them has none."""
    places = {call.id: place for place, call in enumerate(calls)}
    return [
        msgspec.structs.replace(call, id=place, parent=places.get(call.parent, -1))
        for place, call in enumerate(calls)
    ]


def regions(calls: Sequence[Call]) -> Iterator[Region]:
    """Tiles a run: every operator executed belongs to exactly one region (DESIGN section 3), in
    execution order.

    A container with k children has k + 1 stretches; one that computes nothing has no outputs. A
    stretch sees its container's inputs and parameters and the outputs of the children before it.
    Its outputs are the new records that a later child reads or the container returns. Parameters of
    a child, and the random numbers that it draws, belong to the child.
    """
    below = children(calls)
    visible: set[int] = set()

    def walk(call: Call) -> Iterator[Region]:
        reads = [r.record for r in call.refs if is_read(r.slot)]
        writes = [r.record for r in call.refs if is_written(r.slot)]
        visible.update(reads)
        kids = below.get(call.id, [])
        if not kids:
            yield Region(call.id, -1, tuple(reads), tuple(writes))
            visible.update(writes)
            return
        fresh = dict.fromkeys(reads)
        for place, kid in enumerate(kids):
            child = calls[kid]
            outputs = dict.fromkeys(
                r.record
                for r in child.slots("input")
                if r.record not in visible and not is_own_input(r.slot)
            )
            yield Region(call.id, place, tuple(fresh), tuple(outputs))
            yield from walk(child)
            fresh = dict.fromkeys(r.record for r in child.refs if is_written(r.slot))
        yield Region(
            call.id,
            len(kids),
            tuple(fresh),
            tuple(dict.fromkeys(r for r in writes if r not in visible)),
        )
        visible.update(writes)

    for root in below.get(-1, []):
        yield from walk(calls[root])
