"""Plots of one tensor: histogram, error against magnitude, quantiles, heatmap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whence import dtypes
from whence.report.plots.style import FAULT_COLOUR, POINTS, SOFT, draw_values, words
from whence.report.tables import count
from whence.results.page import PageDetail

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        rasterized=len(points) > POINTS,
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
            color=SOFT,
            linestyle=":",
            label=f"rounding of {words(detail.target_dtype, 20)}",
        )
    _at_noise(detail, axes.axhline, axes)
    # Elements that are nearly zero would draw the axis out to where nothing is.
    lowest = min(min(errors), detail.noise or math.inf, unit * max(sizes) if unit else math.inf)
    axes.set_ylim(lowest / 10, max(errors) * 20)
    axes.set_xlabel("|reference|")
    axes.set_ylabel("|target - reference|")


def quantiles(detail: PageDetail, axes: Axes) -> None:
    """Errors against those of rounding, quantile by quantile: noise lies on the diagonal."""
    points = [(x, y) for x, y in detail.quantiles if x > 0 and y > 0]
    expected, errors = zip(*points)
    ends = [min(*expected, *errors), max(*expected, *errors)]
    axes.plot(
        [expected[0], expected[-1]],
        [expected[0], expected[-1]],
        color=SOFT,
        linestyle="--",
        linewidth=1,
        label="rounding alone",
    )
    axes.plot(
        expected, errors, color="#2f6f9f", marker="o", markersize=3, linewidth=1, label="seen"
    )
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
    heat = detail.heatmap
    assert heat is not None
    rows, channels = heat.shape
    values = [[heat.values[r * channels + c] for c in range(channels)] for r in range(rows)]
    image = draw_values(axes, values, (0, heat.channels, heat.rows, 0))
    axes.set_xlabel("channel")
    axes.set_ylabel("row")
    for axis, begin, end in heat.hit:
        draw = axes.axhspan if axis == "row" else axes.axvspan
        draw(
            begin,
            max(end, begin + 1),
            fill=False,
            edgecolor=FAULT_COLOUR,
            linewidth=1.4,
            clip_on=False,
            zorder=5,
        )
    if image is not None:
        axes.figure.colorbar(image, ax=axes, label="root mean square error", pad=0.02)
    if heat.sentence:
        axes.text(
            0,
            -0.22,
            words(heat.sentence, 120),
            transform=axes.transAxes,
            fontsize=8,
            color=SOFT,
            va="top",
            wrap=True,
        )


def _at_noise(detail: PageDetail, line: Callable[..., Any], axes: Axes) -> None:
    if detail.noise:
        line(
            detail.noise,
            color=FAULT_COLOUR,
            linestyle="--",
            linewidth=1,
            label="standard deviation of rounding",
        )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best")


TENSOR_PLOTS: tuple[
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
        lambda d: any(x > 0 and y > 0 for x, y in d.quantiles),
        quantiles,
    ),
    ("heatmap", lambda d: d.heatmap is not None, heatmap),
)
