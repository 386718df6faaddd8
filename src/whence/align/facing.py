"""The order of alignment: both runs brought to one form, then who faces whom, then what tells tensors of other axes apart."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from whence.align import batches, padding
from whence.align.derived import Derived
from whence.align.fusion import fused
from whence.align.layouts import laid_out
from whence.align.plan import plan
from whence.records import Run
from whence.results import Made, Plan


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two runs face to face. The plan's ids are those of these runs, which may be made of the given ones (`Derived`)."""

    reference: Run
    target: Run
    plan: Plan


def align(reference: Run, target: Run) -> Aligned:
    """Bring two runs face to face. Elements are read only to confirm what shapes and names propose."""
    reference, target = padding.dense(reference, target), padding.dense(target, reference)
    faced = batches.facing(reference, target)
    reference, target = faced.reference, faced.target
    found = plan(reference, target)
    target, found = fused(reference, target, found)
    target, found = laid_out(reference, target, found)
    found = msgspec.structs.replace(
        found, notes=(*faced.notes, *found.notes), joined=tuple(faced.joined), parted=tuple(faced.parted),
        made_reference=made_of(reference), made_target=made_of(target),
    )  # fmt: skip
    target, found = padding.filled(reference, target, found)
    return Aligned(reference, target, found)


def made_of(run: Run) -> tuple[Made, ...]:
    """Every tensor that was made of a run, through all stages, in the order of their ids."""
    made: tuple[Made, ...] = ()
    while isinstance(run, Derived):
        made = (*run.made, *made)
        run = run.base
    return made
