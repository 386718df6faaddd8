"""Keeps, for each thread, the training region (loss, backward, optimiser) that new calls are
recorded under.
"""

from __future__ import annotations

import threading
from typing import Any


class OpenRegion(threading.local):
    """Thread-local state for `Regions`: the open region of the current thread, or None."""

    region: Any = None
