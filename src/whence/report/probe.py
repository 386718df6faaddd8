"""What variants of one model show, on a terminal.

Among them what operators of one call lose, and which modules may be narrower.
"""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count, from_here, headed, listed
from whence.results.precision import ModuleEffect, PrecisionPlan, PrecisionTable
from whence.results.probe import (
    HealthFinding,
    Held,
    OperatorPlace,
    Probed,
    Property,
    PropertyAnswer,
    SpreadShare,
    Variant,
)
from whence.results.verdict import Status

_WORDS: dict[str, str] = {
    Status.SAME: "HOLDS",
    Status.DIFFERENT: "VIOLATED",
    Status.UNDECIDED: "CANNOT TELL",
}
_SHOWN = (Held.VIOLATED, Held.OBSERVED, Held.UNKNOWN)


def probed_text(result: Probed) -> str:
    """The answer as text."""
    return "\n".join(_lines(result)) + "\n"


def headline(result: Probed) -> tuple[str, str]:
    """(the answer in capitals, the properties that it is about)."""
    broken = [a.property for a in result.answers if a.held == Held.VIOLATED]
    unclear = [a.property for a in result.answers if a.held == Held.UNKNOWN]
    return _WORDS[result.status], ", ".join(map(clean, broken or unclear)) or _tested(result)


def _tested(result: Probed) -> str:
    """How many properties were tested: what does not apply is no pass."""
    absent = sum(answer.held == Held.ABSENT for answer in result.answers)
    tested = len(result.answers) - absent
    if not tested:
        return "nothing was tested: no property that was asked for applies"
    others = f"; {absent} {'does' if absent == 1 else 'do'} not apply" if absent else ""
    return f"{tested} of {len(result.answers)} properties tested{others}"


def _lines(result: Probed) -> Iterator[str]:
    word, names = headline(result)
    yield headed(word, f"{names}   {clean(result.model)}")
    yield headed("  on", clean(result.inputs))
    yield from (headed("  note", clean(note)) for note in result.notes)
    yield ""
    rows = [("property", "holds", "ulp", "first operator", "in")]
    rows += [_row(answer) for answer in result.answers]
    yield from columns(rows, right=(2,))
    for answer in result.answers:
        yield from _details(answer)


def _row(answer: PropertyAnswer) -> tuple[str, str, str, str, str]:
    largest = max(
        (v for v in answer.variants if v.held == answer.held), key=lambda v: v.ulp, default=None
    )
    place = next(
        (v.first for v in answer.variants if v.held == answer.held and v.first is not None), None
    )
    if answer.findings:
        place = answer.findings[0].first
    return (
        clean(answer.property),
        clean(answer.held),
        f"{largest.ulp:.3g}" if largest is not None and largest.differing else "",
        clean(place.operator) if place is not None else "",
        module_words(place) if place is not None else "",
    )


def module_words(place: OperatorPlace) -> str:
    """The module that runs an operator, with its class."""
    return clean(place.scope or "the model itself") + (
        f" ({clean(place.op_type)})" * bool(place.scope)
    )


def _details(answer: PropertyAnswer) -> Iterator[str]:
    yield ""
    yield headed(answer.property.upper(), clean(answer_words(answer)))
    yield from details(answer)
    for variant in answer.variants:
        if variant.held in _SHOWN and variant.differing:
            yield from _variant(variant)
    if answer.shares:
        yield headed("  spread from", ", ".join(map(share_words, answer.shares)))
    if answer.power:
        yield headed("  power", clean(answer.power))
    yield from (headed("  note", clean(note)) for note in answer.notes)
    if answer.next:
        yield headed("  next", clean(answer.next))


def details(answer: PropertyAnswer) -> Iterator[str]:
    """Lines of what an answer holds beside variants: numbers that are lost, plans."""
    yield from _health_lines(answer)
    if answer.precision is not None:
        yield from _precision_lines(answer.precision)


def answer_words(answer: PropertyAnswer) -> str:
    """What an answer says, in one sentence."""
    if answer.property == Property.HEALTH and not answer.why:
        return _health_words(answer)
    if answer.precision is not None and not answer.why:
        return _precision_words(answer.precision)
    if answer.property == Property.SENSITIVITY and not (answer.cause or answer.why):
        reached = sum(v.held == Held.REACHED for v in answer.variants)
        return f"each of {reached} changes reaches an output"
    return answer.cause or answer.why or exactness(answer)


def exactness(answer: PropertyAnswer) -> str:
    """How many variants are equal bit for bit, and how far the others are apart."""
    ran = [v for v in answer.variants if v.held != Held.UNKNOWN or v.differing]
    rounded = [v for v in ran if v.held == Held.ROUNDING]
    exact = f"{len(ran) - len(rounded)} of {len(ran)} variants are equal bit for bit"
    if not rounded:
        return exact
    worst = max(rounded, key=lambda v: v.ulp)
    return f"{exact}; the others differ by at most {worst.ulp:.3g} ulp ({worst.name})"


def _variant(variant: Variant) -> Iterator[str]:
    size = f"{variant.differing} of {variant.count} elements move, by up to {variant.moved:.2g} rms"
    yield headed(f"  {clean(variant.held)}", f"{clean(variant.name)}: {size}")
    if variant.first is not None:
        after = f", fed by {clean(variant.first.after)}" if variant.first.after else ""
        yield headed(
            "    from", f"{clean(variant.first.operator)}{after} in {module_words(variant.first)}"
        )
        if variant.first.line:
            yield headed("    at", clean(from_here(variant.first.line)))
    if variant.in_float64 is not None:
        yield headed("    because", clean(variant.why))


