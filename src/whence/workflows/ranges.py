"""How the tensors of one run use the ranges of floating-point formats: what overflows, what becomes
zero, what loses bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from whence import dtypes
from whence.errors import ElementsMissing, UsageError
from whence.metrics.range_use import Extent, Fit, FloatFormat, extent, fits
from whence.records import Call, Ref, Run
from whence.results import FormatUse, Ranges, TensorRange

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def ranges(run: str | os.PathLike[str], formats: Sequence[str] = NARROW) -> Ranges:
    """Measure how the tensors of a run would fit narrower formats, and how they fill their own.

    run: a run folder or another tool's dump. Elements that are kept are read once; of tensors with
    statistics alone the largest magnitude says whether they overflow. formats: names of
    floating-point dtypes; each one of 8 bits is tried as it is and scaled per tensor. Raises
    UsageError for a name that is none, UnreadableRun when the run cannot be read.
    """
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run

    forms = float_formats(formats)
    path = os.fspath(run)
    return RangeMeasuring(with_figures(open_run(path)), forms).result(path)


# Measures how the tensors of one run use the ranges of floating-point formats.

_EIGHT_BITS = 8
_NOTHING = Fit(0, 0, 0)


def float_formats(names: Sequence[str]) -> list[FloatFormat]:
    """The formats for some dtype names; 8-bit formats are tried unscaled and scaled.

    Raises UsageError for a name that is not a floating-point dtype.
    """
    forms: list[FloatFormat] = []
    for name in dict.fromkeys(names):
        info = dtypes.DTYPES.get(name)
        if info is None or info.kind != "float":
            known = ", ".join(key for key, dtype in dtypes.DTYPES.items() if dtype.kind == "float")
            raise UsageError(f"{name!r} is not a floating-point dtype; known: {known}")
        forms.append(FloatFormat(name))
        if info.bits == _EIGHT_BITS:
            forms.append(FloatFormat(name, is_scaled=True))
    return forms


class _Place(NamedTuple):
    """Identifies one line of the result: a slot of a call, at all its steps."""

    root: str
    scope: str
    op_type: str
    slot: str
    phase: str
    dtype: str


class _Measured(msgspec.Struct):
    """One record: its extent, and how it fits its own dtype and the formats.

    whole: None when no element is kept.
    """

    largest: float
    infinite: int
    step: int
    whole: Extent | None = None
    own: Fit = _NOTHING
    formats: list[Fit] | None = None
    elements: int = 0


class RangeMeasuring:
    """Reads every floating-point tensor of a run once."""

    def __init__(self, run: Run, forms: list[FloatFormat]) -> None:
        self._run, self._forms = run, forms

    def result(self, name: str) -> Ranges:
        """The result for the whole run."""
        places: dict[_Place, list[_Measured]] = {}
        unmeasured = 0
        for call, ref in self._first_sights():
            measured = self._measured(ref.record, call.step)
            if measured is None:
                unmeasured += 1
                continue
            record = self._run.records[ref.record]
            place = _Place(call.root, call.name, call.op_type, ref.slot, call.phase, record.dtype)
            places.setdefault(place, []).append(measured)
        tensors = tuple(self._tensor(place, sights) for place, sights in places.items())
        unread = sum(not tensor.elements for tensor in tensors)
        names = tuple(form.name for form in self._forms)
        return Ranges(name, names, tensors, unread, unmeasured)

    def _first_sights(self) -> Iterator[tuple[Call, Ref]]:
        """Every floating-point tensor with elements, with the first call that refers to it."""
        seen: set[int] = set()
        for call in self._run.calls:
            for ref in call.refs:
                record = self._run.records[ref.record]
                info = dtypes.DTYPES.get(record.dtype)
                if ref.record in seen or info is None or info.kind != "float" or not record.count:
                    continue
                seen.add(ref.record)
                yield call, ref

    def _measured(self, number: int, step: int) -> _Measured | None:
        """The figures of one record; None when it has neither elements nor statistics."""
        record = self._run.records[number]
        figures = record.statistics
        try:
            values = self._run.array(number)
        except ElementsMissing:
            if figures is None:
                return None
            low, high = figures.min or 0.0, figures.max or 0.0
            return _Measured(max(abs(low), abs(high)), figures.inf, step)
        whole = extent(values)
        own, *formats = fits(values, [FloatFormat(record.dtype), *self._forms], whole)
        return _Measured(whole.largest, whole.infinite, step, whole, own, formats, int(values.size))

    def _tensor(self, place: _Place, sights: list[_Measured]) -> TensorRange:
        """Combine all records of one place."""
        largest = max(sights, key=lambda sight: sight.largest)
        extents = [sight.whole for sight in sights if sight.whole is not None]
        small = [whole.smallest for whole in extents if whole.smallest]
        return TensorRange(
            scope=place.scope,
            root=place.root,
            op_type=place.op_type,
            slot=place.slot,
            phase=place.phase,
            dtype=place.dtype,
            times=len(sights),
            elements=sum(sight.elements for sight in sights),
            largest=largest.largest,
            step=largest.step,
            smallest=min(small, default=None),
            zeros=sum(whole.zeros for whole in extents),
            subnormal=sum(sight.own.subnormal for sight in sights),
            saturated=sum(whole.saturated for whole in extents),
            infinite=sum(sight.infinite for sight in sights),
            formats=tuple(
                self._use(number, form, largest.largest, sights)
                for number, form in enumerate(self._forms)
            ),
        )

    @staticmethod
    def _use(number: int, form: FloatFormat, largest: float, sights: list[_Measured]) -> FormatUse:
        total = sum((s.formats[number] for s in sights if s.formats is not None), _NOTHING)
        overflows = form.overflows(largest)
        return FormatUse(form.name, overflows, total.overflow, total.zero, total.subnormal)
