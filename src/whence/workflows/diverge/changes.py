"""What is compared exactly: settings and arguments of calls, and which calls are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.records.training import OPTIMIZER
from whence.workflows.diverge.figures import CallKey, Column, Names, RunFigures

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Settings of an optimiser that say how it computes, or where a schedule began."""
_CLOSE = 1e-9


class Change(NamedTuple):
    """A call whose setting differs, or that one run alone makes. step: its position among the
    common steps. moment: on the reference's clock. key: the call's number.
    """

    step: int
    moment: int
    key: int
    words: str
    is_setting: bool


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a run, by step and key: code, row in the run, sorted."""

    code: Column
    row: Column


def _calls(run: RunFigures, steps: Column, keys: int) -> _Calls:
    if not steps.size:
        return _Calls(np.zeros(0, np.int64), np.zeros(0, np.int64))
    at = np.minimum(np.searchsorted(steps, run.step), len(steps) - 1)
    use = np.flatnonzero(steps[at] == run.step)
    code, first = np.unique(at[use] * keys + run.key[use], return_index=True)
    return _Calls(code, use[first])


def changes(a: RunFigures, b: RunFigures, steps: Column, names: Names) -> list[Change]:
    """Settings that differ, and calls that one run alone makes although both did alike in all
    common steps before.
    """
    keys = len(names.keys)
    one, other = _calls(a, steps, keys), _calls(b, steps, keys)
    return [
        *_settings(a, b, one, other, names),
        *_calls_of_one(a, one, other, len(steps), names),
    ]


def _settings(
    a: RunFigures, b: RunFigures, one: _Calls, other: _Calls, names: Names
) -> Iterator[Change]:
    keys = len(names.keys)
    code, left, right = np.intersect1d(
        one.code, other.code, assume_unique=True, return_indices=True
    )
    rows_a, rows_b = one.row[left], other.row[right]
    differ = a.arguments[rows_a] != b.arguments[rows_b]
    first_seen: dict[int, int] = {}
    for number, key in enumerate((code % keys).tolist()):
        first_seen.setdefault(key, int(code[number]) // keys)
    from_start: set[tuple[int, str]] = set()
    for at in np.flatnonzero(differ).tolist():
        step, key = divmod(int(code[at]), keys)
        pair = (names.words[a.arguments[rows_a[at]]], names.words[b.arguments[rows_b[at]]])
        for name, x, y in differing(*pair):
            is_step = names.keys[key].phase == OPTIMIZER
            if not (is_step and x is not None and y is not None):
                if step == first_seen[key]:
                    from_start.add((key, name))
                if (key, name) in from_start:
                    continue
            words = f"{name} is {_shown(x)} in the reference, {_shown(y)} in the target"
            yield Change(step, int(a.begin[rows_a[at]]), key, words, True)


def differing(one: bytes, other: bytes) -> list[tuple[str, Any, Any]]:
    """(name, value, value) of what differs in two texts of arguments; None for what is missing."""
    if one == other:
        return []
    a, b = msgspec.json.decode(one), msgspec.json.decode(other)
    found = []
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name), b.get(name)
        if name not in IMPLEMENTATION and not _alike(x, y):
            found.append((name, x, y))
    return found


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_alike, x, y))
    if isinstance(x, float | int) and isinstance(y, float | int):
        return x == y or abs(x - y) <= _CLOSE * max(abs(x), abs(y))
    return bool(x == y)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)[:60]


def _calls_of_one(
    a: RunFigures, one: _Calls, other: _Calls, steps: int, names: Names
) -> Iterator[Change]:
    """Calls of one run alone, of keys of which both runs made the same calls until then."""
    keys = len(names.keys)
    only_a = np.setdiff1d(one.code, other.code, assume_unique=True)
    only_b = np.setdiff1d(other.code, one.code, assume_unique=True)
    first: dict[int, tuple[int, bool]] = {}
    for codes, is_reference in ((only_a, True), (only_b, False)):
        for code in codes.tolist():
            step, key = divmod(code, keys)
            if key not in first or step < first[key][0]:
                first[key] = step, is_reference
    if not first:
        return
    # a call that is made in one run alone from its first step on is another program's
    seen = np.unique(np.concatenate([one.code, other.code]))
    started: dict[int, int] = {}
    for code in seen.tolist():
        step, key = divmod(code, keys)
        started[key] = min(step, started.get(key, step))
    begun = {
        step: int(a.begin[one.row[one.code // keys == step]].min(initial=0))
        for step in {step for step, _ in first.values()}
    }
    for key, (step, is_reference) in first.items():
        # a run may end in the middle of a step
        lacking = other if is_reference else one
        is_cut = lacking.code.size > 0 and step == int(lacking.code[-1]) // keys
        if (
            step == 0
            or is_cut
            or (
                started[key] == step and not _is_more_of_same(names.keys[key], names, started, step)
            )
        ):
            continue
        row = one.row[np.searchsorted(one.code, step * keys + key)] if is_reference else -1
        moment = int(a.begin[row]) if row >= 0 else begun[step]
        who = "reference" if is_reference else "target"
        yield Change(step, moment, key, f"the {who} alone makes this call", False)


def _is_more_of_same(key: CallKey, names: Names, started: dict[int, int], step: int) -> bool:
    """Is it one more call, or micro-batch, of a module that both runs called before?"""
    for fewer in (
        key._replace(micro=key.micro - 1),
        key._replace(occurrence=key.occurrence - 1),
    ):
        number = names.calls.get(fewer)
        if number is not None and started.get(number, step) < step:
            return True
    return False
