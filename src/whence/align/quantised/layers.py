"""A quantised graph held against another one: between values that correspond, what each computes is
one layer, with the numbers that the codes of the target stand for facing the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from whence.align.call_sites import match_roots, selected, step_of
from whence.align.calls.fused_operators import VALUES, Fused
from whence.align.quantised import dynamic
from whence.align.quantised.coded_graph import CodedGraph, CodedSide
from whence.align.quantised.operands import MEASURE, form_of, plain_type
from whence.align.quantised.weights import faced
from whence.align.values.corresponding import corresponding_coarsely
from whence.align.values.flat_calls import flat
from whence.align.values.groups import of_one_maker
from whence.align.values.value_graph import Stretch
from whence.records import Call, Run
from whence.records.marks import Mark, has_mark

_KINDS = ("operator", "module")


def applies(reference: Run, target: Run) -> bool:
    """Does the target compute with codes, by other nodes than the reference has?"""
    nodes = [c for c in selected(target.calls) if c.leaf and has_mark(c, Mark.OPSET)]
    if not any(plain_type(call) in MEASURE or form_of(call) for call in nodes):
        return False
    calls = [c for c in selected(reference.calls) if c.leaf and c.kind in _KINDS]
    return any(call.program for call in calls) and _forms(calls) != _forms(nodes)


def _forms(calls: Sequence[Call]) -> list[tuple[str, str]]:
    """Which nodes work on codes, by name."""
    return sorted(
        (call.scope, call.op_type)
        for call in calls
        if plain_type(call) in MEASURE or form_of(call) is not None
    )


def joined(reference: Run, target: Run) -> Fused:
    """Both runs with what lies between values that correspond as one call each."""
    if not any(has_mark(call, Mark.OPSET) for call in reference.calls):
        reference = flat(reference)
    side, other = CodedSide(dynamic.joined(reference)), CodedSide(dynamic.joined(target))
    parts, other_parts = list[Stretch](), list[Stretch]()
    for graph, across in _steps(side, other):
        for part, other_part in _parts(graph, across):
            parts.append(part)
            other_parts.append(other_part)
    new_reference, ids = side.with_layers(parts)
    new_target, other_ids = other.with_layers(other_parts)
    new_target = faced(new_reference, ids, new_target, other_ids)
    coded = sum(new_target.calls[b].quantised is not None for b in other_ids)
    notes = (
        f"{coded} calls of the target compute with codes: what both compute between values that "
        "correspond is taken together",
    )
    pairs = tuple(
        (a, b, "what they read and make corresponds") for a, b in zip(ids, other_ids, strict=True)
    )
    return Fused(new_reference, new_target, pairs, notes, VALUES)


def _steps(side: CodedSide, other: CodedSide) -> Iterator[tuple[CodedGraph, CodedGraph]]:
    """The graphs of each step that both runs have."""
    roots = match_roots(side.run.calls, other.run.calls)
    across = {step_of(graph.root): graph for graph in other.graphs()}
    for graph in side.graphs():
        rank, root, step, micro = step_of(graph.root)
        key = rank, roots.get(root, root), step, micro
        if key in across:
            yield graph, across[key]


def _parts(graph: CodedGraph, other: CodedGraph) -> Iterator[tuple[Stretch, Stretch]]:
    """What lies between values that correspond, in both graphs."""
    named = _named(graph, other)
    partner = corresponding_coarsely(graph.plain, other.plain, named)
    made = [v for v in partner if v in graph.plain.makers and partner[v] in other.plain.makers]
    ordered = sorted(made, key=graph.plain.place)
    for values in of_one_maker(graph.plain, other.plain, partner, ordered):
        part = graph.behind(values, partner.keys())
        across = other.behind([partner[value] for value in values], set(partner.values()))
        yield part, across._replace(reads=_in_order(graph, part, partner, other, across))


def _in_order(
    graph: CodedGraph,
    part: Stretch,
    partner: Mapping[int, int],
    other: CodedGraph,
    across: Stretch,
) -> list[int]:
    """What the target's part reads, in the order of the reference's."""
    wanted = [partner[plain] for read in part.reads if (plain := graph.shown(read)) in partner]
    by_plain = {other.shown(read): read for read in reversed(across.reads)}
    first = [by_plain[value] for value in wanted if value in by_plain]
    return [*first, *(read for read in across.reads if read not in first)]


def _named(graph: CodedGraph, other: CodedGraph) -> dict[int, int]:
    """Values that calls of one name make, the only ones of it."""
    names, others = graph.names(), other.names()
    return {
        value: others[name]
        for name, value in names.items()
        if name in others and _fit(graph, value, other, others[name])
    }


def _fit(graph: CodedGraph, value: int, other: CodedGraph, across: int) -> bool:
    return graph.plain.record(value).count == other.plain.record(across).count
