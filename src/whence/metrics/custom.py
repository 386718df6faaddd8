"""User-defined metrics: a name and a function of two arrays. Each makes a separate pass over the
data.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterable

from whence.dtypes import Array

Custom = tuple[str, Callable[[Array, Array], float]]


def installed() -> list[Custom]:
    """Metrics that installed packages register under the entry point group `whence.metrics`, sorted
    by name.

    An entry point is a pair (name, function(reference, target) -> float), or a function, which then
    has the name of the entry. If it cannot be imported, its own error is raised: a metric that was
    installed on purpose must not be missing silently.
    """
    functions: list[Custom] = []
    for entry in sorted(
        importlib.metadata.entry_points(group="whence.metrics"), key=lambda e: e.name
    ):
        function = entry.load()
        functions.append(
            (function[0], function[1]) if isinstance(function, tuple) else (entry.name, function)
        )
    return functions


def apply(
    custom: Iterable[Custom],
    reference: Array,
    target: Array,
    values: dict[str, float | None],
    whys: dict[str, str],
) -> None:
    """Add the custom metrics of a pair to `values`; one that raises or returns NaN gets a reason in
    `whys` instead.
    """
    for name, function in custom:
        try:
            value = float(function(reference, target))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the comparison goes on
            values[name], whys[name] = None, f"raised {type(error).__name__}: {error}"
            continue
        if math.isnan(value):
            values[name], whys[name] = None, "returned NaN"
        else:
            values[name] = value
