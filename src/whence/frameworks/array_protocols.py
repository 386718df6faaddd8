"""Any library's array -> host array of the same dtype: numpy, torch, and what offers `__array__`
(JAX) or dlpack (CuPy).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import UsageError


def to_host(value: Any, name: str) -> Array:
    """The elements of `value` as a host array, C order, little endian; shares memory where
    possible, never written.

    value: an array or tensor of a dtype in `dtypes.DTYPES` (bfloat16 and float8 included), or a
    Python number. name: for the error. Raises UsageError for anything else.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from whence.frameworks import torch_arrays as adapter

        if not adapter.readable(value) or not adapter.dtype_name(value):
            raise UsageError(
                f"{name!r}: a {value.dtype} tensor ({value.layout}, on {value.device}) has no "
                "elements to read here"
            )
        return adapter.to_host(value)
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            array = np.from_dlpack(value)
        else:
            array = np.asarray(value)
        dtypes.of(array)
    except (KeyError, TypeError, ValueError, RuntimeError, BufferError) as error:
        raise UsageError(
            f"{name!r}: a {type(value).__name__} cannot be read as an array of numbers ({error})"
        ) from None
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
