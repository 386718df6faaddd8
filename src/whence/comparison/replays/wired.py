"""Replays modules whose operators were recorded as calls of their own. The operators run one after
the other, connected by the records that they share.

The code around the operators is not known. A tensor that an operator reads and that no earlier call
of the stretch wrote comes from outside: the caller of the replay provides it, or any result that
depends on it is refused.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.replays.call_tree import TreeReplay
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.operator_names import VIEWS, base_name
from whence.records import Call, Program, Ref
from whence.records.marks import NOT_WRITTEN, OVERWRITTEN, EngineModel
from whence.records.slots import is_input, is_mutated, is_param, is_written


class WiredReplay(TreeReplay):
    """A `TreeReplay` that also replays captures of operators."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made: ChainMap[int, Array] = ChainMap()

    def run(self, call: Call, given_tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As `TreeReplay.run`. Raises ReplayRefused."""
        if not self.side.is_of_operators(call):
            return super().run(call, given_tensors)
        if self.side.writes_views(call):
            composed, own = self.side.composed(call), {r.slot for r in call.refs}
            results = super().run(composed, {**self._handed(composed), **given_tensors})
            return {slot: array for slot, array in results.items() if slot in own}
        records = call.by_slot
        given_tensors = self.passing(call, given_tensors)
        around, self._made = self._made, self._made.new_child()
        try:
            self._made.update((records[s], a) for s, a in given_tensors.items() if s in records)
            slots = [r.slot for r in call.slots("param")]
            held = self.held(call, slots) if slots else {}
            self._made.update((records[slot], array) for slot, array in held.items())
            for number in self.side.children(call.id):
                kid = self.side.run.calls[number]
                if not any(is_written(r.slot) for r in kid.refs):
                    continue  # a number that the code read
                with contextlib.suppress(ReplayRefused):  # reported when its result is needed
                    results = self.run(kid, self._handed(kid))
                    self._made.update(
                        (r.record, results[r.slot]) for r in kid.refs if r.slot in results
                    )
            self.ran.append(call)
            left = (r for r in call.refs if is_written(r.slot) and r.record in self._made)
            results = self.passing(call, {r.slot: self._made[r.record] for r in left})
        finally:
            self._made = around
        self.state.update((records[s], array) for s, array in results.items() if is_mutated(s))
        return results

    def leaves(self, k: int, kid: int) -> list[str]:
        """As `TreeReplay.leaves`."""
        call = self.side.run.calls[kid]
        if not self.side.is_of_operators(call):
            return super().leaves(k, kid)
        return [f"{k}:{r.slot}" for r in call.refs if not is_param(r.slot)]

    def outside(self, call: Call, ref: Ref) -> Array | None:
        """A tensor that an operator reads and that this replay did not compute before; None if it
        is not known. Here these are constants of the code, which no call of the reference wrote,
        and memory that the operator overwrites without reading (zeros).
        """
        record = self.side.run.records[ref.record]
        if record.why in (OVERWRITTEN, NOT_WRITTEN):
            return np.zeros(record.shape, dtypes.named(record.dtype).numpy)
        return None if ref.record in self.side.first_made else self.side.run.array(ref.record)

    def _handed(self, call: Call) -> dict[str, Array]:
        handed: dict[str, Array] = {}
        for ref in call.refs:
            if not is_input(ref.slot):
                continue
            array = self._made.get(ref.record, self.state.get(ref.record))
            array = self.outside(call, ref) if array is None else array
            if array is not None:
                handed[ref.slot] = array
        return handed

    def held(self, call: Call, slots: Sequence[str]) -> dict[str, Array]:
        """The parameters of a module of operators, by slot, converted for this replay."""
        from whence.frameworks.torch_arrays import to_host

        outputs = tuple((slot, {"param": slot}) for slot in slots)
        loaded = self.side.edited(Program(f"holds {slots}", (), (), outputs, tuple(slots)))
        held = self._params_of(loaded, call, self.working).tensors
        return {slot: to_host(tensor) for slot, tensor in held.items()}

    def strides(self, call: Call, inputs: Collection[str]) -> dict[str, tuple[int, ...]]:
        """As `TreeReplay.strides`. An operator may depend on the layout of memory, so its inputs
        get the recorded strides.
        """
        if call.kind != "operator":
            return {}
        layouts = {r.slot: self.side.run.records[r.record].stride for r in call.refs}
        return {slot: stride for slot in inputs if (stride := layouts[slot])}

    def is_lenient(self, call: Call) -> bool:
        """As `TreeReplay.is_lenient`. A single operator may run on any extents, since no code in it
        depends on them.
        """
        return call.kind == "operator" or super().is_lenient(call)

    def rounds(self, call: Call) -> bool:
        """As `TreeReplay.rounds`. Noise is added to operators that return the outputs of an
        innermost module, as if that were one call, and to those of the script or an engine's graph.
        """
        if call.kind != "operator" or call.parent < 0:
            return super().rounds(call)
        module, kids = self.side.run.calls[call.parent], self.side.children(call.parent)
        if module.kind == "region" or module.op_type in list(EngineModel):
            return base_name(call.op) not in VIEWS
        left = {r.record for r in module.refs if is_written(r.slot)}
        is_innermost = all(self.side.run.calls[k].kind == "operator" for k in kids)
        return is_innermost and any(is_written(r.slot) and r.record in left for r in call.refs)
