"""A capture session: selection, byte budget, steps, live printing and failures. Independent of the
framework.

A session stands between a listener, which observes calls, and a `Sink`, which writes them. It never
raises into the captured program: the first failure of the sink ends the capture, leaves the reason
in the run and on stderr, and the program goes on.

`_UserColumns` calls the user's function for every record and keeps the columns it returns.

`_StepSizes` counts the bytes of elements that the steps of each root take, and words the messages
about them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.errors import StoreFailed, UsageError
from whence.frameworks import host
from whence.instrument.options import CaptureOptions
from whence.instrument.selection import Selector
from whence.instrument.wording import (
    counted,
    printed,
    raised,
    size,
    stderr_is_terminal,
    stderr_of_now,
)
from whence.instrument.wording import size as size_words
from whence.records import Call, External, Note, Program, Sink, Sketch, Statistics, Step
from whence.records.marks import STOPPED
from whence.records.slots import is_param

FIGURES = 1 << 12
"""Number of contents whose figures are remembered: a view shares the figures of its base."""

QUICK_BYTES = 1 << 14
"""Bytes of a content up to which computing its figures again is faster than remembering them."""


class Form(msgspec.Struct, gc=False, eq=False):
    """Everything about a tensor except its elements. stride: () for a contiguous one."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    storage_offset: int = 0
    device: str = "cpu"
    subclass: str = ""


class Origin(msgspec.Struct, gc=False, eq=False):
    """The call and the slot for which a tensor is recorded. keep: whether elements were wanted when
    the call began, so that a call is kept as a whole or not at all; None: decide when the tensor is
    recorded.
    """

    scope: str
    slot: str
    op_type: str
    keep: bool | None = None


