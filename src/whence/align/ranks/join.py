"""Runs of several ranks brought to one form: calls of the ranks become one call, their tensors one
tensor, before anything is compared.

How a tensor lies on the ranks is proposed by shapes against the other side, by what the ranks
share, and confirmed on elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from whence.align.derived_run import DerivedTensors
from whence.align.ranks import shards
from whence.align.ranks.child_numbers import number_children
from whence.align.ranks.groups import RankGroups, Side
from whence.align.ranks.joined_run import joined_run
from whence.align.ranks.partial_sums import choose, unreduced
from whence.align.ranks.pipeline_gradients import handed_back
from whence.align.ranks.pipeline_stages import find_stages, renumber
from whence.align.ranks.placement import place
from whence.align.ranks.shards import Shard
from whence.display import listed
from whence.errors import UsageError
from whence.records import Run


def joined(
    reference: Run, target: Run, declared: Sequence[Shard] = ()
) -> tuple[Run, Run, tuple[str, ...]]:
    """Both runs with the calls of their ranks joined, and sentences on what was done. Runs of one
    rank are as they were.

    Ranks that hold the same tensors on both sides stay apart and are paired one by one. Raises
    UsageError for declarations that contradict each other or do not fit a tensor.
    """
    for shard in declared:
        if shard.how not in shards.HOW:
            raise UsageError(
                f"{shard}: {shard.how!r} is not known; there are {', '.join(shards.HOW)}"
            )
    ranks, target_ranks = ({c.rank for c in run.calls} for run in (reference, target))
    if len(ranks) < 2 and len(target_ranks) < 2:
        return (
            (reference, target, ())
            if ranks == target_ranks or not ranks or not target_ranks
            else (reference, *_renumbered(target, min(ranks)))
        )
    if ranks == target_ranks and not declared and _same_shapes(reference, target):
        return reference, target, ()
    sides = Side("reference", reference), Side("target", target)
    groups = RankGroups(*sides, declared)
    _decide(groups)
    runs = [side.run if len(side.ranks) < 2 else joined_run(groups, side) for side in sides]
    rank = min(
        sides[0].ranks
        if len(sides[0].ranks) == 1
        else sides[1].ranks
        if len(sides[1].ranks) == 1
        else [0]
    )
    if len(sides[0].ranks) > 1 or len(sides[1].ranks) > 1:
        runs = [_renumbered(run, rank)[0] for run in runs]
    for i in (0, 1):
        if len(set(sides[i].stage.values())) > 1:
            runs[i] = handed_back(runs[1 - i], runs[i])
    return runs[0], runs[1], tuple(groups.notes)


def _renumbered(run: Run, rank: int) -> tuple[Run, tuple[str, ...]]:
    """A run of one rank under another number: numbers say nothing where there is only one."""
    own_rank = next((c.rank for c in run.calls), rank)
    if own_rank == rank:
        return run, ()
    calls = [replace(c, rank=rank) for c in run.calls]
    return DerivedTensors(run).done(calls), (f"target: rank {own_rank} is paired with rank {rank}",)


def _same_shapes(reference: Run, target: Run) -> bool:
    """Does every call that both have by its key, rank included, hold tensors of the same shapes?"""
    by_key = {c.key(): c for c in target.calls}
    met = False
    for call in reference.calls:
        partner = by_key.get(call.key())
        if partner is None:
            continue
        met = True
        slots = {r.slot: r.record for r in partner.refs}
        for ref in call.refs:
            if (
                ref.slot in slots
                and reference.records[ref.record].shape != target.records[slots[ref.slot]].shape
            ):
                return False
    return met


def _decide(groups: RankGroups) -> None:
    """How every tensor lies on the ranks of both sides, and what is to be told of it."""
    renumber(groups)
    find_stages(groups)
    for side in groups.sides:
        number_children(side)
    place(groups)
    for side in groups.sides:
        unreduced(groups, side)
        choose(groups, side)
        _note_layouts(groups, side)


def _note_layouts(groups: RankGroups, side: Side) -> None:
    if len(side.ranks) < 2:
        return
    counted = Counter(
        shards.words(layout)
        for (name, records), layout in groups.layouts.items()
        if name == side.name and layout
    )
    layouts = ", ".join(f"{count} {words}" for words, count in counted.most_common())
    groups.notes.insert(
        0, f"{side.name}: {len(side.ranks)} ranks joined{f': {layouts}' if layouts else ''}"
    )
    if unknown := list(
        dict.fromkeys(name for place, name in groups.unplaced.items() if place[0] == side.name)
    ):
        groups.notes.append(
            f"{side.name}: how {listed(unknown, 3)} are split over the ranks is not "
            "known: the ranks differ and they have no partner; they are not compared"
        )
