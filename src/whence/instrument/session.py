"""What a capture keeps and when: selection, byte budget, steps, live printing, and failures. Knows
no framework.

A session stands between a listener (which sees calls) and a `Sink` (which writes them). It never
raises into the captured program: the first failure of the sink ends the capture, leaves the reason
in the run and on stderr, and the program goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from whence.errors import StoreFailed
from whence.frameworks import host
from whence.instrument.on_record import OnRecord, UserColumns, load_on_record
from whence.instrument.options import CaptureOptions
from whence.instrument.selection import Selector
from whence.instrument.wording import size as size_words
from whence.records import Call, External, Note, Program, Sink, Sketch, Statistics, Step
from whence.records.slots import is_param

FIGURES = 1 << 12
"""Figures of so many contents are remembered: a view has those of its base."""


class Session:
    """One capture of one process.

    open_sink: called at the first record with (rank); max_bytes: budget for elements. rank: of this
    process, or a function that is asked when the first model is called: a program joins its process
    group before that, and after the capture was set up. say: where lines for a human go (default
    stderr). Thread-safe; listeners may call from any thread.
    """

    def __init__(
        self,
        open_sink: Callable[[int], Sink],
        options: CaptureOptions,
        *,
        max_bytes: int,
        rank: int | Callable[[], int] = 0,
        on_record: OnRecord | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.options, self.max_bytes = options, max_bytes
        self._rank: int | Callable[[], int] = rank
        self.selector = Selector(options)
        some = options.include or options.exclude or options.classes or options.ids or options.steps
        self.takes_all = not some and options.max_depth is None
        self.failed = ""
        self.elements_on = options.keep == "full"
        self.sampled = options.samples is not None
        self._never = {
            "none": "topology only (--keep none)",
            "stats": "statistics only (--keep stats)",
        }.get(options.keep, "")
        self._figures: dict[tuple[bytes, str], tuple[Statistics, Sketch]] = {}
        self.lock = threading.RLock()
        self._orders = itertools.count()
        self._open_sink = open_sink
        self._sink: Sink | None = None
        function = on_record or (load_on_record(options.on_record) if options.on_record else None)
        self._columns = UserColumns(function, self.note) if function is not None else None
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._step_start = 0
        self._step_bytes: dict[str, int] = {}
        self._parameter_bytes = self._parameters_before = 0
        self._announced: set[str] = set()
        # called with (root, step) when all of a step is written
        self.step_ended: Callable[[str, int], None] | None = None
        self.calls = 0
        self.records = 0

    # ---- the sink, and what happens when it fails

    @property
    def rank(self) -> int:
        """The rank of this process, the same from the first time it is asked for."""
        if not isinstance(self._rank, int):
            self._rank = self._rank()
        return self._rank

    def begin(self) -> bool:
        """The first model is called: is this process among the ranks that were asked for? If not,
        nothing is ever taken.
        """
        if self.options.ranks is not None and self.rank not in self.options.ranks:
            self.failed = self.failed or f"rank {self.rank} was not asked for"
        return not self.failed

    @property
    def active(self) -> bool:
        """False once the capture has ended or failed."""
        return not self.failed

    def sink(self) -> Sink:
        """The sink, opened on first use."""
        if self._sink is None:
            with self.lock:
                if self._sink is None:
                    self._sink = self._open_sink(self.rank)
        return self._sink

    def fail(self, reason: str) -> None:
        """End the capture: nothing more is taken, the program goes on. Idempotent."""
        with self.lock:
            if self.failed:
                return
            self.failed = reason
        self._tell(f"whence: capture stopped, the program goes on: {reason}")
        if self._sink is not None:
            # The sink left the reason itself, or the medium takes nothing any more.
            with contextlib.suppress(StoreFailed):
                self._sink.note(Note("error", reason))
            with contextlib.suppress(StoreFailed):
                self._sink.close()

    def _tell(self, text: str) -> None:
        # the program may have closed stderr, or stand on a full disk
        with contextlib.suppress(Exception):
            self._say(text)

    def close(self) -> None:
        """End the capture cleanly. Patterns that matched nothing are left as notes."""
        with self.lock:
            if not self.failed and self._sink is not None:
                try:
                    for sentence in self.selector.unmatched():
                        self._sink.note(Note("selection", sentence))
                    self._sink.close()
                except StoreFailed as error:
                    self.fail(str(error))
            self.failed = self.failed or "closed"

    # ---- steps and the byte budget: whole steps, first ones first

    def begin_step(self, root: str) -> None:
        """An outermost call of `root` begins. Decides whether its elements are kept: only when the
        whole step should fit.
        """
        if self.options.keep != "full":
            return
        used = self._sink.nbytes if self._sink is not None else 0
        self._step_start, self._parameters_before = used, self._parameter_bytes
        if self.elements_on and used + self._step_bytes.get(root, 0) > self.max_bytes:
            self.elements_on = False
            needed = (
                f"{size_words(used)} used, the next step needs "
                f"{size_words(self._step_bytes.get(root, 0))}"
            )
            self.note(
                "budget",
                f"elements end here: {needed}, --max-bytes is {size_words(self.max_bytes)}; "
                "statistics and hashes go on",
            )

    def over_budget(self, scope: str, step: int, waiting: int = 0) -> None:
        """Called before a call takes its tensors: a first step larger than the budget stops between
        calls, not inside one.

        waiting: bytes that are on their way to the sink.
        """
        if (
            self.elements_on
            and self._sink is not None
            and self._sink.nbytes + waiting > self.max_bytes
        ):
            self.elements_on = False
            self.note(
                "budget",
                "elements end inside this step: it does not fit --max-bytes "
                f"{size_words(self.max_bytes)}",
                scope,
                step,
            )

    def end_step(self, root: str, step: int) -> None:
        """An outermost call of `root` has ended. The first time, says how large a step is and how
        many fit.
        """
        if self._sink is None or not self.active:
            return
        size = self._sink.nbytes - self._step_start
        parameters = self._parameter_bytes - self._parameters_before
        whole, selected = self.elements_on, self.selector.only is None or step in self.selector.only
        try:
            self._sink.step(Step(root, step, size, whole, self.rank))
        except StoreFailed as error:
            self.fail(str(error))
            return
        if whole and selected:
            # The first step holds the parameters too, the later ones do not unless an optimizer
            # changes them.
            first = root not in self._step_bytes
            self._step_bytes[root] = (
                size - parameters if first else max(size, self._step_bytes[root])
            )
            if first and root not in self._announced:
                self._announced.add(root)
                self._tell(self._size_of_a_step(root, size - parameters, parameters))
        elif root not in self._announced and selected:
            self._announced.add(root)
            if self.options.keep == "full":
                self._tell(
                    f"whence: {root}: no whole step fits --max-bytes "
                    f"{size_words(self.max_bytes)}; statistics and hashes go on"
                )
        if self.step_ended is not None:
            self.step_ended(root, step)

    def _size_of_a_step(self, root: str, size: int, parameters: int) -> str:
        parameter_words = f"parameters {size_words(parameters)} once, " if parameters else ""
        if size <= 0:
            return f"whence: {root}: {parameter_words}no elements in a step"
        fit = max(1, 1 + int((self.max_bytes - self._step_start - parameters - size) // size))
        count = f"{fit:,}".replace(",", " ")
        return (
            f"whence: {root}: {parameter_words}{size_words(size)}/step, {count} "
            f"{'step fits' if fit == 1 else 'steps fit'}"
        )

    # ---- what a listener hands over

    def only_steps(self, steps: Collection[int] | None) -> None:
        """Take only these steps of each root from now on; None for all. Calls of others are
        recorded without tensors.
        """
        self.selector.only, self.takes_all = None if steps is None else frozenset(steps), False

    def next_order(self) -> int:
        """The number of the call that begins now."""
        return next(self._orders)

    def note(
        self, kind: str, text: str, scope: str = "", step: int = -1, *, aloud: bool = False
    ) -> None:
        """Leave a note in the run, unless the capture has ended. aloud: and say it now."""
        if self.failed:
            return
        if aloud:
            self._tell(f"whence: {text}")
        try:
            self.sink().note(Note(kind, text, scope, step))
        except StoreFailed as error:
            self.fail(str(error))

    def record(
        self,
        dtype: str,
        shape: tuple[int, ...],
        data: np.ndarray[Any, np.dtype[np.uint8]] | None,
        digest: bytes,
        *,
        scope: str,
        slot: str,
        op_type: str,
        value: Any = None,
        stride: tuple[int, ...] = (),
        storage_offset: int = 0,
        device: str = "cpu",
        subclass: str = "",
        base: tuple[int, int] | None = None,
        tail: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
        external: External | None = None,
        address: int = 0,
        nbytes: int = 0,
        keep: bool | None = None,
    ) -> int:
        """Take one tensor: statistics always (unless `--keep none`), elements when the budget and
        `keep` allow.

        Returns its id, -1 after a failure. data: all its canonical bytes, None when they are the
        `nbytes` at `address`. base, tail: only `tail`, what follows record base[0] along axis
        base[1], is written. value: the framework's tensor, for a user's on_record. keep: whether
        elements were wanted when the call of this tensor began, so that no call is kept by half;
        None asks now.
        """
        statistics = sketch = payload = None
        if self.options.keep != "none":
            figures = self._figures.get((digest, dtype))
            if figures is None:
                figures = self._figures_of(digest, dtype, data, address, nbytes)
            statistics, sketch = figures
        why = self._never or self._why_none(scope, slot, self.elements_on if keep is None else keep)
        if not why and tail is not None:
            payload = tail
        elif not why:
            payload = host.bytes_at(address, nbytes) if data is None else data
        columns = (
            self._columns.of(op_type, f"{scope}:{slot}", value)
            if self._columns is not None
            else None
        )
        if self.options.print_pattern is not None and self.selector.prints(scope):
            self._print(f"{scope}:{slot}", dtype, shape, statistics)
        try:
            sink = self._sink or self.sink()
            bytes_before = sink.nbytes if is_param(slot) else -1
            number = sink.record(
                dtype,
                shape,
                payload,
                digest,
                statistics,
                sketch,
                why=why,
                stride=stride,
                storage_offset=storage_offset,
                device=device,
                columns=columns,
                subclass=subclass,
                base=base if tail is not None and payload is not None else None,
                external=external if payload is not None else None,
            )
        except StoreFailed as error:
            self.fail(str(error))
            return -1
        self.records += 1
        if bytes_before >= 0:
            self._parameter_bytes += sink.nbytes - bytes_before
        return number

    def _figures_of(
        self,
        digest: bytes,
        dtype: str,
        data: np.ndarray[Any, np.dtype[np.uint8]] | None,
        address: int,
        nbytes: int,
    ) -> tuple[Statistics, Sketch]:
        """Figures of bytes that are new. data, address, nbytes: as of `record`."""
        if len(self._figures) >= FIGURES:
            self._figures.clear()
        figures = self._figures[digest, dtype] = (
            host.statistics_at(address, nbytes, dtype)
            if data is None
            else host.statistics(data, dtype)
        )
        return figures

    def _why_none(self, scope: str, slot: str, keep: bool) -> str:
        """Why no elements of this slot are kept, "" where they are."""
        if self.options.no_inputs and not self.selector.elements(scope, slot):
            return "statistics only (--no-inputs)"
        if keep:
            return ""
        return "not sampled" if self.sampled and self.elements_on else "over --max-bytes"

    def unreadable(
        self,
        dtype: str,
        shape: tuple[int, ...],
        why: str,
        *,
        device: str = "",
        subclass: str = "",
        stride: tuple[int, ...] = (),
        storage_offset: int = 0,
    ) -> int:
        """A tensor that cannot be read (meta, sparse, quantised ...): a record with a reason, never
        a hole.
        """
        try:
            return self.sink().record(
                dtype,
                shape,
                None,
                b"",
                None,
                None,
                why=why,
                device=device,
                subclass=subclass,
                stride=stride,
                storage_offset=storage_offset,
            )
        except StoreFailed as error:
            self.fail(str(error))
            return -1

    def call(self, call: Call) -> None:
        """Take a finished call."""
        try:
            (self._sink or self.sink()).call(call)
            self.calls += 1
        except StoreFailed as error:
            self.fail(str(error))

    def program(self, program: Program) -> None:
        """Take a program, once."""
        try:
            self.sink().program(program)
        except StoreFailed as error:
            self.fail(str(error))

    # ---- what the user asked to be shown

    def _print(
        self, name: str, dtype: str, shape: tuple[int, ...], statistics: Statistics | None
    ) -> None:
        figures = ""
        if statistics is not None and statistics.mean is not None:
            figures = (
                f"  min {statistics.min:.6g}  max {statistics.max:.6g}  mean "
                f"{statistics.mean:.6g}  std {statistics.std:.6g}"
            )
        if statistics is not None and (statistics.nan or statistics.inf):
            figures += f"  NaN {statistics.nan}  Inf {statistics.inf}"
        self._tell(f"{name}  {dtype} {list(shape)}{figures}")
