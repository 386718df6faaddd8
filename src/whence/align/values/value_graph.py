"""One step of a run as a graph of values: which call makes each value, and from which values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from whence import dtypes
from whence.align.calls.input_order import MOVES
from whence.records import Call, Record, Ref, Run, in_order
from whence.records.slots import is_output

ATEN_MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "clone",
    "contiguous", "detach", "alias", "lift_fresh", "flatten", "unflatten",
))  # fmt: skip
_WITH_ACTIVATION = frozenset((
    "com.microsoft.BiasGelu", "com.microsoft.BiasSplitGelu", "com.microsoft.FastGelu",
))  # fmt: skip
_KINDS = {
    "addmm": "MatMul",
    "mm": "MatMul",
    "bmm": "MatMul",
    "baddbmm": "MatMul",
    "convolution": "Conv",
    "native_layer_norm": "LayerNormalization",
    "_softmax": "Softmax",
    "embedding": "Gather",
    "Linear": "MatMul",
    "Conv1d": "Conv",
    "Conv2d": "Conv",
    "LayerNorm": "LayerNormalization",
    "Embedding": "Gather",
    "MaxPool2d": "MaxPool",
    "max_pool2d_with_indices": "MaxPool",
    "com.microsoft.nchwc.MaxPool": "MaxPool",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "hardsigmoid": "HardSigmoid",
    "softmax": "Softmax",
    "ReLU": "Relu",
    "ReLU6": "Clip",
    "hardtanh": "Clip",
    "Hardswish": "HardSwish",
    "hardswish": "HardSwish",
    "LeakyReLU": "LeakyRelu",
    "leaky_relu": "LeakyRelu",
    "BatchNorm1d": "BatchNormalization",
    "BatchNorm2d": "BatchNormalization",
    "native_batch_norm": "BatchNormalization",
    "relu": "Relu",
    "GELU": "Gelu",
    "gelu": "Gelu",
    "matmul": "MatMul",
    "fc": "MatMul",
    "fused_matmul": "MatMul",
    "fused_elementwise_add": "Add",
    "multiply": "Mul",
    "fused_elementwise_mul": "Mul",
    "Gemm": "MatMul",
    "com.microsoft.FusedMatMul": "MatMul",
    "com.microsoft.FusedGemm": "MatMul",
    "com.microsoft.FusedConv": "Conv",
    "com.microsoft.nchwc.Conv": "Conv",
}
"""Operators that have several names; all others are known by their own name."""


_ACTIVATED, _SCALED = " and activation", " and scale"
_ACTIVATIONS = frozenset(("Relu", "Clip", "HardSwish", "LeakyRelu", "Sigmoid", "HardSigmoid"))


class Form(NamedTuple):
    """What values of one meaning have in common. kind: of the operator that makes the value. place:
    index among its results. parameters: their element counts. sources: the values that it is
    computed from.
    """

    kind: str
    place: int
    parameters: tuple[int, ...]
    sources: tuple[int, ...]


class Stretch(NamedTuple):
    """A part of a graph: its calls in order, the values it reads, its parameters, and the values it
    makes.
    """

    calls: Sequence[Call]
    reads: Sequence[int]
    params: Sequence[int]
    makes: Sequence[int]


class ValueGraph:
    """The values of one call of a model: tensors that an operator computed and did not merely move.

    root: the model's call. calls: its operators, in order. parameters: records. values: records, in
    the order in which they were made. makers: by record, moved ones included.
    """

    def __init__(
        self, run: Run, root: Call, calls: Sequence[Call], parameters: Collection[int]
    ) -> None:
        self.run, self.root, self.calls = run, root, calls
        self.makers: dict[int, Call] = {}
        self._unshown: dict[int, list[Call]] = {}
        waiting: list[Call] = []
        for call in calls:  # the first: later calls only pass on what exists
            read = {ref.record for ref in call.slots("input")}
            for ref in call.slots("output"):
                if ref.record not in read:
                    self.makers.setdefault(ref.record, call)
            # a tensor that an engine cannot show without changing it is read by the calls that
            # follow
            waiting.append(call)
            if call.slots("output"):
                self._unshown[call.id], waiting = waiting[:-1], []
        self._parameters = parameters
        self._made_of: defaultdict[int, list[int]] | None = None
        ends = {ref.record for ref in root.slots("output")}
        self.values = [
            ref.record
            for call in calls
            for ref in call.slots("output")
            if self.makers.get(ref.record) is call and (ref.record in ends or not is_move(call))
        ]
        self._is_value = set(self.values)

    def record(self, value: int) -> Record:
        return self.run.records[value]

    def is_floating(self, value: int) -> bool:
        return dtypes.is_floating(self.record(value).dtype)

    def place(self, value: int) -> int:
        """The position of the call that made a value, in execution order."""
        return self.makers[value].order

    def source(self, record: int) -> int:
        """The value whose elements a record holds, back through moves."""
        while record not in self._is_value and record in self.makers:
            inputs = self.makers[record].slots("input")
            if not inputs:
                break
            record = inputs[0].record
        return record

    def made_of(self, value: int) -> list[int]:
        """The records made by the calls that read a value."""
        if self._made_of is None:
            self._made_of = defaultdict(list)
            for call in self.calls:
                for ref in call.slots("input"):
                    results = [r.record for r in call.slots("output")]
                    self._made_of[self.source(ref.record)] += results
        return self._made_of[value]

    def names(self, plain: Callable[[str], str] = str) -> dict[str, int]:
        """Values by the plain name of the call that makes them, where one call alone has it."""
        names: defaultdict[str, list[int]] = defaultdict(list)
        for value in self.values:
            maker = self.makers[value]
            if len(maker.slots("output")) == 1:
                names[plain(maker.scope)].append(value)
        return {name: values[0] for name, values in names.items() if len(values) == 1 and name}

    def is_parameter(self, record: int) -> bool:
        """Whether a record is a parameter, possibly moved."""
        return self.source(record) in self._parameters

    def inputs(self, call: Call) -> list[Ref]:
        """The inputs of a call that are not parameters."""
        return [ref for ref in call.slots("input") if not self.is_parameter(ref.record)]

    def parameters(self, call: Call) -> list[Record]:
        """The parameters of a call with more than one element."""
        read = (r.record for r in call.refs if not is_output(r.slot))
        records = (self.record(self.source(r)) for r in read if self.is_parameter(r))
        return [record for record in records if record.count > 1]

    def forms(self, value: int) -> list[Form]:
        """The form of a value by the operator that makes it. If that is a norm, sum, activation or
        scale after a convolution or matrix product, also the form of one fused operator that does
        all of it.
        """
        call = self.makers[value]
        place = [ref.record for ref in call.slots("output")].index(value)
        forms = [self._form(call, kind_of(call), place, self._sizes(call))]
        is_active = kind_of(call) in _ACTIVATIONS
        maker = self._maker_behind(call) if is_active else call
        suffix = _ACTIVATED if is_active else ""
        if kind_of(maker) == "Add":
            sources = [self.source(ref.record) for ref in self.inputs(maker)]
            forms += self._biased(maker, sources, suffix)
            for k, source in enumerate(sources):
                if len(sources) == 2 and source in self.makers:
                    forms += self._folded(source, suffix, (sources[1 - k],))
        elif kind_of(call) in ("Mul", "Div") and not self._sizes(call):
            forms += self._scaled(self._maker_behind(call))
        elif maker is not call or kind_of(maker) == "BatchNormalization":
            forms += self._folded(self._made_by(maker, value), suffix, ())
        return forms

    def _scaled(self, behind: Call) -> list[Form]:
        """The form of a matrix product fused with the number that multiplies its result."""
        is_product = kind_of(behind) == "MatMul"
        return [self._form(behind, f"MatMul{_SCALED}", 0, self._sizes(behind))] * is_product

    def _biased(self, maker: Call, sources: Sequence[int], suffix: str) -> list[Form]:
        """The form of a matrix product fused with this call's addition of a parameter."""
        behind = self.makers.get(sources[0]) if len(sources) == 1 else None
        if behind is None or kind_of(behind) != "MatMul":
            return []
        sizes = tuple(sorted((*self._sizes(maker), *self._sizes(behind))))
        return [self._form(behind, f"MatMul{suffix}", 0, sizes)] if self._sizes(maker) else []

    def _made_by(self, maker: Call, value: int) -> int:
        """The value itself if `maker` makes it, else the first output of `maker`."""
        own = [ref.record for ref in maker.slots("output")]
        return value if value in own else own[0]

    def _folded(self, value: int, suffix: str, summed: tuple[int, ...]) -> list[Form]:
        """The form of the convolution that makes a value, with a following norm folded in."""
        maker, sizes = self.makers[value], tuple[int, ...]()
        if kind_of(maker) == "BatchNormalization":
            sizes = (self.record(value).shape[1],)
            maker = self._maker_behind(maker)
        if kind_of(maker) != "Conv":
            return []
        sizes = tuple(sorted(dict.fromkeys((*sizes, *self._sizes(maker)))))
        form = self._form(maker, f"Conv{suffix}", 0, sizes)
        return [form._replace(sources=(*form.sources, *summed))]

    def _maker_behind(self, call: Call) -> Call:
        """The call that made the only input of this call; the call itself where it has several
        inputs or none.
        """
        inputs = self.inputs(call)
        return self.makers.get(self.source(inputs[0].record), call) if len(inputs) == 1 else call

    def _sizes(self, call: Call) -> tuple[int, ...]:
        return tuple(sorted(record.count for record in self.parameters(call)))

    def _form(self, call: Call, kind: str, place: int, sizes: tuple[int, ...]) -> Form:
        sources = tuple(self.source(ref.record) for ref in self.inputs(call))
        return Form(kind, place, sizes, sources)

    def behind(self, values: Sequence[int], stops: Collection[int]) -> Stretch:
        """The part that computes `values`, going back to `stops` and to records that no call
        made.
        """
        calls_behind: dict[int, Call] = {}
        ends: dict[int, None] = {}
        waiting = [(value, True) for value in reversed(values)]
        while waiting:
            record, is_first = waiting.pop()
            maker = self.makers.get(record)
            if maker is None or (record in stops and not is_first):
                ends[record] = None
            elif maker.id not in calls_behind:
                for call in (maker, *self._unshown[maker.id]):
                    calls_behind[call.id] = call
                    waiting += [(ref.record, False) for ref in reversed(call.slots("input"))]
        calls = in_order(calls_behind.values())
        params = [ref.record for call in calls for ref in call.slots("param")]
        params += [record for record in ends if record in self._parameters]
        reads = [record for record in ends if record not in self._parameters]
        return Stretch(calls, reads, list(dict.fromkeys(params)), values)


def is_move(call: Call) -> bool:
    """Whether an operator only passes on elements, in whatever order."""
    if call.op.startswith("aten."):
        return call.op_type in ATEN_MOVES
    return call.op_type in MOVES


def has_activation(call: Call) -> bool:
    """Whether an activation was fused into this operator."""
    return bool(call.arguments.get("activation")) or call.op_type in _WITH_ACTIVATION


def kind_of(call: Call) -> str:
    """The kind of an operator, independent of its name in a framework."""
    kind = _KINDS.get(call.op_type, call.op_type)
    if call.op_type == "com.microsoft.FusedMatMul" and call.arguments.get("alpha", 1) != 1:
        kind += _SCALED
    return f"{kind}{_ACTIVATED}" if has_activation(call) else kind
