"""Logs of Paddle inference: tensors a hook printed, kernels' VLOGMatrix blocks, the tensor
checker's figures, edges from GLOG_v >= 3.

Layout as written by Paddle 2.4 to 3.3. A hook line is `print(op_type, tensor_name, tensor)`.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Sequence

from whence.display import listed
from whence.dtypes import DTYPES, Array
from whence.readers.assembly.builder import Building
from whence.readers.paddle import printed as paddle_print
from whence.readers.paddle.log_scan import PRECISION, TABLE, LogScan, Point
from whence.readers.source import Place
from whence.records import Run
from whence.records.marks import Mark, mark

LOOKS_LIKE = "a log with tensors that Paddle printed, `===>:` blocks or [PRECISION] lines"
ORDER = 45
ALONE = "a log with printed tensors"
_FAR_BYTES = 4 << 20  # how far into a log its first tensor may stand
_BLOCK_VALUES = 10  # that a kernel logs of a tensor, however large it is
_SAME_SHARE = 0.95  # of the names of a step that an earlier one has

# names of operator outputs
_MADE = re.compile(r"\?|inner_var\.\d+|.*block_arg_\d+|(?:.*[._])?tmp_\d+.*")
_FOLDED = "constant_folding@"


def sniff(place: Place) -> bool:
    """Whether this is text that contains Paddle's marks. Reads beyond the head only when the head
    is a glog.
    """
    head = place.head
    if place.is_folder or b"\0" in head[:4096]:
        return False
    if _marked(head):
        return True
    if place.size > len(head) and (paddle_print.GLOG.search(head[:8192]) or b"--- Running" in head):
        with place.path.open("rb") as file:
            return _marked(file.read(_FAR_BYTES))
    return False


def _marked(text: bytes) -> bool:
    return (
        (b"Tensor(shape=[" in text and b"lace(" in text)
        or b"] ===>: " in text
        or TABLE in text
        or PRECISION.search(text) is not None
    )


def open_run(place: Place) -> Run:
    """Returns a call for each tensor of a log, by step. Calls have inputs where the log has the
    executor's `Op(..), inputs:{..}` lines.
    """
    with place.path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    scan = LogScan()
    scan.read(text)
    building = Building(place.path, "paddle log")
    steps = _steps(scan.points)
    edges = iter([*scan.edges, (len(scan.points), (), ())])
    position, outputs, inputs = next(edges)
    makers: dict[str, tuple[str, ...]] = {}
    latest: dict[str, int] = {}
    current = -1
    for i, (point, step) in enumerate(zip(scan.points, steps, strict=True)):
        while position <= i and outputs:
            makers.update((name, inputs) for name in outputs)
            position, outputs, inputs = next(edges)
        if step != current:
            latest, current = {}, step
        record = _record(building, text, point, file=f"{place.path.name},{point.row}")
        sources = _sources(point, makers, latest)
        is_open = bool(scan.edges) and sources is None
        building.call(
            point.name,
            op_type=point.op_type,
            kind=point.kind,
            step=step,
            outputs=[record],
            inputs=sources or (),
            notes=(*point.notes, mark(Mark.INPUTS_UNKNOWN)) if is_open else point.notes,
        )
        if point.kind == "operator":
            latest[point.name] = record
            if point.first_name:
                latest[point.first_name] = record
    _add_notes(building, scan)
    return building.run()


def _sources(
    point: Point, makers: dict[str, tuple[str, ...]], latest: dict[str, int]
) -> dict[str, int] | None:
    """Returns the records that a tensor was computed from, by name. An output that the log does not
    show is replaced by the inputs of its operator. None where the log lacks one of them.

    Weights and inputs of the model are not outputs of an operator.
    """
    name = point.first_name or point.name
    if point.kind != "operator" or name not in makers:
        return None
    records: dict[str, int] = {}
    visited = {name}
    todo = list(reversed(makers[name]))
    while todo:
        source = todo.pop()
        if source.startswith(_FOLDED):
            continue  # a constant, whose operators ran in a pass
        if source in latest:
            records[source] = latest[source]
        elif source in makers and source not in visited:
            todo += reversed(makers[source])
        elif source in visited or _MADE.fullmatch(source):
            return None
        visited.add(source)
    return records


def _record(building: Building, text: mmap.mmap, point: Point, file: str) -> int:
    printed = point.printed
    if printed is not None:

        def load() -> Array:
            return paddle_print.elements(text[printed.start : printed.end], printed)

        return building.tensor(
            printed.dtype,
            printed.shape,
            None if printed.why else load,
            why=printed.why,
            quantum=printed.quantum,
            whole=printed.whole,
            device=printed.device,
            file="" if printed.why or printed.dtype not in DTYPES else file,
        )
    if point.values is not None:
        values = point.values
        return building.array(
            values,
            quantum=point.quantum,
            whole=(-1,) if values.size >= _BLOCK_VALUES else (),
            file=file,
        )
    count = point.statistics.count if point.statistics is not None else 0
    why = "the tensor checker writes figures, no elements"
    return building.tensor(
        point.dtype, (count,), why=why, statistics=point.statistics, device=point.device
    )


def _add_notes(building: Building, scan: LogScan) -> None:
    """Notes which parts of the log are not compared."""
    if scan.empty:
        building.note(
            "error",
            f"{scan.empty} tensors were printed before they were filled (Not initialized); they "
            "are left out",
        )
    if scan.stated:
        named = [
            f"{name} {state}" + (f" ({n} times)" if n > 1 else "")
            for (name, state), n in scan.stated.most_common()
        ]
        building.note(
            "error",
            "lines that say whether a tensor is there are not compared: they hold no numbers "
            f"({listed(named, 3)})",
        )
    if scan.tables:
        building.note(
            "error",
            f"{scan.tables} tables of how often operators ran in which dtype are not compared: "
            "they hold no tensors",
        )
    unreadable = [(p.name, p.printed.why) for p in scan.points if p.printed and p.printed.why]
    if unreadable:
        name, why = unreadable[0]
        others = f" (and of {len(unreadable) - 1} others)" if len(unreadable) > 1 else ""
        building.note("error", f"the print of {name}{others} cannot be read: {why}")
    if _stand_apart([p.kind for p in scan.points]):
        building.note(
            "error",
            "all `===>:` blocks are apart from the printed tensors: stdout was buffered, "
            "so which operator they belong "
            "to is not known; run with PYTHONUNBUFFERED=1",
        )


def _stand_apart(kinds: list[str]) -> bool:
    """Whether all labels precede or follow all operators."""
    if "label" not in kinds or "operator" not in kinds:
        return False
    last = {kind: i for i, kind in enumerate(kinds)}
    return kinds.index("operator") > last["label"] or kinds.index("label") > last["operator"]


def _steps(points: Sequence[Point]) -> list[int]:
    """Returns the step of every point: by the lines that begin steps; otherwise a repeated name
    begins the next step.

    A name may occur more than once a step (loops, in-place writes). The name that counts steps is
    therefore the first one with the most common number of occurrences, and the steps must then fit
    all names.
    """
    if any(p.step >= 0 for p in points):
        return [max(p.step, 0) for p in points]
    steps = [0] * len(points)
    hooked = [
        i
        for i, p in enumerate(points)
        if p.kind == "operator" and (p.printed is not None or p.name != p.op_type)
    ]
    starts = _starts([points[i].name for i in hooked])
    for step, start in enumerate(starts):
        # The lines that a kernel logs precede the output of its operator.
        begins = hooked[start - 1] + 1 if start else 0
        end = hooked[starts[step + 1] - 1] + 1 if step + 1 < len(starts) else len(points)
        steps[begins:end] = [step] * (end - begins)
    return steps


def _starts(names: Sequence[str]) -> list[int]:
    """Returns the positions at which the steps of a sequence of names begin."""
    counts = Counter(names)
    if len(names) == len(counts) or not names:
        return [0]
    often = Counter(counts.values()).most_common(1)[0][0]
    for allowed in ((often, often + 1), (often,)):
        anchor = next((i for i, name in enumerate(names) if counts[name] in allowed), None)
        if anchor is None or counts[names[anchor]] < 2:
            continue
        starts = [i - anchor for i, name in enumerate(names) if name == names[anchor]]
        if _alike(names, starts):
            return starts
    return [0]


def _alike(names: Sequence[str], starts: Sequence[int]) -> bool:
    ends = [*starts[1:], len(names)]
    first = set(names[: ends[0]])
    later = names[ends[0] :]
    return bool(later) and sum(name in first for name in later) >= _SAME_SHARE * len(later)
