"""Narrows a stage of torch.compile down to operators of the program, by runs in which only a piece
of the traced graphs is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from whence.instrument.torch.compiled.what_compiled import Compiled
from whence.records import Run
from whence.records.slots import is_input, is_output
from whence.results import GraphOperator, Place, RungKind
from whence.workflows.ladder.climbers import FINE, Judgement
from whence.workflows.notebook_progress import Tell

_LEFT_OUT_ONE_BY_ONE = 16
"""A piece with more operators is shown as it is."""


class Runs(Protocol):
    """Runs a rung with variables and options of the capture, and judges it."""

    def __call__(
        self, rung: str, environment: Mapping[str, str], /, *, level: str = ...
    ) -> Judgement: ...


class Pieces:
    """Pieces of the graphs, compiled on `rung`. compiled: what a run compiled, by process."""

    def __init__(
        self, rung: str, run: Runs, compiled: Callable[[Run], Sequence[Compiled]], tell: Tell
    ) -> None:
        self._rung, self._run, self._compiled, self._tell = rung, run, compiled, tell
        self._runs = 0

    def place(self) -> Place:
        """The smallest piece that is outside the noise when it alone is compiled."""
        whole = self._judged(0, None)
        operators = () if whole.run is None else _operators(self._compiled(whole.run))
        if not operators or whole.verdict != RungKind.OUTSIDE:
            why = (
                f"with its operators compiled as pieces of their own the program is "
                f"{whole.verdict}: it goes wrong between them, or in how a graph is entered"
            )
            return Place((), len(operators), self._runs, why)
        last = _first(0, len(operators), lambda n: self._is_outside(0, n))
        first = last - _first(0, last, lambda n: self._is_outside(last - n, last))
        without = self._without(first, last)
        piece = tuple(operators[n] for n in range(first, last) if n not in without)
        return Place(piece, len(operators), self._runs)

    def _without(self, first: int, last: int) -> tuple[int, ...]:
        """Operators between the first and the last that make no difference."""
        without: tuple[int, ...] = ()
        between = range(first + 1, last - 1) if last - first <= _LEFT_OUT_ONE_BY_ONE else range(0)
        # what runs behind the piece is left out from its end, what runs before it from its start
        for number in (*reversed(between), *between):
            if number not in without and self._is_outside(first, last, (*without, number)):
                without = (*without, number)
        # what writes in place may not run in another order: then it is wrong uncompiled too
        wrong = without and self._judged(first, last, without, "dynamo").verdict not in FINE
        return () if wrong else without

    def _is_outside(self, first: int, last: int, without: tuple[int, ...] = ()) -> bool:
        return self._judged(first, last, without).verdict == RungKind.OUTSIDE

    def _judged(
        self, first: int, last: int | None, without: tuple[int, ...] = (), rung: str = ""
    ) -> Judgement:
        from whence.instrument.torch.compiled.cuts import Cut

        self._runs += 1
        self._tell(f"compiling operators {first} to {last or 'the last'} (run {self._runs})")
        return self._run(rung or self._rung, Cut(first, last, without).variables())


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first number above `low` from which on `holds` is true, as it is of `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _operators(compiled: Sequence[Compiled]) -> tuple[GraphOperator, ...]:
    """Those of the process that compiled most."""
    return max((each.operators for each in compiled), key=len, default=())


def first_not_traced(run: Runs, compiled: Callable[[Run], Sequence[Compiled]]) -> Place:
    """The first operator of the eager program that reads what the traced graphs hold too, and whose
    result they do not compute.
    """
    from whence.instrument.torch.compiled.cuts import Cut

    traced = run("dynamo", Cut(values=True).variables()).run
    values = {value for each in (compiled(traced) if traced else ()) for value in each.values}
    eager = run("eager", {}, level="op")
    if eager.run is None or not values:
        return Place((), runs=2, why="the program fails when its operators are recorded")
    records = eager.run.records
    for call in eager.run.calls:
        hashes = {ref.slot: records[ref.record].hash for ref in call.refs}
        reads = {value for slot, value in hashes.items() if is_input(slot)}
        gives = {value for slot, value in hashes.items() if is_output(slot)}
        if call.source and reads and reads <= values and gives - values - {""}:
            return Place(
                (GraphOperator("", call.op_type, call.source, _line(call.source)),), runs=2
            )
    return Place((), runs=2, why="the traced graphs compute everything that eager operators give")


def _line(source: str) -> str:
    import linecache

    file, _, number = source.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
