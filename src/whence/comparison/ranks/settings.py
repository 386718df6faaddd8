"""Are the numbers that steer a training the same on all ranks: hyper-parameters of optimisers,
limits of clipping, loss scales, and how many steps were made?
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whence.comparison.ranks.rank_calls import Moment, RankCalls, in_words
from whence.records import Call
from whence.records.slots import INVERSE_SCALE
from whence.records.training import GRADIENTS, OPTIMIZER
from whence.results import RankCause, RankCheck, RankCheckKind, RankFinding, RankVerdict

_CHECK = RankCheckKind.SETTINGS


def check(calls: RankCalls) -> RankCheck:
    """Compare the settings of every step of an optimiser."""
    steps: dict[int, set[int]] = {}
    findings: list[RankFinding] = []
    for moment, group in calls.at.items():
        if moment.phase != OPTIMIZER:
            continue
        for rank in group:
            steps.setdefault(rank, set()).add(moment.step)
        if len(group) > 1 and moment.op:
            findings += _differences(calls, moment, group)
    if not steps:
        return RankCheck(_CHECK, RankVerdict.NOTHING, "no optimizer steps")
    findings = list({f.sentence.partition(" (")[0]: f for f in reversed(findings)}.values())[::-1]
    findings = [next(iter(findings))] if findings else []
    counts = {rank: len(made) for rank, made in steps.items()}
    if len(set(counts.values())) > 1 and not calls.broken_off:
        listed = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
        sentence = f"ranks make different numbers of steps: {listed}"
        ranks = tuple(sorted(counts))
        fewest = min(counts.values())
        findings.append(
            RankFinding(_CHECK, RankVerdict.FAULT, RankCause.OTHER_COUNT, sentence, ranks, fewest)
        )
    if findings:
        words = findings[0].sentence
        return RankCheck(_CHECK, RankVerdict.FAULT, words, tuple(findings))
    words = "hyper-parameters, clipping, loss scales and numbers of steps are equal"
    return RankCheck(_CHECK, RankVerdict.FINE, words)


def _differences(calls: RankCalls, moment: Moment, group: dict[int, Call]) -> Iterator[RankFinding]:
    named = f"{moment.scope}.{moment.op}" if moment.scope else moment.op
    kinds = {rank: call.op_type for rank, call in sorted(group.items())}
    what = "gradients" if moment.op == GRADIENTS else f"the step of {named}"
    found: list[tuple[str, dict[int, Any]]] = [("optimizer", kinds)]
    names = dict.fromkeys(name for call in group.values() for name in call.arguments)
    found += [
        (name, {rank: call.arguments.get(name) for rank, call in sorted(group.items())})
        for name in names
    ]
    scales = calls.prints(moment, INVERSE_SCALE)
    if scales:
        values = {rank: calls.record(group[rank], INVERSE_SCALE) for rank in scales}
        means = {r: v.statistics.mean for r, v in values.items() if v and v.statistics}
        found.append(("1 / loss scale", means))
    for name, values_of in found:
        if len({repr(value) for value in values_of.values()}) > 1:
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in values_of.items())
            yield RankFinding(
                _CHECK,
                RankVerdict.FAULT,
                RankCause.OTHER_SETTING,
                f"{name} is {listed} (in {what})",
                tuple(values_of),
                moment.step,
                moment.scope,
                named if moment.op != GRADIENTS else "",
                evidence=(f"{in_words(values_of)} step the same parameter",)
                if moment.op != GRADIENTS
                else (),
            )
