"""Names for what a suggested command writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import PurePath


def free_name(name: str, is_free: Callable[[str], bool]) -> str:
    """`name`, or with a number before its ending where it is taken: cmp-2, report-2.html. A line
    that is typed as it stands must not stop at what an earlier one left.
    """
    ending = PurePath(name).suffix
    stem = name.removesuffix(ending)
    names = itertools.chain([name], (f"{stem}-{n}{ending}" for n in itertools.count(2)))
    return next(free for free in names if is_free(free))
