"""Capture a live program: as a context manager in code, or attached to a process that `whence run` started."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import UsageError
from whence.workflows.capture.forcing import to_force
from whence.workflows.capture.setup import finishing

if TYPE_CHECKING:
    from whence.instrument.options import CaptureOptions
    from whence.instrument.session import Session
    from whence.instrument.torch.interventions import Changes
    from whence.instrument.torch.modules import Listener
    from whence.records import External, RunInfo

_SHARE_OF_FREE_SPACE = 4
TORCH, PADDLE = "torch", "paddle"


@contextmanager
def capture(
    model: Any, path: str | os.PathLike[str], *, on_record: Callable[[str, str, Any], Any] | None = None, **options: Any
) -> Iterator[Session]:
    """Capture every call of `model` (a torch module) and of the modules below it while the block runs, into the run `path`.

    `model` may be a Paddle layer or predictor too (docs/paddle.md).

        with whence.capture(model, "runs/ref"):
            model(x)

    options: the fields of `CaptureOptions`: include, exclude, classes, max_depth, ids, slots, steps, keep, max_bytes, no_inputs,
    programs, force, level ("logits", or logits=True: tokens and logits alone) ... A misspelt one fails at once.
    on_record: a function (op type, name, tensor) -> numbers for columns.
    seed, deterministic: set in this process when the block is entered, and left so. A child that the block forks is not captured.
    patch, patch_from: calls (`layers.3.mlp`) that return what they returned in the run patch_from. inject: a fault to plant meanwhile.
    force_tokens: a run whose tokens the program goes on with instead of its own.
    Without these the captured program is not changed: outputs, RNG and hooks stay bitwise as they are. A failing disk ends the capture with
    a note, never the program. Raises UsageError, OutputExists, StoreFailed before the block is entered.
    """
    from whence import store
    from whence.errors import CaptureError
    from whence.instrument.launch import launcher
    from whence.instrument.options import make
    from whence.instrument.wording import raised
    from whence.workflows.capture import labels
    from whence.workflows.capture import paddle as paddle_capturing

    chosen = make(**options)
    paddle = paddle_capturing.is_paddle(model)
    if paddle:
        paddle_capturing.check(chosen)
    elif not hasattr(model, "named_modules"):
        raise CaptureError(
            f"cannot capture a {type(model).__name__}: whence.capture takes a torch.nn.Module, a paddle.nn.Layer or a Paddle predictor; "
            "a whole program is captured by `whence run`"
        )
    folder = os.fspath(path)
    session = _session(folder, chosen, on_record)  # before anything is written: an on_record that cannot be found is said first
    if chosen.rung:
        raise UsageError(
            "rung: a model given to capture is compiled already; whence.ladder climbs in code, `whence run --rung` runs a program"
        )
    check_patch(chosen, folder)
    store.create(folder, _info(chosen), force=chosen.force)
    launcher.apply_determinism(chosen, framework=PADDLE if paddle else TORCH)
    listener = labelled = None
    try:
        listener = paddle_capturing.listener(session, model, folder) if paddle else _listener(session, model, folder)
        listener.install()
        labelled = labels.taking(session, folder)
        yield session
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # of the program: it goes on with it
        if session.calls:
            session.note("ended", f"the block was left by {raised(error)}")
        raise
    finally:
        if listener is not None:
            listener.remove()
        session.close()
        if labelled is not None:
            labelled()


_dumping: list[tuple[str, CaptureOptions, Session, Listener]] = []  # the region that is open, or was and goes on


def begin_dump(
    path: str | os.PathLike[str], *, on_record: Callable[[str, str, Any], Any] | None = None, force: bool = False, **options: Any
) -> None:
    """Record every operator from here to `end_dump` into the run `path`, on this thread and in modules called on others.

        whence.begin_dump("runs/ops", samples=2, dedup=True)
        loss(model(x)).backward()
        whence.end_dump()

    options: as of `whence.capture` with level="op". Begun again with the same path and options, while it is open nothing happens, and after
    `end_dump(clear_context=False)` it goes on. Nothing of the program is changed. Raises UsageError when another region is
    open or the options are others, OutputExists, StoreFailed.
    """
    from whence import store
    from whence.instrument.launch import launcher
    from whence.instrument.options import make

    folder, chosen = str(Path(path).absolute()), make(level="op", force=force, **options)
    if _dumping:
        if (_dumping[0][0], _dumping[0][1]) != (folder, chosen):
            raise UsageError(f"begin_dump {folder}: {_dumping[0][0]} is not ended; call end_dump() first")
        _dumping[0][3].active = True
        return
    session = _session(folder, chosen, on_record)
    store.create(folder, _info(chosen), force=chosen.force)
    launcher.apply_determinism(chosen)
    listener = _listener(session, None, folder)
    listener.install()
    _dumping.append((folder, chosen, session, listener))


def end_dump(clear_context: bool = True) -> None:
    """End the region that `begin_dump` opened. clear_context: finish the run; False only stops, and `begin_dump` may go on with it.

    Nothing happens where none is open. A region that is never ended is finished with the process.
    """
    if not _dumping:
        return
    _, _, session, listener = _dumping[0]
    if not clear_context:
        listener.active = False
        return
    _dumping.clear()
    listener.remove()
    session.close()


atexit.register(end_dump)


def attach(options: CaptureOptions, run_path: str, framework: str) -> None:
    """Listen to every model of a framework in this process until it ends. Called in the child by `whence run`, after its import."""
    from whence.workflows.capture import labels
    from whence.workflows.capture import paddle as paddle_capturing

    def start() -> Listener | paddle_capturing.Both:
        session = _session(run_path, options, None)
        paddle = framework == PADDLE
        listener = paddle_capturing.listener(session, None, run_path) if paddle else _listener(session, None, run_path, lasting=True)
        listener.install()
        labels.inherited(session)
        return listener

    current = start()
    rung = None
    if options.rung:
        from whence.instrument.torch.compiled import stages

        rung = stages.Rung(options.rung)
        rung.install()

    def finish() -> None:
        labels.inherited(None)
        current.remove()
        if rung is not None:
            stages.note(current.session, rung.remove())
        current.session.close()

    def renew() -> None:
        # A forked child shares the parent's file descriptors and must not write to them: it captures into a folder of its own.
        nonlocal current
        current.abandon()
        current = start()

    atexit.register(finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    # multiprocessing ends its children without atexit. Its own finalizers do run there, but only those made after it cleared
    # them in the child; that is the moment this hook is called. It holds the first argument weakly, so a module it is.
    multiprocessing.util.register_after_fork(sys.modules[__name__], lambda _: multiprocessing.util.Finalize(None, finish, exitpriority=10))


def check_patch(options: CaptureOptions, path: str) -> None:
    """Raise UsageError or UnreadableRun when the run to patch from cannot be read or holds no such call, before anything is written."""
    if options.patch:
        from whence import store
        from whence.instrument.patch_points import check_points

        if Path(path).resolve() == Path(options.patch_from).resolve():
            raise UsageError(f"patch_from {options.patch_from} is the run that is to be written; choose another output path")
        check_points(options.patch, store.open_run(options.patch_from).calls, options.patch_from)
    if options.force_tokens:
        if Path(path).resolve() == Path(options.force_tokens).resolve():
            raise UsageError(f"force_tokens {options.force_tokens} is the run that is to be written; choose another output path")
        to_force(options.force_tokens)


def _listener(session: Session, model: Any, folder: str, *, lasting: bool = False) -> Listener:
    from whence.instrument.torch.logits import LogitsListener
    from whence.instrument.torch.modules import Listener
    from whence.instrument.torch.operators import OperatorListener

    how: dict[str, Any] = {"find_external": _Externals(model, session), "changes": _changes(session)}
    if session.options.level == "graph":
        from whence.instrument.torch.compiled.listener import GraphListener

        return GraphListener(session, model, folder=folder, program=True, **how)
    if session.options.level == "op":
        return OperatorListener(session, model, lasting=lasting, **how)
    return (LogitsListener if session.options.level == "logits" else Listener)(session, model, **how)


def _changes(session: Session) -> Changes | None:
    options = session.options
    if not options.patch and not options.inject and not options.force_tokens:
        return None
    from whence import store
    from whence.instrument.torch.forced_tokens import Forced
    from whence.instrument.torch.interventions import Changes

    forced = Forced(session, to_force(options.force_tokens), options.force_tokens) if options.force_tokens else None
    return Changes(session, store.open_run(options.patch_from) if options.patch else None, options.patch, options.inject, forced)


def _session(folder: str, options: CaptureOptions, on_record: Callable[[str, str, Any], Any] | None) -> Session:
    from whence import store
    from whence.instrument.session import Session

    limit = options.max_bytes if options.max_bytes is not None else default_max_bytes(folder)

    def writer(rank: int) -> Any:
        return store.Writer(folder, rank, finishing=finishing(folder))

    return Session(writer, options, max_bytes=limit, rank=_rank, on_record=on_record)


def default_max_bytes(folder: str) -> int:
    """The smaller of 20 GB and a quarter of the free space where the run is written."""
    from whence.instrument.options import DEFAULT_MAX_BYTES

    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    return min(DEFAULT_MAX_BYTES, shutil.disk_usage(place).free // _SHARE_OF_FREE_SPACE)


def _rank() -> int:
    """The rank of this process: of its process group once it has joined one, else as its launcher says."""
    from whence.instrument.torch import torch_ranks

    found = torch_ranks.facts().get("rank")
    if found is not None:
        return int(found)
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "PADDLE_TRAINER_ID", "LOCAL_RANK"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def _info(options: CaptureOptions) -> RunInfo:
    """What is known of this process, for a run that was started in code."""
    from whence.instrument.launch import interpreter, launcher

    return launcher.describe(tuple(sys.argv), options, interpreter.versions_here())


class _Externals:
    """Looks a parameter's bytes up in checkpoint files: the ones given by the user, else those this process reads by itself."""

    def __init__(self, model: Any, session: Session) -> None:
        self._model, self._session = model, session
        self._given = tuple(session.options.weights)
        self._files: tuple[str, ...] | None = None
        self._looked = 0.0
        self._candidates: Any = None

    def __call__(self, digest: bytes, dtype: str, shape: tuple[int, ...], data: Any) -> External | None:
        """Where the bytes lie, None when nowhere. Called once per parameter: files are looked for at most once a second."""
        now = time.monotonic()
        if self._files is None or (not self._given and now - self._looked > 1.0):
            self._looked = now
            self._know(self._given or _checkpoints(self._model))
        found: External | None = self._candidates.find(digest, dtype, data.nbytes, data) if self._files else None
        return found

    def _know(self, files: tuple[str, ...]) -> None:
        from whence import store

        if files == self._files:
            return
        self._files, self._candidates = files, store.Candidates(files)
        if self._given:
            for path, reason in self._candidates.skipped.items():
                self._session.note("weights", f"--weights {path} cannot be used, parameters are copied: {reason}")


def _checkpoints(model: Any) -> tuple[str, ...]:
    """Checkpoint files this process has mapped, and those beside the model's name when that is a folder.

    Never the shards of a run: it may be scrubbed or deleted, and would take the parameters of this one with it.
    """
    found: dict[str, None] = {}
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or getattr(model, "name_or_path", "")
    if isinstance(name, str) and name and Path(name).is_dir():
        found.update(dict.fromkeys(str(p) for p in sorted(Path(name).glob("*.safetensors"))))
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        place = line.partition("/")
        if place[1] and place[2].endswith((".safetensors", ".gguf")):
            found["/" + place[2]] = None
    return tuple(path for path in found if not (Path(path).parent / "journal.jsonl").exists())
