"""Random numbers that a module call draws become inputs of its program.

A replay draws nothing: dropout, stochastic depth and noise are computed from the numbers that the
recorded run drew, so that runs with other seeds or on other devices can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from whence.frameworks.torch_arrays import tensors_in
from whence.frameworks.torch_schema import OperatorSchema, draws, restored, schema_of
from whence.instrument.torch.operator_listener import OperatorListener
from whence.instrument.torch.pool_rows import Pools

# What they make depends on numbers and sizes alone, or their results hold what they drew.
_DRAWN_FROM_NUMBERS = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_",
    "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "uniform_",
}  # fmt: skip
FUSED_DROPOUT = "native_dropout"


class Draw(NamedTuple):
    """A tensor of random numbers, with the operator and the settings that drew it."""

    tensor: Any
    operator: str
    settings: dict[str, Any]


def draw_of(schema: OperatorSchema, named: Mapping[str, Any], out: Any) -> Draw | None:
    """What an operator call drew; None where that depends on the elements of a tensor.

    named: its arguments by schema name. out: what it returned.
    """
    settings = {
        name: value
        for name, value in {**schema.defaults, **named}.items()
        if isinstance(value, (bool, int, float)) and name not in ("pin_memory", "train")
    }
    if schema.base == FUSED_DROPOUT:
        return Draw(out[1], schema.name, settings)
    if schema.base not in _DRAWN_FROM_NUMBERS:
        return None
    shaped_like = {"self"} if schema.base.endswith("_like") or "p" in settings else set()
    read = {name for name, value in named.items() if next(tensors_in(value), None) is not None}
    if read - set(schema.writes) - shaped_like or not isinstance(out, torch.Tensor):
        return None
    return Draw(out, schema.name, settings)


class DrawListener(OperatorListener):
    """Reports the random numbers that a module call draws and the pool rows that it reads and
    writes, where its program is known.

    drawn: called with each tensor of random numbers right after the draw. Listening costs some
    microseconds per operator, so it is done only for modules that drew numbers or used pools
    before.
    """

    def __init__(self, drawn: Callable[[Any], object], pools: Pools) -> None:
        super().__init__()
        self._drawn, self._pools = drawn, pools

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        with restored(func, self.autocast):
            out = func(*args, **kwargs)
        if self.over or not isinstance(func, torch._ops.OpOverload):
            return out
        schema = schema_of(func)
        if schema.random or self._pools.holds([*args, *kwargs.values()]):
            self._look(schema, dict(zip(schema.positional, args)) | kwargs, out)
        return out

    def _look(self, schema: OperatorSchema, named: dict[str, Any], out: Any) -> None:
        try:
            if draws(schema, named) and (draw := draw_of(schema, named, out)) is not None:
                self._drawn(draw.tensor)
            elif not schema.random:
                self._pools.record(schema, named, out)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the program
            self.give_up(f"the recorder failed at {schema.name}: {type(error).__name__}: {error}")

    def child_enters(self, k: int, tensors: Any) -> None:
        """Children have listeners of their own."""

    def child_leaves(self, k: int, tensors: Any) -> None:
        """Children have listeners of their own."""
