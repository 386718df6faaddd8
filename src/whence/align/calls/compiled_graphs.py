"""Cuts executions of one compiled graph, in both runs, at the nodes that both runs recorded.

A compiled run records the outputs of its kernels, an interpreted run every node, and another
compilation has other kernels. Each node recorded in both runs becomes one call. It reads the
nearest earlier nodes recorded in both, and its program is the piece of the graph in between, so a
kernel's result is replayed from that kernel's actual inputs. Nodes recorded in one run only lie
inside such pieces. See decision 0013.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from whence.align.call_sites import facing_lanes
from whence.align.calls.graph_nodes import (
    is_compiled,
    kernel_note,
    places_of,
    program_piece,
    same_nodes,
)
from whence.align.derived_run import Derived, renumbered
from whence.records import Call, Program, Ref, Run, children, in_order
from whence.records.marks import Mark, NoProgram, mark
from whence.records.slots import is_param, is_read, param_name

_COMPILED = f"{NoProgram.COMPILED} by inductor"


class Cut(NamedTuple):
    """The two runs with their graphs cut at the same nodes, and sentences on what was done."""

    reference: Run
    target: Run
    notes: tuple[str, ...] = ()


def cut_alike(reference: Run, target: Run) -> Cut:
    """Cut the graphs that both runs executed at the nodes recorded in both."""
    graphs, others = ([c for c in run.calls if c.kind == "graph"] for run in (reference, target))
    if not graphs or not others:
        return Cut(reference, target)
    cutting, target_cutting, sentences = _Cutting(reference), _Cutting(target), Counter[str]()
    for call, target_call in _executions(graphs, others):
        execution = _Execution(cutting, call, target_cutting, target_call)
        if execution.shared:
            execution.cut()
            sentences.update(execution.sentences())
    return Cut(
        cutting.done(),
        target_cutting.done(),
        tuple(f"{text} ({n} executions)" if n > 1 else text for text, n in sentences.items()),
    )


def _executions(
    graphs: Sequence[Call], target_graphs: Sequence[Call]
) -> Iterable[tuple[Call, Call]]:
    """Pairs of executions of one graph: those with the same step, compilation and count; otherwise
    by position, if there are equally many.
    """
    for calls, target_calls in facing_lanes(graphs, target_graphs):
        named = {(c.op, c.scope, c.occurrence): c for c in target_calls}
        pairs = [(c, named[key]) for c in calls if (key := (c.op, c.scope, c.occurrence)) in named]
        if len(pairs) < len(calls) == len(target_calls):
            pairs = list(zip(calls, target_calls))
        yield from pairs


class _Cutting:
    """One run while its graphs are cut. programs: by id, those of the pieces. replaced: by id, the
    new call; None for a dropped one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.below = children(run.calls)
        self.programs: dict[str, Program] = {}
        self.replaced: dict[int, Call | None] = {}
        self._cuts: dict[Hashable, int] = {}

    def number(self, cut: Hashable) -> int:
        """A number that identifies one way of cutting one program."""
        return self._cuts.setdefault(cut, len(self._cuts))

    def done(self) -> Run:
        if not self.replaced:
            return self.run
        ordered = in_order(self.run.calls)
        begun = [call for c in ordered if (call := self.replaced.get(c.id, c)) is not None]
        begun.sort(key=lambda c: c.order)
        run = Derived(self.run, (), (), renumbered(begun)[0])
        run.programs = {**self.run.programs, **self.programs}
        return run


class _Side:
    """One execution of a graph in one run: its program, and the calls of its recorded nodes."""

    def __init__(self, cutting: _Cutting, call: Call) -> None:
        self.cutting, self.call = cutting, call
        self.program = cutting.run.programs.get(call.program)
        self.kids = [
            k
            for i in cutting.below.get(call.id, ())
            if (k := cutting.run.calls[i]).kind == "operator"
        ]
        self.places = places_of(self.program) if self.program is not None else {}
        self.records = call.by_slot

    @property
    def compiled(self) -> bool:
        return self.call.arguments.get("mode") != "fx"


