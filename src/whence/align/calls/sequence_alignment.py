"""Two sequences of calls brought face to face: not line by line, but so that what was inserted or
removed stays alone.

The alignment with the largest sum of likenesses wins (Needleman and Wunsch, J. Mol. Biol. 48, 1970,
with free gaps). A pair counts only if every best alignment has it; what several fit equally is
returned as doubtful.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.align.calls.fingerprints import Feature, distance
from whence.align.module_names import likeness

# What each agreement is worth. Parameters that agree weigh less than class, shapes and place
# together: two layers whose weights were exchanged still face their namesakes, and the exchange is
# the finding.
KIND, FAMILY, SHAPES, BARE, CONTENT, CLOSE = 2.0, 1.5, 2.0, 0.5, 4.0, 2.0
OUT, OUTPUT, WORD, LAYOUT = 1.0, 1.5, 2.0, 2.0
OTHER_SHAPES, OTHER_FORM = -1.0, -2.0
LEAST = 2.5  # evidence a pair needs
_EQUAL = 0.3  # alternatives within this are equal
_CELLS = 1 << 22  # of a table; longer sequences are split first
_WORDS = 20_000  # pairs of names that are compared letter by letter
_CLOSE_MOMENTS = 1e-3

Scores = np.ndarray[Any, np.dtype[np.float64]]


class Aligned(NamedTuple):
    """Positions that face each other, with the likeness each pair rests on, and positions that
    several fit equally.
    """

    pairs: list[tuple[int, int, float]]
    doubtful: list[tuple[int, list[int]]]


def scores(
    left: Sequence[Feature],
    right: Sequence[Feature],
    words: Callable[[int], str],
    *,
    named: bool = False,
) -> Scores:
    """How well each of the left fits each of the right: (n, m) float64, -inf where one cannot be
    the other.

    words: the name behind `Feature.word`. named: most calls of both runs share their names, so that
    another name with other parameters is another call.
    """

    def column(features: Sequence[Feature], name: str) -> np.ndarray[Any, Any]:
        return np.asarray([getattr(f, name) for f in features], dtype=np.int64)

    def same(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(equal and known, known on both sides)."""
        a, b = column(left, name)[:, None], column(right, name)[None, :]
        known = (a > 0) & (b > 0)
        return (a == b) & known, known

    kind, _ = same("kind")
    fam, fam_known = same("family")
    shapes, shapes_known = same("shapes")
    content, content_known = same("content")
    out, _ = same("out")
    out_hash, _ = same("out_hash")
    bare = (column(left, "shapes")[:, None] == 0) & (column(right, "shapes")[None, :] == 0)
    box_a, box_b = column(left, "container")[:, None] > 0, column(right, "container")[None, :] > 0
    boxes = box_a & box_b
    layout = boxes & same("layout")[0]
    total = np.where(kind, KIND, np.where(fam, FAMILY, 0.0))
    total += np.where(
        shapes, SHAPES, np.where(shapes_known, OTHER_SHAPES, np.where(bare, BARE, OTHER_FORM))
    )
    total += (
        np.where(out, OUT, 0.0)
        + np.where(layout, LAYOUT, 0.0)
        + np.where(box_a != box_b, OTHER_FORM, 0.0)
    )
    held = _shared(left, right) if boxes.any() or named else np.zeros(total.shape)
    close = distance([f.moments for f in left], [f.moments for f in right]) < _CLOSE_MOMENTS
    total += np.maximum(
        np.where(content & ~boxes, CONTENT, np.where(close, CLOSE, 0.0)), CONTENT * held * boxes
    )
    apart = distance([f.out_moments for f in left], [f.out_moments for f in right])
    with np.errstate(divide="ignore"):
        near = np.clip((-1.0 - np.log10(apart)) / 6.0, 0.0, 1.0)  # 1 at 1e-7, 0 at 1e-1
    total += OUTPUT * np.where(out_hash, 1.0, near)
    alike = _words(left, right, words)
    total += WORD * alike
    # What is known to be another kind of operator is not the same call, whatever its shapes.
    other = fam_known & ~fam & ~(content & content_known)
    # Other parameters and other outputs: a part of what is fused across, or the whole; not one call
    # for one.
    out_known = (column(left, "out")[:, None] > 0) & (column(right, "out")[None, :] > 0)
    other |= shapes_known & ~shapes & out_known & ~out & (alike < 0.9)
    if named:
        telling = content_known | (
            np.asarray([bool(f.held) for f in left])[:, None]
            & np.asarray([bool(f.held) for f in right])
        )
        other |= telling & ~content & ~close & (held < 0.1) & (alike < 0.5)
    return np.where(other, -np.inf, total)


