"""Finds which values of two graphs correspond: by statistics that do not depend on the order of
elements; after a fault, where statistics no longer agree, by the values they are computed from.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from whence.align.values.exported_modules import module_values
from whence.align.values.value_graph import Form, ValueGraph, has_activation, is_move, kind_of
from whence.records import Call, Record

_CLOSE = 1e-4
"""Largest relative difference between sums over the elements of one value in two runs that round
differently.
"""
_NEARER, _ROUNDING = 10, 1e-6
"""Another value is the corresponding one if it is this many times nearer, by more than what
rounding changes in statistics.
"""
_FAR = (1e-3, 1e-2, 0.1, 0.5)
"""The same limit after a fault, tried from the smallest."""
_NAMED = 0.1
"""Up to this distance a common name is believed: a fused node may keep the name of one of several
steps.
"""
_NEAR = 1e-2
"""Up to this distance operators of any kind may have made the two values; beyond it only operators
of one kind.
"""


def corresponding(reference: ValueGraph, target: ValueGraph) -> dict[int, int]:
    """Values of the reference -> values of the target that hold the same elements in runs without a
    fault.
    """
    pairing = _Pairing(reference, target)
    pairing.by_ends()
    pairing.by_figures()
    pairing.by_names(equal_names(reference, target), _NAMED)
    pairing.by_modules()
    pairing.by_structure()
    for far in _FAR:
        while pairing.by_nearness(far):
            pairing.by_structure()
    pairing.drop_what_makes_the_same()
    return pairing.partner


def corresponding_coarsely(
    reference: ValueGraph, target: ValueGraph, named: Mapping[int, int]
) -> dict[int, int]:
    """As `corresponding`, where one graph is quantised to few bits. named: values of equal name,
    reference -> target.
    """
    pairing = _Pairing(reference, target, is_coarse=True)
    pairing.by_ends()
    pairing.by_names(named)
    pairing.by_structure()
    for far in _FAR:
        while pairing.by_nearness(far):
            pairing.by_structure()
    return pairing.partner


def computed_again(graph: ValueGraph, partner: Mapping[int, int]) -> dict[int, int]:
    """By value without a partner, that of a value with the same elements, made by an operator of
    the same kind: the other run's optimiser lets one node do what two do here.
    """

    def made(value: int) -> tuple[str, tuple[int, ...], str]:
        record = graph.record(value)
        kind = kind_of(graph.makers[value]) if value in graph.makers else ""
        return (record.hash or "" if _varies(record) else ""), tuple(record.shape), kind

    first = {made(value): other for value, other in reversed(list(partner.items()))}
    alike = {v: first.get(made(v)) for v in graph.values if made(v)[0] and v not in partner}
    return {value: other for value, other in alike.items() if other is not None}


def equal_names(
    reference: ValueGraph, target: ValueGraph, plain: Callable[[str], str] = str
) -> dict[int, int]:
    """Values of the reference -> values of the target of the same name, where the name is unique in
    each. plain: a name without what a tool appended to it.
    """
    names = target.names(plain)
    return {v: names[name] for name, v in reference.names(plain).items() if name in names}


class _Pairing:
    """The pairs of values while they are being found. is_coarse: whether one run is so coarse that
    its elements tell little of the other's.
    """

    def __init__(
        self, reference: ValueGraph, target: ValueGraph, *, is_coarse: bool = False
    ) -> None:
        self.reference, self.target, self._is_coarse = reference, target, is_coarse
        self.partner: dict[int, int] = {}
        # Values that a model returns only after a move such as a transpose.
        self._ends, self._taken = _moved_ends(reference), _moved_ends(target)

    def _pair(self, value: int, other: int) -> None:
        self.partner[value] = other
        self._taken.add(other)

    def _free(self, values: Iterable[int]) -> list[int]:
        return [v for v in values if v not in self._taken]

    def _is_open(self, value: int) -> bool:
        return value not in self.partner and value not in self._ends

    def by_ends(self) -> None:
        """Pair the inputs and outputs of the models, by name or else by position."""
        for kind in ("input", "output"):
            refs = self.reference.root.slots(kind)
            others = {ref.slot: ref for ref in self.target.root.slots(kind)}
            by_name = [(ref, others[ref.slot]) for ref in refs if ref.slot in others]
            if len(by_name) != len(refs):
                by_name = list(zip(refs, others.values()))
            for ref, other in by_name:
                a, b = self.reference.record(ref.record), self.target.record(other.record)
                if a.count == b.count and self._is_open(a.id) and b.id not in self._taken:
                    self._pair(a.id, b.id)

    def by_names(self, named: Mapping[int, int], far: float = math.inf) -> None:
        """Pair values of equal name whose statistics differ by at most `far`."""
        for value, other in named.items():
            if self._is_open(value) and other not in self._taken and self._fit(value, other):
                a, b = self.reference.record(value), self.target.record(other)
                if math.isinf(far) or _alike(a, b, far):
                    self._pair(value, other)

    def by_figures(self) -> None:
        """Pair values that hold the same elements in some order, up to rounding. Among several,
        prefer one in the same order, then one made from paired values, then one made by an operator
        of the same kind, then the first.
        """
        by_count = _by_count(self.target)
        own = _by_count(self.reference)
        for value in filter(self._is_open, self.reference.values):
            record = self.reference.record(value)
            if not self.reference.is_floating(value) or not _varies(record):
                continue  # constants: many tensors have the same elements
            alike = [
                other
                for other in self._free(by_count[record.count])
                if _alike(record, self.target.record(other))
            ]
            if not alike:
                continue
            best = max(alike, key=lambda other: self._agreement(value, other))
            if not self._is_another_nearer(value, best, own[record.count]):
                self._pair(value, best)

    def _is_another_nearer(self, value: int, other: int, values: Sequence[int]) -> bool:
        """Whether another value of the reference is clearly nearer to the target's value. Then
        `value` comes a small step earlier, for example before a small bias is added.
        """
        record = self.target.record(other)
        far = _distance(self.reference.record(value), record)
        return any(
            _NEARER * _distance(self.reference.record(v), record) + _ROUNDING < far
            for v in values
            if v != value and self._is_open(v)
        )

    def _agreement(self, value: int, other: int) -> tuple[bool, bool, bool]:
        call, partner = self.reference.makers[value], self.target.makers[other]
        a, b = self.reference.record(value), self.target.record(other)
        is_equal = bool(a.hash) and (a.hash, a.shape) == (b.hash, b.shape)
        return is_equal, self._has_partners(call, partner), kind_of(call) == kind_of(partner)

    def _has_partners(self, call: Call, partner: Call) -> bool:
        """Whether all inputs of one call are paired with the inputs of the other."""
        sources = Counter(self.reference.source(r.record) for r in self.reference.inputs(call))
        others = Counter(self.target.source(r.record) for r in self.target.inputs(partner))
        if not sources or not all(source in self.partner for source in sources):
            return False
        return Counter({self.partner[s]: n for s, n in sources.items()}) == others

    def by_modules(self) -> None:
        """Pair the outputs of torch modules, by the module paths that an exporter wrote into its
        nodes.
        """
        others = module_values(self.target)
        for path, module in module_values(self.reference).items():
            other = others.get(path)
            if other is None or not module.may_be(other):
                continue
            for value, partner in self._facing(module.values, other.values):
                if self._is_open(value) and partner not in self._taken:
                    self._pair(value, partner)

    def _facing(self, values: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of the outputs of one module in two graphs, whose order may differ; [] where the
        partners are ambiguous.
        """
        if len(values) == 1:
            return [(values[0], others[0])] if self._fit(values[0], others[0]) else []
        pairs = []
        for value in values:
            record = self.reference.record(value)
            far = [_distance(record, self.target.record(other)) for other in others]
            nearest = min(far)
            if math.isinf(nearest) or far.count(nearest) > 1:
                return []
            pairs.append((value, others[far.index(nearest)]))
        return pairs if len({other for _, other in pairs}) == len(others) else []

    def by_structure(self) -> None:
        """Pair values by their parameters and by the values they are computed from, until no more
        pairs are found.
        """
        while self.by_parameters() + self.by_inputs():
            pass

    def by_nearness(self, far: float) -> int:
        """Pair values whose statistics differ by at most `far`, each the only candidate of the
        other, made by operators whose paired inputs agree. Returns the number of pairs.
        """
        free = self._free(self.target.values)
        near: dict[int, list[int]] = {}
        for value in filter(self._is_open, self.reference.values):
            near[value] = [other for other in free if self._may_be(value, other, far)]
        wanted = Counter(other for others in near.values() for other in others)
        count = 0
        for value, others in near.items():
            if len(others) == 1 and wanted[others[0]] == 1:
                self._pair(value, others[0])
                count += 1
        return count

    def drop_what_makes_the_same(self) -> None:
        """Remove pairs whose elements differ although values computed from them agree: one of the
        two is a step further in the computation than the other, not wrong.
        """
        unlike = {
            v
            for v, other in self.partner.items()
            if v in self.reference.makers and not self._are_alike(v, other)
        }
        for value in reversed(self.reference.values):
            if value in self.partner and value not in unlike:
                for read in self.reference.behind([value], self.partner.keys()).reads:
                    if read in unlike:
                        del self.partner[read]
                        unlike.discard(read)

    def _are_alike(self, value: int, other: int) -> bool:
        return _alike(self.reference.record(value), self.target.record(other))

    def _may_be(self, value: int, other: int, far: float) -> bool:
        a, b = self.reference.record(value), self.target.record(other)
        call, partner = self.reference.makers[value], self.target.makers[other]
        if a.count != b.count or not _alike(a, b, far):
            return False
        if kind_of(call) != kind_of(partner) and far > _NEAR:
            return False
        if self._is_coarse and not self._read_as_many(call, partner):
            return False
        sources = {self.reference.source(r.record) for r in self.reference.inputs(call)}
        others = {self.target.source(r.record) for r in self.target.inputs(partner)}
        known = {self.partner[source] for source in sources if source in self.partner}
        if not known and far > _NEAR:
            return False
        return known == {other for other in others if other in self._taken}

    def _read_as_many(self, call: Call, partner: Call) -> bool:
        """Whether the parameters of two calls have the same element counts."""
        counts = (r.count for r in self.reference.parameters(call))
        others = (r.count for r in self.target.parameters(partner))
        return Counter(counts) == Counter(others)

    def by_parameters(self) -> int:
        """Pair values made by the last calls that read the same parameters. Returns the number of
        pairs.
        """
        readers, others = _readers(self.reference), _readers(self.target)
        count = 0
        for value in filter(self._is_open, self.reference.values):
            call = self.reference.makers[value]
            across = _readers_of(call, self.reference, others)
            partner = max(across, key=lambda reader: reader.order, default=None)
            if partner is None or has_activation(call) != has_activation(partner):
                continue
            if self._is_composite(call) and not self._may_end_in(value, partner):
                continue
            back = max(
                _readers_of(partner, self.target, readers), key=lambda r: r.order, default=None
            )
            free = self._free(ref.record for ref in partner.slots("output"))
            made = [ref.record for ref in call.slots("output")]
            if back is call and len(free) == len(made) and self._fits(value, free, made):
                self._pair(value, free[made.index(value)])
                count += 1
        return count

    def _is_composite(self, call: Call) -> bool:
        """Whether one call, such as a whole block, uses several matrices."""
        return sum(_is_matrix(record) for record in self.reference.parameters(call)) > 1

    def _may_end_in(self, value: int, partner: Call) -> bool:
        """Whether a composite call may end at `partner`. The last call of the target that reads one
        of its parameters need not be its last: a sum may follow, also inside an operator of the
        next module. So one output must be near.
        """
        record = self.reference.record(value)
        made = (self.target.record(ref.record) for ref in partner.slots("output"))
        return any(_alike(record, other, _NEAR) for other in made)

    def _fits(self, value: int, free: list[int], made: list[int]) -> bool:
        other = free[made.index(value)]
        return self.reference.record(value).count == self.target.record(other).count

    def by_inputs(self) -> int:
        """Pair values that operators of the same kind make from paired values; several such values
        are paired in order. Returns the number of pairs.
        """
        candidates: defaultdict[Form, list[int]] = defaultdict(list)
        for other in self._free(self.target.values):
            for form in self.target.forms(other):
                if form.sources:
                    candidates[form._replace(sources=tuple(sorted(form.sources)))].append(other)
        wanted: defaultdict[Form, list[int]] = defaultdict(list)
        for value in filter(self._is_open, self.reference.values):
            for form in self.reference.forms(value):
                if form.sources and all(source in self.partner for source in form.sources):
                    partners = sorted(self.partner[source] for source in form.sources)
                    wanted[form._replace(sources=tuple(partners))].append(value)
        count = 0
        for key, values in wanted.items():
            found = candidates.get(key, [])
            if len(found) != len(values):
                continue
            for value, other in zip(values, found):
                is_free = self._is_open(value) and other not in self._taken
                if is_free and self._fit(value, other) and not self._is_short(value, other):
                    self._pair(value, other)
                    count += 1
        return count

    def _is_short(self, value: int, other: int) -> bool:
        """Whether a value computed from the target's value is less than half as far from the
        reference's as that value itself. Then the target's value lacks a step, such as a scale that
        the reference folded into the weight.
        """
        record = self.reference.record(value)
        far = _distance(record, self.target.record(other))
        results = self.target.made_of(other)
        return any(2.0 * _distance(record, self.target.record(v)) < far for v in results)

    def _fit(self, value: int, other: int) -> bool:
        return self.reference.record(value).count == self.target.record(other).count


