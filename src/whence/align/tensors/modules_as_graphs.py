"""Rewrites a run of modules in the form of the other run's compiled graphs."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from whence.align.derived_run import Derived, DerivedTensors, renumbered
from whence.align.layout import axes
from whence.align.tensors.graph_modules import GraphModules
from whence.records import Call, Ref, Run, children
from whence.records.region import inwards


def as_graphs(reference: Run, target: Run) -> Run:
    """The target, a run of modules, in the form of the reference's graphs: one call for each node
    that holds a module's output.

    Its graphs have the same inputs and parameters as the reference's, as far as modules show them.
    Calls inside the modules are left out.
    """
    modules = GraphModules(target, reference)
    modules.graphs()
    # graph's call in the reference -> (call of a node, record of the target)
    nodes_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for record, (node, _, _) in modules.paired.items():
        nodes_of[reference.calls[node].parent].append((node, record))
    derived = DerivedTensors(target)
    replaced: set[int] = set()
    added: list[Call] = []
    for graph in (c for c in reference.calls if c.id in nodes_of):
        above = reference.calls[graph.parent] if graph.parent >= 0 else graph
        outer = modules.by_key.get(modules.key(above, above.root, above.scope, above.occurrence))
        if outer is None:
            continue
        number, refs = len(target.calls) + len(added), modules.graph_refs(graph, above, outer)
        replaced.update(kid for kid in inwards(children(target.calls), outer.id) if kid != outer.id)
        moved = _moved(graph, number, outer.id, outer, refs)
        added.append(replace(moved, arguments={"mode": "fx"}))
        for node, record in sorted(nodes_of[graph.id], key=lambda n: reference.calls[n[0]].order):
            kid = reference.calls[node]
            want = reference.records[kid.slots("output")[0].record].shape
            way = next(iter(axes.ways(target.records[record].shape, want)), None)
            if way is None or modules.turned(record):
                continue
            why = f"what {kid.scope} returns is node {kid.op}"
            output = Ref("output.0", derived.add(way, {"x": [record]}, why))
            moved = _moved(kid, len(target.calls) + len(added), number, outer, (output,))
            added.append(replace(moved, arguments={}, origins=()))
    if not added:
        return target
    begun = [(c.order, 0, c) for c in target.calls if c.id not in replaced]
    begun += [(c.order, c.id, c) for c in added]
    calls = [c for *_, c in sorted(begun, key=lambda item: item[:2])]
    return Derived(derived.done(), (), (), renumbered(calls)[0])


def _moved(call: Call, number: int, parent: int, outer: Call, refs: tuple[Ref, ...]) -> Call:
    """A copy of a call of the other run, placed below a call of this run."""
    return replace(
        call,
        id=number,
        parent=parent,
        order=outer.order,
        root=outer.root,
        rank=outer.rank,
        refs=refs,
        program="",
        no_program="captured as modules",
        notes=(),
    )
