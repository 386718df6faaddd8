"""Plots the error along the whole run, and writes the plot's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import disk, extras
from whence.report.answer import headline
from whence.report.own_files import MARK, check_replaceable
from whence.report.plots.style import (
    BAND,
    BAND_EDGE,
    FAULT_COLOUR,
    LINE,
    NAME_WIDTH,
    POINTS,
    RC,
    SOFT,
    STYLES,
    Style,
    is_shown,
    words,
)
from whence.report.tables import TAIL, count
from whence.results import GUILTY
from whence.results.page import Page, PageCall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 6  # findings that are named in a plot
_NAME = "error-along-the-run"


def write(page: Page, folder: Path) -> list[Path]:
    """Write the plot as PNG and SVG, if the page has calls, and return the files. Raises
    MissingDependency, OutputExists for a file that whence did not write, OSError.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise extras.missing("matplotlib", "a plot", error) from error
    files = [folder / f"{_NAME}.{form}" for form in ("png", "svg")] if page.calls else []
    for file in files:
        check_replaceable(file, force=True)
    disk.make_folders(folder)
    with mpl.rc_context({**mpl.rcParamsDefault, **RC, "backend": "agg"}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        if files:
            along(page, figure)
        for path in files:
            is_svg = path.suffix == ".svg"
            metadata = {"Date": None, "Creator": MARK} if is_svg else {"Software": MARK}
            with disk.whole_file(path) as content:
                figure.savefig(content, format=path.suffix[1:], dpi=200, metadata=metadata)
    return files


def along(page: Page, figure: Figure) -> None:
    """Plot the error of every call in execution order on a log axis. The error that rounding
    explains is shaded; findings are marked and named.
    """
    axes, strip = figure.subplots(
        2, 1, sharex=True, height_ratios=(16, 2), gridspec_kw={"hspace": 0.02}
    )
    calls = page.calls
    positive = [v for call in calls for v in (call.error, call.noise) if v and math.isfinite(v)]
    low, high = (min(positive) / 3, max(positive) * 6) if positive else (1e-9, 1.0)
    places = [i for i, call in enumerate(calls) if is_shown(call)]
    _noise_band(calls, places, low, axes)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.02 * len(calls) - 0.5, 1.02 * len(calls) - 0.5)
    for verdict, style in STYLES.items():
        errors = [(i, calls[i].error) for i in places if calls[i].verdict == verdict]
        if not errors:
            continue
        look = _look(style, len(errors))
        points = [(i, min(error, high)) for i, error in errors if error]
        _scatter(axes, points, label=f"{verdict} ({count(len(errors))})", **look)
        flat = [(i, 1.0 if error == 0 else 0.0) for i, error in errors if not error]
        _scatter(strip, flat, clip_on=False, **{**look, "s": look["s"] * 0.6})
    _equal_strip(strip, any(call.error is None for call in calls))
    axes.tick_params(bottom=False)
    _steps(calls, axes)
    _names(page, axes)
    axes.set_ylabel("relative error of what each call made")
    strip.set_xlabel("calls in execution order")
    axes.set_title(f"{page.comparison.status.upper()}\n", fontweight="bold")
    axes.text(0, 1.02, words(headline(page.comparison), 130), transform=axes.transAxes, color=SOFT)
    columns = 2 + sum(any(c.verdict == verdict for c in calls) for verdict in STYLES)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(columns, 4),
        fontsize=8,
    )


def _noise_band(calls: Sequence[PageCall], places: Sequence[int], low: float, axes: Axes) -> None:
    """Draw the error that rounding explains as a band, and how far introduced errors rise above
    it.
    """
    noise = [
        value if (value := calls[i].noise or math.nan) < math.inf else math.nan for i in places
    ]
    # The band reaches half-way to the neighbouring calls, and is absent where nothing is to be
    # explained.
    if not all(map(math.isnan, noise)):
        edges = [places[0] - 0.5, *((a + b) / 2 for a, b in pairwise(places)), places[-1] + 0.5]
        axes.stairs(
            noise,
            edges,
            baseline=low,
            fill=True,
            color=BAND,
            linewidth=0,
            label="explained by rounding and what came in",
        )
        axes.stairs(noise, edges, baseline=None, color=BAND_EDGE, linewidth=0.4)
    stems = [
        (i, call.noise, call.error)
        for i, call in enumerate(calls)
        if call.verdict in GUILTY and call.noise and call.error
    ]
    if stems:
        axes.vlines(*zip(*stems), color=FAULT_COLOUR, linewidth=0.9, zorder=2.5)


def _scatter(axes: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    axes.scatter(*(zip(*points) if points else ((), ())), **look)


def _equal_strip(strip: Axes, unknown: bool) -> None:
    """Label the strip below, for calls that are equal or whose error is unknown."""
    strip.set_ylim(-0.6 if unknown else 0.4, 1.6)
    strip.set_yticks(
        [1.0, 0.0] if unknown else [1.0], ["equal", "unknown"] if unknown else ["equal"]
    )
    strip.grid(False)
    strip.tick_params(length=0)
    for spine in ("bottom", "left"):
        strip.spines[spine].set_visible(False)


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
        "rasterized": points > POINTS,
        **faces,
    }


def _steps(calls: Sequence[PageCall], axes: Axes) -> None:
    """Draw thin numbered lines where a step begins, at most twenty."""
    places = [(call.rank, call.step) for call in calls]
    begins = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1]]
    if len(begins) < 2:
        return
    several = len({rank for rank, _ in places}) > 1
    every = -(-len(begins) // 20)
    for begin in begins[::every]:
        rank, step = places[begin]
        label = f"{rank}:{step}" if several else f"{step}"
        head = ("rank:step " if several else "step ") if begin == 0 else ""
        axes.axvline(begin - 0.5, color=LINE, linewidth=0.7, zorder=1)
        axes.annotate(
            head + label,
            (begin - 0.5, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -9),
            textcoords="offset points",
            fontsize=7,
            color=SOFT,
        )


def _names(page: Page, axes: Axes) -> None:
    places = {call.pair: i for i, call in enumerate(page.calls)}
    named = 0
    for finding in page.comparison.findings[:_NAMED]:
        place = places.get(finding.pair)
        error = page.calls[place].error if place is not None else None
        if place is None or not error:
            continue
        to_the_left = place > 0.6 * len(page.calls)
        axes.annotate(
            words(finding.name, NAME_WIDTH, TAIL),
            (place, min(error, axes.get_ylim()[1])),
            xytext=(-14 if to_the_left else 14, 10 + 13 * (named % 2)),
            textcoords="offset points",
            ha="right" if to_the_left else "left",
            fontsize=8,
            fontweight="bold",
            color=FAULT_COLOUR,
            arrowprops={
                "arrowstyle": "-",
                "color": FAULT_COLOUR,
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
