"""Replays the reference's programs on the target's inputs: figures of every output, with every
refusal counted by its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.prepare.masks import UnifiedMasks
from whence.comparison.replays.call_tree import TreeReplay, perturbed
from whence.comparison.replays.program_difference import (
    Parting,
    first_parting,
    only_operator,
    other_function,
    source_line,
    written_anew,
)
from whence.comparison.replays.program_difference import difference as program_difference
from whence.comparison.replays.semantics import PLAIN, FaultCause, ReplayResult, Semantics
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.threads import Threads
from whence.comparison.replays.tied_choices import I64, Choosing, Figures, run_options, settled
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Program, Run, marks
from whence.replay.composed import COMPOSED
from whence.replay.paddle_translation import TRANSLATED
from whence.results import SlotPair

if TYPE_CHECKING:
    from whence.comparison.replays.user_model import Models
    from whence.replay.choices import Choices

_PRINTED = "its tensors were printed to fewer digits than they have, which no replay repeats"
# Converted parameters kept for the next call of the same module; never the whole model at once.
_HELD_BYTES = 512 << 20
_OTHER_LIBRARY = (
    16  # terms of a sum that rounds as a correct kernel of another library may: 1.2 roundings
)
_DRAWS = 8  # of inputs a rounding apart, to see which values lie at the boundary between two codes
_REPLICAS = (
    3  # noisy repetitions of what lies inside a call that shows nothing (VERDICT.md level 3)
)

Slots = Callable[[str], SlotPair | None]


class _Params:
    """The parameters of one replayed call, converted once per working dtype and kept for the
    module's other calls.
    """

    def __init__(
        self,
        replayer: Replayer,
        loaded: Any,
        pairs: list[tuple[SlotPair, bool]],
        semantics: Semantics,
    ) -> None:
        self._replayer, self._loaded, self._pairs, self._semantics = (
            replayer,
            loaded,
            pairs,
            semantics,
        )
        self._key = (
            loaded.program.id,
            tuple((p.reference_record, p.target_record, given) for p, given in pairs),
        )

    def held(self, working: str) -> Any:
        """The parameters for `Loaded.run` with this working dtype."""
        stand_ins, records = self._semantics.params, self._replayer.reference.run.records

        def one(pair: SlotPair, given: bool) -> Array:
            if pair.reference_slot not in stand_ins:
                return self._replayer.parameter(pair, given)
            return self._semantics.param(
                pair.reference_slot, working, records[pair.reference_record].dtype
            )

        def make() -> Any:
            return self._loaded.hold(
                {p.reference_slot: one(p, given) for p, given in self._pairs}, working=working
            )

        return make() if stand_ins else self._replayer.hold((*self._key, working), make)


class Replayer:
    """Figures of calls from replay.

    Needs torch; without it every call is refused with the pip command. paired: calls of the
    reference that have a partner. inner: the parameter that faces one of a call without a partner.
    shown: the pair of a slot of a call that has one. allow: vendor namespaces whose operators may
    be run. spread: of a record of the reference, by how much each element differs between its runs
    (`Again.elementwise`). model: the user's, for calls of the reference without a usable program.
    """

    def __init__(
        self,
        reference: Run,
        target: Run,
        *,
        paired: Collection[int] = (),
        inner: Callable[[Call, Call, str], SlotPair | None] | None = None,
        shown: Callable[[Call, str], SlotPair | None] = lambda *_: None,
        allow: Sequence[str] = (),
        spread: Callable[[int], Array | None] = lambda _: None,
        model: Models | None = None,
    ) -> None:
        self.paired, self.inner, self.shown, self.spread = paired, inner, shown, spread
        self.reference, self.target = (
            ReplaySource(reference, allow, model),
            ReplaySource(target, allow),
        )
        # What the target itself ran had its masks in its own form.
        self.own = ReplaySource(target.base if isinstance(target, UnifiedMasks) else target, allow)
        self.refused: Counter[str] = Counter()
        self._held: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._held_bytes = 0

    def figures(
        self,
        call: Call,
        other: Call,
        slots: Slots,
        given: Mapping[str, bool],
        skip: Callable[[str, Sequence[str]], bool],
        semantics: Semantics = PLAIN,
        *,
        thorough: bool = False,
    ) -> ReplayResult:
        """Figures of one paired call, for every output of its program that the target has.

        slots: the pair of tensors that face each other in a slot of the program. given: parameter
        slots -> whether the run started with that value (then a correct target holds the
        reference's, rounded) or changed it (then the target's own value is an input like any
        other). skip: of an output and what it rests on, whether there is nothing to find out.
        semantics: what is declared of the call. thorough: with the working replay also where
        nothing comes near a limit.
        """
        with Threads(1):
            try:
                found = self._figures(call, other, slots, given, skip, semantics, thorough)
            except (ReplayRefused, ElementsMissing) as error:
                # A guard, an extent: there is a program, and it does not serve these inputs.
                if self.instead(call, str(error)):
                    return self.figures(
                        call, other, slots, given, skip, semantics, thorough=thorough
                    )
                found = ReplayResult(
                    refused={"": str(error)},
                    misrouted=error.slots if isinstance(error, _Misrouted) else {},
                )
        for slot, missing in found.assumed.items():
            if (
                slot in found.local and found.local[slot].score > 1
            ):  # it may as well have been given something else
                del found.local[slot]
                found.refused[slot] = f"the target has no tensor for {missing}"
        for why in set(found.refused.values()):
            self.refused[why] += 1
        return found

    def _figures(
        self,
        call: Call,
        other: Call,
        slots: Slots,
        given: Mapping[str, bool],
        skip: Callable[[str, Sequence[str]], bool],
        semantics: Semantics,
        thorough: bool,
    ) -> ReplayResult:
        loaded = self._loaded(call)
        if semantics.program is not None:
            loaded = self.reference.edited(semantics.program)
        program, found = loaded.program, ReplayResult(refused=dict(loaded.program.lost))
        faced = {
            slot: pair
            for slot in (*program.inputs, *program.params)
            if (pair := slots(slot)) is not None
        }
        if COMPOSED in program.notes:
            self._same_choices(call, loaded, faced)
        if any(
            map(
                self._is_print,
                (
                    *faced.values(),
                    *(pair for slot, _ in program.outputs if (pair := slots(slot)) is not None),
                ),
            )
        ):
            return ReplayResult(refused={"": _PRINTED})
        # A parameter that the target keeps in another form has no partner; what stands in for it
        # needs none.
        own = self.reference.records(
            call, [s for s in program.params if s in semantics.params and s not in faced]
        )
        faced |= {slot: SlotPair(slot, "", record, -1) for slot, record in own.items()}
        alone = self.reference.records(call, [s for s in program.inputs if s not in faced])
        lent = {
            slot: record
            for slot, record in alone.items()
            if self.reference.lent(record) is not None
        }
        inside = self._inside(call, program.inputs, faced)
        for one, two in program.same:
            self._still_one(one, two, slots)
        outputs: dict[str, SlotPair] = {}
        for slot, operand in program.outputs:
            pair = slots(slot)
            if pair is None:
                continue
            needs = loaded.needs(slot)
            missing = sorted(
                s for s in needs if s not in faced and s not in lent and s not in inside
            )
            if missing:
                found.refused[slot] = f"the target has no tensor for {missing[0]}"
            elif not skip(slot, needs) and not self._handed_on(
                operand, program.inputs, faced, pair
            ):
                outputs[slot] = pair
                given_to_it = sorted(s for s in needs if not s.startswith("param"))
                if given_to_it and not any(s in faced or s in inside for s in given_to_it):
                    found.assumed[slot] = given_to_it[0]
        if not outputs:
            return found
        inputs, strides = self.target.arrays(
            {s: faced[s].target_record for s in program.inputs if s in faced}
        )
        params = _Params(
            self,
            loaded,
            [(faced[s], given.get(s, True)) for s in program.params if s in faced],
            semantics,
        )
        produced = {
            slot: self.target.run.array(pair.target_record) for slot, pair in outputs.items()
        }
        chosen = self.working_dtypes(faced, outputs, produced)
        inputs |= {
            slot: array
            for slot, record in lent.items()
            if (array := self.reference.lent(record, chosen[1])) is not None
        }
        if any(inside & loaded.needs(slot) for slot in outputs):
            # What hangs in a cache is read by calls inside, not by this one's own operators.
            handed = {
                r.slot: pair
                for r in call.slots("input")
                if r.slot not in faced and (pair := slots(r.slot)) is not None
            }
            state = {
                pair.reference_record: self.target.run.array(pair.target_record)
                for pair in handed.values()
            }
            whole = _Whole(self, call, other, loaded, inputs, params, strides, state, *chosen)
            same = all(self._equal(pair) for pair in (*faced.values(), *handed.values()))
            whole.measure(
                found,
                produced,
                {slot: pair.reference_record for slot, pair in outputs.items()},
                same=same,
            )
            return found
        run = _Running(
            loaded,
            inputs,
            params,
            strides,
            produced,
            semantics,
            *chosen,
            lambda: self._integers(other),
        )
        r, otherwise = run.wide_or_routed()
        terms = loaded.length
        if TRANSLATED in program.notes:  # a kernel of another library may be off by a few roundings
            terms = max(terms, _OTHER_LIBRARY)
        reference = self._reference(call, loaded, faced, outputs, run)
        spread = {slot: self.spread(pair.reference_record) for slot, pair in outputs.items()}

        def figures(
            r: Mapping[str, Array], working: Mapping[str, Array], *, written_out: bool = False
        ) -> dict[str, judge.ReplayError]:
            return {
                slot: _measured(
                    slot,
                    y,
                    r[slot],
                    working[slot],
                    terms,
                    reference.get(slot),
                    spread[slot],
                    semantics,
                    written_out=written_out,
                )
                for slot, y in produced.items()
            }

        def highest(figures: Mapping[str, judge.ReplayError]) -> float:
            return max(local.score for local in figures.values())

        def in_units_of_rounding(r: Mapping[str, Array]) -> dict[str, judge.ReplayError]:
            found = figures(r, run.working())
            if highest(found) > judge.LIMITS.suspect:
                # A fused operator rounds once, a correct target may round in between: the noisier
                # of both floors counts.
                stepwise = figures(r, run.working(stepwise=True), written_out=True)
                found = {
                    slot: min(local, stepwise[slot], key=lambda item: item.score)
                    for slot, local in found.items()
                }
            return found

        if not thorough and semantics is PLAIN and _is_half(produced):
            # Against the wide replay rounded once, the least noise there can be: what passes that
            # passes the working replay too.
            once = figures(
                r, {slot: judge.rounded(r[slot], dtypes.of(y).name) for slot, y in produced.items()}
            )
            if highest(once) <= judge.LIMITS.suspect:
                found.local, found.quick = once, True
        if not found.quick:
            found.local = in_units_of_rounding(r)
        if run.choosing is not None and highest(found.local) > judge.LIMITS.suspect:

            def with_inherited_noise(r: Mapping[str, Array]) -> dict[str, judge.ReplayError]:
                measured = in_units_of_rounding(r)
                for seed in range(
                    _REPLICAS
                ):  # what it was given is off by a rounding each, which exp and sums enlarge
                    run.working(seed=seed)
                return measured

            found.local = with_inherited_noise(r)
            r, chosen_alike = run.choosing.figures(r, found.local, with_inherited_noise)
            found.local = dict(chosen_alike)
        for slot, local in found.local.items():
            if (
                local.integer_mismatch and dtypes.of(produced[slot]).bits == 8
            ):  # codes of values that lie at a boundary
                draws = [run.working(seed=seed)[slot] for seed in (None, *range(_DRAWS))]
                wrong = judge.beyond_boundaries(produced[slot], [r[slot], *draws])
                found.local[slot] = dataclasses.replace(
                    local, score=np.inf if wrong else 0.0, integer_mismatch=wrong
                )
        if highest(found.local) > judge.LIMITS.suspect and any(
            marks.is_gathered(c) for c in (call, other)
        ):
            # Kernels are chosen by extents, and these ran on others: what they may round is that of
            # inputs a rounding apart.
            copies = [run.working(seed=seed) for seed in (None, *range(_REPLICAS))]
            for slot, y in produced.items():
                elsewhere = judge.whole(y, r[slot], [c[slot] for c in copies])
                if elsewhere.score <= 1:
                    found.local[slot] = min(
                        found.local[slot], elsewhere, key=lambda item: item.score
                    )
        elif highest(found.local) > judge.LIMITS.suspect and marks.is_of_pieces(other):
            copies = [run.working(seed=seed) for seed in (None, *range(_REPLICAS))]
            found.local = {
                s: judge.steadier(one, produced[s], r[s], [c[s] for c in copies])
                for s, one in found.local.items()
            }
        if run.choosing is not None:
            found.local = run.choosing.said(found.local)
        if otherwise is not None and highest(found.local) > 1:
            raise otherwise
        return found

    def _integers(self, other: Call) -> list[I64]:
        """The whole numbers that the target's own program makes on its own inputs, as far as it
        runs.
        """
        from whence.replay.choices import Integers

        seen = Integers()
        with contextlib.suppress(ReplayRefused, ElementsMissing):
            loaded = self.own.load(other)
            arrays, strides = self.own.arrays(
                self.own.records(other, (*loaded.program.inputs, *loaded.program.params))
            )
            loaded.run(arrays, arrays, working="recorded", strides=strides, watch=seen)
        return seen.arrays

    def _same_choices(self, call: Call, loaded: Any, faced: Mapping[str, SlotPair]) -> None:
        """Raises ReplayRefused where integers inside a composed program are others on the target's
        inputs than on the reference's.

        Code that loops over experts or takes what a mask lets through looked at such numbers, and
        the operators that were recorded are those of the reference's.
        """
        slots = (*loaded.program.inputs, *loaded.program.params)
        mine, strides = self.reference.arrays(self.reference.records(call, slots))
        theirs, _ = self.target.arrays({s: faced[s].target_record for s in slots if s in faced})
        if mine.keys() != theirs.keys():
            return
        chosen: list[dict[int, Array]] = [{}, {}]
        for given, into in zip((mine, theirs), chosen, strict=True):
            if any(given[s].shape != mine[s].shape for s in mine):
                return
            loaded.run(given, given, working="recorded", strides=strides, trace=into.__setitem__)
        for place, one in chosen[0].items():
            if one.dtype.kind in "biu" and not np.array_equal(one, chosen[1].get(place, one)):
                name = loaded.program.operations[place].name
                raise ReplayRefused(
                    f"{name} chooses other elements on the target's inputs, and what the code "
                    "does then was not recorded"
                )

    def _is_print(self, pair: SlotPair) -> bool:
        """Was one of these tensors printed to fewer digits than its dtype holds?"""
        a, b = (
            self.reference.run.records[pair.reference_record],
            self.target.run.records[pair.target_record],
        )
        return judge.roundoff(a, b) > judge.coarser(a.dtype, b.dtype)

    def examined(self, call: Call, found: ReplayResult) -> ReplayResult:
        """What stands of a finding: nothing where the program is wrong about the reference too,
        unless the target agrees with it.
        """
        with Threads(1):
            for ran in (call, *found.ran):
                why, score = self.reference.confirm(ran)
                if not why:
                    continue
                agrees = (
                    found.local
                    and all(local.score <= 1 for local in found.local.values())
                    and not found.ran
                )
                if agrees and np.isfinite(score) and score > 1:
                    return dataclasses.replace(found, broken=score)
                self.refused[why] += 1
                return ReplayResult(refused={"": why})
        return found

    def instead(self, call: Call, why: str) -> bool:
        """Does the user's model stand for the call from now on, and did not before? why: its
        program cannot be used.
        """
        if self.reference.model is None or self.reference.borrows(call):
            return False
        with contextlib.suppress(ReplayRefused), Threads(1):
            self.reference.instead(call, why)
        return self.reference.borrows(call)

    def _loaded(self, call: Call) -> Any:
        """The call's program; also one that only a call of the reference itself contradicts, for
        `examined` to decide.
        """
        try:
            return self.reference.trusted(call)
        except ReplayRefused:
            with contextlib.suppress(
                ReplayRefused
            ):  # one that cannot be loaded; then the reason is the one above
                if (
                    call.program
                    and np.isfinite(score := self.reference.confirm(call)[1])
                    and score > 1
                ):
                    return self.reference.load(call)
            raise

    def _inside(self, call: Call, inputs: Sequence[str], faced: Collection[str]) -> set[str]:
        """The inputs that children without a partner leave: they run again too."""
        kids = self.reference.children(call.id)
        alone = {k for k, kid in enumerate(kids) if kid not in self.paired}
        return (
            {
                s
                for s in inputs
                if s not in faced and s[0].isdigit() and int(s.partition(":")[0]) in alone
            }
            if alone
            else set()
        )

    def _still_one(self, one: str, two: str, slots: Slots) -> None:
        """What a module was given and what it returned were one tensor: where the target's are not,
        which was used is unknown.
        """
        given, left = slots(one), slots(two)
        if given is None or left is None or given.target_record == left.target_record:
            return
        a, b = (self.target.run.records[p.target_record] for p in (given, left))
        if not a.hash or a.hash != b.hash or a.shape != b.shape:
            raise ReplayRefused(f"{two} was {one} itself in the reference and is not in the target")

    def _handed_on(
        self, operand: Any, inputs: Sequence[str], faced: Mapping[str, SlotPair], pair: SlotPair
    ) -> bool:
        """Is this output an input as it is, in the target as in the program?"""
        if "in" not in operand or inputs[operand["in"]] not in faced:
            return False
        records = self.target.run.records
        source, made = (
            records[faced[inputs[operand["in"]]].target_record],
            records[pair.target_record],
        )
        return (
            bool(source.hash)
            and source.hash == made.hash
            and source.dtype == made.dtype
            and source.shape == made.shape
        )

    def _reference(
        self,
        call: Call,
        loaded: Any,
        faced: Mapping[str, SlotPair],
        outputs: Mapping[str, SlotPair],
        run: _Running,
    ) -> dict[str, tuple[Array, Array | None]]:
        """(what the reference made, the wide replay on its inputs or None where they are the
        target's) by output, where known.
        """
        records = self.reference.records(call, (*loaded.program.inputs, *loaded.program.params))
        try:
            made, _ = self.reference.arrays(
                {slot: pair.reference_record for slot, pair in outputs.items()}
            )
            if all(self._equal(pair) for pair in faced.values()):
                return {slot: (array, None) for slot, array in made.items()}
            if run.wide_dtype == "float32" and all(
                dtypes.of(a).name in ("float32", "float64") for a in made.values()
            ):
                return {
                    slot: (a, a) for slot, a in made.items()
                }  # it was checked to reproduce its recording
            arrays, strides = self.reference.arrays(records)
            held = self.hold(
                (
                    loaded.program.id,
                    "own",
                    tuple(records.get(s) for s in loaded.program.params),
                    run.wide_dtype,
                ),
                lambda: loaded.hold(arrays, working=run.wide_dtype),
            )
            again = loaded.run(
                arrays, held, working=run.wide_dtype, strides=strides, outputs=list(outputs)
            )
        except (ReplayRefused, ElementsMissing):
            return {}
        return {
            slot: (made[slot], again[slot])
            for slot in outputs
            if again[slot].shape == made[slot].shape
        }

    def wide(self, program: Program, inputs: Slots) -> dict[str, Array]:
        """The outputs of a program without parameters on the target's inputs, in float64. Raises
        ReplayRefused, ElementsMissing.
        """
        faced = {
            slot: pair.target_record
            for slot in program.inputs
            if (pair := inputs(slot)) is not None
        }
        arrays, strides = self.target.arrays(faced)
        with Threads(1):
            made: dict[str, Array] = self.reference.edited(program).run(
                arrays, {}, working="float64", strides=strides
            )
        return made

    def _equal(self, pair: SlotPair) -> bool:
        if pair.target_record < 0:
            return False
        a, b = (
            self.reference.run.records[pair.reference_record],
            self.target.run.records[pair.target_record],
        )
        return bool(a.hash) and a.hash == b.hash and a.dtype == b.dtype and a.shape == b.shape

    def working_dtypes(
        self,
        faced: Mapping[str, SlotPair],
        outputs: Mapping[str, SlotPair],
        produced: Mapping[str, Array],
    ) -> tuple[str, str]:
        """(dtype of the wide replay, dtype of the working one) for what the target produced."""
        names = [dtypes.of(a).name for a in produced.values()]
        floating = [n for n in names if dtypes.named(n).is_floating]
        target = max(floating, key=judge.unit_roundoff, default="float32")
        finest = min(
            (judge.unit_roundoff(n) for n in floating), default=judge.unit_roundoff("float32")
        )
        pairs = [p for s, p in faced.items() if not s.startswith("param")] + list(outputs.values())
        recorded = {self.reference.run.records[p.reference_record].dtype for p in pairs}
        mine = {self.target.run.records[p.target_record].dtype for p in pairs}
        return "float32" if dtypes.is_half_roundoff(
            finest
        ) else "float64", "recorded" if recorded == mine else target

    # ---- parameters

    def parameter(self, pair: SlotPair, given: bool) -> Array:
        """What a correct target holds: the reference's value at the target's precision; its own
        where it is finer, or was changed.

        Where the target's is empty, packed away by an engine, the reference's stands in.
        """
        ours, theirs = (
            self.reference.run.records[pair.reference_record].dtype,
            self.target.run.records[pair.target_record].dtype,
        )
        if not self.target.run.records[pair.target_record].count:
            return judge.rounded(self.reference.run.array(pair.reference_record), theirs)
        if not given or judge.unit_roundoff(theirs) < judge.unit_roundoff(ours):
            return self.target.run.array(pair.target_record)
        return judge.rounded(self.reference.run.array(pair.reference_record), theirs)

    def hold(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Converted parameters by key, made when they are not there; the oldest are let go."""
        cache = self._held
        found = cache.get(key)
        if found is not None:
            cache.move_to_end(key)
            return found[0]
        held = make()
        nbytes = sum(t.nbytes for t in held.tensors.values())
        cache[key] = (held, nbytes)
        self._held_bytes += nbytes
        while self._held_bytes > _HELD_BYTES and len(cache) > 1:
            _, (_, freed) = cache.popitem(last=False)
            self._held_bytes -= freed
        return held

    # ---- why a flagged operator is at fault

    def cause(self, call: Call, other: Call, slots: Slots, flagged: Sequence[str]) -> FaultCause:
        """The cause of an introduced error whose parameters are equal. flagged: the outputs in
        question.

        The target's own program on its own inputs: where it gives what the target recorded (within
        rounding), the kernel does what the code says, so the code differs (`semantic`); where it
        does not, the kernel is at fault.
        """
        if not other.program:
            # The reference could be replayed, so it drew none.
            random = other.no_program.startswith("draws random numbers")
            return (
                FaultCause("semantic", f"only the target {other.no_program}")
                if random
                else FaultCause()
            )
        words = ""
        try:
            theirs, borrowed = self.own.program(other), self.reference.borrows(call)
            mine = self.reference.program(call) if not borrowed else None
            anew = mine is not None and written_anew(mine, theirs)
            words = program_difference(mine, theirs) if mine is not None and not anew else ""
            outputs = [pair.target_slot for slot in flagged if (pair := slots(slot)) is not None]
            outputs = [s for s in outputs if s in dict(theirs.outputs)] or [
                s for s, _ in theirs.outputs
            ]
            with Threads(1):
                score, wide, right = own_score(self.own, other, outputs)
                if score > 1:
                    alone = only_operator(theirs)
                    what = (
                        f"the target's own operators ({alone})"
                        if alone
                        else "the target's own operators"
                    )
                    source = source_line(
                        other,
                        theirs,
                        next((i for i, op in enumerate(theirs.operations) if op.name == alone), -1),
                    )
                    return FaultCause(
                        "kernel",
                        f"{what}, run again on its own inputs, do not give what it recorded",
                        alone,
                        source,
                    )
                if mine is None:
                    parting = Parting()
                elif anew:
                    parting = other_function(mine, theirs)
                else:
                    parting = self._parting(call, slots, flagged, theirs, right, wide)
        except (ReplayRefused, ElementsMissing, KeyError, ValueError):
            return FaultCause("", words)
        because = "; ".join(w for w in (words, parting.words) if w)
        return FaultCause(
            "semantic",
            because
            or "the target's own operators reproduce it, so its code computes something else",
            parting.operator,
            source_line(other, theirs, parting.place),
        )

    def _parting(
        self,
        call: Call,
        slots: Slots,
        flagged: Sequence[str],
        theirs: Program,
        right: Mapping[int, Array],
        wide: str,
    ) -> Parting:
        """Where the reference's program, on the target's inputs, first gives something else than
        the target's own (`right`).
        """
        loaded = self.reference.load(call)
        mine = loaded.program
        faced = {
            slot: pair for slot in (*mine.inputs, *mine.params) if (pair := slots(slot)) is not None
        }
        arrays, strides = self.target.arrays({s: pair.target_record for s, pair in faced.items()})
        left: dict[int, Array] = {}
        try:
            loaded.run(
                arrays,
                arrays,
                working=wide,
                strides=strides,
                outputs=list(flagged),
                trace=left.__setitem__,
            )
        except ReplayRefused:
            return Parting()
        return first_parting(mine, theirs, left, right, 1e-9 if wide == "float64" else 1e-4)


def own_score(
    side: ReplaySource, call: Call, outputs: Sequence[str]
) -> tuple[float, str, dict[int, Array]]:
    """How far what a call recorded is from its own program on its own inputs, over the limit; above
    1 it is not what the program says.

    Also the dtype of the wide replay and what that computed, by operation. Raises ReplayRefused,
    ElementsMissing.
    """
    loaded = side.load(call)
    program = loaded.program
    arrays, strides = side.arrays(side.records(call, (*program.inputs, *program.params)))
    made, _ = side.arrays(side.records(call, outputs))
    wide = (
        "float32"
        if dtypes.is_half_roundoff(
            min(judge.unit_roundoff(dtypes.of(a).name) or 1.0 for a in made.values())
        )
        else "float64"
    )
    right: dict[int, Array] = {}
    r = loaded.run(
        arrays, arrays, working=wide, strides=strides, outputs=list(made), trace=right.__setitem__
    )
    score = 0.0
    for stepwise in (False, True):
        w = loaded.run(
            arrays,
            arrays,
            working="recorded",
            strides=strides,
            outputs=list(made),
            stepwise=stepwise,
        )
        figures: Figures = {
            s: judge.local(y, r[s], w[s], written_out=stepwise)
            for s, y in made.items()
            if r[s].shape == y.shape
        }
        run = functools.partial(
            loaded.run, arrays, arrays, strides=strides, outputs=list(made), stepwise=stepwise
        )
        figures = settled(loaded, made, run, wide, figures)
        found = max((local.score for local in figures.values()), default=0.0)
        score = min(score, found) if stepwise else found
        if score <= 1:
            break
    return score, wide, right


class _Misrouted(ReplayRefused):
    """A program that does not serve the target's inputs, since another choice, which no tie
    explains, gave calls inside other extents.
    """

    def __init__(self, why: str, slots: dict[str, str]) -> None:
        super().__init__(why)
        self.slots = slots


class _Running:
    """One call's program on the target's inputs, in the dtypes that are needed."""

    def __init__(
        self,
        loaded: Any,
        inputs: Mapping[str, Array],
        params: _Params,
        strides: Mapping[str, tuple[int, ...]],
        produced: Mapping[str, Array],
        semantics: Semantics,
        wide: str,
        working: str,
        proposed: Callable[[], list[I64]],
    ) -> None:
        self._lenient = False
        self._loaded, self._inputs, self._params, self._strides = loaded, inputs, params, strides
        self._produced, self._semantics = produced, semantics
        self.wide_dtype, self.working_dtype = wide, working
        self.choosing = None
        if loaded.chooses:
            self.choosing = Choosing(
                loaded.program, produced, lambda choices: self._run(wide, choices=choices), proposed
            )

    def wide_or_routed(self) -> tuple[Mapping[str, Array], ReplayRefused | None]:
        """The wide replay; where another choice among ties gives the program other extents than it
        was recorded with, as that gives.

        Also the refusal that is raised instead where the target is not what that gives: then it
        proves nothing.
        """
        try:
            return self.wide(), None
        except ReplayRefused as refused:
            if self.choosing is None:
                raise
            self._lenient = True
            if self.choosing.looked(self.working):
                with contextlib.suppress(ReplayRefused):
                    return self.wide(), refused
            if slots := self._misrouted():
                raise _Misrouted(str(refused), slots) from refused
            raise

    def _misrouted(self) -> dict[str, str]:
        """Outputs of another extent than the program gives them, as far as it runs, by more rows
        than there are ties.
        """
        from whence.replay.choices import Extents

        extents, most = Extents(), self.choosing.tied_rows() if self.choosing is not None else 0
        with contextlib.suppress(ReplayRefused):
            self._loaded.run(
                self._inputs,
                self._params.held(self.wide_dtype),
                working=self.wide_dtype,
                strides=self._strides,
                outputs=list(self._produced),
                convert=False,
                lenient=True,
                watch=extents,
            )
        out: dict[str, str] = {}
        for slot, operand in self._loaded.program.outputs:
            place, number = operand.get("op", (-1, 0))
            if slot not in self._produced or place not in extents.shapes:
                continue
            mine, theirs = extents.shapes[place][number], self._produced[slot].shape
            if (
                len(mine) == len(theirs) > 0
                and mine[1:] == theirs[1:]
                and abs(mine[0] - theirs[0]) > most
            ):
                ties = f"scores tie in {most} rows" if most else "no scores tie"
                out[slot] = (
                    f"{theirs[0]} rows, where the reference's operators give {mine[0]} on the "
                    f"same inputs; {ties}"
                )
        return out

    def wide(self) -> Mapping[str, Array]:
        return self.choosing.wide() if self.choosing is not None else self._run(self.wide_dtype)

    def working(self, *, stepwise: bool = False, seed: int | None = None) -> dict[str, Array]:
        """In the target's dtypes; with a seed, on inputs that are off by up to a rounding each."""
        choices = self.choosing.for_working() if self.choosing is not None else None
        try:
            return self._run(self.working_dtype, stepwise=stepwise, seed=seed, choices=choices)
        except ReplayRefused:
            if self.working_dtype in ("recorded", self.wide_dtype):
                raise
            # Mixed dtypes inside: computed in float32 and rounded once at the end.
            return self._run("float32", stepwise=stepwise, seed=seed, choices=choices)

    def _run(
        self,
        dtype: str,
        *,
        stepwise: bool = False,
        seed: int | None = None,
        choices: Choices | None = None,
    ) -> dict[str, Array]:
        held, outputs, given = self._params.held(dtype), list(self._produced), self._inputs
        if seed is not None:
            noise = np.random.default_rng(seed)
            given = {slot: perturbed(array, dtype, noise) for slot, array in given.items()}

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            made: dict[str, Array] = self._loaded.run(
                inputs,
                held,
                working=dtype,
                strides=self._strides,
                stepwise=stepwise,
                outputs=outputs,
                convert=False,
                **run_options(choices, lenient=self._lenient),
            )
            return made

        return self._semantics.run(run, given, dtype, self._produced)


class _Between(TreeReplay):
    """Calls without a partner run again; of those inside them that have one, what the target made
    goes on.
    """

    def __init__(
        self,
        replayer: Replayer,
        working: str,
        held: Callable[[Any, Call, str], Any],
        **options: Any,
    ) -> None:
        super().__init__(replayer.reference, working, held, **options)
        self._replayer = replayer

    def run(self, call: Call, given: Mapping[str, Array]) -> dict[str, Array]:
        """What `call` leaves. Raises ReplayRefused."""
        shown = self._shown(call) if call.id in self._replayer.paired else {}
        own = {r.slot: r.record for r in call.refs}
        self.state.update(
            (own[slot], array) for slot, array in shown.items() if slot.startswith("mutated")
        )
        return (
            shown
            if shown and shown.keys() >= set(self.side.left(call))
            else super().run(call, given) | shown
        )

    def _shown(self, call: Call) -> dict[str, Array]:
        reference, target = self._replayer.reference.run, self._replayer.target.run
        pairs = {
            slot: pair
            for slot in self.side.left(call)
            if (pair := self._replayer.shown(call, slot)) is not None
        }
        return {
            slot: target.array(pair.target_record)
            for slot, pair in pairs.items()
            if reference.records[pair.reference_record].shape
            == target.records[pair.target_record].shape
        }


class _Whole:
    """A call that shows less inside than the reference's: what lies between the tensors that both
    show, run as one.
    """

    def __init__(
        self,
        replayer: Replayer,
        call: Call,
        other: Call,
        loaded: Any,
        inputs: Mapping[str, Array],
        params: _Params,
        strides: Mapping[str, tuple[int, ...]],
        state: Mapping[int, Array],
        wide: str,
        working: str,
    ) -> None:
        self._replayer, self._call, self._other, self._loaded, self._state = (
            replayer,
            call,
            other,
            loaded,
            state,
        )
        self._inputs, self._params, self._strides = inputs, params, strides
        self._wide, self._working = wide, working
        self._ran: list[Call] = []

    def measure(
        self,
        found: ReplayResult,
        produced: Mapping[str, Array],
        records: Mapping[str, int],
        *,
        same: bool,
    ) -> None:
        """Figures of the outputs `produced`, into `found`. records: the reference's. same: are both
        sides' inputs equal?
        """
        r = self._run(self._wide, records, None)
        copies = [self._run(self._working, records, seed) for seed in (None, *range(_REPLICAS))]
        side = self._replayer.reference
        for slot, y in produced.items():
            if slot not in r or any(slot not in c or c[slot].shape != y.shape for c in copies):
                found.refused[slot] = "made inside, where it could not be followed"
                continue
            reference = side.run.array(records[slot]) if same else None
            found.local[slot] = judge.whole(
                y, r[slot], [c[slot] for c in copies], reference=reference
            )
        found.inside, found.ran = len(self._ran), self._ran

    def _run(self, working: str, records: Mapping[str, int], seed: int | None) -> dict[str, Array]:
        side, call, loaded = self._replayer.reference, self._call, self._loaded
        own = side.records(call, loaded.program.inputs)
        state = {
            **self._state,
            **{own[slot]: array for slot, array in self._inputs.items() if slot in own},
        }
        noise = np.random.default_rng(seed) if seed is not None else None
        chain = _Between(self._replayer, working, self._held, noise=noise, state=state)
        kids = side.children(call.id)
        leaves = {
            s
            for k, kid in enumerate(kids)
            if kid not in self._replayer.paired
            for s in chain.leaves(k, kid)
        }
        there = {*self._inputs, *loaded.program.params, *leaves}
        held = self._params.held(working)
        made: dict[str, Array] = loaded.run(
            self._inputs,
            held,
            working=working,
            strides=self._strides,
            outputs=loaded.determined(there),
            child=lambda k, handed: chain.child(call, k, handed),
            convert=False,
        )
        self._ran = chain.ran
        # A cache that calls inside filled is not among what the call's own operators made.
        return {
            slot: chain.state[record] for slot, record in records.items() if record in chain.state
        } | made

    def _held(self, loaded: Any, call: Call, working: str) -> Any:
        """The parameters of a call inside: the target's where it shows them, else the reference's
        in the working dtype.
        """
        replayer, run = self._replayer, self._replayer.reference.run
        refs = {r.slot: r.record for r in call.refs}
        missing = [s for s in loaded.program.params if s not in refs]
        if missing:
            raise ReplayRefused(f"{missing[0]} of {call.scope} was not captured")

        def rounded(slot: str) -> Array:
            pair = replayer.inner(self._other, call, slot) if replayer.inner is not None else None
            array = run.array(refs[slot])
            if pair is not None:  # one that is not the reference's is a finding of its own
                return replayer.target.run.array(pair.target_record)
            same = dtypes.of(array).name == loaded.program.base and self._working in (
                "bfloat16",
                "float16",
            )
            return judge.rounded(array, self._working) if same else array

        key = (
            loaded.program.id,
            "inside",
            tuple(refs[s] for s in loaded.program.params),
            working,
            self._working,
        )
        return replayer.hold(
            key,
            lambda: loaded.hold({s: rounded(s) for s in loaded.program.params}, working=working),
        )


def _is_half(produced: Mapping[str, Array]) -> bool:
    """Is everything that was made of 16 bits or less?"""
    return all(dtypes.is_half(dtypes.of(a).name) for a in produced.values())


def _measured(
    slot: str,
    y: Array,
    r: Array,
    w: Array,
    terms: int,
    reference: tuple[Array, Array | None] | None,
    spread: Array | None,
    semantics: Semantics,
    *,
    written_out: bool = False,
) -> judge.ReplayError:
    if r.shape != y.shape or w.shape != y.shape:
        raise ReplayRefused(f"{slot} of the replay has shape {r.shape}, the target's {y.shape}")
    made, again = (
        reference if reference is not None and reference[0].shape == y.shape else (None, None)
    )
    return semantics.measure(
        slot,
        y,
        r,
        w,
        terms=terms,
        reference=made,
        reference_wide=again,
        spread=spread,
        written_out=written_out,
    )
