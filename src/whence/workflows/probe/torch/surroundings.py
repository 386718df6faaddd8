"""What a call runs in beside its arguments."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a call runs in beside its arguments: states of generators, and autocast by device."""

    torch_state: Any
    python_state: Any
    numpy_state: Any
    autocast: tuple[tuple[str, Any], ...]

    @staticmethod
    def now() -> Surroundings:
        """Those of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        switched = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
        return Surroundings(
            torch.get_rng_state(), random.getstate(), np.random.get_state(), tuple(switched)
        )


def set_generators(state: Surroundings) -> None:
    """Put the generators of random numbers where they were."""
    torch.set_rng_state(state.torch_state)
    random.setstate(state.python_state)
    np.random.set_state(state.numpy_state)
