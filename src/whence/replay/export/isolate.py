"""Finds the operator of a trace that is at fault: runs each alone the way the target ran it, and
judges its results against float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whence.records.program import GRADIENTS
from whence.replay import allowed_operators, stepwise
from whence.replay.derivatives import longest_sum
from whence.replay.export.three_way import beyond_rounding, wide
from whence.replay.export.trace import Piece, Step, Trace, Value, numbers, overload, piece
from whence.replay.export.ways import Way, run_as

# windows of consecutive operators tried at every place; longer ones are bisected
_SECONDS = 60.0  # after which no further piece is tried
_LONGEST = 3


def terms(steps: Sequence[Step]) -> int:
    """Returns the largest number of terms that one element is summed from, in any of these
    operators.
    """
    length = 1
    for step in steps:

        def shown(value: Any, tensors: Mapping[int, Any] = step.read_tensors) -> Any:
            if isinstance(value, Value):
                return tensors[value.number]
            return [shown(item) for item in value] if isinstance(value, list) else value

        if step.name == GRADIENTS:
            length = max(length, longest_sum(shown(step.args[0]), shown(step.args[1])))
        if step.is_own:
            continue
        schema = overload(step.name)._schema
        named = dict(zip((a.name for a in schema.arguments), map(shown, step.args))) | {
            k: shown(v) for k, v in step.kwargs.items()
        }
        length = max(length, stepwise.reduction_length(step.name.split(".")[1], named))
    return length


def judged(p: Piece, outputs: Sequence[Any]) -> float:
    """Returns the distance of a piece's results from float64 as a multiple of what rounding
    explains (above 1: wrong); the largest over its results.
    """
    inputs = {f"t{n}": t for n, t in p.inputs.items()}

    def run(**inputs: Any) -> list[Any]:
        return p.run(list(inputs.values()))

    with torch.no_grad():
        right = wide(run, inputs)  # type: ignore[no-untyped-call]
        noise = p.run([t.clone() for t in p.inputs.values()])
    n = terms(p.steps)
    scores = [beyond_rounding(y, r, w, n)[0] for y, r, w in zip(outputs, right, noise)]  # type: ignore[no-untyped-call]
    return max(scores, default=0.0)


@dataclass
class Drilled:
    """The outcome of a search: operators [begin, end) of the trace, the score of the piece, why no
    smaller piece is named. tried: number of pieces that were run.
    """

    begin: int
    end: int
    score: float
    tried: int
    words: str


class Drill:
    """Searches for the fewest consecutive operators of a trace that give wrong results when run a
    given way.

    results: numbers of the tensors that are judged for the whole trace.
    """

    def __init__(self, trace: Trace, results: Sequence[int], way: Way) -> None:
        self.trace, self.results, self.way = trace, tuple(results), way
        self._until = time.monotonic() + _SECONDS
        self.tried = 0
        self.failed_to_run = 0

    def smallest(self) -> Drilled | None:
        """Returns the smallest wrong piece; None when the whole is right."""
        count = len(self.trace.steps)
        if any(step.name == GRADIENTS for step in self.trace.steps):
            # A derivative needs all the operators that it differentiates.
            score = self._score(0, count) or 0.0
            return Drilled(0, count, score, self.tried, "as a whole") if score > 1 else None
        for length in range(1, min(_LONGEST, count) + 1):
            window = self._first(
                [(i, i + length) for i in range(count - length + 1) if self._worth(i, i + length)]
            )
            if window is not None:
                extent = (
                    "alone"
                    if length == 1
                    else f"with the {length - 1} before it; no operator alone is wrong"
                )
                return Drilled(*window, self.tried, extent)
            if time.monotonic() > self._until:
                break
        whole = self._score(0, count)
        if whole is None or whole <= 1:
            return None
        begin, end = self._bisected(count)
        score = self._score(begin, end) or whole
        return Drilled(
            begin,
            end,
            score,
            self.tried,
            f"{end - begin} operators together; no {_LONGEST} of them in a row are wrong alone",
        )

    def _worth(self, begin: int, end: int) -> bool:
        """Whether the last operator of this window computes anything; an operator that only moves
        elements cannot be at fault alone.
        """
        return _computes(self.trace.steps[end - 1])

    def _first(self, windows: Sequence[tuple[int, int]]) -> tuple[int, int, float] | None:
        """Returns the first window that is wrong. Windows with equal signature are compiled once
        and run on the inputs of each.
        """
        pieces = {w: self._piece(*w) for w in windows}
        groups: dict[Any, list[tuple[int, int]]] = {}
        for w in windows:
            groups.setdefault(signature(pieces[w]), []).append(w)
        rounds = max((len(g) for g in groups.values()), default=0)
        scores: dict[tuple[int, int], float] = {}
        for k in range(rounds):
            if k and time.monotonic() > self._until:
                break
            chosen = [g[min(k, len(g) - 1)] for g in groups.values()]
            for w, score in zip(chosen, self._scores([pieces[w] for w in chosen])):
                scores[w] = score or 0.0
            wrong = sorted(w for w, score in scores.items() if score > 1)
            if wrong:
                return (*wrong[0], scores[wrong[0]])
        return None

    def _scores(self, pieces: list[Piece]) -> list[float | None]:
        """Returns the score of each piece, None for a piece that does not run alone."""
        self.tried += len(pieces)
        try:
            outputs = run_as(self.way, pieces)
            return [judged(p, m) for p, m in zip(pieces, outputs)]
        except Exception:  # noqa: BLE001 - a compiler raises anything; which piece it was is found by halves
            if len(pieces) == 1 or time.monotonic() > self._until:
                self.failed_to_run += len(pieces)
                return [None] * len(pieces)
            half = len(pieces) // 2
            return self._scores(pieces[:half]) + self._scores(pieces[half:])

    def _score(self, begin: int, end: int) -> float | None:
        return self._scores([self._piece(begin, end)])[0]

    def _piece(self, begin: int, end: int) -> Piece:
        return piece(
            self.trace,
            begin,
            end,
            self.results if end == len(self.trace.steps) and begin == 0 else (),
        )

    def _bisected(self, count: int) -> tuple[int, int]:
        """Returns [begin, end) of the shortest wrong prefix, cut to its shortest wrong suffix."""
        low, high = 1, count  # high is wrong
        while low < high and time.monotonic() < self._until:
            middle = (low + high) // 2
            low, high = (low, middle) if (self._score(0, middle) or 0.0) > 1 else (middle + 1, high)
        end = high
        low, high = 0, end - 1  # low is wrong
        while low < high and time.monotonic() < self._until:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if (self._score(middle, end) or 0.0) > 1 else (low, middle - 1)
            )
        return low, end


def signature(p: Piece) -> Any:
    """Returns a key that is equal for pieces that compile to the same code: operators, wiring,
    other arguments, dtype, shape and strides of the inputs.
    """
    order = {
        n: i
        for i, n in enumerate(dict.fromkeys([*p.inputs, *(r for s in p.steps for r in s.results)]))
    }

    def plain(value: Any) -> Any:
        if isinstance(value, Value):
            return ("value", order[value.number])
        return (
            tuple(plain(v) for v in value)
            if isinstance(value, (list, tuple))
            else (type(value).__name__, repr(value))
        )

    steps = tuple(
        (s.name, plain(s.args), tuple((k, plain(v)) for k, v in sorted(s.kwargs.items())))
        for s in p.steps
    )
    forms = tuple((str(t.dtype), tuple(t.shape), tuple(t.stride())) for t in p.inputs.values())
    return steps, forms, tuple(order[n] for n in p.results)


def parting(
    good: Trace,
    bad: Trace,
    good_results: Sequence[int],
    bad_results: Sequence[int],
    is_same: Callable[[Any, Any], bool],
) -> tuple[Piece, Piece, dict[int, int]]:
    """Returns what differs between two traces, without their common beginning and end: (operators
    of `good`, operators of `bad`, bad input -> good input with equal elements).

    Operators are equal when name, arguments and operands are. is_same: whether two tensors are
    equal.
    """
    equal = _equal_inputs(good, bad, is_same)
    whole = piece(good, 0, len(good.steps), good_results)
    whole_of_bad = piece(bad, 0, len(bad.steps), bad_results)
    if whole.differentiated or whole_of_bad.differentiated:
        return whole, whole_of_bad, equal  # a derivative needs all that it is the derivative of
    begin, common = 0, min(len(good.steps), len(bad.steps))
    while begin < common and _alike(good.steps[begin], bad.steps[begin], equal):
        equal.update(zip(bad.steps[begin].results, good.steps[begin].results))
        begin += 1
    ends = _common_ends(
        good.steps, bad.steps, dict(zip(bad_results, good_results)), equal, common - begin
    )
    tail = len(ends) - 1

    def between(steps: Sequence[Step]) -> Sequence[Step]:
        return steps[begin : len(steps) - tail]

    while tail and not any(map(_computes, (*between(good.steps), *between(bad.steps)))):
        tail -= 1  # to move elements is not a fault: with the next that computes
    pairs = {n: m for n, m in ends[tail].items() if equal.get(n) != m}
    if not pairs:
        return whole, whole_of_bad, equal
    return (
        _with_passed(piece(good, begin, len(good.steps) - tail, list(pairs.values())), good),
        _with_passed(piece(bad, begin, len(bad.steps) - tail, list(pairs)), bad),
        equal,
    )


def _equal_inputs(good: Trace, bad: Trace, is_same: Callable[[Any, Any], bool]) -> dict[int, int]:
    """Returns bad input -> good input with equal elements; the one of the same name is
    preferred.
    """
    equal: dict[int, int] = {}
    for slot, n in bad.slots.items():
        m = good.slots.get(slot)
        if m is not None and is_same(good.tensors[m], bad.tensors[n]):
            equal[n] = m
    inputs = set(good.slots.values())
    for n in bad.slots.values():
        if n not in equal:
            m = next((m for m in inputs if is_same(good.tensors[m], bad.tensors[n])), None)
            if m is not None:
                equal[n] = m
    return equal


def _common_ends(
    good_steps: Sequence[Step],
    bad_steps: Sequence[Step],
    results: dict[int, int],
    equal: Mapping[int, int],
    longest: int,
) -> list[dict[int, int]]:
    """Returns, for every length of a common end from 0 operators, the tensors that this end reads:
    bad tensor -> good tensor.

    results: bad result -> good result of the traces. longest: the most operators of a common end.
    """
    ends = [results]
    while len(ends) <= longest:
        a, b, now = good_steps[-len(ends)], bad_steps[-len(ends)], ends[-1]
        wired, read = dict(zip(b.results, a.results)), dict(zip(_order(b), _order(a)))
        if (
            a.name != b.name
            or _plain(a) != _plain(b)
            or any(now.get(n, m) != m for n, m in (wired | read).items())
        ):
            break
        produced = {r for s in bad_steps[: -len(ends)] for r in s.results}
        if any(equal.get(n) != m and (n not in produced or n in equal) for n, m in read.items()):
            break  # it reads something from outside that differs
        ends.append({n: m for n, m in (now | read).items() if n not in wired and equal.get(n) != m})
    return ends


def _computes(step: Step) -> bool:
    base = step.name.split(".")[1]
    return base not in allowed_operators.VIEWS and base not in allowed_operators.CONSTRUCTORS


def _with_passed(p: Piece, trace: Trace) -> Piece:
    """Returns the piece with those of its results that no operator computes added to its inputs,
    which it passes on.
    """
    produced = {r for s in p.steps for r in s.results}
    extra = {n: trace.tensors[n] for n in p.results if n not in produced and n not in p.inputs}
    return Piece(p.steps, p.inputs | extra, p.results, p.slots)


def _order(step: Step) -> list[int]:
    return list(numbers([*step.args, *(step.kwargs[k] for k in sorted(step.kwargs))]))


def _plain(step: Step) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, Value):
            return "tensor"
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else repr(value)

    return [plain(a) for a in step.args], {k: plain(v) for k, v in step.kwargs.items()}


def _alike(a: Step, b: Step, equal: Mapping[int, int]) -> bool:
    return (
        a.name == b.name
        and _plain(a) == _plain(b)
        and [equal.get(n) for n in _order(b)] == _order(a)
    )
