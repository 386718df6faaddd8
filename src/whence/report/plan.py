"""A plan of paired calls as text, as JSON, and as a map to edit. Siblings share one line:
`model.layers.*.mlp` and their number.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import yaml

from whence.records import Call, Run
from whence.records.slots import slot_kind
from whence.report.document import Document, Table, answering
from whence.report.tables import clean, count
from whence.results import TENSOR_RULE, CallPair, Plan, SlotPair

Operands = Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]

_MOST = 12  # lines of names without a partner that are shown


@answering
def plan_text(plan: Plan, reference: Run, target: Run) -> Document:
    """The plan for a terminal: what is paired and why, then what has no partner."""
    selected = (
        {*(p.reference for p in plan.pairs), *(a for a, _ in plan.ambiguous)},
        {
            *(call for p in plan.pairs for call in (p.target, *p.also)),
            *(call for _, others in plan.ambiguous for call in others),
        },
    )
    calls, against = (
        len(some) + len(alone)
        for some, (_, _, alone) in zip(selected, _unmatched(plan, reference, target), strict=True)
    )
    paired = count(len(plan.pairs), "pair")
    yield f"{paired} of {count(calls, 'call')} against {count(against)}"
    yield from (f"aligned: {note}" for note in plan.notes)
    groups: dict[tuple[str, str, str, str], list[CallPair]] = {}
    for pair in plan.pairs:
        names = [_name(reference.calls[pair.reference]), _name(target.calls[pair.target])]
        general = re.sub(r"\d+", "*", names[1])
        key = (_starred(names[0]), general, pair.rule, _starred(pair.evidence))
        groups.setdefault(key, []).append(pair)
    table = [("reference", "target", "calls", "rule", "evidence")]
    for (reference_name, target_name, rule, evidence), pairs in groups.items():
        is_same = re.sub(r"\d+", "*", reference_name) == target_name
        name = "=" if is_same else target_name
        table.append((reference_name, name, str(len(pairs)), rule, evidence))
        table += [("", f"  {line}", "", "", "") for line in _slot_lines(pairs)]
    yield Table(table, right=(2,))
    for side, run, ids in _unmatched(plan, reference, target):
        yield from _alone(f"only {side}", (_name(run.calls[i]) for i in ids))
    yield from _alone(
        "ambiguous",
        (
            f"{_name(reference.calls[a])}: {', '.join(_name(target.calls[b]) for b in bs[:4])}"
            for a, bs in plan.ambiguous
        ),
    )


def _slot_lines(pairs: list[CallPair]) -> Iterator[str]:
    """Says how slots of these pairs are laid out, and which have no partner."""
    slots = [slot for pair in pairs for slot in pair.slots if slot.dims]
    dims = dict.fromkeys(f"{slot.reference_slot} = {slot.dims}" for slot in slots)
    yield from itertools.islice(dims, 6)
    alone = dict.fromkeys(
        slot
        for pair in pairs
        for slot in (*pair.only_reference, *(f"target's {s}" for s in pair.only_target))
    )
    if alone:
        yield f"alone: {', '.join(itertools.islice(alone, 8))}"


def _unmatched(
    plan: Plan, reference: Run, target: Run
) -> tuple[tuple[str, Run, Sequence[int]], ...]:
    return (
        ("reference", reference, plan.unmatched_reference),
        ("target", target, plan.unmatched_target),
    )


def plan_json(plan: Plan, reference: Run, target: Run) -> str:
    """Every pair with its names, rule, evidence and slots; unmatched and ambiguous calls by
    name.
    """

    def named(pair: CallPair) -> dict[str, Any]:
        a, b = reference.calls[pair.reference], target.calls[pair.target]
        slots = [
            {
                "reference": s.reference_slot,
                "target": s.target_slot,
                **({"dims": s.dims} if s.dims else {}),
            }
            for s in pair.slots
        ]
        return {
            "reference": _name(a),
            "target": _name(b),
            "step": a.step,
            "rank": a.rank,
            "occurrence": a.occurrence,
            "rule": pair.rule,
            "evidence": pair.evidence,
            "slots": slots,
            "only_reference": pair.only_reference,
            "only_target": pair.only_target,
        }

    data = {
        "pairs": [named(p) for p in plan.pairs],
        "unmatched_reference": [_name(reference.calls[i]) for i in plan.unmatched_reference],
        "unmatched_target": [_name(target.calls[i]) for i in plan.unmatched_target],
        "ambiguous": {
            _name(reference.calls[a]): [_name(target.calls[b]) for b in bs]
            for a, bs in plan.ambiguous
        },
        "notes": plan.notes,
    }
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"


_Reasoned = tuple[dict[str, Any], CallPair]
"""An entry of a map, and the pair from which it was made."""


def _yaml(entry: dict[str, Any]) -> str:
    """An entry as an item of the YAML list in a map."""
    return yaml.safe_dump([entry], sort_keys=False, width=140)


def plan_map(plan: Plan, reference: Run, target: Run) -> str:
    """The plan as a map file: pairs that equal names alone would not give, with numbers written
    {i}, each under the rule that paired it; everything else as comments.
    """
    operands = _own({m.record: m.operands for m in plan.made_target})
    groups: dict[str, dict[str, list[_Reasoned]]] = {}
    for pair in plan.pairs:
        entry = _entry(pair, reference, target, operands)
        if entry is not None:
            exact = _entry(pair, reference, target, operands, general=False) or entry
            alike = groups.setdefault(entry["reference"], {})
            alike.setdefault(_yaml(entry), [(entry, pair)]).append((exact, pair))
    entries: dict[str, _Reasoned] = {}
    for forms in groups.values():
        # Siblings that are not derived in the same way are written one by one.
        for general, *each in forms.values():
            for entry, pair in [general] if len(forms) == 1 else each:
                entries.setdefault(_yaml(entry), (entry, pair))
    lines = [
        f"# what is paired: {count(len(plan.pairs), 'pair')}; use it with whence compare REF TGT "
        "--map FILE (docs/alignment.md)",
        *(f"# {clean(note)}" for note in plan.notes),
        "pairs:" if entries else "pairs: []",
    ]
    for text, (_, pair) in entries.items():
        reason = f"{pair.rule}: {pair.evidence}" if pair.evidence else pair.rule
        lines += [f"# {clean(reason)}", text.rstrip("\n")]
    for side, run, ids in _unmatched(plan, reference, target):
        names = dict.fromkeys(_starred(_name(run.calls[i])) for i in ids)
        lines += [f"# only {side}: {clean(name)}" for name in names]
    return "\n".join(lines) + "\n"


def _entry(
    pair: CallPair, reference: Run, target: Run, operands: Operands, *, general: bool = True
) -> dict[str, Any] | None:
    """One pair as an entry of a map; None where names alone give it, or a map cannot express it.
    general: write numbers as {i}.
    """
    a, b = reference.calls[pair.reference], target.calls[pair.target]
    # these pairs are found again by their elements
    if not a.scope or not b.scope or pair.rule == TENSOR_RULE:
        return None
    slots: dict[str, Any] = {}
    derived = {
        s.reference_slot: operand
        for s in pair.slots
        if s.dims and (operand := _operands(s, pair, target, operands)) is not None
    }
    # In an entry every call of the target has one name: that of the part it is, else x.
    called = {
        scope: name
        for _, calls, others in derived.values()
        for name, scope in calls.items()
        if name != "x" and not others
    }
    names = {name: scope for scope, name in called.items()} or {"x": b.scope}
    for slot in pair.slots:
        if slot.dims:
            if slot.reference_slot not in derived:
                continue
            text, calls, others = derived[slot.reference_slot]
            name_of = {scope: name for name, scope in names.items()}
            if any(scope not in name_of for scope in calls.values()):
                continue
            text = _renamed(text, {name: name_of[scope] for name, scope in calls.items()})
            slots[slot.reference_slot] = {"dims": text, **others} if others else text
        elif slot.reference_slot != slot.target_slot and slot_kind(slot.reference_slot) != "input":
            slots[slot.reference_slot] = {"dims": "y", "y": slot.target_slot}
    if a.scope == b.scope and not slots:
        return None
    reference_name, *target_names = (
        _generalised([a.scope, *names.values()]) if general else [a.scope, *names.values()]
    )
    is_plain = list(names) == ["x"]
    targets = dict(zip(names, target_names, strict=True))
    entry = {"reference": reference_name, "target": targets["x"] if is_plain else targets}
    return {**entry, "slots": slots} if slots else entry


def _operands(
    slot: SlotPair, pair: CallPair, target: Run, operands: Operands
) -> tuple[str, dict[str, str], dict[str, str]] | None:
    """(expression, operand -> scope, operand -> slot where it differs) of a derived tensor; None
    when it is derived in several stages.
    """
    calls, others = {}, {}
    for name, ids in operands.get(slot.target_record, ()):
        holder = _holder(ids[0], pair, target, slot.reference_slot) if len(ids) == 1 else None
        if holder is None:
            return None
        call, holder_slot = holder
        if holder_slot == slot.reference_slot:
            calls[name] = call.scope
        elif call.id == pair.target:
            others[name] = holder_slot
        else:
            return None
    return (slot.dims, calls, others) if calls or others else None


def _own(operands: Operands) -> Operands:
    """The run's own records from which tensors are derived, through all stages, by their names in
    the whole expression.
    """
    out: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {}
    for record in sorted(operands):
        parts: dict[str, tuple[int, ...]] = {}
        for name, ids in operands[record]:
            parts.update(out[ids[0]] if len(ids) == 1 and ids[0] in out else {name: ids})
        out[record] = tuple(parts.items())
    return out


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """An expression with other names for its tensors; names of axes, which are in quotes, stay."""
    parts = text.split("'")
    parts[::2] = [
        re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), part) for part in parts[::2]
    ]
    return "'".join(parts)


def _holder(record: int, pair: CallPair, target: Run, slot: str) -> tuple[Call, str] | None:
    """(call, slot) of a pair that refers to a record; a slot of the wanted name is preferred."""
    holders = [
        (target.calls[i], r.slot)
        for i in (pair.target, *pair.also)
        for r in target.calls[i].refs
        if r.record == record
    ]
    return min(holders, key=lambda f: f[1] != slot, default=None)


def _generalised(names: Sequence[str]) -> list[str]:
    """The names with numbers that they have in common, in the same order, written {i}, {j}, ...;
    other numbers stay.
    """
    numbers = zip(*(re.findall(r"\d+", name) for name in names))
    shared = itertools.takewhile(lambda alike: len(set(alike)) == 1, numbers)
    out = list(names)
    for letter, _ in zip("ijkl", shared):
        out = [re.sub(r"\d+", f"{{{letter}}}", name, count=1) for name in out]
    return out


def _alone(title: str, names: Iterable[str]) -> Iterator[str]:
    grouped = Counter(map(_starred, names))
    for name, calls in itertools.islice(grouped.items(), _MOST):
        yield f"{title}: {name}" + (f" ({calls} calls)" if calls > 1 else "")
    if len(grouped) > _MOST:
        yield f"{title}: {len(grouped) - _MOST} more names"


def _name(call: Call) -> str:
    return call.module_name


def _starred(text: str) -> str:
    return re.sub(r"(?<![\w-])\d+(?![\w%])", "*", text)
