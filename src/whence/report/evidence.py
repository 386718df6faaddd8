"""Describes what an answer is based on: its evidence and the further runs."""

from __future__ import annotations

from whence.records.marks import OBSERVER
from whence.records.slots import is_inside, is_of_child
from whence.report.document import Document
from whence.report.tables import clean, count, listed
from whence.results import Comparison, Confidence, Coverage, Evidence, Finding, Status, VerdictKind

_BLIND: dict[str, str] = {
    Evidence.TWO_DUMPS: "errors below 5 times what came in",
    Evidence.STATISTICS: "errors that leave min, max, mean and norm alone",
    Evidence.THREE_WAY: "errors below 3 times the reference's own",
    Evidence.TEXT: "differences below the printed digits",
}

_RARE = 1e-3
"""Chance below which a finding is called rare."""


def part_of_call(finding: Finding) -> str:
    """The part of the call that a finding is about: a slot, or an operator in the call's own
    code.
    """
    parts = finding.operator.split(".")
    operator = parts[1] if len(parts) > 2 else finding.operator
    if is_inside(finding.slot) and operator:
        return f"its {operator}"
    if is_of_child(finding.slot):
        return f"its own code ({operator})" if operator else "its own code"
    return finding.slot


def basis(result: Comparison) -> str:
    """What the answer is based on and what it could not have seen; "" where nothing was judged."""
    c = result.coverage
    measured = _measured(c, "all", "all")
    if result.evidence == Evidence.REPLAY:
        every = c.paired + c.inside
        inside = (
            f", {count(c.inside)} of them inside calls that the target shows as one"
            if c.inside
            else ""
        )
        if c.replayed == every == c.calls and measured == "all measured":
            return f"{_all(every)} replayed and measured{inside}"
        regions = sum(v.evidence == Evidence.THREE_WAY for v in result.verdicts)
        third = f"the third run for {count(regions, 'region')}, " if regions else ""
        dumps = f", {third}two dumps for the rest" if c.replayed < every else ""
        replayed = (
            f"{_all(every)} replayed"
            if c.replayed == every
            else f"{count(c.replayed)} of {count(every, 'call')} replayed"
        )
        return f"{replayed}{inside}{dumps}; {measured}"
    if not result.evidence:
        return ""
    if result.evidence == Evidence.PROGRAM and result.status == Status.SAME:
        return _BASES[Evidence.PROGRAM]
    hides = result.evidence == Evidence.TEXT or set(result.counts) != {VerdictKind.IDENTICAL}
    blind = _BLIND.get(result.evidence, "") if result.status == Status.SAME and hides else ""
    if result.counts and set(result.counts) == {VerdictKind.IDENTICAL} and not hides:
        if c.covered:
            return f"{count(c.measured, 'call')} compared bit by bit; {measured}"
        return f"{_all(c.measured)} compared bit by bit"
    calls = _measured(c, _all(c.calls), count(c.calls, "call"))
    text = f"{_BASES.get(result.evidence, result.evidence)}; {calls}"
    return text + (f"; could not have seen {blind}" if blind else "")


def _measured(coverage: Coverage, every: str, calls: str) -> str:
    """The share of all calls that was measured, in words."""
    share = every if coverage.seen >= coverage.calls else f"{coverage.share:.0%} of {calls}"
    through = count(coverage.covered, "call") if coverage.covered else ""
    return f"{share} measured" + (f", {through} through what they lead to" if through else "")


def _all(calls: int) -> str:
    return f"all {count(calls, 'call')}" if calls != 1 else "the only call"


_BASES: dict[str, str] = {
    Evidence.TWO_DUMPS: "the two dumps alone, nothing was replayed",
    Evidence.STATISTICS: "statistics alone, no elements",
    Evidence.TEXT: "printed text alone",
    Evidence.PROGRAM: "the programs alone, nothing was run",
    Evidence.THREE_WAY: "both runs against the third, nothing was replayed",
}


