"""Selects the calls and the slot of a run that are shown."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from whence.errors import UsageError
from whence.records import Call, Ref, Run
from whence.records.columns import columns_of
from whence.records.slots import is_mutated, is_output
from whence.report import tables

_NUMBER = re.compile(r"\d+(_\d+)*")


class Choice(NamedTuple):
    """Selects calls. name: shell pattern on the dotted name, or `re:` and a regular expression.
    ids: tree numbers, each with its subtree.
    """

    name: str = ""
    ids: tuple[str, ...] = ()
    step: int | None = None

    def places(self, run: Run) -> list[int]:
        """Ids of the selected calls, in the order in which they began. Raises UsageError for an
        invalid pattern.
        """
        try:
            test = re.compile(
                self.name[3:]
                if self.name.startswith("re:")
                else fnmatch.translate(self.name or "*")
            )
        except re.error as err:
            raise UsageError(f"--name {self.name!r} is not a regular expression: {err}") from None
        columns = columns_of(run)
        chosen = np.ones(columns.order.size, bool)
        if self.step is not None:
            chosen &= columns.step == self.step
        if self.name and chosen.any():
            # of the few names that a long run has
            number = len(columns.names)
            called, which = np.unique(columns.root * number + columns.op, return_inverse=True)
            names, which = np.unique(columns.scope * called.size + which, return_inverse=True)
            roots, ops = np.divmod(called[names % called.size], number)
            words = zip(names // called.size, roots, ops, strict=True)
            fits = [_fits(test, *(columns.names[n] for n in numbers)) for numbers in words]
            chosen &= np.array(fits)[which]
        places = np.flatnonzero(chosen)
        # Calls are written when they end, so a container comes after its children.
        places = places[np.lexsort((places, columns.order[places], columns.rank[places]))]
        return [n for n in places.tolist() if self._has_number(run, n)]

    def _has_number(self, run: Run, place: int) -> bool:
        """Whether a call has one of the selected tree numbers, or lies below such a call."""
        if not self.ids:
            return True
        number = run.calls[place].number
        return any(i in ("0", number) or number.startswith(i + "_") for i in self.ids)

    def calls(self, run: Run) -> Iterator[Call]:
        """The chosen calls, in the order in which they began; a long run is never held in memory
        whole. Raises UsageError as `places` does.
        """
        return (run.calls[place] for place in self.places(run))


def name_of(call: Call) -> str:
    """The dotted module path, the root's own name for the root, and the operator behind a slash."""
    return _name(call.scope, call.root, call.op)


def _name(scope: str, root: str, op: str) -> str:
    name = scope or root
    return f"{name}/{op}" if op else name


def _fits(test: re.Pattern[str], scope: str, root: str, op: str) -> bool:
    return bool(test.fullmatch(_name(scope, root, op)) or test.fullmatch(scope))


def find(run: Run, name: str, choice: Choice) -> tuple[Call, Ref]:
    """The call and slot that NAME means: a tree number, a dotted name, or one of them with :SLOT;
    the first step unless the choice says which.

    A name alone is its first output. Raises UsageError saying what is near, or which slots there
    are.
    """
    meanings = _meanings(run, name, choice)
    if not meanings:
        raise _unknown(run, name, choice)
    call, slot, _ = meanings[0]
    refs = (
        [r for r in call.refs if r.slot == slot or r.slot.startswith(slot + ".")]
        if slot
        else list(call.refs)
    )
    refs.sort(key=lambda r: 0 if is_output(r.slot) else 1 if is_mutated(r.slot) else 2)
    if not refs:
        slots = ", ".join(tables.clean(r.slot) for r in call.refs) or "none"
        raise UsageError(
            f"{tables.clean(name_of(call))} has no slot "
            f"{tables.clean(slot) or '(it holds no tensor)'}; slots: {slots}"
        )
    return call, refs[0]


def other_meaning(run: Run, name: str, choice: Choice) -> str:
    """A sentence where NAME is a tree number and also the name of another module: a Sequential's
    children are called 0, 1, 2, and numbered 1, 2, 3. Else "".
    """
    if not _NUMBER.fullmatch(name.partition(":")[0]):
        return ""
    meanings = _meanings(run, name, choice)
    named = next((m for m in meanings[1:] if not m.is_number), None)
    if not meanings or not meanings[0].is_number or named is None or named.call is meanings[0].call:
        return ""
    word = tables.clean(name.partition(":")[0])
    slot = name[len(name.partition(":")[0]) :]
    taken = meanings[0].call
    return (
        f"{word} is taken as the tree number of {tables.clean(name_of(taken))} ({taken.op_type}); "
        f"the module named {word} ({named.call.op_type}) has number {named.call.number}: whence "
        f"show {tables.clean(run.path)} {tables.clean(named.call.number + slot)}"
    )


class _Meaning(NamedTuple):
    """One meaning of NAME: the first call with it, the slot that was asked for, and whether NAME is
    a number.
    """

    call: Call
    slot: str
    is_number: bool


def _meanings(run: Run, name: str, choice: Choice) -> list[_Meaning]:
    """The possible meanings of NAME, the preferred one first. The number that `--tree` prints
    before a module is preferred to a name. Every call has a number, so every call can still be
    selected.
    """
    head, _, tail = name.rpartition(":")
    words = [(name, "")] + ([(head, tail)] if head else [])
    wanted = {(word, is_number): slot for word, slot in words for is_number in (True, False)}
    first: dict[tuple[str, bool], Call] = {}
    for call in choice.calls(run):
        for key in ((call.number, True), (call.scope, False), (name_of(call), False)):
            if key in wanted:
                first.setdefault(key, call)
        if len(first) == len(wanted):
            break
    return [_Meaning(first[key], slot, key[1]) for key, slot in wanted.items() if key in first]


def _unknown(run: Run, name: str, choice: Choice) -> UsageError:
    names = sorted({name_of(c) for c in run.calls})
    near = difflib.get_close_matches(name.partition(":")[0], names, n=3, cutoff=0.3) or names[:3]
    of_step = "" if choice.step is None else f" in step {choice.step}"
    hint = f"nearest: {', '.join(tables.clean(n) for n in near)}" if near else "it holds no call"
    return UsageError(
        f"{tables.clean(run.path)} has no call named {tables.clean(name)}{of_step}; {hint} "
        "(--tree lists all)"
    )


def references(run: Run, choice: Choice) -> Iterator[tuple[Call, Ref]]:
    for call in choice.calls(run):
        for ref in call.refs:
            yield call, ref


def none_chosen(run: Run, choice: Choice) -> str:
    if not run.calls:
        return "no call was captured"
    steps = np.unique(columns_of(run).step).tolist()
    return (
        f"none of {tables.count(len(run.calls), 'call')} in {step_ranges(steps)} matches; `--tree` "
        "lists names and numbers"
    )


def step_ranges(numbers: Sequence[int]) -> str:
    """ "step 0", "steps 0-2, 7"."""
    distinct = sorted(set(numbers))
    runs: list[list[int]] = []
    for n in distinct:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"step{'s' if len(distinct) > 1 else ''} {words}"
