"""Which weights of a checkpoint, or of any run, are which initialisers of an ONNX file: by their
elements, in any order of axes, as rows of a fused one, in another precision or as codes; by name
where they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import judge
from whence.align.quantised.layers import CodedValues
from whence.comparison.onnx_files import weights
from whence.comparison.onnx_files.answer import is_onnx_file
from whence.comparison.onnx_files.graph import Weight, of_file
from whence.comparison.onnx_files.weights import State
from whence.dtypes import Array, is_floating
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.judge.policy import Scheme
from whence.judge.quantised_weights import checked_codes
from whence.records import Run
from whence.records.slots import is_param, param_name
from whence.results import FacedWeight, WeightMap

_CLOSE = 0.1
"""Relative error up to which a weight without a name is a copy of another one of its shape; of two
that are not, it is 1 and more.
"""
_STATES = {
    State.EQUAL: "equal", State.ROUNDED: "equal", State.CODES: "codes",
    State.UNKNOWN: "not compared",
}  # fmt: skip
_SQUARE = 2  # axes
_DIRECTIONS = 2
_RECURRENT = 3  # axes: directions, gates, what they read
_ALIGNED = 1 - 1e-6  # cosine of rows of which one is a multiple of the other


class Held(NamedTuple):
    """A weight of a run. call: the module or node that has it. name: there. wrong: of one that is
    stored as codes, what is wrong with them against a float weight in its axes, "" for nothing, and
    the scheme. scales: names of its scales and zero points.
    """

    call: str
    name: str
    weight: Weight
    wrong: Callable[[Array], tuple[str, Scheme]] | None = None
    scales: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        return f"{self.call}.{self.name}" if self.call else self.name


class _View(NamedTuple):
    """A weight in some order of axes. dims: how it is brought there."""

    array: np.ndarray[Any, Any]
    dims: str


def map_weights(reference: Run, target: Run) -> WeightMap:
    """Face the weights of two runs, of which at least one is an ONNX file."""
    sides = tuple(held_by(run) for run in (reference, target))
    facing = _Facing(*sides)
    pairs = facing.pairs()
    return WeightMap(
        tuple(pairs),
        tuple(h.full for h in sides[0] if id(h) not in facing.faced),
        tuple(
            h.full
            for h in sides[1]
            if id(h) not in facing.faced and max(h.weight.shape, default=1) > 1
        ),
    )


def held_by(run: Run) -> list[Held]:
    """The floating weights of a run, each once; of an ONNX file without constants of one element,
    and what codes stand for.
    """
    if is_onnx_file(run):
        return _of_graph(run)
    by_name: dict[str, Held] = {}
    for call in run.calls:
        named = [(call.scope, param_name(ref.slot), ref) for ref in call.slots("param")]
        if call.kind == "label":  # what a checkpoint has under names that say nothing
            module, _, name = call.scope.rpartition(".")
            named += [(module, name, ref) for ref in call.slots("output")]
        for module, name, ref in named:
            form = run.records[ref.record]
            if is_floating(form.dtype):
                weight = Weight(name, form.dtype, form.shape, partial(run.array, ref.record))
                held = Held(module, name, weight)
                by_name.setdefault(held.full, held)
    return list(by_name.values())


def _of_graph(run: Run) -> list[Held]:
    held = {one.name: one for one in _of_codes(run)}
    graph = of_file(run)
    for node in graph.nodes:
        for value in node.inputs:
            weight = graph.weights.get(value)
            if weight is not None and is_floating(weight.dtype) and len(weight.shape):
                held.setdefault(value, Held(node.name, value, weight))
    scales = {name for one in held.values() for name in one.scales}
    return [one for one in held.values() if one.name not in scales]


def _of_codes(run: Run) -> Iterator[Held]:
    """What the codes of weights stand for, in the axes of the float operator."""
    values = CodedValues(run, run.calls)
    for call in run.calls:
        names = {ref.record: param_name(ref.slot) for ref in call.slots("param")}
        for _, ref, grid in values.operands(call):
            if not is_param(ref.slot) or len(run.records[ref.record].shape) < _SQUARE:
                continue
            try:
                codes = grid.codes(run.array(ref.record))
                step = grid.plain(
                    np.broadcast_to(grid.steps(run.array, codes.ndim)[0], codes.shape)
                )
            except (ElementsMissing, ValueError):
                continue
            load = partial(grid.decoded, run.array, ref.record)
            weight = Weight(names[ref.record], "float32", step.shape, load, np.abs(step), "decoded")
            wrong = partial(checked_codes, grid=grid, array=run.array, record=ref.record)
            scales = tuple(names[r] for r in (*grid.scale, grid.zero) if r in names)
            yield Held(call.scope, weight.name, weight, wrong, scales)


class _Facing:
    """Faces the weights of two sides. faced: those that have a partner, by identity."""

    def __init__(self, reference: Sequence[Held], target: Sequence[Held]) -> None:
        self.reference, self.target = reference, target
        self.faced: set[int] = set()
        self._views: dict[int, list[_View]] = {}

    def pairs(self) -> list[FacedWeight]:
        """Every pair; pieces of one weight of the reference one after another."""
        out: dict[int, list[FacedWeight]] = defaultdict(list)
        rules = (
            self._by_elements, self._by_rows, self._by_name, self._by_likeness, self._by_shape,
        )  # fmt: skip
        for rule in rules:
            for a, b, dims in rule():
                out[id(a)].append(self._pair(a, b, dims))
                self.faced |= {id(a), id(b)}
            if rule == self._by_rows:
                for a, b, dims, rows in self._by_pieces():
                    out[id(a)].append(_piece(a, b, dims, rows))
                    self.faced |= {id(a), id(b)}
        return _with_norms([pair for a in self.reference for pair in out[id(a)]])

    def _free(self) -> tuple[list[Held], list[Held]]:
        sides = self.reference, self.target
        return tuple([h for h in side if id(h) not in self.faced] for side in sides)  # type: ignore[return-value]

    def _pair(self, a: Held, b: Held, dims: str) -> FacedWeight:
        view = next((v for v in self._of(b) if v.dims == dims), None)
        array = view.array if view is not None else _taken(self._of(b), dims)
        step = b.weight.step
        shown = Weight(b.name, b.weight.dtype, array.shape, lambda: array)
        if step is not None:
            whole = np.broadcast_to(step, b.weight.shape)
            shown.step = whole.T if dims == "x.T" else whole if not dims else None
        compared, why = weights.compare(a.weight, shown), ""
        if b.wrong is not None and dims in ("", "x.T") and (own := self._of(a)):
            why, scheme = b.wrong(own[0].array.T if dims else own[0].array)
            compared = compared._replace(state=State.DIFFERS if why else State.CODES)
            why = why or str(scheme)
        state = _STATES.get(compared.state, "differs")
        if state == "differs" and not why and _is_scaled(self._of(a), array):
            state = "scaled"
        return FacedWeight(
            a.call, a.name, b.call, b.name, dims, a.weight.shape, b.weight.shape, state,
            None if state == "not compared" else compared.rel_l2, why=why,
        )  # fmt: skip

    def _of(self, held: Held) -> list[_View]:
        """A weight in the orders of axes that frameworks use."""
        if id(held) not in self._views:
            array = held.weight.elements()
            self._views[id(held)] = [] if array is None else _views(array)
        return self._views[id(held)]

    # ---- rules

    def _by_elements(self) -> list[tuple[Held, Held, str]]:
        """Equal after rounding to the target's type; of several that are, one of the same name, or
        in order.
        """
        places: dict[Any, list[tuple[Held, str]]] = defaultdict(list)
        for b in self._free()[1]:
            for view in self._of(b):
                places[b.weight.dtype, view.array.shape, _digest(view.array)].append((b, view.dims))
        kinds = {b.weight.dtype for b in self.target}
        out: list[tuple[Held, Held, str]] = []
        used: set[tuple[int, str]] = set()
        names = {b.name for b in self.target}
        # what has a name first: norms are often alike
        for a in sorted(self._free()[0], key=lambda a: a.full not in names):
            for view in self._of(a)[:1]:
                matches = [
                    place
                    for kind in kinds
                    for place in places.get((kind, view.array.shape, _as_key(view.array, kind)), ())
                    if (id(place[0]), place[1]) not in used
                ]
                named = [p for p in matches if p[0].name == a.full]
                if named or (matches and a.full not in names and not _is_constant(view.array)):
                    b, dims = (named or matches)[0]
                    out.append((a, b, dims))
                    views = {dims} if dims.startswith("x[") else {"", "x.T"}
                    used |= {(id(b), view) for view in views}
        return out

    def _by_name(self) -> list[tuple[Held, Held, str]]:
        own, others = self._free()
        names = {b.name: b for b in others} | {b.full: b for b in others}
        out = []
        for a in own:
            b = names.get(a.full)
            views = self._of(b) if b is not None else []
            fits = [v.dims for v in views if v.array.shape == a.weight.shape]
            if b is not None and fits:
                out.append((a, b, fits[0]))
        return out

    def _by_rows(self) -> list[tuple[Held, Held, str]]:
        """Rows of a fused weight, in any order."""
        own, others = self._free()
        out: list[tuple[Held, Held, str]] = []
        for b in others:
            for view in self._of(b):
                if not view.array.ndim:
                    continue
                rows = _rows(view.array)
                for a in own:
                    array = next((v.array for v in self._of(a)), None)
                    if array is None or array.shape[1:] != view.array.shape[1:] or not array.ndim:
                        continue
                    if view.array.ndim == 1 and len(array) < _SQUARE:
                        continue
                    keys = _rows_as(array, b.weight.dtype)
                    found = [rows.get(key, -1) for key in keys]
                    if found and min(found) >= 0 and len(set(found)) == len(found):
                        out.append((a, b, _cut(view.dims, found)))
        return list({id(a): (a, b, dims) for a, b, dims in out}.values())

    def _by_pieces(self) -> list[tuple[Held, Held, str, str]]:
        """What is split in the target: rows of one weight of the reference."""
        own, others = self._free()
        out: list[tuple[Held, Held, str, str]] = []
        for a in own:
            array = next((v.array for v in self._of(a)), None)
            if array is None or not array.ndim:
                continue
            for b in others:
                keys = {}
                for view in self._of(b):
                    if view.array.ndim and view.array.shape[1:] == array.shape[1:]:
                        keys[view.dims] = _rows_as(view.array, b.weight.dtype)
                rows = _rows(judge.rounded(array, b.weight.dtype)) if keys else {}
                for dims, of_view in keys.items():
                    places = [rows.get(key, -1) for key in of_view]
                    if (
                        len(places) > 1
                        and places[0] >= 0
                        and places == [*range(places[0], places[0] + len(places))]
                    ):
                        out.append((a, b, dims, f"[{places[0]}:{places[-1] + 1}]"))
                        break
        return out

    def _by_likeness(self) -> list[tuple[Held, Held, str]]:
        """The one that is nearest, far nearer than chance."""
        own, others = self._free()
        out: list[tuple[Held, Held, str]] = []
        used: set[int] = set()
        for a in own:
            array = next((v.array for v in self._of(a)), None)
            near = [
                (_distance(array, view.array), k, view.dims)
                for k, b in enumerate(others)
                for view in self._of(b)
                if array is not None and view.array.shape == array.shape and id(b) not in used
            ]
            near += [
                (0.0, k, view.dims)
                for k, b in enumerate(others)
                for view in self._of(b)
                if array is not None and id(b) not in used and _is_scaled(self._of(a), view.array)
            ]
            error, k, dims = min(near, default=(1.0, 0, ""))
            if error < _CLOSE:
                out.append((a, others[k], dims))
                used.add(id(others[k]))
        return out

    def _by_shape(self) -> list[tuple[Held, Held, str]]:
        """Codes that are like nothing: of the only weight that is left of their shape, or of the
        only one whose name theirs begins with.
        """
        own, others = self._free()
        out: dict[int, tuple[Held, Held, str]] = {}
        for b in (other for other in others if other.wrong is not None):
            fits = [
                (a, v.dims) for a in own for v in self._of(b) if v.array.shape == a.weight.shape
            ]
            fits = list({id(a): (a, dims) for a, dims in reversed(fits)}.values())
            named = [(a, dims) for a, dims in fits if b.name.startswith(a.full)]
            for a, dims in named or fits if len(named or fits) == 1 else ():
                out.setdefault(id(a), (a, b, dims))
        return list(out.values())


def _views(array: np.ndarray[Any, Any]) -> list[_View]:
    array = np.asarray(array)
    views = [_View(array, "")]
    if array.ndim in (_SQUARE, _RECURRENT) and array.shape[0] <= _DIRECTIONS:
        views += [_View(array[k], f"x[{k}]") for k in range(len(array))]
    if array.ndim == _SQUARE:
        views.append(_View(np.ascontiguousarray(array.T), "x.T"))
    return views


def _with_norms(pairs: list[FacedWeight]) -> list[FacedWeight]:
    """A bias that differs beside a scaled weight is what the norm made of it."""
    scaled = {w.target for w in pairs if w.state == "scaled"}
    return [
        replace(w, state="scaled")
        if w.state == "differs" and w.target in scaled and len(w.shape) == 1
        else w
        for w in pairs
    ]


def _piece(a: Held, b: Held, dims: str, rows: str) -> FacedWeight:
    return FacedWeight(
        a.call, a.name, b.call, b.name, dims, a.weight.shape, b.weight.shape, "equal", 0.0, rows
    )  # fmt: skip


def _is_scaled(views: Sequence[_View], other: np.ndarray[Any, Any]) -> bool:
    """Is each row of a convolution's or a product's weight a multiple of the one that it faces?"""
    if not views or views[0].array.shape != other.shape or other.ndim < _SQUARE or len(other) < 2:
        return False
    x, y = (a.astype(np.float64).reshape(len(other), -1) for a in (views[0].array, other))
    if x.shape[1] < _SQUARE:
        return False
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return bool((sizes > 0).all() and (np.abs((x * y).sum(axis=1)) > _ALIGNED * sizes).all())


def _is_constant(array: np.ndarray[Any, Any]) -> bool:
    """Are all elements one? Then it could be any norm's."""
    return array.size > 1 and bool((array == array.flat[0]).all())


