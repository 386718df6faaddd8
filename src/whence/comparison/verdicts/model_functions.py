"""Are two models the same function, whatever their rounding?

Where the target divides a model otherwise, much of the reference is replayed as one call, and an
error of a few times its rounding may be what all the operators inside round. In float64 nothing
rounds: there both models give the same, or they are different functions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.formulas import is_smooth, relative_distance
from whence.comparison.replays.self_check import Threads
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.wired import WiredReplay
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.stretch_replay import Outcome
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Ref, Region
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_input, is_output, is_written
from whence.results import (
    GUILTY,
    CauseKind,
    Confidence,
    Evidence,
    SlotPair,
    Verdict,
    VerdictKind,
)

Key = tuple[int, int]
"""Of a verdict: call of the reference and segment of it, -1 for a leaf."""
Hold = Callable[[Any, Call, str], Any]
Located = Callable[[Verdict, Region], Verdict]

_SAME_FUNCTION = 1e-9  # relative, of two ways to write one formula in float64
_WRITTEN_ANEW = 6.0  # times the target's own rounding that rounding computed parameters may leave
_MOST = 0.5  # of a difference that is left once its place is taken over
_CALLS = 2  # of one model that are asked
_PASSES = VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.AMPLIFIED
_OPEN = VerdictKind.UNDETERMINED, VerdictKind.INCOMPARABLE


class Exact(NamedTuple):
    """What both models give in float64 on the target's inputs, by record of each run. ran: the
    calls of each that ran.
    """

    reference: Mapping[int, Array]
    target: Mapping[int, Array]
    ran: tuple[Sequence[Call], Sequence[Call]]


class ModelFunctions:
    """Asks whether models whose inside was not judged operator by operator are one function.

    held: the parameters of a call of the reference, as a correct target holds them. located: names
    the call in which a verdict of code between calls belongs.
    """

    def __init__(
        self,
        errors: PairErrors,
        regions: Sequence[Region],
        sides: BothSides | None,
        held: Hold,
        located: Located,
    ) -> None:
        self._errors, self._paired = errors, errors.paired
        self._regions, self._sides = regions, sides
        self._held, self._located = held, located
        self._same_numbers: dict[tuple[int, ...], bool] = {}
        self._one_function: dict[int, Exact | None] = {}

    def judged(
        self, verdicts: Mapping[Key, Verdict], whole: Mapping[int, int]
    ) -> dict[Key, Verdict]:
        """The verdicts, with a fault where two models are not one function though every verdict
        inside passes. whole: calls that were replayed with calls inside, as
        `CallReplays.inside` has them.
        """
        out = dict(verdicts)
        asked = dict[str, int]()
        regions = {(r.call, r.stretch): r for r in self._regions}
        for root in self._roots():
            keys = [key for key in regions if key in verdicts and self._root(key[0]) == root.id]
            if asked.get(root.root, 0) >= _CALLS or not self._is_open(root, keys, verdicts, whole):
                continue
            asked[root.root] = asked.get(root.root, 0) + 1
            exact = self.exact(root, smooth=True)
            if exact is None or not self._is_apart(root, exact):
                continue
            if (blamed := self._blamed(root, keys, verdicts, exact)) is not None:
                key, verdict = blamed
                out[key] = self._located(verdict, regions[key])
        return out

    def _roots(self) -> Iterator[Call]:
        for call in self._paired.calls:
            is_model = call.parent < 0 and call.kind == "module" and call.phase == "forward"
            if is_model and not call.op and call.id in self._paired.pair_of:
                yield call

    def _root(self, number: int) -> int:
        while (parent := self._paired.calls[number].parent) >= 0:
            number = parent
        return number

    def _is_open(
        self,
        root: Call,
        keys: Sequence[Key],
        verdicts: Mapping[Key, Verdict],
        whole: Mapping[int, int],
    ) -> bool:
        """Whether a fault may hide in what passes: where something behind took a difference back
        within its rounding, where programs were put together, or where one run has calls that the
        other lacks, and a verdict rests on less than a replay of the operators there.
        """
        if any(verdicts[key].verdict in GUILTY for key in keys):
            return False
        if all(self._errors.of(pair).exact for pair in self._outputs(root)):
            return False
        is_form = VerdictKind.OTHER_FORM
        if any(verdicts[k].verdict == is_form or self._is_composed(k[0]) for k in keys):
            return True
        if not any(self._paired.alone(key[0]) for key in keys):
            return False
        return any(key[0] in whole for key in keys) or any(
            v.evidence == Evidence.TWO_DUMPS and v.verdict in (*_PASSES, *_OPEN)
            for v in map(verdicts.__getitem__, keys)
        )

    def _is_composed(self, number: int) -> bool:
        """Whether a call's program was put together from calls of operators."""
        program = self._paired.reference.programs.get(self._paired.calls[number].program)
        return program is not None and has_mark(program, Mark.COMPOSED)

    def _outputs(self, call: Call) -> list[SlotPair]:
        return [
            pair
            for pair in self._paired.slots_of(call.id).values()
            if is_output(pair.reference_slot)
        ]

    # ---- both models in float64

    def exact(self, call: Call, *, smooth: bool) -> Exact | None:
        """What a paired call and all that it calls give in float64 in both runs, on the target's
        inputs; None where that is not known. smooth: None also where code chooses or jumps.
        """
        if self._sides is None:
            return None
        partner = self._paired.pair(self._paired.pair_of[call.id]).partner
        own = {ref.slot: ref.record for ref in partner.slots("input")}
        side = self._sides.unmasked
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError, ValueError), Threads(1):
            reference = self._of_reference(call, {}, smooth=smooth)
            target = _Remembering(side, self._own_parameters, own, {}, smooth=smooth)
            target.of(partner, side.arrays(own)[0])
            return Exact(reference.computed, target.computed, (reference.ran, target.ran))
        return None

    def _of_reference(
        self, call: Call, patches: Mapping[int, Array], *, smooth: bool
    ) -> _Remembering:
        """A call of the reference in float64 on the target's inputs. patches: by record, tensors in
        the place of those that it computes. Raises ReplayRefused, ElementsMissing, KeyError.
        """
        assert self._sides is not None
        index = self._paired.pair_of[call.id]
        inputs = {
            slot: pair.target_record
            for slot in self._paired.slots[index]
            if is_input(slot)
            and (pair := self._paired.replayed(index, slot)) is not None
            and pair.target_record >= 0
        }
        records = {slot: call.by_slot[slot] for slot in inputs}
        replay = _Remembering(self._sides.reference, self._held, records, patches, smooth=smooth)
        replay.of(call, self._sides.target.arrays(inputs)[0])
        return replay

    def _own_parameters(self, loaded: Any, call: Call, working: str) -> Any:
        assert self._sides is not None
        side = self._sides.unmasked
        arrays, _ = side.arrays(side.records(call, loaded.program.params))
        return loaded.hold(arrays, working=working)

    # ---- what they say

    def _is_apart(self, root: Call, exact: Exact) -> bool:
        """Whether the outputs differ in float64 by more than a correct target may."""
        return any(self._score(pair, exact) > 1 for pair in self._outputs(root))

    def _score(self, pair: SlotPair, exact: Exact) -> float:
        """How far both models are apart at a tensor in float64, in units of what a correct target
        may be: of a fraction of a rounding where it holds the reference's numbers, else of what its
        own numbers may be rounded by. 0 where they cannot be compared.
        """
        own, error = self._own_rounding(pair, exact), _distance(pair, exact)
        u = judge.unit_roundoff(self._paired.target.records[pair.target_record].dtype)
        if own is None or error is None or not u:
            return 0.0
        difference = judge.formula_difference("", error, u, lambda: own, only_constants=False)
        if difference is None:
            return 0.0
        if self._hold_the_same(exact):
            return difference.score
        return min(difference.score, error / (_WRITTEN_ANEW * max(own, u / 2)))

    def _own_rounding(self, pair: SlotPair, exact: Exact) -> float | None:
        """How far the target's tensor is from what its own programs give in float64."""
        with contextlib.suppress(ElementsMissing):
            target, made = self._paired.target.array(pair.target_record), exact.target
            if pair.target_record in made and made[pair.target_record].shape == target.shape:
                return relative_distance(made[pair.target_record], target, None)
        return None

    def _hold_the_same(self, exact: Exact) -> bool:
        """Whether both models hold the same numbers in parameters and constants, in whatever order:
        one that was computed of others, or that the other model computes, was rounded.
        """
        assert self._sides is not None
        key = tuple(id(calls) for calls in exact.ran)
        if key not in self._same_numbers:
            records = self._paired.target.records
            params = (ref for call in exact.ran[1] for ref in call.slots("param"))
            kinds = {records[ref.record].dtype for ref in params}
            kind = max(
                filter(dtypes.is_floating, kinds), key=judge.unit_roundoff, default="float64"
            )
            of_reference = _numbers(self._sides.reference, exact.ran[0], kind)
            of_target = _numbers(self._sides.unmasked, exact.ran[1], kind)
            self._same_numbers[key] = np.array_equal(of_reference, of_target)
        return self._same_numbers[key]

    def _blamed(
        self, root: Call, keys: Sequence[Key], verdicts: Mapping[Key, Verdict], exact: Exact
    ) -> tuple[Key, Verdict] | None:
        """The first region whose results differ, and its verdict as that of a fault. Another form
        is passed by, unless it makes most of the difference at the outputs.
        """
        for key in keys:
            scores = {slot: self._score(pair, exact) for slot, pair in self._shown(*key)}
            slot = max(scores, key=lambda s: scores[s], default="")
            if not slot or not scores[slot] > 1:
                continue
            pair, is_form = dict(self._shown(*key))[slot], VerdictKind.OTHER_FORM
            if verdicts[key].verdict != is_form or self._makes_most(root, pair, exact):
                return key, self._fault(verdicts[key], slot, exact, pair)
        return None

    def _makes_most(self, root: Call, pair: SlotPair, exact: Exact) -> bool:
        """Whether the reference, given this tensor of the target, comes far closer to the target's
        outputs.
        """
        outputs = self._outputs(root)
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
            moved = exact._replace(reference=self._with(root, pair, exact))
            before, behind = (
                max((_distance(p, e) or 0.0 for p in outputs), default=0.0) for e in (exact, moved)
            )
            return behind < _MOST * before
        return False

    def _shown(self, number: int, stretch: int) -> Iterator[tuple[str, SlotPair]]:
        """The paired tensors at the end of a region, by slot as its verdict names them: what a call
        returns, or what its child there is given.
        """
        kids = self._paired.kids.get(number, ())
        is_before = 0 <= stretch < len(kids)
        end, prefix = (kids[stretch], f"{stretch}:") if is_before else (number, "")
        for pair in self._paired.slots_of(end).values():
            if is_input(pair.reference_slot) if is_before else is_output(pair.reference_slot):
                yield f"{prefix}{pair.reference_slot}", pair

    def _fault(self, verdict: Verdict, slot: str, exact: Exact, pair: SlotPair) -> Verdict:
        score, error = self._score(pair, exact), _distance(pair, exact) or 0.0
        is_certain = score >= judge.LIMITS.certain and math.isfinite(score)
        return verdict.replace(
            verdict=VerdictKind.INTRODUCED,
            evidence=Evidence.REPLAY,
            confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
            score=score,
            cause=CauseKind.SEMANTIC,
            slot=slot,
            numbers={**verdict.numbers, "formula": error},
            sentence="introduced here: in float64, on the same inputs, both models agree up to "
            f"here and give results {error:.2g} apart (the target's own rounding: "
            f"{self._own_rounding(pair, exact) or 0.0:.2g})",
        )

    # ---- suspects inside models that are one function

    def acquitted(
        self, pairs: Mapping[int, SlotPair], around: Iterable[int]
    ) -> tuple[Outcome, Call | None]:
        """What float64 says of a suspect that makes these tensors, and inside which call, the
        smallest of these that is one function in both runs and whose operators all give what the
        target recorded. In place: both make the same tensors; taken back: something behind makes
        up for other ones. around: calls around it, the smallest first.
        """
        for number in around:
            call = self._paired.calls[number]
            exact = self._as_one_function(call)
            if exact is None:
                continue
            if not pairs or not self._reproduces(exact.ran[1]):
                return Outcome.TRAVELS, None
            if all(_is_same(pair, exact) for pair in pairs.values()):
                return Outcome.IN_PLACE, call
            other = [pair for pair in pairs.values() if not _is_same(pair, exact)]
            with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError, ValueError):
                # A tensor that nothing reads cannot be taken back.
                if all(self._matters(call, pair, exact) for pair in other):
                    return Outcome.TAKEN_BACK, call
            return Outcome.TRAVELS, None
        return Outcome.TRAVELS, None

    def _matters(self, call: Call, pair: SlotPair, exact: Exact) -> bool:
        """Whether the reference's outputs change with this tensor of the target put into it. Raises
        ReplayRefused, ElementsMissing, KeyError.
        """
        moved = exact._replace(reference=self._with(call, pair, exact))
        return not all(_is_same(output, moved) for output in self._outputs(call))

    def _with(self, call: Call, pair: SlotPair, exact: Exact) -> Mapping[int, Array]:
        """What the reference makes inside a call with this tensor of the target put into it. Raises
        ReplayRefused, ElementsMissing, KeyError.
        """
        patches = {pair.reference_record: exact.target[pair.target_record]}
        return self._of_reference(call, patches, smooth=False).computed

    def _as_one_function(self, call: Call) -> Exact | None:
        """What both runs give in float64 inside a call that is one function in them, else None."""
        if call.id not in self._one_function:
            outputs, exact = self._outputs(call), self.exact(call, smooth=False)
            is_one = exact is not None and outputs and all(_is_same(p, exact) for p in outputs)
            self._one_function[call.id] = exact if is_one else None
        return self._one_function[call.id]

    def _reproduces(self, calls: Sequence[Call]) -> bool:
        """Whether the target's operators, run again, give what it recorded of each call."""
        assert self._sides is not None
        side = self._sides.unmasked
        try:
            return not any(side.confirm(call)[0] for call in calls if call.program)
        except (ReplayRefused, ElementsMissing):
            return False


