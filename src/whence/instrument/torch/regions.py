"""Calls of kind "region": operators and graphs that run outside any module (code of the program
itself, a backward pass, an optimiser).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from whence.instrument.call_frames import count
from whence.instrument.session import Session
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Call


class Region:
    """Consecutive operators outside any module that are of one kind and belong to one call of a
    root.

    kind: "region", "backward" or "optimizer". operators: number of operators so far.
    """

    __slots__ = (
        "counts",
        "keep",
        "kind",
        "micro",
        "note",
        "number",
        "occurrence",
        "operators",
        "order",
        "phase",
        "root",
        "scope",
        "selected",
        "step",
        "training",
    )  # fmt: skip
    selected: bool

    def __init__(
        self, kind: str, order: int, root: ModuleRoot, step: int, micro: int, counts: dict[str, int]
    ) -> None:
        self.kind, self.order, self.root = kind, order, root
        self.step, self.micro, self.counts = step, micro, counts
        self.operators = 0
        self.phase = "forward" if kind == "region" else kind
        self.number, self.scope, self.note = kind, "", ""
        self.keep = self.training = False
        self.occurrence = count(counts, f"<{kind}>")


def part_of(region: Any, session: Session, **fields: Any) -> Call:
    """The next call inside a region or an execution of a graph: one part of a training step, or an
    operator. fields: of `Call`, beside those it takes from the region.
    """
    region.operators += 1
    order = session.next_order()
    common: dict[str, Any] = {
        "kind": "module",
        "root": region.root.name,
        "step": region.step,
        "rank": session.rank,
        "micro": region.micro,
        "phase": region.phase,
        "number": f"{region.number}_{region.operators}",
        "training": True,
    }
    return Call(id=order, order=order, parent=region.order, leaf=True, **(common | fields))


class OpenRegion(threading.local):
    """The open region of each thread, None without one."""

    region: Region | None = None


class Regions:
    """The open region of each thread.

    thread: thread-local state with an attribute `region`, None for one of its own. ended: called
    after a region was written.
    """

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        thread: Any = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._session, self._registry, self._ended = session, registry, ended
        self._thread: Any = OpenRegion() if thread is None else thread
        self._open: dict[int, Region] = {}
        # Counts of the current micro-batch only: a long training has millions of them.
        self._counts: dict[str, tuple[tuple[int, int], dict[str, int]]] = {}
        self.nowhere = ModuleRoot("region", lambda: None)  # before any root was called

    def enter_counted(self, kind: str, root: ModuleRoot, step: int, micro: int) -> Region:
        """`enter`, with the counts of the root's current micro-batch."""
        when, counts = self._counts.get(root.name, ((-1, -1), {}))
        if when != (step, micro):
            counts = {}
            self._counts[root.name] = (step, micro), counts
        return self.enter(kind, root, step, micro, counts)

    def enter(
        self, kind: str, root: ModuleRoot, step: int, micro: int, counts: dict[str, int]
    ) -> Region:
        """The region for the code that runs now: the open one if it matches, else a new one in its
        place.
        """
        thread, session = self._thread, self._session
        region: Region | None = thread.region
        if (
            region is not None
            and region.kind == kind
            and region.root is root
            and (region.step, region.micro) == (step, micro)
        ):
            return region
        self.close()
        region = thread.region = Region(kind, session.next_order(), root, step, micro, counts)
        if root is self.nowhere and not session.begin():
            region.selected = False
        else:
            region.selected = session.takes_all or session.selector.wants("", "", 0, "0", step)
        self._open[id(region)] = region
        return region

    def close(self) -> None:
        """End the region of this thread."""
        if self._thread.region is not None:
            self._end(self._thread.region)
            self._thread.region = None

    def close_all(self) -> None:
        """End the regions of all threads."""
        for region in list(self._open.values()):
            self._end(region)

    def _end(self, region: Region) -> None:
        self._open.pop(id(region), None)
        if not region.selected or self._session.failed:
            return
        call = Call(
            id=region.order,
            scope="",
            root=region.root.name,
            step=region.step,
            order=region.order,
            rank=self._session.rank,
            micro=region.micro,
            phase=region.phase,
            op=region.kind,
            occurrence=region.occurrence,
            kind="region",
            op_type=region.kind,
            number=region.number,
        )
        self._registry.call(call)
        self._ended()
