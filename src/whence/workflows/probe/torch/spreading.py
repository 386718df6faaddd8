"""Where a spread by rounding comes from: what begins it is computed as in the base run in turn, and
the spread that is left is measured.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from whence.results.probe import SpreadShare
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import GROSS, Judge, Trial, traced
from whence.workflows.probe.torch.measuring import Begun
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.regions import Everything, Region, Row, axes
from whence.workflows.probe.torch.trace import Key, Trace

_MOST_SHARES = 4
_LOOKS_UP = ("index", "gather", "scatter", "embedding", "take")
"""Operators that are no arithmetic on rows: cut into rows, they point outside of them."""
_EXPLAINS = 0.1
"""Share below which an operator's own kernel explains nothing: the code that calls it may."""

Change = Callable[..., Any]
"""(key, operator, args, kwargs, result) of an operator -> what takes the place of the result."""


class _Group(NamedTuple):
    """Where a spread begins: calls of one operator, or modules that run other code."""

    operator: str
    begun: list[Begun]
    is_only: bool

    @property
    def scopes(self) -> set[str]:
        """The modules."""
        return {b.operator.key[0] for b in self.begun}


def shares_of_rows(
    judge: Judge, one: CallInputs, many: CallInputs, size: int
) -> tuple[SpreadShare, ...]:
    """How much of the spread of a row in a batch of `size` goes away when what begins it is
    computed for this row alone.
    """
    region = Row(1, size)

    def spread(change: Change | None, mode: Any) -> float:
        trace = Trace(judge.subject.model, begin=1 << 60, change=change)
        outputs = judge.subject.run(many, trace.listening(), mode)
        return _variance(judge.base(one), outputs, region)

    def without(group: _Group, whole_modules: bool) -> float:
        if whole_modules:
            alone = _ModulesAlone(judge.subject.model, group.scopes, shapes, size)
            return spread(None, alone.listening())
        return spread(_RowByRow(group.operator, base, size), contextlib.nullcontext())

    begun = judge.begins(Trial(one, many, region), most=GROSS)
    try:
        base = traced(judge.subject, one, 1 << 60)
        shapes = _module_shapes(judge, one)
        whole = spread(None, contextlib.nullcontext())
    except Exception:  # noqa: BLE001 - what cannot be traced has no shares
        return ()
    return _shares(begun, whole, without)


