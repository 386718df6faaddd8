"""What a predictor runs, as its hooks show it: inputs and outputs one by one, in no order, made
into calls with their data flow.

A call ends when the next operator begins. What hooks do not show (attributes, the order of
operands, members of lists) is taken from the program after its passes.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from whence.frameworks import paddle_arrays as tensors
from whence.frameworks.paddle_programs import UNKNOWN
from whence.instrument.paddle.call_forms import OperatorFrame
from whence.instrument.paddle.ended_operators import NO_PROGRAM, EndedOperators, OperatorSelection
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.program_matching import ProgramMatching
from whence.instrument.paddle.run_tensors import RunTensors, of_array
from whence.instrument.paddle.saved_programs import NameTable, PredictorRoot, PredictorSource
from whence.instrument.paddle.tensor_identity import FindExternal, Unshown, look
from whence.instrument.session import Origin, Session
from whence.records import Call, Ref
from whence.records.marks import Mark

_HANDED_ON = ("yield", "builtin_combine", "feed", "fetch")  # what is no operator of a program
# in the names of what is not saved with the weights: scratch of an operator, of any content
_SCRATCH = "__non_persistable"


class PredictorRun:
    """One predictor, and its run in progress."""

    def __init__(
        self,
        session: Session,
        words: NameTable,
        predictor: Any,
        root: PredictorRoot,
        source: PredictorSource,
        find: FindExternal | None,
        changes: Interventions | None,
    ) -> None:
        self.session, self.root, self.source, self.changes = session, root, source, changes
        self.words, self.program = words, source.described
        self.feeds = list(predictor.get_input_names())
        self.fetches = list(predictor.get_output_names())
        self._tensors = RunTensors(session, find, words.name, self.feeds, self.program)
        self._matching = ProgramMatching(self._tensors, source.unshown or Unshown({}, {}))
        self.interrupted: BaseException | None = None
        self._types: dict[str, str] = {}
        self._selection = OperatorSelection(session, root)
        self._ended = EndedOperators(
            session, root, self._tensors, self._matching, self._selection, self.fetches
        )
        self._stack: list[OperatorFrame] = []
        self._takes_inputs, self._takes_outputs = (
            session.selector.slots("input"),
            session.selector.slots("output"),
        )
        self._clear()

    def _clear(self) -> None:
        self._stack.clear()
        self._tensors.clear()
        self._matching.clear()
        self._ended.clear()
        self._patched: Counter[str] = Counter()

    # ---- a run

    def begin(self, predictor: Any, arguments: Any) -> None:
        """The predictor is run. arguments: the list of tensors it was given, None when handles hold
        them.
        """
        session = self.session
        self._clear()
        self._tensors.begin()
        session.begin_step(self.root.name)
        top = OperatorFrame("", "Predictor", session.next_order(), None)
        top.root, top.step, top.counts = self.root, self.root.steps, {}
        self._stack.append(top)
        session.over_budget("", self.root.steps)
        top.keep = session.elements_on
        top.selected = self._selection.wants(top)
        if not top.selected or not self._takes_inputs:
            return
        for place, name in enumerate(self.feeds):
            if isinstance(arguments, (list, tuple)):
                if place < len(arguments) and tensors.is_tensor(arguments[place]):
                    seen_input, value = look(arguments[place]), arguments[place]
                else:
                    continue
            else:
                try:
                    value = tensors.of_handle(predictor.get_input_handle(name))
                except Exception:  # noqa: BLE001 - one that was not filled: Paddle will say so itself
                    continue
                seen_input = of_array(value)
            top.inputs[name] = self._tensors.take(value, seen_input, name, f"input.{name}", "", top)

    def end(self, predictor: Any, out: Any, error: str) -> None:
        """The predictor has run, or raised."""
        if not self._stack:
            return
        session, top = self.session, self._stack[0]
        self._finish_above(top)
        self._ended.emit(everything=True)
        if top.selected and not error and self._takes_outputs:
            for place, name in enumerate(self.fetches):
                named = self._tensors.named.get(name)
                if named is not None and named[0] >= 0:
                    top.outputs[name] = (named[0], "content")
                elif (
                    isinstance(out, (list, tuple))
                    and place < len(out)
                    and tensors.is_tensor(out[place])
                ):
                    top.outputs[name] = self._tensors.take(
                        out[place], look(out[place]), name, f"output.{name}", "", top
                    )
                else:
                    top.outputs[name] = self._tensors.fetched(predictor, name, top)
        refs = [
            Ref(f"input.{n}", *record_and_edge) for n, record_and_edge in top.inputs.items()
        ] + [Ref(f"output.{n}", *record_and_edge) for n, record_and_edge in top.outputs.items()]
        session.call(
            Call(
                top.order,
                "",
                self.root.name,
                self.root.steps,
                top.order,
                rank=session.rank,
                op_type="Predictor",
                leaf=not top.children,
                source=os.path.basename(self.root.file),  # noqa: PTH119
                refs=tuple(refs),
                no_program=NO_PROGRAM,
                error=error,
                notes=() if top.selected else (Mark.NOT_SELECTED.value,),
            )
        )
        session.end_step(self.root.name, self.root.steps)
        self.root.steps += 1
        self._clear()

    # ---- what hooks show

    def reads(self, op: str, name: str, tensor: Any) -> None:
        """An input of the operator that runs next."""
        if not self._stack:
            return
        top = self._stack[-1]
        if (
            top.op != op
            or top.outputs
            or name in top.inputs
            or name in top.params
            or top.parent is None
        ):
            top = self._enter(op)
        if top.op_type in _HANDED_ON or _SCRATCH in name:
            return
        if top.op_type == "if":
            _decided(top, tensor)
        if not top.selected or not self._takes_inputs:
            if self._tensors.is_parameter(name):
                top.params[name] = (-1, "")
            elif name not in top.inputs:
                top.inputs[name] = (-1, "")
            return
        if self._tensors.is_parameter(name):
            unchanged = self._tensors.tensors.unchanged(tensor, name)
            # What a constant is called changes from process to process.
            top.params[name] = unchanged or self._tensors.tensors.parameter(
                tensor, name, Origin(top.op_type, f"param.{self._tensors.plain(name)}", top.op_type)
            )
            return
        waits = not self.session.takes_all and not self._selection.is_known(top)
        top.inputs[name] = self._tensors.read(name, tensor, top, waits=waits)

    def wrote(self, op: str, name: str, tensor: Any) -> None:
        """An output of the operator that ran."""
        if not self._stack or _SCRATCH in name:
            return
        top = self._stack[-1]
        if (
            top.op != op
            or top.parent is None
            or name in top.outputs
            or (top.outputs and not top.inputs and not top.params and ":" not in op)
        ):
            above = next(
                (
                    f
                    for f in reversed(self._stack)
                    if f.op == op and f.parent is not None and f.block
                ),
                None,
            )
            if above is not None and above is not top:
                self._finish_above(above)
                top = above
            else:
                top = self._enter(op)
        plain = self._tensors.plain(name)
        changes = self.changes
        if changes is not None:
            note = changes.operator_wrote(
                self.root.name,
                self.root.steps,
                top.number,
                top.op_type,
                plain,
                self._patched[plain],
                tensor,
            )
            self._patched[plain] += 1
            if note and note not in top.notes:
                top.notes.append(note)
        if name in top.params:
            self._tensors.rewrote(name, tensor, top)
            return
        if (
            top.selected
            and not self.session.takes_all
            and not self._selection.is_known(top)
            and not top.outputs
        ):
            top.selected = self._selection.wants(top, plain) or (
                self.program is not None and bool(self.session.options.include)
            )
        if not top.selected or not self._takes_outputs:
            top.outputs[name] = (-1, "")
            self._tensors.skip(name)
            return
        top.outputs[name] = self._tensors.take(
            tensor, look(tensor), name, "output.0", plain, top, since=top.order
        )

    # ---- operators

    def _enter(self, op: str) -> OperatorFrame:
        top = self._stack[-1]
        while top.parent is not None and not (top.block and not top.outputs):
            self._leave()
            top = self._stack[-1]
        op_type = self._types.get(op)
        if op_type is None:
            op_type = self._types[op] = self.words.op_type(op)
        if top.parent is not None and top.operator is None and self.program is not None:
            self._matching.match(top, self.program)  # what runs in its block is looked for in there
        session = self.session
        frame = OperatorFrame(op, op_type, session.next_order(), top)
        if not session.takes_all:
            frame.selected = self._selection.wants_next(frame)
        session.over_budget(op_type, self.root.steps)
        frame.keep = session.elements_on
        self._stack.append(frame)
        return frame

    def _finish_above(self, frame: OperatorFrame) -> None:
        while self._stack and self._stack[-1] is not frame:
            self._leave()

    def _leave(self) -> None:
        """The innermost operator has run: match it with the program, and hand it on when nothing
        before it waits for a tensor.
        """
        frame = self._stack.pop()
        if frame.op_type in _HANDED_ON:
            if frame.parent is not None:
                frame.parent.children -= 1
            return
        if self.program is not None:
            self._matching.match(frame, self.program)
            if frame.block and frame.operator is not None:
                self.program.wrote(frame.operator, list(frame.outputs))
        self._ended.add(frame)


def _decided(frame: OperatorFrame, tensor: Any) -> None:
    """Note which block of an `if` runs, from its condition; where it reads several such tensors,
    nobody knows which.
    """
    sight = look(tensor)
    if sight.dtype == "bool" and sight.nbytes == 1:
        frame.branch = int(not tensor.numpy().item()) if frame.branch is None else UNKNOWN
