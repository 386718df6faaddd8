"""The interface of a program that can be run on the rungs of a ladder, and what is known
of them.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whence.records import Run
from whence.results import LadderKind, Pass, Place, Rung, RungKind


class Stairs(NamedTuple):
    """The properties of a ladder.

    base: the lowest rung, which is run twice and which other rungs are compared with. sees_inside:
    comparisons see nodes, not only a boundary. rounded: a variant of the base whose results are
    rounded once more, "" when there is none. bisects: always, not only on request.
    """

    kind: LadderKind
    base: str
    sees_inside: bool
    rounded: str = ""
    bisects: bool = False


class Judgement(NamedTuple):
    """The comparison of one more run with the lowest rung.

    node: the first that differs. run: None when it failed.
    """

    verdict: str
    node: str = ""
    run: Run | None = None


Judge = Callable[[Callable[[Path], object]], Judgement]
"""Runs the given function, which captures into the path that it receives, and compares the run."""


class Climber(abc.ABC):
    """A program that can be run on any rung. By default each rung is a stage of its own, and no
    extra rung runs between two.
    """

    words: str
    stairs: Stairs

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        """Set up what all rungs need: a private cache of compiled code, so that each rung compiles
        anew and the user's cache stays unchanged.
        """
        yield

    @abc.abstractmethod
    def capture(self, path: Path, rung: str) -> float:
        """Run the program on a rung into `path`. Returns the duration in seconds.

        Raises CaptureError when the run fails.
        """

    @abc.abstractmethod
    def facts(self, path: Path, run: Run) -> dict[str, Any]:
        """Fields of the `Rung` whose run is at `path`: what was compiled or optimised."""

    def instead(self, base: Run) -> Climber | None:
        """Another climber that fits what the program uses, None when this one fits."""
        return None

    @abc.abstractmethod
    def rungs(self, base: Run) -> Sequence[str]:
        """Rungs above the lowest, in order."""

    def parted_by(self, rung: Rung) -> Sequence[str]:
        """Names of extra rungs to run before this one, chosen by its outcome.

        They run in order until one is outside the noise.
        """
        return ()

    def nothing(self, rungs: Sequence[Rung]) -> str:
        """The reason why going on makes no sense, "" when it does."""
        return ""

    def stage(self, rung: str, top: Rung) -> str:
        """The stage at fault when `rung` is the first outside the noise. top: the highest rung."""
        return rung

    def notes(self, base: Run) -> list[str]:
        """Remarks about the program that a reader of the ladder needs."""
        return []

    def bisect(
        self, rungs: Sequence[Rung], base: Run, judge: Judge, tell: Callable[[str], None]
    ) -> Pass | None:
        """Find what makes the difference on the first rung outside the noise, by more runs."""
        return None

    def place(
        self, rungs: Sequence[Rung], judge: Judge, tell: Callable[[str], None]
    ) -> Place | None:
        """Find where in the program the first rung outside the noise goes wrong, by more runs."""
        return None


FINE = (RungKind.BIT_EQUAL, RungKind.NOISE)


def first_outside(rungs: Sequence[Rung]) -> Rung | None:
    """The first rung outside the noise."""
    return next((r for r in rungs[1:] if r.verdict == RungKind.OUTSIDE), None)
