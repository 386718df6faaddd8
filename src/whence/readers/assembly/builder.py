"""Builds a Run from a foreign dump: a reader adds tensors and calls, the builder gives them ids."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun
from whence.records import (
    Call,
    Collective,
    Dumped,
    Lack,
    Missing,
    Note,
    Program,
    Record,
    Ref,
    Run,
    RunInfo,
    Statistics,
    Step,
)
from whence.records.marks import Mark, mark
from whence.records.missing import ends_of, missing_of
from whence.records.places import as_text

Load = Callable[[], Array]
Slots = Mapping[str, int] | Iterable[int]
_NO_PROGRAM = "a dump has no program"
LOGGED = mark(Mark.LOGGED)
"""The note of a label that a kernel logged while it ran: it comes before the kernel's output."""


class Building:
    """A run under construction.

    path, kind: become `Run.path` and `RunInfo.kind`. Tensors and calls are added in execution
    order; a call may be added before its children and get its tensors later (`fill`). No elements
    are read until they are requested. root: of calls that name no other.
    """

    def __init__(
        self,
        path: object,
        kind: str,
        *,
        versions: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.path, self.info = (
            str(path),
            RunInfo(kind=kind, versions=dict(versions or {}), settings=dict(settings or {})),
        )
        self.ended, self.root = "", "model"
        self.programs: dict[str, Program] = {}
        self._records: list[Record] = []
        self._loads: dict[int, Load] = {}
        self._calls: list[Call] = []
        self._occurrences: Counter[tuple[int, str, int, int, str, str, str]] = Counter()
        self._notes: list[Note] = []
        self._missing: list[Missing] = []

    def tensor(
        self,
        dtype: str,
        shape: tuple[int, ...],
        load: Load | None = None,
        *,
        why: str = "",
        statistics: Statistics | None = None,
        digest: str = "",
        quantum: float = 0.0,
        whole: tuple[int, ...] = (),
        device: str = "cpu",
        columns: Mapping[str, float | None] = {},
        stride: tuple[int, ...] = (),
        file: str = "",
    ) -> int:
        """Adds a tensor; returns its record.

        dtype: whence's name; one that whence does not know is kept as it is and has no elements.
        shape: logical. load: returns the elements, of that dtype and shape, each time it is called;
        it may raise ElementsMissing, and any other exception becomes that. Without it `why` gives
        the reason. digest: the dump's own, prefixed ("md5:..."). quantum, whole: as in `Record`;
        whole is (-1,) where a text does not tell how much it leaves out. file: as in `Dumped`; a
        tensor that names a file and has no elements counts as missing from the run.
        """
        number = len(self._records)
        if load is not None and dtype not in dtypes.DTYPES:
            load, why = None, why or f"dtype {dtype} is not known to whence"
        if load is None and not why:
            raise ValueError(f"record {number}: neither elements nor a reason")
        if load is None and file:
            text = f"a tensor of {file} cannot be read: {why}"
            self._missing.append(Missing(Lack.DAMAGED, file, text))
        record = Record(
            number,
            dtype,
            tuple(shape),
            hash=digest,
            statistics=statistics,
            quantum=quantum,
            whole=whole,
            device=device,
            columns=dict(columns),
            stride=stride,
            why=why,
            elements=Dumped(file) if load is not None or file else None,
        )
        self._records.append(record)
        if load is not None:
            self._loads[number] = load
        return number

    def array(self, array: Array, **options: Any) -> int:
        """Adds a tensor whose elements are in memory or mapped. options: as for `tensor`."""
        return self.tensor(dtypes.of(array).name, tuple(array.shape), lambda: array, **options)

    def call(
        self,
        scope: str,
        *,
        op_type: str = "",
        op: str = "",
        inputs: Slots = (),
        outputs: Slots = (),
        params: Mapping[str, int] = {},
        kind: str = "operator",
        root: str = "",
        step: int = 0,
        rank: int = 0,
        micro: int = 0,
        phase: str = "forward",
        parent: int = -1,
        source: str = "",
        arguments: Mapping[str, Any] = {},
        origins: Iterable[str] = (),
        notes: Iterable[str] = (),
        training: bool = False,
    ) -> int:
        """Adds a call that begins now; returns a handle for `parent` and `fill`.

        inputs, outputs: {name: record}, or a sequence of records, named by position ("input.0");
        params: {name: record}. parent: handle of the call that contains it. The n-th call of a name
        in a step has occurrence n.
        """
        root = as_text(root or self.root)
        scope, op = as_text(scope), as_text(op)  # often names of files
        key = (rank, root, step, micro, phase, scope, op)
        if phase == "backward":  # what the forward pass kept for it is in no dump
            notes = (*notes, mark(Mark.INPUTS_UNKNOWN))
        added = Call(
            len(self._calls),
            scope,
            root,
            step,
            len(self._calls),
            rank=rank,
            micro=micro,
            phase=phase,
            op=op,
            occurrence=self._occurrences[key],
            kind=kind,
            op_type=op_type,
            source=source,
            parent=parent,
            arguments=dict(arguments),
            no_program=_NO_PROGRAM,
            origins=tuple(origins),
            notes=tuple(notes),
            training=training,
            refs=_refs((("input", inputs), ("param", params), ("output", outputs))),
        )
        self._calls.append(added)
        self._occurrences[key] += 1
        return len(self._calls) - 1

    def again(self, card: Call, tensors: Iterable[tuple[str, int]], parent: int = -1) -> int:
        """Adds a call that begins now, from a card that whence wrote (`whence.records.sidecar`).
        tensors: (slot, record). Returns its handle.
        """
        refs = tuple(Ref(slot, record) for slot, record in tensors)
        place = len(self._calls)
        self._calls.append(
            msgspec.structs.replace(
                card, id=place, order=place, parent=parent, refs=refs, no_program=_NO_PROGRAM
            )
        )
        return place

    def fill(
        self,
        call: int,
        *,
        inputs: Slots = (),
        outputs: Slots = (),
        params: Mapping[str, int] = {},
        mutated: Mapping[str, int] = {},
    ) -> None:
        """Adds tensors to a call, in the form that `call` takes; positions continue from those it
        has. mutated: {input it changed: record after}.
        """
        old = self._calls[call]
        kinds = (("input", inputs), ("param", params), ("output", outputs), ("mutated", mutated))
        refs = (*old.refs, *_refs(kinds, old))
        self._calls[call] = msgspec.structs.replace(old, refs=refs)

    def note(self, kind: str, text: str, scope: str = "", step: int = -1) -> None:
        """Adds a note on the run; kinds "error" and "budget" are shown with every comparison."""
        self._notes.append(Note(kind, text, scope, step))

    def lacks(self, kind: Lack, where: str, text: str) -> None:
        """Records a part of the dump that exists and is not read, also as a note. where: the file,
        relative to the dump; text: which part, and why.
        """
        self._missing.append(Missing(kind, where, text))
        self.note("error", text)

    def take_over(self, run: Run) -> int:
        """Adds the tensors, programs, notes and missing parts of another run, but not its calls.
        Returns the new number of its first record.
        """
        first = len(self._records)
        for record in run.records:
            number = first + record.id
            self._records.append(msgspec.structs.replace(record, id=number))
            if not record.why:
                self._loads[number] = partial(run.array, record.id)
        self.programs.update(run.programs)
        self._notes += run.notes
        self._missing += missing_of(run)
        return first

    def run(self) -> Run:
        """Returns the finished run. Calls without a parent get one common root per process, model
        and step.
        """
        calls = self._rooted()
        below: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            below.setdefault(call.parent, []).append(place)
        ends: list[int] = []
        numbers: dict[int, str] = {}
        roots: Counter[_Whole] = Counter()
        for top in below.get(-1, ()):
            key = _whole(calls[top])
            numbers[top] = str(roots[key])
            roots[key] += 1
            todo = [(top, False)]
            while todo:
                place, entered = todo.pop()
                kids = below.get(place, [])
                if entered or not kids:
                    ends.append(place)
                    continue
                numbers.update((kid, f"{numbers[place]}_{i}") for i, kid in enumerate(kids))
                todo.append((place, True))
                todo += [(kid, False) for kid in reversed(kids)]
        if len(ends) != len(calls):
            raise UnreadableRun(f"{len(calls) - len(ends)} calls contain each other in a circle")
        position = {place: i for i, place in enumerate(ends)}

        def placed(place: int, end: int) -> Call:
            call = calls[place]
            parent = position.get(call.parent, -1)
            return msgspec.structs.replace(
                call,
                id=end,
                order=place,
                parent=parent,
                number=numbers[place],
                leaf=place not in below,
            )

        finished = [placed(place, end) for end, place in enumerate(ends)]
        steps = dict.fromkeys((c.root, c.step, c.rank) for c in finished)
        return _Built(
            self, finished, [Step(root, step, 0, True, rank) for root, step, rank in sorted(steps)]
        )

    def _rooted(self) -> list[Call]:
        """Returns the calls in the order in which they began, renumbered, with parentless ones
        below a common root.
        """
        loose: dict[_Whole, list[int]] = {}
        for place, call in enumerate(self._calls):
            if call.parent == -1:
                loose.setdefault(_whole(call), []).append(place)
        parents = {call.parent for call in self._calls}
        missing = {
            key: tops
            for key, tops in loose.items()
            if all(self._calls[top].scope for top in tops)
            and not (len(tops) == 1 and tops[0] in parents)
        }
        first = {tops[0]: key for key, tops in missing.items()}
        out: list[Call] = []
        moved: dict[int, int] = {}
        whole: dict[_Whole, int] = {}
        for place, call in enumerate(self._calls):
            key = _whole(call)
            if place in first:
                whole[key] = len(out)
                last = self._calls[missing[key][-1]]
                refs = [Ref(r.slot, r.record) for r in call.slots("input")] + [
                    Ref(r.slot, r.record) for r in last.slots("output")
                ]
                gathered = Call(
                    len(out),
                    "",
                    call.root,
                    call.step,
                    len(out),
                    rank=call.rank,
                    micro=call.micro,
                    phase=call.phase,
                    no_program=_NO_PROGRAM,
                    refs=tuple(refs),
                    notes=(mark(Mark.PUT_TOGETHER),),
                )
                out.append(gathered)
            moved[place] = len(out)
            parent = moved[call.parent] if call.parent != -1 else whole.get(key, -1)
            out.append(msgspec.structs.replace(call, id=len(out), parent=parent))
        return out


def _refs(kinds: Iterable[tuple[str, Slots]], of: Call | None = None) -> tuple[Ref, ...]:
    """Returns references to tensors; positions continue from those that a call has."""
    refs: list[Ref] = []
    for kind, slots in kinds:
        start = len(of.slots(kind)) if of else 0
        named = slots.items() if isinstance(slots, Mapping) else enumerate(slots, start)
        refs += [Ref(f"{kind}.{name}", record) for name, record in named]
    return tuple(refs)


_Whole = tuple[int, str, int, int, str]


def _whole(call: Call) -> _Whole:
    """Returns the key that the calls below one root share: (rank, root, step, micro, phase)."""
    return call.rank, call.root, call.step, call.micro, call.phase


class _Built:
    """The Run that a `Building` returns. Elements are read anew on every request."""

    def __init__(self, of: Building, calls: list[Call], steps: list[Step]) -> None:
        self.path, self.info, self.ended = of.path, of.info, of.ended
        self.calls, self.records, self.steps = calls, of._records, steps
        self.programs, self.notes = dict(of.programs), list(of._notes)
        self.collectives: list[Collective] = []
        self.missing = tuple(dict.fromkeys((*ends_of(self), *of._missing)))
        self._loads = of._loads
        self._lock = threading.Lock()

    def array(self, record: int) -> Array:
        load, expected = self._loads.get(record), self.records[record]
        if load is None:
            raise ElementsMissing(expected.why)
        try:
            with self._lock:  # files are shared by all records in them
                elements = load()
        except ElementsMissing:
            raise
        # a parser may raise anything on a damaged file: only this tensor is lost, with the reason
        except Exception as error:
            raise ElementsMissing(f"cannot be read: {type(error).__name__}: {error}") from error
        if tuple(elements.shape) != expected.shape or dtypes.of(elements).name != expected.dtype:
            raise ElementsMissing(
                f"is {elements.dtype} {tuple(elements.shape)}, not {expected.dtype} "
                f"{expected.shape} as the dump says"
            )
        view = np.asarray(elements).view()
        view.flags.writeable = False
        return view
