"""Pairs the tensors of two paired calls: by slot name, then by content, then by order where shapes
agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from whence import dtypes
from whence.align.calls.sequence_alignment import best_in_order
from whence.records import Call, Record, Ref, Run
from whence.records.slots import input_name, is_cache, is_input, is_param, param_name, slot_family
from whence.results import SlotPair

# Equivalent parameter names in different frameworks.
_SAME_NAME = {
    "kernel": "weight",
    "w": "weight",
    "scale": "weight",
    "gamma": "weight",
    "g": "weight",
    "embedding": "weight",
    "table": "weight",
    "b": "bias",
    "beta": "bias",
    "offset": "bias",
}
_CLOSE = 1e-3
_CLEARLY = 5.0
_ANOTHER = 0.1


def pair_slots(
    call: Call, partner: Call, reference: Run, target: Run
) -> tuple[list[SlotPair], list[str], list[str]]:
    """(pairs of slots, slots that only the reference's call has, slots that only the target's call
    has).
    """
    across = {r.slot: r for r in partner.refs}
    numbered = _numbered_params(call, partner, reference, target)
    slots: list[SlotPair] = []
    unpaired: list[Ref] = []
    for ref in call.refs:
        match = across.pop(numbered.get(ref.slot, ref.slot), None)
        if match is None:
            unpaired.append(ref)
        else:
            slots.append(_pair(ref, match))
    slots = _of_one_kind(slots, across, reference, target)
    if call.op_type != partner.op_type:
        slots = _elsewhere(_swapped(slots, reference, target), across, reference, target)
    # A module may be paired with the last of its operators, which reads other inputs than the
    # module.
    kinds = {call.kind, partner.kind}
    is_part = call.op_type != partner.op_type and kinds == {"module", "operator"}
    is_fused = _is_fused(call, partner)
    # If one side folded a scale or bias into its parameters, they differ from the other side's
    # parameters of the same name.
    for slot in [s for s in slots if _may_be_another(s.reference_slot, is_part, is_fused)]:
        a, b = reference.records[slot.reference_record], target.records[slot.target_record]
        if _unlike(a, b) if is_part else _distance(a, b) >= _CLOSE:
            slots.remove(slot)
            unpaired.append(Ref(slot.reference_slot, slot.reference_record))
            across[slot.target_slot] = Ref(slot.target_slot, slot.target_record)
    free = list(across.values())
    if not unpaired or not free:
        return slots, [r.slot for r in unpaired], [f.slot for f in free]
    for kind in dict.fromkeys(slot_family(r.slot) for r in unpaired):
        refs = [r for r in unpaired if slot_family(r.slot) == kind]
        others = [f for f in free if slot_family(f.slot) == kind]
        for ref, match in _matched(refs, others, kind, reference, target):
            a, b = reference.records[ref.record], target.records[match.record]
            if _may_be_another(ref.slot, is_part, is_fused) and (
                (is_part and _unlike(a, b)) or (is_fused and _distance(a, b) >= _CLOSE)
            ):
                continue
            unpaired.remove(ref)
            free.remove(match)
            slots.append(_pair(ref, match))
    return slots, [r.slot for r in unpaired], [f.slot for f in free]


def is_count_of_cache(run: Run, ref: Ref) -> bool:
    """Whether a tensor is a count that a cache keeps of itself, such as its length.

    Caches of other kinds keep no count. A wrong count shows in the keys that are read.
    """
    record = run.records[ref.record]
    return is_cache(ref.slot) and record.count <= 1 and not dtypes.is_floating(record.dtype)


def _may_be_another(slot: str, is_part: bool, is_fused: bool) -> bool:
    """Whether tensors of one slot name may be different tensors, because the calls do not do the
    same.
    """
    return (is_input(slot) and is_part) or ((is_input(slot) or is_param(slot)) and is_fused)


def _numbered_params(call: Call, partner: Call, reference: Run, target: Run) -> dict[str, str]:
    """For calls that were joined and number their parameters: reference slot -> target slot, paired
    by equal elements first, then in order by equal shape; "" for a slot without a partner.
    """
    own = [r for r in call.slots("param") if param_name(r.slot).isdecimal()]
    free = [r for r in partner.slots("param") if param_name(r.slot).isdecimal()]
    if not own or not free:
        return {}
    slots: dict[str, str] = {}
    for fits in (have_one_content, _is_of_one_shape):
        for ref in own:
            record = reference.records[ref.record]
            match = next((f for f in free if fits(record, target.records[f.record])), None)
            if ref.slot not in slots and match is not None:
                slots[ref.slot] = match.slot
                free.remove(match)
    # A slot name that another slot took has no partner of its own.
    lost = {ref.slot: "" for ref in own if ref.slot not in slots}
    return lost | slots


def have_one_content(a: Record, b: Record) -> bool:
    """Whether two records are equal in dtype, shape and every bit."""
    return bool(a.hash) and (a.hash, a.dtype, a.shape) == (b.hash, b.dtype, b.shape)


def _is_of_one_shape(a: Record, b: Record) -> bool:
    return a.count > 1 and a.shape == b.shape and _may_be_float(a) == _may_be_float(b)


def _is_fused(call: Call, partner: Call) -> bool:
    """Whether two operators of one name differ because one was fused with operators before it."""
    if (
        call.op_type == partner.op_type
        or not call.kind == partner.kind == "operator"
        or call.scope != partner.scope
    ):
        return False
    return any(len(call.slots(kind)) != len(partner.slots(kind)) for kind in ("input", "param"))


def _of_one_kind(
    slots: list[SlotPair], free: dict[str, Ref], reference: Run, target: Run
) -> list[SlotPair]:
    """Repair inputs where one side has integers and the other floats in the same slot (`positions,
    hidden` against `hidden`; `weights, indices` against `indices, weights`): each is paired with
    the only tensor that fits, taken from `free` or from another such slot.

    free: target slots without a partner; changed in place.
    """
    out = list(slots)
    clashing = {
        k: Ref(slot.target_slot, slot.target_record)
        for k, slot in enumerate(slots)
        if is_input(slot.reference_slot)
        and _is_float(reference.records[slot.reference_record])
        != _is_float(target.records[slot.target_record])
    }
    if not clashing:
        return out
    exchanged = {ref.slot: ref for ref in clashing.values()}
    for k, current in clashing.items():
        a = reference.records[slots[k].reference_record]
        is_shorter = a.count != target.records[current.record].count
        fits = [
            r
            for r in (*(free.values() if is_shorter else ()), *exchanged.values())
            if is_input(r.slot)
            and (t := target.records[r.record]).count == a.count
            and _is_float(t) == _is_float(a)
        ]
        if len(fits) != 1:
            continue
        free.pop(fits[0].slot, None)
        exchanged.pop(fits[0].slot, None)
        out[k] = SlotPair(
            slots[k].reference_slot, fits[0].slot, slots[k].reference_record, fits[0].record
        )
    used = Counter(slot.target_slot for slot in out)
    free.update((ref.slot, ref) for ref in clashing.values() if ref.slot not in used)
    return [
        slot for k, slot in enumerate(out) if slot is not slots[k] or used[slot.target_slot] == 1
    ]


def _is_float(record: Record) -> bool:
    return dtypes.is_floating(record.dtype)


def _matched(
    refs: list[Ref], others: list[Ref], kind: str, reference: Run, target: Run
) -> list[tuple[Ref, Ref]]:
    """Pairs among slots of one kind whose names differ: by parameter name, equal elements,
    statistics, then shape.
    """
    out: list[tuple[Ref, Ref]] = []
    refs, others = list(refs), list(others)

    def take(ref: Ref, match: Ref) -> None:
        out.append((ref, match))
        refs.remove(ref)
        others.remove(match)

    # Graphs that share one tensor among modules record it under the name of one of them.
    for name_of in (_parameter, _role) if kind == "param" else ():
        for ref in list(refs):
            named = [o for o in others if name_of(o.slot) == name_of(ref.slot)]
            if len(named) == 1 and sum(name_of(r.slot) == name_of(ref.slot) for r in refs) == 1:
                take(ref, named[0])
    a = {r.slot: reference.records[r.record] for r in refs}
    b = {o.slot: target.records[o.record] for o in others}
    for ref in list(refs):
        equal = [o for o in others if _same_elements(a[ref.slot], b[o.slot])]
        if len(equal) == 1 and sum(_same_elements(a[r.slot], b[equal[0].slot]) for r in refs) == 1:
            take(ref, equal[0])
    for ref in list(refs):
        near = sorted((_figure_distance(a[ref.slot], b[o.slot]), k) for k, o in enumerate(others))
        if (
            near
            and near[0][0] < _CLOSE
            and (len(near) == 1 or near[1][0] > _CLEARLY * near[0][0] + 1e-6)
        ):
            match = others[near[0][1]]
            if a[ref.slot].shape == b[match.slot].shape and not any(
                r is not ref
                and _figure_distance(a[r.slot], b[match.slot]) <= _CLEARLY * near[0][0] + 1e-6
                for r in refs
            ):
                take(ref, match)
    refs = [r for r in refs if not is_count_of_cache(reference, r)]  # a count pairs by name only
    for ref in list(refs):
        # One program passes an argument by position, the other by name.
        match_ = next((o for o in others if b[o.slot].shape == a[ref.slot].shape), None)
        if match_ is not None:
            take(ref, match_)
    if len(refs) == 1 and len(others) == 1 and a[refs[0].slot].count == b[others[0].slot].count:
        take(refs[0], others[0])
    return out


def _unlike(a: Record, b: Record) -> bool:
    """Whether the norms of two tensors with the same count differ too much for an error of a
    run.
    """
    s, t = a.statistics, b.statistics
    if (
        a.count != b.count
        or s is None
        or t is None
        or s.norm is None
        or t.norm is None
        or _same_elements(a, b)
    ):
        return False
    return abs(s.norm - t.norm) > _ANOTHER * max(s.norm, t.norm)


def _parameter(slot: str) -> str:
    head, _, last = slot.rpartition(".")
    return f"{head}.{_SAME_NAME.get(last, last)}"


def _role(slot: str) -> str:
    """The name of a parameter inside its module, without the path."""
    name = param_name(slot).rpartition(".")[2]
    return _SAME_NAME.get(name, name)


def _same_elements(a: Record, b: Record) -> bool:
    if a.count != b.count or a.dtype != b.dtype or not a.count:
        return False
    if a.sketch is not None and b.sketch is not None:
        return a.sketch.checksum == b.sketch.checksum
    return bool(a.hash) and a.hash == b.hash


def _figure_distance(a: Record, b: Record) -> float:
    """The largest relative difference of norm, extremes and mean; inf where these are unknown or
    constant.
    """
    s, t = a.statistics, b.statistics
    if a.count != b.count or s is None or t is None or not s.std or not t.std:
        return float("inf")
    worst = 0.0
    for x, y in ((s.norm, t.norm), (s.min, t.min), (s.max, t.max), (s.mean, t.mean)):
        if x is None or y is None:
            return float("inf")
        worst = max(worst, abs(x - y) / max(abs(x), abs(y), 1e-3 * (s.std or 0.0), 1e-300))
    return worst


def _swapped(slots: list[SlotPair], reference: Run, target: Run) -> list[SlotPair]:
    """For two classes that take the same tensors in another order, pair the inputs crosswise whose
    elements are swapped.

    Calls of one class keep their positions: there, swapped arguments are a fault.
    """
    positions = [
        k
        for k, s in enumerate(slots)
        if is_input(s.reference_slot) and input_name(s.reference_slot).isdigit()
    ]
    out = list(slots)
    for n, i in enumerate(positions):
        for j in positions[n + 1 :]:
            a, b = out[i], out[j]
            record_a, record_b = (
                reference.records[a.reference_record],
                reference.records[b.reference_record],
            )
            target_a, target_b = target.records[a.target_record], target.records[b.target_record]
            straight = _same_elements(record_a, target_a) or _same_elements(record_b, target_b)
            if (
                not straight
                and _same_elements(record_a, target_b)
                and _same_elements(record_b, target_a)
            ):
                out[i] = SlotPair(
                    a.reference_slot, b.target_slot, a.reference_record, b.target_record
                )
                out[j] = SlotPair(
                    b.reference_slot, a.target_slot, b.reference_record, a.target_record
                )
    return out


def _elsewhere(
    slots: list[SlotPair], free: dict[str, Ref], reference: Run, target: Run
) -> list[SlotPair]:
    """For two classes of which one takes more tensors (`probabilities, v` against `q, k, v`), pair
    an input with the free tensor whose statistics fit clearly better.

    free: target slots without a partner; changed in place.
    """
    out = list(slots)
    for k, slot in enumerate(slots):
        if not is_input(slot.reference_slot) or not input_name(slot.reference_slot).isdigit():
            continue
        record, current = (
            reference.records[slot.reference_record],
            target.records[slot.target_record],
        )
        others = [
            r
            for r in free.values()
            if slot_family(r.slot) == "input" and target.records[r.record].shape == record.shape
        ]
        fits = min(others, key=lambda r: _distance(record, target.records[r.record]), default=None)
        if fits is not None and _CLEARLY * _distance(
            record, target.records[fits.record]
        ) < _distance(record, current):
            del free[fits.slot]
            free[slot.target_slot] = Ref(slot.target_slot, slot.target_record)
            out[k] = SlotPair(slot.reference_slot, fits.slot, slot.reference_record, fits.record)
    return out


def _distance(a: Record, b: Record) -> float:
    return 0.0 if _same_elements(a, b) else _figure_distance(a, b)


_MOST = 250_000  # ways to look at


def pair_in_order(
    call: Call, partner: Call, reference: Run, target: Run
) -> tuple[list[SlotPair], list[str], list[str]]:
    """(pairs of slots, slots that only the reference's call has, slots that only the target's call
    has).

    Inputs and outputs are paired in order. An input or output that has no counterpart is skipped;
    scalars are skipped first. `pair_slots` decides for tensors that the order leaves unpaired.
    """
    pairs: list[SlotPair] = []
    for kind in ("input", "output"):
        refs, others = call.slots(kind), partner.slots(kind)
        a, b = (
            [reference.records[r.record] for r in refs],
            [target.records[r.record] for r in others],
        )
        pairs += [_pair(refs[i], others[j]) for i, j in _in_order(a, b)]
    placed, target_placed = {p.reference_slot for p in pairs}, {p.target_slot for p in pairs}
    # Names and contents may pair what the order did not.
    remaining, _, _ = pair_slots(
        _without(call, placed), _without(partner, target_placed), reference, target
    )
    usable = [p for p in remaining if not _clash(p, reference, target)]
    later = {p.reference_slot for p in usable}, {p.target_slot for p in usable}
    return (
        sorted(
            [*pairs, *usable], key=lambda p: [r.slot for r in call.refs].index(p.reference_slot)
        ),
        [r.slot for r in call.refs if r.slot not in placed | later[0]],
        [r.slot for r in partner.refs if r.slot not in target_placed | later[1]],
    )


def _pair(ref: Ref, across: Ref) -> SlotPair:
    return SlotPair(ref.slot, across.slot, ref.record, across.record)


def _without(call: Call, slots: set[str]) -> Call:
    return replace(call, refs=tuple(r for r in call.refs if r.slot not in slots))


def _clash(pair: SlotPair, reference: Run, target: Run) -> bool:
    return not _worth(reference.records[pair.reference_record], target.records[pair.target_record])


def _in_order(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[int, int]]:
    """The order-preserving pairs that agree best; very long lists are paired by position."""
    if len(records) * len(others) > _MOST:
        return [
            (k, k) for k in range(min(len(records), len(others))) if _worth(records[k], others[k])
        ]
    return best_in_order(len(records), len(others), lambda i, j: _worth(records[i], others[j]))


def _worth(a: Record, b: Record) -> float:
    """How well two tensors fit; 0 for different counts or kinds of dtype."""
    if a.count != b.count or _may_be_float(a) != _may_be_float(b):
        return 0.0
    same_shape = a.shape == b.shape
    alike = bool(a.hash) and a.hash == b.hash and a.dtype == b.dtype
    return (
        1.0
        + 0.5 * same_shape
        + 0.25 * alike
        + (0.1 if a.dtype == b.dtype else 0.0)
        - (0.5 if not a.shape else 0.0)
    )


def _may_be_float(record: Record) -> bool:
    dtype = dtypes.DTYPES.get(record.dtype)
    return dtype is None or dtype.is_floating
