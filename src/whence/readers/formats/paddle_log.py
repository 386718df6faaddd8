"""Logs of Paddle inference: tensors a hook printed, kernels' VLOGMatrix blocks, the tensor
checker's figures, edges from GLOG_v >= 3.

Layout as written by Paddle 2.4 to 3.3. A hook line is `print(op_type, tensor_name, tensor)`; glog
lines may stand anywhere, also between the words of a hook line. The log is mapped; a print is read
when its tensor is asked for.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whence.dtypes import Array
from whence.readers.assembly.builder import Building
from whence.readers.paddle import printed as paddle_print
from whence.readers.paddle.names import plain_name, plain_type
from whence.readers.source import Place
from whence.records import Run, Statistics
from whence.records.marks import Mark, mark

LOOKS_LIKE = "a log with tensors that Paddle printed, `===>:` blocks or [PRECISION] lines"
ORDER = 45
_FAR_BYTES = 4 << 20  # how far into a log its first tensor may stand
_BLOCK_VALUES = 10  # that a kernel logs of a tensor, however large it is
_PLAIN_AXES = 3  # of a tensor that oneDNN leaves in order
_WORDS = 4  # of a line before a tensor's that are its name
_LONGEST_NAME = 300
_SAME_SHARE = 0.95  # of the names of a step that an earlier one has

_ANSI = re.compile(rb"\x1b\[[\d;]{0,10}m")
_PRECISION = re.compile(
    rb"\[PRECISION\]\s*(\[ERROR\])?\s*in \[device=([^,\]]*), op=([^,\]]*), tensor=([^,\]]*), dtype=([^,\]]*)\], (numel=[^\n]*)"  # noqa: E501
)
_VARIABLE = re.compile(rb"(?:^|(?<=[\[,{ ]))([^\s,\[\]{}():;=]{1,300}):(?=\[|[a-z_0-9]{1,30}\[)")
# names of what operators make
_MADE = re.compile(r"\?|inner_var\.\d+|.*block_arg_\d+|(?:.*[._])?tmp_\d+.*")
# hand on what was made inside
_BLOCKS = re.compile(rb"Op\((?:pd_op\.)?(?:while|if|conditional_block|select_input)\w{0,20}\)")
_FOLDED = "constant_folding@"
_LAYOUTS = ("onednn_to_paddle_layout", "transfer_layout")
_STATED = re.compile(
    rb"([^\s,:;=][^,:;=\n]{0,80}?)[ *:]{1,4}(?:is |= ?)?((?:not )?(?:nullptr|initialized|allocated))\b[ .!]*$"  # noqa: E501
)
_STEP = re.compile(
    rb"[-=#>* ]{0,20}(?:step|run|iteration|iter)[ :=#]{0,3}(\d{1,9})[-=#<*: ]{0,20}", re.IGNORECASE
)
_FIGURE = re.compile(rb"(\w{1,20})=([-+.\w]{1,40})")
_LABEL, _OPERATOR, _INPUTS, _OUTPUTS = b"===>:", b"Op(", b"), inputs:{", b"}, outputs:{"
_TABLE = b"| -- FP16 Calls --"
_PIECE_BYTES = 8 << 20  # of what stands between two tensors that is taken apart at once
_KINDS = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}


def sniff(place: Place) -> bool:
    """Is this text in which Paddle's marks stand? Looks further than the head only when the head is
    a glog.
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
        or _TABLE in text
        or _PRECISION.search(text) is not None
    )


@dataclass(slots=True)
class _Point:
    """Something a log shows of a tensor, in the order of the log. same: the name it had before a
    change of layout.
    """

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
    same: str = ""


@dataclass(slots=True)
class _Scan:
    """What a log holds. edges: (place among the points, outputs, inputs) of operators that ran.
    stated: how often a line says that a tensor is a nullptr or initialized, by (tensor, state)."""

    points: list[_Point] = field(default_factory=list)
    edges: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)
    before: bytes = b""
    label: bytes = b""
    step: int = -1
    glog: int = 0
    empty: int = 0
    tables: int = 0
    stated: Counter[tuple[str, str]] = field(default_factory=Counter)


def open_run(place: Place) -> Run:
    """The tensors of a log, a call each, by step; inputs where the log has the executor's `Op(..),
    inputs:{..}` lines.
    """
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
        read = _sources(point, makers, latest)
        building.call(
            point.name,
            op_type=point.op_type,
            kind=point.kind,
            step=step,
            outputs=[record],
            inputs=read or (),
            notes=(*point.notes, mark(Mark.INPUTS_UNKNOWN))
            if scan.edges and read is None
            else point.notes,
        )
        if point.kind == "operator":
            latest[point.name] = record
            if point.same:
                latest[point.same] = record
    _noted(building, scan)
    return building.run()