def _shared(left: Sequence[Feature], right: Sequence[Feature]) -> Scores:
    """Share of the parameters below that both hold, 0..1."""
    where: dict[int, list[int]] = {}
    for j, f in enumerate(right):
        for one in f.held:
            where.setdefault(one, []).append(j)
    out = np.zeros((len(left), len(right)))
    for i, f in enumerate(left):
        for j, n in Counter(j for one in f.held for j in where.get(one, ())).items():
            out[i, j] = n / max(len(f.held), len(right[j].held))
    return out


def _words(
    left: Sequence[Feature], right: Sequence[Feature], words: Callable[[int], str]
) -> Scores:
    ours, a = np.unique([f.word for f in left], return_inverse=True)
    theirs, b = np.unique([f.word for f in right], return_inverse=True)
    if len(ours) * len(theirs) > _WORDS:
        table = (ours[:, None] == theirs[None, :]).astype(np.float64)
    else:
        names = [words(int(k)) for k in theirs]
        table = np.array([[likeness(words(int(i)), name) for name in names] for i in ours])
        # A number says which of many, not what.
        digits = np.array([words(int(i)).isdigit() for i in ours])
        table[digits] *= 0.25
    return np.asarray(table[a][:, b], dtype=np.float64)


def align(table: Scores) -> Aligned:
    """The best alignment of a table of likenesses (n, m); a likeness below LEAST never pairs."""
    n, m = table.shape
    s = np.where(table >= LEAST, table, -np.inf)
    if not np.isfinite(s).any():
        return Aligned([], [])
    ahead, behind = _best(s), _best(s[::-1, ::-1])[::-1, ::-1]
    best = float(ahead[n, m])
    through = ahead[:n, :m] + s + behind[1:, 1:]
    possible = through >= best - _EQUAL
    per_row, per_column = possible.sum(axis=1), possible.sum(axis=0)
    pairs: list[tuple[int, int, float]] = []
    doubtful: list[tuple[int, list[int]]] = []
    for i in np.flatnonzero(per_row):
        found = [int(j) for j in np.flatnonzero(possible[i])]
        if len(found) == 1 and per_column[found[0]] == 1:
            pairs.append((int(i), found[0], float(table[i, found[0]])))
        else:
            doubtful.append((int(i), found))
    return Aligned(pairs, doubtful)


def _best(s: Scores) -> Scores:
    """best[i, j]: the largest sum of any alignment of the first i with the first j."""
    n, m = s.shape
    best = np.zeros((n + 1, m + 1))
    for i in range(n):
        step = np.maximum(best[i, 1:], best[i, :-1] + s[i])
        best[i + 1, 1:] = np.maximum.accumulate(step)
    return best


