"""Notes of calls, and reasons, that code asks for: each text stands here once, with what writes it
and what reads it. The texts are part of the run format.
"""

from __future__ import annotations

from enum import StrEnum

from whence.records.program import Program
from whence.records.run import Call, Record


class Mark(StrEnum):
    """A note of a call (of a program, where it says so): the whole text, or what stands before or
    behind a value.
    """

    NOT_SELECTED = "not selected"
    """No tensor of the call was kept."""
    OPENED = "its code is judged as that of the call around it"
    """A container that only one run has, without tensors: where its code stood."""
    HIDDEN = "inside not seen"
    """Behind "WHY: ": compiled or scripted code hides what the call calls."""
    PATCHED = "patched from "
    """Before a path: another run's outputs replaced the call's on purpose."""
    PATCHED_AS = ", where it is called "
    """Behind `PATCHED`, before the call's name in that run."""
    MEMORY_ORDER = "its elements may stand as a kernel library lays them out in memory"
    """The outputs of a call of a dump may not be in the order that their shape says."""
    PUT_TOGETHER = "put together: the dump has no call for the whole"
    """A root call that no dump held: inputs of the first call, outputs of the last."""
    INPUTS_UNKNOWN = "what it read is not known"
    """It may depend on all that was made before."""
    STORED_WIDER = "the dump does not say in what dtype it was computed"
    """Its tensors may be stored wider than they were computed."""
    UNORDERED = "the dump does not say which tensor was made before which"
    """Its place among the other calls means nothing. What the dump tells instead may follow
    (`known_order.Trace`).
    """
    LOGGED = "some of what a kernel held, logged while it ran"
    """A label whose elements are a part of a tensor of a kernel."""
    TAKES = "takes "
    """Before "NAME as PARAMETER": what its operator takes a variable as."""
    WRITES = "writes "
    """Before a further name that the operator writes its result to."""
    EXECUTED_IN = "executed in "
    """Before the dtype that an engine computed the call in, whatever its tensors are stored in."""
    REWRITTEN = "its program runs operators that the reference's does not: names say little"
    """It is paired by the values that it makes."""
    OPSET = "opset "
    """Before the version of the operator set of ONNX that the node is of."""
    OF_MODULE = "of module "
    """Before the path of the torch module that an exporter made the node's first result of."""
    ONEDNN = "a kernel of oneDNN"
    """A pass gave the call to oneDNN."""
    NODE = "node "
    """Before the name of the node of a compiled graph that the call is."""
    KERNEL = "kernel "
    """Before the kernel that computed that node."""
    MOVES = "only moves elements: held against what it was given"
    """A call that its run did not have, for a move of elements that only the other run has."""
    TAKEN_TOGETHER = " taken together"
    """Behind the names of the calls that this one is: the other run has them in one."""
    JOINED = "joined from "
    """Before what of how many calls: it was cut from others or joined from them."""
    OF_PIECES = "joined of the pieces that "
    """Before how many ranks hold pieces of its tensors."""
    SHOWN_RANK = "of the ranks' replicas, shown is that of rank "
    """Before the rank whose tensors stand for those that should be alike and are not."""
    TRANSLATED = "translated from "
    """Before the library whose operators a program was made of: it may be off by a few
    roundings."""
    COMPOSED = "composed of operators"
    """Of a program: put together from calls of operators."""


_BEHIND = (Mark.HIDDEN, Mark.TAKEN_TOGETHER)
_ANYWHERE = (Mark.PATCHED, Mark.PATCHED_AS)  # several notes of a module stand in one text
_BEFORE = (
    Mark.UNORDERED,
    Mark.TAKES,
    Mark.WRITES,
    Mark.EXECUTED_IN,
    Mark.OPSET,
    Mark.OF_MODULE,
    Mark.NODE,
    Mark.KERNEL,
    Mark.JOINED,
    Mark.OF_PIECES,
    Mark.SHOWN_RANK,
    Mark.TRANSLATED,
)


def mark(kind: Mark, value: object = "") -> str:
    """Returns the text of a note, with its value."""
    return f"{value}{kind}" if kind in _BEHIND else f"{kind}{value}"


def _is(kind: Mark, note: str) -> bool:
    if kind in _BEFORE:
        return note.startswith(kind)
    if kind in _BEHIND:
        return note.endswith(kind)
    return kind in note if kind in _ANYWHERE else note == kind


def has_mark(noted: Call | Program, kind: Mark) -> bool:
    """Whether one of the notes of a call has this mark."""
    return bool(noted.notes) and any(_is(kind, note) for note in noted.notes)


def mark_values(noted: Call | Program, kind: Mark) -> list[str]:
    """Returns the values of all its notes with this mark."""
    notes = [note for note in noted.notes if _is(kind, note)]
    if kind in _BEHIND:
        return [note.removesuffix(kind) for note in notes]
    return [
        note.rpartition(kind)[2] if kind in _ANYWHERE else note.removeprefix(kind) for note in notes
    ]


def taken_parameters(call: Call) -> list[tuple[str, str]]:
    """Returns (name, place) of the parameters that an operator of a graph reads, according to its
    notes.
    """
    parts = (value.rpartition(" as ") for value in mark_values(call, Mark.TAKES))
    return [(name, place) for name, _, place in parts]


