"""Reports on a terminal which models an upgrade changes."""

from __future__ import annotations

from whence.report.document import Document, answering
from whence.report.tables import clean, count, shortened, spaced
from whence.results import Release, Status, Upgrade, Upgraded, UpgradeKind

_COUNTED = (
    UpgradeKind.BITWISE,
    UpgradeKind.ROUNDING,
    UpgradeKind.ADDED,
    UpgradeKind.CANNOT_BUILD,
)
"""Kinds that are only counted, unless all models are asked for."""
_HEADLINES = {
    Status.SAME: "SAME",
    Status.DIFFERENT: "DIFFERENT",
    Status.UNDECIDED: "CANNOT TELL",
}
_WIDE, _ERROR = 200, 600


@answering
def upgrade_text(result: Upgrade, *, everything: bool = False) -> Document:
    """The answer as text. everything: list every model, not only those that changed."""
    counts = result.counts
    tried = count(len(result.models), "model")
    yield _HEADLINES[result.status], f"{counts.get(UpgradeKind.DIFFERS, 0)} of {tried} differ"
    yield "  first", _release(result.first)
    yield "  second", _release(result.second)
    if result.train:
        yield "  mode", "training: losses and gradients are compared too"
    yield from (f"  {number:>5}  {kind}" for kind, number in counts.items())
    if result.untried:
        yield f"  {len(result.untried):>5}  not tried: the budget is used up; the same call goes on"
    yield "  took", f"{result.seconds:,.0f} s, {result.processor_seconds:,.0f} s of processors"
    for kind in counts:
        if kind in _COUNTED and not everything:
            continue
        yield ""
        yield f"{kind}:"
        for model in result.models:
            if model.kind == kind:
                yield from _model(model)


def _release(release: Release) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in release.versions.items())
    return release.given + (f" ({versions})" if versions else "")


def _model(model: Upgraded) -> Document:
    yield "  " + spaced(model.name, model.model)
    if (place := model.place) is not None:
        where = spaced(place.module, place.op_type, place.operator)
        more = f"   and {count(model.others, 'more finding')}" if model.others else ""
        yield "    module", where and where + more
        words = f"{place.cause}: {place.words}" if place.cause else place.words
        yield "    cause", shortened(clean(words), _WIDE)
        if place.first or place.second:
            yield "    lines", f"{place.first} -> {place.second}"
    for side, error in zip(("first", "second"), model.errors):
        yield f"    {side}", shortened(clean(error), _ERROR)
    for title, entries in (
        ("settings", model.settings),
        ("benign", model.benign),
        ("note", model.notes),
    ):
        yield from ((f"    {title}", shortened(clean(entry), _WIDE)) for entry in entries)
    if model.largest is not None:
        wide = f", {model.largest_wide:.3g} in float64" if model.largest_wide is not None else ""
        yield "    outputs", f"{model.output} rel_l2 {model.largest:.3g}{wide}".strip()
    yield "    script", model.script
