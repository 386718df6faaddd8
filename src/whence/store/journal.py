"""The journal: one JSON line per record, call, program, note, step
and collective, written after the bytes it
speaks of.

The journal is the run: everything else (headers, index) can be made again from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import orjson

from whence.records import Call, Collective, Note, Program, Record, Step
from whence.store.columns import FileBlocks
from whence.store.shards import Bytes

Line = Record | Call | Program | Note | Step | Collective

OTHER, RECORD, CALL, PROGRAM, NOTE, STEP, COLLECTIVE = range(7)
KINDS: dict[type, int] = {
    Record: RECORD, Call: CALL, Program: PROGRAM, Note: NOTE, Step: STEP, Collective: COLLECTIVE,
}  # fmt: skip

decode_record = msgspec.json.Decoder(Record).decode
decode_call = msgspec.json.Decoder(Call).decode
decode_program = msgspec.json.Decoder(Program).decode
decode_note = msgspec.json.Decoder(Note).decode
decode_step = msgspec.json.Decoder(Step).decode
decode_collective = msgspec.json.Decoder(Collective).decode
_decode = msgspec.json.Decoder(Line).decode
_TAGS = {"record", "call", "program", "note", "step", "collective"}
_CHUNK = 8 << 20
MAX_LINE_BYTES = 256 << 20


def in_words(value: object) -> str:
    """Returns the text that replaces a value that is not JSON: its repr, or its type when it has
    none.
    """
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a repr of the user's may raise anything
        return f"<{type(value).__name__}>"


encoder = msgspec.json.Encoder(enc_hook=in_words)  # the writer never fails on an argument


def settled(line: Line) -> Line | msgspec.Raw:
    """Returns what waits in the queue of the journal in place of a line: its encoded text, or the
    value itself where nothing can change it any more, such as a record. Raises for a value that
    JSON cannot hold.
    """
    if isinstance(line, Call):
        if not line.arguments:
            return line
        try:
            return msgspec.Raw(encoder.encode(_writable(line)))
        except _UNWRITABLE:
            return msgspec.Raw(_escaped(_in_plain_words(line)))
    try:
        return msgspec.Raw(encoder.encode(line))
    except UnicodeEncodeError:
        return msgspec.Raw(_escaped(line))


def encoded(lines: list[Line | msgspec.Raw]) -> bytes:
    """Returns the text of lines. Text in them that is not valid Unicode is written with escapes."""
    try:
        return encoder.encode_lines(lines)
    except UnicodeEncodeError:
        return b"".join(_escaped(line) + b"\n" for line in lines)


_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)


def _escaped(line: Line | msgspec.Raw) -> bytes:
    try:
        return encoder.encode(line)
    except UnicodeEncodeError:
        return encoder.encode(_without_surrogates(msgspec.to_builtins(line)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return [_without_surrogates(v) for v in value] if isinstance(value, list | tuple) else value


def _writable(call: Call) -> Call:
    """Returns the call with arguments that JSON can hold: inf and nan, which msgspec writes as
    null, by their names; a value that is nested too deeply by its repr.
    """
    try:
        return call if _is_json(call.arguments) else _with_arguments(call, _as_json(call.arguments))
    except RecursionError:
        return _in_plain_words(call)


def _in_plain_words(call: Call) -> Call:
    """Returns the call with the repr of each argument."""
    words = {
        str(k): in_words(v).encode("ascii", "backslashreplace").decode()
        for k, v in call.arguments.items()
    }
    return _with_arguments(call, words)


def _with_arguments(call: Call, arguments: dict[str, Any]) -> Call:
    return msgspec.structs.replace(call, arguments=arguments)


_SOUND = frozenset((int, str, bool, type(None)))
_SEQUENCES = (list, tuple)


def _is_json(value: object) -> bool:
    """Whether a value holds no inf and no nan."""
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(type(v) in _SOUND or _is_json(v) for v in value.values())
    return not isinstance(value, _SEQUENCES) or all(type(v) in _SOUND or _is_json(v) for v in value)


def _as_json(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, dict):
        return {k: _as_json(v) for k, v in value.items()}
    return value


class Entry(NamedTuple):
    """A line of the journal: its value (None for a kind of line this version does not know) and its
    start and end.
    """

    line: Line | None
    start: int
    end: int


class Damage(Exception):
    """The journal is unreadable from `byte` on. torn: only the last line is incomplete, as after a
    kill.
    """

    def __init__(self, byte: int, line: int, reason: str, *, torn: bool) -> None:
        super().__init__(reason)
        self.byte, self.line, self.reason, self.torn = byte, line, reason, torn


def read(journal: Bytes | FileBlocks) -> Iterator[Entry]:
    """Yields the lines in order. Raises Damage at the first incomplete one, after yielding all
    before it.
    """
    for number, (raw, start, end, whole) in enumerate(_lines(journal), start=1):
        if not whole:
            raise Damage(start, number, "the last line was cut off", torn=True)
        try:
            line = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not isinstance(error, msgspec.ValidationError) or not _is_of_the_future(raw):
                raise Damage(start, number, str(error), torn=False) from None
            line = None
        yield Entry(line, start, end)


def _is_of_the_future(raw: bytes) -> bool:
    try:
        fields: Any = orjson.loads(raw)
    except ValueError:
        return False
    tag = fields.get("t") if isinstance(fields, dict) else None
    return (
        isinstance(tag, str)
        and re.fullmatch(r"[a-z_-]{1,32}", tag) is not None
        and tag not in _TAGS
    )


def _lines(journal: Bytes | FileBlocks) -> Iterator[tuple[bytes, int, int, bool]]:
    """Yields (text without its newline, start, start of the next line, whether there was a
    newline).
    """
    start = 0
    while start < journal.size:
        size = _CHUNK
        block = journal[start : start + size].tobytes()
        while b"\n" not in block and start + size < journal.size and size < MAX_LINE_BYTES:
            size *= 2
            block = journal[start : start + size].tobytes()
        cut = block.rfind(b"\n")
        if cut < 0:
            yield block, start, start + len(block), False
            return
        for raw in block[:cut].split(b"\n"):
            end = start + len(raw) + 1
            yield raw, start, end, True
            start = end
