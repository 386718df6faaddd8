"""Cast points: what a float32 recording must remember for a 16-bit replay."""

from __future__ import annotations

from typing import Any

import torch

from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import OperatorSchema
from whence.instrument.torch.caller_code import cast_way
from whence.instrument.torch.operand_table import Operand, OperandTable, layout

_FILLED = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "eye"}


class CastPoints:
    """Casts of float32 to float32, which run no operator, as operations "whence.cast".

    explicit: `.float()` runs now.
    """

    def __init__(self, table: OperandTable) -> None:
        self._table = table
        self._raised: set[tuple[Any, ...]] = set()
        self.explicit = False

    def is_pinned(self, facts: OperatorSchema, named: dict[str, Any], outs: list[Any]) -> bool:
        """Would the result be float32 in a 16-bit run too? Only asked of float32 recordings."""
        if self._table.base is not torch.float32 or not any(t.dtype is torch.float32 for t in outs):
            return False
        if facts.base in _FILLED or facts.base.endswith("_like"):
            return named.get("dtype") is None and "self" not in named
        floats = [t for value in named.values() for t in tensors_in(value) if t.is_floating_point()]
        if not floats:
            return True  # int -> float: positions, counts
        pins = [t for t in floats if t.dtype is torch.float32 and layout(t) in self._table.pinned]
        return bool(pins) and (any(t.dim() for t in pins) or not any(t.dim() for t in floats))

    def record_cast(
        self, facts: OperatorSchema, encoded: Any, named: dict[str, Any], outs: list[Any]
    ) -> bool:
        """Record a cast operator as a cast point where a 16-bit run would tell them apart; False:
        record it as it is.
        """
        source, result = named.get("self"), outs[0] if outs else None
        if (
            self._table.base is not torch.float32
            or source is None
            or result is None
            or result.dtype is not torch.float32
        ):
            return False
        if layout(source) == layout(result):
            # `to` that moved nothing (it is an operator under inference_mode only): the
            # torch-function level tells which way it goes.
            self._table.operands[layout(result)] = encoded[0]
            return True
        if source.dtype is not torch.bool:
            return False
        # 0 and 1 are exact in any dtype, so only `.float()` asks for float32; a mask cast
        # `.to(x.dtype)` follows the working dtype.
        key = layout(result)
        self._table.emit(
            "whence.cast",
            (encoded[0], {"dtype": "float32"}, "up" if self.explicit else "back"),
            {},
            result,
            key,
        )
        (self._table.pinned.add if self.explicit else self._table.pinned.discard)(key)
        return True

    def add(self, tensor: Any, way: str) -> None:
        """A cast of float32 to float32. way: "up" (stays float32 in 16 bit), "back" (to the working
        dtype), "" (by turns).
        """
        key = layout(tensor)
        pinned = key in self._table.pinned
        way = way or ("back" if pinned else "up")
        if pinned == (way == "up"):
            return
        self._table.emit(
            "whence.cast", (self._table.ref(tensor), {"dtype": "float32"}, way), {}, tensor, key
        )
        self._table.notes.add("cast pinned")
        (self._raised.add if way == "up" else self._raised.discard)(key)
        (self._table.pinned.add if way == "up" else self._table.pinned.discard)(key)

    def widened(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Operand] | None:
        """`softmax(x, dtype=float32)` of a float32 x: x is widened for this call only."""
        if self._table.base is not torch.float32:
            return None
        dtypes = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
        operand = args[0] if args else kwargs.get("input")
        if (
            dtypes != [torch.float32]
            or not isinstance(operand, torch.Tensor)
            or operand.dtype is not torch.float32
        ):
            return None
        key = layout(operand)
        if key in self._table.pinned:
            return None
        source = self._table.ref(operand)
        self.add(operand, "up")
        return key, source

    def unmoved(self, name: str, args: Any, kwargs: Any, caller: Any) -> None:
        """A cast that returned its own tensor: no operator ran. caller: the frame that cast."""
        tensor = args[0]
        if self._table.base is not torch.float32 or tensor.dtype is not torch.float32:
            return
        if name == "float":
            self.add(tensor, "up")
            return
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.Tensor)]
        if others:
            # `h.type_as(x)` after `h = x.float()`: x is h's own tensor, and what is meant is x
            # before it was widened.
            self.add(
                tensor, "up" if layout(others[0]) in self._table.pinned - self._raised else "back"
            )
        elif any(isinstance(v, torch.dtype) for v in (*args[1:], *kwargs.values())):
            self.add(tensor, cast_way(caller))
