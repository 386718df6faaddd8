"""Listens to `paddle.inference`: every operator a predictor runs, through its input and output
hooks, without an edit of the program.

Hooks hand out live buffers, which are hashed and written inside the callback (`paddle_runs`). The
predictor saves its program after passes into the run. Nothing that fails here reaches the
predictor, in which every exception of a hook would become `std::exception`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from whence.instrument.guard import Guard, end_capture, put_back
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.operator_calls import PredictorRun
from whence.instrument.paddle.saved_programs import (
    NameTable,
    PredictorRoot,
    PredictorSource,
    SavedPrograms,
    tidy,
)
from whence.instrument.paddle.tensor_identity import FindExternal
from whence.instrument.session import Session
from whence.instrument.wording import raised

ROOT = "model"
"""The root of the first predictor, as readers of logs call it."""


_UNKNOWN = PredictorSource()


class Listener:
    """Records what predictors run into a session while installed.

    predictor: only this one; None: every one that is made or run. folder: of the run, where
    programs are saved, "" to save none. weights(program file, weights file): where parameters may
    be referenced from. changes: what is replaced on purpose.
    """

    def __init__(
        self,
        session: Session,
        predictor: Any = None,
        *,
        words: NameTable,
        folder: str = "",
        weights: Callable[[str, str], FindExternal] | None = None,
        changes: Interventions | None = None,
    ) -> None:
        self.session, self.words, self.changes = session, words, changes
        self.active = False
        self._predictor, self._weights = predictor, weights
        # else only what a predictor is given and returns
        self._operators = session.options.level != "logits"
        self._programs = SavedPrograms(session, words, folder, saves=self._operators)
        self._lock = threading.RLock()
        self._watched: dict[int, tuple[Any, list[PredictorRun]]] = {}
        self._roots: list[PredictorRoot] = []
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._begun = False

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        import paddle

        inference = paddle.inference
        self.active = True
        self.session.load_kernels()
        self._wrap(inference.Predictor, "run", self._run)
        if self._predictor is not None:
            self._adopt(self._predictor)
            return
        self._wrap(inference.Predictor, "clone", self._clone)
        self._wrap(inference.Config, "set_optim_cache_dir", self._set_cache)
        self._wrap(inference.Config, "set_model_buffer", self._set_buffer)
        self._wrap(inference, "create_predictor", self._create)
        paddle.base.core.create_predictor = inference.create_predictor
        self._undo.append(
            (paddle.base.core, "create_predictor", inference.create_predictor, self._undo[-1][3])
        )

    def _wrap(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        previous = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return previous(*args, **kwargs)
            return method(previous, *args, **kwargs)

        wrapper.__name__, wrapper.__doc__ = name, previous.__doc__
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, wrapper, previous))

    def remove(self) -> None:
        """Stop listening. Hooks stay with their predictors, as Paddle cannot take them off, and do
        nothing. Idempotent.
        """
        self.active = False
        put_back(self._undo)
        for _, cell in self._watched.values():
            cell.clear()
        self._watched.clear()
        if self.changes is not None and not self.session.failed:
            self.changes.finish()

    def aside(self, *, aside: bool = True) -> AbstractContextManager[None]:
        """A predictor is called by whoever holds it, never inside of another model."""
        return nullcontext()

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self.session.failed = "forked"
        self._lock = threading.RLock()  # a thread that is not here any more may have held it
        self.remove()

    # ---- what is called instead of Paddle's own

    def _create(self, previous: Callable[..., Any], config: Any) -> Any:
        source, spare = _UNKNOWN, config
        with self._guard():
            spare = type(config)(config)  # one config makes one predictor, be it that it fails
            source = self._programs.prepare(config)
        try:
            predictor = previous(config)
        except (
            Exception
        ):  # what Paddle raises has many types; that we have it save the program may be the reason
            if not source.folder:
                raise
            predictor = previous(spare)  # raises what the program would have seen
        with self._guard():
            self._adopt(predictor, source)
        return predictor

    def _clone(self, previous: Callable[..., Any], predictor: Any) -> Any:
        clone = previous(predictor)
        with self._guard():
            entry = self._watched.get(id(predictor))
            if entry is not None and entry[1]:
                source = entry[1][0].source
                self._adopt(clone, source._replace(folder="", saved=""))
                tidy(source.folder)
        return clone

    def _set_cache(self, previous: Callable[..., Any], config: Any, folder: str) -> Any:
        with self._guard():
            self._programs.cached(config, folder)
        return previous(config, folder)

    def _set_buffer(
        self, previous: Callable[..., Any], config: Any, *buffers: Any, **named: Any
    ) -> Any:
        with self._guard():
            sizes = [
                len(buffer)
                for buffer in (*buffers, *named.values())
                if isinstance(buffer, (bytes, str))
            ]
            self._programs.given(config, sum(sizes))
        return previous(config, *buffers, **named)

    def _run(self, previous: Callable[..., Any], predictor: Any, *args: Any, **kwargs: Any) -> Any:
        watched: PredictorRun | None = None
        with self._guard():
            watched = self._of(predictor)
            if watched is not None:
                watched.begin(predictor, args[0] if args else kwargs.get("inputs"))
        if watched is None:
            return previous(predictor, *args, **kwargs)
        try:
            out = previous(predictor, *args, **kwargs)
        except BaseException as error:  # of the program: recorded, and raised again
            with self._guard():
                watched.end(predictor, None, raised(error))
            raise
        finally:
            interrupted, watched.interrupted = watched.interrupted, None
        with self._guard():
            watched.end(predictor, out, "")
        if interrupted is not None:
            raise interrupted
        return out

    # ---- predictors

    def _of(self, predictor: Any) -> PredictorRun | None:
        if self.session.failed:
            self.active = False
            return None
        entry = self._watched.get(id(predictor))
        if entry is not None and entry[0]() is predictor:
            return entry[1][0] if entry[1] else None
        if self._predictor is not None:
            return None
        return self._adopt(predictor)

    def _adopt(self, predictor: Any, source: PredictorSource = _UNKNOWN) -> PredictorRun | None:
        """Hook a predictor."""
        session = self.session
        if not self._begun:
            self._begun = True
            if not session.begin():
                self.active = False
                return None
        root = self._root(source.files[0])
        source = self._programs.read(source, root.name)
        files = source.files
        find = self._weights(*files) if self._weights is not None and files[1] else None
        watched = PredictorRun(session, self.words, predictor, root, source, find, self.changes)
        settings = self._programs.settings(source)
        session.note("settings", msgspec.json.encode(settings).decode(), root.name)
        if source.described is None and self._operators:
            why = "attributes and the order of operands are not known: no program was saved for it"
            session.note("program", why, root.name)
        if source.lacks_weights:
            text = (
                f"{files[1]} does not exist: Paddle then runs the program with arbitrary memory "
                "instead of weights; give Config the file that was saved with "
                f"{os.path.basename(files[0])}"  # noqa: PTH119
            )
            session.note("error", text, root.name, aloud=True)
        cell = [watched]
        place = id(predictor)

        def gone(ref: Any) -> None:
            cell.clear()
            if place in self._watched and self._watched[place][0] is ref:
                del self._watched[place]

        ref = weakref.ref(predictor, gone)
        root.ref = ref
        self._watched[place] = (ref, cell)
        if self._operators:
            predictor.register_input_hook(_hook(self, cell, PredictorRun.reads))
            predictor.register_output_hook(_hook(self, cell, PredictorRun.wrote))
        return watched

    def _root(self, file: str) -> PredictorRoot:
        for root in self._roots:
            if root.ref() is None and root.file == file:
                return root
        root = PredictorRoot(ROOT if not self._roots else f"{ROOT}#{len(self._roots)}", file)
        self._roots.append(root)
        return root

    # ---- never into the program

    def _guard(self) -> Guard:
        return Guard(self._lock, self.give_up)

    def give_up(self, error: BaseException) -> None:
        """Something of ours failed: the capture ends, the program goes on."""
        self.active = False
        end_capture(self.session, error)


def _hook(
    listener: Listener,
    cell: list[PredictorRun],
    method: Callable[[PredictorRun, str, str, Any], None],
) -> Callable[[str, str, Any], None]:
    """A hook that keeps nothing alive and raises nothing; a Ctrl-C is raised when the predictor has
    returned.
    """

    def hook(op: str, name: str, tensor: Any) -> None:
        if not cell:
            return
        watched = cell[0]
        if not listener.active or watched.session.failed:
            return
        try:
            with listener._lock:
                method(watched, op, name, tensor)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the predictor
            listener.give_up(error)
        except BaseException as error:  # noqa: BLE001 - a Ctrl-C in here: raised when the predictor has returned
            watched.interrupted = error

    return hook
