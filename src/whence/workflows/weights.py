"""Pairs the parameters of two runs and compares their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from whence.errors import ElementsMissing, UsageError
from whence.records import Call, Run
from whence.records.slots import is_param, param_name
from whence.results import FacedWeight, Made, SlotPair, WeightMap
from whence.workflows.saved import AnyPath, AnyRun

if TYPE_CHECKING:
    from whence import align


def map_weights(
    reference: AnyRun,
    target: AnyRun,
    *,
    mapping: AnyPath | None = None,
) -> WeightMap:
    """Pair the parameters of two runs, also of other frameworks or under other names.

    mapping: a map to start from (docs/alignment.md). The weights of an ONNX file are found by their
    elements, since exporters fuse, transpose and rename them. Raises UnreadableRun, UsageError (no
    two parameters could be paired).
    """
    from whence.comparison.onnx_files import facing
    from whence.comparison.onnx_files.answer import is_onnx_file
    from whence.workflows.compare import align_runs
    from whence.workflows.saved import as_run

    runs = as_run(reference), as_run(target)
    if mapping is None and any(map(is_onnx_file, runs)):
        found = facing.map_weights(*runs)
        if not found.pairs:
            raise UsageError("no weight of the one is one of the other: they are other models")
        return found
    aligned = align_runs(reference, target, mapping=mapping)
    weights = {**_paired(aligned), **_coded(aligned)}
    if not weights:
        raise UsageError(
            "no two parameters could be paired: capture both runs with their parameters, or give "
            "--map"
        )
    of_codes = {
        f"{weight.target}.{name}"
        for weight in weights.values()
        for name in (*weight.target_name.split("+"), *(_OF_CODES if weight.why else ()))
    }
    only_reference, only_target = (
        tuple(name for name in names if name not in known)
        for names, known in zip(
            _unpaired(aligned), ({f"{a}.{b}" for a, b in weights}, of_codes), strict=True
        )
    )
    return WeightMap(tuple(weights.values()), only_reference, only_target)


_OF_CODES = ("g_idx", "weight_g_idx", "weight_shape")
"""What packed codes are stored with, beside scales and zero points."""


def _coded(aligned: align.Aligned) -> dict[tuple[str, str], FacedWeight]:
    """The parameters that the target stores as codes and scales, of paired calls, by (module,
    parameter); each is named by all that it is stored as. Zero points of one file are stored in one
    way: where few are stored otherwise than the rest, these differ.
    """
    import numpy as np

    from whence import dtypes
    from whence.judge import quantised_weights, stored_codes
    from whence.judge.error_structure import norm

    reference, target = aligned.reference, aligned.target
    weights: dict[tuple[str, str], FacedWeight] = {}
    less: dict[tuple[str, str], int] = {}
    for pair in aligned.plan.pairs:
        a, b = reference.calls[pair.reference], target.calls[pair.target]
        records = {ref.slot: ref.record for ref in b.slots("param")}
        if all(dtypes.is_floating(target.records[record].dtype) for record in records.values()):
            continue
        for ref in a.slots("param"):
            key = _name(a), param_name(ref.slot)
            if key in weights or len(reference.records[ref.record].shape) < 2:
                continue
            try:
                wide = reference.array(ref.record)
                params = {slot: target.array(record) for slot, record in records.items()}
            except ElementsMissing:
                continue
            stored = stored_codes.stored(wide, params, ref.slot)
            if stored is None:
                continue
            checked = quantised_weights.check(wide, stored)
            off = norm(stored.dequantised() - wide.astype(np.float64))
            off /= norm(wide) or 1.0
            if len(stored.where) > 2:
                less[key] = stored.less
            weights[key] = FacedWeight(
                *key,
                _name(b),
                "+".join(map(param_name, stored.where)),
                "",
                wide.shape,
                params[stored.where[0]].shape,
                "differs" if checked.sentence else "codes",
                off,
                why=checked.sentence or str(stored.scheme),
            )
    ((usual, count),) = Counter(less.values()).most_common(1) or [(0, 0)]
    for key, number in less.items():
        if number != usual and 2 * count > len(less) and weights[key].state == "codes":
            words = f"its zero points are off by one from what those of {count} other weights mean"
            weights[key] = replace(weights[key], state="differs", why=words)
    return weights


def _paired(aligned: align.Aligned) -> dict[tuple[str, str], FacedWeight]:
    """The first pair of every parameter, by (module, parameter)."""

    reference, target = aligned.reference, aligned.target
    derived = {m.record: m for m in aligned.plan.made_target}
    stated = _stated(aligned)
    weights: dict[tuple[str, str], FacedWeight] = {}
    for pair in aligned.plan.pairs:
        a, b = reference.calls[pair.reference], target.calls[pair.target]
        for slot in (s for s in pair.slots if is_param(s.reference_slot)):
            key = _name(a), param_name(slot.reference_slot)
            if key in weights:
                continue
            own_slot = stated.get((pair.reference, slot.reference_slot), slot.target_slot)
            weights[key] = FacedWeight(
                *key,
                _name(b),
                param_name(own_slot),
                slot.dims,
                reference.records[slot.reference_record].shape,
                target.records[_source(slot.target_record, derived)].shape,
                *_state(reference, target, slot),
            )
    return weights


def _stated(aligned: align.Aligned) -> dict[tuple[int, str], str]:
    """(call, slot) of the reference -> slot of the user's target.

    The executed plan names the target's transformed tensors; the plan as stated names them as the
    run stores them.
    """
    return {
        (p.reference, s.reference_slot): s.target_slot
        for p in aligned.as_said().pairs
        for s in p.slots
    }


def _unpaired(aligned: align.Aligned) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters of the reference and of the target that have no partner."""
    reference, target, stated = aligned.reference, aligned.target, _stated(aligned)
    paired: tuple[set[str], set[str]] = (set(), set())
    for pair in aligned.plan.pairs:
        for slot in (s for s in pair.slots if is_param(s.reference_slot)):
            own_slot = stated.get((pair.reference, slot.reference_slot), slot.target_slot)
            paired[0].add(_full(reference.calls[pair.reference], slot.reference_slot))
            paired[1].add(_full(target.calls[pair.target], own_slot))

    def names(run: Run, paired_names: set[str]) -> tuple[str, ...]:
        every = (_full(c, r.slot) for c in run.calls for r in c.slots("param"))
        return tuple(dict.fromkeys(name for name in every if name not in paired_names))

    return names(reference, paired[0]), names(target, paired[1])


def _source(record: int, derived: Mapping[int, Made]) -> int:
    """The first record stored in the run that a tensor was made from."""
    while record in derived and derived[record].operands:
        record = derived[record].operands[0][1][0]
    return record


def _name(call: Call) -> str:
    return call.module_name


def _full(call: Call, slot: str) -> str:
    return f"{_name(call)}.{param_name(slot)}"


def _state(reference: Run, target: Run, slot: SlotPair) -> tuple[str, float | None]:
    """Compare a parameter: ("equal", "differs" or "not compared", relative error in the 2-norm)."""
    import numpy as np

    from whence import judge

    try:
        a, b = reference.array(slot.reference_record), target.array(slot.target_record)
    except ElementsMissing:
        return "not compared", None
    if a.shape != b.shape:
        return "not compared", None
    rounded = judge.rounded(a, target.records[slot.target_record].dtype)
    if np.array_equal(
        rounded.reshape(-1).view(np.uint8), np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    ):
        return "equal", 0.0
    expected = a.astype(np.float64).ravel()
    size = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(b.astype(np.float64).ravel() - expected))
    return "differs", error / size if size else None
