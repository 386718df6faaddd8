"""Measures whether taking tensors out of compiled code changes its results: the same code runs once
more with nothing taken, and the bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from whence.frameworks.torch_arrays import tensors_in
from whence.instrument.torch.compiled.fx_nodes import flat
from whence.instrument.wording import raised

_PURE = {
    "aten",
    "prims",
    "inductor",
    "quantized",
    "mkldnn",
    "mkl",
    "mkldnn_prepacked",
    "onednn",
    "whence",
    "rngprims",
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Cannot(Exception):
    """The graph cannot be run twice; the text is the reason."""


def silently(
    gm: Any,
    code: Callable[[Any], Any],
    inputs: Sequence[Any],
    keep: Collection[int],
    mutated: Collection[int],
) -> list[Any]:
    """Run the code on clones of these inputs, invisibly to the program. Returns its results, then
    the inputs at `mutated` after the run.

    keep: indices of inputs that need no clone, because the code does not write them. The states of
    random generators are restored. Raises Cannot.
    """
    for node in gm.graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and node.target.namespace not in _PURE
        ):
            raise Cannot(f"it runs {node.target}, which may act outside the graph")
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Cannot(f"it runs {node.target.name()}, a higher-order operator")
    devices = {v.device for v in inputs if isinstance(v, torch.Tensor) and v.device.type != "cpu"}
    states = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            clones = _clones(inputs, keep)
            mutated_clones = [clones[i] for i in mutated]
            out = code(list(clones))
            return [*tensors_in(flat(out)), *mutated_clones]
    except Exception as error:  # whatever an operator raises where it is run once more
        raise Cannot(f"run beside the program it raised {raised(error)}") from error
    finally:
        torch.set_rng_state(state)
        for device, rng_state in states:
            torch.get_device_module(device).set_rng_state(rng_state, device)


def _clones(inputs: Sequence[Any], keep: Collection[int]) -> list[Any]:
    """Clones of the inputs. Inputs that share memory also share it as clones."""
    storages: dict[int, Any] = {}
    clones: list[Any] = []
    for i, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or i in keep:
            clones.append(value)
            continue
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            raise Cannot(f"an input is a {type(value).__name__}")
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        clone = torch.empty(0, dtype=value.dtype, device=value.device)
        clones.append(
            clone.set_(
                storages[storage._cdata], value.storage_offset(), value.shape, value.stride()
            )
        )
    return clones


def difference(expected: Sequence[Any], actual: Sequence[Any]) -> str:
    """The difference in words ("3 ulp in 2 of 5 tensors"), "" where all bits are equal."""
    if len(expected) != len(actual):
        return f"{len(actual)} tensors instead of {len(expected)}"
    differing = worst = 0
    for a, b in zip(expected, actual):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(b.shape)} {b.dtype} instead of {tuple(a.shape)} {a.dtype}"
        steps = _ulp(a.detach(), b.detach())
        if steps:
            differing += 1
            worst = max(worst, steps)
    if not differing:
        return ""
    return f"{worst} ulp in {differing} of {len(expected)} tensors"


def _ulp(a: Any, b: Any) -> int:
    """Largest distance between two elements in units in the last place, 0 when all bits are
    equal.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = a.contiguous(), b.contiguous()
    kind = _BITS[a.element_size()]
    first, second = a.reshape(-1).view(kind), b.reshape(-1).view(kind)
    if torch.equal(first, second):
        return 0
    if kind in (torch.uint8, torch.int64):
        return 1 if kind is torch.uint8 else int((first - second).abs().max())
    first, second = (
        torch.where(v < 0, torch.iinfo(kind).min - v.long(), v.long()) for v in (first, second)
    )
    return max(1, int((first - second).abs().max()))
