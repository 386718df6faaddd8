"""Aligns a run of compiled graphs with a run of modules: the graph node that holds a module's
output is paired with that output.

A compiler keeps of a module only what the next kernel reads. A node whose module path is the
module's and that is used outside the module is its output. Modules without such a node are judged
across: between tensors that both runs recorded, the reference's programs run on the target's
inputs.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from whence.align import dims as ex
from whence.align.call_sites import match_roots, selected
from whence.align.calls.graph_nodes import nodes_by_kind
from whence.align.derived_run import DerivedTensors
from whence.align.layout import axes
from whence.align.tensors.candidates import TensorCandidates
from whence.align.tensors.elements import (
    Elements,
    Inner,
    Inside,
    PairedTensor,
    Tap,
    pairs_of_tensors,
    split,
)
from whence.align.tensors.module_outputs import (
    ModuleOutput,
    is_move,
    module_outputs,
)
from whence.errors import ElementsMissing
from whence.records import Call, Ref, Run, children, in_order
from whence.records.region import hands_on
from whence.records.slots import is_param, param_name
from whence.results import Plan, SlotPair

_STEPS = 4  # steps for which nodes inside containers are looked up


def graphs_in_one(reference: Run, target: Run) -> bool:
    """Whether only the target executed compiled graphs, and the reference modules."""
    return any(c.kind == "graph" for c in target.calls) and not any(
        c.kind == "graph" for c in reference.calls
    )


def by_module(reference: Run, target: Run, inside: Inside | None = None) -> tuple[Run, Run, Plan]:
    """Both runs with derived tensors, and a plan that pairs the outputs of modules with nodes of
    graphs.

    inside: computes tensors inside the reference's programs; nodes of a container's own code are
    paired with these by their elements.
    """
    graph_modules = GraphModules(reference, target)
    graph_modules.graphs()
    graph_modules.modules()
    if inside is not None:
        graph_modules.pair_inside(inside)
    rich = (
        graph_modules.elements.with_inner(graph_modules.inner.keys())
        if graph_modules.inner
        else reference
    )
    return rich, graph_modules.derived.done(), graph_modules.plan()


class GraphModules:
    def __init__(self, reference: Run, target: Run) -> None:
        self.reference, self.target = reference, target
        self.derived = DerivedTensors(target)
        self.met: set[int] = set()  # modules of the target that the reference called too
        self.paired: dict[int, PairedTensor] = {}
        self.elements = Elements(reference, target)
        self.inner: dict[int, Inner] = {}  # records of tensors inside calls
        self._place: dict[
            int, tuple[str, str, int, int]
        ] = {}  # by call of a node: module, operator, its index and the number of such nodes
        roots = match_roots(reference.calls, target.calls)
        self.one_rank = (
            len({c.rank for c in reference.calls}) == len({c.rank for c in target.calls}) == 1
        )
        self.by_key: dict[tuple[Any, ...], Call] = {}
        for call in selected(reference.calls):
            if call.kind == "module" and call.phase == "forward":
                self.by_key[
                    self.key(call, roots.get(call.root, call.root), call.scope, call.occurrence)
                ] = call
        self.below = children(target.calls)

    def key(self, call: Call, root: str, scope: str, occurrence: int) -> tuple[Any, ...]:
        return (0 if self.one_rank else call.rank), root, call.step, call.micro, scope, occurrence

    def modules(self) -> None:
        """Pair modules that both runs called: those around the graphs, and those that were not
        compiled.
        """
        for target_call in selected(self.target.calls):
            call = (
                self.by_key.get(
                    self.key(
                        target_call, target_call.root, target_call.scope, target_call.occurrence
                    )
                )
                if target_call.kind == "module"
                else None
            )
            if call is None or target_call.phase != "forward":
                continue
            self.met.add(target_call.id)
            records = target_call.by_slot
            for ref in call.refs:
                if not is_param(ref.slot) and ref.slot in records:
                    self._pair(
                        ref.record,
                        records[ref.slot],
                        target_call,
                        ref.slot,
                        "the same module",
                        plain=True,
                    )

    def graphs(self) -> None:
        """Pair the outputs of modules inside graphs with graph nodes."""
        for graph in selected(self.target.calls):
            program = self.target.programs.get(graph.program)
            if (
                graph.kind != "graph"
                or graph.phase != "forward"
                or program is None
                or not program.scopes
            ):
                continue
            kids = {
                k.op: k
                for i in self.below.get(graph.id, ())
                if (k := self.target.calls[i]).kind == "operator"
            }
            for (scope, base), alike in nodes_by_kind(program).items():
                for place, name in enumerate(alike):
                    if name in kids:
                        self._place[kids[name].id] = scope, base, place, len(alike)
            for scope, outputs in module_outputs(program, kids).items():
                call = self.by_key.get(self.key(graph, graph.root, scope, 0))
                if call is None or self.key(graph, graph.root, scope, 1) in self.by_key:
                    # for a module called twice, the graph does not tell the calls apart
                    continue
                outs = list(dict.fromkeys(r.record for r in call.slots("output")))
                for record, output in self._matched(outs, outputs):
                    self._pair(
                        record,
                        _output(output.call),
                        output.call,
                        "output.0",
                        f"node {output.call.op} is what {scope} returns",
                        output.plain,
                    )

    def pair_inside(self, inside: Inside) -> None:
        """Pair, by their elements, nodes that are no module's output with operators of the
        reference's own code.

        A naming rule learnt from certain pairs finds nodes that a fault has changed: the third
        operator in one layer corresponds to the third in all layers.
        """
        used = {slot.target_record for _, _, slot in self.paired.values()} | {
            call for call, _, _ in self.paired.values()
        }
        by_step: dict[int, list[Tap]] = defaultdict(list)
        counts: Counter[tuple[Any, ...]] = Counter()
        for kid in in_order(selected(self.target.calls)):
            if kid.kind != "operator" or kid.phase != "forward" or kid.id in used:
                continue
            key = (kid.parent, kid.scope, kid.op_type)
            family, numbers = split(kid.scope)
            tap = Tap(
                kid.id,
                _output(kid),
                kid.order,
                (family, kid.op_type, str(counts[key])),
                numbers,
                kid.scope,
            )
            counts[key] += 1
            owner = self.by_key.get(self.key(kid, kid.root, kid.scope, 0))
            if owner is not None and not owner.leaf:
                by_step[kid.step].append(tap)
        for step in sorted(by_step)[:_STEPS]:
            self._pair_step(
                by_step[step],
                inside(step, frozenset(self.target.records[t.record].count for t in by_step[step])),
            )

    def _pair_step(self, taps: Sequence[Tap], tensors: Iterable[Inner]) -> None:
        items: dict[int, Inner] = {}
        places = []
        scopes = {tap.name for tap in taps}
        for item in tensors:
            call = self.reference.calls[item.call]
            if call.scope in scopes and call.phase == "forward" and not is_move(item.name):
                places.append(self.elements.place(item))
                items[places[-1].record] = item
        partners = TensorCandidates(self.elements, taps, places)
        partners.by_content()
        partners.by_name()
        unpaired = {tap.call: tap for tap in taps}
        for match in partners.matched.values():
            item = items[match.place.record]
            if self.reference.calls[item.call].scope == match.tap.name:
                del unpaired[match.tap.call]
                self._pair_inner(match.tap, item, match.place.record, match.fit.node, match.why)
        alike: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, item in sorted(
            items.items(), key=lambda tensors: (tensors[1].call, tensors[1].operation)
        ):
            alike[self.reference.calls[item.call].scope, item.name.split(".")[1]].append(number)
        for tap in unpaired.values():
            scope, base, place, of = self._place.get(tap.call, ("", "", 0, 0))
            operators = alike.get((scope, base), [])
            if not of or len(operators) != of or operators[place] in self.inner:
                continue
            have, want = (
                self.target.records[tap.record].shape,
                self.elements.record(True, operators[place]).shape,
            )
            if (node := next(iter(axes.ways(have, want)), None)) is not None:
                self._pair_inner(
                    tap,
                    items[operators[place]],
                    operators[place],
                    node,
                    f"the only {base} of {scope or 'the model'}, or as many in order",
                )

    def _pair_inner(self, tap: Tap, item: Inner, record: int, node: ex.Node, why: str) -> None:
        self.inner[record] = item
        self.paired[record] = self._brought(record, tap.record, node, tap.call, "output.0", why)

    def _brought(
        self, record: int, target_record: int, node: ex.Node, call: int, slot: str, why: str
    ) -> PairedTensor:
        """A target tensor, brought to the axes of its partner in the reference, as a paired
        tensor.
        """
        new_record = self.derived.add(node, {"x": [target_record]}, why)
        dims = "" if new_record == target_record else str(node)
        return call, why, SlotPair("", slot, record, new_record, dims)

    def turned(self, record: int) -> bool:
        """Whether a reference tensor is paired with a tensor whose axes are permuted."""
        dims = self.paired[record][2].dims
        return bool(dims) and str(next(iter(axes.ways(*self._shapes(record)[::-1])), "")) != dims

    def _shapes(self, record: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        node = self.target.calls[self.paired[record][0]]
        return self.reference.records[record].shape, self.target.records[_output(node)].shape

    def graph_refs(self, graph: Call, above: Call, outer: Call) -> tuple[Ref, ...]:
        """The tensors of a graph, as the reference's modules show them. above: the module around
        the graph. outer: its partner in the reference.
        """
        slots = {r.record: r.slot for r in reversed(above.refs)}
        records = outer.by_slot
        refs = []
        for ref in graph.refs:
            if is_param(ref.slot):
                path, _, name = param_name(ref.slot).rpartition(".")
                call = self.by_key.get(self.key(graph, graph.root, path, 0))
                record = call.by_slot.get(f"param.{name}") if call is not None else None
            else:
                record = records.get(slots.get(ref.record, ""))
            if record is not None:
                refs.append(Ref(ref.slot, record))
        return tuple(refs)

    def _matched(
        self, outs: Sequence[int], outputs: Sequence[ModuleOutput | None]
    ) -> Iterable[tuple[int, ModuleOutput]]:
        """Pairs of outputs of a module and nodes. outputs: None for a node that was not captured;
        of several outputs only those of a unique size are paired.
        """
        sizes = [
            -1 if output is None else self.target.records[_output(output.call)].count
            for output in outputs
        ]
        counts = [self.reference.records[r].count for r in outs]
        for output, size in zip(outputs, sizes):
            certain = len(outputs) == 1 or (
                -1 not in sizes and sizes.count(size) == counts.count(size) == 1
            )
            if output is not None and certain and size in counts:
                yield outs[counts.index(size)], output

    def _pair(
        self, record: int, target_record: int, call: Call, slot: str, why: str, plain: bool
    ) -> None:
        have, want = self.target.records[target_record].shape, self.reference.records[record].shape
        node: ex.Node | None = next(iter(axes.ways(have, want)), None)
        if not plain:
            node = None
            try:
                fit = axes.fit(self.target.array(target_record), self.reference.array(record))
            except ElementsMissing:
                fit = None
            if fit is not None and fit.close:
                node = fit.node
        if node is None:
            return
        with contextlib.suppress(ex.Unfit):
            brought = self._brought(record, target_record, node, call.id, slot, why)
            self.paired.setdefault(record, brought)

    def plan(self) -> Plan:
        """The plan: pairs of modules whose output the target shows; all others have no partner and
        are judged across.
        """
        inner: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for record, item in self.inner.items():
            inner[item.call].append((f"inside.{item.operation}", record))
        modules = (c for c in selected(self.reference.calls) if c.kind == "module")
        pairs = list(pairs_of_tensors(modules, self.paired, inner))
        used, facing = (
            self.met | {call for call, _, _ in self.paired.values()},
            {p.reference for p in pairs},
        )
        inside = [
            c
            for c in selected(self.target.calls)
            if c.kind in ("graph", "operator", "region") and c.id not in used
        ]
        forward, backward = (
            sum(c.kind == "operator" and (c.phase == "forward") is ahead for c in inside)
            for ahead in (True, False)
        )
        free = (c for c in selected(self.reference.calls) if c.id not in facing)
        return Plan(
            tuple(pairs),
            tuple(c.id for c in free if not hands_on(self.reference, c)),
            tuple(
                c.id for c in selected(self.target.calls) if c.id not in used and c not in inside
            ),
            (),
            _notes(forward, backward),
        )


def _notes(forward: int, backward: int) -> tuple[str, ...]:
    """Notes on tensors of graphs that are not compared. forward, backward: their numbers."""
    notes = []
    if forward:
        notes.append(
            f"{forward} tensors of the target's graphs are not a module's output; they are "
            "judged with the next that is"
        )
    if backward:
        notes.append(
            f"{backward} tensors of the target's backward graphs are not compared: modules "
            "show none; capture the fx run"
        )
    return tuple(notes)


def _output(call: Call) -> int:
    return call.slots("output")[0].record
