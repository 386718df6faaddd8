"""What climbs a ladder: a program that can be run on any rung, and what is known of the rungs."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whence.records import Run
from whence.results import LadderKind, Pass, Rung, RungKind


class Stairs(NamedTuple):
    """What a ladder is. base: the lowest rung, which is run twice and which others are compared
    with. sees_inside: comparisons see nodes, not a boundary alone.
    rounded: a rung of the base whose results are rounded once more, "" where there is none.
    bisects: always, not when asked for alone.
    """

    kind: LadderKind
    base: str
    sees_inside: bool
    rounded: str = ""
    bisects: bool = False


class Judgement(NamedTuple):
    """How one more run stands against the lowest rung. node: the first that differs. run: None
    where it failed.
    """

    verdict: str
    node: str = ""
    run: Run | None = None


Judge = Callable[[Callable[[Path], object]], Judgement]
"""Captures a run by the function, into the path that it is given, and compares it."""


class Climber(abc.ABC):
    """A program that can be run on any rung. Where a method says nothing else, each rung is named
    itself, and none stands between two.
    """

    words: str
    stairs: Stairs

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        """What all rungs need: a cache of compiled code that is theirs alone, so that a rung
        compiles anew and spoils nobody's.
        """
        yield

    @abc.abstractmethod
    def capture(self, path: Path, rung: str) -> float:
        """Run it into `path` and return the seconds it took. Raises CaptureError when it fails."""

    @abc.abstractmethod
    def facts(self, path: Path, run: Run) -> dict[str, Any]:
        """Fields of the `Rung` that it ran into `path`: what was compiled or optimised."""

    def instead(self, base: Run) -> Climber | None:
        """The climber for what the program uses, None where that is this one."""
        return None

    @abc.abstractmethod
    def rungs(self, base: Run) -> Sequence[str]:
        """Rungs above the lowest, in order."""

    def parted_by(self, rung: Rung) -> Sequence[str]:
        """The rungs that are run too, before this one, as it came out: in order, until one of them
        is outside the noise.
        """
        return ()

    def nothing(self, rungs: Sequence[Rung]) -> str:
        """Why it makes no sense to go on, "" where it does."""
        return ""

    def stage(self, rung: str, top: Rung) -> str:
        """What is at fault where a rung is the first outside the noise. top: the highest rung."""
        return rung

    def notes(self, base: Run) -> list[str]:
        """What a reader of the ladder must know of the program."""
        return []

    def bisect(
        self, rungs: Sequence[Rung], base: Run, judge: Judge, tell: Callable[[str], None]
    ) -> Pass | None:
        """Name what makes the difference on the first rung outside the noise, by more runs."""
        return None


FINE = (RungKind.BIT_EQUAL, RungKind.NOISE)


def first_outside(rungs: Sequence[Rung]) -> Rung | None:
    """The first rung outside the noise."""
    return next((r for r in rungs[1:] if r.verdict == RungKind.OUTSIDE), None)
