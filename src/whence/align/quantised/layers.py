"""Aligns a quantised graph with another graph: whatever lies between two pairs of corresponding
values becomes one layer, whose codes are compared as the numbers they stand for.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whence import dtypes
from whence.align.call_sites import match_roots, selected, step_of
from whence.align.calls.facing_tensors import facing
from whence.align.calls.fused_operators import VALUES, Fused
from whence.align.calls.joined_programs import with_joined_program
from whence.align.calls.whole_calls import whole_call
from whence.align.quantised import dynamic
from whence.align.quantised.operands import (
    DEQUANTIZE,
    KEEPS,
    QUANTIZE,
    Form,
    form_of,
    is_coded,
    operands,
    packed,
    plain_type,
    triples,
)
from whence.align.values.corresponding import computed_again, corresponding_coarsely, equal_names
from whence.align.values.flat_calls import flat
from whence.align.values.groups import of_one_maker, with_wholes
from whence.align.values.value_graph import Stretch, ValueGraph, is_move, kind_of
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.frameworks import host
from whence.records import Call, Looked, Over, Program, Record, Ref, Run, in_order
from whence.records.marks import Mark, has_mark
from whence.records.quantised import (
    Coded,
    CodedWeight,
    Grid,
    Member,
    QuantisedLayer,
    Reread,
)
from whence.records.slots import is_input, is_output, is_param, param_name

_KINDS = ("operator", "module")


def applies(reference: Run, target: Run) -> bool:
    """Whether the target computes with codes, in nodes other than the reference's."""
    nodes = [c for c in selected(target.calls) if c.leaf and has_mark(c, Mark.OPSET)]
    if not any(map(is_coded, nodes)):
        return False
    calls = [c for c in selected(reference.calls) if c.leaf and c.kind in _KINDS]
    return any(call.program for call in calls) and _are_coded_otherwise(calls, nodes)


def _are_coded_otherwise(calls: Sequence[Call], nodes: Sequence[Call]) -> bool:
    """Whether the nodes compute with codes elsewhere than the calls do, or in other operators.
    Nodes that were fused from coded calls do not.
    """
    own = {call.scope: call.op_type for call in calls if is_coded(call)}
    coded = [node for node in nodes if is_coded(node)]
    fused = {name for node in coded for name in node.origins}
    plain = {node.scope: node.op_type for node in coded if not own.keys() & {*node.origins}}
    return plain != {scope: kind for scope, kind in own.items() if scope not in fused}


def joined(reference: Run, target: Run) -> Fused:
    """Both runs with the calls between corresponding values joined into one call each, and the
    pairs of these calls.
    """
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
    plain = [
        (a, b)
        for a, b in zip(ids, other_ids, strict=True)
        if not (new_reference.calls[a].quantised or new_target.calls[b].quantised)
    ]
    new_reference, new_target = facing(new_reference, new_target, plain)
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
    """Yields the graphs (of `side`, of `other`) of every step that both runs have."""
    roots = match_roots(side.run.calls, other.run.calls)
    across = {step_of(graph.root): graph for graph in other.graphs()}
    for graph in side.graphs():
        rank, root, step, micro = step_of(graph.root)
        key = rank, roots.get(root, root), step, micro
        if key in across:
            yield graph, across[key]


def _parts(graph: CodedGraph, other: CodedGraph) -> Iterator[tuple[Stretch, Stretch]]:
    """Yields the part of each graph that lies between corresponding values, for both graphs."""
    named = equal_names(graph.plain, other.plain, plain_name)
    partner = corresponding_coarsely(graph.plain, other.plain, named)
    made = [v for v in partner if v in graph.plain.makers and partner[v] in other.plain.makers]
    ordered = sorted(made, key=graph.plain.place)
    known = computed_again(graph.plain, partner) | partner
    for values in of_one_maker(graph.plain, other.plain, partner, ordered):
        part = graph.behind(values, known.keys())
        across = other.behind([partner[value] for value in values], set(partner.values()))
        yield part, across._replace(reads=_in_order(graph, part, known, other, across))


def _in_order(
    graph: CodedGraph,
    part: Stretch,
    partner: Mapping[int, int],
    other: CodedGraph,
    across: Stretch,
) -> list[int]:
    """The records that the target's part reads, in the order in which the reference's part reads
    their partners; records without a partner last.
    """
    wanted = [partner[plain] for read in part.reads if (plain := graph.shown(read)) in partner]
    by_plain = {other.shown(read): read for read in reversed(across.reads)}
    first = [by_plain[value] for value in wanted if value in by_plain]
    return [*first, *(read for read in across.reads if read not in first)]


