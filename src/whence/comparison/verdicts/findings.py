"""From verdicts to findings: an operator is at fault when it introduces an error and nothing it
depends on did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from whence.frameworks.operator_names import base_name
from whence.records import Call, Region
from whence.records.marks import Mark, has_mark
from whence.records.region import outwards
from whence.records.slots import param_name
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Remark,
    Verdict,
    VerdictKind,
)


class Judged(NamedTuple):
    """A region of the reference with its verdict. downstream: it depends on a guilty region."""

    region: Region
    verdict: Verdict
    downstream: bool


def order_and_taint(
    calls: Sequence[Call],
    regions: Sequence[Region],
    verdicts: Mapping[tuple[int, int], Verdict],
    unseen: Collection[int] = (),
) -> list[Judged]:
    """The judged regions in execution order, each with whether blame follows the data flow to it.

    verdicts: by (call id, stretch). A record is tainted if a guilty region, or one that read a
    tainted record, wrote it. All later steps of a root are tainted too, since a generated token is
    chosen from its outputs. unseen: ids of calls whose inputs are not known; they may depend on all
    earlier tensors of their root.
    """
    tainted: set[int] = set()
    step_tainted: dict[str, int] = {}
    root_tainted: set[tuple[int, str]] = set()
    sees_tainted: set[int] = set()  # containers: what one stretch sees, those after it see too
    out: list[Judged] = []
    for region in _with_wholes(regions, verdicts):
        call = calls[region.call]
        verdict = verdicts.get((region.call, region.stretch))
        downstream = region.call in sees_tainted or any(
            record in tainted for record in region.inputs
        )
        if downstream and region.stretch >= 0:
            sees_tainted.add(region.call)
        since = step_tainted.get(call.root)
        if since is not None and call.step > since:
            downstream = True
        if call.id in unseen and (call.rank, call.root) in root_tainted:
            downstream = True
        if verdict is not None:
            out.append(Judged(region, verdict, downstream))
        if downstream or (
            verdict is not None
            and verdict.verdict in GUILTY
            and verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY)
        ):
            # All steps share parameters: reading a wrong one taints outputs, not the parameter.
            tainted.update(region.outputs)
            step_tainted.setdefault(call.root, call.step)
            root_tainted.add((call.rank, call.root))
    return out


def _with_wholes(
    regions: Sequence[Region], verdicts: Mapping[tuple[int, int], Verdict]
) -> Iterator[Region]:
    """The regions, and after the last stretch of a container that also has a verdict as a whole (a
    label whose name is a prefix of others), the container itself, so that no verdict is lost.
    """
    last = {region.call: place for place, region in enumerate(regions)}
    for place, region in enumerate(regions):
        yield region
        if region.stretch >= 0 and last[region.call] == place and (region.call, -1) in verdicts:
            yield region._replace(stretch=-1)


def findings(
    judged: Sequence[Judged], calls: Sequence[Call], plan: Plan, starred: Callable[[str], str]
) -> list[Finding]:
    """The operators at fault, most upstream first.

    A region is at fault if its verdict is guilty and it is not downstream of a guilty one, or if a
    replay on the target's own inputs proves that it adds an error of its own. Any other guilty
    verdict from two dumps is a consequence. Calls of one module in several steps, siblings whose
    names differ in numbers only, and modules of one type with the same reason (an eps that every
    norm got) form one finding.
    """
    groups: dict[tuple[str, ...], list[Judged]] = {}
    wrong = {
        (j.region.call, _parameter(j, calls))
        for j in judged
        if j.verdict.verdict == VerdictKind.PARAM_DIFF
    }
    for item in judged:
        verdict = item.verdict
        if verdict.verdict not in GUILTY or not verdict.confidence:
            continue
        is_proven = verdict.evidence == Evidence.REPLAY or verdict.verdict == VerdictKind.PARAM_DIFF
        if (item.downstream and not is_proven) or (
            verdict.verdict == VerdictKind.PARAM_DIFF and _said_above(item, calls, wrong)
        ):
            continue
        call = calls[item.region.call]
        key = (starred(call.scope), call.op_type, str(item.region.stretch))
        groups.setdefault(key, []).append(item)
    ranked = []
    for members in _joined_by_reason(groups, calls):
        upstream = [m for m in members if not m.downstream]
        by_growth = _from_dumps(members) and not _labels(members, calls)
        chosen = max(upstream or members, key=_weight) if by_growth else (upstream or members)[0]
        ranked.append((not upstream, _order(chosen, calls), members, chosen))
    dumps_only = all(
        _from_dumps(members) and not _labels(members, calls) for _, _, members, _ in ranked
    )
    # With replay, the first finding in execution order comes first; from two dumps alone, the one
    # with the largest growth. Labels, which the user placed, stay in execution order.
    ranked.sort(key=lambda r: (r[0], -_weight(r[3]) if dumps_only else 0.0, r[1]))
    return [_finding(chosen, members, calls, plan) for _, _, members, chosen in ranked]


def _joined_by_reason(
    groups: Mapping[tuple[str, ...], list[Judged]], calls: Sequence[Call]
) -> list[list[Judged]]:
    """The groups, with those of one module type and the same reason merged; members are in
    execution order.
    """
    joined: dict[tuple[str, ...], list[Judged]] = {}
    for key, members in groups.items():
        reason = next((m.verdict.reason for m in members if _is_other_code(m)), "")
        joined.setdefault((key[1], reason) if reason else key, []).extend(members)
    return [sorted(members, key=lambda m: _order(m, calls)) for members in joined.values()]


def _is_other_code(item: Judged) -> bool:
    return item.verdict.cause == CauseKind.SEMANTIC


def remarks(
    judged: Sequence[Judged],
    calls: Sequence[Call],
    findings: Sequence[Finding],
    starred: Callable[[str], str],
) -> list[Remark]:
    """Remarks, which count only with `strict`, in execution order: precision losses, passes close
    to their limit, and different code without an effect here.
    """
    named = {name for f in findings for name in (f.name, *f.also)}
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for item in judged:
        verdict, kind = item.verdict, _kind_of_remark(item.verdict)
        if not kind or (verdict.verdict in GUILTY and _name(item, calls) in named):
            continue
        call = calls[item.region.call]
        groups.setdefault(
            (kind, starred(call.scope), call.op_type, str(item.region.stretch)), []
        ).append(item)
    out = []
    for (kind, *_), members in groups.items():
        first = members[0]
        call, verdict = calls[first.region.call], first.verdict
        names = list(dict.fromkeys(_name(m, calls) for m in members))
        where = (
            f"{between(first.region, calls)}: "
            if first.region.stretch >= 0 and not verdict.where
            else ""
        )
        out.append(
            Remark(
                kind,
                names[0],
                call.op_type,
                call.step,
                call.rank,
                verdict.evidence,
                f"{where}{verdict.sentence}",
                verdict.score,
                call.root,
                verdict.source or call.source,
                tuple(names[1:]),
                verdict.pair,
            )
        )
    return out


def _kind_of_remark(verdict: Verdict) -> str:
    if verdict.confidence == Confidence.SUSPECT and verdict.cause == CauseKind.SEMANTIC:
        return CauseKind.SEMANTIC
    if verdict.verdict in (VerdictKind.PRECISION, VerdictKind.OTHER_FORM):
        return verdict.verdict
    return Confidence.SUSPECT if verdict.confidence == Confidence.SUSPECT else ""


def _parameter(item: Judged, calls: Sequence[Call]) -> int:
    """The record of a verdict's parameter, -1 if it is no parameter of the call itself."""
    refs = calls[item.region.call].slots("param")
    return next((r.record for r in refs if item.verdict.slot in (r.slot, param_name(r.slot))), -1)


