"""Every element type whence knows: its name, width, unit roundoff, and its exact widening.

Names are torch's without the `torch.` (float32, bfloat16, float8_e4m3fn, complex64, bool). A dtype
numpy has no native type for is an ml_dtypes one, so that arrays keep their dtype from capture to
report.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from whence import dtypes, extras

# Here, where everything that takes arrays comes by: only this much of numpy is loaded so far.
extras.check_release("numpy", np.__version__)

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    kind: "float", "int", "uint", "bool" or "complex". bits: storage per element. unit_roundoff:
    largest relative error of rounding to nearest (2^-24 for float32); None for exact kinds.
    max_finite: largest finite magnitude (of one component for complex); None for bool. safetensors:
    the code used in a shard. complex128 has none there and is stored as F64 with a last axis of 2.
    code: what the kernels switch on; -1 where no kernel decodes the type (numpy does it).
    """

    name: str
    kind: str
    bits: int
    unit_roundoff: float | None
    max_finite: float | None
    numpy: np.dtype[np.generic]
    safetensors: str
    code: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def is_floating(self) -> bool:
        """True for real and complex floating-point types: the ones that round."""
        return self.unit_roundoff is not None


def _table() -> dict[str, DType]:
    floats = [
        # name, numpy type, safetensors code, significand bits incl. the hidden one, kernel code
        ("float32", np.float32, "F32", 24, 0),
        ("bfloat16", ml_dtypes.bfloat16, "BF16", 8, 1),
        ("float16", np.float16, "F16", 11, 2),
        ("float8_e5m2", ml_dtypes.float8_e5m2, "F8_E5M2", 3, 3),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "F8_E4M3", 4, 4),
        ("float64", np.float64, "F64", 53, 7),
        ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, "F8_E4M3FNUZ", 4, -1),
        ("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz, "F8_E5M2FNUZ", 3, -1),
        ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "F8_E8M0", 1, -1),
    ]
    ints = [
        ("int8", np.int8, "I8", 5),
        ("uint8", np.uint8, "U8", 6),
        ("int16", np.int16, "I16", 10),
        ("uint16", np.uint16, "U16", 11),
        ("int32", np.int32, "I32", 12),
        ("uint32", np.uint32, "U32", 13),
        ("int64", np.int64, "I64", 8),
        ("uint64", np.uint64, "U64", 9),
    ]
    table: dict[str, DType] = {}
    for name, scalar, st_code, digits, code in floats:
        dt = np.dtype(scalar)
        big = float(ml_dtypes.finfo(dt).max)
        table[name] = DType(name, "float", dt.itemsize * 8, 2.0**-digits, big, dt, st_code, code)
    for name, int_scalar, st_code, code in ints:
        dt = np.dtype(int_scalar)
        kind = "int" if dt.kind == "i" else "uint"
        table[name] = DType(
            name, kind, dt.itemsize * 8, None, float(np.iinfo(dt).max), dt, st_code, code
        )
    table["bool"] = DType("bool", "bool", 8, None, None, np.dtype(np.bool_), "BOOL", 6)
    table["complex64"] = DType(
        "complex64",
        "complex",
        64,
        2.0**-24,
        float(np.finfo(np.float32).max),
        np.dtype(np.complex64),
        "C64",
        -1,
    )
    table["complex128"] = DType(
        "complex128",
        "complex",
        128,
        2.0**-53,
        float(np.finfo(np.float64).max),
        np.dtype(np.complex128),
        "F64",
        -1,
    )
    return table


DTYPES: dict[str, DType] = _table()
_BY_NUMPY: dict[np.dtype[np.generic], DType] = {d.numpy: d for d in DTYPES.values()}


def named(name: str) -> DType:
    """The dtype called `name`. Raises KeyError with the known names when there is none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise KeyError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None


def is_floating(name: str) -> bool:
    """Is this the name of a type that rounds? A name that whence does not know, as dumps may have,
    is none.
    """
    return name in DTYPES and DTYPES[name].is_floating


def is_whole(name: str) -> bool:
    """Is this the name of a type of whole numbers or booleans? A name that whence does not know is
    none.
    """
    return name in DTYPES and DTYPES[name].kind in ("int", "uint", "bool")


def of(array: Array) -> DType:
    """The dtype of a numpy array (ml_dtypes included). Raises KeyError for object, string, datetime
    and structured arrays.
    """
    try:
        return _BY_NUMPY[array.dtype.newbyteorder("=")]
    except KeyError:
        raise KeyError(f"numpy dtype {array.dtype} has no whence name") from None


def widen(array: Array) -> Array:
    """The same values, exactly, in the type metrics are computed in.

    float and bool and ints up to 32 bits -> float64; 64-bit ints stay as they are (float64 would
    lose bits above 2^53); complex -> complex128. Raises KeyError for dtypes whence does not know.
    """
    kind = of(array)
    if kind.kind == "complex":
        return array.astype(np.complex128)
    if kind.kind in ("int", "uint") and kind.bits == 64:
        return array
    return array.astype(np.float64)


def unit_roundoff(dtype: str) -> float:
    """Unit roundoff of a dtype by name; 0 for exact kinds and unknown names."""
    dtype_info = dtypes.DTYPES.get(dtype)
    return (dtype_info.unit_roundoff or 0.0) if dtype_info is not None else 0.0


def coarser(dtype: str, second: str) -> float:
    """Unit roundoff of the coarser of two dtypes; 0 when either is an exact kind."""
    a, b = unit_roundoff(dtype), unit_roundoff(second)
    return max(a, b) if a and b else 0.0


def is_half(dtype: str) -> bool:
    """Does a dtype round as 16 bits or fewer do? False for exact kinds and unknown names."""
    return is_half_roundoff(unit_roundoff(dtype))


def is_half_roundoff(unit_roundoff: float) -> bool:
    """Is this the unit roundoff of 16 bits or fewer?"""
    return unit_roundoff > 1e-5
