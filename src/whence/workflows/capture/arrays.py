"""Runs made of named arrays, for programs that cannot be captured but can pass on tensors (a JAX
port, llama.cpp, a kernel test).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import StoreFailed, UsageError
from whence.records import Call, MemoryRun, Record, Ref, Run, Step
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.store import Writer

Named = Mapping[str, Any] | Iterable[tuple[Any, ...]]


def record(path: AnyPath, arrays: Named, *, step: int = 0, force: bool = False) -> None:
    """Write a run made of named arrays.

        whence.record("runs/tgt", {"h0": h0, "h1": h1, "logits": logits})

    arrays: name -> array, or pairs (name, array) or triples (name, operator, array), in the order
    in which they were made; names may repeat. Arrays are numpy, torch, JAX or anything numpy can
    read. Raises UsageError, OutputExists, StoreFailed.
    """
    named = list(_triples(arrays))
    with recording(path, force=force) as run:
        for name, op, array in named:
            run.add(name, array, op=op, step=step)


class recording:  # noqa: N801 - called like a function, as `capture` is
    """A run that is written array by array; `whence.recording(path)`.

        with whence.recording("runs/tgt") as run:
            run.add("h0", h0)
            run.add("kq-0", scores, op="MUL_MAT")

    Each array is a call of kind "label" with one output; inside the block `whence.label` adds to
    the run too. Nothing is executed, and no array is changed. force: replace a run. Raises
    OutputExists or StoreFailed at once when nothing can be written at `path`.
    """

    def __init__(self, path: AnyPath, *, force: bool = False) -> None:
        from whence import store
        from whence.instrument.launch import interpreter, launcher
        from whence.instrument.options import make
        from whence.instrument.session import Session
        from whence.workflows.capture.setup import default_max_bytes

        folder = os.fspath(path)
        store.create(
            folder, launcher.describe((), make(), interpreter.versions_here()), force=force
        )
        self._writer: Writer = store.Writer(folder)
        self._session = Session(
            lambda rank: self._writer, make(), max_bytes=default_max_bytes(folder)
        )
        self._labels = _Labels(self._session.next_order)
        self._end_labels: Callable[[], None] | None = None
        self._folder = folder
        self._steps: Counter[int] = Counter()

    def __enter__(self) -> recording:
        from whence.workflows.capture import labels as labelling

        self._end_labels = labelling.taking(self._session, self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, name: str, array: Any, *, op: str = "", step: int = 0) -> None:
        """Record one array under a name; the n-th array of that name in its step has occurrence n,
        from 0.

        op: the operation that produced it ("MUL_MAT"); it is shown and distinguishes tensors. step:
        number of the forward pass, from 0. Raises UsageError for a value that is not an array of
        numbers, StoreFailed when the disk fails or the run is closed.
        """
        host, record = _described(name, array)
        if self._writer is None:
            raise StoreFailed(
                f"cannot add {name!r}: the recording is closed; add it inside the with block, or "
                "record a run of its own"
            )
        data = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        number = self._writer.record(
            record.dtype,
            record.shape,
            data,
            bytes.fromhex(record.hash),
            record.statistics,
            record.sketch,
        )
        self._writer.call(self._labels.call(name, op, step, number))
        self._steps[step] += data.nbytes

    def close(self) -> None:
        """Finish the run. Idempotent."""
        writer, self._writer = self._writer, None  # type: ignore[assignment]
        if writer is not None:
            for step, nbytes in sorted(self._steps.items()):
                writer.step(Step("", step, nbytes, True))
            writer.close()
        end_labels, self._end_labels = self._end_labels, None
        if end_labels is not None:
            end_labels()


def in_memory(arrays: Named, path: str) -> Run:
    """A run in memory made of named arrays, one step. Raises UsageError."""
    labels, calls, records, elements = _Labels(), [], [], {}
    for number, (name, op, array) in enumerate(_triples(arrays)):
        host, record = _described(name, array, number)
        calls.append(labels.call(name, op, 0, number))
        records.append(record)
        elements[number] = host
    return MemoryRun(calls, records, elements, path=path)


class _Labels:
    """Numbers the arrays of one run as calls."""

    def __init__(self, next_order: Callable[[], int] | None = None) -> None:
        self._occurrences: Counter[tuple[int, str]] = Counter()
        self._next = next_order or itertools.count().__next__

    def call(self, name: str, op: str, step: int, record: int) -> Call:
        order, occurrence = self._next(), self._occurrences[step, name]
        self._occurrences[step, name] += 1
        return Call(
            order,
            name,
            "",
            step,
            order,
            occurrence=occurrence,
            kind="label",
            op_type=op,
            number=str(order),
            leaf=True,
            no_program="a recorded array has no program",
            refs=(Ref("output.0", record),),
        )


def _triples(arrays: Named) -> Iterable[tuple[str, str, Any]]:
    named: Any = arrays
    if isinstance(named, Mapping):
        items: Iterable[Any] = named.items()
    elif (
        isinstance(named, Iterable)
        and not isinstance(named, (str, bytes))
        and not hasattr(named, "dtype")
    ):
        items = named
    else:
        raise UsageError(
            f"a {type(named).__name__} is not a run: give {{name: array}}, or pairs (name, array)"
        )
    for item in items:
        if (
            not isinstance(item, tuple)
            or len(item) not in (2, 3)
            or not all(isinstance(part, str) for part in item[:-1])
        ):
            raise UsageError(f"{str(item)[:60]!r} is not (name, array) or (name, operator, array)")
        yield item[0], item[1] if len(item) == 3 else "", item[-1]


def _described(name: Any, value: Any, number: int = 0) -> tuple[Any, Record]:
    """(host array, its description). Raises UsageError."""
    from whence import dtypes
    from whence.frameworks import host
    from whence.frameworks.array_protocols import to_host

    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is not a name for an array; names are texts that are not empty")
    array = to_host(value, name)
    dtype, data = dtypes.of(array).name, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    statistics, sketch = host.statistics(data, dtype)
    return array, Record(
        number,
        dtype,
        tuple(array.shape),
        hash=host.digest(data).hex(),
        statistics=statistics,
        sketch=sketch,
    )
