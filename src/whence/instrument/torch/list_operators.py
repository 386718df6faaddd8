"""Splits operators on lists of tensors (`_foreach_mul_`, `_fused_adamw_`) into one operator for
each tensor.

The recording of one tensor then does not depend on the others in its list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_LISTS = ("_foreach_", "_fused_")
_OVERLOADS = {"Scalar": "Scalar", "Tensor": "Tensor", "List": "Tensor", "ScalarList": "Scalar"}
"""Overload of an operator on a list -> overload of the operator on one tensor."""


UNSCALES = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_ON_ONE = {
    torch.ops.aten._foreach_norm.Scalar: torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten._foreach_clamp_min_.Scalar: torch.ops.aten.clamp_min_.default,
    torch.ops.aten._foreach_clamp_max_.Scalar: torch.ops.aten.clamp_max_.default,
}


class OneOfList(NamedTuple):
    """What an operator on lists does at one index of the lists: an operator with its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def result(self, place: int, out: Any) -> Any:
        """The result of this operator. out: what the operator on lists returned."""
        if out is not None:
            return [out[place]]
        return self.args[0] if self.func._schema.returns else None


def one_by_one(func: Any, args: Any, kwargs: Any) -> list[OneOfList]:
    """The operators that this call amounts to, one for each index of its lists; [] for an operator
    without lists.

    `_foreach_mul_.Scalar` becomes `mul_.Scalar` on each tensor; an operator without such a
    counterpart stays as it is, on lists of one tensor.
    """
    if func is UNSCALES:
        gradients, _, inverse = args
        return [OneOfList(torch.ops.aten.mul_.Tensor, (g, inverse), {}) for g in gradients]
    if not getattr(func, "_opname", "").startswith(_LISTS):
        return []
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    lengths = {len(items) for items in lists} - {0}
    if len(lengths) != 1:
        return []
    count = lengths.pop()
    single = None if kwargs or len(args) != 2 else _on_one(func)
    parts = []
    for place in range(count):
        taken = tuple(_item(value, place, alone=single is not None) for value in args)
        named = {key: _item(value, place, alone=False) for key, value in kwargs.items()}
        parts.append(OneOfList(single or func, taken, named))
    return parts


def _on_one(func: Any) -> Any:
    """The operator on one tensor that an operator in place on a list of them amounts to, or one
    that computes norms; None where it has another form.
    """
    if (single := _ON_ONE.get(func)) is not None:
        return single
    name = func._opname
    if not name.startswith("_foreach_") or not name.endswith("_"):
        return None
    overloads = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    return getattr(overloads, _OVERLOADS.get(func._overloadname, ""), None)


def _item(value: Any, place: int, *, alone: bool) -> Any:
    """An argument for one index of the lists. alone: pass a tensor, not a list of one tensor."""
    if not isinstance(value, (list, tuple)):
        return value
    items = value[place : place + 1]
    return items[0] if alone else list(items)
