"""A run of compiled graphs against one of modules: the node of a graph that a module returns faces
what that module returned.

A compiler leaves of a module what the next kernel reads: the value of a node whose module path is
the module's and that is used outside it is the module's output. Modules of which nothing was left
are judged through: between tensors that both runs show, the reference's programs run on what the
target had (`api.tapped`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from whence.align import dims as ex
from whence.align.call_sites import match_roots, selected
from whence.align.derived_run import Derived, DerivedTensors, renumbered
from whence.align.layout import axes
from whence.align.tensors.candidates import TensorCandidates, split
from whence.align.tensors.elements import Elements, Inner, Inside, Place, Tap
from whence.errors import ElementsMissing
from whence.records import Call, Program, Ref, Run, children
from whence.records.program import operands
from whence.records.region import hands_on
from whence.records.slots import is_input, is_param, is_written, param_name
from whence.results import TENSOR_RULE, CallPair, Plan, SlotPair

_MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "slice", "select",
    "unsqueeze", "squeeze", "alias", "detach", "split", "split_with_sizes", "chunk", "unbind",
    "as_strided", "unflatten", "narrow",
))  # fmt: skip
_STEPS = 4  # of which nodes inside containers are looked for
_TURNS = frozenset(("transpose", "permute", "t"))

_Place = tuple[int, int]  # operation, result


class ModuleOutput(NamedTuple):
    """A tensor of a graph that is the output of a module. slot: of the module. plain: nothing has
    changed the order of its elements.
    """

    scope: str
    call: Call
    plain: bool


def graphs_in_one(reference: Run, target: Run) -> bool:
    """Did only the target execute compiled graphs, and the reference modules?"""
    return any(c.kind == "graph" for c in target.calls) and not any(
        c.kind == "graph" for c in reference.calls
    )


def by_module(reference: Run, target: Run, inside: Inside | None = None) -> tuple[Run, Run, Plan]:
    """Both runs with what was made of their tensors, and a plan that pairs what modules returned
    with nodes of graphs.

    inside: computes what programs of the reference hold; nodes of a container's own code find their
    operator in it by their elements.
    """
    graph_modules = _GraphModules(reference, target)
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


def as_graphs(reference: Run, target: Run) -> Run:
    """A target of modules in the form of the reference's graphs: one call for each node that is
    what a module returned.

    Its graphs have the inputs and parameters that the reference's have, as far as modules show
    them; what lies inside is left out.
    """
    graph_modules = _GraphModules(target, reference)
    graph_modules.graphs()
    # node's call in the reference -> (graph, record of the target)
    nodes_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for record, (node, _, _) in graph_modules.paired.items():
        nodes_of[reference.calls[node].parent].append((node, record))
    derived = DerivedTensors(target)
    replaced: dict[int, Call | None] = {}
    added: list[Call] = []
    for graph in (c for c in reference.calls if c.id in nodes_of):
        above = reference.calls[graph.parent] if graph.parent >= 0 else graph
        outer = graph_modules.by_key.get(
            graph_modules._key(above, above.root, above.scope, above.occurrence)
        )
        if outer is None:
            continue
        nodes = sorted(nodes_of[graph.id], key=lambda item: reference.calls[item[0]].order)
        number, refs = len(target.calls) + len(added), graph_modules.graph_refs(graph, above, outer)
        replaced.update((k, None) for k in _descendants(target, outer.id))
        added.append(
            msgspec.structs.replace(
                graph,
                id=number,
                parent=outer.id,
                order=outer.order,
                root=outer.root,
                rank=outer.rank,
                refs=refs,
                program="",
                no_program="captured as modules",
                arguments={"mode": "fx"},
                notes=(),
            )
        )
        for node, record in nodes:
            kid = reference.calls[node]
            want = reference.records[_output(kid)].shape
            way = next(iter(axes.ways(target.records[record].shape, want)), None)
            if way is None or graph_modules.turned(record):
                continue
            new_record = derived.add(
                way, {"x": [record]}, f"what {kid.scope} returns is node {kid.op}"
            )
            added.append(
                msgspec.structs.replace(
                    kid,
                    id=len(target.calls) + len(added),
                    parent=number,
                    order=outer.order,
                    root=outer.root,
                    rank=outer.rank,
                    refs=(Ref("output.0", new_record),),
                    arguments={},
                    program="",
                    no_program="captured as modules",
                    origins=(),
                    notes=(),
                )
            )
    if not added:
        return target
    begun = [(c.order, 0, c) for c in target.calls if c.id not in replaced] + [
        (c.order, c.id, c) for c in added
    ]
    made_run = derived.done()
    return Derived(
        made_run, (), (), renumbered([c for *_, c in sorted(begun, key=lambda item: item[:2])])[0]
    )


def _descendants(run: Run, call: int) -> list[int]:
    below, out, todo = children(run.calls), list[int](), [call]
    while todo:
        kids = below.get(todo.pop(), [])
        out += kids
        todo += kids
    return out


class _GraphModules:
    def __init__(self, reference: Run, target: Run) -> None:
        self.reference, self.target = reference, target
        self.derived = DerivedTensors(target)
        self.met: set[int] = set()  # modules of the target that the reference called too
        self.paired: dict[int, tuple[int, str, SlotPair]] = {}
        self.elements = Elements(reference, target)
        self.inner: dict[int, Inner] = {}  # of records inside calls
        self._place: dict[
            int, tuple[str, str, int, int]
        ] = {}  # of a node's call: module, operator, which of how many such
        roots = match_roots(reference.calls, target.calls)
        self.one_rank = (
            len({c.rank for c in reference.calls}) == len({c.rank for c in target.calls}) == 1
        )
        self.by_key: dict[tuple[Any, ...], Call] = {}
        for call in selected(reference.calls):
            if call.kind == "module" and call.phase == "forward":
                self.by_key[
                    self._key(call, roots.get(call.root, call.root), call.scope, call.occurrence)
                ] = call
        self.below = children(target.calls)
        self._cache: dict[Any, dict[str, list[_Place]]] = {}

    def _key(self, call: Call, root: str, scope: str, occurrence: int) -> tuple[Any, ...]:
        return (0 if self.one_rank else call.rank), root, call.step, call.micro, scope, occurrence

    def modules(self) -> None:
        """Modules that both runs called: around the graphs, and those that were not compiled."""
        for target_call in selected(self.target.calls):
            call = (
                self.by_key.get(
                    self._key(
                        target_call, target_call.root, target_call.scope, target_call.occurrence
                    )
                )
                if target_call.kind == "module"
                else None
            )
            if call is None or target_call.phase != "forward":
                continue
            self.met.add(target_call.id)
            records = {r.slot: r.record for r in target_call.refs}
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
        """What graphs leave of the modules inside them."""
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
            for (scope, base), alike in _alike(program).items():
                for place, name in enumerate(alike):
                    if name in kids:
                        self._place[kids[name].id] = scope, base, place, len(alike)
            for scope, outputs in module_outputs(program, kids).items():
                call = self.by_key.get(self._key(graph, graph.root, scope, 0))
                if call is None or self._key(graph, graph.root, scope, 1) in self.by_key:
                    # of a module that was called again the graph does not tell which call it was
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
        """Nodes that are no module's output and the operators of the reference's own code that give
        the same, by their elements.

        A rule of names that certain pairs teach finds those that a fault has changed: what is the
        third operator in one layer is it in all.
        """
        used = {slot.target_record for _, _, slot in self.paired.values()} | {
            call for call, _, _ in self.paired.values()
        }
        by_step: dict[int, list[Tap]] = defaultdict(list)
        counts: Counter[tuple[Any, ...]] = Counter()
        for kid in sorted(selected(self.target.calls), key=lambda c: c.order):
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
            owner = self.by_key.get(self._key(kid, kid.root, kid.scope, 0))
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
                number = self.elements.add(item)
                items[number] = item
                name, numbers = split(call.scope)
                role = ((name, f"inside.{item.operation}", str(call.occurrence)), numbers)
                places.append(
                    Place(
                        number,
                        call.order,
                        [role],
                        f"{call.scope or call.root} operator {item.operation} ({item.name})",
                        is_written=True,
                    )
                )
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
        new_record = self.derived.add(node, {"x": [tap.record]}, why)
        dims = "" if new_record == tap.record else str(node)
        self.inner[record] = item
        self.paired[record] = (
            tap.call,
            why,
            SlotPair(f"inside.{item.operation}", "output.0", record, new_record, dims),
        )

    def turned(self, record: int) -> bool:
        """Does a tensor of the modules face one with its axes in another order?"""
        dims = self.paired[record][2].dims
        return bool(dims) and str(next(iter(axes.ways(*self._shapes(record)[::-1])), "")) != dims

    def _shapes(self, record: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        node = self.target.calls[self.paired[record][0]]
        return self.reference.records[record].shape, self.target.records[_output(node)].shape

    def graph_refs(self, graph: Call, above: Call, outer: Call) -> tuple[Ref, ...]:
        """The tensors of a graph, as modules of the other run show them. above: the module that ran
        it; outer: that in the other run.
        """
        slots = {r.record: r.slot for r in reversed(above.refs)}
        records = {r.slot: r.record for r in outer.refs}
        refs = []
        for ref in graph.refs:
            if is_param(ref.slot):
                path, _, name = param_name(ref.slot).rpartition(".")
                call = self.by_key.get(self._key(graph, graph.root, path, 0))
                record = (
                    {r.slot: r.record for r in call.refs}.get(f"param.{name}")
                    if call is not None
                    else None
                )
            else:
                record = records.get(slots.get(ref.record, ""))
            if record is not None:
                refs.append(Ref(ref.slot, record))
        return tuple(refs)

    def _matched(
        self, outs: Sequence[int], outputs: Sequence[ModuleOutput | None]
    ) -> Iterable[tuple[int, ModuleOutput]]:
        """Outputs of a module and nodes. found: None for a node that was not captured; of several,
        those of a size of their own.
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
        try:
            new_record = self.derived.add(node, {"x": [target_record]}, why)
        except ex.Unfit:
            return
        dims = "" if new_record == target_record else str(node)
        self.paired.setdefault(record, (call.id, why, SlotPair("", slot, record, new_record, dims)))

    def plan(self) -> Plan:
        """Every module of which the target shows what it returned faces that; the others have no
        partner and are judged through.
        """
        pairs: list[CallPair] = []
        inner: dict[int, list[int]] = defaultdict(list)
        for record, item in self.inner.items():
            inner[item.call].append(record)
        for call in sorted(selected(self.reference.calls), key=lambda c: c.order):
            outputs = [r for r in call.refs if r.record in self.paired and is_written(r.slot)]
            inside_records = inner.get(call.id, [])
            if call.kind != "module" or not (outputs or inside_records):
                continue
            inputs = [r for r in call.refs if r.record in self.paired and is_input(r.slot)]
            target, why, _ = self.paired[outputs[0].record if outputs else inside_records[0]]
            slots = tuple(
                _named(self.paired[r.record][2], r.slot) for r in (*inputs, *outputs)
            ) + tuple(self.paired[r][2] for r in inside_records)
            slot_names = {s.reference_slot for s in slots}
            only = tuple(
                r.slot for r in call.refs if r.slot not in slot_names and not is_param(r.slot)
            )
            pairs.append(CallPair(call.id, target, TENSOR_RULE, why, slots, only))
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
        notes = []
        if forward:
            notes.append(
                f"{forward} tensors of the target's graphs are no module's output; they are "
                "judged with the next that is"
            )
        if backward:
            notes.append(
                f"{backward} tensors of the target's backward graphs are not compared: modules "
                "show none; capture the fx run"
            )
        free = (c for c in selected(self.reference.calls) if c.id not in facing)
        return Plan(
            tuple(pairs),
            tuple(c.id for c in free if not hands_on(self.reference, c)),
            tuple(
                c.id for c in selected(self.target.calls) if c.id not in used and c not in inside
            ),
            (),
            tuple(notes),
        )


