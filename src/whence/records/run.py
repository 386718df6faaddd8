"""Calls and records of a captured program, and the two protocols every stage meets in: `Run` (readable), `Sink` (writable).

A run is a data-flow graph of calls. A call refers to the records it read and wrote; a tensor that is the output of one
call and the input of the next is one record with two references. Everything here is frozen and survives a JSON round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from whence.display import Named
from whence.dtypes import Array
from whence.errors import ElementsMissing

PATCHED = "patched from "
"""How the note of a call begins whose outputs another run's replaced on purpose."""
PATCHED_AS = ", where it is called "
"""How that note goes on where the other run calls it otherwise."""
MEMORY_ORDER = "its elements may stand as a kernel library lays them out in memory"
"""The note of a call of a dump whose outputs may not be in the order that their shape says."""

OVERWRITTEN = "overwritten without being read"
"""Why an operator's argument has no elements: what it held does not matter."""


class Key(NamedTuple):
    """Names one tensor of one run: which process, which model, when, where, which operator, which of its tensors."""

    rank: int
    root: str
    step: int
    micro: int
    phase: str
    scope: str
    op: str
    occurrence: int
    slot: str


class Statistics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of one tensor, taken in float64 over its finite elements (of |z| for complex).

    count: all elements. min, max, mean, std, norm: None when no element is finite. std is the population one (ddof 0);
    norm is the 2-norm. nan, inf, zero: how many elements are NaN, +-Inf, exactly zero.
    """

    count: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    nan: int
    inf: int
    zero: int


class Sketch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few numbers that do not change when the elements are permuted, to recognise a tensor under another name or layout.

    checksum: 64-bit sum over the mixed bit patterns, equal for equal multisets of elements (exact).
    abs_sum, cube_sum, fourth_sum: sums of |x|, x^3, x^4 over finite elements in float64 (approximate; survive rounding);
    None when they overflow.
    """

    checksum: int
    abs_sum: float | None
    cube_sum: float | None
    fourth_sum: float | None


class Kept(msgspec.Struct, frozen=True, tag="kept", tag_field="in", gc=False):
    """Elements lie in a shard of this run: bytes [offset, offset + nbytes) of its data area, canonical (C) order, little endian."""

    shard: int
    offset: int
    nbytes: int


class Increment(msgspec.Struct, frozen=True, tag="increment", tag_field="in"):
    """Elements are those of record `base` followed along `axis` by the elements stored at shard/offset/nbytes."""

    base: int
    axis: int
    shard: int
    offset: int
    nbytes: int


class External(msgspec.Struct, frozen=True, tag="external", tag_field="in"):
    """Elements lie byte-equal in a file of the user's (a safetensors or GGUF checkpoint); `hash` of the record guards them."""

    file: str
    offset: int
    nbytes: int


class Dumped(msgspec.Struct, frozen=True, tag="dumped", tag_field="in"):
    """Elements lie in a foreign dump. file: relative to it, with forward slashes, "" when that is the dump itself; a place in that file
    may follow a comma ("Add.Add_1.4.6.1706596912161941,inputs,0"). stored: the dtype they lie in, "" when it is the record's."""

    file: str
    stored: str = ""


Elements = Kept | Increment | External


class Record(msgspec.Struct, frozen=True, tag="record", tag_field="t", omit_defaults=True):
    """One captured tensor.

    id: its number in the run (position in `Run.records`). shape: logical. stride: in elements, () when contiguous.
    hash: xxh3_128 of the canonical little-endian bytes, 32 hex digits, "" when not taken.
    elements: where they are, or None with `why` saying why they were not kept.
    columns: numbers a user's `on_record` returned. subclass: tensor class when it is not a plain tensor.
    Of foreign dumps: `hash` may be the dump's own digest, prefixed ("md5:..."). quantum: for elements read from printed text, the step
    of its last digit, 0 when they are exact. whole: shape of the tensor of which the text shows only these elements, () when all.
    """

    id: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    storage_offset: int = 0
    device: str = "cpu"
    hash: str = ""
    statistics: Statistics | None = None
    sketch: Sketch | None = None
    elements: Elements | Dumped | None = None
    why: str = ""
    columns: dict[str, float | None] = {}
    subclass: str = ""
    quantum: float = 0.0
    whole: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        """Where a dump keeps the elements, as `Dumped` says; "" for what is not of a dump."""
        return self.elements.file if isinstance(self.elements, Dumped) else ""

    @property
    def count(self) -> int:
        """Number of elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call's reference to a record under a slot name: input.0, input.attention_mask, output.logits, param.weight, mutated.1.

    edge: how sameness with an earlier sight is known: "identity" (live storage, same version, same bytes),
    "content" (same bytes only), "" (first sight).
    """

    slot: str
    record: int
    edge: str = ""


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a tensor lies on the processes that hold it together, as the program itself says (a DTensor).

    shape: of the whole tensor. mesh: extents of the grid of processes; ranks: theirs, row by row; names: of its dimensions. places: for
    each dimension of the grid "replicate", "sum" (each process has a summand), "shard K" (pieces along axis K), or the program's own
    word for what is none of these. nested: of axes that several dimensions cut, (axis, dimensions with the coarsest pieces first).
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[str, ...]
    names: tuple[str, ...] = ()
    nested: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        names = self.names or tuple(f"mesh {i}" for i in range(len(self.mesh)))
        where = ", ".join(f"{place} on {name} of {size}" for place, name, size in zip(self.places, names, self.mesh, strict=True))
        return f"{where}; the whole is {list(self.shape)}"


