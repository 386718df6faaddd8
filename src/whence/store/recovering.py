"""Completes what a killed writer left unfinished: headers of its shards, a journal with a torn end,
an index.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec
import numpy as np

from whence import disk
from whence.disk import write_file
from whence.errors import StoreFailed, UnreadableRun
from whence.store import index_builder
from whence.store.folder import (
    JOURNAL,
    ProcessInfo,
    is_writing,
    load_info,
    load_process,
    process_folders,
    shard_name,
)
from whence.store.index import INCREMENT, KEPT, Index
from whence.store.index import load as load_index
from whence.store.shards import (
    HEADER_BYTES,
    MAX_HEADER_BYTES,
    Header,
    finish_file,
    map_file,
    parse_header,
    tensor_name,
)
from whence.store.status import RECOVERED, RUNNING, Ended, leave_status, read_status

DAMAGED = "journal.damaged"


class Recovered(msgspec.Struct, frozen=True):
    """Result of recovering one process folder.

    records: readable now. finished: shards whose header was written. lost: records whose elements
    are beyond the end of their file. cut_bytes: of the journal, after its last complete line.
    """

    folder: str
    records: int
    finished: tuple[str, ...]
    lost: int
    cut_bytes: int


def recover(path: str | Path, *, force: bool = False) -> tuple[Recovered, ...]:
    """Makes every shard of the run a valid safetensors file, and builds its indexes, from the
    journals. A second call changes nothing.

    Bytes after the last journalled tensor are cut off. A part of a journal that is damaged (not
    merely torn) is moved to journal.damaged. Raises StoreFailed when a process still writes (on
    another host: wrote within the last minute; unless `force`) or the medium refuses, UnreadableRun
    when there is no run.
    """
    run = Path(path)
    load_info(run)
    folders = writable_folders(run, force=force)
    try:
        return tuple(recover_process(folder, process) for folder, process in folders)
    except OSError as error:
        raise StoreFailed(
            f"cannot recover {run}: {error.strerror or error}; nothing that was readable was "
            "lost: try again"
        ) from error


def writable_folders(run: Path, *, force: bool) -> list[tuple[Path, ProcessInfo]]:
    """Returns the process folders of a run that may be changed now. Raises StoreFailed when one may
    not.
    """
    folders = []
    for folder in sorted(process_folders(run)):
        if folder.is_symlink():
            raise StoreFailed(
                f"{folder} is a symbolic link: its target is not changed; recover it "
                "where it really is"
            )
        if not (folder / JOURNAL).exists():
            continue
        process = load_process(folder)
        if not force and read_status(folder).ended == RUNNING and is_writing(folder, process):
            raise StoreFailed(
                f"process {process.pid} still writes {folder}: wait until it ends (or force it, "
                "when you know better)"
            )
        folders.append((folder, process))
    return folders


def is_written(run: Path) -> bool:
    """Whether any process still writes the run."""
    for folder in process_folders(run):
        try:
            if read_status(folder).ended == RUNNING and is_writing(folder, load_process(folder)):
                return True
        except UnreadableRun:
            continue
    return False


def recover_process(folder: Path, process: ProcessInfo) -> Recovered:
    """Recovers one process folder. Raises OSError, StoreFailed."""
    journal = map_file(folder / JOURNAL)
    index = load_index(folder, journal.size)
    fresh = index is None
    if index is None:
        index = index_builder.build(journal)
    cut = journal.size - index.journal_bytes
    if cut:
        if index.damage is not None and not index.damage.torn:
            write_file(folder / DAMAGED, journal[index.journal_bytes :].tobytes())
        _refuse_link(folder / JOURNAL)
        del journal
        fd = disk.system.open(folder / JOURNAL, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            disk.system.cut(fd, index.journal_bytes)
        finally:
            os.close(fd)
    finished = []
    lost = 0
    for number in _shards(folder, index):
        header_written, missing = _finish(folder, number, process, index)
        lost += missing
        if header_written:
            finished.append(shard_name(number))
    if fresh:
        index.save(folder)
    if read_status(folder).ended == RUNNING:
        _refuse_link(folder / "status.json")
        leave_status(folder, Ended(RECOVERED))
    return Recovered(str(folder), int(index.records_at.size), tuple(finished), lost, cut)


def _shards(folder: Path, index: Index) -> list[int]:
    """Returns the numbers of the existing shard files."""
    numbers = set(np.unique(index.columns["shard"]).tolist())
    for file in folder.glob("shard-*.safetensors"):
        digits = file.name[len("shard-") : -len(".safetensors")]
        if digits.isascii() and digits.isdigit() and shard_name(int(digits)) == file.name:
            numbers.add(int(digits))
    return sorted(n for n in numbers if n >= 0 and (folder / shard_name(n)).exists())


def _finish(folder: Path, number: int, process: ProcessInfo, index: Index) -> tuple[bool, int]:
    """Writes the header of one shard unless it is correct already. Returns (whether it was written,
    records beyond its end).
    """
    file = folder / shard_name(number)
    _refuse_link(file)
    fd = disk.system.open(file, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little") if size >= 8 else 0
        reserved = (
            8 + length if 2 <= length <= MAX_HEADER_BYTES else process.header_bytes or HEADER_BYTES
        )
        header, missing = _header(index, number, size - reserved)
        if missing == 0 and _is_finished(file, reserved, reserved + header.end):
            return False, 0
        finish_file(contextlib.nullcontext(fd), header, reserved)
    except ValueError as error:
        raise StoreFailed(
            f"cannot write the header of {file}: {error}; its elements stay readable with whence"
        ) from error
    finally:
        os.close(fd)
    return True, missing


def _header(index: Index, number: int, data_bytes: int) -> tuple[Header, int]:
    """Returns the header of a shard from the journal; records at the position of an earlier one are
    not named again.
    """
    columns = index.columns
    header = Header()
    missing = 0
    records = np.flatnonzero(
        (columns["shard"] == number)
        & ((columns["elements"] == KEPT) | (columns["elements"] == INCREMENT))
    )
    for record in records.tolist():
        offset, nbytes = int(columns["offset"][record]), int(columns["nbytes"][record])
        if offset + nbytes > data_bytes:
            missing += 1
            continue
        if offset < header.end:
            continue
        shape = index.stored_shape(record)
        if shape is None:  # left unnamed, and so part of the padding
            continue
        increment = columns["elements"][record] == INCREMENT
        dtype = index.names[columns["dtype"][record]]
        name, digest = tensor_name(record, increment=bool(increment)), columns["hash"][record]
        header.add(name, dtype, shape, offset, nbytes, digest.tobytes())
    return header, missing


def _is_finished(file: Path, reserved: int, end: int) -> bool:
    """Whether a shard has a header that covers it, as after a clean end. It may name padding at the
    end.
    """
    try:
        data = map_file(file)
        tensors = parse_header(data)
    except (OSError, ValueError):
        return False
    covered = max((t.offset + t.nbytes for t in tensors), default=reserved)
    return covered == data.size and data.size >= end


def _refuse_link(file: Path) -> None:
    try:
        status = file.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableRun(f"{file} is not a regular file; its target is not changed")
