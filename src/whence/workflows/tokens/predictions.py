"""Files of generated outputs: JSON lines or one JSON array of objects with a prompt and an output.

A file is read twice and never held in memory. The first reading keeps, for each record, its place
and digests of its prompt and output; the record is read again when it is compared. Memory therefore
grows with the number of prompts and not with their bytes. A record that cannot be read becomes an
entry with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
import xxhash

from whence.errors import UnreadableRun, UsageError
from whence.workflows.tokens.evaluations import as_record

_IDS = ("id", "doc_id", "prompt_id", "data_id", "question_id", "no", "NO", "idx", "index")
_LONGEST_ID = 40


class Prediction(NamedTuple):
    """One record. prompt: text, None without one. output: text, or a list of tokens."""

    prompt: str | None
    output: str | list[int] | list[str]


class Entry(NamedTuple):
    """The place of a record.

    number: from 0. line: from 1; in an array, the element. prompt, output: digests. why: the reason
    when it cannot be read. id: the record's own identifier, "" without one.
    """

    number: int
    line: int
    offset: int
    length: int
    prompt: bytes | None = None
    output: bytes | None = None
    why: str = ""
    id: str = ""


class Predictions:
    """The outputs of one run, from a file or from records in memory. Use it as a context manager:
    it keeps a file open.

    source: a path (also of a pipe), or a sequence of records as they stand in such a file.
    prompt_key, output_key: keys of a record, or a path of keys and list positions, joined by dots.
    Raises UnreadableRun.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
        words: str,
        *,
        prompt_key: str,
        output_key: str,
    ) -> None:
        """words: the name to use in messages when there is no path."""
        self.prompt_key, self.output_key = prompt_key, output_key
        self.models: dict[str, None] = {}
        self._records: Sequence[Mapping[str, Any]] | None = None
        self._file: IO[bytes] | None = None
        self.name, self.noun = words, "record"
        places: Iterator[_RecordPlace]
        if isinstance(source, (str, os.PathLike)):
            self.name, self._file = os.fspath(source), _opened(Path(source))
        else:
            self._records = source
            places = ((i + 1, i, 0, "") for i in range(len(source)))
        try:
            if self._file is not None:
                self.noun, places = _record_places(self._file, self.name)
            self.entries = [self._entry(number, *place) for number, place in enumerate(places)]
            self._check()
        except BaseException:
            self.close()
            raise

    def read(self, entry: Entry) -> Prediction:
        """Read the record of an entry. Raises ValueError with the reason when it contains no
        output.
        """
        raw = self._raw(entry)
        return Prediction(self._prompt(raw), self._output(raw))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, number: int, line: int, offset: int, length: int, why: str) -> Entry:
        entry = Entry(number, line, offset, length, why=why)
        if why:
            return entry
        try:
            raw = self._raw(entry)
            prompt = self._prompt(raw)
        except (ValueError, RecursionError) as error:
            return entry._replace(
                why="nested too deeply" if isinstance(error, RecursionError) else str(error)
            )
        entry = entry._replace(id=_id(raw))
        # A record without an output still says which prompt has none.
        entry = entry._replace(prompt=None if prompt is None else _digest(prompt))
        try:
            entry = entry._replace(output=_digest(self._output(raw)))
        except ValueError as error:
            entry = entry._replace(why=str(error))
        model = raw.get("model")
        if isinstance(model, str) and model:
            self.models[model] = None
        return entry

    def _raw(self, entry: Entry) -> Any:
        if self._records is not None:
            return as_record(self._records[entry.offset])
        assert self._file is not None
        self._file.seek(entry.offset)
        return as_record(_value(self._file.read(entry.length)))

    def _prompt(self, raw: Any) -> str | None:
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"{_kind(raw)}, not an object with {self.prompt_key!r} and {self.output_key!r}"
            )
        prompt, _ = _at(raw, self.prompt_key)
        # An empty prompt does not distinguish records.
        return (
            None
            if prompt is None or prompt in ("", [])
            else prompt
            if isinstance(prompt, str)
            else _canonical(prompt)
        )

    def _output(self, raw: Mapping[str, Any]) -> str | list[int] | list[str]:
        output, missing = _at(raw, self.output_key)
        if missing:
            raise ValueError(f"no key {self.output_key!r} (it has {_keys(raw)})")
        return _tokens(output, self.output_key)

    def _check(self) -> None:
        """Raise UnreadableRun when no entry contains an output.

        A wrong key is reported once and not for each line.
        """
        if not self.entries or any(e.output is not None for e in self.entries):
            return
        first = self.entries[0]
        hint = "; --output-key names another" if "no key" in first.why else ""
        raise UnreadableRun(
            f"{self.name}: none of {len(self.entries)} {self.noun}s holds an output; {self.noun} "
            f"{first.line}: {first.why}{hint}\n"
            f"  read are JSON lines, or one JSON array, of objects such as"
            f' {{"{self.prompt_key}": "...", "{self.output_key}": "..." or [token ids]}}'
        )


