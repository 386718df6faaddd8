"""Masks of equal meaning and different form: True and False in one run, 0 and the lowest number of
the dtype in the other.

The form is a choice of the attention implementation, and either is right. Before anything is
measured, a mask of the target is converted to the form of the reference's mask that it is paired
with.
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
    """A run in which some masks are converted to another form. base: the run as it is.

    The unconverted masks are appended to its records, since a mask may be paired with one of its
    own form where it is computed and with one of the other form where it is used.
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
        """The id of the unconverted version of a record."""
        if record not in self._arrays:
            return record
        return self._first + self._as_they_are.index(record)

    def array(self, record: int) -> Array:
        """Elements of a record, converted if it is a converted mask. Raises ElementsMissing."""
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
    """The target with its masks in the reference's form; the target itself if no form differs."""
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
            converted = in_form_of(reference.array(records[0].id), target.array(target_id))
            equal = next(
                (
                    r
                    for r in records
                    if converted is not None and np.array_equal(reference.array(r.id), converted)
                ),
                None,
            )
        except ElementsMissing:
            continue
        if converted is None:
            continue
        # A mask with the reference's content has its hash and statistics; of any other mask only
        # the elements are known.
        facts = (
            {"hash": equal.hash, "statistics": equal.statistics}
            if equal is not None
            else {"hash": "", "statistics": None}
        )
        read[target_id] = (
            msgspec.structs.replace(
                target.records[target_id], dtype=records[0].dtype, sketch=None, **facts
            ),
            converted,
        )
    return UnifiedMasks(target, read) if read else target


def in_form_of(reference: Array, target: Array) -> Array | None:
    """The mask `target` in the form of the mask `reference`; None if one of them is not a mask.

    Both have one shape. A mask is bool, or holds 0 and sentinels (|v| >= 0.9 of the dtype's largest
    number, or -inf), or 0 and 1. True may mean "visible" or "hidden": the meaning that agrees with
    the reference in more places counts.
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
    """Whether two masks of different shapes show every query the same keys.

    (batch, keys) says which keys are not padding; a query sees those up to its own position, and
    the last query has the last key as its own. (batch, heads, queries, keys) says it for each
    query. Keys that only the wider mask has (free room in a cache) must be hidden.
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
    """The mask as (batch, heads or 1, queries, width); None if it has fewer keys than queries."""
    keys = mask.shape[-1]
    if mask.ndim == 2:
        if keys < queries:
            return None
        up_to = np.arange(keys) <= np.arange(keys - queries, keys)[:, None]
        mask = mask[:, None, None, :] & up_to
    return np.pad(mask, [(0, 0)] * 3 + [(0, width - keys)])


def visible(mask: Array) -> Bits | None:
    """Boolean array, True where a key is visible; None if the array is not a mask. A bool mask, in
    which True may also mean "hidden", is returned as it is.
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
