"""The code of a program that works on gradients between a backward pass and the optimiser's step:
gradients divided by the number of micro-batches there, a clipping of its own, weight decay by hand.

Its operators are recorded as those of a loss are, but only those that use a gradient or what was
made of one: the rest of a training loop (logging, moving averages) runs there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whence.frameworks.torch_arrays import tensors_in
from whence.instrument.torch.list_operators import one_by_one
from whence.instrument.torch.operator_listener import OperatorListener
from whence.instrument.torch.program_recorder import Recorder
from whence.instrument.torch.training.gradient_arithmetic import Change, Operand, Run
from whence.records import Program
from whence.records.program import map_operands

_MOST_OPERATORS = 20_000
"""So many operators are recorded: some for each parameter."""
_FOLLOWED = {"in", "op", "dtype", "device", "layout", "memory_format", "float", "complex"}
"""Arguments of operators that stay what they are when their program becomes a part of another."""


class GradientProgram(NamedTuple):
    """What such code made of gradients.

    parameters: identities of those whose gradients it read or made. beside: slot and tensor of what
    it read of other kinds. change: the same as operations.
    """

    parameters: tuple[int, ...]
    beside: tuple[tuple[str, Any], ...]
    change: Change


class GradientCode(OperatorListener):
    """Records what runs inside its `with` block as far as it works on the gradients of these
    parameters.

    beside: gives the slot of a tensor of another kind that such code may read, "" for one that is
    not known. is_lost: could what it did not be followed?
    """

    def __init__(self, parameters: Sequence[Any], beside: Callable[[Any], str]) -> None:
        super().__init__()
        self._parameters, self._beside = parameters, beside
        self._read: dict[str, Any] = {}
        self._recorder: Recorder | None = None
        self._took_number = self.is_lost = False

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        if self.over:
            return self.run(func, args, kwargs)
        if self._recorder is None:
            self._begin()
        recorder = self._recorder
        assert recorder is not None
        if not any(map(recorder.knows, tensors_in((args, kwargs)))):
            out = self.run(func, args, kwargs)
            self._took_number = self._took_number or isinstance(out, (bool, int, float))
            return out
        if self._took_number and any(isinstance(value, float) for value in args):
            # It may have been computed from the number, which is another in another run.
            recorder.give_up("works on gradients with a number that came out of a tensor")
        if parts := one_by_one(func, args, kwargs):
            return recorder.operator_as(lambda: self.run(func, args, kwargs), parts)
        return recorder.operator(func, args, kwargs)

    def _begin(self) -> None:
        """The first operator is about to run: gradients are still what they were."""
        gradients = [
            (f"input.{k}", parameter.grad)
            for k, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        self._recorder = Recorder(
            gradients,
            [],
            casts=False,
            find=self._find,
            most=_MOST_OPERATORS,
            watch_versions=False,
        )
        self._recorder.autocast = self.autocast

    def _find(self, tensor: Any) -> str:
        slot = self._beside(tensor)
        if slot:
            self._read.setdefault(slot, tensor)
        return slot

    def finish(self) -> GradientProgram | None:
        """What the code did, None where it did nothing to gradients or is lost."""
        recorder, self._recorder = self._recorder, None
        self.is_lost = self.over
        if recorder is None or self.over:
            return None
        self.over = True
        outputs = [
            (f"output.{k}", parameter.grad)
            for k, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        recording = recorder.finish(outputs)
        if recording.program is None:
            self.is_lost = True
            return None
        return self._program_of(recording.program)

    def _program_of(self, program: Program) -> GradientProgram | None:
        kinds = {o.kind for operation in program.operations for o in operation.operands()}
        if not kinds <= _FOLLOWED:
            self.is_lost = True
            return None
        places = {slot: place for place, slot in enumerate(program.inputs)}
        own = {f"input.{k}": k for k in range(len(self._parameters))}
        left = {f"output.{k}": k for k in own.values()}
        made = {
            left[slot]: operand
            for slot, operand in program.outputs
            if operand != {"in": places.get(f"input.{left[slot]}")}
        }
        if not made:
            return None
        read = {own[slot] for slot in program.inputs if slot in own}
        numbers = sorted(made.keys() | read)
        order = {f"input.{k}": place for place, k in enumerate(numbers)}
        beside = tuple((slot, self._read[slot]) for slot in program.inputs if slot not in own)
        return GradientProgram(
            tuple(id(self._parameters[k]) for k in numbers),
            beside,
            _spliced(program, order, [slot for slot, _ in beside], [made.get(k) for k in numbers]),
        )


def _spliced(
    program: Program,
    gradients: Mapping[str, int],
    beside: Sequence[str],
    made: Sequence[Operand | None],
) -> Change:
    """A recorded program as a change. gradients: the place of each gradient that it reads, by slot;
    beside: slots of what it reads of other kinds; made: what becomes of each gradient, None where
    it stays.
    """

    def change(given: Sequence[Operand], run: Run, read: Sequence[Operand]) -> list[Operand]:
        ran: list[Operand] = []

        def renamed(kind: str, place: Any) -> Operand:
            if kind == "in":
                slot = program.inputs[place]
                at = gradients.get(slot)
                return read[beside.index(slot)] if at is None else given[at]
            if kind == "op":
                return {"op": [ran[place[0]]["op"][0], place[1]]}
            return {kind: place}

        for operation in program.operations:
            ran.append(run(operation.with_operands(renamed)))  # noqa: PERF401 - reads those before
        return [
            before if after is None else map_operands(renamed, after)
            for before, after in zip(given, made, strict=True)
        ]

    return change
