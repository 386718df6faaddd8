"""Modules that one side computes by other operators: they are judged by what they are given and what they return.

Operator by operator, code that was written anew faces nothing, or something that only has the same name. So a module whose own operators
do not all face each other is brought to the form it has in a capture of modules: its operators become its program, which is run again on
what the target gave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from whence import align
from whence.errors import ReplayRefused
from whence.records import Call, Over, Program, Run, children
from whence.replay.composed import compose
from whence.results import Plan

if TYPE_CHECKING:
    from whence.api.comparing import CompareOptions

Site = tuple[str, str]
"""Root and scope of a module."""


class Folded(Over):
    """A run whose modules at `sites` have a program in the place of their operators."""

    def __init__(self, base: Run, calls: list[Call], programs: Mapping[str, Program], sites: Collection[Site]) -> None:
        super().__init__(base, calls)
        self.programs, self.sites = programs, frozenset(sites)


def has_operators(run: Run) -> bool:
    """Is this a capture of operators below modules?"""
    return run.info.options.get("level") == "op"


def written_otherwise(reference: Run, target: Run, plan: Plan) -> tuple[set[Site], set[Site], tuple[str, ...]]:
    """The modules of either run of which not all operators face each other, and a sentence that says so."""
    across = {p.reference: p.target for p in plan.pairs}
    below, below_target = children(reference.calls), children(target.calls)
    back = {b: a for a, b in across.items()}
    ours: dict[Site, Site] = {}
    counts: Counter[Site] = Counter()
    for pair in plan.pairs:
        call, other = reference.calls[pair.reference], target.calls[pair.target]
        if call.kind != "module" or other.kind != "module":
            continue
        mine = [k for k in below.get(call.id, ()) if reference.calls[k].kind == "operator"]
        theirs = [k for k in below_target.get(other.id, ()) if target.calls[k].kind == "operator"]
        if not mine and not theirs:
            continue
        alone = sum(k not in across for k in mine) + sum(k not in back for k in theirs)
        if alone or _is_wired_otherwise(reference, target, mine, across):
            ours[call.root, call.scope] = other.root, other.scope
            counts[call.root, call.scope] += 1
    if not ours:
        return set(), set(), ()
    names = list(dict.fromkeys(align.starred(scope) or root for root, scope in ours))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    said = f"{', '.join(names[:3])}{more}: both runs have other operators there; each is judged as a whole, by its operators run again"
    return set(ours), set(ours.values()), (said,)


def _is_wired_otherwise(reference: Run, target: Run, mine: Collection[int], across: Mapping[int, int]) -> bool:
    """Does an operator read what another one made than the operator that it faces does?"""
    here = {*mine}
    makers = {r.record: k for k in mine for kind in ("output", "mutated") for r in reference.calls[k].slots(kind)}
    theirs = {r.record: across[k] for k in mine if k in across for kind in ("output", "mutated") for r in target.calls[across[k]].slots(kind)}
    back = {across[k]: k for k in here if k in across}
    for k in mine:
        if k not in across:
            continue
        given = {r.slot: r.record for r in target.calls[across[k]].slots("input")}
        for ref in reference.calls[k].slots("input"):
            maker, other = makers.get(ref.record), theirs.get(given.get(ref.slot, -1))
            if maker is not None and other is not None and back.get(other) != maker and reference.calls[maker].op != target.calls[other].op:
                return True
    return False


def folded(run: Run, sites: Collection[Site]) -> Run:
    """The run with these modules' own operators in a program each. What cannot be run again has none, and the reason."""
    below = children(run.calls)
    programs = dict(run.programs)
    changed: dict[int, Call] = {}
    dropped: set[int] = set()
    for call in run.calls:
        kids = [run.calls[k] for k in below.get(call.id, ())]
        own = {k.id for k in kids if k.kind == "operator"}
        if (call.root, call.scope) not in sites or call.kind != "module" or not own:
            continue
        dropped |= own
        leaf = len(own) == len(kids)
        try:
            program = compose(call, kids, run.programs, run.records)
        except ReplayRefused as refused:
            changed[call.id] = msgspec.structs.replace(call, leaf=leaf, no_program=str(refused))
            continue
        programs[program.id] = program
        changed[call.id] = msgspec.structs.replace(call, leaf=leaf, program=program.id, no_program="")
    if not dropped:
        return run
    kept = [changed.get(c.id, c) for c in run.calls if c.id not in dropped]
    number = {c.id: i for i, c in enumerate(kept)}
    calls = [msgspec.structs.replace(c, id=number[c.id], parent=number.get(c.parent, -1)) for c in kept]
    return Folded(run, calls, programs, sites)


def judged_by_module(aligned: align.Aligned, options: CompareOptions) -> align.Aligned:
    """Both runs as they are judged: modules that are written otherwise as a whole. Only captures of operators have such."""
    reference, target = aligned.reference, aligned.target
    if options.match not in ("auto", "names") or not (has_operators(reference) and has_operators(target)):
        return aligned
    ours, theirs, said = written_otherwise(reference, target, aligned.plan)
    if not ours:
        return aligned
    again = align.align(folded(reference, ours), folded(target, theirs), match=options.match, chart=options.chart)
    notes = tuple(dict.fromkeys((*aligned.plan.notes, *said, *again.plan.notes)))
    return align.Aligned(again.reference, again.target, msgspec.structs.replace(again.plan, notes=notes))


def folded_like(reference: Run, run: Run) -> Run:
    """A further run of the reference in the form that the reference was brought to."""
    while isinstance(reference, Over):
        if isinstance(reference, Folded):
            return folded(run, reference.sites)
        reference = reference.base
    return run
