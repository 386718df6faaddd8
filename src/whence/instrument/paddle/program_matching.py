"""Finds the operator of a predictor's program that belongs to the hooks' data, and adds what hooks
do not show.
"""

from __future__ import annotations

from typing import Any

from whence.frameworks.paddle_programs import Matched, Program
from whence.instrument.paddle.call_forms import OperatorFrame
from whence.instrument.paddle.run_tensors import RunTensors
from whence.instrument.paddle.tensor_identity import Unshown
from whence.instrument.session import Origin


class ProgramMatching:
    """Matches running operators with a program, once for each form of a call.

    unshown: constants that no hook shows.
    """

    def __init__(self, tensors: RunTensors, unshown: Unshown) -> None:
        self._tensors, self._unshown = tensors, unshown
        self._matches: dict[tuple[Any, ...], tuple[Any, Matched | None, int, tuple[str, ...]]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the run."""
        self._ran: dict[int, OperatorFrame] = {}

    def frame_of(self, operator: Any) -> OperatorFrame | None:
        """The call of an operator in this run, None for one that did not run."""
        return self._ran.get(id(operator)) if operator is not None else None

    def match(self, frame: OperatorFrame, program: Program) -> None:
        """Find the operator of a frame in the program."""
        assert frame.parent is not None
        block = frame.parent.operator if frame.parent.parent is not None else None
        if frame.operator is not None or (
            frame.parent.parent is not None and block is None and not program.named
        ):
            return
        key = (id(block), frame.parent.branch)
        names = (
            (frame.op, *key) if frame.block else (frame.op, *key, *frame.outputs, "", *frame.inputs)
        )
        match = self._matches.get(names)
        if match is None:
            match = self._matches[names] = self._look_up(frame, program, block, key)
        frame.operator, frame.matched, frame.listed, constants = match
        for name in constants:
            frame.params[name] = self._constant(name, frame)
        if frame.operator is not None:
            self._ran[id(frame.operator)] = frame
        elif not frame.block:
            program.moved(list(frame.inputs), list(frame.outputs))

    def _look_up(
        self, frame: OperatorFrame, program: Program, block: Any, key: tuple[int, int | None]
    ) -> tuple[Any, Matched | None, int, tuple[str, ...]]:
        params, read = (None, ()) if frame.block else (frame.params, frame.inputs)
        op = program.operator(
            block,
            key,
            frame.op_type,
            params,
            list(frame.outputs),
            inputs=read,
            folded=self._tensors.folds,
        )
        matched = (
            program.matched(op, list(frame.inputs), list(frame.outputs))
            if op is not None and not frame.block
            else None
        )
        weights, folded = self._unshown
        constants = (
            tuple(name for name in program.held(op) if name in weights or name in folded)
            if op is not None
            else ()
        )
        return op, matched, program.listed(op) if op is not None else 0, constants

    def _constant(self, name: str, frame: OperatorFrame) -> tuple[int, str]:
        if not frame.selected:
            return -1, ""
        weights, folded = self._unshown
        if name in folded:
            return folded[name]
        origin = Origin(frame.op_type, f"param.{self._tensors.plain(name)}", frame.op_type)
        record_and_edge = self._tensors.tensors.from_file(weights.pop(name), name, origin)
        folded[name] = record_and_edge[0], "content"
        return record_and_edge

    def earlier(self, name: str, maker: Any) -> tuple[int, str] | None:
        """(record, edge) of an operand that no hook showed for this call, None if unknown."""
        if name in self._tensors.named:
            return self._tensors.named[name][0], "content"
        producer = self.frame_of(maker)
        return (
            (next(iter(producer.outputs.values()))[0], "content")
            if producer is not None and len(producer.outputs) == 1
            else None
        )
