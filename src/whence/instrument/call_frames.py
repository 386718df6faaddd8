"""The calls in progress of a listener: a stack for each thread, the place of each call in the tree
of calls, and the roots that count steps. Independent of the framework.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from whence.instrument.guard import end_capture
from whence.instrument.session import Session
from whence.records import Ref

_Result = TypeVar("_Result")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Hiding = tuple[Callable[[], Any], Callable[[], Any], Callable[[], int]]
"""How to hide a listener from its framework: (makes a context, makes a context for when modes of
the program are on, counts the modes that are on).
"""
_RootT = TypeVar("_RootT", bound="Root")


class Root:
    """A name under which the outermost calls of a model count their steps.

    ref: returns the model, None when it is gone. A model that is made anew at every step (a loss)
    continues the root of the earlier one of its kind.
    """

    def __init__(self, name: str, ref: Callable[[], Any]) -> None:
        self.name, self.ref = name, ref


class Frame:
    """One call between its entry and its return.

    number: place in the tree of calls: "0" for a root, "2_1" for the first child of its second
    child. place: index among the children of its parent. occurrence: how often its scope was called
    before within `counts`, which all calls below one call of a root share. selected: whether the
    selection of the capture includes it. keep: whether elements of its tensors are kept.
    """

    __slots__ = (
        "children",
        "counts",
        "depth",
        "keep",
        "number",
        "occurrence",
        "order",
        "parent",
        "place",
        "refs",
        "root",
        "scope",
        "selected",
        "step",
    )  # fmt: skip
    counts: dict[str, int]
    depth: int
    number: str
    occurrence: int
    parent: Any
    place: int
    root: Any
    step: int

    def __init__(self, scope: str, order: int, parent: Any) -> None:
        self.scope, self.order, self.parent, self.children = scope, order, parent, 0
        self.keep, self.selected = False, True
        self.refs: list[Ref] = []
        if parent is None:
            self.number, self.depth, self.place = "0", 0, 0
            return
        self.place = parent.children
        parent.children = count = self.place + 1
        self.number = str(count) if parent.number == "0" else f"{parent.number}_{count}"
        self.depth = parent.depth + 1
        self.root, self.step, self.counts = parent.root, parent.step, parent.counts


class ThreadCalls(threading.local):
    """The calls in progress on one thread, innermost last. busy: whence's own code is running."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.busy = False


class Switch(Protocol):
    """Tells whether calls are observed. asleep: only outermost calls are."""

    @property
    def active(self) -> bool: ...
    @property
    def asleep(self) -> bool: ...


class Looks:
    """Work that whence's own code may postpone, but must finish before the program goes on.

    deferred: work may be postponed, since whence's own code is running. pending: there is postponed
    work; `finish` does it.
    """

    __slots__ = ("deferred", "finish", "pending")

    def __init__(self) -> None:
        self.deferred = self.pending = False
        self.finish: Callable[[], None] = _nothing


def _nothing() -> None:
    """Nothing to finish."""


class CallFrames:
    """The calls in progress of one listener, and contexts in which its own code runs between them.

    thread: the state of the current thread. active: False before and after listening, and while
    asleep. asleep: waiting for a step that is recorded.
    """

    def __init__(
        self,
        session: Session,
        hiding: Hiding = (contextlib.nullcontext, contextlib.nullcontext, bool),
        thread: ThreadCalls | None = None,
    ) -> None:
        self._session = session
        self._hide, self._hide_from_modes, self._modes = hiding
        self.thread: Any = thread or ThreadCalls()
        self.lock = threading.RLock()
        self.looks = Looks()
        self.active = self.asleep = False

    def guarded(self, action: Callable[..., _Result], *args: Any) -> _Result | None:
        """Returns `action(*args)`. If it raises, the capture ends, the program goes on, and None is
        returned. A Ctrl-C is raised to the program, and calls that `action` added to the stack are
        removed.
        """
        thread = self.thread
        depth = len(thread.stack)
        thread.busy = True
        try:
            with self.lock, self._hide_from_modes() if self._modes() else self._hide():
                looks = self.looks
                looks.deferred = True
                try:
                    return action(*args)
                finally:
                    looks.deferred = False
                    if looks.pending:
                        looks.finish()
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            self.give_up(error)
        except BaseException:  # Ctrl-C: the call that was to begin never did
            del thread.stack[depth:]
            raise
        finally:
            thread.busy = False
        return None

    def give_up(self, error: Exception) -> None:
        """End the capture because of an error in the listener's own code."""
        self.active = self.asleep = False
        self.thread.stack.clear()
        end_capture(self._session, error)

    def be_busy(self) -> None:
        """Mark this thread as one that runs the listener's own code only."""
        self.thread.busy = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which calls on this thread are not observed."""
        thread = self.thread
        before, thread.busy = thread.busy, True
        try:
            yield
        finally:
            thread.busy = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which a tensor is recorded while a call of the program is in progress; what
        fails in it is raised.
        """
        with self.aside(), self.lock, self._hide():
            yield

    def leave(self, frame: Any) -> None:
        """Remove `frame` from the stack, with calls above it that ended without notice (a greenlet,
        a Ctrl-C).
        """
        stack = self.thread.stack
        if stack and stack[-1] is frame:
            stack.pop()
        elif any(entry is frame for entry in stack):
            while stack.pop() is not frame:
                pass

    def forked(self) -> None:
        """Stop in a forked child and replace the lock, which a thread of the parent may have
        held.
        """
        self.active = self.asleep = False
        self._session.failed = "forked"
        self.lock = threading.RLock()


def count(table: dict[str, int], key: str) -> int:
    """How often `key` was counted in `table` before; counts it once more."""
    number = table[key] = table.get(key, -1) + 1
    return number


def root_or_name(roots: Iterable[_RootT], kind: str) -> tuple[_RootT | None, str]:
    """(a root of this kind whose model is gone, or None; the name for a new root)."""
    alike = [root for root in roots if root.name.partition("#")[0] == kind]
    free = next((root for root in alike if root.ref() is None), None)
    return free, kind if not alike else f"{kind}#{len(alike)}"
