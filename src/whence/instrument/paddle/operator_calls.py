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
from whence.instrument.call_frames import Root, count
from whence.instrument.paddle.call_forms import CallForm, OperatorFrame, form_of, refs_of
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.program_matching import ProgramMatching
from whence.instrument.paddle.run_tensors import RunTensors, of_array
from whence.instrument.paddle.saved_programs import NameTable, PredictorSource
from whence.instrument.paddle.tensor_identity import FindExternal, Unshown, look
from whence.instrument.session import Origin, Session
from whence.records import Call, Ref
from whence.records.marks import Mark

NO_PROGRAM = "operators of Paddle are not recorded as programs"

_HANDED_ON = ("yield", "builtin_combine", "feed", "fetch")  # what is no operator of a program
# in the names of what is not saved with the weights: scratch of an operator, of any content
_SCRATCH = "__non_persistable"


class PredictorRoot(Root):
    """A name under which runs of a predictor count their steps; one made anew from the same file
    continues the root of the one before.
    """

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name, lambda: None)
        self.file, self.steps = file, 0


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
        self._scopes: dict[tuple[Any, ...], tuple[str, str]] = {}
        self._forms: dict[tuple[Any, ...], CallForm] = {}
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
        self._ended: list[OperatorFrame] = []
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
        top.selected = self._wants("", "", top)
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
        self._emit(everything=True)
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
            origin = Origin(top.op_type, f"param.{self._tensors.plain(name)}", top.op_type)
            top.params[name] = unchanged or self._tensors.tensors.parameter(tensor, name, origin)
            return
        waits = not self.session.takes_all and self._key(top) not in self._scopes
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
            and self._key(top) not in self._scopes
            and not top.outputs
        ):
            top.selected = self._wants(plain, "", top) or (
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
            frame.selected = self._wants(*self._scopes.get(self._key(frame), ("", "")), frame)
        session.over_budget(op_type, self.root.steps)
        frame.keep = session.elements_on
        self._stack.append(frame)
        return frame

    def _key(self, frame: OperatorFrame) -> tuple[Any, ...]:
        above = frame.parent
        return (
            frame.op,
            frame.number if ":" not in frame.op else "",
            above.op if above is not None else "",
        )

    def _wants(self, scope: str, layer: str, frame: OperatorFrame) -> bool:
        """Was this call asked for, by its name or by that of the layer it was written in? One
        without a name yet: perhaps.
        """
        session, step = self.session, self.root.steps
        if session.takes_all:
            return True
        start, stop = session.options.steps or (0, None)
        if step < start or (stop is not None and step >= stop):
            return False
        if not scope and frame.parent is not None:
            return True
        names = (scope, layer) if layer else (scope,)
        return any(
            session.selector.wants(name, frame.op_type, frame.depth, frame.number, step)
            for name in names
        )

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
        self._claim(frame)
        self._ended.append(frame)
        self._emit()

    def _claim(self, frame: OperatorFrame) -> None:
        """Tensors that no hook showed as somebody's output, because lists are not shown: they are
        of the operator that made the list.
        """
        for name, (record, edge) in frame.inputs.items():
            if record < 0 or edge or name in self.feeds:
                continue
            if frame.matched is not None:
                maker = self._matching.frame_of(frame.matched.owners.get(name))
            else:
                waiting = [f for f in self._ended if not f.outputs]
                maker = waiting[0] if len(waiting) == 1 else None
            if maker is not None and maker is not frame and maker in self._ended:
                maker.outputs[name] = (record, "")

    def _emit(self, *, everything: bool = False) -> None:
        ready = 0
        for frame in self._ended:
            if not everything and (not frame.outputs or len(frame.outputs) < frame.listed):
                break
            self._call(frame)
            ready += 1
        del self._ended[:ready]

    def _call(self, frame: OperatorFrame) -> None:
        session = self.session
        key = (
            frame.op,
            id(frame.operator),
            id(frame.matched),
            *frame.inputs,
            "",
            *frame.outputs,
            "",
            *frame.params,
        )
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = form_of(frame, self.fetches, self._tensors.plain)
        scope = form.scope
        if not session.takes_all:
            self._scopes.setdefault(self._key(frame), (scope, form.layer))
            if frame.selected:
                frame.selected = self._wants(scope, form.layer, frame)
                if frame.selected:
                    self._tensors.take_later(frame)
        notes = form.notes if not frame.notes else (*frame.notes, *form.notes)
        session.call(
            Call(
                frame.order,
                scope,
                self.root.name,
                self.root.steps,
                frame.order,
                rank=session.rank,
                occurrence=count(frame.counts, scope),
                kind="operator",
                op_type=frame.op_type,
                source=form.source,
                parent=frame.parent.order if frame.parent is not None else -1,
                number=frame.number,
                leaf=not frame.children,
                refs=tuple(refs_of(frame, form, self._matching.earlier)) if frame.selected else (),
                arguments=form.arguments,
                no_program=NO_PROGRAM,
                notes=notes if frame.selected else (Mark.NOT_SELECTED.value,),
            )
        )


def _decided(frame: OperatorFrame, tensor: Any) -> None:
    """Note which block of an `if` runs, from its condition; where it reads several such tensors,
    nobody knows which.
    """
    sight = look(tensor)
    if sight.dtype == "bool" and sight.nbytes == 1:
        frame.branch = int(not tensor.numpy().item()) if frame.branch is None else UNKNOWN
