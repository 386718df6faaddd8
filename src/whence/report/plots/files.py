"""Which plots a page has, and their files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whence import disk, extras
from whence.records.slots import is_written
from whence.report.own_files import MARK, check_replaceable
from whence.report.plots.along import along
from whence.report.plots.style import (
    FAULT_COLOUR,
    NAME_WIDTH,
    RC,
    SOFT,
    draw_values,
    is_shown,
    words,
)
from whence.report.plots.tensor import TENSOR_PLOTS
from whence.report.tables import TAIL
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
        for name, has, draw in TENSOR_PLOTS:
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
