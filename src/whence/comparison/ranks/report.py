"""The ranks of one run: who they are, what they send, and the checks of them."""

from __future__ import annotations

from collections import Counter

from whence.comparison.ranks import replicas, sequences, settings
from whence.comparison.ranks.parameters import Parameters
from whence.comparison.ranks.rank_calls import RankCalls
from whence.comparison.ranks.rows import RowsAndDraws
from whence.records import Collective, Run, collectives_of, missing_of
from whence.results import CollectiveRow, RankGroup, RankReport


def report(run: Run) -> RankReport:
    """Look at the ranks of an opened run."""
    calls = RankCalls(run)
    parameters = Parameters(calls)
    rows = RowsAndDraws(parameters)
    steps = {m.step for m in calls.at} | {c.step for c in collectives_of(run) if c.step >= 0}
    meshes = {
        (p.mesh, p.ranks, p.names)
        for group in calls.at.values()
        for call in group.values()
        for p in call.placements.values()
    }
    return RankReport(
        run=run.path,
        ranks=calls.ranks,
        steps=len(steps),
        groups=_groups(calls),
        meshes=tuple(sorted(_mesh(*mesh) for mesh in meshes)),
        collectives=_table(calls, sorted(steps)),
        checks=(
            replicas.check(parameters),
            sequences.check(calls),
            rows.rows(),
            rows.draws(),
            settings.check(calls),
        ),
        ended="; ".join(missing.text for missing in missing_of(run)),
    )


def _mesh(extents: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...]) -> str:
    named = names or tuple(f"mesh {i}" for i in range(len(extents)))
    sizes = " x ".join(f"{name} {size}" for name, size in zip(named, extents, strict=True))
    return f"{sizes}: ranks {', '.join(map(str, ranks))}"


def _groups(calls: RankCalls) -> tuple[RankGroup, ...]:
    every = [c for listed in calls.collectives.values() for c in listed]
    counts = Counter((c.group, c.ranks) for c in every)
    purposes = {(c.group, c.ranks): c.purpose for c in every}
    return tuple(
        RankGroup(name, purposes[name, ranks], ranks, counts[name, ranks])
        for name, ranks in sequences.groups(calls)
    )


def _table(calls: RankCalls, steps: list[int]) -> tuple[CollectiveRow, ...]:
    counts: dict[tuple[str, ...], dict[int, Counter[int]]] = {}
    nbytes: Counter[tuple[tuple[str, ...], int, int]] = Counter()
    shown: dict[tuple[str, ...], Collective] = {}
    for rank, listed in calls.collectives.items():
        for c in listed:
            form: tuple[str, ...] = c.kind, c.op, c.dtype, c.group, str(c.ranks), c.by
            shown.setdefault(form, c)
            counts.setdefault(form, {}).setdefault(rank, Counter())[c.step] += 1
            nbytes[form, rank, c.step] += c.nbytes
    rows = []
    for form, by_rank in counts.items():
        rank = max(by_rank, key=lambda r: sum(by_rank[r].values()))
        numbers = [by_rank[rank][step] for step in steps]
        c = shown[form]
        rows.append(
            CollectiveRow(
                c.kind,
                c.op,
                c.dtype,
                c.ranks,
                c.purpose,
                c.by,
                by_rank[rank][-1],
                min(numbers, default=0),
                max(numbers, default=0),
                max((nbytes[form, rank, step] for step in (*steps, -1)), default=0),
            )
        )
    return tuple(rows)
