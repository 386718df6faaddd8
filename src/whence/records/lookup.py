"""Looks up calls, tensors and rows by the names that a person types, for `run["fc1"]` and
`comparison["fc1"]`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Protocol

from whence.display import Displayed
from whence.errors import ElementsMissing
from whence.records.run import Call, Run

_MOST = 20_000  # names that are offered


def of_run(run: Any, name: str) -> Any:
    """Returns the calls of a name, or the elements of `NAME:SLOT` in the first of its calls that
    kept them.
    """
    calls = _calls(run, name)
    if calls:
        return calls
    scope, colon, slot = name.rpartition(":")
    refs = (
        [ref for call in _calls(run, scope) for ref in call.refs if ref.slot == slot]
        if colon
        else []
    )
    for ref in refs:
        try:
            return run.array(ref.record)
        except ElementsMissing:
            if ref is refs[-1]:
                raise
    raise KeyError(unknown(name, names_in(run)))


def _calls(run: Any, name: str) -> tuple[Call, ...]:
    return tuple(call for call in run.calls if name in (call.module_name, _full(call)))


def names_in(run: Any) -> list[str]:
    """Returns names of calls in the order of the run, then of their tensors."""
    calls: dict[str, None] = {}
    slots: dict[str, None] = {}
    for call in run.calls:
        calls[_full(call)] = None
        slots.update((f"{_full(call)}:{ref.slot}", None) for ref in call.refs)
        if len(slots) > _MOST:
            break
    return [*calls, *slots]


def _full(call: Call) -> str:
    name = call.module_name
    return f"{name}/{call.op}" if call.op else name


def unknown(name: str, names: Sequence[str]) -> str:
    """Returns the message that there is no such name, with similar ones."""
    near = difflib.get_close_matches(name, names, 3, 0.4) or names[:3]
    return f"no {name!r} here; " + (f"nearest: {', '.join(near)}" if near else "nothing is")


class Named(Displayed):
    """Mix-in of a run: its calls and tensors by name."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        """`run["layers.0.mlp"]`: its calls, in order. `run["layers.0.mlp:output.0"]`: elements of
        the first call that kept them.

        Raises KeyError with similar names, ElementsMissing.
        """
        from whence.records import lookup

        return lookup.of_run(self, name)

    def _ipython_key_completions_(self) -> list[str]:
        """Returns names of calls and of their tensors."""
        from whence.records import lookup

        return lookup.names_in(self)


class NamedRun(Run, Protocol):
    """A run with its calls and tensors by name, as every opened run is (`Named`)."""

    def __getitem__(self, name: str) -> Any: ...
