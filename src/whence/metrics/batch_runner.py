"""Jobs in batches of a few megabytes, on threads; a large tensor is cut at row boundaries and its
rows are joined again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from whence import _kernels
from whence.metrics import numpy_pass
from whence.metrics.accumulators import Accumulators, I, empty, join, worst_channel
from whence.metrics.passes import Job, Options, compiled_rows, rows_of

BATCH_BYTES = 8 << 20
BATCH_PAIRS = 4096
SPLIT_BYTES = 16 << 20

T = TypeVar("T")
U = TypeVar("U")


class BatchRunner:
    """Gives `finish` the rows of jobs, batch by batch; threads start with the second batch."""

    def __init__(
        self, options: Options, threads: int, finish: Callable[[Sequence[Job], Accumulators], None]
    ) -> None:
        self.options, self.threads, self._finish = options, threads, finish
        self.pool: ThreadPoolExecutor | None = None
        self.flying: deque[Future[None]] = deque()

    def run(self, jobs: Iterator[Job]) -> None:
        batch: list[Job] = []
        nbytes = 0
        try:
            for job in jobs:
                if self.options.compiled and job.nbytes > SPLIT_BYTES:
                    self._large(job)
                else:
                    batch.append(job)
                    nbytes += job.nbytes
                    if nbytes >= BATCH_BYTES or len(batch) >= BATCH_PAIRS:
                        self._submit(self._batch, batch)
                        batch, nbytes = [], 0
                del job
            if batch:
                if self.flying:
                    self._submit(self._batch, batch)
                else:
                    self._batch(batch)
            while self.flying:
                self.flying.popleft().result()
        finally:
            if self.pool is not None:
                self.pool.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[Any], None], argument: Any) -> None:
        if self.threads == 1:
            work(argument)
            return
        while len(self.flying) >= 2 * self.threads:
            self.flying.popleft().result()
        self.flying.append(self._pool().submit(work, argument))

    def _pool(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="whence-measure")
        return self.pool

    def _ordered(self, work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """work(item) in order, on the pool, at most two items at once for each thread."""
        if self.threads == 1:
            yield from map(work, items)
            return
        ahead: deque[Future[U]] = deque()
        for item in items:
            ahead.append(self._pool().submit(work, item))
            if len(ahead) >= 2 * self.threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _batch(self, jobs: list[Job]) -> None:
        self._finish(jobs, rows_of(jobs, self.options))

    def _large(self, job: Job) -> None:
        """One tensor, cut at row boundaries. numpy walks it in chunks by itself."""
        if job.path < 0:
            self._submit(self._batch, [job])
            return
        unit = job.channels or _kernels.BLOCK
        step = max(1, BATCH_BYTES // (unit * (job.r_type.itemsize + job.t_type.itemsize))) * unit
        whole = empty(1)
        dd, rr = np.zeros(job.channels), np.zeros(job.channels)

        def work(start: int) -> tuple[int, Accumulators, Any, Any]:
            stop = min(start + step, job.reference.size)
            r, t = (
                numpy_pass.flat(job.reference, start, stop),
                numpy_pass.flat(job.target, start, stop),
            )
            part = Job(0, r, t, job.r_type, job.t_type, job.channels, job.path, r.nbytes + t.nbytes)
            part_dd, part_rr = np.zeros(job.channels), np.zeros(job.channels)
            return start, compiled_rows([part], self.options, (part_dd, part_rr)), part_dd, part_rr

        for start, part, part_dd, part_rr in self._ordered(
            work, range(0, job.reference.size, step)
        ):
            join(whole, part, start, start // job.channels if job.channels else 0)
            whole.ints[0, I["bytes_differ"]] = min(1, whole.ints[0, I["bytes_differ"]])
            dd += part_dd
            rr += part_rr
        if job.channels:
            worst_channel(whole, np.sqrt(dd), np.sqrt(rr))
        self._finish([job], whole)
