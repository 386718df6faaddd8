"""The parameters of both sides: whether the run started with them, and what differs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

from whence import align, dtypes, judge
from whence.comparison.paired_runs import PairedRuns
from whence.records import Call
from whence.records.slots import (
    SlotKind,
    is_mutated,
    is_param,
    is_written,
    param_name,
    slot_kind,
    slot_of_kind,
)
from whence.records.training import OPTIMIZER
from whence.results import SlotPair

_LISTED = 3
_SEVERAL = 3  # parameters that differ by rounding, of a model that was made on another processor


class Parameters:
    """Compares each pair of parameters once, bit by bit."""

    def __init__(self, paired: PairedRuns) -> None:
        self.paired = paired
        self._first: dict[tuple[str, str, int, str], tuple[int, int]] = {}
        self._differences: dict[tuple[int, int], judge.ParameterDifference] = {}
        self._held_in: dict[str, bool] = {}

    def is_given(self, call: Call, slot: SlotPair) -> bool:
        """Whether this parameter has the initial value of the run: no step has changed it, and the
        two sides do not differ by rounding, as tables do that each side computes.
        """
        # Each call of an operator is an operator of its own, even under one name.
        key = (
            call.root,
            call.scope,
            call.occurrence if call.kind == "operator" else 0,
            slot.reference_slot,
        )
        records = slot.reference_record, slot.target_record
        is_first = self._first.setdefault(key, records) == records
        if not is_first or slot.reference_record in self.made_before:
            return False
        return not self.difference(slot).is_rounding

    @functools.cached_property
    def made_before(self) -> Set[int]:
        """Records of the reference that unrecorded steps may have changed; empty if recording
        started at step 0. These are parameters with a gradient, parameters that their call writes,
        and the state of optimisers, all as of the first recorded step.
        """
        first_steps: dict[str, int] = {}
        for call in self.paired.calls:
            first_steps[call.root] = min(first_steps.get(call.root, call.step), call.step)
        if not any(first_steps.values()):
            return frozenset()
        records: set[int] = set()
        for call in self.paired.calls:
            if call.step != first_steps[call.root] or not call.step:
                continue
            if call.phase == OPTIMIZER and call.kind != "region":
                records.update(r.record for r in call.slots("input"))
                continue
            written = {
                slot_of_kind(r.slot, SlotKind.PARAM) for r in call.refs if is_mutated(r.slot)
            }
            written.update(call.gradients)
            records.update(r.record for r in call.slots("param") if r.slot in written)
        return frozenset(records - self.paired.written)

    def given(self, call: Call, slots: Mapping[str, SlotPair]) -> dict[str, bool]:
        return {
            s.reference_slot: self.is_given(call, s)
            for s in slots.values()
            if is_param(s.reference_slot)
        }

    def by_role(
        self, call: Call, slots: Mapping[str, SlotPair]
    ) -> tuple[list[SlotPair], list[SlotPair], list[tuple[str, judge.ParameterDifference]]]:
        """(inputs, outputs, exactly comparable parameters) of a paired call.

        A parameter that changed during the run (an optimiser, running statistics) is state: an
        input that carries noise. So is a table that each side computed; not in a checkpoint,
        where the parameters are all there is.
        """
        is_checkpoint = not any(is_written(s.reference_slot) for s in slots.values())
        inputs: list[SlotPair] = []
        outputs: list[SlotPair] = []
        parameters: list[tuple[str, judge.ParameterDifference]] = []
        for slot in slots.values():
            name = slot.reference_slot
            if slot_kind(name) == SlotKind.PARAM and (is_checkpoint or self.is_given(call, slot)):
                parameters.append((name, self.difference(slot)))
            elif slot_kind(name) in (SlotKind.INPUT, SlotKind.PARAM):
                inputs.append(slot)
            elif is_written(name):
                outputs.append(slot)
        return inputs, outputs, parameters

    def notes(self) -> list[str]:
        """Notes about parameters that differ by rounding only, so that each side keeps its own."""
        names: set[str] = set()
        moved: dict[str, float] = {}
        narrow: dict[str, dict[str, None]] = defaultdict(dict)
        for pair in self.paired.plan.pairs:
            call = self.paired.calls[pair.reference]
            for slot in pair.slots:
                if not is_param(slot.reference_slot):
                    continue
                name = f"{call.scope}.{param_name(slot.reference_slot)}".lstrip(".")
                names.add(name)
                if (slot.reference_record, slot.target_record) not in self._differences:
                    continue
                difference = self.difference(slot)
                if difference.is_rounding and difference.rounded_to:
                    narrow[difference.rounded_to][name] = None
                elif difference.is_rounding:
                    rel = (difference.numbers or {}).get("rel_l2") or 0.0
                    moved[name] = rel if math.isfinite(rel) else 0.0
        notes = [
            f"{_first_of(list(listed))}: stored wider than the target's other parameters, and in "
            f"{dtype} before, as these are"
            for dtype, listed in narrow.items()
        ]
        if not moved:
            return notes
        which = f"{len(moved)} of {len(names)} parameters, " if len(moved) > 1 else ""
        return [
            *notes,
            f"{which}{_first_of(sorted(moved))}: the last digits "
            f"differ, up and down alike, by {max(moved.values()):.1g} of their norm at most: made "
            "on another processor? Each side is replayed with its own",
        ]

    def difference(self, slot: SlotPair) -> judge.ParameterDifference:
        """How a parameter differs, judged with the help of the other parameters. Last digits that
        all moved one way count as rounding if those of most other parameters moved both ways.
        Missing digits count as rounding if all parameters of the target lack them, as in a model
        that was stored in 16 bits and is computed in 32.
        """
        difference = self._by_itself(slot)
        if difference.rounded_to and self._are_all_held_in(difference.rounded_to):
            return dataclasses.replace(difference, is_rounding=True)
        if difference.is_last_digit and not difference.is_rounding and self._round_everywhere:
            return dataclasses.replace(difference, is_rounding=True)
        return difference

    @functools.cached_property
    def _round_everywhere(self) -> bool:
        """Whether several parameters, and most of those with different last digits, differ upwards
        and downwards.
        """
        differences = [self._by_itself(slot) for slot in self._compared.values()]
        both_ways = sum(d.is_rounding for d in differences)
        one_way = sum(d.is_last_digit and not d.is_rounding for d in differences)
        return both_ways >= max(_SEVERAL, one_way)

    @functools.cached_property
    def _compared(self) -> dict[tuple[int, int], SlotPair]:
        """All pairs of parameters of paired calls, by (reference record, target record)."""
        return {
            (slot.reference_record, slot.target_record): slot
            for pair in self.paired.plan.pairs
            for slot in pair.slots
            if is_param(slot.reference_slot)
        }

    def _are_all_held_in(self, dtype: str) -> bool:
        """Whether the target stores most floating parameters in a dtype that the reference does not
        use, and all values of the others are representable in it.
        """
        if dtype not in self._held_in:
            narrower = wider = 0
            for slot in self._compared.values():
                reference, target = self.paired.records(slot)
                if dtypes.named(target.dtype).is_floating and reference.dtype != dtype:
                    narrower += target.dtype == dtype
                    wider += target.dtype != dtype
            self._held_in[dtype] = narrower > wider and all(
                self._is_held_in(slot, dtype) for slot in self._compared.values()
            )
        return self._held_in[dtype]

    def _is_held_in(self, slot: SlotPair, dtype: str) -> bool:
        """Whether a parameter of the target has this dtype, is not floating-point, or holds only
        values that this dtype can represent.
        """
        record = self.paired.records(slot)[1]
        if record.dtype == dtype or not dtypes.named(record.dtype).is_floating:
            return True
        arrays = self.paired.arrays(slot)
        return arrays is not None and judge.is_held_in(arrays[1], dtype)

    def _by_itself(self, slot: SlotPair) -> judge.ParameterDifference:
        key = (slot.reference_record, slot.target_record)
        difference = self._differences.get(key)
        if difference is None:
            if key in self.paired.measured and self.paired.measured[key].identical:
                difference = judge.ParameterDifference(True, True)
            else:
                arrays = self.paired.arrays(slot)
                if arrays is None:
                    difference = self._from_hash(slot)
                else:
                    difference = judge.parameters(*arrays)
            self._differences[key] = difference
        return difference

    def _from_hash(self, slot: SlotPair) -> judge.ParameterDifference:
        a, b = self.paired.records(slot)
        unread = self.paired.why_no_elements(slot)
        if (
            a.sketch is not None
            and b.sketch is not None
            and a.sketch.checksum == b.sketch.checksum
            and a.dtype == b.dtype
        ):
            return judge.ParameterDifference(
                False,
                False,
                f"the same elements in another order ({unread}, so not which)",
            )
        if a.dtype == b.dtype and a.shape == b.shape and a.hash and b.hash:
            return judge.ParameterDifference(
                False, True, f"hashes differ ({unread}, so not how)", {}
            )
        if (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (moved := judge.drift(a, b)) is not None
            and judge.parted(moved, judge.roundoff(a, b))
        ):
            return judge.ParameterDifference(
                False, True, f"statistics differ ({unread}, so not how)", {}
            )
        return judge.ParameterDifference(False, False, unread)

    def by_path(self) -> Iterator[tuple[Call, list[tuple[str, judge.ParameterDifference]]]]:
        """(call, differences) of the reference's calls, comparing each parameter with the target's
        parameter of the same path, whichever call of the target holds it.

        Each parameter is compared once, with its initial value. A path that several models of the
        target use for different parameters is left out.
        """
        records: dict[str, int] = {}
        roots: dict[str, str] = {}
        several: set[str] = set()
        for partner in self.paired.target.calls:
            for ref in partner.slots("param"):
                path = align.normal_scope(
                    ".".join(filter(None, (partner.scope, param_name(ref.slot))))
                )
                if (
                    records.setdefault(path, ref.record) != ref.record
                    and roots[path] != partner.root
                ):
                    several.add(path)
                roots.setdefault(path, partner.root)
        visited: set[tuple[str, str]] = set()
        for call in self.paired.calls:
            differences = []
            for ref in call.slots("param"):
                path = align.normal_scope(
                    ".".join(filter(None, (call.scope, param_name(ref.slot))))
                )
                if path in records and path not in several and (call.root, path) not in visited:
                    visited.add((call.root, path))
                    differences.append(
                        (
                            ref.slot,
                            self.difference(
                                SlotPair(ref.slot, ref.slot, ref.record, records[path])
                            ),
                        )
                    )
            if differences:
                yield call, differences

    def inside(self, call: Call, partner: Call) -> list[tuple[str, str, judge.ParameterDifference]]:
        """(scope, name, difference) of the parameters of unpaired calls below `call`, compared with
        the parameters that the target's call itself holds.
        """
        differences: list[tuple[str, str, judge.ParameterDifference]] = []
        visited: set[tuple[int, int]] = set()
        for inner in (self.paired.calls[k] for k in self.paired.alone(call.id)):
            for ref in inner.slots("param"):
                pair = self.paired.inner_parameter(partner, inner, ref.slot)
                if (
                    pair is None
                    or (pair.reference_record, pair.target_record) in visited
                    or not self.is_given(inner, pair)
                ):
                    continue
                visited.add((pair.reference_record, pair.target_record))
                differences.append((inner.scope, param_name(ref.slot), self.difference(pair)))
        return differences


def _first_of(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return f"{', '.join(names[:_LISTED])}{f' and {more} more' if more > 0 else ''}"
