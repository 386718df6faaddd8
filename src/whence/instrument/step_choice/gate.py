"""Decides from step to step which steps are recorded and when the ring is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from whence.instrument.step_choice.conditions import Condition, Watcher, conditions_of
from whence.instrument.step_choice.requests import NAME, Asked, RequestFile
from whence.instrument.step_choice.windows import Ranges, holds
from whence.instrument.wording import counted


class Ring(Protocol):
    """A store of the last steps, if they are kept."""

    through: bool

    def end_step(self) -> None: ...
    def write(self) -> int: ...
    def clear(self) -> None: ...


class Choice(NamedTuple):
    """The user's choice of steps. ranges: steps known beforehand; conditions: on loss or norm, or
    "asked"; following: number of steps that each condition records. ring: whether the last steps
    are kept.
    """

    ranges: Ranges
    conditions: tuple[Condition, ...]
    following: int
    ring: bool


class StepGate:
    """Open while steps are recorded into the run.

    tell: called with what happened, in words. control: the file through which `whence trigger`
    sends requests. The caller numbers the steps, since each root counts its own.
    """

    def __init__(self, choice: Choice, control: str, tell: Callable[[str], None]) -> None:
        self._choice, self._tell = choice, tell
        self.watcher = Watcher(choice.conditions)
        self._control = RequestFile(control)
        # With conditions or a ring and no ranges, only steps after an event are recorded.
        self._planned = bool(choice.ranges) or not (choice.conditions or choice.ring)
        self._left = 0.0
        self._off = False
        self.ring: Ring | None = None

    def takes(self, step: int) -> bool:
        """Whether a step is recorded into the run."""
        if self._off:
            return False
        return self._left > 0 or (self._planned and holds(self._choice.ranges, step))

    @property
    def is_off(self) -> bool:
        """Whether recording, including the ring, was switched off."""
        return self._off

    def close(self) -> None:
        """Remove the control file."""
        self._control.remove()

    def step_ended(self) -> None:
        """End a step: check the conditions and the requests."""
        if self._left > 0:
            self._left -= 1
        if self.ring is not None and not self._off:
            self.ring.end_step()
        why = self.watcher.step_ended()
        if why and not self._off:
            self._happened(why, self._choice.following)
        if self._control.take():
            self._asked()

    def _asked(self) -> None:
        request = self._control.request()
        if request.asked is Asked.OFF:
            self._off, self._left = True, 0
            if self.ring is not None:
                self.ring.clear()
            self._tell("nothing is recorded from here on: whence trigger --off")
        elif request.asked is Asked.ON:
            self._happened("whence trigger --on", math.inf, asked=True)
        else:
            self._happened("whence trigger", request.steps or self._choice.following, asked=True)

    def _happened(self, why: str, steps: float, *, asked: bool = False) -> None:
        """Record the next `steps` steps, and write the steps that the ring holds."""
        if asked:
            self._off = False
        written = self.ring.write() if self.ring is not None else 0
        self._left = max(self._left, steps)
        before = f"; written: {counted(written, 'step')} before" if written else ""
        following = "all" if math.isinf(steps) else f"the next {counted(int(steps), 'step')}"
        self._tell(f"{why}: recording {following}{before}")


class Options(Protocol):
    """The options of a capture that choose steps."""

    @property
    def ranges(self) -> Ranges: ...
    @property
    def when(self) -> tuple[str, ...]: ...
    @property
    def for_steps(self) -> int: ...
    @property
    def ring(self) -> int | None: ...


def gate_of(options: Options, folder: str, tell: Callable[[str], None]) -> StepGate:
    """The gate for these options. folder: of the run. A ring without a condition is written on NaN
    and spikes.
    """
    has_ring = options.ring is not None
    texts = options.when or (("nan", "spike") if has_ring else ())
    choice = Choice(options.ranges, conditions_of(texts), options.for_steps, has_ring)
    return StepGate(choice, str(Path(folder) / NAME), tell)
