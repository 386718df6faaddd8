"""Workers of a Ray cluster, or of Ray on this machine. Only tasks and their results travel; every
machine must see the runs under the same paths and have the same whence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from typing import Any

from whence import extras
from whence.engines.task import ATTEMPTS, Outcome, Request, Task, gave_up, in_words, perform
from whence.errors import EngineFailed, UsageError

_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _answer(module: str, payload: bytes, version: str) -> tuple[bytes, str]:
    """(result, error) of a task, in a worker."""
    try:
        return perform(Request(module, payload, version)), ""
    except Exception as error:  # noqa: BLE001 - whatever a task raises is the answer to it
        return b"", in_words(error)


class RayCluster:
    """Workers of Ray.

    workers: how many run at once; None means one for each processor of the cluster. address: of a
    running cluster; None starts Ray here and stops it at `close`. Raises MissingDependency.
    """

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        if not extras.is_here("ray"):
            extras.needed("ray", "engine ray")  # says how to get it
        self._workers, self._address = workers, address
        self._ray: Any = None
        self._perform: Any = None
        self._is_own = False

    def _start(self) -> None:
        """Connect before the first task. Raises UsageError when no cluster answers."""
        self._ray = extras.needed("ray", "engine ray")
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            self._connect(self._workers, self._address)
        cores = self._ray.cluster_resources().get("CPU", 1)
        self._workers = self._workers or max(1, int(cores))
        self._perform = self._ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_answer)

    def _connect(self, workers: int | None, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            cores = workers or len(os.sched_getaffinity(0))
            options |= {"address": "local", "num_cpus": cores, "include_dashboard": False}
        else:
            options |= {"address": address}
        try:
            self._ray.init(runtime_env={"env_vars": _THREADS}, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"cannot reach a Ray cluster at {address or 'this machine'}: {in_words(error)}; "
                "see `ray status`, or leave --address out to start Ray here"
            ) from error

    def run(self, tasks: Sequence[Task]) -> Generator[Outcome, None, None]:
        """The outcome of each task, as they finish."""
        if not tasks:
            return
        if self._ray is None:
            self._start()
        waiting, workers = iter(tasks), self._workers or 1
        flying: dict[Any, int] = {}
        version = Request("", b"").version
        try:
            while True:
                while len(flying) < workers and (task := next(waiting, None)):
                    reference = self._perform.remote(task.module, task.payload, version)
                    flying[reference] = task.number
                if not flying:
                    return
                for done in self._ray.wait(list(flying), num_returns=1)[0]:
                    yield self._outcome(done, flying.pop(done))
        finally:
            for reference in flying:
                with contextlib.suppress(self._ray.exceptions.RayError):  # it is done, or gone
                    self._ray.cancel(reference, force=True)

    def _outcome(self, done: Any, number: int) -> Outcome:
        exceptions = self._ray.exceptions
        try:
            result, error = self._ray.get(done)
        except (
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OutOfMemoryError,
        ) as ended:
            how = f"of {type(ended).__name__}"
            return Outcome(number, error=gave_up(how))
        except (exceptions.LocalRayletDiedError, exceptions.RaySystemError) as gone:
            raise EngineFailed(
                f"Ray ended while it measured ({in_words(gone)}); compare again"
            ) from gone
        except exceptions.RayError as refused:
            return Outcome(number, error=in_words(refused))
        return Outcome(number, result, error)

    def close(self) -> None:
        """Leave the cluster, or stop what was started here."""
        if self._is_own and self._ray.is_initialized():
            self._ray.shutdown()
        self._ray = None
        self._is_own = False
