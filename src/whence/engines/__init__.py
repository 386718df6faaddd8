"""Where the work of a comparison is done: in this process, in processes of this machine, or on a
Ray cluster. One file an engine; what a task computes lies with whoever hands it out.

A task names a module of whence and holds bytes; its result is bytes. Tensors never travel: workers
read the runs themselves.
"""

from __future__ import annotations

from whence.engines.task import Engine, Outcome, Task, perform
from whence.errors import UsageError

ENGINES = ("local", "processes", "ray")

__all__ = ["ENGINES", "Engine", "Outcome", "Task", "create", "perform"]


def create(
    name: str,
    *,
    workers: int | None = None,
    address: str | None = None,
) -> Engine | None:
    """Create the engine with this name; None for "local", which needs no workers.

    workers: by default one for each core, for Ray all that the cluster has. address: of a running
    Ray cluster; None starts Ray on this machine. Raises UsageError, and MissingDependency when Ray
    is not installed.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r}: {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
    if workers is not None and workers < 1:
        raise UsageError(f"workers {workers}: one or more")
    if address is not None and name != "ray":
        raise UsageError(
            f"address (--address) names a Ray cluster: it needs engine ray, not {name}"
        )
    if name == "local":
        if workers is not None:
            raise UsageError(
                "workers (--workers) is for engine processes or ray; local uses threads"
            )
        return None
    if name == "processes":
        from whence.engines.processes import Processes

        return Processes(workers)
    from whence.engines.ray_cluster import RayCluster

    return RayCluster(workers, address)
