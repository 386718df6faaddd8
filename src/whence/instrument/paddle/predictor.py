"""Listens to `paddle.inference`: every operator a predictor runs, through its input and output
hooks, without an edit of the program.

Hooks hand out live buffers, which are hashed and written inside the callback (`paddle_runs`). The
predictor saves its program after passes into the run. Nothing that fails here reaches the
predictor, in which every exception of a hook would become `std::exception`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from whence.errors import WhenceError
from whence.frameworks import host
from whence.frameworks.paddle_programs import Program
from whence.instrument.guard import Guard, end_capture, put_back
from whence.instrument.paddle import settings as paddle_facts
from whence.instrument.paddle.interventions import Interventions
from whence.instrument.paddle.operator_calls import NameTable, PredictorRoot, PredictorRun
from whence.instrument.paddle.tensor_identity import FindExternal, Unshown
from whence.instrument.session import Session
from whence.instrument.wording import raised

ROOT = "model"
"""The root of the first predictor, as readers of logs call it."""

_ROOM = 2  # times the size of its weights that must be free for a program to be saved


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
        self._predictor, self._folder, self._weights = predictor, folder, weights
        self._lock = threading.RLock()
        self._watched: dict[int, tuple[Any, list[PredictorRun]]] = {}
        self._roots: list[PredictorRoot] = []
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._cached: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._saved = 0
        self._begun = False
        # else only what a predictor is given and returns
        self._operators = session.options.level != "logits"

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        import paddle

        inference = paddle.inference
        self.active = True
        if self.session.options.keep != "none":
            # without numba the same figures come from numpy, slower
            with contextlib.suppress(ImportError):
                host.use_kernels()
        self._wrap(inference.Predictor, "run", self._run)
        if self._predictor is not None:
            self._adopt(self._predictor, None, None)
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

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self.session.failed = "forked"
        self._lock = threading.RLock()  # a thread that is not here any more may have held it
        self.remove()

    # ---- what is called instead of Paddle's own

    def _create(self, previous: Callable[..., Any], config: Any) -> Any:
        facts: dict[str, Any] = {}
        folder, files, spare = "", ("", ""), config
        with self._guard():
            facts, files = paddle_facts.of_config(config), paddle_facts.files(config)
            spare = type(config)(config)  # one config makes one predictor, be it that it fails
            folder = self._prepare(config, files[1])
        try:
            predictor = previous(config)
        except (
            Exception
        ):  # what Paddle raises has many types; that we have it save the program may be the reason
            if not folder:
                raise
            predictor = previous(spare)  # raises what the program would have seen
        with self._guard():
            self._adopt(predictor, facts, files, folder=folder, saved=self._cached.get(config, ""))
        return predictor

    def _clone(self, previous: Callable[..., Any], predictor: Any) -> Any:
        clone = previous(predictor)
        with self._guard():
            entry = self._watched.get(id(predictor))
            above = entry[1][0] if entry is not None and entry[1] else None
            if above is not None:
                self._adopt(
                    clone,
                    above.facts,
                    above.files,
                    program=above.saved_program,
                    unshown=above.unshown,
                )
                _tidy(above.folder)
        return clone

    def _set_cache(self, previous: Callable[..., Any], config: Any, folder: str) -> Any:
        with self._guard():
            self._cached[config] = folder
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
            self._buffers[config] = sum(sizes)
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
        return self._adopt(predictor, None, None)

    def _adopt(
        self,
        predictor: Any,
        facts: dict[str, Any] | None,
        files: tuple[str, str] | None,
        *,
        folder: str = "",
        saved: str = "",
        program: str = "",
        unshown: Unshown | None = None,
    ) -> PredictorRun | None:
        """Hook a predictor.

        folder: where its program was saved for us; saved: where the user had it saved; program,
        unshown: of the one it was cloned from.
        """
        if not self._begun:
            self._begun = True
            if not self.session.begin():
                self.active = False
                return None
        files = files or ("", "")
        root = self._root(files[0])
        weights = ""
        if not program:
            program, weights = self._kept(folder, saved, files, facts or {})
        described = None
        if program:
            try:
                described = Program(self.words.describe(program), self.words.op_type)
            except Exception as error:  # noqa: BLE001 - a program that cannot be read costs order and attributes, not the capture
                self.session.note(
                    "program",
                    f"{os.path.basename(program)} cannot be read: {raised(error)}",  # noqa: PTH119
                    root.name,
                )
        find = self._weights(*files) if self._weights is not None and files[1] else None
        unshown = unshown or self._unshown(described, program, weights)
        _tidy(folder)
        watched = PredictorRun(
            self.session, self.words, predictor, root, described, find, self.changes, unshown
        )
        watched.facts, watched.files, watched.folder, watched.saved_program = (
            facts or {},
            files,
            folder,
            program,
        )
        self._settings(watched)
        if (
            files[1]
            and not Path(files[1]).is_file()
            and (described is None or described.parameters)
        ):
            # Paddle says nothing either.
            problem = (
                "does not exist: Paddle runs the program with whatever lies in memory in "
                "place of its weights"
            )
            text = (
                f"{files[1]} {problem}; give Config the file that was saved with "
                f"{os.path.basename(files[0])}"  # noqa: PTH119
            )
            self.session.note("error", text, root.name, aloud=True)
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

    def _settings(self, watched: PredictorRun) -> None:
        settings = paddle_facts.versions() | watched.facts
        kinds = self._kinds(watched)
        if kinds:
            settings["parameter_dtypes"] = kinds
        if watched.saved_program and self._folder:
            settings["program"] = os.path.relpath(watched.saved_program, self._folder)
        self.session.note("settings", msgspec.json.encode(settings).decode(), watched.root.name)
        if watched.program is None and self._operators:
            why = "attributes and the order of operands are not known: no program was saved for it"
            self.session.note("program", why, watched.root.name)

    def _kinds(self, watched: PredictorRun) -> dict[str, int]:
        """How many parameters of each dtype the user's program has: passes fold quantised ones into
        others.
        """
        file = watched.files[0] if Path(watched.files[0]).is_file() else watched.saved_program
        if not file:
            return {}
        try:
            described = self.words.describe(file)
        except WhenceError:  # as Paddle reads it, it is a program of another version
            return {}
        dtypes = Counter(variable.dtype for variable in described.parameters.values())
        # tables of indices
        return {
            dtype: count for dtype, count in dtypes.items() if dtype not in ("", "bool", "int64")
        }

    # ---- programs

    def _prepare(self, config: Any, weights: str) -> str:
        """Have the predictor save its program after passes into the run; "" where the user has its
        own way of saving, or room is short.
        """
        if not self._operators or not self._folder or self._cached.get(config):
            return ""
        if paddle_facts.said(config, "save_optimized_model") or paddle_facts.said(
            config, "use_optimized_model"
        ):
            return ""
        size = self._buffers.get(config, 0) or (
            Path(weights).stat().st_size if Path(weights).is_file() else 0
        )
        if shutil.disk_usage(self._folder).free < _ROOM * size:
            self.session.note(
                "program",
                f"not saved: Paddle writes the weights along, {size} bytes, and the disk has no "
                "room",
            )
            return ""
        folder = Path(self._folder) / "paddle" / f"{os.getpid()}-{self._saved}"
        self._saved += 1
        folder.mkdir(parents=True, exist_ok=True)
        config.enable_save_optim_model(True)
        config.set_optim_cache_dir(str(folder))
        self._cached.pop(config, None)
        return str(folder)

    def _unshown(self, described: Program | None, program: str, weights: str) -> Unshown:
        """Parameters that operators are given in lists, from the weights that were saved with the
        program.
        """
        names = described.held_by_any() if weights and described is not None else set()
        unshown = Unshown({}, {})
        try:
            unshown.weights.update(self.words.weights(program, weights, names) if names else {})
        except (WhenceError, OSError, ValueError) as error:
            self.session.note(
                "program",
                f"weights in lists are not known, only what is made of them is compared: {error}",
            )
        return unshown

    def _kept(
        self, folder: str, saved: str, files: tuple[str, str], facts: dict[str, Any]
    ) -> tuple[str, str]:
        """The file of the program that runs and that of its weights, "" for what there is none of.

        Saved for us, saved by the user, or the user's own where no passes ran. Paddle saves none
        without parameters.
        """
        file, weights = files
        for where in filter(None, (folder, saved)):
            for name in ("_optimized.json", "_optimized.pdmodel"):
                path = Path(where) / name
                if path.is_file():
                    parameters = str(path.with_suffix(".pdiparams"))
                    if where != folder:
                        return str(path), parameters
                    moved = path.with_name("program" + path.suffix)
                    path.replace(moved)
                    return str(moved), parameters
        # Constants are folded in PIR whatever was asked.
        if (
            folder
            and file
            and Path(file).is_file()
            and not facts.get("ir_optim", True)
            and not facts.get("pir", True)
        ):
            moved = Path(folder) / f"program{Path(file).suffix}"
            shutil.copyfile(file, moved)
            return str(moved), weights
        return "", ""

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


def _tidy(folder: str) -> None:
    """Remove what Paddle saved beside the program: the weights are in the user's file, and in the
    run.
    """
    if folder:
        for path in Path(folder).glob("_optimized*"):
            path.unlink(missing_ok=True)
