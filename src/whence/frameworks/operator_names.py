"""Operators by their names alone. Needs nothing: programs are validated where there is no torch."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


def base_name(name: str) -> str:
    """The name without namespace and overload: "aten.mul.Tensor" -> "mul"."""
    return name.split(".")[1] if name.count(".") > 1 else name


# Choose among scores; which of the results holds the indices.
CHOOSES = {
    "topk": 1, "sort": 1, "argsort": 0, "argmax": 0, "argmin": 0, "max": 1, "min": 1, "kthvalue": 1,
    "median": 1, "nanmedian": 1, "mode": 1, "cummax": 1, "cummin": 1, "max_pool2d_with_indices": 1,
    "max_pool3d_with_indices": 1, "adaptive_max_pool2d": 1, "adaptive_max_pool3d": 1,
}  # fmt: skip

VIEWS = frozenset((
    "view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "t",
    "alias", "detach", "split", "chunk", "unbind", "as_strided", "narrow", "unfold", "diagonal",
    "view_as_real", "view_as_complex", "lift_fresh", "split_with_sizes", "movedim", "reshape",
    "_reshape_alias", "_unsafe_view", "real", "imag", "swapaxes", "mT", "flatten", "unflatten",
    "squeeze_", "unsqueeze_", "contiguous", "unsafe_split", "unsafe_chunk",
    "unsafe_split_with_sizes",
))  # fmt: skip
"""Operators whose result shows the memory of their first tensor, or may."""
