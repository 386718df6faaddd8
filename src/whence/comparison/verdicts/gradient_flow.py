"""Finds tensors that have a gradient in one run only: the other run detaches them or freezes their
parameters.

A capture notes of every call of a training run which of its tensors have a gradient. The first
tensor, in the order of execution, of which only one run says so is where the code differs: it is
detached there, made without autograd, or frozen. What depends on it follows from that. A call whose
input has a gradient in both runs, and whose backward pass makes it in one run only, detaches it
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from whence.comparison.paired_runs import PairedRuns
from whence.records import Call, Run, children
from whence.records.region import inwards
from whence.records.slots import is_input, is_output, is_param, param_name
from whence.results import CauseKind, Confidence, Evidence, Verdict, VerdictKind

Verdicts = dict[tuple[int, int], Verdict]

_MADE, _GIVEN = "output.grad.", "input.grad."


def stopped(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, with a guilty one for each region that a gradient passes in one run only."""
    if not all(any(c.gradients for c in run.calls) for run in (paired.reference, paired.target)):
        return verdicts
    out = dict(verdicts)
    for root in paired.kids.get(-1, []):
        for verdict, call in _Flow(paired).differing(root):
            out[call, verdict.stretch] = verdict
    return out


class _Flow:
    """Compares which tensors have a gradient, over the paired calls of both runs."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired = paired
        self._blamed: set[int] = set()  # records that are detached, once for all that read them
        runs = paired.reference, paired.target
        self._sent = tuple(map(_Sent, runs))
        self._again = [
            {_at(c): c.gradients for c in run.calls if c.phase == "recompute"} for run in runs
        ]

    def differing(self, call: int) -> Iterator[tuple[Verdict, int]]:
        """(verdict, call) of the regions of a call, and of the calls below it, that pass a gradient
        on in one run only.
        """
        index = self._paired.pair_of.get(call)
        owner = self._paired.calls[call]
        if index is None or owner.phase != "forward" or not self._may_flow(index):
            return
        parameters = self._lone(index, is_param)
        if parameters:
            yield self._verdict(index, -1, parameters[0], _frozen(parameters)), call
        agrees = not self._lone(index, is_input) and not parameters
        kids = self._paired.kids.get(call, [])
        for place, kid in enumerate(kids):
            below = self._paired.pair_of.get(kid)
            if below is None:
                agrees = False
                continue
            inputs = self._lone(below, is_input)
            records = self._records(below, inputs)
            if inputs and agrees and not records & self._blamed:
                yield self._before(index, place, below, inputs[0]), call
            self._blamed |= records
            if not inputs:
                yield from self.differing(kid)
            agrees = agrees and not self._lone(below, is_output)
        outputs = self._lone(index, is_output)
        unused = [lone for lone in outputs if not self._arrives(index, *lone)]
        self._blamed |= self._records(index, unused)
        outputs = [lone for lone in outputs if lone not in unused]
        if agrees and not kids and (lost := self._swallowed(index)):
            yield lost, call
        if outputs and agrees:
            yield self._behind(index, len(kids) if kids else -1, outputs[0]), call

    def _swallowed(self, index: int) -> Verdict | None:
        """The verdict of a call whose backward pass returns the gradient of an input in one run
        only, although autograd saw the call and the input has a gradient; None for any other call.
        """
        calls = self._calls(index)
        if any(sent.of(call) is None for sent, call in zip(self._sent, calls, strict=True)):
            return None
        for pair in self._paired.slots[index].values():
            slots = pair.reference_slot, pair.target_slot
            if not is_input(slots[0]) or slots[0] not in self._gradients(index)[0]:
                continue
            made = [s.makes(c, x) for s, c, x in zip(self._sent, calls, slots, strict=True)]
            if made[0] != made[1]:
                run = "reference" if made[0] else "target"
                words = f"no gradient of {slots[0]} comes out of it: {_detached(run)} inside"
                return self._verdict(index, -1, (slots[0], run), words)
        return None

    def _gradients(self, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The slots with a gradient, of the reference's and of the target's call. A checkpoint may
        run a call without autograd and repeat it with autograd in the backward pass: then the slots
        of the repeated call count.
        """
        call, partner = self._calls(index)
        again, again_partner = self._again
        return (
            call.gradients or again.get(_at(call), ()),
            partner.gradients or again_partner.get(_at(partner), ()),
        )

    def _may_flow(self, index: int) -> bool:
        """Whether the two calls can be compared by their gradients. Gradients noted in both runs
        suffice. A container without any may exchange objects that a capture does not look into; a
        leaf with gradients in one run only may have a frozen parameter in the other.
        """
        has = [bool(slots) for slots in self._gradients(index)]
        return all(has) or self._calls(index)[0].leaf == any(has)

    def _arrives(self, index: int, slot: str, run: str) -> bool:
        """Whether the backward pass gives the call a gradient of this output, in the run where the
        output has one. It gives none if nobody uses the output, or if code created it with
        `requires_grad`, so that no operator lies behind it.
        """
        number = 0 if run == "reference" else 1
        call, sent = self._calls(index)[number], self._sent[number]
        if number:
            pairs = self._paired.slots[index].values()
            slot = next((p.target_slot for p in pairs if p.reference_slot == slot), slot)
        return sent.of(call) is None or sent.comes_to(call, slot)

    def _calls(self, index: int) -> tuple[Call, Call]:
        pair = self._paired.plan.pairs[index]
        return self._paired.calls[pair.reference], self._paired.target.calls[pair.target]

    def _lone(self, index: int, wanted: Callable[[str], bool]) -> list[tuple[str, str]]:
        """(slot, run) of the call's tensors, in wanted slots, with a gradient in one run only."""
        gradients, gradients_across = self._gradients(index)
        lone = []
        for slot in self._paired.slots[index].values():
            if not wanted(slot.reference_slot):
                continue
            has = slot.reference_slot in gradients, slot.target_slot in gradients_across
            if has[0] != has[1]:
                lone.append((slot.reference_slot, "reference" if has[0] else "target"))
        return lone

    def _records(self, index: int, lone: list[tuple[str, str]]) -> set[int]:
        slots = {slot for slot, _ in lone}
        return {
            pair.reference_record
            for pair in self._paired.slots[index].values()
            if pair.reference_slot in slots
        }

    def _before(self, index: int, place: int, below: int, lone: tuple[str, str]) -> Verdict:
        slot, run = lone
        kid = self._calls(below)[0]
        name = kid.module_name
        words = f"{slot} of {name} has a gradient in the {run} only: {_detached(run)} before it"
        return self._verdict(index, place, (f"{place}:{slot}", run), words)

    def _behind(self, index: int, stretch: int, lone: tuple[str, str]) -> Verdict:
        slot, run = lone
        words = f"{slot} has a gradient in the {run} only: {_detached(run)} here"
        return self._verdict(index, stretch, lone, words)

    def _verdict(self, index: int, stretch: int, lone: tuple[str, str], words: str) -> Verdict:
        return Verdict(
            index,
            VerdictKind.INTRODUCED,
            stretch=stretch,
            evidence=Evidence.PROGRAM,
            confidence=Confidence.CERTAIN,
            cause=CauseKind.SEMANTIC,
            sentence=words,
            slot=lone[0],
            reason=words,
        )


