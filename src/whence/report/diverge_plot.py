"""The losses of two trainings, and how far they are apart with the band of noise, as an SVG that
follows the light or dark scheme of whoever looks at it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from whence.report.diverge import headline
from whence.report.own_files import MARK
from whence.report.tables import clean, shortened
from whence.results import Diverged, Status

_WIDTH, _LEFT, _RIGHT = 900, 74, 20
_TOP, _UPPER, _GAP, _LOWER = 64, 170, 46, 190
_HEIGHT = _TOP + _UPPER + _GAP + _LOWER + 62
_MOST = 1200
"""Points of a line; of more steps the largest of each stretch is drawn."""
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1d1f23 }
.soft { fill: #5d636d } .title { font-size: 14px; font-weight: 600 }
.paper { fill: #ffffff } .grid { stroke: #e4e6ea } .frame { stroke: #9aa0a8; fill: none }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round }
.one { stroke: #0072b2 } .two { stroke: #c05a00; stroke-dasharray: 5 3 } .apart { stroke: #1d1f23 }
.again { stroke: #008a65; stroke-dasharray: 2 3 } .band { fill: #7fa3c4; fill-opacity: 0.35 }
.part { stroke: #c4161c; stroke-width: 1.5; stroke-dasharray: 6 3 } .parttext { fill: #c4161c }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8eb } .soft { fill: #a8afb9 } .paper { fill: #16181c } .grid { stroke: #2c3038 }
.one { stroke: #4db2f0 } .two { stroke: #f0a04d } .apart { stroke: #e6e8eb }
.again { stroke: #3cc79d } .part { stroke: #ff6b6b } .parttext { fill: #ff6b6b }
}
"""

Point = tuple[float, float]


