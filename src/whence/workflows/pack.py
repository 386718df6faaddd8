"""Packs a run relative to another one, and unpacks it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import UsageError, WhenceError
from whence.records import Run
from whence.workflows.notebook_progress import Count
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.store import Packed, StoredRun
    from whence.store.packed_reference import PackingState

Column = np.ndarray[Any, np.dtype[Any]]
_KEY = ("rank", "root", "phase", "scope", "op", "step", "micro", "occurrence")
_ENOUGH = 0.5  # of the bytes: where names pair fewer, the runs are aligned


def pack(
    target: AnyPath,
    output: AnyPath | None = None,
    *,
    against: AnyPath | None = None,
    progress: Count | None = None,
) -> Packed:
    """Write a run with its tensors as differences from those of a reference run; no bit is lost
    (docs/large-runs.md). Every command opens it as it is while the reference can be found.

    target: a run. output: a new folder; TARGET.packed where it is None. against: the run that
    tensors are packed against; None compresses each alone. Raises UnreadableRun,
    UsageError (it is packed already, among others), OutputExists, StoreFailed, MissingDependency.
    """
    from whence import store
    from whence.store.delta import blosc

    blosc()
    for given in (target, output, against):
        store.refuse_url(given, "runs are packed on this machine: copy it here first")
    path = Path(os.fspath(target))
    run = store.open_run(path)
    reference = store.open_run(os.fspath(against)) if against is not None else None
    if reference is not None and Path(reference.path).resolve() == path.resolve():
        raise UsageError(f"{path} cannot be packed against itself")
    partners = _partners(reference, run) if reference is not None else None
    out = Path(os.fspath(output)) if output is not None else path.with_name(f"{path.name}.packed")
    return store.pack(run, out, reference=reference, partners=partners, tell=progress)


def is_packed(run: AnyPath) -> bool:
    """Whether a run is packed."""
    from whence import store

    return store.is_packed(os.fspath(run))


def packing_state(run: Run) -> PackingState | None:
    """How a run is packed, against what, and whether that was found; None where it is not packed.
    Raises UnreadableRun.
    """
    from whence import store

    return store.packing_state(run) if isinstance(run, store.StoredRun) else None


def relocate(packed: AnyPath, reference: AnyPath) -> None:
    """Tell a packed run where the run lies now that it is packed against.

    Raises UsageError (it is not packed, or without a reference), UnreadableRun (`reference` is
    another run), StoreFailed.
    """
    from whence import store

    store.relocate(os.fspath(packed), os.fspath(reference))


def unpack(
    packed: AnyPath,
    output: AnyPath | None = None,
    *,
    against: AnyPath | None = None,
) -> Packed:
    """Write a packed run as it was, byte for byte.

    output: a new folder; where it is None, PACKED without ".packed", or with ".unpacked". against:
    where the reference lies, if it was moved. Raises UsageError, UnreadableRun (the reference is
    another one, or something is damaged), OutputExists, StoreFailed, MissingDependency.
    """
    from whence import store
    from whence.store.delta import blosc

    blosc()
    path = Path(os.fspath(packed))
    name = path.name.removesuffix(".packed")
    default = path.with_name(name if name != path.name else f"{name}.unpacked")
    return store.unpack(
        path,
        os.fspath(output) if output is not None else default,
        reference=os.fspath(against) if against is not None else None,
    )


def _partners(reference: StoredRun, target: StoredRun) -> Column:
    """For each record of the target, the matching record of the reference, -1 for none.

    A record with equal bytes is preferred, then one of the same name, then the one that alignment
    pairs.
    """
    partners = np.full(len(target.records), -1, np.int64)
    known: dict[Any, int] = {}
    for key, record in _named(reference):
        known.setdefault(key, record)
    for key, record in _named(target):
        if partners[record] < 0:
            partners[record] = known.get(key, -1)
    sizes = target.column("nbytes")
    if sizes[partners >= 0].sum() < _ENOUGH * sizes.sum():
        _align(reference, target, partners)
    equal = {digest: n for n, digest in enumerate(_digests(reference)) if digest is not None}
    for record, digest in enumerate(_digests(target)):
        if digest is not None:
            partners[record] = equal.get(digest, partners[record])
    return partners


def _named(run: StoredRun) -> Any:
    """(name of a tensor in a call, record) for every reference of a run."""
    calls = list(zip(*(run.column(name).tolist() for name in _KEY), strict=True))
    at, slots, records = (
        run.column(name).tolist() for name in ("ref_call", "ref_slot", "ref_record")
    )
    for call, slot, record in zip(at, slots, records, strict=True):
        yield (calls[call], slot), record


def _digests(run: StoredRun) -> list[tuple[int, int, int] | None]:
    """(hash, size) of the stored bytes of every record; None when one of them is unknown."""
    hashes, sizes, kinds = run.column("hash"), run.column("nbytes"), run.column("elements")
    return [
        (a, b, size) if (a or b) and kind == 1 else None
        for (a, b), size, kind in zip(hashes.tolist(), sizes.tolist(), kinds.tolist(), strict=True)
    ]


def _align(reference: StoredRun, target: StoredRun, partners: Column) -> None:
    """Fill in partners of records that names do not pair, from an alignment of the runs.

    If the alignment fails, these records have no partner and are compressed alone.
    """
    from whence.workflows.compare import align_runs

    try:
        plan = align_runs(reference, target).plan
    except WhenceError:
        return
    for pair in plan.pairs:
        for slot in pair.slots:
            record, partner = slot.target_record, slot.reference_record
            if record < partners.size and partner < len(reference.records):
                partners[record] = partner if partners[record] < 0 else partners[record]
