"""Follows a tensor through the calls of a comparison on disk."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from whence.errors import UnreadableRun, UsageError
from whence.records import Call
from whence.workflows.saved import AnyComparison, as_comparison

if TYPE_CHECKING:
    from whence.comparison.answer.origin import OriginTracer
    from whence.results import Origin

_POINT = re.compile(r"(?P<name>.+?)(?:@(?P<step>\d+)(?:\.(?P<occurrence>\d+))?)?")


def trace(comparison: AnyComparison, tensor: str = "") -> Origin:
    """Find where a tensor's difference comes from: go back from it through the program to the first
    operator whose inputs agree.

    comparison: a folder that `compare` wrote, or what it returned. tensor: NAME[@STEP[.OCCURRENCE]]
    of a call of the reference; "" is the first significant one. The two runs must still be where
    they were. Raises UsageError for an unknown tensor, or when nothing differs; UnreadableRun when
    a run is missing or was changed.
    """
    from whence.comparison.answer.origin import OriginTracer, flow_of
    from whence.comparison.programs import programs
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run

    result = as_comparison(comparison)
    if not tensor and result.origin is not None:
        return result.origin
    if result.plan.joined:
        raise UsageError(
            "calls of these runs were joined before they were paired, so their data flow is not "
            "followed; whence show lists the calls"
        )
    reference, target, _ = programs.apply_programs(
        open_run(result.reference),
        open_run(result.target),
        programs.open_programs(result.program_files or None, open_run),
    )
    reference, target = with_figures(reference), with_figures(target)
    named = {row.pair: row.name for row in result.rows}
    for index, pair in enumerate(result.plan.pairs):
        call = reference.calls[pair.reference] if pair.reference < len(reference.calls) else None
        if (
            call is None
            or pair.target >= len(target.calls)
            or named.get(index, call.module_name) != call.module_name
        ):
            raise UnreadableRun(
                f"{result.reference} is not the run that was compared; compare again"
            )
    tracer = OriginTracer(flow_of(reference, target, result.plan, result.rows, result.verdicts))
    start = tracer.first() if not tensor else _named(tracer, tensor)
    if start is None:
        raise UsageError(
            "nothing differs in this comparison, so there is nothing to trace; name a tensor to "
            "see what it was made of"
        )
    return tracer.origin(start)


def _named(tracer: OriginTracer, tensor: str) -> Call:
    point = _POINT.fullmatch(tensor)
    assert point is not None
    step, occurrence = (
        int(point[k]) if point[k] is not None else None for k in ("step", "occurrence")
    )
    calls = [
        c
        for c in tracer.calls
        if c.module_name == point["name"]
        and step in (None, c.step)
        and occurrence in (None, c.occurrence)
    ]
    if not calls:
        near = difflib.get_close_matches(
            point["name"], sorted({c.module_name for c in tracer.calls}), 3, 0.5
        )
        hint = f"; nearest: {', '.join(near)}" if near else "; whence show lists the calls"
        raise UsageError(f"no call {tensor!r} in the reference{hint}")
    return next((c for c in calls if tracer.differs(c)), calls[0])
