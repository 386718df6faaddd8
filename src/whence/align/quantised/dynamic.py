"""Joins dynamically quantised products into one call each. ONNX Runtime's quantiser writes such a
product as five nodes (quantise the input by its own range, multiply codes, cast, rescale); together
they are one layer with float inputs and a quantised weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from whence.align.call_sites import selected, step_of
from whence.align.calls.facing_tensors import with_programs
from whence.align.calls.joined_programs import with_joined_program
from whence.align.derived_run import renumbered
from whence.align.quantised.operands import MEASURE, PRODUCTS, operands, plain_type
from whence.records import Call, Program, Ref, Run, in_order
from whence.records.marks import Mark, mark
from whence.records.slots import is_param, param_name

_FUSED = "MatMulIntegerToFloat"
"""A node in which three of the five are already fused."""


class _Layer(NamedTuple):
    """The nodes of one dynamically quantised layer, in execution order. weight, scale, zero, bias:
    its parameters; None where it has none.
    """

    members: tuple[Call, ...]
    op_type: str
    weight: Ref
    scale: Ref
    zero: Ref | None
    bias: Ref | None = None


def joined(run: Run) -> Run:
    """The run with each dynamically quantised layer as one call that reads float inputs."""
    calls = [call for call in selected(run.calls) if call.leaf]
    if not any(plain_type(call) in MEASURE for call in calls):
        return run
    steps: dict[object, list[Call]] = defaultdict(list)
    for call in in_order(calls):
        steps[step_of(call)].append(call)
    layers = [layer for step in steps.values() for layer in _Graph(step).layers()]
    wholes, programs = dict[int, Call](), dict[str, Program]()
    for layer in layers:
        whole, program = _whole(run, layer)
        if program is not None:
            wholes[layer.members[-1].id] = whole
            programs[program.id] = program
    inside = {c.id for layer in layers if layer.members[-1].id in wholes for c in layer.members}
    kept = [c for c in run.calls if c.id not in inside or plain_type(c) in MEASURE]
    read = {r.record for c in (*kept, *wholes.values()) for r in c.refs if c.id not in inside}
    begun = []
    for call in in_order(run.calls):
        if call.id in wholes:
            begun.append(wholes[call.id])
        elif call.id not in inside or any(r.record in read for r in call.slots("output")):
            begun.append(call)
    return with_programs(run, renumbered(begun)[0], programs)


class _Graph:
    """The nodes of one step, with the maker and the readers of each record."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._makers = {ref.record: call for call in calls for ref in call.slots("output")}
        self._readers: dict[int, list[Call]] = defaultdict(list)
        for call in calls:
            for record in dict.fromkeys(r.record for r in call.slots("input")):
                self._readers[record].append(call)

    def layers(self) -> list[_Layer]:
        """The dynamically quantised layers of this step, written out or fused."""
        found = (self._written_out(c) or self._fused(c) for c in self._calls)
        return [layer for layer in found if layer is not None]

    def _fused(self, call: Call) -> _Layer | None:
        reads = operands(call)
        if plain_type(call) != _FUSED or not {0, 1, 3} <= reads.keys():
            return None
        measure = self._measure(reads, (2, 4))
        if measure is None or not (is_param(reads[1].slot) and is_param(reads[3].slot)):
            return None
        op_type = PRODUCTS["MatMulInteger"]
        zero, bias = reads.get(5), reads.get(6)
        return _Layer((measure, call), op_type, reads[1], reads[3], zero, bias)

    def _written_out(self, call: Call) -> _Layer | None:
        reads = operands(call)
        if plain_type(call) not in PRODUCTS or not {0, 1} <= reads.keys():
            return None
        measure = self._measure(reads, (2,))
        cast = self._only_reader(call, "Cast")
        product = self._only_reader(cast, "Mul") if cast is not None else None
        if measure is None or cast is None or product is None or not is_param(reads[1].slot):
            return None
        rest = [r for r in product.slots("input") if r.record != cast.slots("output")[0].record]
        scales = self._makers.get(rest[0].record) if len(rest) == 1 else None
        if scales is None or plain_type(scales) != "Mul":
            return None
        factors = operands(scales).values()
        own = [ref for ref in factors if is_param(ref.slot)]
        measured = [ref.record for ref in factors if not is_param(ref.slot)]
        if len(own) != 1 or measured != [measure.slots("output")[1].record]:
            return None
        members = in_order((measure, scales, call, cast, product))
        op_type = PRODUCTS[plain_type(call)]
        return _Layer(tuple(members), op_type, reads[1], own[0], reads.get(3))

    def _measure(self, reads: Mapping[int, Ref], places: Sequence[int]) -> Call | None:
        """The DynamicQuantizeLinear node that made the first operand, if the operands at `places`
        are its scale or zero point too; else None.
        """
        measure = self._makers.get(reads[0].record)
        if measure is None or plain_type(measure) not in MEASURE:
            return None
        made = [ref.record for ref in measure.slots("output")]
        is_own = all(k in reads and reads[k].record in made[1:] for k in places)
        return measure if is_own and len(made) == 3 and made[0] == reads[0].record else None

    def _only_reader(self, call: Call, kind: str) -> Call | None:
        readers = self._readers.get(call.slots("output")[0].record, [])
        return readers[0] if len(readers) == 1 and plain_type(readers[0]) == kind else None


def _whole(run: Run, layer: _Layer) -> tuple[Call, Program | None]:
    """The layer as one call at the place of its last node, and its program; None for the program
    where the nodes have none.
    """
    last, measure = layer.members[-1], next(c for c in layer.members if plain_type(c) in MEASURE)
    product = next((c for c in layer.members if plain_type(c) in PRODUCTS), last)
    held = {1: layer.weight, 2: layer.scale, 3: layer.zero, 4: layer.bias}
    params = {place: ref for place, ref in held.items() if ref is not None}
    refs = (Ref("input.0", measure.slots("input")[0].record), *dict.fromkeys(params.values()))
    outputs = last.slots("output")
    whole = replace(
        last,
        op_type=layer.op_type,
        refs=(*refs, *outputs),
        arguments=product.arguments,
        notes=(
            *(n for n in last.notes if not n.startswith(Mark.TAKES)),
            *(mark(Mark.TAKES, f"{param_name(r.slot)} as {k}") for k, r in params.items()),
        ),
    )
    return with_joined_program(run, whole, layer.members, whole.refs)
