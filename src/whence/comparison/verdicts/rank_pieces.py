"""Finds shards on the wrong rank, and sums that were not divided by the number of ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from whence.dtypes import Array

_SAME = 1e-3  # relative distance below which a tensor is meant to be another


def norm(x: npt.NDArray[np.float64]) -> float:
    """The Euclidean norm of all elements."""
    return float(np.linalg.norm(x.reshape(-1)))


def undivided(share: Array, output: Array, ranks: int) -> str:
    """Is the output what one rank was given, before it was divided by the number of losses? share:
    what it was given, divided.
    """
    expected = share.astype(np.float64)
    if ranks == 1 or expected.shape != output.shape or not norm(expected):
        return ""
    if norm(output.astype(np.float64) - ranks * expected) > _SAME * norm(expected):
        return ""
    return f"not divided by the {ranks} ranks whose losses it is of: {ranks} x the mean"


def swapped(reference: Array, target: Array, n: int) -> str:
    """Are the n pieces of a tensor along one of its axes those of the reference in another
    order?
    """
    for axis in reversed(range(reference.ndim)):
        if reference.shape[axis] % n or reference.shape[axis] < n:
            continue
        a, b = (np.split(x.astype(np.float64), n, axis) for x in (reference, target))
        near = [[norm(y - x) for x in a] for y in b]
        order = [int(np.argmin(row)) for row in near]
        remaining = math.sqrt(sum(near[j][i] ** 2 for j, i in enumerate(order)))
        if order != list(range(n)) and remaining < 0.1 * norm(
            target.astype(np.float64) - reference.astype(np.float64)
        ):
            if sorted(order) == list(range(n)):
                return (
                    f"the ranks' pieces lie in the order {', '.join(map(str, order))} "
                    f"along axis {axis}"
                )
            j = next(j for j, i in enumerate(order) if i != j)
            return (
                f"in the place of rank {j}'s piece along axis {axis} lies that of rank {order[j]}"
            )
    return ""
