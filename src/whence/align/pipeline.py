"""Runs the stages of alignment in order: bring both runs to one form, pair calls, then pair and lay
out tensors.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from whence.align.batches import align as batches
from whence.align.batches import masked_columns, padding
from whence.align.call_sites import selected
from whence.align.calls import fused_operators, layout_operators
from whence.align.calls.compiled_graphs import cut_alike
from whence.align.calls.granularity import one_level, rebased
from whence.align.calls.match import pair_of, plan
from whence.align.derived_run import Derived, stated, worded
from whence.align.dims import Node, Unfit, names
from whence.align.layout.batch_order import in_one_order
from whence.align.layout.fused_projections import fused
from whence.align.layout.search import laid_out
from whence.align.plan_editor import USER_MAP, PlanEditor
from whence.align.quantised import layers as quantised_layers
from whence.align.ranks import join
from whence.align.tensors import match as tensors
from whence.align.tensors.elements import Inside
from whence.align.tensors.graph_modules import by_module, graphs_in_one
from whence.align.tensors.modules_as_graphs import as_graphs
from whence.align.user_map import Entry, Map, Slot, compiled, filled
from whence.align.values import groups as value_groups
from whence.records import Call, Run
from whence.records.marks import Mark, mark
from whence.results import CallPair, Made, Plan, SlotPair


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two aligned runs, possibly `Derived` from the given ones, and the plan with their ids."""

    reference: Run
    target: Run
    plan: Plan

    def as_said(self) -> Plan:
        """The plan as a user's map would state it."""
        return stated(self.target, self.plan)


def align(
    reference: Run,
    target: Run,
    *,
    match: str = "auto",
    user_map: Map | None = None,
    inside: Callable[[Run], Inside] | None = None,
) -> Aligned:
    """Align two runs. Elements are read only to confirm what shapes and names propose.

    match: as `plan` takes it; with "exact" and "order" the runs are taken as they are. user_map:
    raises UsageError where it does not fit. inside: computes tensors inside calls of the reference
    that no record holds; asked for those of the target left without a partner.
    """
    reference, target, notes = one_level(reference, target)
    if user_map is not None:
        reference, target, named, map_notes = prepared(reference, target, user_map)
        notes += map_notes
    is_free = match in ("auto", "names")  # whether the runs may be brought to another form
    if is_free:
        if graphs_in_one(target, reference):
            target = as_graphs(reference, target)
        reference, target, cut = cut_alike(reference, target)
        notes += cut
        if user_map is None and graphs_in_one(reference, target):
            return _graphs_by_module(reference, target, inside, notes)
        target, moved = rebased(reference, target)
        shards = user_map.ranks if user_map is not None else ()
        reference, target, joined = join.joined(reference, target, shards)
        notes += [*moved, *joined]
    batched = batches.AlignedBatches(reference, target)
    together = fused_operators.Fused(reference, target)
    if is_free:
        dense = padding.dense(reference, target), padding.dense(target, reference)
        batched = batches.align_batches(*dense)
        if quantised_layers.applies(batched.reference, batched.target):
            together = quantised_layers.joined(batched.reference, batched.target)
        elif value_groups.applies(batched.reference, batched.target):
            together = value_groups.joined(batched.reference, batched.target)
        else:
            together = fused_operators.joined(batched.reference, batched.target)
            together = layout_operators.pair_moves(together)
        reference, target = together.reference, together.target
    matched = plan(reference, target, match, together)
    if user_map is not None:
        target, matched = applied(reference, target, matched, user_map, named)
    if is_free:
        reference, target, matched = masked_columns.cut(reference, target, matched)
        target, matched = fused(reference, target, matched)
        target, matched = laid_out(reference, target, matched)
        target, matched = in_one_order(reference, target, matched)
    if match == "auto":
        reference, target, matched = tensors.pair_tensors(reference, target, matched, inside)
    matched = replace(
        matched,
        notes=(*notes, *batched.notes, *together.notes, *matched.notes),
        joined=tuple(batched.joined),
        parted=tuple(batched.parted),
        made_reference=made_of(reference),
        made_target=made_of(target),
    )
    if is_free:
        target, matched = padding.fill_padding(reference, target, matched)
    return Aligned(reference, target, worded(target, matched))


def _graphs_by_module(
    reference: Run, target: Run, inside: Callable[[Run], Inside] | None, notes: list[str]
) -> Aligned:
    """Aligns modules of the reference with compiled graphs of the target."""
    within = inside(reference) if inside is not None else None
    reference, target, matched = by_module(reference, target, within)
    matched = replace(
        matched,
        notes=(*notes, *matched.notes),
        made_reference=made_of(reference),
        made_target=made_of(target),
    )
    return Aligned(reference, target, worded(target, matched))


