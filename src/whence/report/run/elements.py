"""How many bytes a record has, and where its elements are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from whence import dtypes
from whence.records import Dumped, External, Increment, Kept, Record, Run
from whence.records.slots import slot_kind
from whence.report import tables

# A tensor is counted once, under the first of these that any call uses it as.
_KINDS = ("param", "grad", "mutated", "output", "input")
_UNUSED = "unused"


def has_elements(record: Record) -> bool:
    """Can its elements be read, as far as the run knows?"""
    return record.elements is not None and not (isinstance(record.elements, Dumped) and record.why)


def bytes_of(record: Record) -> int:
    dtype = dtypes.DTYPES.get(record.dtype)
    return (
        record.count * dtype.itemsize
        if dtype and all(extent >= 0 for extent in record.shape)
        else 0
    )


def bytes_by_kind(run: Run) -> dict[str, tuple[int, int, int]]:
    # kind -> records, their bytes, bytes whose elements are in the run or in a checkpoint
    rank = {kind: place for place, kind in enumerate(_KINDS)}
    kinds: dict[int, int] = {}
    for call in run.calls:
        for ref in call.refs:
            place = rank.get(slot_kind(ref.slot), len(_KINDS))
            kinds[ref.record] = min(place, kinds.get(ref.record, place))
    sums: dict[str, list[int]] = {}
    for record in run.records:
        place = kinds.get(record.id, len(_KINDS))
        total = sums.setdefault(_KINDS[place] if place < len(_KINDS) else _UNUSED, [0, 0, 0])
        size = bytes_of(record)
        total[0] += 1
        total[1] += size
        total[2] += size if has_elements(record) else 0
    return {
        kind: (sums[kind][0], sums[kind][1], sums[kind][2])
        for kind in (*_KINDS, _UNUSED)
        if kind in sums
    }


def program_counts(run: Run) -> dict[str, Any]:
    leaves = [call for call in run.calls if call.program or call.no_program or call.leaf]
    reasons = Counter(call.no_program or "none recorded" for call in leaves if not call.program)
    return {
        "calls": len(leaves),
        "usable_calls": len(leaves) - reasons.total(),
        "refused": dict(reasons.most_common()),
    }


def elements_place(record: Record) -> str:
    match record.elements:
        case Kept(shard=shard, offset=offset, nbytes=size):
            return f"kept, {tables.size(size)} (shard {shard}, offset {offset})"
        case Increment(base=base, axis=axis, nbytes=size):
            return f"kept as {tables.size(size)} after record #{base} along axis {axis}"
        case External(file=file, offset=offset, nbytes=size):
            return f"{tables.size(size)} in {file}, offset {offset}"
        case Dumped(file=file):
            return (
                f"{tables.size(bytes_of(record))} in {file or 'the dump'}"
                if not record.why
                else f"not kept: {record.why}"
            )
        case None:
            return f"not kept: {record.why}" if record.why else "no place recorded"


def kind_of_record(record: Record) -> str:
    return f"{tables.clean(record.dtype)} {tables.shape(record.shape)}"
