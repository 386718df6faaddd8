"""One rung of the ladder of ONNX Runtime: every session of this process is made with another level
of graph optimisation, or without some optimisers.

This changes the program on purpose. Nothing of it is edited: the method that makes native sessions
is wrapped while a capture with the option `rung` or `disabled_optimizers` is active.

Which optimisers changed the graph of a session. The runtime tells it in its log alone, which it
writes to the file descriptor of stderr.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

from whence.errors import CaptureError
from whence.instrument.guard import Replacements
from whence.instrument.onnxruntime import native_sessions
from whence.instrument.onnxruntime.what_optimized import Optimized, note
from whence.instrument.session import Session

_MAKES = "_create_inference_session"
# The rung of `RUNGS["onnxruntime"]` -> the member of `GraphOptimizationLevel`.
_LEVELS = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
_ORT_FORMAT = b"ORTM"
"""Bytes 4 to 8 of a model in the runtime's own format."""


class Levels:
    """While installed, sessions have the level of a rung; "" leaves that of the program. Its other
    options stay. disabled: names of optimisers that they do without, beside the program's. Raises
    CaptureError where this release has no such level, or makes sessions in another way.
    """

    def __init__(self, rung: str, disabled: Iterable[str] = ()) -> None:
        self._rung, self._disabled = rung, tuple(disabled)
        self._sessions = 0
        self._optimizers: dict[str, None] = {}
        self._ort_format: dict[str, None] = {}
        self._replaced = Replacements()
        _check(rung)

    def install(self) -> None:
        """Wrap the method that makes native sessions."""
        from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

        previous = getattr(InferenceSession, _MAKES)

        def makes(
            python_session: Any, providers: Any, provider_options: Any, disabled: Any = None
        ) -> None:
            self._make(previous, python_session, (providers, provider_options), disabled)

        makes.__wrapped__ = previous  # type: ignore[attr-defined]
        self._replaced.put(InferenceSession, _MAKES, makes)

    def remove(self) -> Optimized:
        """Put the method back, and say what was optimised until now. Idempotent."""
        self._replaced.remove()
        return Optimized(
            self._rung,
            self._sessions,
            tuple(available_levels()),
            tuple(self._optimizers),
            tuple(self._ort_format),
        )

    def finish(self, session: Session) -> None:
        """Put the method back, and note in a run what was optimised."""
        note(session, self.remove())

    def _make(
        self,
        previous: Callable[..., None],
        python_session: Any,
        providers: tuple[Any, Any],
        disabled: Any,
    ) -> None:
        import onnxruntime

        own = python_session._sess_options
        options = onnxruntime.SessionOptions() if own is None else own
        level = options.graph_optimization_level
        names = (disabled,) if isinstance(disabled, str) else tuple(disabled or ())
        without = {*map(str, names), *self._disabled}
        python_session._sess_options = options
        try:
            if self._rung:
                members = onnxruntime.GraphOptimizationLevel
                options.graph_optimization_level = getattr(members, _LEVELS[self._rung])
            previous(python_session, *providers, without)
        finally:
            options.graph_optimization_level = level  # the object is the program's own
        self._sessions += 1
        self._look(python_session, without)

    def _look(self, python_session: Any, without: set[str]) -> None:
        """Which optimisers changed the graph, and whether its file is one they leave alone."""
        name = os.path.basename(python_session._model_path or "") or "(bytes)"  # noqa: PTH119
        try:
            if _is_of_ort_format(python_session):
                self._ort_format[name] = None
            self._optimizers |= dict.fromkeys(_changing_optimizers(python_session, without))
        except Exception as error:  # noqa: BLE001 - what the runtime raises has many types
            sys.stderr.write(f"whence: which optimisers changed {name} is not known: {error}\n")


def _check(rung: str) -> None:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

    version = onnxruntime.__version__
    if not hasattr(InferenceSession, _MAKES):
        raise CaptureError(
            f"onnxruntime {version} makes its sessions in a way that whence does not know "
            f"(InferenceSession.{_MAKES} is missing), so nothing in them can be switched off"
        )
    if rung and rung not in available_levels():
        raise CaptureError(
            f"rung {rung}: onnxruntime {version} has no {_LEVELS[rung]}; its levels are "
            f"{', '.join(available_levels())}"
        )


def available_levels() -> list[str]:
    """The rungs that the release of this process has."""
    import onnxruntime

    members = onnxruntime.GraphOptimizationLevel
    return [rung for rung, name in _LEVELS.items() if hasattr(members, name)]


def _is_of_ort_format(python_session: Any) -> bool:
    path = python_session._model_path
    if not path:
        return bytes(python_session._model_bytes[4:8]) == _ORT_FORMAT
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read(8)[4:] == _ORT_FORMAT


def made(make: Callable[[], Any], rung: str, disabled: Iterable[str]) -> tuple[Any, Optimized]:
    """(the session that `make` makes, what was optimised), on a rung."""
    levels = Levels(rung, disabled)
    levels.install()
    try:
        python_session = make()
    finally:
        optimized = levels.remove()
    return python_session, optimized


_CHANGED = re.compile(rb"GraphTransformer (\w+) modified: 1 ")
_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ \[[VIWEF]:onnxruntime:")
_INFO = 1
_STDERR = 2
_lock = threading.Lock()


def _changing_optimizers(python_session: Any, disabled: set[str]) -> list[str]:
    """Names of optimisers that change the graph of a session, in the order in which they first do.
    A second session is made like it, and its log is read. Raises whatever the runtime raises.
    """
    with _lock, tempfile.TemporaryFile() as log:
        native_sessions.logging_alike(python_session, disabled, _Redirected(log), _INFO)
        log.seek(0)
        lines = log.read().splitlines(keepends=True)
    others = b"".join(line for line in lines if not _LINE.match(line))
    if others:  # of other threads
        os.write(_STDERR, others)
    found = (_CHANGED.search(line) for line in lines)
    return list(dict.fromkeys(match[1].decode() for match in found if match))


class _Redirected:
    """A block in which file descriptor 2 is a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._kept = -1

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._kept = os.dup(_STDERR)
        os.dup2(self._file.fileno(), _STDERR)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, _STDERR)
        os.close(self._kept)
