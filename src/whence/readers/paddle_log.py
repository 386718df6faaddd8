"""Logs of Paddle inference: tensors a hook printed, kernels' VLOGMatrix blocks, the tensor checker's figures, edges from GLOG_v >= 3.

Layout as written by Paddle 2.4 to 3.3. A hook line is `print(op_type, tensor_name, tensor)`; glog lines may stand anywhere, also
between the words of a hook line. The log is mapped; a print is read when its tensor is asked for.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whence.dtypes import Array
from whence.readers.building import Building
from whence.readers.parts import paddle_print
from whence.readers.parts.paddle_names import plain_name, plain_type
from whence.readers.place import Place
from whence.records import Run, Statistics

LOOKS_LIKE = "a log with tensors that Paddle printed, `===>:` blocks or [PRECISION] lines"
ORDER = 45
_FAR_BYTES = 4 << 20  # how far into a log its first tensor may stand
_WORDS = 4  # of a line before a tensor's that are its name
_LONGEST_NAME = 300
_SAME_SHARE = 0.95  # of the names of a step that an earlier one has

_ANSI = re.compile(rb"\x1b\[[\d;]{0,10}m")
_LABEL = re.compile(rb"===>:\s*([^\n]{1,300}?)\s*$")
_PRECISION = re.compile(
    rb"\[PRECISION\]\s*(\[ERROR\])?\s*in \[device=([^,\]]*), op=([^,\]]*), tensor=([^,\]]*), dtype=([^,\]]*)\], (numel=[^\n]*)"
)
_OPERATOR = re.compile(rb"Op\(([^()\s]{1,200})\), inputs:\{(.*)\}, outputs:\{(.*)\}")
_VARIABLE = re.compile(rb"([^\s,\[\]{}():;=]{1,300}):(?=\[|[a-z_0-9]{1,30}\[)")
_STEP = re.compile(rb"[-=#>* ]{0,20}(?:step|run|iteration|iter)[ :=#]{0,3}(\d{1,9})[-=#<*: ]{0,20}", re.IGNORECASE)
_FIGURE = re.compile(rb"(\w{1,20})=([-+.\w]{1,40})")
_MARKS = (b"Tensor(shape=[", b"===>: ", b"[PRECISION]")
_KINDS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "complex64": "complex64", "complex128": "complex128"}


def sniff(place: Place) -> bool:
    """Is this text in which Paddle's marks stand? Looks further than the head only when the head is a glog."""
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
    return (b"Tensor(shape=[" in text and b"lace(" in text) or _PRECISION.search(text) is not None or (b"] ===>: " in text)


@dataclass(slots=True)
class _Point:
    """Something a log shows of a tensor, in the order of the log. inputs: names it was made of, where the log says so."""

    name: str
    op_type: str
    kind: str
    printed: paddle_print.Printed | None = None
    values: Array | None = None
    quantum: float = 0.0
    statistics: Statistics | None = None
    dtype: str = ""
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    marked: int = -1


@dataclass(slots=True)
class _Scan:
    """What a log holds. edges: (place among the points, outputs, inputs) of operators that ran."""

    points: list[_Point] = field(default_factory=list)
    edges: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)
    before: bytes = b""
    label: bytes = b""
    step: int = -1
    glog: int = 0
    empty: int = 0


def open_run(place: Place) -> Run:
    """The tensors of a log, a call each, by step; inputs where the log has the executor's `Op(..), inputs:{..}` lines."""
    with place.path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    scan = _scanned(text)
    building = Building(place.path, "paddle log")
    steps = _steps(scan.points)
    edges = iter([*scan.edges, (len(scan.points), (), ())])
    coming = next(edges)
    makers: dict[str, tuple[str, ...]] = {}
    latest: dict[str, int] = {}
    before = -1
    for number, (point, step) in enumerate(zip(scan.points, steps, strict=True)):
        while coming[0] <= number and coming[1]:
            makers.update((name, coming[2]) for name in coming[1])
            coming = next(edges)
        if step != before:
            latest, before = {}, step
        record = _added(building, text, point)
        building.call(
            point.name, op_type=point.op_type, kind=point.kind, step=step, outputs=[record], notes=point.notes,
            inputs=sources(point.name, makers, latest) if point.kind == "operator" else (),
        )  # fmt: skip
        if point.kind == "operator":
            latest[point.name] = record
    _noted(building, scan)
    return building.run()


