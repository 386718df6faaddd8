"""`msit llm compare` (MindStudio inference tools)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.comparison.views.formulas import EPS32, Figures, cosine, kl, masked, narrow
from whence.dtypes import Array
from whence.results import ViewRow

MOVES_AGAINST_THEMSELVES = True


def figures(reference: Array, target: Array) -> tuple[Figures, str]:
    """`msit llm compare`: in float32 (imaginary parts are dropped), numbers of elements are
    compared and not shapes.

    Relative and absolute errors are 0 where |reference| <= 1.19e-7; kl_divergence is of the softmax
    over the whole tensor, in float64 here, where the tool's float32 leaves some 1e-7 of rounding.
    Nothing is computed where either side is not finite.
    """
    if reference.size != target.size:
        return {}, "data shape doesn't match."
    g, m = narrow(reference), narrow(target)
    for name, side in (("golden_data", g), ("my_data", m)):
        if not np.isfinite(side).all():
            return {}, f"{name} includes NAN or inf."
    if not g.size:
        return {}, "empty"  # the tool ends with an error here
    numbers = masked(g, m, EPS32)
    numbers["cosine_similarity"] = cosine(g, m, EPS32, 10, lone=0.0)
    numbers["kl_divergence"] = kl(g, m)
    size = float(np.linalg.norm(g.astype(np.float64)))
    distance = float(np.linalg.norm(m.astype(np.float64) - g.astype(np.float64)))
    numbers["relative_euclidean_distance"] = distance / size if size > EPS32 else 0.0
    return numbers, ""


def decide(rows: Sequence[ViewRow]) -> list[ViewRow]:
    """The tool leaves the decision to its reader."""
    return list(rows)
