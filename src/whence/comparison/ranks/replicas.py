"""Checks that replicas of a tensor are equal on all ranks, and names where they first differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whence.comparison.ranks.parameters import Parameter, Parameters
from whence.comparison.ranks.rank_calls import Moment, Print, clusters, in_words
from whence.records import CollectiveKind
from whence.records.slots import is_input, is_output, split_slot
from whence.records.training import TAKEN_GRADIENT
from whence.results import RankCause, RankCheck, RankCheckKind, RankFinding, RankVerdict

_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE)


class _Drift(NamedTuple):
    """The first difference between replicas of a parameter. stage: READ, STATE, TAKEN or LEFT, in
    the order of a step; ranks: of the replicas; groups: ranks with equal tensors.
    """

    step: int
    stage: int
    parameter: Parameter
    slot: str
    moment: Moment
    ranks: tuple[int, ...]
    groups: list[tuple[int, ...]]


READ, STATE, TAKEN, LEFT = range(4)


def check(parameters: Parameters) -> RankCheck:
    """Compare all replicas of parameters, buffers, gradients and optimiser states."""
    drifts: list[_Drift] = []
    compared = 0
    for parameter in parameters.all:
        for group in parameters.replicas(parameter):
            compared += 1
            drift = next(_drifts(parameters, parameter, group), None)
            if drift is not None:
                drifts.append(drift)
    kind = RankCheckKind.REPLICAS
    if not compared:
        return RankCheck(kind, RankVerdict.NOTHING, "no rank holds a copy of what another holds")
    number = f"{compared:,} {'parameter or buffer' if compared == 1 else 'parameters and buffers'}"
    if not drifts:
        words = (
            f"{number} that ranks hold copies of are equal, with gradients and states, in all steps"
        )
        return RankCheck(kind, RankVerdict.FINE, words)
    findings = tuple(_findings(parameters, drifts))
    return RankCheck(
        kind,
        RankVerdict.FAULT,
        f"{len(drifts):,} of {number} that ranks hold copies of differ",
        findings,
    )


def _drifts(
    parameters: Parameters, parameter: Parameter, group: tuple[int, ...]
) -> Iterator[_Drift]:
    """The differences between replicas of a parameter, in execution order."""
    moments = [(m.step, READ, m) for m in parameter.read]
    moments += [(m.step, STATE, m) for m in parameter.stepped if _whole(parameters, parameter, m)]
    for step, stage, moment in sorted(moments, key=lambda item: item[:2]):
        slots = [(READ, parameter.slot)] if stage == READ else _stepped(parameters, moment)
        for at, slot in slots:
            if any(
                place.startswith("sum")
                for call in parameters.calls.at[moment].values()
                if slot in call.placements
                for place in call.placements[slot].places
            ):
                continue
            parts = clusters(parameters.calls.prints(moment, slot), group)
            if len(parts) > 1:
                yield _Drift(step, at, parameter, slot, moment, group, parts)


def _whole(parameters: Parameters, parameter: Parameter, moment: Moment) -> bool:
    """Whether an optimiser updates the whole parameter that forward passes read, rather than each
    rank its shard of it.
    """
    if parameters.placement(parameter) or not parameter.read:
        return True
    read = parameters.first[id(parameter)]
    stepped = parameters.calls.prints(moment, "input.param")
    return all(known.shape == read[rank].shape for rank, known in stepped.items() if rank in read)


def _stepped(parameters: Parameters, moment: Moment) -> list[tuple[int, str]]:
    slots = dict.fromkeys(
        ref.slot for call in parameters.calls.at[moment].values() for ref in call.refs
    )
    stage = {"input.param": READ, TAKEN_GRADIENT: TAKEN}
    return sorted(
        (stage.get(s, LEFT if is_output(s) else STATE), s)
        for s in slots
        if is_input(s) or is_output(s)
    )


def _findings(parameters: Parameters, drifts: list[_Drift]) -> Iterator[RankFinding]:
    """Findings about the first drift of parameters with an optimiser, and of others (buffers).
    Later drifts are consequences of these.
    """
    for stepped in (True, False):
        those = [d for d in drifts if bool(d.parameter.stepped) == stepped]
        if not those:
            continue
        at = min((d.step, d.stage) for d in those)
        first = [d for d in those if (d.step, d.stage) == at]
        if at[1] == TAKEN:  # in the order of the backward pass
            first.sort(key=lambda d: -_read_at(parameters, d.parameter))
        by_parts: dict[str, list[_Drift]] = {}
        for drift in first:
            by_parts.setdefault(_cause(parameters, drift)[0], []).append(drift)
        for cause, alike in by_parts.items():
            _, words, evidence = _cause(parameters, alike[0])
            yield _finding(alike, RankCause(cause), words, evidence, len(those))


def _read_at(parameters: Parameters, parameter: Parameter) -> int:
    """The execution order of the first forward call that reads a parameter, -1 if none does."""
    if not parameter.read:
        return -1
    return min(call.order for call in parameters.calls.at[parameter.read[0]].values())


def _finding(
    alike: list[_Drift], cause: RankCause, words: str, evidence: tuple[str, ...], later: int
) -> RankFinding:
    first = alike[0]
    what = _what(first)
    others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    if later > len(alike):
        evidence = (*evidence, f"{later - len(alike)} more part later")
    return RankFinding(
        RankCheckKind.REPLICAS,
        RankVerdict.FAULT,
        cause,
        f"{what}{others}: {words}",
        first.ranks,
        first.step,
        first.parameter.scope,
        first.parameter.full_name,
        len(alike),
        evidence,
    )


def _what(drift: _Drift) -> str:
    name = drift.parameter.full_name
    _, kind = split_slot(drift.slot)
    if drift.slot == TAKEN_GRADIENT:
        return f"the gradient of {name}"
    if drift.slot in ("input.param", "output.param") or drift.stage == READ:
        return name
    return f"{kind} of {name}"


def _cause(parameters: Parameters, drift: _Drift) -> tuple[RankCause, str, tuple[str, ...]]:
    """(cause, words, evidence) of a drift."""
    parted = " and ".join(in_words(group) for group in drift.groups[:2])
    if drift.slot == TAKEN_GRADIENT:
        return _gradient(parameters, drift)
    if drift.stage == LEFT:
        return RankCause.OTHER_STEP, f"after the step of the optimizer, {parted} differ", ()
    if drift.stage == STATE:
        return RankCause.OTHER_STATE, f"the optimizers of {parted} begin with different ones", ()
    before = [m for m in drift.parameter.stepped if m.step < drift.step]
    changed = [
        rank
        for rank in drift.ranks
        if before
        and _known(parameters, before[-1], "output.param", rank)
        != _known(parameters, drift.moment, drift.slot, rank)
    ]
    if changed and len(changed) < len(drift.ranks):
        words = f"changed on {in_words(changed)} between the steps of the optimizer"
        return RankCause.CHANGED, words, ()
    if drift.moment.step == 0 or drift.moment == next(iter(drift.parameter.read), None):
        return (
            RankCause.OTHER_START,
            f"{in_words(drift.ranks)} start from different values",
            (_broadcasts(parameters, drift.ranks),),
        )
    if not drift.parameter.stepped:
        words = f"each of {in_words(drift.ranks)} keeps its own: neither broadcast nor reduced"
        return RankCause.NOT_SYNCHRONISED, words, ()
    return (
        RankCause.CHANGED,
        f"{parted}: they became different between two steps of the optimizer",
        (),
    )


def _known(parameters: Parameters, moment: Moment, slot: str, rank: int) -> Print | None:
    return parameters.calls.prints(moment, slot).get(rank)


def _broadcasts(parameters: Parameters, ranks: tuple[int, ...]) -> str:
    early = [c for r in ranks for c in parameters.calls.collectives.get(r, ()) if c.step < 0]
    if not early:
        return "no broadcast was recorded before the first step"
    sent = sum(c.kind == CollectiveKind.BROADCAST and set(ranks) <= set(c.ranks) for c in early)
    return f"{sent} broadcasts over {in_words(ranks)} were recorded before the first step"


def _gradient(parameters: Parameters, drift: _Drift) -> tuple[RankCause, str, tuple[str, ...]]:
    exchanged = _exchanged(parameters, drift)
    reduced = _reduced(parameters, drift)
    if exchanged:
        return RankCause.MIXED_UP, exchanged, reduced
    several = [group for group in drift.groups if len(group) > 1]
    if len(several) > 1:
        groups = " and over ".join(in_words(group) for group in several)
        return RankCause.OTHER_GROUP, f"it is reduced over {groups} apart", reduced
    if several:
        alone = [rank for group in drift.groups if len(group) == 1 for rank in group]
        words = f"{in_words(alone)} {'has' if len(alone) == 1 else 'have'} another one than "
        return RankCause.NOT_REDUCED, words + in_words(several[0]), reduced
    words = f"each of {in_words(drift.ranks)} takes its own: it is not reduced over them"
    return RankCause.NOT_REDUCED, words, reduced


def _exchanged(parameters: Parameters, drift: _Drift) -> str:
    """A sentence if one rank uses, for another parameter, the gradient that others use for this
    one; else "".
    """
    prints = parameters.calls.prints(drift.moment, drift.slot)
    for other in parameters.all:
        for moment in other.stepped:
            if moment.step != drift.step or other is drift.parameter:
                continue
            other_prints = parameters.calls.prints(moment, drift.slot)
            for one in drift.ranks:
                for another in drift.ranks:
                    if one != another and one in prints and another in other_prints:
                        a, b = prints[one], other_prints[another]
                        if a.text == b.text and not a.constant:
                            return (
                                f"what rank {one} takes for it, rank {another} takes for that of "
                                f"{other.full_name}: they are reduced in another order"
                            )
    return ""


def _reduced(parameters: Parameters, drift: _Drift) -> tuple[str, ...]:
    """Evidence: the number of each rank's reductions in the step, outside of forward passes."""
    counts: dict[int, int] = {}
    for rank in drift.ranks:
        counts[rank] = sum(
            c.kind in _REDUCING
            and c.step == drift.step
            and c.phase != "forward"
            and set(drift.ranks) <= set(c.ranks)
            for c in parameters.calls.collectives.get(rank, ())
        )
    if not any(counts.values()):
        whole = in_words(drift.ranks)
        return (f"nothing is reduced over all of {whole} after the forward pass of this step",)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        return (f"reductions in this step: {listed}",)
    return ()
