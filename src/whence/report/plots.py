"""The main plots of a page as PNG and SVG, for tickets and papers: light, legible in print and
without colour. Computes nothing.

Every plot is a function of a `Page` (or of one of its details) and axes. Names are drawn as they
are: no mathematics is read in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whence import dtypes
from whence.errors import MissingDependency
from whence.records.slots import is_written
from whence.report.answer import headline
from whence.report.tables import HEAD, TAIL, clean, count, shortened
from whence.results import GUILTY, VerdictKind
from whence.results.page import Page, PageCall, PageDetail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DETAILS = 3  # calls whose tensors get plots of their own
_INK, _SOFT, _LINE, _BAND, _BAND_EDGE = "#1d1f23", "#5d636d", "#d5d7db", "#d9e6f1", "#7fa3c4"
_DPI = 200
_NAMED = 6  # findings with their name in a plot
_POINTS = 5000  # beyond these an SVG holds an image of them
_LABELS = 64  # names of a heatmap's rows
_NAME = 44  # characters of one
_QUIET = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.DECLARED, VerdictKind.INHERITED)
_NARROW = 12  # steps that get a tick each


class Style(NamedTuple):
    """How a verdict is drawn: the shape tells it without the colour."""

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
    VerdictKind.PRECISION: Style("#a37500", "D", 20),
    VerdictKind.NONDETERMINISTIC: Style("#008a65", "P", 26),
    VerdictKind.UNDETERMINED: Style("#70757d", "o", 22, filled=False),
    VerdictKind.INCOMPARABLE: Style("#70757d", "x", 24),
    VerdictKind.STRUCTURAL: Style("#7d4bb3", "s", 30),
    VerdictKind.PARAM_DIFF: Style("#b44a00", "d", 46),
    VerdictKind.INTRODUCED: Style("#c4161c", "*", 90),
}
_RC = {
    "svg.hashsalt": "whence",
    "font.size": 9,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "text.color": _INK,
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


def write(page: Page, folder: Path) -> list[Path]:
    """Write every plot that the page has numbers for, each in every format; returns the files.
    Raises MissingDependency, OSError.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            f"plots need matplotlib, which cannot be imported ({error}):  pip install "
            '"whence[plots]"'
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context({**mpl.rcParamsDefault, **_RC, "backend": "agg"}):
        for name, size, draw in plots(page):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            for form in FORMATS:
                written.append(folder / f"{name}.{form}")
                figure.savefig(
                    written[-1],
                    dpi=_DPI,
                    metadata={"Date": None} if form == "svg" else {"Software": "whence"},
                )
    return written


def plots(page: Page) -> Iterator[tuple[str, tuple[float, float], Callable[[Figure], None]]]:
    """(file name without suffix, size in inches, what draws it), in the order in which a reader
    asks.
    """
    if page.calls:
        yield "error-along-the-run", (9.0, 4.2), lambda figure: along(page, figure)
    for number, detail in enumerate(telling(page), 1):
        end = f"-{number}" if number > 1 else ""
        for name, has, draw in _DETAILED:
            if has(detail):
                yield name + end, (5.2, 3.8), _drawing(draw, page, detail)
    for axis in ("step", "rank"):
        values = sorted({getattr(call, axis) for call in page.calls})
        names = list(dict.fromkeys(call.name for call in page.calls if _shown(call)))
        if len(values) > 1 and names:
            height = 1.6 + 0.14 * min(len(names), _LABELS)
            width = 4.2 + 0.22 * min(len(values), 24)
            yield f"{axis}-by-layer", (width, height), _gridded(page, axis, values, names)


