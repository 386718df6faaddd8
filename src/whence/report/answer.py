"""The answer on a terminal: the answer first, then the evidence, then the counts, within a screen.

Executions of operators are counted too: the first that differs, and the first whose difference
rounding does not explain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

from whence.records import Lack
from whence.records.marks import OBSERVER
from whence.records.slots import input_name, is_drawn, is_input
from whence.report import effect, evidence, generation, origin
from whence.report.document import Document, few, text
from whence.report.tables import called_at, clean, count, listed, spaced, where
from whence.results import (
    TENSOR_RULE,
    CauseKind,
    Comparison,
    Confidence,
    Counted,
    Declared,
    Evidence,
    Finding,
    LayerCost,
    NotThere,
    Occurrence,
    Status,
    VerdictKind,
)

_MOST_FINDINGS = 5
_MOST_COSTS = 5
_MOST_MISSING = 5
_WORTH = 0.01  # share of the outputs' squared error from which on a layer is named
_SATURATED = 1e-3  # share of results beyond the largest code from which on it is shown
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
    """The whole answer as text. output: where the files were written, shown last. occurrences:
    include the whole table of executions.

    width: of the terminal; lines are broken between words. None leaves them unbroken.
    """
    return text(_answer(result, output, occurrences), width)


def _answer(result: Comparison, output: str, occurrences: bool) -> Document:
    logits_only = result.generation is not None and result.generation.logits_only
    # Differing inputs come first: everything after them then means little.
    yield "INPUTS DIFFER", few(result.inputs_differ, 3)
    yield "PROGRAMS", result.programs
    yield "TARGET'S RANKS", (finding.sentence for finding in result.ranks[:_MOST_FINDINGS])
    yield from _head(result)
    for i, finding in enumerate(result.findings[:_MOST_FINDINGS]):
        yield from _finding(finding, result, first=i == 0)
    yield _more(result.findings, "report.json")
    yield "  levels", result.levels
    yield from _remarks(result)
    for item in result.declared:
        yield from _declared(item)
    if result.status == Status.SAME:  # a fault costs more and changes the shares
        yield from _costs(result.layer_costs)
        if result.layer_costs and not all(item.declared for item in result.declared):
            yield "  to measure it", "whence recipe   runs the target again with layers in float"
    about = result.origin
    if about is not None and result.findings and about.steps[-1].name == result.findings[0].name:
        yield from origin.about(about)
    yield from _occurrences(result, every=occurrences)
    yield from generation.lines(result)
    if not logits_only:
        yield from evidence.lines(result)
    if result.effect is not None:
        yield "  at the outputs", effect.words(result.effect)
    yield from _missing(result.missing)
    # A line with words to fill in cannot be typed as it stands, so it must not look as if it could.
    yield (
        "  next",
        (
            ("# fill in: " if s.fill_in else "") + f"{s.command}   # {s.decides}"
            for s in result.next
        ),
    )
    if not logits_only:
        yield _counts(result)
    yield from (("  aligned", note) for note in result.plan.notes[:6])
    for side, names in result.without_partner.items():
        yield "  ambiguous" if side == "ambiguous" else f"  only {side}", listed(names, 4)
    for near in result.nearest[:3]:
        yield "  nearest", f"{near.name}: {near.candidate} ({near.why})"
    notes = [note for note in result.notes if OBSERVER not in note]
    yield from (f"note: {note}" for note in (*result.environment[:6], *notes[:6]))
    if output:
        yield written_to(result, output)


def _more(items: Sequence[object], where: str) -> tuple[str, str]:
    """Says how many more items there are than those shown."""
    more = len(items) - _MOST_FINDINGS
    return "", f"{count(more)} more in {where}" if more > 0 else ""


def _missing(missing: Sequence[NotThere]) -> Document:
    """Says what either run lacks, except what the user accepted. The line on the observer effect
    covers the effect of the capture.
    """
    missing = [one for one in missing if one.kind != Lack.WATCHED]
    for accepted, some in itertools.groupby(missing[:_MOST_MISSING], attrgetter("accepted")):
        texts = (
            f"{one.side}, {one.where}: {one.text}" if one.where else f"{one.side}: {one.text}"
            for one in some
        )
        yield "  leaves out" if accepted else "  missing", texts
    yield _more(missing, "summary.json (missing)")


def written_to(result: Comparison, output: str) -> str:
    """The line that says where the files of a comparison lie."""
    tokens = ", generation.csv" if result.generation is not None else ""
    layers = ", layers.csv" if result.layer_costs else ""
    return f"written to {clean(output)}: summary.json, report.csv, report.json{tokens}{layers}"


def cause_words(finding: Finding) -> str:
    """The cause of a finding in words, as far as it is known."""
    cause = CAUSES.get(finding.cause, "")
    return f"{finding.cause}: {cause}" if cause else str(finding.verdict)


def headline(result: Comparison) -> str:
    """The answer in one sentence."""
    if result.findings and result.status == Status.DIFFERENT:
        first = result.findings[0]
        others = len(result.findings) - 1
        tail = f"; {count(others, 'more finding')}" if others else ""
        kind = f" ({first.op_type})" if first.op_type != first.name else ""
        return (
            f"{first.name}{kind}, step {first.step}, rank {first.rank}: {cause_words(first)} "
            f"({first.confidence}){tail}"
        )
    return clean(next(iter(_head(result)), ("", ""))[1]) or result.status


def _head(result: Comparison) -> Iterator[tuple[str, str]]:
    if result.status == Status.SAME and result.evidence == Evidence.PROGRAM:
        yield "SAME", result.headline
    elif result.status == Status.SAME:
        same = f"no fault: every difference is {same_words(result)}"
        but = ", in what is there" if result.missing else ""
        if result.coverage.covered and is_bitwise(result):
            same = "no fault: bitwise identical in what both runs show"
        elif is_bitwise(result):
            same = "bitwise identical"
        yield "SAME", same + but
    elif result.status == Status.DIFFERENT:
        yield "DIFFERENT", result.headline
    else:
        yield "UNDECIDED", result.headline or "whence cannot tell"
    if result.status == Status.UNDECIDED and (undecided := result.undecided) is not None:
        name = undecided.name or undecided.root
        yield "  where", spaced(name, undecided.op_type, undecided.slot, where(undecided))
        yield "  called at", called_at(undecided.source)


def is_bitwise(result: Comparison) -> bool:
    """Whether every tensor is equal on both sides bit by bit."""
    return set(result.counts) <= {VerdictKind.IDENTICAL} and not result.alike


def same_words(result: Comparison) -> str:
    """The explanation of all differences between two runs without a fault."""
    text = _same_by_rounding(result)
    if not result.alike:
        return text
    first = result.alike[0]
    others = f" and {count(len(result.alike) - 1, 'more tensor')}" if len(result.alike) > 1 else ""
    return (
        f"{text}, but for {count(first.elements, 'element')} of {first.name} "
        f"{first.slot}{others}, counted as equal: {first.words}"
    )


def _same_by_rounding(result: Comparison) -> str:
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
    if result.random_numbers is not None:
        text += " or follows from other random numbers"
    if result.counts.get(VerdictKind.OTHER_FORM):
        text += " or another form of the same computation"
    if any(d.declared for d in result.declared):
        text += " or declared"
    if any(not d.declared for d in result.declared):
        text += " or the loss of quantised layers"
    return text + (f"; {count(losses, 'call')} with a low-precision intermediate" if losses else "")


def _finding(finding: Finding, result: Comparison, *, first: bool) -> Document:
    title = "also"
    if first:
        title = "FIRST FAULT" if len(result.findings) > 1 else "FAULT"
        title = title if result.status == Status.DIFFERENT else "SUSPECT"
    call = finding.op_type if finding.op_type != finding.name else ""
    call += f" #{finding.occurrence}" if finding.occurrence else ""
    yield title, spaced(finding.name, call, evidence.part_of_call(finding), _where(finding, result))
    yield "  called at", called_at(finding.source)
    yield "  printed at", ", ".join(finding.printed_at)
    sure = "" if first and evidence.says_how_sure(result) else f" ({evidence.confidence(finding)})"
    title = "  cause" if finding.cause in CAUSES else "  verdict"
    yield title, f"{cause_words(finding)}{sure}"
    yield "  evidence", finding.sentence
    if first:
        yield from _figures(finding, result)
    yield "  also in", listed(finding.also, 4)


def _where(finding: Finding, result: Comparison) -> str:
    words = f"step {finding.step}, rank {finding.rank}"
    if finding.phase:
        words += f", {finding.phase}"
    if finding.side == "reference":
        words += ", in the reference"
    models = result.effect.models if result.effect is not None else ()
    if finding.root in models[1:] and finding.name != finding.root:
        words += f", of {finding.root}"  # its path begins there, not in the largest model
    return words


def _figures(finding: Finding, result: Comparison) -> Document:
    """The measured figures of a finding."""
    numbers = finding.numbers
    e_in, e_out = numbers.get("e_in"), numbers.get("e_out")
    if e_in is not None and e_out is not None and finding.verdict != VerdictKind.PARAM_DIFF:
        absent = _absent(finding, result)
        equal = "" if absent else _equal_inputs(finding, result)
        size = f"rel_l2 {e_in:.2g}" if e_in else equal
        yield "  inputs", "; ".join(filter(None, (size, absent)))
        floor = numbers.get("floor_rel")
        budget = f", own rounding {floor:.2g}" if floor is not None else ""
        yield "  output", f"rel_l2 {e_out:.2g}{budget}"
    ratio, of_reference, of_target = (
        numbers.get(f"third_{n}") for n in ("ratio", "reference_err", "target_err")
    )
    if None not in (ratio, of_reference, of_target):
        yield (
            "  three-way",
            f"target is off by rel_l2 {of_target:.2g}, the reference by {of_reference:.2g}: "
            f"{ratio:.3g} times",
        )
    a, b = finding.worst_reference, finding.worst_target
    if finding.worst_index is not None and a is not None and b is not None:
        place = list(finding.worst_index)
        yield "  worst element", f"{place}   reference {a:.6g}   target {b:.6g}"


_REMARKS: dict[str, str] = {
    VerdictKind.PRECISION: "PRECISION",
    VerdictKind.OTHER_FORM: "OTHER FORM",
    Confidence.SUSPECT: "SUSPECT",
    CauseKind.SEMANTIC: "OTHER CODE",
}
_COUNTED: dict[str, str] = {
    VerdictKind.PRECISION: "passes, but for --strict: more than rounding",
    VerdictKind.OTHER_FORM: "passes: no fault of what the model computes",
    Confidence.SUSPECT: "passes, but for --strict: close to its limit",
    CauseKind.SEMANTIC: "passes, but for --strict: other constants, of hardly an effect here",
}


def _remarks(result: Comparison) -> Document:
    """Passing modules that deserve a look, by name; the loss of quantised layers has its own
    rows.
    """
    quantised = {name for item in result.declared if not item.declared for name in item.names}
    remarks = [
        r
        for r in result.remarks
        if r.kind != VerdictKind.PRECISION or not {r.name, *r.also} <= quantised
    ]
    for remark in remarks[:_MOST_FINDINGS]:
        yield _REMARKS[remark.kind], spaced(remark.name, remark.op_type, where(remark))
        same = result.status == Status.SAME
        yield "  counts as", _COUNTED[remark.kind] if same else remark.kind
        yield "  evidence", remark.sentence
        yield "  called at", called_at(remark.source)
        yield "  also in", listed(remark.also, 4)
    yield _more(remarks, "report.json (remarks)")


def _declared(item: Declared) -> Document:
    types = "/".join(item.op_types[:3])
    calls = count(item.calls, f"{types} call")
    worst = (
        f": SQNR from {item.sqnr_db:.1f} dB, worst {item.worst}" if item.sqnr_db is not None else ""
    )
    if item.ignored:
        yield "IGNORED", f"{calls}, as declared: {listed(item.names, 4)}"
    elif item.declared:
        yield "DECLARED", f"{calls}, {item.what}{worst}"
    else:
        layers = count(len(item.names), f"quantised {types} layer")
        yield "PRECISION LOSS", f"{layers}, not declared: {item.what}{worst}"
        yield "  to declare it", f"--policy FILE.yaml with   {item.snippet}"
    yield "  because", item.reason


def _costs(costs: Sequence[LayerCost]) -> Document:
    """The quantised layers that cost most; layers that would gain nothing in float are left out."""
    worth = [(c, c.explains) for c in costs if c.explains is not None and c.explains >= _WORTH]
    for place, (cost, share) in enumerate(worth[:_MOST_COSTS]):
        words = f"{cost.name}   SQNR {cost.sqnr_db:.1f} dB"
        words += f", in float removes {100 * share:.0f} % of the outputs' squared error"
        if cost.weights_explain is not None:
            words += f" (left out by the quantiser {100 * cost.weights_explain:.0f} %)"
        if cost.steps < cost.calls:
            words += f" in the first {count(cost.steps, 'call')} of {count(cost.calls)}"
        if cost.saturated >= _SATURATED:
            words += f", {100 * cost.saturated:.2g} % saturated"
        yield "LEAVE IN FLOAT" if place == 0 else "  then", words
    more = len(costs) - len(worth[:_MOST_COSTS])
    if worth and more:
        yield "", f"{count(more, 'layer')} more in layers.csv"


def _equal_inputs(finding: Finding, result: Comparison) -> str:
    """Says what is known of the inputs when none of them differs."""
    pair = (
        result.plan.pairs[finding.pair] if finding.pair in range(len(result.plan.pairs)) else None
    )
    if pair is None or pair.rule == TENSOR_RULE:
        return "bitwise equal"
    are_known = any(is_input(slot.reference_slot) for slot in pair.slots)
    return "bitwise equal" if are_known else "none of this call was recorded"


def _absent(finding: Finding, result: Comparison) -> str:
    """The inputs that only one side's call has, in words."""
    if (
        not 0 <= finding.pair < len(result.plan.pairs)
        or result.plan.pairs[finding.pair].rule == TENSOR_RULE
    ):
        return ""
    pair = result.plan.pairs[finding.pair]
    both = any(map(is_input, pair.only_reference)) and any(map(is_input, pair.only_target))
    if both and finding.cause not in (CauseKind.INPUT, CauseKind.STRUCTURAL):
        return ""  # numbered differently
    sides = (
        ("reference", pair.only_reference, "not passed in the target"),
        ("target", pair.only_target, "passed only in the target"),
    )
    parts = []
    for side, slots, words in sides:
        names = [f"`{input_name(s)}`" for s in slots if is_input(s) and not is_drawn(s)]
        if any(map(is_drawn, slots)):
            parts.append(f"random numbers are drawn in the {side} only")
        if names:
            others = f" and {len(names) - 3} more" if len(names) > 3 else ""
            verb = "is" if len(names) == 1 else "are"
            parts.append(f"{', '.join(names[:3])}{others} {verb} {words}")
    return "; ".join(parts)


