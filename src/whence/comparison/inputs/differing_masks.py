"""How a mask differs from another, where the two tensors are masks at all."""

from __future__ import annotations

import numpy as np

from whence.comparison.prepare.masks import visible
from whence.dtypes import Array
from whence.judge.mask_words import mask_words


def differing_mask(slot: str, arrays: tuple[Array, Array] | None) -> str:
    """In words, "" of tensors that are no masks. arrays: the reference's and the target's.

    What is not called a mask is one where its form says so: True and False or sentinels over as
    many queries as keys, each of which sees itself. Zeros and ones may be anything.
    """
    if arrays is None or arrays[0].shape != arrays[1].shape or arrays[0].ndim < 2:
        return ""
    reference, target = map(visible, arrays)
    if reference is None or target is None:
        return ""
    if "mask" not in slot.lower():
        queries, keys = reference.shape[-2:]
        of_ones = arrays[0].dtype.kind != "b" and bool((arrays[0] == 1).any())
        if queries != keys or of_ones:
            return ""
        own = np.diagonal(reference, axis1=-2, axis2=-1)
        if not (own.all() or not own.any()):
            return ""
    return mask_words(reference, target)
