"""Records one model of an engine: its steps, and the calls of its nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from whence.instrument.call_frames import Root, count
from whence.instrument.engines.effect import Effect, Shown
from whence.instrument.engines.tensors import FindExternal, Taken, Tensors
from whence.instrument.engines.values import Seen, of_array
from whence.instrument.session import Origin, Session
from whence.instrument.step_choice.windows import holds
from whence.instrument.wording import counted, raised
from whence.records import Call, Ref
from whence.records.marks import OBSERVER, Mark
from whence.records.slots import is_input

_LISTED = 8  # values in a note


class ModelRoot(Root):
    """A root that is a model of an engine. model: its file, by which a new model of the same file
    is recognised.
    """

    def __init__(self, name: str, model: str) -> None:
        super().__init__(name, lambda: None)
        self.model, self.steps = model, 0


class NodeForm(msgspec.Struct, frozen=True):
    """What all calls of a node have in common. inputs, params, outputs: (slot, name of the value).
    shape: slot of the parameter that holds the result's shape, "" for none. A shape can be written
    in several ways (-1, 0), and an engine's passes may choose another one.
    """

    op_type: str
    scope: str
    source: str
    arguments: dict[str, Any]
    notes: tuple[str, ...]
    origins: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    params: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    shape: str


class StepInProgress:
    """One run of a model, from its call to its return. records: name of a value of the graph ->
    (record, digest).
    """

    def __init__(self, order: int, step: int) -> None:
        self.order, self.step, self.keep, self.selected = order, step, False, True
        self.refs: list[Ref] = []
        self.taken: Taken = {}
        self.records: dict[str, tuple[int, bytes]] = {}


class Watched(ABC):
    """Records the runs of one model. KIND: op_type of its calls. NO_PROGRAM: why its nodes have no
    program. inside: what the engine knows of its graph, with `plan.nodes` in order of execution and
    the `observer` that shows their values; None where only inputs and outputs are recorded.
    """

    KIND = ""
    NO_PROGRAM = ""

    def __init__(self, session: Session, tensors: Tensors, root: ModelRoot) -> None:
        self.session, self.tensors, self.root = session, tensors, root
        self.inside: Any = None
        self.parameters: dict[str, int] = {}
        self._told_changes, self._changed = False, 0

    # ---- what an engine says of its models

    @abstractmethod
    def constant(
        self, form: NodeForm, name: str, shown: Shown
    ) -> tuple[Seen, FindExternal | None] | None:
        """A parameter of a node, and the function that finds its bytes in the user's file; None
        where the parameter is unknown.
        """

    def why_hidden(self, value: str) -> str:
        """Why a value of the graph can never be shown, "" for one that can."""
        return ""

    # ---- a step

    def started(self, step: StepInProgress) -> None:
        """Begin a step of the model."""
        session = self.session
        self.root.steps += 1
        session.begin_step(self.root.name)
        session.over_budget("", step.step)
        step.keep = session.elements_on
        step.selected = session.takes_all or session.selector.wants(
            "", self.KIND, 0, "0", step.step
        )

    def take(self, step: StepInProgress, name: str, slot: str, seen: Seen) -> None:
        """Record what the model was given or returned. name: of the value in the graph."""
        origin = Origin("", slot, self.KIND, step.keep)
        take = self.tensors.given if is_input(slot) else self.tensors.returned
        record, edge, digest = take(step.taken, seen, origin)
        if record >= 0:
            step.refs.append(Ref(slot, record, edge))
            step.records[name] = record, digest

    def ended(self, step: StepInProgress, results: Mapping[str, Seen], error: str) -> None:
        """End a step: write the calls of its nodes and of the model. results: by slot, without the
        "output." prefix. error: what the model raised, "" for nothing.
        """
        session = self.session
        if step.selected and not error and session.selector.slots("output"):
            for slot, value in results.items():
                self.take(step, slot, f"output.{slot}", value)
        calls = 0
        if not error and self.is_observed(step.step):
            calls = self._nodes(step, results)
        session.call(
            Call(
                step.order,
                "",
                self.root.name,
                step.step,
                step.order,
                rank=session.rank,
                op_type=self.KIND,
                leaf=not calls,
                source=self.root.model,
                refs=tuple(step.refs),
                no_program=self.NO_PROGRAM,
                error=error,
                notes=() if step.selected else (Mark.NOT_SELECTED.value,),
            )
        )
        self.tensors.ended(self.root.name, step.taken)
        session.end_step(self.root.name, step.step)

    def close(self) -> None:
        """Stop recording this model. Idempotent."""
        if self._changed and not self.session.failed:
            self.session.note(
                "observer",
                f"{OBSERVER}the results of {counted(self._changed, 'further step')} differ from "
                "those of what the program runs",
                self.root.name,
            )
        self._changed = 0
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.observer.close()

    def is_observed(self, step: int) -> bool:
        """Whether the nodes of this step are recorded."""
        return self.inside is not None and holds(self.session.options.ranges, step)

    # ---- nodes

    def _nodes(self, step: StepInProgress, results: Mapping[str, Seen]) -> int:
        """Run the second model and write a call for each node. Returns the number of calls."""
        session, inside = self.session, self.inside
        if inside is None:
            return 0
        if session.selector.only is not None and step.step not in session.selector.only:
            return 0
        try:
            shown, effect = inside.observer.results(step, results)
        except Exception as error:  # noqa: BLE001 - what an engine raises has many types
            text = f"the graph beside the session cannot be run: {raised(error)}"
            session.note("inside-not-seen", text, self.root.name, aloud=True)
            self.close()
            return 0
        self._tell(effect, step.step)
        counts: dict[str, int] = {}
        nodes = inside.plan.nodes
        for place, form in enumerate(nodes, 1):
            self._node(step, form, place, shown, counts)
        inside.observer.recorded()
        return len(nodes)

    def _tell(self, effect: Effect | None, step: int) -> None:
        if effect is None:
            return
        if self._told_changes:
            self._changed += 1
            return
        # after the first change, later ones are only counted
        self._told_changes = not effect.text.startswith("none")
        self.session.note("observer", f"{OBSERVER}{effect.text}", self.root.name, step)
        if effect.unseen:
            more = " ..." if len(effect.unseen) > _LISTED else ""
            listed = ", ".join(effect.unseen[:_LISTED]) + more
            self.session.note("inside-not-seen", f"not shown: {listed}", self.root.name)

    def _node(
        self,
        step: StepInProgress,
        form: NodeForm,
        place: int,
        shown: Shown,
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
                no_program=self.NO_PROGRAM,
                notes=form.notes if selected else (Mark.NOT_SELECTED.value,),
            )
        )

    def _refs(
        self, step: StepInProgress, form: NodeForm, shown: Shown, origin: Origin
    ) -> list[Ref]:
        session, refs = self.session, []
        if session.selector.slots("input"):
            for slot, value in form.inputs:
                record, edge = self._value(step, value, slot, shown, origin, reads=True)
                refs += [Ref(slot, record, edge)] if record >= 0 else []
        for slot, name in form.params:
            record, edge = self._parameter(form, slot, name, shown, origin)
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
        shown: Shown,
        origin: Origin,
        *,
        reads: bool,
    ) -> tuple[int, str]:
        """(record, edge) of a value of the graph; record -1 where it is unknown."""
        known = step.records.get(value)
        members = shown.get(value, [])
        if known is not None and (reads or not members):
            return known[0], "identity"
        if not members:
            why = self.why_hidden(value)
            if not why:
                return -1, ""
            members = [(value, Seen("", (), why=why))]
        seen = members[0][1] if len(members) == 1 else Seen("", (), why="a sequence of tensors")
        if known is not None and not seen.why and seen.digest() == known[1]:
            return known[0], "identity"  # the result, as the session alone returned it
        origin = Origin(origin.scope, slot, origin.op_type, origin.keep)
        record, digest = self.tensors.take(seen, origin)
        step.records[value] = record, digest
        return record, ""

    def _parameter(
        self, form: NodeForm, slot: str, name: str, shown: Shown, origin: Origin
    ) -> tuple[int, str]:
        """(record, edge) of a parameter of a node; record -1 where it is unknown. A parameter that
        holds a shape is recorded as the actual extents of the result.
        """
        result = shown.get(form.outputs[0][1]) if slot == form.shape else None
        shape = result[0][1].shape if result and not result[0][1].why else None
        key = name if shape is None else f"{name} as {shape}"
        known = self.parameters.get(key)
        if known is not None:
            return known, "content"
        constant = (
            self.constant(form, name, shown)
            if shape is None
            else (of_array(np.array(shape, np.int64)), None)
        )
        if constant is None:
            return -1, ""
        origin = Origin(origin.scope, slot, origin.op_type, origin.keep)
        record = self.parameters[key] = self.tensors.parameter(constant[0], origin, constant[1])
        return record, ""


def only_boundary(session: Session, why: str, root: str) -> None:
    """Note why the inside of a model is not recorded."""
    text = f"only inputs and outputs are recorded: {why}"
    session.note("inside-not-seen", text, root, aloud=True)


ROOT = "model"
"""The root of the first model."""


class Registry:
    """The models of a program that are observed, each with its root, by a key of the engine.

    own: makes the context in which code of the listener runs. observes: whether the inside of
    models is recorded, not only what they are given and return.
    """

    def __init__(self, session: Session, own: Callable[[], Any]) -> None:
        self._session, self._own = session, own
        is_inner = session.options.level not in ("io", "logits")
        self.observes = is_inner and session.options.max_depth != 0
        self._watched: dict[Any, Any] = {}
        self._roots: list[ModelRoot] = []
        self._begun = False

    def begin(self) -> bool:
        """Called before a model is observed. Returns whether this process is captured."""
        if not self._begun:
            self._begun = True
            self._session.begin()
        return not self._session.failed

    def root(self, owner: Any, model: str) -> ModelRoot:
        """The root for a model; the root of an earlier model of the same file that is gone is
        continued, with its step count.
        """
        for root in self._roots:
            current = root.ref()
            if current is owner or (current is None and root.model == model):
                return root
        root = ModelRoot(ROOT if not self._roots else f"{ROOT}#{len(self._roots)}", model)
        self._roots.append(root)
        return root

    def gone(self, key: Any, watched: Watched) -> None:
        """Called when a model of the program is gone."""
        if self._watched.get(key) is watched:
            del self._watched[key]
            with self._own():
                watched.close()

    def close(self) -> None:
        """Release all models. Idempotent."""
        for watched in list(self._watched.values()):
            watched.close()
        self.forget()

    def forget(self) -> None:
        """Forget all models: in a forked child, where second models belong to the parent."""
        self._watched.clear()
