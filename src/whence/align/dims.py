"""Dims expressions: how a tensor of one run is made from tensors of the other. Read, shown, carried
out; never evaluated as code.

    x                                  the tensor itself
    x[..., 0:192]                      a part of it (integers, slices, ...)
    x.T                                all axes reversed
    t d -> 1 t d                       axes moved, merged, split, added, dropped, as in einops; "rearrange(x, 'b (h d) -> h b d', h=9)"
    take(x, [0, 2, 1], axis=0)         indices along an axis
    cat(q, k, v, axis=-1)              concatenated; "*ranks" stands for all tensors bound to that name
    a + b                              summed in float64 and rounded once; "sum(*ranks)" for many
    pad(x, axis=-1, to=12, value=0)    filled up behind

They nest. An expression knows the shape it makes from shapes alone, so that a plan is made without
data.
"""  # noqa: E501

from __future__ import annotations

import ast
import dataclasses
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
    """Axes moved, merged and split by names ("b (h d) t -> h (b t) d"). lengths: of axes that the
    shape does not tell.
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
        groups, new_groups = (_groups(side, self.pattern) for side in self.pattern.split("->"))
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
    """Element by element, in float64 (integers and complex as they are) and rounded once."""

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
class Pad:
    """Filled up behind to `to` along an axis. value: a number, "lowest" for the most negative
    finite one of the dtype.
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
    """All tensors bound to a name, inside cat and sum."""

    name: str

    def __str__(self) -> str:
        return f"*{self.name}"

    def shape(self, bound: Bound) -> Shape:
        raise Unfit(f"*{self.name} stands inside cat or sum only")

    def apply(self, bound: Bound) -> Array:
        raise Unfit(f"*{self.name} stands inside cat or sum only")


Node = Name | Cut | Reverse | Rearrange | Take | Cat | Sum | Pad | Star


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
    return f"({node})" if isinstance(node, Sum) and len(node.parts) > 1 else str(node)


def _key(key: Any) -> str:
    if key is Ellipsis:
        return "..."
    if isinstance(key, slice):
        ends = ["" if n is None else str(n) for n in (key.start, key.stop)]
        return ":".join(ends) + (f":{key.step}" if key.step is not None else "")
    return str(key)


