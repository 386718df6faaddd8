"""The numbers of one pair of tensors."""

from __future__ import annotations

import msgspec


class Measured(msgspec.Struct, frozen=True):
    """All measurements of one pair of records.

    tier: "same" (bit-identical, nothing else to say), "core", "full", or "none" when nothing could
    be measured, with `why`. values: metric name -> number, None where undefined, with the reason in
    `whys`. max_abs_index: where the largest error is.
    """

    tier: str
    identical: bool
    values: dict[str, float | None] = {}
    whys: dict[str, str] = {}
    max_abs_index: tuple[int, ...] | None = None
    histogram: tuple[int, ...] = ()
    why: str = ""
