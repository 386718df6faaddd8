"""How many threads torch works with while something is replayed."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Threads:
    """So many intra-op threads of torch inside. One is fastest for many small operators: more spin
    while they wait for each other.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        torch = sys.modules.get("torch") or _torch()
        self._torch, self._before = torch, torch.get_num_threads() if torch is not None else 0
        if torch is not None and self._before != self._count:
            torch.set_num_threads(self._count)

    def __exit__(self, *exc: object) -> None:
        if self._torch is not None and self._before != self._count:
            self._torch.set_num_threads(self._before)


def _torch() -> Any:
    """torch, or None where it is not installed: then nothing can be replayed, and the reason is
    given for each call.
    """
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None
