"""The sessions of a program that are listened to, each with its root, and without being kept
alive.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from whence.instrument.engines.roots import Roots
from whence.instrument.engines.tensors import Tensors
from whence.instrument.onnxruntime import settings as session_facts
from whence.instrument.onnxruntime.insides import Reading, open_inside
from whence.instrument.onnxruntime.watched import WatchedSession
from whence.instrument.session import Session
from whence.instrument.wording import raised


class Registry:
    """Sessions by identity. guard: makes the context in which code of the listener runs. folder:
    of the run, where graphs are saved for a moment. reading: what reads ONNX files.
    """

    def __init__(
        self, session: Session, guard: Callable[[], Any], reading: Reading, folder: str
    ) -> None:
        self._session, self._guard, self._reading, self._folder = session, guard, reading, folder
        # else only what a session is given and returns
        observes = session.options.level not in ("io", "logits")
        self._observes = observes and session.options.max_depth != 0
        self._tensors = Tensors(session)
        self._watched: dict[int, tuple[Callable[[], Any], WatchedSession]] = {}
        self._disabled: dict[int, tuple[str, ...]] = {}
        self._roots = Roots()
        self._begun = False

    def known(self, python_session: Any) -> WatchedSession | None:
        """The session, when it is listened to already and still runs what it ran then."""
        entry = self._watched.get(id(python_session))
        if entry is None or entry[0]() is not python_session:
            return None
        if entry[1].native is python_session._sess:
            return entry[1]
        entry[1].close()  # the program changed its providers: it is made anew
        return self.adopt(python_session, self._disabled.get(id(python_session), ()))

    def adopt(self, python_session: Any, disabled: tuple[str, ...] = ()) -> WatchedSession | None:
        """Listen to a session from now on; None where this process is not asked for. disabled:
        names of optimisers that the program switched off.
        """
        session = self._session
        if not self._begun:
            self._begun = True
            session.begin()
        if session.failed:
            return None
        disabled = tuple(dict.fromkeys((*disabled, *session.options.disabled_optimizers)))
        path = session_facts.model_path(python_session)
        root = self._roots.of(python_session, os.path.basename(path) or "(bytes)")  # noqa: PTH119
        watched = WatchedSession(session, self._tensors, root, python_session)
        original = self._original(python_session, path, root.name)
        facts = session_facts.of_session(python_session, original, disabled)
        session.note("settings", msgspec.json.encode(facts).decode(), root.name)
        if self._observes:
            watched.inside = open_inside(
                session,
                self._reading,
                python_session,
                original,
                self._folder,
                set(disabled),
                root.name,
            )
        self._remember(python_session, watched, disabled)
        return watched

    def close(self) -> None:
        """Let go of all sessions. Idempotent."""
        for _, watched in list(self._watched.values()):
            watched.close()
        self._watched.clear()

    def forget(self) -> None:
        """In a forked child: sessions beside the program's belong to the parent."""
        self._watched.clear()

    def _remember(
        self, python_session: Any, watched: WatchedSession, disabled: tuple[str, ...]
    ) -> None:
        place = id(python_session)

        def gone(ref: Any) -> None:
            entry = self._watched.get(place)
            if entry is not None and entry[0] is ref:
                del self._watched[place]
                self._disabled.pop(place, None)
                with self._guard():
                    entry[1].close()

        ref = weakref.ref(python_session, gone)
        watched.root.ref = ref
        self._watched[place], self._disabled[place] = (ref, watched), disabled

    def _original(self, python_session: Any, path: str, root: str) -> Any:
        """The user's model as its file has it, None where that cannot be read."""
        try:
            return self._reading.model(path or python_session._model_bytes)
        except (OSError, ValueError) as error:
            name = os.path.basename(path) or "the model given as bytes"  # noqa: PTH119
            self._session.note("program", f"{name} cannot be read: {raised(error)}", root)
            return None