def _distance(pair: SlotPair, exact: Exact) -> float | None:
    """How far both models are apart at a tensor, as relative 2-norm; None where it has no two."""
    f, g = exact.reference.get(pair.reference_record), exact.target.get(pair.target_record)
    if f is None or g is None or f.shape != g.shape:
        return None
    return relative_distance(f, g, None)


def _is_same(pair: SlotPair, exact: Exact) -> bool:
    distance = _distance(pair, exact)
    return distance is not None and distance <= _SAME_FUNCTION


def _numbers(side: ReplaySource, calls: Sequence[Call], kind: str) -> Array:
    """The numbers of the floating parameters and constants of these calls, each tensor once, in
    ascending order. kind: the dtype to which they are rounded.
    """
    records = set[int]()
    for call in calls:
        program = side.run.programs.get(call.program)
        records.update(ref.record for ref in call.slots("param"))
        records.update(program.constants if program is not None else ())
    contents = {side.run.records[n].hash or str(n): side.run.array(n) for n in records}
    floating = [a for a in contents.values() if dtypes.of(a).is_floating]
    rounded = [judge.rounded(a, kind).astype(np.float64).ravel() for a in floating]
    return np.sort(np.concatenate([np.zeros(0), *rounded]))


class _Remembering(WiredReplay):
    """A replay in float64 that keeps every tensor. computed: these, by record. patches: tensors
    that later calls read in the place of those. smooth: raise ReplayRefused for code that chooses
    among numbers or jumps.
    """

    def __init__(
        self,
        side: ReplaySource,
        held: Hold,
        inputs: Mapping[str, int],
        patches: Mapping[int, Array],
        *,
        smooth: bool,
    ) -> None:
        super().__init__(side, "float64", held, lenient=True)
        self._inputs, self._patches, self._smooth = inputs, patches, smooth
        self.computed: dict[int, Array] = {}
        self._chosen = set[int]()

    def of(self, call: Call, given: Mapping[str, Array]) -> None:
        """Run a call and those inside. Raises ReplayRefused, ElementsMissing, KeyError."""
        self.state.update((self._inputs[slot], array) for slot, array in given.items())
        results, records = self.run(call, given), call.by_slot
        self.computed.update((records[s], array) for s, array in results.items() if s in records)

    def run(self, call: Call, given_tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As `WiredReplay.run`."""
        if self._smooth and (self._chooses(call) or self._reads_chosen(call)):
            inside = (self.side.run.calls[k] for k in self.side.children(call.id))
            self._chosen.update(
                r.record for c in (call, *inside) for r in c.refs if is_written(r.slot)
            )
            raise ReplayRefused("code chooses, or its result jumps")
        return super().run(call, given_tensors)

    def _reads_chosen(self, call: Call) -> bool:
        is_one = not self.side.is_of_operators(call)
        return is_one and any(r.record in self._chosen for r in call.slots("input"))

    def lent(self, record: int | None) -> Array | None:
        """As `WiredReplay.lent`. What follows from a choice is no constant."""
        return None if record in self._chosen else super().lent(record)

    def outside(self, call: Call, ref: Ref) -> Array | None:
        """As `WiredReplay.outside`. What a module is given was computed, also where no call shows
        how: each run would go on with what it recorded, and the two hold other numbers.
        """
        return None if ref.record in self.side.handed else super().outside(call, ref)

    def _chooses(self, call: Call) -> bool:
        is_open = self.side.is_of_operators(call)
        is_one = not is_open or self.side.writes_views(call)
        whole = self.side.composed(call) if is_open and is_one else call
        if is_one and not is_smooth(self.side.trusted(whole).program):
            return True
        if not is_open:
            return False
        kids = (self.side.run.calls[k] for k in self.side.children(call.id))
        numbers = (k for k in kids if not any(is_written(r.slot) for r in k.refs))
        records = self.side.run.records
        return any(dtypes.is_floating(records[r.record].dtype) for k in numbers for r in k.refs)

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """As `WiredReplay.passing`."""
        records, passed = call.by_slot, dict(arrays)
        for slot, array in arrays.items():
            record = records.get(slot, -1)
            self.computed.setdefault(record, array)
            patch = self._patches.get(record)
            if patch is not None and patch.shape == array.shape:
                passed[slot] = patch
        return passed
