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
KIND, FAMILY, SHAPES, WEIGHT, BARE, CONTENT, CLOSE = 2.0, 1.5, 2.0, 1.0, 0.5, 4.0, 2.0
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
    reference: Sequence[Feature], target: Sequence[Feature], words: Words, *, named: bool = False
) -> Scores:
    """How well each call of the reference fits each of the target: (n, m) float64, -inf for pairs
    that are excluded.

    words: number of a word (`Feature.word`) -> the word. named: whether most calls of both runs
    share their names, so that calls with different names and parameters are excluded.
    """

    def same(name: str) -> tuple[Bools, Bools]:
        """(equal and known, known on both sides)."""
        a, b = _column(reference, name)[:, None], _column(target, name)[None, :]
        both_known = (a > 0) & (b > 0)
        return (a == b) & both_known, both_known

    kind, _ = same("kind")
    fam, fam_known = same("family")
    shapes, shapes_known = same("shapes")
    weight, _ = same("weight")
    content, content_known = same("content")
    out, out_known = same("out")
    out_hash, _ = same("out_hash")
    bare = (_column(reference, "shapes")[:, None] == 0) & (_column(target, "shapes")[None, :] == 0)
    box_a = _column(reference, "container")[:, None] > 0
    box_b = _column(target, "container")[None, :] > 0
    boxes = box_a & box_b
    layout = boxes & same("layout")[0]
    total = np.where(kind, KIND, np.where(fam, FAMILY, 0.0))
    total += np.where(
        shapes,
        SHAPES,
        np.where(
            weight & ~boxes,  # with a bias more or less
            WEIGHT,
            np.where(shapes_known, OTHER_SHAPES, np.where(bare, BARE, OTHER_FORM)),
        ),
    )
    total += (
        np.where(out, OUT, 0.0)
        + np.where(layout, LAYOUT, 0.0)
        + np.where(box_a != box_b, OTHER_FORM, 0.0)
    )
    shared = _shared(reference, target) if boxes.any() or named else np.zeros(total.shape)
    close = distance([f.moments for f in reference], [f.moments for f in target]) < _CLOSE_MOMENTS
    total += np.maximum(
        np.where(content & ~boxes, CONTENT, np.where(close, CLOSE, 0.0)), CONTENT * shared * boxes
    )
    total += OUTPUT * np.where(out_hash, 1.0, _output_nearness(reference, target))
    likenesses = _likenesses(reference, target, words)
    total += WORD * likenesses
    # Calls known to be of different operator families are different calls, whatever their shapes.
    # Equal parameters say more than names of classes, except where a layer looks up the rows of the
    # matrix by which another multiplies.
    sizes = [np.asarray([f.out_moments[0] for f in side]) for side in (reference, target)]
    resized = (sizes[0][:, None] != sizes[1]) & (sizes[0][:, None] > 0) & (sizes[1] > 0)
    excluded = fam_known & ~fam & (~(content & content_known) | resized)
    # Different parameters and different outputs: one call is a part of the other, not its partner.
    excluded |= shapes_known & ~shapes & out_known & ~out & (likenesses < 0.9)
    if named:
        telling = content_known | (
            np.asarray([bool(f.elements) for f in reference])[:, None]
            & np.asarray([bool(f.elements) for f in target])
        )
        excluded |= telling & ~content & ~close & (shared < 0.1) & (likenesses < 0.5)
    return np.where(excluded, -np.inf, total)


def _output_nearness(reference: Sequence[Feature], target: Sequence[Feature]) -> Scores:
    """1 where the moments of the outputs differ by 1e-7 at most, 0 from 1e-1."""
    differences = distance([f.out_moments for f in reference], [f.out_moments for f in target])
    with np.errstate(divide="ignore"):
        return np.asarray(np.clip((-1.0 - np.log10(differences)) / 6.0, 0.0, 1.0))


