"""The style of plots: colours, marker shapes of verdicts, texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from whence.report.tables import HEAD, clean, shortened
from whence.results import VerdictKind
from whence.results.page import PageCall

if TYPE_CHECKING:
    pass

INK, SOFT, LINE, BAND, BAND_EDGE = "#1d1f23", "#5d636d", "#d5d7db", "#d9e6f1", "#7fa3c4"
POINTS = 5000  # beyond these an SVG holds an image of them
NAME_WIDTH = 44  # characters of one
_QUIET = (
    VerdictKind.IDENTICAL,
    VerdictKind.NOISE,
    VerdictKind.DECLARED,
    VerdictKind.OTHER_FORM,
    VerdictKind.INHERITED,
)


class Style(NamedTuple):
    """How a verdict is drawn; its shape identifies it without the colour."""

    colour: str
    marker: str
    size: float
    filled: bool = True
    alpha: float = 1.0


STYLES = {
    VerdictKind.IDENTICAL: Style("#9aa0a8", ".", 26, alpha=0.7),
    VerdictKind.NOISE: Style("#2f8fc9", "o", 12, filled=False),
    VerdictKind.DECLARED: Style("#0072b2", "s", 14, filled=False),
    VerdictKind.INHERITED: Style("#a2937c", "o", 7, alpha=0.45),
    VerdictKind.AMPLIFIED: Style("#b5568b", "^", 26),
    VerdictKind.OTHER_FORM: Style("#0072b2", "v", 14, filled=False),
    VerdictKind.PRECISION: Style("#a37500", "D", 20),
    VerdictKind.NONDETERMINISTIC: Style("#008a65", "P", 26),
    VerdictKind.UNDETERMINED: Style("#70757d", "o", 22, filled=False),
    VerdictKind.INCOMPARABLE: Style("#70757d", "x", 24),
    VerdictKind.STRUCTURAL: Style("#7d4bb3", "s", 30),
    VerdictKind.PARAM_DIFF: Style("#b44a00", "d", 46),
    VerdictKind.INTRODUCED: Style("#c4161c", "*", 90),
}
FAULT_COLOUR = STYLES[VerdictKind.INTRODUCED].colour
RC = {
    "svg.hashsalt": "whence",
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#ececee",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def words(text: str, width: int, keep: str = HEAD) -> str:
    """Text for a plot, in which nothing is read as mathematics."""
    return shortened(clean(text), width, keep).replace("$", r"\$")


def is_shown(call: PageCall) -> bool:
    """Whether a call is drawn. A container repeats the error of its last child, so it is drawn only
    if its own code stands out.
    """
    return call.leaf or call.verdict not in _QUIET
