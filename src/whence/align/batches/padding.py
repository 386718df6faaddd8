"""Writes nested tensors out with padding, and leaves padded positions out of the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from whence.align.batches.batch import Batch, batches_of
from whence.align.call_sites import step_of
from whence.align.derived_run import Derived, DerivedTensors
from whence.align.dims import Cat, Cut, Name, Node, Pad, Rearrange
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Record, Ref, Run
from whence.records.region import outwards
from whence.records.slots import is_output, is_param
from whence.results import Made, Plan, SlotPair

_PARTED = 100.0  # times the error of what is not padding
_DIFFERS = 1e-3  # relative error of padding that no rounding makes

WORDS = "padding from the reference"
Bits = npt.NDArray[np.bool_]


def dense(run: Run, other_run: Run) -> Run:
    """The run with its nested tensors padded, where the other run has none."""
    derived = DerivedTensors(run)
    calls = [_dense(derived, call) for call in run.calls]
    if not derived.tensors or any(_nested(call) for call in other_run.calls):
        return run
    return derived.done(calls)


def _nested(call: Call) -> dict[str, int]:
    slots = {r.slot for r in call.refs}
    return {
        r.slot[:-6]: r.record
        for r in call.refs
        if r.slot.endswith(".sizes") and f"{r.slot[:-6]}.values" in slots
    }


def _dense(derived: DerivedTensors, call: Call) -> Call:
    sizes = _nested(call)
    if not sizes:
        return call
    refs = []
    for ref in call.refs:
        name, _, part = ref.slot.rpartition(".")
        if name not in sizes or part not in ("values", "sizes"):
            refs.append(ref)
        elif part == "values":
            padded = _padded(derived, ref.record, sizes[name], _width(derived.run, call))
            refs += [Ref(name, padded, ref.edge)] if padded is not None else [ref]
    return replace(call, refs=tuple(refs))


def _width(run: Run, call: Call) -> tuple[int, int] | None:
    """(batch, tokens) of the mask that the call's root was given."""
    *_, root = outwards(run.calls, call.id)
    masks = (run.records[r.record].shape for r in root.slots("input") if "mask" in r.slot)
    return next(((s[0], s[1]) for s in masks if len(s) == 2), None)


def _padded(
    derived: DerivedTensors, values: int, sizes: int, width: tuple[int, int] | None
) -> int | None:
    try:
        shapes = derived.run.array(sizes)
    except ElementsMissing:
        return None
    if (
        shapes.ndim != 2
        or not shapes.size
        or shapes.dtype.kind not in "iu"
        or int(shapes.min()) < 0
    ):
        return None
    rows = [tuple(int(n) for n in row) for row in shapes]
    longest = max(r[0] for r in rows)
    to = (
        width[1] if width is not None and width[0] == len(rows) and width[1] >= longest else longest
    )
    ends = [0, *itertools.accumulate(int(np.prod(r)) for r in rows)]
    names = [f"n{k}" for k in range(shapes.shape[1])]
    if len({r[1:] for r in rows}) != 1 or ends[-1] != derived.record(values).count:
        return None
    parts: list[Node] = []
    for (start, stop), row in zip(itertools.pairwise(ends), rows, strict=True):
        lengths = tuple(zip(names, row, strict=True))
        part: Node = Rearrange(
            Cut(Name("x"), (slice(start, stop),)),
            f"({' '.join(names)}) -> 1 {' '.join(names)}",
            lengths,
        )
        parts.append(Pad(part, 1, to, 0) if row[0] < to else part)
    return derived.add(
        Cat(tuple(parts), 0), {"x": [values]}, "nested tensor written out with padding"
    )


class PaddingFilled(Derived):
    """A run with additional tensors: copies of its own, in which padded positions hold the
    reference's values, so that padding shows no difference.

    padding: by (record of the reference, record of the run), a boolean array, True at padding.
    """

    def __init__(self, base: Run, reference: Run, padding: Mapping[tuple[int, int], Bits]) -> None:
        first = len(base.records)
        sources = [base.records[target_record] for _, target_record in padding]
        # Only shape and dtype of these tensors are known before they are computed.
        records = [
            Record(first + k, r.dtype, r.shape, device=r.device) for k, r in enumerate(sources)
        ]
        super().__init__(
            base,
            [
                Made(r.id, WORDS, (("x", (source.id,)),))
                for r, source in zip(records, sources, strict=True)
            ],
            records,
        )
        self._reference, self._padding = reference, list(padding.items())

    def _make(self, tensor: Made) -> Array:
        (reference_record, target_record), padding = self._padding[tensor.record - self._first]
        array = np.array(self.base.array(target_record))
        array[padding] = self._reference.array(reference_record)[padding].astype(array.dtype)
        array.flags.writeable = False
        return array


