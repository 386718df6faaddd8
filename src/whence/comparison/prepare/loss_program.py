"""The loss of one micro-batch as one program that starts at the outputs of the model's layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from whence.records import Call, Placement, Program, Ref, Run
from whence.records.slots import (
    is_drawn,
    is_input,
    is_of_child,
    is_output,
    is_param,
    is_read,
    split_child,
    split_slot,
)
from whence.replay.program_parts import ProgramBuilder, ProgramPart


class LossNotMoved(Exception):
    """Why the loss of a step cannot be taken out of its model, in words."""


@dataclass(frozen=True)
class TrainedCall:
    """A call of a model in training with all that belongs to its loss.

    children: the calls right below `model`, in order; lone: positions of children that the other
    run's model lacks, such as a loss module; they come last. losses: outputs of the model that the
    other run's model lacks. loss: the call of the code behind the model, None if the backward pass
    starts at an output of the model; loss_backward: the call of its backward pass. parts: the
    backward calls of the model's own operators; lone_backward: those of the lone children.
    """

    run: Run
    model: Call
    children: Sequence[Call]
    lone: frozenset[int]
    losses: frozenset[str]
    loss: Call | None
    loss_backward: Call | None
    parts: Sequence[Call]
    lone_backward: Sequence[Call]

    @functools.cached_property
    def program(self) -> Program:
        """The model's program. Raises LossNotMoved."""
        return self.program_of(self.model)

    def program_of(self, call: Call) -> Program:
        """A call's program of a training step. Raises LossNotMoved."""
        program = self.run.programs.get(call.program)
        if program is None or program.inference:
            raise LossNotMoved(f"{call.name} has no program of its training step")
        return program

    def record(self, call: Call, slot: str) -> Ref:
        """The reference to the tensor in a call's slot. Raises LossNotMoved."""
        ref = next((ref for ref in call.refs if ref.slot == slot), None)
        if ref is None:
            raise LossNotMoved(f"{slot} of {call.name} was not captured")
        return ref

    def child(self, place: int) -> Call:
        """The child of the model at this position. Raises LossNotMoved."""
        if place >= len(self.children):
            raise LossNotMoved(f"not every call inside {self.model.name} was captured")
        return self.children[place]

    def returned_loss(self) -> str:
        """The output of the model that is its loss. Raises LossNotMoved."""
        if len(self.losses) > 1:
            raise LossNotMoved(f"backward passes begin at {' and '.join(sorted(self.losses))}")
        return next(iter(self.losses))

    def name(self, place: int, slot: str) -> str:
        """The name under which the loss reads an output of a child. It is built from the child's
        scope, which both runs share.
        """
        scope = self.children[place].scope
        earlier = sum(child.scope == scope for child in self.children[:place])
        return f"input.{scope}{f'#{earlier}' if earlier else ''}.{slot}"

    def readable(self) -> dict[str, Ref]:
        """All tensors of the model that a loss could read, by the name that the loss uses: the
        model's inputs and the outputs of its children.
        """
        refs = {ref.slot: ref for ref in self.model.refs if is_input(ref.slot)}
        for place, child in enumerate(self.children):
            for ref in child.refs:
                if is_output(ref.slot):
                    name = self.name(place, ref.slot)
                    refs[name] = msgspec.structs.replace(ref, slot=name)
        return refs

    @functools.cached_property
    def read_outputs(self) -> frozenset[str]:
        """The model's outputs that its loss is computed from, or that are the loss."""
        if self.loss is None:
            return self.losses
        records = {ref.record for ref in self.loss.refs if is_input(ref.slot)}
        return frozenset(
            ref.slot for ref in self.model.refs if is_output(ref.slot) and ref.record in records
        )