def _sources(
    point: _Point, makers: dict[str, tuple[str, ...]], latest: dict[str, int]
) -> dict[str, int] | None:
    """Records of which a tensor was made, by name: of operators whose outputs a log does not show,
    what they were made of.

    None where the log does not tell it all. Weights and what the model is given are nobody's
    output.
    """
    name = point.same or point.name
    if point.kind != "operator" or name not in makers:
        return None
    found: dict[str, int] = {}
    seen = {name}
    todo = list(reversed(makers[name]))
    while todo:
        one = todo.pop()
        if one.startswith(_FOLDED):
            continue  # a constant, whose operators ran in a pass
        if one in latest:
            found[one] = latest[one]
        elif one in makers and one not in seen:
            todo += reversed(makers[one])
        elif one in seen or _MADE.fullmatch(one):
            return None
        seen.add(one)
    return found


def _added(building: Building, text: mmap.mmap, point: _Point) -> int:
    printed = point.printed
    if printed is not None:
        shown = printed

        def load() -> Array:
            return paddle_print.elements(text[shown.start : shown.end], shown)

        return building.tensor(
            printed.dtype,
            printed.shape,
            None if printed.why else load,
            why=printed.why,
            quantum=printed.quantum,
            whole=printed.whole,
            device=printed.device,
        )
    if point.values is not None:
        values = point.values
        return building.array(
            values, quantum=point.quantum, whole=(-1,) if values.size >= _BLOCK_VALUES else ()
        )
    count = point.statistics.count if point.statistics is not None else 0
    why = "the tensor checker writes figures, no elements"
    return building.tensor(
        point.dtype, (count,), why=why, statistics=point.statistics, device=point.device
    )


def _noted(building: Building, scan: _Scan) -> None:
    if scan.empty:
        building.note(
            "error",
            f"{scan.empty} tensors were printed before they were filled (Not initialized); they "
            "are left out",
        )
    if scan.stated:
        named = ", ".join(
            f"{name} {state}" + (f" ({n} times)" if n > 1 else "")
            for (name, state), n in scan.stated.most_common(3)
        )
        more = f" and {len(scan.stated) - 3} more" if len(scan.stated) > 3 else ""
        building.note(
            "error",
            "lines that say whether a tensor is there are not compared: they hold no numbers "
            f"({named}{more})",
        )
    if scan.tables:
        building.note(
            "error",
            f"{scan.tables} tables of how often operators ran in which dtype are not compared: "
            "they hold no tensors",
        )
    lost = [p for p in scan.points if p.printed is not None and p.printed.why]
    if lost and lost[-1].printed is not None:
        more = f" (and of {len(lost) - 1} others)" if len(lost) > 1 else ""
        building.note(
            "error",
            f"the print of {lost[0].name}{more} cannot be read: "
            f"{lost[0].printed.why if lost[0].printed else ''}",
        )
    kinds = [p.kind for p in scan.points]
    if "label" in kinds and "operator" in kinds:
        last = len(kinds) - 1 - kinds[::-1].index("label")
        if kinds.index("operator") > last or kinds.index("label") > len(kinds) - 1 - kinds[
            ::-1
        ].index("operator"):
            building.note(
                "error",
                "all `===>:` blocks stand apart from the printed tensors: stdout was buffered, "
                "so which operator they belong "
                "to is not known; run with PYTHONUNBUFFERED=1",
            )


def _scanned(text: mmap.mmap) -> _Scan:
    scan = _Scan()
    size, place = len(text), 0
    header = paddle_print.HEADER.search(text, 0)
    while header is not None:
        following = paddle_print.HEADER.search(text, header.end())
        _pieces(scan, text, place, header.start(), last=True)
        limit = following.start() if following is not None else size
        printed = paddle_print.read(text, header, limit)
        _add(scan, text, _printed(scan, printed))
        scan.words, scan.before = [], b""
        place, header = printed.end, following
    _pieces(scan, text, place, size, last=False)
    return scan


def _add(scan: _Scan, text: mmap.mmap, point: _Point) -> None:
    """Add a printed tensor. What only changes the layout of the tensor before it is that tensor,
    under its new name.

    Passes put such operators in where kernels of oneDNN end; a run without them has nothing that
    they face.
    """
    before = scan.points[-1] if scan.points else None
    if (
        point.op_type in _LAYOUTS
        and before is not None
        and before.printed is not None
        and point.printed is not None
    ):
        one, two = before.printed, point.printed
        if (one.dtype, one.shape) == (two.dtype, two.shape) and text[one.start : one.end] == text[
            two.start : two.end
        ]:
            notes = (*before.notes, f"laid out anew as {point.name}")
            point = replace(
                point, op_type=before.op_type, same=before.same or before.name, notes=notes
            )
            scan.points.pop()
    scan.points.append(point)