def _by_count(graph: ValueGraph) -> defaultdict[int, list[int]]:
    """Values by their number of elements."""
    out: defaultdict[int, list[int]] = defaultdict(list)
    for value in graph.values:
        out[graph.record(value).count].append(value)
    return out


def _moved_ends(graph: ValueGraph) -> set[int]:
    """The values that a model only moves (a transpose, say) before it returns them."""
    makers = (graph.makers.get(ref.record) for ref in graph.root.slots("output"))
    moves = [call for call in makers if call is not None and is_move(call)]
    # A runtime may not record what the move read.
    return {graph.source(ref.record) for call in moves for ref in call.slots("input")[:1]}


def _readers(graph: ValueGraph) -> dict[int, list[Call]]:
    """The calls that read each parameter, by the checksum of its elements in any order."""
    readers: defaultdict[int, list[Call]] = defaultdict(list)
    for call in graph.calls:
        for record in graph.parameters(call):
            if record.sketch is not None:
                readers[record.sketch.checksum].append(call)
    return readers


def _readers_of(call: Call, graph: ValueGraph, across: dict[int, list[Call]]) -> list[Call]:
    """The calls of the other graph that read the parameters of this call; [] where a parameter has
    several readers.
    """
    candidates: list[Call] = []
    for record in graph.parameters(call):
        readers = across.get(record.sketch.checksum, []) if record.sketch is not None else []
        if len(readers) > 1:
            return []
        candidates += readers
    return candidates


