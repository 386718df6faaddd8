"""The end of a captured process, however it ends, and the beginning of one that it forks."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable


def at_the_end(finish: Callable[[], object], renew: Callable[[], object]) -> None:
    """Call `finish` when this process ends, and `renew` in each that it forks, which calls `finish`
    at its own end.
    """
    atexit.register(finish)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    # multiprocessing ends its children without atexit. Its own finalizers do run there, but only
    # those made after it cleared them in the child; that is the moment this hook is called. It
    # holds the first argument weakly, so a module it is.
    multiprocessing.util.register_after_fork(
        sys.modules[__name__],
        lambda _: multiprocessing.util.Finalize(None, finish, exitpriority=10),
    )
