"""Parses which calls of a program are changed deliberately: points of a run (`--patch`) and faults
(`--inject`). Independent of the framework.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from typing import NamedTuple

from whence.errors import UsageError
from whence.records import Call
from whence.records.slots import is_cache

FAULTS = ("scale", "weight", "row", "eps", "bias", "channel", "stale", "constant", "drop-residual")

_POINT = re.compile(
    r"(?:(?P<root>[^/@:]+)/)?(?P<name>[^/@:]+)(?:@(?P<step>\d+)(?:\.(?P<occurrence>\d+))?)?(?::(?P<slot>output[^/@:]*))?"
)
_FAULT = re.compile(
    r"(?P<kind>[a-z-]+)@(?:(?P<root>[^/@:=]+)/)?(?P<site>[^/@:=]+)(?:=(?P<strength>[-+.\deE]+))?"
)


class Point(NamedTuple):
    """Calls of a run: `[ROOT/]NAME[@STEP[.OCCURRENCE]][:SLOT]`. NAME is a module's, or shell style;
    what is left out means every one.
    """

    root: str
    name: str
    step: int | None
    occurrence: int | None
    slot: str

    def fits(self, root: str, scope: str, step: int, occurrence: int) -> bool:
        """Whether a call with this key matches the point. The root's own call goes by the root's
        name.
        """
        if (
            self.step not in (None, step)
            or self.occurrence not in (None, occurrence)
            or (self.root and self.root != root)
        ):
            return False
        return fnmatch.fnmatchcase(scope or root, self.name)

    def fits_call(self, call: Call) -> bool:
        """`fits` of a recorded call."""
        return self.fits(call.root, call.scope, call.step, call.occurrence)


class Fault(NamedTuple):
    """A fault to plant: `KIND@[ROOT/]NAME[=STRENGTH]`. strength None: the kind's own."""

    kind: str
    root: str
    site: str
    strength: float | None


def parse_point(text: str) -> Point:
    """Read "layers.3.mlp", "layers.3.mlp@2.0:output.0", "Decoder/layers.*". Raises UsageError."""
    match = _POINT.fullmatch(text)
    if not match:
        raise UsageError(
            f"patch: {text!r} is not [ROOT/]NAME[@STEP[.OCCURRENCE]][:SLOT], as in layers.3.mlp, "
            "layers.3.mlp@0 or layers.3.mlp:output.0 "
            "(only outputs can be replaced)"
        )
    step, occurrence = match["step"], match["occurrence"]
    return Point(
        match["root"] or "",
        match["name"],
        None if step is None else int(step),
        None if occurrence is None else int(occurrence),
        match["slot"] or "",
    )


def parse_fault(text: str) -> Fault:
    """Read "scale@layers.3.mlp.up_proj=1.01". Raises UsageError."""
    match = _FAULT.fullmatch(text)
    try:
        if match and match["kind"] in FAULTS:
            return Fault(
                match["kind"],
                match["root"] or "",
                match["site"],
                float(match["strength"]) if match["strength"] else None,
            )
    except ValueError:
        pass
    raise UsageError(
        f"inject: {text!r} is not KIND@[ROOT/]NAME[=STRENGTH], as in scale@layers.3.mlp=1.01; "
        f"kinds: {', '.join(FAULTS)}"
    )


def outputs_of(call: Call) -> tuple[str, ...]:
    """The output slots of a call that are not state it changed (a cache is returned by some modules
    too).
    """
    state = {r.record for r in call.slots("mutated")}
    return tuple(r.slot for r in call.slots("output") if r.record not in state)


def results_of(call: Call) -> tuple[str, ...]:
    """Its outputs without caches, by which the error of a call is measured; all of them where it
    returns nothing else.
    """
    slots = outputs_of(call)
    return tuple(slot for slot in slots if not is_cache(slot)) or slots


def check_points(points: Iterable[str], calls: Iterable[Call], path: str) -> None:
    """Raise UsageError, with the nearest names, when a point is not a call of the reference at
    `path`, or one without outputs.
    """
    with_outputs = [c for c in calls if outputs_of(c)]
    names = list(dict.fromkeys(c.scope or c.root for c in with_outputs))
    for text in points:
        point = parse_point(text)
        fitting = [c for c in with_outputs if point.fits_call(c)]
        if not fitting:
            close = difflib.get_close_matches(point.name, names, n=3, cutoff=0.4)
            nearest = f"; nearest: {', '.join(close)}" if close else ""
            where = "" if point.step is None else f" at step {point.step}"
            is_called = any(fnmatch.fnmatchcase(n, point.name) for n in names)
            hint = f" (the module is there{nearest})" if is_called else nearest
            raise UsageError(
                f"patch: {path} holds no output of a call {point.name}{where}{hint}; whence show "
                f"{path} --tree lists the calls"
            )
        if point.slot and not any(point.slot in outputs_of(c) for c in fitting):
            raise UsageError(
                f"patch: {point.name} has no {point.slot}; it has "
                f"{', '.join(outputs_of(fitting[0]))}"
            )
