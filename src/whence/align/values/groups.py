"""Pairs two graphs of one function that share no names, such as two exports of a model: the
operators between corresponding values are joined into one call on each side and paired.

Nothing is left between two pairs, whichever operators either graph has: a norm written out in one,
a constant folded in one, a transpose needed in one only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from whence.align.call_sites import match_roots, selected, step_of
from whence.align.calls.facing_tensors import facing, with_programs
from whence.align.calls.fused_operators import VALUES, Fused
from whence.align.calls.joined_programs import with_joined_program
from whence.align.calls.whole_calls import joined_names, whole_call
from whence.align.derived_run import renumbered
from whence.align.values.corresponding import corresponding
from whence.align.values.flat_calls import flat
from whence.align.values.value_graph import Stretch, ValueGraph, is_move
from whence.records import Call, Program, Ref, Run, in_order
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_param

_KINDS = ("operator", "module")
_OWN = "com.microsoft."
_SHARED = 0.5
"""Share of common names from which on two graphs are paired by their names instead."""


def applies(reference: Run, target: Run) -> bool:
    """Whether both runs are operators of graphs, with programs for the reference, that share few
    names or whose shared names do not mean the same.
    """
    if _is_rewritten(target):
        return True
    if not any(map(_is_node, target.calls)):
        return False
    calls, others = (
        [c for c in selected(run.calls) if c.leaf and c.kind in _KINDS]
        for run in (reference, target)
    )
    if not any(map(_is_node, others)):
        return False
    if not any(map(_is_node, calls)):
        return any(c.program and c.parent != -1 for c in calls)
    names, target_names = ({c.scope for c in side if not is_move(c)} for side in (calls, others))
    if len(names & target_names) < _SHARED * min(len(names), len(target_names)):
        return True
    if _are_fused_unsaid(calls, others) or _are_fused_unsaid(others, calls):
        return True
    ends, other_ends = _last_calls(reference, calls), _last_calls(target, others)
    pairs = ((call, other_ends[name]) for name, call in ends.items() if name in other_ends)
    return any(_hands_on(a) != _hands_on(b) and not (a.origins or b.origins) for a, b in pairs)


def _is_node(call: Call) -> bool:
    """Whether the call is a node of a graph that an engine ran."""
    return has_mark(call, Mark.OPSET) or has_mark(call, Mark.EXECUTED_IN)


def _is_rewritten(target: Run) -> bool:
    return any(has_mark(call, Mark.REWRITTEN) for call in target.calls)


def _are_fused_unsaid(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether one graph has an operator of the runtime's own that stands for several operators of
    the other graph without recording which. Then names tell little, even those that still occur in
    both.

    Such a graph was written by an optimiser, and no capture knows what it was made from; or a node
    on blocks of channels has the name of an operator that was fused into it.
    """
    kinds = {call.scope: _last(call) for call in calls}
    known = {*kinds.values()}
    own = [c for c in others if c.op_type.startswith(_OWN) and not (c.origins or is_move(c))]
    if any(call.origins for call in others):
        blocked = (c for c in own if c.op_type.startswith(f"{_OWN}nchwc."))
        return any(kinds.get(c.scope, _last(c)) != _last(c) for c in blocked)
    return any(_last(call) not in known for call in own)


def _last(call: Call) -> str:
    return call.op_type.rpartition(".")[2]


def _hands_on(call: Call) -> bool:
    return is_move(call) or call.op_type == "Cast"


def _last_calls(run: Run, calls: Sequence[Call]) -> dict[str, Call]:
    """By name, the calls that make the model's outputs, where names tell anything: a reshape or
    cast added or removed before an output takes its name along, and a call of an optimised file
    says which calls it stands for.
    """
    ends = {r.record for call in run.calls if call.parent == -1 for r in call.slots("output")}
    return {
        call.scope: call
        for call in calls
        if any(ref.record in ends for ref in call.slots("output"))
    }


def joined(reference: Run, target: Run) -> Fused:
    """Both runs with the operators between corresponding values joined into one call each."""
    parameters = _parameters(reference)
    is_graph = any(has_mark(call, Mark.OPSET) for call in reference.calls)
    if not is_graph and not _is_rewritten(target):
        reference = flat(reference)
    parts, target_parts = list[Stretch](), list[Stretch]()
    for graph, other in _steps(reference, target, parameters):
        for part, target_part in _parts(graph, other):
            parts.append(part)
            target_parts.append(target_part)
    reference, ids = with_wholes(reference, parts, partial(_whole, reference))
    target, target_ids = with_wholes(target, target_parts, partial(_whole, target))
    placed = list(zip(ids, target_ids, strict=True))
    reference, target = facing(reference, target, placed)
    sentences = Counter(
        f"{joined_names(part.calls)} against {joined_names(other.calls)}: taken together, between "
        "values that correspond"
        for part, other in zip(parts, target_parts, strict=True)
        if len(part.calls) + len(other.calls) > 2
    )
    notes = tuple(f"{text} ({n} calls)" if n > 1 else text for text, n in sentences.items())
    pairs = tuple((a, b, "what they read and make corresponds") for a, b in placed)
    return Fused(reference, target, pairs, notes, VALUES)


def _parameters(run: Run) -> set[int]:
    return {ref.record for call in run.calls for ref in call.refs if is_param(ref.slot)}


