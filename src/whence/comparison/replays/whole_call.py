"""Replays a call whose inside the target does not show, as one, between tensors that both show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.call_tree import REPLICAS, TreeReplay, jumps_of
from whence.comparison.replays.jump_sides import JumpSides, Run
from whence.comparison.replays.program_run import ProgramRun
from whence.comparison.replays.semantics import PLAIN, ReplayResult, Semantics
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call
from whence.records.slots import is_mutated

if TYPE_CHECKING:
    from whence.replay.jumps import Jumps

_SEEDS = (None, *range(REPLICAS))
"""Seeds of the replays in the target's dtype: None without noise, the others with noise."""


class _TreeBetweenPairs(TreeReplay):
    """Replays unpaired calls, and uses the target's tensors for paired calls inside them."""

    def __init__(
        self,
        sides: BothSides,
        working: str,
        params_of: Callable[[Any, Call, str], Any],
        **options: Any,
    ) -> None:
        super().__init__(sides.reference, working, params_of, **options)
        self._sides = sides

    def run(self, call: Call, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs and mutated tensors of `call`, by slot. Raises ReplayRefused."""
        target_tensors = self._shown(call) if call.id in self._sides.paired else {}
        records = call.by_slot
        self.state.update(
            (records[slot], array) for slot, array in target_tensors.items() if is_mutated(slot)
        )
        return (
            target_tensors
            if target_tensors and target_tensors.keys() >= set(self.side.left(call))
            else super().run(call, inputs) | target_tensors
        )

    def _shown(self, call: Call) -> dict[str, Array]:
        reference, target = self._sides.reference.run, self._sides.target.run
        pairs = {
            slot: pair
            for slot in self.side.left(call)
            if (pair := self._sides.pair_of(call, slot)) is not None
        }
        return {
            slot: target.array(pair.target_record)
            for slot, pair in pairs.items()
            if reference.records[pair.reference_record].shape
            == target.records[pair.target_record].shape
        }


class WholeCall:
    """Replays a call of which the target shows less inside than the reference: the calls between
    tensors that both runs have, as one computation.
    """

    def __init__(
        self,
        sides: BothSides,
        call: Call,
        partner: Call,
        run: ProgramRun,
        state: Mapping[int, Array],
    ) -> None:
        self._sides, self._call, self._partner = sides, call, partner
        self._loaded, self._state = run.loaded, state
        self._inputs, self._params, self._strides = run.inputs, run.params, run.strides
        self._wide, self._working = run.wide_dtype, run.working_dtype
        self._ran: list[Call] = []

    def measure(
        self,
        result: ReplayResult,
        produced: Mapping[str, Array],
        records: Mapping[str, int],
        *,
        equal_inputs: bool,
        semantics: Semantics = PLAIN,
    ) -> None:
        """Put the figures of the target's outputs `produced` into `result`. records: the
        reference's, by slot. equal_inputs: whether both runs have equal inputs. semantics: says
        which elements count.
        """
        r = self._run(self._wide, records, None)
        copies = [self._run(self._working, records, seed) for seed in _SEEDS]
        for slot in [s for s in produced if not _made(produced, s, (r, *copies))]:
            result.refused[slot] = "made inside, where it could not be followed"
        produced = {slot: y for slot, y in produced.items() if slot not in result.refused}

        def measured(
            wide: Mapping[str, Array], copies: Sequence[Mapping[str, Array]]
        ) -> dict[str, judge.ReplayError]:
            errors = {}
            for slot, y in produced.items():
                shown = semantics.shown(slot, y.shape)
                run = self._sides.reference.run
                reference = shown(run.array(records[slot])) if equal_inputs else None
                errors[slot] = judge.whole(
                    shown(y), shown(wide[slot]), [shown(c[slot]) for c in copies],
                    reference=reference,
                )  # fmt: skip
            return errors

        errors, inside = measured(r, copies), self._ran
        if errors and any(self._sides.reference.trusted(c).jumps for c in (self._call, *inside)):
            errors = self._on_sides(produced, records, errors, measured)
        result.local.update(errors)
        result.inside, result.ran = len(inside), inside

    def _on_sides(
        self,
        produced: Mapping[str, Array],
        records: Mapping[str, int],
        errors: dict[str, judge.ReplayError],
        measured: Callable[..., dict[str, judge.ReplayError]],
    ) -> dict[str, judge.ReplayError]:
        """The figures if operators that jump fall on the target's sides."""

        def working(seed: int | None) -> Run:
            return lambda jumps: self._run(self._working, records, seed, jumps)

        sides = JumpSides(
            lambda jumps: self._run(self._wide, records, None, jumps),
            (working(None),),
            [working(seed) for seed in range(REPLICAS)],
            produced,
            {},
        )
        if judge.highest(errors) <= judge.LIMITS.suspect and not sides.differ():
            return errors
        wide = sides.follow()
        levels = sides.levels()
        copies = [self._run(self._working, records, seed, levels) for seed in _SEEDS]
        followed = measured(wide, copies)
        if sides.is_open and not judge.highest(followed) < judge.highest(errors):
            return errors
        described = sides.described() if judge.highest(followed) <= 1 else ()
        return {s: dataclasses.replace(e, choices=described) for s, e in followed.items()}

    def _run(
        self,
        working: str,
        records: Mapping[str, int],
        seed: int | None,
        jumps: Jumps | None = None,
    ) -> dict[str, Array]:
        side, call, loaded = self._sides.reference, self._call, self._loaded
        input_records = side.records(call, loaded.program.inputs)
        state = {
            **self._state,
            **{
                input_records[slot]: array
                for slot, array in self._inputs.items()
                if slot in input_records
            },
        }
        noise = np.random.default_rng(seed) if seed is not None else None
        chain = _TreeBetweenPairs(
            self._sides, working, self._held, noise=noise, state=state, jumps=jumps
        )
        kids = side.children(call.id)
        leaves = {
            s
            for k, kid in enumerate(kids)
            if kid not in self._sides.paired
            for s in chain.leaves(k, kid)
        }
        available = {*self._inputs, *loaded.program.params, *leaves}
        params = self._params.held(working)
        outputs: dict[str, Array] = loaded.run(
            self._inputs,
            params,
            working=working,
            strides=self._strides,
            outputs=loaded.determined(available),
            child=lambda k, handed: chain.child(call, k, handed),
            convert=False,
            **jumps_of(loaded, call, jumps),
        )
        self._ran = chain.ran
        # A cache that calls inside filled is not an output of the call's own operators.
        return {
            slot: chain.state[record] for slot, record in records.items() if record in chain.state
        } | outputs

    def _held(self, loaded: Any, call: Call, working: str) -> Any:
        """The parameters of a call inside: the target's if it has them, else the reference's,
        rounded to a 16-bit working dtype.
        """
        sides, run = self._sides, self._sides.reference.run
        refs = call.by_slot
        missing = [s for s in loaded.program.params if s not in refs]
        if missing:
            raise ReplayRefused(f"{missing[0]} of {call.scope} was not captured")

        def rounded(slot: str) -> Array:
            pair = sides.inner(self._partner, call, slot) if sides.inner is not None else None
            array = run.array(refs[slot])
            if pair is not None:  # one that is not the reference's is a finding of its own
                return sides.target.run.array(pair.target_record)
            is_base = dtypes.of(array).name == loaded.program.base and self._working in (
                "bfloat16",
                "float16",
            )
            return judge.rounded(array, self._working) if is_base else array

        key = (
            loaded.program.id,
            "inside",
            tuple(refs[s] for s in loaded.program.params),
            working,
            self._working,
        )
        return sides.parameters.hold(
            key,
            lambda: loaded.hold({s: rounded(s) for s in loaded.program.params}, working=working),
        )


def _made(produced: Mapping[str, Array], slot: str, runs: Sequence[Mapping[str, Array]]) -> bool:
    """Whether every replay computed this output in the target's shape."""
    return all(slot in run and run[slot].shape == produced[slot].shape for run in runs)
