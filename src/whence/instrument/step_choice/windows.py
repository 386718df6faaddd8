"""Steps that are known before the program runs: ranges of numbers, and one of every so many."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from whence.errors import UsageError

_FORMS = "write START:STOP, START:STOP:EVERY or FIRST-LAST (0:1000, 5:, ::100, 0-3,1000-1003)"
_RANGE = re.compile(
    r"(?P<start>\d*):(?P<stop>\d*)(?::(?P<every>\d*))?|(?P<one>\d+)(?:-(?P<last>\d+))?"
)


class StepRange(NamedTuple):
    """Steps from `start` to `stop` (excluded, None: all that follow), one of `every` so many."""

    start: int = 0
    stop: int | None = None
    every: int = 1

    def __contains__(self, step: object) -> bool:
        return (
            isinstance(step, int)
            and step >= self.start
            and (self.stop is None or step < self.stop)
            and (step - self.start) % self.every == 0
        )


Ranges = tuple[StepRange, ...]


def holds(ranges: Ranges, step: int) -> bool:
    """Whether a step is in one of the ranges. Without ranges every step is."""
    if not ranges:
        return True
    for each in ranges:  # noqa: SIM110 - asked for every call; `any` takes twice as long
        if step in each:
            return True
    return False


def first_step(ranges: Ranges) -> int:
    """The first step that the ranges hold."""
    return min((each.start for each in ranges), default=0)


def parse_steps(text: str) -> Ranges:
    """Read "0:1000", "5:", ":3", "7", "::100", "0-3,1000-1003". Raises UsageError."""
    return tuple(_parsed(part.strip(), text) for part in text.split(","))


def _parsed(part: str, whole: str) -> StepRange:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"steps: {whole!r} is not understood; {_FORMS}")
    if match["one"] is not None:
        first = int(match["one"])
        return checked(StepRange(first, int(match["last"] or first) + 1))
    every = match["every"]
    return checked(
        StepRange(
            int(match["start"] or 0),
            int(match["stop"]) if match["stop"] else None,
            int(every) if every else 1,
        )
    )


def read_steps(value: Any) -> Any:
    """Ranges as code writes them: a text, a number, a `range`, a pair, or a list of these."""
    if value is None:
        return ()
    if isinstance(value, str):
        return parse_steps(value)
    if isinstance(value, StepRange):
        return (value,)
    if isinstance(value, int):
        return (checked(StepRange(value, value + 1)),)
    if isinstance(value, range):
        return (checked(StepRange(value.start, value.stop, value.step)),)
    if not isinstance(value, (list, tuple)):
        return value
    if value and all(part is None or isinstance(part, int) for part in value):
        return (checked(StepRange(*value)),)
    return tuple(each for part in value for each in read_steps(part))


def checked(steps: StepRange) -> StepRange:
    """A range. Raises UsageError where it holds no step."""
    if steps.start < 0 or steps.every < 1 or (steps.stop is not None and steps.stop <= steps.start):
        stop = "" if steps.stop is None else steps.stop
        every = "" if steps.every == 1 else f":{steps.every}"
        raise UsageError(f"steps: {steps.start}:{stop}{every} holds no step; {_FORMS}")
    return steps
