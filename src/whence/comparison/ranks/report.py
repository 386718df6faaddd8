"""Reports on the ranks of one run: who they are, what they exchange, and the checks of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from whence.comparison.ranks import replicas, sequences
from whence.comparison.ranks.parameters import Parameters
from whence.comparison.ranks.rank_calls import Moment, Print, RankCalls, in_words
from whence.records import Call, Collective, Run, collectives_of, missing_of
from whence.records.slots import INVERSE_SCALE, is_drawn, is_input
from whence.records.training import GRADIENTS, OPTIMIZER
from whence.results import (
    CollectiveRow,
    RankCause,
    RankCheck,
    RankCheckKind,
    RankFinding,
    RankGroup,
    RankReport,
    RankVerdict,
)


def report(run: Run) -> RankReport:
    """The report on the ranks of an opened run."""
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
            check(calls),
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


# Checks that the numbers that control a training are equal on all ranks: hyper-parameters of
# optimisers, limits of clipping, loss scales and the number of steps.

_CHECK = RankCheckKind.SETTINGS


def check(calls: RankCalls) -> RankCheck:
    """Compare the settings of every optimiser step."""
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


# Checks that ranks with copies of one model train on different rows and draw different random
# numbers, and that ranks with one activation draw the same numbers for it.

_FEWEST_ROWS = 4
"""Least number of elements by which two inputs can be told apart."""
_FEWEST_DRAWN = 16
"""Least number of random numbers that are not equal by chance."""


class RowsAndDraws:
    """Inputs and random numbers of ranks in training. copies: pairs of ranks with the same
    model.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters, self._calls = parameters, parameters.calls
        self._pairs = list(combinations(self._calls.ranks, 2))
        self._copies = {pair for pair in self._pairs if parameters.are_copies(*pair)}
        self._leaves: dict[tuple[str, int, int], Moment] = {}
        self._tops: list[Moment] = []
        for moment, group in self._calls.at.items():
            call = next(iter(group.values()))
            if moment.phase != "forward" or moment.op or not call.training:
                continue
            if call.parent < 0:
                self._tops.append(moment)
            if call.leaf:
                self._leaves.setdefault((moment.root, moment.step, moment.micro), moment)

    # ---- rows

    def rows(self) -> RankCheck:
        """Compare the training inputs of ranks that hold copies of a model."""
        kind = RankCheckKind.ROWS
        same: dict[tuple[int, int], Moment] = {}
        compared = 0
        for moment in self._tops:
            for pair in self._copies:
                if not {*pair} <= self._calls.at[moment].keys():
                    continue
                compared += 1
                if pair not in same and self._same_rows(moment, pair):
                    same[pair] = moment
        if not compared:
            return RankCheck(kind, RankVerdict.NOTHING, "no two ranks train copies of one model")
        if not same:
            return RankCheck(
                kind, RankVerdict.FINE, "ranks with copies of the model train on rows of their own"
            )
        step = min(m.step for m in same.values())
        ranks = tuple(sorted({r for pair, m in same.items() if m.step == step for r in pair}))
        sentence = f"{in_words(ranks)} train on the same rows"
        shown = "all that the model is given is bit-equal on them, and they hold the same model"
        finding = RankFinding(
            kind, RankVerdict.FAULT, RankCause.SAME_ROWS, sentence, ranks, step, evidence=(shown,)
        )
        return RankCheck(kind, RankVerdict.FAULT, sentence, (finding,))

    def _same_rows(self, moment: Moment, pair: tuple[int, int]) -> bool:
        """Whether two ranks have equal inputs for a model and for its first layer. A layer with
        other tokens or rows as inputs works on its own part of them.
        """
        first = self._leaves.get((moment.root, moment.step, moment.micro))
        for at in (moment, first):
            if at is None or not {*pair} <= self._calls.at[at].keys():
                return False
            one, other = (self._inputs(self._calls.at[at][rank]) for rank in pair)
            if one.keys() != other.keys() or not one:
                return False
            if any(one[slot].text != other[slot].text for slot in one):
                return False
            call = self._calls.at[at][pair[0]]
            if not any(
                not known.constant and _count(known) >= _FEWEST_ROWS
                for slot, known in one.items()
                if slot not in call.placements
            ):
                return False
        return True

    def _inputs(self, call: Call) -> dict[str, Print]:
        slots = [r.slot for r in call.refs if is_input(r.slot) and not is_drawn(r.slot)]
        found = {slot: self._calls.print_of(call, slot) for slot in slots}
        return {slot: known for slot, known in found.items() if known is not None}

    # ---- random numbers

    def draws(self) -> RankCheck:
        """Compare the random numbers that calls draw in training."""
        kind = RankCheckKind.DRAWS
        drawn = list(self._drawn())
        if not drawn:
            return RankCheck(kind, RankVerdict.NOTHING, "no two ranks draw random numbers")
        findings = [
            finding
            for cause in (RankCause.OTHER_SEED, RankCause.SAME_SEED)
            if (finding := _of_cause([d for d in drawn if d[0] == cause], cause)) is not None
        ]
        if not findings:
            words = "ranks draw alike where they hold the same, and by themselves elsewhere"
            return RankCheck(kind, RankVerdict.FINE, words)
        worst = max((f.verdict for f in findings), key=list(RankVerdict).index)
        return RankCheck(kind, worst, findings[0].sentence, tuple(findings))

    def _drawn(self) -> Iterator[tuple[RankCause | None, Moment, tuple[int, int]]]:
        """Yields, for each call that draws random numbers on two ranks, what is wrong with it:
        (cause or None, moment, ranks).
        """
        for moment, group in self._calls.at.items():
            call = next(iter(group.values()))
            if len(group) < 2 or moment.phase != "forward" or not call.training:
                continue
            for slot in (ref.slot for ref in call.refs if is_drawn(ref.slot)):
                prints = self._calls.prints(moment, slot)
                for pair in self._pairs:
                    if not {*pair} <= prints.keys():
                        continue
                    one, other = (prints[rank] for rank in pair)
                    if one.constant or other.constant or _count(one) < _FEWEST_DRAWN:
                        continue
                    yield self._judged(moment, pair, alike=one.text == other.text), moment, pair

    def _judged(self, moment: Moment, pair: tuple[int, int], *, alike: bool) -> RankCause | None:
        given = self._calls.prints(moment, "input.0")
        if not {*pair} <= given.keys():
            return None
        hold_the_same = given[pair[0]].text == given[pair[1]].text
        if alike:
            return None if hold_the_same else RankCause.SAME_SEED
        is_copy = pair in self._copies
        return RankCause.OTHER_SEED if hold_the_same and not is_copy else None


def _of_cause(
    drawn: list[tuple[RankCause | None, Moment, tuple[int, int]]], cause: RankCause
) -> RankFinding | None:
    if not drawn:
        return None
    _, first, _ = drawn[0]
    ranks = tuple(sorted({rank for _, moment, pair in drawn if moment == first for rank in pair}))
    moments = len({moment for _, moment, _ in drawn})
    name = first.scope or first.root
    if cause == RankCause.SAME_SEED:
        verdict = RankVerdict.WARNING
        words = "draw the same random numbers for different elements: the same seed"
    else:
        verdict = RankVerdict.FAULT
        words = "draw different random numbers for an activation that they hold alike"
    shown = f"in {moments:,} call{'s' if moments > 1 else ''}, first in {name}"
    return RankFinding(
        RankCheckKind.DRAWS,
        verdict,
        cause,
        f"{in_words(ranks)} {words}",
        ranks,
        first.step,
        first.scope,
        evidence=(shown,),
    )


def _count(known: Print) -> int:
    n = 1
    for extent in known.shape:
        n *= extent
    return n
