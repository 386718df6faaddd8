"""The region that a thread is in while what belongs to a training step is written."""

from __future__ import annotations

import threading
from typing import Any


class OpenRegion(threading.local):
    """As `Regions` asks for: the open region of the current thread, or None."""

    region: Any = None
