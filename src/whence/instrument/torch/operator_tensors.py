"""Tensors of one call of an operator, as records and refs of it; memory that no operator has
written yet is told from tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from whence.instrument.session import Session
from whence.instrument.torch.dtensor_placement import HALF, is_half
from whence.instrument.torch.operator_call import OperatorCall
from whence.instrument.torch.overload import Overload
from whence.instrument.torch.sampling import Sampling
from whence.instrument.torch.tensor_content import StorageRef, storage_ref
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import OVERWRITTEN, Ref
from whence.records.marks import NOT_WRITTEN
from whence.records.slots import is_mutated

_TENSOR = torch.Tensor


class OperatorTensors:
    """Records the tensors of operators."""

    def __init__(self, session: Session, registry: TensorRegistry, sampling: Sampling) -> None:
        self._session, self._registry, self._sampling = session, registry, sampling
        self._unwritten: dict[int, StorageRef] = {}
        self._takes_inputs, self._takes_outputs = (
            session.selector.slots("input"),
            session.selector.slots("output"),
        )

    def prune(self) -> None:
        """Forget memory that is gone."""
        if self._unwritten:
            self._unwritten = {
                k: ref
                for k, ref in self._unwritten.items()
                if not torch.UntypedStorage._expired(ref.cdata)
            }

    def take_inputs(self, call: OperatorCall) -> None:
        """Record what an operator is given, before it runs."""
        session, sampling, overload = self._session, self._sampling, call.overload
        registry = self._registry
        chosen = not sampling.on or sampling.choose(call)
        if chosen and session.elements_on:
            session.over_budget(call.scope, call.above.step, registry.staging.waiting_bytes)
            call.keep = session.elements_on
        if sampling.on:
            call.is_written = sampling.writes(call, chosen)
            if sampling.counts:
                for slot, tensor in call.inputs:
                    self._count(call, slot, tensor)
            if not call.is_written:
                return
        if self._takes_inputs:
            known_again, keep, sights, refs = registry.again, call.keep, call.sights, call.refs
            doubtful = self._unwritten or overload.overwritten
            for slot, tensor in call.inputs:
                if doubtful and (why := self._unreadable_input(overload, slot, tensor)):
                    call.see(slot, registry.unreadable(tensor, why), why)
                    continue
                sight = sights[slot] = known_again(tensor, keep) or registry.record_of(
                    tensor, slot, call, tried=True
                )
                refs.append(Ref(slot, sight[0], sight[1]))
        if overload.random:
            for device, state in call.states():
                slot = f"state.{device}"
                call.see(slot, registry.record_of(state, slot, call), "")

    def _unreadable_input(self, overload: Overload, slot: str, tensor: Any) -> str:
        if slot in overload.overwritten:
            return OVERWRITTEN
        return NOT_WRITTEN if self._unwritten and _storage(tensor) in self._unwritten else ""

    def take_results(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        """Record what an operator returned and wrote. results: (slot, tensor, slot of the input
        that it is).
        """
        overload, takes = call.overload, call.is_written and self._takes_outputs
        if call.placements and is_half(overload.name):
            for slot, tensor, _ in results if takes else ():
                call.see(slot, self._registry.unreadable(tensor, HALF), "")
        elif overload.plain and not self._unwritten:
            if takes:
                self._take_plain(call, results)
        elif takes:
            for slot, tensor, input_slot in results:
                self._take_result(call, slot, tensor, input_slot)
        else:
            for slot, tensor, _ in results:
                if overload.uninitialised and tensor.numel():
                    self._unwritten[_storage(tensor)] = storage_ref(tensor)
                elif is_mutated(slot):
                    self._unwritten.pop(_storage(tensor), None)
        if self._sampling.counts:
            self._count_results(call, results)

    def _take_plain(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        """Results that are new tensors or views of what went in, of which all was written."""
        view, keep, registry = call.overload.view, call.keep, self._registry
        base = call.inputs[0][1] if view and call.inputs else None
        for slot, tensor, _ in results:
            sight = None
            if base is not None and type(base) in (_TENSOR, torch.nn.Parameter):
                sight = registry.again(tensor, keep, base)
            sight = call.sights[slot] = sight or registry.record_of(
                tensor, slot, call, unsettled=view, tried=True
            )
            call.refs.append(Ref(slot, sight[0], sight[1]))

    def _take_result(self, call: OperatorCall, slot: str, tensor: Any, input_slot: str) -> None:
        overload, registry = call.overload, self._registry
        if overload.uninitialised and tensor.numel():
            self._unwritten[_storage(tensor)] = storage_ref(tensor)
            call.see(slot, registry.unreadable(tensor, NOT_WRITTEN), "unwritten")
        elif input_slot and (sight := call.sights.get(input_slot)) is not None:
            call.see(slot, sight, "")
        elif self._unwritten and self._still_unwritten(call, slot, tensor):
            call.see(slot, registry.unreadable(tensor, NOT_WRITTEN), "unwritten")
        else:
            unsettled = overload.view or bool(overload.writes)
            sight = registry.record_of(tensor, slot, call, unsettled=unsettled, tried=True)
            call.see(slot, sight, "")

    def _still_unwritten(self, call: OperatorCall, slot: str, tensor: Any) -> bool:
        """Is this a view of memory that nobody wrote? What was written now is no longer among
        it.
        """
        if is_mutated(slot):
            self._unwritten.pop(_storage(tensor), None)
        return call.overload.view and _storage(tensor) in self._unwritten

    def _count_results(self, call: OperatorCall, results: list[tuple[str, Any, str]]) -> None:
        if not call.overload.uninitialised:
            for slot, tensor, _ in results:
                self._count(call, slot, tensor)
        self._sampling.tally(call)

    def _count(self, call: OperatorCall, slot: str, tensor: Any) -> None:
        if self._session.options.keep != "none":
            self._registry.figures(tensor, call.range_of(slot))


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0  # a wrapper, or a layout without one
