"""The code of an optimiser that is not torch's own, as it runs in a step: recorded once for all
parameters, and divided into what it does to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from whence.frameworks.torch_arrays import NAMES
from whence.instrument.torch.operand_table import layout
from whence.instrument.torch.program_recorder import Recording
from whence.instrument.torch.split_recording import Wanted
from whence.instrument.torch.training.code_region import CodeRecorder

Tensors = list[tuple[str, Any]]
"""(slot, tensor) of one parameter: itself, its gradient, what the optimiser keeps of it."""

_MOST_OPERATORS = 400
"""So many operators are recorded for each parameter."""
_DEEPEST = 4


def is_torchs(kind: type) -> bool:
    """Is this class of optimisers one of torch's own, and no class that is made of one?"""
    return getattr(torch.optim, kind.__name__, None) is kind


class OptimizerCode(CodeRecorder):
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
        return self.each(
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
