"""A failing call as a pytest file, which fails while the fault exists and passes once it
is fixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array

_INLINE = 64
"""An input with at most this many elements stands in the file; larger ones go to a .npz
beside it.
"""
_HEAD = '''"""{title}

Written by `whence ops fuzz`. It fails as long as the kernel is wrong on these inputs.
"""
{path}
from whence.testing import assert_kernel
'''


def written(
    name: str, call: Mapping[str, Any], inputs: Mapping[str, Array], title: str
) -> tuple[str, dict[str, Array]]:
    """(text of the file, arrays for the .npz beside it).

    call: further arguments of `assert_kernel`.
    """
    kept: dict[str, Array] = {}
    rows = []
    for key, array in inputs.items():
        values = _values(array)
        if array.size > _INLINE:
            kept[key] = np.frombuffer(array.tobytes(), np.uint8)
            values = 'Path(__file__).with_suffix(".npz")'
        rows.append(f"        {key!r}: ({dtypes.of(array).name!r}, {array.shape!r}, {values}),")
    quotable = title.replace("\\", "/").replace('"', "'")
    path = "\nfrom pathlib import Path\n" if kept else ""
    more = {k: v for k, v in call.items() if v and k not in ("kernel", "reference")}
    lines = [
        _HEAD.format(title=quotable, path=path),
        "",
        f"def {name}() -> None:",
        "    inputs = {",
        *rows,
        "    }",
        "    assert_kernel(",
        f"        {call['kernel']!r},",
        f"        {call['reference']!r},",
        "        inputs,",
        *(f"        {key}={value!r}," for key, value in more.items()),
        "    )",
    ]
    return "\n".join(lines) + "\n", kept


def _values(array: Array) -> str:
    numbers = array.reshape(-1).astype(np.float64 if dtypes.of(array).is_floating else object)
    return "[" + ", ".join(_number(value) for value in numbers.tolist()) + "]"


def _number(value: Any) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def read(inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Read the inputs of such a file as arrays."""
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
    """A valid name for a test function."""
    words = re.sub(r"\W+", "_", f"{kernel.rpartition(':')[2]}_{kind}")
    return f"test_{words.strip('_').lower()}_{number}"