def sources(name: str, makers: dict[str, tuple[str, ...]], latest: dict[str, int]) -> list[int]:
    """Records of which a tensor was made: of operators whose outputs a log does not show, what they were made of."""
    found: dict[int, None] = {}
    seen = set()
    todo = list(reversed(makers.get(name, ())))
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in latest:
            found[latest[one]] = None
        elif one != name:
            todo += reversed(makers.get(one, ()))
    return list(found)


def _added(building: Building, text: mmap.mmap, point: _Point) -> int:
    printed = point.printed
    if printed is not None:
        shown = printed

        def load() -> Array:
            return paddle_print.elements(text[shown.start : shown.end], shown)

        return building.tensor(
            printed.dtype, printed.shape, None if printed.why else load, why=printed.why, quantum=printed.quantum, whole=printed.whole,
            device=printed.device,
        )  # fmt: skip
    if point.values is not None:
        values = point.values
        return building.array(values, quantum=point.quantum)
    count = point.statistics.count if point.statistics is not None else 0
    why = "the tensor checker writes figures, no elements"
    return building.tensor(point.dtype, (count,), why=why, statistics=point.statistics, device=point.device)


def _noted(building: Building, scan: _Scan) -> None:
    if scan.empty:
        building.note("error", f"{scan.empty} tensors were printed before they were filled (Not initialized); they are left out")
    lost = [p for p in scan.points if p.printed is not None and p.printed.why]
    if lost and lost[-1].printed is not None:
        more = f" (and of {len(lost) - 1} others)" if len(lost) > 1 else ""
        building.note("error", f"the print of {lost[0].name}{more} cannot be read: {lost[0].printed.why if lost[0].printed else ''}")
    kinds = [p.kind for p in scan.points]
    if "label" in kinds and "operator" in kinds:
        last = len(kinds) - 1 - kinds[::-1].index("label")
        if kinds.index("operator") > last or kinds.index("label") > len(kinds) - 1 - kinds[::-1].index("operator"):
            building.note(
                "error", "all `===>:` blocks stand apart from the printed tensors: stdout was buffered, so which operator they belong "
                "to is not known; run with PYTHONUNBUFFERED=1"
            )  # fmt: skip


def _scanned(text: mmap.mmap) -> _Scan:
    scan = _Scan()
    size, place = len(text), 0
    header = paddle_print.HEADER.search(text, 0)
    while header is not None:
        following = paddle_print.HEADER.search(text, header.end())
        _between(scan, text[place : header.start()], last=True)
        limit = following.start() if following is not None else size
        printed = paddle_print.read(text, header, limit)
        scan.points.append(_printed(scan, printed))
        scan.words, scan.before = [], b""
        place, header = printed.end, following
    _between(scan, text[place:size], last=False)
    return scan


def _printed(scan: _Scan, printed: paddle_print.Printed) -> _Point:
    """The point of a tensor whose words before it were gathered."""
    words = [word for word in scan.words if not word.endswith(b":") or b"pd_op" in word]
    if words:
        op, name = (words[-2].lstrip(b"+-").decode("utf-8", "replace") if len(words) > 1 else ""), words[-1]
    else:
        op, name = "", scan.before
    told = name[:_LONGEST_NAME].decode("utf-8", "replace").strip(" :=,#") or "tensor"
    return _Point(plain_name(told), plain_type(op), "operator", printed, marked=scan.step)


def _between(scan: _Scan, text: bytes, *, last: bool) -> None:
    """Read what stands between two tensors. last: the text after the last line break stands before a tensor's header."""
    if not last or text.count(b"\n") > 1 or b"] " in text or b"\x1b" in text:
        lines = text.split(b"\n")
        own = lines.pop() if last else b""
        for line in lines:
            _line(scan, line.rstrip(b"\r"))
    else:
        first, _, own = text.rpartition(b"\n")
        if first.strip():
            _line(scan, first.rstrip(b"\r"))
    if own.strip():
        if b"\x1b" in own:
            own = _ANSI.sub(b"", own)
        found = paddle_print.GLOG.search(own)
        scan.words += (own[: found.start()] if found is not None else own).split()


