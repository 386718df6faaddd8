"""Two sequences of calls aligned by how well their features fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whence.align.calls.fingerprints import Feature, distance
from whence.align.calls.sequence_alignment import Aligned, Scores, align, longest_increasing
from whence.align.module_names import likeness

# What each agreement is worth. Parameters that agree weigh less than class, shapes and place
# together: two layers whose weights were exchanged still pair with their namesakes, and the
# exchange is the finding.
KIND, FAMILY, SHAPES, BARE, CONTENT, CLOSE = 2.0, 1.5, 2.0, 0.5, 4.0, 2.0
OUT, OUTPUT, WORD, LAYOUT = 1.0, 1.5, 2.0, 2.0
OTHER_SHAPES, OTHER_FORM = -1.0, -2.0
LEAST = 2.5  # evidence a pair needs
_CELLS = 1 << 22  # of a table; longer sequences are split first
_WORDS = 20_000  # pairs of names that are compared letter by letter
_CLOSE_MOMENTS = 1e-3

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Words = Callable[[int], str]


def _column(features: Sequence[Feature], name: str) -> np.ndarray[Any, Any]:
    return np.asarray([getattr(f, name) for f in features], dtype=np.int64)


def scores(
    left: Sequence[Feature], right: Sequence[Feature], words: Words, *, named: bool = False
) -> Scores:
    """How well each call of the left fits each of the right: (n, m) float64, -inf where one cannot
    be the other.

    words: the name behind `Feature.word`. named: most calls of both runs share their names, so that
    another name with other parameters is another call.
    """

    def same(name: str) -> tuple[Bools, Bools]:
        """(equal and known, known on both sides)."""
        a, b = _column(left, name)[:, None], _column(right, name)[None, :]
        known = (a > 0) & (b > 0)
        return (a == b) & known, known

    kind, _ = same("kind")
    fam, fam_known = same("family")
    shapes, shapes_known = same("shapes")
    content, content_known = same("content")
    out, out_known = same("out")
    out_hash, _ = same("out_hash")
    bare = (_column(left, "shapes")[:, None] == 0) & (_column(right, "shapes")[None, :] == 0)
    box_a = _column(left, "container")[:, None] > 0
    box_b = _column(right, "container")[None, :] > 0
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
    shared = _shared(left, right) if boxes.any() or named else np.zeros(total.shape)
    close = distance([f.moments for f in left], [f.moments for f in right]) < _CLOSE_MOMENTS
    total += np.maximum(
        np.where(content & ~boxes, CONTENT, np.where(close, CLOSE, 0.0)), CONTENT * shared * boxes
    )
    total += OUTPUT * np.where(out_hash, 1.0, _output_nearness(left, right))
    likenesses = _likenesses(left, right, words)
    total += WORD * likenesses
    # Calls known to be of different operator families are different calls, whatever their shapes.
    excluded = fam_known & ~fam & ~(content & content_known)
    # Other parameters and other outputs: a part of a fused call, or the whole; not one call for
    # one.
    excluded |= shapes_known & ~shapes & out_known & ~out & (likenesses < 0.9)
    if named:
        telling = content_known | (
            np.asarray([bool(f.held) for f in left])[:, None]
            & np.asarray([bool(f.held) for f in right])
        )
        excluded |= telling & ~content & ~close & (shared < 0.1) & (likenesses < 0.5)
    return np.where(excluded, -np.inf, total)


def _output_nearness(left: Sequence[Feature], right: Sequence[Feature]) -> Scores:
    """1 where the moments of the outputs differ by 1e-7 at most, 0 from 1e-1."""
    differences = distance([f.out_moments for f in left], [f.out_moments for f in right])
    with np.errstate(divide="ignore"):
        return np.asarray(np.clip((-1.0 - np.log10(differences)) / 6.0, 0.0, 1.0))


def _shared(left: Sequence[Feature], right: Sequence[Feature]) -> Scores:
    """Share of the parameters below that both hold, 0..1."""
    holders: dict[int, list[int]] = {}
    for j, f in enumerate(right):
        for element in f.held:
            holders.setdefault(element, []).append(j)
    out = np.zeros((len(left), len(right)))
    for i, f in enumerate(left):
        for j, n in Counter(j for element in f.held for j in holders.get(element, ())).items():
            out[i, j] = n / max(len(f.held), len(right[j].held))
    return out


def _likenesses(left: Sequence[Feature], right: Sequence[Feature], words: Words) -> Scores:
    """Likeness of the names, 0..1."""
    left_words, a = np.unique([f.word for f in left], return_inverse=True)
    right_words, b = np.unique([f.word for f in right], return_inverse=True)
    if len(left_words) * len(right_words) > _WORDS:
        table = (left_words[:, None] == right_words[None, :]).astype(np.float64)
    else:
        names = [words(int(k)) for k in right_words]
        table = np.array([[likeness(words(int(i)), name) for name in names] for i in left_words])
        # A number says which of many, not what.
        digits = np.array([words(int(i)).isdigit() for i in left_words])
        table[digits] *= 0.25
    return np.asarray(table[a][:, b], dtype=np.float64)


def sequence(
    left: Sequence[Feature], right: Sequence[Feature], words: Words, *, named: bool = False
) -> Aligned:
    """Align two sequences of any length. Long ones are cut where a segment occurs once on either
    side.
    """
    pairs: list[tuple[int, int, float]] = []
    doubtful: list[tuple[int, list[int]]] = []
    todo = [(0, len(left), 0, len(right))]
    while todo:
        a, b, c, d = todo.pop()
        if a == b or c == d:
            continue
        lefts, rights = left[a:b], right[c:d]
        if _same_sequence(lefts, rights):
            pairs += [(a + k, c + k, CONTENT + SHAPES) for k in range(len(lefts))]
            continue
        if len(lefts) * len(rights) <= _CELLS:
            aligned = align(scores(lefts, rights, words, named=named), LEAST)
            pairs += [(a + i, c + j, s) for i, j, s in aligned.pairs]
            doubtful += [(a + i, [c + j for j in js]) for i, js in aligned.doubtful]
            continue
        anchors = _anchors(_tokens(lefts, True), _tokens(rights, True)) or _anchors(
            _tokens(lefts, False), _tokens(rights, False)
        )
        if not anchors:
            if _tokens(lefts, False) == _tokens(rights, False):
                pairs += [(a + k, c + k, KIND + OUT) for k in range(len(lefts))]
            continue
        i0, j0 = 0, 0
        for i, j in [*anchors, (len(lefts), len(rights))]:
            if i > i0 and j > j0:
                todo.append((a + i0, a + i, c + j0, c + j))
            if i < len(lefts):
                pairs.append((a + i, c + j, KIND + SHAPES))
            i0, j0 = i + 1, j + 1
    return Aligned(sorted(pairs), sorted(doubtful))


def _same_sequence(left: Sequence[Feature], right: Sequence[Feature]) -> bool:
    """Do the contents of the parameters say that both are the same calls in the same order?"""
    if len(left) != len(right):
        return False
    strong = _tokens(left, True)
    return all(f.content or f.held for f in left if f.shapes) and strong == _tokens(right, True)


def _tokens(features: Sequence[Feature], strong: bool) -> list[tuple[Any, ...]]:
    if strong:
        return [(f.family or f.kind, f.shapes, f.content, f.held, f.out) for f in features]
    return [(f.family or f.kind, f.layout, f.out) for f in features]


def _anchors(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """Positions inside segments that occur once on both sides, in increasing order. Tried with
    longer and longer segments.
    """
    ids: dict[tuple[Any, ...], int] = {}
    a = np.array([ids.setdefault(t, len(ids)) for t in left], dtype=np.uint64)
    b = np.array([ids.setdefault(t, len(ids)) for t in right], dtype=np.uint64)
    width = 1
    while width <= min(len(a), len(b), 512):
        x, y = _rolled(a, width), _rolled(b, width)
        place = {int(v): j for v, j in _once(y)}
        anchors = longest_increasing([(i, place[int(v)]) for v, i in _once(x) if int(v) in place])
        if anchors:
            return anchors
        width *= 2
    return []


def _rolled(
    tokens: np.ndarray[Any, np.dtype[np.uint64]], width: int
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A 64-bit mix of each segment of `width` tokens."""
    mixed = (tokens + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    half = 1
    while half < width:  # a power of two: segments double
        mixed = mixed[:-half] * np.uint64(0xBF58476D1CE4E5B9) + (
            mixed[half:] ^ (mixed[half:] >> np.uint64(29))
        )
        half *= 2
    return mixed


def _once(values: np.ndarray[Any, np.dtype[np.uint64]]) -> list[tuple[int, int]]:
    """(value, position) of the values that occur once, in their order."""
    unique, first, count = np.unique(values, return_index=True, return_counts=True)
    single = count == 1
    positions = first[single]
    order = np.argsort(positions)
    return [(int(v), int(i)) for v, i in zip(unique[single][order], positions[order])]
