"""Does what is wrong at one place travel, or does something behind it take it back?

A difference is a fault if it travels. A stretch is a call with all that it calls; its ends are its
inputs and what it leaves. The reference's programs of a stretch run on the target's inputs twice:
plain, and patched, with the target's tensors in the place of what the suspect made. Where the
target's results are the plain ones, and the patched ones are not, something behind the suspect
takes it back: another form of the same computation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whence import align, dtypes, judge
from whence.comparison.replays.call_tree import REPLICAS
from whence.comparison.replays.formulas import relative_distance
from whence.comparison.replays.self_check import Threads
from whence.comparison.verdicts.channel_factors import (
    Changed,
    Uneven,
    changed_parameters,
    channel_order,
    factor_in_words,
    uneven_parameters,
)
from whence.comparison.verdicts.model_functions import ModelFunctions
from whence.comparison.verdicts.operator_steps import OperatorSteps
from whence.comparison.verdicts.own_inputs import CallsOnOwnInputs
from whence.comparison.verdicts.pair_errors import PairErrors
from whence.comparison.verdicts.regions import RegionJudge
from whence.comparison.verdicts.step_gradients import StepGradients
from whence.comparison.verdicts.stretch_replay import (
    WELL_WITHIN,
    Outcome,
    Stretch,
    StretchReplay,
    acquitted,
    is_told,
    moved_to,
)
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Region, Run
from whence.records.region import outwards
from whence.records.slots import (
    is_input,
    is_output,
    is_own_input,
    is_param,
    is_written,
    param_name,
    split_slot,
)
from whence.records.training import GRADIENTS, OPTIMIZER
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
Arrays = Mapping[int, Array]
"""Tensors by record of the reference."""

_SUSPECTS_PER_STRETCH = 24  # each costs one run of it
_HIDES = 0.5  # share of a layer's results beyond the largest code
_ENDS = 3  # calls behind a suspect that are asked whether it is taken back before them
_SUSPECTS_TOGETHER = 6  # of which one or two may run by the target's programs
_RIGHT_GRADIENTS = "the gradients that the optimiser takes are right"
_RIGHT_PARAMETERS = "the step takes it back, and the parameters that it leaves are right"
_FAR_OFF = 30.0  # times the limit by one copy that no further copies bring below it
_FAR = 0.5  # power of the unit roundoff that no clean stretch with equal inputs comes near
_CHANGED = VerdictKind.PARAM_DIFF, VerdictKind.OTHER_FORM


_STEP = (
    "the optimiser's step is written differently, and its parameters are not those that the "
    "reference's operators compute from the target's gradients"
)
_STEP_UNSEEN = "the optimiser's step is written differently, and its operators cannot be run again"


class Neighbourhoods:
    """Replays the stretches around every suspect and withdraws faults that do not travel."""

    def __init__(
        self,
        errors: PairErrors,
        regions: Sequence[Region],
        judge_of_regions: RegionJudge,
        before_alignment: tuple[Run, Run] | None,
    ) -> None:
        """before_alignment: both runs as captured, if alignment changed them; else None."""
        self._paired, self._errors = errors.paired, errors
        self._parameters = judge_of_regions.parameters
        self._regions = {(r.call, r.stretch): r for r in regions}
        replayer = judge_of_regions.replays.replayer
        self._steps = StepGradients(errors, judge_of_regions.replays)
        self.make_up_for_inputs = self._steps.make_up_for_inputs
        can_run = replayer is not None and (
            errors.paired.reference.programs or replayer.reference.model
        )
        self._sides = replayer.sides if replayer is not None and can_run else None
        self._own_inputs = (
            CallsOnOwnInputs(*before_alignment, self._sides.reference)
            if self._sides is not None and before_alignment is not None
            else None
        )
        self._operator_steps = (
            OperatorSteps(errors.paired, self._sides)
            if self._sides is not None and align.has_operators(self._sides.reference.run)
            else None
        )
        self.functions = ModelFunctions(
            errors,
            regions,
            self._sides,
            functools.partial(self._held, {}),
            judge_of_regions.located,
        )
        # Tensors without calls are judged along the whole of the reference already.
        self._shown_alone = judge_of_regions.sparse.calls
        self._stretches: dict[tuple[int, frozenset[int], int], Stretch] = {}
        self._suspects: list[int] = []
        self._asked: dict[int, int] = {}
        self._watched: frozenset[int] = frozenset()
        self._cut_off: list[int] = []  # layers most of whose results are the largest code

    def judged(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
        """The verdicts, without those of suspects that a stretch around them acquits."""
        suspects = [
            (key, verdict)
            for key, verdict in verdicts.items()
            if key in self._regions
            and key[0] not in self._shown_alone
            and verdict.verdict in (*GUILTY, VerdictKind.UNDETERMINED)
        ]
        if not suspects:
            return dict(verdicts)
        self._watched = frozenset(
            record for key, _ in suspects for record in self._regions[key].outputs
        )
        self._cut_off = [
            call
            for (call, _), v in verdicts.items()
            if (v.numbers.get("saturated") or 0.0) > _HIDES
        ]
        suspects.sort(key=lambda suspect: suspect[1].verdict == VerdictKind.UNDETERMINED)
        asked_of = (k for k, v in suspects if v.verdict in GUILTY or (k[1] >= 0 and not v.slot))
        self._suspects = list(dict.fromkeys(call for call, _ in asked_of))
        judged, standing = dict(verdicts), set[tuple[Any, ...]]()
        with Threads(1) if self._sides is not None else contextlib.nullcontext():
            for key, verdict in suspects:
                call = self._paired.calls[key[0]]
                module = call.root, call.scope, call.phase, call.op, key[1], verdict.verdict
                if module in standing:  # its calls are one finding, whatever others say
                    continue
                is_alone = not standing
                judged[key] = asked = self._after_asking(self._regions[key], verdict, is_alone)
                if asked.verdict in GUILTY:
                    standing.add(module)
            return self._with_uneven(judged | self._taken_back_before_others(judged))

    def _taken_back_before_others(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
        """Verdicts of the first suspects that are taken back before the next one, in a container
        whose results are wrong because of a later one. Empty if no suspect would be left: another
        reader of the tensor may then be what makes the results wrong.
        """
        guilty = [k for k, v in verdicts.items() if k in self._regions and v.verdict in GUILTY]
        forms: dict[Key, Verdict] = {}
        if self._sides is None or not 1 < len(guilty) <= _SUSPECTS_PER_STRETCH:
            return {}
        for key in sorted(guilty, key=lambda key: self._behind(self._regions[key])):
            region, verdict = self._regions[key], verdicts[key]
            for stretch in self._before_later_calls(region):
                outcome = self._outcome(region, verdict, stretch)
                if _takes_back(verdict) and stretch.left.keys() >= set(region.outputs):
                    outcome = Outcome.IN_PLACE
                if outcome in (Outcome.TAKEN_BACK, Outcome.IN_PLACE):
                    words = self._change_in_words(region, verdict, stretch)
                    kind = VerdictKind.OTHER_FORM
                    forms[key] = acquitted(verdict, kind, outcome, stretch, words)
                    break
            else:
                return forms  # this one is a fault, and what it leaves spoils what is behind
        return {}

    def _behind(self, region: Region) -> float:
        """The order from which on calls lie behind a region: that of its reader, which may be given
        what is right.
        """
        kids = self._paired.kids.get(region.call, ())[max(region.stretch, 0) :][:1]
        if region.stretch < 0:
            return self._paired.calls[region.call].order + 1
        return next((self._paired.calls[k].order for k in kids), math.inf)

    def _before_later_calls(self, region: Region) -> Iterator[Stretch]:
        """The clean stretches from the beginning of the containers around a region to what a later
        call inside is given.
        """
        order = self._behind(region)
        for number in self._paired_around(self._start(region)):
            kids = self._paired.kids.get(number, ())
            later = (k for k in kids if self._paired.calls[k].order >= order)
            ends = itertools.islice((k for k in later if k in self._paired.pair_of), _ENDS)
            stretches = (self._stretch(number, end=end) for end in ends)
            yield from (stretch for stretch in stretches if stretch.can_acquit)

    def with_steps(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
        """The verdicts, with one for each optimiser's step, captured as operators, whose different
        result nothing else explains.
        """
        out = dict(verdicts)
        steps = self._operator_steps.unexplained() if self._operator_steps is not None else ()
        guilty = {
            (c.root, c.step)
            for (number, _), v in verdicts.items()
            if v.verdict in GUILTY and (c := self._paired.calls[number]).phase == OPTIMIZER
        }
        with Threads(1) if self._sides is not None else contextlib.nullcontext():
            for number, is_known in steps:
                call = self._paired.calls[number]
                if (call.root, call.step) in guilty:
                    continue
                index = self._paired.pair_of[number]
                before = out.get((number, -1)) or Verdict(index, VerdictKind.IDENTICAL)
                out[number, -1] = before.replace(
                    verdict=VerdictKind.INTRODUCED if is_known else VerdictKind.UNDETERMINED,
                    confidence=Confidence.CERTAIN if is_known else Confidence.NONE,
                    evidence=Evidence.REPLAY if is_known else Evidence.TWO_DUMPS,
                    sentence=_STEP if is_known else _STEP_UNSEEN,
                )
        return out

    def cover(self, number: int) -> bool:
        """Whether a call of the reference that could not be measured is shown to be right: it lies
        inside a stretch with right results, or before a step that takes right gradients.
        """
        if self._steps.cover(self._paired.calls[number]):
            return True
        if self._sides is None:
            return False
        call, steps = self._paired.calls[number], self._operator_steps
        with Threads(1):
            if steps is not None and self._is_of_script(call):
                return steps.take_back(call)
            return any(stretch.is_clean for stretch in self._around(call.parent))

    def was_replayed(self, key: Key) -> bool:
        """Whether a stretch around this region was replayed with the reference's programs."""
        region = self._regions.get(key)
        if region is None or key[0] in self._shown_alone:
            return False
        return any(stretch.plain for stretch in self._around(self._start(region)))

    def _start(self, region: Region) -> int:
        """The id of the smallest call that contains a region's outputs."""
        is_leaf = region.stretch < 0
        return self._paired.calls[region.call].parent if is_leaf else region.call

    def _after_asking(self, region: Region, verdict: Verdict, is_alone: bool) -> Verdict:
        """The verdict of a suspect after the stretches around it were replayed. is_alone: whether
        no suspect before it was confirmed as a fault.
        """
        if verdict.cause == CauseKind.KERNEL:  # wrong by its own program, whatever comes behind
            return verdict
        if words := self._taken_back_at_step(region, verdict):
            kind = VerdictKind.OTHER_FORM
            return verdict.withdrawn(kind, f"another form: {words}; {verdict.sentence}")
        is_parameter = verdict.verdict == VerdictKind.PARAM_DIFF  # its reader may take it back
        start = region.call if is_parameter else self._start(region)
        if self._is_cut_otherwise(self._paired.calls[region.call], verdict):
            return verdict.withdrawn(
                VerdictKind.INHERITED,
                "the reference's programs give the target's results on its own inputs, before rows "
                f"and padding were aligned; {verdict.sentence}",
            )
        if verdict.verdict == VerdictKind.UNDETERMINED:
            clean = next((s for s in self._around(start) if s.is_clean), None)
            if clean is not None:
                return acquitted(verdict, VerdictKind.INHERITED, Outcome.NO_EFFECT, clean)
            if is_alone and (wrong := self._steps.wrong_behind(self._steps.call_of(region))):
                return verdict.replace(
                    verdict=VerdictKind.INTRODUCED,
                    confidence=Confidence.LIKELY,
                    sentence=f"introduced behind right forward passes: {wrong}",
                    # the loss of a part is not that of the whole
                    numbers={},
                )
            return verdict
        outcome, stretch = Outcome.UNKNOWN, None
        for stretch in self._clean_around(start, region.call):
            outcome = self._outcome(region, verdict, stretch)
            if outcome == Outcome.NO_EFFECT and _takes_back(verdict):
                outcome = Outcome.IN_PLACE
            if outcome in (Outcome.TAKEN_BACK, Outcome.IN_PLACE):
                words = self._change_in_words(region, verdict, stretch)
                return acquitted(verdict, VerdictKind.OTHER_FORM, outcome, stretch, words)
        if exact := self._as_functions(region, verdict, start):
            return exact
        if outcome == Outcome.NO_EFFECT and stretch is not None and stretch.pair.call.parent < 0:
            call, pairs = self._paired.calls[region.call], self._pairs_of(region, verdict).values()
            is_read = is_parameter or any(self._is_read(call, p.reference_slot) for p in pairs)
            if verdict.evidence == Evidence.TWO_DUMPS and pairs and not is_read:
                words = "another form: it differs here, where nothing reads it"
                return verdict.withdrawn(VerdictKind.OTHER_FORM, f"{words}; {verdict.sentence}")
            sentence = f"{verdict.sentence}; no effect at the outputs on these inputs"
            return verdict.replace(sentence=sentence)
        return verdict

    def _as_functions(self, region: Region, verdict: Verdict, start: int) -> Verdict | None:
        """The verdict of a suspect inside a call that both runs divide otherwise and that is one
        function in both; None where it stands. Only the size of an error may be rounding: other
        inputs, missing tensors and what is not finite have none.
        """
        is_sized = verdict.score is not None and math.isfinite(verdict.score)
        if verdict.verdict != VerdictKind.INTRODUCED or not is_sized or self._sides is None:
            return None
        # Nothing is known of what one run alone writes in place.
        around = (n for n in self._paired_around(start) if self._left(n) and self._paired.alone(n))
        outcome, call = self.functions.acquitted(self._pairs_of(region, verdict), around)
        if call is None:
            return None
        words = f"in float64 both runs are one function up to the end of {call.module_name}"
        if outcome == Outcome.IN_PLACE:
            words = f"{words}, and make the same here: its operators round more"
            return verdict.withdrawn(VerdictKind.PRECISION, f"{verdict.sentence}; {words}")
        words = f"another form: it differs here, is taken back, and {words}"
        return verdict.withdrawn(VerdictKind.OTHER_FORM, f"{words}; {verdict.sentence}")

    def _is_cut_otherwise(self, call: Call, verdict: Verdict) -> bool:
        """Whether a verdict rests on error growth between tensors that alignment cut, in a module
        that gives the target's results on the target's own, uncut inputs.
        """
        if (
            self._own_inputs is None
            or call.phase != "forward"
            or verdict.evidence != Evidence.TWO_DUMPS
            or verdict.cause  # it is known, as of a mask that the caller gave otherwise
            or verdict.verdict not in (VerdictKind.INTRODUCED, VerdictKind.UNDETERMINED)
        ):
            return False
        for around in outwards(self._paired.calls, call.id):
            is_own = around.id == call.id
            if around.id in self._paired.pair_of:
                pair = self._paired.pair(self._paired.pair_of[around.id])
                right = self._own_inputs.right(pair.call, pair.partner)
                is_whole = right is not None and any(map(is_output, right))
                if is_own and right and verdict.slot in right:
                    return True
                if is_whole and not (is_own and is_output(verdict.slot)):
                    return True
                if right is not None and not is_whole:
                    return False  # a later call in which the error drowns does not take it back
            if is_own and not self._is_read(call, verdict.slot):
                return False
        return False

    def _is_read(self, call: Call, slot: str) -> bool:
        """Whether the code around a call computes with this output or returns it."""
        if not is_output(slot) or call.parent < 0 or self._sides is None:
            return True
        k = self._paired.kids[call.parent].index(call.id)
        with contextlib.suppress(ReplayRefused):
            program = self._sides.reference.program(self._paired.calls[call.parent])
            return f"{k}:{slot}" in program.inputs
        return True

    def _taken_back_at_step(self, region: Region, verdict: Verdict) -> str:
        """What is right at each parameter's next step nevertheless, as words; "" if nothing is."""
        call = self._paired.calls[region.call]
        if self._operator_steps is not None and self._is_of_script(call):
            partner = self._paired.pair(verdict.pair).partner
            beside = self._paired.kids.get(call.parent, ())
            # A different setting of the same optimiser may change a step by less than rounding.
            is_set = call.arguments != partner.arguments and call.op == partner.op
            is_set &= all(number in self._paired.pair_of for number in beside)
            is_asked = call.phase != OPTIMIZER or verdict.evidence == Evidence.TWO_DUMPS
            is_asked |= not is_set
            return _RIGHT_GRADIENTS if is_asked and self._operator_steps.take_back(call) else ""
        call = self._steps.call_of(region)
        # The step judges its own gradients better than growth does, which knows one operator alone.
        is_shown = call.op == GRADIENTS and verdict.evidence == Evidence.TWO_DUMPS
        if (is_shown or self._steps.resolve(verdict)) and self._steps.take_back(call):
            return _RIGHT_GRADIENTS
        return _RIGHT_PARAMETERS if self._steps.make_up(call) else ""

    def _is_of_script(self, call: Call) -> bool:
        """Whether the call belongs to the training script rather than to a forward pass."""
        return call.phase != "forward" or "region" in (
            self._paired.calls[n].kind for n in (call.id, call.parent) if n >= 0
        )

    # ---- parameters that do not follow a change of others

    def _with_uneven(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, Verdict]:
        """The verdicts, with parameters at fault that did not follow a change of others. If a
        stretch is right once such a parameter is changed like them, it alone is the fault, and the
        other differing parameters of the stretch are another form of the same computation.
        """
        out, changed, guilty = dict(verdicts), dict[int, list[Changed]](), list[int]()
        modules = set[tuple[str, str, str, str]]()
        for (number, _), verdict in verdicts.items():
            call, kind = self._paired.calls[number], verdict.verdict
            if self._sides is None or call.phase != "forward" or kind not in _CHANGED:
                continue
            if (module := self._module(number)) in modules:  # it is called again
                continue
            modules.add(module)
            if own := changed_parameters(self._paired, call):
                changed[number] = own
                guilty += [number] if kind == VerdictKind.PARAM_DIFF else []
            if len(changed) > _SUSPECTS_PER_STRETCH:
                return out  # other weights, and no few that belong together
        every = [one for each in changed.values() for one in each]
        for number in guilty:
            call = self._paired.calls[number]
            for uneven in uneven_parameters(self._paired, call, every):
                inside = {self._module(c) for c in self._put_right(uneven, number, changed)}
                for key, verdict in verdicts.items():
                    here = self._module(key[0])
                    if verdict.verdict != VerdictKind.PARAM_DIFF or here not in inside:
                        continue
                    at_fault = verdict.replace(slot=uneven.slot, sentence=uneven.words)
                    if here == self._module(uneven.call):
                        out[key] = at_fault
                        continue
                    if key[0] == number:  # the parameter at fault is the reference's
                        out[uneven.call, -1] = at_fault.replace(
                            pair=self._paired.pair_of[uneven.call]
                        )
                    name = f"{param_name(uneven.slot)} of {self._paired.calls[uneven.call].scope}"
                    sentence = f"another form, once {name} is put right; {verdict.sentence}"
                    out[key] = verdict.withdrawn(VerdictKind.OTHER_FORM, sentence)
        return out

    def _module(self, number: int) -> tuple[str, str, str, str]:
        call = self._paired.calls[number]
        return call.root, call.scope, call.phase, call.op

    def _put_right(
        self, uneven: Uneven, number: int, changed: Mapping[int, Sequence[Changed]]
    ) -> list[int]:
        """The calls with changed parameters in the smallest stretch around a call that confirms an
        uneven parameter: with the target's parameters it gives the target's results, and with this
        parameter changed too it gives right ones. Empty if there is no such stretch.
        """
        for around in self._paired_around(self._paired.calls[number].parent):
            stretch = Stretch(self._paired.pair(self._paired.pair_of[around]), self._left(around))
            inside = [c for c in changed if self._is_inside(c, stretch)]
            if len(inside) > _SUSPECTS_TOGETHER or not stretch.left:
                return []
            with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
                target = self._paired.target
                patches = {
                    one.pair.reference_record: target.array(one.pair.target_record)
                    for c in inside
                    for one in changed[c]
                }
                if self._is_right_with(stretch, patches, {uneven.record: uneven.changed}):
                    return inside
        return []

    def _is_right_with(self, stretch: Stretch, own: Arrays, more: Arrays) -> bool:
        """Whether a stretch gives the target's results with the target's parameters (`own`), which
        are wrong, and right ones with `more` besides. Raises ReplayRefused, ElementsMissing,
        KeyError.
        """
        wide, working = self._dtypes(stretch)
        stretch.plain = self._replayed(stretch, wide, {}, None)[0]
        right = self._replayed(stretch, wide, {**own, **more}, None)[0]
        if self._is_apart(stretch, right):
            return False
        seeds = (None, *range(REPLICAS))
        stretch.copies = [self._replayed(stretch, working, {}, seed)[0] for seed in seeds]
        of_target = self._replayed(stretch, wide, own, None)[0]

        def are_right(results: Arrays) -> bool:
            return all(
                judge.whole(array, stretch.plain[r], [copy[r] for copy in stretch.copies]).score
                <= WELL_WITHIN
                for r, array in results.items()
            )

        return (
            self._score(stretch, of_target) <= 1 and are_right(right) and not are_right(of_target)
        )

    # ---- the stretches around a suspect

    def _clean_around(self, number: int, suspect: int) -> Iterator[Stretch]:
        """The stretches from this call outwards whose results are right, if need be with other
        suspects inside computed by the target's programs.
        """
        for stretch in self._around(number):
            if any(c != suspect and self._is_inside(c, stretch) for c in self._cut_off):
                return  # they hide what comes in
            if stretch.can_acquit:
                yield stretch
                continue
            inside = [c for c in self._suspects if c != suspect and self._is_inside(c, stretch)]
            if not inside or len(inside) > _SUSPECTS_TOGETHER:
                continue
            others = self._with_replaced(stretch, inside)
            yield from itertools.islice((s for s in others if s.can_acquit), 1)

    def _with_replaced(self, stretch: Stretch, inside: Sequence[int]) -> Iterator[Stretch]:
        """The stretch with each of these suspects computed by the target's program."""
        number = stretch.pair.call.id
        return (self._stretch(number, frozenset({call})) for call in inside)

    def _is_inside(self, number: int, stretch: Stretch) -> bool:
        return stretch.pair.call in outwards(self._paired.calls, number)

    def _around(self, number: int) -> Iterator[Stretch]:
        """The stretches from this call outwards, the smallest first; none without replay."""
        return map(self._stretch, self._paired_around(number) if self._sides is not None else ())

    def _paired_around(self, number: int) -> Iterator[int]:
        """The ids of this call and its ancestors that have a partner, innermost first."""
        around = (call.id for call in outwards(self._paired.calls, number))
        return (number for number in around if number in self._paired.pair_of)

    # ---- one stretch

    def _stretch(
        self, number: int, replaced: frozenset[int] = frozenset(), end: int = -1
    ) -> Stretch:
        """The stretch of a call, up to its end or to what the call `end` inside it is given."""
        key = number, replaced, end
        if key not in self._stretches:
            pair = self._paired.pair(self._paired.pair_of[number])
            left = self._left(number) if end < 0 else self._given(end)
            stretch = self._stretches[key] = Stretch(pair, left, replaced, end)
            if stretch.left and (replaced or not self._is_far(stretch)):
                self._run(stretch)
        return self._stretches[key]

    def _given(self, number: int) -> dict[int, SlotPair]:
        """The pairs of tensors that a call is given, by record of the reference."""
        return {
            slot.reference_record: slot
            for slot in self._paired.slots_of(number).values()
            if is_input(slot.reference_slot) and not is_own_input(slot.reference_slot)
        }

    def _left(self, number: int) -> dict[int, SlotPair]:
        """The pairs of tensors that a call leaves (outputs and buffers written in place), by record
        of the reference. Empty if the target lacks one, or if only one run writes a buffer.

        A cache is left out, since another form of the same computation may store other values in
        it; it counts where it is read. A tensor that an operator inside overwrites counts where its
        module shows it.
        """
        below, left = [number], {}
        while below:
            call = self._paired.calls[below.pop()]
            if call.id != number and call.kind == "operator":
                continue
            below += self._paired.kids.get(call.id, ())
            slots = self._paired.slots_of(call.id)
            if slots and self._written(call) != self._written(self._partner(call)):
                return {}
            refs = (
                call.slots("mutated")
                if call.id != number
                else (r for r in call.refs if is_written(r.slot))
            )
            for ref in refs:
                if align.is_cache(ref.slot):
                    continue
                if ref.slot in slots:
                    left[ref.record] = slots[ref.slot]
                elif call.id == number:
                    return {}
        return left

    def _partner(self, call: Call) -> Call:
        return self._paired.pair(self._paired.pair_of[call.id]).partner

    @staticmethod
    def _written(call: Call) -> set[str]:
        """The names of the buffers that a call writes in place, caches excepted."""
        held = {param_name(r.slot) for r in call.slots("param")}
        written = (split_slot(r.slot)[1] for r in call.slots("mutated"))
        return {slot for slot in written if slot in held and not align.is_cache(slot)}

    def _is_far(self, stretch: Stretch) -> bool:
        """Whether a stretch differs, on equal inputs, by too much for its results to be right."""
        slots = self._paired.slots[stretch.pair.index].values()
        inputs = [s for s in slots if is_input(s.reference_slot)]
        if not all(map(self._paired.is_equal, inputs)):
            return False
        errors = [self._errors.of(slot) for slot in stretch.left.values()]
        # A tensor of higher precision was computed together with the coarser ones.
        far = max((e.u for e in errors), default=0.0) ** _FAR
        return any((e.value or 0.0) > max(far, 1e-8) for e in errors)

    def _run(self, stretch: Stretch) -> None:
        """Replay a stretch without patches and score the target's results against it."""
        with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
            wide, working = self._dtypes(stretch)
            stretch.plain, stretch.computed = self._replayed(stretch, wide, {}, None)
            if stretch.replaced and self._is_apart(stretch, self._targets(stretch)):
                return  # one of several suspects
            for seed in (None, *range(REPLICAS)):
                left, computed = self._replayed(stretch, working, {}, seed)
                stretch.copies.append(left)
                stretch.copies_computed.append(computed)
                if seed is None and self._score(stretch, stretch.plain) > _FAR_OFF:
                    return  # noise would not make it clean
            stretch.score = self._score(stretch, stretch.plain)

    def _targets(self, stretch: Stretch) -> Arrays:
        """The target's tensors at the end of a stretch, by record of the reference. Raises
        ElementsMissing.
        """
        target = self._paired.target
        return {record: target.array(p.target_record) for record, p in stretch.left.items()}

    def _is_apart(self, stretch: Stretch, results: Arrays) -> bool:
        """Whether these results are too far from the wide replay for rounding to explain it."""
        far = max((self._errors.of(p).u for p in stretch.left.values()), default=0.0) ** _FAR
        return any(
            dtypes.of(wide := stretch.plain[record]).is_floating
            and wide.shape == target.shape
            and relative_distance(wide, target, None) > max(far, 1e-8)
            for record, target in results.items()
        )

    def _dtypes(self, stretch: Stretch) -> tuple[str, str]:
        slots = self._paired.slots[stretch.pair.index]
        inputs = {s: p for s, p in slots.items() if is_input(s)}
        produced = {str(record): array for record, array in self._targets(stretch).items()}
        outputs = {str(record): pair for record, pair in stretch.left.items()}
        assert self._sides is not None
        return self._sides.working_dtypes(inputs, outputs, produced)

    def _replayed(
        self, stretch: Stretch, working: str, patches: Arrays, seed: int | None
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """(outputs, watched tensors inside) of the reference's stretch on the target's inputs, by
        record. working: dtype to compute in; seed: of the noise, None without noise. Raises
        ReplayRefused, ElementsMissing, KeyError.
        """
        assert self._sides is not None
        call = stretch.pair.call
        inputs = {
            slot: pair
            for slot in self._paired.slots[stretch.pair.index]
            if is_input(slot)
            and (pair := self._paired.replayed(stretch.pair.index, slot)) is not None
        }
        arrays = {s: self._paired.target.array(p.target_record) for s, p in inputs.items()}
        replaced = {}
        for number in stretch.replaced:
            inner = self._paired.pair(self._paired.pair_of[number])
            replaced[number] = inner.partner, self._paired.slots[inner.index]
        chain = StretchReplay(
            self._sides,
            working,
            functools.partial(self._held, patches),
            noise=np.random.default_rng(seed) if seed is not None else None,
            state={p.reference_record: arrays[s] for s, p in inputs.items()},
            lenient=True,  # where the results are the target's all the same, the program served
            patches=patches,
            watched=self._watched.union(stretch.left),
            replaced=replaced,
        )
        results = chain.run(call, arrays)
        records = call.by_slot
        left = {record: chain.state[record] for record in stretch.left if record in chain.state}
        left |= {records[slot]: array for slot, array in results.items() if slot in records}
        left |= chain.computed if stretch.end >= 0 else {}
        if not left.keys() >= stretch.left.keys():
            raise ReplayRefused("what it leaves is not all made by calls that can be run again")
        return {record: left[record] for record in stretch.left}, chain.computed

    def _held(self, patches: Arrays, loaded: Any, call: Call, working: str) -> Any:
        """The parameters of a call inside a stretch, as a correct target would hold them."""
        assert self._sides is not None
        parameters = self._sides.parameters
        slots = self._paired.slots_of(call.id)
        records = self._sides.reference.records(call, loaded.program.params)
        is_initial = self._parameters.given(call, slots)

        def value(slot: str) -> Array:
            if records[slot] in patches:
                return patches[records[slot]]
            pair = slots.get(slot) or self._paired.parameter_around(call, slot)
            if pair is not None:
                return parameters.expected(pair, is_initial.get(slot, True))
            return self._paired.reference.array(records[slot])

        key = (
            loaded.program.id,
            "stretch",
            tuple(records.get(s) for s in loaded.program.params),
            working,
        )

        def hold() -> Any:
            return loaded.hold({s: value(s) for s in loaded.program.params}, working=working)

        return hold() if patches.keys() & set(records.values()) else parameters.hold(key, hold)

    def _score(self, stretch: Stretch, results: Arrays) -> float:
        """The largest error of the target's tensors at the end of a stretch against `results`, as a
        multiple of the limit; inf if shapes differ.
        """
        scores = []
        for record, pair in stretch.left.items():
            array = self._paired.target.array(pair.target_record)
            copies = moved_to(results[record], stretch.plain[record], stretch.copies, record)
            if array.shape != results[record].shape:
                return math.inf
            scores.append(judge.whole(array, results[record], copies).score)
        return max(scores)

    # ---- one suspect

    def _outcome(self, region: Region, verdict: Verdict, stretch: Stretch) -> Outcome:
        """What a stretch with right results shows about a suspect inside it."""
        parameter = self._parameter(region, verdict)
        shown = self._shown(region, verdict) or parameter
        if not shown or self._asked.setdefault(stretch.pair.index, 0) >= _SUSPECTS_PER_STRETCH:
            return Outcome.UNKNOWN
        self._asked[stretch.pair.index] += 1
        scores = {record: self._off(stretch, record, array) for record, array in shown.items()}
        other = {record: array for record, array in shown.items() if scores[record] > 1}
        is_right = max(scores.values()) <= WELL_WITHIN
        try:
            if self._matters(stretch, shown):
                is_each = self._is_each_taken_back(verdict, stretch, shown, other)
                return Outcome.TAKEN_BACK if is_each else Outcome.TRAVELS
            if is_right and parameter and self._matters(stretch, parameter):
                return Outcome.TAKEN_BACK  # by the code that reads it
        except (ElementsMissing, KeyError):
            return Outcome.UNKNOWN
        if is_right and verdict.evidence == Evidence.TWO_DUMPS and not verdict.cause:
            return Outcome.IN_PLACE  # a replay after all
        if other and all(self._is_in_another_order(stretch, *o) for o in other.items()):
            return Outcome.IN_PLACE
        is_relied_on = self._is_relied_on(region, stretch)
        return Outcome.TAKEN_BACK if is_relied_on else Outcome.NO_EFFECT

    def _is_relied_on(self, region: Region, stretch: Stretch) -> bool:
        """Whether the target's other calls rely on the suspect: the stretch is right with all calls
        around it computed by the target's programs, but not if the reference computes the suspect
        alone. The reference's later calls may hide this, e.g. an activation that is applied twice.
        """
        number, every = stretch.pair.call.id, {region.call}
        if stretch.end >= 0:
            return False
        for around in outwards(self._paired.calls, self._start(region)):
            every |= {around.id, *self._paired.kids.get(around.id, ())}
            every &= self._paired.pair_of.keys()
            # Else the target's programs do not serve here.
            if self._stretch(number, stretch.replaced | every).is_clean:
                reverse = self._stretch(number, stretch.replaced | (every - {region.call}))
                if bool(reverse.plain) and is_told(reverse.score, stretch.score):
                    return True
            if around.id == number:
                break
        return False

    def _is_each_taken_back(
        self, verdict: Verdict, stretch: Stretch, shown: Arrays, differing: Arrays
    ) -> bool:
        """Whether each tensor that differs from the reference's matters by itself. A tensor that
        nothing reads cannot be taken back. An exception is a tensor that is only in another channel
        order, as its parameter is.
        """
        is_parameter = verdict.verdict == VerdictKind.PARAM_DIFF
        return len(shown) == 1 or all(
            self._matters(stretch, {record: array})
            or (is_parameter and self._is_in_another_order(stretch, record, array))
            for record, array in differing.items()
        )

    def _is_in_another_order(self, stretch: Stretch, record: int, array: Array) -> bool:
        """Whether the array holds the reference's channels, each once, in another order."""
        made = stretch.computed.get(record)
        order = channel_order(made, array) if made is not None else None
        if made is None or order is None:
            return False
        copies = [copy[record][..., order] for copy in stretch.copies_computed if record in copy]
        return judge.whole(array, made[..., order], copies).score <= 1

    def _matters(self, stretch: Stretch, shown: Arrays) -> bool:
        """Whether the results of a clean stretch become wrong with these tensors put into it."""
        try:
            patched, _ = self._replayed(stretch, self._dtypes(stretch)[0], shown, None)
            return is_told(self._score(stretch, patched), stretch.score)
        except ReplayRefused:  # the plain run was not: these tensors lead elsewhere
            return True

    def _shown(self, region: Region, verdict: Verdict) -> dict[int, Array]:
        """The target's tensors for a region's outputs, by record of the reference. A tensor of
        another shape or kind cannot be used; the reference's own, rolled by one element, stands in
        for it and shows whether the output matters.
        """
        shown: dict[int, Array] = {}
        for record, pair in self._pairs_of(region, verdict).items():
            with contextlib.suppress(ElementsMissing):
                array = self._paired.target.array(pair.target_record)
                reference = self._paired.reference.array(record)
                fits = array.shape == reference.shape and (
                    dtypes.of(array).is_floating == dtypes.of(reference).is_floating
                )
                shown[record] = array if fits else np.roll(reference, 1)
        return shown

    def _parameter(self, region: Region, verdict: Verdict) -> dict[int, Array]:
        """The target's values of a differing parameter that a `PARAM_DIFF` verdict names, by record
        of the reference. If the target holds it in another shape or not at all, a clearly wrong
        value stands in, which shows whether the parameter matters. Empty for other verdicts.
        """
        if verdict.verdict != VerdictKind.PARAM_DIFF:
            return {}
        partner = self._paired.pair(verdict.pair).partner
        shown: dict[int, Array] = {}
        for number in (region.call, *self._paired.alone(region.call)):
            call = self._paired.calls[number]
            for ref in call.slots("param"):
                if not f".{verdict.slot}".endswith(f".{param_name(ref.slot)}"):
                    continue
                reference = self._paired.reference.array(ref.record)
                pair = self._paired.inner_parameter(partner, call, ref.slot)
                held = self._paired.target.array(pair.target_record) if pair else None
                if held is None or held.shape != reference.shape:
                    shown[ref.record] = 2 * np.roll(reference, 1)
                elif not np.array_equal(held, reference):
                    shown[ref.record] = held
        return shown

    def _pairs_of(self, region: Region, verdict: Verdict) -> dict[int, SlotPair]:
        """The pairs of a region's output tensors, by record of the reference."""
        numbers = [region.call]
        if region.stretch >= 0:
            numbers += self._paired.kids.get(region.call, ())[region.stretch :][:1]
        pairs = (
            pair
            for number in numbers
            for pair in self._paired.slots_of(number).values()
            if not is_param(pair.reference_slot)
        )
        outputs = {p.reference_record: p for p in pairs if p.reference_record in region.outputs}
        # Code that only passes tensors on in the reference may compute in the target.
        if outputs or not verdict.slot or is_param(verdict.slot):
            return outputs
        named = self._paired.slot(verdict.pair, verdict.slot)
        return {named.reference_record: named} if named is not None else {}

    def _change_in_words(self, region: Region, verdict: Verdict, stretch: Stretch) -> str:
        """The target's change in words: a factor if it is one, else "it differs here"."""
        for record, pair in self._pairs_of(region, verdict).items():
            computed = stretch.computed.get(record)
            with contextlib.suppress(ElementsMissing):
                target = self._paired.target.array(pair.target_record)
                if computed is not None and (words := factor_in_words(computed, target)):
                    return words
        return "it differs here"

    def _off(self, stretch: Stretch, record: int, array: Array) -> float:
        """The error of a tensor against the one that the replayed stretch computes for this record,
        as a multiple of the limit; inf if it computes none of this shape.
        """
        copies = stretch.copies_computed
        if record not in stretch.computed or any(record not in copy for copy in copies):
            return math.inf
        computed = stretch.computed[record]
        if any(a.shape != array.shape for a in (computed, *(copy[record] for copy in copies))):
            return math.inf
        around = moved_to(computed, computed, copies, record)
        return judge.whole(array, computed, around).score


def _takes_back(verdict: Verdict) -> bool:
    """Whether what a suspect leaves agrees far better than what it was given."""
    e_in, e_out = (verdict.numbers.get(name) or 0.0 for name in ("e_in", "e_out"))
    return judge.LIMITS.growth * e_out < e_in