# One of two runs of which at least one computes with codes: its graphs of values, and its calls
# joined into layers.


class CodedSide:
    """A run and its quantised tensors. rounded: record of codes -> the value that was quantised to
    them.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        leaves = in_order(c for c in selected(run.calls) if c.leaf)
        self.values = CodedValues(run, leaves)
        self.made = list[Decoded]()
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        self._leaves = leaves
        self.rounded: dict[int, int] = {}

    def decoded(self, record: int) -> int:
        """The record with the numbers that a record of codes stands for, in ONNX's order of axes;
        the record itself where nothing changes.
        """
        if record in self._numbers:
            return self._numbers[record]
        grid = self.values.placed(record)
        if grid is None and record in self.values.last:  # floats made of dequantised ones
            grid = Grid(self.run.records[record].dtype, (), channels_last=True)
        is_coded = record in self.values.grids
        if grid is None or not (is_coded or grid.channels_last):
            return record
        number = len(self.run.records) + len(self.made)
        self.made.append(Decoded(record, grid, is_coded))
        self._numbers[record] = number
        self._sources[number] = record
        return number

    def source(self, record: int) -> int:
        """The run's own record from which decoded numbers were made."""
        return self._sources.get(record, record)

    def coded(self, record: int) -> Coded:
        """A record in the form in which a layer stores it: its decoded numbers, codes and grid."""
        is_coded = record in self.values.grids
        return Coded(self.decoded(record), record if is_coded else -1, self.values.placed(record))

    def read(self, record: int) -> Coded:
        """An input of a layer, as in `coded`, with the value that was quantised to it."""
        of = self.rounded.get(record, -1)
        return replace(self.coded(record), of=of)

    def graphs(self) -> Iterator[CodedGraph]:
        """Yields the graph of each step."""
        calls: dict[object, list[Call]] = {}
        for call in self._leaves:
            calls.setdefault(step_of(call), []).append(call)
        roots = [c for c in self.run.calls if c.parent == -1 and not c.leaf and step_of(c) in calls]
        plain = dict[int, list[Call]]()
        for root in roots:
            ends = [ref.record for ref in root.slots("output")]
            step = plain_calls(calls[step_of(root)], self.values, ends, self.decoded)
            self.rounded |= step.rounded
            plain[root.id] = step.calls
        run = DecodedRun(self.run, self.made)
        for root in roots:
            yield CodedGraph(self, run, root, calls[step_of(root)], plain[root.id])

    def with_layers(self, parts: Sequence[Stretch]) -> tuple[Run, list[int]]:
        """(the run with each part joined into one call, the ids of these calls)."""
        read = {record for part in parts for record in part.reads} & {*self.rounded}
        rounding = {
            call.id
            for call in self._leaves
            if call.op_type in QUANTIZE and call.slots("output")[0].record in read
        }
        run, ids = with_wholes(self.run, parts, self._whole, rounding)
        return DecodedRun(run, self.made), ids

    def _as_taken(self, part: Stretch, record: int) -> Coded:
        """An input of a part, and whether every call of the part that reads it quantises it by its
        own range.
        """
        return replace(self.read(record), is_measured=_rounds_by_range(part.calls, record))

    def _floats(self, part: Stretch, weights: Sequence[CodedWeight]) -> tuple[int, ...]:
        """The floating parameters of a part that are neither decoded from codes nor scales of
        codes.
        """
        grids = [self.values.grids.get(ref.record) for c in part.calls for ref in c.refs]
        of_codes = {record for g in grids if g is not None for record in (*g.scale, g.zero)}
        of_codes |= {weight.coded.codes for weight in weights}
        records = self.run.records
        return tuple(
            r
            for r in part.params
            if r not in of_codes and records[r].count > 1 and dtypes.is_floating(records[r].dtype)
        )

    def _facing(self, ref: Ref) -> int:
        """The record that a layer shows for a tensor that it reads or makes: for an input that was
        quantised just before, the numbers before quantisation.
        """
        of = self.rounded.get(ref.record, -1) if is_input(ref.slot) else -1
        return self.decoded(ref.record if of < 0 else of)

    def _inner(self, part: Stretch) -> list[int]:
        """Codes that a part makes and reads only itself."""
        makes = {self.values.numbers.get(record, record) for record in part.makes}
        made = (ref.record for call in part.calls for ref in call.slots("output"))
        return [r for r in dict.fromkeys(made) if r in self.values.grids and r not in makes]

    def _whole(self, part: Stretch, number: int) -> tuple[Call, Program | None]:
        """One call and program for a part, with the description of its quantised layer where it has
        codes.
        """
        own = (
            *(Ref(f"input.{k}", record) for k, record in enumerate(part.reads)),
            *(Ref(f"param.{k}", record) for k, record in enumerate(part.params)),
            *(Ref(f"output.{k}", record) for k, record in enumerate(part.makes)),
        )
        weights = coded_weights(self.values, part, self.decoded)
        is_quantised = bool(weights) or any(r in self.values.grids for r in own_records(own))
        is_quantised |= any(r in self.values.numbers for r in part.makes)
        refs = own
        if is_quantised:
            params = dict.fromkeys(weight.coded.record for weight in weights)
            refs = (
                *(Ref(r.slot, self._facing(r)) for r in own if not is_param(r.slot)),
                *(Ref(f"param.{k}", record) for k, record in enumerate(params)),
            )
        whole = replace(whole_call(_shown(part.calls), refs, number), leaf=True, kind="operator")
        if is_quantised:
            layer = QuantisedLayer(
                tuple(self._as_taken(part, record) for record in part.reads),
                tuple(map(self.coded, part.makes)),
                tuple(weights),
                tuple(r for call in part.calls for r in self.values.rereads.get(call.id, ())),
                {ref.slot: ref.record for ref in own},
                tuple(map(_member, part.calls)),
                tuple(map(self.coded, self._inner(part))),
                self._floats(part, weights),
            )
            whole = replace(whole, quantised=layer)
        return with_joined_program(self.run, whole, part.calls, own)


