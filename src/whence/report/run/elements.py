"""The sizes of records in bytes, and where their elements are stored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from whence import dtypes
from whence.records import Dumped, External, Increment, Kept, Record, Run
from whence.records.columns import columns_of, program_fields
from whence.records.slots import slot_kind
from whence.report import tables

# A tensor is counted once, under the first of these kinds as which a call uses it.
_KINDS = ("param", "grad", "mutated", "output", "input")
_UNUSED = "unused"


def bytes_of(record: Record) -> int:
    dtype = dtypes.DTYPES.get(record.dtype)
    return (
        record.count * dtype.itemsize
        if dtype and all(extent >= 0 for extent in record.shape)
        else 0
    )


def bytes_by_kind(run: Run) -> dict[str, tuple[int, int, int]]:
    # kind -> records, their bytes, bytes whose elements are in the run or in a checkpoint
    columns = columns_of(run)
    kinds = (*_KINDS, _UNUSED)
    rank = {kind: place for place, kind in enumerate(_KINDS)}
    ranks = columns.of_names(lambda name: rank.get(slot_kind(name), len(_KINDS)))
    places = np.full(columns.dtype.size, len(_KINDS))
    if columns.record.size:
        np.minimum.at(places, columns.record, ranks[columns.slot])
    sizes = columns.nbytes()
    chosen = {kind: places == place for place, kind in enumerate(kinds)}
    return {
        kind: (int(is_of.sum()), int(sizes[is_of].sum()), int(sizes[is_of & columns.kept].sum()))
        for kind, is_of in chosen.items()
        if is_of.any()
    }


def program_counts(run: Run) -> dict[str, Any]:
    usable = 0
    reasons: Counter[str] = Counter()
    for call in program_fields(run):
        if call.program:
            usable += 1
        elif call.no_program or call.leaf:
            reasons[call.no_program or "none recorded"] += 1
    return {
        "calls": usable + reasons.total(),
        "usable_calls": usable,
        "refused": dict(reasons.most_common()),
    }


def elements_place(record: Record) -> str:
    match record.elements:
        case Kept(shard=shard, offset=offset, nbytes=size):
            return f"kept, {tables.size(size)} (shard {shard}, offset {offset})"
        case Increment(base=base, axis=axis, nbytes=size):
            return f"kept as {tables.size(size)} appended to record #{base} along axis {axis}"
        case External(file=file, offset=offset, nbytes=size):
            return f"{tables.size(size)} in {file}, offset {offset}"
        case Dumped(file=file):
            return (
                f"{tables.size(bytes_of(record))} in {file or 'the dump'}"
                if not record.why
                else f"not kept: {record.why}"
            )
        case None:
            return f"not kept: {record.why}" if record.why else "not kept"


def kind_of_record(record: Record) -> str:
    return f"{tables.clean(record.dtype)} {tables.shape(record.shape)}"