def _pieces(scan: _Scan, text: mmap.mmap, start: int, end: int, *, last: bool) -> None:
    """Read what stands between two tensors, a piece at a time, cut between lines."""
    while end - start > _PIECE_BYTES:
        cut = text.rfind(b"\n", start, start + _PIECE_BYTES) + 1 or start + _PIECE_BYTES
        _between(scan, text[start:cut], last=False)
        start = cut
    _between(scan, text[start:end], last=last)


def _printed(scan: _Scan, printed: paddle_print.Printed) -> _Point:
    """The point of a tensor whose words before it were gathered."""
    words = [word for word in scan.words if not word.endswith(b":") or b"pd_op" in word]
    if words:
        op, name = (
            (words[-2].lstrip(b"+-").decode("utf-8", "replace") if len(words) > 1 else ""),
            words[-1],
        )
    else:
        op, name = "", scan.before
    told = name[:_LONGEST_NAME].decode("utf-8", "replace").strip(" :=,#") or "tensor"
    # PIR names kernels of oneDNN as such, the executor before it does not.
    notes = (
        (mark(Mark.MEMORY_ORDER),)
        if len(printed.shape) > _PLAIN_AXES and not op.startswith("pd_op.")
        else ()
    )
    return _Point(
        plain_name(told), plain_type(op), "operator", printed, marked=scan.step, notes=notes
    )


def _between(scan: _Scan, text: bytes, *, last: bool) -> None:
    """Read what stands between two tensors. last: the text after the last line break stands before
    a tensor's header.
    """
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
    if _LABEL in line:
        scan.label = line.partition(_LABEL)[2].strip()[:_LONGEST_NAME]
        return
    if scan.label and line.strip() and len(line) <= paddle_print.LONGEST_ROW:
        found, name = paddle_print.numbers(line), scan.label.decode("utf-8", "replace")
        scan.label = b""
        if found is not None:
            values, quantum = found
            values = values if values.dtype == np.int64 else values.astype(np.float32)
            scan.points.append(
                _Point(
                    name,
                    "VLOGMatrix",
                    "label",
                    values=values,
                    quantum=quantum,
                    marked=scan.step,
                    notes=(mark(Mark.LOGGED),),
                )
            )
            return
    if b"[PRECISION]" in line:
        found_figures = _PRECISION.search(line)
        if found_figures is not None:
            scan.points.append(_checked(scan, found_figures))
        return
    if _INPUTS in line and _OPERATOR in line:
        read, _, wrote = line.partition(_INPUTS)[2].partition(_OUTPUTS)
        inputs, outputs = (
            tuple(dict.fromkeys(map(_variable, _VARIABLE.findall(names))))
            for names in (read, wrote)
        )
        scan.edges.append(
            (len(scan.points), outputs, (*inputs, "?") if _BLOCKS.search(line) else inputs)
        )
        return
    if (stated := _STATED.search(line)) is not None and b"Tensor(Not initialized)" not in line:
        scan.stated[stated[1].strip(b" *:-").decode("utf-8", "replace"), stated[2].decode()] += 1
        return
    if (
        header is not None
        or not line.strip()
        or line.startswith((b"--- Running", b"Parameter containing"))
    ):
        return
    if _TABLE in line:
        scan.tables += 1
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
        whole("numel"),
        number("min"),
        number("max"),
        number("mean"),
        None,
        None,
        whole("num_nan"),
        whole("num_inf"),
        whole("num_zero"),
    )
    device, op, tensor, dtype = (found[i].decode("utf-8", "replace").strip() for i in (2, 3, 4, 5))
    notes = ("the checker calls this an error",) if found[1] else ()
    return _Point(
        plain_name(tensor) if tensor else plain_type(op),
        plain_type(op),
        "operator",
        statistics=statistics,
        device=device,
        dtype=_KINDS.get(dtype, dtype),
        notes=notes,
        marked=scan.step,
    )


def _steps(points: Sequence[_Point]) -> list[int]:
    """The step of every point: by the marks a log has, else a name that comes again begins the
    next.

    A name may come more often than once a step (loops, writing in place), so the first name that
    comes as often as most do is the one to count; where steps begin must then hold for all names.
    """
    if any(p.marked >= 0 for p in points):
        return [max(p.marked, 0) for p in points]
    steps = [0] * len(points)
    hooked = [
        i
        for i, p in enumerate(points)
        if p.kind == "operator" and (p.printed is not None or p.name != p.op_type)
    ]
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
