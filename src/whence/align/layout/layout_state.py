"""The pairs of a plan while the layout of the target's tensors is being decided."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property

from msgspec.structs import replace

from whence.align import dims as ex
from whence.align.layout.axes import applied, ways
from whence.align.layout.distances import AGREES, distance, resembles
from whence.align.module_names import starred
from whence.align.plan_editor import PlanEditor
from whence.dtypes import Array
from whence.records import Record, Run
from whence.records.slots import is_input, is_param
from whence.results import CallPair, Plan, SlotPair

TensorPair = tuple[int, int]  # a record of the reference, and one of the target
# paired tensors of sibling calls: for each, the reference call and the slots where it first occurs
Family = dict[TensorPair, tuple[int, SlotPair]]


def is_constant(record: Record) -> bool:
    """Whether all elements of a record are equal. A constant agrees with any permutation."""
    figures = record.statistics
    return figures is not None and figures.min == figures.max


class LayoutState(PlanEditor):
    """decided: for each pair of tensors, the expression that brings the target's to its partner's
    axes, and the evidence. modules: reference calls by the modules of the pair they belong to.

    channel_orders: orders of channels found in weights, by the scope of the enclosing module.
    padded: numbers of tokens, of the reference and of the target that fills them up, by root, rank
    and step of the target.
    """

    def __init__(self, reference: Run, target: Run, plan: Plan) -> None:
        super().__init__(reference, target, plan)
        self.decided: dict[TensorPair, tuple[ex.Node, str]] = {}
        self.padded: set[tuple[str, int, int, int, int]] = set()
        self.channel_orders: dict[str, dict[tuple[int, ...], None]] = {}
        self.modules: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for call, pair in self.pairs.items():
            self.modules[self.module(pair)].append(call)

    def arrays(self, tensors: TensorPair) -> tuple[Array, Array] | None:
        """The elements of both tensors; None where one of them was not stored."""
        a, b = self.array("reference", tensors[0]), self.array("target", tensors[1])
        return (a, b) if a is not None and b is not None else None

    def records(self, tensors: TensorPair) -> tuple[Record, Record]:
        return self.reference.records[tensors[0]], self.target.records[tensors[1]]

    def module(self, pair: CallPair) -> tuple[str, str, str, str]:
        """(root, scope) of the pair's reference call, then (root, scope) of its target call."""
        call, target_call = self.calls(pair)
        return call.root, call.scope, target_call.root, target_call.scope

    def families(self, kinds: tuple[str, ...]) -> Iterator[Family]:
        """Pairs of tensors in slots of these kinds, grouped by starred name, slot, shape and dtype;
        pairs that are equal bit by bit are left out.
        """
        out: defaultdict[tuple[object, ...], Family] = defaultdict(dict)
        for call_id, pair in self.pairs.items():
            names: tuple[str, str] | None = None
            for slot in pair.slots:
                if not slot.reference_slot.startswith(kinds):
                    continue
                tensors = slot.records
                a, b = self.records(tensors)
                if a.hash and a.hash == b.hash and a.shape == b.shape:
                    continue
                if names is None:
                    call, target_call = self.calls(pair)
                    names = starred(call.scope), starred(target_call.scope)
                key = (
                    *names,
                    starred(slot.reference_slot),
                    starred(slot.target_slot),
                    a.shape,
                    b.shape,
                    a.dtype,
                    b.dtype,
                )
                out[key].setdefault(tensors, (call_id, slot))
        yield from out.values()

    @cached_property
    def equal_parameters(self) -> Counter[tuple[str, str, tuple[int, ...]]]:
        """Number of parameters equal bit by bit, by starred scope, slot and shape."""
        places = {
            s.records: (p, s) for p in reversed(self.pairs.values()) for s in reversed(p.slots)
        }
        out: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        for tensors, (pair, slot) in places.items():
            a, b = self.records(tensors)
            if is_param(slot.reference_slot) and a.hash and a.hash == b.hash and a.shape == b.shape:
                scope = self.reference.calls[pair.reference].scope
                out[starred(scope), slot.reference_slot, a.shape] += 1
        return out

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Ids of the reference calls that read each record, for paired slots only."""
        out: defaultdict[int, list[int]] = defaultdict(list)
        for call, pair in self.pairs.items():
            for slot in pair.slots:
                if is_input(slot.reference_slot):
                    out[slot.reference_record].append(call)
        return out

    def agree(self, tensors: TensorPair) -> bool:
        """Whether some expression that the shapes allow makes the two tensors agree."""
        a, b = self.records(tensors)
        arrays = self.arrays(tensors)
        if arrays is None:
            return False
        return any(
            distance(arrays[0], applied(node, arrays[1])) < AGREES
            for node in ways(b.shape, a.shape)
        )

    def resemble(self, tensors: TensorPair) -> bool:
        """Whether the two tensors agree in the layout decided for them or, without one, in any
        layout that the shapes allow.
        """
        arrays = self.arrays(tensors)
        if arrays is not None and tensors in self.decided:
            return distance(arrays[0], applied(self.decided[tensors][0], arrays[1])) < AGREES
        return arrays is not None and (resembles(*arrays) or self.agree(tensors))

    def laid_out(self) -> tuple[Run, Plan]:
        """The target with its tensors as decided, and the plan with these in its pairs."""
        new_records: dict[TensorPair, int] = {}
        for tensors, (node, why) in self.decided.items():
            try:
                new_records[tensors] = self.derived.add(node, {"x": [tensors[1]]}, why)
            except ex.Unfit:
                continue
        for call, pair in self.pairs.items() if new_records else ():
            slots = tuple(
                slot if (record := new_records.get(slot.records)) is None
                else replace(slot, target_record=record, dims="")
                for slot in pair.slots
            )  # fmt: skip
            if slots != pair.slots:
                self.pairs[call] = replace(pair, slots=slots)
        return self.done()
