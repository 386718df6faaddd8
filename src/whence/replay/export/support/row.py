"""What a test found, as a row of the table; and what its parts are called in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from whence.replay.export.support.measure import Figures
from whence.replay.export.support.tensors import NAMES, Elements, tensors_in


class Skipped(Exception):
    """There is nothing to compare; the text says why."""


class Wrong(Exception):
    """The device made something of another form than the CPU; the text says what."""


@dataclass
class Row:
    """What a test found. seconds: of the call on the device. calls: operators that ran, where there
    are several.
    """

    figures: Figures
    seconds: float
    note: str
    calls: tuple[str, ...] = ()

    def with_note(self, note: str) -> Row:
        """With one more remark, if there is any."""
        return replace(self, note="; ".join(x for x in (self.note, note) if x))

    def cells(self) -> dict[str, Any]:
        """Its figures by column. shape, dtype, least and greatest value are those of the
        results.
        """
        f = self.figures
        has_range = f.least <= f.greatest
        return {
            "dtype": "; ".join(dict.fromkeys(f.dtypes)),
            "shape": "; ".join(f.shapes),
            "min-val": repr(f.least) if has_range else "",
            "max-val": repr(f.greatest) if has_range else "",
            "max": repr(f.worst),
            **{f"1e-{k + 1}": n for k, n in enumerate(f.counts)},
            "ulp": f"{f.ulp:.17g}",
            "nan_mismatch": f.nan,
            "inf_mismatch": f.inf,
            "local_error": f"{f.local:.6g}",
            "time": f"{self.seconds:.6f}",
            "numel": f.numel,
            "calls": " ".join(self.calls),
        }


def note_of_made_up(elements: Elements) -> str:
    return (
        f"elements were not kept, drawn in their range: {', '.join(elements.made_up)}"
        if elements.made_up
        else ""
    )


def named_figures(slot: str, value: Any, figures: Figures) -> Figures:
    figures.dtypes, figures.shapes = (
        [NAMES.get(value.dtype, str(value.dtype))],
        [str(list(value.shape))],
    )
    figures.why = f"{slot}: {figures.why}" if figures.why else ""
    return figures


def form_of(value: Any) -> str:
    return f"{NAMES.get(value.dtype, value.dtype)} {list(value.shape)}"


def layout_of(value: Any, inputs: Mapping[str, Any]) -> str:
    owners = [
        n
        for n, t in inputs.items()
        if any(
            t.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            for t in tensors_in(t)
        )
    ]
    whose = f" of {owners[0]}" if owners and value.numel() else ""
    return f"{form_of(value)} stride {list(value.stride())} offset {value.storage_offset()}{whose}"
