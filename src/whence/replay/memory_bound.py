"""How many bytes an operator makes at most, worked out before it runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import tensors_in
from whence.replay import allowed_operators
from whence.replay.binding import BoundOperation

# Views by their schema that copy when they must.
_MAY_COPY = {
    "reshape", "reshape_as", "ravel", "flatten", "contiguous", "to", "type_as", "resolve_conj",
    "resolve_neg", "view_as", "unflatten",
}  # fmt: skip
# Results of these are no larger than their largest operand.
_NEVER_GROW = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod",
    "var", "std", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "sort",
    "topk", "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm",
    "native_batch_norm", "_native_batch_norm_legit_no_training", "clone", "contiguous",
    "_to_copy", "to", "relu", "flip", "roll", "tril", "triu",
}  # fmt: skip
_ATTENTIONS = {
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
}
_FILLED = frozenset({"zeros", "ones", "full", "empty"})


class MemoryBudget:
    """Refuses operators that would make too much. max_result: bytes of one result; all together may
    have 16 times as many. data_dependent: some operator's bytes depend on its elements.
    """

    def __init__(self, max_result: int) -> None:
        self.max_result, self.total, self.data_dependent = max_result, 0, False

    def spend(self, step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count an operator before it runs. Raises ReplayRefused when it would make too much."""
        largest, by_data = _largest_result(step, args, kwargs)
        self.data_dependent |= by_data
        self.total += largest
        if largest > self.max_result or self.total > 16 * self.max_result:
            raise ReplayRefused(
                f"operator {step.operation.name} would make {largest} bytes; at most "
                f"{self.max_result} are allowed"
            )


def _largest_result(
    step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, bool]:
    """(bytes that the operator makes at most, do they depend on the elements it is given?)."""
    if not step.allocates and step.base not in _MAY_COPY:
        return 0, False
    largest = _from_shapes(step, args, kwargs)
    if largest is None:
        largest = _measured(step, args, kwargs)
    if largest is not None:
        return largest, False
    if step.base in allowed_operators.DATA_DEPENDENT:
        return _bound_by_data(step.base, dict(zip(step.names, args)) | kwargs), True
    # No meta kernel, or operands of mixed dtypes. Grown at most by its integers.
    read_bytes = sum(t.untyped_storage().nbytes() for t in tensors_in([*args, *kwargs.values()]))
    return 8 * read_bytes * max([1, *(_product(v) for v in (*args, *kwargs.values()))]), False


def _from_shapes(step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """An upper bound in bytes for the everyday operators; None for the others. Loads nothing,
    where meta kernels load a compiler.
    """
    tensors = list(tensors_in([*args, *kwargs.values()]))
    widest = 16  # bytes of a complex128
    if step.base == "arange":
        numbers = [a for a in args if isinstance(a, (int, float))]
        start, end, by = {1: (0, *numbers, 1), 2: (*numbers, 1)}.get(
            len(numbers), tuple(numbers[:3]) or (0, 0, 1)
        )
        return widest * max(0, math.ceil((end - start) / by)) if by else None
    if not tensors:
        sizes = [a for a in args if isinstance(a, list)]
        return widest * math.prod(sizes[0]) if step.base in _FILLED and len(sizes) == 1 else None
    try:
        if step.pointwise:
            return widest * math.prod(np.broadcast_shapes(*(tuple(t.shape) for t in tensors)))
        if step.base in _NEVER_GROW:
            return int(widest * max(t.numel() for t in tensors))
        if step.base in ("cat", "stack"):
            return int(widest * sum(t.numel() for t in tensors))
        if step.base == "embedding":
            return int(widest * tensors[1].numel() * tensors[0].shape[-1])
        if step.base == "linear":
            return int(
                widest * (tensors[0].numel() // max(1, tensors[0].shape[-1])) * tensors[1].shape[0]
            )
        if step.base in _ATTENTIONS:
            rows, keys, width = (
                tensors[0].numel() // max(1, tensors[0].shape[-1]),
                tensors[1].shape[-2],
                tensors[2].shape[-1],
            )
            # written out it makes all scores, and masks them
            return int(widest * rows * (width + 2 * keys + 2))
        if step.base in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = tensors[-2:]
            return int(widest * math.prod(a.shape[:-1]) * b.shape[-1])
    except (ValueError, IndexError):  # shapes that do not fit: the operator itself will say so
        return None
    return None


def _measured(step: BoundOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Bytes of the largest tensor the operator makes, on the way too, found on meta tensors;
    None when meta cannot tell.
    """

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        if isinstance(value, (list, tuple)):
            return [meta(item) for item in value]
        return torch.device("meta") if isinstance(value, torch.device) else value

    shadow = {k: meta(v) for k, v in kwargs.items()}
    if next(tensors_in([*args, *kwargs.values()]), None) is None:
        shadow["device"] = torch.device("meta")
    try:
        with _LargestStorage() as storages:
            step.func(*(meta(a) for a in args), **shadow)
        return int(storages.largest)
    except Exception:  # noqa: BLE001 - meta kernels are Python and raise anything; whoever asked has another bound
        return None


def _bound_by_data(base: str, named: dict[str, Any]) -> int:
    """Bytes that an operator whose size depends on its elements makes at most, read off the
    elements.
    """
    tensors = list(tensors_in(list(named.values())))
    first = tensors[0]
    if base in ("one_hot", "bincount"):
        classes = max(
            int(first.max()) + 1 if first.numel() else 0,
            named.get("num_classes", -1),
            named.get("minlength", 0),
        )
        return 8 * int(classes) * (int(first.numel()) if base == "one_hot" else 1)
    if base == "repeat_interleave":
        counts = named["repeats"]
        return 8 * int(counts.sum()) * max(1, int(first.numel()) // max(1, int(counts.numel())))
    return sum(8 * t.numel() * max(1, t.dim()) for t in tensors)


def _product(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return math.prod(_product(item) for item in value)
    return max(1, value) if type(value) is int else 1


class _LargestStorage(TorchDispatchMode):  # type: ignore[misc]
    """The largest thing an operator makes, also on the way when it is a composite one."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            # What an expanded view covers costs nothing.
            self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out
