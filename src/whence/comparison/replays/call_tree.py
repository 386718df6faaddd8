"""Replays a whole tree of the reference's calls, to judge a target that does not show the inside of
a call.

With compiled code, another engine or fused modules, calls that only the reference has lie between
the tensors that both sides show. Their programs are run in the order of the recording, each with
only its own parameters loaded.
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
"""Number of noisy replays of the inside of a call that is not visible (VERDICT.md level 3)."""


class TreeReplay:
    """Replays calls of the reference with all calls below them, in one working dtype.

    params_of: (loaded program, call, working dtype) -> parameters for `Loaded.run`. noise: if not
    None, the floating outputs of every leaf are multiplied by 1 + u xi, xi uniform in (-1, 1)
    (VERDICT.md level 3). state: tensors held in caches, by record of the reference. jumps: records,
    and may force, on which side of a jump (rounding, comparison) elements fall. lenient: as in
    `Loaded.run`.
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
        """The outputs and mutated tensors of `call` on these inputs, by slot. Raises
        ReplayRefused.
        """
        loaded = self.side.trusted(call)
        program = loaded.program
        records = call.by_slot
        inputs: dict[str, Array] = {}
        for slot in program.inputs:
            if is_of_child(slot):
                continue
            array = given_tensors.get(slot)
            array = array if array is not None else self.state.get(records.get(slot, -1))
            array = array if array is not None else self.lent(records.get(slot))
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

    def lent(self, record: int | None) -> Array | None:
        """The recorded elements of a tensor that is the same in every correct run; None of any
        other.
        """
        return self.side.lent(record, self.working)

    def passing(self, call: Call, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors with which the replay continues in place of a call's inputs or outputs; here
        the same ones.
        """
        return dict(arrays)

    def trace(self, call: Call) -> Callable[[int, Array], None] | None:
        """A callback that gets (operation, result) of every operator of a call; None for none."""
        return None

    def rounds(self, call: Call) -> bool:
        """Whether noise is added to a call's outputs; here only to those of leaves."""
        return call.leaf

    def is_lenient(self, call: Call) -> bool:
        """Whether a call may run on other extents than those recorded."""
        return self._lenient

    def strides(self, call: Call, inputs: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The strides of inputs that are not contiguous, by slot; here none, since freshly computed
        tensors are contiguous.
        """
        return {}

    def child(self, call: Call, k: int, handed: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs and mutated tensors of the k-th child of `call` on these inputs."""
        kids = self.side.children(call.id)
        if k >= len(kids):
            raise ReplayRefused(f"call {k} below {call.module_name} was not recorded")
        return self.run(self.side.run.calls[kids[k]], handed)

    def leaves(self, k: int, kid: int) -> list[str]:
        """The slots ("3:input.0") that the k-th child (call `kid`) fills in its parent's program:
        its inputs and outputs; empty if it cannot be replayed.
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
    """The option for `Loaded.run` that records and forces the sides of jumps in a call."""
    return {"jumps": jumps.of(call.id)} if jumps is not None and loaded.jumps else {}


def perturbed(array: Array, working: str, noise: Noise) -> Array:
    """The array with every element changed at random by up to one unit roundoff of the working
    dtype ("recorded": the array's own).
    """
    kind = dtypes.of(array)
    if not kind.is_floating or kind.kind == "complex":
        return array
    u = judge.unit_roundoff(working if working != "recorded" else kind.name)
    xi: npt.NDArray[np.float64] = noise.uniform(-1.0, 1.0, array.shape)
    with np.errstate(over="ignore"):
        noisy: Array = (array.astype(np.float64) * (1.0 + u * xi)).astype(array.dtype)
    # a masked element holds the largest number of the dtype, which noise must not make infinite
    return np.where(np.isfinite(noisy), noisy, array)


_PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul", "bmm"})


class TreeWalk(TreeReplay):
    """Replays whole roots, one after the other. Each computed tensor that the target shows too is
    kept, and the replay continues with the target's.

    instead: record of the reference -> the target's tensor, None if it has none. inner: (call,
    operation) -> record of an operator's result inside a call. coarser: applied to the inputs of
    matrix products, None for no change. why: the first reason why something could not be run; "" if
    all was.
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
        """The tensors computed in this call and below, by record, of those that the target shows.
        An input that the target lacks comes from an earlier root of this replay, else from the
        reference.
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
        """Run a call; if that is refused, run the calls below it on those inputs that are known."""
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
        records = call.by_slot
        self.state.update(
            (records[slot], array) for slot, array in results.items() if slot in records
        )

    def _parameters(self, call: Call) -> dict[str, Array]:
        """The reference's parameters among the inputs of an operator, by slot."""
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
        records = call.by_slot
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
        """Whether the call's program contains a matrix product."""
        program = self.side.run.programs.get(call.program)
        return program is not None and any(
            op.name.split(".")[1] in _PRODUCTS for op in program.operations
        )
