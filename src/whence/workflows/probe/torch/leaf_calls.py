"""Which modules run in one call of a model, in which order, and which hands its result to which."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import tensors_in
from whence.workflows.probe.torch.subject import Subject


class LeafCall(NamedTuple):
    """A call of a module without children: numbers of the tensors that it is given and gives."""

    scope: str
    given: tuple[int, ...]
    gives: int


class LeafCalls(TorchDispatchMode):  # type: ignore[misc]
    """Listens to one call. order: module -> its place among the first calls of all. shapes: module
    -> shapes of the tensors among its arguments, of its first call. calls: of modules without
    children. read_outside: tensors that are read by code of no such module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: dict[str, int] = {}
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self.calls: list[LeafCall] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.read_outside: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id is that of one tensor while it lives
        self._inside = 0

    @contextlib.contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """The mode, with hooks on the model's modules."""
        hooks = []
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None
            hooks.append(
                module.register_forward_pre_hook(self._enters(name, is_leaf), with_kwargs=True)
            )
            if is_leaf:
                hooks.append(module.register_forward_hook(self._leaves(name), with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._kept.clear()

    def _enters(self, name: str, is_leaf: bool) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.order.setdefault(name, len(self.order))
            self.counts[name] += 1
            if name not in self.shapes:
                tensors = tensors_in([*args, *kwargs.values()])
                self.shapes[name] = [tuple(t.shape) for t in tensors]
            self._inside += is_leaf

        return hook

    def _leaves(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            self._inside -= 1
            given = tuple(map(self._number, tensors_in([*args, *kwargs.values()])))
            gives = self._number(out) if isinstance(out, torch.Tensor) else -1
            self.calls.append(LeafCall(name, given, gives))

        return hook

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


def leaf_calls(subject: Subject, inputs: Any) -> LeafCalls:
    """Listen to one call of a model. Raises whatever the model raises."""
    calls = LeafCalls()
    subject.run(inputs, calls.listening(subject.model))
    return calls