def fill_padding(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """(target, plan): if the outputs of a root differ in padding only, padding is left out of all
    tensors below it, and a note of the plan says so.

    Both runs must have the same mask with padding. Fused attention skips padded rows and leaves
    zeros there; other code computes values that nothing reads.
    """
    real: dict[tuple[Any, ...], Bits] = {}
    notes = []
    for pair in plan.pairs:
        call = reference.calls[pair.reference]
        if call.parent != -1 or call.phase != "forward":
            continue
        is_real = real_positions(reference, call)
        if is_real is not None and _parts(reference, target, pair.slots, is_real):
            real[step_of(call)] = is_real
            share = f"{np.count_nonzero(~is_real)} of {is_real.size} positions"
            notes.append(f"{call.root} step {call.step}: padding ({share}) differs and is left out")
    if not real:
        return target, plan
    padding: dict[tuple[int, int], Bits] = {}
    places: dict[tuple[int, int], int] = {}
    pairs = []
    for pair in plan.pairs:
        slots = list(pair.slots)
        kept = real.get(step_of(reference.calls[pair.reference]))
        for index, slot in enumerate(slots):
            shape = reference.records[slot.reference_record].shape
            where = _along(kept, shape) if kept is not None else None
            key = slot.records
            if (
                where is None
                or is_param(slot.reference_slot)
                or target.records[slot.target_record].shape != shape
            ):
                continue
            padding.setdefault(key, ~where)
            record = len(target.records) + places.setdefault(key, len(places))
            slots[index] = replace(slot, target_record=record, dims=WORDS)
        pairs.append(replace(pair, slots=tuple(slots)))
    first = len(target.records)
    return PaddingFilled(target, reference, padding), replace(
        plan,
        pairs=tuple(pairs),
        notes=(*plan.notes, *notes),
        padded=tuple((first + place, source) for (_, source), place in places.items()),
    )


def real_positions(run: Run, root: Call) -> Bits | None:
    """Boolean (batch, tokens), True for positions of a root's call that are not padding; None if
    none is padding or nothing tells.
    """
    batches = batches_of(run, [root])
    return _real(batches[0]) if batches else None


def _real(batch: Batch) -> Bits | None:
    """Boolean (batch, tokens), True for positions that are not padding; None if all are real."""
    if batch.flat:
        return None
    out = np.zeros(batch.shape, np.bool_)
    for row, (tokens, start, _) in enumerate(batch.rows):
        out[row, start : start + len(tokens)] = True
    return out if not out.all() else None


def _along(real: Bits, shape: tuple[int, ...]) -> Bits | None:
    """The mask in the order of a tensor's first two axes; None if these are other axes."""
    if len(shape) < 2:
        return None
    return real if shape[:2] == real.shape else real.T if shape[:2] == real.shape[::-1] else None


def _parts(reference: Run, target: Run, slots: Sequence[SlotPair], real: Bits) -> bool:
    """Whether an output of a root with equal masks differs clearly more in padding than in real
    positions.
    """
    masks = [
        s
        for s in slots
        if "mask" in s.reference_slot and reference.records[s.reference_record].shape == real.shape
    ]
    if (
        not all(
            reference.records[s.reference_record].hash == target.records[s.target_record].hash
            for s in masks
        )
        or not masks
    ):
        return False
    return any(
        outside > max(_PARTED * inside, _DIFFERS)
        for inside, outside in _errors(reference, target, slots, real)
    )


def _errors(
    reference: Run, target: Run, slots: Sequence[SlotPair], real: Bits
) -> Iterator[tuple[float, float]]:
    """(relative error of real positions, of padding) of every output of a root."""
    for slot in slots:
        shape = reference.records[slot.reference_record].shape
        where = _along(real, shape)
        if (
            not is_output(slot.reference_slot)
            or where is None
            or target.records[slot.target_record].shape != shape
        ):
            continue
        try:
            x, y = (
                reference.array(slot.reference_record).astype(np.float64),
                target.array(slot.target_record).astype(np.float64),
            )
        except ElementsMissing:
            continue
        inside, outside = (
            float(np.linalg.norm((x - y)[k])) / (float(np.linalg.norm(x[k])) or 1.0)
            for k in (where, ~where)
        )
        yield inside, outside
