"""One call of a kernel, judged by what its reference makes of the same inputs in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import UsageError
from whence.results.fuzz import FaultKind
from whence.workflows.operator_fuzz.kernels import Kernel, WritesOutside
from whence.workflows.operator_fuzz.layouts import LaidOut
from whence.workflows.rounding import Ways, named_arrays, run_ways

if TYPE_CHECKING:
    from whence.judge.band import Band

Arrays = dict[str, Array]
_REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError)
"""What code raises that refuses an input on purpose."""


class NotValid(Exception):
    """The reference raises on these inputs: nothing is asked of the kernel."""


class Refused(Exception):
    """The kernel refuses the inputs."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a call. output, index: where. got, exact: there. alone: of a later call
    with other values, what is wrong if it is wrong as a first call too.
    """

    kind: FaultKind
    words: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: float | None = None
    exact: float | None = None
    times: float | None = None
    alone: FaultKind | None = None


class Checker:
    """A kernel and its reference. arguments: beside the tensors, of the reference by name."""

    def __init__(self, kernel: Kernel, reference: Kernel) -> None:
        self.kernel, self.reference = kernel, reference
        self.not_repeated = 0

    def fault(
        self, inputs: Arrays, layout: str = "contiguous", *, again: bool = False
    ) -> Fault | None:
        """What is wrong with the call on these inputs; None for nothing. again: it is then called
        on other values of the same form, and on these again. Raises NotValid, Refused.
        """
        wanted = self.wanted(inputs)
        first, fault = self._call(inputs, layout, wanted)
        if fault is not None or not again:
            return fault
        others = {name: turned(array) for name, array in inputs.items()}
        try:
            fault = self._call(others, layout, self.wanted(others))[1]
        except (NotValid, Refused):
            fault = None
        if fault is not None:
            return _later(fault, "called next with these values turned")
        second, fault = self._call(inputs, layout, wanted)
        if fault is not None:
            return replace(_later(fault, "called again with the same values"), alone=None)
        self.not_repeated += any(
            first[name].tobytes() != array.tobytes() for name, array in second.items()
        )
        return None

    def wanted(self, inputs: Arrays) -> dict[str, Band]:
        """The band of every output. Raises NotValid, and UsageError for a reference that does not
        run in float64.
        """
        try:
            ways = run_ways(self._referred, _given(inputs, self.reference.is_torch), threads=False)
        except Exception as error:  # whatever a reference raises on sizes that it does not take
            raise NotValid(f"{type(error).__name__}: {error}") from error
        if set(ways.exact) != set(ways.own):
            why = "; ".join(ways.notes) or "it gives other results there"
            raise UsageError(f"{self.reference.words} does not run in float64: {why}")
        return {name: _band(name, ways, inputs, self.reference.is_torch) for name in ways.own}

    def _referred(self, **inputs: Any) -> Any:
        with np.errstate(all="ignore"):
            return self.reference.call(inputs)

    def _call(
        self, inputs: Arrays, layout: str, wanted: Mapping[str, Band]
    ) -> tuple[Arrays, Fault | None]:
        layout = layout if self.kernel.strided else "contiguous"
        held = {name: LaidOut(a, layout, self.kernel.is_torch) for name, a in inputs.items()}
        try:
            with np.errstate(all="ignore"):
                results = named_arrays(self.kernel.call({k: v.value for k, v in held.items()}))
        except WritesOutside as error:
            return {}, Fault(FaultKind.WRITES_OUTSIDE, str(error))
        except _REFUSALS as error:
            raise Refused(
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            ) from error
        except Exception as error:  # noqa: BLE001 - a crash of a kernel is what is looked for
            return {}, Fault(FaultKind.RAISES, f"it raises {type(error).__name__}: {error}")
        results = {name: np.array(array) for name, array in results.items()}
        written = [name for name, value in held.items() if value.is_written()]
        if written:
            return results, Fault(FaultKind.WRITES_INPUT, f"it changes its input {written[0]}")
        if any(not np.isfinite(_wide(a)).all() for a in inputs.values()):
            results = _alike_fill(results, wanted)
        return results, _worst(results, wanted)


def _later(fault: Fault, when: str) -> Fault:
    """A fault that shows in a later call."""
    words = f"{when}: {fault.words}"
    return replace(fault, kind=FaultKind.KEEPS_STATE, words=words, alone=fault.kind)


def _alike_fill(results: Arrays, wanted: Mapping[str, Band]) -> Arrays:
    """Where an input is infinite or NaN, whether a result is infinite or NaN is a matter of the
    formula: inf - inf of one is inf of the other.
    """
    if len(results) != len(wanted):
        return results
    changed: Arrays = {}
    for (name, array), around in zip(results.items(), wanted.values()):
        is_same = array.shape == around.centre.shape and dtypes.of(array).is_floating
        both = ~np.isfinite(_wide(array)) & ~np.isfinite(around.centre) if is_same else False
        changed[name] = np.where(both, around.centre, _wide(array)).astype(array.dtype)
    return changed


def _wide(array: Array) -> Any:
    return array.astype(np.float64)


def _worst(results: Arrays, wanted: Mapping[str, Band]) -> Fault | None:
    if len(results) == len(wanted) == 1:
        results = dict(zip(wanted, results.values()))
    if missing := [name for name in wanted if name not in results]:
        return Fault(FaultKind.SHAPE, f"it gives no {missing[0] or 'result'}")
    faults = [_judged(name, results[name], around) for name, around in wanted.items()]
    return next((fault for fault in faults if fault is not None), None)


def _judged(name: str, result: Array, around: Band) -> Fault | None:
    from whence.judge.band import Placed

    if result.shape != around.centre.shape:
        words = f"its shape is {list(result.shape)}, of the reference {list(around.centre.shape)}"
        return Fault(FaultKind.SHAPE, words, name)
    if dtypes.of(result).is_floating:
        unit, smallest = _unit(result)
        around = _for_result(around, unit, smallest)
        placed = around.place(result)
    else:
        wrong = result.astype(np.float64) != around.centre
        for way in around.ways:
            wrong &= result.astype(np.float64) != way
        place = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.any() else ()
        placed = Placed(float("inf") if wrong.any() else 0.0, index=tuple(int(i) for i in place))
    if placed.is_inside:
        return None
    got, exact = _at(result, placed.index), _at(around.centre, placed.index)
    kind = FaultKind.NOT_FINITE if placed.mismatches else FaultKind.WRONG
    what = "NaN or infinite on one side alone" if placed.mismatches else (
        f"{max(placed.z, placed.rho):.3g} times what rounding makes"
    )  # fmt: skip
    return Fault(kind, what, name, placed.index, got, exact, placed.score)


def _at(array: Array, index: tuple[int, ...]) -> float:
    return float(array[index]) if index or array.ndim == 0 else float(array.reshape(-1)[0])


def _unit(result: Array) -> tuple[float, float]:
    """(unit roundoff, magnitude below which numbers may be flushed to zero) of a result."""
    kind = dtypes.of(result)
    import ml_dtypes

    info = ml_dtypes.finfo(result.dtype)
    # 16 bits are not flushed as a rule, and their smallest normal number is no small one
    smallest = info.smallest_subnormal if kind.bits <= 16 and kind.name == "float16" else info.tiny
    return float(kind.unit_roundoff or 0.0), float(smallest)


def _for_result(around: Band, unit: float, smallest: float) -> Band:
    """The band of what is given in a dtype: it rounds once more."""
    size = np.where(np.isfinite(around.centre), np.abs(around.centre), 0.0)
    wider = np.maximum(around.deviation, unit * size + smallest)
    return replace(around, deviation=wider)


def _band(name: str, ways: Ways, inputs: Arrays, is_torch: bool) -> Band:
    from whence.judge.band import band, with_sums

    own, exact = ways.own[name], ways.exact[name]
    kind = dtypes.of(own)
    rows = [
        own,
        *(w[name] for w in ways.others.values() if w.get(name, own[:0]).shape == own.shape),
    ]
    if not kind.is_floating:
        return band(exact, rows, 0.0, alike=True)
    unit, smallest = _unit(own)
    around = band(exact, rows, unit, smallest=smallest, alike=True)
    with np.errstate(all="ignore"):
        offs = [
            np.nan_to_num(_wide(m[name]) - _wide(exact), nan=0.0, posinf=0.0, neginf=0.0)
            for m in ways.moved
        ]
    moved = np.sqrt(np.mean(np.square(offs), axis=0)) if offs else np.zeros(exact.shape)
    longest = max((n for a in inputs.values() for n in a.shape), default=1)
    return with_sums(around, moved, ways.terms if is_torch else longest, kind.name)


def _given(inputs: Arrays, is_torch: bool) -> dict[str, Any]:
    if not is_torch:
        return dict(inputs)
    from whence.frameworks.torch_arrays import from_host

    return {name: from_host(np.array(array)) for name, array in inputs.items()}


def turned(array: Array) -> Array:
    """Other values of the same form and range."""
    flipped: Any = np.ascontiguousarray(np.flip(array))
    if array.dtype == np.bool_:
        flipped = np.logical_not(flipped)
    elif dtypes.of(array).is_floating:
        flipped = (-flipped).astype(array.dtype)
    return np.asarray(flipped)


def history(calls: Sequence[Arrays], checker: Checker) -> None:
    """Make calls whose results nobody looks at."""
    for inputs in calls:
        try:
            checker._call(inputs, "contiguous", {})
        except (Refused, NotValid):
            continue
