"""What differs, in words, and what makes a program repeat itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whence.errors import ElementsMissing
from whence.records.marks import NoProgram, drawn_by, reads_unwritten
from whence.records.slots import is_drawn, is_of_child, is_state
from whence.results import SourceKind
from whence.workflows.repeat.programs import ChangedOperation, documented, is_own_backward
from whence.workflows.repeat.sources import has_operators, initial_states, outside_inputs

if TYPE_CHECKING:
    from whence.dtypes import Array
    from whence.records import Run
    from whence.workflows.repeat.sources import Difference, Walk

_ROW_BYTES = 16  # a shorter row may be equal by chance
_SEED = "seed the program before it draws: torch.manual_seed(0), numpy.random.seed(0)"
_TRY_SEED = "whence repeat --seed 0 tells whether a seed is enough"
_DETERMINISTIC = "torch.use_deterministic_algorithms(True) (whence repeat --deterministic tries it)"


def words_and_advice(
    difference: Difference, walk: Walk, inner: ChangedOperation | None
) -> tuple[str, tuple[str, ...]]:
    """(what differs, what makes it repeat). inner: the operation of the call's program that does
    not repeat, where that is known.
    """
    words = {
        SourceKind.INPUT: _input,
        SourceKind.STATE: _state,
        SourceKind.RANDOM: _random,
        SourceKind.OPERATOR: _operator,
    }
    kind = difference.kind
    if kind in words:
        return words[kind](difference, walk, inner)
    if kind == SourceKind.CODE and difference.changed is not None:
        return (
            difference.words or difference.changed.words,
            (
                "look at the line for what differs from run to run: the time, a random number of "
                "Python, the order of a set (PYTHONHASHSEED=0 fixes it)",
            ),
        )
    return difference.words, ("look for what decides this: the time, a file that the program "
                              "writes itself, a random number",)  # fmt: skip


def _input(
    difference: Difference, walk: Walk, inner: ChangedOperation | None
) -> tuple[str, tuple[str, ...]]:
    shared, rows = _shared_rows(difference, walk)
    loader = "DataLoader(..., generator=torch.Generator().manual_seed(0))"
    workers = "with num_workers, seed numpy and random in worker_init_fn"
    if rows and shared:
        every = f"all {rows} of its rows" if shared == rows else f"{shared} of its {rows} rows"
        words = f"the data come in another order: {every} are in the other run at another place"
        return words, (f"fix the order: shuffle=False, or {loader}", workers, _TRY_SEED)
    return "the program gives it other data", (_SEED, f"{loader}; {workers}", _TRY_SEED)


def _shared_rows(difference: Difference, walk: Walk) -> tuple[int, int]:
    """How many rows of an input are rows of the same input at any step of the other run; (0, 0)
    where rows tell nothing.
    """
    if difference.records is None:
        return 0, 0
    try:
        rows = _rows(walk.second.array(difference.records[1]))
        others: set[bytes] = set()
        for record in outside_inputs(walk.first, difference.call, difference.slot):
            others.update(_rows(walk.first.array(record)))
    except ElementsMissing:
        return 0, 0
    return sum(row in others for row in rows), len(rows)


def _rows(array: Array) -> list[bytes]:
    if array.ndim < 2 or array.nbytes // max(len(array), 1) < _ROW_BYTES:
        return []
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    return [row.tobytes() for row in rows if (row != row[0]).any()]


def _state(
    difference: Difference, walk: Walk, inner: ChangedOperation | None
) -> tuple[str, tuple[str, ...]]:
    first, second = initial_states(walk.first), initial_states(walk.second)
    hashes = {walk.first.records[r].hash: name for name, r in first.items()}
    moved = [
        name
        for name, record in second.items()
        if name in first
        and (digest := walk.second.records[record].hash)
        and digest != walk.first.records[first[name]].hash
        and digest in hashes
    ]
    if moved:
        words = (
            f"it holds what {hashes[walk.second.records[second[moved[0]]].hash]} holds in the "
            "other run: values are drawn in another order"
            if len(moved) == 1
            else f"values stand in other parameters ({len(moved)} of {len(first)}): they are drawn "
            "in another order"
        )
        return words, (
            "make the order one: sorted(...) in the place of a set, or PYTHONHASHSEED=0",
        )
    if difference.call.step:
        return "code that was not captured sets it to another value", (_SEED, _TRY_SEED)
    return "it begins with other values", (
        f"{_SEED}, before the model is made",
        "if it is read from a file: a file that the program itself writes",
        _TRY_SEED,
    )


def _random(
    difference: Difference, walk: Walk, inner: ChangedOperation | None
) -> tuple[str, tuple[str, ...]]:
    drawn = _drawn_by(difference, walk.first)
    words = f"draws other random numbers{f' ({drawn})' if drawn else ''}"
    if not draws_differ(difference, walk):
        words = f"{NoProgram.RANDOM}{f' ({drawn})' if drawn else ''}: these differ, or an operator"
        return words, (_SEED, "whence repeat --level op tells which of the two it is")
    if walk.first.info.seed is None:
        return words, (_SEED, _TRY_SEED)
    return f"{words} although the run was seeded: something else draws before it, or seeds anew", (
        "draw in one thread and in a fixed order, or give the draw a generator of its own",
    )


def _drawn_by(difference: Difference, run: Run) -> str:
    """The operator that drew random numbers, "" where it is not known."""
    program = run.programs.get(difference.call.program)
    draws = program.draws if program is not None else ()
    operators = {draw.slot: draw.operator for draw in draws}
    return operators.get(difference.slot, "") or drawn_by(difference.call)


def draws_differ(difference: Difference, walk: Walk) -> bool:
    """Is it certain that other numbers were drawn: do they differ themselves, the generator's
    state, or what a dropout leaves at zero?
    """
    if is_state(difference.slot) or is_drawn(difference.slot):
        return True
    if "dropout" not in difference.call.op_type.lower() or difference.records is None:
        return False
    arrays = walk.records.elements(*difference.records)
    return arrays is not None and bool(((arrays[0] == 0) != (arrays[1] == 0)).any())


def _operator(
    difference: Difference, walk: Walk, inner: ChangedOperation | None
) -> tuple[str, tuple[str, ...]]:
    reason = difference.call.no_program
    if reads_unwritten(difference.call):
        return "reads memory that torch.empty made and nothing wrote", (
            f"write it before it is read; {_DETERMINISTIC} fills such memory",
        )
    if inner is not None:
        return f"{inner.operator} {inner.words}", (_DETERMINISTIC,)
    names = documented(walk.first.programs.get(difference.call.program))
    device = _device(difference, walk.first)
    if names and device not in ("", "cpu"):
        advice = [_DETERMINISTIC]
        if any("conv" in name for name in names):
            advice.append("torch.backends.cudnn.benchmark = False")
        if any(name.startswith("aten.bmm") for name in names):
            advice.append("CUBLAS_WORKSPACE_CONFIG=:4096:8")
        return f"runs {', '.join(names[:3])}, which torch documents as not deterministic", (
            *advice,
        )
    words = "gives another result on equal inputs"
    if is_of_child(difference.slot) and has_operators(walk.first, difference.call):
        words = "is made by code that torch does not see: numpy, a thread, an extension"
    elif is_own_backward(walk.first, difference.call) or (
        difference.partner is not None and is_own_backward(walk.second, difference.partner)
    ):
        words += "; a backward of its own computes it (torch.autograd.Function)"
    elif reason:
        words += f"; it cannot be looked into ({reason})"
    advice = [_DETERMINISTIC, "an operator of your own: sum in a fixed order, write every element"]
    return words, tuple(advice)


def _device(difference: Difference, run: Run) -> str:
    if difference.records is None:
        return ""
    return run.records[difference.records[0]].device
