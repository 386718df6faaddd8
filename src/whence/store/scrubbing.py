"""Removes private data from a run, in place: elements, command, environment, paths, users, hosts.
Figures and topology stay.

`Anonymous` cleans the texts: removes paths, user, hosts, commit and words of the command. Names
that a comparison pairs by (scopes, operators, slots) stay.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import xxhash

from whence import disk
from whence.disk import write_file
from whence.errors import StoreFailed, UnreadableRun, UsageError
from whence.records import Elements, Increment, Kept, RunInfo
from whence.store import index_builder
from whence.store import journal as journal_file
from whence.store.folder import (
    INDEX,
    JOURNAL,
    PACKED,
    PROCESS,
    RUN,
    ProcessInfo,
    indented,
    load_info,
    load_json,
    shard_name,
)
from whence.store.index import EXTERNAL, NONE, Column, Index
from whence.store.journal import decode_call, decode_program, decode_record, encoder
from whence.store.recovering import DAMAGED, recover_process, writable_folders
from whence.store.shards import HEADER_BYTES, SHARD_BYTES, Bytes, Shard, ShardWriter, map_file
from whence.store.status import Ended, leave_status, read_status

SCRUBBED = "scrubbed"
_STAYS = (
    "kind", "format", "started", "finished", "seed", "deterministic", "exit_code", "versions",
    "devices", "options", "settings",
)  # fmt: skip


class Scrubbed(msgspec.Struct, frozen=True):
    """records: how many lost their elements. nbytes: how much smaller the shards became."""

    records: int
    nbytes: int


def scrub(
    path: str | Path, names: Sequence[str] | None = None, *, info: bool = True, force: bool = False
) -> Scrubbed:
    """Remove elements from a run in place; `array` then says "scrubbed". Statistics, hashes,
    sketches and topology stay.

    names: shell patterns; only records that some call refers to under a matching scope, slot or
    "scope.slot" (and constants of the programs of calls with a matching scope). None or empty: all.
    Records with the very same stored bytes, and increments on a scrubbed record, are scrubbed with
    them; references to files of the user's are removed. info: also remove command, environment,
    user, hosts, commit and paths: from run.json, from every text of the journals, and from the
    names of folders. A crash leaves each process folder either as it was or scrubbed; scrubbing
    again finishes. A run that was killed is recovered first. Hashes stay, so a value that can be
    guessed can be confirmed. Raises UsageError when the patterns match nothing, StoreFailed when a
    process still writes (unless `force`) or the medium refuses.
    """
    run, names = Path(path), names or None
    about = load_info(run)
    if (run / PACKED).exists():
        raise UsageError(f"{run} is packed: whence unpack {run} -o RUN, and scrub that")
    folders = writable_folders(run, force=force)
    anonymous = Anonymous(about, [process.host for _, process in folders]) if info else None
    records = nbytes = 0
    try:
        # All of it before anything is changed: a pattern that matches nothing is a mistake.
        if names is not None and not any(
            _matches(folder, process, names) for folder, process in folders
        ):
            raise UsageError(
                f"no record of {run} is referred to under {', '.join(map(repr, names))}; nothing "
                "was scrubbed"
            )
        for folder, process in folders:
            old_bytes = _shard_bytes(folder)
            records += _scrub_process(folder, process, names, anonymous)
            nbytes += old_bytes - _shard_bytes(folder)
        if anonymous is not None:
            _clean_rest(run, anonymous)
    except OSError as error:
        raise StoreFailed(
            f"cannot scrub {run}: {error.strerror or error}; scrub it again, it is not finished"
        ) from error
    return Scrubbed(records, nbytes)


def _clean_rest(run: Path, anonymous: Anonymous) -> None:
    """Cleans the files beside the journals. run.json holds the private words, so it is written
    after all others; folders are renamed last.
    """
    for file in sorted((run / "paddle").rglob("*")):
        if file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            if (cleaned := anonymous.file(data)) != data:
                write_file(file, cleaned)
    fields = load_json(run / RUN)
    fields_left = {name: anonymous.value(fields[name]) for name in _STAYS if name in fields}
    if isinstance(fields_left.get("settings"), dict):
        fields_left["settings"].pop("launched", None)  # processes of this machine
    write_file(
        run / RUN, indented({**fields_left, "command": [], "environment": {}, "scrubbed": True})
    )
    folders = [
        (process.rank, process.pid, folder.name, folder, process)
        for folder, process in writable_folders(run, force=True)
    ]
    for number, (rank, _, name, folder, process) in enumerate(
        sorted(folders, key=lambda entry: entry[:3]), start=1
    ):
        nobody = msgspec.structs.replace(process, host=SCRUBBED, pid=number, boot="", pid_started=0)
        write_file(folder / PROCESS, indented(msgspec.to_builtins(nobody)))
        new_name = f"rank{rank:05d}-{SCRUBBED}-{number}"
        if name != new_name:
            folder.rename(run / new_name)


def _scrub_process(
    folder: Path, process: ProcessInfo, names: Sequence[str] | None, anonymous: Anonymous | None
) -> int:
    recover_process(folder, process)
    journal = map_file(folder / JOURNAL)
    index = index_builder.build(journal)  # what stands beside it may be of another journal
    columns = index.columns
    chosen = (
        np.ones(index.records_at.size, bool) if names is None else _matching(index, journal, names)
    )
    if anonymous is not None:
        chosen |= columns["elements"] == EXTERNAL  # the path of a file of the user's
        (folder / DAMAGED).unlink(missing_ok=True)
        status = read_status(folder)
        error = anonymous.text(status.error)
        leave_status(folder, msgspec.structs.replace(status, error=error))
    chosen = _with_dependents(columns, chosen) & (columns["elements"] != NONE)
    _delete_unreferenced(folder, columns["shard"])  # of a scrub that was interrupted
    if chosen.any() or anonymous is not None:
        moved = _move(folder, process, index, chosen)
        lines = _lines_without(journal, index, chosen, moved, SCRUBBED)
        _replace_journal(
            folder, lines if anonymous is None else (anonymous.line(bytes(raw)) for raw in lines)
        )
        journal = map_file(folder / JOURNAL)
        index = index_builder.build(journal)
        _delete_unreferenced(folder, index.columns["shard"])
        index.save(folder)
    return int(chosen.sum())


def _matches(folder: Path, process: ProcessInfo, names: Sequence[str]) -> bool:
    recover_process(folder, process)
    journal = map_file(folder / JOURNAL)
    return bool(_matching(index_builder.build(journal), journal, names).any())


def _matching(index: Index, journal: Bytes, names: Sequence[str]) -> Column:
    """Returns which records are referred to under one of the patterns."""
    columns, chosen = index.columns, np.zeros(index.records_at.size, bool)
    texts, cache = index.names, dict[tuple[int, int], bool]()

    def hit(scope: int, slot: int) -> bool:
        is_hit = cache.get((scope, slot))
        if is_hit is None:
            candidates = (texts[scope], texts[slot], f"{texts[scope]}.{texts[slot]}")
            is_hit = cache[scope, slot] = any(
                fnmatchcase(text, pattern) for text in candidates for pattern in names
            )
        return is_hit

    scopes = np.repeat(columns["scope"], np.diff(columns["refs_at"])).tolist()
    for scope, slot, record in zip(
        scopes, columns["ref_slot"].tolist(), columns["ref_record"].tolist(), strict=True
    ):
        if hit(scope, slot):
            chosen[record] = True
    used = set()
    for place, scope in enumerate(columns["scope"].tolist()):
        if any(fnmatchcase(texts[scope], pattern) for pattern in names):
            used.add(decode_call(index.line(journal, int(index.calls_at[place]))).program)
    for line in index.lines(journal_file.PROGRAM):
        program = decode_program(index.line(journal, line))
        if program.id in used:
            chosen[[c for c in program.constants if 0 <= c < chosen.size]] = True
    return chosen


def _move(
    folder: Path, process: ProcessInfo, index: Index, chosen: Column
) -> dict[tuple[int, int], tuple[int, int]]:
    """Copies the elements that stay out of shards that are deleted. Returns old (shard, offset) ->
    new (shard, offset).
    """
    columns = index.columns
    going = set(np.unique(columns["shard"][chosen]).tolist()) - {-1}
    staying = np.flatnonzero(np.isin(columns["shard"], list(going)) & ~chosen)
    number = int(columns["shard"].max(initial=-1)) + 1
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    old: dict[int, Shard] = {}
    reserved = process.header_bytes or HEADER_BYTES
    writer: ShardWriter | None = None
    try:
        for record in staying.tolist():
            shard, offset, nbytes = (int(columns[c][record]) for c in ("shard", "offset", "nbytes"))
            if (shard, offset) in moved:
                continue
            data = old.setdefault(shard, Shard(folder / shard_name(shard))).data(offset, nbytes)
            if (
                writer is None
                or writer.crowded
                or (writer.end > 0 and writer.end + nbytes > SHARD_BYTES)
            ):
                if writer is not None:
                    _finish(writer)
                    number += 1
                writer = ShardWriter(folder / shard_name(number), reserved)
            start = writer.put(data, nbytes)
            shape = index.stored_shape(record)
            if shape is not None:
                increment = int(columns["base"][record]) >= 0
                dtype = index.names[columns["dtype"][record]]
                digest = columns["hash"][record].tobytes()
                writer.name(record, dtype, shape, start, nbytes, digest, increment=increment)
            moved[shard, offset] = (number, start)
        if writer is not None:
            _finish(writer)
    finally:
        if writer is not None:
            writer.abandon()
    return moved


def _finish(writer: ShardWriter) -> None:
    writer.flush()
    with writer.file as fd:
        disk.system.sync(fd)
    writer.finish()


def _delete_unreferenced(folder: Path, shards: Column) -> None:
    referenced = {shard_name(n) for n in np.unique(shards).tolist() if n >= 0}
    for file in folder.glob("shard-*.safetensors"):
        if file.name not in referenced:
            file.unlink()
    for file in folder.glob(f"{JOURNAL}.*.tmp"):
        file.unlink()


def _shard_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))


_GONE = "<scrubbed>"
_NOBODY = "scrubbed"

# What calls are paired and replayed by, and what holds no text of anybody's.
_STRUCTURE = frozenset((
    "t", "id", "scope", "root", "op", "op_type", "phase", "kind", "number", "dtype", "hash",
    "program", "refs", "in", "aliases", "origins", "statistics", "sketch", "shape", "stride",
    "inputs", "outputs", "params", "names", "scopes", "picks", "same", "grad", "input_dtypes",
    "base", "default_dtype", "operations", "constants", "fixed", "equal", "calls", "subclass",
))  # fmt: skip
# A path of two parts or more from a root on, and a Python file by any path.
_PART = r"[^\s\x00-\x1f/'\"<>|:;,(){}\[\]\\]+"
_PATH = rf"(?<![\w.])(?:~|[A-Za-z]:)?(?:/{_PART}){{2,}}/?|[^\s\x00-\x1f'\"<>|:;,(){{}}\[\]\\=]+\.(?:py|ipynb|sh)\b"  # noqa: E501
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python[\d.]+)/(.+)")
_PUBLIC = (
    "torch",
    "transformers",
    "paddle",
    "accelerate",
    "onnxruntime",
    "openvino",
    "builtins",
    "__main__",
)
_SOURCE_LINE = re.compile(r"(.*):(\d+)")
# an attribute of a ProgramDesc: its name, and that it holds strings
_STACK = re.compile(rb"\x0a\x0cop_callstack\x10\x05")
_STRINGS = 0x42
# the same attribute of PIR in JSON, {"AT": {"#": "0.a_array", "D": [...]}, "N": "op_callstack"}
_JSON_STACK = rb'"N"\s*:\s*"op_callstack"'
_JSON_TOKEN = re.compile(rb'%s|"(?:[^"\\]|\\.)*"|[{}]' % _JSON_STACK, re.DOTALL)
_JSON_WORD = re.compile(rb'"(?:AT|N|D|#|\d+\.[a-z]_\w+)"')
_LEAST = 3  # letters of a name that is looked for in texts
_LEAST_WORD = 5  # of a word of a command, where it looks like one of the language


class Anonymous:
    """Cleans the texts of one run. info, hosts: hold its private words. Idempotent."""

    def __init__(self, info: RunInfo, hosts: Iterable[str]) -> None:
        hosts = {part for host in (info.host, *hosts) for part in (host, host.partition(".")[0])}
        words = {info.user, *hosts}
        words |= {
            word
            for argument in (*info.command, *info.environment.values())
            for word in _telling(argument)
        }
        paths = (
            {
                info.cwd,
                *(str(parent) for parent in PurePath(info.cwd).parents if len(parent.parts) > 2),
            }
            if info.cwd
            else set()
        )
        wholes = sorted(
            {w for w in words if len(w) >= _LEAST and w not in (_GONE, _NOBODY)},
            key=len,
            reverse=True,
        )
        literal = [
            rf"{re.escape(p)}(?!\w)(?:/{_PART})*/?" for p in sorted(paths, key=len, reverse=True)
        ]
        literal += [
            rf"(?<!\w){re.escape(w)}(?!\w)" + (r"(?:\.[A-Za-z][\w-]*)*" if w in hosts else "")
            for w in wholes
        ]
        if commit := re.match(r"[0-9a-f]{7,}", info.git):  # however it is cut short
            literal.append(rf"(?<![0-9a-z]){commit[0][:7]}[0-9a-f]*")
        self._free = re.compile("|".join((*literal, _PATH)))
        self._bytes = re.compile(self._free.pattern.encode("utf-8", "surrogateescape"))
        self._paths = (
            re.compile(
                "|".join(
                    map(re.escape, sorted((p for p in paths if "/" in p), key=len, reverse=True))
                )
            )
            if paths
            else None
        )

    def text(self, text: str) -> str:
        """Cleans a free text. Files of libraries keep their path below the library."""
        return self._free.sub(_without, text)

    def source(self, source: str) -> str:
        """`Call.source`: the line and names of public libraries stay, other files and modules
        go.
        """
        if line := _SOURCE_LINE.fullmatch(source):
            library = _LIBRARY.fullmatch(line[1])
            return f"{library[1] if library else _GONE}:{line[2]}"
        return source if source.partition(".")[0] in (*_PUBLIC, "", _GONE) else _GONE

    def value(self, value: Any) -> Any:
        """Cleans all texts in a JSON value, including keys."""
        return _with_texts(value, self.text, self.text)

    def line(self, raw: bytes) -> bytes:
        """A line of a journal, its newline included; the same bytes where nothing in it is
        private. Raises UnreadableRun where it is not JSON.
        """
        try:
            fields = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableRun(
                f"a line of the journal is damaged ({error}), so private words in it cannot be "
                "found; the run is not clean, do not share it"
            ) from error
        if not isinstance(fields, dict):
            return b"{}\n"
        cleaned = {name: self._field(name, item) for name, item in fields.items()}
        return raw if cleaned == fields else msgspec.json.encode(cleaned) + b"\n"

    def file(self, data: bytes) -> bytes:
        """A file of another tool, whose offsets must not change: every private byte becomes x."""
        without = _without_json_stacks(_without_stacks(data))
        return self._bytes.sub(lambda match: b"x" * len(match[0]), without)

    def _field(self, name: str, item: Any) -> Any:
        if name == "source" and isinstance(item, str):
            return self.source(item)
        if name == "elements":
            return item  # places in shards; references to files of the user's were taken out
        return self._structure(item) if name in _STRUCTURE else self.value(item)

    def _structure(self, item: Any) -> Any:
        """Names keep all but a path that is known to be private."""
        if self._paths is None:
            return item
        return _with_texts(item, functools.partial(self._paths.sub, _GONE), str)


def _with_texts(value: Any, text: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """A JSON value with `text` applied to its texts and `key` to its keys."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return [_with_texts(item, text, key) for item in value]
    if isinstance(value, dict):
        return {key(name): _with_texts(item, text, key) for name, item in value.items()}
    return value