class Content(msgspec.Struct, gc=False, eq=False):
    """The canonical bytes of one tensor: `nbytes` at `address`, or `data`.

    base, tail: the tensor is record base[0], extended by `tail` along axis base[1], and only `tail`
    is written. external: place of the bytes in a file of the user. known: figures computed earlier.
    """

    digest: bytes
    address: int = 0
    nbytes: int = 0
    data: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    base: tuple[int, int] | None = None
    tail: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    external: External | None = None
    known: tuple[Statistics, Sketch] | None = None

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes, as an array."""
        return host.bytes_at(self.address, self.nbytes) if self.data is None else self.data

    def figures(self, dtype: str) -> tuple[Statistics, Sketch]:
        """Figures of the elements."""
        if self.known is not None:
            return self.known
        if self.data is None:
            return host.statistics_at(self.address, self.nbytes, dtype)
        return host.statistics(self.data, dtype)


class Session:
    """One capture of one process.

    open_sink: called with the rank at the first record; max_bytes: budget for elements. rank: of
    this process, or a function called at the first call of a model: programs join their process
    group after the capture is set up and before that call. say: writes lines for a human (default:
    to stderr). Thread-safe; listeners may call from any thread.
    """

    def __init__(
        self,
        open_sink: Callable[[int], Sink],
        options: CaptureOptions,
        *,
        max_bytes: int,
        rank: int | Callable[[], int] = 0,
        on_record: _OnRecord | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.options, self.max_bytes = options, max_bytes
        self._rank = rank
        self.selector = Selector(options)
        some = options.include or options.exclude or options.classes or options.ids
        self.takes_all = not (some or options.ranges) and options.max_depth is None
        self.failed = ""
        self.elements_on = options.keep == "full"
        self.sampled = options.samples is not None
        self._never = {
            "none": "topology only (--keep none)",
            "stats": "statistics only (--keep stats)",
        }.get(options.keep, "")
        self.measures = options.keep != "none"
        self._prints = options.print_pattern is not None
        self._figures: dict[tuple[bytes, str], tuple[Statistics, Sketch]] = {}
        self.lock = threading.RLock()
        # Returns the number of the next call that begins.
        self.next_order: Callable[[], int] = itertools.count().__next__
        self._open_sink = open_sink
        self._sink: Sink | None = None
        function = on_record or (load_on_record(options.on_record) if options.on_record else None)
        self._columns = _UserColumns(function, self.note) if function is not None else None
        self._say = say or stderr_of_now()
        self._tells_all = say is not None or stderr_is_terminal()
        self._sizes = _StepSizes(max_bytes)
        # Called with (root, step) when a whole step is written.
        self.step_ended: Callable[[str, int], None] | None = None
        self.calls, self.records, self.begun = 0, 0, False

    @property
    def shows_values(self) -> bool:
        """Whether a function of the user gets the tensors. It may keep them."""
        return self._columns is not None

    # ---- the sink, and what happens when it fails

    @functools.cached_property
    def rank(self) -> int:
        """The rank of this process, determined at the first access."""
        return self._rank if isinstance(self._rank, int) else self._rank()

    def begin(self) -> bool:
        """Called when a model is called. Returns whether this process is to be captured; a rank
        that was not requested ends the capture.
        """
        if self.options.ranks is not None and self.rank not in self.options.ranks:
            self.failed = self.failed or f"rank {self.rank} was not asked for"
        self.begun = True
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
                self._sink.note(Note(STOPPED, reason))
            with contextlib.suppress(StoreFailed):
                self._sink.close()

    def _tell(self, text: str) -> None:
        # the program may have closed stderr, or stand on a full disk
        with contextlib.suppress(Exception):
            self._say(text)

    def close(self) -> None:
        """End the capture cleanly. Patterns that matched nothing are left as notes."""
        with self.lock:
            if self._sink is not None:
                try:
                    for sentence in () if self.failed else self.selector.unmatched():
                        self._sink.note(Note("selection", sentence))
                    self._sink.close()
                except StoreFailed as error:
                    self.fail(str(error))
            self.failed = self.failed or "closed"

    # ---- steps and the byte budget: whole steps, first ones first

    def step_fits(self, root: str, waiting: int) -> bool:
        """Whether `begin_step` is certain to change nothing, while `waiting` bytes are not written
        yet.
        """
        used = 0 if self._sink is None else self._sink.nbytes
        return self.options.keep != "full" or self._sizes.fits(root, used, waiting)

    def begin_step(self, root: str) -> None:
        """Begin an outermost call of `root`. Elements are kept if the whole step should fit into
        the budget.
        """
        if self.options.keep != "full":
            return
        problem = self._sizes.begin(root, self._sink.nbytes if self._sink is not None else 0)
        if self.elements_on and problem:
            self.elements_on = False
            self.note("budget", problem)

    def over_budget(self, scope: str, step: int, waiting: int = 0) -> None:
        """Stop keeping elements if the budget is exceeded. Called before a call's tensors are
        recorded, so that the first step ends between calls, not inside one.

        waiting: bytes that are not written yet.
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
        """End an outermost call of `root`. After the first one, a line at a terminal says how large
        a step is and how many fit.
        """
        if self._sink is None or not self.active:
            return
        used, whole = self._sink.nbytes, self.elements_on
        try:
            self._sink.step(Step(root, step, self._sizes.bytes_of_step(used), whole, self.rank))
        except StoreFailed as error:
            self.fail(str(error))
            return
        selected = self.selector.only is None or step in self.selector.only
        counts = selected and self._never == "" and not self.options.ring
        line = self._sizes.end(root, used, whole) if counts else None
        if line is not None and (line.is_warning or self._tells_all):
            self._tell(line.text)
        if self.step_ended is not None:
            self.step_ended(root, step)

    # ---- what a listener hands over

    def only_steps(self, steps: Collection[int] | None) -> None:
        """Record only these steps of each root from now on; None for all. Calls of other steps are
        recorded without tensors.
        """
        self.selector.only, self.takes_all = None if steps is None else frozenset(steps), False

    def note(
        self, kind: str, text: str, scope: str = "", step: int = -1, *, aloud: bool = False
    ) -> None:
        """Write a note into the run, unless the capture has ended. aloud: also say it now."""
        if self.failed:
            return
        if aloud:
            self._tell(f"whence: {text}")
        try:
            self.sink().note(Note(kind, text, scope, step))
        except StoreFailed as error:
            self.fail(str(error))

    def record(self, form: Form, content: Content, origin: Origin, value: Any = None) -> int:
        """Record one tensor: statistics always (except with `--keep none`), elements if the budget
        and `origin.keep` allow. Returns the record's id, -1 after a failure.

        value: the framework's tensor, for the user's on_record.
        """
        statistics = sketch = columns = None
        dtype, shape, digest = form.dtype, form.shape, content.digest
        scope, slot = origin.scope, origin.slot
        if self.measures:
            statistics, sketch = (
                content.figures(dtype)
                if content.nbytes <= QUICK_BYTES or content.known is not None
                else self._remembered_figures(content, dtype)
            )
        why = self._never or self._why_none(origin)
        payload = None if why else content.array() if content.tail is None else content.tail
        if self._columns is not None:
            columns = self._columns.of(origin.op_type, f"{scope}:{slot}", value)
        if self._prints and self.selector.prints(scope):
            self._tell(printed(f"{scope}:{slot}", dtype, shape, statistics))
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
                stride=form.stride,
                storage_offset=form.storage_offset,
                device=form.device,
                columns=columns,
                subclass=form.subclass,
                base=None if payload is None else content.base,
                external=None if payload is None else content.external,
            )
        except StoreFailed as error:
            self.fail(str(error))
            return -1
        self.records += 1
        if bytes_before >= 0:
            self._sizes.parameter_bytes += sink.nbytes - bytes_before
        return number

    def _remembered_figures(self, content: Content, dtype: str) -> tuple[Statistics, Sketch]:
        figures = self._figures.get((content.digest, dtype))
        if figures is None:
            if len(self._figures) >= FIGURES:
                self._figures.clear()
            figures = self._figures[content.digest, dtype] = content.figures(dtype)
        return figures

    def _why_none(self, origin: Origin) -> str:
        """Why no elements of this tensor are kept, "" where they are."""
        if self.options.no_inputs and not self.selector.elements(origin.scope, origin.slot):
            return "statistics only (--no-inputs)"
        if self.elements_on if origin.keep is None else origin.keep:
            return ""
        return "not sampled" if self.sampled and self.elements_on else "over --max-bytes"

    def unreadable(self, form: Form, why: str) -> int:
        """Record a tensor that cannot be read (meta, sparse, quantised ...), with the reason."""
        try:
            return self.sink().record(
                form.dtype,
                form.shape,
                None,
                b"",
                None,
                None,
                why=why,
                device=form.device,
                subclass=form.subclass,
                stride=form.stride,
                storage_offset=form.storage_offset,
            )
        except StoreFailed as error:
            self.fail(str(error))
            return -1

    def call(self, call: Call) -> None:
        """Write a finished call."""
        try:
            (self._sink or self.sink()).call(call)
            self.calls += 1
        except StoreFailed as error:
            self.fail(str(error))

    def program(self, program: Program) -> None:
        """Write a program. The caller passes each only once."""
        try:
            self.sink().program(program)
        except StoreFailed as error:
            self.fail(str(error))


