"""What operators of one call lose, and which modules may be narrower, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, columns, count, from_here, headed, listed
from whence.results.precision import ModuleEffect, PrecisionPlan, PrecisionTable
from whence.results.probe import HealthFinding, Held, PropertyAnswer

_MOST_FINDINGS = 8
_MOST_ROWS = 8
_NAMES = 3


def health_words(answer: PropertyAnswer) -> str:
    """The line that answers for numeric health."""
    if answer.held == Held.HEALTHY:
        return (
            "no operator overflows, underflows, cancels, amplifies or saturates so that it matters"
        )
    return f"{count(len(answer.findings), 'line')} of code lose numbers, the worst first"


def health_lines(answer: PropertyAnswer) -> Iterator[str]:
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


def precision_words(table: PrecisionTable) -> str:
    """The line that answers for precision."""
    words = [
        f"{len(plan.modules)} of {_measured(plan)} modules to {plan.to}" for plan in table.plans
    ]
    return ", ".join(map(clean, words))


def _measured(plan: PrecisionPlan) -> int:
    return len(plan.modules) + len(plan.keep)


def precision_lines(table: PrecisionTable) -> Iterator[str]:
    """Each plan, its check, and the modules that matter most."""
    for plan in table.plans:
        yield from _plan(plan, table.rows.get(plan.to, ()))


def _plan(plan: PrecisionPlan, rows: tuple[ModuleEffect, ...]) -> Iterator[str]:
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
    yield from _rows(rows, set(plan.modules))


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
    words = [f"{_error(c.error)} on this call, the mixed model run" for c in own]
    if others:
        worst = (
            None if any(c.error is None for c in others) else max(c.error or 0.0 for c in others)
        )
        words.append(f"at most {_error(worst)} on {count(len(others), 'other call')}")
    rows = sum(c.rows for c in plan.checks)
    if rows:
        words.append(
            f"another largest element in {sum(c.flips for c in plan.checks)} of {rows} rows"
        )
    verdict = "" if plan.holds else "MORE THAN PREDICTED: "
    return verdict + "; ".join(words)


def _error(error: float | None) -> str:
    return "NaN or Inf" if error is None else f"{error:.2g}"


def _rows(rows: tuple[ModuleEffect, ...], chosen: set[str]) -> Iterator[str]:
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
