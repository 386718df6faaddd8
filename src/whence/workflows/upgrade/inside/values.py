"""Numbers that are the same in two environments (weights by name and shape, inputs by name), and
digests of results.
"""

from __future__ import annotations

import hashlib
import math
import re
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

_ABOUT_ONE = re.compile(r"(^|[._])(weight|gamma|scale|.*norm\w*|running_var)$")
_TABLE = re.compile(r"embed|token|position", re.IGNORECASE)


def drawn(name: str, shape: Iterable[int]) -> Any:
    """Normally distributed numbers, float32, determined by name and shape."""
    sizes = tuple(shape)
    seed = zlib.crc32(f"{name} {sizes}".encode())
    return np.random.default_rng(seed).standard_normal(sizes, dtype=np.float32)


def integers(name: str, shape: Iterable[int], low: int, high: int) -> Any:
    """Integers in low..high (exclusive), int64, determined by name and shape."""
    sizes = tuple(shape)
    seed = zlib.crc32(f"{name} {sizes} {low} {high}".encode())
    return np.random.default_rng(seed).integers(low, high, sizes)


def weight(name: str, shape: Iterable[int]) -> Any:
    """A parameter, float32, scaled so that activations stay near 1; norm weights stay near 1."""
    sizes = tuple(shape)
    numbers = drawn(name, sizes)
    if name.endswith("A_log"):
        return np.log(1 + np.abs(numbers))
    if len(sizes) < 2:
        return (1 + 0.1 * numbers if _ABOUT_ONE.search(name) else 0.1 * numbers).astype(np.float32)
    if _TABLE.search(name) and len(sizes) == 2:
        return 0.5 * numbers
    fan_in = math.prod(sizes[1:]) if len(sizes) != 3 else max(sizes[1:])
    return (numbers / math.sqrt(max(fan_in, 1))).astype(np.float32)


def words(error: BaseException) -> set[str]:
    """Words of an error, and of the lines of code that it went through."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    return set(re.findall(r"\w+", " ".join([str(error), *lines])))


def aliases(model: Any) -> list[list[str]]:
    """Names of each floating-point parameter in the model's order; all names of a tied one
    together.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values()]


def fill(
    model: Any,
    only: Iterable[str] | None = None,
    random: Iterable[str] = (),
    called: Mapping[str, str] | None = None,
) -> None:
    """Fill parameters, running statistics and buffers that the constructor draws at random.

    only: names of parameters; None for all. random: names of these buffers. called: names of
    parameters in another release.
    """
    former = called or {}
    import torch

    wanted = set(only) if only is not None else None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for names in aliases(model):
            if wanted is None or wanted & set(names):
                parameter = parameters[names[0]]
                name = former.get(names[0], names[0])
                parameter.copy_(torch.from_numpy(np.array(weight(name, parameter.shape))))
        drawn_buffers = set(random)
        for name, buffer in model.named_buffers():
            if not buffer.is_floating_point():
                continue
            if name.endswith("running_var"):
                numbers = 1 + np.abs(0.1 * drawn(name, buffer.shape))
            elif name.endswith("running_mean"):
                numbers = 0.1 * drawn(name, buffer.shape)
            elif name in drawn_buffers:
                numbers = drawn(name, buffer.shape)
            else:
                continue
            buffer.copy_(torch.from_numpy(np.array(numbers)))


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in a value (tuples, lists, mappings, data classes), with their names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from tensors(inner, f"{name}.{key}".lstrip("."))


def digest(tensor: Any) -> list[Any]:
    """[dtype, shape, hash of the bits, whether all elements are finite] of a tensor."""
    import torch

    held = tensor.detach().cpu().contiguous()
    finite = not held.is_floating_point() or bool(torch.isfinite(held).all())
    bits = held.reshape(-1).view(torch.uint8).numpy() if held.numel() else np.zeros(0, np.uint8)
    found = hashlib.sha256(bits.tobytes()).hexdigest()[:24]
    return [str(held.dtype).removeprefix("torch."), list(held.shape), found, finite]


def buffers_drawn(make: Any) -> tuple[Any, list[str]]:
    """Build a model with `make`; returns it and the names of its buffers with random content."""
    import torch

    torch.manual_seed(1)
    other = make()
    torch.manual_seed(0)
    model = make()
    first, second = dict(other.named_buffers()), dict(model.named_buffers())
    names = [
        name
        for name, buffer in second.items()
        if buffer.is_floating_point()
        and name in first
        and first[name].shape == buffer.shape
        and not torch.equal(first[name], buffer)
    ]
    return model, names
