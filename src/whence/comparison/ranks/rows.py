"""Do ranks that hold copies of one model train on rows of their own, and draw random numbers of
their own? And do ranks that hold one activation alike draw alike for it?
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from whence.comparison.ranks.parameters import Parameters
from whence.comparison.ranks.rank_calls import Moment, Print, in_words
from whence.records import Call
from whence.records.slots import is_drawn, is_input
from whence.results import RankCause, RankCheck, RankCheckKind, RankFinding, RankVerdict

_FEWEST_ROWS = 4
"""Elements of an input that is told from another by its elements."""
_FEWEST_DRAWN = 16
"""Random numbers that are not equal by chance."""


class RowsAndDraws:
    """What ranks are given and what they draw. copies: pairs of ranks with the same model."""

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
        """Compare what copies of the model are given in training."""
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
        """Is all that a model and its first layer are given equal on two ranks? A layer that is
        given other tokens or rows has its own part of them.
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
        """Of each call that draws on two ranks, what is wrong with it."""
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