def sequence(
    left: Sequence[Feature],
    right: Sequence[Feature],
    words: Callable[[int], str],
    *,
    named: bool = False,
) -> Aligned:
    """Align two sequences of any length. Long ones are cut where a stretch occurs once on either
    side.
    """
    pairs: list[tuple[int, int, float]] = []
    doubtful: list[tuple[int, list[int]]] = []
    todo = [(0, len(left), 0, len(right))]
    while todo:
        a, b, c, d = todo.pop()
        if a == b or c == d:
            continue
        mine, theirs = left[a:b], right[c:d]
        if len(mine) == len(theirs):
            strong = _tokens(mine, True)
            if all(f.content or f.held for f in mine if f.shapes) and strong == _tokens(
                theirs, True
            ):
                pairs += [(a + k, c + k, CONTENT + SHAPES) for k in range(len(mine))]
                continue
        if len(mine) * len(theirs) <= _CELLS:
            found = align(scores(mine, theirs, words, named=named))
            pairs += [(a + i, c + j, s) for i, j, s in found.pairs]
            doubtful += [(a + i, [c + j for j in others]) for i, others in found.doubtful]
            continue
        anchors = _anchors(_tokens(mine, True), _tokens(theirs, True)) or _anchors(
            _tokens(mine, False), _tokens(theirs, False)
        )
        if not anchors:
            if _tokens(mine, False) == _tokens(theirs, False):
                pairs += [(a + k, c + k, KIND + OUT) for k in range(len(mine))]
            continue
        i0, j0 = 0, 0
        for i, j in [*anchors, (len(mine), len(theirs))]:
            if i > i0 and j > j0:
                todo.append((a + i0, a + i, c + j0, c + j))
            if i < len(mine):
                pairs.append((a + i, c + j, KIND + SHAPES))
            i0, j0 = i + 1, j + 1
    return Aligned(sorted(pairs), sorted(doubtful))


def _tokens(features: Sequence[Feature], strong: bool) -> list[tuple[Any, ...]]:
    if strong:
        return [(f.family or f.kind, f.shapes, f.content, f.held, f.out) for f in features]
    return [(f.family or f.kind, f.layout, f.out) for f in features]


def _anchors(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """Positions inside stretches that occur once on both sides, in increasing order. Tried with
    longer and longer stretches.
    """
    ids: dict[tuple[Any, ...], int] = {}
    a = np.array([ids.setdefault(t, len(ids)) for t in left], dtype=np.uint64)
    b = np.array([ids.setdefault(t, len(ids)) for t in right], dtype=np.uint64)
    width = 1
    while width <= min(len(a), len(b), 512):
        x, y = _rolled(a, width), _rolled(b, width)
        place = {int(v): j for v, j in _once(y)}
        found = longest_increasing([(i, place[int(v)]) for v, i in _once(x) if int(v) in place])
        if found:
            return found
        width *= 2
    return []


def _rolled(
    tokens: np.ndarray[Any, np.dtype[np.uint64]], width: int
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A 64-bit mix of each stretch of `width` tokens."""
    mixed = (tokens + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    half = 1
    while half < width:  # a power of two: stretches double
        mixed = mixed[:-half] * np.uint64(0xBF58476D1CE4E5B9) + (
            mixed[half:] ^ (mixed[half:] >> np.uint64(29))
        )
        half *= 2
    return mixed


def _once(values: np.ndarray[Any, np.dtype[np.uint64]]) -> list[tuple[int, int]]:
    found, first, count = np.unique(values, return_index=True, return_counts=True)
    alone = count == 1
    at = first[alone]
    order = np.argsort(at)
    return [(int(v), int(i)) for v, i in zip(found[alone][order], at[order])]


def longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of pairs (sorted by their first number) whose second numbers increase
    too.
    """
    ends: list[int] = []
    at: list[int] = []
    before = [-1] * len(pairs)
    for k, (_, j) in enumerate(pairs):
        place = bisect.bisect_left(ends, j)
        before[k] = at[place - 1] if place else -1
        if place == len(ends):
            ends.append(j)
            at.append(k)
        else:
            ends[place], at[place] = j, k
    out: list[tuple[int, int]] = []
    k = at[-1] if at else -1
    while k >= 0:
        out.append(pairs[k])
        k = before[k]
    return out[::-1]
