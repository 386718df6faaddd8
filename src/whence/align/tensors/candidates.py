"""Pairs tensors of labels with those of calls: by elements, by learnt names, by order."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence import dtypes
from whence.align import dims
from whence.align.layout import axes
from whence.align.layout.distances import typical_distance
from whence.align.tensors.elements import Elements, Family, Numbers, Place, Tap, split
from whence.records import Record
from whence.records.slots import is_output

CLEARER = 3.0  # must be this many times closer than any other candidate
_VOTES = 3  # votes of certain pairs for a naming rule that outweigh a tensor's elements
# times the usual distance of certain pairs: perhaps a nearby tensor that no call returned
_UNLIKE = 100.0
_MONOTONE = 0.9  # least share of certain pairs in one order for order to count


@dataclass(slots=True)
class Match:
    """A tap paired with a place through an expression over the tap's tensor. sure: whether the
    elements confirm the pair.
    """

    tap: Tap
    place: Place
    fit: axes.Fit
    why: str
    sure: bool = True


class TensorCandidates:
    """Finds the partners of some taps among some places."""

    def __init__(self, elements: Elements, taps: Sequence[Tap], places: Sequence[Place]) -> None:
        self.elements, self.taps, self.places = elements, taps, list(places)
        self.matched: dict[int, Match] = {}
        self.repeated: set[int] = set()  # taps whose place another tap has: its views and copies
        self.fits = TensorFits(elements, places)

    def by_content(self) -> None:
        """Pair tensors whose elements are much closer to each other than to any other candidate."""
        doubtful: dict[int, list[tuple[Place, axes.Fit]]] = {}
        for tap in self.taps:
            fits = [
                (place, fit)
                for place in self.fits.candidates(tap)
                if (fit := self.fits.fit(tap, place)) is not None and fit.close
            ]
            if not fits:
                continue
            fits.sort(key=lambda item: item[1].distance)
            best = fits[0][1].distance
            limit = max(CLEARER * best, 1e-6)
            rivals = [item for item in fits if item[1].distance <= limit]
            if len(rivals) == 1 or self.fits.hold_same_elements([place for place, _ in rivals]):
                place, fit = min(rivals, key=lambda item: self._fitness(tap, *item))
                further = [f.distance for p, f in fits if f.distance > limit]
                self._take(
                    tap,
                    place,
                    fit,
                    f"elements {best:.2g} apart"
                    + (f", the next {further[0]:.2g}" if further else ""),
                )
            else:
                doubtful[tap.call] = rivals
        self._one_each()
        self._by_order(doubtful)

    def as_before(self, earlier: dict[tuple[str, Family], list[tuple[Family, Numbers]]]) -> None:
        """Pair what was paired in an earlier step the same way again."""
        roles = {role: place for place in reversed(self.places) for role in place.roles}
        for tap in self.taps:
            place = next(
                (roles[r] for r in earlier.get((tap.name, tap.family), ()) if r in roles), None
            )
            old = self.matched.get(tap.call)
            if place is None or (
                old is not None
                and (old.place is place or self.fits.hold_same_elements([old.place, place]))
            ):
                continue
            fit = self.fits.fit(tap, place)
            if fit is not None:
                self.matched[tap.call] = Match(
                    tap,
                    place,
                    fit,
                    f"as in the step before; elements {fit.distance:.2g} apart",
                    sure=fit.close,
                )

    def by_name(self) -> None:
        """Pair the remaining taps by the naming rule that most certain pairs follow."""
        rules = self._rules()
        roles = {role: place for place in reversed(self.places) for role in place.roles}
        for tap in self.taps:
            for family, offset, votes in rules.get(tap.family, ()):
                place = roles.get((family, tuple(n - o for n, o in zip(tap.numbers, offset))))
                if place is None:
                    continue
                old = self.matched.get(tap.call)
                if old is not None and (old.place is place or (old.sure and votes < _VOTES)):
                    break
                fit = self.fits.fit(tap, place)
                if fit is None or any(
                    m.place is place and m.sure and m.tap is not tap for m in self.matched.values()
                ):
                    continue
                sure = (m for m in self.matched.values() if m.sure and m.tap.family == tap.family)
                fit = self.fits.in_axes_of(tap, place, [m.fit.node for m in sure]) or fit
                why = (
                    f"named as {votes} certain pair{'s are' if votes > 1 else ' is'}; "
                    f"elements {fit.distance:.2g} apart"
                )
                self.matched[tap.call] = Match(tap, place, fit, why, sure=False)
                break

    def strays(self, tap: Tap) -> bool:
        """Whether a tensor is much further from its partner than certain pairs usually are."""
        usual = float(np.median([m.fit.distance for m in self.matched.values()]))
        return self.matched[tap.call].fit.distance > max(_UNLIKE * usual, 1e-6)

    def only_one_of_its_size(self) -> None:
        """Pair tensors that are the only ones of their size on both sides, or that share a name."""
        unpaired = [t for t in self.taps if t.call not in self.matched]
        used = {m.place.record for m in self.matched.values()}
        count = Counter(self.elements.record(False, t.record).count for t in self.taps)
        for tap in unpaired:
            size = self.elements.record(False, tap.record).count
            open_ = [p for p in self.fits.of_size(size) if p.record not in used and p.is_written]
            exact = [
                p
                for p in open_
                if any((f[0], n) == split(tap.name) and is_output(f[1]) for f, n in p.roles)
            ]
            namesakes = exact or [
                p
                for p in open_
                if any(_last(tap.name) in (f[1].partition(".")[2], _last(f[0])) for f, _ in p.roles)
            ]
            chosen = (
                namesakes
                if len(namesakes) == 1
                else open_
                if len(open_) == 1 and count[size] == 1 and size > 1
                else []
            )
            if chosen and (fit := self.fits.fit(tap, chosen[0])) is not None:
                why = (
                    "of the same name"
                    if chosen is namesakes
                    else "the only tensor of its size on either side"
                )
                self.matched[tap.call] = Match(
                    tap, chosen[0], fit, f"{why}; elements {fit.distance:.2g} apart", sure=fit.close
                )
                used.add(chosen[0].record)

    def repeats(self, tap: Tap) -> bool:
        """Whether a tap repeats the elements of a tensor that already has a partner (a view, a
        copy).
        """
        if tap.call in self.repeated:
            return True
        record = self.elements.record(False, tap.record)
        for match in self.matched.values():
            matched_record = self.elements.record(False, match.tap.record)
            if (
                record.sketch is not None
                and matched_record.sketch is not None
                and (record.count, record.sketch.checksum)
                == (matched_record.count, matched_record.sketch.checksum)
            ):
                return True
        return False

    def _take(self, tap: Tap, place: Place, fit: axes.Fit, why: str) -> None:
        self.matched[tap.call] = Match(tap, place, fit, why)

    def _fitness(self, tap: Tap, place: Place, fit: axes.Fit) -> tuple[bool, int, bool, int]:
        """Sort key among places with the same elements: equal numbers in names first, then the
        simplest change of axes, then outputs.
        """
        named = bool(tap.numbers) and any(numbers == tap.numbers for _, numbers in place.roles)
        return not named, len(str(fit.node)), not place.is_written, place.order

    def _one_each(self) -> None:
        """Of several taps with one place, keep the closest, with the simplest change of axes."""
        by_place: dict[int, list[Match]] = defaultdict(list)
        for match in self.matched.values():
            by_place[match.place.record].append(match)
        for matches in by_place.values():
            keep = min(
                matches,
                key=lambda m: (
                    m.fit.distance > 2 * min(f.fit.distance for f in matches),
                    len(str(m.fit.node)),
                    m.tap.order,
                ),
            )
            for match in matches:
                if match is not keep:
                    del self.matched[match.tap.call]
                    self.repeated.add(match.tap.call)

    def _by_order(self, doubtful: dict[int, list[tuple[Place, axes.Fit]]]) -> None:
        """Where several places have the same elements, take the only one that keeps the order, if
        the certain pairs are in order.
        """
        sure = sorted((m.tap.order, m.place.order) for m in self.matched.values())
        if (
            not doubtful
            or len(sure) < 3
            or _longest_run([b for _, b in sure]) < _MONOTONE * len(sure)
        ):
            return
        for tap in self.taps:
            if tap.call not in doubtful:
                continue
            low = max((b for a, b in sure if a < tap.order), default=-1)
            high = min((b for a, b in sure if a > tap.order and b >= low), default=1 << 60)
            used = {m.place.record for m in self.matched.values()}
            fits = [
                (p, f)
                for p, f in doubtful[tap.call]
                if low <= p.order <= high and p.record not in used
            ]
            if len(fits) == 1:
                self._take(
                    tap,
                    *fits[0],
                    f"elements {fits[0][1].distance:.2g} apart, the only one of several alike "
                    "that keeps the order",
                )

    def _rules(self) -> dict[Family, list[tuple[Family, Numbers, int]]]:
        """By the starred name of a tap: (role of a certain pair's place, offset between the numbers
        in both names, votes), most votes first.
        """
        votes: dict[Family, Counter[tuple[Family, Numbers]]] = defaultdict(Counter)
        for match in self.matched.values():
            for family, numbers in dict.fromkeys(match.place.roles):
                if match.sure and match.tap.numbers and len(numbers) == len(match.tap.numbers):
                    votes[match.tap.family][
                        family, tuple(a - b for a, b in zip(match.tap.numbers, numbers))
                    ] += 1
        return {
            family: [
                (role, offset, n)
                for (role, offset), n in counts.most_common()
                if 2 * n >= counts.most_common(1)[0][1]
            ]
            for family, counts in votes.items()
        }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _longest_run(values: Sequence[int]) -> int:
    """The length of the longest non-decreasing subsequence."""
    ends: list[int] = []
    for value in values:
        index = bisect_left(ends, value + 1)
        ends[index : index + 1] = [value]
    return len(ends)


# Brings tensors of labels to the axes of tensors of calls, and measures how far apart they then
# are.

_FIGURES = 0.1  # largest relative difference of statistics for elements to be read
_LOOKED_AT = 16  # candidates whose elements are read, per tensor


class TensorFits:
    """Fits of taps to places, each computed once."""

    def __init__(self, elements: Elements, places: Sequence[Place]) -> None:
        self.elements = elements
        self._fits: dict[tuple[int, int], axes.Fit | None] = {}
        self._by_count: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            self._by_count[elements.record(True, place.record).count].append(place)

    def of_size(self, count: int) -> Sequence[Place]:
        """The places whose tensor has this many elements."""
        return self._by_count.get(count, ())

    def candidates(self, tap: Tap) -> list[Place]:
        """The places whose statistics are nearest to the tap's; without any, places that are
        shorter than the tap along one axis.
        """
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
        """Places whose tensor may be the front part of this one along one padded axis."""
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
        """The tap brought to the place's axes, and its distance after it; None where that is not
        possible.
        """
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
        """The tap in the axes of its siblings, because the elements of a faulty tensor do not show
        its axes; None where none of them gives the place's shape.
        """
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
        """Whether these places hold the same elements (a view, a copy), by their checksums."""
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
    """The largest relative difference of statistics that do not depend on the order of elements:
    norm, sum of |x| and fourth root of the sum of x^4. inf for an exact dtype against a floating
    one.
    """
    s, t, p, q = a.statistics, b.statistics, a.sketch, b.sketch
    if _exact(a.dtype) != _exact(b.dtype):
        return float("inf")
    if s is None or t is None or p is None or q is None or s.norm is None or t.norm is None:
        return 0.0  # unknown: the elements decide
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
