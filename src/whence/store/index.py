"""The columnar index: opens a run of 10^6 records without parsing its journal.

It holds the start of every line of the journal, and as plain columns the fields that comparisons
are planned from. It is derived from the journal alone: at close, by `recover`, or in memory when a
run without an index is opened.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from whence.dtypes import DTYPES
from whence.records import Statistics
from whence.store.columns import Column as FileColumn
from whence.store.columns import check_lengths, save, whole_column
from whence.store.columns import load as load_columns
from whence.store.folder import FORMAT, INDEX
from whence.store.journal import CALL, RECORD, Damage
from whence.store.shards import Bytes

Column = np.ndarray[Any, np.dtype[Any]]

NONE, KEPT, INCREMENT, EXTERNAL = range(4)
"""Codes of the column `elements`."""

STATISTICS = Statistics.__struct_fields__

# name -> (dtype, which length it has)
SCHEMA: dict[str, tuple[str, str]] = {
    "line_start": ("<i8", "lines+1"), "line_kind": ("|u1", "lines"), "names": ("|u1", "free"),
    "names_at": ("<i8", "names+1"), "dtype": ("<i4", "records"), "shape": ("<i8", "free"),
    "shape_at": ("<i8", "records+1"), "hash": ("<u8", "records"), "elements": ("|u1", "records"),
    "shard": ("<i4", "records"), "offset": ("<i8", "records"), "nbytes": ("<i8", "records"),
    "base": ("<i8", "records"), "axis": ("<i4", "records"), "statistics": ("<f8", "records"),
    "parent": ("<i8", "calls"), "order": ("<i8", "calls"), "rank": ("<i4", "calls"),
    "step": ("<i8", "calls"), "micro": ("<i8", "calls"), "occurrence": ("<i8", "calls"),
    "root": ("<i4", "calls"), "phase": ("<i4", "calls"), "scope": ("<i4", "calls"),
    "op": ("<i4", "calls"), "op_type": ("<i4", "calls"), "refs_at": ("<i8", "calls+1"),
    "ref_slot": ("<i4", "refs"), "ref_record": ("<i8", "refs"),
    "line_digest": ("<u8", "lines"), "call_kind": ("|u1", "calls"), "call_says": ("|u1", "calls"),
}  # fmt: skip
LATER = ("line_digest", "call_kind", "call_says")
"""Columns that an earlier index lacks; `ProcessReader.said` then derives them from the journal."""
RECORD_COLUMNS, CALL_COLUMNS = (
    tuple(n for n, (_, length) in SCHEMA.items() if length == of and n not in LATER)
    for of in ("records", "calls")
)
NAME_COLUMNS = ("dtype", "root", "phase", "scope", "op", "op_type", "ref_slot")
WIDTHS = {"hash": 2, "statistics": len(STATISTICS)}


class Index:
    """The columns of one process. damage: why the journal could not be read to its end, or None."""

    def __init__(
        self,
        columns: dict[str, Column],
        names: list[str],
        journal_bytes: int,
        damage: Damage | None = None,
    ) -> None:
        self.columns = columns
        self.names = names
        self.journal_bytes = journal_bytes
        self.damage = damage
        self.records_at = np.flatnonzero(columns["line_kind"] == RECORD)
        self.calls_at = np.flatnonzero(columns["line_kind"] == CALL)

    def shape(self, record: int) -> tuple[int, ...]:
        """Returns the shape of a record."""
        starts = self.columns["shape_at"]
        return tuple(self.columns["shape"][starts[record] : starts[record + 1]].tolist())

    def stored_shape(self, record: int) -> tuple[int, ...] | None:
        """Returns the shape of the elements in the shard: the whole record, or its increment. None
        when the columns contradict each other.
        """
        columns, shape = self.columns, self.shape(record)
        dtype = DTYPES.get(self.names[columns["dtype"][record]])
        if columns["elements"][record] == INCREMENT:
            axis, base_shape = (
                int(columns["axis"][record]),
                self.shape(int(columns["base"][record])),
            )
            if (
                len(base_shape) != len(shape)
                or not 0 <= axis < len(shape)
                or base_shape[axis] > shape[axis]
            ):
                return None
            shape = (*shape[:axis], shape[axis] - base_shape[axis], *shape[axis + 1 :])
        if dtype is None or math.prod(shape) * dtype.itemsize != columns["nbytes"][record]:
            return None
        return shape

    def span(self, line: int) -> tuple[int, int]:
        """Returns bytes [start, end) of a line in the journal, including its newline."""
        starts = self.columns["line_start"]
        return int(starts[line]), int(starts[line + 1])

    def line(self, journal: Bytes, line: int) -> memoryview:
        """Returns the bytes of a line, including its newline."""
        start, end = self.span(line)
        return journal[start:end].data

    def lines(self, kind: int) -> list[int]:
        """Returns the numbers of the lines of a kind."""
        return [int(n) for n in np.flatnonzero(self.columns["line_kind"] == kind)]

    def save(self, folder: Path) -> None:
        """Writes the index beside its journal. Raises OSError."""
        columns = {name: whole_column(column) for name, column in self.columns.items()}
        write_index(folder, columns, self.names, self.journal_bytes)


def write_index(
    folder: Path, columns: dict[str, FileColumn], names: list[str], journal_bytes: int
) -> None:
    """Writes an index beside its journal. Raises OSError."""
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    starts = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(e) for e in encoded], out=starts[1:])
    blob = np.frombuffer(b"".join(encoded), np.uint8)
    save(
        folder / INDEX,
        {**columns, "names": whole_column(blob), "names_at": whole_column(starts)},
        {"format": str(FORMAT), "journal_bytes": str(journal_bytes)},
    )


def load(folder: Path, journal_bytes: int) -> Index | None:
    """Returns the index beside a journal of `journal_bytes`; None when there is none, or it is
    stale or invalid.
    """
    try:
        return _sound(load_columns(folder / INDEX, SCHEMA, WIDTHS, LATER), journal_bytes)
    except (OSError, ValueError, KeyError):
        return None


def _sound(columns: dict[str, Column], journal_bytes: int) -> Index | None:
    """Whether lengths agree, offsets increase, and codes and record numbers are in range, so that
    nothing in the index points outside a file. Returns None, or raises ValueError, where not.
    """
    kinds = columns["line_kind"]
    blob, names_at = columns.pop("names"), columns.pop("names_at")
    if names_at.size == 0:
        return None
    lengths = {
        "lines": kinds.size,
        "records": int((kinds == RECORD).sum()),
        "calls": int((kinds == CALL).sum()),
        "refs": columns["ref_record"].size,
        "names": names_at.size - 1,
    }
    check_lengths(columns, SCHEMA, lengths)
    rising = [
        (columns["line_start"], journal_bytes),
        (columns["shape_at"], columns["shape"].size),
        (columns["refs_at"], columns["ref_record"].size),
        (names_at, blob.size),
    ]
    for offsets, last in rising:
        if offsets[0] != 0 or offsets[-1] != last or (np.diff(offsets) < 0).any():
            return None
    in_range = [(columns[name], lengths["names"]) for name in NAME_COLUMNS] + [
        (columns["ref_record"], lengths["records"])
    ]
    if any(c.size and (int(c.min()) < 0 or int(c.max()) >= stop) for c, stop in in_range):
        return None
    if (columns["base"] >= np.arange(lengths["records"])).any() or (columns["shape"] < 0).any():
        return None
    if (columns["parent"] >= lengths["calls"]).any() or (columns["parent"] < -1).any():
        return None
    text = blob.tobytes()
    names = [
        text[a:b].decode("utf-8", "surrogatepass")
        for a, b in zip(names_at[:-1].tolist(), names_at[1:].tolist(), strict=True)
    ]
    return Index(columns, names, journal_bytes)