def _drawing(
    draw: Callable[[PageDetail, Axes], None], page: Page, detail: PageDetail
) -> Callable[[Figure], None]:
    def made(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(detail, axes)
        call = page.calls[detail.call]
        axes.set_title(f"{_words(f'{call.name}  {detail.slot}', 60, TAIL)}\n", fontweight="bold")
        under = f"{call.op_type}, step {call.step}, rank {call.rank}: {call.verdict}"
        axes.text(0, 1.02, _words(under, 80), transform=axes.transAxes, color=_SOFT)

    return made


def _words(text: str, width: int, keep: str = HEAD) -> str:
    """Text as it is drawn: nothing in it is mathematics."""
    return shortened(clean(text), width, keep).replace("$", r"\$")


def telling(page: Page) -> list[PageDetail]:
    """The tensors that are plotted: of the findings first what they made, then of other calls that
    stand out. None that are equal.
    """
    pairs = [finding.pair for finding in page.comparison.findings]
    places = {call.pair: at for at, call in enumerate(page.calls)}
    found = [places[pair] for pair in pairs if pair in places]
    other = [d.call for d in page.details if page.calls[d.call].verdict in GUILTY]
    best: dict[int, PageDetail] = {}
    for detail in page.details:
        if (
            not detail.identical
            and detail.edges
            and (detail.call not in best or _made(detail) > _made(best[detail.call]))
        ):
            best[detail.call] = detail
    order = [at for at in dict.fromkeys([*found, *other, *best]) if at in best]
    return [best[at] for at in order[:DETAILS]]


def _made(detail: PageDetail) -> tuple[bool, float]:
    return is_written(detail.slot) or ":" in detail.slot, detail.figures.get("rel_l2") or 0.0


# ---- the whole run


def _shown(call: PageCall) -> bool:
    """A call that only holds others repeats what the last of them made, unless its own code stands
    out.
    """
    return call.leaf or call.verdict not in _QUIET


def along(page: Page, figure: Figure) -> None:
    """Error of every call in execution order on a log axis, what rounding explains shaded, what
    stands out marked and named.
    """
    axes, strip = figure.subplots(
        2, 1, sharex=True, height_ratios=(16, 2), gridspec_kw={"hspace": 0.02}
    )
    calls = page.calls
    positive = [v for call in calls for v in (call.error, call.noise) if v and math.isfinite(v)]
    low, high = (min(positive) / 3, max(positive) * 6) if positive else (1e-9, 1.0)
    drawn = [at for at, call in enumerate(calls) if _shown(call)]
    noise = [
        found if (found := calls[at].noise or math.nan) < math.inf else math.nan for at in drawn
    ]
    # half-way to the neighbours, and nothing where there is nothing to explain
    if not all(map(math.isnan, noise)):
        edges = [drawn[0] - 0.5, *((a + b) / 2 for a, b in pairwise(drawn)), drawn[-1] + 0.5]
        axes.stairs(
            noise,
            edges,
            baseline=low,
            fill=True,
            color=_BAND,
            linewidth=0,
            label="explained by rounding and what came in",
        )
        axes.stairs(noise, edges, baseline=None, color=_BAND_EDGE, linewidth=0.4)
    stems = [
        (at, call.noise, call.error)
        for at, call in enumerate(calls)
        if call.verdict in GUILTY and call.noise and call.error
    ]
    if stems:  # how far what is introduced stands above the rounding of its call
        at, foot, error = zip(*stems)
        axes.vlines(
            at, foot, error, color=STYLES[VerdictKind.INTRODUCED].colour, linewidth=0.9, zorder=2.5
        )
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.02 * len(calls) - 0.5, 1.02 * len(calls) - 0.5)
    for verdict, style in STYLES.items():
        mine = [(at, calls[at].error) for at in drawn if calls[at].verdict == verdict]
        if not mine:
            continue
        seen = [(at, min(error, high)) for at, error in mine if error]
        look = _look(style, len(mine))
        axes.scatter(
            *(zip(*seen) if seen else ((), ())), **look, label=f"{verdict} ({count(len(mine))})"
        )
        flat = [(at, 1.0 if error == 0 else 0.0) for at, error in mine if not error]
        strip.scatter(
            *(zip(*flat) if flat else ((), ())), **{**look, "s": look["s"] * 0.6}, clip_on=False
        )
    unknown = any(call.error is None for call in calls)
    strip.set_ylim(-0.6 if unknown else 0.4, 1.6)
    strip.set_yticks(
        [1.0, 0.0] if unknown else [1.0], ["equal", "unknown"] if unknown else ["equal"]
    )
    strip.grid(False)
    strip.tick_params(length=0)
    axes.tick_params(bottom=False)
    for spine in ("bottom", "left"):
        strip.spines[spine].set_visible(False)
    _steps(calls, axes)
    _names(page, axes)
    axes.set_ylabel("relative error of what each call made")
    strip.set_xlabel("calls in execution order")
    axes.set_title(f"{page.comparison.status.upper()}\n", fontweight="bold")
    axes.text(
        0, 1.02, _words(headline(page.comparison), 130), transform=axes.transAxes, color=_SOFT
    )
    columns = 2 + sum(any(c.verdict == verdict for c in calls) for verdict in STYLES)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(columns, 4),
        fontsize=8,
    )


def _look(style: Style, points: int) -> dict[str, Any]:
    faces = (
        {"c": style.colour}
        if style.marker == "x" or style.filled
        else {"facecolors": "none", "edgecolors": style.colour}
    )
    width = 0.0 if style.filled and style.marker != "x" else 0.9
    return {
        "marker": style.marker,
        "s": style.size,
        "alpha": style.alpha,
        "linewidths": width,
        "zorder": 3 + style.size / 100,
        "rasterized": points > _POINTS,
        **faces,
    }


