"""The order of alignment: both runs brought to one form, then who faces whom, then what tells tensors of other axes apart."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from whence.align import tensors
from whence.align.derived import Derived
from whence.align.plan import plan
from whence.records import Run
from whence.results import Made, Plan


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two runs face to face. The plan's ids are those of these runs, which may be made of the given ones (`Derived`)."""

    reference: Run
    target: Run
    plan: Plan


def align(reference: Run, target: Run, inside: tensors.Inside | None = None) -> Aligned:
    """Bring two runs face to face. Elements are read only to confirm what shapes and names propose.

    inside: computes tensors inside calls of the reference that no record holds; asked for those of the target left without a partner.
    """
    found = plan(reference, target)
    reference, target, found = tensors.face(reference, target, found, inside)
    return Aligned(reference, target, msgspec.structs.replace(found, made_reference=made_of(reference), made_target=made_of(target)))


def made_of(run: Run) -> tuple[Made, ...]:
    """Every tensor that was made of a run, through all stages, in the order of their ids."""
    made: tuple[Made, ...] = ()
    while isinstance(run, Derived):
        made = (*run.made, *made)
        run = run.base
    return made
