"""Judges a comparison that failed in a test by running the test in other ways of rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array
from whence.results.accept import Acceptance, AcceptKind, JudgedValue
from whence.workflows.accept import golden_files
from whence.workflows.accept.accept import answered
from whence.workflows.accept.golden_files import Golden
from whence.workflows.accept.judging import Evidence, judged, worst_first
from whence.workflows.rounding import Ways, run_ways

Arrays = dict[str, Array]


def accept_comparison(
    expected: Any, actual: Any, program: Callable[..., Any], inputs: Mapping[str, Any]
) -> Acceptance:
    """Judge a comparison that failed in a program of this process.

    program: of named arguments, `inputs`; gives {"actual": ..., "expected": ...} of the comparison.
    Where the expected values are the same in every way of rounding, they are an expectation. Where
    they are computed too, the question is whether both sides compute the same: whether their
    difference is 0 but for rounding. Raises what the program raises.
    """
    ways = run_ways(program, inputs or None)
    old, new = golden_files.read({"": expected}), golden_files.read({"": actual})
    if not _agrees(ways.own, "actual", new):
        words = "the test does not repeat: run again, it compares other values"
        value = JudgedValue("", AcceptKind.CANNOT_TELL, words=words, decides="seeds to the test")
        return answered([value], Evidence(), ways.notes)
    everywhere = {"as it is": ways.own, **ways.others}
    if all(_agrees(w, "expected", old) for w in (*everywhere.values(), ways.exact) if w):
        evidence = _evidence(ways, everywhere, lambda values: _side(values, "actual"))
    else:
        evidence = _evidence(ways, everywhere, _difference)
        evidence.sizes = {
            name: float(np.sqrt(np.mean(np.square(_finite(array)))))
            for name, array in _side(ways.own, "expected").items()
        }
        new = {name: Golden(array) for name, array in evidence.ways["as it is"].items()}
        old = {name: Golden(np.zeros_like(g.content)) for name, g in new.items()}
    values = [judged(name, golden, new.get(name), evidence)[0] for name, golden in old.items()]
    return answered(worst_first(values), evidence, ways.notes)


def _evidence(
    ways: Ways, everywhere: Mapping[str, Arrays], part: Callable[[Arrays], Arrays]
) -> Evidence:
    return Evidence({name: part(values) for name, values in everywhere.items()}, part(ways.exact))


def _side(values: Arrays, side: str) -> Arrays:
    """The numbers of one side ("actual" or "expected"), by their names within it."""
    return {
        name[len(side) :].lstrip("."): array
        for name, array in values.items()
        if name.partition(".")[0] == side and array.dtype.kind != "U"
    }


def _difference(values: Arrays) -> Arrays:
    """Actual minus expected values, in float64."""
    actual, expected = (_side(values, side) for side in ("actual", "expected"))
    return {
        name: _wide(array) - _wide(expected[name])
        for name, array in actual.items()
        if name in expected and expected[name].shape == array.shape
    }


def _agrees(values: Arrays, side: str, seen: Mapping[str, Golden]) -> bool:
    """Whether a run of the test compares the same values of one side as the run that failed."""
    again = _side(values, side)
    return all(
        name in again and np.array_equal(_wide(again[name]), _wide(g.content), equal_nan=True)
        for name, g in seen.items()
    )


def _finite(content: Any) -> npt.NDArray[Any]:
    return np.asarray(np.nan_to_num(np.abs(_wide(content)), nan=0.0, posinf=0.0))


def _wide(content: Any) -> npt.NDArray[Any]:
    array = np.asarray(content)
    return array if np.iscomplexobj(array) else array.astype(np.float64)
