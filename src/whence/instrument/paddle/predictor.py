"""Listens to `paddle.inference`: every operator a predictor runs, through its input and output
hooks, without an edit of the program.

Hooks hand out live buffers, which are hashed and written inside the callback (`paddle_runs`). The
predictor saves its program after passes into the run. Nothing that fails here reaches the
predictor, in which every exception of a hook would become `std::exception`.

What a predictor runs, as its hooks show it: inputs and outputs one by one, in no order, made
into calls with their data flow.

A call ends when the next operator begins. What hooks do not show (attributes, the order of
operands, members of lists) is taken from the program after its passes.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from whence.frameworks import paddle_arrays as tensors
from whence.frameworks.paddle_programs import UNKNOWN
from whence.instrument.engines.watched import ModelRoot, Registry
from whence.instrument.engines.wrapping import Wrappers
from whence.instrument.paddle.call_forms import OperatorFrame
from whence.instrument.paddle.ended_operators import NO_PROGRAM, EndedOperators, OperatorSelection
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.program_matching import ProgramMatching
from whence.instrument.paddle.run_tensors import RunTensors, of_array
from whence.instrument.paddle.saved_programs import (
    NameTable,
    PredictorSource,
    SavedPrograms,
    tidy,
)
from whence.instrument.paddle.tensor_identity import FindExternal, Unshown, look
from whence.instrument.session import Origin, Session
from whence.records import Call, Ref
from whence.records.marks import Mark

_UNKNOWN = PredictorSource()


class Listener:
    """Records what predictors run into a session while installed.

    predictor: only this one; None: every one that is made or run. folder: of the run, where
    programs are saved, "" to save none. weights(program file, weights file): where parameters may
    be referenced from. changes: what is replaced on purpose.
    """

    def __init__(
        self,
        session: Session,
        predictor: Any = None,
        *,
        words: NameTable,
        folder: str = "",
        weights: Callable[[str, str], FindExternal] | None = None,
        changes: Interventions | None = None,
    ) -> None:
        self.session, self.words, self.changes = session, words, changes
        self._wrappers = Wrappers(session)
        self._predictor, self._weights = predictor, weights
        # else only what a predictor is given and returns
        self._operators = session.options.level != "logits"
        self._programs = SavedPrograms(session, words, folder, saves=self._operators)
        self._watched: dict[int, tuple[Any, list[_PredictorRun]]] = {}
        self._registry = Registry(session, self._wrappers.own)

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        import paddle

        inference = paddle.inference
        self._wrappers.active = True
        self._wrappers.wrap(inference.Predictor, "run", self._run)
        if self._predictor is not None:
            self._adopt(self._predictor)
            return
        self._wrappers.note(inference.Predictor, "clone", self._cloned)
        self._wrappers.wrap(inference.Config, "set_optim_cache_dir", self._set_cache)
        self._wrappers.wrap(inference.Config, "set_model_buffer", self._set_buffer)
        for place in (inference, paddle.base.core):
            self._wrappers.wrap(place, "create_predictor", self._create)

    def remove(self) -> None:
        """Stop listening. Hooks stay with their predictors, as Paddle cannot take them off, and do
        nothing. Idempotent.
        """
        self._wrappers.put_back()
        for _, cell in self._watched.values():
            cell.clear()
        self._watched.clear()
        if self.changes is not None and not self.session.failed:
            self.changes.finish()

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self._wrappers.forked()
        self.remove()

    # ---- what is called instead of Paddle's own

    def _create(self, previous: Callable[..., Any], config: Any) -> Any:
        source, spare = _UNKNOWN, config
        with self._wrappers.own():
            spare = type(config)(config)  # one config makes one predictor, be it that it fails
            source = self._programs.prepare(config)
        try:
            predictor = previous(config)
        except (
            Exception
        ):  # what Paddle raises has many types; that we have it save the program may be the reason
            if not source.folder:
                raise
            predictor = previous(spare)  # raises what the program would have seen
        with self._wrappers.own():
            self._adopt(predictor, source)
        return predictor

    def _cloned(self, clone: Any, predictor: Any) -> None:
        entry = self._watched.get(id(predictor))
        if entry is not None and entry[1]:
            source = entry[1][0].source
            self._adopt(clone, source._replace(folder="", saved=""))
            tidy(source.folder)

    def _set_cache(self, previous: Callable[..., Any], config: Any, folder: str) -> Any:
        with self._wrappers.own():
            self._programs.cached(config, folder)
        return previous(config, folder)

    def _set_buffer(
        self, previous: Callable[..., Any], config: Any, *buffers: Any, **named: Any
    ) -> Any:
        with self._wrappers.own():
            sizes = [
                len(buffer)
                for buffer in (*buffers, *named.values())
                if isinstance(buffer, (bytes, str))
            ]
            self._programs.given(config, sum(sizes))
        return previous(config, *buffers, **named)

    def _run(self, previous: Callable[..., Any], predictor: Any, *args: Any, **kwargs: Any) -> Any:
        watched: _PredictorRun | None = None
        with self._wrappers.own():
            watched = self._of(predictor)
            if watched is not None:
                watched.begin(predictor, args[0] if args else kwargs.get("inputs"))
        if watched is None:
            return previous(predictor, *args, **kwargs)
        ended = partial(watched.end, predictor)
        try:
            out = self._wrappers.call(previous, (predictor, *args), kwargs, ended)
        finally:
            interrupted, watched.interrupted = watched.interrupted, None
        if interrupted is not None:
            raise interrupted
        return out

    # ---- predictors

    def _of(self, predictor: Any) -> _PredictorRun | None:
        entry = self._watched.get(id(predictor))
        if entry is not None and entry[0]() is predictor:
            return entry[1][0] if entry[1] else None
        if self._predictor is not None:
            return None
        return self._adopt(predictor)

    def _adopt(self, predictor: Any, source: PredictorSource = _UNKNOWN) -> _PredictorRun | None:
        """Hook a predictor."""
        session = self.session
        if not self._registry.begin():
            return None
        root = self._registry.root(predictor, source.files[0])
        source = self._programs.read(source, root.name)
        files = source.files
        find = self._weights(*files) if self._weights is not None and files[1] else None
        watched = _PredictorRun(session, self.words, predictor, root, source, find, self.changes)
        settings = self._programs.settings(source)
        session.note("settings", msgspec.json.encode(settings).decode(), root.name)
        if source.described is None and self._operators:
            why = (
                "attributes and the order of operands are not known: no program was saved for it; "
                "begin the capture before create_predictor (`with whence.capture(...)` without the "
                "predictor), or give compare --program"
            )
            session.note("program", why, root.name)
        if source.lacks_weights:
            text = (
                f"{files[1]} does not exist: Paddle then runs the program with arbitrary memory "
                "instead of weights; give Config the file that was saved with "
                f"{os.path.basename(files[0])}"  # noqa: PTH119
            )
            session.note("error", text, root.name, aloud=True)
        cell = [watched]
        place = id(predictor)

        def gone(ref: Any) -> None:
            cell.clear()
            if place in self._watched and self._watched[place][0] is ref:
                del self._watched[place]

        ref = weakref.ref(predictor, gone)
        root.ref = ref
        self._watched[place] = (ref, cell)
        if self._operators:
            predictor.register_input_hook(_hook(self._wrappers, cell, _PredictorRun.reads))
            predictor.register_output_hook(_hook(self._wrappers, cell, _PredictorRun.wrote))
        return watched


def _hook(
    wrappers: Wrappers,
    cell: list[_PredictorRun],
    method: Callable[[_PredictorRun, str, str, Any], None],
) -> Callable[[str, str, Any], None]:
    """A hook that keeps nothing alive and raises nothing; a Ctrl-C is raised when the predictor has
    returned.
    """

    def hook(op: str, name: str, tensor: Any) -> None:
        if not cell:
            return
        watched = cell[0]
        if not wrappers.active or watched.session.failed:
            return
        try:
            with wrappers.own():
                method(watched, op, name, tensor)
        except BaseException as error:  # noqa: BLE001 - a Ctrl-C in here: raised when the predictor has returned
            watched.interrupted = error

    return hook


_HANDED_ON = ("yield", "builtin_combine", "feed", "fetch")  # what is not an operator of a program
# in the names of what is not saved with the weights: scratch of an operator, of any content
_SCRATCH = "__non_persistable"


class _PredictorRun:
    """One predictor, and its run in progress."""

    def __init__(
        self,
        session: Session,
        words: NameTable,
        predictor: Any,
        root: ModelRoot,
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
        """Begin a run of the predictor. arguments: the list of input tensors, None when they are in
        handles.
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
        """End a run of the predictor. error: what it raised, "" for nothing."""
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
                source=os.path.basename(self.root.model),  # noqa: PTH119
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
        """Record an input of the operator that runs next."""
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
        """Record an output of the operator that has run."""
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
        """End the innermost operator: match it with the program, and write it when no earlier
        operator waits for a tensor.
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
    """Note which block of an `if` runs, from its condition. With several tensors that may be the
    condition, the block is unknown.
    """
    sight = look(tensor)
    if sight.dtype == "bool" and sight.nbytes == 1:
        frame.branch = int(not tensor.numpy().item()) if frame.branch is None else UNKNOWN
