"""Tensors of paired calls that hold the same in other axes: flattened, transposed, padded, heads or channels in another order.

Shapes propose, data confirm. Parameters come first: equal elements after a change of layout are proof, and the order of a weight's
rows is that of its bias and its outputs. Siblings of one starred name (`layers.*.q_proj`) share one layout, so that a faulty tensor
among them is not explained away. A change of order is believed only where what is computed from it agrees again: weights in a wrong
order are a fault, weights in another order are not.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from whence import dtypes
from whence.align import channels
from whence.align import expressions as ex
from whence.align.derived import Making, text
from whence.align.names import starred
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Run
from whence.results import CallPair, Plan, SlotPair

T = TypeVar("T")
X = ex.Name("x")
AGREES = 0.3  # relative 2-norm up to which two tensors may be one: 8-bit quantised runs reach 0.07, unrelated tensors have 1.4
CLEARLY = 0.3  # the best candidate has at most this share of the second's distance
_AS_NEAR = 10.0  # times as far as a turned tensor may be what is made of it, or twice as far as such a tensor may be at all
_NEAR = 0.05
_READ = 3  # members of a family that are read
_SAMPLE = 1 << 16
_SENTINEL = 1e30  # masks are filled with less than minus this
_MOST_AXES = 6

Shape = tuple[int, ...]
Face = tuple[int, int]  # a record of the reference, and one of the target


# ---- what shapes propose


def ways(have: Shape, want: Shape) -> list[ex.Node]:
    """Expressions over x that make a tensor of shape `want` from one of shape `have`, the plainest first. No way: []."""
    if have == want:
        return [X]
    if math.prod(have) == math.prod(want):
        return _regrouped(X, have, want)
    out: list[ex.Node] = []
    for axis, extent in enumerate(have):
        for n in dict.fromkeys(want):
            if math.prod(have) // max(extent, 1) * n != math.prod(want) or n == extent:
                continue
            shape = (*have[:axis], n, *have[axis + 1 :])
            last = axis == len(have) - 1
            if n < extent:
                kept: ex.Node = ex.Cut(X, (..., slice(0, n)) if last and axis else (*[slice(None)] * axis, slice(0, n)))
                out += _regrouped(kept, shape, want) if shape != want else [kept]
            else:
                for value in (0, "lowest"):
                    padded = ex.Pad(X, -1 if last else axis, n, value)
                    out += _regrouped(padded, shape, want) if shape != want else [padded]
    return out


def turned(shape: Shape) -> list[ex.Node]:
    """Expressions over x that keep this shape and change the order: equal axes exchanged, channels of heads interleaved."""
    out: list[ex.Node] = []
    real = [axis for axis, n in enumerate(shape) if n > 1]
    if len(real) <= _MOST_AXES:
        for order in itertools.permutations(real):
            moved = list(range(len(shape)))
            for at, axis in zip(real, order, strict=True):
                moved[at] = axis
            if order != tuple(real) and all(shape[a] == shape[b] for a, b in zip(range(len(shape)), moved, strict=True)):
                out.append(_moved(X, shape, moved))
    return out


def _regrouped(of: ex.Node, have: Shape, want: Shape) -> list[ex.Node]:
    """Axes moved, merged, split; those of extent one added and dropped. Both shapes have one count."""
    left, right = [n for n in have if n != 1], [n for n in want if n != 1]
    if max(len(left), len(right)) > _MOST_AXES or not math.prod(have):
        return []
    out: list[ex.Node] = []
    atoms = _atoms(left, right)
    if atoms is not None:
        out.append(_pattern(of, have, want, atoms, list(range(len(atoms)))))
    fine = left if len(left) >= len(right) else right
    for order in itertools.permutations(range(len(fine))):
        if list(order) == sorted(order):
            continue
        if fine is left and _groups([left[i] for i in order], right) is not None:
            out.append(_pattern(of, have, want, left, list(order)))
        elif fine is not left and _groups([right[i] for i in order], left) is not None:
            # order: of the target's atoms, as axes of `want`.
            out.append(_pattern(of, have, want, [right[i] for i in order], [order.index(i) for i in range(len(order))]))
    return list({str(node): node for node in out}.values())


def _atoms(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Axes that both shapes are merged from without a change of order, None when they are not."""
    ends = sorted({*itertools.accumulate(left, _times), *itertools.accumulate(right, _times)})
    atoms, before = [], 1
    for end in ends:
        if end % before:
            return None
        atoms.append(end // before)
        before = end
    return atoms


def _times(a: int, b: int) -> int:
    return a * b


def _groups(atoms: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """Which atoms each axis of `shape` is merged from, in order."""
    out: list[list[int]] = []
    at = 0
    for extent in shape:
        group: list[int] = []
        size = 1
        while size < extent and at < len(atoms):
            size *= atoms[at]
            group.append(at)
            at += 1
        if size != extent:
            return None
        out.append(group)
    return out if at == len(atoms) else None


def _pattern(of: ex.Node, have: Shape, want: Shape, atoms: Sequence[int], order: list[int]) -> ex.Node:
    """atoms: axes as `have` is merged from them; order: which of them come one after another in `want`."""
    if len(have) == 2 and want == have[::-1] and order == [1, 0]:
        return ex.Reverse(of)
    names = [chr(ord("a") + i) for i in range(len(atoms))]

    def side(shape: Shape, order: Sequence[int]) -> tuple[str, list[list[int]]]:
        groups = _groups([atoms[i] for i in order], [n for n in shape if n != 1]) or []
        there = iter(groups)
        words = []
        for n in shape:
            group = [] if n == 1 else [names[order[i]] for i in next(there)]
            words.append("1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})")
        return " ".join(words), groups

    left, groups = side(have, list(range(len(atoms))))
    lengths = tuple((names[i], atoms[i]) for group in groups for i in group[:-1])
    return ex.Rearrange(of, f"{left} -> {side(want, order)[0]}", lengths)


def _moved(of: ex.Node, shape: Shape, moved: Sequence[int]) -> ex.Node:
    if len(shape) == 2:
        return ex.Reverse(of)
    names = [chr(ord("a") + i) for i in range(len(shape))]
    return ex.Rearrange(of, f"{' '.join(names)} -> {' '.join(names[i] for i in moved)}")


# ---- what data say


def distance(reference: Array, made: Array) -> float:
    """Relative 2-norm of the difference over what is finite in both, or the share of integers that differ; inf where shapes clash."""
    if reference.shape != made.shape:
        return math.inf
    if not reference.size:
        return 0.0
    if reference.dtype.kind in "iub" or made.dtype.kind in "iub":
        return float(np.mean(reference != made))
    a, b = (_widened(x) for x in (reference, made))
    with np.errstate(all="ignore"):
        known = [np.isfinite(x) & (np.abs(x) < _SENTINEL) for x in (a, b)]
        fine = known[0] & known[1]
        size = math.sqrt(float((np.abs(a[fine]) ** 2).sum()))
        apart = math.sqrt(float((np.abs(b[fine] - a[fine]) ** 2).sum()))
    if 2 * np.count_nonzero(fine) < fine.size or 100 * np.count_nonzero(known[0] != known[1]) > fine.size:
        return math.inf
    return apart / size if size else (0.0 if not apart else math.inf)


def _widened(x: Array) -> np.ndarray[Any, np.dtype[Any]]:
    return x.astype(np.complex128 if dtypes.of(x).kind == "complex" else np.float64)


def resembles(reference: Array, target: Array) -> bool:
    """Are these, element by element, one tensor but for an error? A sample is looked at."""
    if reference.shape != target.shape:
        return False
    step = max(reference.size // _SAMPLE, 1)
    return distance(reference.reshape(-1)[::step], target.reshape(-1)[::step]) < AGREES


def clear_best(distances: Sequence[float]) -> int | None:
    """The candidate that agrees and is much nearer than every other one that makes another tensor; None when there is none."""
    best = min(range(len(distances)), key=lambda i: distances[i])
    nearest = distances[best]
    others = [d for d in distances if not math.isclose(d, nearest, rel_tol=1e-6, abs_tol=1e-12)]
    return best if nearest < AGREES and nearest <= CLEARLY * min(others, default=math.inf) else None


@dataclass(frozen=True, slots=True)
class Order:
    """How a parameter of the target lies. kind: "axes" (moved as a whole), "rows" (of its outputs), "columns" (of its inputs).

    places: of the rows or columns. outputs: the axis of the reference's weight that its outputs lie along.
    """

    kind: str
    node: ex.Node
    places: tuple[int, ...] = ()


def lies(reference: Array, target: Array) -> Order | None:
    """How a parameter of the target must be laid to be the reference's, None where nothing is found. Raises nothing."""
    if reference.shape == target.shape and resembles(reference, target):
        return Order("axes", X)
    for node in (*ways(target.shape, reference.shape), *(turned(target.shape) if reference.shape == target.shape else ())):
        if node is not X and resembles(reference, _applied(node, target)):
            return Order("axes", node)
    if reference.ndim < 2 or target.ndim != reference.ndim:
        return None
    for base, turn in ((X, False), (ex.Reverse(X), True)):
        source = target.T if turn else target
        if source.shape != reference.shape or (turn and target.ndim != 2):
            continue
        for kind, axis in (("rows", 0), ("columns", 1)):
            a, b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (reference, source))
            found = channels.located(a, b)
            order = channels.completed(found, len(b)) if found is not None else None
            if order is not None and sorted(order.tolist()) == list(range(len(order))):
                return Order(kind, channels.taken(base, source.shape, axis, order), tuple(order.tolist()))
    return None


def _applied(node: ex.Node, array: Array) -> Array:
    made: Array = node.apply({"x": [array]})
    return made


# ---- the stage


def laid_out(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Give the target's tensors the axes of those they face. Elements are read of few of every family of siblings."""
    return _Layouts(reference, target, plan).done()


class _Layouts:
    def __init__(self, reference: Run, target: Run, plan: Plan) -> None:
        self.reference, self.target, self.plan = reference, target, plan
        self.pairs = list(plan.pairs)
        self.decided: dict[Face, tuple[ex.Node, str]] = {}
        self._readers: dict[int, list[int]] | None = None
        self._by_parent: dict[int, list[int]] | None = None
        self._at = {pair.reference: at for at, pair in enumerate(self.pairs)}
        self._modules: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for at, pair in enumerate(self.pairs):
            self._modules[self._module(pair)].append(at)
        self._equal: Counter[tuple[str, str]] | None = None
        self._channel_orders: dict[str, dict[tuple[int, ...], None]] = {}  # found in weights, by the module they are in

    def done(self) -> tuple[Run, Plan]:
        self._left_over()
        self._parameters()
        self._activations()
        if not self.decided and self.pairs == list(self.plan.pairs):
            return self.target, self.plan
        making = Making(self.target)
        made: dict[Face, int] = {}
        for face, (node, why) in self.decided.items():
            try:
                made[face] = making.add(node, {"x": [face[1]]}, why)
            except ex.Unfit:
                continue
        target = making.done()
        texts = {record: text(target, record) for record in made.values()}
        pairs = []
        for pair in self.pairs:
            slots = tuple(self._with(slot, made, texts) for slot in pair.slots)
            pairs.append(msgspec.structs.replace(pair, slots=slots) if slots != pair.slots else pair)
        return target, msgspec.structs.replace(self.plan, pairs=tuple(pairs), notes=(*self.plan.notes, *self._told()))

    def _told(self) -> list[str]:
        """How many tensors were laid otherwise, and what of the target's parameters is left out, in sentences."""
        counts = Counter(_brief(str(node)) for node, _ in self.decided.values())
        shown = ", ".join(f"{how} ({count})" for how, count in counts.most_common(3)) + (", ..." if len(counts) > 3 else "")
        total = sum(counts.values())
        out: dict[str, None] = {f"{total} tensors of the target were brought to the reference's axes: {shown}": None} if counts else {}
        for pair in self.pairs:
            for slot in pair.slots:
                face = slot.reference_record, slot.target_record
                if slot.reference_slot.startswith("param") and face in self.decided:
                    a, b = self._records(face)
                    if a.count < b.count:
                        name = f"{self.target.calls[pair.target].scope}.{slot.target_slot.removeprefix('param.')}"
                        out[f"{name} of the target is {list(b.shape)}, of the reference {list(a.shape)}: the rest was left out"] = None
        return list(out)

    def _with(self, slot: SlotPair, made: dict[Face, int], texts: dict[int, str]) -> SlotPair:
        found = made.get((slot.reference_record, slot.target_record))
        return slot if found is None else msgspec.structs.replace(slot, target_record=found, dims=texts[found])

    def _arrays(self, face: Face) -> tuple[Array, Array] | None:
        try:
            return self.reference.array(face[0]), self.target.array(face[1])
        except ElementsMissing:
            return None

    def _records(self, face: Face) -> tuple[Record, Record]:
        return self.reference.records[face[0]], self.target.records[face[1]]

    def _calls(self, pair: CallPair) -> tuple[Call, Call]:
        return self.reference.calls[pair.reference], self.target.calls[pair.target]

    def _families(self, kinds: tuple[str, ...]) -> Iterator[dict[Face, tuple[int, SlotPair]]]:
        """Facing tensors of siblings with the same names and shapes: each face once, with where it was first met."""
        out: defaultdict[tuple[object, ...], dict[Face, tuple[int, SlotPair]]] = defaultdict(dict)
        for index, pair in enumerate(self.pairs):
            names: tuple[str, str] | None = None
            for slot in pair.slots:
                if not slot.reference_slot.startswith(kinds):
                    continue
                face = slot.reference_record, slot.target_record
                a, b = self._records(face)
                if a.hash and a.hash == b.hash and a.shape == b.shape:
                    continue
                if names is None:
                    call, other = self._calls(pair)
                    names = starred(call.scope), starred(other.scope)
                key = (*names, slot.reference_slot, slot.target_slot, a.shape, b.shape, a.dtype, b.dtype)
                out[key].setdefault(face, (index, slot))
        yield from out.values()

    # ---- slots without a partner, since shapes differ

    def _left_over(self) -> None:
        """Pair slots that are left on both sides where one layout fits and the data agree."""
        known: dict[tuple[object, ...], bool] = {}
        for index, pair in enumerate(self.pairs):
            if not pair.only_reference or not pair.only_target:
                continue
            call, other = self._calls(pair)
            mine, theirs = ({r.slot: r.record for r in c.refs} for c in (call, other))
            slots, free = list(pair.slots), list(pair.only_target)
            for name in pair.only_reference:
                kind = name.partition(".")[0]
                fits = [
                    f for f in free
                    if f.partition(".")[0] == kind and f in theirs and name in mine and self._fit((mine[name], theirs[f]))
                ]  # fmt: skip
                if len(fits) != 1:
                    continue
                face = mine[name], theirs[fits[0]]
                shapes = tuple(r.shape for r in self._records(face))
                key = (starred(call.scope), starred(other.scope), name, fits[0], shapes)
                if not known.get(key):
                    known[key] = self._agree(face)
                if known[key]:
                    slots.append(SlotPair(name, fits[0], *face))
                    free.remove(fits[0])
            if len(slots) != len(pair.slots):
                only = tuple(n for n in pair.only_reference if n not in {s.reference_slot for s in slots})
                self.pairs[index] = msgspec.structs.replace(pair, slots=tuple(slots), only_reference=only, only_target=tuple(free))

    def _fit(self, face: Face) -> bool:
        a, b = self._records(face)
        return dtypes.named(a.dtype).is_floating == dtypes.named(b.dtype).is_floating and bool(ways(b.shape, a.shape))

    def _agree(self, face: Face) -> bool:
        a, b = self._records(face)
        arrays = self._arrays(face)
        if arrays is None:
            return False
        return any(distance(arrays[0], _applied(node, arrays[1])) < AGREES for node in ways(b.shape, a.shape))

    # ---- parameters

    def _parameters(self) -> None:
        found = [(orders, family) for family in self._families(("param",)) if (orders := self._orders_of(family))]
        # The order of inputs is told by what the call makes of them; with these in place it shows what the order of outputs leads to.
        found.sort(key=lambda item: next(iter(item[0].values())).kind == "rows")
        for orders, family in found:
            if self._legitimate(orders, family):
                self._order(orders, family)

    def _orders_of(self, family: dict[Face, tuple[int, SlotPair]]) -> dict[Face, Order]:
        """How the parameters of one family lie, {} where they lie as the reference's or it cannot be told."""
        faces = list(family)
        suspects = [face for face in faces if self._suspect(face)]
        # Weights under one name that differ in nothing but a few are a fault in these few.
        if 2 * len(suspects) <= len(faces) + self._identical_siblings(family):
            return {}
        read = spread(suspects, _READ)
        orders = [self._lies(face) for face in read]
        if orders[0] is not None and orders[0].node is X:
            return {}
        votes = Counter((o.kind, str(o.node)) for o in orders if o is not None)
        if not votes:
            self._by_shape(faces)
            return {}
        (kind, node), count = votes.most_common(1)[0]
        if 2 * count > len(read):
            shared = next(o for o in orders if o is not None and (o.kind, str(o.node)) == (kind, node))
            return dict.fromkeys(faces, shared) if shared.node is not X else {}
        # Every sibling has an order of its own.
        return {face: order for face in faces if (order := self._lies(face)) is not None and order.node is not X}

    def _suspect(self, face: Face) -> bool:
        """May these parameters hold the same elements in another order?"""
        a, b = self._records(face)
        if a.shape != b.shape:
            return True
        if a.count < 4 or max(a.shape, default=0) == a.count:
            return False  # a vector follows its weight
        if a.dtype == b.dtype and a.sketch is not None and b.sketch is not None:
            return a.sketch.checksum == b.sketch.checksum
        norms = [r.statistics.norm for r in (a, b) if r.statistics is not None and r.statistics.norm]
        return len(norms) == 2 and math.isclose(*norms, rel_tol=0.02)

    def _identical_siblings(self, family: dict[Face, tuple[int, SlotPair]]) -> int:
        """How many parameters of the same starred name are equal bit by bit."""
        index, slot = next(iter(family.values()))
        name, kind = starred(self._calls(self.pairs[index])[0].scope), slot.reference_slot
        if self._equal is None:
            self._equal = Counter()
            seen: set[Face] = set()
            for pair in self.pairs:
                for s in pair.slots:
                    face = s.reference_record, s.target_record
                    if s.reference_slot.startswith("param") and face not in seen:
                        seen.add(face)
                        a, b = self._records(face)
                        if a.hash and a.hash == b.hash and a.shape == b.shape:
                            self._equal[starred(self.reference.calls[pair.reference].scope), s.reference_slot] += 1
        return self._equal[name, kind]

    def _lies(self, face: Face) -> Order | None:
        arrays = self._arrays(face)
        return lies(*arrays) if arrays is not None else None

    def _by_shape(self, faces: Iterable[Face]) -> None:
        """Where data say nothing, a layout that is the only one possible, and hides no element."""
        for face in faces:
            a, b = self._records(face)
            found = ways(b.shape, a.shape)
            if a.shape != b.shape and len(found) == 1 and a.count == b.count:
                self.decided[face] = found[0], "the only way the shapes allow"

    def _legitimate(self, found: dict[Face, Order], family: dict[Face, tuple[int, SlotPair]]) -> bool:
        """Does what is computed with these parameters agree, so that the order is a choice and not a fault?"""
        for asked, (face, order) in enumerate(found.items()):
            a, b = self._records(face)
            index, _ = family[face]
            call, other = self._calls(self.pairs[index])
            if order.kind == "axes" and (a.shape != b.shape or _keeps(order.node, b.shape) or call.op_type != other.op_type):
                return True
            if asked >= _READ:
                break
            if self._outputs_agree(index) if order.kind != "rows" else self._follows(index):
                return True
        return False

    def _order(self, found: dict[Face, Order], family: dict[Face, tuple[int, SlotPair]]) -> None:
        for face, order in found.items():
            index, slot = family[face]
            what = "elements are equal after it" if order.kind == "axes" else f"{order.kind} found by their elements"
            self.decided[face] = order.node, f"{slot.reference_slot.removeprefix('param.')}: {what}"
            if order.kind == "axes":
                continue
            places = np.array(order.places)
            scope = self.reference.calls[self.pairs[index].reference].scope
            self._channel_orders.setdefault(scope.rpartition(".")[0], {})[order.places] = None
            for at in self._modules[self._module(self.pairs[index])]:
                for s in self.pairs[at].slots:
                    kind = s.reference_slot.partition(".")[0]
                    own = (s.reference_record, s.target_record)
                    a, b = self._records(own)
                    if kind == "param" and order.kind == "rows" and a.shape == b.shape == (len(places),):
                        self.decided[own] = channels.taken(X, b.shape, 0, places), "as the rows of the weight"
                    elif kind == ("output" if order.kind == "rows" else "input") and b.shape:
                        self._channels(own, places, axis=-1 if len(self._records(face)[0].shape) == 2 else 1)

    def _channels(self, face: Face, places: channels.Order, axis: int) -> None:
        a, b = self._records(face)
        if len(b.shape) < 2 - (axis == -1) or b.shape[axis] != len(places):
            return
        node = channels.taken(X, b.shape, axis, places)
        if a.shape != b.shape:
            grouped = _regrouped(node, b.shape, a.shape) if a.count == b.count else []
            if not grouped:
                return
            node = grouped[0]
        self.decided[face] = node, "as the rows of the weight" if axis else ""

    def _module(self, pair: CallPair) -> tuple[str, str, str, str]:
        call, other = self._calls(pair)
        return call.root, call.scope, other.root, other.scope

    # ---- does what follows agree?

    def _outputs_agree(self, index: int) -> bool:
        outputs = [s for s in self.pairs[index].slots if s.reference_slot.startswith("output")]
        return any(self._agree((s.reference_record, s.target_record)) for s in outputs)

    def _follows(self, index: int) -> bool:
        """Does a tensor agree that was not there before this call: what a later sibling reads, or the parent returns?

        Not what the module itself is given again: what a recurrent cell reads at every step need not have been made with it.
        """
        if self._by_parent is None:
            self._by_parent = {}
            for at, pair in enumerate(self.pairs):
                self._by_parent.setdefault(self.reference.calls[pair.reference].parent, []).append(at)
        call = self.reference.calls[self.pairs[index].reference]
        siblings = sorted(self._by_parent.get(call.parent, ()), key=lambda i: self.reference.calls[self.pairs[i].reference].order)
        before: set[int] = set()
        earlier: set[int] = set()
        made: set[Face] = set()
        for at in siblings:
            pair = self.pairs[at]
            later = self.reference.calls[pair.reference].order > call.order
            other = self.reference.calls[pair.reference].scope != call.scope
            for slot in pair.slots:
                if slot.reference_slot.startswith("input") and later and other and slot.reference_record not in before:
                    made.add((slot.reference_record, slot.target_record))
                if not slot.reference_slot.startswith("param"):
                    before.add(slot.reference_record)
                    if not later:
                        earlier.add(slot.reference_record)
        parent = self._at.get(call.parent)
        if parent is not None:
            outputs = (s for s in self.pairs[parent].slots if s.reference_slot.startswith("output") and s.reference_record not in earlier)
            made.update((s.reference_record, s.target_record) for s in outputs)
        return any(self._resemble(face) for face in made if not self._constant(face[0]))

    def _constant(self, record: int) -> bool:
        """Has it one value only? A first hidden state agrees with anything."""
        known = self.reference.records[record].statistics
        return known is not None and known.min == known.max

    def _resemble(self, face: Face) -> bool:
        arrays = self._arrays(face)
        if arrays is not None and face in self.decided:
            return distance(arrays[0], _applied(self.decided[face][0], arrays[1])) < AGREES
        return arrays is not None and (resembles(*arrays) or self._agree(face))

    # ---- activations

    def _activations(self) -> None:
        for family in self._families(("input", "output", "mutated", "grad")):
            faces = [face for face in family if face not in self.decided]
            if not faces:
                continue
            a, b = self._records(faces[0])
            same = a.shape == b.shape
            if same and self._channel_orders and dtypes.named(a.dtype).is_floating:
                faces = self._as_channels(faces, family)
                if not faces:
                    continue
            if same and (not dtypes.named(a.dtype).is_floating or a.count < 4 or not self._may_be_turned(faces[0])):
                continue
            candidates = [*ways(b.shape, a.shape), *(turned(b.shape) if same else ())]
            if len(candidates) < 2 and same:
                continue
            node = self._chosen(faces, candidates)
            why = "confirmed on data"
            if node is None and not same and candidates and _keeps(candidates[0], b.shape):
                node, why = candidates[0], "from shapes alone"
            if node is None or node is X:
                continue
            if a.count < b.count and not self._left_out(faces[0], node, family[faces[0]]):
                continue
            if not _keeps(node, b.shape) and a.count == b.count and not self._used_so(faces, node, family, same):
                continue
            for face in faces:
                self.decided[face] = node, why

    def _as_channels(self, faces: Sequence[Face], family: dict[Face, tuple[int, SlotPair]]) -> list[Face]:
        """Decide for tensors whose channels lie as those of a weight beside them, all or head by head. Returns the others."""
        ways = {face: nodes for face in faces if (nodes := self._beside(face, family[face][0]))}
        clear: dict[Face, ex.Node] = {}
        blurred: list[Face] = []
        for face, nodes in ways.items():
            arrays = self._arrays(face)
            if arrays is None or resembles(*arrays):
                continue
            best = clear_best([distance(arrays[0], _applied(node, arrays[1])) for node in nodes])
            if best is not None and nodes[best] is not X:
                clear[face] = nodes[best]
            else:
                blurred.append(face)
        # Behind a fault nothing agrees: then as the siblings, where there is one order only.
        if 2 * len(clear) >= len(ways):
            clear.update((face, ways[face][0]) for face in blurred if len(ways[face]) == 1)
        self.decided.update((face, (node, "as the channels of a weight beside it")) for face, node in clear.items())
        return [face for face in faces if face not in clear]

    def _beside(self, face: Face, index: int) -> list[ex.Node]:
        """The orders of channels that weights in the same module, or in this one, have, as far as they fit this tensor."""
        scope, shape = self.reference.calls[self.pairs[index].reference].scope, self._records(face)[1].shape
        nodes: list[ex.Node] = []
        for places in self._channel_orders.get(scope.rpartition(".")[0]) or self._channel_orders.get(scope) or ():
            n, order = (shape[-1] if len(shape) > 1 else 0), np.array(places)
            if n > 1 and len(order) > n and len(order) % n == 0:
                heads = order.reshape(-1, n) - np.arange(0, len(order), n)[:, None]
                order = heads[0] if (heads == heads[0]).all() else order
            if len(order) == n and sorted(order.tolist()) == list(range(n)):
                nodes.append(channels.taken(X, shape, -1, order))
        return nodes

    def _may_be_turned(self, face: Face) -> bool:
        """Do these differ by much, although their figures are alike?"""
        a, b = self._records(face)
        if a.statistics is not None and b.statistics is not None:
            x, y = a.statistics.norm, b.statistics.norm
            if x is None or y is None or not math.isclose(x, y, rel_tol=AGREES):
                return False
        if not turned(b.shape):
            return False
        arrays = self._arrays(face)
        return arrays is not None and not resembles(*arrays)

    def _left_out(self, face: Face, node: ex.Node, where: tuple[int, SlotPair]) -> bool:
        """May a part of the target's tensor be left out: is it made of what the reference's weight has not, or filled with one value?"""
        index, _ = where
        for slot in self.pairs[index].slots:
            if slot.reference_slot.startswith("param"):
                a, b = self._records((slot.reference_record, slot.target_record))
                if a.count < b.count and (slot.reference_record, slot.target_record) in self.decided:
                    return True
        arrays = self._arrays(face)
        if arrays is None:
            return False
        left = arrays[1].size - arrays[0].size
        values, counts = np.unique(arrays[1], return_counts=True)
        return bool(counts.max() >= left and np.count_nonzero(arrays[0] == values[counts.argmax()]) <= counts.max() - left)

    def _chosen(self, faces: Sequence[Face], candidates: Sequence[ex.Node]) -> ex.Node | None:
        if len(candidates) == 1 and _keeps(candidates[0], self._records(faces[0])[1].shape):
            return candidates[0]
        votes: Counter[int] = Counter()
        for face in spread(faces, _READ):
            arrays = self._arrays(face)
            if arrays is None or not candidates:
                continue
            best = clear_best([distance(arrays[0], _applied(node, arrays[1])) for node in candidates])
            if best is not None:
                votes[best] += 1
        return candidates[votes.most_common(1)[0][0]] if votes else None

    def _used_so(self, faces: Sequence[Face], node: ex.Node, family: dict[Face, tuple[int, SlotPair]], same: bool) -> bool:
        """Does what reads this tensor agree? A tensor in a wrong order is a fault, in another order it is not."""
        if self._readers is None:
            self._readers = {}
            for at, pair in enumerate(self.pairs):
                for slot in pair.slots:
                    if slot.reference_slot.startswith("input"):
                        self._readers.setdefault(slot.reference_record, []).append(at)
        asked = False
        for face in spread(faces, _READ):
            readers = [at for at in self._readers.get(face[0], ()) if self.pairs[at].slots]
            if family[face][1].reference_slot.startswith("input"):
                readers = list(dict.fromkeys([family[face][0], *readers]))
            asked |= bool(readers)
            if same:
                # Nothing but the elements speaks for another order: what is made of it must be as near as it is then.
                arrays = self._arrays(face)
                near = distance(arrays[0], _applied(node, arrays[1])) if arrays is not None else math.inf
                if near > _NEAR:
                    continue
                index = family[face][0]
                as_near = all(self._apart(at) <= max(_AS_NEAR * near, 2 * _NEAR) for at in readers)
                if self._given_so(index, node) or (as_near and (readers or self._follows(index))):
                    return True
            elif any(self._outputs_agree(at) for at in readers) or self._follows(family[face][0]):
                return True
        return not asked and not same

    def _given_so(self, index: int, node: ex.Node) -> bool:
        """Was what this call is given laid in this order too?"""
        given = (s for s in self.pairs[index].slots if s.reference_slot.startswith("input"))
        found = (self.decided.get((s.reference_record, s.target_record)) for s in given)
        return any(how is not None and how[0] == node for how in found)

    def _apart(self, index: int) -> float:
        """The largest distance of an output of this pair from what it faces, in whatever order of axes is nearest."""
        out = 0.0
        for slot in self.pairs[index].slots:
            face = slot.reference_record, slot.target_record
            arrays = self._arrays(face) if slot.reference_slot.startswith("output") else None
            if arrays is not None:
                same = arrays[1].shape == arrays[0].shape
                found = [*ways(arrays[1].shape, arrays[0].shape), *(turned(arrays[1].shape) if same else ())]
                out = max(out, min((distance(arrays[0], _applied(node, arrays[1])) for node in found), default=math.inf))
        return out


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]} ..."


def _keeps(node: ex.Node, shape: Shape) -> bool:
    return ex.keeps_order(node, shape)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most so many of them: the first, the last and between."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
