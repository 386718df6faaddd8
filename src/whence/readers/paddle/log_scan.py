"""Parses the text of a Paddle log: tensors in the order of the log, and the edges between
operators.

glog lines may occur anywhere, also between the words of a hook line. The log is mapped; elements
are read on request.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from whence.dtypes import Array
from whence.readers.paddle import printed as paddle_print
from whence.readers.paddle.names import plain_name, plain_type
from whence.records import Statistics
from whence.records.marks import Mark, mark

_PLAIN_AXES = 3  # of a tensor that oneDNN leaves in order
_MAX_WORDS = 4  # of a line before a tensor's that are its name
_MAX_NAME = 300
_PIECE_BYTES = 8 << 20  # of what stands between two tensors that is taken apart at once
_LAYOUT_OPERATORS = ("onednn_to_paddle_layout", "transfer_layout")
_KINDS = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
    "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip

_ANSI = re.compile(rb"\x1b\[[\d;]{0,10}m")
PRECISION = re.compile(
    rb"\[PRECISION\]\s*(\[ERROR\])?\s*in \[device=([^,\]]*), op=([^,\]]*), tensor=([^,\]]*), dtype=([^,\]]*)\], (numel=[^\n]*)"  # noqa: E501
)
_VARIABLE = re.compile(rb"(?:^|(?<=[\[,{ ]))([^\s,\[\]{}():;=]{1,300}):(?=\[|[a-z_0-9]{1,30}\[)")
# return outputs of inner operators
_BLOCKS = re.compile(rb"Op\((?:pd_op\.)?(?:while|if|conditional_block|select_input)\w{0,20}\)")
_STATED = re.compile(
    rb"([^\s,:;=][^,:;=\n]{0,80}?)[ *:]{1,4}(?:is |= ?)?((?:not )?(?:nullptr|initialized|allocated))\b[ .!]*$"  # noqa: E501
)
_STATED_BYTES = 104  # the longest match of `_STATED`, without what a line ends with
_STEP = re.compile(
    rb"[-=#>* ]{0,20}(?:step|run|iteration|iter)[ :=#]{0,3}(\d{1,9})[-=#<*: ]{0,20}", re.IGNORECASE
)
_FIGURE = re.compile(rb"(\w{1,20})=([-+.\w]{1,40})")
_LABEL, _OPERATOR, _INPUTS, _OUTPUTS = b"===>:", b"Op(", b"), inputs:{", b"}, outputs:{"
TABLE = b"| -- FP16 Calls --"
_OF_NO_USE = (b"--- Running", b"Parameter containing")
_EMPTY = b"Tensor(Not initialized)"


@dataclass(slots=True)
class Point:
    """A tensor, or its figures, in a log. first_name: its name before its layout changed. row: the
    line of the log, from 1.
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
    step: int = -1
    first_name: str = ""
    row: int = 0


