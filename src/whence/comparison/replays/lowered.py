"""Calls that compute in 16 bits and hand over float32, as autocast has them do: a product of copies
in bfloat16 whose result a softmax, or a sum of gradients, widens again; or code between modules
that works on what such a product left, as the loss of a router on its scores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from whence import dtypes
from whence.frameworks.operator_names import base_name
from whence.records import Call, Program, Run
from whence.records.training import OPTIMIZER
from whence.replay.allowed_operators import CONTRACTIONS, VIEWS

_CASTS = {"_to_copy", "to", "type_as", "convert_element_type", "cast"}


class LoweredPrecision:
    """Which calls of the target compute products in 16 bits, where the reference knows no 16 bits
    and the target computes most of its products so.

    A reference that has some itself says where, and one layer that is lowered among others that
    are not is a difference. Steps of optimisers do not count: what they keep, and compute in 16
    bits, is no sign of autocast.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target

    def dtype(self, partner: Call) -> str:
        """The dtype of 16 bits that a call of the target computes in, "" where it does not."""
        program = self._target.programs.get(partner.program)
        if program is None or not self._kinds or _has_products(program):
            return self._kinds.get(partner.program, "")
        return _computes_in(program)

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """By program of the target that computes products: the dtype of 16 bits that it casts to,
        "" of none.
        """
        if self._reference_has_half:
            return {}
        kinds = {
            name: _lowered(program)
            for name in {call.program for call in _without_steps(self._target) if call.program}
            if (program := self._target.programs.get(name)) is not None and _has_products(program)
        }
        lowered = sum(bool(kind) for kind in kinds.values())
        return kinds if lowered > len(kinds) / 2 else {}

    @property
    def _reference_has_half(self) -> bool:
        half = {name for name in dtypes.DTYPES if dtypes.is_half(name)}
        records = self._reference.records
        return any(
            records[ref.record].dtype in half
            for call in _without_steps(self._reference)
            for ref in call.refs
        )


def _without_steps(run: Run) -> Iterator[Call]:
    return (call for call in run.calls if call.phase != OPTIMIZER)


def _lowered(program: Program) -> str:
    """The first dtype of 16 bits that a program casts to."""
    for operation in program.operations:
        kind = operation.kwargs.get("dtype")
        name = kind.get("dtype", "") if isinstance(kind, dict) else ""
        if name in dtypes.DTYPES and dtypes.is_half(name):
            return str(name)
    return ""


def _computes_in(program: Program) -> str:
    """The dtype of 16 bits of its inputs that a program computes on before it widens them."""
    half: dict[tuple[str, Any], str] = {
        ("in", place): name
        for place, name in enumerate(program.input_dtypes)
        if name in dtypes.DTYPES and dtypes.is_half(name)
    }
    for place, operation in enumerate(program.operations):
        read = [(o.kind, o.value) for o in operation.operands() if o.kind == "in"]
        read += [("op", tuple(o.value)) for o in operation.operands() if o.kind == "op"]
        narrow = [half[key] for key in read if key in half]
        base = base_name(operation.name)
        if not narrow or base in _CASTS or "dtype" in operation.kwargs:
            continue
        if base not in VIEWS:
            return narrow[0]
        half["op", (place, 0)] = narrow[0]
    return ""


def _has_products(program: Program) -> bool:
    bases = {base_name(operation.name) for operation in program.operations}
    return bool(bases & CONTRACTIONS) or any(map(_is_recurrent, bases))


def _is_recurrent(base: str) -> bool:
    return base.removesuffix("_cell") in ("lstm", "gru", "rnn_tanh", "rnn_relu") or (
        base == "mkldnn_rnn_layer"
    )
