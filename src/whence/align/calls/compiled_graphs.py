"""Executions of one compiled graph face to face: both runs cut at the nodes that both show.

A compiled run shows what its kernels leave, an interpreted one every node, another compile other
kernels. Each node that both show becomes one call: it reads the nodes nearest before it that both
show, and its program is the piece of the graph between, so that what a kernel computes is replayed
on what that kernel was given. Nodes that one run shows alone lie inside such pieces. See decision
0013.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import msgspec

from whence import dtypes
from whence.align.call_sites import match_roots
from whence.align.derived_run import Derived, renumbered
from whence.records import Call, Program, Ref, Run, children
from whence.records.marks import Mark, NoProgram, has_mark, mark
from whence.records.program import map_operands, operands
from whence.records.slots import is_param, is_read, param_name

_COMPILED = f"{NoProgram.COMPILED} by inductor"
# of the operators of two graphs in the same order; below, they were lowered otherwise, and order
# proves little
_ALIKE = 0.9
_MOST = 20_000  # operations of two graphs that differ; beyond, they are matched by name

_Place = tuple[int, int]  # operation, result


def kernel(call: Call) -> str:
    """The node of a graph that a call is and the kernel that computed it, in words; "" of other
    calls.
    """
    if is_piece(call):
        return ", ".join(n for n in call.notes if n.startswith((Mark.NODE, Mark.KERNEL)))
    if call.kind == "operator" and "kernel" in call.arguments:
        return f"{mark(Mark.NODE, call.op)}, {_kernel(call)}"
    return ""


def is_piece(call: Call) -> bool:
    """Is this a node of a graph that was cut alike in both runs?"""
    return has_mark(call, Mark.NODE)


def is_compiled(call: Call) -> bool:
    """Did compiled code compute this node?"""
    return "kernel" in call.arguments


class Cut(NamedTuple):
    """The two runs with their graphs cut alike, and what was done, in sentences."""

    reference: Run
    target: Run
    notes: tuple[str, ...] = ()


def cut_alike(reference: Run, target: Run) -> Cut:
    """Cut graphs that both runs executed at the nodes that both show. Runs without such graphs come
    back as they are.
    """
    left, right = ([c for c in run.calls if c.kind == "graph"] for run in (reference, target))
    if not left or not right:
        return Cut(reference, target)
    ours, theirs, told = _Cutting(reference), _Cutting(target), Counter[str]()
    for one, other in _facing(left, right):
        both = _Both(ours, one, theirs, other)
        if both.shown:
            both.put()
            told.update(both.told())
    return Cut(
        ours.done(),
        theirs.done(),
        tuple(f"{text} ({n} executions)" if n > 1 else text for text, n in told.items()),
    )


def _facing(left: Sequence[Call], right: Sequence[Call]) -> Iterable[tuple[Call, Call]]:
    """Executions of one graph: same step, compile and count; else, of as many in a step, the same
    place.
    """
    roots = match_roots(left, right)
    alone = len({c.rank for c in left}) == len({c.rank for c in right}) == 1

    def lanes(calls: Sequence[Call], names: Mapping[str, str]) -> dict[Hashable, list[Call]]:
        out: dict[Hashable, list[Call]] = defaultdict(list)
        for call in sorted(calls, key=lambda c: c.order):
            out[
                0 if alone else call.rank,
                names.get(call.root, call.root),
                call.step,
                call.micro,
                call.phase,
            ].append(call)
        return out

    across = lanes(right, {})
    for lane, ours in lanes(left, roots).items():
        theirs = across.get(lane, [])
        named = {(c.op, c.scope, c.occurrence): c for c in theirs}
        pairs = [(c, named[key]) for c in ours if (key := (c.op, c.scope, c.occurrence)) in named]
        if len(pairs) < len(ours) == len(theirs):
            pairs = list(zip(ours, theirs))
        yield from pairs


class _Cutting:
    """One run while its graphs are cut. named: parts of the names of programs that were made, which
    count the cuts.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.below = children(run.calls)
        self.programs: dict[str, Program] = {}
        self.replaced: dict[int, Call | None] = {}
        self._cuts: dict[Hashable, int] = {}

    def number(self, cut: Hashable) -> int:
        """A number for one way of cutting one program."""
        return self._cuts.setdefault(cut, len(self._cuts))

    def done(self) -> Run:
        if not self.replaced:
            return self.run
        ordered = sorted(self.run.calls, key=lambda c: c.order)
        begun = [kept for c in ordered if (kept := self.replaced.get(c.id, c)) is not None]
        begun.sort(key=lambda c: c.order)
        run = Derived(self.run, (), (), renumbered(begun)[0])
        run.programs = {**self.run.programs, **self.programs}
        return run