def share_words(share: SpreadShare) -> str:
    """An operator with the part of a spread that it explains."""
    where = f" in {clean(share.scope)}" if share.scope else ""
    calls = f"{share.calls} calls" if share.calls > 1 else "1 call"
    return f"{clean(share.operator)}{where} {100 * share.share:.0f} % ({calls})"


_MOST_FINDINGS = 8
_MOST_ROWS = 8
_NAMES = 3


def _health_words(answer: PropertyAnswer) -> str:
    """The line that answers for numeric health."""
    if answer.held == Held.HEALTHY:
        return (
            "no operator overflows, underflows, cancels, amplifies or saturates so that it matters"
        )
    return f"{count(len(answer.findings), 'line')} of code lose numbers, the worst first"


def _health_lines(answer: PropertyAnswer) -> Iterator[str]:
    """Each finding: what, in which operator, where, and what it means."""
    for finding in answer.findings[:_MOST_FINDINGS]:
        yield from _finding(finding)
    if len(answer.findings) > _MOST_FINDINGS:
        yield headed("", f"and {len(answer.findings) - _MOST_FINDINGS} more (--format json)")


def _finding(finding: HealthFinding) -> Iterator[str]:
    place = finding.first
    module = clean(place.scope or "the model itself")
    kind = f" ({clean(place.op_type)})" if place.scope else ""
    yield headed(f"  {clean(finding.symptom)}", f"{clean(place.operator)} in {module}{kind}")
    if finding.also:
        yield headed("    and in", clean(listed(finding.also, _NAMES)))
    if place.line:
        yield headed("    at", clean(from_here(place.line)))
    yield headed("    means", clean(finding.meaning))


def _precision_words(table: PrecisionTable) -> str:
    """The line that answers for precision."""
    words = [
        f"{len(plan.modules)} of {_measured(plan)} modules to {plan.to}" for plan in table.plans
    ]
    return ", ".join(map(clean, words))


def _measured(plan: PrecisionPlan) -> int:
    return len(plan.modules) + len(plan.keep)


def _precision_lines(table: PrecisionTable) -> Iterator[str]:
    """Each plan, its check, and the modules that matter most."""
    for plan in table.plans:
        yield from _plan_lines(plan, table.rows.get(plan.to, ()))


def _plan_lines(plan: PrecisionPlan, rows: tuple[ModuleEffect, ...]) -> Iterator[str]:
    yield ""
    share = 100 * plan.parameters / plan.of_parameters if plan.of_parameters else 0.0
    may = (
        f"{len(plan.modules)} of {_measured(plan)} modules may go, {share:.3g} % of the parameters"
    )
    yield headed(f"  {clean(plan.to)}", clean(plan.why) if not plan.modules else may)
    if plan.modules:
        yield headed("    predicted", _predicted(plan))
        yield headed("    measured", _checks(plan))
        if plan.decides:
            yield headed("    unless", _unless(plan))
        yield headed("    may go", clean(listed(plan.modules, _NAMES)))
    yield headed("    keep", clean(listed(plan.keep, _NAMES)) or "none of those measured")
    yield ""
    yield from _effect_rows(rows, set(plan.modules))


def _predicted(plan: PrecisionPlan) -> str:
    return (
        f"an error of the outputs of at most {plan.predicted:.2g} (budget {plan.budget:.2g}): "
        f"{plan.quadrature:.2g} in squares, times {plan.correction:.2f} for what is correlated, "
        f"times {plan.margin:.2f} for other inputs"
    )


def _unless(plan: PrecisionPlan) -> str:
    return (
        f"more decisions of {clean(plan.decides)} come out otherwise than here "
        f"({plan.decided} at most): the outputs then move further"
    )


def _checks(plan: PrecisionPlan) -> str:
    own = [c for c in plan.checks if c.inputs == "this call"]
    others = [c for c in plan.checks if c.inputs != "this call"]
    words = [f"{_error_text(c.error)} on this call, the mixed model run" for c in own]
    if others:
        worst = (
            None if any(c.error is None for c in others) else max(c.error or 0.0 for c in others)
        )
        words.append(f"at most {_error_text(worst)} on {count(len(others), 'other call')}")
    rows = sum(c.rows for c in plan.checks)
    if rows:
        words.append(
            f"another largest element in {sum(c.flips for c in plan.checks)} of {rows} rows"
        )
    verdict = "" if plan.holds else "MORE THAN PREDICTED: "
    return verdict + "; ".join(words)


def _error_text(error: float | None) -> str:
    return "NaN or Inf" if error is None else f"{error:.2g}"


def _effect_rows(rows: tuple[ModuleEffect, ...], chosen: set[str]) -> Iterator[str]:
    tried = [row for row in rows if row.error is not None or not row.parameters or _is_harm(row)]
    table = [("module", "class", "parameters", "error alone", "flips", "")]
    for row in tried[:_MOST_ROWS]:
        flips = f"{row.flips} of {row.rows}" if row.rows else ""
        error = clean(row.why) if row.error is None else f"{row.error:.2g}"
        kept = "may go" if row.module in chosen else "keep"
        table.append(
            (
                clean(row.module) or "the model",
                clean(row.op_type),
                str(row.parameters),
                error,
                flips,
                kept,
            )
        )
    yield from (f"    {line}" for line in columns(table, right=(2, 3)))
    if len(tried) > _MOST_ROWS:
        yield f"    and {len(tried) - _MOST_ROWS} that do less (--format json has all)"
    if len(rows) > len(tried):
        yield f"    {len(rows) - len(tried)} more are not offered: {clean(_why_not(rows, tried))}"


def _is_harm(row: ModuleEffect) -> bool:
    return row.why.startswith("NaN or Inf")


def _why_not(rows: tuple[ModuleEffect, ...], tried: list[ModuleEffect]) -> str:
    shown = {row.module for row in tried}
    return next(row.why for row in rows if row.module not in shown)