def _without_stacks(data: bytes) -> bytes:
    """A Paddle program with the call stacks of its operators overwritten: strings (field 8) of that
    attribute.
    """
    out = bytearray(data)
    for match in _STACK.finditer(data):
        i = match.end()
        while i < len(data) and data[i] == _STRINGS:
            length = shift = 0
            continues = True
            while continues and (i := i + 1) < len(data):
                length |= (data[i] & 0x7F) << shift
                shift += 7
                continues = bool(data[i] & 0x80)
            end = min(i + 1 + length, len(data))
            out[i + 1 : end] = b"x" * (end - i - 1)
            i = end
    return bytes(out)


def _without_json_stacks(data: bytes) -> bytes:
    """A program of PIR with the call stacks of its operators overwritten: all texts of the object
    that is named so, but for the words of the format.
    """
    if re.search(_JSON_STACK, data) is None:
        return data
    out = bytearray(data)
    texts: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []  # of each object: texts before it; is it a call stack?
    for match in _JSON_TOKEN.finditer(data):
        token = match[0]
        if token == b"{":
            opened.append((len(texts), False))
        elif token == b"}" and opened:
            first, is_stack = opened.pop()
            for start, end in texts[first:] if is_stack else ():
                out[start + 1 : end - 1] = b"x" * (end - start - 2)
            if is_stack or not opened:
                del texts[first:]
        elif token.endswith(b'"op_callstack"') and token != b'"op_callstack"' and opened:
            opened[-1] = opened[-1][0], True
        elif token != b"}" and not _JSON_WORD.fullmatch(token):
            texts.append(match.span())
    return bytes(out)


