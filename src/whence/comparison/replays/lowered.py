"""Calls that compute in 16 bits and hand over float32, as autocast has them do: a product of copies
in bfloat16 whose result a softmax, or a sum of gradients, widens again.
"""

from __future__ import annotations

import functools

from whence import dtypes
from whence.frameworks.operator_names import base_name
from whence.records import Call, Program, Run
from whence.replay.allowed_operators import CONTRACTIONS


class LoweredPrecision:
    """Which calls of the target compute products in 16 bits, where the reference knows no 16 bits
    and the target computes most of its products so.

    A reference that has some itself says where, and one layer that is lowered among others that
    are not is a difference.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target

    def dtype(self, partner: Call) -> str:
        """The dtype of 16 bits that a call of the target computes in, "" where it does not."""
        return self._kinds.get(partner.program, "")

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """By program of the target that computes products: the dtype of 16 bits that it casts to,
        "" of none.
        """
        if self._reference_has_half:
            return {}
        kinds = {
            name: _lowered(program)
            for name in {call.program for call in self._target.calls if call.program}
            if (program := self._target.programs.get(name)) is not None and _has_products(program)
        }
        lowered = sum(bool(kind) for kind in kinds.values())
        return kinds if lowered > len(kinds) / 2 else {}

    @property
    def _reference_has_half(self) -> bool:
        return any(
            record.dtype in dtypes.DTYPES and dtypes.is_half(record.dtype)
            for record in self._reference.records
        )


def _lowered(program: Program) -> str:
    """The first dtype of 16 bits that a program casts to."""
    for operation in program.operations:
        kind = operation.kwargs.get("dtype")
        name = kind.get("dtype", "") if isinstance(kind, dict) else ""
        if name in dtypes.DTYPES and dtypes.is_half(name):
            return str(name)
    return ""


def _has_products(program: Program) -> bool:
    return any(base_name(operation.name) in CONTRACTIONS for operation in program.operations)