_MAX_FAILURES = 20  # that are noted

_OnRecord = Callable[[str, str, Any], Any]


def load_on_record(spec: str) -> _OnRecord:
    """The function named `module:function`. Raises UsageError saying which part was not found."""
    module_name, _, name = spec.partition(":")
    if not name:
        raise UsageError(f"--on-record {spec!r}: write it as module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"--on-record {spec!r}: cannot import {module_name!r} ({error}); is its folder on "
            "PYTHONPATH?"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--on-record {spec!r}: {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


class _UserColumns:
    """Calls the user's function. note: called with (kind, text, name) for an error that it
    raises.
    """

    def __init__(self, function: _OnRecord, note: Callable[[str, str, str], None]) -> None:
        self._function, self._note = function, note
        self._failures = 0

    def of(self, op_type: str, name: str, value: Any) -> dict[str, float | None] | None:
        """The columns of a record, None when there are none."""
        try:
            return _as_columns(self._function(op_type, name, value))
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything; it is recorded, not raised
            self._failures += 1
            if self._failures <= _MAX_FAILURES:
                self._note("hook-error", f"on_record raised {raised(error)}", name)
            return None


def _as_columns(result: Any) -> dict[str, float | None] | None:
    if result is None:
        return None
    if isinstance(result, Mapping):
        return {str(k): float(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return {f"value{i}": float(v) for i, v in enumerate(result)}
    return {"value": float(result)}


_EXACT = 100  # fewer steps than this are counted, more are estimated


class StepLine(NamedTuple):
    """A message about a step. is_warning: say it always; otherwise only at a terminal."""

    text: str
    is_warning: bool = False


class _StepSizes:
    """Sizes of the steps so far. The first step of a root also writes its parameters, later ones
    only those that an optimiser changed.

    max_bytes: budget of the run for elements. parameter_bytes: bytes of parameters so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.parameter_bytes = max_bytes, 0
        self._start = self._parameters_before = 0
        self._expected: dict[str, int] = {}
        self._announced: set[str] = set()

    def begin(self, root: str, used: int) -> str:
        """Begin a step of `root` after `used` bytes were written. Returns why it will not fit, ""
        if it may.
        """
        self._start, self._parameters_before = used, self.parameter_bytes
        expected = self._expected.get(root, 0)
        if used + expected <= self._max_bytes:
            return ""
        return (
            f"elements end here: {size(used)} used, the next step needs {size(expected)}, "
            f"--max-bytes is {size(self._max_bytes)}; statistics and hashes go on"
        )

    def fits(self, root: str, used: int, waiting: int) -> bool:
        """Whether `begin` will return "" whatever happens to the `waiting` bytes that are not
        written yet.

        Another thread may begin and end earlier steps meanwhile: they are assumed to be as large as
        possible.
        """
        written = used + waiting
        last = written - self._start  # read before what the end of that step changes
        return written + max(last, self._expected.get(root, 0)) <= self._max_bytes

    def bytes_of_step(self, used: int) -> int:
        """Bytes that were written since the step began."""
        return used - self._start

    def end(self, root: str, used: int, whole: bool) -> StepLine | None:
        """End a selected step of `root`. Returns a message about its size, None if there is nothing
        new to say.

        whole: all its elements were kept.
        """
        step, parameters = used - self._start, self.parameter_bytes - self._parameters_before
        first = root not in self._expected
        if whole:
            self._expected[root] = step - parameters if first else max(step, self._expected[root])
        if root in self._announced or (whole and not first):
            return None
        self._announced.add(root)
        if not whole:
            return StepLine(
                f"whence: {root}: no whole step fits into --max-bytes {size(self._max_bytes)}; "
                "from here on only statistics and hashes are kept",
                is_warning=True,
            )
        step -= parameters
        text = f"whence: capturing {root}: "
        if parameters:
            text += f"{size(parameters)} of parameters" + (" + " if step > 0 else ", ")
        if step <= 0:
            return StepLine(text + "no new elements per step")
        fit = max(1, 1 + int((self._max_bytes - self._start - parameters - step) // step))
        return StepLine(f"{text}{size(step)} per step; room for {_about(fit)}")


def _about(steps: int) -> str:
    """ "3 steps", "about 830 000 steps"."""
    if steps < _EXACT:
        return counted(steps, "step")
    return f"about {counted(int(float(f'{steps:.1e}')), 'step')}"