def made_of(run: Run) -> tuple[Made, ...]:
    """Every tensor that was derived from a run, at any stage, in the order of ids."""
    tensors: tuple[Made, ...] = ()
    while isinstance(run, Derived):
        tensors = (*run.tensors, *tensors)
        run = run.base
    return tensors


# Applies a user's map: rewrites names, leaves out calls, and adds pairs that replace all others.


def prepared(
    reference: Run, target: Run, user_map: Map
) -> tuple[Run, Run, Mapping[str, str], list[str]]:
    """(reference, target, new names of the target -> old ones, notes): names rewritten, ignored
    calls not selected.

    Raises UsageError for patterns that match nothing.
    """
    notes = []
    new_reference = _ignored(reference, user_map, user_map.ignore_reference, "reference")
    new_target = _ignored(target, user_map, user_map.ignore_target, "target")
    for side, run, changed in (
        ("reference", reference, new_reference),
        ("target", target, new_target),
    ):
        count = len(selected(run.calls)) - len(selected(changed.calls))
        if count:
            notes.append(f"the map leaves out {count} calls of the {side}")
    return new_reference, *_renamed(new_target, user_map), notes


def _ignored(run: Run, user_map: Map, patterns: Sequence[tuple[str, int]], side: str) -> Run:
    if not patterns:
        return run
    ignored: set[int] = set()
    for pattern, line in patterns:
        matching = [c.id for c in run.calls if compiled(pattern).fullmatch(c.scope)]
        if not matching:
            raise user_map.error(line, f"ignore.{side}: {_nothing(pattern, run, side)}")
        ignored.update(matching)
    calls = [
        replace(c, notes=(*c.notes, mark(Mark.NOT_SELECTED))) if c.id in ignored else c
        for c in run.calls
    ]
    return Derived(run, (), (), calls)


def _renamed(run: Run, user_map: Map) -> tuple[Run, Mapping[str, str]]:
    if not user_map.names:
        return run, {}
    rules = [(compiled(r.old), r) for r in user_map.names]
    used: set[int] = set()
    new: dict[str, str] = {}
    for scope in dict.fromkeys(c.scope for c in run.calls):
        for index, (expression, rule) in enumerate(rules):
            match = expression.fullmatch(scope)
            if match:
                used.add(index)
                new[scope] = filled(rule.new, match)
                break
    for index, (_, rule) in enumerate(rules):
        if index not in used:
            raise user_map.error(rule.line, f"names.from: {_nothing(rule.old, run, 'target')}")
    calls = [replace(c, scope=new[c.scope]) if c.scope in new else c for c in run.calls]
    return Derived(run, (), (), calls), {new: old for old, new in new.items()}


def applied(
    reference: Run, target: Run, plan: Plan, user_map: Map, named: Mapping[str, str]
) -> tuple[Run, Plan]:
    """(target with what the map makes of it, plan with its pairs): they take the place of all
    others of the same calls.

    named: the target's own names by rewritten ones. Raises UsageError for entries that match
    nothing, contradict or do not fit.
    """
    editor = PlanEditor(reference, target, plan)
    editor.pairs = {call: _by_name(pair, target, named) for call, pair in editor.pairs.items()}
    entries: dict[int, tuple[Entry, CallPair]] = {}
    by_name = _table(selected(target.calls))
    for entry in user_map.pairs:
        expression = compiled(entry.reference)
        matches = [(c, expression.fullmatch(c.scope)) for c in selected(reference.calls)]
        calls = [(call, match) for call, match in matches if match]
        if not calls:
            nothing = _nothing(entry.reference, reference, "reference")
            raise user_map.error(entry.line, f"pairs.reference: {nothing}")
        missing: list[str] = []
        for call, match in calls:
            if call.id in entries:
                raise user_map.error(
                    entry.line,
                    f"{call.scope} was paired on line {entries[call.id][0].line} already; "
                    "leave one of them out",
                )
            names = {name: filled(pattern, match) for name, pattern in entry.target}
            candidates = {name: _namesake(call, scope, by_name) for name, scope in names.items()}
            operands = {
                name: operand for name, operand in candidates.items() if operand is not None
            }
            if len(operands) == len(names):
                entries[call.id] = entry, _mapped_pair(call, operands, entry, user_map, editor)
            missing += [scope for name, scope in names.items() if name not in operands][:1]
        if len(missing) == len(calls):
            nothing = _nothing(missing[0], target, "target")
            raise user_map.error(
                entry.line, f"pairs.target: {nothing} where {calls[0][0].scope} is"
            )
    for _, pair in entries.values():
        editor.release("reference", reference.calls[pair.reference])
        for partner in (pair.target, *pair.also):
            editor.release("target", target.calls[partner])
    for _, pair in entries.values():
        editor.add(pair)
    return editor.done()


