"""A call that shows less inside than the reference's, run as one between tensors that both show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.both_sides import BothSides
from whence.comparison.replays.call_tree import REPLICAS, TreeReplay
from whence.comparison.replays.program_run import ProgramRun
from whence.comparison.replays.semantics import PLAIN, ReplayResult, Semantics
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call
from whence.records.slots import is_mutated


class _TreeBetweenPairs(TreeReplay):
    """Calls without a partner are run again; of calls inside them that have one, the target's
    tensors go on.
    """

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
        """What `call` leaves. Raises ReplayRefused."""
        target_tensors = self._shown(call) if call.id in self._sides.paired else {}
        records = {r.slot: r.record for r in call.refs}
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
    """A call of which the target shows less inside than the reference: what lies between the
    tensors that both have, run as one.
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
        """Figures of the outputs `produced`, into `result`. records: the reference's. equal_inputs:
        do both runs have the same inputs? semantics: says which elements count.
        """
        r = self._run(self._wide, records, None)
        copies = [self._run(self._working, records, seed) for seed in (None, *range(REPLICAS))]
        side = self._sides.reference
        for slot, y in produced.items():
            if slot not in r or any(slot not in c or c[slot].shape != y.shape for c in copies):
                result.refused[slot] = "made inside, where it could not be followed"
                continue
            shown = semantics.shown(slot, y.shape)
            reference = shown(side.run.array(records[slot])) if equal_inputs else None
            result.local[slot] = judge.whole(
                shown(y), shown(r[slot]), [shown(c[slot]) for c in copies], reference=reference
            )
        result.inside, result.ran = len(self._ran), self._ran

    def _run(self, working: str, records: Mapping[str, int], seed: int | None) -> dict[str, Array]:
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
        chain = _TreeBetweenPairs(self._sides, working, self._held, noise=noise, state=state)
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
        )
        self._ran = chain.ran
        # A cache that calls inside filled is not among what the call's own operators made.
        return {
            slot: chain.state[record] for slot, record in records.items() if record in chain.state
        } | outputs

    def _held(self, loaded: Any, call: Call, working: str) -> Any:
        """The parameters of a call inside: the target's where it has them, else the reference's in
        the working dtype.
        """
        sides, run = self._sides, self._sides.reference.run
        refs = {r.slot: r.record for r in call.refs}
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
