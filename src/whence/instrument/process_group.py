"""The process group of this process. Does not import torch: programs of other frameworks use this
too.
"""

from __future__ import annotations

import sys
from typing import Any


def process_group() -> dict[str, Any]:
    """rank, world_size and backend of torch's default process group; {} when this process joined
    none.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
        ):
            return {}
        return {
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
            "backend": str(distributed.get_backend()),
        }
    except Exception:  # noqa: BLE001 - a group that is half set up must not stop the program
        return {}