class Call(msgspec.Struct, frozen=True, tag="call", tag_field="t", omit_defaults=True):
    """One execution of a module (kind "module"), operator ("operator"), label ("label") or compiled graph ("graph"), or operators outside
    any module ("region").

    id: its position in `Run.calls`, the order in which calls ended; `order` is the order in which they began. A capture gives
    ids as calls begin (so that `parent` is known) and writes them as they end; a reader renumbers to positions, and a parent
    that was never written (a killed process) becomes -1.
    scope: dotted module path inside the root, "" for the root itself. op: "" for a module call.
    parent: id of the enclosing call, -1 for a root call. number: place in the tree, "0" the root, "3_1" first child of its third child.
    op_type: class name ("Linear") or operator. source: "module.Class" or "file:line". leaf: no module was called inside.
    arguments: non-tensor arguments by slot name. program: id of the recorded program, or "" with `no_program` saying why.
    error: the exception that left this call, if one did (its outputs are then missing).
    origins: names of the operators of the original program that a compiler fused into this one, in order; () when not said.
    placements: of slots whose tensor is this process's part of one that several hold, by slot.
    files: slot -> where a foreign dump keeps this sight of a tensor (`Record.file`), of slots whose record is an earlier sight.
    Of operators of a capture: aliases: pairs of slots that share a storage, where the schema does not say so. seconds: wall time (on an
    asynchronous device the time to launch it). forward: `order` of the operator whose backward this is a part of, -1 of none.
    """

    id: int
    scope: str
    root: str
    step: int
    order: int
    rank: int = 0
    micro: int = 0
    phase: str = "forward"
    op: str = ""
    occurrence: int = 0
    kind: str = "module"
    op_type: str = ""
    source: str = ""
    parent: int = -1
    number: str = "0"
    leaf: bool = False
    training: bool = False
    refs: tuple[Ref, ...] = ()
    arguments: dict[str, Any] = {}
    program: str = ""
    no_program: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""
    origins: tuple[str, ...] = ()
    files: dict[str, str] = {}
    aliases: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    forward: int = -1
    placements: dict[str, Placement] = {}

    def slots(self, kind: str) -> tuple[Ref, ...]:
        """References whose slot is of `kind` ("input", "output", "param", "mutated", "grad"), in order."""
        return tuple(r for r in self.refs if r.slot.partition(".")[0] == kind)

    def key(self, slot: str = "") -> Key:
        """The key of this call, or of one of its slots."""
        return Key(self.rank, self.root, self.step, self.micro, self.phase, self.scope, self.op, self.occurrence, slot)


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operator of a program: overload name ("aten.addmm.default") and its arguments.

    Arguments are plain JSON values, lists of them, or one-key objects: {"in": k} input k of the program, {"param": slot},
    {"op": [i, j]} output j of operation i, {"const": k} constant k, {"dtype": "float32"}, {"device": ""}, {"layout": name},
    {"memory_format": name}, {"float": "inf" | "-inf" | "nan"}, {"complex": [re, im]}.
    guard: for an operator that returns a Python number, the number the recording saw; replay must see the same.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    guard: float | bool | None = None


