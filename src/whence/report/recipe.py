"""A recipe of quantisation on a terminal: the layers to leave in float, what each brings, and the
lines for the quantiser.
"""

from __future__ import annotations

from whence.report.document import Document, answering
from whence.report.tables import count
from whence.results import InFloat, QuantisationRecipe

_MOST = 6


@answering
def recipe(result: QuantisationRecipe) -> Document:
    """The whole answer as text."""
    error = "not known" if result.error is None else f"rel_l2 {result.error:.3g}"
    yield "OUTPUT ERROR", f"{error}, quantised against {result.reference}"
    if not result.leave:
        known = [layer for layer in result.others if layer.measured is not None]
        none = f"no layer: none of {count(len(known), 'layer')} brings 2 % of the outputs' error"
        yield "LEAVE IN FLOAT", none if known else "not known: no layer was measured"
    for place, layer in enumerate(result.leave):
        yield "LEAVE IN FLOAT" if place == 0 else "  then", _words(layer)
        yield "  or", layer.cure
    if result.left is not None:
        yield "LEFT", f"rel_l2 {result.left:.3g}, measured with all of them in float"
    for place, layer in enumerate(result.others[:_MOST]):
        yield "  not chosen" if place == 0 else "", _words(layer)
    more = max(len(result.others) - _MOST, 0)
    if more:
        yield "", f"{count(more, 'layer')} more"
    if result.untried:
        yield "  not measured", f"{count(result.untried, 'layer')} (--seconds N gives them time)"
    yield f"FOR {result.tool.upper()}", result.recipe.splitlines()
    yield "  rests on", f"{count(result.runs, 'run')} of the target's command"
    yield from (f"note: {note}" for note in result.notes)


def _words(layer: InFloat) -> str:
    estimated = "" if layer.estimated is None else f"estimated {100 * layer.estimated:.0f} %"
    if layer.why_not:
        gain = f"not measured: {layer.why_not}{'; ' if estimated else ''}{estimated}"
    elif layer.measured is None:
        gain = estimated or "not measured"
    else:
        share = round(100 * layer.measured)
        gain = f"{'adds' if share < 0 else 'removes'} {abs(share)} % of the outputs' squared error"
        gain += f" ({estimated})" if estimated else ""
    if layer.together is not None and layer.together != layer.measured:
        gain += f"; with those before it {round(100 * layer.together)} %"
    return f"{layer.name}   SQNR {layer.sqnr_db:.1f} dB, {gain}"
