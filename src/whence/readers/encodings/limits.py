"""Limits on what a dump may request. A dump is untrusted: declared sizes are checked against actual
ones before anything is allocated.
"""

from __future__ import annotations

from whence.errors import UnreadableRun

HEAD_BYTES = 1 << 16  # of a file, to recognise it by
FILES = 2_000_000  # in one folder with all that is below
DEPTH = 16  # of folders
JSON_BYTES = 4 << 30
# unpacked against packed; float data packs to a few per cent at best, a bomb to a thousandth
ZIP_RATIO = 100
ZIP_FLOOR = 256 << 20  # bytes that may always be unpacked
RANK = 64  # dimensions of a tensor


def unpacked(nbytes: int, packed: int, label: str) -> None:
    """Refuses data that decompresses to far more than its size. Raises UnreadableRun."""
    if nbytes > max(ZIP_FLOOR, ZIP_RATIO * packed):
        raise UnreadableRun(
            f"{label} says that its {packed} bytes unpack to {nbytes}; no tensor packs so well, "
            "so it is not unpacked"
        )


def extents(shape: object, label: str) -> tuple[int, ...]:
    """Checks a shape from a file: a sequence of at most 64 non-negative integers. Raises
    UnreadableRun.
    """
    if not isinstance(shape, (list, tuple)) or len(shape) > RANK:
        raise UnreadableRun(f"{label}: {str(shape)[:60]} is not a shape")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in shape):
        raise UnreadableRun(f"{label}: {str(shape)[:60]} is not a shape")
    return tuple(shape)


def count(shape: tuple[int, ...]) -> int:
    """Returns the number of elements of a shape as an unbounded integer, so that
    nothing overflows.
    """
    total = 1
    for extent in shape:
        total *= extent
    return total
