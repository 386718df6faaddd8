"""The order of alignment: both runs brought to one form, then which calls are paired, then what
tells tensors of other axes apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from whence.align import apply_map
from whence.align.batches import align as batches
from whence.align.batches import masked_columns, padding
from whence.align.calls import fused_operators, layout_operators
from whence.align.calls.compiled_graphs import cut_alike
from whence.align.calls.granularity import one_level, rebased
from whence.align.calls.match import plan
from whence.align.derived_run import Derived, stated, worded
from whence.align.layout.fused_projections import fused
from whence.align.layout.search import laid_out
from whence.align.quantised import layers as quantised_layers
from whence.align.ranks import join
from whence.align.tensors import match as tensors
from whence.align.tensors.elements import Inside
from whence.align.tensors.graph_modules import by_module, graphs_in_one
from whence.align.tensors.modules_as_graphs import as_graphs
from whence.align.user_map import Map
from whence.align.values import groups as value_groups
from whence.records import Run
from whence.results import Made, Plan


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two aligned runs, possibly `Derived` from the given ones, and the plan with their ids."""

    reference: Run
    target: Run
    plan: Plan

    def as_said(self) -> Plan:
        """The plan in the words of a map."""
        return stated(self.target, self.plan)


def align(
    reference: Run,
    target: Run,
    *,
    match: str = "auto",
    user_map: Map | None = None,
    inside: Callable[[Run], Inside] | None = None,
) -> Aligned:
    """Align two runs. Elements are read only to confirm what shapes and names propose.

    match: as `plan` takes it; with "exact" and "order" the runs are taken as they are. user_map:
    raises UsageError where it does not fit. inside: computes tensors inside calls of the reference
    that no record holds; asked for those of the target left without a partner.
    """
    reference, target, notes = one_level(reference, target)
    if user_map is not None:
        reference, target, named, map_notes = apply_map.prepared(reference, target, user_map)
        notes += map_notes
    is_free = match in ("auto", "names")  # may the runs be brought to another form?
    if is_free:
        if graphs_in_one(target, reference):
            target = as_graphs(reference, target)
        reference, target, cut = cut_alike(reference, target)
        notes += cut
        if user_map is None and graphs_in_one(reference, target):
            return _graphs_by_module(reference, target, inside, notes)
        target, moved = rebased(reference, target)
        shards = user_map.ranks if user_map is not None else ()
        reference, target, joined = join.joined(reference, target, shards)
        notes += [*moved, *joined]
    batched = batches.AlignedBatches(reference, target)
    together = fused_operators.Fused(reference, target)
    if is_free:
        dense = padding.dense(reference, target), padding.dense(target, reference)
        batched = batches.align_batches(*dense)
        if quantised_layers.applies(batched.reference, batched.target):
            together = quantised_layers.joined(batched.reference, batched.target)
        elif value_groups.applies(batched.reference, batched.target):
            together = value_groups.joined(batched.reference, batched.target)
        else:
            together = fused_operators.joined(batched.reference, batched.target)
            together = layout_operators.pair_moves(together)
        reference, target = together.reference, together.target
    matched = plan(reference, target, match, together)
    if user_map is not None:
        target, matched = apply_map.applied(reference, target, matched, user_map, named)
    if is_free:
        reference, target, matched = masked_columns.cut(reference, target, matched)
        target, matched = fused(reference, target, matched)
        target, matched = laid_out(reference, target, matched)
    if match == "auto":
        reference, target, matched = tensors.pair_tensors(reference, target, matched, inside)
    matched = replace(
        matched,
        notes=(*notes, *batched.notes, *together.notes, *matched.notes),
        joined=tuple(batched.joined),
        parted=tuple(batched.parted),
        made_reference=made_of(reference),
        made_target=made_of(target),
    )
    if is_free:
        target, matched = padding.fill_padding(reference, target, matched)
    return Aligned(reference, target, worded(target, matched))


def _graphs_by_module(
    reference: Run, target: Run, inside: Callable[[Run], Inside] | None, notes: list[str]
) -> Aligned:
    """Modules of the reference against compiled graphs of the target."""
    within = inside(reference) if inside is not None else None
    reference, target, matched = by_module(reference, target, within)
    matched = replace(
        matched,
        notes=(*notes, *matched.notes),
        made_reference=made_of(reference),
        made_target=made_of(target),
    )
    return Aligned(reference, target, worded(target, matched))


def made_of(run: Run) -> tuple[Made, ...]:
    """Every tensor that was made of a run, through all stages, in the order of their ids."""
    tensors: tuple[Made, ...] = ()
    while isinstance(run, Derived):
        tensors = (*run.tensors, *tensors)
        run = run.base
    return tensors