def _taken(views: Sequence[_View], dims: str) -> np.ndarray[Any, Any]:
    """What an expression of `_cut` takes of a weight."""
    from whence.align.dims import parsing

    return np.asarray(parsing.parse(dims).apply({"x": [views[0].array]}))


def _cut(base: str, rows: Sequence[int]) -> str:
    """Rows of a view, as an expression."""
    source = base or "x"
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return f"{source}[{rows[0]}:{rows[0] + len(rows)}]"
    return f"take({source}, {list(rows)}, axis=0)"


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    return host.digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _as_key(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    return _digest(judge.rounded(array, dtype))


def _rows(array: np.ndarray[Any, Any]) -> Mapping[bytes, int]:
    """The place of each row; -1 of rows that occur twice."""
    places: dict[bytes, int] = {}
    for k, row in enumerate(np.ascontiguousarray(array)):
        key = np.ascontiguousarray(row).tobytes()
        places[key] = -1 if key in places else k
    return places


def _rows_as(array: np.ndarray[Any, Any], dtype: str) -> list[bytes]:
    return [np.ascontiguousarray(row).tobytes() for row in judge.rounded(array, dtype)]


def _distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    size = float(np.linalg.norm(x))
    spread = float(np.std(x)) if x.size > 1 else 0.0
    return float(np.linalg.norm(y - x)) / size if size and spread else 1.0
