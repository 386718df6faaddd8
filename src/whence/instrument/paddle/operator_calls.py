"""What a predictor runs, as its hooks show it: inputs and outputs one by one, in no order, made
into calls with their data flow.

A call ends when the next operator begins. What hooks do not show (attributes, the order of
operands, members of lists) is taken from the program after its passes.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes
from whence.frameworks import paddle_arrays as tensors
from whence.frameworks.paddle_programs import FOLDED, UNKNOWN, Matched, Program, natural
from whence.instrument.call_frames import Frame, Root, count
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.tensor_identity import (
    FindExternal,
    Look,
    SeenTensor,
    Tensors,
    Unshown,
    Weight,
    look,
)
from whence.instrument.session import Session
from whence.records import Call, Ref

NO_PROGRAM = "operators of Paddle are not recorded as programs"

# operators that run others
_BLOCKS = ("while", "if", "conditional_block", "conditional_block_infer", "pylayer")
_HANDED_ON = ("yield", "builtin_combine", "feed", "fetch")  # what is no operator of a program
# in the names of what is not saved with the weights: scratch of an operator, of any content
_SCRATCH = "__non_persistable"


class NameTable(NamedTuple):
    """What the readers know of Paddle: names without what changes between processes, and how its
    programs and weights are read.

    weights: (file of a program, file of its weights, names) -> those of the parameters named that
    are in there.
    """

    name: Callable[[str], str]
    op_type: Callable[[str], str]
    describe: Callable[[str], Any]
    weights: Callable[[str, str, Collection[str]], dict[str, Weight]]


class _Form(NamedTuple):
    """What calls have in common of which hooks showed the same names: worked out once, since a
    program runs many times.

    operands: (hooks' name, the operator that made it where that name may be unknown) of what is no
    parameter, in order; params, outputs: (slot, hooks' name), an output's slot being "" where it is
    one of the results that are counted.
    """

    scope: str
    layer: str
    source: str
    operands: tuple[tuple[str, Any], ...]
    params: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    arguments: dict[str, Any]
    notes: tuple[str, ...]


class OperatorFrame(Frame):
    """One operator that runs. inputs, params, outputs: by the name hooks give: (record, edge).
    listed: tensors in the list it makes. branch: which of its blocks runs, where that is known.
    """

    __slots__ = (
        "block", "branch", "inputs", "listed", "matched", "notes", "op", "op_type", "operator",
        "outputs", "params",
    )  # fmt: skip

    def __init__(self, op: str, op_type: str, order: int, parent: OperatorFrame | None) -> None:
        super().__init__("", order, parent)
        self.keep = True
        self.op, self.op_type, self.block = op, op_type, op_type in _BLOCKS
        self.branch: int | None = None
        self.inputs: dict[str, tuple[int, str]] = {}
        self.params: dict[str, tuple[int, str]] = {}
        self.outputs: dict[str, tuple[int, str]] = {}
        self.notes: list[str] = []
        self.listed = 0
        self.operator: Any = None
        self.matched: Matched | None = None


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
        program: Program | None,
        find: FindExternal | None,
        changes: Interventions | None,
        unshown: Unshown,
    ) -> None:
        self.session, self.words, self.root, self.program, self.changes = (
            session,
            words,
            root,
            program,
            changes,
        )
        self.unshown = unshown
        self.feeds = list(predictor.get_input_names())
        self.fetches = list(predictor.get_output_names())
        self.tensors = Tensors(self.session, find)
        self.interrupted: BaseException | None = None
        self.facts: dict[str, Any] = {}
        self.files, self.folder, self.saved_program = ("", ""), "", ""
        self._names: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._scopes: dict[tuple[Any, ...], tuple[str, str]] = {}
        self._matches: dict[tuple[Any, ...], tuple[Any, Matched | None, int, tuple[str, ...]]] = {}
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._constant: dict[str, bool] = {}
        self._stack: list[OperatorFrame] = []
        self._folds = False  # has a constant been seen that Paddle folded
        self._takes_inputs, self._takes_outputs = (
            session.selector.slots("input"),
            session.selector.slots("output"),
        )
        self._clear()

    def _clear(self) -> None:
        self._stack.clear()
        self._named: dict[str, tuple[int, bytes]] = {}
        self._last_seen: dict[str, SeenTensor | None] = {}
        self._later: dict[tuple[int, str], tuple[Look, bytes]] = {}
        self._ended: list[OperatorFrame] = []
        self._ran: dict[int, OperatorFrame] = {}
        self._patched: Counter[str] = Counter()

    # ---- a run

    def begin(self, predictor: Any, arguments: Any) -> None:
        """The predictor is run. arguments: the list of tensors it was given, None when handles hold
        them.
        """
        session = self.session
        self._clear()
        self.tensors.begin()
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
                seen_input = _of_array(value)
            top.inputs[name] = self._taken(
                value, seen_input, name, f"input.{name}", "Predictor", "", top
            )

    def end(self, predictor: Any, out: Any, error: str) -> None:
        """The predictor has run, or raised."""
        if not self._stack:
            return
        session, top = self.session, self._stack[0]
        self._finish_above(top)
        self._emit(everything=True)
        if top.selected and not error and self._takes_outputs:
            for place, name in enumerate(self.fetches):
                named = self._named.get(name)
                if named is not None and named[0] >= 0:
                    top.outputs[name] = (named[0], "content")
                elif (
                    isinstance(out, (list, tuple))
                    and place < len(out)
                    and tensors.is_tensor(out[place])
                ):
                    top.outputs[name] = self._taken(
                        out[place], look(out[place]), name, f"output.{name}", "Predictor", "", top
                    )
                else:
                    top.outputs[name] = self._fetched(predictor, name, top)
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
                notes=() if top.selected else ("not selected",),
            )
        )
        session.end_step(self.root.name, self.root.steps)
        self.root.steps += 1
        self._clear()

    def _fetched(self, predictor: Any, name: str, top: OperatorFrame) -> tuple[int, str]:
        try:
            value = tensors.of_handle(predictor.get_output_handle(name))
        except Exception as error:  # noqa: BLE001 - what the program will see when it asks for it
            return self.session.unreadable(
                "", (), f"Paddle does not hand it out: {' '.join(str(error).split())[:200]}"
            ), ""
        return self._taken(value, _of_array(value), name, f"output.{name}", "Predictor", "", top)

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
            if self._is_parameter(name):
                top.params[name] = (-1, "")
            elif name not in top.inputs:
                top.inputs[name] = (-1, "")
            return
        if self._is_parameter(name):
            unchanged = self.tensors.unchanged(tensor, name)
            # What a constant is called changes from process to process.
            top.params[name] = unchanged or self.tensors.parameter(
                tensor,
                name,
                scope=top.op_type,
                slot=f"param.{self._plain(name)}",
                op_type=top.op_type,
            )
            return
        top.inputs[name] = self._read(name, tensor, top)

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
        plain = self._plain(name)
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
            self._rewrote(name, tensor, top)
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
            self._named[name] = (-1, b"")
            self._last_seen.pop(name, None)
            return
        top.outputs[name] = self._taken(
            tensor, look(tensor), name, "output.0", top.op_type, plain, top, since=top.order
        )

    def _rewrote(self, name: str, tensor: Any, top: OperatorFrame) -> None:
        """A parameter is among the outputs of operators that may write it (batch norm). When this
        one did, it is a mutation.
        """
        record = top.params[name][0]
        if record < 0:
            return
        number, _ = self.tensors.parameter(
            tensor, name, scope=top.op_type, slot=f"mutated.{name}", op_type=top.op_type, sure=True
        )
        if number != record:
            top.outputs[name] = (number, "")

    def _read(self, name: str, tensor: Any, top: OperatorFrame) -> tuple[int, str]:
        previous = self._last_seen.get(name)
        if previous is not None and self.tensors.unmoved(previous, tensor, top.order):
            return previous.record, "content"
        sight = look(tensor)
        if sight.why:
            return self.session.unreadable(sight.dtype, sight.shape, sight.why), ""
        digest = sight.digest()
        named = self._named.get(name)
        if named is not None and named[1] == digest and named[0] >= 0:
            self._last_seen[name] = self.tensors.remember(sight, digest, named[0], top.order)
            return named[0], "content"
        number = self.tensors.known(sight, digest, top.order)
        edge = "content"
        if number is None and not self.session.takes_all and self._key(top) not in self._scopes:
            # Whether this operator was asked for is known when its outputs have names: its bytes
            # wait.
            data = (
                sight.data if sight.data is not None else tensors.viewed(sight.place, sight.nbytes)
            ).copy()
            self._later[top.order, name] = (sight._replace(place=0, data=data), digest)
            return -1, ""
        if number is None:
            plain = self._plain(name)
            number = self.tensors.record(
                tensor,
                sight,
                digest,
                scope=plain,
                slot=f"input.{plain}",
                op_type=top.op_type,
                keep=top.keep,
            )
            self._last_seen[name] = self.tensors.remember(sight, digest, number, top.order)
            edge = ""
        self._named[name] = (number, digest)
        return number, edge

    def _taken(
        self,
        value: Any,
        sight: Look,
        name: str,
        slot: str,
        op_type: str,
        scope: str,
        top: OperatorFrame,
        *,
        since: int | None = None,
    ) -> tuple[int, str]:
        """A tensor that this call made, or that the root was given. since: known again when a call
        from there on has seen it.
        """
        self._last_seen.pop(name, None)
        if sight.why:
            number = self.session.unreadable(sight.dtype, sight.shape, sight.why)
            self._named[name] = (number, b"")
            return number, ""
        digest = sight.digest()
        record = (
            self.tensors.known(sight, digest, top.order, since=since) if since is not None else None
        )
        edge = "content" if record is not None else ""
        if record is None:
            record = self.tensors.record(
                value, sight, digest, scope=scope, slot=slot, op_type=op_type, keep=top.keep
            )
            self._last_seen[name] = self.tensors.remember(sight, digest, record, top.order)
        self._named[name] = (record, digest)
        return record, edge

    def _is_parameter(self, name: str) -> bool:
        if name in self._named:
            return False
        constant = self._constant.get(name)
        if constant is None:
            constant = self._constant[name] = name not in self.feeds and self._is_constant(name)
        return constant

    def _is_constant(self, name: str) -> bool:
        if self.program is not None and name in self.program.parameters:
            return True
        if name.startswith(FOLDED):
            self._folds = True
            return True
        return (
            "inner_var" not in name
            and "block_arg" not in name
            and (self.program is None or not self.program.writes(name))
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
            self._match(top, self.program)  # what runs in its block is looked for in there
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
            self._match(frame, self.program)
            if frame.block and frame.operator is not None:
                self.program.wrote(frame.operator, list(frame.outputs))
        self._claim(frame)
        self._ended.append(frame)
        self._emit()

    def _match(self, frame: OperatorFrame, program: Program) -> None:
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
            params, read = (None, ()) if frame.block else (frame.params, frame.inputs)
            op = program.operator(
                block,
                key,
                frame.op_type,
                params,
                list(frame.outputs),
                inputs=read,
                folded=self._folds,
            )
            matched = (
                program.matched(op, list(frame.inputs), list(frame.outputs))
                if op is not None and not frame.block
                else None
            )
            weights, folded = self.unshown
            constants = (
                tuple(name for name in program.held(op) if name in weights or name in folded)
                if op is not None
                else ()
            )
            match = self._matches[names] = (
                op,
                matched,
                program.listed(op) if op is not None else 0,
                constants,
            )
        frame.operator, frame.matched, frame.listed, constants = match
        for name in constants:
            frame.params[name] = self._unshown(name, frame)
        if frame.operator is not None:
            self._ran[id(frame.operator)] = frame
        elif not frame.block:
            program.moved(list(frame.inputs), list(frame.outputs))

    def _unshown(self, name: str, frame: OperatorFrame) -> tuple[int, str]:
        if not frame.selected:
            return -1, ""
        weights, folded = self.unshown
        if name in folded:
            return folded[name]
        record_and_edge = self.tensors.from_file(
            weights.pop(name),
            name,
            scope=frame.op_type,
            slot=f"param.{self._plain(name)}",
            op_type=frame.op_type,
        )
        folded[name] = record_and_edge[0], "content"
        return record_and_edge

    def _claim(self, frame: OperatorFrame) -> None:
        """Tensors that no hook showed as somebody's output, because lists are not shown: they are
        of the operator that made the list.
        """
        for name, (record, edge) in frame.inputs.items():
            if record < 0 or edge or name in self.feeds:
                continue
            if frame.matched is not None:
                maker = self._ran.get(id(frame.matched.owners.get(name)))
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
            form = self._forms[key] = self._form(frame)
        scope = form.scope
        if not session.takes_all:
            self._scopes.setdefault(self._key(frame), (scope, form.layer))
            if frame.selected:
                frame.selected = self._wants(scope, form.layer, frame)
                if frame.selected:
                    self._take_later(frame)
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
                refs=tuple(self._refs(frame, form)) if frame.selected else (),
                arguments=form.arguments,
                no_program=NO_PROGRAM,
                notes=notes if frame.selected else ("not selected",),
            )
        )

    def _take_later(self, frame: OperatorFrame) -> None:
        for name in [name for name, (record, _) in frame.inputs.items() if record < 0]:
            waiting = self._later.pop((frame.order, name), None)
            if waiting is not None:
                sight, digest = waiting
                named = self._named.get(name)
                if named is None or named[0] < 0 or named[1] != digest:
                    plain = self._plain(name)
                    number = self.tensors.record(
                        sight.data,
                        sight,
                        digest,
                        scope=plain,
                        slot=f"input.{plain}",
                        op_type=frame.op_type,
                        keep=frame.keep,
                    )
                    named = self._named[name] = (number, digest)
                frame.inputs[name] = (named[0], "")

    def _refs(self, frame: OperatorFrame, form: _Form) -> list[Ref]:
        """What was read, parameters and results, each in its slot; what was not taken has none."""
        refs: list[Ref] = []
        place = 0
        inputs, outputs = frame.inputs, frame.outputs
        for name, maker in form.operands:
            record_and_edge = inputs.get(name) or self._made_before(name, maker)
            if record_and_edge is not None and record_and_edge[0] >= 0:
                refs.append(Ref(_slot("input", place), *record_and_edge))
                place += 1
        for slot, name in form.params:
            record_and_edge = frame.params[name]
            if record_and_edge[0] >= 0:
                refs.append(Ref(slot, *record_and_edge))
        place = 0
        for slot, name in form.outputs:
            record_and_edge = outputs[name]
            if slot:
                refs.append(Ref(slot, *record_and_edge))
            elif record_and_edge[0] >= 0:
                refs.append(Ref(_slot("output", place), *record_and_edge))
                place += 1
        return refs

    def _made_before(self, name: str, maker: Any) -> tuple[int, str] | None:
        """An operand that no hook showed of this call."""
        if name in self._named:
            return self._named[name][0], "content"
        producer = self._ran.get(id(maker)) if maker is not None else None
        return (
            (next(iter(producer.outputs.values()))[0], "content")
            if producer is not None and len(producer.outputs) == 1
            else None
        )

    def _form(self, frame: OperatorFrame) -> _Form:
        """Operands in the order of the program, where that is known, and parameters by name."""
        op, matched = frame.operator, frame.matched
        makers = dict(matched.makers) if matched is not None else {}
        operands = (
            [(name, makers.get(k)) for k, name in enumerate(matched.inputs)]
            if matched is not None
            else []
        )
        placed = {name for name, _ in operands}
        operands += [
            (name, None)
            for name in sorted((n for n in frame.inputs if n not in placed), key=natural)
        ]
        outputs = sorted(
            frame.outputs,
            key=lambda name: (name in frame.params, name in self.fetches, natural(name)),
        )
        names = [self._plain(name) for name in outputs]
        ordered = [v.name for _, v in op.inputs] if op is not None else []
        used: Counter[str] = Counter()
        params = []
        for name in sorted(
            frame.params, key=lambda n: (ordered.index(n) if n in ordered else len(ordered), n)
        ):
            plain = self._plain(name)
            if frame.block and plain != name:
                continue  # constants have no name that lasts; they stand where they are read inside
            params.append((f"param.{plain}{used[plain] or ''}", name))
            used[plain] += 1
        return _Form(
            names[0] if names else frame.op_type,
            str(getattr(op, "scope", "") or ""),
            (op.source or op.scope) if op is not None else "",
            tuple(operands),
            tuple(params),
            tuple(
                (f"mutated.{plain}" if name in frame.params else "", name)
                for name, plain in zip(outputs, names)
            ),
            dict(op.attributes) if op is not None else {},
            tuple(f"writes {name}" for name in names[1:]),
        )

    def _plain(self, name: str) -> str:
        plain = self._names.get(name)
        if plain is None:
            plain = self._names[name] = self.words.name(name)
        return plain


@functools.cache
def _slot(kind: str, place: int) -> str:
    return f"{kind}.{place}"


def _decided(frame: OperatorFrame, tensor: Any) -> None:
    """Note which block of an `if` runs, from its condition; where it reads several such tensors,
    nobody knows which.
    """
    sight = look(tensor)
    if sight.dtype == "bool" and sight.nbytes == 1:
        frame.branch = int(not tensor.numpy().item()) if frame.branch is None else UNKNOWN


def _of_array(array: np.ndarray[Any, Any]) -> Look:
    """The form of an array on the host, as of a tensor."""
    data = array.reshape(-1).view(np.uint8)
    try:
        return Look(dtypes.of(array).name, array.shape, 0, data.size, data)
    except KeyError:
        return Look(
            str(array.dtype), array.shape, 0, 0, None, f"dtype {array.dtype} has no host form"
        )
