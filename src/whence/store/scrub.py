"""Take what is private out of a run, in place: elements, command, environment, paths, users, hosts.
Figures and topology stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import numpy as np

from whence import disk
from whence.disk import write_file
from whence.errors import StoreFailed, UsageError
from whence.store import index_builder
from whence.store import journal as journal_file
from whence.store.anonymous import Anonymous
from whence.store.dropping import lines_without, replace_journal, with_dependents
from whence.store.folder import (
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
from whence.store.journal import decode_call, decode_program
from whence.store.recover import DAMAGED, recover_process, writable_folders
from whence.store.shards import HEADER_BYTES, SHARD_BYTES, Bytes, Shard, ShardWriter, map_file
from whence.store.status import leave_status, read_status
from whence.store.windows import refuse_windows

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
    refuse_windows(run, "scrubs")
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
    except OSError as error:
        raise StoreFailed(
            f"cannot scrub {run}: {error.strerror or error}; scrub it again, it is not finished"
        ) from error
    if anonymous is not None:
        try:
            _clean_rest(run, anonymous)
        except OSError as error:
            raise StoreFailed(
                f"cannot scrub {run}: {error.strerror or error}; scrub it again, it is not finished"
            ) from error
    return Scrubbed(records, nbytes)


def _clean_rest(run: Path, anonymous: Anonymous) -> None:
    """Clean what is beside the journals. run.json holds the private words, so it is written after
    all else; folders are renamed last.
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
    chosen = with_dependents(columns, chosen) & (columns["elements"] != NONE)
    _delete_unreferenced(folder, columns["shard"])  # of a scrub that was interrupted
    if chosen.any() or anonymous is not None:
        moved = _move(folder, process, index, chosen)
        lines = lines_without(journal, index, chosen, moved, SCRUBBED)
        replace_journal(
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
    """Which records are referred to under one of the patterns."""
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
            start, end = index.span(int(index.calls_at[place]))
            used.add(decode_call(journal[start:end].data).program)
    for line in index.lines(journal_file.PROGRAM):
        start, end = index.span(line)
        program = decode_program(journal[start:end].data)
        if program.id in used:
            chosen[[c for c in program.constants if 0 <= c < chosen.size]] = True
    return chosen


def _move(
    folder: Path, process: ProcessInfo, index: Index, chosen: Column
) -> dict[tuple[int, int], tuple[int, int]]:
    """Copy the elements that stay out of shards that are deleted. Returns old (shard, offset) ->
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