class _Execution:
    """One execution of a graph in both runs. shared: by a node's name in the reference, its calls
    in both runs.
    """

    def __init__(
        self, cutting: _Cutting, call: Call, target_cutting: _Cutting, target_call: Call
    ) -> None:
        self.reference, self.target = _Side(cutting, call), _Side(target_cutting, target_call)
        self.graph = self.reference.program or self.target.program
        self.shared: dict[str, tuple[Call, Call]] = {}
        if self.graph is not None and not self.graph.names:
            return
        places = (
            self.reference.places
            or self.target.places
            or {k.op: (n, 0) for n, k in enumerate(self.reference.kids)}
        )
        self.names = (
            same_nodes(self.reference.program, self.target.program)
            if self.graph is not None
            else {name: name for name in places}
        )
        across = {k.op: k for k in self.target.kids}
        for kid in sorted(
            (k for k in self.reference.kids if k.op in places), key=lambda k: places[k.op]
        ):
            partner = across.get(self.names.get(kid.op, ""))
            if partner is not None and self._alike(kid, partner):
                self.shared[kid.op] = kid, partner

    def _alike(self, kid: Call, partner: Call) -> bool:
        if (kid.scope, kid.op_type) != (partner.scope, partner.op_type):
            return False
        a, b = (
            [run.records[r.record].shape for r in c.slots("output")]
            for c, run in ((kid, self.reference.cutting.run), (partner, self.target.cutting.run))
        )
        return a == b and len(a) == 1

    def sentences(self) -> Iterable[str]:
        """Sentences on nodes that only one run recorded, and on graphs that differ."""
        for side, words, across in (
            (self.reference, "reference", "target"),
            (self.target, "target", "reference"),
        ):
            unshared = len(side.kids) - len(self.shared)
            if unshared:
                yield (
                    f"graph {side.call.op}{_of_phase(side.call)}: {unshared} of {len(side.kids)} "
                    f"tensors of the {words} are not seen in the "
                    f"{across}; they are judged with the next that is"
                )
        if (
            self.reference.program is not None
            and self.target.program is not None
            and not self._one_graph()
        ):
            where = f"graph {self.reference.call.op}{_of_phase(self.reference.call)}"
            yield (
                f"{where}: both runs have other operators in it; nodes are paired by place, "
                "module and operator"
            )

    def _one_graph(self) -> bool:
        return all(a == b for a, b in self.names.items()) and len(self.names) == len(
            self.reference.places
        ) == len(self.target.places)

    def cut(self) -> None:
        """Replace the recorded nodes, in both runs, by calls at the shared nodes with pieces of the
        graph as programs.
        """
        together = self._together()
        cuts = [
            _pieces(self.reference, {name: name for name in self.shared}, together),
            _pieces(self.target, {name: self.names[name] for name in self.shared}, together),
        ]
        needed = {
            name: [s for cut in cuts for s in _slots(cut.get(name))] for name in (*self.shared, "")
        }
        if self.graph is None:
            needed |= self._read()
        for k, side in enumerate((self.reference, self.target)):
            for place, (name, calls) in enumerate(zip(self.shared, self.shared.values())):
                call, records = (
                    calls[k],
                    {f"input.{n}": _output(c[k]) for n, c in self.shared.items()} | side.records,
                )
                inputs = [Ref(s, records[s]) for s in dict.fromkeys(needed[name]) if s in records]
                side.cutting.replaced[call.id] = self._call(
                    side, call, name, place, inputs, cuts[k].get(name)
                )
            for kid in side.kids:
                side.cutting.replaced.setdefault(kid.id, None)
            self._tail(side, cuts[k].get(""), set(needed[""]))
            self._above(side)

    def _read(self) -> dict[str, list[str]]:
        """Inputs of each node's kernel, for graphs without a program, as far as both runs recorded
        them.
        """
        k, side = (1, self.target) if self.target.compiled else (0, self.reference)
        slots_of = {_output(calls[k]): f"input.{name}" for name, calls in self.shared.items()}
        slots_of |= {record: slot for slot, record in side.records.items() if is_read(slot)}
        read = {
            name: [slots_of[r.record] for r in calls[k].slots("input") if r.record in slots_of]
            for name, calls in self.shared.items()
        }
        return {name: [s for s in inputs if s != f"input.{name}"] for name, inputs in read.items()}

    def _together(self) -> dict[str, frozenset[str]]:
        """For each shared node, the nodes that one kernel computes together with it in either run:
        inside the kernel their values are not rounded.
        """
        out: dict[str, frozenset[str]] = dict.fromkeys(self.shared, frozenset())
        for k in (0, 1):
            kernels: dict[Hashable, set[str]] = defaultdict(set)
            for name, calls in self.shared.items():
                if is_compiled(calls[k]):
                    kernels[calls[k].arguments["kernel"], calls[k].origins].add(name)
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
        notes = (mark(Mark.NODE, call.op), *((kernel_note(call),) if is_compiled(call) else ()))
        if program is not None:
            side.cutting.programs[program.id] = program
        return replace(
            call,
            op=name,
            occurrence=self.shared[name][0].occurrence,
            refs=(*inputs, Ref("output.0", _output(call))),
            order=side.call.order + place + 1,
            origins=(),
            notes=(*call.notes, *notes),
            program=program.id if program is not None else "",
            no_program=_COMPILED
            if program is not None and side.compiled
            else ""
            if program is not None
            else side.call.no_program,
        )

    def _above(self, side: _Side) -> None:
        """Drop the parameters of the enclosing module that the graph's nodes read."""
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
        cutting.replaced[parent] = replace(above, refs=refs)

    def _tail(self, side: _Side, program: Program | None, needed: set[str]) -> None:
        """Let the graph's own call read the outputs of its pieces, and only those parameters that
        no piece reads.
        """
        refs = tuple(r for r in side.call.refs if not is_param(r.slot) or r.slot in needed)
        if program is not None:
            numbered = {f"input.{name}": f"{k}:output.0" for k, name in enumerate(self.shared)}
            program = replace(
                program,
                inputs=tuple(numbered.get(s, s) for s in program.inputs),
                calls=tuple((k, 0) for k in range(len(self.shared))),
            )
            side.cutting.programs[program.id] = program
        side.cutting.replaced[side.call.id] = replace(
            side.call,
            refs=refs,
            program=program.id if program is not None else "",
            no_program=_COMPILED if program is not None and side.compiled else side.call.no_program,
        )


