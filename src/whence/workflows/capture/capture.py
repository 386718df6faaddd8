"""Capture a live program: as a context manager in code, or attached to a process that `whence run`
started.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from whence import store
from whence.errors import UsageError
from whence.instrument.arguments import CaptureArguments, StepsArgument
from whence.instrument.options import CaptureOptions, make
from whence.instrument.session import Session
from whence.workflows.capture.process_end import at_the_end
from whence.workflows.capture.setup import (
    check_patch,
    is_one_of_several,
    listener_of,
    open_session,
    process_info,
    uncaught,
)

if TYPE_CHECKING:
    from whence.instrument.framework import Listening
    from whence.workflows.saved import AnyPath


@contextmanager
def capture(
    model: Any,
    path: AnyPath,
    *,
    on_record: Callable[[str, str, Any], Any] | None = None,
    **options: Unpack[CaptureArguments],
) -> Iterator[Session]:
    """Capture every call of `model` (a torch module) and of the modules below it while the block
    runs, into the run `path`.

    `model` may be a Paddle layer or predictor too (docs/paddle.md), a session of ONNX Runtime
    or a model of OpenVINO (docs/onnxruntime.md).

        with whence.capture(model, "runs/ref"):
            model(x)

    options: the fields of `CaptureOptions`: include, exclude, classes, max_depth, ids, slots,
    steps, keep, max_bytes, no_inputs, programs, force, level ("logits", or logits=True: tokens and
    logits alone) ... A misspelt option fails at once. on_record: a function (op type, name, tensor)
    -> numbers for columns. seed, deterministic: set in this process when the block is entered, and
    not reset. A child that the block forks is not captured. patch, patch_from: calls
    (`layers.3.mlp`) that return what they returned in the run patch_from. inject: a fault to plant
    meanwhile. force_tokens: a run whose tokens the program goes on with instead of its own. Without
    these options the captured program is not changed: outputs, RNG and hooks are bitwise the same.
    A failing disk ends the capture with a note, never the program. Raises UsageError, OutputExists,
    StoreFailed before the block is entered.
    """
    from whence.instrument.framework import check, owner_of, set_determinism
    from whence.instrument.guard import keep_ring
    from whence.instrument.wording import raised
    from whence.workflows.capture import labels

    chosen = make(**options)
    name = owner_of(model)
    check(name, chosen)
    folder = os.fspath(path)
    session = open_session(folder, chosen, on_record)
    if chosen.rung or chosen.disabled_optimizers:
        raise UsageError(
            f"{'rung' if chosen.rung else 'disabled_optimizers'}: a model given to capture is "
            "compiled or optimised already; whence.ladder climbs in code, `whence run --rung` "
            "runs a program"
        )
    check_patch(chosen, folder)
    store.create(folder, process_info(chosen), force=chosen.force, together=is_one_of_several())
    set_determinism(chosen, name)
    listener = labelled = None
    try:
        listener = listener_of(name, session, model, folder)
        listener.install()
        labelled = labels.taking(session, folder)
        yield session
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # the program's own
        if listener is not None:
            listener.remove()
        keep_ring(session, raised(error))
        if session.calls:
            session.note("ended", f"the block was left by {raised(error)}")
        raise
    finally:
        if listener is not None:
            listener.remove()
        session.close()
        if labelled is not None:
            labelled()


_dumping: list[
    tuple[str, CaptureOptions, Session, Any]
] = []  # the region that is open, or was and goes on


def begin_dump(
    path: AnyPath,
    *,
    on_record: Callable[[str, str, Any], Any] | None = None,
    force: bool = False,
    **options: Unpack[StepsArgument],
) -> None:
    """Record every operator from here to `end_dump` into the run `path`, on this thread and in
    modules called on others.

        whence.begin_dump("runs/ops", samples=2, dedup=True)
        loss(model(x)).backward()
        whence.end_dump()

    options: as of `whence.capture` with level="op". Beginning again with the same path and options
    does nothing while the region is open, and continues it after `end_dump(clear_context=False)`.
    The program is not changed. Raises UsageError when another region is open or with other options,
    OutputExists, StoreFailed.
    """
    from whence.instrument.framework import set_determinism

    folder, chosen = str(Path(path).absolute()), make(level="op", force=force, **options)
    if _dumping:
        if (_dumping[0][0], _dumping[0][1]) != (folder, chosen):
            raise UsageError(
                f"begin_dump {folder}: {_dumping[0][0]} is not ended; call end_dump() first"
            )
        _dumping[0][3].active = True
        return
    session = open_session(folder, chosen, on_record)
    store.create(folder, process_info(chosen), force=chosen.force)
    set_determinism(chosen)
    listener = listener_of("torch", session, None, folder)
    listener.install()
    _dumping.append((folder, chosen, session, listener))


def end_dump(clear_context: bool = True) -> None:
    """End the region that `begin_dump` opened. clear_context: finish the run; False only pauses,
    and `begin_dump` can continue it.

    Does nothing if no region is open. A region that is never ended ends with the process.
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
    """Listen to every model of a framework in this process until it ends. Called in the child by
    `whence run`, after its import.
    """
    from whence.instrument.framework import has_level, stage_of
    from whence.instrument.guard import keep_ring
    from whence.workflows.capture import labels

    if not has_level(framework, options):
        return  # a program of another framework may import this one for its own purposes

    def start() -> Listening:
        session = open_session(run_path, options, None)
        listener = listener_of(framework, session, None, run_path, lasting=True)
        listener.install()
        labels.inherited(session)
        return listener

    # Raises where there is none, before anything is listened to.
    stage = stage_of(framework, options)
    current = start()
    if stage is not None:
        stage.install()

    def finish() -> None:
        labels.inherited(None)
        current.remove()
        if failure := uncaught():
            keep_ring(current.session, failure)
        if stage is not None:
            stage.finish(current.session)
        elif "torch._dynamo" in sys.modules:
            from whence.instrument.torch.compiled import stages as compiled_stages

            compiled_stages.note_unseen(current.session)
        current.session.close()

    def renew() -> None:
        # A forked child shares the parent's file descriptors and must not write to them: it
        # captures into a folder of its own.
        nonlocal current
        current.abandon()
        current = start()

    at_the_end(finish, renew)
