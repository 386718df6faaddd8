"""Stores the tensors of a script in a safetensors file that keeps their memory layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from whence import dtypes
from whence.frameworks.torch_arrays import canonical


def save(tensors: Mapping[str, Any]) -> bytes:
    """Returns the tensors as the bytes of a safetensors file. A non-contiguous tensor is stored as
    its memory together with its layout; tensors that share memory share it in the file.
    """
    stored_tensors: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    memories: dict[tuple[int, Any], tuple[str, list[str]]] = {}
    for name, tensor in tensors.items():
        t = tensor.detach().cpu()
        t = t.resolve_conj() if t.is_complex() else t
        shares = sum(
            o.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and o.dtype == tensor.dtype
            for o in tensors.values()
        )
        if t.is_contiguous() and (shares == 1 or not t.numel()):
            stored_tensors[name] = t
            continue
        key = (t.untyped_storage().data_ptr(), t.dtype)
        memories.setdefault(key, (f"memory.{len(memories)}", []))[1].append(name)
    for memory, names in memories.values():
        views = [tensors[n].detach().cpu() for n in names]
        first = min(v.storage_offset() for v in views) // 64 * 64
        reach = max(
            v.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride())) + 1
            for v in views
        )
        whole = torch.empty(0, dtype=views[0].dtype).set_(
            views[0].untyped_storage(), first, (reach - first,), (1,)
        )
        stored_tensors[memory] = whole
        layouts |= {
            n: [memory, list(v.shape), list(v.stride()), v.storage_offset() - first]
            for n, v in zip(names, views)
        }
    header: dict[str, Any] = {"__metadata__": {"layouts": json.dumps(layouts)}}
    chunks, offset = [], 0
    for name, tensor in stored_tensors.items():
        raw = canonical(tensor).tobytes()
        header[name] = {
            "dtype": stored(str(tensor.dtype)[6:]),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        chunks.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(chunks)


def stored(dtype: str) -> str:
    return "C128" if dtype == "complex128" else dtypes.named(dtype).safetensors
