"""Where the records lie in a file of JSON lines or one JSON array; read chunk by chunk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from whence.errors import UnreadableRun

RECORD_BYTES = 64 << 20  # of one record; a longer one is passed over and named
_CHUNK = 1 << 20
_BLANK = b" \t\r\n"
_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32"))
_BOM = b"\xef\xbb\xbf"

Place = tuple[int, int, int, str]  # line, offset, length, why it cannot be read


def places(file: IO[bytes], name: str) -> tuple[str, Iterator[Place]]:
    """("line" or "element", where each record is)."""
    head = file.read(4)
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            raise UnreadableRun(f"{name} is {encoding}; JSON is read as UTF-8, so save it as that")
    start = len(_BOM) if head.startswith(_BOM) else 0
    file.seek(start)
    while (byte := file.read(1)) and byte in _BLANK:
        pass
    if byte == b"[":
        return "element", _elements(file)
    file.seek(start)
    return "line", _lines(file)


def _lines(file: IO[bytes]) -> Iterator[Place]:
    line, offset = 0, file.tell()
    while raw := file.readline(RECORD_BYTES + 1):
        line += 1
        if len(raw) > RECORD_BYTES and not raw.endswith(b"\n"):
            end = offset + len(raw)
            while tail := file.readline(_CHUNK):
                end += len(tail)
                if tail.endswith(b"\n"):
                    break
            yield line, offset, 0, _too_long(end - offset)
            offset = end
        else:
            if raw.strip(_BLANK):
                yield line, offset, len(raw.rstrip(_BLANK)), ""
            offset += len(raw)
        file.seek(offset)  # the record was read meanwhile


_STRING = re.compile(rb'["\\]')
_TOP = re.compile(rb'["\[\]{},]')
_INNER = re.compile(rb'["\[\]{}]')


def _elements(file: IO[bytes]) -> Iterator[Place]:
    """Elements of an array of which the opening bracket has been read, found by brackets and quotes
    alone, chunk by chunk.
    """
    base, line, depth, quoted, skip = file.tell(), 0, 1, False, 0
    start = base
    while chunk := file.read(_CHUNK):
        position = skip
        skip = 0
        while position < len(chunk):
            token = (_STRING if quoted else _TOP if depth == 1 else _INNER).search(chunk, position)
            if token is None:
                break
            byte, position = token[0], token.end()
            if quoted:
                quoted = byte != b'"'
                position += quoted  # a backslash takes the next byte with it
            elif byte == b'"':
                quoted = True
            elif byte in b"[{":
                depth += 1
            elif byte in b"]}":
                depth -= 1
            if quoted or depth > 1 or byte not in b",]}" or (depth == 1 and byte != b","):
                continue
            end = base + position - 1
            empty = depth == 0 and _blank(file, start, end)
            if not (empty and line == 0):
                line += 1
                yield (
                    line,
                    start,
                    end - start,
                    "nothing after the last comma" if empty else _limit(end - start),
                )
            start = end + 1
            if depth == 0:
                trailing = _trailing(file, start) if byte == b"]" else "}"
                if trailing:
                    yield line + 1, start, 0, f"the array ends, and after it comes {trailing!r}"
                return
        skip = max(position - len(chunk), 0)
        base += len(chunk)
        file.seek(base)
    yield (
        line + 1,
        start,
        0,
        "the file ends inside the array: it was cut short" + (", in a string" if quoted else ""),
    )


def _limit(length: int) -> str:
    return _too_long(length) if length > RECORD_BYTES else ""


def _too_long(length: int) -> str:
    return f"{length} bytes; a record of more than {RECORD_BYTES >> 20} MiB is not read"


def _blank(file: IO[bytes], start: int, end: int) -> bool:
    file.seek(start)
    return end - start <= _CHUNK and not file.read(end - start).strip(_BLANK)


def _trailing(file: IO[bytes], start: int) -> str:
    file.seek(start)
    while chunk := file.read(_CHUNK):
        text = chunk.strip(_BLANK)
        if text:
            return text[:20].decode("utf-8", "backslashreplace")
    return ""
