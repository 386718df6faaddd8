"""Decides which call of the reference faces which call of the target, from names and metadata alone. Reads no tensor data.

Rules by falling strictness: "exact key" (rank, root, step, micro, phase, scope, op, occurrence all equal), then
"normalised name" (wrappers and index styles taken out, roots matched by class or as the only ones left). What no rule pairs
is listed as unmatched, what several candidates fit equally as ambiguous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from whence.align.names import WRAPPER_CLASSES, normal_scope
from whence.records import Call, Ref, Run
from whence.results import CallPair, Plan, SlotPair

NOT_SELECTED = "not selected"


def selected(calls: Iterable[Call]) -> list[Call]:
    """The calls a capture was asked for; the others are in a run only to keep the tree whole."""
    return [c for c in calls if NOT_SELECTED not in c.notes]


def same_step(one: Call, other: Call) -> bool:
    """Do two calls belong to one call of a root?"""
    return (one.rank, one.root, one.step, one.micro) == (other.rank, other.root, other.step, other.micro)


def plan(reference: Run, target: Run) -> Plan:
    """Pair two runs. Every selected call of either side ends up in exactly one of pairs, unmatched, ambiguous."""
    left, right = selected(reference.calls), selected(target.calls)
    pairs: list[CallPair] = []
    taken: set[int] = set()
    by_key = {c.key(): c for c in right}
    rest: list[Call] = []
    for call in left:
        other = by_key.get(call.key())
        if other is None or other.id in taken:
            rest.append(call)
            continue
        taken.add(other.id)
        pairs.append(pair_of(call, other, "exact key", reference, target))
    unpaired = [c for c in right if c.id not in taken]
    ambiguous: list[tuple[int, tuple[int, ...]]] = []
    if rest and unpaired:
        roots = match_roots(left, right)
        table: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
        for call in unpaired:
            table[_normal_key(call, {})].append(call)
        still: list[Call] = []
        groups: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
        for call in rest:
            groups[_normal_key(call, roots)].append(call)
        for key, mine in groups.items():
            matched, doubtful, alone = _within(mine, table.get(key, []))
            for a, b in matched:
                taken.add(b.id)
                pairs.append(pair_of(a, b, "normalised name", reference, target))
            ambiguous += [(a.id, tuple(b.id for b in others)) for a, others in doubtful]
            still += alone
        doubtful_left = {a for a, _ in ambiguous}
        doubtful_right = {b for _, others in ambiguous for b in others}
        rest = [c for c in still if c.id not in doubtful_left]
        unpaired = [c for c in unpaired if c.id not in taken and c.id not in doubtful_right]
    pairs.sort(key=lambda p: reference.calls[p.reference].order)
    return Plan(
        tuple(pairs), tuple(sorted(c.id for c in rest)), tuple(sorted(c.id for c in unpaired)), tuple(sorted(ambiguous)), ()
    )  # fmt: skip


def _normal_key(call: Call, roots: dict[str, str]) -> tuple[Any, ...]:
    return (
        call.rank,
        roots.get(call.root, call.root),
        call.step,
        call.micro,
        call.phase,
        normal_scope(call.scope),
        call.op,
        call.occurrence,
    )


def match_roots(left: Sequence[Call], right: Sequence[Call]) -> dict[str, str]:
    """Root names of the reference -> root names of the target they stand for."""
    names_left = dict.fromkeys(c.root for c in left)
    names_right = dict.fromkeys(c.root for c in right)
    table = {name: name for name in names_left if name in names_right}
    free_left = [n for n in names_left if n not in table]
    free_right = [n for n in names_right if n not in table]
    if len(free_left) == 1 and len(free_right) == 1:
        table[free_left[0]] = free_right[0]
    return table


def _within(mine: Sequence[Call], others: Sequence[Call]) -> tuple[list[tuple[Call, Call]], list[tuple[Call, list[Call]]], list[Call]]:
    """Pair the calls that share one normalised key: (pairs, doubtful, without a partner).

    A wrapper and what it wraps normalise to one name: wrappers face wrappers, and only classes that agree decide between several.
    """
    if not others:
        return [], [], list(mine)
    if len(mine) == 1 and len(others) == 1:
        return [(mine[0], others[0])], [], []
    pairs: list[tuple[Call, Call]] = []
    free = list(others)
    left: list[Call] = []
    for call in mine:
        same = [o for o in free if o.op_type == call.op_type]
        if len(same) == 1:
            pairs.append((call, same[0]))
            free.remove(same[0])
        else:
            left.append(call)
    plain_left = [c for c in left if c.op_type not in WRAPPER_CLASSES]
    plain_free = [c for c in free if c.op_type not in WRAPPER_CLASSES]
    if len(plain_left) == 1 and len(plain_free) == 1:
        pairs.append((plain_left[0], plain_free[0]))
        left.remove(plain_left[0])
        free.remove(plain_free[0])
    if not left or not free:
        return pairs, [], left
    return pairs, [(c, free) for c in left], []


def pair_of(call: Call, other: Call, rule: str, reference: Run, target: Run) -> CallPair:
    """Pair the tensors of two calls: by slot, then what is left of the same kind by order where the shapes agree."""
    theirs = {r.slot: r for r in other.refs}
    slots: list[SlotPair] = []
    left: list[Ref] = []
    for ref in call.refs:
        match = theirs.pop(ref.slot, None)
        if match is None:
            left.append(ref)
        else:
            slots.append(SlotPair(ref.slot, match.slot, ref.record, match.record))
    only: list[str] = []
    free = list(theirs.values())
    for ref in left:
        shape = reference.records[ref.record].shape
        kind = ref.slot.partition(".")[0]
        # One program passes by position what the other passes by name.
        match = next((f for f in free if kind == "input" and f.slot.startswith("input") and target.records[f.record].shape == shape), None)
        if match is None:
            only.append(ref.slot)
        else:
            free.remove(match)
            slots.append(SlotPair(ref.slot, match.slot, ref.record, match.record))
    evidence = "" if call.op_type == other.op_type else f"{call.op_type} against {other.op_type}"
    return CallPair(call.id, other.id, rule, evidence, tuple(slots), tuple(only), tuple(f.slot for f in free))