def _counts(result: Comparison) -> str:
    parts = [f"{count(result.counts[v])} {v}" for v in VerdictKind if result.counts.get(v)]
    tail = f"; {count(result.unmatched)} unmatched, {count(result.incomparable)} incomparable"
    return (
        f"{count(result.coverage.paired)} of {count(result.coverage.calls, 'call')} paired: "
        f"{', '.join(parts) or 'none'}{tail}"
    )


_MOST = 4


def _occurrences(result: Comparison, *, every: bool = False) -> Document:
    """Lines on executions of operators. every: all operators, by type and by name; else only the
    first that differ.
    """
    table = result.occurrences
    if table is None or (table.first_difference is None and not every):
        return
    first, significant = table.first_difference, table.first_significant
    yield (
        "FIRST DIFFERENCE",
        _in_full(first) if first is not None else "none: every tensor is bitwise equal",
    )
    if significant is not None:
        yield "FIRST SIGNIFICANT", _in_full(significant)
    elif first is not None and not result.findings:
        # a finding may name a module, which is not counted as an operator
        yield "FIRST SIGNIFICANT", "none: rounding explains every difference"
    rows = sorted(
        (r for r in table.rows if every or (r.by == "type" and r.first_significant is not None)),
        key=_occurrence_order,
    )
    for row in rows if every else rows[:_MOST]:
        yield f"  by {row.by}", _occurrence_sentence(row)
    if len(rows) > _MOST and not every:
        yield "", f"and {count(len(rows) - _MOST)} more operators (--occurrences, report.json)"