def shares_of_threads(
    judge: Judge, inputs: CallInputs, threads: Callable[[int], Any], count: int
) -> tuple[SpreadShare, ...]:
    """How much of the spread on `count` threads goes away when what begins it runs on as many as
    before. threads: makes the context in which so many run.
    """
    before = torch.get_num_threads()
    trial = Trial(inputs, inputs, Everything(), modes=[lambda _: threads(count)])

    def spread(mode: Any, change: Change | None = None) -> float:
        trace = Trace(judge.subject.model, begin=1 << 60, change=change)
        outputs = judge.subject.run(inputs, threads(count), trace.listening(), mode)
        return _variance(judge.base(inputs), outputs, Everything())

    def without(group: _Group, whole_modules: bool) -> float:
        def as_before(key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
            if key[2] != group.operator or func._schema.is_mutable:
                return out
            with threads(before):
                return func(*args, **kwargs)

        if not whole_modules:
            return spread(contextlib.nullcontext(), as_before)
        return spread(_in_modules(judge.subject.model, group.scopes, lambda: threads(before)))

    begun = judge.begins(trial, most=GROSS)
    try:
        whole = spread(contextlib.nullcontext())
    except Exception:  # noqa: BLE001 - what cannot be traced has no shares
        return ()
    return _shares(begun, whole, without)


def _shares(
    begun: Sequence[Begun], whole: float, without: Callable[[_Group, bool], float]
) -> tuple[SpreadShare, ...]:
    """without(group, whole_modules): the variance that is left when operators of a group, or whole
    modules that run them, are computed as in the base run.
    """
    by_name: dict[tuple[str, str], list[Begun]] = defaultdict(list)
    for one in begun:
        by_name[one.operator.key[2], one.operator.key[0] if one.is_only else ""].append(one)
    groups = [_Group(name, found, found[0].is_only) for (name, _), found in by_name.items()]
    groups.sort(key=lambda group: -len(group.begun))
    shares = []
    for group in groups[:_MOST_SHARES] if whole else ():
        try:
            share = 1 - without(group, group.is_only) / whole
            if share < _EXPLAINS and not group.is_only and "" not in group.scopes:
                share = max(share, 1 - without(group, True) / whole)
        except Exception:  # noqa: BLE001 - what cannot be computed otherwise has no share
            continue
        name = group.operator.removesuffix(".default")
        scope = min(group.scopes) if len(group.scopes) == 1 else ""
        shares.append(SpreadShare(name, len(group.begun), max(0.0, share), scope))
    return tuple(sorted(shares, key=lambda share: -share.share))


def _variance(base: Outputs, changed: Outputs, region: Region) -> float:
    """Mean square of the differences where nothing may move, in mean squares of each output: those
    of independent sources add up.
    """
    total = 0.0
    for name in base.keys() & changed.keys():
        pair = region.pair(base[name], changed[name], None)
        if pair is None or pair[0].shape != pair[1].shape or not pair[0].is_floating_point():
            continue
        first, second = (tensor.double() for tensor in pair)
        scale = float(first.square().mean()) or 1.0
        total += float((first - second).square().mean()) / scale
    return total


class _RowByRow:
    """Computes the first row of every call of one operator alone, as in a batch of one.

    base: the trace of a batch of one, whose shapes tell the axis of rows.
    """

    def __init__(self, operator: str, base: Trace, size: int) -> None:
        self._operator, self._base, self._size = operator, base, size

    def __call__(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        at = self._base.by_key.get(key)
        is_lookup = any(word in key[2] for word in _LOOKS_UP)  # of places in other rows, too
        if key[2] != self._operator or at is None or func._schema.is_mutable or is_lookup:
            return out
        twin = self._base.operators[at]
        cut = _cutter(iter(twin.read), self._size)
        row = func(*cut(args), **{name: cut(value) for name, value in kwargs.items()})
        _paste(out, row, self._size)
        return out


class _ModulesAlone:
    """Computes the first row of every call of some modules alone. shapes: module and number of its
    call -> shapes of its arguments in a batch of one.
    """

    def __init__(
        self, model: Any, names: set[str], shapes: dict[tuple[str, int], Any], size: int
    ) -> None:
        self._modules = {name: model.get_submodule(name) for name in names}
        self._shapes, self._size = shapes, size
        self._calls: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks on the modules."""
        hooks = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            number = self._calls[name]
            self._calls[name] += 1
            cut = _cutter(iter(self._shapes[name, number]), self._size)
            row = module.forward(*cut(args), **{n: cut(value) for n, value in kwargs.items()})
            _paste(out, row, self._size)

        return hook


def _module_shapes(judge: Judge, one: CallInputs) -> dict[tuple[str, int], Any]:
    """Shapes of the tensors among the arguments of every call of a module."""
    from whence.frameworks.torch_arrays import tensors_in

    shapes: dict[tuple[str, int], Any] = {}
    calls: dict[str, int] = defaultdict(int)

    def hook(name: str) -> Any:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            tensors = tensors_in([*args, *kwargs.values()])
            shapes[name, calls[name]] = [tuple(t.shape) for t in tensors]
            calls[name] += 1

        return note

    hooks = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in judge.subject.model.named_modules()
    ]
    try:
        judge.subject.run(one)
    finally:
        for handle in hooks:
            handle.remove()
    return shapes


@contextlib.contextmanager
def _in_modules(model: Any, names: set[str], mode: Callable[[], Any]) -> Iterator[None]:
    """A context around every call of some modules."""
    stack: list[Any] = []

    def enters(module: Any, args: Any) -> None:
        stack.append(mode())
        stack[-1].__enter__()

    def leaves(module: Any, args: Any, out: Any) -> None:
        stack.pop().__exit__(None, None, None)

    hooks = []
    for name in names:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(enters))
        hooks.append(module.register_forward_hook(leaves, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cutter(shapes: Iterator[tuple[int, ...]], size: int) -> Callable[[Any], Any]:
    """Cuts arguments of a batch of `size` to their first row. shapes: those of a batch of one."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _first(value, next(shapes), size)
        if type(value) in (list, tuple):
            return type(value)(cut(item) for item in value)
        return value

    return cut


def _first(tensor: torch.Tensor, shape: tuple[int, ...], size: int) -> torch.Tensor:
    for axis in axes(shape, tuple(tensor.shape), 1, size) or ():
        tensor = tensor.narrow(axis.number, 0, axis.times)
    return tensor


def _paste(out: Any, row: Any, size: int) -> None:
    """Write results of a batch of one over those of the first row."""
    many, alone = (r if isinstance(r, (list, tuple)) else (r,) for r in (out, row))
    for whole, part in zip(many, alone):
        if isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor):
            _first(whole, tuple(part.shape), size).copy_(part)
