"""The nodes of a dims expression. Each computes its shape from shapes, and its tensor from
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence.dtypes import Array
from whence.errors import UsageError

Shape = tuple[int, ...]
Bound = Mapping[str, Sequence[Any]]


class Unfit(UsageError):
    """The expression does not fit the shapes it is given."""


@dataclass(frozen=True, slots=True)
class Name:
    """One bound tensor."""

    name: str

    def __str__(self) -> str:
        return self.name

    def shape(self, bound: Bound) -> Shape:
        return tuple(self._tensor(bound))

    def apply(self, bound: Bound) -> Array:
        array: Array = self._tensor(bound)
        return array

    def _tensor(self, bound: Bound) -> Any:
        tensors = bound.get(self.name)
        if tensors is None:
            raise Unfit(f"{self.name!r} is not bound; there is {', '.join(bound) or 'nothing'}")
        if len(tensors) != 1:
            raise Unfit(f"{self.name!r} stands for {len(tensors)} tensors: write *{self.name}")
        return tensors[0]


@dataclass(frozen=True, slots=True)
class Cut:
    """Basic indexing. keys: integers, slices, Ellipsis."""

    of: Node
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{_inside(self.of)}[{', '.join(_key(k) for k in self.keys)}]"

    def shape(self, bound: Bound) -> Shape:
        shape = self.of.shape(bound)
        named = [k for k in self.keys if k is not Ellipsis]
        if len(named) > len(shape):
            raise Unfit(f"{self} takes {len(named)} axes of a tensor of shape {shape}")
        if Ellipsis in self.keys:
            index = self.keys.index(Ellipsis)
            keys = (
                *self.keys[:index],
                *[slice(None)] * (len(shape) - len(named)),
                *self.keys[index + 1 :],
            )
        else:
            keys = (*self.keys, *[slice(None)] * (len(shape) - len(named)))
        out = []
        for key, extent in zip(keys, shape, strict=True):
            if isinstance(key, slice):
                out.append(len(range(*key.indices(extent))))
            elif not -extent <= key < extent:
                raise Unfit(f"{self}: index {key} of an axis of {extent}")
        return tuple(out)

    def apply(self, bound: Bound) -> Array:
        part: Array = self.of.apply(bound)[self.keys]
        return part


@dataclass(frozen=True, slots=True)
class Reverse:
    """All axes in reverse order."""

    of: Node

    def __str__(self) -> str:
        return f"{_inside(self.of)}.T"

    def shape(self, bound: Bound) -> Shape:
        return self.of.shape(bound)[::-1]

    def apply(self, bound: Bound) -> Array:
        return self.of.apply(bound).T


@dataclass(frozen=True, slots=True)
class Rearrange:
    """Axes permuted, merged and split by names ("b (h d) -> h b d"). lengths: of the axes whose
    length shapes do not determine.
    """

    of: Node
    pattern: str
    lengths: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lengths = "".join(f", {name}={n}" for name, n in self.lengths)
        return f"rearrange({self.of}, {self.pattern!r}{lengths})"

    def shape(self, bound: Bound) -> Shape:
        return self._steps(self.of.shape(bound))[2]

    def apply(self, bound: Bound) -> Array:
        array = self.of.apply(bound)
        split, order, merged = self._steps(array.shape)
        return array.reshape(split).transpose(order).reshape(merged)

    def _steps(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """(shape with every named axis apart, their new order, shape they are merged to)."""
        groups, new_groups = (axis_groups(side, self.pattern) for side in self.pattern.split("->"))
        if len(groups) != len(shape):
            raise Unfit(f"{self.pattern!r} is for {len(groups)} axes, the tensor has shape {shape}")
        lengths = dict(self.lengths)
        for group, extent in zip(groups, shape, strict=True):
            unknown = [name for name in group if name not in lengths]
            have = math.prod(lengths[name] for name in group if name in lengths)
            if len(unknown) > 1:
                raise Unfit(
                    f"{self.pattern!r}: the lengths of {' and '.join(unknown)} are not known; "
                    "give all but one"
                )
            if unknown and have and extent % have == 0:
                lengths[unknown[0]] = extent // have
            elif unknown or have != extent:
                inside = " * ".join(f"{n} {lengths.get(n, '?')}" for n in group) or "1"
                raise Unfit(f"{self.pattern!r}: an axis of {extent} is not {inside}")
        flat = [name for group in groups for name in group]
        merged = [name for group in new_groups for name in group]
        if sorted(flat) != sorted(merged):
            raise Unfit(
                f"{self.pattern!r}: {', '.join(sorted(set(flat) ^ set(merged)))} is on one side "
                "only, or twice"
            )
        return (
            tuple(lengths[n] for n in flat),
            tuple(flat.index(n) for n in merged),
            tuple(math.prod(lengths[n] for n in group) for group in new_groups),
        )


@dataclass(frozen=True, slots=True)
class Take:
    """Indices along one axis, in this order."""

    of: Node
    indices: tuple[int, ...]
    axis: int

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.indices))
        return f"take({self.of}, [{listed}], axis={self.axis})"

    def shape(self, bound: Bound) -> Shape:
        shape = list(self.of.shape(bound))
        axis = _axis(self.axis, len(shape), self)
        if any(not 0 <= i < shape[axis] for i in self.indices):
            raise Unfit(f"take: indices up to {max(self.indices)} of an axis of {shape[axis]}")
        shape[axis] = len(self.indices)
        return tuple(shape)

    def apply(self, bound: Bound) -> Array:
        part: Array = np.take(
            self.of.apply(bound), np.asarray(self.indices, np.intp), axis=self.axis
        )
        return part


@dataclass(frozen=True, slots=True)
class Cat:
    """Concatenated along an axis."""

    parts: tuple[Node, ...]
    axis: int

    def __str__(self) -> str:
        return f"cat({', '.join(map(str, self.parts))}, axis={self.axis})"

    def shape(self, bound: Bound) -> Shape:
        shapes = [s for part in self.parts for s in _shapes(part, bound)]
        if not shapes:
            raise Unfit("cat of nothing")
        axis = _axis(self.axis, len(shapes[0]), self)
        others = {(len(s), s[:axis], s[axis + 1 :]) for s in shapes}
        if len(others) != 1:
            raise Unfit(
                f"cat along axis {self.axis}: shapes "
                f"{', '.join(map(str, dict.fromkeys(shapes)))} do not fit together"
            )
        return (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])

    def apply(self, bound: Bound) -> Array:
        return np.concatenate(
            [a for part in self.parts for a in _arrays(part, bound)], axis=self.axis
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of tensors, element by element, in float64 (integers and complex as they are) and
    rounded once.
    """

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        if len(self.parts) > 1 and not any(isinstance(p, Star) for p in self.parts):
            return " + ".join(map(str, self.parts))
        return f"sum({', '.join(map(str, self.parts))})"

    def shape(self, bound: Bound) -> Shape:
        shapes = {s for part in self.parts for s in _shapes(part, bound)}
        if len(shapes) != 1:
            raise Unfit(f"{self}: shapes {', '.join(map(str, sorted(shapes)))} are not one")
        return shapes.pop()

    def apply(self, bound: Bound) -> Array:
        arrays = [a for part in self.parts for a in _arrays(part, bound)]
        first = arrays[0]
        if first.dtype.kind in "iubc":
            return np.asarray(np.sum(arrays, axis=0, dtype=first.dtype))
        total = arrays[0].astype(np.float64)
        for array in arrays[1:]:
            total += array.astype(np.float64)
        return total.astype(first.dtype)