class CodedGraph:
    """One step of a run as two graphs: the recorded one, and `plain`, the float graph that it was
    quantised from.
    """

    def __init__(
        self, side: CodedSide, run: Run, root: Call, calls: Sequence[Call], plain: Sequence[Call]
    ) -> None:
        self.root, self._side = root, side
        params = {r.record for c in calls for r in c.slots("param")}
        self._exact = ValueGraph(side.run, root, calls, params)
        shown = params | {side.decoded(record) for record in params}
        ends = [Ref(r.slot, side.decoded(r.record)) for r in root.slots("output")]
        inputs = [Ref(r.slot, side.decoded(r.record)) for r in root.slots("input")]
        plain_root = replace(root, refs=(*inputs, *ends))
        self.plain = ValueGraph(run, plain_root, plain, shown)

    def shown(self, record: int) -> int:
        """The value of the plain graph that a record of the run corresponds to."""
        return self.plain.source(self._side.decoded(record))

    def behind(self, values: Sequence[int], stops: Collection[int]) -> Stretch:
        """The part of the recorded graph that makes `values` from `stops`; both are values of the
        plain graph.
        """
        source = self._side.source
        ends = {source(v) for v in stops}
        # where a value is quantised right away, the codes are read in its place
        ends |= {made for made, of in self._side.rounded.items() if of in ends}
        return self._exact.behind([source(v) for v in values], ends)


def _rounds_by_range(calls: Sequence[Call], record: int) -> bool:
    """Whether every one of these calls that reads a tensor quantises it by its own range, perhaps
    after moves such as a transpose.
    """
    readers = [c for c in calls if any(r.record == record for r in c.slots("input"))]

    def rounds(call: Call) -> bool:
        if is_move(call):
            return all(_rounds_by_range(calls, r.record) for r in call.slots("output"))
        form, reads = form_of(call), operands(call)
        return form is not None and form.rounds in reads and reads[form.rounds].record == record

    return bool(readers) and all(map(rounds, readers))


def own_records(refs: Sequence[Ref]) -> list[int]:
    """The records of inputs and outputs, without parameters."""
    return [ref.record for ref in refs if not is_param(ref.slot)]


def _member(call: Call) -> Member:
    return Member(
        call.scope,
        call.program,
        call.by_slot,
        plain_type(call),
        tuple(ref.record for ref in operands(call).values()),
    )