def lines(result: Comparison) -> Document:
    """The fields of an answer that state its evidence."""
    if text := basis(result):
        sure = f"{confidence(result.findings[0])}: " if says_how_sure(result) else ""
        yield "  how sure", f"{sure}{text}"
    if result.status == Status.SAME:
        yield "  would have seen", visible(result)
    if (drawn := result.random_numbers) is not None:
        where = f"first in {drawn.name} ({drawn.op_type}), step {drawn.step}"
        text = f"differ in {count(drawn.calls, 'call')}, {where}, rank {drawn.rank}"
        yield "  random numbers", f"{text}; replays take the target's"
    for note in result.notes:  # how much a capture changed the results it captured
        side, is_effect, words = note.partition(OBSERVER)
        if is_effect:
            yield "  observer effect", f"{side}{words}"
    yield from _repetition(result)
    yield from _third(result)


def says_how_sure(result: Comparison) -> bool:
    """Whether the answer has a line of its own on the certainty of the first finding."""
    alone = result.generation is not None and result.generation.logits_only
    return bool(result.findings) and result.status == Status.DIFFERENT and not alone


def confidence(finding: Finding) -> str:
    """The certainty of a finding, in words."""
    return f"{finding.confidence}{chance(finding)}"


def chance(finding: Finding) -> str:
    """In how many comparisons of correct targets rounding would reach this far, in words; "" where
    the finding is not based on it, or is certain anyway.
    """
    rare = finding.numbers.get("chance")
    if rare is None or rare > _RARE or finding.confidence == Confidence.CERTAIN:
        return ""
    if rare < 1e-9:
        return "; by rounding alone less than once in a billion comparisons"
    return f"; by rounding alone once in {count(round(1 / rare))} comparisons"


def visible(result: Comparison) -> str:
    """A sentence on how large a fault must be to be named; "" where that is unknown."""
    sizes = {(v.evidence, v.kind): v for v in result.visible}
    parts = []
    for evidence in (Evidence.REPLAY, Evidence.TWO_DUMPS):
        scale, element = sizes.get((evidence, "scale")), sizes.get((evidence, "element"))
        if scale is None:
            continue
        calls = count(scale.calls, "call")
        if evidence == Evidence.TWO_DUMPS and result.evidence == Evidence.REPLAY:
            calls += " without replay"
        text = (
            f"a scale error above {_percent(scale.median)} (median of {calls}; "
            f"{_percent(scale.largest)} at most, {clean(scale.name) or 'the root'})"
        )
        if element is not None:
            largest = f"{_percent(element.largest)} at most"
            text += f", one element off by {_percent(element.median)} of the rms ({largest})"
        parts.append(text)
    return "; ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _repetition(result: Comparison) -> Document:
    repetition = result.repetition
    if repetition is None:
        return
    runs = count(len(repetition.runs), "further run")
    if repetition.calls:
        called = [f"{n} ({t})" for n, t in zip(repetition.names, repetition.op_types)]
        calls = f"{count(repetition.calls, 'call')}; first {listed(called, 4)}"
        spread = f"there the reference differs from itself by rel_l2 {repetition.own:.2g}"
        text = f"{calls}; {spread} ({runs})"
    elif repetition.largest:
        largest = f"tensors part by rel_l2 {repetition.largest:.2g}"
        text = f"no call on equal inputs, yet {largest} ({runs})"
    else:
        text = f"nothing: {runs} bitwise equal to the reference"
    yield "  nondeterministic", text


def _third(result: Comparison) -> Document:
    third = result.third
    if third is None:
        return
    if not third.calls:
        exact = set(result.counts) <= {VerdictKind.IDENTICAL}
        unmeasured = f"no differing call could be measured against {third.run}"
        yield "  third run", "not needed: nothing differs" if exact else unmeasured
        return
    target, reference = third.target_err, third.reference_err
    if target is not None and reference is not None:
        words, than = "as close to", "as"
        if target < 0.95 * reference:
            words, than = "closer to", "than"
        elif target > reference / 0.95:
            words, than = "further from", "than"
        overlap = (
            f"; overlap of the errors {third.overlap:.0%}" if third.overlap is not None else ""
        )
        sizes = f"rel_l2 {target:.2g} against {reference:.2g}{overlap}"
        yield (
            "  third run",
            f"at the model's output the target is {words} {third.run} {than} the "
            f"reference: {sizes}",
        )
    name = f" ({clean(third.name)})" if third.name else ""
    yield (
        "  error ratio",
        f"target / reference, median {third.median:.3g}, largest {third.worst:.3g}{name}; "
        f"target closer in {count(third.closer)} of {count(third.calls, 'differing region')}",
    )
