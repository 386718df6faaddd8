"""Where a spread by rounding comes from: what begins it is computed as in the base run in turn, and
the spread that is left is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from whence.results.probe import SpreadShare
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import GROSS, Judge, Trial, made, traced
from whence.workflows.probe.torch.leaf_calls import leaf_calls
from whence.workflows.probe.torch.measuring import Begun, relative_rms
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.regions import Region, Row, axes
from whence.workflows.probe.torch.trace import NOTHING_KEPT, Key, Trace, hooked
from whence.workflows.rounding.torch_modes import on_threads

_MOST_SHARES = 4
_LOOKS_UP = ("index", "gather", "scatter", "embedding", "take")
"""Operators that are not arithmetic on rows: cut into rows, they point outside of them."""
_EXPLAINS = 0.1
"""Share below which an operator's own kernel explains nothing: the code that calls it may."""

Change = Callable[..., Any]
"""(key, operator, args, kwargs, result) of an operator -> what takes the place of the result."""
_Way = tuple[Any, ...]
"""A change or None, and contexts around the run."""


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

    def without(group: _Group, whole_modules: bool) -> _Way:
        if whole_modules:
            return None, _modules_alone(judge.subject.model, group.scopes, shapes, size)
        return (_row_by_row(group.operator, base, size),)

    try:
        base = traced(judge.subject, one, NOTHING_KEPT)
        shapes = leaf_calls(judge.subject, one).shapes
    except Exception:  # noqa: BLE001 - what cannot be traced has no shares
        return ()
    return _shares(judge, Trial(one, many, Row(1, size)), without)


def shares_of_threads(judge: Judge, inputs: CallInputs, count: int) -> tuple[SpreadShare, ...]:
    """How much of the spread on `count` threads goes away when what begins it runs on as many as
    before.
    """
    before = torch.get_num_threads()

    def without(group: _Group, whole_modules: bool) -> _Way:
        def as_before(key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
            if key[2] != group.operator or func._schema.is_mutable:
                return out
            with on_threads(before):
                return func(*args, **kwargs)

        if not whole_modules:
            return (as_before,)
        return None, _in_modules(judge.subject.model, group.scopes, lambda: on_threads(before))

    trial = Trial(inputs, inputs, modes=[lambda _: on_threads(count)])
    return _shares(judge, trial, without)


def _shares(
    judge: Judge, trial: Trial, without: Callable[[_Group, bool], _Way]
) -> tuple[SpreadShare, ...]:
    """without(group, whole_modules): what computes operators of a group, or whole modules that run
    them, as in the base run.
    """

    def spread(change: Change | None = None, *modes: Any) -> float:
        subject = judge.subject
        trace = Trace(subject.model, begin=NOTHING_KEPT, change=change)
        around = [mode(subject) for mode in trial.modes]
        changed = subject.run(made(trial.changed, subject), *around, trace.listening(), *modes)
        return _variance(judge.base(trial.base), changed, trial.region)

    begun = judge.begins(trial, most=GROSS)
    try:
        whole = spread()
    except Exception:  # noqa: BLE001 - what cannot be traced has no shares
        return ()
    by_name: dict[tuple[str, str], list[Begun]] = defaultdict(list)
    for one in begun:
        by_name[one.operator.key[2], one.operator.key[0] if one.is_only else ""].append(one)
    groups = [_Group(name, found, found[0].is_only) for (name, _), found in by_name.items()]
    groups.sort(key=lambda group: -len(group.begun))
    shares = []
    for group in groups[:_MOST_SHARES] if whole else ():
        try:
            share = 1 - spread(*without(group, group.is_only)) / whole
            if share < _EXPLAINS and not group.is_only and "" not in group.scopes:
                share = max(share, 1 - spread(*without(group, True)) / whole)
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
        if pair is not None and pair[0].shape == pair[1].shape and pair[0].is_floating_point():
            total += relative_rms(*pair) ** 2
    return total


def _row_by_row(operator: str, base: Trace, size: int) -> Change:
    """Computes the first row of every call of one operator alone, as in a batch of one.

    base: the trace of a batch of one, whose shapes tell the axis of rows.
    """

    def change(key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        at = base.by_key.get(key)
        is_lookup = any(word in operator for word in _LOOKS_UP)  # of places in other rows, too
        if key[2] == operator and at is not None and not (func._schema.is_mutable or is_lookup):
            cut = _cutter(iter(base.operators[at].read), size)
            _paste(out, func(*cut(args), **{n: cut(value) for n, value in kwargs.items()}), size)
        return out

    return change


def _modules_alone(
    model: Any, names: Collection[str], shapes: dict[tuple[str, int], Any], size: int
) -> Any:
    """Computes the first row of every call of some modules alone. shapes: of the tensors among
    their arguments in a batch of one, by module and number of the call.
    """
    calls: dict[str, int] = defaultdict(int)

    def alone(name: str, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        cut = _cutter(iter(shapes[name, calls[name]]), size)
        calls[name] += 1
        row = module.forward(*cut(args), **{n: cut(value) for n, value in kwargs.items()})
        _paste(out, row, size)

    return hooked([(name, model.get_submodule(name)) for name in names], after=alone)


def _in_modules(model: Any, names: Collection[str], mode: Callable[[], Any]) -> Any:
    """A context around every call of some modules."""
    stack: list[Any] = []

    def enters(*_: Any) -> None:
        stack.append(mode())
        stack[-1].__enter__()

    def leaves(*_: Any) -> None:
        stack.pop().__exit__(None, None, None)

    return hooked([(name, model.get_submodule(name)) for name in names], enters, leaves)


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
