"""The error at the output of a run: that of the outputs of its root calls."""

from __future__ import annotations

import math
from collections.abc import Iterable

from whence.errors import ElementsMissing
from whence.records import Call, Run
from whence.results import OutputError

Errors = dict[tuple[str, int, int, int], OutputError]
"""By (root, rank, step, micro)."""


def output_errors(reference: Run, target: Run) -> Errors:
    """Error of the root's outputs by (root, rank, step, micro), taken in float64. Outputs that are
    state (caches) are left out, and steps that a capture was not asked for."""
    from whence.align import selected

    roots = {c.key(): c for c in selected(target.calls) if c.parent == -1}
    out: Errors = {}
    for call in selected(reference.calls):
        partner = roots.get(call.key())
        if call.parent != -1 or call.phase != "forward" or partner is None:
            continue
        error, norm = _error(reference, target, call, partner)
        key = (call.root, call.rank, call.step, call.micro)
        out[key] = OutputError(*key, error, norm, _same_question(reference, target, call, partner))
    return out


def _error(reference: Run, target: Run, call: Call, partner: Call) -> tuple[float | None, float]:
    """(2-norm of the difference or None, 2-norm of the reference) over all floating outputs of a
    root's call but caches.
    """
    from whence import dtypes, metrics
    from whence.instrument.patch_points import results_of

    records = {r.slot: r.record for r in partner.refs}
    results = results_of(call)
    slots = [
        r
        for r in call.slots("output")
        if r.slot in results and dtypes.is_floating(reference.records[r.record].dtype)
    ]
    error = norm = 0.0
    for ref in slots:
        if ref.slot not in records:
            return None, norm
        try:
            measured = metrics.measure(
                reference.array(ref.record), target.array(records[ref.slot]), tier="core"
            )
        except ElementsMissing:
            return None, norm
        if measured.identical:
            statistics = reference.records[ref.record].statistics
            norm += ((statistics.norm if statistics is not None else None) or 0.0) ** 2
            continue
        values = measured.values
        rmse, rel, size = values.get("rmse"), values.get("rel_l2"), values.get("reference_norm")
        if rmse is None or size is None or values.get("nan_mismatch") or values.get("inf_mismatch"):
            return None, norm
        # rel_l2 is over the finite pairs only, as the norm is; of an all-zero reference it is
        # infinite.
        error += (
            (rel * size) ** 2
            if rel is not None and size
            else rmse**2 * reference.records[ref.record].count
        )
        norm += size**2
    return (math.sqrt(error), math.sqrt(norm)) if slots else (None, 0.0)


def _same_question(reference: Run, target: Run, call: Call, partner: Call) -> bool:
    """Are all integer inputs, such as tokens, equal?"""
    inputs = {r.slot: reference.records[r.record] for r in call.slots("input")}
    partners = {r.slot: target.records[r.record] for r in partner.slots("input")}
    return all(
        record.hash == partners[slot].hash
        for slot, record in inputs.items()
        if record.dtype.startswith(("int", "uint")) and slot in partners
    )


def squared_error(errors: Iterable[OutputError]) -> float | None:
    """Squared error over the squared norm of the reference, over all of them; None when one is not
    defined, or nothing is there.
    """
    every = list(errors)
    norm = sum(e.norm**2 for e in every)
    if not every or not norm or any(e.error is None for e in every):
        return None
    return sum((e.error or 0.0) ** 2 for e in every) / norm


def relative_error(errors: Iterable[OutputError]) -> float | None:
    """Root of `squared_error`."""
    square = squared_error(errors)
    return None if square is None else math.sqrt(square)