@dataclass(frozen=True)
class LossProgram:
    """The loss as one program, with its inputs and outputs (`refs`).

    read: names of its inputs by their slots in the model's program ("1:output.0", "input.labels").
    own: names of its inputs by their slots in the code behind the model.
    """

    program: Program
    refs: tuple[Ref, ...]
    placements: Mapping[str, Placement]
    read: Mapping[str, str]
    own: Mapping[str, str]

    def renamed(self, names: Mapping[str, str]) -> LossProgram:
        """This program with inputs renamed, by their old names."""

        def name(slot: str) -> str:
            return names.get(slot, slot)

        inputs = tuple(map(name, self.program.inputs))
        return LossProgram(
            msgspec.structs.replace(self.program, inputs=inputs),
            tuple(msgspec.structs.replace(ref, slot=name(ref.slot)) for ref in self.refs),
            {name(slot): placement for slot, placement in self.placements.items()},
            {slot: name(here) for slot, here in self.read.items()},
            {slot: name(here) for slot, here in self.own.items()},
        )

    def shown(self, trained: TrainedCall, slots: frozenset[str]) -> LossProgram:
        """This program with further inputs, which only the other run's loss reads."""
        readable = trained.readable()
        more = tuple(ref for slot, ref in readable.items() if slot in slots)
        return LossProgram(self.program, (*self.refs, *more), self.placements, self.read, self.own)


def loss_program(trained: TrainedCall) -> LossProgram:
    """The program of the loss. Raises LossNotMoved."""
    return _Expansion(trained).result()


class _Expansion:
    def __init__(self, trained: TrainedCall) -> None:
        self._trained, self._builder = trained, ProgramBuilder()
        self._model = ProgramPart(
            trained.program,
            self._of_model,
            lambda slot: self._shape(self._held(slot)[1].record),
        )
        self._results = dict(trained.program.outputs)
        self._lone: dict[int, ProgramPart] = {}
        self._refs: dict[str, Ref] = {}
        self._placements: dict[str, Placement] = {}
        self._read: dict[str, str] = {}
        self._own: dict[str, str] = {}

    def result(self) -> LossProgram:
        trained, builder = self._trained, self._builder
        if trained.loss is None:
            loss = trained.returned_loss()
            outputs = [("output.0", self._result_of_model(loss))]
            written = [Ref("output.0", trained.record(trained.model, loss).record)]
        else:
            code = trained.program_of(trained.loss)
            call = trained.loss
            part = ProgramPart(
                code, self._of_loss, lambda slot: self._shape(trained.record(call, slot).record)
            )
            operands = builder.take(part, [operand for _, operand in code.outputs])
            outputs = [(slot, o) for (slot, _), o in zip(code.outputs, operands, strict=True)]
            written = [ref for ref in call.refs if not is_read(ref.slot)]
        if not builder.length:
            raise LossNotMoved("nothing is computed between the layers and the loss")
        if any(not is_output(slot) for slot, _ in outputs):
            raise LossNotMoved("its code changes a tensor that it is given")
        refs = (*self._refs.values(), *written)
        program = builder.program(outputs)
        return LossProgram(program, refs, self._placements, self._read, self._own)

    # ---- where inputs come from

    def _of_loss(self, slot: str) -> Any:
        """The operand for an input of the code behind the model: an output or input of the model,
        or an input of the loss's own. Raises LossNotMoved.
        """
        model, loss = self._trained.model, self._trained.loss
        assert loss is not None
        if is_param(slot):
            raise LossNotMoved(f"its code reads {slot}")
        ref = self._trained.record(loss, slot)
        for known in model.refs:
            if known.record != ref.record:
                continue
            if is_output(known.slot) and known.slot in self._results:
                return self._result_of_model(known.slot)
            if is_input(known.slot):
                return self._of_model(known.slot)
        here = f"input.loss.{split_slot(slot)[1]}"
        self._own[slot] = here
        return self._input(here, ref, loss.placements.get(slot))

    def _of_model(self, slot: str) -> Any:
        """The operand for an input or parameter of the model's program. Raises LossNotMoved."""
        if slot in self._results:  # an input of a child that the loss reads as well
            return self._result_of_model(slot)
        if is_of_child(slot) and split_child(slot)[0] in self._trained.lone:
            return self._of_lone(*split_child(slot))
        if is_drawn(slot):
            raise LossNotMoved("it draws random numbers")
        call, ref = self._held(slot)
        if is_param(slot):
            self._refs[slot] = ref
            return self._builder.param(slot)
        here = slot if call is self._trained.model else self._trained.name(*split_child(slot))
        self._read[slot] = here
        return self._input(here, ref, call.placements.get(ref.slot))

    def _of_lone(self, place: int, slot: str) -> Any:
        """The operand for an output of a lone child, whose operators become part of the loss.
        Raises LossNotMoved.
        """
        child = self._trained.child(place)
        program = self._trained.program_of(child)
        if not child.leaf or program.params or slot not in dict(program.outputs):
            raise LossNotMoved(
                f"{child.scope} is in one run only, and is not a loss: it has layers or parameters"
            )
        if place not in self._lone:
            self._lone[place] = ProgramPart(
                program,
                lambda inner: self._result_of_model(f"{place}:{inner}"),
                lambda inner: self._shape(self._trained.record(child, inner).record),
            )
        return self._builder.take(self._lone[place], [dict(program.outputs)[slot]])[0]

    def _result_of_model(self, slot: str) -> Any:
        if slot not in self._results:
            raise LossNotMoved(f"{slot} of {self._trained.model.name} was not followed")
        return self._builder.take(self._model, [self._results[slot]])[0]

    def _held(self, slot: str) -> tuple[Call, Ref]:
        """(call, reference) of a tensor that the model's program reads."""
        call, inner = self._trained.model, slot
        if is_of_child(slot):
            place, inner = split_child(slot)
            call = self._trained.child(place)
        return call, self._trained.record(call, inner)

    def _input(self, slot: str, ref: Ref, placement: Placement | None) -> Any:
        self._refs[slot] = msgspec.structs.replace(ref, slot=slot)
        if placement is not None:
            self._placements[slot] = placement
        return self._builder.input(slot, self._trained.run.records[ref.record].dtype)

    def _shape(self, record: int) -> Sequence[int]:
        return self._trained.run.records[record].shape


