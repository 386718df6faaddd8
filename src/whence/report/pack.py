"""Reports the result of packing a run, in lines."""

from __future__ import annotations

from typing import Any

from whence.report.tables import clean, size


def state(packing: Any) -> str:
    """Says that a run is packed: against which run, its size, and what is needed to read it."""
    sizes = f"tensors take {size(packing.packed_nbytes)} in place of {size(packing.nbytes)}"
    if packing.problem:
        return f"this run is packed: {sizes}. {clean(packing.problem)}"
    against = f" against {clean(packing.found)}" if packing.found else ", each tensor alone"
    return f"this run is packed{against}: {sizes}"


def relocated(run: str, reference: str) -> str:
    """Says where the reference of a packed run is now."""
    return f"{clean(run)}: its reference lies at {clean(reference)}"


def packed(result: Any, against: str) -> list[str]:
    """Says what was packed. against: path of the reference, or ""."""
    ratio = result.nbytes / result.packed_nbytes if result.packed_nbytes else 1.0
    lines = [
        f"written to {clean(result.path)}: tensors take {size(result.packed_nbytes)} in place of "
        f"{size(result.nbytes)}, {ratio:.1f} times less"
    ]
    if against:
        lines.append(f"it is read with {clean(against)}, which has to stay as it is")
    return lines


def unpacked(result: Any) -> list[str]:
    """Says what was unpacked."""
    return [
        f"written to {clean(result.path)}: {size(result.nbytes)} of tensors out of "
        f"{size(result.packed_nbytes)}"
    ]