@dataclass(frozen=True, slots=True)
class Share:
    """A tensor divided by a whole number, in float64 or complex128, and rounded once."""

    of: Node
    parts: int

    def __str__(self) -> str:
        return f"{_inside(self.of)} / {self.parts}"

    def shape(self, bound: Bound) -> Shape:
        return self.of.shape(bound)

    def apply(self, bound: Bound) -> Array:
        array = self.of.apply(bound)
        wide = np.complex128 if array.dtype.kind == "c" else np.float64
        return np.asarray(np.divide(array, self.parts, dtype=wide).astype(array.dtype))


@dataclass(frozen=True, slots=True)
class Pad:
    """A tensor padded at the end of an axis up to the extent `to`. value: a number or "lowest", the
    least finite one.
    """

    of: Node
    axis: int
    to: int
    value: float | str

    def __str__(self) -> str:
        return f"pad({self.of}, axis={self.axis}, to={self.to}, value={self.value!r})"

    def shape(self, bound: Bound) -> Shape:
        shape = list(self.of.shape(bound))
        axis = _axis(self.axis, len(shape), self)
        if shape[axis] > self.to:
            raise Unfit(f"pad: an axis of {shape[axis]} is longer than {self.to}")
        shape[axis] = self.to
        return tuple(shape)

    def apply(self, bound: Bound) -> Array:
        from whence import dtypes

        array = self.of.apply(bound)
        shape = list(array.shape)
        shape[_axis(self.axis, array.ndim, self)] = self.to
        value = self.value
        if value == "lowest":
            value = False if array.dtype.kind == "b" else -(dtypes.of(array).max_finite or 0)
        out = np.full(shape, np.asarray(value).astype(array.dtype), array.dtype)
        out[tuple(slice(0, n) for n in array.shape)] = array
        return out