class Program(msgspec.Struct, frozen=True, tag="program", tag_field="t", omit_defaults=True):
    """What one region ran: data, never code. Used only after it reproduced its own recorded outputs.

    inputs: slots of the call that feed {"in": k}. params: slots that feed {"param": slot}.
    constants: records of tensors made inside from Python data. outputs: (slot, operand).
    base: the floating dtype the region worked in, "" when it met none; a replay in another precision puts that one in its place.
    input_dtypes: by input. default_dtype: torch's default while recording. fixed: (input, axis, extent) the program only serves.
    equal: (input, axis, input, axis) whose extents were one at recording and must be on replay. inference: recorded under
    inference_mode, where composite operators arrive whole; grad: slots that required grad then (they choose by it).
    notes: what was met ("in-place", "cast pinned", "guard"), for a reader.

    A call that calls others runs its own operators between them: outputs "k:input.x" are what its k-th child was given (from 0),
    inputs "k:output.x" and "k:mutated.x" what that child left. calls: (child, how many operations run before it). same: (slot,
    slot) that were one tensor, so that which of them was meant cannot be known. lost: (output, why it could not be followed).
    Of a compiled graph: names: the name of the node that each operation was ("addmm_3"). scopes: path of the module that each is in.
    picks: (name, operation, result) of nodes that pick one of several results.
    lines: where the user's code called each operation ("file:line", "" where that is not known), () when none is; call_lines: where it
    called each child, in the order of `calls`. Both are those of the first recording and no part of the id.
    """

    id: str
    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    params: tuple[str, ...] = ()
    constants: tuple[int, ...] = ()
    base: str = ""
    input_dtypes: tuple[str, ...] = ()
    default_dtype: str = "float32"
    fixed: tuple[tuple[int, int, int], ...] = ()
    equal: tuple[tuple[int, int, int, int], ...] = ()
    inference: bool = False
    grad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    scopes: tuple[str, ...] = ()
    picks: tuple[tuple[str, int, int], ...] = ()
    lines: tuple[str, ...] = ()
    call_lines: tuple[str, ...] = ()


class Note(msgspec.Struct, frozen=True, tag="note", tag_field="t", omit_defaults=True):
    """Something the capture must tell: kind ("inside-not-seen", "hook-error", "budget", "error", ...), text, where."""

    kind: str
    text: str
    scope: str = ""
    step: int = -1


class Step(msgspec.Struct, frozen=True, tag="step", tag_field="t", omit_defaults=True):
    """The end of one step of a root: how many bytes of elements it added and whether all its elements were kept."""

    root: str
    step: int
    nbytes: int
    kept: bool
    rank: int = 0


class RunInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was run. Unknown fields of later versions are ignored on reading.

    started, finished: ISO 8601 with offset. exit_code: what the command returned; None while it runs or when nobody saw its end.
    interpreter: the Python that the command started, "" where it started something else.
    """

    format: int = 1
    kind: str = "whence"
    command: tuple[str, ...] = ()
    started: str = ""
    user: str = ""
    host: str = ""
    cwd: str = ""
    versions: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    git: str = ""
    seed: int | None = None
    deterministic: bool = False
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    settings: dict[str, Any] = {}
    finished: str = ""
    exit_code: int | None = None
    interpreter: str = ""


class Run(Protocol):
    """A captured program that can be read: lazily, any number of times, never executing anything in it.

    `calls[i].id == i` and `records[i].id == i`; a Run of several processes renumbers. `ended` is "" for a clean end,
    else a sentence saying how the capture ended and what is missing.
    """

    @property
    def path(self) -> str: ...
    @property
    def info(self) -> RunInfo: ...
    @property
    def ended(self) -> str: ...
    @property
    def calls(self) -> Sequence[Call]: ...
    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def programs(self) -> Mapping[str, Program]: ...
    @property
    def notes(self) -> Sequence[Note]: ...
    @property
    def steps(self) -> Sequence[Step]: ...

    def array(self, record: int) -> Array:
        """Elements of a record: read-only, dtype kept, memory-mapped where possible. Raises ElementsMissing with the reason."""
        ...


class Sink(Protocol):
    """Where a capture puts what it sees. Every method raises StoreFailed when the medium fails; nothing written before is lost."""

    def record(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: np.ndarray[Any, np.dtype[np.uint8]] | None,
        digest: bytes,
        statistics: Statistics | None,
        sketch: Sketch | None,
        *,
        why: str = "",
        stride: tuple[int, ...] = (),
        storage_offset: int = 0,
        device: str = "cpu",
        columns: dict[str, float | None] | None = None,
        subclass: str = "",
        base: tuple[int, int] | None = None,
        external: External | None = None,
    ) -> int:
        """Add one record and return its id. data: its canonical bytes, or None with `why`; consumed before returning.

        digest: 16 bytes of xxh3_128 over the canonical bytes, b"" when not taken; elements with a digest, dtype and shape
        already stored are not written again. base: (record, axis) when `data` only holds what follows that record along axis.
        external: where the elements lie byte-equal in a file of the user's; then `data` is ignored and `digest` must be given.
        """
        ...

    def call(self, call: Call) -> None:
        """Add a finished call. Its records were added before."""
        ...

    def program(self, program: Program) -> None: ...
    def note(self, note: Note) -> None: ...
    def step(self, step: Step) -> None: ...

    def flush(self) -> None:
        """Hand everything added so far to the operating system, so that it survives a kill of this process."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of elements written so far."""
        ...

    def close(self) -> None:
        """Finish cleanly: headers, index. Idempotent."""
        ...


