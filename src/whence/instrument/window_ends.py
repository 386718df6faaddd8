"""When the windows of steps end that a capture writes into folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from whence.errors import StoreFailed
from whence.instrument.options import CaptureOptions
from whence.records import Sink


@runtime_checkable
class StepWindows(Protocol):
    """A sink with a folder for each window of steps.

    count_step: says whether the window ends with the step that has ended. begin_window: ends it.
    """

    def count_step(self) -> bool: ...
    def begin_window(self) -> None: ...


class Session(Protocol):
    """What is asked of `session.Session`."""

    options: CaptureOptions
    elements_on: bool

    @property
    def active(self) -> bool: ...
    def sink(self) -> Sink: ...
    def fail(self, reason: str) -> None: ...


def step_ended(session: Session, before: Callable[[], object] = lambda: None) -> None:
    """A step of the program has ended, recorded or not: the window may end with it. before: called
    before it ends, to hand over what is still on its way to the sink.
    """
    if session.options.window is None or not session.active:
        return
    try:
        sink = session.sink()
        if isinstance(sink, StepWindows) and sink.count_step():
            before()
            sink.begin_window()
            # What was deleted meanwhile is room for more elements.
            session.elements_on = session.options.keep == "full"
    except StoreFailed as error:
        session.fail(str(error))