def _without(match: re.Match[str]) -> str:
    library = _LIBRARY.fullmatch(match[0])
    return library[1] if library else _GONE


def _telling(argument: str) -> Iterable[str]:
    """Words of a command that are specific to it, unlike "python", "--dtype" and "bf16"."""
    yield from (
        (argument,) if len(argument) >= _LEAST_WORD and re.search(r"[/\\.:@\s]", argument) else ()
    )
    for word in re.split(r"[\s=,;'\"]+", argument):
        # bfloat16, 1e-5
        if len(word) >= _LEAST_WORD and not re.fullmatch(r"-*[a-z]+\d{0,3}|[-+\d.e]+", word):
            yield word


_Places = Mapping[tuple[int, int], tuple[int, int]]
"""Old (shard, offset) -> new (shard, offset)."""


def _with_dependents(columns: dict[str, Column], chosen: Column) -> Column:
    """Returns also the records that share stored bytes with a chosen one, and the increments that
    follow one.
    """
    place = np.stack([columns["shard"], columns["offset"]], axis=1)
    stored = (columns["shard"] >= 0) & (columns["nbytes"] > 0)
    _, group = np.unique(place, axis=0, return_inverse=True)
    group = group.reshape(-1)
    base = columns["base"]
    while True:
        hit = np.zeros(int(group.max()) + 1 if group.size else 0, bool)
        hit[group[chosen & stored]] = True
        wider = chosen | (stored & hit[group]) | ((base >= 0) & chosen[base])
        if np.array_equal(wider, chosen):
            return wider
        chosen = wider


