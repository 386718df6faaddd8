"""The program that a predictor runs after its passes: has Paddle save it into the run, and reads
it.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from whence.errors import WhenceError
from whence.frameworks.paddle_programs import Program
from whence.instrument.paddle import settings as paddle_facts
from whence.instrument.paddle.tensor_identity import Unshown, Weight
from whence.instrument.session import Session
from whence.instrument.wording import raised

_ROOM = 2  # times the size of its weights that must be free for a program to be saved


class NameTable(NamedTuple):
    """What the readers know of Paddle: names without what changes between processes, and how its
    programs and weights are read.

    weights: (file of a program, file of its weights, names) -> those of the parameters named that
    are in there.
    """

    name: Callable[[str], str]
    op_type: Callable[[str], str]
    describe: Callable[[str], Any]
    weights: Callable[[str, str, Collection[str]], dict[str, Weight]]


class PredictorSource(NamedTuple):
    """What a predictor was made from.

    facts: settings of its config. files: its program and its weights, "" where unknown. folder:
    where whence had its program saved; saved: where the user had it saved. program: file of the
    program after passes, "" for none; described: the content of that file, None where it cannot be
    read. unshown: parameters that no hook shows.
    """

    facts: dict[str, Any] = {}  # noqa: RUF012 - never written
    files: tuple[str, str] = ("", "")
    folder: str = ""
    saved: str = ""
    program: str = ""
    described: Program | None = None
    unshown: Unshown | None = None

    @property
    def lacks_weights(self) -> bool:
        """Whether the weights file is missing although the program has, or may have, parameters.
        Paddle does not report this.
        """
        program = self.described
        missing = bool(self.files[1]) and not Path(self.files[1]).is_file()
        return missing and (program is None or bool(program.parameters))


class SavedPrograms:
    """The programs of predictors in one run. folder: of the run, "" to save none. saves: whether
    operators are recorded; otherwise no program is saved.
    """

    def __init__(self, session: Session, words: NameTable, folder: str, *, saves: bool) -> None:
        self._session, self._words, self._folder, self._saves = session, words, folder, saves
        self._cached: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._saved = 0

    def cached(self, config: Any, folder: str) -> None:
        """Note the folder in which the user has the program of a config saved."""
        self._cached[config] = folder

    def given(self, config: Any, nbytes: int) -> None:
        """Note that a config gets its program and weights from memory."""
        self._buffers[config] = nbytes

    def prepare(self, config: Any) -> PredictorSource:
        """The source of a predictor of this config. Has its program saved into the run after
        passes, unless the user saves it already or disk space is short.
        """
        files = paddle_facts.files(config)
        facts, folder = paddle_facts.of_config(config), self._ask(config, files[1])
        return PredictorSource(facts, files, folder, self._cached.get(config, ""))

    def _ask(self, config: Any, weights: str) -> str:
        """Have a program saved. Returns the folder, "" where it is not saved."""
        if not self._saves or not self._folder or self._cached.get(config):
            return ""
        if paddle_facts.said(config, "save_optimized_model") or paddle_facts.said(
            config, "use_optimized_model"
        ):
            return ""
        size = self._buffers.get(config, 0) or (
            Path(weights).stat().st_size if Path(weights).is_file() else 0
        )
        if shutil.disk_usage(self._folder).free < _ROOM * size:
            self._session.note(
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

    def read(self, source: PredictorSource, root: str) -> PredictorSource:
        """The source with its program read; a clone's program is reused. Notes go to the root named
        `root`.
        """
        program, weights = (source.program, "") if source.program else _kept(source)
        described = None
        if program:
            try:
                described = Program(self._words.describe(program), self._words.op_type)
            except Exception as error:  # noqa: BLE001 - a program that cannot be read costs order and attributes, not the capture
                name = os.path.basename(program)  # noqa: PTH119
                self._session.note("program", f"{name} cannot be read: {raised(error)}", root)
        unshown = source.unshown or self._unshown(described, program, weights)
        tidy(source.folder)
        return source._replace(program=program, described=described, unshown=unshown)

    def _unshown(self, described: Program | None, program: str, weights: str) -> Unshown:
        """Parameters that operators are given in lists, from the weights that were saved with the
        program.
        """
        names = described.held_by_any() if weights and described is not None else set()
        unshown = Unshown({}, {})
        try:
            unshown.weights.update(self._words.weights(program, weights, names) if names else {})
        except (WhenceError, OSError, ValueError) as error:
            self._session.note(
                "program",
                f"weights in lists are not known, only what is made of them is compared: {error}",
            )
        return unshown

    def settings(self, source: PredictorSource) -> dict[str, Any]:
        """What a reader of two runs asks first of a predictor."""
        settings = paddle_facts.versions() | source.facts
        if dtypes := self._parameter_dtypes(source):
            settings["parameter_dtypes"] = dtypes
        if source.program and self._folder:
            settings["program"] = os.path.relpath(source.program, self._folder)
        return settings

    def _parameter_dtypes(self, source: PredictorSource) -> dict[str, int]:
        """How many parameters of each dtype the user's program has: passes fold quantised ones into
        others.
        """
        file = source.files[0] if Path(source.files[0]).is_file() else source.program
        if not file:
            return {}
        try:
            described = self._words.describe(file)
        except WhenceError:  # as Paddle reads it, it is a program of another version
            return {}
        dtypes = Counter(variable.dtype for variable in described.parameters.values())
        # tables of indices
        return {
            dtype: count for dtype, count in dtypes.items() if dtype not in ("", "bool", "int64")
        }


def _kept(source: PredictorSource) -> tuple[str, str]:
    """The file of the program that runs and that of its weights, "" for what there is none of.

    Saved for us, saved by the user, or the user's own where no passes ran. Paddle saves none
    without parameters.
    """
    (file, weights), folder, facts = source.files, source.folder, source.facts
    for where in filter(None, (folder, source.saved)):
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
    unchanged = not facts.get("ir_optim", True) and not facts.get("pir", True)
    if folder and file and Path(file).is_file() and unchanged:
        moved = Path(folder) / f"program{Path(file).suffix}"
        shutil.copyfile(file, moved)
        return str(moved), weights
    return "", ""


def tidy(folder: str) -> None:
    """Remove what Paddle saved beside the program: the weights are in the user's file, and in the
    run.
    """
    if folder:
        for path in Path(folder).glob("_optimized*"):
            path.unlink(missing_ok=True)