def without_loss(
    trained: TrainedCall, loss: LossProgram, others_inputs: frozenset[str]
) -> tuple[Call, Program]:
    """The model's call and program without its losses and without inputs that belong to the loss.
    These are the inputs that the loss reads and the other run's model lacks, even if the model
    itself reads them too. others_inputs: input slots of the other run's model. Raises LossNotMoved.
    """
    call, program = trained.model, trained.program
    if any(place < len(trained.children) - len(trained.lone) for place in trained.lone):
        raise LossNotMoved("layers run behind a module that only one run has")

    def is_kept(slot: str) -> bool:
        return slot not in trained.losses and not (
            is_of_child(slot) and split_child(slot)[0] in trained.lone
        )

    outputs = [(slot, operand) for slot, operand in program.outputs if is_kept(slot)]
    builder = ProgramBuilder()
    part = ProgramPart(program, builder.as_in(program), lambda slot: ())
    used = _inputs_of(part, [operand for _, operand in outputs])
    for slot in program.inputs:
        if is_kept(slot) and (slot in used or is_of_child(slot) or slot in others_inputs):
            part.operand(slot)
    operands = builder.take(part, [operand for _, operand in outputs])
    results = [(slot, operand) for (slot, _), operand in zip(outputs, operands, strict=True)]
    calls = [
        (place, sum(k < before for k in part.places))
        for place, before in program.calls
        if place not in trained.lone
    ]
    remaining = builder.program(results, calls)
    moved = loss.read.keys() - others_inputs
    refs = tuple(ref for ref in call.refs if is_kept(ref.slot) and ref.slot not in moved)
    return msgspec.structs.replace(call, refs=refs, program=remaining.id), remaining


def _inputs_of(part: ProgramPart, operands: Sequence[Any]) -> set[str]:
    """The slots of the inputs that these operands depend on."""
    inputs = part.program.inputs
    read = [(kind, value) for o in operands for kind, value in o.items()]
    for place in part.needed(operands):
        read += part.program.operations[place].operands()
    return {
        inputs[value if kind == "in" else value[0]] for kind, value in read if kind in ("in", "dim")
    }
