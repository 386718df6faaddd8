"""Reports what a conversion wrote, what it left out and why, as lines. Computes nothing."""

from __future__ import annotations

from typing import Any

from whence.report.tables import clean, count, size

_NAMES = 3


def converted(result: Any, destination: str, to: str) -> list[str]:
    """The lines of the report. result: of `api.convert`."""
    lines = [
        f"{clean(destination)}: {count(result.tensors, 'tensor')}, {size(result.nbytes)}, in "
        f"{count(len(result.files), 'file')} of {to}"
    ]
    if result.described:
        lines.append(f"  of {count(result.described, 'tensor')} the statistics alone")
    for why, names in result.left_out.items():
        examples = ", ".join(map(clean, names[:_NAMES])) + (", ..." if len(names) > _NAMES else "")
        lines.append(f"  left out: {count(len(names))}: {clean(why)}: {examples}")
    return lines
