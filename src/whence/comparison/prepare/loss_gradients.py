"""The backward pass of a loss that was made one program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from whence.comparison.prepare.loss_program import LossNotMoved, LossProgram, TrainedCall
from whence.records import Call, Operation, Placement, Program, Ref
from whence.records.backward import GivenGradient, WantedGradient, backward_program, read_by
from whence.records.program import GRADIENTS
from whence.records.slots import is_of_child, is_read, split_child
from whence.records.training import LOSS
from whence.replay.program_parts import ProgramBuilder, ProgramPart

_GIVEN, _MADE = "input.grad.", "output.grad."


@dataclass(frozen=True)
class LossGradients:
    """What takes the place of the calls of a loss's backward pass.

    replaced: what calls become, by id; None for those that are no calls of their own any more.
    programs: of those that have another.
    """

    replaced: Mapping[int, Call | None]
    programs: Sequence[Program]


def loss_gradients(trained: TrainedCall, loss: LossProgram) -> LossGradients | None:
    """The calls of the backward pass; None where the micro-batch has none. Raises
    LossNotMoved.
    """
    return _Gradients(trained, loss).result()


class _Gradients:
    def __init__(self, trained: TrainedCall, loss: LossProgram) -> None:
        self._trained, self._loss = trained, loss
        self._replaced: dict[int, Call | None] = {}
        self._programs: list[Program] = []
        self._made: dict[str, tuple[Ref, Placement | None]] = {}  # by slot of the loss

    def result(self) -> LossGradients | None:
        trained = self._trained
        parts = [part for part in trained.parts if self._of_loss(part)]
        for part in parts:
            self._replaced[part.id] = self._rest(part)
        if trained.loss is None:
            if not parts:
                return None
            given = {"output.0": self._given_to_model(parts, trained.returned_loss())}
            first = min(parts, key=lambda part: part.order)
        else:
            first_or_none = trained.loss_backward
            if first_or_none is None:
                if parts:
                    raise LossNotMoved("the backward pass of its code was not captured")
                return None
            first = first_or_none
            given = {
                ref.slot.removeprefix(_GIVEN): ref
                for ref in first.refs
                if ref.slot.startswith(_GIVEN)
            }
            self._note_own(first)
        return self._as_one(first, given)

    def _of_loss(self, part: Call) -> list[str]:
        """The gradients that a part of the model's backward pass is given by its loss."""
        return [
            ref.slot
            for ref in part.refs
            if ref.slot.startswith(_GIVEN) and self._is_of_loss(ref.slot.removeprefix(_GIVEN))
        ]

    def _is_of_loss(self, slot: str) -> bool:
        if is_of_child(slot):
            return split_child(slot)[0] in self._trained.lone
        return slot in self._trained.read_outputs

    def _given_to_model(self, parts: Sequence[Call], output: str) -> Ref:
        """The gradient that the backward pass of the model begins with."""
        slot = f"{_GIVEN}{output}"
        for part in parts:
            for ref in part.refs:
                if ref.slot == slot:
                    return ref
        raise LossNotMoved(f"the gradient of {output} was not captured")

    # ---- parts of the model's backward pass

    def _rest(self, part: Call) -> Call | None:
        """What is left of a part without the gradients that the loss makes, which are noted; None
        for nothing.
        """
        program = self._trained.program_of(part)
        operation = program.operations[-1] if program.operations else None
        if operation is None or operation.name != GRADIENTS:
            raise LossNotMoved(f"the program of {part.name} is of another form")
        starts, given, goals = operation.args
        of_loss = set(self._of_loss(part))
        from_loss = [program.inputs[gradient["in"]] in of_loss for gradient in given]
        code = ProgramPart(program, lambda slot: None, lambda slot: ())
        kept: list[tuple[str, Any]] = []
        for slot, result in program.outputs:
            goal, name = goals[result["op"][1]], slot.removeprefix(_MADE)
            if is_of_child(name) and split_child(name)[0] in self._trained.lone:
                continue
            leads = {
                is_loss
                for start, is_loss in zip(starts, from_loss, strict=True)
                if code.leads(start, goal)
            }
            if leads == {False}:
                kept.append((slot, goal))
            elif leads == {True} and name in self._loss.read:
                ref = self._trained.record(part, slot)
                self._made[self._loss.read[name]] = ref, part.placements.get(slot)
            else:
                raise LossNotMoved(f"the gradient of {name} is not of the loss alone")
        if not kept:
            return None
        others = [
            (start, gradient)
            for start, gradient, is_loss in zip(starts, given, from_loss, strict=True)
            if not is_loss
        ]
        return self._cut(part, program, others, kept)

    def _cut(
        self,
        part: Call,
        program: Program,
        given: Sequence[tuple[Any, Any]],
        kept: Sequence[tuple[str, Any]],
    ) -> Call:
        """A part of fewer gradients. given: results of the forward pass and their gradients; kept:
        slots of the gradients that it makes, and what they are of.
        """
        builder = ProgramBuilder()
        refs = {ref.slot: ref for ref in part.refs}
        code = ProgramPart(
            program,
            builder.as_in(program),
            lambda slot: self._trained.run.records[refs[slot].record].shape,
        )
        starts = builder.take(code, [start for start, _ in given])
        gradients = builder.take(code, [gradient for _, gradient in given])
        goals = builder.take(code, [goal for _, goal in kept])
        place = builder.length
        builder.append(Operation(GRADIENTS, (starts, gradients, goals)))
        cut = builder.program([(slot, {"op": [place, k]}) for k, (slot, _) in enumerate(kept)])
        self._programs.append(cut)
        slots = {*cut.inputs, *cut.params, *(slot for slot, _ in kept)}
        return msgspec.structs.replace(
            part, program=cut.id, refs=tuple(ref for ref in part.refs if ref.slot in slots)
        )

    # ---- the loss

    def _note_own(self, backward: Call) -> None:
        """Take note of gradients of what only the code behind the model reads."""
        for ref in backward.refs:
            if not ref.slot.startswith(_MADE):
                continue
            here = self._loss.own.get(ref.slot.removeprefix(_MADE))
            if here is not None:
                self._made[here] = ref, backward.placements.get(ref.slot)

    def _as_one(self, first: Call, given: Mapping[str, Ref]) -> LossGradients:
        """The backward pass of the loss as one call in the place of `first`."""
        records = self._trained.run.records
        program = backward_program(
            self._loss.program,
            [
                GivenGradient(output, f"{_GIVEN}{output}", records[ref.record].dtype)
                for output, ref in given.items()
            ],
            [WantedGradient(slot, f"{_MADE}{slot}") for slot in self._made],
            passed_on=False,
            aliases={},
        )
        if program is None:
            raise LossNotMoved("its gradients cannot be told from its operators")
        self._programs.append(program)
        refs = tuple(self._refs(program, given))
        placements = {
            s: p for s, p in self._loss.placements.items() if any(ref.slot == s for ref in refs)
        }
        for slot, (_, placement) in self._made.items():
            if placement is not None:
                placements[f"{_MADE}{slot}"] = placement
        call = msgspec.structs.replace(
            first,
            op=LOSS,
            op_type=LOSS,
            source="",
            arguments={},
            refs=refs,
            placements=placements,
            program=program.id,
            no_program="",
        )
        gone: dict[int, Call | None] = {lone.id: None for lone in self._trained.lone_backward}
        return LossGradients({**self._replaced, **gone, first.id: call}, self._programs)

    def _refs(self, program: Program, given: Mapping[str, Ref]) -> Iterator[Ref]:
        unused = {*program.inputs, *program.params} - read_by(program)
        yield from (ref for ref in self._loss.refs if is_read(ref.slot) and ref.slot not in unused)
        for output, ref in given.items():
            yield msgspec.structs.replace(ref, slot=f"{_GIVEN}{output}")
        for slot, (ref, _) in self._made.items():
            yield msgspec.structs.replace(ref, slot=f"{_MADE}{slot}")