@dataclass(slots=True)
class LogScan:
    """The content of a log, read line by line.

    points: in the order of the log. edges: (position among the points, outputs, inputs) of
    operators that ran. empty: tensors that were printed before they were filled. tables: tables of
    operators by dtype. stated: lines that state that a tensor is a nullptr or initialized, by
    (tensor, state). step: the last line that begins a step, from 0. words, line, label: candidates
    for the name of the next tensor: words in front of its print, the line before it, the label of a
    block. row: the line being read, from 1.
    """

    points: list[Point] = field(default_factory=list)
    edges: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    empty: int = 0
    tables: int = 0
    stated: Counter[tuple[str, str]] = field(default_factory=Counter)
    step: int = -1
    words: list[bytes] = field(default_factory=list)
    line: bytes = b""
    label: bytes = b""
    row: int = 1

    def read(self, text: mmap.mmap) -> None:
        """Reads a log."""
        end = 0
        header = paddle_print.HEADER.search(text, 0)
        while header is not None:
            following = paddle_print.HEADER.search(text, header.end())
            self._between(text, end, header.start(), is_before_header=True)
            limit = following.start() if following is not None else len(text)
            printed = paddle_print.read(text, header, limit)
            self._add_print(text, printed)
            self.row += text[header.start() : printed.end].count(b"\n")
            end, header = printed.end, following
        self._between(text, end, len(text), is_before_header=False)

    def _add_print(self, text: mmap.mmap, printed: paddle_print.Printed) -> None:
        """Adds a printed tensor. A print that only changes the layout of the tensor before it is
        merged with that tensor, under the new name.

        Passes insert such operators after kernels of oneDNN; a run without oneDNN has no partner
        for them.
        """
        point = self._point(printed)
        previous = self.points[-1] if self.points else None
        if (
            point.op_type in _LAYOUT_OPERATORS
            and previous is not None
            and previous.printed is not None
        ):
            old = previous.printed
            if (old.dtype, old.shape) == (printed.dtype, printed.shape) and text[
                old.start : old.end
            ] == text[printed.start : printed.end]:
                point = replace(
                    point,
                    op_type=previous.op_type,
                    first_name=previous.first_name or previous.name,
                    notes=(*previous.notes, f"laid out anew as {point.name}"),
                )
                self.points.pop()
        self.points.append(point)
        self.words, self.line = [], b""

    def _point(self, printed: paddle_print.Printed) -> Point:
        """Returns the point of a print, named by the words in front of it."""
        words = [word for word in self.words if not word.endswith(b":") or b"pd_op" in word]
        op, name = "", self.line
        if words:
            op = _decoded(words[-2].lstrip(b"+-")) if len(words) > 1 else ""
            name = words[-1]
        name_text = _decoded(name[:_MAX_NAME]).strip(" :=,#") or "tensor"
        # PIR names kernels of oneDNN as such, the executor before it does not.
        in_memory_order = len(printed.shape) > _PLAIN_AXES and not op.startswith("pd_op.")
        return Point(
            plain_name(name_text),
            plain_type(op),
            "operator",
            printed,
            step=self.step,
            notes=(mark(Mark.MEMORY_ORDER),) if in_memory_order else (),
            row=self.row,
        )

    def _between(self, text: mmap.mmap, start: int, end: int, *, is_before_header: bool) -> None:
        """Reads the text between two tensors in pieces, cut between lines."""
        while end - start > _PIECE_BYTES:
            cut = text.rfind(b"\n", start, start + _PIECE_BYTES) + 1 or start + _PIECE_BYTES
            self._piece(text[start:cut], is_before_header=False)
            start = cut
        self._piece(text[start:end], is_before_header=is_before_header)

    def _piece(self, text: bytes, *, is_before_header: bool) -> None:
        """Reads lines. is_before_header: the text after the last line break precedes a tensor's
        header.
        """
        lines, prefix = [], b""
        if not is_before_header or text.count(b"\n") > 1 or b"] " in text or b"\x1b" in text:
            lines = text.split(b"\n")
            prefix = lines.pop() if is_before_header else b""
        else:
            line, _, prefix = text.rpartition(b"\n")
            lines = [line] if line.strip() else []
        first = self.row
        for self.row, line in enumerate(lines, first):
            self._line(line.rstrip(b"\r"))
        self.row = first + text.count(b"\n")
        if prefix.strip():
            prefix = _ANSI.sub(b"", prefix)
            log = paddle_print.GLOG.search(prefix)
            self.words += (prefix[: log.start()] if log is not None else prefix).split()

    def _line(self, line: bytes) -> None:
        line, is_log = self._without_log_prefix(_ANSI.sub(b"", line) if b"\x1b" in line else line)
        if _LABEL in line:
            self.label = line.partition(_LABEL)[2].strip()[:_MAX_NAME]
        elif self._add_block(line):
            pass
        elif b"[PRECISION]" in line:
            if (match := PRECISION.search(line)) is not None:
                self.points.append(_checked(match, self.step))
        elif _INPUTS in line and _OPERATOR in line:
            self._edge(line)
        # the start is not searched: a line may be megabytes long
        elif (
            state := _STATED.search(line.rstrip(b" .!")[-_STATED_BYTES:])
        ) is not None and _EMPTY not in line:
            self.stated[_decoded(state[1].strip(b" *:-")), state[2].decode()] += 1
        elif is_log or not line.strip() or line.startswith(_OF_NO_USE):
            pass
        elif TABLE in line:
            self.tables += 1
        elif _EMPTY in line:
            self.empty += 1
            self.words = []
        else:
            self.step += _STEP.fullmatch(line.strip()) is not None
            self.line = line if len(line) <= _MAX_NAME else b""

    def _without_log_prefix(self, line: bytes) -> tuple[bytes, bool]:
        """Returns (the message of a log line, True), or (the line, False). Words before the prefix
        belong to a print that the log line interrupts.
        """
        log = paddle_print.GLOG.search(line) if b"] " in line or line.endswith(b"]") else None
        if log is None:
            return line, False
        words = line[: log.start()].split()
        if len(words) <= _MAX_WORDS:
            self.words += words
        return line[log.end() :], True

    def _add_block(self, line: bytes) -> bool:
        """Adds a labelled block if this line holds its values; returns False otherwise."""
        if not self.label or not line.strip() or len(line) > paddle_print.LONGEST_ROW:
            return False
        row, name = paddle_print.numbers(line), _decoded(self.label)
        self.label = b""
        if row is None:
            return False
        values, quantum = row
        self.points.append(
            Point(
                name,
                "VLOGMatrix",
                "label",
                values=values if values.dtype == np.int64 else values.astype(np.float32),
                quantum=quantum,
                step=self.step,
                notes=(mark(Mark.LOGGED),),
                row=self.row,
            )
        )
        return True

    def _edge(self, line: bytes) -> None:
        inputs, _, outputs = (
            tuple(dict.fromkeys(plain_name(_decoded(name)) for name in _VARIABLE.findall(names)))
            for names in line.partition(_INPUTS)[2].partition(_OUTPUTS)
        )
        if _BLOCKS.search(line):
            inputs = (*inputs, "?")
        self.edges.append((len(self.points), outputs, inputs))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _checked(match: re.Match[bytes], step: int) -> Point:
    """Parses a line of the tensor checker: figures of one tensor, without a name in eager mode."""
    figures = {k.decode(): v.decode("utf-8", "replace") for k, v in _FIGURE.findall(match[6])}

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
    device, op, tensor, dtype = (match[i].decode("utf-8", "replace").strip() for i in (2, 3, 4, 5))
    notes = ("the checker calls this an error",) if match[1] else ()
    return Point(
        plain_name(tensor) if tensor else plain_type(op),
        plain_type(op),
        "operator",
        statistics=statistics,
        device=device,
        dtype=_KINDS.get(dtype, dtype),
        notes=notes,
        step=step,
    )
