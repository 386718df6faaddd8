"""Ranks with other layers or experts than their neighbours: pipeline stages, local numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from whence.align.module_names import starred
from whence.align.ranks.groups import RankGroups, Side
from whence.records import Record
from whence.records.training import is_of_step

_STAGES = 0.02  # ranks of two pipeline stages share at most this share of their leaf modules


def renumber(groups: RankGroups) -> None:
    """Number layers and experts of each rank as the other side numbers the same parameters."""
    for side, other_side in (
        (groups.sides[0], groups.sides[1]),
        (groups.sides[1], groups.sides[0]),
    ):
        if len(side.ranks) < 2:
            continue
        numbers_of: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
        for call in other_side.calls:
            for ref in call.slots("param"):
                if print_ := _fingerprint(other_side.run.records[ref.record]):
                    numbers_of[starred(call.scope), print_].add(_numbers(call.scope))
        for rank in side.ranks:
            votes: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
            for call in side.calls:
                numbers = _numbers(call.scope)
                for ref in call.slots("param") if call.rank == rank and numbers else ():
                    print_ = _fingerprint(side.run.records[ref.record])
                    places = (
                        numbers_of.get((starred(call.scope), print_), set()) if print_ else set()
                    )
                    if len(places) == 1:
                        for i, (a, b) in enumerate(zip(next(iter(places)), numbers, strict=True)):
                            votes[_prefix(starred(call.scope), i), i][a - b] += 1
            for (prefix, i), counted in votes.items():
                offset, count = counted.most_common(1)[0]
                if offset and count > 0.6 * counted.total():
                    _shift(groups, side, rank, prefix, i, offset)
        side.group()


def _shift(groups: RankGroups, side: Side, rank: int, prefix: str, place: int, offset: int) -> None:
    for call in side.calls:
        if call.rank == rank and _prefix(starred(call.scope), place) == prefix:
            side.scope[call.id] = _with_number(side.scope[call.id], place, offset)
    groups.notes.append(f"{side.name}: rank {rank} counts {prefix} from 0 again: {offset:+d}")


def find_stages(groups: RankGroups) -> None:
    """Ranks that share no leaf module are stages of a pipeline, ordered as on the other side."""
    for side, other_side in (
        (groups.sides[0], groups.sides[1]),
        (groups.sides[1], groups.sides[0]),
    ):
        leaves = {
            rank: {
                side.scope[c.id]
                for c in side.calls
                if c.leaf and c.rank == rank and not is_of_step(c.phase, c.op)
            }
            for rank in side.ranks
        }
        clusters: list[list[int]] = []
        for rank in side.ranks:
            for cluster in clusters:
                shared = leaves[rank] & leaves[cluster[0]]
                fewest = min(len(leaves[rank]), len(leaves[cluster[0]]))
                # one may be shared by both ends: a tied embedding
                if len(shared) > max(fewest > 3, _STAGES * fewest):
                    cluster.append(rank)
                    break
            else:
                clusters.append([rank])
        if len(clusters) < 2 or not any(len(g) > 1 for g in side.groups.values()):
            continue  # ranks without a common root are no pipeline
        order = {other_side.scope[c.id]: c.order for c in reversed(other_side.calls)}
        firsts = [
            min((order[s] for s in leaves[cluster[0]] if s in order), default=math.inf)
            for cluster in clusters
        ]
        ranked = sorted(range(len(clusters)), key=lambda i: (firsts[i], clusters[i][0]))
        for stage, i in enumerate(ranked):
            side.stage.update(dict.fromkeys(clusters[i], stage))
        listed = ", then ".join(_ranks(clusters[i]) for i in ranked)
        groups.notes.append(f"{side.name}: stages of a pipeline: {listed}")


def _fingerprint(record: Record) -> str:
    return (
        record.hash and f"{record.hash} {record.shape}"
        if record.count > 1 and not _constant(record)
        else ""
    )


def _constant(record: Record) -> bool:
    """Parameters of one value throughout (untrained norms) tell no layer from another."""
    return record.statistics is not None and record.statistics.min == record.statistics.max


def _numbers(scope: str) -> tuple[int, ...]:
    return tuple(int(part) for part in scope.split(".") if part.isdigit())


def _prefix(scope: str, place: int) -> str:
    """The starred scope up to its number at `place`; "" when it has none."""
    parts = scope.split(".")
    stars = [i for i, part in enumerate(parts) if part == "*"]
    return ".".join(parts[: stars[place] + 1]) if place < len(stars) else ""


def _with_number(scope: str, place: int, offset: int) -> str:
    parts = scope.split(".")
    index = [i for i, part in enumerate(parts) if part.isdigit()][place]
    parts[index] = str(int(parts[index]) + offset)
    return ".".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = list(range(ranks[0], ranks[-1] + 1)) == list(ranks) and len(ranks) > 2
    return f"ranks {ranks[0]} to {ranks[-1]}" if listed else f"ranks {', '.join(map(str, ranks))}"
