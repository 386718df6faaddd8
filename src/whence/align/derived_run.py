"""Executes a plan: a run whose tensors are brought to other axes, joined or cut. Each is made from
the run's own tensors when it is first read.

The stages after alignment see runs of one form and need not know how they were aligned.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from whence.align import dims as expressions
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.records import Call, Looked, Over, Program, Record, Run
from whence.results import Made, Plan, SlotPair

_HELD_BYTES = 512 << 20  # bytes of derived tensors kept: they are measured, then replayed on


class Derived(Over):
    """A run with derived tensors after its own records, and calls that refer to them. base: the run
    itself.

    calls: replace the run's calls, ids are positions; None keeps the run's own.
    """

    def __init__(
        self,
        base: Run,
        tensors: Sequence[Made],
        records: Sequence[Record],
        calls: Sequence[Call] | None = None,
    ) -> None:
        self._first = first = len(base.records)
        super().__init__(
            base,
            calls,
            Looked(
                first + len(records),
                lambda index: records[index - first] if index >= first else base.records[index],
            ),
        )
        self.tensors = tuple(tensors)
        self._cache: OrderedDict[int, Array] = OrderedDict()
        self._cache_bytes = 0

    def array(self, record: int) -> Array:
        """Elements of a record, read-only. Raises ElementsMissing, naming the tensors it is derived
        from.
        """
        if record < self._first:
            return self.base.array(record)
        array = self._cache.get(record)
        if array is None and self.records[record].why:
            raise ElementsMissing(self.records[record].why)
        if array is None:
            array = self._make(self.tensors[record - self._first])
            self._cache[record] = array
            self._cache_bytes += array.nbytes
            while self._cache_bytes > _HELD_BYTES and len(self._cache) > 1:
                self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        else:
            self._cache.move_to_end(record)
        return array

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        return (self.base, record) if record < self._first else None

    def _make(self, tensor: Made) -> Array:
        try:
            bound = {name: [self.array(r) for r in ids] for name, ids in tensor.operands}
        except ElementsMissing as error:
            raise ElementsMissing(f"made as {tensor.dims}: {error}") from None
        array = np.ascontiguousarray(expressions.parse(tensor.dims).apply(bound)).reshape(
            self.records[tensor.record].shape
        )
        view = array.view()
        view.flags.writeable = False
        return view


class DerivedTensors:
    """Collects the tensors to be derived from one run, each once. Reads no elements."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tensors: list[Made] = []
        self._records: list[Record] = []
        self._existing: dict[tuple[Any, ...], int] = {}
        self.programs: dict[str, Program] = {}

    def record(self, record: int) -> Record:
        """A record of the run, or of a tensor that will be derived."""
        index = record - len(self.run.records)
        return self._records[index] if index >= 0 else self.run.records[record]

    def add(
        self, dims: expressions.Node | str, bound: Mapping[str, Sequence[int]], why: str = ""
    ) -> int:
        """The record of the tensor that an expression makes. bound: names -> records. Raises
        Unfit.
        """
        node = expressions.parse(dims) if isinstance(dims, str) else dims
        operands = tuple((name, tuple(ids)) for name, ids in bound.items())
        if isinstance(node, expressions.Name) and len(bound[node.name]) == 1:
            return bound[node.name][0]
        text = str(node)
        existing = self._existing.get((text, operands))
        if existing is not None:
            return existing
        records = [self.record(r) for _, ids in operands for r in ids]
        dtypes = dict.fromkeys(r.dtype for r in records)
        if len(dtypes) != 1:
            raise expressions.Unfit(f"{text}: made of {' and '.join(dtypes)}; one dtype is needed")
        shape = node.shape({name: [self.record(r).shape for r in ids] for name, ids in operands})
        number = len(self.run.records) + len(self.tensors)
        self._records.append(_described(number, node, records, shape))
        self.tensors.append(Made(number, text, operands, why))
        self._existing[text, operands] = number
        return number

    def unknown(self, records: Sequence[int], why: str) -> int:
        """A record without elements that stands for these records: shape and dtype of the first,
        and why.
        """
        existing = self._existing.get((why, *records))
        if existing is None:
            of, existing = self.record(records[0]), len(self.run.records) + len(self.tensors)
            self._records.append(Record(existing, of.dtype, of.shape, device=of.device, why=why))
            self.tensors.append(Made(existing, "not known", (), why))
            self._existing[why, *records] = existing
        return existing

    def done(self, calls: Sequence[Call] | None = None) -> Run:
        """The run with its derived tensors; the run itself where there are none."""
        if not self.tensors and calls is None:
            return self.run
        made = Derived(self.run, self.tensors, self._records, calls)
        if self.programs:
            made.programs = {**self.run.programs, **self.programs}
        return made