def _shared(reference: Sequence[Feature], target: Sequence[Feature]) -> Scores:
    """Share of the parameters below that both hold, 0..1."""
    holders: dict[int, list[int]] = {}
    for j, f in enumerate(target):
        for element in f.elements:
            holders.setdefault(element, []).append(j)
    out = np.zeros((len(reference), len(target)))
    for i, f in enumerate(reference):
        for j, n in Counter(j for element in f.elements for j in holders.get(element, ())).items():
            out[i, j] = n / max(len(f.elements), len(target[j].elements))
    return out


def _likenesses(reference: Sequence[Feature], target: Sequence[Feature], words: Words) -> Scores:
    """Likeness of the names, 0..1."""
    words_a, a = np.unique([f.word for f in reference], return_inverse=True)
    words_b, b = np.unique([f.word for f in target], return_inverse=True)
    if len(words_a) * len(words_b) > _WORDS:
        table = (words_a[:, None] == words_b[None, :]).astype(np.float64)
    else:
        names = [words(int(k)) for k in words_b]
        table = np.array([[likeness(words(int(i)), name) for name in names] for i in words_a])
        # A number says which of many calls it is, not what it computes.
        digits = np.array([words(int(i)).isdigit() for i in words_a])
        table[digits] *= 0.25
    return np.asarray(table[a][:, b], dtype=np.float64)


def sequence(
    reference: Sequence[Feature], target: Sequence[Feature], words: Words, *, named: bool = False
) -> Aligned:
    """Align two sequences; long ones are cut where a segment occurs once on either side."""
    pairs: list[tuple[int, int, float]] = []
    doubtful: list[tuple[int, list[int]]] = []
    todo = [(0, len(reference), 0, len(target))]
    while todo:
        a, b, c, d = todo.pop()
        if a == b or c == d:
            continue
        part, target_part = reference[a:b], target[c:d]
        if _same_sequence(part, target_part):
            pairs += [(a + k, c + k, CONTENT + SHAPES) for k in range(len(part))]
            continue
        if len(part) * len(target_part) <= _CELLS:
            aligned = align(scores(part, target_part, words, named=named), LEAST)
            pairs += [(a + i, c + j, s) for i, j, s in aligned.pairs]
            doubtful += [(a + i, [c + j for j in js]) for i, js in aligned.doubtful]
            continue
        anchors = _anchors(_tokens(part, True), _tokens(target_part, True)) or _anchors(
            _tokens(part, False), _tokens(target_part, False)
        )
        if not anchors:
            if _tokens(part, False) == _tokens(target_part, False):
                pairs += [(a + k, c + k, KIND + OUT) for k in range(len(part))]
            continue
        i0, j0 = 0, 0
        for i, j in [*anchors, (len(part), len(target_part))]:
            if i > i0 and j > j0:
                todo.append((a + i0, a + i, c + j0, c + j))
            if i < len(part):
                pairs.append((a + i, c + j, KIND + SHAPES))
            i0, j0 = i + 1, j + 1
    return Aligned(sorted(pairs), sorted(doubtful))


def _same_sequence(reference: Sequence[Feature], target: Sequence[Feature]) -> bool:
    """Do the contents of the parameters say that both are the same calls in the same order?"""
    if len(reference) != len(target):
        return False
    strong = _tokens(reference, True)
    return all(f.content or f.elements for f in reference if f.shapes) and strong == _tokens(
        target, True
    )


def _tokens(features: Sequence[Feature], strong: bool) -> list[tuple[Any, ...]]:
    if strong:
        return [(f.family or f.kind, f.shapes, f.content, f.elements, f.out) for f in features]
    return [(f.family or f.kind, f.layout, f.out) for f in features]


def _anchors(
    reference: list[tuple[Any, ...]], target: list[tuple[Any, ...]]
) -> list[tuple[int, int]]:
    """Positions in segments that occur once on either side, in order; short segments first."""
    ids: dict[tuple[Any, ...], int] = {}
    a = np.array([ids.setdefault(t, len(ids)) for t in reference], dtype=np.uint64)
    b = np.array([ids.setdefault(t, len(ids)) for t in target], dtype=np.uint64)
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
