"""Runs a whole tree of the reference's calls again: what a target that does not show the inside of a call is judged by.

Compiled code, another engine, fused modules: between the tensors that both sides show lie calls that only the reference has. Their
programs are run one after the other, in the order of the recording, each with its own parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.comparison.replays.side import Side
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Call

Noise = np.random.Generator


class Chain:
    """One evaluation of calls of the reference, in one working dtype.

    held: gives a call's parameters for `Loaded.run`. noise: every leaf's floating outputs are multiplied by 1 + u xi,
    xi uniform in (-1, 1) (VERDICT.md level 3); None for none. state: tensors that hang in caches, by the reference's record.
    """

    def __init__(
        self, side: Side, working: str, held: Callable[[Any, Call, str], Any], *, noise: Noise | None = None,
        state: Mapping[int, Array] | None = None,
    ) -> None:  # fmt: skip
        self.side, self.working, self._held, self._noise = side, working, held, noise
        self.state: dict[int, Array] = dict(state or {})
        self.ran: list[Call] = []

    def run(self, call: Call, given: Mapping[str, Array]) -> dict[str, Array]:
        """What `call` leaves (outputs and mutations by slot) when it is given these tensors. Raises ReplayRefused."""
        loaded = self.side.trusted(call)
        program = loaded.program
        own = {r.slot: r.record for r in call.refs}
        inputs: dict[str, Array] = {}
        for slot in program.inputs:
            if slot[0].isdigit():
                continue
            array = given.get(slot)
            array = array if array is not None else self.state.get(own.get(slot, -1))
            array = array if array is not None else self.side.lent(own.get(slot), self.working)
            if array is not None:
                inputs[slot] = array
        inputs = self.passing(call, inputs)
        there = {*inputs, *program.params, *(s for k, kid in enumerate(self.side.children(call.id)) for s in self.leaves(k, kid))}
        wanted = loaded.determined(there)
        if not wanted:
            first = min(loaded.needs(program.outputs[0][0]) - there)
            raise ReplayRefused(f"{first} of {call.scope or call.root} is made where nothing was recorded")
        held = self._held(loaded, call, self.working)
        made: dict[str, Array] = loaded.run(
            inputs, held, working=self.working, outputs=wanted, child=lambda k, handed: self.child(call, k, handed),
            convert=False, trace=self.trace(call),
        )  # fmt: skip
        self.ran.append(call)
        left = {slot: self._noisy(array) if call.leaf else array for slot, array in made.items() if not slot[0].isdigit()}
        left = self.passing(call, left)
        self.state.update((own[slot], array) for slot, array in left.items() if slot.startswith("mutated") and slot in own)
        return left

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """What goes on in the place of what a call is given or leaves, by slot: here, as it is."""
        return dict(arrays)

    def trace(self, call: Call) -> Callable[[int, Array], None] | None:
        """What is told of every operator of a call; here, nothing is."""
        return None

    def child(self, call: Call, k: int, handed: Mapping[str, Array]) -> dict[str, Array]:
        """What the k-th child of `call` leaves."""
        kids = self.side.children(call.id)
        if k >= len(kids):
            raise ReplayRefused(f"call {k} below {call.scope or call.root} was not recorded")
        return self.run(self.side.run.calls[kids[k]], handed)

    def leaves(self, k: int, kid: int) -> list[str]:
        """The slots that the k-th child (call `kid`) fills in the program above it: what it is given, and what it leaves."""
        call = self.side.run.calls[kid]
        made = self.side.left(call)
        return [f"{k}:{slot}" for slot in (*made, *(r.slot for r in call.slots("input")))] if made else []

    def _noisy(self, array: Array) -> Array:
        return array if self._noise is None else perturbed(array, self.working, self._noise)


def perturbed(array: Array, working: str, noise: Noise) -> Array:
    """Every element off by up to one unit roundoff of the working dtype ("recorded" for the array's own), drawn at random."""
    kind = dtypes.of(array)
    if not kind.is_floating or kind.kind == "complex":
        return array
    u = judge.unit_roundoff(working if working != "recorded" else kind.name)
    xi: npt.NDArray[np.float64] = noise.uniform(-1.0, 1.0, array.shape)
    with np.errstate(over="ignore"):
        noisy: Array = (array.astype(np.float64) * (1.0 + u * xi)).astype(array.dtype)
    return np.where(np.isfinite(noisy), noisy, array)  # what stands for "masked" is the largest number there is
