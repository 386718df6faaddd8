"""Metrics of the user's own: a name and a function of two arrays. Each gets a pass of its own over
the data.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterable

from whence.dtypes import Array

Custom = tuple[str, Callable[[Array, Array], float]]


def installed() -> list[Custom]:
    """Metrics that installed packages announce under the entry point group `whence.metrics`, in the
    order of their names.

    An entry point is a pair (name, function(reference, target) -> float) or a function, which then
    has the entry's name. One that cannot be imported raises its own error: a metric that was
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
    """Add the custom metrics of a pair; one that raises or returns NaN gets a reason instead."""
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