def _described(
    number: int, node: expressions.Node, sources: Sequence[Record], shape: tuple[int, ...]
) -> Record:
    """The record of a derived tensor. A reordering keeps the statistics, a reshape also the
    hash.
    """
    first = sources[0]
    out = Record(number, first.dtype, shape, device=first.device)
    moved = isinstance(node, expressions.Rearrange | expressions.Reverse) and isinstance(
        node.of, expressions.Name
    )
    if len(sources) != 1 or not moved:
        return out
    out = replace(out, statistics=first.statistics, sketch=first.sketch)
    return replace(out, hash=first.hash) if expressions.keeps_order(node, first.shape) else out


def text(run: Run, record: int, known: Container[int] = ()) -> str:
    """The expression that makes a record, in terms of the run's own records and of those in
    `known`; "" for one of these.
    """
    tensor = made_as(run, record) if record not in known else None
    if tensor is None:
        return ""
    inner = {name: text(run, ids[0], known) for name, ids in tensor.operands if len(ids) == 1}
    return expressions.substituted(
        tensor.dims, {name: expression for name, expression in inner.items() if expression}
    )


def worded(run: Run, plan: Plan) -> Plan:
    """The plan with the expression of every derived target tensor in its pair."""
    return _with_texts(plan, lambda slot: slot.dims or text(run, slot.target_record))


def stated(run: Run, plan: Plan) -> Plan:
    """The plan as a user's map has to state it: every target tensor written in terms of the tensors
    of the aligned run's calls.

    Ranks, batches and tokens are joined before a map is applied, so tensors joined there are whole
    tensors for a map.
    """
    in_calls = {r.record for c in run.calls for r in c.refs}
    apart = tuple(m for m in plan.made_target if m.record not in in_calls)
    plan = _with_texts(plan, lambda slot: text(run, slot.target_record, in_calls))
    return replace(plan, made_target=apart)


def _with_texts(plan: Plan, text_of: Callable[[SlotPair], str]) -> Plan:
    def with_text(slot: SlotPair) -> SlotPair:
        dims = text_of(slot)
        return replace(slot, dims=dims) if dims != slot.dims else slot

    pairs = (replace(p, slots=tuple(map(with_text, p.slots))) for p in plan.pairs)
    return replace(plan, pairs=tuple(pairs))


def made_as(run: Run, record: int) -> Made | None:
    """How a record was derived, at any stage; None for one of the run's own."""
    while isinstance(run, Derived):
        first = len(run.base.records)
        if record >= first:
            return run.tensors[record - first]
        run = run.base
    return None


_ON_RANKS = " on the ranks"


def on_ranks(words: str) -> str:
    """The reason given for a tensor joined from pieces on several ranks. words: how it lies on
    them.
    """
    return f"{words}{_ON_RANKS}"


def is_on_ranks(tensor: Made) -> bool:
    """Whether this tensor was joined from pieces on several ranks."""
    return tensor.why.endswith(_ON_RANKS)


def renumbered(begun: Sequence[Call]) -> tuple[list[Call], dict[int, int]]:
    """Calls of a tree, given in the order in which they began, with new ids in the order in which
    they ended; and old id -> new id.
    """
    below: dict[int, list[Call]] = defaultdict(list)
    for call in begun:
        below[call.parent].append(call)
    order = {call.id: k for k, call in enumerate(begun)}
    numbers: dict[int, str] = {}
    ends: list[Call] = []
    todo = [(call, False) for call in reversed(below[-1])]
    while todo:
        call, is_done = todo.pop()
        kids = below.get(call.id, [])
        if is_done or not kids:
            ends.append(call)
            continue
        start = numbers.get(call.id, call.number)
        numbers.update((kid.id, f"{start}_{k}") for k, kid in enumerate(kids))
        todo.append((call, True))
        todo += [(kid, False) for kid in reversed(kids)]
    new_ids = {call.id: k for k, call in enumerate(ends)}
    calls = [
        replace(
            c,
            id=k,
            order=order[c.id],
            parent=new_ids.get(c.parent, -1),
            number=numbers.get(c.id, c.number),
        )
        for k, c in enumerate(ends)
    ]
    return calls, new_ids
