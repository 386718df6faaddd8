"""What wrong rows of a cache hold: zeros, rows of another request or position, another head, a
multiple, a rotation, codes with another scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from whence.workflows.serving.rows import Array, Kind, distances, ranges

_SCALES = 0.1
"""Largest relative difference of scales that count as equal: codes round them."""
_CLOSE = 1e-2
"""Largest relative difference of rows that count as equal."""
_COARSEST = 1 / 16
"""Relative rounding of the coarsest codes of eight bits."""
_MOST_POSITIONS, _MOST_PARTS = 64, 4
"""Most positions that are explained one by one when no single law explains all; most laws in an
answer.
"""
_MOSTLY = 0.9
"""Least share of the rows that one explanation must cover."""


class WrongRows(NamedTuple):
    """Wrong rows of the keys or values of one layer.

    rows: actual content, (cells, width). truth: correct content. positions, heads: of each cell.
    held: all correct rows of the request, (positions, heads, width). origin: by position, the
    (request, position) that wrote the row bit for bit, when known.
    """

    kind: Kind
    rows: Array
    truth: Array
    positions: Array
    heads: Array
    held: Array
    request: int
    origin: Mapping[int, tuple[int, int]]

    def at(self, position: int) -> WrongRows:
        """The rows of one position."""
        own = self.positions == position
        return self._replace(
            rows=self.rows[own],
            truth=self.truth[own],
            positions=self.positions[own],
            heads=self.heads[own],
        )


def explained(wrong: WrongRows) -> str:
    """Describe what the rows contain, as the end of a sentence ("hold zeros"); "" when no
    law fits.
    """
    if words := _by_one_law(wrong):
        return words
    parts: dict[str, list[int]] = {}
    for position in sorted(set(wrong.positions.tolist()))[:_MOST_POSITIONS]:
        parts.setdefault(_by_one_law(wrong.at(position)), []).append(position)
    if set(parts) == {""} or len(parts) > _MOST_PARTS:
        return ""
    return "; ".join(
        f"{position_words(places)} {words or 'hold something else'}"
        for words, places in parts.items()
    )


def _by_one_law(wrong: WrongRows) -> str:
    return next((words for law in _LAWS if (words := law(wrong))), "")


def _zeros(wrong: WrongRows) -> str:
    empty = ~wrong.rows.any(-1)
    return "hold zeros: never written, or cleared" if empty.mean() >= _MOSTLY else ""


def _elsewhere(wrong: WrongRows) -> str:
    """Detect rows that were written for another position or request."""
    sources = {
        position: wrong.origin[position]
        for position in sorted(set(wrong.positions.tolist()))
        if position in wrong.origin and wrong.origin[position] != (wrong.request, position)
    }
    if len(sources) < _MOSTLY * len(set(wrong.positions.tolist())):
        return ""
    requests = {request for request, _ in sources.values()}
    shifts = {place - position for position, (_, place) in sources.items()}
    if requests == {wrong.request} and len(shifts) == 1:
        shift = shifts.pop()
        return f"hold what belongs {_places(abs(shift))} {'later' if shift > 0 else 'earlier'}"
    texts = []
    for request in sorted(requests):
        places = [place for owner, place in sources.values() if owner == request]
        whose = "its own" if request == wrong.request else f"request {request + 1}'s"
        texts.append(f"{whose} {position_words(places)}")
    return f"hold {' and '.join(texts)}"


def _other_place(wrong: WrongRows) -> str:
    """Detect correct rows of the same request that are shifted, when no bits were copied
    exactly.
    """
    most = len(wrong.held) - 1
    for shift in (-1, 1, *range(-most, most + 1)):
        places = wrong.positions + shift
        inside = (places >= 0) & (places <= most)
        if shift and inside.any() and inside.mean() >= 0.5:
            moved = wrong.held[places[inside], wrong.heads[inside]]
            if _near(wrong.rows[inside], moved):
                side = "later" if shift > 0 else "earlier"
                return f"hold what belongs {_places(abs(shift))} {side}"
    return ""


def _other_heads(wrong: WrongRows) -> str:
    """Detect rows that belong to other heads."""
    order: dict[int, int] = {}
    for head in sorted(set(wrong.heads.tolist())):
        own = wrong.heads == head
        for place in range(wrong.held.shape[1]):
            if place != head and _near(wrong.rows[own], wrong.held[wrong.positions[own], place]):
                order[head] = place
    if len(order) < len(set(wrong.heads.tolist())):
        return ""
    return "hold other heads: " + ", ".join(f"{h} holds {p}" for h, p in order.items())


def _clipped(wrong: WrongRows) -> str:
    """Detect rows whose largest values were replaced by the largest that their codes can have."""
    limit = float(np.abs(wrong.rows).max())
    is_over = (np.abs(wrong.truth) > (1 + _COARSEST) * limit).any()
    if not is_over or not _near(wrong.rows, np.clip(wrong.truth, -limit, limit), _COARSEST):
        return ""
    return f"are cut off at {limit:.4g}: larger values do not fit, the scale is too small"


def _eight_bits(wrong: WrongRows) -> str:
    """Detect rows of numbers with three bits behind the first, as fp8 keeps them."""
    sixteenths = 16 * np.frexp(wrong.rows)[0]
    is_fp8 = (sixteenths == sixteenths.round()).all() and _near(wrong.rows, wrong.truth, _COARSEST)
    return "are kept as fp8: --cache fp8 allows its rounding" if is_fp8 else ""


def _rounded(wrong: WrongRows) -> str:
    """Detect rows that are right but for an error of a few percent without a factor."""
    factors = (wrong.rows * wrong.truth).sum(-1) / np.maximum((wrong.truth**2).sum(-1), 1e-30)
    errors = distances(wrong.rows, wrong.truth)
    if not np.median(np.abs(factors - 1)) < 0.2 * np.median(errors) < 0.02:
        return ""
    return f"are off by {np.median(errors):.2g} of their size: are they kept in fewer bits?"


def _factor(wrong: WrongRows) -> str:
    """Detect a constant factor, for all rows or for each head."""
    with np.errstate(all="ignore"):
        dots = (wrong.rows * wrong.truth).sum(-1)
        factors = dots / np.maximum((wrong.truth * wrong.truth).sum(-1), 1e-30)
    if not _near(wrong.rows, wrong.truth * factors[:, None]):
        return ""
    middle = float(np.median(factors))
    if np.abs(factors - middle).max() <= _CLOSE * abs(middle):
        return f"are {middle:.4g} times what they should be: a scale is missing or applied twice"
    return f"are multiples of what they should be, {factors.min():.3g} to {factors.max():.3g} times"


def _rotation(wrong: WrongRows) -> str:
    """Detect a rotation of pairs of channels: rotary angles of other positions or of
    another base.
    """
    if wrong.kind.read is not Kind.K_READ or wrong.rows.shape[-1] % 2:
        return ""
    half = wrong.rows.shape[-1] // 2
    for layout, (first, second) in {
        "halves": (slice(0, half), slice(half, None)),
        "neighbours": (slice(0, None, 2), slice(1, None, 2)),
    }.items():
        rows = wrong.rows[:, first] + 1j * wrong.rows[:, second]
        truth = wrong.truth[:, first] + 1j * wrong.truth[:, second]
        if not _near(np.abs(rows), np.abs(truth)):
            continue
        angle = float(np.angle((rows[:, 0] * truth[:, 0].conj()).sum()))
        whole = round(angle)
        if whole and math.isclose(angle, whole, abs_tol=0.02):
            return f"are rotated by {_places(abs(whole))} too {'many' if whole > 0 else 'few'}"
        return f"are rotated otherwise ({layout}): rope has another base, scaling or order"
    return ""


def _scale(wrong: WrongRows) -> str:
    """Detect codes that are decoded with a wrong scale, where each row has a scale of its own, in
    proportion to its largest value.
    """
    with np.errstate(all="ignore"):
        factors = (wrong.rows * wrong.truth).sum(-1) / (wrong.truth * wrong.truth).sum(-1)
    if not np.isfinite(factors).all():
        return ""
    scaled = wrong.truth * factors[:, None]
    if (_near(wrong.rows, scaled) and _constant(factors)) or not _near(wrong.rows, scaled, 0.2):
        return ""
    if _constant(factors) and np.ptp(wrong.positions):
        return f"are about {np.median(factors):.2g} times what they should be: a scale is wrong"
    sizes = np.abs(wrong.held).max(-1)
    own = sizes[wrong.positions, wrong.heads]
    if _constant(factors * own):
        return "are codes: the scale is missing"
    if _constant(factors / own):
        return "are decoded twice: the scale is applied twice"
    heads = sizes.shape[1]
    for shift in range(1, heads):
        others = (wrong.heads + shift) % heads
        if _constant(factors * own / sizes[wrong.positions, others], 1.0):
            return "are decoded with the scale of another head"
    for shift in (-1, 1, -2, 2):
        places = np.clip(wrong.positions + shift, 0, len(sizes) - 1)
        if _constant(factors * own / sizes[places, wrong.heads], 1.0):
            side = "later" if shift > 0 else "earlier"
            return f"are decoded with the scale of {_places(abs(shift))} {side}"
    return ""


def _constant(values: Array, value: float | None = None) -> bool:
    """Whether values that differ by rounding of codes alone are one, or `value`."""
    middle = float(np.median(values)) if value is None else value
    return bool((np.abs(values - middle) <= _SCALES * abs(middle)).mean() >= _MOSTLY)


_LAWS: tuple[Callable[[WrongRows], str], ...] = (
    _zeros, _elsewhere, _clipped, _eight_bits, _rounded, _scale, _factor, _rotation, _other_heads,
    _other_place,
)  # fmt: skip


def _near(rows: Array, truth: Array, close: float = _CLOSE) -> bool:
    """Whether most rows are equal up to rounding."""
    norms = np.maximum(np.linalg.norm(truth, axis=-1), 1e-30)
    near = np.linalg.norm(rows - truth, axis=-1) <= close * norms
    return bool(near.mean() >= _MOSTLY)


def _places(count: int) -> str:
    return "one position" if count == 1 else f"{count} positions"


def position_words(places: list[int]) -> str:
    """Positions as words ("positions 16 to 31 and 40")."""
    runs = ranges(places)
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in runs[:3]]
    texts += [f"{len(runs) - 3} more runs"] if len(runs) > 3 else []
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"position{'' if single else 's'} {' and '.join(texts)}"
