"""The operators of a predictor that have run: which of them are wanted, and when each is
written.
"""

from __future__ import annotations

from typing import Any

from whence.instrument.call_frames import count
from whence.instrument.engines.watched import ModelRoot
from whence.instrument.paddle.call_forms import CallForm, OperatorFrame, form_of, refs_of
from whence.instrument.paddle.program_matching import ProgramMatching
from whence.instrument.paddle.run_tensors import RunTensors
from whence.instrument.session import Session
from whence.instrument.step_choice.windows import holds
from whence.records import Call
from whence.records.marks import Mark

NO_PROGRAM = "operators of Paddle are not recorded as programs"


class OperatorSelection:
    """Selects operators of a predictor. The scope of an operator is known once it has run."""

    def __init__(self, session: Session, root: ModelRoot) -> None:
        self._session, self._root = session, root
        self._scopes: dict[tuple[Any, ...], tuple[str, str]] = {}

    def is_known(self, frame: OperatorFrame) -> bool:
        """Whether this operator has run before."""
        return self._key(frame) in self._scopes

    def learn(self, frame: OperatorFrame, scope: str, layer: str) -> None:
        """Remember the scope of an operator that has run, and the layer it was written in."""
        self._scopes.setdefault(self._key(frame), (scope, layer))

    def wants_next(self, frame: OperatorFrame) -> bool:
        """Whether an operator that begins now is wanted."""
        return self.wants(frame, *self._scopes.get(self._key(frame), ("", "")))

    def wants(self, frame: OperatorFrame, scope: str = "", layer: str = "") -> bool:
        """Whether this call is selected, by its name or by that of the layer it was written in.
        True for a nested one whose name is not known yet.
        """
        session, step = self._session, self._root.steps
        if session.takes_all:
            return True
        if not holds(session.options.ranges, step):
            return False
        if not scope and frame.parent is not None:
            return True
        names = (scope, layer) if layer else (scope,)
        return any(
            session.selector.wants(name, frame.op_type, frame.depth, frame.number, step)
            for name in names
        )

    @staticmethod
    def _key(frame: OperatorFrame) -> tuple[Any, ...]:
        above = frame.parent
        return (
            frame.op,
            frame.number if ":" not in frame.op else "",
            above.op if above is not None else "",
        )


class EndedOperators:
    """Operators that have run, in order. One is written when no earlier one waits for a tensor."""

    def __init__(
        self,
        session: Session,
        root: ModelRoot,
        tensors: RunTensors,
        matching: ProgramMatching,
        selection: OperatorSelection,
        fetches: list[str],
    ) -> None:
        self._session, self._root, self._tensors = session, root, tensors
        self._matching, self._selection, self._fetches = matching, selection, fetches
        self._forms: dict[tuple[Any, ...], CallForm] = {}
        self._ended: list[OperatorFrame] = []

    def clear(self) -> None:
        """Forget the run."""
        self._ended.clear()

    def add(self, frame: OperatorFrame) -> None:
        """Add an operator that has run."""
        self._claim(frame)
        self._ended.append(frame)
        self.emit()

    def _claim(self, frame: OperatorFrame) -> None:
        """Assign inputs that no hook showed as an output to the operator that made the list holding
        them: hooks do not show lists.
        """
        for name, (record, edge) in frame.inputs.items():
            if record < 0 or edge or name in self._tensors.feeds:
                continue
            if frame.matched is not None:
                maker = self._matching.frame_of(frame.matched.owners.get(name))
            else:
                waiting = [f for f in self._ended if not f.outputs]
                maker = waiting[0] if len(waiting) == 1 else None
            if maker is not None and maker is not frame and maker in self._ended:
                maker.outputs[name] = (record, "")

    def emit(self, *, everything: bool = False) -> None:
        """Write the calls that wait for nothing any more."""
        ready = 0
        for frame in self._ended:
            if not everything and (not frame.outputs or len(frame.outputs) < frame.listed):
                break
            self._call(frame)
            ready += 1
        del self._ended[:ready]

    def _call(self, frame: OperatorFrame) -> None:
        session = self._session
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
            form = self._forms[key] = form_of(frame, self._fetches, self._tensors.plain)
        scope = form.scope
        if not session.takes_all:
            self._selection.learn(frame, scope, form.layer)
            if frame.selected:
                frame.selected = self._selection.wants(frame, scope, form.layer)
                if frame.selected:
                    self._tensors.take_later(frame)
        notes = form.notes if not frame.notes else (*frame.notes, *form.notes)
        session.call(
            Call(
                frame.order,
                scope,
                self._root.name,
                self._root.steps,
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
