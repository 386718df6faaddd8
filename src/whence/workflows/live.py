"""Two models of one process, compared while a program uses them: `whence.compare_live`."""

from __future__ import annotations

import difflib
import inspect
import os
import random
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from whence.errors import CaptureError, UsageError
from whence.results import Comparison, ParityError, Status

if TYPE_CHECKING:
    from whence.instrument.arguments import CaptureArguments
    from whence.instrument.framework import Listening

REFERENCE, TARGET, COMPARED = "reference", "target", "cmp"


def compare_live(
    reference: Any,
    target: Any,
    *,
    mirror: bool = True,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    capture: CaptureArguments | None = None,
    **options: Any,
) -> Live:
    """Compare two models while a program uses `target`: whenever the block calls it, `reference` is
    called with copies of the same inputs, and both are captured.

        with whence.compare_live(reference, target) as watch:
            evaluate(target)
        print(watch.result)

    reference, target: torch modules or Paddle layers; the reference gets the inputs in its own
    framework, device and dtype, and the random numbers that the target gets.
    mirror: False leaves the reference to the block, which calls both models itself. output: folder
    for the runs `reference` and `target` and the comparison `cmp`; None leaves nothing on disk once
    the watch is gone. force: replace them. capture: options of `whence.capture`. options: of
    `whence.compare`. The target computes the same bits, and the program's random generators stay
    where they were. Raises UsageError, OutputExists; at the end of the block what
    comparing raises, and CaptureError where the target was never called, or the reference raised
    (the program is not disturbed by that).
    """
    return Live(
        reference,
        target,
        mirror=mirror,
        output=output,
        force=force,
        capture=capture,
        options=options,
    )


