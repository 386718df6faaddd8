"""What is to be said of a golden run, as JSON."""

import hashlib
import json

import msgspec
import numpy as np
import xxhash

import whence
from whence import store
from whence.errors import ElementsMissing


def described(place):
    """Everything that a run holds: records with what their elements are, calls, programs, notes."""
    run = store.open_run(place)
    records = []
    for record in run.records:
        try:
            data = np.ascontiguousarray(run.array(record.id)).tobytes()
            read = xxhash.xxh3_128_hexdigest(data)
        except ElementsMissing:
            read = ""
        figures = record.statistics
        records.append(
            [
                record.dtype,
                list(record.shape),
                record.hash,
                read,
                record.why,
                [] if figures is None else [repr(v) for v in msgspec.structs.astuple(figures)],
            ]
        )
    calls = [
        [c.scope, c.root, c.op, c.op_type, c.phase, c.kind, c.step, c.rank, c.order, c.parent]
        + [[r.slot, r.record] for r in c.refs]
        for c in run.calls
    ]
    return {
        "records": len(records),
        "calls": len(calls),
        "read": sum(bool(record[3]) for record in records),
        "records_digest": _digest(records),
        "calls_digest": _digest(calls),
        "programs": sorted(run.programs),
        "notes": sorted({note.kind for note in run.notes}),
        "steps": len(run.steps),
        "collectives": len(run.collectives),
        "ended": bool(run.ended),
        "first": records[:2] + calls[:2],
    }


def answer(reference, target):
    """(status, scopes of the findings)."""
    result = whence.compare(reference, target)
    return result.status, sorted({f"{f.cause} {f.name}" for f in result.findings})


def _digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
