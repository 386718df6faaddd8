"""How tensors of labels come to the axes of tensors of calls, and how far apart both then are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from whence import dtypes
from whence.align import dims
from whence.align.layout import axes
from whence.align.layout.distances import typical_distance
from whence.align.tensors.elements import Elements, Place, Tap
from whence.records import Record

_FIGURES = 0.1  # how far norm and moments may be apart between tensors whose elements are looked at
_LOOKED_AT = 16  # candidates of one tensor whose elements are read


class TensorFits:
    """Fits of taps at some places, each worked out once."""

    def __init__(self, elements: Elements, places: Sequence[Place]) -> None:
        self.elements = elements
        self._fits: dict[tuple[int, int], axes.Fit | None] = {}
        self._by_count: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            self._by_count[elements.record(True, place.record).count].append(place)

    def of_size(self, count: int) -> Sequence[Place]:
        """The places with so many elements."""
        return self._by_count.get(count, ())

    def candidates(self, tap: Tap) -> list[Place]:
        """The places whose figures are nearest to the tap's; else those it may be longer than."""
        record = self.elements.record(False, tap.record)
        near = []
        for place in self._by_count.get(record.count, ()):
            difference = _figures(record, self.elements.record(True, place.record))
            if difference <= _FIGURES:
                near.append((difference, place.order, place))
        near.sort(key=lambda item: item[:2])
        places = [place for _, _, place in near[:_LOOKED_AT]]
        return places or self._shorter(tap, record)

    def _shorter(self, tap: Tap, record: Record) -> list[Place]:
        """Places of a size that the front of one padded axis may hold."""
        out = []
        for count, places in self._by_count.items():
            if 0 < count < record.count and any(
                count % (record.count // n) == 0 for n in record.shape if n > 1
            ):
                out += [
                    p
                    for p in places
                    if next(
                        axes.cuts(record.shape, self.elements.record(True, p.record).shape), None
                    )
                ]
        return out[: 4 * _LOOKED_AT]

    def fit(self, tap: Tap, place: Place) -> axes.Fit | None:
        """The tap in the place's axes and its distance then; None where it cannot be."""
        key = tap.record, place.record
        if key not in self._fits:
            a, b = self.elements.record(False, tap.record), self.elements.record(True, place.record)
            fit = None
            if _exact(a.dtype) == _exact(b.dtype):
                array, reference_array = (
                    self.elements.array(False, tap.record),
                    self.elements.array(True, place.record),
                )
                if array is not None and reference_array is not None:
                    fit = axes.fit(array, reference_array)
                elif a.shape == b.shape and a.count:
                    fit = axes.Fit(dims.Name("x"), _figures(a, b))
            self._fits[key] = fit
        return self._fits[key]

    def in_axes_of(self, tap: Tap, place: Place, nodes: Sequence[dims.Node]) -> axes.Fit | None:
        """The tap in its siblings' axes, since a wrong tensor's elements do not tell; or None."""
        array = self.elements.array(False, tap.record)
        reference_array = self.elements.array(True, place.record)
        if array is None or reference_array is None:
            return None
        orders = Counter(str(node) for node in nodes)
        for node in (dims.parse(order) for order, _ in orders.most_common()):
            try:
                if node.shape({"x": [array.shape]}) == reference_array.shape:
                    return axes.Fit(
                        node, typical_distance(reference_array, node.apply({"x": [array]}))
                    )
            except dims.Unfit:
                continue
        return None

    def hold_same_elements(self, places: Sequence[Place]) -> bool:
        """Do these hold the same elements (a view, a copy)?"""
        prints = set()
        for place in places:
            sketch = self.elements.record(True, place.record).sketch
            if sketch is None:
                return False
            prints.add(sketch.checksum)
        return len(prints) == 1


def _exact(dtype: str) -> bool:
    return not dtypes.is_floating(dtype)


def _figures(a: Record, b: Record) -> float:
    """How far apart two tensors of one count are by what no order of elements changes: norm, |x|,
    x^4, extremes. inf when unlike.
    """
    s, t, p, q = a.statistics, b.statistics, a.sketch, b.sketch
    if _exact(a.dtype) != _exact(b.dtype):
        return float("inf")
    if s is None or t is None or p is None or q is None or s.norm is None or t.norm is None:
        return 0.0  # not known: the elements decide
    if p.checksum == q.checksum and a.dtype == b.dtype:
        return 0.0

    def apart(x: float | None, y: float | None, power: float = 1.0) -> float:
        if x is None or y is None:
            return 0.0
        top = max(abs(x), abs(y))
        return abs(abs(x) ** power - abs(y) ** power) / top**power if top else 0.0

    return max(
        apart(s.norm, t.norm), apart(p.abs_sum, q.abs_sum), apart(p.fourth_sum, q.fourth_sum, 0.25)
    )