class _Side:
    """One execution of a graph in one run: its program, where its nodes are in it, and the calls of
    those that it shows.
    """

    def __init__(self, cutting: _Cutting, call: Call) -> None:
        self.cutting, self.call = cutting, call
        self.program = cutting.run.programs.get(call.program)
        self.kids = [
            k
            for i in cutting.below.get(call.id, ())
            if (k := cutting.run.calls[i]).kind == "operator"
        ]
        self.places = places_of(self.program) if self.program is not None else {}
        self.records = {r.slot: r.record for r in call.refs}

    @property
    def compiled(self) -> bool:
        return self.call.arguments.get("mode") != "fx"


class _Both:
    """One execution of a graph in both runs. shown: name in the reference -> the calls of both that
    show this node, in order.
    """

    def __init__(self, ours: _Cutting, one: Call, theirs: _Cutting, other: Call) -> None:
        self.one, self.other = _Side(ours, one), _Side(theirs, other)
        self.graph = self.one.program or self.other.program
        self.shown: dict[str, tuple[Call, Call]] = {}
        if self.graph is not None and not self.graph.names:
            return
        places = (
            self.one.places
            or self.other.places
            or {k.op: (n, 0) for n, k in enumerate(self.one.kids)}
        )
        self.names = (
            _same_nodes(self.one.program, self.other.program)
            if self.graph is not None
            else {name: name for name in places}
        )
        across = {k.op: k for k in self.other.kids}
        for kid in sorted((k for k in self.one.kids if k.op in places), key=lambda k: places[k.op]):
            facing = across.get(self.names.get(kid.op, ""))
            if facing is not None and self._alike(kid, facing):
                self.shown[kid.op] = kid, facing

    def _alike(self, kid: Call, facing: Call) -> bool:
        if (kid.scope, kid.op_type) != (facing.scope, facing.op_type):
            return False
        a, b = (
            [run.records[r.record].shape for r in c.slots("output")]
            for c, run in ((kid, self.one.cutting.run), (facing, self.other.cutting.run))
        )
        return a == b and len(a) == 1

    def told(self) -> Iterable[str]:
        """What was done, in sentences."""
        for side, words, across in (
            (self.one, "reference", "target"),
            (self.other, "target", "reference"),
        ):
            alone = len(side.kids) - len(self.shown)
            if alone:
                yield (
                    f"graph {side.call.op}{_of_phase(side.call)}: {alone} of {len(side.kids)} "
                    f"tensors of the {words} are not seen in the "
                    f"{across}; they are judged with the next that is"
                )
        if (
            self.one.program is not None
            and self.other.program is not None
            and not self._one_graph()
        ):
            where = f"graph {self.one.call.op}{_of_phase(self.one.call)}"
            yield (
                f"{where}: both runs have other operators in it; nodes are paired by place, "
                "module and operator"
            )

    def _one_graph(self) -> bool:
        return all(a == b for a, b in self.names.items()) and len(self.names) == len(
            self.one.places
        ) == len(self.other.places)

    def put(self) -> None:
        """Put the calls of what both show, and pieces of the graph as their programs, into both
        runs.
        """
        together = self._together()
        cuts = [
            _pieces(self.one, {name: name for name in self.shown}, together),
            _pieces(self.other, {name: self.names[name] for name in self.shown}, together),
        ]
        needed = {
            name: [s for cut in cuts for s in _slots(cut.get(name))] for name in (*self.shown, "")
        }
        if self.graph is None:
            needed |= self._read()
        for at, side in enumerate((self.one, self.other)):
            for place, (name, calls) in enumerate(zip(self.shown, self.shown.values())):
                call, there = (
                    calls[at],
                    {f"input.{n}": _output(c[at]) for n, c in self.shown.items()} | side.records,
                )
                inputs = [Ref(s, there[s]) for s in dict.fromkeys(needed[name]) if s in there]
                side.cutting.replaced[call.id] = self._call(
                    side, call, name, place, inputs, cuts[at].get(name)
                )
            for kid in side.kids:
                side.cutting.replaced.setdefault(kid.id, None)
            self._tail(side, cuts[at].get(""), set(needed[""]))
            self._above(side)

    def _read(self) -> dict[str, list[str]]:
        """Without a program: what each node's kernel read, as far as both show it."""
        at, side = (1, self.other) if self.other.compiled else (0, self.one)
        known = {_output(calls[at]): f"input.{name}" for name, calls in self.shown.items()}
        known |= {record: slot for slot, record in side.records.items() if is_read(slot)}
        read = {
            name: [known[r.record] for r in calls[at].slots("input") if r.record in known]
            for name, calls in self.shown.items()
        }
        return {name: [s for s in slots if s != f"input.{name}"] for name, slots in read.items()}

    def _together(self) -> dict[str, frozenset[str]]:
        """By node, those that one kernel computes with it, on either side: it has their values in
        its registers, not as it stored them.
        """
        out: dict[str, frozenset[str]] = dict.fromkeys(self.shown, frozenset())
        for at in (0, 1):
            kernels: dict[Hashable, set[str]] = defaultdict(set)
            for name, calls in self.shown.items():
                if is_compiled(calls[at]):
                    kernels[calls[at].arguments["kernel"], calls[at].origins].add(name)
            for members in kernels.values():
                for name in members if len(members) > 1 else ():
                    out[name] |= members
        return out

    def _call(
        self,
        side: _Side,
        call: Call,
        name: str,
        place: int,
        inputs: Sequence[Ref],
        program: Program | None,
    ) -> Call:
        said = (mark(Mark.NODE, call.op), *((_kernel(call),) if is_compiled(call) else ()))
        if program is not None:
            side.cutting.programs[program.id] = program
        return msgspec.structs.replace(
            call,
            op=name,
            occurrence=self.shown[name][0].occurrence,
            refs=(*inputs, Ref("output.0", _output(call))),
            order=side.call.order + place + 1,
            origins=(),
            notes=(*call.notes, *said),
            program=program.id if program is not None else "",
            no_program=_COMPILED
            if program is not None and side.compiled
            else ""
            if program is not None
            else side.call.no_program,
        )

    def _above(self, side: _Side) -> None:
        """The module that ran the graph: what it lists as its parameters are those of the graph,
        which the nodes read.
        """
        cutting, parent = side.cutting, side.call.parent
        above = cutting.replaced.get(parent) or cutting.run.calls[parent] if parent >= 0 else None
        if above is None:
            return
        within = f"{above.scope}." if above.scope else ""
        refs = tuple(
            r
            for r in above.refs
            if _plain(f"param.{within}{param_name(r.slot)}") not in side.records
        )
        cutting.replaced[parent] = msgspec.structs.replace(above, refs=refs)

    def _tail(self, side: _Side, program: Program | None, needed: set[str]) -> None:
        """The graph's own call: what it returns is made of what the calls below left. Parameters
        are with those that read them.
        """
        refs = tuple(r for r in side.call.refs if not is_param(r.slot) or r.slot in needed)
        if program is not None:
            numbered = {f"input.{name}": f"{k}:output.0" for k, name in enumerate(self.shown)}
            program = msgspec.structs.replace(
                program,
                inputs=tuple(numbered.get(s, s) for s in program.inputs),
                calls=tuple((k, 0) for k in range(len(self.shown))),
            )
            side.cutting.programs[program.id] = program
        side.cutting.replaced[side.call.id] = msgspec.structs.replace(
            side.call,
            refs=refs,
            program=program.id if program is not None else "",
            no_program=_COMPILED if program is not None and side.compiled else side.call.no_program,
        )