class Live:
    """Two models that are compared while the block runs; `result` is the comparison afterwards.

    calls: how often the target was called so far.
    """

    def __init__(
        self,
        reference: Any,
        target: Any,
        *,
        mirror: bool,
        output: str | os.PathLike[str] | None,
        force: bool,
        capture: CaptureArguments | None,
        options: Mapping[str, Any],
    ) -> None:
        self._models = (reference, target)
        self._mirror, self._force = mirror, force
        self._capture: dict[str, Any] = dict(capture or {})
        self._options = dict(options)
        self._output = Path(output) if output is not None else None
        self._check()
        self._folder = self._output or Path(tempfile.mkdtemp(prefix="whence-live-"))
        if self._output is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._stack = ExitStack()
        self._thread = threading.local()
        self._reference_error: Exception | None = None
        self._result: Comparison | None = None
        self._why = "the block has not been entered"
        self.calls = 0

    @property
    def result(self) -> Comparison:
        """What was found. Raises UsageError before the block has ended."""
        if self._result is None:
            raise UsageError(f"there is no result: {self._why}")
        return self._result

    def answer(self, width: int | None = None) -> str:
        """The result as `whence compare` prints it. width: at which lines are broken."""
        from whence.report.answer import answer

        return answer(self.result, output=str(self._kept) if self._kept else "", width=width)

    def check(self) -> Comparison:
        """Raise ParityError unless every difference is rounding; else give the result."""
        __tracebackhide__ = True
        from whence.report.assertion import disparity

        result = self.result
        if result.status != Status.SAME:
            raise ParityError(disparity(result, self._output), result)
        return result

    def __repr__(self) -> str:
        known = f"{self._result.status}" if self._result is not None else self._why
        return f"<Live comparison, {self.calls} calls of the target: {known}>"

    # ---- the block

    def __enter__(self) -> Self:
        if self._why != "the block has not been entered":
            raise UsageError("a comparison is made of one block; make another for another block")
        from whence.workflows.capture.capture import listening

        try:
            with ExitStack() as stack:
                listeners = [
                    stack.enter_context(listening(model, self._folder / side, **self._of_capture()))
                    for side, model in zip((REFERENCE, TARGET), self._models, strict=True)
                ]
                for name in sorted({_framework(model) for model in self._models}):
                    stack.enter_context(_around_calls(name, self._acting(*listeners)))
                self._stack = stack.pop_all()
        except BaseException:
            self._why = "the block could not be entered"
            raise
        self._why = "the block is still running"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is not None:
            self._why = f"the block was left by {type(error).__name__}"
            return
        self._why = "the runs could not be compared"
        if self._reference_error is not None:
            raise CaptureError(
                f"the reference raised {type(self._reference_error).__name__} on the inputs of "
                f"call {self.calls} of the target, which the program itself did not notice: "
                f"{self._reference_error}"
            ) from self._reference_error
        if not self.calls:
            raise CaptureError(
                "the block did not call the target: give the object that the program calls "
                "(torch.compile and wrappers like DistributedDataParallel make another)"
            )
        self._result = self._compared()

    def _compared(self) -> Comparison:
        from whence.workflows.compare import compare

        result = compare(
            self._folder / REFERENCE,
            self._folder / TARGET,
            output=self._kept,
            force=self._force,
            **self._options,
        )
        if self._kept is not None:
            return result.in_folder(str(self._kept))
        note = "the runs were not kept: give compare_live(..., output=FOLDER) to look into them"
        return msgspec.structs.replace(result, next=(), notes=(*result.notes, note))

    @property
    def _kept(self) -> Path | None:
        return self._output / COMPARED if self._output is not None else None

    # ---- calls

    def _acting(self, of_reference: Listening, of_target: Listening) -> Callable[..., Any]:
        reference, target = self._models
        thread = self._thread

        def act(call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
            if (module is not target and module is not reference) or getattr(thread, "busy", False):
                return call(module, *args, **kwargs)
            thread.busy = True
            try:
                if module is target:
                    if self._mirror:
                        with of_target.aside(), of_reference.aside():
                            self._call_reference(args, kwargs, of_reference)
                    self.calls += 1
                    with of_reference.aside():
                        return call(module, *args, **kwargs)
                with of_target.aside():
                    if self._mirror:  # a call of the program's own, of which the target has none
                        with of_reference.aside():
                            return call(module, *args, **kwargs)
                    return call(module, *args, **kwargs)
            finally:
                thread.busy = False

        return act

    def _call_reference(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], listening: Listening
    ) -> None:
        from whence.workflows.feeding import called_with

        if self._reference_error is not None:
            return
        try:
            with _other_generators():
                called_with(
                    self._models[0],
                    args,
                    kwargs,
                    gradients=True,
                    around=listening.aside(aside=False),
                )
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises is told later
            self._reference_error = error

    # ---- arguments

    def _check(self) -> None:
        """Raise before the program runs what would otherwise be raised when it is over."""
        from whence.workflows.compare import compare
        from whence.workflows.saved import check_output

        for side, model in zip((REFERENCE, TARGET), self._models, strict=True):
            _framework(model)
            if not hasattr(model, "named_modules") and not hasattr(model, "named_sublayers"):
                raise UsageError(
                    f"the {side} is of type {type(model).__name__}: compare_live takes torch "
                    "modules and Paddle layers; capture others with whence.capture(MODEL, RUN) and "
                    "compare the runs (whence.testing.assert_parity takes predictors too)"
                )
        if self._models[0] is self._models[1]:
            raise UsageError(
                "reference and target are one object; copy.deepcopy(model) makes another"
            )
        known = {*inspect.signature(compare).parameters} - {"reference", "target", "output"}
        for name in self._options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UsageError(
                    f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        if self._capture.get("level") == "graph":
            raise UsageError("level graph captures one model of a process at a time")
        if self._output is not None:
            for part in (REFERENCE, TARGET, COMPARED):
                check_output(self._output / part, self._force)

    def _of_capture(self) -> Any:
        return {"force": self._force, **self._capture}


def _framework(model: Any) -> str:
    from whence.instrument.framework import owner_of

    return owner_of(model)


def _around_calls(name: str, act: Callable[..., Any]) -> Any:
    from whence.instrument.framework import framework

    return framework(name).around_calls(act)


@contextmanager
def _other_generators() -> Iterator[None]:
    """What a block draws from the generators of Python and numpy is not missing afterwards."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
