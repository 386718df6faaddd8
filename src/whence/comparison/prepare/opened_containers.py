"""Opens containers that only one run has: their code becomes that of the container around them.

Another implementation of a model divides it into other modules. Code between paired calls inside an
unpaired container would belong to no pair, and nobody would ask whether it is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from whence import align
from whence.align.calls.match import pair_of
from whence.align.calls.site_pairing import ORDER
from whence.errors import ReplayRefused
from whence.records import Call, Over, Program, Ref, Run, children
from whence.records.marks import Mark, has_mark, mark
from whence.records.program import identified
from whence.records.training import BACKWARD, OPTIMIZER, backward_child, is_sum
from whence.replay.flatten import Flat, Node, flatten
from whence.results import CallPair, Plan, SlotPair


class Opened(Over):
    """A run in which some containers are opened."""

    def __init__(self, base: Run, calls: Sequence[Call], programs: Sequence[Program]) -> None:
        super().__init__(base, calls)
        self.programs = {**base.programs, **{program.id: program for program in programs}}


def with_containers_of_both(aligned: align.Aligned) -> align.Aligned:
    """Two aligned runs in which every container around a paired call is paired itself. Calls and
    records keep their ids.
    """
    plan = _without_other_places(aligned)
    alone, alone_target = plan.unmatched_reference, plan.unmatched_target
    reference, taken = opened(aligned.reference, {p.reference for p in plan.pairs}, {*alone})
    target, taken_target = opened(
        aligned.target, {k for p in plan.pairs for k in (p.target, *p.also)}, {*alone_target}
    )
    if reference is aligned.reference and target is aligned.target:
        return aligned if plan is aligned.plan else align.Aligned(reference, target, plan)
    held = {_content(target, ref): ref for call in target.calls for ref in call.slots("param")}
    pairs = []
    for pair in plan.pairs:
        refs, lone = taken.get(pair.reference, ()), taken_target.get(pair.target, ())
        alike = {ref.slot: held.get(_content(reference, ref)) for ref in refs}
        slots = [
            SlotPair(ref.slot, holder.slot, ref.record, holder.record)
            for ref in refs
            if (holder := alike[ref.slot]) is not None
        ]
        pairs.append(
            msgspec.structs.replace(
                pair,
                slots=(*pair.slots, *slots),
                only_reference=(*pair.only_reference, *(s for s, t in alike.items() if t is None)),
                only_target=(*pair.only_target, *(ref.slot for ref in lone)),
            )
        )
    plan = msgspec.structs.replace(
        plan,
        pairs=tuple(pairs),
        unmatched_reference=tuple(k for k in alone if not _is_opened(reference.calls[k])),
        unmatched_target=tuple(k for k in alone_target if not _is_opened(target.calls[k])),
    )
    return align.Aligned(reference, target, plan)


def _without_other_places(aligned: align.Aligned) -> Plan:
    """The plan without pairs that rest on a place in the program alone, which says nothing where
    modules are divided otherwise: backward passes that lead to children which are no pair, and
    gradients and steps of parameters, paired in order, whose modules are none. The backward pass of
    a module is paired with that of the module's partner instead.
    """
    plan, runs = aligned.plan, (aligned.reference, aligned.target)
    if all(runs[0].calls[pair.reference].phase == "forward" for pair in plan.pairs):
        return plan
    partners = {p.reference: (p.target, *p.also) for p in plan.pairs}
    paired = {*partners}, {k for targets in partners.values() for k in targets}
    below = [children(run.calls) for run in runs]
    at = [{(c.rank, c.order): c.id for c in run.calls if c.phase == "forward"} for run in runs]
    modules = {
        (runs[0].calls[k].scope, runs[1].calls[t].scope)
        for k, targets in partners.items()
        for t in targets
        if runs[0].calls[k].phase == "forward"
    }

    def leads_elsewhere(pair: CallPair) -> bool:
        call, partner = runs[0].calls[pair.reference], runs[1].calls[pair.target]
        if call.phase == OPTIMIZER or is_sum(call.op):
            if pair.rule != ORDER or (call.scope, partner.scope) in modules:
                return False
            started = [
                (s.by_slot.get("input.param"), r) for s, r in ((call, runs[0]), (partner, runs[1]))
            ]
            contents = {run.records[record].hash for record, run in started if record is not None}
            return len(contents) != 1 or "" in contents
        forwards = [
            at[side].get((inner.rank, inner.forward), -1)
            for side, inner in enumerate((call, partner))
        ]
        children_of = [backward_child(inner.op) for inner in (call, partner)]
        if pair.rule == ORDER and _is_of_module(call) and forwards[0] in partners:
            return forwards[1] not in partners[forwards[0]]
        kids = []
        for side, child in enumerate(children_of):
            around = below[side].get(forwards[side], ())
            if child is None or child >= len(around):
                return False
            kids.append(around[child])
        are_paired = [kid in paired[side] for side, kid in enumerate(kids)]
        return any(are_paired) and kids[1] not in partners.get(kids[0], ())

    wrong = {p.reference: p.target for p in plan.pairs if leads_elsewhere(p)}
    if not wrong:
        return plan
    pairs = [p for p in plan.pairs if p.reference not in wrong]
    used = {k for p in pairs for k in (p.target, *p.also)}
    passes = {(c.rank, c.forward): c for c in runs[1].calls if _is_of_module(c)}
    for call in filter(_is_of_module, map(runs[0].calls.__getitem__, wrong)):
        forwards = partners.get(at[0].get((call.rank, call.forward), -1), ())
        candidates = (passes.get((call.rank, runs[1].calls[k].order)) for k in forwards)
        partner = next((c for c in candidates if c is not None and c.id not in used), None)
        if partner is not None:
            used.add(partner.id)
            pairs.append(pair_of(call, partner, ORDER, *runs))
    placed = {p.reference for p in pairs}
    return msgspec.structs.replace(
        plan,
        pairs=tuple(pairs),
        unmatched_reference=(*plan.unmatched_reference, *(k for k in wrong if k not in placed)),
        unmatched_target=tuple(
            k for k in (*plan.unmatched_target, *wrong.values()) if k not in used
        ),
    )


def _is_of_module(call: Call) -> bool:
    """Whether a call is the backward pass of an innermost module."""
    return call.phase == BACKWARD and call.leaf and not call.op


def _content(run: Run, ref: Ref) -> tuple[str, ...]:
    """A key that equal tensors share; no other tensor has that of one without a digest."""
    record = run.records[ref.record]
    return (record.hash, record.dtype) if record.hash else (ref.slot, str(id(run)))


def _is_opened(call: Call) -> bool:
    return has_mark(call, Mark.OPENED)


def opened(
    run: Run, paired: Set[int], unpaired: Set[int]
) -> tuple[Run, Mapping[int, Sequence[Ref]]]:
    """The run with those of its unpaired containers opened that lie between paired calls, and what
    each container around them took over.
    """
    calls = run.calls
    below = children(calls) if any(not calls[k].leaf for k in unpaired) else {}
    tops: dict[int, int] = {}  # by opened container, the paired one around it
    for call in paired if below else ():
        between, around = list[int](), calls[call].parent
        while around in unpaired:
            between.append(around)
            around = calls[around].parent
        if around in paired:
            tops.update(dict.fromkeys(between, around))
    tops = {k: t for k, t in tops.items() if not any(calls[c].kind == "operator" for c in below[k])}
    if not tops:
        return run, {}
    changed = {
        kid: msgspec.structs.replace(calls[kid], parent=top)
        for call, top in tops.items()
        for kid in below[call]
    }
    for call, top in tops.items():
        notes = (*calls[call].notes, mark(Mark.NOT_SELECTED), mark(Mark.OPENED))
        changed[call] = msgspec.structs.replace(
            calls[call], parent=top, refs=(), program="", leaf=True, notes=notes
        )
    moved = [changed.get(call.id, call) for call in calls]
    kids = children(moved)
    programs: list[Program] = []
    taken: dict[int, Sequence[Ref]] = {}
    for top in set(tops.values()):
        flat = _program(run, top, below, tops, kids[top])
        whole = moved[top]  # which an opened container may have held too
        if isinstance(flat, str):
            moved[top] = msgspec.structs.replace(whole, program="", no_program=flat)
            continue
        origins = [
            (slot, calls[call], inner)
            for slot, (call, inner) in flat.origins.items()
            if call in tops and inner in calls[call].by_slot
        ]
        refs = tuple(Ref(slot, call.by_slot[inner]) for slot, call, inner in origins)
        flows = tuple(slot for slot, call, inner in origins if inner in call.gradients)
        scopes = tuple(calls[place].scope for place in flat.places)
        program = identified(msgspec.structs.replace(flat.program, scopes=scopes))
        programs.append(program)
        moved[top] = msgspec.structs.replace(
            whole,
            program=program.id,
            refs=(*whole.refs, *refs),
            gradients=(*whole.gradients, *flows),
        )
        taken[top] = refs
    return Opened(run, moved, programs), taken


def _program(
    run: Run,
    top: int,
    below: Mapping[int, Sequence[int]],
    tops: Mapping[int, int],
    kids: Sequence[int],
) -> Flat | str:
    """The program of a container with those of the opened ones inside, or why there is none. kids:
    its children afterwards.
    """
    calls, around = run.calls, run.calls[top].scope

    def node(number: int) -> Node:
        call = calls[number]
        program = run.programs.get(call.program)
        if program is None:
            raise ReplayRefused(f"{call.module_name} has no program: {call.no_program}")
        inside = frozenset(k for k, kid in enumerate(below[number]) if kid in tops)
        records = {ref.slot: ref.record for ref in call.refs} | {
            f"{k}:{ref.slot}": ref.record
            for k, kid in enumerate(below[number])
            for ref in calls[kid].refs
        }
        shapes = {slot: run.records[record].shape for slot, record in records.items()}
        scope = call.scope.removeprefix(f"{around}.") if around else call.scope
        return Node(number, program, below[number], inside, shapes, scope, records)

    try:
        return flatten(top, node, {kid: place for place, kid in enumerate(kids)})
    except ReplayRefused as refused:
        return str(refused)
