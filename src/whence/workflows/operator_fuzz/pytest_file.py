"""A failing call as a file of pytest, which fails on the fault and passes when it is mended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array

_INLINE = 64
"""Elements up to which an input stands in the file; larger ones are kept beside it."""
_HEAD = '''"""{title}

Written by `whence ops fuzz`. It fails as long as the kernel is wrong on these inputs.
"""

from pathlib import Path

from whence.testing import assert_kernel

HERE = Path(__file__).parent
'''


def written(
    name: str, call: Mapping[str, Any], inputs: Mapping[str, Array], title: str
) -> tuple[str, dict[str, Array]]:
    """(text of the file, arrays that are kept in a .npz beside it). call: further arguments of
    `assert_kernel`.
    """
    kept: dict[str, Array] = {}
    lines = [
        _HEAD.format(title=title.replace("\\", "/").replace('"""', "'''")),
        "",
        f"def {name}() -> None:",
    ]
    lines.append("    inputs = {")
    for key, array in inputs.items():
        dtype = dtypes.of(array).name
        if array.size <= _INLINE:
            lines.append(f"        {key!r}: ({dtype!r}, {tuple(array.shape)!r}, {_values(array)}),")
        else:
            kept[key] = array.view(np.uint8) if array.flags.c_contiguous and array.ndim else array
            kept[key] = np.frombuffer(array.tobytes(), np.uint8)
            lines.append(
                f'        {key!r}: ({dtype!r}, {tuple(array.shape)!r}, HERE / "{name}.npz"),'
            )
    lines += ["    }", "    assert_kernel("]
    lines += [f"        {value!r}," for value in (call["kernel"], call["reference"])]
    lines += ["        inputs,"]
    lines += [
        f"        {key}={value!r},"
        for key, value in call.items()
        if key not in ("kernel", "reference") and value
    ]
    lines += ["    )"]
    return "\n".join(lines) + "\n", kept


def _values(array: Array) -> str:
    numbers = array.reshape(-1).astype(np.float64 if dtypes.of(array).is_floating else object)
    return "[" + ", ".join(_number(value) for value in numbers.tolist()) + "]"


def _number(value: Any) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def read(inputs: Mapping[str, Any]) -> dict[str, Array]:
    """The inputs of such a file as arrays."""
    arrays: dict[str, Array] = {}
    for key, (dtype, shape, values) in inputs.items():
        kind = dtypes.named(dtype).numpy
        if isinstance(values, list):
            arrays[key] = np.array(values).astype(kind).reshape(shape)
        else:
            with np.load(values) as kept:
                arrays[key] = np.frombuffer(kept[key].tobytes(), kind).reshape(shape)
    return arrays


def test_name(kernel: str, kind: str, number: int) -> str:
    """A name of a test function."""
    words = re.sub(r"\W+", "_", f"{kernel.rpartition(':')[2]}_{kind}")
    return f"test_{words.strip('_').lower()}_{number}"