def _is_matrix(record: Record) -> bool:
    return sum(extent > 1 for extent in record.shape) > 1


def _varies(record: Record) -> bool:
    """Whether a tensor holds more than one distinct number."""
    return record.statistics is not None and bool(record.statistics.std)


def _distance(a: Record, b: Record) -> float:
    """Sum of the relative differences between the sketches of two values (sums of |x|, |x|^4 and
    x^3); 0 if equal, inf where a sketch is missing.
    """
    if a.sketch is None or b.sketch is None or a.count != b.count:
        return math.inf
    sums = (a.sketch.abs_sum, b.sketch.abs_sum), (a.sketch.fourth_sum, b.sketch.fourth_sum)
    cubes = a.sketch.cube_sum, b.sketch.cube_sum
    if any(x is None for pair in (*sums, cubes) for x in pair):
        return math.inf
    return sum(
        abs(x - y) / (max(abs(x), abs(y)) or 1.0)
        for x, y in (*sums, cubes)
        if x is not None and y is not None
    )


def _alike(a: Record, b: Record, far: float = _CLOSE) -> bool:
    """Whether two values may hold the same elements up to order and rounding. far: largest relative
    difference of their sketches.
    """
    if a.sketch is None or b.sketch is None or a.count < 2:
        return False
    if a.sketch.checksum == b.sketch.checksum and a.dtype == b.dtype:
        return True
    sums = (a.sketch.abs_sum, a.sketch.fourth_sum), (b.sketch.abs_sum, b.sketch.fourth_sum)
    for x, y in zip(*sums):
        if x is None or y is None or not abs(x - y) <= far * max(abs(x), abs(y)):
            return False
    cubes = a.sketch.cube_sum, b.sketch.cube_sum
    if cubes[0] is None or cubes[1] is None or sums[0][1] is None:
        return False
    # upper bound of the sum of cubes, by Hölder's inequality
    largest = float(sums[0][1] ** 0.75 * a.count**0.25)
    return abs(cubes[0] - cubes[1]) <= far * largest
