"""Runs a whole tree of the reference's calls again: what a target that does not show the inside of
a call is judged by.

Compiled code, another engine, fused modules: between the tensors that both sides show lie calls
that only the reference has. Their programs are run one after the other, in the order of the
recording, each with its own parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from whence import dtypes, judge
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Call
from whence.records.slots import is_input, is_mutated, is_of_child

if TYPE_CHECKING:
    from whence.replay.jumps import Jumps

Noise = np.random.Generator

REPLICAS = 3
"""Noisy repetitions of what lies inside a call that shows nothing (VERDICT.md level 3)."""


class TreeReplay:
    """Runs calls of the reference with all that they call, in one working dtype.

    params_of: a call's parameters for `Loaded.run`. noise: every leaf's floating outputs are
    multiplied by 1 + u xi, xi uniform in (-1, 1) (VERDICT.md level 3); None for none. state:
    tensors that hang in caches, by the reference's record. jumps: sees and tells the sides of the
    operators that jump. lenient: as `Loaded.run` has it.
    """

    def __init__(
        self,
        side: ReplaySource,
        working: str,
        params_of: Callable[[Any, Call, str], Any],
        *,
        noise: Noise | None = None,
        state: Mapping[int, Array] | None = None,
        jumps: Jumps | None = None,
        lenient: bool = False,
    ) -> None:
        self.side, self.working, self._params_of, self._noise = side, working, params_of, noise
        self.jumps = jumps
        self.state: dict[int, Array] = dict(state or {})
        self._lenient = lenient
        self.ran: list[Call] = []

    def run(self, call: Call, given_tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs and mutations of `call`, by slot, when it is called with these tensors. Raises
        ReplayRefused.
        """
        loaded = self.side.trusted(call)
        program = loaded.program
        records = {r.slot: r.record for r in call.refs}
        inputs: dict[str, Array] = {}
        for slot in program.inputs:
            if is_of_child(slot):
                continue
            array = given_tensors.get(slot)
            array = array if array is not None else self.state.get(records.get(slot, -1))
            array = array if array is not None else self.side.lent(records.get(slot), self.working)
            if array is not None:
                inputs[slot] = array
        inputs = self.passing(call, inputs)
        available = {
            *inputs,
            *program.params,
            *(s for k, kid in enumerate(self.side.children(call.id)) for s in self.leaves(k, kid)),
        }
        outputs = loaded.determined(available)
        if not outputs:
            first = min(loaded.needs(program.outputs[0][0]) - available)
            raise ReplayRefused(f"{first} of {call.module_name} is made where nothing was recorded")
        params = self._params_of(loaded, call, self.working)
        results: dict[str, Array] = loaded.run(
            inputs,
            params,
            working=self.working,
            outputs=outputs,
            child=lambda k, handed: self.child(call, k, handed),
            convert=False,
            trace=self.trace(call),
            strides=self.strides(call, inputs),
            **jumps_of(loaded, call, self.jumps),
            lenient=self.is_lenient(call),
        )
        self.ran.append(call)
        written = {
            slot: self._noisy(array) if self.rounds(call) else array
            for slot, array in results.items()
            if not is_of_child(slot)
        }
        written = self.passing(call, written)
        self.state.update(
            (records[slot], array)
            for slot, array in written.items()
            if is_mutated(slot) and slot in records
        )
        return written

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors that go on in place of the inputs or outputs of a call: here, the same."""
        return dict(arrays)

    def trace(self, call: Call) -> Callable[[int, Array], None] | None:
        """Called with the result of every operator of a call; None where nobody listens."""
        return None

    def rounds(self, call: Call) -> bool:
        """Does noise go on what a call leaves? Here: where none below it has added its own."""
        return call.leaf

    def is_lenient(self, call: Call) -> bool:
        """Does a call run on other extents than its recording allows?"""
        return self._lenient

    def strides(self, call: Call, inputs: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The layouts that these inputs have: here, contiguous, as code that makes them anew leaves
        them.
        """
        return {}

    def child(self, call: Call, k: int, handed: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs and mutations of the k-th child of `call`."""
        kids = self.side.children(call.id)
        if k >= len(kids):
            raise ReplayRefused(f"call {k} below {call.module_name} was not recorded")
        return self.run(self.side.run.calls[kids[k]], handed)

    def leaves(self, k: int, kid: int) -> list[str]:
        """The slots that the k-th child (call `kid`) fills in the program above it: its inputs and
        what it writes.
        """
        call = self.side.run.calls[kid]
        results = self.side.left(call)
        return (
            [f"{k}:{slot}" for slot in (*results, *(r.slot for r in call.slots("input")))]
            if results
            else []
        )

    def _noisy(self, array: Array) -> Array:
        return array if self._noise is None else perturbed(array, self.working, self._noise)


def jumps_of(loaded: Any, call: Call, jumps: Jumps | None) -> dict[str, Any]:
    """The option of a run by which the operators of a call that jump are seen and told."""
    return {"jumps": jumps.of(call.id)} if jumps is not None and loaded.jumps else {}


def perturbed(array: Array, working: str, noise: Noise) -> Array:
    """Every element off by up to one unit roundoff of the working dtype ("recorded" for the array's
    own), drawn at random.
    """
    kind = dtypes.of(array)
    if not kind.is_floating or kind.kind == "complex":
        return array
    u = judge.unit_roundoff(working if working != "recorded" else kind.name)
    xi: npt.NDArray[np.float64] = noise.uniform(-1.0, 1.0, array.shape)
    with np.errstate(over="ignore"):
        noisy: Array = (array.astype(np.float64) * (1.0 + u * xi)).astype(array.dtype)
    # what stands for "masked" is the largest number there is
    return np.where(np.isfinite(noisy), noisy, array)


_PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul", "bmm"})


class TreeWalk(TreeReplay):
    """Replays whole roots, one after the other. Every tensor that is computed is kept, and the
    target's goes on in its place.

    instead: the target's tensor for a record of the reference, None where it has none. inner:
    (call, operation) -> record of the result of one operator. coarser: applied to the inputs of
    matrix products, None for nothing. why: why something could not be run, "" when all was.
    """

    def __init__(
        self,
        side: ReplaySource,
        working: str,
        params_of: Callable[[Any, Call, str], Any],
        instead: Callable[[int], Array | None],
        *,
        noise: Noise | None = None,
        coarser: Callable[[Array], Array] | None = None,
    ) -> None:
        super().__init__(side, working, params_of, noise=noise)
        self._instead, self._coarser = instead, coarser
        self.inner: dict[tuple[int, int], int] = {}
        self.why = ""
        self._reached: dict[int, Array] = {}
        self._owned: set[int] | None = None

    def through(self, root: Call) -> dict[int, Array]:
        """The tensors that were computed in this call and below, by record. An input that the
        target does not have is as computed before, or the reference's.
        """
        self._reached = {}
        inputs: dict[str, Array] = {}
        for ref in root.slots("input"):
            try:
                inputs[ref.slot] = self._known(ref.record, self.side.run)
            except ElementsMissing as error:
                self.why = self.why or str(error)
        self._try(root, inputs)
        return self._reached

    def _known(self, record: int, run: Any) -> Array:
        substitute = self._instead(record)
        substitute = substitute if substitute is not None else self.state.get(record)
        array: Array = substitute if substitute is not None else run.array(record)
        return array

    def _try(self, call: Call, inputs: Mapping[str, Array]) -> None:
        """Run a call; where that is refused, run the calls below it whose inputs are known."""
        try:
            results = self.run(call, inputs)
        except (ReplayRefused, ElementsMissing) as error:
            self.why = self.why or f"{call.module_name}: {error}"
            for kid in (self.side.run.calls[k] for k in self.side.children(call.id)):
                substitutes = {r.slot: self._instead(r.record) for r in kid.slots("input")}
                inputs_known = self._parameters(kid) | {
                    r.slot: self.state[r.record]
                    for r in kid.slots("input")
                    if r.record in self.state
                }
                self._try(
                    kid,
                    inputs_known
                    | {slot: array for slot, array in substitutes.items() if array is not None},
                )
            return
        records = {r.slot: r.record for r in call.refs}
        self.state.update(
            (records[slot], array) for slot, array in results.items() if slot in records
        )

    def _parameters(self, call: Call) -> dict[str, Array]:
        """The parameters among the inputs of an operator: the reference's own."""
        if call.kind != "operator":
            return {}
        if self._owned is None:
            self._owned = {r.record for c in self.side.run.calls for r in c.slots("param")}
        return {
            r.slot: self.side.run.array(r.record)
            for r in call.slots("input")
            if r.record in self._owned
        }

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        records = {r.slot: r.record for r in call.refs}
        out = dict(arrays)
        for slot, array in arrays.items():
            record = records.get(slot)
            substitute = self._instead(record) if record is not None else None
            if record is not None and substitute is not None and substitute.shape == array.shape:
                self._reached.setdefault(record, array)
                out[slot] = substitute
            if (
                self._coarser is not None
                and is_input(slot)
                and call.leaf
                and self._multiplies(call)
            ):
                out[slot] = self._coarser(out[slot])
        return out

    def trace(self, call: Call) -> Callable[[int, Array], None] | None:
        records = {
            place: record for (owner, place), record in self.inner.items() if owner == call.id
        }
        if not records:
            return None

        def take(place: int, array: Array) -> None:
            if place in records:
                self._reached.setdefault(records[place], array)

        return take

    def _multiplies(self, call: Call) -> bool:
        """Is this call a matrix product?"""
        program = self.side.run.programs.get(call.program)
        return program is not None and any(
            op.name.split(".")[1] in _PRODUCTS for op in program.operations
        )
