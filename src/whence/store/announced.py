"""Says which tensors of a run are looked at next: an object store is asked for them ahead."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable

from whence.errors import ElementsMissing
from whence.store.index import INCREMENT, KEPT
from whence.store.reader import StoredRun
from whence.store.remote_run import mirror_of
from whence.store.remote_shard import FileRange, RemoteShard


def announce(run: StoredRun, records: Iterable[int]) -> None:
    """Say whose elements are looked at next, in this order: what lies in an object store is fetched
    ahead of that, as far as memory for it goes. Does nothing for a run of this machine.
    """
    readers = run.readers
    mirror = mirror_of(readers[0].folder.parent) if readers else None
    if mirror is None:
        return
    first_records = [reader.record_base for reader in readers]
    ranges: list[FileRange] = []
    for record in records:
        reader = readers[bisect_right(first_records, record) - 1]
        columns, local = reader.index.columns, record - reader.record_base
        if columns["elements"][local] not in (KEPT, INCREMENT):
            continue
        shard = reader.shard(int(columns["shard"][local]))
        if isinstance(shard, RemoteShard):
            with contextlib.suppress(ElementsMissing):  # told where it is looked at
                ranges.append(
                    shard.range(int(columns["offset"][local]), int(columns["nbytes"][local]))
                )
    mirror.announce(ranges)