def _lines_without(
    journal: Bytes, index: Index, dropped: Column, moved: _Places, why: str
) -> Iterator[bytes | memoryview]:
    """The lines of a journal in which these records have no elements, for the reason `why`, and
    others lie where they were moved to.
    """
    places = {int(line): record for record, line in enumerate(index.records_at)}
    for number in range(index.columns["line_kind"].size):
        raw = index.line(journal, number)
        record = places.get(number)
        if record is None:
            yield raw
            continue
        line = decode_record(raw)
        if dropped[record]:
            yield encoder.encode(msgspec.structs.replace(line, elements=None, why=why)) + b"\n"
        elif (
            isinstance(line.elements, Kept | Increment)
            and (line.elements.shard, line.elements.offset) in moved
        ):
            moved_line = msgspec.structs.replace(line, elements=_moved(line.elements, moved))
            yield encoder.encode(moved_line) + b"\n"
        else:
            yield raw


def _replace_journal(folder: Path, lines: Iterable[bytes | memoryview]) -> None:
    """Replaces the journal of a process folder and deletes its index. From then on no reader sees
    the removed content. Raises OSError.
    """
    status, count, digest = read_status(folder), 0, xxhash.xxh3_128()
    is_stated = status.lines >= 0
    with disk.whole_file(folder / JOURNAL) as file:
        for line in lines:
            file.write(line)
            digest.update(line)
            count += 1
        file.flush()
        disk.system.sync(file.fileno())
        (folder / INDEX).unlink(missing_ok=True)
        if is_stated:  # until the other journal stands, neither is told to be whole
            leave_status(folder, Ended(status.ended, status.error))
    if is_stated:
        leave_status(folder, Ended(status.ended, status.error, count, digest.hexdigest()))


def _moved(place: Kept | Increment, moved: _Places) -> Elements:
    shard, offset = moved[place.shard, place.offset]
    return msgspec.structs.replace(place, shard=shard, offset=offset)