class MemoryRun(Named):
    """A Run held in memory: hand-made ones in tests, small foreign dumps, results of an engine.

    arrays: elements by record id; a record without an entry has none (`Record.why` says why).
    Raises ValueError when ids are not positions or a call refers to a record that is not there.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        records: Sequence[Record],
        arrays: Mapping[int, Array],
        *,
        path: str = "<memory>",
        info: RunInfo | None = None,
        programs: Mapping[str, Program] | None = None,
        notes: Sequence[Note] = (),
        steps: Sequence[Step] = (),
        ended: str = "",
    ) -> None:
        for i, call in enumerate(calls):
            if call.id != i:
                raise ValueError(f"call at position {i} has id {call.id}")
            for ref in call.refs:
                if not 0 <= ref.record < len(records):
                    raise ValueError(f"call {call.scope or call.root!r} refers to record {ref.record} of {len(records)}")
        for i, record in enumerate(records):
            if record.id != i:
                raise ValueError(f"record at position {i} has id {record.id}")
        self.path, self.info, self.ended = path, info or RunInfo(), ended
        self.calls, self.records = tuple(calls), tuple(records)
        self.programs, self.notes, self.steps = dict(programs or {}), tuple(notes), tuple(steps)
        self._arrays = dict(arrays)

    def array(self, record: int) -> Array:
        try:
            found = self._arrays[record]
        except KeyError:
            raise ElementsMissing(self.records[record].why or f"record {record}: elements were not kept") from None
        view = found.view()
        view.flags.writeable = False
        return view


class Over(Named):
    """A Run over another one, `base`: what is not given is the other's, elements too."""

    def __init__(self, base: Run, calls: Sequence[Call] | None = None, records: Sequence[Record] | None = None) -> None:
        self.base = base
        self.path, self.info, self.ended = base.path, base.info, base.ended
        self.programs, self.notes, self.steps = base.programs, base.notes, base.steps
        self.calls: Sequence[Call] = base.calls if calls is None else calls
        self.records: Sequence[Record] = base.records if records is None else records

    def array(self, record: int) -> Array:
        return self.base.array(record)


class Looked(Sequence[Record]):
    """Records that are looked up one at a time by their place, from 0 to `length`."""

    def __init__(self, length: int, one: Callable[[int], Record]) -> None:
        self._length, self._one = length, one

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self._one(i) for i in range(*at.indices(self._length))]
        if not -self._length <= at < self._length:
            raise IndexError(f"record {at} of {self._length}")
        return self._one(at % self._length)


class Region(NamedTuple):
    """A piece of the run that is judged as one: a leaf call, or one stretch of a container between two of its child calls.

    call: id of the call whose code runs. stretch: -1 for a leaf call, else which stretch (0 = before the first child).
    inputs: record ids that became visible at its boundary; a stretch sees those of the stretches before it in its call too.
    outputs: what it made. An output that was already visible to the region is not one.
    """

    call: int
    stretch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def children(calls: Sequence[Call]) -> dict[int, list[int]]:
    """Ids of the direct children of every call, in execution order; key -1 holds the root calls."""
    table: dict[int, list[int]] = {}
    for call in sorted(calls, key=lambda c: c.order):
        table.setdefault(call.parent, []).append(call.id)
    return table


def regions(calls: Sequence[Call]) -> Iterator[Region]:
    """Tile a run: every operator executed belongs to exactly one region (DESIGN section 3), in execution order.

    A container with k children has k + 1 stretches; one that made nothing has no outputs. A stretch sees its container's inputs
    and parameters and the outputs of the children before it; what a later child reads, or the container returns, and nobody had
    before, the stretch made. Parameters of a child are the child's.
    """
    below = children(calls)
    known: set[int] = set()

    def walk(call: Call) -> Iterator[Region]:
        reads = [r.record for r in call.refs if r.slot.startswith(("input", "param"))]
        writes = [r.record for r in call.refs if r.slot.startswith(("output", "mutated"))]
        known.update(reads)
        kids = below.get(call.id, [])
        if not kids:
            yield Region(call.id, -1, tuple(reads), tuple(writes))
            known.update(writes)
            return
        fresh = dict.fromkeys(reads)
        for place, kid in enumerate(kids):
            child = calls[kid]
            made = dict.fromkeys(r.record for r in child.slots("input") if r.record not in known)
            yield Region(call.id, place, tuple(fresh), tuple(made))
            yield from walk(child)
            fresh = dict.fromkeys(r.record for r in child.refs if r.slot.startswith(("output", "mutated")))
        yield Region(call.id, len(kids), tuple(fresh), tuple(dict.fromkeys(r for r in writes if r not in known)))
        known.update(writes)

    for root in below.get(-1, []):
        yield from walk(calls[root])
