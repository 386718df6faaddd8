"""One pair of tensors, as the tables of a comparison have it."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.measured import Measured


class Row(Described, msgspec.Struct, frozen=True):
    """One pair of tensors in the report: names, shapes, verdict of its call, measurements."""

    pair: int
    name: str
    op_type: str
    step: int
    rank: int
    occurrence: int
    reference_slot: str
    target_slot: str
    reference_record: int
    target_record: int
    reference_dtype: str
    target_dtype: str
    reference_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    verdict: str
    rule: str
    measured: Measured

    @property
    def error(self) -> float | None:
        """Relative 2-norm of the difference; None where it is not defined or was not measured."""
        return self.measured.values.get("rel_l2")