def _id(raw: Mapping[str, Any]) -> str:
    """The identifier of a record: a short text or a whole number under one of the usual keys."""
    for key in _IDS:
        value = raw.get(key)
        if (
            isinstance(value, (str, int))
            and not isinstance(value, bool)
            and 0 < len(str(value)) <= _LONGEST_ID
        ):
            return str(value)
    return ""


def _opened(path: Path) -> IO[bytes]:
    """Open the file, or what came through a pipe. Raises UnreadableRun."""
    if path.is_dir():
        raise UnreadableRun(f"{path} is a folder; give the JSON file of outputs in it")
    try:
        file = path.open("rb")
        if file.seekable():
            return file
        with file:
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - handed on; `close` closes it
            shutil.copyfileobj(file, copy)
        copy.seek(0)
        return copy
    except OSError as error:
        raise UnreadableRun(f"{path} cannot be read: {error.strerror or error}") from error


def _value(raw: bytes) -> Any:
    """Parse any JSON value as Python does, including NaN, lone surrogates and large integers.

    Raises ValueError with the position.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos}" if error.pos < len(text.rstrip()) else "where it ends"
        reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise ValueError(f"not JSON: {reason} {where}") from None


def _at(record: Any, key: str) -> tuple[Any, bool]:
    """(value, whether it is missing): looks up the key itself, then its dotted parts one by one."""
    if key in record:
        return record[key], False
    for part in key.split("."):
        if isinstance(record, Mapping) and part in record:
            record = record[part]
        elif isinstance(record, (list, tuple)) and part.isdecimal() and int(part) < len(record):
            record = record[int(part)]
        else:
            return None, True
    return record, False


def _tokens(output: Any, key: str) -> str | list[int] | list[str]:
    if isinstance(output, str):
        return output
    if hasattr(output, "tolist"):  # an array of token ids, of records in memory
        output = output.tolist()
    if not isinstance(output, (list, tuple)):
        raise ValueError(f"{key!r} is {_kind(output)}, not text or a list of token ids")
    wrong = next(
        (i for i, t in enumerate(output) if isinstance(t, bool) or not isinstance(t, (int, str))),
        None,
    )
    if wrong is not None:
        hint = (
            " (several sequences for one prompt: name one with --output-key KEY.0)"
            if isinstance(output[wrong], (list, tuple))
            else ""
        )
        raise ValueError(
            f"{key!r} holds {_kind(output[wrong])} at {wrong}, which is not a token id{hint}"
        )
    if len({isinstance(t, str) for t in output}) > 1:
        raise ValueError(f"{key!r} mixes token ids and text")
    return list(output)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return str(value)[:20]
    return (
        "text"
        if isinstance(value, str)
        else "a list"
        if isinstance(value, (list, tuple))
        else "an object"
    )


def _keys(record: Mapping[str, Any]) -> str:
    return ", ".join(repr(str(k)[:40]) for k in list(record)[:8]) or "none"


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"its prompt is not a JSON value: {error}") from error


def _digest(value: str | list[int] | list[str]) -> bytes:
    kind, text = ("s", value) if isinstance(value, str) else ("l", json.dumps(value))
    return xxhash.xxh3_128_digest((kind + text).encode("utf-8", "surrogatepass"))


def records(source: object) -> Sequence[Mapping[str, Any]]:
    """The sequence of records in what a caller passed. Raises UsageError for anything else."""
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        return source
    raise UsageError(f"outputs are a path or a list of records, not {type(source).__name__}")


RECORD_BYTES = 64 << 20  # of one record; a longer one is passed over and named
_CHUNK = 1 << 20
_BLANK = b" \t\r\n"
_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32"))
_BOM = b"\xef\xbb\xbf"

_RecordPlace = tuple[int, int, int, str]  # line, offset, length, why it cannot be read


def _record_places(file: IO[bytes], name: str) -> tuple[str, Iterator[_RecordPlace]]:
    """("line" or "element", the place of each record)."""
    head = file.read(4)
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            raise UnreadableRun(f"{name} is {encoding}; JSON is read as UTF-8, so save it as that")
    start = len(_BOM) if head.startswith(_BOM) else 0
    file.seek(start)
    while (byte := file.read(1)) and byte in _BLANK:
        pass
    if byte == b"[":
        return "element", _element_places(file)
    file.seek(start)
    return "line", _line_places(file)


def _line_places(file: IO[bytes]) -> Iterator[_RecordPlace]:
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


def _element_places(file: IO[bytes]) -> Iterator[_RecordPlace]:
    """The elements of an array whose opening bracket has been read, found chunk by chunk from
    brackets and quotes alone.
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
