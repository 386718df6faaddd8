"""What a conversion wrote, and what it left out and why, as lines. Computes nothing."""

from __future__ import annotations

from typing import Any

from whence.report.tables import clean, count, size

_NAMES = 3


def converted(written: Any, destination: str, to: str) -> list[str]:
    """written: of `api.convert`."""
    lines = [
        f"{clean(destination)}: {count(written.tensors, 'tensor')}, {size(written.nbytes)}, in "
        f"{count(len(written.files), 'file')} of {to}"
    ]
    if written.described:
        lines.append(f"  of {count(written.described, 'tensor')} the statistics alone")
    for why, names in written.left_out.items():
        shown = ", ".join(map(clean, names[:_NAMES])) + (", ..." if len(names) > _NAMES else "")
        lines.append(f"  left out: {count(len(names))}: {clean(why)}: {shown}")
    return lines
