"""The function of the user's that is called for every record, and the columns it returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from whence.errors import UsageError
from whence.instrument.wording import raised

_MAX_FAILURES = 20  # that are noted

OnRecord = Callable[[str, str, Any], Any]


def load_on_record(spec: str) -> OnRecord:
    """The function named `module:function`. Raises UsageError saying which part was not found."""
    module_name, _, name = spec.partition(":")
    if not name:
        raise UsageError(f"--on-record {spec!r}: write it as module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"--on-record {spec!r}: cannot import {module_name!r} ({error}); is its folder on "
            "PYTHONPATH?"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--on-record {spec!r}: {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


class UserColumns:
    """Calls the user's function. note: called with (kind, text, name) of an error it raises."""

    def __init__(self, function: OnRecord, note: Callable[[str, str, str], None]) -> None:
        self._function, self._note = function, note
        self._failures = 0

    def of(self, op_type: str, name: str, value: Any) -> dict[str, float | None] | None:
        """The columns of a record, None when there are none."""
        try:
            return _as_columns(self._function(op_type, name, value))
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; it is recorded, not raised
            self._failures += 1
            if self._failures <= _MAX_FAILURES:
                self._note("hook-error", f"on_record raised {raised(error)}", name)
            return None


def _as_columns(result: Any) -> dict[str, float | None] | None:
    if result is None:
        return None
    if isinstance(result, Mapping):
        return {str(k): float(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return {f"value{i}": float(v) for i, v in enumerate(result)}
    return {"value": float(result)}
