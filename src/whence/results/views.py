"""Rows of a table as another tool writes them."""

from __future__ import annotations

import msgspec


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """One side of a row of a view: a tensor of a call, with its figures.

    kind: of the call. file: where the dump keeps the tensor; path: with the dump's own path before
    it. not_finite: has it NaN or Inf.
    """

    name: str
    kind: str
    op_type: str
    occurrence: int
    phase: str
    slot: str
    step: int
    rank: int
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    path: str = ""
    source: str = ""
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    norm: float | None = None
    not_finite: bool = False


class ViewRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pair of tensors as a view shows it, or one without a partner.

    call: ids of both calls, -1 for none. slot: of the reference, or of the only one. figures: by
    the tool's formulas; why: its reason for none. result, message: as the tool decides. verdict,
    rel_l2, max_abs_err, note: whence's own.
    """

    call: tuple[int, int]
    slot: str
    reference: Shown | None
    target: Shown | None
    figures: dict[str, float | str | None] = {}
    why: str = ""
    result: str = ""
    message: str = ""
    verdict: str = ""
    rel_l2: float | None = None
    max_abs_err: float | None = None
    note: str = ""