def _occurrence_order(row: Counted) -> tuple[bool, bool, int]:
    first = row.first_significant or row.first_difference
    return (
        row.by == "name",
        row.first_significant is None,
        first.call if first is not None else 1 << 62,
    )


def _occurrence_sentence(row: Counted) -> str:
    """A sentence on the executions of one operator."""
    name, first = row.name, row.first_difference
    uncompared = (
        f"; {count(row.count - row.compared)} of {count(row.count)} could not be compared"
        if row.compared < row.count
        else ""
    )
    if first is None:
        return (
            f"{name}: all {count(row.compared)} equal{uncompared}"
            if row.compared
            else f"{name}: nothing could be compared{uncompared}"
        )
    earlier = first.number - 1
    equal = (
        ""
        if not earlier
        else "occurrence 1 equal, "
        if earlier == 1
        else f"occurrences 1-{earlier} equal, "
    )
    if row.equal < earlier:
        equal = f"{count(row.equal)} before it equal, "
    place = _where_it_is(first)
    text = f"{name}: {equal}{_nth(first.number)} of {count(row.count)} first to differ ({place})"
    if row.first_significant is None:
        text += ", none significant"
    elif row.first_significant.number != first.number:
        text += (
            f", {_nth(row.first_significant.number)} first significant "
            f"({_where_it_is(row.first_significant)})"
        )
    else:
        text += ", and first significant"
    return text + uncompared


def _where_it_is(where: Occurrence) -> str:
    step = f", step {where.step}" if where.step else ""
    return f"{where.name}, rel_l2 {where.rel_l2:.2g}{step}"


def _in_full(where: Occurrence) -> str:
    call = f"{where.name}   {where.op_type}, its {_nth(where.number)}"
    return f"{call}   rel_l2 {where.rel_l2:.2g}, step {where.step} ({where.verdict})"


def _nth(number: int) -> str:
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"
