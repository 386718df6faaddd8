"""Calls and records of a captured program, and the two protocols every stage meets in: `Run`
(readable), `Sink` (writable).

A run is a data-flow graph of calls. A call refers to the records it read and wrote; a tensor that
is the output of one call and the input of the next is one record with two references. Everything
here is frozen and survives a JSON round trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from whence.display import Described
from whence.dtypes import Array
from whence.records.collective import Collective
from whence.records.program import Program
from whence.records.quantised import QuantisedLayer
from whence.records.slots import slot_kind
from whence.records.storage import Dumped, Elements, External, Sketch, Statistics


class Key(NamedTuple):
    """Identifies one tensor of one run: process, model, step, place, operator, and slot."""

    rank: int
    root: str
    step: int
    micro: int
    phase: str
    scope: str
    op: str
    occurrence: int
    slot: str


class Record(
    Described, msgspec.Struct, frozen=True, tag="record", tag_field="t", omit_defaults=True
):
    """One captured tensor.

    id: its number in the run (position in `Run.records`). shape: logical. stride: in elements, ()
    when contiguous. hash: xxh3_128 of the canonical little-endian bytes, 32 hex digits, "" when not
    taken. elements: where they are, or None with `why` saying why they were not kept. columns:
    numbers a user's `on_record` returned. subclass: tensor class when it is not a plain tensor. Of
    foreign dumps: `hash` may be the dump's own digest, prefixed ("md5:..."). quantum: for elements
    read from printed text, the step of its last digit, 0 when they are exact. whole: shape of the
    tensor of which the text shows only these elements, () when all.
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
        """Where a dump keeps the elements, as in `Dumped`; "" for a record that is not
        from a dump.
        """
        return self.elements.file if isinstance(self.elements, Dumped) else ""

    @property
    def count(self) -> int:
        """Number of elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call's reference to a record under a slot name: input.0, input.attention_mask,
    output.logits, param.weight, mutated.1.

    edge: how sameness with an earlier sight is known: "identity" (live storage, same version, same
    bytes), "content" (same bytes only), "" (first sight).
    """

    slot: str
    record: int
    edge: str = ""


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a tensor lies on the processes that hold it together, as the program itself says (a
    DTensor).

    shape: of the whole tensor. mesh: extents of the grid of processes; ranks: theirs, row by row;
    names: of its dimensions. places: for each dimension of the grid "replicate", "sum" (each
    process has a summand), "shard K" (pieces along axis K), or the program's own word for what is
    none of these. nested: of axes that several dimensions cut, (axis, dimensions with the coarsest
    pieces first).
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[str, ...]
    names: tuple[str, ...] = ()
    nested: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        names = self.names or tuple(f"mesh {i}" for i in range(len(self.mesh)))
        where = ", ".join(
            f"{place} on {name} of {size}"
            for place, name, size in zip(self.places, names, self.mesh, strict=True)
        )
        return f"{where}; the whole is {list(self.shape)}"