def _steps(calls: Sequence[PageCall], axes: Axes) -> None:
    """Thin lines where a step begins, of at most twenty, with their numbers."""
    places = [(call.rank, call.step) for call in calls]
    begins = [at for at, place in enumerate(places) if at == 0 or place != places[at - 1]]
    if len(begins) < 2:
        return
    several = len({rank for rank, _ in places}) > 1
    every = -(-len(begins) // 20)
    for at in begins[::every]:
        rank, step = places[at]
        label = f"{rank}:{step}" if several else f"{step}"
        head = ("rank:step " if several else "step ") if at == 0 else ""
        axes.axvline(at - 0.5, color=_LINE, linewidth=0.7, zorder=1)
        axes.annotate(
            head + label,
            (at - 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -9),
            textcoords="offset points",
            fontsize=7,
            color=_SOFT,
        )


def _names(page: Page, axes: Axes) -> None:
    places = {call.pair: at for at, call in enumerate(page.calls)}
    named = 0
    for finding in page.comparison.findings[:_NAMED]:
        at = places.get(finding.pair)
        error = page.calls[at].error if at is not None else None
        if at is None or not error:
            continue
        left = at > 0.6 * len(page.calls)
        axes.annotate(
            _words(finding.name, _NAME, TAIL),
            (at, min(error, axes.get_ylim()[1])),
            xytext=(-14 if left else 14, 10 + 13 * (named % 2)),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
            fontweight="bold",
            color=STYLES[VerdictKind.INTRODUCED].colour,
            arrowprops={
                "arrowstyle": "-",
                "color": STYLES[VerdictKind.INTRODUCED].colour,
                "linewidth": 0.6,
            },
            bbox={
                "boxstyle": "square,pad=0.1",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.8,
            },
            zorder=8,
        )
        named += 1


# ---- one tensor


def histogram(detail: PageDetail, axes: Axes) -> None:
    """How many elements have which error, in decades; the error that rounding explains as a
    line.
    """
    widths = [b - a for a, b in zip(detail.edges, detail.edges[1:])]
    axes.bar(
        detail.edges[:-1],
        detail.counts,
        widths,
        align="edge",
        color="#7fa3c4",
        edgecolor="white",
        linewidth=0.4,
    )
    axes.set_xscale("log")
    _at_noise(detail, axes.axvline, axes)
    axes.set_xlabel(
        f"|target - reference|   ({count(detail.zeros)} of {count(detail.elements)} equal)"
    )
    axes.set_ylabel("elements")


def magnitude(detail: PageDetail, axes: Axes) -> None:
    """Error of elements against their size; on the dotted line it is half a unit in the last place
    of the target's dtype.
    """
    points = [(size, error) for size, error in detail.magnitude if size > 0 and error > 0]
    sizes, errors = zip(*points)
    axes.scatter(
        sizes,
        errors,
        s=7,
        color="#2f6f9f",
        alpha=0.55,
        linewidths=0,
        rasterized=len(points) > _POINTS,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    unit = (
        dtypes.DTYPES[detail.target_dtype].unit_roundoff
        if detail.target_dtype in dtypes.DTYPES
        else None
    )
    if unit:
        ends = [min(sizes), max(sizes)]
        axes.plot(
            ends,
            [unit * s for s in ends],
            color=_SOFT,
            linestyle=":",
            label=f"rounding of {_words(detail.target_dtype, 20)}",
        )
    _at_noise(detail, axes.axhline, axes)
    # Elements that are nearly zero would draw the axis out to where nothing is.
    lowest = min(min(errors), detail.noise or math.inf, unit * max(sizes) if unit else math.inf)
    axes.set_ylim(lowest / 10, max(errors) * 20)
    axes.set_xlabel("|reference|")
    axes.set_ylabel("|target - reference|")


def quantiles(detail: PageDetail, axes: Axes) -> None:
    """Errors seen against those of rounding, quantile by quantile: noise lies on the diagonal."""
    points = [(expected, seen) for expected, seen in detail.quantiles if expected > 0 and seen > 0]
    expected, seen = zip(*points)
    ends = [min(*expected, *seen), max(*expected, *seen)]
    axes.plot(
        [expected[0], expected[-1]],
        [expected[0], expected[-1]],
        color=_SOFT,
        linestyle="--",
        linewidth=1,
        label="rounding alone",
    )
    axes.plot(expected, seen, color="#2f6f9f", marker="o", markersize=3, linewidth=1, label="seen")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(ends[0] / 2, ends[1] * 2)
    axes.set_xlabel("|error| that rounding explains")
    axes.set_ylabel("|error| seen")
    axes.legend(fontsize=8)


def heatmap(detail: PageDetail, axes: Axes) -> None:
    """Root mean square of the error over (row, channel), log colours; where it is concentrated is
    outlined.
    """
    found = detail.heatmap
    assert found is not None
    rows, channels = found.shape
    values = [[found.values[r * channels + c] for c in range(channels)] for r in range(rows)]
    image = _image(axes, values, (0, found.channels, found.rows, 0))
    axes.set_xlabel("channel")
    axes.set_ylabel("row")
    for axis, begin, end in found.hit:
        draw = axes.axhspan if axis == "row" else axes.axvspan
        draw(
            begin,
            max(end, begin + 1),
            fill=False,
            edgecolor=STYLES[VerdictKind.INTRODUCED].colour,
            linewidth=1.4,
            clip_on=False,
            zorder=5,
        )
    if image is not None:
        axes.figure.colorbar(image, ax=axes, label="root mean square error", pad=0.02)
    if found.sentence:
        axes.text(
            0,
            -0.22,
            _words(found.sentence, 120),
            transform=axes.transAxes,
            fontsize=8,
            color=_SOFT,
            va="top",
            wrap=True,
        )


def _at_noise(detail: PageDetail, line: Callable[..., Any], axes: Axes) -> None:
    if detail.noise:
        line(
            detail.noise,
            color=STYLES[VerdictKind.INTRODUCED].colour,
            linestyle="--",
            linewidth=1,
            label="standard deviation of rounding",
        )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best")


def _image(
    axes: Axes, values: Sequence[Sequence[float | None]], extent: tuple[float, float, float, float]
) -> Any:
    """A picture of numbers >= 0 in log colours that stay apart in grey; zeros are white, unknown
    ones grey. None when none is above 0.
    """
    from matplotlib.colors import LogNorm

    seen = [v for row in values for v in row if v and math.isfinite(v)]
    axes.set_facecolor(_LINE)
    axes.grid(False)
    white = [[1.0 if v == 0 else math.nan for v in row] for row in values]
    axes.imshow(
        white, cmap="gray", vmin=0, vmax=1, aspect="auto", extent=extent, interpolation="nearest"
    )
    if not seen:
        return None
    low, high = min(seen), max(seen)
    filled = [[v if v and math.isfinite(v) else math.nan for v in row] for row in values]
    norm = LogNorm(max(low, high * 1e-9), high if high > low else high * 1.01)
    return axes.imshow(
        filled, cmap="cividis_r", norm=norm, aspect="auto", extent=extent, interpolation="nearest"
    )


_DETAILED: tuple[
    tuple[str, Callable[[PageDetail], bool], Callable[[PageDetail, Any], None]], ...
] = (
    ("histogram", lambda d: bool(d.edges and any(d.counts)), histogram),
    (
        "error-against-magnitude",
        lambda d: any(size > 0 and error > 0 for size, error in d.magnitude),
        magnitude,
    ),
    (
        "quantiles",
        lambda d: any(expected > 0 and seen > 0 for expected, seen in d.quantiles),
        quantiles,
    ),
    ("heatmap", lambda d: d.heatmap is not None, heatmap),
)


# ---- several steps or ranks


def _gridded(
    page: Page, axis: str, values: Sequence[int], names: Sequence[str]
) -> Callable[[Figure], None]:
    worst: dict[tuple[str, int], float | None] = {}
    marked: set[tuple[str, int]] = set()
    for call in page.calls:
        if _shown(call):
            at = call.name, getattr(call, axis)
            before = worst.get(at)
            worst[at] = call.error if before is None else max(before, call.error or 0.0)
            if call.verdict in GUILTY:
                marked.add(at)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        cells = [[worst.get((name, value)) for value in values] for name in names]
        image = _image(axes, cells, (-0.5, len(values) - 0.5, len(names) - 0.5, -0.5))
        stars = [(values.index(value), names.index(name)) for name, value in marked]
        if stars:
            across, down = zip(*stars)
            colour = STYLES[VerdictKind.INTRODUCED].colour
            axes.scatter(
                across,
                down,
                marker="*",
                s=46,
                color=colour,
                edgecolors="white",
                linewidths=0.4,
                label="introduced here",
            )
            figure.legend(loc="outside lower left", fontsize=8)
        some = range(0, len(names), -(-len(names) // _LABELS))
        axes.set_yticks(list(some), [_words(names[i], _NAME, TAIL) for i in some], fontsize=7)
        ticks = range(0, len(values), -(-len(values) // _NARROW))
        axes.set_xticks(list(ticks), [str(values[i]) for i in ticks])
        axes.set_xlabel(axis)
        axes.set_title(f"largest relative error by {axis} and layer", fontweight="bold")
        if image is not None:
            figure.colorbar(image, ax=axes, label="rel_l2", pad=0.02)

    return draw
