"""Masks that say the same in another form: True and False in one run, 0 and the smallest number in
another.

Which form a mask has is a choice of the attention implementation, and both are right. Before
anything is measured, a mask of the target that is paired with one of the other form is read in the
reference's.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge.precision import mask_fill
from whence.records import Looked, Over, Record, Run
from whence.results import Plan

Bits = npt.NDArray[np.bool_]


class UnifiedMasks(Over):
    """A run in which some records are read in another form. base: the run as it is.

    Behind its records stand those that are read in another form, once more as they are: a mask may
    be paired with one of its own form where it is made, and of the other where it is used.
    """

    def __init__(self, base: Run, read: dict[int, tuple[Record, Array]]) -> None:
        self._arrays = {number: array for number, (_, array) in read.items()}
        self._as_they_are, self._first = list(read), len(base.records)

        def record(number: int) -> Record:
            if number >= self._first:
                original = base.records[self._as_they_are[number - self._first]]
                return msgspec.structs.replace(original, id=number)
            return read[number][0] if number in read else base.records[number]

        super().__init__(base, records=Looked(self._first + len(read), record))

    def in_own_form(self, record: int) -> int:
        """The number under which a record is read as it is."""
        if record not in self._arrays:
            return record
        return self._first + self._as_they_are.index(record)

    def array(self, record: int) -> Array:
        """Elements of a record, in the form it is read in. Raises ElementsMissing."""
        if record >= self._first:
            return self.base.array(self._as_they_are[record - self._first])
        mask = self._arrays.get(record)
        return self.base.array(record) if mask is None else mask

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        if record >= self._first:
            return self.base, self._as_they_are[record - self._first]
        return None if record in self._arrays else (self.base, record)


def unify_masks(reference: Run, target: Run, plan: Plan) -> Run:
    """The target with its masks in the reference's form; the target itself where none has
    another.
    """
    pairs: dict[int, set[int]] = {}
    for pair in plan.pairs:
        for slot in pair.slots:
            a, b = reference.records[slot.reference_record], target.records[slot.target_record]
            if a.shape == b.shape and (a.dtype == "bool") != (b.dtype == "bool"):
                pairs.setdefault(b.id, set()).add(a.id)
    read: dict[int, tuple[Record, Array]] = {}
    for target_id, reference_ids in pairs.items():
        records = [reference.records[i] for i in reference_ids]
        if len({r.dtype for r in records}) > 1:
            continue
        try:
            as_theirs = in_form_of(reference.array(records[0].id), target.array(target_id))
            equal = next(
                (
                    r
                    for r in records
                    if as_theirs is not None and np.array_equal(reference.array(r.id), as_theirs)
                ),
                None,
            )
        except ElementsMissing:
            continue
        if as_theirs is None:
            continue
        # Equal content has the reference's hash; of other content nothing is known but its
        # elements.
        facts = (
            {"hash": equal.hash, "statistics": equal.statistics}
            if equal is not None
            else {"hash": "", "statistics": None}
        )
        read[target_id] = (
            msgspec.structs.replace(
                target.records[target_id], dtype=records[0].dtype, sketch=None, **facts
            ),
            as_theirs,
        )
    return UnifiedMasks(target, read) if read else target


def in_form_of(reference: Array, target: Array) -> Array | None:
    """The mask `target` written as the mask `reference` is, None where one of them is not a mask.

    Both of one shape. A mask is bool, or 0 and sentinels (|v| >= 0.9 of the dtype's largest number,
    -inf), or 0 and 1. True may mean "look" or "look away": the meaning that agrees with the
    reference in more places is taken.
    """
    allowed, allowed_target = visible(reference), visible(target)
    if allowed is None or allowed_target is None:
        return None
    if 2 * np.count_nonzero(allowed == allowed_target) < allowed.size:
        allowed_target = ~allowed_target
    if reference.dtype.kind == "b":
        return allowed_target
    values = np.unique(reference.astype(np.float64))
    if np.all((values == 0) | (values == 1)) and 1 in values:
        return allowed_target.astype(reference.dtype)
    top = dtypes.of(reference).max_finite or np.inf
    return np.where(allowed_target, 0.0, values[0] if values[0] < 0 else -top).astype(
        reference.dtype
    )


def hide_the_same(reference: Array, target: Array) -> bool:
    """Do two masks of other shapes let every query see the same keys?

    (batch, keys) says which keys are not padding, and each query sees those up to itself, the last
    the last; (batch, heads, queries, keys) says it for each query. Keys that only the wider one has
    (a cache with room) have to be hidden.
    """
    masks = [visible(mask) for mask in (reference, target)]
    shapes = [mask.shape for mask in masks if mask is not None and mask.ndim in (2, 4)]
    if len(shapes) < 2 or shapes[0][0] != shapes[1][0]:
        return False
    queries = {shape[2] for shape in shapes if len(shape) == 4}
    if len(queries) != 1:
        return False
    width = max(shape[-1] for shape in shapes)
    a, b = (_by_query(m, next(iter(queries)), width) for m in masks if m is not None)
    return a is not None and b is not None and bool(np.all(a == b))


def _by_query(mask: Bits, queries: int, width: int) -> Bits | None:
    """(batch, heads, queries, width) of a mask; None where it has fewer keys than queries."""
    keys = mask.shape[-1]
    if mask.ndim == 2:
        if keys < queries:
            return None
        up_to = np.arange(keys) <= np.arange(keys - queries, keys)[:, None]
        mask = mask[:, None, None, :] & up_to
    return np.pad(mask, [(0, 0)] * 3 + [(0, width - keys)])


def visible(mask: Array) -> Bits | None:
    """True where a mask lets attention look, as far as its form tells; None when it is not a
    mask.
    """
    if mask.dtype.kind == "b":
        return np.asarray(mask)
    kind = dtypes.of(mask)
    if kind.kind == "complex" or not mask.size:
        return None
    values = mask.astype(np.float64)
    if kind.is_floating:
        blocked = values <= -mask_fill(kind)
        if np.all(blocked | (values == 0)):
            return np.asarray(~blocked)
    return np.asarray(values != 0) if np.all((values == 0) | (values == 1)) else None
