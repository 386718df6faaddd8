"""The tensors that a call returned, by path."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_DEPTH = 8

Outputs = dict[str, torch.Tensor]
"""Tensors that a call returned, by path ("logits", "0.1"); caches are left out."""


def flattened(out: Any) -> Outputs:
    """The tensors that a call returned, by path; objects such as caches are left out."""
    found: Outputs = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach().clone()
        elif depth > _DEPTH:
            return
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for key, item in enumerate(value):
                walk(item, f"{path}.{key}" if path else str(key), depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                walk(getattr(value, field.name), f"{path}.{field.name}".strip("."), depth + 1)

    walk(out, "", 0)
    return found


def equal_outputs(a: Outputs, b: Outputs) -> bool:
    """Whether the outputs of two runs are equal bit for bit."""
    return a.keys() == b.keys() and all(same_bits(tensor, b[name]) for name, tensor in a.items())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN counts as equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.equal(a, b)) or bool(((a == b) | (a.isnan() & b.isnan())).all())