def module_outputs(
    program: Program, kids: Mapping[str, Call]
) -> dict[str, list[ModuleOutput | None]]:
    """By module path, what leaves the module, in order; None for what the run does not show. kids:
    calls of the run, by node.
    """
    names = {(i, 0): name for i, name in enumerate(program.names)} | {
        (i, k): name for name, i, k in program.picks
    }
    users, turns = _users(program)
    out: dict[str, list[ModuleOutput | None]] = defaultdict(list)
    for place in sorted(users):
        scope, kid = program.scopes[place[0]], kids.get(names.get(place, ""))
        while scope:
            if not all(_within(user, scope) for user in users[place]):
                plain = not any(_within(turn, scope) for turn in turns[place])
                out[scope].append(ModuleOutput(scope, kid, plain) if kid is not None else None)
            scope = scope.rpartition(".")[0]
    return out


def _alike(program: Program) -> dict[tuple[str, str], list[str]]:
    """Names of the nodes of one module and operator, in order."""
    out: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, scope, op in zip(program.names, program.scopes, program.operations):
        out[scope, op.name.split(".")[1]].append(name)
    return out


def is_move(name: str) -> bool:
    """Does this operator only change how a tensor's elements are addressed?"""
    return name.split(".")[1] in _MOVES


def _within(scope: str, above: str) -> bool:
    return scope == above or scope.startswith(above + ".")