def _steps(
    reference: Run, target: Run, parameters: Collection[int]
) -> Iterator[tuple[ValueGraph, ValueGraph]]:
    """Pairs of graphs, one for each step that both runs have."""
    roots = match_roots(reference.calls, target.calls)
    others = dict(_graphs(target, {}, _parameters(target)))
    for key, graph in _graphs(reference, roots, parameters):
        if key in others:
            yield graph, others[key]


def _graphs(
    run: Run, roots: Mapping[str, str], parameters: Collection[int]
) -> Iterator[tuple[object, ValueGraph]]:
    calls: dict[object, list[Call]] = {}
    for call in in_order(selected(run.calls)):
        if call.leaf:
            calls.setdefault(step_of(call), []).append(call)
    for call in run.calls:
        if call.parent == -1 and not call.leaf and step_of(call) in calls:
            root = roots.get(call.root, call.root)
            yield (
                (root, call.step, call.micro),
                ValueGraph(run, call, calls[step_of(call)], parameters),
            )


def _parts(graph: ValueGraph, other: ValueGraph) -> Iterator[tuple[Stretch, Stretch]]:
    """Pairs of parts that lie between corresponding values, one for each operator of the reference
    that makes such values.
    """
    partner = corresponding(graph, other)
    made = [v for v in partner if v in graph.makers and partner[v] in other.makers]
    for values in of_one_maker(graph, other, partner, sorted(made, key=graph.place)):
        part = graph.behind(values, partner.keys())
        across = other.behind([partner[value] for value in values], set(partner.values()))
        faced = [partner[read] for read in part.reads if read in partner]
        rest = [read for read in across.reads if read not in faced]
        yield part, across._replace(reads=[*faced, *rest])


def of_one_maker(
    graph: ValueGraph, other: ValueGraph, partner: Mapping[int, int], values: Sequence[int]
) -> list[list[int]]:
    """Groups of values that one call makes in either graph."""
    groups: dict[tuple[bool, int], list[int]] = {}
    for value in values:
        keys = (True, graph.makers[value].id), (False, other.makers[partner[value]].id)
        together = [value]
        for group in {id(groups[k]): groups[k] for k in keys if k in groups}.values():
            together = [*group, *together]
        for member in together:
            groups[True, graph.makers[member].id] = together
            groups[False, other.makers[partner[member]].id] = together
    return list({id(group): group for group in groups.values()}.values())


def with_wholes(
    run: Run,
    parts: Sequence[Stretch],
    whole_of: Callable[[Stretch, int], tuple[Call, Program | None]],
    left_out: Collection[int] = (),
) -> tuple[Run, list[int]]:
    """(the run with each part joined into one call, the ids of these calls).

    whole_of: gives the call for a part under an id, and its program if it needs its own. left_out:
    ids of calls that belong to no part and are removed too.
    """
    first = len(run.calls)
    programs: dict[str, Program] = {}
    heads = {_last_maker(part).id: number for number, part in enumerate(parts)}
    members = {call.id for part in parts for call in part.calls}.union(left_out)
    begun: list[Call] = []
    names: Counter[object] = Counter()
    for call in in_order(run.calls):
        if call.id in heads:
            number = heads[call.id]
            whole, program = whole_of(parts[number], first + number)
            if program is not None:
                programs[program.id] = program
            key = step_of(whole), whole.scope, whole.op
            begun.append(replace(whole, occurrence=names[key]))
            names[key] += 1
        elif call.id not in members:
            begun.append(call)
    calls, new_ids = renumbered(begun)
    return with_programs(run, calls, programs), [new_ids[first + n] for n in range(len(parts))]


def _last_maker(part: Stretch) -> Call:
    """The last call of a part that makes one of its values."""
    makes = set(part.makes)
    return next(
        call
        for call in reversed(part.calls)
        if any(ref.record in makes for ref in call.slots("output"))
    )


def _whole(run: Run, part: Stretch, number: int) -> tuple[Call, Program | None]:
    """One call for a part. A single call is kept, with its inputs in the part's order."""
    (call, *others) = part.calls
    is_whole = len(part.makes) == 1 and not others
    if is_whole and set(part.params) <= {ref.record for ref in call.slots("param")}:
        inputs = {ref.record: ref for ref in reversed(call.slots("input"))}
        ordered = [inputs[record] for record in part.reads if record in inputs]
        ordered += [ref for ref in call.slots("input") if ref not in ordered]
        lent = [
            Ref(f"input.beside.{k}", record)
            for k, record in enumerate(part.reads)
            if record not in inputs
        ]
        refs = (*ordered, *lent, *(ref for ref in call.refs if not is_input(ref.slot)))
        return replace(call, id=number, refs=refs), None
    refs = (
        *(Ref(f"input.{k}", record) for k, record in enumerate(part.reads)),
        *(Ref(f"param.{k}", record) for k, record in enumerate(part.params)),
        *(Ref(f"output.{k}", record) for k, record in enumerate(part.makes)),
    )
    whole = whole_call(
        [_named(call) for call in part.calls if len(part.calls) == 1 or not is_move(call)]
        or part.calls,
        refs,
        number,
    )
    whole = replace(whole, leaf=True)
    return with_joined_program(run, whole, part.calls, refs)


def _named(call: Call) -> Call:
    """The call, named by its operator type where its only name is the model's."""
    return call if call.scope else replace(call, scope=call.op_type)
