"""Which modules run in one call of a model, in which order, and which module reads which result."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import tensors_in
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.trace import hooked


class LeafCall(NamedTuple):
    """A call of a module without children: numbers of its input and output tensors."""

    scope: str
    given: tuple[int, ...]
    gives: int


class LeafCalls(TorchDispatchMode):  # type: ignore[misc]
    """Listens to one call.

    order: module -> its rank among the first calls of all modules. shapes: (module, number of its
    call) -> shapes of the tensors among its arguments. calls: of modules without children.
    read_outside: tensors that other code reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: dict[str, int] = {}
        self.shapes: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self.calls: list[LeafCall] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.read_outside: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id is that of one tensor while it lives
        self._inside = 0

    @contextlib.contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """The mode, with hooks on the model's modules."""
        with hooked(model.named_modules(), self._enters, self._leaves), self:
            yield
        self._kept.clear()

    def _enters(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        self.order.setdefault(name, len(self.order))
        tensors = tensors_in([*args, *kwargs.values()])
        self.shapes[name, self.counts[name]] = [tuple(t.shape) for t in tensors]
        self.counts[name] += 1
        self._inside += _is_leaf(module)

    def _leaves(self, name: str, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if _is_leaf(module):
            self._inside -= 1
            given = tuple(map(self._number, tensors_in([*args, *kwargs.values()])))
            gives = self._number(out) if isinstance(out, torch.Tensor) else -1
            self.calls.append(LeafCall(name, given, gives))

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._kept.append(tensor)
        return self._numbers[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside:
            for tensor in tensors_in([*args, *(kwargs or {}).values()]):
                number = self._numbers.get(id(tensor))
                if number is not None:
                    self.read_outside.add(number)
        return func(*args, **(kwargs or {}))


def _is_leaf(module: Any) -> bool:
    return next(module.children(), None) is None


def leaf_calls(subject: Subject, inputs: Any) -> LeafCalls:
    """Listen to one call of a model. Raises whatever the model raises."""
    calls = LeafCalls()
    subject.run(inputs, calls.listening(subject.model))
    return calls
