"""Finds the sources of a spread by rounding: each source in turn is computed as in the base run,
and the remaining spread is measured.
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
"""Operators that do no arithmetic on rows; cut to a row, their indices would point outside."""
_EXPLAINS = 0.1
"""Share of the spread below which an operator's own kernel explains nothing; its calling
code may.
"""

Change = Callable[..., Any]
"""(key, operator, args, kwargs, result) of an operator -> replacement for its result."""
_Way = tuple[Any, ...]
"""A change or None, and the contexts around the run."""


class _Group(NamedTuple):
    """A place where a spread begins: calls of one operator, or modules that run other code."""

    operator: str
    begun: list[Begun]
    is_only: bool

    @property
    def scopes(self) -> set[str]:
        """Paths of the modules in which the spread begins."""
        return {b.operator.key[0] for b in self.begun}


def shares_of_rows(
    judge: Judge, one: CallInputs, many: CallInputs, size: int
) -> tuple[SpreadShare, ...]:
    """The share of a row's spread in a batch of `size` that each source causes.

    A source is computed for this row alone, and the remaining spread is measured.
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
    """The share of the spread on `count` threads that each source causes.

    A source runs on the original number of threads, and the remaining spread is measured.
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
    """The shares of all sources.

    without(group, whole_modules): the change that computes the operators of a group, or the whole
    modules that contain them, as in the base run.
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
    """Sum over the outputs of the mean squared difference, relative to the output's mean square.

    Only elements that must be equal count. Variances of independent sources add up.
    """
    total = 0.0
    for name in base.keys() & changed.keys():
        pair = region.pair(base[name], changed[name], None)
        if pair is not None and pair[0].shape == pair[1].shape and pair[0].is_floating_point():
            total += relative_rms(*pair) ** 2
    return total


def _row_by_row(operator: str, base: Trace, size: int) -> Change:
    """Computes the first row of every call of one operator separately, as in a batch of one.

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
    """Computes the first row of every call of some modules separately.

    shapes: of the tensors among their arguments in a batch of one, by module and number of the
    call.
    """
    calls: dict[str, int] = defaultdict(int)

    def alone(name: str, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        cut = _cutter(iter(shapes[name, calls[name]]), size)
        calls[name] += 1
        row = module.forward(*cut(args), **{n: cut(value) for n, value in kwargs.items()})
        _paste(out, row, size)

    return hooked([(name, model.get_submodule(name)) for name in names], after=alone)


def _in_modules(model: Any, names: Collection[str], mode: Callable[[], Any]) -> Any:
    """Enters a context around every call of some modules."""
    stack: list[Any] = []

    def enters(*_: Any) -> None:
        stack.append(mode())
        stack[-1].__enter__()

    def leaves(*_: Any) -> None:
        stack.pop().__exit__(None, None, None)

    return hooked([(name, model.get_submodule(name)) for name in names], enters, leaves)


def _cutter(shapes: Iterator[tuple[int, ...]], size: int) -> Callable[[Any], Any]:
    """A function that cuts arguments of a batch of `size` to their first row.

    shapes: of the arguments in a batch of one.
    """

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
