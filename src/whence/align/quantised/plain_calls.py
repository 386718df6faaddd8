"""The calls of a quantised graph as they stand in the graph that it was made of: for finding which
values correspond, not for computing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from whence.align.quantised.coded_values import CodedValues
from whence.align.quantised.operands import DEQUANTIZE, QUANTIZE, form_of, operands
from whence.align.values.value_graph import is_move, kind_of
from whence.records import Call, Ref
from whence.records.slots import is_output, is_param

_ENDS = (
    "_QuantizeLinear_Output", "_DequantizeLinear_Output", "_QuantizeLinear_Input",
    "_DequantizeLinear", "_quantized", "_quant",
)  # fmt: skip
"""How the quantiser of ONNX Runtime ends the names of values that it adds."""


def plain_name(scope: str) -> str:
    """The name of a value without what a quantiser put behind it, in the form of a scope."""
    for end in _ENDS:
        scope = scope.removesuffix(end)
    if scope.startswith("/"):  # a value, as torch's exporter names it
        scope = scope.removeprefix("/").replace("/", ".").removesuffix("_output_0")
    return scope


class Plain(NamedTuple):
    """rounded: by record of codes, the numbers that they were made of, where these are a value of
    their own.
    """

    calls: list[Call]
    rounded: dict[int, int]


def plain_calls(
    calls: Sequence[Call], values: CodedValues, ends: Sequence[int], decoded: Callable[[int], int]
) -> Plain:
    """The calls of one step, where making codes belongs to the operator before, and reading them
    counts as nothing. ends: records that the model returns. decoded: the record of the numbers of a
    record.
    """
    readers: Counter[int] = Counter(ends)
    for call in calls:
        readers.update({ref.record for ref in call.refs if not is_output(ref.slot)})
    makers = {ref.record: call for call in calls for ref in call.slots("output")}
    shown: dict[int, int] = {}  # what an operator makes -> the codes that are made of it at once
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
    """The calls with each ReLU as a part of what it alone reads: codes that begin at zero do what
    it does, and the quantised graph may have none.
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
        place = makers.get(_first(call)) if kind_of(call) == "Relu" else None
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
    form = form_of(call)
    outputs = tuple(
        Ref(ref.slot, decoded(shown.get(ref.record, ref.record))) for ref in call.slots("output")
    )
    if call.op_type in DEQUANTIZE:
        source = operands(call)[0].record
        refs = (Ref("input.0", decoded(source)), *outputs)
        return replace(call, op_type="Identity", refs=refs)
    if form is None:
        inputs = tuple(
            ref if is_param(ref.slot) else Ref(ref.slot, decoded(ref.record))
            for ref in call.refs
            if not is_output(ref.slot)
        )
        return replace(call, refs=(*inputs, *outputs))
    if call.op_type in QUANTIZE:
        refs = (Ref("input.0", decoded(_first(call))), *outputs)
        return replace(call, op_type="Identity", refs=refs)
    coded = [operand.ref for operand in values.operands(call)]
    coded_records = {ref.record for ref in coded}
    others = [
        ref for ref in call.slots("input") if ref.record not in coded_records
    ]  # what is given as numbers
    refs = tuple(Ref(ref.slot, decoded(ref.record)) for ref in (*others, *coded))
    return replace(call, op_type=form.kind, refs=(*refs, *outputs))
