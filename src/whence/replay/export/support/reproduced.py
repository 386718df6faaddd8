"""Inputs and states that make a call of an operator the same again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from whence.frameworks.torch_schema import chosen_result
from whence.replay.export.support.operators import reference_rules
from whence.replay.export.support.row import Wrong
from whence.replay.export.support.tensors import Built, Elements, specs_in, tensors_in


def built_from(arguments: Mapping[str, Any], elements: Elements) -> Built:
    return Built(arguments, {name: elements.of(name, spec) for name, spec in specs_in(arguments)})


def drawn_gradient(like: Any, seed: int) -> Any:
    with reference_rules():
        generator = torch.Generator().manual_seed(seed)
        values = (
            torch.rand(math.prod(like.shape), generator=generator, dtype=torch.float64).reshape(
                like.shape
            )
            * 2
            - 1
        )
        # Rounded to 8 bits, so that every dtype holds the same.
        return values.to(torch.bfloat16).to(like.dtype).to(like.device)


@contextlib.contextmanager
def generators_in(state: Mapping[str, Any], seed: int) -> Iterator[None]:
    """With generators in these states ("cpu", "cuda"); without any, the CPU's is seeded. Afterwards
    the CPU's is as before.
    """
    saved = torch.get_rng_state()
    torch.manual_seed(seed)
    for device, value in state.items():
        (torch if device == "cpu" else getattr(torch, device)).set_rng_state(value)
    try:
        yield
    finally:
        torch.set_rng_state(saved)


def picks_of(func: Any, inputs: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """For results that are indices: what they point at, by slot; equal values may be pointed at in
    any order.
    """
    name = func._schema.name.partition("::")[2]
    place = chosen_result(func)
    x = next(tensors_in(list(inputs.values())), None)
    if place is None or x is None:
        return {}
    dim = inputs.get("dim", -1 if name not in ("argmax", "argmin") else None)

    def pick(index: Any) -> Any:
        shaped = index
        if "pool" in name:
            flat = x.flatten(-3 if "3d" in name else -2)
            index = index.flatten(-3 if "3d" in name else -2)
            axis = -1
        elif dim is None or x.dim() == 0:
            flat, index, axis = x.reshape(-1), index.reshape(-1), 0
        else:
            flat, axis = x, dim
            if index.dim() < x.dim():
                index = index.unsqueeze(dim)
        if index.numel() and not bool(((index >= 0) & (index < flat.shape[axis])).all()):
            raise Wrong("an index beyond its tensor")
        return flat.gather(axis, index).reshape(shaped.shape)

    return {f"output.{place}": pick}