@dataclass(frozen=True, slots=True)
class Star:
    """All tensors bound to a name; used inside cat and sum."""

    name: str

    def __str__(self) -> str:
        return f"*{self.name}"

    def shape(self, bound: Bound) -> Shape:
        raise Unfit(f"*{self.name} can only be inside cat or sum")

    def apply(self, bound: Bound) -> Array:
        raise Unfit(f"*{self.name} can only be inside cat or sum")


Node = Name | Cut | Reverse | Rearrange | Take | Cat | Sum | Share | Pad | Star


def _shapes(part: Node, bound: Bound) -> list[Shape]:
    if isinstance(part, Star):
        if part.name not in bound:
            raise Unfit(f"*{part.name} is not bound; there is {', '.join(bound) or 'nothing'}")
        return [tuple(s) for s in bound[part.name]]
    return [part.shape(bound)]


def _arrays(part: Node, bound: Bound) -> list[Array]:
    if isinstance(part, Star):
        return list(bound[part.name])
    return [part.apply(bound)]


def _axis(axis: int, dims: int, node: Node) -> int:
    if not -dims <= axis < dims:
        raise Unfit(f"{node}: axis {axis} of a tensor with {dims} axes")
    return axis % dims


def _inside(node: Node) -> str:
    is_joined = isinstance(node, Share) or (isinstance(node, Sum) and len(node.parts) > 1)
    return f"({node})" if is_joined else str(node)


def _key(key: Any) -> str:
    if key is Ellipsis:
        return "..."
    if isinstance(key, slice):
        ends = ["" if n is None else str(n) for n in (key.start, key.stop)]
        return ":".join(ends) + (f":{key.step}" if key.step is not None else "")
    return str(key)


def axis_groups(side: str, pattern: str) -> list[list[str]]:
    """Axes of one side of a pattern, each a list of names; "1" and "()" are axes of extent one."""
    groups: list[list[str]] = []
    inside: list[str] | None = None
    for token in re.findall(r"[A-Za-z_]\w*|1|\(|\)|\S", side):
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            groups.append(inside)
            inside = None
        elif token == "1":
            if inside is None:
                groups.append([])
        elif token.isidentifier():
            if inside is None:
                groups.append([token])
            else:
                inside.append(token)
        else:
            raise Unfit(
                f"{pattern!r}: {token!r} is not understood; axes are names, 1, and (a b) for "
                "merged ones"
            )
    if inside is not None:
        raise Unfit(f"{pattern!r}: a bracket is not closed")
    return groups


def names(node: Node) -> Iterator[str]:
    """The names of the tensors that an expression uses, except those with a star."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Cat | Sum):
        for part in node.parts:
            yield from names(part)
    elif not isinstance(node, Star):
        yield from names(node.of)


def keeps_order(node: Node, shape: Shape) -> bool:
    """Whether an expression only changes the shape of a tensor, so that its bytes stay the same."""
    if isinstance(node, Reverse):
        return sum(n != 1 for n in shape) <= 1
    if not isinstance(node, Rearrange) or not isinstance(node.of, Name):
        return isinstance(node, Name)
    split, order, _ = node._steps(shape)
    axes = [axis for axis in order if split[axis] != 1]
    return axes == sorted(axes)
