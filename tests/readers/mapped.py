"""Where the elements of an array lie."""

import mmap

import numpy as np


def is_mapped(array: np.ndarray) -> bool:
    """Are they in a file that is mapped, not copied into memory?"""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)
