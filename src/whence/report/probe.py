"""Reports the results of a model's variants on a terminal.

These include the losses of operators within one call, and modules that could use fewer bits.
"""

from __future__ import annotations

from whence.report.document import Document, Table, answering
from whence.report.tables import clean, count, from_here, listed
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


@answering
def probed_text(result: Probed) -> Document:
    """The answer as text."""
    word, names = headline(result)
    yield word, f"{names}   {result.model}"
    yield "  on", result.inputs
    yield from (("  note", note) for note in result.notes)
    yield ""
    head = ("property", "holds", "ulp", "first operator", "in")
    yield Table([head, *map(_row, result.answers)], right=(2,))
    for answer in result.answers:
        yield from _details(answer)


def headline(result: Probed) -> tuple[str, str]:
    """(the answer in capitals, the properties it is about)."""
    broken = [a.property for a in result.answers if a.held == Held.VIOLATED]
    unclear = [a.property for a in result.answers if a.held == Held.UNKNOWN]
    return _WORDS[result.status], ", ".join(map(clean, broken or unclear)) or _tested(result)


def _tested(result: Probed) -> str:
    """The number of properties tested; a property that does not apply does not count as passed."""
    absent = sum(answer.held == Held.ABSENT for answer in result.answers)
    tested = len(result.answers) - absent
    if not tested:
        return "nothing was tested: no property that was asked for applies"
    others = f"; {absent} {'does' if absent == 1 else 'do'} not apply" if absent else ""
    return f"{tested} of {len(result.answers)} properties tested{others}"


def _row(answer: PropertyAnswer) -> tuple[str, str, str, str, str]:
    ulp, place = shown(answer)
    if answer.findings:
        place = answer.findings[0].first
    where = (place.operator, module_words(place)) if place is not None else ("", "")
    return (answer.property, answer.held, ulp, *where)


def shown(answer: PropertyAnswer) -> tuple[str, OperatorPlace | None]:
    """The largest difference in ulp, and where the first one begins, of what decides an answer."""
    same = [variant for variant in answer.variants if variant.held == answer.held]
    largest = max(same, key=lambda variant: variant.ulp, default=None)
    place = next((variant.first for variant in same if variant.first is not None), None)
    return f"{largest.ulp:.3g}" if largest is not None and largest.differing else "", place


def module_words(place: OperatorPlace) -> str:
    """The module that runs an operator, with its class."""
    return clean(f"{place.scope} ({place.op_type})" if place.scope else "the model itself")


def _details(answer: PropertyAnswer) -> Document:
    yield ""
    yield answer.property.upper(), answer_words(answer) or answer.held
    yield from details(answer)
    for variant in answer.variants:
        if variant.held in _SHOWN and variant.differing:
            yield from _variant(variant)
    yield "  spread from", ", ".join(map(share_words, answer.shares))
    yield "  power", answer.power
    yield from (("  note", note) for note in answer.notes)
    yield "  next", answer.next


def details(answer: PropertyAnswer) -> Document:
    """Lines on what an answer holds beside its variants: lost numbers, plans."""
    for finding in answer.findings[:_MOST_FINDINGS]:
        yield from _finding(finding)
    if len(answer.findings) > _MOST_FINDINGS:
        yield "", f"and {len(answer.findings) - _MOST_FINDINGS} more (--format json)"
    if answer.precision is not None:
        for plan in answer.precision.plans:
            yield from _plan(plan, answer.precision.rows.get(plan.to, ()))


def answer_words(answer: PropertyAnswer) -> str:
    """An answer in one sentence."""
    if answer.property == Property.HEALTH and not answer.why:
        return _health_words(answer)
    if answer.precision is not None and not answer.why:
        return _precision_words(answer.precision)
    if answer.property == Property.SENSITIVITY and not (answer.cause or answer.why):
        reached = sum(v.held == Held.REACHED for v in answer.variants)
        return f"each of {reached} changes reaches an output"
    return answer.cause or answer.why or exactness(answer)


def exactness(answer: PropertyAnswer) -> str:
    """How many variants are equal bit for bit, and how far apart the others are."""
    ran = [v for v in answer.variants if v.held != Held.UNKNOWN or v.differing]
    rounded = [v for v in ran if v.held == Held.ROUNDING]
    exact = f"{len(ran) - len(rounded)} of {len(ran)} variants are equal bit for bit"
    if not rounded:
        return exact
    worst = max(rounded, key=lambda v: v.ulp)
    return f"{exact}; the others differ by at most {worst.ulp:.3g} ulp ({worst.name})"


