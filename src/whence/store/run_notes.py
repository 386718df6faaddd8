"""What the processes of a run noted, and what is wrong with their files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from whence.errors import ElementsMissing
from whence.records import Note, RunInfo
from whence.records.marks import STOPPED
from whence.store import journal
from whence.store.index import INCREMENT, KEPT
from whence.store.journal import NOTE
from whence.store.process_reader import ProcessReader
from whence.store.status import FAILED
from whence.store.windows import deleted_windows

_RANKS = 1 << 17  # more are named by no launcher


def notes_of(process: ProcessReader) -> list[Note]:
    """What a process noted, why it stopped where its medium failed, and damaged shards."""
    noted = process.decode(NOTE, journal.decode_note)
    return [*noted, *_stopped(process), *_damaged_shards(process)]


def _stopped(process: ProcessReader) -> list[Note]:
    if process.status != FAILED:
        return []
    return [Note(STOPPED, process.error or "no reason was left")]


def _damaged_shards(process: ProcessReader) -> list[Note]:
    """A note for each shard that is not there or was cut off, with how many tensors lie in what
    is missing.
    """
    columns = process.index.columns
    is_stored = (columns["elements"] == KEPT) | (columns["elements"] == INCREMENT)
    shards = np.where(is_stored, columns["shard"], process.shard_count)
    ends = columns["offset"] + columns["nbytes"]
    numbers = np.unique(shards[np.flatnonzero(np.diff(shards, prepend=-1))])
    last = np.zeros(numbers.size, np.int64)  # a number may be any, where an index is damaged
    np.maximum.at(last, np.searchsorted(numbers, shards), ends)
    notes = []
    for number, end in zip(numbers.tolist(), last.tolist(), strict=True):
        if number == process.shard_count:  # of those that are stored elsewhere
            continue
        shard = process.shard(number)
        try:
            shard.require(end)
        except ElementsMissing as error:
            lost = shard.lost(columns["offset"][shards == number], ends[shards == number])
            text = f"elements of {lost} of {process.records} tensors cannot be read: {error}"
            notes.append(Note("error", text))
    return notes


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
