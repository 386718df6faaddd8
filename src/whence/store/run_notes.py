"""What the processes of a run noted, what is wrong with their files, and what the run lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from whence.errors import ElementsMissing
from whence.records import Lack, Missing, Note, RunInfo
from whence.records.marks import STOPPED
from whence.records.places import WRITTEN
from whence.store import journal
from whence.store.folder import JOURNAL
from whence.store.index import INCREMENT, KEPT, Column
from whence.store.journal import NOTE
from whence.store.process_reader import AnyShard, ProcessReader
from whence.store.remote_shard import RemoteShard
from whence.store.shards import Shard, holds
from whence.store.status import CLEAN, FAILED
from whence.store.windows import deleted_windows

_RANKS = 1 << 17  # more are named by no launcher


def notes_of(process: ProcessReader) -> list[Note]:
    """What a process noted, why it stopped where its medium failed, and damaged shards."""
    noted = process.decode(NOTE, journal.decode_note)
    damaged = [Note("error", missing.text) for missing in damaged_shards(process)]
    return [*noted, *_stopped(process), *damaged]


def _stopped(process: ProcessReader) -> list[Note]:
    if process.left.ended != FAILED:
        return []
    return [Note(STOPPED, process.left.error or "no reason was left")]


def damaged_shards(process: ProcessReader) -> list[Missing]:
    """Each shard that is not there or was cut off, with how many tensors lie in what is missing,
    and each that is not the one that the journal speaks of.
    """
    columns = process.index.columns
    is_stored = (columns["elements"] == KEPT) | (columns["elements"] == INCREMENT)
    shards = np.where(is_stored, columns["shard"], process.shard_count)
    ends = columns["offset"] + columns["nbytes"]
    numbers = np.unique(shards[np.flatnonzero(np.diff(shards, prepend=-1))])
    last = np.zeros(numbers.size, np.int64)  # a number may be any, where an index is damaged
    np.maximum.at(last, np.searchsorted(numbers, shards), ends)
    damaged = []
    for number, end in zip(numbers.tolist(), last.tolist(), strict=True):
        if number == process.shard_count:  # of those that are stored elsewhere
            continue
        shard = process.shard(number)
        try:
            shard.require(end)
        except ElementsMissing as error:
            lost = shard.lost(columns["offset"][shards == number], ends[shards == number])
            text = f"elements of {lost} of {process.records} tensors cannot be read: {error}"
            damaged.append(Missing(Lack.DAMAGED, _where(process, shard), text))
        else:
            if isinstance(shard, Shard) and _is_foreign(process, shard, shards == number):
                text = (
                    f"{shard.path} holds the elements of another journal than the one beside it: "
                    "copy the run again, all of it"
                )
                damaged.append(Missing(Lack.FOREIGN, _where(process, shard), text))
    return damaged


def _where(process: ProcessReader, shard: AnyShard) -> str:
    name = shard.path.name if not isinstance(shard, RemoteShard) else ""
    return f"{process.folder.name}/{name}".rstrip("/")


def _is_foreign(process: ProcessReader, shard: Shard, in_shard: Column) -> bool:
    """Does a whole shard say that it holds other tensors than the journal names?"""
    stated = shard.said_to_hold() if process.left.ended == CLEAN else ""
    if not stated:
        return False
    columns = process.index.columns
    records = np.flatnonzero(in_shard & (columns["nbytes"] > 0))
    _, firsts = np.unique(columns["offset"][records], return_index=True)
    digests = columns["hash"][records[firsts]]
    return stated != holds([digests.tobytes()])


def lacks(
    processes: Sequence[ProcessReader],
    unborn: Sequence[str],
    info: RunInfo,
    chosen: Collection[int] | None,
) -> tuple[Missing, ...]:
    """What the files of a run show that it lacks. unborn: process folders without a journal, in
    sentences.
    """
    out = []
    for process in processes:
        name = process.folder.name
        if process.is_running:
            text = f"{process.ended()}; wait for its end, or follow it with --watch"
            out.append(Missing(Lack.RUNNING, name, text))
        elif ended := process.ended():
            out.append(Missing(Lack.CUT, name, f"{ended}; capture it again, or copy it again"))
        if process.is_altered():
            text = (
                f"{process.folder / JOURNAL} is not as it was written (its hash differs): copy the "
                "run again"
            )
            out.append(Missing(Lack.FOREIGN, f"{name}/{JOURNAL}", text))
        out += damaged_shards(process)
    out += [Missing(Lack.CUT, text.partition(" ")[0], text) for text in unborn]
    absent = absent_ranks(processes, info, chosen)
    out += [Missing(Lack.RANK, "", note.text) for note in absent]
    return (*out, *_absent_processes(processes, len(unborn), info, chosen))


def _absent_processes(
    processes: Sequence[ProcessReader], unborn: int, info: RunInfo, chosen: Collection[int] | None
) -> tuple[Missing, ...]:
    """That process folders are gone which were there as the command ended."""
    written = info.settings.get(WRITTEN)
    there = len(processes) + unborn
    if chosen is not None or not isinstance(written, int) or written <= there:
        return ()
    text = f"{there} of the {written} processes that wrote this run are in it: copy it again"
    return (Missing(Lack.RANK, "", text),)


def absent_ranks(
    processes: Sequence[ProcessReader], info: RunInfo, chosen: Collection[int] | None
) -> tuple[Note, ...]:
    """A note of the ranks that their launcher started and that left nothing in the run. chosen: the
    ranks that are read, None for all.
    """
    there = {process.info.rank for process in processes}
    size = min(max((p.info.world_size for p in processes), default=0), _RANKS)
    absent = sorted(set(range(size)) - there)
    if not absent or chosen is not None or info.options.get("ranks") is not None:
        return ()
    some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return (
        Note(
            "ranks",
            f"rank {some} of {size} left nothing in this run: it called no model, could not write, "
            "or ended before",
        ),
    )


def emptiness(path: Path, processes: int, notes: Sequence[Note], ended: str) -> str:
    """What to say of a run with no call and no record."""
    if deleted := deleted_windows(path):
        return (
            f"{path} has no window any more: {deleted} were compared and deleted (whence compare "
            "--watch --discard); to look into one, capture again and leave --discard out"
        )
    note_lines = "".join(f"\n  it says: {note.kind}: {note.text}" for note in notes[:10])
    return (
        f"{path} is an empty run: {processes} process folder(s), no call and no record"
        f"{f'; {ended}' if ended else ''}{note_lines}\n  "
        + (
            "it ended before anything was captured: remove the cause and capture again"
            if ended
            else "nothing was captured: check that the command runs a model in a process "
            "that whence can see, and what was selected"
        )
    )
