"""Parses dims expressions from text, and substitutes expressions for names in others."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from whence.align.dims.expressions import (
    Cat,
    Cut,
    Name,
    Node,
    Pad,
    Rearrange,
    Reverse,
    Share,
    Star,
    Sum,
    Take,
    Unfit,
    axis_groups,
)


def substituted(text: str, inner: Mapping[str, str]) -> str:
    """The expression with other expressions in the place of its names."""
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


def parse(text: str, default: str = "x") -> Node:
    """An expression parsed from text. default: the tensor to which a pattern without a tensor
    applies. Raises Unfit.
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
        sorted(n for group in axis_groups(side, pattern) for n in group) for side in sides
    )
    if names != new_names or len(set(names)) != len(names):
        raise Unfit(
            f"{pattern!r}: every axis must occur once on each side; "
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
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Div):
        parts_of = _whole(_constant(tree.right, text), "divisor", text)
        if parts_of < 1:
            raise _wrong(tree, text, f"divided by {parts_of}: a number from 1 on is wanted")
        return Share(_read(tree.left, text), parts_of)
    if isinstance(tree, ast.Subscript):
        keys = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        return Cut(_read(tree.value, text), tuple(_index(k, text) for k in keys))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return _call(tree.func.id, tree, text)
    raise _wrong(
        tree,
        text,
        "not understood; there are names, x[...], x.T, a + b, x / 2, cat, sum, rearrange, take, "
        "pad",
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