def _at(call: Call) -> tuple[object, ...]:
    return call.rank, call.root, call.scope, call.step, call.micro


class _Sent:
    """The records of a run for which the backward passes of its calls computed a gradient."""

    def __init__(self, run: Run) -> None:
        self._calls, self._kids = run.calls, children(run.calls)
        self._parts: dict[tuple[int, int], list[Call]] = {}  # by rank and order of forward calls
        for call in run.calls:
            if call.phase == "backward" and call.forward >= 0:
                self._parts.setdefault((call.rank, call.forward), []).append(call)
        self._known: dict[int, set[int] | None] = {}

    def _backward(self, call: Call) -> Iterator[tuple[Call, Call]]:
        """(call, part of its backward pass) of this call and of those below it."""
        for inner in (self._calls[number] for number in inwards(self._kids, call.id)):
            for part in self._parts.get((inner.rank, inner.order), ()):
                yield inner, part

    def of(self, call: Call) -> set[int] | None:
        """Records whose gradient the backward pass of this call, or of one below it, returned; None
        if none of these calls had a backward pass.
        """
        if call.id not in self._known:
            sent: set[int] | None = None
            for inner, part in self._backward(call):
                made = {ref.slot.removeprefix(_MADE) for ref in part.slots("output")}
                records = {ref.record for ref in inner.refs if ref.slot in made}
                sent = (sent or set()) | records
            self._known[call.id] = sent
        return self._known[call.id]

    def comes_to(self, call: Call, slot: str) -> bool:
        """Whether the backward pass of the call, or of one below it, receives a gradient of this
        output.
        """
        records = {ref.record for ref in call.refs if ref.slot == slot}
        for inner, part in self._backward(call):
            own = {ref.slot for ref in inner.refs if ref.record in records and is_output(ref.slot)}
            if any(ref.slot.removeprefix(_GIVEN) in own for ref in part.slots("input")):
                return True
        return False

    def makes(self, call: Call, slot: str) -> bool:
        """Whether the backward pass of the call, or of one below it, returns a gradient of this
        input.
        """
        records = {ref.record for ref in call.refs if ref.slot == slot}
        return bool(records & (self.of(call) or set()))


def _detached(run: str) -> str:
    return f"the {'target' if run == 'reference' else 'reference'} detaches it"


def _frozen(parameters: list[tuple[str, str]]) -> str:
    slot, run = parameters[0]
    other = "target" if run == "reference" else "reference"
    return f"`{param_name(slot)}` has a gradient in the {run} only: it is frozen in the {other}"
