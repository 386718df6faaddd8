"""The smallest input on which a kernel is still wrong in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.workflows.operator_fuzz.draws import SIMPLEST, Case

Arrays = dict[str, Array]
_MOST_TRIES = 120


class Budget:
    """fails: does a case still fail in the same way? It is asked a bounded number of times."""

    def __init__(self, fails: Callable[[Case], bool], tries: int = _MOST_TRIES) -> None:
        self._fails, self._left = fails, tries
        self._known: dict[Case, bool] = {}

    def fails(self, case: Case) -> bool:
        """False where nothing is left to ask with."""
        if case not in self._known:
            if self._left <= 0:
                return False
            self._left -= 1
            self._known[case] = self._fails(case)
        return self._known[case]


def smallest_case(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with the plainest layout and values, and the smallest sizes."""
    budget = Budget(fails)
    for simpler in _simpler(case):
        if budget.fails(simpler):
            case = simpler
            break
    if case.layout != "contiguous" and budget.fails(plain := replace(case, layout="contiguous")):
        case = plain
    is_moving = True
    while is_moving:
        is_moving = False
        for name, size in case.sizes:
            least = _least(case, name, budget)
            if least < size:
                case, is_moving = case.with_size(name, least), True
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for values in SIMPLEST:
        if values == case.values:
            return
        yield replace(case, values=values, layout="contiguous")
        yield replace(case, values=values)


def _least(case: Case, name: str, budget: Budget) -> int:
    """The smallest size of a dimension that fails, as far as halving and small numbers find it."""
    size = case.size_of[name]
    for small in range(min(size, 4)):
        if budget.fails(case.with_size(name, small)):
            return small
    low, high = min(size, 4) - 1, size  # passes at low, fails at high
    while high - low > 1:
        middle = (low + high) // 2
        is_failing = budget.fails(case.with_size(name, middle))
        low, high = (low, middle) if is_failing else (middle, high)
    return high


def with_fewer_values(inputs: Arrays, fails: Callable[[Arrays], bool], tries: int = 40) -> Arrays:
    """The inputs with as many elements as possible 0, or else a small whole number."""
    for name, array in inputs.items():
        if not dtypes.of(array).is_floating or array.size < 2:
            continue
        rounded = np.where(np.isfinite(array.astype(np.float64)), np.rint(array), array)
        candidate = inputs | {name: rounded.astype(array.dtype)}
        if tries > 0 and fails(candidate):
            inputs = candidate
        block, tries = inputs[name].size // 2, tries - 1
        while block >= 1 and tries > 0:
            for start in range(0, array.size, block):
                if tries <= 0:
                    break
                candidate = inputs | {name: _zeroed(inputs[name], start, block)}
                if candidate[name].tobytes() != inputs[name].tobytes():
                    tries -= 1
                    inputs = candidate if fails(candidate) else inputs
            block //= 2
    return inputs


def _zeroed(array: Array, start: int, count: int) -> Array:
    flat = array.reshape(-1).copy()
    flat[start : start + count] = 0
    return flat.reshape(array.shape)