def _shown(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls by which a layer is named: those that do more than move or quantise elements."""
    named = [
        call if call.scope else replace(call, scope=call.op_type)
        for call in calls
        if not is_move(call) and call.op_type not in QUANTIZE | DEQUANTIZE
    ]
    return named or calls


# A run of a quantised graph, with the numbers that its codes stand for as further records.

_HELD_BYTES = 256 << 20


class Decoded(NamedTuple):
    """A tensor to be decoded. source: a record of codes (is_coded), or of numbers of which only the
    axes change.
    """

    source: int
    grid: Grid
    is_coded: bool


class DecodedRun(Over):
    """A run with decoded tensors after its own records: numbers decoded from codes, in ONNX's order
    of axes. Elements are computed on demand.
    """

    def __init__(self, base: Run, made: Sequence[Decoded]) -> None:
        self._first, self._made = len(base.records), made
        self._held: OrderedDict[int, Array] = OrderedDict()
        self._bytes = 0
        super().__init__(base, None, Looked(self._first + len(made), functools.cache(self._record)))

    def array(self, record: int) -> Array:
        """Elements of a record, read-only. Raises ElementsMissing."""
        if record < self._first:
            return self.base.array(record)
        if record not in self._held:
            made = self._made[record - self._first]
            array = decoded(self.base, made)
            array.flags.writeable = False
            self._held[record] = array
            self._bytes += array.nbytes
            while self._bytes > _HELD_BYTES and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
            return array
        self._held.move_to_end(record)
        return self._held[record]

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return (self.base, record) if record < self._first else None

    def _record(self, record: int) -> Record:
        if record < self._first:
            return self.base.records[record]
        made = self._made[record - self._first]
        source = self.base.records[made.source]
        try:
            array = self.array(record)
        except ElementsMissing as error:
            return Record(record, "float32", _shape(source.shape, made.grid), why=str(error))
        statistics, sketch = host.statistics(array.reshape(-1).view(np.uint8), "float32")
        return Record(record, "float32", array.shape, statistics=statistics, sketch=sketch)


def decoded(run: Run, made: Decoded) -> Array:
    """The numbers that a tensor of codes stands for, as float32. Raises ElementsMissing."""
    array = made.grid.decoded(run.array, made.source) if made.is_coded else run.array(made.source)
    if made.grid.channels_last and array.ndim > 2:
        array = np.moveaxis(array, -1, 1)
    return np.array(array, dtype=np.float32, order="C")


def _shape(shape: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
    if grid.packed is not None:
        return grid.packed.columns, grid.packed.rows
    return (shape[0], shape[-1], *shape[1:-1]) if grid.channels_last and len(shape) > 2 else shape


# The calls of a quantised graph written as in the float graph that it was made from: used to find
# which values correspond, not to compute.

_ENDS = (
    "_QuantizeLinear_Output", "_DequantizeLinear_Output", "_QuantizeLinear_Input",
    "_DequantizeLinear", "_quantized", "_quant",
)  # fmt: skip
"""Suffixes that ONNX Runtime's quantiser appends to the names of values it adds."""


def plain_name(scope: str) -> str:
    """The name of a value without a quantiser's suffix, as a dotted scope."""
    for end in _ENDS:
        scope = scope.removesuffix(end)
    if scope.startswith("/"):  # the name of a value by torch's exporter
        scope = scope.removeprefix("/").replace("/", ".").removesuffix("_output_0")
    return scope


class Plain(NamedTuple):
    """calls: of the float graph. rounded: record of codes -> the record that was quantised to them,
    where other calls read that too.
    """

    calls: list[Call]
    rounded: dict[int, int]


def plain_calls(
    calls: Sequence[Call], values: CodedValues, ends: Sequence[int], decoded: Callable[[int], int]
) -> Plain:
    """The calls of one step without quantisation: a QuantizeLinear node belongs to the operator
    before it where nothing else reads that operator's output, and DequantizeLinear becomes
    Identity.

    ends: records that the model returns. decoded: maps a record to the record of its decoded
    numbers.
    """
    readers: Counter[int] = Counter(ends)
    for call in calls:
        readers.update({ref.record for ref in call.refs if not is_output(ref.slot)})
    makers = {ref.record: call for call in calls for ref in call.slots("output")}
    shown: dict[int, int] = {}  # output of an operator -> the codes quantised from it alone
    for call in calls:
        if call.op_type in QUANTIZE and call.slots("input"):
            made = call.slots("input")[0].record
            if readers[made] == 1 and made in makers and made not in values.numbers:
                shown[made] = call.slots("output")[0].record
    plain, rounded = list[Call](), dict[int, int]()
    for call in calls:
        if call.op_type in QUANTIZE:
            if _first(call) in shown:
                continue
            if call.slots("input"):
                rounded[call.slots("output")[0].record] = _first(call)
        plain.append(_plain(call, values, shown, decoded))
    return Plain(_without_clipping(plain, [decoded(end) for end in ends]), rounded)


def _without_clipping(calls: Sequence[Call], ends: Sequence[int]) -> list[Call]:
    """The calls with each ReLU or Clip merged into the call before it, where nothing else reads its
    output. Codes that start at zero clip as a ReLU does, so the quantised graph may have no ReLU.
    """
    readers: Counter[int] = Counter(ends)
    for call in calls:
        readers.update({ref.record for ref in call.refs if not is_output(ref.slot)})
    makers = {ref.record: k for k, call in enumerate(calls) for ref in call.slots("output")}
    out: list[Call | None] = []
    for call in calls:
        if call.arguments.get("activation") == "Relu":
            arguments = {k: v for k, v in call.arguments.items() if k != "activation"}
            call = replace(call, arguments=arguments)
        out.append(call)
    for k, call in enumerate(calls):
        place = makers.get(_first(call)) if kind_of(call) in ("Relu", "Clip") else None
        maker = out[place] if place is not None else None
        if place is None or maker is None or readers[_first(call)] != 1 or is_move(maker):
            continue
        if len(maker.slots("output")) == 1 and _first(call) == maker.slots("output")[0].record:
            refs = [ref for ref in maker.refs if not is_output(ref.slot)]
            out[place] = replace(maker, scope=call.scope, refs=(*refs, *call.slots("output")))
            out[k] = None
    return [call for call in out if call is not None]


def _first(call: Call) -> int:
    inputs = call.slots("input")
    return inputs[0].record if inputs else -1


def _plain(
    call: Call, values: CodedValues, shown: Mapping[int, int], decoded: Callable[[int], int]
) -> Call:
    form, kind = form_of(call), call.op_type
    reads: list[Ref] = [*call.slots("input")]
    if kind in DEQUANTIZE:
        kind, reads = "Identity", [Ref("input.0", operands(call)[0].record)]
    elif kind in QUANTIZE:
        kind, reads = "Identity", [Ref("input.0", _first(call))]
    elif form is None:
        reads = [ref for ref in call.refs if not is_output(ref.slot)]
    else:
        coded = [operand.ref for operand in values.operands(call)]
        floats = [ref for ref in reads if ref.record not in {ref.record for ref in coded}]
        kind, reads = form.kind, [*floats, *coded]
    refs = [
        ref if form is None and is_param(ref.slot) else Ref(ref.slot, decoded(ref.record))
        for ref in reads
    ]
    refs += [
        Ref(ref.slot, decoded(shown.get(ref.record, ref.record))) for ref in call.slots("output")
    ]
    return replace(call, op_type=kind, refs=tuple(refs))


# Finds the reference's parameters that the codes of a quantised layer stand for.

_ALIKE = 0.5
"""Least cosine similarity of a decoded weight and the reference's parameter for the two to be one
weight; it does not depend on their scales.
"""


def coded_weights(
    values: CodedValues, part: Stretch, decoded: Callable[[int], int]
) -> list[CodedWeight]:
    """The parameters of a part that are stored as codes, each once."""
    weights: dict[int, CodedWeight] = {}
    for call in part.calls:
        for operand in values.operands(call):
            ref = operand.ref
            if is_param(ref.slot):
                coded = Coded(decoded(ref.record), ref.record, operand.grid)
                weights[ref.record] = CodedWeight(param_name(ref.slot), coded)
    for call in part.calls:
        reads = {k: values.numbers.get(ref.record, -1) for k, ref in operands(call).items()}
        grids = [values.grids.get(reads.get(k, -1)) for k in range(3)]
        bias = weights.get(reads.get(2, -1))
        if bias is not None and grids[0] is not None and grids[1] is not None:
            factors = (*grids[0].scale, *grids[1].scale)
            weights[reads[2]] = replace(bias, factors=factors)
    return list(weights.values())


def faced(reference: Run, calls: Sequence[int], target: Run, partners: Sequence[int]) -> Run:
    """The target with each weight of its layers in the slot of the reference's parameter that it
    stands for.
    """
    changed: dict[int, Call] = {}
    for a, b in zip(calls, partners, strict=True):
        partner = target.calls[b]
        layer = partner.quantised
        if layer is None or not layer.weights:
            continue
        facing = _facing(reference, reference.calls[a], target, layer.weights)
        weights = tuple(
            replace(w, facing=slot) for w, slot in zip(layer.weights, facing, strict=True)
        )
        params = [Ref(w.facing or f"param.beside.{w.name}", w.coded.record) for w in weights]
        refs = (*(r for r in partner.refs if not is_param(r.slot)), *params)
        layer = replace(layer, weights=weights)
        changed[b] = replace(partner, refs=refs, quantised=layer)
    return Over(target, [changed.get(call.id, call) for call in target.calls])


def _facing(reference: Run, call: Call, target: Run, weights: Sequence[CodedWeight]) -> list[str]:
    """For each weight, the slot of the reference's parameter of its shape with the largest cosine
    similarity, of equal ones the nearest in size; else the only remaining one of its shape; else
    "" for none.
    """
    free = {ref.slot: ref.record for ref in call.slots("param")}
    shapes = {slot: reference.records[record].shape for slot, record in free.items()}
    facing = dict[int, str]()
    for k, weight in enumerate(weights):
        best, chosen = (_ALIKE, 0.0), ""
        for slot, record in free.items():
            if shapes[slot] != target.records[weight.coded.record].shape:
                continue
            try:
                likeness = _likeness(reference.array(record), target.array(weight.coded.record))
            except ElementsMissing:
                continue
            if likeness > best:
                best, chosen = likeness, slot
        if chosen:
            del free[chosen]
            facing[k] = chosen
    for k, weight in enumerate(weights):  # similar to none: the only one left of its shape
        left = [s for s in free if shapes[s] == target.records[weight.coded.record].shape]
        if k not in facing and len(left) == 1:
            del free[left[0]]
            facing[k] = left[0]
    return [facing.get(k, "") for k in range(len(weights))]


def _likeness(one: Array, two: Array) -> tuple[float, float]:
    """Cosine similarity of two tensors, then how far one is as large as the other, in 0..1: single
    elements of one sign all have the same direction.
    """
    a, b = (x.astype(np.float64).reshape(-1) for x in (one, two))
    small, large = sorted(float(np.linalg.norm(x)) for x in (a, b))
    if not small:
        return float(not large), 1.0
    return float(a @ b) / (small * large), small / large


# Finds which tensors of a run are codes, the scale and zero point they were made with, and those
# they are read with.

_TO_LAST, _TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_INTEGERS = ("int", "uint")


class CodedOperand(NamedTuple):
    """Codes that a call reads. place: position of the operand."""

    place: int
    ref: Ref
    grid: Grid


class CodedValues:
    """The quantised tensors of a run.

    grids: record of codes -> scale and zero point. last: records whose channels lie on the last
    axis. numbers: record dequantised from codes -> those codes. rereads: by call id, codes that the
    call reads with another scale or zero point than they were made with.
    """

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self.run = run
        self.grids: dict[int, Grid] = {}
        self.last: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.rereads: dict[int, list[Reread]] = {}
        self._makers = {ref.record: call for call in calls for ref in call.slots("output")}
        self._turned = _turned_for_kernels(calls)
        for call in calls:
            self._look(call)

    def operands(self, call: Call) -> list[CodedOperand]:
        """The codes that a call reads, including an integer bias."""
        form = form_of(call)
        if form is None:
            return []
        reads = operands(call)
        coded = []
        for triple, axis in triples(call, form):
            ref, scale, zero = (reads.get(k) for k in triple[:3])
            if ref is not None and scale is not None and self._are_codes(ref.record):
                grid = self._grid(ref.record, (scale.record,), zero, axis)
                grid = replace(grid, packed=packed(call), is_turned=form.is_turned)
                coded.append(CodedOperand(triple.codes, ref, grid))
        bias = reads.get(form.bias)
        if bias is not None and len(coded) == 2 and self._are_codes(bias.record):
            scale_records = tuple(s for operand in coded for s in operand.grid.scale)
            grid = Grid(self.run.records[bias.record].dtype, scale_records)
            coded.append(CodedOperand(form.bias, bias, grid))
        return coded

    def _look(self, call: Call) -> None:
        form = form_of(call)
        made = call.slots("output")
        is_last = _is_channels_last(call)
        if form is not None:
            for operand in self.operands(call):
                self._read(call, operand)
            self._made(call, form)
        elif plain_type(call) in KEEPS and call.slots("input"):
            source = call.slots("input")[0].record
            if source in self.grids:
                for ref in made:
                    if self.run.records[ref.record].dtype == self.grids[source].dtype:
                        self.grids[ref.record] = self.grids[source]
        perm = call.arguments.get("perm")
        sources = [ref.record for ref in call.slots("input")]
        comes_last = any(record in self.last for record in sources)
        if plain_type(call) == "Transpose" and perm in (_TO_LAST, _TO_FIRST):
            comes_last = perm == _TO_LAST and call.id in self._turned
        if is_last or (comes_last and plain_type(call) != "Reshape"):
            self.last.update(r.record for r in made if len(self.run.records[r.record].shape) == 4)

    def _read(self, call: Call, operand: CodedOperand) -> None:
        record, grid = operand.ref.record, operand.grid
        if is_param(operand.ref.slot):
            self.grids.setdefault(record, grid)
        elif record not in self.grids:
            self.grids[record] = grid
        elif not self._are_equal(self.grids[record], grid):
            made = self._makers.get(record)
            name = made.scope if made is not None else operand.ref.slot
            reread = Reread(name, self.grids[record], grid)
            self.rereads.setdefault(call.id, []).append(reread)
        if call.op_type in DEQUANTIZE:
            self.numbers[call.slots("output")[0].record] = record

    def _made(self, call: Call, form: Form) -> None:
        if form.makes is None:
            return
        reads = operands(call)
        scale, zero = (reads.get(k) for k in form.makes)
        if scale is None:
            return
        axis = int(call.arguments.get("axis", 1)) if call.op_type in QUANTIZE else 0
        for ref in call.slots("output"):
            self.grids[ref.record] = self._grid(ref.record, (scale.record,), zero, axis)

    def _grid(self, record: int, scale: tuple[int, ...], zero: Ref | None, axis: int) -> Grid:
        dtype = self.run.records[record].dtype
        return Grid(dtype, scale, zero.record if zero is not None else -1, axis)

    def _are_codes(self, record: int) -> bool:
        dtype = self.run.records[record].dtype
        return dtype in dtypes.DTYPES and dtypes.named(dtype).kind in _INTEGERS

    def _are_equal(self, one: Grid, two: Grid) -> bool:
        if one.dtype != two.dtype:
            return False
        if (one.scale, one.zero) == (two.scale, two.zero):
            return True
        try:
            a, b = (grid.steps(self.run.array, 0) for grid in (one, two))
        except ValueError:  # scales along an axis: weights, read only once
            return True
        return bool(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]))

    def placed(self, record: int) -> Grid | None:
        """The grid of a record of codes, or of the numbers dequantised from one; None for
        others.
        """
        grid = self.grids.get(self.numbers.get(record, record))
        if grid is None or record not in self.last:
            return grid
        return replace(grid, channels_last=True)


def _is_channels_last(call: Call) -> bool:
    return bool(call.arguments.get("channels_last")) or "nhwc" in call.op_type


def _turned_for_kernels(calls: Sequence[Call]) -> set[int]:
    """Transpose calls that the runtime inserted to move channels to the last axis for its kernels:
    a channels-last kernel reads their result before the next transpose.
    """
    readers: dict[int, list[Call]] = {}
    for call in calls:
        for ref in call.slots("input"):
            readers.setdefault(ref.record, []).append(call)
    turned = set[int]()
    for call in calls:
        if plain_type(call) != "Transpose" or call.arguments.get("perm") != _TO_LAST:
            continue
        waiting, seen = [call], {call.id}
        while waiting:
            for reader in (
                r for ref in waiting.pop().slots("output") for r in readers.get(ref.record, ())
            ):
                if _is_channels_last(reader):
                    turned.add(call.id)
                elif reader.id not in seen and plain_type(reader) != "Transpose":
                    seen.add(reader.id)
                    waiting.append(reader)
            if call.id in turned:
                break
    return turned