def _groups(side: str, pattern: str) -> list[list[str]]:
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
    """The tensors that an expression is made of, but for those behind a star."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Cat | Sum):
        for part in node.parts:
            yield from names(part)
    elif not isinstance(node, Star):
        yield from names(node.of)


def keeps_order(node: Node, shape: Shape) -> bool:
    """Does this only change the shape of a tensor, so that its bytes stay as they are?"""
    if isinstance(node, Reverse):
        return sum(n != 1 for n in shape) <= 1
    if not isinstance(node, Rearrange) or not isinstance(node.of, Name):
        return isinstance(node, Name)
    split, order, _ = node._steps(shape)
    axes = [axis for axis in order if split[axis] != 1]
    return axes == sorted(axes)


def substituted(text: str, inner: Mapping[str, str]) -> str:
    """The expression with others in the place of names."""
    if not inner:
        return text
    return str(
        _within(parse(text), {name: parse(expression) for name, expression in inner.items()})
    )


def _within(node: Node, inner: Mapping[str, Node]) -> Node:
    if isinstance(node, Name):
        return inner.get(node.name, node)
    if isinstance(node, Cat | Sum):
        return dataclasses.replace(node, parts=tuple(_within(p, inner) for p in node.parts))
    return node if isinstance(node, Star) else dataclasses.replace(node, of=_within(node.of, inner))


# ---- reading


def parse(text: str, default: str = "x") -> Node:
    """An expression from text. default: the tensor that a bare pattern ("t d -> 1 t d") is about.
    Raises Unfit with the place.
    """
    if "->" in text and "rearrange" not in text and "'" not in text and '"' not in text:
        pattern, *lengths = (part.strip() for part in text.split(","))
        sizes = []
        for part in lengths:
            match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(\d+)", part)
            if match is None:
                raise Unfit(f"{text!r}: {part!r} is not a length like h=9")
            sizes.append((match[1], int(match[2])))
        return Rearrange(Name(default), _checked(pattern), tuple(sizes))
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None)
        raise Unfit(
            f"{text!r} is not an expression{f' (column {column})' if column else ''}: x[..., 0:8], "
            "cat(a, b, axis=-1), a + b, t d -> 1 t d"
        ) from None
    return _read(tree, text)


def _checked(pattern: str) -> str:
    sides = pattern.split("->")
    if len(sides) != 2:
        raise Unfit(f"{pattern!r}: one -> is needed")
    names, new_names = (
        sorted(n for group in _groups(side, pattern) for n in group) for side in sides
    )
    if names != new_names or len(set(names)) != len(names):
        raise Unfit(
            f"{pattern!r}: every axis stands once on either side; "
            f"{', '.join(sorted(set(names) ^ set(new_names))) or 'one is there twice'}"
        )
    return pattern


def _read(tree: ast.expr, text: str) -> Node:
    if isinstance(tree, ast.Name):
        return Name(tree.id)
    if isinstance(tree, ast.Starred) and isinstance(tree.value, ast.Name):
        return Star(tree.value.id)
    if isinstance(tree, ast.Attribute) and tree.attr == "T":
        return Reverse(_read(tree.value, text))
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts = [_read(tree.left, text), _read(tree.right, text)]
        first = parts[0].parts if isinstance(parts[0], Sum) else (parts[0],)
        return Sum((*first, parts[1]))
    if isinstance(tree, ast.Subscript):
        keys = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        return Cut(_read(tree.value, text), tuple(_index(k, text) for k in keys))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return _call(tree.func.id, tree, text)
    raise _wrong(
        tree,
        text,
        "not understood; there are names, x[...], x.T, a + b, cat, sum, rearrange, take, pad",
    )


def _wrong(tree: ast.expr, text: str, message: str) -> Unfit:
    return Unfit(f"{text!r}: {message} (column {tree.col_offset + 1})")


def _call(function: str, tree: ast.Call, text: str) -> Node:
    named = {k.arg: _constant(k.value, text) for k in tree.keywords if k.arg}
    match function, tree.args:
        case "cat", [_, *_]:
            axis = _whole(named.pop("axis", -1), "axis", text)
            return (
                Cat(tuple(_read(p, text) for p in tree.args), axis)
                if not named
                else _no(named, text)
            )
        case "sum", [_, *_]:
            return Sum(tuple(_read(p, text) for p in tree.args)) if not named else _no(named, text)
        case "rearrange", [of, pattern]:
            lengths = tuple((name, _whole(n, name, text)) for name, n in named.items())
            return Rearrange(_read(of, text), _checked(str(_constant(pattern, text))), lengths)
        case "take", [of, listed]:
            indices = _constant(listed, text)
            if not isinstance(indices, list) or not all(isinstance(i, int) for i in indices):
                raise _wrong(tree, text, "take wants a list of indices")
            return Take(_read(of, text), tuple(indices), _whole(named.get("axis", 0), "axis", text))
        case "pad", [of]:
            if "to" not in named:
                raise _wrong(tree, text, "pad wants to=, the extent to fill up to")
            value = named.get("value", 0)
            if not (isinstance(value, (int, float)) or value == "lowest"):
                raise _wrong(tree, text, f"value={value!r}: a number or 'lowest'")
            return Pad(
                _read(of, text),
                _whole(named.get("axis", -1), "axis", text),
                _whole(named["to"], "to", text),
                value,
            )
    raise _wrong(
        tree,
        text,
        f"{function} is not known, or not with these arguments; there are cat, sum, rearrange, "
        "take, pad",
    )


def _no(arguments: Mapping[str, Any], text: str) -> Any:
    raise Unfit(f"{text!r}: {', '.join(arguments)} is not an argument there")


def _whole(value: Any, name: str, text: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unfit(f"{text!r}: {name}={value!r} is not a whole number")
    return value


def _constant(tree: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Unfit(
            f"{text!r}: a number or a list of numbers is wanted (column {tree.col_offset + 1})"
        ) from None


def _index(tree: ast.expr, text: str) -> Any:
    if isinstance(tree, ast.Slice):
        ends = [
            None if end is None else _whole(_constant(end, text), "slice", text)
            for end in (tree.lower, tree.upper, tree.step)
        ]
        return slice(*ends)
    value = _constant(tree, text)
    return value if value is Ellipsis else _whole(value, "index", text)
