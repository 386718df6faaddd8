"""Which plots a page has, and their files.

Plots of one tensor: histogram, error against magnitude, quantiles, heatmap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import disk, dtypes, extras
from whence.records.slots import is_written
from whence.report.own_files import MARK, check_replaceable
from whence.report.plots.along import along
from whence.report.plots.style import (
    FAULT_COLOUR,
    NAME_WIDTH,
    POINTS,
    RC,
    SOFT,
    draw_values,
    is_shown,
    words,
)
from whence.report.tables import TAIL, count
from whence.results import GUILTY
from whence.results.page import Page, PageDetail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DETAILS = 3  # calls whose tensors get plots of their own
_DPI = 200
_LABELS = 64  # names of a heatmap's rows
_NARROW = 12  # steps that get a tick each


def write(page: Page, folder: Path) -> list[Path]:
    """Write every plot that the page has numbers for, each in every format; returns the files.
    Raises MissingDependency, OutputExists for a file of somebody else, OSError.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise extras.missing("matplotlib", "a plot", error) from error
    drawings = list(plots(page))
    for name, form in itertools.product([name for name, *_ in drawings], FORMATS):
        check_replaceable(folder / f"{name}.{form}", force=True)
    disk.make_folders(folder)
    files = []
    with mpl.rc_context({**mpl.rcParamsDefault, **RC, "backend": "agg"}):
        for name, size, draw in drawings:
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            for form in FORMATS:
                files.append(folder / f"{name}.{form}")
                metadata = {"Date": None, "Creator": MARK} if form == "svg" else {"Software": MARK}
                with disk.whole_file(files[-1]) as file:
                    figure.savefig(file, format=form, dpi=_DPI, metadata=metadata)
    return files


def plots(page: Page) -> Iterator[tuple[str, tuple[float, float], Callable[[Figure], None]]]:
    """(file name without suffix, size in inches, what draws it), in the order in which a reader
    asks.
    """
    if page.calls:
        yield "error-along-the-run", (9.0, 4.2), lambda figure: along(page, figure)
    for number, detail in enumerate(telling(page), 1):
        end = f"-{number}" if number > 1 else ""
        for name, has, draw in _TENSOR_PLOTS:
            if has(detail):
                yield name + end, (5.2, 3.8), _drawing(draw, page, detail)
    for axis in ("step", "rank"):
        values = sorted({getattr(call, axis) for call in page.calls})
        names = list(dict.fromkeys(call.name for call in page.calls if is_shown(call)))
        if len(values) > 1 and names:
            height = 1.6 + 0.14 * min(len(names), _LABELS)
            width = 4.2 + 0.22 * min(len(values), 24)
            yield f"{axis}-by-layer", (width, height), _gridded(page, axis, values, names)


def _drawing(
    draw: Callable[[PageDetail, Axes], None], page: Page, detail: PageDetail
) -> Callable[[Figure], None]:
    def draw_on(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(detail, axes)
        call = page.calls[detail.call]
        axes.set_title(f"{words(f'{call.name}  {detail.slot}', 60, TAIL)}\n", fontweight="bold")
        under = f"{call.op_type}, step {call.step}, rank {call.rank}: {call.verdict}"
        axes.text(0, 1.02, words(under, 80), transform=axes.transAxes, color=SOFT)

    return draw_on


def telling(page: Page) -> list[PageDetail]:
    """The tensors that are plotted, one a call: those of findings, of other guilty calls, then the
    rest; none that are equal.
    """
    pairs = [finding.pair for finding in page.comparison.findings]
    places = {call.pair: i for i, call in enumerate(page.calls)}
    at_fault = [places[pair] for pair in pairs if pair in places]
    guilty = [d.call for d in page.details if page.calls[d.call].verdict in GUILTY]
    best: dict[int, PageDetail] = {}
    for detail in page.details:
        if (
            not detail.identical
            and detail.edges
            and (detail.call not in best or _rank(detail) > _rank(best[detail.call]))
        ):
            best[detail.call] = detail
    order = [i for i in dict.fromkeys([*at_fault, *guilty, *best]) if i in best]
    return [best[i] for i in order[:DETAILS]]


def _rank(detail: PageDetail) -> tuple[bool, float]:
    return is_written(detail.slot) or ":" in detail.slot, detail.figures.get("rel_l2") or 0.0


def _gridded(
    page: Page, axis: str, values: Sequence[int], names: Sequence[str]
) -> Callable[[Figure], None]:
    worst: dict[tuple[str, int], float | None] = {}
    marked: set[tuple[str, int]] = set()
    for call in page.calls:
        if is_shown(call):
            cell = call.name, getattr(call, axis)
            largest = worst.get(cell)
            worst[cell] = call.error if largest is None else max(largest, call.error or 0.0)
            if call.verdict in GUILTY:
                marked.add(cell)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        cells = [[worst.get((name, value)) for value in values] for name in names]
        image = draw_values(axes, cells, (-0.5, len(values) - 0.5, len(names) - 0.5, -0.5))
        stars = [(values.index(value), names.index(name)) for name, value in marked]
        if stars:
            across, down = zip(*stars)
            axes.scatter(
                across,
                down,
                marker="*",
                s=46,
                color=FAULT_COLOUR,
                edgecolors="white",
                linewidths=0.4,
                label="introduced here",
            )
            figure.legend(loc="outside lower left", fontsize=8)
        some = range(0, len(names), -(-len(names) // _LABELS))
        axes.set_yticks(list(some), [words(names[i], NAME_WIDTH, TAIL) for i in some], fontsize=7)
        ticks = range(0, len(values), -(-len(values) // _NARROW))
        axes.set_xticks(list(ticks), [str(values[i]) for i in ticks])
        axes.set_xlabel(axis)
        axes.set_title(f"largest relative error by {axis} and layer", fontweight="bold")
        if image is not None:
            figure.colorbar(image, ax=axes, label="rel_l2", pad=0.02)

    return draw


def _histogram(detail: PageDetail, axes: Axes) -> None:
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


def _magnitude(detail: PageDetail, axes: Axes) -> None:
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


def _quantiles(detail: PageDetail, axes: Axes) -> None:
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


def _heatmap(detail: PageDetail, axes: Axes) -> None:
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


_TENSOR_PLOTS: tuple[
    tuple[str, Callable[[PageDetail], bool], Callable[[PageDetail, Any], None]], ...
] = (
    ("histogram", lambda d: bool(d.edges and any(d.counts)), _histogram),
    (
        "error-against-magnitude",
        lambda d: any(size > 0 and error > 0 for size, error in d.magnitude),
        _magnitude,
    ),
    (
        "quantiles",
        lambda d: any(x > 0 and y > 0 for x, y in d.quantiles),
        _quantiles,
    ),
    ("heatmap", lambda d: d.heatmap is not None, _heatmap),
)
