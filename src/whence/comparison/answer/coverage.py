"""How much of the reference was compared, and one verdict for each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import msgspec

from whence import align
from whence.comparison.verdicts.call_replays import CallReplays
from whence.records import Call, Program, Ref, Run, children, marks
from whence.records.marks import Mark
from whence.records.slots import is_input, is_mutated, is_written
from whence.results import Coverage, SlotPair, Verdict, VerdictKind, severity


class CallCoverage:
    """Counts which calls of the reference were compared.

    inside: by call, the number of unpaired calls that were compared as part of it. covered: records
    between compared tensors, which were replayed. covers: whether a call that was not measured is
    shown to be right by a stretch or a step around it.
    """

    def __init__(
        self, replays: CallReplays, covered: Set[int], covers: Callable[[int], bool]
    ) -> None:
        self.paired, self.errors = replays.paired, replays.errors
        self._replays, self._covered = replays, covered
        self._covers = covers
        self._unread = unread(self.paired.reference)
        self.inside = dict(replays.inside)
        for index, pair in enumerate(self.paired.plan.pairs):
            if self.paired.shows_no_inside(index, pair):
                self.inside[pair.reference] = len(self.paired.alone(pair.reference))

    def per_call(self, verdicts: Mapping[tuple[int, int], Verdict]) -> dict[int, str]:
        """One verdict per paired call: a leaf's own, or the worst of a container's segments."""
        worst: dict[int, str] = {}
        for (number, _), verdict in verdicts.items():
            old = worst.get(number)
            if old is None or severity(verdict.verdict) > severity(old):
                worst[number] = verdict.verdict
        for pair, slots in zip(self.paired.plan.pairs, self.paired.slots, strict=True):
            call = self.paired.calls[pair.reference]
            outputs = [s for s in slots.values() if is_written(s.reference_slot)]
            if call.id not in worst and (kind := self._by_tensors(call, slots, outputs)):
                worst[call.id] = kind
            if (
                outputs
                and all(
                    self.errors.of(s).value is None
                    and not self._is_replayed_otherwise(call, s.reference_slot)
                    for s in outputs
                )
                and worst[call.id] not in (VerdictKind.STRUCTURAL, VerdictKind.PARAM_DIFF)
            ):
                is_covered = self._covers(call.id)
                worst[call.id] = VerdictKind.OTHER_FORM if is_covered else VerdictKind.INCOMPARABLE
        return worst

    def _by_tensors(
        self, call: Call, slots: Mapping[str, SlotPair], outputs: Sequence[SlotPair]
    ) -> VerdictKind | None:
        """The verdict of a call that no stage judged, by its tensors; None without tensors."""
        if outputs:
            if not all(map(self.paired.is_equal, outputs)):
                return VerdictKind.INHERITED
            partly = any(map(self.paired.partly, outputs))
            return VerdictKind.UNDETERMINED if partly else VerdictKind.IDENTICAL
        if call.slots("output"):
            return VerdictKind.INCOMPARABLE
        is_equal = slots and all(map(self.paired.is_equal, slots.values()))
        return VerdictKind.IDENTICAL if is_equal else None

    def coverage(self) -> Coverage:
        """The numbers of calls that were compared, measured and replayed."""
        paired = self.paired
        passthrough = [c for c in paired.calls if c.id not in paired.pair_of and paired.hands_on(c)]
        whole = [c for c in paired.calls if marks.has_mark(c, Mark.PUT_TOGETHER)]
        left_out = {c.id for c in (*passthrough, *whole)}
        selected = [c for c in align.selected(paired.calls) if c.id not in left_out]
        ran_inside = {inner for number in self.inside for inner in paired.alone(number)}
        measured = {c.id for c in selected if c.id in paired.pair_of and self._outputs_known(c)}
        covered = {
            c.id
            for c in selected
            if c.id not in measured and c.id not in ran_inside and self._covers(c.id)
        }
        ends = (c for c in selected if c.parent == -1 and (c.kind != "region" or c.slots("output")))
        known = measured | covered
        root_ok = bool(paired.plan.pairs) and all(c.id in known for c in ends)
        handed_on = {r.record for c in passthrough for r in c.slots("output")}
        root_ok &= all(self._whole_known(call, handed_on) for call in whole)
        number = len(paired.plan.pairs) - sum(call.id in paired.pair_of for call in whole)
        inside, replayed, replayer = sum(self.inside.values()), 0, self._replays.replayer
        if replayer is not None:
            replayed = number - len(self._replays.not_replayed - {c.id for c in whole}) + inside
        programs = sum(
            bool(c.program or (replayer is not None and replayer.reference.borrows(c)))
            for c in selected
        )
        if not paired.measured:  # a dump without tensors
            measured, covered, root_ok = set(), set(), False
        beside = paired.left_out
        return Coverage(
            len(selected) + beside.calls,
            number + beside.calls,
            len(measured) + beside.calls,
            replayed + (beside.calls if replayer is not None else 0),
            programs + beside.programs,
            root_ok,
            inside,
            len(covered),
        )

    def _whole_known(self, call: Call, handed_on: Set[int]) -> bool:
        """Whether the outputs of a root that stands for a whole dump were measured.

        Outputs of operators that only pass a tensor on (`handed_on`) do not count: a dump may end
        with such an operator, which the other run lacks.
        """
        shortened = msgspec.structs.replace(
            call, refs=tuple(r for r in call.refs if r.record not in handed_on)
        )
        has_ends = bool(shortened.slots("output")) or not call.slots("output")
        return call.id in self.paired.pair_of and (not has_ends or self._outputs_known(shortened))

    def partly(self) -> int:
        """The number of output pairs of which only a part was printed."""
        slots = {
            (s.reference_record, s.target_record): s
            for table in self.paired.slots
            for s in table.values()
        }
        return sum(
            is_written(s.reference_slot) and bool(self.paired.partly(s)) for s in slots.values()
        )

    def _outputs_known(self, call: Call) -> bool:
        """Whether every output of a paired call that matters was measured."""
        slots = self.paired.slots_of(call.id)
        return all(
            self._is_known(call, ref, slots.get(ref.slot)) for ref in self._left(call, slots)
        )

    def _left(self, call: Call, slots: Mapping[str, SlotPair]) -> Sequence[Ref]:
        """What a paired call leaves and that has to be compared here."""
        # A tensor that a call changes in place and returns has two slots; a partner of one counts.
        covered = self._covered | {s.reference_record for s in slots.values()}
        refs = [
            r
            for r in _left_refs(call)
            if r.slot in slots
            or (r.record not in covered and not align.is_count_of_cache(self.paired.reference, r))
        ]
        used = [
            r
            for r in refs
            if r.slot in slots
            or (r.record not in self._unread and not self._was_joined(call, r.slot))
        ]
        # If the target keeps no cache, its content is compared in the calls that read it.
        has_cache = any(align.is_cache(s.reference_slot) for s in slots.values())
        others = [ref for ref in used or refs if has_cache or not align.is_cache(ref.slot)]
        return others or used or refs

    def _is_known(self, call: Call, ref: Ref, slot: SlotPair | None) -> bool:
        """Whether a tensor that a call leaves was measured, or judged otherwise."""
        if slot is not None:
            is_measured = self.errors.of(slot).value is not None and not self.paired.partly(slot)
            # An empty tensor, or a cache of another length, holds nothing to compare here.
            is_empty = self.paired.reference.records[ref.record].count == 0
            if is_measured or is_empty or self._has_other_form(slot):
                return True
        return self._is_replayed_otherwise(call, ref.slot)

    def _is_replayed_otherwise(self, call: Call, slot: str) -> bool:
        """Whether this output was judged by a replay on inputs that cannot be compared, and a
        replay of the code before the call judged these inputs.

        An example is an expert that gets other tokens because the scores that route them tie.
        """
        if slot not in self._replays.figures.get(call.id, {}) or call.parent < 0:
            return False
        slots = self.paired.slots_of(call.id).values()
        unknown = [
            s.reference_slot
            for s in slots
            if is_input(s.reference_slot) and self.errors.of(s).value is None
        ]
        place = self.paired.kids[call.parent].index(call.id)
        judged = self._replays.figures.get(call.parent, {})
        return bool(unknown) and all(f"{place}:{name}" in judged for name in unknown)

    def _has_other_form(self, slot: SlotPair) -> bool:
        """Whether the pair is a cache with different lengths (static, growing or a window). Its
        content is compared in the calls that read it.
        """
        reference, target = self.paired.records(slot)
        return align.is_cache(slot.reference_slot) and reference.shape != target.shape

    def _was_joined(self, call: Call, slot: str) -> bool:
        """Whether the slot is a cache that only one run has. Its content went into later calls,
        which are joined with this one.
        """
        partner = self.paired.pair(self.paired.pair_of[call.id]).partner
        is_cache = align.is_cache(slot) or is_mutated(slot)
        return is_cache and any(map(marks.is_gathered, (call, partner)))


def unread(run: Run) -> set[int]:
    """Records that a call returned or changed in place and that nothing reads: they are no input of
    a call, no container's own operators read them, and no root returns them.

    In a container without a program every child's output counts as read, since it is not known what
    the container does with it. An engine's graph, which consists of its nodes only, is an
    exception.
    """
    written: set[int] = set()
    read: set[int] = set()
    below = children(run.calls)
    for call in run.calls:
        outputs = _left(call)
        written.update(outputs.values())
        read.update(r.record for r in call.slots("input"))
        if call.parent == -1:
            read.update(outputs.values())
        kids = [run.calls[k] for k in below.get(call.id, ())]
        inside = {
            f"{k}:{slot}": record
            for k, kid in enumerate(kids)
            for slot, record in _left(kid).items()
        }
        program = run.programs.get(call.program)
        if program is None:
            if not _computes_in_calls_alone(call, kids):
                read.update(inside.values())
            continue
        used = _used(program)
        # A tensor that is only passed on counts as read if an outer call reads it, or if it is
        # passed on as another record.
        handed = outputs | {
            f"{k}:{r.slot}": r.record for k, kid in enumerate(kids) for r in kid.slots("input")
        }
        for slot, operand in program.outputs:
            source = program.inputs[operand["in"]] if "in" in operand else ""
            if source in inside and handed.get(slot) != inside[source]:
                used.add(source)
        read.update(record for slot, record in inside.items() if slot in used)
    return written - read


def _computes_in_calls_alone(call: Call, kids: Sequence[Call]) -> bool:
    """Whether a container computes nothing outside its children and their tensors are known."""
    is_graph = call.op_type in list(marks.EngineModel) or marks.has_mark(call, Mark.TAKEN_TOGETHER)
    return is_graph and all(kid.refs for kid in kids)


def _left_refs(call: Call) -> Sequence[Ref]:
    return *call.slots("output"), *call.slots("mutated")


def _left(call: Call) -> dict[str, int]:
    return {r.slot: r.record for r in _left_refs(call)}


def _used(program: Program) -> set[str]:
    """The input slots that the operations of a program read."""
    return {
        program.inputs[place]
        for operation in program.operations
        for kind, place in operation.operands()
        if kind == "in"
    }
