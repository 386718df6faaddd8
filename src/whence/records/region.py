"""Operators that return what they were given."""

from __future__ import annotations

from whence.records import Call, Run


def hands_on(run: Run, call: Call) -> bool:
    """Did an operator return the elements that it was given, in their order? One without a partner then hides nothing: they are
    compared where they were made."""
    records = run.records
    given = {(records[r.record].hash, records[r.record].dtype) for r in call.slots("input") if records[r.record].hash}
    made = [(records[r.record].hash, records[r.record].dtype) for r in call.slots("output")]
    return call.kind == "operator" and bool(made) and given.issuperset(made)
