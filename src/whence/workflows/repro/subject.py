"""A finding whose runs are opened and paired again, as they were in the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whence.dtypes import Array
from whence.errors import ReplayRefused, UnreadableRun
from whence.records import Call, Program
from whence.records.slots import is_of_child, is_param
from whence.results import CallPair, Comparison, Finding, SlotPair, VerdictKind

if TYPE_CHECKING:
    from whence.comparison.paired_runs import PairedRuns
    from whence.comparison.replays.replayer import Replayer
    from whence.comparison.replays.side import ReplaySource


class NothingToRun(ReplayRefused):
    """A finding for which a script has nothing to run, however the runs were captured."""


@dataclass(frozen=True)
class Subject:
    """A finding with both of its calls. pair: their index in the plan."""

    finding: Finding
    paired: PairedRuns
    replayer: Replayer
    pair: int

    @property
    def reference_call(self) -> Call:
        return self.paired.calls[self.paired.plan.pairs[self.pair].reference]

    @property
    def target_call(self) -> Call:
        return self.paired.target.calls[self.paired.plan.pairs[self.pair].target]

    @property
    def reference_source(self) -> ReplaySource:
        return self.replayer.reference

    @property
    def target_source(self) -> ReplaySource:
        return self.replayer.sides.unmasked

    @property
    def is_of_reference(self) -> bool:
        """Whether the fault is in the reference; then its operators run on its own tensors."""
        return self.finding.side == "reference"

    def recorded(self, pair: SlotPair) -> Array:
        """The tensor that the side at fault recorded."""
        if self.is_of_reference:
            return self.paired.reference.array(pair.reference_record)
        return self.paired.target.array(pair.target_record)

    def judged_slots(self, program: Program) -> list[str]:
        """The outputs that the finding concerns."""
        slots = [slot for slot, _ in program.outputs]
        child, _, inner = self.finding.slot.rpartition(":")
        children = self.reference_source.children(self.reference_call.id)
        names = [c.scope.rpartition(".")[2] or c.op_type for c in map(self._call, children)]
        named = [f"{k}:{inner}" for k, name in enumerate(names) if child and name == child]
        for slot in (self.finding.slot, *named):
            if slot in slots:
                return [slot]
        return [s for s in slots if self.paired.slot(self.pair, s) is not None]

    def pair_of(self, call: int, slot: str, program_slot: str) -> SlotPair | None:
        """The pair of a slot, of the call or of an inner call.

        program_slot: the slot's name in the program of the whole call.
        """
        if call == self.reference_call.id:
            return self.paired.slot(self.pair, program_slot if is_of_child(program_slot) else slot)
        if call in self.paired.pair_of:
            return self.paired.slots[self.paired.pair_of[call]].get(slot)
        if is_param(slot):
            return self.paired.inner_parameter(self.target_call, self._call(call), slot)
        return None

    def _call(self, number: int) -> Call:
        return self.paired.calls[number]


def open_subject(compared: Comparison, finding: Finding, model: Any) -> Subject:
    """Open and pair the runs of a comparison again. Raises ReplayRefused, UnreadableRun."""
    from whence.comparison.verdicts.after_steps import AFTER_STEP

    paired, replayer = _paired_again(compared, model)
    index = finding.pair
    if not 0 <= index < len(compared.plan.pairs):
        raise ReplayRefused("it is about no pair of calls")
    if AFTER_STEP in finding.numbers:
        raise NothingToRun(
            "the code that changes the parameter after its step was not captured; look at what the "
            "program does between the optimiser's step and the next forward pass"
        )
    then = compared.plan.pairs[index]
    now = paired.plan.pairs[index] if index < len(paired.plan.pairs) else None
    if now is None or (now.reference, now.target) != (then.reference, then.target):
        raise UnreadableRun(
            f"{compared.reference} and {compared.target} are no longer paired as they were when "
            "they were compared; compare them again"
        )
    return Subject(finding, paired, replayer, _innermost(finding, paired, now))


def _innermost(finding: Finding, paired: PairedRuns, pair: CallPair) -> int:
    """The index of the pair that the finding names.

    A finding may concern a parameter of a paired inner call.
    """
    if finding.verdict == VerdictKind.PARAM_DIFF:
        above = paired.calls[pair.reference]
        key = (finding.name, above.root, above.step, above.rank, above.micro)
        for call, index in paired.pair_of.items():
            c = paired.calls[call]
            if (c.scope, c.root, c.step, c.rank, c.micro) == key:
                return index
    return finding.pair


def _paired_again(compared: Comparison, model: Any) -> tuple[PairedRuns, Replayer]:
    """Both runs of a comparison, paired as they were then."""
    from whence.comparison.paired_runs import PairedRuns
    from whence.comparison.prepare.whole_model import put_together
    from whence.comparison.replays import user_model
    from whence.comparison.replays.replayer import Replayer
    from whence.records.views import CachedRun
    from whence.workflows.reopen import reopened

    aligned, options = reopened(compared, user_model.read(model) if model is not None else None)
    reference, target = CachedRun(aligned.reference), CachedRun(aligned.target)
    plan = put_together(aligned.plan, reference.calls, target.calls)
    paired = PairedRuns(reference, target, plan, options, lambda *_: None)
    replayer = Replayer(
        reference,
        paired.target,
        paired=paired.pair_of,
        inner=paired.inner_parameter,
        pair_of=lambda call, slot: paired.slot(paired.pair_of[call.id], slot),
        allow=options.allow,
        model=options.model,
    )
    return paired, replayer
