"""Programs of `gradients` (docs/training.md) with the operations of a loss scaler taken out.

Two runs may take a loss's scale out of gradients in other places: one has no scaler, another
unscales before clipping, a third leaves it to a fused step. What they do beside that is the same
where the remaining operations are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from whence.records import Call, Operation, Program, Run
from whence.records.program import identified, map_operands
from whence.records.slots import FOUND_INF, GRAD_SCALE, INVERSE_SCALE, is_of_loss_scaler

_MULTIPLY, _DIVIDE = ("aten.mul.Tensor", "aten.mul_.Tensor"), "aten.div.Tensor"
_EXCEEDS, _CHOOSE = "aten.gt.Scalar", "aten.where.self"

OperandKey = tuple[str, Any]
"""An operand as it can be looked up."""


def scaler_settings(run: Run, call: Call) -> dict[str, float]:
    """What the loss scaler of a call of `gradients` is set to, by slot. Raises ElementsMissing."""
    return {
        ref.slot: float(run.array(ref.record).reshape(-1)[0])
        for ref in call.refs
        if is_of_loss_scaler(ref.slot)
    }


def without_scaler(program: Program, settings: Mapping[str, float]) -> Program | None:
    """The program without the operations of a loss scaler; itself where it has none.

    settings: what the scaler's inputs hold, by slot. None where the scale is not the first thing
    that is taken out (gradients are clipped while they are scaled), where an operation reads a
    gradient both with its scale and without, or where the step is skipped.
    """
    if not any(map(is_of_loss_scaler, program.inputs)):
        return program
    if settings.get(FOUND_INF, 0.0):
        return None
    return _Removal(program, settings).result()


class _Stage(NamedTuple):
    """A gradient on its way through a scaler: input `number`, times `factor`."""

    number: int
    factor: float


class _Removal:
    def __init__(self, program: Program, settings: Mapping[str, float]) -> None:
        self._program, self._settings = program, settings
        self._gradients = [k for k, s in enumerate(program.inputs) if not is_of_loss_scaler(s)]
        self._stages: dict[OperandKey, _Stage] = {
            ("in", k): _Stage(k, 1.0) for k in self._gradients
        }
        self._flags: set[OperandKey] = set()

    def result(self) -> Program | None:
        kept = [
            (number, operation)
            for number, operation in enumerate(self._program.operations)
            if not self._is_of_scaler(number, operation)
        ]
        factors: dict[int, float] = {}
        for key in self._read(kept):
            stage = self._stages.get(key)
            if stage is None and (key in self._flags or is_of_loss_scaler(self._slot(key))):
                return None
            if stage is not None and factors.setdefault(stage.number, stage.factor) != stage.factor:
                return None
        return self._without(kept)

    def _is_of_scaler(self, number: int, operation: Operation) -> bool:
        """Does this operation only change the scale of a gradient? Notes what it makes."""
        keys = [operand_key(value) for value in operation.args]
        here: OperandKey = ("op", (number, 0))
        if operation.name in (*_MULTIPLY, _DIVIDE) and len(keys) == 2:
            slot = INVERSE_SCALE if operation.name in _MULTIPLY else GRAD_SCALE
            stage = self._stages.get(keys[0])
            if stage is None or self._slot(keys[1]) != slot:
                return False
            power = 1 if slot == INVERSE_SCALE else -1
            self._stages[here] = _Stage(stage.number, stage.factor * self._settings[slot] ** power)
            return True
        if operation.name == _EXCEEDS and self._slot(keys[0]) == FOUND_INF:
            self._flags.add(here)
            return True
        if operation.name == _CHOOSE and keys[0] in self._flags and keys[2] in self._stages:
            self._stages[here] = self._stages[keys[2]]
            return True
        return False

    def _slot(self, key: OperandKey) -> str:
        return self._program.inputs[key[1]] if key[0] == "in" else ""

    def _read(self, kept: list[tuple[int, Operation]]) -> Iterator[OperandKey]:
        """What the operations that stay, and the outputs, read."""
        for _, operation in kept:
            for operand in operation.operands():
                yield operand_key({operand.kind: operand.value})
        for _, value in self._program.outputs:
            yield operand_key(value)

    def _without(self, kept: list[tuple[int, Operation]]) -> Program:
        places = {old: new for new, (old, _) in enumerate(kept)}
        numbers = {old: new for new, old in enumerate(self._gradients)}

        def moved(kind: str, value: Any) -> Any:
            stage = self._stages.get(operand_key({kind: value}))
            if stage is not None:
                return {"in": numbers[stage.number]}
            return {kind: [places[value[0]], value[1]] if kind == "op" else value}

        program = self._program
        return identified(
            msgspec.structs.replace(
                program,
                id="",
                operations=tuple(operation.with_operands(moved) for _, operation in kept),
                inputs=tuple(program.inputs[k] for k in self._gradients),
                input_dtypes=tuple(program.input_dtypes[k] for k in self._gradients),
                outputs=tuple((s, map_operands(moved, value)) for s, value in program.outputs),
            )
        )


def operand_key(value: Any) -> OperandKey:
    """An input of a program or the result of an operation, as it can be looked up; ("", None) for
    anything else.
    """
    kind = next(iter(value), "") if isinstance(value, dict) else ""
    if kind not in ("in", "op"):
        return "", None
    return kind, tuple(value[kind]) if kind == "op" else value[kind]
