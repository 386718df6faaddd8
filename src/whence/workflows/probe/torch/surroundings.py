"""The state that affects a call in addition to its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from whence.workflows.rounding.ways import Generators


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The state that affects a call: generators of random numbers, and autocast by device."""

    generators: Generators
    autocast: tuple[tuple[str, Any], ...]

    @staticmethod
    def now() -> Surroundings:
        """The current state of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        switched = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
        return Surroundings(Generators.now(), tuple(switched))