def mark_value(noted: Call | Program, kind: Mark) -> str:
    """Returns the value of the first note with this mark, "" without one."""
    return next(iter(mark_values(noted, kind)), "")


class EngineModel(StrEnum):
    """The type of the calls of a model that an engine loaded from a file."""

    ONNX_RUNTIME = "InferenceSession"
    OPENVINO = "CompiledModel"


class NoProgram(StrEnum):
    """Prefixes of the reasons why a call has no program, for code that tests them."""

    COMPILED = "compiled"
    RUNS_COMPILED = "runs compiled"
    SCRIPTED = "scripted"
    RANDOM = "draws random numbers"


NOT_WRITTEN = "memory that was not written yet"
"""Why a tensor has no elements: what it holds means nothing."""

READS_UNWRITTEN = f"works on {NOT_WRITTEN}"
EMPTY_IS_READ = (
    "a tensor changed without an operator that wrote it (memory made by `empty` is read)"
)
"""Why a call has no program that reads memory which `empty` made: an operator, and code."""


def reads_unwritten(call: Call) -> bool:
    """Whether the call, as far as recorded, reads memory that nothing wrote."""
    return call.no_program in (READS_UNWRITTEN, EMPTY_IS_READ)


def drawn_by(call: Call) -> str:
    """Returns the operator by which a call draws random numbers, "" where it draws none or none is
    stated.
    """
    operator = call.no_program.removeprefix(NoProgram.RANDOM).partition("(")[2].rstrip(")")
    return operator if call.no_program.startswith(NoProgram.RANDOM) else ""


def is_without_program(call: Call, *reasons: NoProgram) -> bool:
    """Whether one of these is the reason why there is no program."""
    return call.no_program.startswith(reasons)


def is_hidden_by_compiler(call: Call) -> bool:
    """Whether no program of the call was recorded because compiled or scripted code ran."""
    return is_without_program(call, NoProgram.COMPILED, NoProgram.RUNS_COMPILED, NoProgram.SCRIPTED)


def was_compiled(call: Call) -> bool:
    """Whether the call, or code that it ran, was compiled, according to its notes or the reason for
    the missing program.
    """
    return is_hidden_by_compiler(call) or any(
        note.startswith(NoProgram.COMPILED) for note in call.notes
    )


def hidden_inside(call: Call) -> str:
    """Returns the note of a call whose inner calls were not recorded, "" for any other call."""
    return call.notes[0] if call.notes and _is(Mark.HIDDEN, call.notes[0]) else ""


def gathered(rows: str, calls: int) -> str:
    """Returns the note of a call that was cut from others or joined from them, by rows
    and tokens.
    """
    return mark(Mark.JOINED, f"{rows} of {calls} {'call' if calls == 1 else 'calls'}")


def is_gathered(call: Call) -> bool:
    """Whether this call was cut from others or joined from them."""
    return has_mark(call, Mark.JOINED)


def of_pieces(ranks: int) -> str:
    """Returns the note of a joined call that worked on pieces of its tensors."""
    return mark(Mark.OF_PIECES, f"{ranks} ranks hold")


def is_of_pieces(call: Call) -> bool:
    """Whether each rank worked on pieces of this call's tensors."""
    return has_mark(call, Mark.OF_PIECES)


def shown(rank: int) -> str:
    """Returns the note of a joined call whose tensors should be equal on all ranks and are not."""
    return mark(Mark.SHOWN_RANK, rank)


def shown_rank(call: Call) -> str:
    """Returns the rank whose tensors represent all in a call whose ranks differ; "" where they do
    not.
    """
    return mark_value(call, Mark.SHOWN_RANK)


_UNPLACED = "how it lies on the ranks is not known"


def unplaced(ranks: int) -> str:
    """Returns the reason of a tensor without elements: the ranks hold different ones, and nothing
    tells how to join them.
    """
    return (
        f"{_UNPLACED}: {ranks} ranks differ, and no tensor of the other run says what they "
        "make together"
    )


def is_unplaced(record: Record) -> bool:
    """Whether neither elements nor shape of a tensor are known, since its layout over the ranks is
    not known.
    """
    return record.why.startswith(_UNPLACED)


OVERWRITTEN = "overwritten without being read"
"""Why an operator's argument has no elements: what it held does not matter."""

OBSERVER = "observer effect: "
"""How the note of a run begins that says how its own capture changed it."""

FILES_CHANGED = "files-changed"
"""Kind of a run's note that says that a tool's files are read in the place of the run beside
them.
"""

WRITING = "is still being written"
"""How the reason begins why a run has not ended whose process runs."""

STOPPED = "stopped"
"""Kind of the note that a capture stopped while its program went on."""

# Names under which other files ask for the same texts.
MEMORY_ORDER = Mark.MEMORY_ORDER.value
NOT_SELECTED = Mark.NOT_SELECTED.value
PATCHED = Mark.PATCHED.value
PATCHED_AS = Mark.PATCHED_AS.value
GATHERED = Mark.PUT_TOGETHER.value
UNTOLD = Mark.INPUTS_UNKNOWN.value
WIDER = Mark.STORED_WIDER.value
UNORDERED = Mark.UNORDERED.value
TAKES = Mark.TAKES.value
ONEDNN = Mark.ONEDNN.value
