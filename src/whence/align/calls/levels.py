"""A run whose operators were recorded beside one of modules alone: they are compared by their modules."""

from __future__ import annotations

import msgspec

from whence.records import Call, Over, Run

_OPERATORS = ("operator", "region")


def one_level(reference: Run, target: Run) -> tuple[Run, Run, list[str]]:
    """Both runs without operator calls where only one capture took them, and a sentence that says so."""
    said = []
    if _has_operators(reference) and not _any_operator(target):
        reference = _modules_of(reference)
        said.append("the operators of the reference are left out: the target was captured without")
    elif _has_operators(target) and not _any_operator(reference):
        target = _modules_of(target)
        said.append("the operators of the target are left out: the reference was captured without")
    return reference, target, said


def _has_operators(run: Run) -> bool:
    """Is this a capture of operators? Dumps of others that hold operators have nothing else to be compared by."""
    return run.info.options.get("level") == "op"


def _any_operator(run: Run) -> bool:
    return any(call.kind in _OPERATORS for call in run.calls)


def _modules_of(run: Run) -> Run:
    kept = [call for call in run.calls if call.kind not in _OPERATORS]
    if not kept:  # a region without a model: its operators are all there is
        return run
    number = {call.id: i for i, call in enumerate(kept)}
    parents = {call.parent for call in kept}
    calls: list[Call] = [
        msgspec.structs.replace(c, id=number[c.id], parent=number.get(c.parent, -1), leaf=c.id not in parents) for c in kept
    ]
    return Over(run, calls)
