"""Losses that one run computes inside the model and the other behind it.

One run calls `model(ids, labels=labels).loss`, the other computes a loss of the model's logits.
Both are right, but their calls cannot be paired: the models do not return the same tensors, and
their backward passes do not start from the same gradients. So the loss becomes one forward call in
both runs, from the outputs of the model's layers to the number from which the backward pass starts,
and one backward call. Each gets a program of the recorded operators, which is checked against its
recording before use, like any program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from whence.comparison.prepare.loss_program import (
    LossNotMoved,
    LossProgram,
    TrainedCall,
    loss_program,
    without_loss,
)
from whence.comparison.prepare.training_calls import TrainingCalls, models_of
from whence.records import Call, Operation, Over, Placement, Program, Record, Ref, Run
from whence.records.backward import GivenGradient, WantedGradient, backward_program, read_by
from whence.records.program import GRADIENTS
from whence.records.slots import is_input, is_of_child, is_output, is_read, split_child
from whence.records.training import LOSS
from whence.replay.program_parts import ProgramBuilder, ProgramPart

_REGION = "region"
_SPACE = 3
_NEW = -1  # the id of a call that no capture has written


@dataclass(frozen=True)
class LossPlace:
    """How one run's model differs from the other run's.

    losses: outputs (slots) that only this model returns; lone: scopes of children that only this
    model has; others_inputs: input slots of the other model. names: common names for inputs of this
    run's loss, by its own names; unread: names of tensors that only the other run's loss reads.
    """

    losses: frozenset[str]
    lone: frozenset[str]
    others_inputs: frozenset[str]
    names: Mapping[str, str]
    unread: frozenset[str]


class LossApart(Over):
    """A run in which each loss is one call that starts at the outputs of the model's layers.
    places: by root.
    """

    def __init__(
        self,
        base: Run,
        calls: Sequence[Call],
        programs: Mapping[str, Program],
        places: Mapping[str, LossPlace],
    ) -> None:
        super().__init__(base, calls)
        self.programs, self.places = programs, places

    def redone(self, run: Run) -> Run:
        """A further run of the same program in this form. Raises LossNotMoved."""
        return moved(TrainingCalls(spaced(run)), self.places)


def outputs_of(models: Iterable[Call]) -> set[str]:
    """The output slots of these calls."""
    return {ref.slot for call in models for ref in call.refs if is_output(ref.slot)}


def _inputs(models: Iterable[Call]) -> frozenset[str]:
    return frozenset(ref.slot for call in models for ref in call.refs if is_input(ref.slot))


def loss_places(
    trainings: tuple[TrainingCalls, TrainingCalls], models: tuple[list[Call], list[Call]]
) -> tuple[LossPlace, LossPlace] | None:
    """The differences between the models of two runs, for each run; None unless exactly one of the
    models returns a loss. Raises LossNotMoved.
    """
    outputs = [outputs_of(calls) for calls in models]
    losses = [
        frozenset(
            slot
            for slot in outputs[k] - outputs[1 - k]
            if any(trainings[k].is_loss(call, slot) for call in models[k])
        )
        for k in (0, 1)
    ]
    if bool(losses[0]) == bool(losses[1]):
        return None
    scopes = [
        {kid.scope for kid in training.children(calls[0])}
        for training, calls in zip(trainings, models, strict=True)
    ]
    lone = [frozenset(scopes[k] - scopes[1 - k]) if losses[k] else frozenset[str]() for k in (0, 1)]
    first = [
        t.trained(calls[0], loss, alone)
        for t, calls, loss, alone in zip(trainings, models, losses, lone, strict=True)
    ]
    programs = [loss_program(trained) for trained in first]
    read = [{ref.slot for ref in p.refs if is_input(ref.slot)} for p in programs]
    unread = [(read[1 - k] - read[k]) & first[k].readable().keys() for k in (0, 1)]
    of_layers = [{n for slot, n in p.read.items() if is_of_child(slot)} for p in programs]
    if any(of_layers) and not of_layers[0] & of_layers[1]:
        raise LossNotMoved("nothing that a layer returned is read in both runs")
    alone = [
        {
            ref.slot: first[k].run.records[ref.record]
            for ref in programs[k].refs
            if ref.slot in read[k] - read[1 - k] - unread[1 - k]
        }
        for k in (0, 1)
    ]
    names = _names(alone[0], alone[1])
    return (
        LossPlace(losses[0], lone[0], _inputs(models[1]), names[0], frozenset(unread[0])),
        LossPlace(losses[1], lone[1], _inputs(models[0]), names[1], frozenset(unread[1])),
    )


def _names(
    alone: Mapping[str, Record], alone_target: Mapping[str, Record]
) -> tuple[dict[str, str], dict[str, str]]:
    """(names for the reference, names for the target): common names for inputs that the runs name
    differently, mostly labels. Inputs are matched in order, first by equal elements, then by equal
    dtype and shape, then by dtype and number of axes.
    """
    renamed: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for is_equal in (_has_same_elements, _has_same_form, _has_same_kind):
        for slot, record in alone.items():
            if slot in renamed[0]:
                continue
            partner = next(
                (s for s, r in alone_target.items() if s not in renamed[1] and is_equal(record, r)),
                "",
            )
            if partner:
                inside = slot if not slot.startswith("input.loss.") else partner
                renamed[0][slot] = renamed[1][partner] = inside
    return renamed


def _has_same_elements(a: Record, b: Record) -> bool:
    return bool(a.hash) and a.hash == b.hash and _has_same_form(a, b)


def _has_same_form(a: Record, b: Record) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _has_same_kind(a: Record, b: Record) -> bool:
    """Whether dtype and number of axes agree. Extents may differ: a rank may hold a part of the
    rows that the other run holds whole.
    """
    return (a.dtype, len(a.shape)) == (b.dtype, len(b.shape))


def moved(training: TrainingCalls, places: Mapping[str, LossPlace]) -> Run:
    """The run with the losses at these places, by root, as one call each. Raises LossNotMoved."""
    run = training.run
    replaced: dict[int, Call | None] = {}
    behind: dict[int, Call] = {}  # new calls, by the id of the call that they follow
    programs = dict(run.programs)
    for root, calls in models_of(run).items():
        if root not in places:
            continue
        place = places[root]
        for model in calls:
            trained = training.trained(model, place.losses, place.lone)
            loss = loss_program(trained).renamed(place.names).shown(trained, place.unread)
            programs[loss.program.id] = loss.program
            call = _loss_call(trained, loss, training.last_order(model))
            if trained.loss is None:
                behind[model.id] = call
            else:
                replaced[call.id] = call
            if place.losses:
                replaced[model.id], program = without_loss(trained, loss, place.others_inputs)
                programs[program.id] = program
                replaced.update({trained.children[k].id: None for k in trained.lone})
            gradients = loss_gradients(trained, loss)
            if gradients is not None:
                programs.update({program.id: program for program in gradients.programs})
                replaced.update(gradients.replaced)
    return LossApart(run, _numbered(run, replaced, behind), programs, places)


def _loss_call(trained: TrainedCall, loss: LossProgram, last_order: int) -> Call:
    """The call of a loss; a new call behind the model if the run has none."""
    model = trained.model
    call = trained.loss
    if call is None:
        call = Call(
            _NEW,
            "",
            model.root,
            model.step,
            last_order + 2,
            rank=model.rank,
            micro=model.micro,
            op=LOSS,
            occurrence=model.occurrence,
            op_type=LOSS,
            number=f"{_REGION}_{LOSS}",
            leaf=True,
            training=True,
        )
    written = {s: p for s, p in call.placements.items() if is_output(s)}
    return msgspec.structs.replace(
        call,
        refs=loss.refs,
        placements={**loss.placements, **written},
        program=loss.program.id,
        no_program="",
    )


def _region(loss: Call) -> Call:
    """The region around a new call of a loss: code that belongs to no module, as in a capture."""
    return msgspec.structs.replace(
        loss,
        order=loss.order - 1,
        op=_REGION,
        kind=_REGION,
        op_type=_REGION,
        number=_REGION,
        leaf=False,
        training=False,
        refs=(),
        placements={},
        program="",
    )


def _numbered(
    run: Run, replaced: Mapping[int, Call | None], behind: Mapping[int, Call]
) -> list[Call]:
    """All calls, renumbered by position. replaced: new calls by id, None for a call to remove.
    behind: new losses, by the id of the call that they follow.
    """
    remaining: list[Call] = []
    number: dict[int, int] = {}
    losses: list[int] = []
    for call in run.calls:
        kept = replaced.get(call.id, call)
        if kept is not None:
            number[call.id] = len(remaining)
            remaining.append(kept)
        if (loss := behind.get(call.id)) is not None:
            losses.append(len(remaining))
            remaining += [loss, _region(loss)]
    calls = [
        msgspec.structs.replace(call, id=place, parent=number.get(call.parent, -1))
        for place, call in enumerate(remaining)
    ]
    for place in losses:
        calls[place] = msgspec.structs.replace(calls[place], parent=place + 1)
    return calls


def spaced(run: Run) -> Run:
    """The run with execution order spread out, so that two calls fit between any two."""
    spaced = Over(
        run,
        [
            msgspec.structs.replace(
                call,
                order=_SPACE * call.order,
                forward=_SPACE * call.forward if call.forward >= 0 else -1,
            )
            for call in run.calls
        ],
    )
    spaced.collectives = [
        msgspec.structs.replace(each, order=_SPACE * each.order) for each in spaced.collectives
    ]
    return spaced


# The backward pass of a loss, as one call with one program.

_GIVEN, _MADE = "input.grad.", "output.grad."


@dataclass(frozen=True)
class LossGradients:
    """The new calls of a loss's backward pass.

    replaced: by id, the call in the place of an old one; None for a call to remove. programs: the
    new programs of these calls.
    """

    replaced: Mapping[int, Call | None]
    programs: Sequence[Program]


def loss_gradients(trained: TrainedCall, loss: LossProgram) -> LossGradients | None:
    """The new calls of the loss's backward pass; None if the micro-batch has no backward pass.
    Raises LossNotMoved.
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
        """The slots in which a part of the model's backward pass gets a gradient from the loss."""
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
        """The gradient from which the backward pass of the model starts. Raises LossNotMoved."""
        slot = f"{_GIVEN}{output}"
        for part in parts:
            for ref in part.refs:
                if ref.slot == slot:
                    return ref
        raise LossNotMoved(f"the gradient of {output} was not captured")

    # ---- parts of the model's backward pass

    def _rest(self, part: Call) -> Call | None:
        """A part of the model's backward pass without the gradients that come from the loss alone;
        None if nothing is left. Notes the removed gradients for the loss's own backward call.
        Raises LossNotMoved.
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
        """A backward part that computes fewer gradients. given: (result of the forward pass, its
        gradient); kept: (slot of a computed gradient, the operand that it is the gradient of).
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
        """Note the gradients of tensors that only the code behind the model reads."""
        for ref in backward.refs:
            if not ref.slot.startswith(_MADE):
                continue
            here = self._loss.own.get(ref.slot.removeprefix(_MADE))
            if here is not None:
                self._made[here] = ref, backward.placements.get(ref.slot)

    def _as_one(self, first: Call, given: Mapping[str, Ref]) -> LossGradients:
        """The loss's backward pass as one call, which replaces `first`. Raises LossNotMoved."""
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
