"""The answer on a terminal: first the answer, then the evidence, then the counts, within a
screen.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.records.marks import OBSERVER
from whence.records.slots import input_name, is_input, is_inside
from whence.report import generation, origin
from whence.report import occurrences as counts
from whence.report.tables import AT_LINE, clean, count, folded, from_here
from whence.results import (
    TENSOR_RULE,
    CauseKind,
    Comparison,
    Confidence,
    Declared,
    Evidence,
    Finding,
    Status,
    VerdictKind,
)

LEFT = 19
_MOST_FINDINGS = 5
CAUSES: dict[str, str] = {
    CauseKind.PARAMETER: "the parameters differ",
    CauseKind.KERNEL: "the kernel computes something else than its code says",
    CauseKind.SEMANTIC: "the code computes something else",
    CauseKind.STRUCTURAL: "the structure differs",
    CauseKind.INPUT: "it was given something else",
}


def answer(
    result: Comparison, *, output: str = "", occurrences: bool = False, width: int | None = None
) -> str:
    """The whole answer as text. output: where the files were written, shown last. occurrences: the
    whole table of them.

    width: of the terminal, at which lines are broken between words; None leaves them long.
    """
    # Differing inputs come before everything: nothing further down means much then.
    lines = [
        _row("INPUTS DIFFER" if i == 0 else "", clean(sentence))
        for i, sentence in enumerate(result.inputs_differ[:3])
    ]
    if len(result.inputs_differ) > 3:
        lines.append(_row("", f"and {count(len(result.inputs_differ) - 3)} more"))
    lines += [
        _row("PROGRAMS" if i == 0 else "", clean(line)) for i, line in enumerate(result.programs)
    ]
    lines += _head(result)
    for i, finding in enumerate(result.findings[:_MOST_FINDINGS]):
        lines += _finding(finding, result, first=i == 0)
    if len(result.findings) > _MOST_FINDINGS:
        lines.append(
            _row("", f"{count(len(result.findings) - _MOST_FINDINGS)} more in report.json")
        )
    lines += _remarks(result)
    for item in result.declared:
        lines += _declared(item)
    if (
        result.origin is not None
        and result.findings
        and result.origin.steps[-1].name == result.findings[0].name
    ):
        lines += [
            _row(left, right) for left, right in origin.about(result.origin) if left != "  inputs"
        ]
    lines += [_row(left, right) for left, right in counts.lines(result, every=occurrences)]
    lines += [_row(left, right) for left, right in generation.lines(result)]
    if result.generation is None or not result.generation.logits_only:
        lines += [
            *_evidence(result),
            *_observed(result),
            *_repetition(result),
            *_third(result),
            _counts(result),
        ]
    lines += [_row("  aligned", clean(note)) for note in result.plan.notes[:6]]
    for side, names in result.without_partner.items():
        more = f" and {count(len(names) - 4)} more" if len(names) > 4 else ""
        lines.append(
            _row(
                "  ambiguous" if side == "ambiguous" else f"  only {side}",
                ", ".join(clean(n) for n in names[:4]) + more,
            )
        )
    lines += [
        _row("  nearest", f"{clean(n.name)}: {clean(n.candidate)} ({clean(n.why)})")
        for n in result.nearest[:3]
    ]
    notes = [note for note in result.notes if OBSERVER not in note]
    for note in (*result.environment[:6], *notes[:6]):
        lines.append(f"note: {clean(note)}")
    if output:
        lines.append(written_to(result, output))
    return folded("\n".join(lines), width, LEFT) + "\n"


def written_to(result: Comparison, output: str) -> str:
    """The line that says where the files of a comparison lie."""
    tokens = ", generation.csv" if result.generation is not None else ""
    return f"written to {clean(output)}: summary.json, report.csv, report.json{tokens}"


def headline(result: Comparison) -> str:
    """The answer in one sentence."""
    if result.findings and result.status == Status.DIFFERENT:
        first = result.findings[0]
        cause = CAUSES.get(first.cause, "")
        more = (
            f"; {count(len(result.findings) - 1, 'more finding')}"
            if len(result.findings) > 1
            else ""
        )
        said = f"{first.cause}: {cause}" if cause else f"{first.verdict}"
        return (
            f"{first.name} ({first.op_type}), step {first.step}, rank {first.rank}: {said} "
            f"({first.confidence}){more}"
        )
    return next(iter(_head(result)), "")[LEFT:].strip() or result.status


def _head(result: Comparison) -> Iterator[str]:
    if result.status == Status.SAME:
        exact = set(result.counts) <= {VerdictKind.IDENTICAL}
        yield _row(
            "SAME",
            "bitwise identical" if exact else f"no fault: every difference is {same_words(result)}",
        )
    elif result.status == Status.UNDECIDED:
        yield _row("UNDECIDED", clean(result.headline))
    elif result.headline:
        yield _row("DIFFERENT", clean(result.headline))


def same_words(result: Comparison) -> str:
    """What every difference of two runs without a fault is."""
    dtypes = next((e for e in result.environment if "parameter_dtypes" in e), "")
    names = dtypes.rpartition("parameter_dtypes ")[2]
    losses = max(
        result.counts.get(VerdictKind.PRECISION, 0)
        - sum(d.calls for d in result.declared if not d.declared),
        0,
    )
    text = f"rounding ({clean(names)})" if names else "rounding"
    text += (
        " or within the reference's own run-to-run spread"
        if result.repetition and result.repetition.largest
        else ""
    )
    if any(d.declared for d in result.declared):
        text += " or declared"
    if any(not d.declared for d in result.declared):
        text += " or the loss of quantised layers"
    return text + (f"; {count(losses, 'call')} with a low-precision intermediate" if losses else "")


def _finding(finding: Finding, result: Comparison, *, first: bool) -> Iterator[str]:
    title = ("FIRST FAULT" if len(result.findings) > 1 else "FAULT") if first else "also"
    call = f"{clean(finding.op_type)}" + (f" #{finding.occurrence}" if finding.occurrence else "")
    where = f"step {finding.step}, rank {finding.rank}"
    if finding.phase:
        where += f", {clean(finding.phase)}"
    if finding.side == "reference":
        where += ", in the reference"
    slot = finding.slot
    if is_inside(slot) and finding.operator:
        slot = (
            "its "
            f"{finding.operator.split('.')[1] if finding.operator.count('.') > 1 else finding.operator}"  # noqa: E501
        )
    yield _row(title, "   ".join(x for x in (clean(finding.name), call, clean(slot), where) if x))
    cause = CAUSES.get(finding.cause, "")
    if cause:
        yield _row("  cause", f"{finding.cause}: {cause} ({finding.confidence})")
    else:
        yield _row("  verdict", f"{finding.verdict} ({finding.confidence})")
    yield _row("  evidence", clean(finding.sentence))
    if AT_LINE.search(finding.source):
        yield _row("  called at", clean(from_here(finding.source)))
    numbers = finding.numbers
    e_in, e_out = numbers.get("e_in"), numbers.get("e_out")
    if (
        first
        and e_in is not None
        and e_out is not None
        and finding.verdict != VerdictKind.PARAM_DIFF
    ):
        absent = _absent(finding, result)
        inputs = (
            absent
            if absent and e_in == 0
            else ("bitwise equal" if e_in == 0 else f"rel_l2 {e_in:.2g}")
        )
        yield _row("  inputs", f"{inputs}; {absent}" if absent and e_in != 0 else inputs)
        floor = numbers.get("floor_rel")
        budget = f"  own rounding {floor:.2g}" if floor is not None else ""
        yield _row("  output", f"rel_l2 {e_out:.2g}{budget}")
    ratio, own, strays = (
        numbers.get(f"third_{n}") for n in ("ratio", "reference_err", "target_err")
    )
    if first and ratio is not None and own is not None and strays is not None:
        yield _row(
            "  three-way",
            f"target is off by rel_l2 {strays:.2g}, the reference by {own:.2g}: {ratio:.3g} times",
        )
    a, b = finding.worst_reference, finding.worst_target
    if first and finding.worst_index is not None and a is not None and b is not None:
        yield _row(
            "  worst element", f"{list(finding.worst_index)}   reference {a:.6g}   target {b:.6g}"
        )
    if finding.also:
        names = ", ".join(clean(n) for n in finding.also[:4])
        yield _row(
            "  also in",
            names + (f" and {count(len(finding.also) - 4)} more" if len(finding.also) > 4 else ""),
        )


_REMARKS: dict[str, str] = {VerdictKind.PRECISION: "PRECISION", Confidence.SUSPECT: "SUSPECT"}
_COUNTED: dict[str, str] = {
    VerdictKind.PRECISION: "passes, but for --strict: more than rounding",
    Confidence.SUSPECT: "passes, but for --strict: close to its limit",
}


def _remarks(result: Comparison) -> Iterator[str]:
    """What --strict counts, by name; the loss of quantised layers has rows of its own."""
    quantised = {name for item in result.declared if not item.declared for name in item.names}
    left = [
        r
        for r in result.remarks
        if r.kind != VerdictKind.PRECISION or not {r.name, *r.also} <= quantised
    ]
    for remark in left[:_MOST_FINDINGS]:
        where = f"step {remark.step}, rank {remark.rank}"
        yield _row(
            _REMARKS[remark.kind], "   ".join((clean(remark.name), clean(remark.op_type), where))
        )
        yield _row(
            "  counts as", _COUNTED[remark.kind] if result.status == Status.SAME else remark.kind
        )
        yield _row("  evidence", clean(remark.sentence))
        if AT_LINE.search(remark.source):
            yield _row("  called at", clean(from_here(remark.source)))
        if remark.also:
            names = ", ".join(clean(n) for n in remark.also[:4])
            yield _row(
                "  also in",
                names
                + (f" and {count(len(remark.also) - 4)} more" if len(remark.also) > 4 else ""),
            )
    if len(left) > _MOST_FINDINGS:
        yield _row("", f"{count(len(left) - _MOST_FINDINGS)} more in report.json (remarks)")


def _declared(item: Declared) -> Iterator[str]:
    calls = count(item.calls, f"{'/'.join(clean(o) for o in item.op_types[:3])} call")
    worst = (
        f": SQNR from {item.sqnr_db:.1f} dB, worst {clean(item.worst)}"
        if item.sqnr_db is not None
        else ""
    )
    if item.ignored:
        names = ", ".join(clean(n) for n in item.names[:4]) + (
            f" and {count(len(item.names) - 4)} more" if len(item.names) > 4 else ""
        )
        yield _row("IGNORED", f"{calls}, as declared: {names}")
    elif item.declared:
        yield _row("DECLARED", f"{calls}, {clean(item.what)}{worst}")
    else:
        layers = count(
            len(item.names), f"quantised {'/'.join(clean(o) for o in item.op_types[:3])} layer"
        )
        yield _row("PRECISION LOSS", f"{layers}, not declared: {clean(item.what)}{worst}")
        yield _row("  to declare it", f"--policy FILE.yaml with   {clean(item.snippet)}")
    if item.reason:
        yield _row("  because", clean(item.reason))


def _absent(finding: Finding, result: Comparison) -> str:
    """Which inputs only one side's call has, in words; what they share may be equal, what they were
    asked is not.
    """
    if (
        not 0 <= finding.pair < len(result.plan.pairs)
        or result.plan.pairs[finding.pair].rule == TENSOR_RULE
    ):
        return ""
    pair = result.plan.pairs[finding.pair]
    sides = (
        (pair.only_reference, "not passed in the target"),
        (pair.only_target, "passed only in the target"),
    )
    said = []
    for slots, words in sides:
        names = [f"`{clean(input_name(s))}`" for s in slots if is_input(s)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(
                f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} {words}"
            )
    return "; ".join(said)


_BLIND: dict[str, str] = {
    Evidence.TWO_DUMPS: "errors below 5 times what came in",
    Evidence.STATISTICS: "errors that leave min, max, mean and norm alone",
    Evidence.THREE_WAY: "errors below 5 times the reference's own",
    Evidence.TEXT: "differences below the printed digits",
}


def rests_on(result: Comparison) -> str:
    """What the answer rests on and could not have seen, "" where nothing was judged."""
    c = result.coverage
    measured = f"{c.share:.0%} of {count(c.calls, 'call')} measured"
    if result.evidence == Evidence.REPLAY:
        inside = (
            f", {count(c.inside)} of them inside calls that the target shows as one"
            if c.inside
            else ""
        )
        rest = (
            ""
            if c.replayed >= c.paired + c.inside
            else f", {_beside(result)}two dumps for the rest"
        )
        return (
            f"replay of {count(c.replayed)} of "
            f"{count(c.paired + c.inside, 'call')}{inside}{rest}; {measured}"
        )
    if not result.evidence:
        return ""
    hides = result.evidence == Evidence.TEXT or set(result.counts) != {VerdictKind.IDENTICAL}
    blind = _BLIND.get(result.evidence, "") if result.status == Status.SAME and hides else ""
    return f"{result.evidence}; {measured}" + (f"; could not have seen {blind}" if blind else "")


def _evidence(result: Comparison) -> Iterator[str]:
    if said := rests_on(result):
        yield _row("  rests on", said)


def _observed(result: Comparison) -> Iterator[str]:
    """By how much the capture of each side changed what it saw, where that was measured."""
    for note in result.notes:
        side, found, words = note.partition(OBSERVER)
        if found:
            yield _row("  observer effect", clean(f"{side}{words}"))


def _repetition(result: Comparison) -> Iterator[str]:
    again = result.repetition
    if again is None:
        return
    runs = count(len(again.runs), "further run")
    if again.calls:
        more = f" and {count(len(again.names) - 4)} more" if len(again.names) > 4 else ""
        names = ", ".join(
            f"{clean(n)} ({clean(t)})" for n, t in list(zip(again.names, again.op_types))[:4]
        )
        calls = f"{count(again.calls, 'call')}; first {names}{more}"
        yield _row(
            "  nondeterministic",
            f"{calls}; there the reference parts from itself by rel_l2 {again.own:.2g} ({runs})",
        )
    elif again.largest:
        yield _row(
            "  nondeterministic",
            f"no call on equal inputs, yet tensors part by rel_l2 {again.largest:.2g} ({runs})",
        )
    else:
        yield _row("  nondeterministic", f"nothing: {runs} bitwise equal to the reference")


def _beside(result: Comparison) -> str:
    regions = sum(v.evidence == Evidence.THREE_WAY for v in result.verdicts)
    return f"the third run for {count(regions, 'region')}, " if regions else ""


def _third(result: Comparison) -> Iterator[str]:
    third = result.third
    if third is None:
        return
    if not third.calls:
        exact = set(result.counts) <= {VerdictKind.IDENTICAL}
        yield _row(
            "  third run",
            "not needed: nothing differs"
            if exact
            else f"no differing call could be measured against {clean(third.run)}",
        )
        return
    mine, theirs = third.target_err, third.reference_err
    if mine is not None and theirs is not None:
        words = (
            "closer to"
            if mine < 0.95 * theirs
            else "further from"
            if mine > theirs / 0.95
            else "as close to"
        )
        than = "as" if words == "as close to" else "than"
        overlap = (
            f"; overlap of the errors {third.overlap:.0%}" if third.overlap is not None else ""
        )
        sizes = f"rel_l2 {mine:.2g} against {theirs:.2g}{overlap}"
        yield _row(
            "  third run",
            f"at the model's output the target is {words} {clean(third.run)} {than} the "
            f"reference: {sizes}",
        )
    name = f" ({clean(third.name)})" if third.name else ""
    yield _row(
        "  error ratio",
        f"target / reference, median {third.median:.3g}, largest {third.worst:.3g}{name}; "
        f"target closer in {count(third.closer)} of {count(third.calls, 'differing region')}",
    )


def _counts(result: Comparison) -> str:
    parts = [f"{count(result.counts[v])} {v}" for v in VerdictKind if result.counts.get(v)]
    tail = f"; {count(result.unmatched)} unmatched, {count(result.incomparable)} incomparable"
    return (
        f"{count(result.coverage.paired)} of {count(result.coverage.calls, 'call')} paired: "
        f"{', '.join(parts) or 'none'}{tail}"
    )


def _row(left: str, right: str) -> str:
    return f"{left:<{LEFT}}{right}"