def _users(program: Program) -> tuple[dict[_Place, set[str]], dict[_Place, set[str]]]:
    """By value: the modules that use it ("" for what the graph returns), and those that turn its
    axes. Views are looked through.
    """
    sources: dict[_Place, tuple[_Place | None, frozenset[str]]] = {}
    users: dict[_Place, set[str]] = defaultdict(set)
    turns: dict[_Place, set[str]] = defaultdict(set)

    def source(place: _Place) -> tuple[_Place | None, frozenset[str]]:
        if not is_move(program.operations[place[0]].name):
            return place, frozenset()
        return sources.get((place[0], 0), (None, frozenset()))

    def use(value: Any, user: str) -> None:
        for place in _places(value):
            origin, turned = source(place)
            if origin is not None:
                users[origin].add(user)
                turns[origin] |= turned

    for i, op in enumerate(program.operations):
        if is_move(op.name):
            origin, turned = next((source(p) for p in _places(op.args)), (None, frozenset()))
            sources[i, 0] = (
                origin,
                turned | {program.scopes[i]} if op.name.split(".")[1] in _TURNS else turned,
            )
        else:
            use([*op.args, *op.kwargs.values()], program.scopes[i])
    for _, operand in program.outputs:
        use(operand, "")
    return users, turns


def _places(value: Any) -> Iterable[_Place]:
    return (tuple(key) for kind, key in operands(value) if kind == "op")


def _named(slot: SlotPair, name: str) -> SlotPair:
    return SlotPair(name, slot.target_slot, slot.reference_record, slot.target_record, slot.dims)


def _output(call: Call) -> int:
    return call.slots("output")[0].record
