"""One run of two that are held against each other, of which one or both compute with codes: its
graphs of values, and its calls taken together as layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from whence import dtypes
from whence.align.call_sites import selected, step_of
from whence.align.calls.joined_programs import with_joined_program
from whence.align.calls.whole_calls import whole_call
from whence.align.quantised.coded_values import CodedValues
from whence.align.quantised.decoded_run import Decoded, DecodedRun
from whence.align.quantised.operands import DEQUANTIZE, QUANTIZE, form_of, operands, plain_type
from whence.align.quantised.plain_calls import plain_calls, plain_name
from whence.align.quantised.weights import coded_weights
from whence.align.values.groups import with_wholes
from whence.align.values.value_graph import Stretch, ValueGraph, is_move
from whence.records import Call, Program, Ref, Run
from whence.records.quantised import Coded, CodedWeight, Member, QuantisedLayer
from whence.records.slots import is_input, is_param


class CodedSide:
    """A run and what of it is codes. rounded: by record of codes, the value that they were made
    of.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        leaves = sorted((c for c in selected(run.calls) if c.leaf), key=lambda c: c.order)
        self.values = CodedValues(run, leaves)
        self.made = list[Decoded]()
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        self._leaves = leaves
        self.rounded: dict[int, int] = {}

    def decoded(self, record: int) -> int:
        """The record of the numbers of a record, in the order of axes of ONNX."""
        if record in self._numbers:
            return self._numbers[record]
        grid = self.values.placed(record)
        is_coded = record in self.values.grids
        if grid is None or not (is_coded or grid.channels_last):
            return record
        number = len(self.run.records) + len(self.made)
        self.made.append(Decoded(record, grid, is_coded))
        self._numbers[record] = number
        self._sources[number] = record
        return number

    def source(self, record: int) -> int:
        """The record of the run that the numbers were made of."""
        return self._sources.get(record, record)

    def coded(self, record: int) -> Coded:
        """A record of the run as a layer has it."""
        is_coded = record in self.values.grids
        return Coded(self.decoded(record), record if is_coded else -1, self.values.placed(record))

    def read(self, record: int) -> Coded:
        """The same of what a layer reads."""
        of = self.rounded.get(record, -1)
        return replace(self.coded(record), of=of)

    def graphs(self) -> Iterator[CodedGraph]:
        """The graph of each step."""
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
        """(the run with each part as one call, those calls)."""
        read = {record for part in parts for record in part.reads} & {*self.rounded}
        rounding = {
            call.id
            for call in self._leaves
            if call.op_type in QUANTIZE and call.slots("output")[0].record in read
        }
        run, ids = with_wholes(self.run, parts, self._whole, rounding)
        return DecodedRun(run, self.made), ids

    def _as_taken(self, part: Stretch, record: int) -> Coded:
        """What a part reads, and whether all that read it round it by its own range."""
        return replace(self.read(record), is_measured=_rounds_by_range(part.calls, record))

    def _floats(self, part: Stretch, weights: Sequence[CodedWeight]) -> tuple[int, ...]:
        """The parameters of a part that are neither codes nor of any."""
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
        """What a layer shows of a tensor that it reads or makes: of codes that were made of it on
        the way, the numbers before.
        """
        of = self.rounded.get(ref.record, -1) if is_input(ref.slot) else -1
        return self.decoded(ref.record if of < 0 else of)

    def _inner(self, part: Stretch) -> list[int]:
        """Codes that a part makes and reads itself."""
        makes = {self.values.numbers.get(record, record) for record in part.makes}
        made = (ref.record for call in part.calls for ref in call.slots("output"))
        return [r for r in dict.fromkeys(made) if r in self.values.grids and r not in makes]

    def _whole(self, part: Stretch, number: int) -> tuple[Call, Program | None]:
        """One call for a part, with its layer where codes are in it."""
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
    """A step of a run as two graphs: as it is, and as the graph that it was made of."""

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
        """A record of the run as the plain graph has it."""
        return self.plain.source(self._side.decoded(record))

    def behind(self, values: Sequence[int], stops: Collection[int]) -> Stretch:
        """What makes values of others, as the run has it. values, stops: of the plain graph."""
        source = self._side.source
        ends = {source(v) for v in stops}
        # what is rounded right behind a value is read in its place
        ends |= {made for made, of in self._side.rounded.items() if of in ends}
        return self._exact.behind([source(v) for v in values], ends)

    def names(self) -> dict[str, int]:
        """Values by the name of what makes them, where one call alone has it."""
        names: dict[str, list[int]] = {}
        for value in self.plain.values:
            maker = self.plain.makers[value]
            if len(maker.slots("output")) == 1:
                names.setdefault(plain_name(maker.scope), []).append(value)
        return {name: values[0] for name, values in names.items() if len(values) == 1 and name}


def _rounds_by_range(calls: Sequence[Call], record: int) -> bool:
    """Do all of these calls that read a tensor round it by its own range, as it is or moved?"""
    readers = [c for c in calls if any(r.record == record for r in c.slots("input"))]

    def rounds(call: Call) -> bool:
        if is_move(call):
            return all(_rounds_by_range(calls, r.record) for r in call.slots("output"))
        form, reads = form_of(call), operands(call)
        return form is not None and form.rounds in reads and reads[form.rounds].record == record

    return bool(readers) and all(map(rounds, readers))


def own_records(refs: Sequence[Ref]) -> list[int]:
    """The records that are no parameters."""
    return [ref.record for ref in refs if not is_param(ref.slot)]


def _member(call: Call) -> Member:
    return Member(
        call.scope,
        call.program,
        {ref.slot: ref.record for ref in call.refs},
        plain_type(call),
        {place: ref.record for place, ref in operands(call).items()},
        tuple(ref.record for ref in call.slots("output")),
        call.arguments,
    )


def _shown(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls that a layer is named by: those that compute."""
    named = [
        call if call.scope else replace(call, scope=call.op_type)
        for call in calls
        if not is_move(call) and call.op_type not in QUANTIZE | DEQUANTIZE
    ]
    return named or calls
