"""One session of the program: its facts, its steps, and the calls of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.instrument.call_frames import Root, count
from whence.instrument.onnxruntime.blocked_values import Convolution
from whence.instrument.onnxruntime.blocked_weights import plain_bias, plain_weight
from whence.instrument.onnxruntime.graph_plan import GraphPlan, NodeForm
from whence.instrument.onnxruntime.observer import Effect, Observer
from whence.instrument.onnxruntime.tensors import FindExternal, Taken, Tensors
from whence.instrument.onnxruntime.values import Seen, of_array, seen_values
from whence.instrument.session import Origin, Session
from whence.instrument.wording import counted, raised
from whence.records import Call, Ref
from whence.records.marks import OBSERVER, Mark
from whence.records.slots import is_input

NO_PROGRAM = "nodes of ONNX are not recorded as programs"
KIND = "InferenceSession"
_Shown = dict[str, list[tuple[str, Seen]]]


class SessionRoot(Root):
    """A root that is a session. model: its file, by which a session that is made anew is known."""

    def __init__(self, name: str, ref: Callable[[], Any], model: str) -> None:
        super().__init__(name, ref)
        self.model, self.steps = model, 0


class Inside(NamedTuple):
    """What is known of the graph that a session runs. initializer: its elements, by name; None
    where they cannot be read. find: where they lie in the user's file.
    """

    plan: GraphPlan
    observer: Observer
    initializer: Callable[[str], Any]
    find: FindExternal | None
    close: Callable[[], None]


class StepInProgress:
    """One run of a session, between its call and its return. records: of values of the graph, by
    name, with the digest of their bytes.
    """

    def __init__(self, order: int, step: int) -> None:
        self.order, self.step, self.keep, self.selected = order, step, False, True
        self.refs: list[Ref] = []
        self.taken: Taken = {}
        self.records: dict[str, tuple[int, bytes]] = {}
        self.feeds: dict[str, Any] = {}
        self.run_options: Any = None


class WatchedSession:
    """Records the runs of one session. inside: None where only inputs and outputs are taken."""

    def __init__(
        self, session: Session, tensors: Tensors, root: SessionRoot, python_session: Any
    ) -> None:
        self.session, self._tensors, self.root = session, tensors, root
        self.inside: Inside | None = None
        self._input_types = {v.name: str(v.type) for v in python_session.get_inputs()}
        self.output_names = [v.name for v in python_session.get_outputs()]
        # of the runtime itself: another one when the program changes providers
        self.native = python_session._sess
        self._parameters: dict[str, int] = {}
        self._told_changes, self._changed = False, 0

    # ---- a step

    def begin(self, feeds: Mapping[str, Any], run_options: Any) -> StepInProgress:
        """The session is run. feeds: values by name of the input; a list of (slot, `Seen`) is one
        that was bound.
        """
        session = self.session
        step = StepInProgress(session.next_order(), self.root.steps)
        self.root.steps += 1
        session.begin_step(self.root.name)
        session.over_budget("", step.step)
        step.keep, step.run_options = session.elements_on, run_options
        step.selected = session.takes_all or session.selector.wants("", KIND, 0, "0", step.step)
        for name, value in feeds.items():
            bound = isinstance(value, list) and bool(value) and isinstance(value[0], tuple)
            members = (
                value
                if bound
                else list(seen_values(value, f"input.{name}", self._input_types.get(name, "")))
            )
            if self._is_observed(step.step):
                step.feeds[name] = self._feed(value, members, bound)
            if step.selected and session.selector.slots("input"):
                for slot, seen in members:
                    self._take(step, name, slot, seen)
        return step

    def end(self, step: StepInProgress, results: Sequence[tuple[str, Any]], error: str) -> None:
        """The session has run, or raised. results: (name, value)."""
        session = self.session
        seen = {
            slot: value for name, v in results for slot, value in seen_values(v, name)
        }  # a member of a sequence by its place
        if step.selected and not error and session.selector.slots("output"):
            for slot, value in seen.items():
                self._take(step, slot, f"output.{slot}", value)
        calls = 0
        if not error and self._is_observed(step.step):
            calls = self._nodes(step, [name for name, _ in results], seen)
        session.call(
            Call(
                step.order,
                "",
                self.root.name,
                step.step,
                step.order,
                rank=session.rank,
                op_type=KIND,
                leaf=not calls,
                source=self.root.model,
                refs=tuple(step.refs),
                no_program=NO_PROGRAM,
                error=error,
                notes=() if step.selected else (Mark.NOT_SELECTED.value,),
            )
        )
        self._tensors.ended(self.root.name, step.taken)
        session.end_step(self.root.name, step.step)

    def close(self) -> None:
        """The session is gone, or nobody listens any more. Idempotent."""
        if self._changed and not self.session.failed:
            self.session.note(
                "observer",
                f"{OBSERVER}the results of {counted(self._changed, 'further step')} differ from "
                "those of the session alone",
                self.root.name,
            )
        self._changed = 0
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.close()

    # ---- inputs and results

    def _take(self, step: StepInProgress, name: str, slot: str, seen: Seen) -> None:
        origin = Origin("", slot, KIND, step.keep)
        take = self._tensors.given if is_input(slot) else self._tensors.returned
        record, edge, digest = take(step.taken, seen, origin)
        if record >= 0:
            step.refs.append(Ref(slot, record, edge))
            step.records[name] = record, digest

    @staticmethod
    def _feed(value: Any, members: list[tuple[str, Seen]], bound: bool) -> Any:
        """An input for the session beside, with memory of its own where a run may write it."""
        if not bound and not hasattr(value, "_ortvalue"):
            return value
        seen = members[0][1]
        return value if seen.why else seen.kept().array()

    # ---- nodes

    def _is_observed(self, step: int) -> bool:
        start, stop = self.session.options.steps or (0, None)
        return self.inside is not None and step >= start and (stop is None or step < stop)

    def _nodes(self, step: StepInProgress, names: Sequence[str], results: dict[str, Seen]) -> int:
        """Run the graph beside, and hand on a call of each node. Returns how many."""
        session, inside = self.session, self.inside
        assert inside is not None
        if session.selector.only is not None and step.step not in session.selector.only:
            return 0
        try:
            shown, effect = inside.observer.results(step.feeds, names, step.run_options, results)
        except Exception as error:  # noqa: BLE001 - what the runtime raises has many types
            text = f"the graph beside the session cannot be run: {raised(error)}"
            session.note("inside-not-seen", text, self.root.name, aloud=True)
            self.close()
            return 0
        self._tell(effect, step.step)
        counts: dict[str, int] = {}
        for place, form in enumerate(inside.plan.nodes, 1):
            self._node(step, form, place, shown, counts)
        inside.observer.measured()
        return len(inside.plan.nodes)

    def _tell(self, effect: Effect | None, step: int) -> None:
        if effect is None:
            return
        if self._told_changes:
            self._changed += 1
            return
        # of what comes after the first change only the number is told
        self._told_changes = not effect.text.startswith("none")
        self.session.note("observer", f"{OBSERVER}{effect.text}", self.root.name, step)
        if effect.unseen:
            listed = ", ".join(effect.unseen[:8]) + (" ..." if len(effect.unseen) > 8 else "")
            self.session.note("inside-not-seen", f"not shown: {listed}", self.root.name)

    def _node(
        self,
        step: StepInProgress,
        form: NodeForm,
        place: int,
        shown: _Shown,
        counts: dict[str, int],
    ) -> None:
        session, number = self.session, str(place)
        selected = session.takes_all or session.selector.wants(
            form.scope, form.op_type, 1, number, step.step
        )
        refs: list[Ref] = []
        if selected:
            session.over_budget(form.scope, step.step)
            origin = Origin(form.scope, "", form.op_type, session.elements_on)
            refs = self._refs(step, form, shown, origin)
        order = session.next_order()
        session.call(
            Call(
                order,
                form.scope,
                self.root.name,
                step.step,
                order,
                rank=session.rank,
                occurrence=count(counts, form.scope),
                kind="operator",
                op_type=form.op_type,
                source=form.source,
                parent=step.order,
                number=number,
                leaf=True,
                refs=tuple(refs),
                arguments=form.arguments,
                origins=form.origins,
                no_program=NO_PROGRAM,
                notes=form.notes if selected else (Mark.NOT_SELECTED.value,),
            )
        )

    def _refs(
        self, step: StepInProgress, form: NodeForm, shown: _Shown, origin: Origin
    ) -> list[Ref]:
        session, refs = self.session, []
        if session.selector.slots("input"):
            for slot, value in form.inputs:
                record, edge = self._value(step, value, slot, shown, origin, reads=True)
                refs += [Ref(slot, record, edge)] if record >= 0 else []
        for slot, name in form.params:
            made = shown.get(form.outputs[0][1]) if slot == form.shape else None
            if made and not made[0][1].why:
                record, edge = self._shape(name, made[0][1].shape, slot, origin)
            else:
                record, edge = self._parameter(name, slot, origin, form.convolution, shown)
            refs += [Ref(slot, record, edge)] if record >= 0 else []
        if session.selector.slots("output"):
            for slot, value in form.outputs:
                record, edge = self._value(step, value, slot, shown, origin, reads=False)
                refs += [Ref(slot, record, edge)] if record >= 0 else []
        return refs

    def _value(
        self,
        step: StepInProgress,
        value: str,
        slot: str,
        shown: _Shown,
        origin: Origin,
        *,
        reads: bool,
    ) -> tuple[int, str]:
        """(record, edge) of a value of the graph; -1 where it is not known."""
        known = step.records.get(value)
        members = shown.get(value, [])
        if known is not None and (reads or not members):
            return known[0], "identity"
        if not members:
            inside = self.inside
            if inside is None or value not in inside.observer.hidden:
                return -1, ""
            why = "it lies in blocks of channels, and how many channels it has is not known"
            members = [(value, Seen("", (), why=why))]
        seen = members[0][1] if len(members) == 1 else Seen("", (), why="a sequence of tensors")
        if known is not None and not seen.why and seen.digest() == known[1]:
            return known[0], "identity"  # the result, as the session alone returned it
        origin = Origin(origin.scope, slot, origin.op_type, origin.keep)
        record, digest = self._tensors.take(seen, origin)
        step.records[value] = record, digest
        return record, ""

    def _shape(
        self, name: str, shape: tuple[int, ...], slot: str, origin: Origin
    ) -> tuple[int, str]:
        """The parameter that says a shape, as the extents that it came to."""
        key = f"{name} as {shape}"
        known = self._parameters.get(key)
        if known is not None:
            return known, "content"
        origin = Origin(origin.scope, slot, origin.op_type, origin.keep)
        seen = of_array(np.array(shape, np.int64))
        record = self._parameters[key] = self._tensors.parameter(seen, origin, None)
        return record, ""

    def _parameter(
        self,
        name: str,
        slot: str,
        origin: Origin,
        convolution: Convolution | None,
        shown: _Shown,
    ) -> tuple[int, str]:
        known = self._parameters.get(name)
        if known is not None:
            return known, "content"
        inside = self.inside
        assert inside is not None
        if name in inside.plan.constants:
            if name not in shown:
                return -1, ""
            seen = shown[name][0][1]
        else:
            array = inside.initializer(name)
            if convolution is not None and not isinstance(array, str):
                array = _plain_parameter(array, convolution, is_weight=name == convolution.weight)
            seen = Seen("", (), why=array) if isinstance(array, str) else of_array(array)
        origin = Origin(origin.scope, slot, origin.op_type, origin.keep)
        record = self._parameters[name] = self._tensors.parameter(seen, origin, inside.find)
        return record, ""


def _plain_parameter(array: Any, convolution: Convolution, *, is_weight: bool) -> Any:
    """A weight or bias as the shape of the convolution says; a text where that is not known."""
    _, outputs, inputs, is_blocked, group = convolution
    plain = None
    if outputs and is_weight:
        plain = plain_weight(array, outputs, inputs, is_blocked=is_blocked, group=group)
    elif outputs:
        plain = plain_bias(array, outputs)
    return "it lies in blocks of channels" if plain is None else plain