def _by_name(pair: CallPair, target: Run, named: Mapping[str, str]) -> CallPair:
    """The pair, with a note where it was found by a rewritten name."""
    old = named.get(target.calls[pair.target].scope)
    return pair if old is None else replace(pair, rule=USER_MAP, evidence=f"{old} in the target")


def _table(calls: Iterable[Call]) -> Mapping[tuple[Any, ...], list[Call]]:
    out: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in calls:
        out[call.scope, call.step, call.micro, call.phase].append(call)
    return out


def _namesake(call: Call, scope: str, by_name: Mapping[tuple[Any, ...], list[Call]]) -> Call | None:
    """The call of that name in the same step; of several, the one of the same rank and
    occurrence.
    """
    namesakes = by_name.get((scope, call.step, call.micro, call.phase), [])
    exact = [c for c in namesakes if (c.rank, c.occurrence) == (call.rank, call.occurrence)]
    return next(iter(exact or (namesakes if len(namesakes) == 1 else [])), None)


def _mapped_pair(
    call: Call, operands: Mapping[str, Call], entry: Entry, user_map: Map, editor: PlanEditor
) -> CallPair:
    first = next(iter(operands.values()))
    base = pair_of(call, first, USER_MAP, editor.reference, editor.target)
    slots = {s.reference_slot: s for s in base.slots} if len(operands) == 1 else {}
    slot_names = [r.slot for r in call.refs]
    for name, how in entry.slots.items():
        if name not in slot_names:
            raise user_map.error(
                how.line, f"{call.scope} has no slot {name!r}; it has {', '.join(slot_names)}"
            )
        if how.dims is None:
            slots.pop(name, None)
        else:
            slots[name] = _mapped_slot(call, name, how, how.dims, operands, user_map, editor)
    called = " and ".join(dict.fromkeys(c.scope for c in operands.values()))
    return CallPair(
        call.id,
        first.id,
        USER_MAP,
        f"line {entry.line}: {called}",
        tuple(slots.values()),
        tuple(name for name in slot_names if name not in slots),
        base.only_target,
        tuple(c.id for c in operands.values() if c.id != first.id),
    )


def _mapped_slot(
    call: Call,
    name: str,
    how: Slot,
    dims: Node,
    operands: Mapping[str, Call],
    user_map: Map,
    editor: PlanEditor,
) -> SlotPair:
    """Pairs a slot of the reference's call with the tensor that its expression makes from the
    target's.
    """
    slot_names = dict(how.names)
    bound: dict[str, list[int]] = {}
    used = set(names(dims))
    for operand in (o for o in (*operands, *slot_names) if o in used):
        source = operands.get(operand, next(iter(operands.values())))
        slot = slot_names.get(operand, name)
        record = source.by_slot.get(slot)
        if record is not None:
            bound[operand] = [record]
        elif operand in slot_names:
            raise user_map.error(
                how.line,
                f"{source.scope} of the target has no slot {slot!r} (it has "
                f"{', '.join(r.slot for r in source.refs)})",
            )
    try:
        number = editor.derived.add(dims, bound, f"{user_map.path}, line {how.line}")
    except Unfit as error:
        raise user_map.error(how.line, f"{call.scope}, {name}: {error}") from None
    record_id = next(r.record for r in call.refs if r.slot == name)
    shape, expected = editor.derived.record(number).shape, editor.reference.records[record_id].shape
    if shape != expected:
        raise user_map.error(
            how.line,
            f"{call.scope}, {name}: {dims} has shape {shape}, the reference's is {expected}",
        )
    text = str(dims) if number < len(editor.target.records) else ""  # reported at the end
    return SlotPair(name, slot_names.get(next(iter(operands)), name), record_id, number, text)


def _nothing(pattern: str, run: Run, side: str) -> str:
    """An error text for a pattern that matches no name, with the nearest names."""
    scopes = list(dict.fromkeys(c.scope for c in run.calls if c.scope))
    plain = re.sub(r"\{\w+\}|\*", "0", pattern)
    near = difflib.get_close_matches(plain, scopes, 3, 0.5)
    return f"{pattern!r} matches no call of the {side}" + (
        f"; nearest: {', '.join(near)}" if near else ""
    )