def _pieces(
    side: _Side, cut: Mapping[str, str], together: Mapping[str, frozenset[str]]
) -> dict[str, Program]:
    """The pieces of a graph between nodes: by the name of the node each leads to, "" for what the
    graph returns.

    cut: name -> the side's own name. together: nodes that a piece is not cut at.
    """
    program = side.program
    if program is None:
        return {}
    at = {side.places[own]: name for name, own in cut.items() if own in side.places}
    number = side.cutting.number((program.id, tuple(cut.items()), tuple(together.values())))
    run, by_name = side.cutting.run, {k.op: k for k in side.kids}
    kinds = {f"input.{name}": run.records[_output(by_name[own])].dtype for name, own in cut.items()}
    kinds |= {slot: run.records[record].dtype for slot, record in side.records.items()}
    out = {}
    for place, name in at.items():
        here = {p: n for p, n in at.items() if n != name and n not in together[name]}
        out[name] = _piece(
            program, {"output.0": {"op": list(place)}}, here, kinds, f"{program.id} {number} {name}"
        )
    ends = {slot: operand for slot, operand in program.outputs if slot in side.records}
    if ends:
        out[""] = _piece(program, ends, at, kinds, f"{program.id} {number}")
    return out


def _piece(
    program: Program,
    outputs: Mapping[str, Any],
    cut: Mapping[_Place, str],
    kinds: Mapping[str, str],
    id_: str,
) -> Program:
    """What leads to `outputs` from the inputs of the graph and the places where it is cut."""
    needed: set[int] = set()
    todo = list(operands(list(outputs.values())))
    while todo:
        kind, at = todo.pop()
        if kind == "op" and tuple(at) not in cut and at[0] not in needed:
            needed.add(at[0])
            todo += program.operations[at[0]].operands()
    order = {old: new for new, old in enumerate(sorted(needed))}
    inputs: list[str] = []
    params: list[str] = []
    constants: list[int] = []

    def replaced(kind: str, at: Any) -> Any:
        if kind == "op":
            if tuple(at) in cut:
                return {"in": _index(inputs, f"input.{cut[tuple(at)]}")}
            return {"op": [order[at[0]], at[1]]}
        if kind == "in":
            return {"in": _index(inputs, program.inputs[at])}
        if kind == "const":
            return {"const": _index(constants, program.constants[at])}
        if kind == "param":
            _index(params, at)
        return {kind: at}

    operations = [program.operations[old].with_operands(replaced) for old in order]
    left = tuple((slot, map_operands(replaced, operand)) for slot, operand in outputs.items())
    fixed = tuple(
        (inputs.index(s), axis, n)
        for i, axis, n in program.fixed
        if (s := program.inputs[i]) in inputs
    )
    floating = [
        k for s in (*inputs, *params) if (k := kinds.get(s, "")) and dtypes.named(k).is_floating
    ]
    return msgspec.structs.replace(
        program,
        id=id_,
        operations=tuple(operations),
        inputs=tuple(inputs),
        outputs=left,
        params=tuple(params),
        constants=tuple(constants),
        base=floating[0] if floating else program.base,
        input_dtypes=tuple(kinds.get(s, "") for s in inputs),
        fixed=fixed,
        equal=(),
        names=tuple(program.names[old] for old in order),
        scopes=tuple(program.scopes[old] for old in order) if program.scopes else (),
        picks=tuple((n, order[i], k) for n, i, k in program.picks if i in order),
    )


