"""How the tensors of one run use the ranges of floating-point formats: what overflows, what becomes
zero, what loses bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from whence.results import Ranges

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def ranges(run: str | os.PathLike[str], formats: Sequence[str] = NARROW) -> Ranges:
    """Measure how the tensors of a run would fit narrower formats, and how they fill their own.

    run: a run folder or another tool's dump. Elements that are kept are read once; of tensors with
    statistics alone the largest magnitude says whether they overflow. formats: names of
    floating-point dtypes; each one of 8 bits is tried as it is and scaled per tensor. Raises
    UsageError for a name that is none, UnreadableRun when the run cannot be read.
    """
    from whence.readers.figures import with_figures
    from whence.readers.opening import open_run
    from whence.workflows.range_measuring import RangeMeasuring, float_formats

    forms = float_formats(formats)
    path = os.fspath(run)
    return RangeMeasuring(with_figures(open_run(path)), forms).result(path)
