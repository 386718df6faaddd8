"""The extension that `native/module.cpp` is: addresses are integers, and must stay valid for the
call. `whence._kernels` has the columns of what lies there.
"""

from typing import Any

COLUMNS: str

def compare(
    pairs: int, count: int, tier: int, rtol: float, atol: float,
    thresholds: int, floats: int, ints: int, histograms: int, /,
) -> None: ...  # fmt: skip
def describe(address: int, n: int, code: int, full: int, /) -> tuple[Any, ...]: ...
def describe_many(contents: int, count: int, words: int, counts: int, figures: int, /) -> None: ...
def join_units(contents: int, count: int, words: int, counts: int, figures: int, /) -> None: ...
def instruction_sets() -> list[str]: ...
def choose(instruction_set: str, /) -> None: ...
