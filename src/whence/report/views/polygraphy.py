"""Polygraphy's comparison of outputs (`--save-accuracy-results`) as a table: one line for every
output of an iteration.
"""

from __future__ import annotations

from whence.report.cells import Columns, either, figure, name, reference, shape, target

_STATISTICS = [
    f"{of}_{difference}"
    for difference in ("absdiff", "reldiff")
    for of in ("max", "mean", "median", "quantile")
]

COLUMNS: Columns = {
    "iteration": either(lambda s: s.step),
    "output": either(name),
    "dtype_0": target(lambda s: s.dtype),
    "dtype_1": reference(lambda s: s.dtype),
    "shape_0": target(shape),
    "shape_1": reference(shape),
    **{statistic: figure(statistic) for statistic in _STATISTICS},
    "check_error_stat": lambda *_: "elemwise",
    "atol": lambda *_: 1e-5,
    "rtol": lambda *_: 1e-5,
    "passed": lambda _, row: row.result or "False",
}
