"""Measures how far two tensors are apart, and finds where in a run the distance begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from whence.results.probe import OperatorPlace
from whence.workflows.probe.torch.outputs import same_bits
from whence.workflows.probe.torch.regions import EVERYTHING, Region
from whence.workflows.probe.torch.trace import Trace, TracedOperator

_BY_NUMBER = ("aten.index", "aten.gather", "aten.scatter", "aten.take")
_MAKES_MEMORY = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True)
class Distance:
    """The distance of two tensors.

    moved: the largest difference, in root mean squares of the first tensor. ulp: the largest
    difference in units in the last place of the element, or of the root mean square if that is
    larger. differing: number of elements with different bits, out of `count`.
    """

    moved: float = 0.0
    ulp: float = 0.0
    differing: int = 0
    count: int = 0

    def __or__(self, other: Distance) -> Distance:
        return Distance(
            max(self.moved, other.moved),
            max(self.ulp, other.ulp),
            self.differing + other.differing,
            self.count + other.count,
        )


def distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """The distance of two tensors of one shape; infinite where only one is NaN or infinite."""
    if same_bits(a, b):
        return Distance(count=a.numel())
    if not (a.is_floating_point() or a.is_complex()):
        differing = int((a != b).sum())
        return Distance(1.0, float("inf"), differing, a.numel())
    eps = torch.finfo(a.dtype).eps
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    d = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    finite = a.masked_fill(~a.isfinite(), 0.0)
    rms = float(finite.square().mean().sqrt()) or 1.0
    unit = (
        torch.finfo(torch.float64).tiny
        + torch.exp2(finite.abs().clamp(min=rms).log2().floor()) * eps
    )
    return Distance(float(d.max()) / rms, float((d / unit).max()), int((~same).sum()), a.numel())


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference of two tensors, relative to that of the finite elements of
    the first.

    Infinite when an element is NaN or infinite in only one of them.
    """
    a, b = a.double(), b.double()
    difference = (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    moved = float(difference.square().mean().sqrt())
    size = float(a[a.isfinite()].square().mean().sqrt())
    return moved / (size if size > 0 else 1.0) if moved < float("inf") else float("inf")


def _is_fraction(operator: TracedOperator) -> bool:
    """Whether results are floating-point or boolean."""
    return any(t.is_floating_point() or t.dtype == torch.bool for t in operator.results or ())


class Begun(NamedTuple):
    """An operator in which a difference begins: its inputs are equal, its results are not.

    is_only: only the variant runs it.
    """

    number: int
    operator: TracedOperator
    distance: Distance
    after: TracedOperator | None
    is_only: bool = False


def counterparts(base: Trace, variant: Trace) -> dict[int, int]:
    """Match operators of two runs: number in the base run -> number in the variant.

    When a module call runs different operators (a kernel for another size), only those before the
    first and after the last difference are matched: the n-th product may be another one.
    """
    theirs = _by_call(variant)
    partners: dict[int, int] = {}
    for call, mine in _by_call(base).items():
        others = theirs.get(call, [])
        names = [base.operators[n].key[2] for n in mine]
        other_names = [variant.operators[n].key[2] for n in others]
        least = min(len(names), len(other_names))
        if names == other_names:
            before, behind = least, 0
        else:
            same = [a == b for a, b in zip(names, other_names)]
            before = same.index(False) if False in same else least
            same = [a == b for a, b in zip(names[::-1], other_names[::-1])]
            behind = min(same.index(False) if False in same else least, least - before)
        partners |= zip(mine[:before], others[:before])
        if behind:
            partners |= zip(mine[-behind:], others[-behind:])
    return partners


def _by_call(trace: Trace) -> dict[tuple[str, int], list[int]]:
    """Numbers of the operators that each module call runs directly."""
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, operator in enumerate(trace.operators):
        calls[operator.key[:2]].append(number)
    return calls


class Walk:
    """Walks over two traced runs, operator by operator.

    twin: a third run with another extent, whose shapes tell which axis is which; None when the
    variant itself has another extent. least: distance, in root mean squares, that a difference must
    exceed to count. most: distance in units in the last place above which two results belong to
    different operators and are not compared.
    """

    def __init__(
        self, region: Region = EVERYTHING, least: float = 0.0, most: float = float("inf")
    ) -> None:
        self._region, self._least, self._most = region, least, most
        self._states: dict[int, bool] = {}
        self._unclear: set[int] = set()
        self._numbers: set[int] = set()

    def over(self, base: Trace, variant: Trace, twin: Trace | None) -> Iterator[Begun]:
        """The operators in which a difference begins, in order."""
        partners = counterparts(base, variant)
        own = set(range(len(variant.operators))) - set(partners.values())
        for number, operator in enumerate(base.operators):
            if operator.results is None:
                continue
            other = partners.get(number)
            results = variant.operators[other].results if other is not None else None
            shapes = None
            if twin is not None:
                at = twin.by_key.get(operator.key)
                shapes = twin.operators[at].shapes if at is not None else None
            known = twin is None or shapes is not None
            far, is_clear = self._distance(operator, results, shapes, known=known)
            if not is_clear and not _is_fraction(operator):
                self._numbers.add(number)
            is_moved = operator.key[2].startswith(_BY_NUMBER) and self._reads_numbers(operator)
            if far is not None and (far.ulp >= self._most or is_moved):
                far, is_clear = None, False
            is_far = far is not None and far.differing > 0 and far.moved > self._least
            self._states[number] = is_far
            if not is_clear:
                self._unclear.add(number)
            if far is None or other is None or not is_far:
                continue
            above = self._above(base, operator)
            if above is not None:
                read = [n for n in variant.operators[other].parents if n in own]
                only = variant.operators[read[-1]] if read else None
                yield self._begun(base, number, far, above, only)

    @staticmethod
    def _begun(
        base: Trace, number: int, far: Distance, above: list[int], only: TracedOperator | None
    ) -> Begun:
        """The operator to name.

        For a view it is the operator that computed the data; for an operator that only the variant
        runs and that produces the difference, it is this one.
        """
        if only is not None:
            return Begun(number, only, far, None, is_only=True)
        operator = base.operators[number]
        computed = [n for n in above if not base.operators[n].is_view]
        if operator.is_view and computed:
            operator = base.operators[computed.pop()]
        return Begun(number, operator, far, base.operators[computed[0]] if computed else None)

    def _reads_numbers(self, operator: TracedOperator) -> bool:
        """Whether the operator reads indices that differ, as those that assign tokens to experts
        do.
        """
        return not self._numbers.isdisjoint(operator.parents)

    def _distance(
        self,
        operator: TracedOperator,
        results: list[torch.Tensor] | None,
        shapes: Any,
        *,
        known: bool,
    ) -> tuple[Distance | None, bool]:
        """(distance of the comparable results or None, whether all others are known to be equal).

        Integers that differ are not compared: they state where elements went.
        """
        mine = operator.results
        if mine is None or results is None or len(mine) != len(results):
            return None, False
        if operator.key[2].startswith(_MAKES_MEMORY) or not known:
            return None, all(map(same_bits, mine, results))
        if shapes is not None and len(shapes) != len(mine):
            return None, False
        far, is_clear = None, True
        for place, (a, b) in enumerate(zip(mine, results)):
            pair = self._region.pair(a, b, shapes[place] if shapes is not None else None)
            if pair is None or pair[0].shape != pair[1].shape:
                is_clear = False
            elif not (a.is_floating_point() or a.is_complex()):
                is_clear = is_clear and same_bits(*pair)
            else:
                far = (far or Distance()) | distance(*pair)
        return far, is_clear

    def _above(self, base: Trace, operator: TracedOperator) -> list[int] | None:
        """Ancestors of this operator whose equality is unknown; None when an ancestor differs."""
        waiting, seen = list(operator.parents), set()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            if self._states.get(number, False):
                return None
            if number in self._unclear:
                seen.add(number)
                waiting += base.operators[number].parents
        return sorted(seen)


def place(begun: Begun) -> OperatorPlace:
    """The operator in the form that an answer names it."""
    scope, _, operator, _ = begun.operator.key
    after = begun.after
    return OperatorPlace(
        operator.removesuffix(".default"),
        scope,
        begun.operator.op_type,
        begun.operator.line,
        after.key[2].removesuffix(".default") if after is not None else "",
    )
