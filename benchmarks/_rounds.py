"""Interleaved rounds: every candidate once a round, in turning order, so that a busy machine slows
all of them alike.

The figure is the median of the process's CPU time: per core, and blind to being preempted. Ratios
are taken within a round.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Times = dict[str, list[float]]


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 7, warm: int = 1
) -> Times:
    """CPU seconds of each candidate in each round. `warm` rounds before are thrown away (first
    touch of pages, caches).
    """
    names = list(candidates)
    times: Times = {name: [] for name in names}
    for n in range(-warm, rounds):
        for name in names if n % 2 == 0 else names[::-1]:
            start = time.process_time()
            candidates[name]()
            spent = time.process_time() - start
            if n >= 0:
                times[name].append(spent)
    return times


def median(times: Times, name: str) -> float:
    """Median CPU seconds of one candidate."""
    return statistics.median(times[name])


def ratio(times: Times, above: str, below: str) -> float:
    """Median over the rounds of above / below."""
    return statistics.median(
        a / max(b, 1e-9) for a, b in zip(times[above], times[below], strict=True)
    )


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    except OSError:
        pass
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