class Call(Described, msgspec.Struct, frozen=True, tag="call", tag_field="t", omit_defaults=True):
    """One execution of a module (kind "module"), operator ("operator"), label ("label") or compiled
    graph ("graph"), or operators outside any module ("region").

    id: its position in `Run.calls`, the order in which calls ended; `order` is the order in which
    they began. A capture gives ids as calls begin (so that `parent` is known) and writes them as
    they end; a reader renumbers to positions, and a parent that was never written (a killed
    process) becomes -1. scope: dotted module path inside the root, "" for the root itself. op: ""
    for a module call. parent: id of the enclosing call, -1 for a root call. number: place in the
    tree, "0" the root, "3_1" first child of its third child. op_type: class name ("Linear") or
    operator. source: "module.Class" or "file:line". leaf: no module was called inside. arguments:
    non-tensor arguments by slot name. program: id of the recorded program, or "" with `no_program`
    saying why. error: the exception that left this call, if one did (its outputs are then missing).
    origins: names of the operators of the original program that a compiler fused into this one, in
    order; () when not said. placements: of slots whose tensor is this process's part of one that
    several hold, by slot. files: slot -> where a foreign dump keeps this sight of a tensor
    (`Record.file`), of slots whose record is an earlier sight. Of operators of a capture: aliases:
    pairs of slots that share a storage, where the schema does not say so. seconds: wall time (on an
    asynchronous device the time to launch it). forward: `order` of the operator whose backward this
    is a part of, -1 of none. gradients: of a call that autograd saw, slots of the tensors that have
    a gradient.
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
    quantised: QuantisedLayer | None = None
    gradients: tuple[str, ...] = ()

    @property
    def module_name(self) -> str:
        """The scope of its module; for the root itself, the root's name."""
        return self.scope or self.root

    @property
    def name(self) -> str:
        """The display name of a call: its module. For a part of a training step that is not a call
        of a module (a loss, a sum of gradients, the step of one parameter), the part's name follows
        after a slash.
        """
        is_part = self.kind == "module" and self.op and self.forward < 0
        return f"{self.module_name}/{self.op}" if is_part else self.module_name

    @property
    def by_slot(self) -> dict[str, int]:
        """The record of each slot."""
        return {ref.slot: ref.record for ref in self.refs}

    def slots(self, kind: str) -> tuple[Ref, ...]:
        """Returns references whose slot is of `kind` ("input", "output", "param", "mutated",
        "grad"), in order.
        """
        return tuple([r for r in self.refs if slot_kind(r.slot) == kind])

    def key(self, slot: str = "") -> Key:
        """Returns the key of this call, or of one of its slots."""
        return Key(
            self.rank,
            self.root,
            self.step,
            self.micro,
            self.phase,
            self.scope,
            self.op,
            self.occurrence,
            slot,
        )


class Note(Described, msgspec.Struct, frozen=True, tag="note", tag_field="t", omit_defaults=True):
    """A message of the capture: kind ("inside-not-seen", "hook-error", "budget", "error",
    "stopped", ...), text, place.
    """

    kind: str
    text: str
    scope: str = ""
    step: int = -1


class Step(msgspec.Struct, frozen=True, tag="step", tag_field="t", omit_defaults=True):
    """The end of one step of a root: how many bytes of elements it added and whether all its
    elements were kept.
    """

    root: str
    step: int
    nbytes: int
    kept: bool
    rank: int = 0


class RunInfo(Described, msgspec.Struct, frozen=True, omit_defaults=True):
    """What was run. Unknown fields of later versions are ignored on reading.

    started, finished: ISO 8601 with offset. exit_code: what the command returned; None while it
    runs or when nobody saw its end. interpreter: the Python that the command started, "" where it
    started something else.
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
    """A captured program that can be read: lazily, any number of times, never executing anything in
    it.

    `calls[i].id == i` and `records[i].id == i`; a Run of several processes renumbers. `ended` is ""
    for a clean end, else a sentence saying how the capture ended and what is missing.
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
    @property
    def collectives(self) -> Sequence[Collective]: ...

    def array(self, record: int) -> Array:
        """Elements of a record: read-only, dtype kept, memory-mapped where possible. Raises
        ElementsMissing with the reason.
        """
        ...


def collectives_of(run: Run) -> Sequence[Collective]:
    """Returns the collectives of a run; none for a reader's or user's own kind of run without such
    a field.
    """
    collectives: Sequence[Collective] = getattr(run, "collectives", ())
    return collectives


class Sink(Protocol):
    """Receives the records and calls of a capture. Every method raises StoreFailed when the medium
    fails; nothing written before is lost.
    """

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
        """Add one record and return its id. data: its canonical bytes, or None with `why`; consumed
        before returning.

        digest: 16 bytes of xxh3_128 over the canonical bytes, b"" when not taken; elements with a
        digest, dtype and shape already stored are not written again. base: (record, axis) when
        `data` only holds what follows that record along axis. external: where the elements lie
        byte-equal in a file of the user's; then `data` is ignored and `digest` must be given.
        """
        ...

    def call(self, call: Call) -> None:
        """Add a finished call. Its records were added before."""
        ...

    def program(self, program: Program) -> None: ...
    def note(self, note: Note) -> None: ...
    def step(self, step: Step) -> None: ...
    def collective(self, collective: Collective) -> None: ...

    def flush(self) -> None:
        """Hand everything added so far to the operating system, so that it survives a kill of this
        process.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of elements written so far."""
        ...

    def close(self) -> None:
        """Finish cleanly: headers, index. Idempotent."""
        ...
