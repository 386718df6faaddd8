"""Handles calls of dumps that hold outputs but not all inputs: each is judged against the worst
error before it.

Their inputs cannot be better than the worst of what was made before, and they may depend on all of
it: such a call is compared with that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from whence import judge
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.records import Call, Ref, Run, in_order
from whence.records.marks import Mark, has_mark
from whence.records.region import inwards
from whence.records.slots import is_input, is_written
from whence.results import SlotPair

_NOTHING = judge.PairError(0.0, exact=True)


class UnseenInputs:
    """Paired calls of the reference whose inputs at least one run does not show, or shows in part.

    calls: ids of calls with unknown inputs. worst_before: by call with unknown or partly shown
    inputs, the largest error that it may have received: of all earlier tensors if the inputs are
    unknown, else on the way to its inputs. ahead: by paired leaf, the largest error of all earlier
    tensors, whether it read them or not. equal_before: by paired leaf, the number of earlier
    tensors in float32, where all of them are equal; of equal ones at all where no order is known.
    """

    def __init__(self, errors: PairErrors) -> None:
        self._paired = paired = errors.paired
        self.errors = errors
        self._outputs_only = any(map(_outputs_only, (paired.reference, paired.target)))
        self.calls: set[int] = set()
        self.worst_before: dict[int, judge.PairError] = {}
        self.ahead: dict[int, judge.PairError] = {}
        self.equal_before: dict[int, int] = {}
        self._looked: dict[int, int] = {}
        largest = _Largest()
        for call in in_order(paired.calls):
            came_in = largest.on_the_way(call)
            if call.id not in paired.pair_of:
                if call.leaf:
                    largest.upto.update((ref.record, came_in) for ref in _written(call))
            elif call.leaf or self._is_untold(call):
                self._add(call, came_in, largest)
        unordered = (c.id for c in paired.calls if has_mark(c, Mark.UNORDERED))
        self.equal_before.update(dict.fromkeys(unordered, largest.equal))

    def _add(self, call: Call, came_in: judge.PairError, largest: _Largest) -> None:
        """Note what a paired call may have received. came_in: the largest error that it is known to
        have been given; largest: the largest errors before it.
        """
        slots = self._paired.slots_of(call.id).values()
        ahead = self.ahead[call.id] = _worse(came_in, largest.before(call))
        if not ahead.value:
            self.equal_before[call.id] = largest.equal
        is_untold = self._is_untold(call)
        if is_untold:
            self.calls.add(call.id)
            came_in = ahead
        if is_untold or any(
            self._paired.partly(slot) for slot in slots if is_input(slot.reference_slot)
        ):
            self.worst_before[call.id] = came_in
        written = [s for s in slots if call.leaf and is_written(s.reference_slot)]
        errors = list(map(self.errors.of, written))
        for slot, error in zip(written, errors, strict=True):
            largest.upto[slot.reference_record] = _worse(came_in, error)
        largest.add(call, errors)

    def _is_untold(self, call: Call) -> bool:
        """Whether the inputs of a call are not known.

        A backward pass starts from a loss, which is computed outside any module from the outputs of
        the forward pass and from data, which come with those of the model.
        """
        is_given = bool(call.slots("input"))
        if has_mark(call, Mark.INPUTS_UNKNOWN):
            return True
        if call.kind == "region" and (call.phase == "backward" or not is_given):
            return True
        return call.leaf and (call.kind == "label" or self._outputs_only) and not is_given

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


def _written(call: Call) -> Iterator[Ref]:
    yield from (*call.slots("output"), *call.slots("mutated"))


class _Largest:
    """The largest errors so far. upto: by record, on the way to it."""

    def __init__(self) -> None:
        self.upto: dict[int, judge.PairError] = {}
        self.equal = 0
        """Number of tensors in float32 so far that are equal."""
        self._step: dict[tuple[int, str], int] = {}
        # by process and root, in this step; logged: by the kernel that runs now, which has not yet
        # given its result
        self._worst: dict[tuple[int, str], judge.PairError] = {}
        self._logged: dict[tuple[int, str], judge.PairError] = {}
        # up to the call of this name, in steps before
        self._earlier: dict[tuple[int, str, str], judge.PairError] = {}

    def on_the_way(self, call: Call) -> judge.PairError:
        """The largest error on the way to the inputs of a call."""
        errors = (self.upto.get(ref.record, _NOTHING) for ref in call.slots("input"))
        return functools.reduce(_worse, errors, _NOTHING)

    def before(self, call: Call) -> judge.PairError:
        """The largest error of any tensor before a call, in its step or before."""
        whole = call.rank, call.root
        if self._step.get(whole) != call.step:
            self._step[whole], self._worst[whole] = call.step, _NOTHING
            self._logged[whole] = _NOTHING
        return _worse(self._worst[whole], self._earlier.get((*whole, call.scope), _NOTHING))

    def add(self, call: Call, errors: Iterable[judge.PairError]) -> None:
        """Note the errors of what a call wrote, after `before`."""
        whole, name = (call.rank, call.root), (call.rank, call.root, call.scope)
        errors = list(errors)
        u = judge.unit_roundoff("float32")
        self.equal += sum(e.u == u and e.inherited is not None and e.inherited <= u for e in errors)
        is_logged = has_mark(call, Mark.LOGGED)
        largest = self._logged if is_logged else self._worst
        largest[whole] = functools.reduce(_worse, errors, largest[whole])
        if not is_logged:
            self._worst[whole] = _worse(self._worst[whole], self._logged[whole])
        self._earlier[name] = _worse(self._earlier.get(name, _NOTHING), self._worst[whole])


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
