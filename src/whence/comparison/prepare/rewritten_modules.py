"""Modules that the two runs compute by different operators: each is judged as a whole, by its
inputs and outputs.

Operators of rewritten code have no partner, or are paired with operators that only share their
name. So a module whose own operators are not all paired is brought to the form that it has in a
capture of modules: its operators become its program, which is replayed on the target's inputs.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from whence import align, judge
from whence.display import listed
from whence.errors import ReplayRefused
from whence.records import Call, Over, Program, Ref, Run, children, in_order
from whence.records.marks import Mark, has_mark
from whence.records.region import renumbered
from whence.records.slots import (
    SlotKind,
    is_mutated,
    is_output,
    is_param,
    is_read,
    is_written,
    slot_of_kind,
)
from whence.replay.composed import compose
from whence.results import Plan

REWRITTEN = "its operators are judged together"
"""The note of a call that stands for operators that the other run has otherwise."""

Site = tuple[str, str]
"""Root and scope of a module."""


class Folded(Over):
    """A run in which the operators of the modules at `sites` are folded into programs."""

    def __init__(
        self, base: Run, calls: list[Call], programs: Mapping[str, Program], sites: Collection[Site]
    ) -> None:
        super().__init__(base, calls)
        self.programs, self.sites = programs, frozenset(sites)


def unfolded(run: Run) -> Run:
    """The run before its operators were folded into programs; record ids stay the same."""
    layer: Run | None = run
    while layer is not None and not isinstance(layer, Folded):
        layer = getattr(layer, "base", None)
    return run if layer is None else layer.base


def written_otherwise(
    reference: Run, target: Run, plan: Plan
) -> tuple[set[Site], set[Site], tuple[str, ...]]:
    """(sites of the reference, sites of the target, sentences) of paired modules whose operators
    are not all paired, or are connected differently.
    """
    across = {p.reference: p.target for p in plan.pairs}
    below, below_target = children(reference.calls), children(target.calls)
    back = {b: a for a, b in across.items()}
    sites: dict[Site, Site] = {}
    counts: Counter[Site] = Counter()
    for pair in plan.pairs:
        call, partner = reference.calls[pair.reference], target.calls[pair.target]
        if call.kind != "module" or partner.kind != "module":
            continue
        if _is_graph(reference, below.get(call.id, ())):
            continue  # each node says what it computes, and passes of an engine fuse some
        operators = [k for k in below.get(call.id, ()) if reference.calls[k].kind == "operator"]
        partner_operators = [
            k for k in below_target.get(partner.id, ()) if target.calls[k].kind == "operator"
        ]
        if not operators and not partner_operators:
            continue
        unpaired = sum(k not in across for k in operators) + sum(
            k not in back for k in partner_operators
        )
        alike = _forms(reference, call) == _forms(target, partner)
        if unpaired or (alike and _is_wired_otherwise(reference, target, operators, across)):
            sites[call.root, call.scope] = partner.root, partner.scope
            counts[call.root, call.scope] += 1
    if not sites:
        return set(), set(), ()
    names = list(dict.fromkeys(align.starred(scope) or root for root, scope in sites))
    sentence = (
        f"{listed(names, 3)}: both runs have other operators there; each is judged "
        "as a whole, by its operators run again"
    )
    return set(sites), set(sites.values()), (sentence,)


def without_operators(reference: Run, target: Run, plan: Plan) -> tuple[Run, Run] | None:
    """Both captures of operators in the form of captures of modules, if the plan cut and joined
    batches; else None.

    Inputs and outputs of modules have an axis of rows and one of tokens. Tensors of the operators
    inside may merge both into one axis, or hold the length of either, and cannot be cut.
    """
    if not plan.joined or not all(map(align.has_operators, (reference, target))):
        return None
    return folded(reference, _modules(reference)), folded(target, _modules(target))


def _modules(run: Run) -> set[Site]:
    return {(c.root, c.scope) for c in run.calls if c.kind == "module"}


def _is_graph(run: Run, calls: Sequence[int]) -> bool:
    """Whether these calls are nodes of an ONNX graph."""
    return any(has_mark(run.calls[k], Mark.OPSET) for k in calls)


def _is_wired_otherwise(
    reference: Run, target: Run, operators: Sequence[int], across: Mapping[int, int]
) -> bool:
    """Whether paired operators of a module differ in shapes, or read the results of operators that
    are not paired with each other.
    """
    pairs = [(reference.calls[k], target.calls[across[k]]) for k in operators if k in across]
    makers, partner_makers = _makers([a for a, _ in pairs]), _makers([b for _, b in pairs])
    for call, partner in pairs:
        partner_inputs = {r.slot: r.record for r in partner.slots("input")}
        for ref in call.slots("input"):
            maker, instead = (
                makers.get(ref.record),
                partner_makers.get(partner_inputs.get(ref.slot, -1)),
            )
            if maker is not None and instead is not None and across[maker] != instead:
                return True
        if _forms(reference, call) != _forms(target, partner):
            return True
    return False


def _makers(calls: Sequence[Call]) -> dict[int, int]:
    """By record, the call that wrote it; records with several possible writers are left out."""
    calls_of: dict[int, list[int]] = {}
    for call in calls:
        for ref in call.slots("output"):
            calls_of.setdefault(ref.record, []).append(call.id if not ref.edge else -1)
    return {record: ids[0] for record, ids in calls_of.items() if len(ids) == 1 and ids[0] >= 0}


def _forms(run: Run, call: Call) -> list[tuple[int, ...]]:
    return [run.records[r.record].shape for r in call.refs if not is_param(r.slot)]


def folded(run: Run, sites: Collection[Site]) -> Run:
    """The run with the own operators of each of these modules folded into one program. A module
    that cannot be replayed gets the reason instead (`no_program`).
    """
    below, writers = children(run.calls), Writers(run)
    programs = dict(run.programs)
    changed: dict[int, Call] = {}
    dropped: set[int] = set()
    for call in run.calls:
        kids = [run.calls[k] for k in below.get(call.id, ())]
        operators = {k.id for k in kids if k.kind == "operator"}
        if (call.root, call.scope) not in sites or call.kind != "module" or not operators:
            continue
        dropped |= operators
        leaf = len(operators) == len(kids)
        earlier = writers.before(call, kids)
        call = msgspec.structs.replace(call, refs=(*earlier.refs, *call.refs))
        try:
            program = compose(call, kids, run.programs, run.records, earlier.unnamed)
        except ReplayRefused as refused:
            changed[call.id] = msgspec.structs.replace(
                call, leaf=leaf, no_program=str(refused), notes=(*call.notes, REWRITTEN)
            )
            continue
        programs[program.id] = program
        notes = (*call.notes, REWRITTEN)
        changed[call.id] = msgspec.structs.replace(
            call, leaf=leaf, program=program.id, no_program="", notes=notes
        )
    if not dropped:
        return run
    for group in _backward_of(run, sites):
        dropped |= {c.id for c in group[1:]}
        changed[group[0].id] = _one_call(run, group)
    remaining = [changed.get(c.id, c) for c in run.calls if c.id not in dropped]
    return Folded(run, renumbered(remaining), programs, sites)


def _backward_of(run: Run, sites: Collection[Site]) -> list[list[Call]]:
    """Groups of operators in these modules' backward passes: consecutive operators of one module,
    in execution order.
    """
    groups: list[list[Call]] = []
    last: Call | None = None
    for call in in_order(run.calls):
        if call.kind != "operator" or call.phase != "backward":
            continue
        if (call.root, call.scope) in sites:
            if last is not None and (last.root, last.scope, last.parent) == (
                call.root,
                call.scope,
                call.parent,
            ):
                groups[-1].append(call)
            else:
                groups.append([call])
        last = call
    counts: Counter[tuple[Any, ...]] = Counter()
    for group in groups:
        key = group[0].key()._replace(op="", occurrence=0)
        group[0] = msgspec.structs.replace(group[0], op="backward", occurrence=counts[key])
        counts[key] += 1
    return groups


def _place(call: Call) -> tuple[str, str, int, int]:
    return call.root, call.scope, call.step, call.micro


def _one_call(run: Run, group: Sequence[Call]) -> Call:
    """One call that replaces a group of operators of a backward pass. Its inputs are the gradients
    from outside and all inputs and outputs of its module's forward pass; its outputs are the
    gradients that other calls read.

    Intermediate tensors saved for the backward pass are left out, since they depend on how the
    forward pass is written.
    """
    first, inside = group[0], {c.id for c in group}
    results = [r.record for c in group for r in (*c.slots("output"), *c.slots("mutated"))]
    forward = [
        c
        for c in run.calls
        if c.kind == "module" and c.phase == "forward" and _place(c) == _place(first)
    ]
    refs: dict[str, Ref] = {}
    for number, call in enumerate(forward):
        for ref in call.refs:
            if is_read(ref.slot) or is_output(ref.slot):
                slot = f"input.forward.{number}.{ref.slot}"
                refs[slot] = Ref(slot, ref.record)
    others = [c for c in run.calls if c.id not in inside]
    gradients = {
        r.record
        for c in others
        if c.phase == "backward"
        for r in (*c.slots("output"), *c.slots("mutated"))
    }.difference(results)
    read_elsewhere = {r.record for c in others for r in c.slots("input")}
    inputs = [r.record for c in group for r in c.slots("input") if r.record in gradients]
    outputs = [record for record in results if record in read_elsewhere]
    for kind, records in (("input", inputs), ("output", outputs)):
        counts: Counter[str] = Counter()
        for record in dict.fromkeys(records):
            shape = "x".join(map(str, run.records[record].shape)) or "scalar"
            slot = f"{kind}.gradient.{shape}.{counts[shape]}"
            refs[slot] = Ref(slot, record)
            counts[shape] += 1
    return msgspec.structs.replace(
        first,
        op_type="backward",
        refs=tuple(refs.values()),
        arguments={},
        program="",
        leaf=True,
        aliases=(),
        seconds=sum(c.seconds for c in group),
        notes=(*first.notes, REWRITTEN),
        no_program="its operators are others than the other run's, and what they keep of the "
        "forward pass is too",
    )


def judged_by_module(aligned: align.Aligned, match: str, chart: align.Map | None) -> align.Aligned:
    """Both runs with modules that are written differently folded into one call each, and aligned
    again. Runs other than captures of operators stay as they are.
    """
    reference, target = aligned.reference, aligned.target
    if match not in ("auto", "names") or not all(map(align.has_operators, (reference, target))):
        return aligned
    reference_sites, target_sites, sentences = written_otherwise(reference, target, aligned.plan)
    if not reference_sites:
        return aligned
    realigned = align.align(
        folded(reference, reference_sites),
        folded(target, target_sites),
        match=match,
        user_map=chart,
    )
    notes = tuple(dict.fromkeys((*aligned.plan.notes, *sentences, *realigned.plan.notes)))
    return align.Aligned(
        realigned.reference, realigned.target, msgspec.structs.replace(realigned.plan, notes=notes)
    )


def folded_like(reference: Run, run: Run) -> Run:
    """A further run of the reference with the same modules folded as in the reference."""
    while isinstance(reference, Over):
        if isinstance(reference, Folded):
            return folded(run, reference.sites)
        reference = reference.base
    return run


# Adds to a call the tensors that it read from objects (such as a cache inside an argument) and that
# the capture did not list as inputs.
#
# A capture of modules finds these tensors while it records a program. A capture of operators only
# shows who reads them, so they are looked up among the tensors that earlier calls wrote.

Place = tuple[str, str, str]
"""Root, scope and slot of a module."""


class EarlierTensors(NamedTuple):
    """Tensors of earlier calls that a call read although they are not among its inputs. refs: as
    inputs, those whose name is the same in both runs; unnamed: the records of all others.
    """

    refs: tuple[Ref, ...]
    unnamed: frozenset[int]


class Writers:
    """Looks up which call wrote a tensor of a run, and when."""

    def __init__(self, run: Run) -> None:
        self._run, self._below = run, children(run.calls)
        self._by_operators: dict[int, int] = {}  # record -> the first operator that wrote it
        self._places: dict[int, dict[Place, int]] = {}  # record -> place -> the first such call
        self._written: dict[Place, list[tuple[int, int]]] = {}  # place -> (call, record) in order
        for call in run.calls:
            for ref in call.refs:
                if not is_written(ref.slot):
                    continue
                if call.kind == "operator":
                    self._by_operators.setdefault(ref.record, call.id)
                elif call.kind == "module":
                    place = call.root, call.scope, ref.slot
                    self._places.setdefault(ref.record, {}).setdefault(place, call.id)
                    self._written.setdefault(place, []).append((call.id, ref.record))

    def before(self, call: Call, kids: Sequence[Call]) -> EarlierTensors:
        """The tensors of earlier calls that operators among `kids` (the calls right below `call`)
        read and that are not inputs of `call`.
        """
        known = {r.record for r in call.refs if not is_written(r.slot)}
        known |= {r.record for kid in kids for r in kid.refs if is_written(r.slot)}
        start = self._start(call)
        taken = {r.slot for r in call.refs}
        refs: dict[str, Ref] = {}
        unnamed: set[int] = set()
        for ref in _read(kids):
            if ref.record in known:
                continue
            known.add(ref.record)
            slot = self._slot(call, ref.record, start)
            if slot and slot not in taken and slot not in refs:
                refs[slot] = Ref(slot, ref.record, ref.edge)
            elif self._is_activation(ref, start):
                unnamed.add(ref.record)
        return EarlierTensors(tuple(refs.values()), frozenset(unnamed))

    def _start(self, call: Call) -> int:
        """The id of the first call that ended inside this one. Calls with smaller ids ended before
        this call started.
        """
        kids = self._below.get(call.id)
        return self._start(self._run.calls[kids[0]]) if kids else call.id

    def _slot(self, call: Call, record: int, start: int) -> str:
        """The input slot for a tensor that a module wrote before `start`; "" if it is not the
        newest one that any module wrote in its slot.

        An older state of a cache gets no name, since it would be paired with the other run's newest
        state.
        """
        places = [
            place
            for place, first in self._places.get(record, {}).items()
            if first < start and self._newest(place, start) == record
        ]
        if not places:
            return ""
        own = [p for p in places if p[:2] == (call.root, call.scope) and is_mutated(p[2])]
        if own:
            return slot_of_kind(own[0][2], SlotKind.INPUT)
        root, scope, slot = max(places, key=lambda place: (len(place[1]), place))
        return f"{SlotKind.INPUT}.{scope or root}.{slot}"

    def _newest(self, place: Place, start: int) -> int:
        written = self._written[place]
        return written[bisect.bisect_left(written, (start, -1)) - 1][1]

    def _is_activation(self, ref: Ref, start: int) -> bool:
        """Whether an earlier call computed this floating-point tensor, so that the other run has
        its own version. A constant with the same content does not count.
        """
        writers = (self._by_operators.get(ref.record), *self._places.get(ref.record, {}).values())
        return (
            ref.edge == "identity"
            and any(writer is not None and writer < start for writer in writers)
            and judge.unit_roundoff(self._run.records[ref.record].dtype) > 0
        )


def _read(kids: Iterable[Call]) -> Iterable[Ref]:
    return (ref for kid in kids if kid.kind == "operator" for ref in kid.slots("input"))
