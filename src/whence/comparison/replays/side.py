"""One side of a replay: where the tensors of a call's program lie in its run, and which programs
may be trusted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from whence import align, dtypes, judge
from whence.comparison.replays.self_check import Recording, reproduces, rounding_score
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.frameworks.operator_names import VIEWS, base_name
from whence.judge.precision import mask_fill
from whence.records import Call, Program, Ref, Run, children, in_order
from whence.records.marks import OVERWRITTEN, EngineModel, Mark, has_mark
from whence.records.slots import (
    SlotKind,
    is_mutated,
    is_of_child,
    is_param,
    is_written,
    slot_of_kind,
    split_child,
)

if TYPE_CHECKING:
    from whence.comparison.replays.user_model import Models

# A program is refused after it failed on so many calls without reproducing one.
_CHECKS = 3


class ReplaySource:
    """A run with its programs. Each program is loaded once, and used only after it has reproduced
    its own recording.
    """

    def __init__(self, run: Run, allow: Sequence[str] = (), model: Models | None = None) -> None:
        self.run, self.allow, self.model = run, tuple(allow), model
        self._below: dict[int, list[int]] | None = None
        self._makers: dict[int, tuple[Call, str]] | None = None
        self._composed: dict[int, Call] = {}
        self._own_programs: dict[str, Program] = {}
        self._loaded: dict[str, Any] = {}
        self._reproduced: set[str] = set()
        self._tried: Counter[str] = Counter()
        self._why: dict[str, str] = {}
        self._confirmed: dict[tuple[int, str], tuple[str, float]] = {}
        self._borrowed: dict[int, Any] = {}

    @functools.cached_property
    def is_of_graphs(self) -> bool:
        """Whether the run contains nodes of an ONNX graph."""
        return any(has_mark(call, Mark.OPSET) for call in self.run.calls)

    @functools.cached_property
    def is_of_file(self) -> bool:
        """Whether an engine read the graph from a file, which states the dtype of its weights."""
        marks = Mark.OPSET, Mark.EXECUTED_IN
        return any(has_mark(call, mark) for call in self.run.calls for mark in marks)

    @functools.cached_property
    def dtype_of_file(self) -> str:
        """The 16-bit dtype of most weights of the graph, "" if there is none."""
        programs = self.run.programs.values()
        if not self.is_of_file and not any(has_mark(p, Mark.TRANSLATED) for p in programs):
            return ""
        records = {r.record for call in self.run.calls for r in call.slots("param")}
        kinds = [self.run.records[record].dtype for record in records]
        floating = Counter(kind for kind in kinds if dtypes.is_floating(kind))
        ((kind, count),) = floating.most_common(1) or [("", 0)]
        return kind if dtypes.is_half(kind) and 2 * count > floating.total() else ""

    @functools.cached_property
    def first_made(self) -> dict[int, int]:
        """By record, the execution order of the leaf call that first wrote it, or of the module
        whose code wrote it through a view. Records that were read before are left out, such as a
        parameter that a view returns again.
        """
        made: dict[int, int] = {}
        read: set[int] = set()
        for call in in_order(self.run.calls):
            if call.leaf or call.kind == "operator":
                read.update(r.record for r in call.slots("input") if r.record not in made)
                for ref in call.refs:
                    if is_written(ref.slot) and ref.record not in read:
                        made.setdefault(ref.record, call.order)
        read.clear()
        for call in self.run.calls:
            read.update(r.record for r in call.refs if not is_written(r.slot))
            for ref in call.slots("output"):
                if ref.record not in read:
                    made.setdefault(ref.record, call.order)
        return made

    @functools.cached_property
    def handed(self) -> frozenset[int]:
        """Records of floating tensors that modules are given."""
        modules = (call for call in self.run.calls if call.kind == "module")
        given = (ref.record for call in modules for ref in call.slots("input"))
        return frozenset(n for n in given if dtypes.is_floating(self.run.records[n].dtype))

    def is_of_operators(self, call: Call) -> bool:
        """Whether a call is a module, a graph of an engine or a part of the script whose operators
        are recorded as calls.
        """
        is_shown = align.has_operators(self.run) or call.op_type in list(EngineModel)
        return call.kind in ("module", "region") and not call.program and is_shown

    def composed(self, call: Call) -> Call:
        """A module of operators as one call with one program, for operators that write memory which
        others view. Raises ReplayRefused.
        """
        from whence.replay.composed import compose

        if call.id not in self._composed:
            kids = [self.run.calls[k] for k in self.children(call.id)]
            call = msgspec.structs.replace(
                call, refs=(*call.refs, *self._read_from(call, kids), *self._read_elsewhere(call))
            )
            program = compose(call, kids, self.run.programs, self.run.records)
            self._own_programs[program.id] = program
            self._composed[call.id] = msgspec.structs.replace(call, program=program.id)
            below = [k.id for k in kids if k.kind != "operator"]
            self._below = {**(self._below or {}), call.id: below}
        return self._composed[call.id]

    def _read_from(self, call: Call, kids: Iterable[Call]) -> list[Ref]:
        """Tensors of earlier calls that operators of a module read and that are not its inputs."""
        given = {r.record for r in call.refs}
        read = dict.fromkeys(
            r.record for k in kids if k.kind == "operator" for r in k.slots("input")
        )
        return [
            Ref(f"input.earlier.{record}", record)
            for record in read
            if record not in given and self.first_made.get(record, call.order) < call.order
        ]

    def _read_elsewhere(self, call: Call) -> list[Ref]:
        """Tensors, other than outputs, that operators of a module compute and that operators of
        other calls (such as a backward pass) read.
        """
        from whence.replay.composed import INNER

        shown = {r.record for r in call.refs if is_written(r.slot)}
        kids = (self.run.calls[k] for k in self.children(call.id))
        written = dict.fromkeys(
            r.record for k in kids if k.kind == "operator" for r in k.refs if is_written(r.slot)
        )
        return [
            Ref(f"{INNER}{record}", record)
            for record in written
            if record not in shown and self._readers.get(record, {call.id}) != {call.id}
        ]

    @functools.cached_property
    def _readers(self) -> dict[int, set[int]]:
        """By record, the calls whose operators read it."""
        readers: dict[int, set[int]] = {}
        for call in self.run.calls:
            if call.kind == "operator":
                for ref in call.slots("input"):
                    readers.setdefault(ref.record, set()).add(call.parent)
        return readers

    def writes_views(self, call: Call) -> bool:
        """Whether an operator right below a module writes memory through a view."""
        kids = [self.run.calls[k] for k in self.children(call.id)]
        views = {
            r.record
            for k in kids
            if k.kind == "operator" and base_name(k.op) in VIEWS
            for r in k.slots("output")
            if r.record not in {i.record for i in k.slots("input")}  # it is its operand itself
        }
        written = (
            (_written_to(k, r.slot), r.record) for k in kids for r in k.refs if is_mutated(r.slot)
        )
        return call.id in self._composed or any(
            # what is overwritten unread may be part of another tensor, which shows it instead
            before in views
            or (
                before >= 0
                and self.run.records[before].why == OVERWRITTEN
                and after not in self._readers
            )
            for before, after in written
        )

    # ---- records

    def children(self, call: int) -> list[int]:
        """Ids of the calls that this call made, in order."""
        if self._below is None:
            self._below = children(self.run.calls)
        return self._below.get(call, [])

    def record(self, call: Call, slot: str) -> int | None:
        """The record of a slot of a call's program: its own ("input.0"), or of its k-th child
        ("3:output.0").
        """
        if is_of_child(slot):
            k, slot = split_child(slot)
            kids = self.children(call.id)
            if k >= len(kids):
                return None
            call = self.run.calls[kids[k]]
        return call.by_slot.get(slot)

    def records(self, call: Call, slots: Iterable[str]) -> dict[str, int]:
        """The records of these slots, as far as they were captured."""
        by_slot = call.by_slot
        records = {
            slot: self.record(call, slot) if is_of_child(slot) else by_slot.get(slot)
            for slot in slots
        }
        return {slot: record for slot, record in records.items() if record is not None}

    def arrays(
        self, records: dict[str, int]
    ) -> tuple[dict[str, Array], dict[str, tuple[int, ...]]]:
        """(elements, strides where they are not contiguous) by slot. Raises ElementsMissing."""
        run = self.run
        return (
            {slot: run.array(record) for slot, record in records.items()},
            {
                slot: stride
                for slot, record in records.items()
                if (stride := run.records[record].stride)
            },
        )

    def lent(self, record: int | None, working: str = "recorded") -> Array | None:
        """The elements of a tensor that is the same in every correct run (a mask, positions,
        integers, tables); None for any other tensor.

        The target may lack such a tensor: a fused attention needs no mask and has its own rotation
        tables. Tensors computed without activations carry no noise. working: if a 16-bit dtype, the
        mask is converted to it, and its fill becomes the lowest number of that dtype.
        """
        if record is None:
            return None
        try:
            array = self.run.array(record)
        except ElementsMissing:
            return None
        kind = dtypes.of(array)
        if kind.is_floating:
            values = np.unique(array.astype(np.float64)) if kind.kind != "complex" else np.zeros(4)
            top = mask_fill(kind)
            if values.size > 3 or not all(v in (0.0, 1.0) or abs(v) >= top for v in values):
                return array if self._is_table(record) else None
            if working in ("bfloat16", "float16") and kind.kind != "complex":
                limit = float(dtypes.named(working).max_finite or np.inf)
                exact = array.astype(np.float64)
                array = np.where(np.isfinite(exact), np.clip(exact, -limit, limit), exact).astype(
                    dtypes.named(working).numpy
                )
        return array

    def _is_table(self, record: int) -> bool:
        """Whether a tensor was computed from integers and parameter vectors alone, as cosines and
        sines are from positions and frequencies.
        """
        if self._makers is None:
            leaves = (c for c in self.run.calls if c.leaf)
            self._makers = {r.record: (c, r.slot) for c in leaves for r in c.slots("output")}
        if record not in self._makers:
            return False
        call, slot = self._makers[record]
        try:
            needs = self.load(call).needs(slot)
        except (ReplayRefused, KeyError):
            return False
        read = {s: self.run.records[r] for s, r in self.records(call, needs).items()}
        inputs = [r for s, r in read.items() if not is_param(s)]
        return (
            len(read) == len(needs)
            and bool(inputs)
            and all(judge.unit_roundoff(r.dtype) == 0.0 for r in inputs)
            and all(len(r.shape) <= 1 for s, r in read.items() if is_param(s))
        )

    # ---- programs

    def program(self, call: Call) -> Program:
        """The program of a call. Raises ReplayRefused with the reason when there is none."""
        if not call.program:
            raise ReplayRefused(call.no_program or "no program was recorded")
        program = self.run.programs.get(call.program) or self._own_programs.get(call.program)
        if program is None:
            raise ReplayRefused("its program was not written (the capture ended early)")
        return program

    def notes(self) -> list[str]:
        """How many programs reproduce their recording, but not bitwise, in words."""
        notes = Counter(
            loaded.check_note.partition(": ")[2] or loaded.check_note
            for loaded in self._loaded.values()
            if loaded.check_note
        )
        return [
            f"{text} ({count} program{'s' if count > 1 else ''})" for text, count in notes.items()
        ]

    def load(self, call: Call) -> Any:
        """The program of a call, ready to run, trusted or not."""
        return self.edited(self.program(call))

    def edited(self, program: Program) -> Any:
        """A program of this run, as recorded or with declared semantics, ready to run."""
        if program.id not in self._loaded:
            from whence.replay.validation import load

            self._loaded[program.id] = load(
                program, [self.run.array(c) for c in program.constants], allow=self.allow
            )
        return self._loaded[program.id]

    def trusted(self, call: Call) -> Any:
        """The program of a call, ready to run, if it reproduces the recording; else the module of
        the user's model. Raises ReplayRefused with the reason.
        """
        if call.id in self._borrowed:
            return self._borrowed[call.id]
        try:
            return self._reproducing(call, self.load(call))
        except ReplayRefused as refused:
            if self.model is None:
                raise
            return self.instead(call, str(refused))

    def instead(self, call: Call, why: str) -> Any:
        """The module of the user's model, which replaces the call's program from now on. why: why
        the program cannot be used. Raises ReplayRefused.
        """
        if self.model is None:
            raise ReplayRefused(why)
        kids = [self.run.calls[k] for k in self.children(call.id)]
        forms = {
            r.slot: (self.run.records[r.record].dtype, self.run.records[r.record].shape)
            for r in call.refs
        }
        settings = align.settings_of(self.run).get(call.root, {})
        modes = (mode for mode in ("inference_mode", "grad") if settings.get(mode))
        grad = next(modes, "no_grad")

        def inputs(kid: Call) -> dict[str, Array]:
            return self.arrays(self.records(kid, [r.slot for r in kid.slots("input")]))[0]

        try:
            borrowed = self._reproducing(call, self.model.borrowed(call, kids, forms, inputs, grad))
        except (ReplayRefused, ElementsMissing) as also:
            raise ReplayRefused(f"{why}; model {self.model.words}: {also}") from None
        self._borrowed[call.id] = borrowed
        self.model.used[call.id] = f"{align.starred(call.scope) or call.root} ({borrowed.kind})"
        return borrowed

    def borrows(self, call: Call) -> bool:
        """Whether the user's model replaces this call's program."""
        return call.id in self._borrowed

    def left(self, call: Call) -> list[str]:
        """The output slots that a replay of this call computes, [] if it cannot be replayed."""
        try:
            program = self.program(call) if self.model is None else self.trusted(call).program
        except ReplayRefused:
            return []
        return [slot for slot, _ in program.outputs if not is_of_child(slot)]

    def _reproducing(self, call: Call, loaded: Any) -> Any:
        program = loaded.program.id
        if program in self._reproduced:
            return loaded
        if self._tried[program] >= _CHECKS and (call.id, program) not in self._confirmed:
            raise ReplayRefused(self._why[program])
        why, _ = self._confirm(call, loaded)
        if why:
            self._tried[program] += 1
            self._why.setdefault(program, why)
            raise ReplayRefused(why)
        return loaded

    def confirm(self, call: Call) -> tuple[str, float]:
        """("", 0) if the call's program or module reproduces its recording, else (why not, error as
        a multiple of rounding).

        This finds a value that the recording baked in, extents that the program does not follow,
        and a broken kernel. A program that flags the target is believed only if it is right about
        the reference.
        """
        outcome = self._confirm(call, self._borrowed.get(call.id) or self.load(call))
        if outcome[0] and self.model is not None:
            self.model.used.pop(call.id, None)
        return outcome

    def own_error(self, record: int) -> float:
        """The relative error of a recorded tensor against its operator in float64, where that is
        rounding: a logistic function rounds to 2e-8 of one, and may have made nothing larger. 0
        where it is not known.
        """
        order = self.first_made.get(record)
        call = next((c for c in self.run.calls if c.leaf and c.order == order), None)
        if call is None or not call.program or self.confirm(call)[1] > judge.LIMITS.certain:
            return 0.0
        slot = next(r.slot for r in call.slots("output") if r.record == record)
        try:
            program = self.load(call).program
            arrays, _ = self.arrays(self.records(call, (*program.inputs, *program.params)))
            wide = self.load(call).run(arrays, arrays, outputs=[slot], working="float64")[slot]
            recorded = self.run.array(record).astype(np.float64)
        except (ReplayRefused, ElementsMissing):
            return 0.0
        size = float(np.linalg.norm(wide))
        return float(np.linalg.norm(recorded - wide)) / size if size else 0.0

    def _confirm(self, call: Call, loaded: Any) -> tuple[str, float]:
        key = call.id, loaded.program.id
        if key not in self._confirmed:
            why, score = self._compare_with_recording(call, loaded)
            if why:
                words = getattr(loaded, "words", "the program")
                why = f"{words} does not reproduce its own recording: {why}"
            else:
                self._reproduced.add(loaded.program.id)
            self._confirmed[key] = why, score
        return self._confirmed[key]

    def _compare_with_recording(self, call: Call, loaded: Any) -> tuple[str, float]:
        """(why the program does not reproduce the recording, error as a multiple of rounding)."""
        program = loaded.program
        slots = self.records(call, (*program.inputs, *program.params))
        outputs = self.records(call, loaded.determined(slots))
        if not outputs:
            missing = [s for s in (*program.inputs, *program.params) if s not in slots]
            what = missing[0] if missing else "none of its outputs"
            return f"{what} was not captured", np.inf
        try:
            arrays, strides = self.arrays(slots)
            recorded = {slot: self.run.array(record) for slot, record in outputs.items()}
        except ElementsMissing as error:
            return str(error), np.inf
        recording = Recording(call, arrays, strides, recorded, outputs)
        try:
            why = reproduces(loaded, recording, self.run)
        except (ReplayRefused, ElementsMissing) as error:
            why = str(error)
        return why, rounding_score(loaded, recording) if why else 0.0


def _written_to(call: Call, slot: str) -> int:
    """The record that an operator overwrote through this slot, -1 if it is not known."""
    before = slot_of_kind(slot, SlotKind.INPUT)
    return call.by_slot.get(before, -1)
