"""Which parameter of one run faces which of another, how it is brought there, and whether both then
hold the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whence.errors import ElementsMissing, UsageError
from whence.records.slots import is_param, param_name

if TYPE_CHECKING:
    from whence.records import Call, Run
    from whence.results import Made, SlotPair, WeightMap


def map_weights(
    reference: str | os.PathLike[str] | Run,
    target: str | os.PathLike[str] | Run,
    *,
    mapping: str | os.PathLike[str] | None = None,
) -> WeightMap:
    """Hold the parameters of two runs against each other: another framework's, another naming's.

    mapping: a map to start from (docs/alignment.md). Raises UnreadableRun, UsageError (no parameter
    faces another).
    """
    from whence import align
    from whence.comparison.verdicts.sparse_target.inner_tensors import inside
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run
    from whence.results import FacedWeight, WeightMap

    opened = (
        open_run(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else run
        for run in (reference, target)
    )
    left, right = map(with_figures, opened)
    aligned = align.align(
        left,
        right,
        user_map=align.load_map(mapping) if mapping is not None else None,
        inside=inside,
    )
    ours, theirs = aligned.reference, aligned.target
    # How the user's run keeps them is in the plan as said; what they become, in the one that was
    # carried out.
    said = {(p.reference, s.reference_slot): s for p in aligned.as_said().pairs for s in p.slots}
    made = {m.record: m for m in aligned.plan.made_target}
    out: dict[tuple[str, str], FacedWeight] = {}
    met: tuple[set[str], set[str]] = (set(), set())
    for pair in aligned.plan.pairs:
        a, b = ours.calls[pair.reference], theirs.calls[pair.target]
        for slot in (s for s in pair.slots if is_param(s.reference_slot)):
            key = _name(a), param_name(slot.reference_slot)
            told = said.get((pair.reference, slot.reference_slot), slot)
            met[0].add(_full(a, slot.reference_slot))
            met[1].add(_full(b, told.target_slot))
            if key not in out:
                state, error = _state(ours, theirs, slot)
                shape = theirs.records[_source(slot.target_record, made)].shape
                out[key] = FacedWeight(
                    key[0],
                    key[1],
                    _name(b),
                    param_name(told.target_slot),
                    slot.dims,
                    ours.records[slot.reference_record].shape,
                    shape,
                    state,
                    error,
                )
    if not out:
        raise UsageError(
            "no parameter of one faces one of the other: capture both with their parameters, or "
            "give --map"
        )
    alone = [
        tuple(
            dict.fromkeys(
                name
                for c in run.calls
                for r in c.slots("param")
                if (name := _full(c, r.slot)) not in seen
            )
        )
        for run, seen in zip((ours, theirs), met)
    ]
    return WeightMap(tuple(out.values()), alone[0], alone[1])


def _source(record: int, made: Mapping[int, Made]) -> int:
    """The first record of the run itself that a tensor was made from."""
    while record in made and made[record].operands:
        record = made[record].operands[0][1][0]
    return record


def _name(call: Call) -> str:
    return call.scope or call.root


def _full(call: Call, slot: str) -> str:
    return f"{_name(call)}.{param_name(slot)}"


def _state(reference: Run, target: Run, slot: SlotPair) -> tuple[str, float | None]:
    """("equal", "differs", or "not compared", relative error in the 2-norm)."""
    import numpy as np

    from whence import judge

    try:
        a, b = reference.array(slot.reference_record), target.array(slot.target_record)
    except ElementsMissing:
        return "not compared", None
    if a.shape != b.shape:
        return "not compared", None
    rounded = judge.rounded(a, target.records[slot.target_record].dtype)
    if np.array_equal(
        rounded.reshape(-1).view(np.uint8), np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    ):
        return "equal", 0.0
    one, two = a.astype(np.float64), b.astype(np.float64)
    size = float(np.linalg.norm(one.ravel()))
    return "differs", float(np.linalg.norm((two - one).ravel())) / size if size else None
