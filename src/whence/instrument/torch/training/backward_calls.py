"""Makes the calls of a backward pass from the gradients that were recorded during it.

A forward call that calls no module gets one backward call: from the gradients of its outputs to
those of its inputs and parameters. A forward call with children gets one for each child whose
outputs its own operators use, since these operators are differentiated between the backward passes
of the children, and one for its own inputs and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from whence.instrument.session import Session
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Region, Regions, part_of
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.forward_calls import Edge, ForwardCall, first_reads
from whence.instrument.torch.training.gradient_hooks import Gradient, SeenGradients
from whence.records import Placement, Ref
from whence.records.backward import (
    DIFFERENTIATES,
    GivenGradient,
    WantedGradient,
    as_input,
    backward_program,
    read_by,
)
from whence.records.slots import is_of_child, is_output, is_read, split_child
from whence.records.training import backward_of


class _Part(NamedTuple):
    """One call of the backward pass. child: index of the child whose outputs' gradients it makes,
    None for the call's own inputs. given, made: (slot of the forward program, gradient) of its
    inputs and results. turn: number of its last gradient.
    """

    call: ForwardCall
    child: int | None
    given: list[tuple[str, Gradient]]
    made: list[tuple[str, Gradient]]

    @property
    def turn(self) -> int:
        return max((g.turn for _, g in (*self.given, *self.made)), default=0)


class BackwardCalls:
    """Writes the calls of backward passes."""

    def __init__(self, session: Session, registry: TensorRegistry, writer: ProgramWriter) -> None:
        self._session, self.registry, self._writer = session, registry, writer
        self._regions = Regions(session, registry)
        self._programs: dict[Any, str] = {}

    def close(self) -> None:
        """Close the region of the backward pass."""
        self._regions.close()

    def write(self, passes: Iterable[tuple[Sequence[ForwardCall], SeenGradients]]) -> Region | None:
        """Write the calls of a backward pass and of the passes nested in it. Returns the region
        that is open then, None where nothing was recorded.
        """
        region = None
        parts = [part for calls, seen in passes for call in calls for part in _parts(call, seen)]
        parts.sort(key=lambda part: part.turn)
        for part in parts:
            call = part.call
            region = self._regions.enter_counted("backward", call.root, call.step, call.micro)
            if region.selected:
                self._write(part, region)
        return region

    def _write(self, part: _Part, region: Any) -> None:
        call = part.call
        program, no_program = self._program_of(part)
        own = backward_of(part.child) if part.child is not None else call.op
        self.registry.call(
            part_of(
                region,
                self._session,
                scope=call.scope,
                op=own,
                occurrence=_free(region.counts, f"{call.scope}/{own}", call.occurrence),
                op_type=call.op_type,
                source=call.info.source,
                training=call.training,
                refs=tuple(self._refs(part, program)),
                placements=_placements(part),
                arguments=call.arguments,
                program=program,
                no_program=no_program,
                forward=call.order,
            )
        )

    def _refs(self, part: _Part, program: str) -> Iterator[Ref]:
        """Refs of a part: what its program reads, or everything available if it has none, then what
        it makes.
        """
        used = read_by(self._writer.program(program)) if program else None
        for ref in _read(part):
            if used is None or ref.slot in used:
                yield ref
        for slot, gradient in part.made:
            yield Ref(f"output.grad.{slot}", gradient.record, gradient.edge)

    def _program_of(self, part: _Part) -> tuple[str, str]:
        """(program id, reason why there is none) of one part."""
        call, writer = part.call, self._writer
        if not call.program:
            return "", "its forward pass has no program"
        aliases = _aliases(call)
        key = (
            call.program,
            tuple(aliases.items()),
            tuple((slot, g.dtype) for slot, g in part.given),
            tuple(slot for slot, _ in part.made),
        )
        if key not in self._programs:
            program = backward_program(
                writer.program(call.program),
                [
                    GivenGradient(slot, read_as, g.dtype)
                    for (slot, g), read_as in zip(part.given, _given_slots(part), strict=True)
                ],
                [WantedGradient(slot, f"output.grad.{slot}") for slot, _ in part.made],
                passed_on=part.child is not None,
                aliases=aliases,
            )
            self._programs[key] = "" if program is None else program.id
            if program is not None:
                writer.write(program, writer.constants(call.program))
        name = self._programs[key]
        if name:
            return name, ""
        if DIFFERENTIATES in writer.program(call.program).notes:
            return "", "its forward pass runs a backward pass itself"
        return "", "its forward program has other tensors"


def _free(counts: dict[str, int], name: str, occurrence: int) -> int:
    """The occurrence of a forward call, or the next free one if an earlier pass through the same
    graph has used it.
    """
    while f"{name}/{occurrence}" in counts:
        occurrence += 1
    counts[f"{name}/{occurrence}"] = 0
    return occurrence


def _read(part: _Part) -> Iterator[Ref]:
    """Refs of everything that a part may read."""
    call = part.call
    yield from (ref for ref in call.refs if is_read(ref.slot))
    for place, child in call.known_children():
        for ref in child.refs:
            if is_output(ref.slot):
                yield Ref(as_input(f"{place}:{ref.slot}"), ref.record, ref.edge)
    for (_, gradient), slot in zip(part.given, _given_slots(part), strict=True):
        yield Ref(slot, gradient.record, gradient.edge)


def _placements(part: _Part) -> dict[str, Placement]:
    """Placements of the sharded gradients of a part, by slot."""
    slots = [
        *((s, gradient) for (_, gradient), s in zip(part.given, _given_slots(part), strict=True)),
        *((f"output.grad.{slot}", gradient) for slot, gradient in part.made),
    ]
    return {slot: g.placement for slot, g in slots if g.placement is not None}


def _given_slots(part: _Part) -> Iterator[str]:
    """The input slots of the gradients that a part starts from."""
    counts: dict[str, int] = {}
    for slot, _ in part.given:
        earlier = counts.get(slot, 0)
        counts[slot] = earlier + 1
        yield f"input.grad.{slot}" + (f".{earlier}" if earlier else "")


def _parts(call: ForwardCall, seen: SeenGradients) -> Iterator[_Part]:
    """The calls that the backward pass of one call consists of."""
    given = [
        (slot, gradient)
        for slot, edge in call.outputs
        if call.made(edge) and (gradient := seen.given(call, edge)) is not None
    ]
    # Autograd runs nodes in reverse order and adds gradients in that order.
    for place, child in reversed(list(call.known_children())):
        for slot, edge in child.inputs:
            given += [(f"{place}:{slot}", g) for g in seen.sent_below(child, edge)]
    for place, child in call.known_children():
        made = [
            (f"{place}:{slot}", gradient)
            for slot, edge in child.outputs
            if child.made(edge) and (gradient := seen.given(child, edge)) is not None
        ]
        if made:
            yield _Part(call, place, [g for g in given if _is_behind(g[0], place)], made)
    own = [
        (slot, gradient)
        for edge, slot in first_reads(call, seen.held).items()
        if (gradient := seen.sent_by(call, edge)) is not None
    ]
    if own:
        yield _Part(call, None, given, own)


def _is_behind(slot: str, child: int) -> bool:
    """Whether a gradient of this slot can lead to the outputs of the child."""
    return not is_of_child(slot) or split_child(slot)[0] > child


def _aliases(call: ForwardCall) -> dict[str, str]:
    """Maps a slot to an earlier slot that is the same tensor for autograd: a child returned its
    input, or an argument was passed twice.
    """
    first: dict[Edge, str] = {}
    aliases: dict[str, str] = {}
    pairs = [*call.inputs]
    for place, child in call.known_children():
        pairs += [(f"{place}:{slot}", edge) for slot, edge in (*child.inputs, *child.outputs)]
    for slot, edge in pairs:
        if first.setdefault(edge, slot) != slot:
            aliases[slot] = first[edge]
    return aliases
