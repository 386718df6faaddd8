"""The code of an optimiser that is not torch's own, as it runs in a step: recorded once for all
parameters, and divided into what it does to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.torch.list_operators import one_by_one
from whence.instrument.torch.operand_table import OperandTable, layout
from whence.instrument.torch.program_recorder import Recorder, Recording
from whence.instrument.torch.split_recording import Wanted

Tensors = list[tuple[str, Any]]
"""(slot, tensor) of one parameter: itself, its gradient, what the optimiser keeps of it."""

_MOST_OPERATORS = 400
"""So many operators are recorded for each parameter."""
_DEEPEST = 4


def is_torchs(kind: type) -> bool:
    """Is this class of optimisers one of torch's own, and no class that is made of one?"""
    return getattr(torch.optim, kind.__name__, None) is kind


def can_listen(parameters: Sequence[Tensors]) -> bool:
    """Can code that works on these tensors be recorded? They have to be plain, and no mode of the
    program on.
    """
    return torch._C._len_torch_dispatch_stack() == 0 and all(
        OperandTable.is_plain(tensor) for tensors in parameters for _, tensor in tensors
    )


class OptimizerCode(Recorder):
    """Records what runs inside its `with` block. parameters: what each has before the step.
    settings: tensors that the optimiser keeps of its groups, by name, which are constants of the
    programs, as settings that are numbers.
    """

    def __init__(self, parameters: Sequence[Tensors], settings: Tensors) -> None:
        names: dict[tuple[Any, ...], str] = {}
        inputs: Tensors = []
        self._read: list[dict[str, str]] = []
        for number, tensors in enumerate(parameters):
            read: dict[str, str] = {}
            for slot, tensor in tensors:
                place = layout(tensor)  # several parameters may share a count of steps
                if place not in names:
                    names[place] = f"{slot} of {number}"
                    inputs.append((names[place], tensor))
                read.setdefault(names[place], slot)
            self._read.append(read)
        most = _MOST_OPERATORS * len(parameters)
        super().__init__(inputs, [], casts=False, most=most, watch_versions=False)
        self._settings: dict[str, Any] = {}
        with self._guarded("reading the settings of groups"):
            for name, tensor in settings:
                self._table.constant(tensor, layout(tensor))
                if tensor.is_floating_point():
                    self._settings[name] = tensor.detach().clone()

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        if not self.over and (parts := one_by_one(func, args, kwargs)):
            return self.operator_as(lambda: self.run(func, args, kwargs), parts)
        return super().operator(func, args, kwargs)

    def measured(self, settings: Tensors) -> str:
        """The name of a setting that the step has changed and that is no count: later steps compute
        with a number that rounding changes. "" where there is none.
        """
        changed = (
            name
            for name, tensor in settings
            if (before := self._settings.get(name)) is not None and not torch.equal(before, tensor)
        )
        return next(changed, "")

    def programs(self, outputs: Sequence[Tensors]) -> list[Recording]:
        """What the step did to each parameter. outputs: what each has after it."""
        return self.finish_each(
            [Wanted(read, made) for read, made in zip(self._read, outputs, strict=True)]
        )


def kept_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of what an optimiser keeps, as far as it is tensors: those in lists and
    dictionaries too ("factors.0").
    """
    yield from _named("", state, 0) if isinstance(state, dict) else ()


def _named(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in NAMES:
            yield path, value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(key, (str, int)):
                yield from _named(f"{path}.{key}" if path else str(key), item, depth + 1)
