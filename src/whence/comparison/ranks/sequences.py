"""Checks that the ranks of a group issue the same collectives in the same order. At the first
difference a job hangs, or mixes up data of different tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from whence.comparison.ranks.rank_calls import RankCalls, in_words
from whence.records import Collective, CollectiveKind
from whence.results import RankCause, RankCheck, RankCheckKind, RankFinding, RankVerdict

_Group = tuple[str, tuple[int, ...]]
_UNEVEN = (CollectiveKind.ALL_TO_ALL, CollectiveKind.GATHER, CollectiveKind.SCATTER)
_CHECK = RankCheckKind.COLLECTIVES
_FOLLOWING = 8
"""Number of collectives after a differing one that must agree again to show where the order
resumes.
"""
_HANGS_S = 3.0
"""Seconds after which a rank that is alone in a collective counts as waiting for ranks that do not
come.
"""


def check(calls: RankCalls) -> RankCheck:
    """Compare the collectives and messages that the ranks of every group issue."""
    every = [c for listed in calls.collectives.values() for c in listed]
    if not every:
        return RankCheck(_CHECK, RankVerdict.NOTHING, "no collective was recorded")
    findings = [f for group in groups(calls) for f in _group(calls, group)]
    findings += list(_messages(calls))
    findings.sort(key=lambda f: f.step)
    whole = f"{len(every):,} collectives and messages"
    if not findings:
        return RankCheck(_CHECK, RankVerdict.FINE, f"{whole} agree in kind, order and sizes")
    worst = max((f.verdict for f in findings), key=list(RankVerdict).index)
    return RankCheck(_CHECK, worst, f"{whole} do not agree", tuple(findings))


def groups(calls: RankCalls) -> list[_Group]:
    """(name, ranks) of all groups, in the order of first use."""
    return list(
        dict.fromkeys((c.group, c.ranks) for listed in calls.collectives.values() for c in listed)
    )


def _group(calls: RankCalls, group: _Group) -> Iterator[RankFinding]:
    name, ranks = group
    issued = {
        rank: {
            c.number: c
            for c in calls.collectives[rank]
            if (c.group, c.ranks) == (name, ranks) and not c.kind.is_message
        }
        for rank in ranks
        if rank in calls.collectives
    }
    if len(issued) < 2 or not any(issued.values()):
        return
    first, *others = sorted(issued, key=lambda rank: -len(issued[rank]))
    for other in sorted(others):
        finding = _pair(calls, first, issued[first], other, issued[other])
        if finding is not None:
            yield finding
            return


def _pair(
    calls: RankCalls, a: int, own: dict[int, Collective], b: int, theirs: dict[int, Collective]
) -> RankFinding | None:
    """The first disagreement of two ranks; None without one. Missing numbers were not recorded."""
    both = sorted(own.keys() & theirs.keys())
    first = next((n for n in both if _known(own[n]) != _known(theirs[n])), None)
    if first is not None and not _swapped(own, theirs, first):
        for x, mine, y, yours in ((a, own, b, theirs), (b, theirs, a, own)):
            if _has_one_more(mine, yours, first):
                return _one_more(x, mine[first], y, yours[first])
    for number in both:
        one, other = own[number], theirs[number]
        if _form(one) != _form(other) or not _splits_fit(one, other):
            return _differs(a, own, b, theirs, number)
        if _place(one) != _place(other) and _swapped(own, theirs, number):
            sentence = (
                f"{_words(one)} of rank {a} meets that of another tensor on rank {b}: "
                f"{_where(one)} and {_where(other)}, in the other order right after"
            )
            return _finding(RankCause.MIXED_UP, RankVerdict.FAULT, sentence, (a, b), one, other)
    last = max(theirs, default=-1)
    missing = sorted(number for number in own if number > last)
    return _missing(calls, a, own, b, theirs, missing[0]) if missing else None


def _has_one_more(mine: dict[int, Collective], yours: dict[int, Collective], number: int) -> bool:
    """Whether, from `number` on, one rank issues the same collectives as the other after one
    additional collective.
    """
    after = [n for n in range(number, number + _FOLLOWING) if n + 1 in mine and n in yours]
    return bool(after) and all(_known(mine[n + 1]) == _known(yours[n]) for n in after)


def _one_more(rank: int, extra: Collective, other: int, meets: Collective) -> RankFinding:
    sentence = (
        f"rank {rank} issues one more than rank {other}: {_words(extra)} at {_where(extra)}, which "
        f"meets {_words(meets)} at {_where(meets)}"
    )
    evidence = (f"what follows on rank {rank} is that of rank {other}, one place later",)
    ranks = (rank, other)
    cause = RankCause.OTHER_SEQUENCE
    return _finding(cause, RankVerdict.FAULT, sentence, ranks, extra, meets, evidence)


def _differs(
    a: int, own: dict[int, Collective], b: int, theirs: dict[int, Collective], number: int
) -> RankFinding:
    one, other = own[number], theirs[number]
    evidence: tuple[str, ...] = ()
    if _swapped(own, theirs, number):
        evidence = ("the same two in another order",)
    sentence = (
        f"collective {number} of {in_words(one.ranks)} is {_words(one)} on rank {a}, at "
        f"{_where(one)}, and {_words(other)} on rank {b}, at {_where(other)}"
    )
    return _finding(
        RankCause.OTHER_SEQUENCE, RankVerdict.FAULT, sentence, (a, b), one, other, evidence
    )


def _missing(
    calls: RankCalls,
    a: int,
    own: dict[int, Collective],
    b: int,
    theirs: dict[int, Collective],
    number: int,
) -> RankFinding:
    """The finding for a rank that issued fewer collectives: it ended without them, or the job was
    cut off.
    """
    one = own[number]
    ended = max((c.at for listed in calls.collectives.values() for c in listed), default=one.at)
    waited = max(ended, _finished(calls)) - one.at
    stopped = b in calls.broken_off
    joined = theirs[max(theirs)] if theirs else None
    last = next(reversed(calls.collectives[b]), None)
    sentence = f"rank {b} does not join {_words(one)}, which rank {a} issues at {_where(one)}"
    evidence = []
    if last is not None and last is not joined:
        evidence.append(f"rank {b} is in {_words(last)} over {in_words(last.ranks)} instead")
    elif joined is not None:
        evidence.append(f"its last one is {_words(joined)} at {_where(joined)}")
    if not stopped:
        evidence.append(f"rank {b} ended without it")
    elif waited >= _HANGS_S:
        evidence.append(f"rank {a} waited {waited:.0f} s")
    else:
        evidence.append(f"the job was cut off {max(waited, 0.0):.1f} s later")
    certain = not stopped or waited >= _HANGS_S or (last is not None and last is not joined)
    verdict = RankVerdict.FAULT if certain else RankVerdict.UNKNOWN
    return _finding(RankCause.NOT_JOINED, verdict, sentence, (a, b), one, one, tuple(evidence))


def _finished(calls: RankCalls) -> float:
    from datetime import datetime

    text = calls.run.info.finished
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def _messages(calls: RankCalls) -> Iterator[RankFinding]:
    """Check that the k-th message that one rank sends to another matches the k-th that the other
    receives from it.
    """
    sent: dict[tuple[str, int, int], list[Collective]] = {}
    taken: dict[tuple[str, int, int], list[Collective]] = {}
    for rank, listed in calls.collectives.items():
        for c in listed:
            if c.kind == CollectiveKind.SEND:
                sent.setdefault((c.group, rank, c.peer), []).append(c)
            elif c.kind == CollectiveKind.RECEIVE and c.peer >= 0:
                taken.setdefault((c.group, c.peer, rank), []).append(c)
    for way in dict.fromkeys((*sent, *taken)):
        _, a, b = way
        if a not in calls.collectives or b not in calls.collectives:
            continue
        sends, takes = ({c.number: c for c in side.get(way, [])} for side in (sent, taken))
        finding = _message(calls, a, sends, b, takes)
        if finding is not None:
            yield finding


def _message(
    calls: RankCalls, a: int, sends: dict[int, Collective], b: int, takes: dict[int, Collective]
) -> RankFinding | None:
    for number in sorted(sends.keys() & takes.keys()):
        one, other = sends[number], takes[number]
        if (one.dtype, _counts(one.given)) != (other.dtype, _counts(other.taken)):
            sentence = (
                f"message {number} from rank {a} to rank {b} is {_size(one.dtype, one.given)} at "
                f"{_where(one)}, and rank {b} takes {_size(other.dtype, other.taken)} at "
                f"{_where(other)}"
            )
            return _finding(
                RankCause.OTHER_SEQUENCE, RankVerdict.FAULT, sentence, (a, b), one, other
            )
    longer, shorter = (sends, takes) if len(sends) >= len(takes) else (takes, sends)
    rank, other_rank = (a, b) if longer is sends else (b, a)
    missing = sorted(n for n in longer if n > max(shorter, default=-1))
    return _missing(calls, rank, longer, other_rank, shorter, missing[0]) if missing else None


def _form(c: Collective) -> tuple[Any, ...]:
    """The properties in which the ranks of a group must agree."""
    if c.kind in _UNEVEN:
        return c.kind, c.op, c.dtype, c.peer
    if c.kind == CollectiveKind.BROADCAST:
        return c.kind, c.op, c.dtype, c.peer, _counts(c.taken)
    return c.kind, c.op, c.dtype, c.peer, _counts(c.given)


def _splits_fit(one: Collective, other: Collective) -> bool:
    """Whether each of two ranks receives as many rows from the other as the other sends."""
    if one.kind != CollectiveKind.ALL_TO_ALL or not one.splits or not other.splits:
        return True
    a, b = one.ranks.index(one.rank), other.ranks.index(other.rank)
    for source, taker, x, y in ((one, other, a, b), (other, one, b, a)):
        sends, takes = source.splits[0], taker.splits[1]
        if sends and takes and sends[y] != takes[x]:
            return False
    return True


def _known(c: Collective) -> tuple[Any, ...]:
    return _form(c), _place(c)


def _place(c: Collective) -> tuple[str, str]:
    return c.source, c.scope


def _swapped(own: dict[int, Collective], theirs: dict[int, Collective], number: int) -> bool:
    if number + 1 not in own or number + 1 not in theirs:
        return False
    a, b = (own[number], own[number + 1]), (theirs[number], theirs[number + 1])
    return (
        (_form(a[0]), _place(a[0])) == (_form(b[1]), _place(b[1]))
        and (_form(a[1]), _place(a[1])) == (_form(b[0]), _place(b[0]))
        and a[0] != a[1]
    )


def _counts(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape in shapes)


def _size(dtype: str, shapes: tuple[tuple[int, ...], ...]) -> str:
    return f"{dtype or 'nothing'} {', '.join(str(list(shape)) for shape in shapes[:3])}".rstrip()


def _words(c: Collective) -> str:
    op = f" ({c.op})" if c.op else ""
    peer = f" from rank {c.peer}" if c.kind == CollectiveKind.BROADCAST else ""
    return f"{c.kind}{op}{peer} of {_size(c.dtype, c.given or c.taken)}".removesuffix(" of nothing")


def _where(c: Collective) -> str:
    parts = [c.source or "", c.scope, c.by]
    return ", ".join(part for part in parts if part) or "an unknown line"


def _finding(
    cause: RankCause,
    verdict: RankVerdict,
    sentence: str,
    ranks: tuple[int, int],
    one: Collective,
    other: Collective,
    evidence: tuple[str, ...] = (),
) -> RankFinding:
    step = min(one.step, other.step)
    scope = one.scope or other.scope
    pair = (min(ranks), max(ranks))
    return RankFinding(_CHECK, verdict, cause, sentence, pair, step, scope, evidence=evidence)