class _Axis(NamedTuple):
    """From values to places: a linear or a logarithmic scale. end: the place of `high`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is at the edge."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.begin + (self.end - self.begin) * (value - low) / ((high - low) or 1.0)


def diverged_svg(result: Diverged) -> Iterator[str]:
    """The picture, in pieces."""
    steps = [d.step for d in result.drift] or [0]
    across = _Axis(steps[0], max(steps[-1], steps[0] + 1), _LEFT, _WIDTH - _RIGHT)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img"><!-- {MARK} -->\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>\n'
    )
    yield _text(_LEFT, 24, shortened(clean(headline(result)), 110), "title")
    yield from _losses(result, across)
    yield from _differences(result, across)
    yield from _marker(result, across)
    yield from _below(across)
    yield "</svg>\n"


def _losses(result: Diverged, across: _Axis) -> Iterator[str]:
    one = [(d.step, d.reference) for d in result.drift if d.reference is not None]
    two = [(d.step, d.target) for d in result.drift if d.target is not None]
    values = [value for _, value in [*one, *two]]
    bottom = _TOP + _UPPER
    yield _frame(_TOP, bottom)
    if not values:
        yield _text(_LEFT + 10, _TOP + 24, "no loss was recorded", "soft")
        return
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    up = _Axis(low - margin, high + margin, bottom, _TOP)
    ticks = _linear_ticks(up.low, up.high)
    yield from _ticks(up, ticks, lambda v: f"{v:.4g}")
    yield from (
        _line(_placed(points, across, up), name) for points, name in ((one, "one"), (two, "two"))
    )
    yield from _legend(_TOP - 12, (("one", "loss, reference"), ("two", "loss, target")))


def _differences(result: Diverged, across: _Axis) -> Iterator[str]:
    """The difference of the losses above the band of noise; without a loss the median difference
    of all tensors.
    """
    top = _TOP + _UPPER + _GAP
    bottom = top + _LOWER
    yield _frame(top, bottom)
    losses = [
        (d.step, abs(d.target - d.reference))
        for d in result.drift
        if d.reference is not None and d.target is not None
    ]
    band = list(_band(result))
    apart = [(d.step, d.apart) for d in result.drift if d.apart]
    again = [(d.step, d.repetition) for d in result.drift if d.repetition]
    positive = [v for _, v in (*losses, *band, *apart, *again) if v > 0]
    if not positive:
        yield _text(_LEFT + 10, top + 24, "equal bit for bit", "soft")
        return
    low, high = max(min(positive), max(positive) * 1e-12) / 2, max(positive) * 2
    up = _Axis(low, high, bottom, top, True)
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    every = -(-len(decades) // 6) or 1
    yield from _ticks(up, [10.0**d for d in decades[::every]], lambda v: f"{v:.0e}")
    if band:
        edge = _placed(band, across, up)
        corners = [(edge[0][0], bottom), *edge, (edge[-1][0], bottom)]
        yield f'<polygon class="band" points="{_points(corners)}"/>\n'
    shown = [("two", "difference of the loss", [p for p in losses if p[1] > 0])]
    shown += [("apart", "median relative difference", apart)]
    shown += [("again", "that of a repetition", again)]
    names = []
    for style, words, points in shown:
        if points:
            yield _line(_placed(points, across, up), style)
            names.append((style, words))
    if band:
        names.append(("band", "noise of the loss"))
    yield from _legend(top - 12, names)


def _band(result: Diverged) -> Iterator[tuple[int, float]]:
    """The noise of the loss; once they have parted it stays what it was."""
    part = result.part if result.status == Status.DIFFERENT else None
    last = 0.0
    for drift in result.drift:
        if drift.band and (part is None or drift.step <= part.step or not last):
            last = drift.band
        if last:
            yield drift.step, last


def _marker(result: Diverged, across: _Axis) -> Iterator[str]:
    """Where they part."""
    part = result.part
    if part is None or result.status != Status.DIFFERENT:
        return
    step = part.during if part.during >= 0 else part.step
    x, second = across.at(step), _TOP + _UPPER + _GAP
    for top, bottom in ((_TOP, _TOP + _UPPER), (second, second + _LOWER)):
        yield f'<line class="part" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>\n'
    is_left = x > (_LEFT + _WIDTH) / 2
    words = shortened(f"step {step}: {part.name}", 60)
    yield _text(x + (-8 if is_left else 8), _TOP + 18, words, "parttext", "end" if is_left else "")


def _below(across: _Axis) -> Iterator[str]:
    bottom = _TOP + _UPPER + _GAP + _LOWER
    for value in _linear_ticks(across.low, across.high):
        if value == int(value):
            yield _text(across.at(value), bottom + 18, f"{int(value):,}", "soft", "middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 40, "step", "soft", "middle")


def _linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range, four to nine."""
    rough = (high - low) / 6 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / width)
    return [k * width for k in range(first, math.floor(high / width) + 1)]


def _placed(points: Sequence[tuple[int, float]], across: _Axis, up: _Axis) -> list[Point]:
    every = -(-len(points) // _MOST)
    largest = [max(points[k : k + every], key=lambda p: p[1]) for k in range(0, len(points), every)]
    return [(across.at(step), up.at(value)) for step, value in largest]


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(points: Sequence[Point], style: str) -> str:
    if len(points) == 1:
        x, y = points[0]
        return f'<circle class="line {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>\n'
    return f'<polyline class="line {style}" points="{_points(points)}"/>\n'


def _frame(top: float, bottom: float) -> str:
    width = _WIDTH - _RIGHT - _LEFT
    return f'<rect class="frame" x="{_LEFT}" y="{top}" width="{width}" height="{bottom - top}"/>\n'


def _ticks(up: _Axis, values: Sequence[float], words: Callable[[float], str]) -> Iterator[str]:
    for value in values:
        y = up.at(value)
        ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line class="grid" {ends}/>\n'
        yield _text(_LEFT - 8, y + 4, words(value), "soft", "end")


def _legend(y: float, names: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = float(_LEFT)
    for style, words in names:
        if style == "band":
            yield f'<rect class="band" x="{x}" y="{y - 9}" width="24" height="10"/>\n'
        else:
            yield f'<line class="line {style}" x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}"/>\n'
        yield _text(x + 30, y, words)
        x += 52 + 7 * len(words)


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    name = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{name}{place}>{html.escape(words)}</text>\n'
