"""Which models an upgrade changes, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from whence.report.tables import clean, count, headed, shortened
from whence.results import Release, Status, Upgrade, Upgraded, UpgradeKind

_COUNTED = (
    UpgradeKind.BITWISE,
    UpgradeKind.ROUNDING,
    UpgradeKind.ADDED,
    UpgradeKind.CANNOT_BUILD,
)
"""Kinds that are counts alone, unless all are asked for."""
_HEADLINES = {
    Status.SAME: "SAME",
    Status.DIFFERENT: "DIFFERENT",
    Status.UNDECIDED: "CANNOT TELL",
}
_WIDE, _ERROR = 200, 600


def upgrade_text(result: Upgrade, *, everything: bool = False) -> str:
    """The answer as text. everything: every model, not only those that are not the same."""
    return "\n".join(_lines(result, everything)) + "\n"


def _lines(result: Upgrade, everything: bool) -> Iterator[str]:
    counts = result.counts
    tried = count(len(result.models), "model")
    differ = counts.get(UpgradeKind.DIFFERS, 0)
    yield headed(_HEADLINES[result.status], f"{differ} of {tried} differ")
    yield headed("  first", _release(result.first))
    yield headed("  second", _release(result.second))
    if result.train:
        yield headed("  mode", "training: losses and gradients are compared too")
    for kind, number in counts.items():
        yield f"  {number:>5}  {kind}"
    if result.untried:
        yield f"  {len(result.untried):>5}  not tried: the budget is used up; the same call goes on"
    seconds = f"{result.seconds:,.0f} s, {result.processor_seconds:,.0f} s of processors"
    yield headed("  took", seconds)
    for kind in counts:
        if kind in _COUNTED and not everything:
            continue
        yield ""
        yield f"{kind}:"
        for model in result.models:
            if model.kind == kind:
                yield from _model(model)


def _release(release: Release) -> str:
    versions = ", ".join(f"{clean(k)} {clean(v)}" for k, v in release.versions.items())
    return f"{clean(release.given)}" + (f" ({versions})" if versions else "")


def _model(model: Upgraded) -> Iterator[str]:
    yield "  " + "   ".join(filter(None, (clean(model.name), clean(model.model))))
    place = model.place
    if place is not None:
        where = "   ".join(filter(None, map(clean, (place.module, place.op_type, place.operator))))
        more = f"   and {count(model.others, 'more finding')}" if model.others else ""
        if where:
            yield headed("    module", where + more)
        words = f"{place.cause}: {place.words}" if place.cause else place.words
        yield headed("    cause", _short(words))
        if place.first or place.second:
            yield headed("    lines", f"{clean(place.first)} -> {clean(place.second)}")
    for side, error in zip(("first", "second"), model.errors):
        if error:
            yield headed(f"    {side}", shortened(clean(error), _ERROR))
    for title, entries in (
        ("settings", model.settings),
        ("benign", model.benign),
        ("note", model.notes),
    ):
        for entry in entries:
            yield headed(f"    {title}", _short(entry))
    if model.largest is not None:
        wide = f", {model.largest_wide:.3g} in float64" if model.largest_wide is not None else ""
        yield headed(
            "    outputs", f"{clean(model.output)} rel_l2 {model.largest:.3g}{wide}".strip()
        )
    if model.script:
        yield headed("    script", clean(model.script))


def _short(words: str) -> str:
    return shortened(clean(words), _WIDE)
