"""Which operator of a trace is at fault: each is run alone the way the target ran it, and judged
against float64.
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

# runs of consecutive operators that are tried at every place; longer ones are bisected
_SECONDS = 60.0  # after which no further piece is tried
_LONGEST = 3


def terms(steps: Sequence[Step]) -> int:
    """The most numbers that one element is summed from, in any of these operators."""
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
    """How far results of a piece are from float64, over what rounding explains; the worst of
    them.
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
    """What was found: operators [begin, end) of the trace, score of the piece; why nothing smaller.
    tried: pieces that were run.
    """

    begin: int
    end: int
    score: float
    tried: int
    words: str


class Drill:
    """Looks for the fewest consecutive operators of a trace that are wrong when they are run a
    given way.

    results: numbers of what is judged of the whole.
    """

    def __init__(self, trace: Trace, results: Sequence[int], way: Way) -> None:
        self.trace, self.results, self.way = trace, tuple(results), way
        self._until = time.monotonic() + _SECONDS
        self.tried = 0
        self.failed_to_run = 0

    def smallest(self) -> Drilled | None:
        """None when the whole is right as well."""
        count = len(self.trace.steps)
        if any(step.name == GRADIENTS for step in self.trace.steps):
            # A derivative needs all that it is the derivative of.
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
        """Does the last operator of this run compute anything? What only moves elements is not a
        fault by itself.
        """
        return _computes(self.trace.steps[end - 1])

    def _first(self, windows: Sequence[tuple[int, int]]) -> tuple[int, int, float] | None:
        """The first window that is wrong. Those that are alike are compiled once, and run on the
        inputs of each.
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
        """None where a piece does not run alone."""
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
        """The shortest beginning that is wrong, then the shortest end of it."""
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
    """What two pieces have in common that compile to the same code: operators, wiring, other
    arguments, forms of the inputs.
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
    """(operators of `good`, those of `bad`, bad input -> good input that holds the same): what is
    left without equal begin and end.

    Operators are equal when they have one name, equal arguments, and read what is equal. is_same:
    are two tensors one?
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
    """Bad input -> good input that holds the same, of the same name where there is one."""
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
    """What lies before a common end is what that end reads: of every length of it, from none, bad
    tensor -> good tensor. results: of the traces. longest: operators that a common end may have.
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
    """A result that no operator of the piece makes is one of its inputs, handed on."""
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
