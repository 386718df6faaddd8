"""The k-th call of one run against the k-th of the other, as people do it by hand; refused at the first line that disagrees."""

from __future__ import annotations

from whence.align.call_sites import selected
from whence.align.module_names import family
from whence.errors import UsageError
from whence.records import Call, Run


def line_by_line(reference: Run, target: Run) -> list[tuple[Call, Call]]:
    """Pairs in execution order. Raises UsageError naming the first line that disagrees in kind or output shapes, or the counts."""
    left, right = (sorted(selected(run.calls), key=lambda c: (c.rank, c.order)) for run in (reference, target))
    for line, (a, b) in enumerate(zip(left, right)):
        why = _disagree(a, b, reference, target)
        if why:
            counts = "" if len(left) == len(right) else f" ({len(left)} calls against {len(right)})"
            raise UsageError(
                f"match order: line {line} disagrees{counts}: reference {_name(a)} {_few(_shapes(a, reference))}, "
                f"target {_name(b)} {_few(_shapes(b, target))}: {why}; match auto aligns runs with inserted or removed calls"
            )
    if len(left) != len(right):
        side, run, rest = ("reference", reference, left[len(right) :]) if len(left) > len(right) else ("target", target, right[len(left) :])
        raise UsageError(
            f"match order: {len(left)} calls against {len(right)}; only {side} has {_name(rest[0])} {_few(_shapes(rest[0], run))} at line "
            f"{min(len(left), len(right))}; match auto aligns runs with inserted or removed calls"
        )
    return list(zip(left, right))


def _disagree(a: Call, b: Call, reference: Run, target: Run) -> str:
    if a.kind != b.kind or a.phase != b.phase:
        return f"{a.phase} {a.kind} against {b.phase} {b.kind}"
    one, two = family(a.op_type), family(b.op_type)
    if one and two and one != two:
        return "another kind of operator"
    return "other output shapes" if _shapes(a, reference) != _shapes(b, target) else ""


def _name(call: Call) -> str:
    name = ".".join(p for p in (call.scope, call.op) if p) or call.root
    return f"{name} ({call.op_type})" if call.op_type else name


def _shapes(call: Call, run: Run) -> str:
    shapes = [run.records[r.record].shape for r in call.slots("output")]
    return " ".join(f"[{', '.join(map(str, s))}]" for s in shapes) or "without output"


def _few(shapes: str) -> str:
    found = shapes.split("] ")
    return shapes if len(found) <= 3 else "] ".join(found[:3]) + f"] and {len(found) - 3} more"