def _line(scan: _Scan, line: bytes) -> None:
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    header = paddle_print.GLOG.search(line) if b"] " in line or line.endswith(b"]") else None
    if header is not None:
        scan.glog += 1
        words = line[: header.start()].split()
        if 0 < len(words) <= _WORDS:
            scan.words += words
        line = line[header.end() :]
    label = _LABEL.search(line) if b"===>:" in line else None
    if label is not None:
        scan.label = label[1]
        return
    if scan.label and line.strip():
        found, name = paddle_print.numbers(line), scan.label.decode("utf-8", "replace")
        scan.label = b""
        if found is not None:
            values, quantum = found
            values = values if values.dtype == np.int64 else values.astype(np.float32)
            notes = ("inside a kernel: the first elements only",)
            scan.points.append(_Point(name, "VLOGMatrix", "label", values=values, quantum=quantum, notes=notes, marked=scan.step))
            return
    if b"[PRECISION]" in line:
        found_figures = _PRECISION.search(line)
        if found_figures is not None:
            scan.points.append(_checked(scan, found_figures))
        return
    if b"Op(" in line and b"inputs:{" in line:
        edge = _OPERATOR.search(line)
        if edge is not None:
            inputs, outputs = (tuple(dict.fromkeys(map(_variable, _VARIABLE.findall(edge[i])))) for i in (2, 3))
            scan.edges.append((len(scan.points), outputs, inputs))
        return
    if header is not None or not line.strip() or line.startswith(b"--- Running") or line.startswith(b"Parameter containing"):
        return
    if b"Tensor(Not initialized)" in line:
        scan.empty += 1
        scan.words = []
        return
    step = _STEP.fullmatch(line.strip())
    if step is not None:
        scan.step += 1
    scan.before = line if len(line) <= _LONGEST_NAME else b""


def _variable(name: bytes) -> str:
    return plain_name(name.decode("utf-8", "replace"))


def _checked(scan: _Scan, found: re.Match[bytes]) -> _Point:
    """A line of the tensor checker: figures of one tensor, without a name in eager mode."""
    figures = {k.decode(): v.decode("utf-8", "replace") for k, v in _FIGURE.findall(found[6])}

    def number(key: str) -> float | None:
        try:
            value = float(figures[key])
        except (KeyError, ValueError):
            return None
        return value if np.isfinite(value) else None

    def whole(key: str) -> int:
        return int(figures[key]) if figures.get(key, "").isdigit() and len(figures[key]) < 19 else 0

    statistics = Statistics(
        whole("numel"), number("min"), number("max"), number("mean"), None, None, whole("num_nan"), whole("num_inf"), whole("num_zero")
    )  # fmt: skip
    device, op, tensor, dtype = (found[i].decode("utf-8", "replace").strip() for i in (2, 3, 4, 5))
    notes = ("the checker calls this an error",) if found[1] else ()
    return _Point(
        plain_name(tensor) if tensor else plain_type(op), plain_type(op), "operator", statistics=statistics, device=device,
        dtype=_KINDS.get(dtype, dtype), notes=notes, marked=scan.step,
    )  # fmt: skip


def _steps(points: Sequence[_Point]) -> list[int]:
    """The step of every point: by the marks a log has, else a name that comes again begins the next.

    A name may come more often than once a step (loops, writing in place), so the first name that comes as often as most do is the
    one to count; where steps begin must then hold for all names.
    """
    if any(p.marked >= 0 for p in points):
        return [max(p.marked, 0) for p in points]
    steps = [0] * len(points)
    hooked = [i for i, p in enumerate(points) if p.kind == "operator" and (p.printed is not None or p.name != p.op_type)]
    starts = _starts([points[i].name for i in hooked])
    for step, start in enumerate(starts):
        # What a kernel logged stands before what its operator returned.
        begins = hooked[start - 1] + 1 if start else 0
        end = hooked[starts[step + 1] - 1] + 1 if step + 1 < len(starts) else len(points)
        steps[begins:end] = [step] * (end - begins)
    return steps


def _starts(names: Sequence[str]) -> list[int]:
    """Where the steps of a sequence of names begin."""
    counts = Counter(names)
    if len(names) == len(counts) or not names:
        return [0]
    often = Counter(counts.values()).most_common(1)[0][0]
    for wanted in ((often, often + 1), (often,)):
        anchor = next((i for i, name in enumerate(names) if counts[name] in wanted), None)
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


__all__ = ["LOOKS_LIKE", "ORDER", "open_run", "sniff", "sources"]
