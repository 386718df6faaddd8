"""Replays the reference's modules on the inputs of the target's modules, in both runs as captured.

Alignment is not needed for that, so the side of the padding and the order of rows do not matter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from whence import align, judge
from whence.comparison.replays.call_tree import REPLICAS
from whence.comparison.replays.side import ReplaySource
from whence.comparison.replays.wired import WiredReplay
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call, Run, children
from whence.records.slots import is_input

_HALF = 1e-5  # between the unit roundoffs of 32 and 16 bits
_ROWS = 64  # that are run one by one


class CallsOnOwnInputs:
    """Tells whether a module of the target computes what the reference's programs compute."""

    def __init__(self, reference: Run, target: Run, source: ReplaySource) -> None:
        self._reference, self._target = reference, target
        self._source = ReplaySource(reference, source.allow, source.model)
        self._kids = {id(run): children(run.calls) for run in (reference, target)}
        self._right: dict[tuple[tuple[str, str, str], tuple[str, str, str]], set[str] | None] = {}

    def right(self, call: Call, partner: Call) -> set[str] | None:
        """The slots in which the target's module, or operator, equals the reference's programs on
        the same inputs, up to rounding and in every call: inputs of calls inside ("3:input.0"), and
        its outputs if all of them are equal. None if the programs cannot be run. call, partner: one
        pair of its calls, as aligned.
        """
        key = (call.root, call.scope, call.op), (partner.root, partner.scope, partner.op)
        if key not in self._right:
            calls = _forward_calls(self._reference, *key[0])
            partners = _forward_calls(self._target, *key[1])
            self._right[key] = None
            with contextlib.suppress(ReplayRefused, ElementsMissing, KeyError):
                if len(calls) == len(partners) > 0:
                    self._right[key] = set.intersection(*map(self._right_of, calls, partners))
        return self._right[key]

    def _right_of(self, call: Call, partner: Call) -> set[str]:
        target = partner.by_slot
        inputs = {s: self._target.array(n) for s, n in target.items() if is_input(s)}
        slots = [r.slot for r in call.slots("output") if not align.is_cache(r.slot)]
        working = self._working_dtype(call, target[slots[0]]) if slots else "recorded"
        fine = "float64" if judge.unit_roundoff(working) < _HALF else "float32"
        wide = self._run(call, inputs, (fine, working), None)
        copies = [self._run(call, inputs, (working,) * 2, s) for s in (None, *range(REPLICAS))]
        # An output that code outside the program gathers is compared in the call that makes it.
        shown = [s for s in slots if s in wide]
        is_right = slots[:1] == shown[:1] != [] and all(
            _is_within(self._target.array(target[s]), wide[s], [c[s] for c in copies])
            for s in shown
        )
        handed = {
            slot
            for slot, record in self._handed(call, partner).items()
            if slot in wide and all(slot in copy for copy in copies)
            if _is_within(self._target.array(record), wide[slot], [c[slot] for c in copies])
        }
        return handed | set(shown) if is_right else handed

    def _handed(self, call: Call, partner: Call) -> dict[str, int]:
        """The target's records of its children's inputs, by child number and slot ("3:input.0")."""
        both = zip(self._inside(self._reference, call), self._inside(self._target, partner))
        return {
            f"{k}:{ref.slot}": ref.record
            for k, (kid, other) in enumerate(both)
            if (kid.scope, kid.op) == (other.scope, other.op)
            for ref in other.slots("input")
        }

    def _inside(self, run: Run, call: Call) -> list[Call]:
        return [run.calls[k] for k in self._kids[id(run)].get(call.id, ())]

    def _working_dtype(self, call: Call, output: int) -> str:
        """The dtype of the module's first output in the target, "recorded" if the reference has the
        same.
        """
        dtype = self._target.records[output].dtype
        own = self._reference.records[call.slots("output")[0].record].dtype
        return "recorded" if dtype == own else dtype

    def _run(
        self, call: Call, inputs: dict[str, Array], dtypes_of_run: tuple[str, str], seed: int | None
    ) -> dict[str, Array]:
        """One replay of the call, if need be row by row. dtypes_of_run: the dtype to compute in,
        and the dtype that parameters are rounded to. seed: of the noise, None without noise.
        """
        try:
            return self._replayed(call, inputs, dtypes_of_run, seed)
        except ReplayRefused:
            rows = self._by_row(call, inputs)
            if not rows:
                raise
        parts = [self._replayed(call, row, dtypes_of_run, seed) for row in rows]
        return {
            slot: np.stack([part[slot][k] for k, part in enumerate(parts)])
            for slot, array in parts[0].items()
            if array.ndim and len(array) == len(parts)
        }

    def _by_row(self, call: Call, inputs: dict[str, Array]) -> list[dict[str, Array]]:
        """The inputs row by row, if the target passes for each row a tensor that the reference
        passes once for all rows (such as positions); empty if there is no such tensor.
        """
        records = {r.slot: self._reference.records[r.record].shape or () for r in call.refs}
        once = [s for s, a in inputs.items() if records.get(s, ())[:1] == (1,) and len(a) > 1]
        counts = {len(inputs[s]) for s in once}
        if len(counts) != 1 or (count := counts.pop()) > _ROWS:
            return []
        return [inputs | {s: inputs[s][k : k + 1] for s in once} for k in range(count)]

    def _replayed(
        self, call: Call, inputs: dict[str, Array], dtypes_of_run: tuple[str, str], seed: int | None
    ) -> dict[str, Array]:
        working, rounded_to = dtypes_of_run
        records = call.by_slot
        chain = _Watched(
            self._source,
            working,
            functools.partial(self._parameters, rounded_to),
            noise=np.random.default_rng(seed) if seed is not None else None,
            state={records[s]: array for s, array in inputs.items() if s in records},
            lenient=True,  # where the results are the target's all the same, the program served
        )
        results, places = chain.run(call, inputs), self._inside(self._reference, call)
        return results | {
            f"{k}:{slot}": array
            for k, kid in enumerate(places)
            for slot, array in chain.handed.get(kid.id, {}).items()
        }

    def _parameters(self, rounded_to: str, loaded: Any, call: Call, working: str) -> Any:
        arrays, _ = self._source.arrays(self._source.records(call, loaded.program.params))
        if rounded_to != "recorded":
            arrays = {slot: judge.rounded(array, rounded_to) for slot, array in arrays.items()}
        return loaded.hold(arrays, working=working)


class _Watched(WiredReplay):
    """A replay that keeps the inputs of all calls inside, by call and slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.handed: dict[int, dict[str, Array]] = {}

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """As `WiredReplay.passing`."""
        self.handed.setdefault(call.id, {}).update({s: a for s, a in arrays.items() if is_input(s)})
        return super().passing(call, arrays)


def _forward_calls(run: Run, root: str, scope: str, op: str) -> list[Call]:
    place = root, scope, op, "forward"
    return [
        call
        for call in run.calls
        if (call.root, call.scope, call.op, call.phase) == place and call.slots("output")
    ]


def _is_within(output: Array, wide: Array, copies: list[Array]) -> bool:
    shapes = {array.shape for array in (output, wide, *copies)}
    return len(shapes) == 1 and judge.whole(output, wide, copies).score <= 1
