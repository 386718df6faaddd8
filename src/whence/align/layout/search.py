"""Tensors of paired calls in other axes: flattened, transposed, padded, channels reordered."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from whence import dtypes
from whence.align import dims as ex
from whence.align.layout.activations import activations
from whence.align.layout.axes import ways
from whence.align.layout.layout_state import LayoutState, TensorPair
from whence.align.layout.refuted_orders import undo_moves_of_equal_parameters
from whence.align.layout.weights import parameters
from whence.align.module_names import starred
from whence.records import Run
from whence.records.slots import is_param, param_name
from whence.results import Plan, SlotPair


def laid_out(reference: Run, target: Run, plan: Plan) -> tuple[Run, Plan]:
    """Give the target's tensors their partners' axes. Reads a few of each family of siblings."""
    state = LayoutState(reference, target, plan)
    _pair_leftovers(state)
    parameters(state)
    activations(state)
    undo_moves_of_equal_parameters(state)
    new_records: dict[TensorPair, int] = {}
    for tensors, (node, why) in state.decided.items():
        try:
            new_records[tensors] = state.derived.add(node, {"x": [tensors[1]]}, why)
        except ex.Unfit:
            continue
    state.notes += _sentences(state)
    for call, pair in state.pairs.items() if new_records else ():
        slots = tuple(_with(slot, new_records) for slot in pair.slots)
        if slots != pair.slots:
            state.pairs[call] = replace(pair, slots=slots)
    return state.done()


def _with(slot: SlotPair, new_records: dict[TensorPair, int]) -> SlotPair:
    record = new_records.get(slot.records)
    return slot if record is None else replace(slot, target_record=record, dims="")


def _pair_leftovers(state: LayoutState) -> None:
    """Pair slots that are left on both sides where one layout fits and the data agree."""
    agreeing: dict[tuple[object, ...], bool] = {}
    for pair in list(state.pairs.values()):
        if not pair.only_reference or not pair.only_target:
            continue
        call, target_call = state.calls(pair)
        records, target_records = ({r.slot: r.record for r in c.refs} for c in (call, target_call))
        slots, free = list(pair.slots), list(pair.only_target)
        for name in pair.only_reference:
            kind = name.partition(".")[0]
            fits = [
                f
                for f in free
                if f.partition(".")[0] == kind
                and f in target_records
                and name in records
                and _fit(state, (records[name], target_records[f]))
            ]
            if len(fits) != 1:
                continue
            tensors = records[name], target_records[fits[0]]
            shapes = tuple(r.shape for r in state.records(tensors))
            key = (starred(call.scope), starred(target_call.scope), name, fits[0], shapes)
            if not agreeing.get(key):
                agreeing[key] = state.agree(tensors)
            if agreeing[key]:
                slots.append(SlotPair(name, fits[0], *tensors))
                free.remove(fits[0])
        if len(slots) != len(pair.slots):
            state.set_slots(call.id, slots)


def _fit(state: LayoutState, tensors: TensorPair) -> bool:
    a, b = state.records(tensors)
    return dtypes.is_floating(a.dtype) == dtypes.is_floating(b.dtype) and bool(
        ways(b.shape, a.shape)
    )


def _sentences(state: LayoutState) -> list[str]:
    """Sentences: how many tensors got other axes, and what of parameters is left out."""
    counts = Counter(_brief(str(node)) for node, _ in state.decided.values())
    listed = ", ".join(f"{how} ({count})" for how, count in counts.most_common(3)) + (
        ", ..." if len(counts) > 3 else ""
    )
    total = sum(counts.values())
    out: dict[str, None] = (
        {f"{total} tensors of the target were brought to the reference's axes: {listed}": None}
        if counts
        else {}
    )
    for pair in state.pairs.values():
        for slot in pair.slots:
            tensors = slot.records
            if is_param(slot.reference_slot) and tensors in state.decided:
                a, b = state.records(tensors)
                if a.count < b.count:
                    name = f"{state.target.calls[pair.target].scope}.{param_name(slot.target_slot)}"
                    out[
                        f"{name} of the target is {list(b.shape)}, of the reference "
                        f"{list(a.shape)}: the rest was left out"
                    ] = None
    return list(out)


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]} ..."
