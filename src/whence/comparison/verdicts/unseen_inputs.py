"""Handles calls of dumps that hold outputs but not all inputs: each is judged against the worst
error before it.

Their inputs cannot be better than the worst of what was made before, and they may depend on all of
it: such a call is compared with that.
"""

from __future__ import annotations

from whence import judge
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.records import Run, in_order, inwards
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_written
from whence.results import SlotPair

_NOTHING = judge.PairError(0.0, exact=True)


class UnseenInputs:
    """Paired calls of the reference whose inputs at least one run does not show, or shows in part.

    calls: ids of calls with unknown inputs. worst_before: by call with unknown or partly shown
    inputs, the largest error that it may have received: of all earlier tensors if the inputs are
    unknown, else on the way to its inputs. ahead: by paired leaf, the largest error of all earlier
    tensors, whether it read them or not.
    """

    def __init__(self, errors: PairErrors) -> None:
        paired = errors.paired
        outputs_only = any(_outputs_only(run) for run in (paired.reference, paired.target))
        self.calls: set[int] = set()
        self.worst_before: dict[int, judge.PairError] = {}
        self.ahead: dict[int, judge.PairError] = {}
        logged: dict[
            tuple[int, str], judge.PairError
        ] = {}  # by the kernel that runs now, which has not yet given its result
        worst: dict[tuple[int, str], judge.PairError] = {}  # by process and root, in this step
        earlier: dict[
            tuple[int, str, str], judge.PairError
        ] = {}  # up to the call of this name, in steps before
        upto: dict[int, judge.PairError] = {}  # by record, the largest on the way to it
        step: dict[tuple[int, str], int] = {}
        for call in in_order(paired.calls):
            index = paired.pair_of.get(call.id)
            came_in = _NOTHING
            for ref in call.slots("input"):
                came_in = _worse(came_in, upto.get(ref.record, _NOTHING))
            if index is None and call.leaf:
                upto.update(
                    (ref.record, came_in)
                    for kind in ("output", "mutated")
                    for ref in call.slots(kind)
                )
            # A backward pass starts from a loss, which is computed outside any module from the
            # outputs of the forward pass and from data, which come with those of the model.
            untold_region = call.kind == "region" and (
                call.phase == "backward" or not call.slots("input")
            )
            if index is None or not (
                call.leaf or has_mark(call, Mark.INPUTS_UNKNOWN) or untold_region
            ):
                continue
            whole, name = (call.rank, call.root), (call.rank, call.root, call.scope)
            if step.get(whole) != call.step:
                step[whole], worst[whole], logged[whole] = call.step, _NOTHING, _NOTHING
            untold = (call.kind == "label" or outputs_only) and not call.slots("input")
            untold = untold or has_mark(call, Mark.INPUTS_UNKNOWN) or untold_region
            if untold:
                self.calls.add(call.id)
            slots = paired.slots[index].values()
            read = [s for s in slots if is_input(s.reference_slot)]
            ahead = self.ahead[call.id] = _worse(
                came_in, _worse(worst[whole], earlier.get(name, _NOTHING))
            )
            if untold:
                came_in = ahead
            if untold or any(map(paired.partly, read)):
                self.worst_before[call.id] = came_in
            for slot in slots if call.leaf else ():
                if is_written(slot.reference_slot):
                    error = errors.of(slot)
                    largest = logged if has_mark(call, Mark.LOGGED) else worst
                    largest[whole] = _worse(largest[whole], error)
                    upto[slot.reference_record] = _worse(came_in, error)
            if not has_mark(call, Mark.LOGGED):
                worst[whole] = _worse(worst[whole], logged[whole])
            earlier[name] = _worse(earlier.get(name, _NOTHING), worst[whole])
        self._paired, self.errors = paired, errors
        self._looked: dict[int, int] = {}

    def within(self, call: int, stretch: int) -> list[judge.PairError]:
        """The errors of tensors made inside the children right before a stretch, for children whose
        own outputs the dump lacks.

        Call this in the order of stretches: each child is reported once.
        """
        kids = self._paired.kids.get(call, [])
        todo = [kid for kid in kids[self._looked.get(call, 0) : stretch] if not self._shown(kid)]
        self._looked[call] = stretch
        inside = (number for kid in todo for number in inwards(self._paired.kids, kid))
        return [self.errors.of(slot) for number in inside for slot in self._made(number)]

    def _shown(self, call: int) -> bool:
        return (
            not self._paired.kids.get(call)
            or call not in self._paired.pair_of
            or bool(self._made(call))
        )

    def _made(self, call: int) -> list[SlotPair]:
        slots = self._paired.slots_of(call).values()
        return [slot for slot in slots if is_written(slot.reference_slot)]


def _worse(first: judge.PairError, second: judge.PairError) -> judge.PairError:
    """The larger of two errors."""
    if second.value is None or second.value <= (first.value or 0.0):
        return first
    return judge.PairError(
        second.value, second.evidence, u=second.u, lone=second.lone, coarse=second.coarse
    )


def _outputs_only(run: Run) -> bool:
    """Whether no leaf call of this run has a recorded input."""
    return not any(call.leaf and call.slots("input") for call in run.calls)
