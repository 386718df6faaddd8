"""Without programs: is what differs at a place taken back by whatever reads it?

The law of `travels` on errors alone. What a suspect leaves is followed through the reference's
calls that read it. A way ends where the target's call is given another tensor, which agrees again
and which the target makes of what the suspect leaves there, or where it computes otherwise (other
parameters, other arguments) and leaves tensors that agree again. The suspect is another form of the
same computation where every way ends so. A call that is the same in both runs takes nothing back:
it hides an error, as a sum with something large does.

Printed logs do not say who reads what, also with programs that read otherwise. There the suspect is
another form where the target makes the reference's tensor in a later operator of its own, and all
results of the model agree, but for what a fault that was proven elsewhere explains.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
from msgspec.structs import replace

from whence.comparison.verdicts.pair_errors import PairErrors
from whence.judge.limits import LIMITS
from whence.records import Call, in_order
from whence.records.slots import is_of_child, is_param, is_read, is_written
from whence.results import GUILTY, Confidence, Evidence, SlotPair, Verdict, VerdictKind

Key = tuple[int, int]
"""Of a verdict: call of the reference and segment of it, -1 for a leaf."""

_PASSES = (
    VerdictKind.IDENTICAL,
    VerdictKind.NOISE,
    VerdictKind.OTHER_FORM,
    VerdictKind.INHERITED,
    VerdictKind.AMPLIFIED,
)
_CLEAR = 10.0
"""Least error of a difference that is taken back, over the limit below which tensors agree."""


class DataFlow:
    """Follows the outputs of suspects to the calls that read them.

    was_replayed: whether programs were run around a suspect; a replay is better evidence, so such
    suspects are skipped. covered: calls of the reference without a partner that lie between a
    suspect and the call that takes its difference back.
    """

    def __init__(self, errors: PairErrors, was_replayed: Callable[[Key], bool]) -> None:
        self._errors, self._paired = errors, errors.paired
        self._was_replayed = was_replayed
        self.covered: set[int] = set()
        self._takers: set[int] = set()
        self._is_proven = False
        self._verdicts: Mapping[Key, Verdict] = {}

    def judged(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
        """The verdicts, with suspects whose difference is taken back, and the calls that take it
        back, withdrawn as another form of the same computation.
        """
        judged = dict(verdicts)
        self._is_proven = any(
            verdict.verdict == VerdictKind.INTRODUCED and verdict.confidence == Confidence.CERTAIN
            for verdict in verdicts.values()
        )
        for key, verdict in verdicts.items():
            if not _is_suspect(verdict) or _came_in(verdict) is None or self._was_replayed(key):
                continue
            behind = self._taken_back_by(key, verdict)
            is_read = any(p.reference_record in self._readers for p in self._left(key, verdict))
            maker = "" if is_read else self._made_behind(key, verdict)
            if maker:
                words = f"another form: the target makes this in {maker}; {verdict.sentence}"
                judged[key] = verdict.withdrawn(VerdictKind.OTHER_FORM, words)
            elif behind:
                words = f"another form: {self._named(behind)} it back; {verdict.sentence}"
                judged[key] = verdict.withdrawn(VerdictKind.OTHER_FORM, words)
        for call in self._takers:
            taker = judged.get((call, -1))
            if taker is not None and _is_suspect(taker):
                words = f"another form: it takes back what came in; {taker.sentence}"
                judged[call, -1] = taker.withdrawn(VerdictKind.OTHER_FORM, words)
        self._verdicts = judged
        return judged

    @functools.cached_property
    def remade(self) -> Set[int]:
        """Calls of the reference without a partner whose results are read only by each other and by
        paired calls that the target computes differently and gets right. A fused operator in the
        target does the work of such calls, for example.
        """
        calls, results = self._paired.calls, self._written_by_roots
        remade: set[int] = set()
        alone = [c for c in calls if c.id not in self._paired.pair_of]
        for call in sorted(alone, key=lambda call: -call.order):
            left = {ref.record for ref in call.refs if is_written(ref.slot)}
            contents = map(self._paired.reference.records.__getitem__, left)
            # an operator that returns its operand unchanged reads its own result
            readers = {
                number
                for record in contents
                for number in self._readers_of_content.get(record.hash or record.id, ())
                if calls[number].order > call.order
            }
            if not readers or left & results or self._paired.kids.get(call.id):
                continue
            if all(number in remade or self._is_right_otherwise(number) for number in readers):
                remade.add(call.id)
        return remade

    def _is_right_otherwise(self, number: int) -> bool:
        """Whether the target computes a call differently, all its results were measured and its
        verdict is a pass.
        """
        index = self._paired.pair_of.get(number)
        verdict = self._verdicts.get((number, -1))
        if index is None or not self._is_other(index):
            return False
        slots = self._paired.slots[index].values()
        left = [self._errors.of(slot).value for slot in slots if is_written(slot.reference_slot)]
        is_known = bool(left) and None not in left
        return is_known and (verdict is None or verdict.verdict in _PASSES)

    def _named(self, behind: Set[int]) -> str:
        calls = [self._paired.calls[call] for call in sorted(behind)]
        first = calls[0].scope or calls[0].op_type or "what reads it"
        return f"{first} and {len(calls) - 1} more take" if len(calls) > 1 else f"{first} takes"

    def _taken_back_by(self, key: Key, verdict: Verdict) -> set[int]:
        """The calls that take back the difference in a suspect's outputs; empty if it travels."""
        call, e_in = self._paired.calls[key[0]], _came_in(verdict) or 0.0
        pairs = self._left(key, verdict)
        off = {pair.reference_record for pair in pairs if not self._agrees(pair, e_in)}
        is_clear = any(not self._agrees(pair, e_in, _CLEAR) for pair in pairs)
        if not is_clear or not self._are_right(self._results[call.step, call.rank]):
            return set()
        derived = self._derived(pairs, self._paired.pair(self._paired.pair_of[key[0]]).partner)
        handed: set[int] = set()  # read another tensor of the target, which agrees
        takers: set[int] = set()
        alone: set[int] = set()
        todo = list(off)
        while todo:
            record = todo.pop()
            readers = [
                (number, slot)
                for number, slot in self._readers.get(record, ())
                if number != key[0] and self._paired.calls[number].order >= call.order
            ]
            if not readers:
                return set()
            for number, slot in readers:
                if self._is_given_another(number, slot, derived, e_in):
                    handed.add(number)
                    continue
                onward = self._onward(self._paired.calls[number], e_in)
                if onward is None:
                    return set()
                if not onward:
                    takers.add(number)
                if number not in self._paired.pair_of:
                    alone.add(number)
                todo += onward - off
                off |= onward
        self.covered |= alone
        self._takers |= takers
        return handed | takers

    def _made_behind(self, key: Key, verdict: Verdict) -> str:
        """The target's next call without a partner that writes as many elements as the suspect, if
        it writes what the suspect writes in the reference; "" otherwise, and where a result of the
        model is off.
        """
        paired, pairs = self._paired, self._left(key, verdict)
        results = [pair for step in self._results.values() for pair in step]
        if len(pairs) != 1 or not self._are_right(results):
            return ""
        order = paired.pair(paired.pair_of[key[0]]).partner.order
        with_partner = {pair.target for pair in paired.plan.pairs}
        size = paired.reference.records[pairs[0].reference_record].count
        maker, later = next(
            (
                (call, replace(pairs[0], target_record=ref.record))
                for call in self._target_leaves
                if call.order > order and call.id not in with_partner
                for ref in call.slots("output")
                if paired.target.records[ref.record].count == size
            ),
            (None, pairs[0]),
        )
        arrays = paired.arrays(later)
        if maker is None or arrays is None:
            return ""
        a, b = (array.astype(np.float64).ravel() for array in arrays)
        error = float(np.linalg.norm(b - a) / (np.linalg.norm(a) or 1.0))
        return maker.scope if self._is_right(pairs[0], error) else ""

    def _are_right(self, results: Sequence[SlotPair]) -> bool:
        """Whether results of the model agree, or a fault that was proven explains why not; False
        if there are none.
        """
        return bool(results) and (self._is_proven or all(map(self._is_right, results)))

    def _is_right(self, pair: SlotPair, error: float | None = None) -> bool:
        own = self._errors.of(pair)
        value = own.value if error is None else error
        return value is not None and value <= LIMITS.root_output_room(own.u)

    @functools.cached_property
    def _readers(self) -> Mapping[int, list[tuple[int, str]]]:
        """By record of the reference, (call, slot) of every leaf call that reads it."""
        readers: dict[int, list[tuple[int, str]]] = {}
        for call in self._paired.calls:
            if not self._paired.kids.get(call.id):
                for ref in call.refs:
                    if is_read(ref.slot):
                        readers.setdefault(ref.record, []).append((call.id, ref.slot))
        return readers

    @functools.cached_property
    def _readers_of_content(self) -> Mapping[str | int, Set[int]]:
        """By content (hash), the leaf calls that may have read a tensor. Views of another shape
        share the content, and so do plain tensors (masks, ones) which a dump cannot tell apart.
        """
        readers: defaultdict[str | int, set[int]] = defaultdict(set)
        for number, slots in self._readers.items():
            record = self._paired.reference.records[number]
            readers[record.hash or record.id] |= {call for call, _ in slots}
        return readers

    def _derived(self, pairs: Sequence[SlotPair], partner: Call) -> Set[int]:
        """Records of the target: the suspect's outputs and all tensors computed from them."""
        derived = {pair.target_record for pair in pairs}
        for call in self._target_leaves:
            if call.order > partner.order and not derived.isdisjoint(
                ref.record for ref in call.refs if is_read(ref.slot)
            ):
                derived |= {ref.record for ref in call.refs if is_written(ref.slot)}
        return derived

    @functools.cached_property
    def _target_leaves(self) -> Sequence[Call]:
        """The target's calls without children, in execution order."""
        calls, kids = self._paired.target.calls, self._paired.target_kids
        return in_order(c for c in calls if not kids.get(c.id))

    def _left(self, key: Key, verdict: Verdict) -> list[SlotPair]:
        """The pairs of a suspect's output tensors."""
        index = self._paired.pair_of[key[0]]
        if key[1] < 0:
            pairs = self._paired.slots[index].values()
            return [pair for pair in pairs if is_written(pair.reference_slot)]
        pair = self._paired.slot(index, verdict.slot) if is_of_child(verdict.slot) else None
        return [pair] if pair is not None else []

    def _is_given_another(self, number: int, slot: str, derived: Set[int], e_in: float) -> bool:
        """Whether the target's call reads a tensor in this slot that agrees with the reference and
        derives from the suspect (`derived`).
        """
        read = self._paired.slots_of(number).get(slot)
        return read is not None and self._agrees(read, e_in) and read.target_record in derived

    def _onward(self, call: Call, e_in: float) -> set[int] | None:
        """The outputs (records) through which an error travels on behind a call that reads it:
        empty if the call takes it back, None if that is not known.
        """
        left = {ref.record for ref in call.refs if is_written(ref.slot)}
        index = self._paired.pair_of.get(call.id)
        if index is None:
            return left or None
        pairs = [p for p in self._paired.slots[index].values() if is_written(p.reference_slot)]
        agreeing = {p.reference_record for p in pairs if self._agrees(p, e_in)}
        if not left or (agreeing and not self._is_other(index)):
            return None
        return left - agreeing

    def _is_other(self, index: int) -> bool:
        """Whether the target's call differs in operator, arguments or parameters."""
        pair = self._paired.pair(index)
        if pair.call.op_type != pair.partner.op_type:
            return True
        if pair.call.arguments != pair.partner.arguments:
            return True
        parameters = (p for p in self._paired.slots[index].values() if is_param(p.reference_slot))
        return any(not self._agrees(parameter, 0.0) for parameter in parameters)

    def _agrees(self, pair: SlotPair, e_in: float, times: float = 1.0) -> bool:
        error = self._errors.of(pair)
        limit = times * LIMITS.growth * (e_in + 2 * error.u)
        return error.value is not None and error.value <= limit

    @functools.cached_property
    def _written_by_roots(self) -> Set[int]:
        roots = (call for call in self._paired.calls if call.parent < 0)
        return {ref.record for call in roots for ref in call.refs if is_written(ref.slot)}

    @functools.cached_property
    def _results(self) -> Mapping[tuple[int, int], Sequence[SlotPair]]:
        """The output pairs of root calls, by (step, rank)."""
        results: dict[tuple[int, int], list[SlotPair]] = defaultdict(list)
        for index, pair in enumerate(self._paired.plan.pairs):
            root = self._paired.calls[pair.reference]
            if root.parent < 0:
                slots = self._paired.slots[index].values()
                results[root.step, root.rank] += [s for s in slots if is_written(s.reference_slot)]
        return results


def _is_suspect(verdict: Verdict) -> bool:
    return verdict.verdict in GUILTY and verdict.evidence != Evidence.REPLAY


def _came_in(verdict: Verdict) -> float | None:
    """The relative error of a suspect's inputs: 0 if the verdict has none, None if unknown."""
    return verdict.numbers.get("e_in", 0.0)