def _pieces(
    side: _Side, cut: Mapping[str, str], together: Mapping[str, frozenset[str]]
) -> dict[str, Program]:
    """The pieces of a graph, by the name of the node at which each ends; "" for the piece that ends
    at the graph's outputs.

    cut: reference name -> this side's name. together: by node, the nodes at which its piece is not
    cut.
    """
    program = side.program
    if program is None:
        return {}
    cuts = {side.places[node]: name for name, node in cut.items() if node in side.places}
    number = side.cutting.number((program.id, tuple(cut.items()), tuple(together.values())))
    run, by_name = side.cutting.run, {k.op: k for k in side.kids}
    kinds = {
        f"input.{name}": run.records[_output(by_name[node])].dtype for name, node in cut.items()
    }
    kinds |= {slot: run.records[record].dtype for slot, record in side.records.items()}
    out = {}
    for place, name in cuts.items():
        inner_cuts = {p: n for p, n in cuts.items() if n != name and n not in together[name]}
        out[name] = program_piece(
            program,
            {"output.0": {"op": list(place)}},
            kinds,
            f"{program.id} {number} {name}",
            inner_cuts,
        )
    ends = {slot: operand for slot, operand in program.outputs if slot in side.records}
    if ends:
        out[""] = program_piece(program, ends, kinds, f"{program.id} {number}", cuts)
    return out


def _plain(slot: str) -> str:
    """The slot of a parameter without the `_orig_mod` component that torch.compile adds."""
    return ".".join(part for part in slot.split(".") if part != "_orig_mod")


def _slots(program: Program | None) -> tuple[str, ...]:
    return () if program is None else (*program.inputs, *program.params)


def _output(call: Call) -> int:
    return call.slots("output")[0].record


def _of_phase(call: Call) -> str:
    return "" if call.phase == "forward" else f" ({call.phase})"