def places_of(program: Program) -> dict[str, _Place]:
    """Where each node of a graph is in its program: operation and result."""
    return {name: (i, 0) for i, name in enumerate(program.names)} | {
        name: (i, k) for name, i, k in program.picks
    }


def _same_nodes(one: Program | None, other: Program | None) -> dict[str, str]:
    """Names of the nodes of one graph -> of the other's that stand in the same place."""
    if one is None or other is None:
        known = places_of(one or other)  # type: ignore[arg-type]
        return {name: name for name in known}
    ours, theirs = ([o.name for o in p.operations] for p in (one, other))
    if (ours, one.names) == (theirs, other.names) or len(ours) + len(theirs) > _MOST:
        same = {name: name for name in one.names if name in set(other.names)}
    else:
        same = {}
        matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
        alone = _alone(one) if matcher.ratio() < _ALIKE else None
        across = _alone(other) if alone is not None else {}
        if alone is not None:
            same = {name: across[what] for what, name in alone.items() if what in across}
        for block in matcher.get_matching_blocks() if alone is None else ():
            for k in range(block.size):
                same[one.names[block.a + k]] = other.names[block.b + k]
    picked = {(i, k): name for name, i, k in other.picks}
    at = {name: i for i, name in enumerate(other.names)}
    for name, i, k in one.picks:
        maker = same.get(one.names[i])
        if maker is not None and (at[maker], k) in picked:
            same[name] = picked[at[maker], k]
    return same


def _alone(program: Program) -> dict[tuple[str, str], str]:
    """By module path and operator, the node that is the only such one."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, scope, op in zip(program.names, program.scopes, program.operations):
        found[scope, op.name].append(name)
    return {what: names[0] for what, names in found.items() if len(names) == 1}


def _plain(slot: str) -> str:
    """The slot of a parameter without the wrapper that torch.compile puts around a model."""
    return ".".join(part for part in slot.split(".") if part != "_orig_mod")


def _slots(program: Program | None) -> tuple[str, ...]:
    return () if program is None else (*program.inputs, *program.params)


def _output(call: Call) -> int:
    return call.slots("output")[0].record


def _of_phase(call: Call) -> str:
    return "" if call.phase == "forward" else f" ({call.phase})"


def _index(table: list[Any], item: Any) -> int:
    if item not in table:
        table.append(item)
    return table.index(item)


def _kernel(call: Call) -> str:
    return mark(Mark.KERNEL, f"{call.arguments['kernel']} computes {_listed(call.origins)}")


def _listed(names: Sequence[str]) -> str:
    shown = [n for n in names if not n.startswith(("view", "permute", "getitem"))] or list(names)
    return ", ".join(
        shown if len(shown) <= 6 else [*shown[:3], f"{len(shown) - 4} more", shown[-1]]
    )