def _said_above(item: Judged, calls: Sequence[Call], wrong: Collection[tuple[int, int]]) -> bool:
    """Whether a call around this one is already blamed for the same parameter. Dumps of modules and
    operators list it with both.
    """
    record, above = _parameter(item, calls), calls[item.region.call].parent
    return any((call.id, record) in wrong for call in outwards(calls, above))


def _from_dumps(members: Sequence[Judged]) -> bool:
    return all(
        m.verdict.evidence != Evidence.REPLAY and m.verdict.verdict == VerdictKind.INTRODUCED
        for m in members
    )


def _labels(members: Sequence[Judged], calls: Sequence[Call]) -> bool:
    return all(calls[m.region.call].kind == "label" for m in members)


def _weight(item: Judged) -> float:
    score = item.verdict.score
    return score if score is not None else math.inf


def _order(item: Judged, calls: Sequence[Call]) -> tuple[int, int, int]:
    call = calls[item.region.call]
    return (call.step, call.order, item.region.stretch)


def _finding(
    chosen: Judged, members: Sequence[Judged], calls: Sequence[Call], plan: Plan
) -> Finding:
    call, verdict = calls[chosen.region.call], chosen.verdict
    if verdict.named >= 0:
        call = calls[verdict.named]
    name = _name(chosen, calls)
    names = dict.fromkeys(_name(m, calls) for m in members)
    sentence = verdict.sentence
    # the name of an overload, not a dump's own name of an operator
    own = call.op if call.kind == "operator" and call.op.count(".") == 2 else ""
    if (
        chosen.region.stretch >= 0
        and "whole" not in verdict.numbers
        and not verdict.where
        and verdict.verdict != VerdictKind.PARAM_DIFF
    ):
        sentence = f"{between(chosen.region, calls)}: {sentence}"
    # A node of a cut graph is named after the last operator of its kernel.
    op_type = base_name(verdict.operator) if has_mark(call, Mark.NODE) else ""
    return Finding(
        name=name,
        op_type=op_type or call.op_type,
        cause=verdict.cause,
        verdict=verdict.verdict,
        confidence=verdict.confidence,
        step=call.step,
        rank=call.rank,
        evidence=verdict.evidence,
        numbers=verdict.numbers,
        sentence=sentence,
        root=call.root,
        occurrence=call.occurrence,
        slot=verdict.slot,
        source=verdict.source or call.source,
        also=tuple(n for n in names if n != name),
        pair=verdict.pair,
        operator=verdict.operator or own,
        side=verdict.side,
        phase=call.phase if call.phase != "forward" else "",
    )


def _name(item: Judged, calls: Sequence[Call]) -> str:
    return item.verdict.where or calls[item.region.call].name


def between(region: Region, calls: Sequence[Call]) -> str:
    """The place of a stretch in its container, e.g. "between self_attn and
    post_attention_layernorm", with names relative to the container.
    """
    above = calls[region.call].scope
    kids = [c for c in calls if c.parent == region.call]
    kids.sort(key=lambda c: c.order)
    short = [c.scope.removeprefix(f"{above}." if above else "") or c.op_type for c in kids]
    if region.stretch == 0:
        return f"before {short[0]}" if short else "in its own code"
    if region.stretch >= len(short):
        return f"after {short[-1]}"
    return f"between {short[region.stretch - 1]} and {short[region.stretch]}"
