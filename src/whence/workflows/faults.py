"""Plants a known fault in a model, to check that it is found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random
from typing import Any

from whence.errors import UsageError


def fault_sites(model: Any, fault: str) -> list[str]:
    """Names of the modules of a torch model in which a fault of this kind (`capture.points.FAULTS`)
    can be planted.
    """
    from whence.instrument.torch import faults

    _check(fault)
    return faults.sites(model, fault)


def planted(
    model: Any, site: str, fault: str, strength: float | None = None, random: Random | None = None
) -> AbstractContextManager[str]:
    """A torch model with one fault while the block runs; gives the sentence that says what was
    planted. Afterwards every bit is as it was.

        with whence.api.planted(model, "layers.3.mlp", "scale", 1.01), whence.capture(model, "runs/faulty"):
            model(x)

    strength: what it means depends on the kind; None for the kind's own. random: draws the element,
    row, channel or branch.
    """  # noqa: E501
    from whence.instrument.torch import faults

    _check(fault)
    return faults.planted(model, site, fault, strength, random or Random(f"{fault} {site}"))


def _check(fault: str) -> None:
    from whence.instrument.patch_points import FAULTS

    if fault not in FAULTS:
        raise UsageError(f"fault {fault!r}: one of {', '.join(FAULTS)}")
