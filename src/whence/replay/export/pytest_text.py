"""Converts names, numbers and arguments of a run to source text: checked and quoted, since a run is
untrusted data.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from math import isfinite
from typing import Any

from whence.display import listed
from whence.replay.export import support

_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def tagged_source(name: str, content: Any) -> str:
    """Returns the source of a tagged value ({"dtype": ...} and similar), "" for any other value."""
    if name == "dtype" and content in support.DTYPES:
        return f"torch.{content}"
    if name == "device":
        return 'torch.device("cpu")'  # on another device, that one
    if name == "layout" and content in ("strided", "torch.strided"):
        return "torch.strided"
    if name == "memory_format" and str(content).removeprefix("torch.") in _MEMORY_FORMATS:
        return f"torch.{str(content).removeprefix('torch.')}"
    if name == "float" and content in ("inf", "-inf", "nan"):
        return f'float("{content}")'
    if name == "complex" and isinstance(content, (list, tuple)) and len(content) == 2:
        parts = [float(p["float"]) if isinstance(p, dict) else p for p in content]
        if all(isinstance(p, (int, float)) for p in parts):
            return f"complex({', '.join(number_text(p, exact=False) for p in parts)})"
    return ""


def source_of_test(
    name: str,
    note: str,
    call: str,
    head: Sequence[str],
    body: Sequence[str],
    samples: Sequence[int],
    *,
    inner: Sequence[str] = (),
    extra: str = "",
) -> str:
    lines = [f'@pytest.mark.parametrize("sample", {list(samples)!r})'] if samples else []
    lines.append(f"def {name}(check, sample):" if samples else f"def {name}(check):")
    lines.append(f"    # {note}")
    lines += [f"    {line}" for line in inner] + ([""] if inner else [])
    first = [*head, "sample" if samples else "None", *([extra] if extra else [])]
    lines += [
        f"    {call}(",
        f"        {', '.join(first)},",
        *(f"        {line}" for line in body),
        "    )",
        "",
    ]
    return "\n".join(lines)


def argument_line(name: str, text: str) -> str:
    return (
        f"{name}={text},"
        if name.isidentifier() and not keyword.iskeyword(name)
        else f"**{{{name!r}: {text}}},"
    )


def origin_note(count: int, scopes: Mapping[str, int], source: str) -> str:
    names = listed([comment_text(s or "(root)") for s in scopes], 2)
    place = f", {comment_text(source)}" if source else ""
    return f"{count} call{'s' if count != 1 else ''} in {names}{place}"[:220]


def comment_text(text: Any) -> str:
    """Returns text of a run that cannot end a comment or a docstring."""
    return "".join(c if c.isprintable() and c not in '"\\`' else "?" for c in str(text))[:160]


def plain_text(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def number_text(value: float, *, exact: bool) -> str:
    if exact:
        return repr(int(value))
    return repr(float(value)) if abs(value) < float("inf") else f'float("{value}")'


def readable_range(low: float, high: float) -> tuple[float, float]:
    """Returns a range with six significant digits inside the given one: -0.99999999 must not become
    -1, whose log1p is infinite.
    """
    least, greatest = _six(low, ROUND_CEILING), _six(high, ROUND_FLOOR)
    return (least, greatest) if least <= greatest else (low, high)


def _six(value: float, rounding: str) -> float:
    return (
        float(Context(prec=6, rounding=rounding).create_decimal(value))
        if isfinite(value)
        else value
    )