def _variant(variant: Variant) -> Document:
    size = f"{variant.differing} of {variant.count} elements move, by up to {variant.moved:.2g} rms"
    yield f"  {variant.held}", f"{variant.name}: {size}"
    if (place := variant.first) is not None:
        after = f", fed by {place.after}" if place.after else ""
        yield "    from", f"{place.operator}{after} in {module_words(place)}"
        yield "    at", place.line and from_here(place.line)
    if variant.in_float64 is not None:
        yield "    because", variant.why


def share_words(share: SpreadShare) -> str:
    """An operator with the part of a spread that it explains."""
    where = f" in {share.scope}" if share.scope else ""
    calls = f"{share.calls} calls" if share.calls > 1 else "1 call"
    return f"{share.operator}{where} {100 * share.share:.0f} % ({calls})"


_MOST_FINDINGS = 8
_MOST_ROWS = 8
_NAMES = 3


def _health_words(answer: PropertyAnswer) -> str:
    """The line on numeric health."""
    if answer.held == Held.HEALTHY:
        return (
            "no operator overflows, underflows, cancels, amplifies or saturates so that it matters"
        )
    return f"{count(len(answer.findings), 'line')} of code lose numbers, the worst first"


def _finding(finding: HealthFinding) -> Document:
    """A finding: what happens, in which operator, where, and what it means."""
    place = finding.first
    yield f"  {finding.symptom}", f"{place.operator} in {module_words(place)}"
    yield "    and in", listed(finding.also, _NAMES)
    yield "    at", place.line and from_here(place.line)
    yield "    means", finding.meaning


def _precision_words(table: PrecisionTable) -> str:
    """The line on precision."""
    words = [
        f"{len(plan.modules)} of {_measured(plan)} modules to {plan.to}" for plan in table.plans
    ]
    return ", ".join(map(clean, words))


def _measured(plan: PrecisionPlan) -> int:
    return len(plan.modules) + len(plan.keep)


def _plan(plan: PrecisionPlan, rows: tuple[ModuleEffect, ...]) -> Document:
    """Lines on a plan, its check, and the modules that matter most."""
    yield ""
    share = 100 * plan.parameters / plan.of_parameters if plan.of_parameters else 0.0
    of = f"{len(plan.modules)} of {_measured(plan)} modules"
    may = f"{of} may go, {share:.3g} % of the parameters"
    yield f"  {plan.to}", may if plan.modules else plan.why
    if plan.modules:
        yield "    predicted", _predicted(plan)
        yield "    measured", _checks(plan)
        if plan.decides:
            more = f"more decisions of {plan.decides} come out otherwise than here"
            yield "    unless", f"{more} ({plan.decided} at most): the outputs then move further"
        yield "    may go", listed(plan.modules, _NAMES)
    yield "    keep", listed(plan.keep, _NAMES) or "none of those measured"
    yield ""
    yield from _effect_rows(rows, set(plan.modules))


def _predicted(plan: PrecisionPlan) -> str:
    return (
        f"an error of the outputs of at most {plan.predicted:.2g} (budget {plan.budget:.2g}): "
        f"{plan.quadrature:.2g} in squares, times {plan.correction:.2f} for what is correlated, "
        f"times {plan.margin:.2f} for other inputs"
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


def _effect_rows(rows: tuple[ModuleEffect, ...], chosen: set[str]) -> Document:
    tried = [
        row
        for row in rows
        if row.error is not None or not row.parameters or row.why.startswith("NaN or Inf")
    ]
    table = [("module", "class", "parameters", "error alone", "flips", "")]
    for row in tried[:_MOST_ROWS]:
        flips = f"{row.flips} of {row.rows}" if row.rows else ""
        error = row.why if row.error is None else f"{row.error:.2g}"
        kept = "may go" if row.module in chosen else "keep"
        name = row.module or "the model"
        table.append((name, row.op_type, str(row.parameters), error, flips, kept))
    yield Table(table, right=(2, 3), indent="    ")
    if len(tried) > _MOST_ROWS:
        yield f"    and {len(tried) - _MOST_ROWS} that do less (--format json has all)"
    if len(rows) > len(tried):
        shown = {row.module for row in tried}
        why = next(row.why for row in rows if row.module not in shown)
        yield f"    {len(rows) - len(tried)} more are not offered: {why}"
