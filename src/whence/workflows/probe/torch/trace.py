"""Every operator of one run in order, with its inputs and results."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.torch_arrays import tensors_in
from whence.instrument.torch.sources import source_here

_BUDGET = 1 << 30
NOTHING_KEPT = 1 << 60
"""Value for `begin` of a trace that keeps no results."""

Key = tuple[str, int, str, int]
"""Scope, number of its call, operator, number of this operator in that call."""


@contextlib.contextmanager
def hooked(
    modules: Iterable[tuple[str, Any]],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Call hooks around each call of some modules.

    before(name, module, args, kwargs); after(name, module, args, kwargs, result), also for a call
    that failed. Scripted modules accept no hooks.
    """
    handles = []
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if before is not None:
            hook = partial(before, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if after is not None:
            hook = partial(after, name)
            handles.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class TracedOperator(NamedTuple):
    """One operator of a run.

    parents: numbers of the operators that produced its inputs. results: copies of its results and
    of what it wrote, None when there was no room. shapes: of the results. read: shapes of the
    tensors among its arguments.
    """

    key: Key
    op_type: str
    line: str
    parents: tuple[int, ...]
    is_view: bool
    draws: bool
    results: list[torch.Tensor] | None
    shapes: tuple[tuple[int, ...], ...]
    read: tuple[tuple[int, ...], ...]


class Trace(TorchDispatchMode):  # type: ignore[misc]
    """Records every operator that runs inside.

    begin: results of operators before this one are not kept. end: the first operator whose results
    were not kept for lack of memory, None when all were. change: called with (operator, args,
    kwargs, result); its return value replaces the result.
    """

    def __init__(
        self, model: Any, *, begin: int = 0, change: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.operators: list[TracedOperator] = []
        self.by_key: dict[Key, int] = {}
        self.end: int | None = None
        self._begin, self._change, self._room = begin, change, _BUDGET
        self._model = model
        self._stack: list[tuple[str, str, int]] = []
        self._calls: dict[str, int] = defaultdict(int)
        self._counts: dict[tuple[str, int, str], int] = defaultdict(int)
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._written: dict[int, int] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[Trace]:
        """The mode that records; the names of running modules are recorded too."""
        with hooked(self._model.named_modules(), self._enters, self._leaves), self:
            yield self
        self._made.clear()

    def _enters(self, scope: str, module: Any, args: Any, kwargs: Any) -> None:
        self._stack.append((scope, type(module).__name__, self._calls[scope]))
        self._calls[scope] += 1

    def _leaves(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in([*args, *kwargs.values()]))
        parents = self._parents(tensors)
        read = tuple(tuple(t.shape) for t in tensors)
        key = self._key(str(func))
        out = func(*args, **kwargs)
        if self._change is not None:
            out = self._change(key, func, args, kwargs, out)
        self._note(func, args, out, (parents, read), key)
        return out

    def _key(self, operator: str) -> Key:
        scope, _, call = self._stack[-1] if self._stack else ("", "", 0)
        count = self._counts[scope, call, operator]
        self._counts[scope, call, operator] += 1
        return scope, call, operator, count

    def _parents(self, tensors: list[Any]) -> tuple[int, ...]:
        found: set[int] = set()
        for tensor in tensors:
            made = self._made.get(id(tensor))
            if made is not None and made[0]() is tensor:
                found.add(made[1])
            written = self._written.get(_storage(tensor))
            if written is not None:
                found.add(written)
        return tuple(sorted(found))

    def _note(self, func: Any, args: Any, out: Any, before: tuple[Any, Any], key: Key) -> None:
        number = len(self.operators)
        results = list(tensors_in([out]))
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable and not results:
            results = list(tensors_in([args[0]])) if args else []
        is_view = bool(getattr(func, "is_view", False))
        for tensor in results:
            self._made[id(tensor)] = weakref.ref(tensor), number
            if not is_view:
                self._written[_storage(tensor)] = number
        self.by_key[key] = number
        op_type = self._stack[-1][1] if self._stack else ""
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        shapes = tuple(tuple(t.shape) for t in results)
        self.operators.append(
            TracedOperator(
                key,
                op_type,
                source_here(),
                before[0],
                is_view,
                draws,
                self._keep(results),
                shapes,
                before[1],
            )
        )

    def _keep(self, results: list[Any]) -> list[torch.Tensor] | None:
        number = len(self.operators)
        if number < self._begin or self.end is not None:
            return None
        size = sum(t.numel() * t.element_size() for t in results)
        if size > self._room and number > self._begin:
            self.end = number
            return None
        self._room -= size
        return [t.detach().clone() for t in results]


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)
