"""One tensor of a running program: is it one that was seen before, and if not, its record.

A tensor is the same as at its last sight while its storage lives and its version and bytes are
equal. Bytes of a CPU tensor are looked at where they lie; a device tensor goes through the staging
ring, and which record it is shows when its bytes have arrived.

Tensors that a program hands on as the very objects that were recorded, known again by looking at
the object: in a steady program that is nearly every input.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.host import memory_at
from whence.frameworks.torch_arrays import address_of, snapshot
from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.call_frames import Looks
from whence.instrument.session import Content, Form, Origin, Session
from whence.instrument.torch.dtensor_placement import placement_of
from whence.instrument.torch.staged_tensors import StagedTensors, is_recorded_as_graph
from whence.instrument.torch.tensor_content import (
    UNSETTLED,
    Bytes,
    Pending,
    PlainForm,
    SeenTensor,
    content_of,
    expired,
    form_of,
    hash_of,
    increment,
    plain_form,
    sample,
    storage_ref,
)
from whence.records import Call, External, Placement, Ref, Statistics
from whence.records.slots import is_mutated

FindExternal = Callable[[bytes, str, tuple[int, ...], Bytes], External | None]

_MIN_EXTERNAL_BYTES = 1 << 16  # of a parameter that is worth looking for in a checkpoint

_FEW = 1 << 6
"""Tensors that are gone, remembered. What is left of the storage of each, between the tensors of
the program, keeps the allocator from joining the room that these leave.
"""

_GRAPH = "a CUDA graph is recorded: the program computes nothing yet, and reading would break it"


class Sighter(Protocol):
    """The call that sees a tensor. keep: whether elements were wanted when it began. placements: of
    its slots, filled as they are seen.
    """

    scope: str
    keep: bool
    op_type: str
    placements: dict[str, Placement]


class TensorRegistry:
    """Records tensors into a session.

    remembers: a CPU tensor that was seen before is recognised by its version and its memory where
    it lies, of more than `FULL_BYTES` by a sample. Where every operator is seen there is hardly
    another way to write it, and hashing the weights for each would cost as much as all the rest.
    find_external: where a parameter's bytes may already lie in the user's checkpoint file. staged:
    send CPU tensors through the ring too. on_error: called with what failed on the ring's thread.
    busy: called there before anything of the user's may run. looks: of the listener's own code.
    """

    def __init__(
        self,
        session: Session,
        *,
        find_external: FindExternal | None,
        staged: bool,
        on_error: Callable[[Exception], None],
        busy: Callable[[], None],
        looks: Looks,
        remembers: bool = False,
    ) -> None:
        self._session, self._find_external, self._staged = session, find_external, staged
        self._remembers = remembers
        self.staging = StagedTensors(session, on_error, busy, looks)
        self._live: dict[tuple[Any, ...], SeenTensor] = {}
        self._crowded = _FEW
        self._known = KnownTensors()

    def call(self, call: Call, settled: Callable[[Call], Call] | None = None) -> None:
        """Hand over a finished call, behind its tensors. settled: what it is when these have
        arrived.
        """

        def hand_over() -> None:
            arrived = _resolved(call)
            self._session.call(arrived if settled is None else settled(arrived))

        if self.staging.used:
            self.staging.emit(hand_over)
        else:
            self._session.call(call if settled is None else settled(call))

    def prune(self) -> None:
        """Forget tensors that are gone, once as many were seen as were left the last time."""
        known, staging = self._known, self.staging
        if max(len(self._live), len(known), len(staging)) >= self._crowded:
            self._live = {k: s for k, s in self._live.items() if not expired(s.storage.cdata)}
            known.prune()
            staging.prune()
            self._crowded = 2 * max(len(self._live), len(known), len(staging)) + _FEW

    def close(self) -> None:
        """Wait for what is on its way and forget everything."""
        self.staging.close()
        self._live.clear()
        self._known.clear()

    def record_of(
        self,
        tensor: Any,
        slot: str,
        frame: Sighter,
        *,
        parameter: bool = False,
        grows: tuple[ObjectSnapshot, str] | None = None,
        unsettled: bool = False,
        tried: bool = False,
    ) -> tuple[Any, str, Any]:
        """The record of this tensor, how it was known again ("identity", "content" or "" for new),
        and its (dtype, shape, stride).

        grows: the object and the path in it that held an earlier part of this tensor. unsettled: an
        operator that is still running wrote it or made a view of it, so torch has not counted its
        version yet. tried: `again` is not to be asked: it was, or an operator made or wrote this
        just now.
        """
        if not self._remembers:
            known_again = (
                self._known.again(tensor, frame.keep)
                if tensor.is_cpu and not self._staged
                else self.staging.again(tensor, slot, frame, self._write)
            )
            if known_again is not None:
                return known_again
            plain = None if self._staged else plain_form(tensor)
            if plain is not None and (address := address_of(tensor)):
                return self._record_plain(tensor, plain, address, slot, frame, parameter, grows)
        elif not tried:
            known_again = self.again(tensor, frame.keep)
            if known_again is not None:
                return known_again
        look = snapshot(tensor)
        if look.subclass and (placement := placement_of(tensor)) is not None:
            frame.placements[slot] = placement
        if look.unreadable:
            return self.unreadable(look.plain, look.unreadable)
        keep, version = frame.keep, look.version
        form = dtype, shape, stride = look.form
        key = (look.address or look.plain.untyped_storage()._cdata, form)
        previous = self._live.get(key)
        whole = Form(dtype, shape, stride, look.plain.storage_offset(), look.device, look.subclass)
        origin = Origin(frame.scope, slot, frame.op_type, keep)
        if self._staged or look.device != "cpu":
            if is_recorded_as_graph(look.plain.device):
                return self.unreadable(look.plain, _GRAPH)
            write = functools.partial(self._write, whole, origin, parameter and keep, grows)
            plain, look.plain = look.plain, None  # the program's memory is not to be kept alive
            seen, arrival = self.staging.record(
                plain, look, previous, keep, unsettled, write, keep or grows is not None
            )
            self._remember(key, seen)
            if plain is tensor and not (self._remembers or stride or parameter or dtype[0] == "c"):
                self.staging.know(tensor, seen, whole, form)
            return arrival, "", form
        content = content_of(look, probed=self._remembers)
        if previous is not None and previous.is_still(content.digest, version, keep):
            if unsettled:
                previous.version = UNSETTLED
            return previous.id, "content" if version is None else "identity", form
        may_refer = parameter and self._session.elements_on
        number = self._write(whole, origin, may_refer, grows, content, look.plain)
        version, storage = UNSETTLED if unsettled else version, storage_ref(look.plain)
        seen = self._remember(key, SeenTensor(number, content.digest, version, storage, keep))
        seen.probe, seen.span, seen.memory = content.probe, content.span, content.memory
        return number, "", form

    def _record_plain(
        self,
        tensor: Any,
        plain: PlainForm,
        address: int,
        slot: str,
        frame: Sighter,
        parameter: bool,
        grows: tuple[ObjectSnapshot, str] | None,
    ) -> tuple[Any, str, Any]:
        """`record_of` for a plain tensor."""
        keep, form, nbytes = frame.keep, plain.form, plain.nbytes
        memory = memory_at(address, nbytes)
        digest = hash_of(memory)
        version = None if tensor.is_inference() else tensor._version
        key = (address, form)
        seen = self._live.get(key)
        if seen is not None and seen.is_still(digest, version, keep):
            self._known.add(tensor, seen, address, memory, form)
            return seen.id, "content" if version is None else "identity", form
        if seen is not None:
            seen.replaced = True
        offset = tensor.storage_offset()
        whole = Form(form[0], form[1], (), offset) if offset else plain.whole
        origin = Origin(frame.scope, slot, frame.op_type, keep)
        content = Content(digest, address, nbytes)
        may_refer = parameter and self._session.elements_on
        number = self._write(whole, origin, may_refer, grows, content, tensor)
        seen = self._remember(key, SeenTensor(number, digest, version, storage_ref(tensor), keep))
        self._known.add(tensor, seen, address, memory, form)
        return number, "", form

    def _remember(self, key: tuple[Any, ...], seen: SeenTensor) -> SeenTensor:
        self._live[key] = seen
        if len(self._live) >= self._crowded:
            self.prune()
        return seen

    def is_as_it_was(self, tensor: Any, record: Any) -> bool:
        """Is a tensor, as far as one look tells, as it was when this record was made of it?"""
        again = self._known.again(tensor, keep=False)
        return again is not None and again[0] == record

    def _write(
        self,
        form: Form,
        origin: Origin,
        may_refer: bool,
        grows: tuple[ObjectSnapshot, str] | None,
        content: Content,
        value: Any,
    ) -> int:
        """Record a tensor that was not seen before.

        may_refer: elements may be left where they lie in the user's checkpoint. grows: as of
        `record_of`. value: what a user's function on_record gets.
        """
        if grows is not None:
            content.base, content.tail = increment(grows, value, form.dtype, form.shape)
        if may_refer and self._find_external is not None and content.nbytes >= _MIN_EXTERNAL_BYTES:
            content.external = self._find_external(
                content.digest, form.dtype, form.shape, content.array()
            )
        number = self._session.record(form, content, origin, value)
        if grows is not None:
            grows[0].grown[grows[1]] = (number, content.digest, form.shape, form.dtype)
        return number

    def again(self, tensor: Any, keep: bool, base: Any = None) -> tuple[Any, str, Any] | None:
        """The sight of a plain CPU tensor that was seen before and is as it was, None where that is
        not certain.

        base: of a view that an operator makes now: the tensor whose version it will have.
        """
        kind = type(tensor)
        if (
            (kind is not _TENSOR and kind is not _PARAMETER)
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
        ):
            return None
        try:
            pointer = tensor.data_ptr()
            stride = () if tensor.is_contiguous() else tensor.stride()
            form = (_NAMES[tensor.dtype], tensor.shape, stride)
        except (RuntimeError, KeyError, ValueError, NotImplementedError):
            return None  # without memory, of a dtype without a name, nested
        previous = self._live.get((pointer, form))
        if (
            previous is None
            or not previous.span
            or (keep and not previous.has_elements)
            or expired(previous.storage.cdata)
        ):
            return None
        holder = tensor if base is None else base
        version = None if holder.is_inference() else holder._version
        if previous.memory is None:
            # The first look after an operator wrote it, or one by content alone, is at all of it.
            if (
                previous.version is None
                or previous.version != version
                or sample(pointer, previous.span) != previous.probe
            ):
                return None
        elif hash_of(previous.memory) != previous.probe:
            return None
        elif previous.version != version:
            if previous.version != UNSETTLED:
                return None
            previous.version = version
        if tensor.is_neg() or tensor.is_conj():
            return None
        return previous.id, "identity" if version is not None else "content", form

    def unreadable(self, tensor: Any, why: str) -> tuple[Any, str, Any]:
        """A record of the shape of a tensor whose elements cannot be read, or say nothing."""
        form = form_of(tensor)
        return self._session.unreadable(form, why), "", (form.dtype, form.shape, form.stride)

    def figures(self, tensor: Any, take: Callable[[Statistics], None]) -> None:
        """Hand the figures of a tensor to `take`, without a record; of one that cannot be read,
        nothing. Of a device tensor later.
        """
        inner = tensors.plain(tensor)
        dtype = tensors.NAMES.get(tensor.dtype)
        if inner is None or len(inner) != 1 or dtype is None or not address_of(inner[0][1]):
            return
        tensor = inner[0][1]
        if tensor.is_cpu and not self._staged:
            if tensor.is_contiguous() and dtype[0] != "c" and not tensor.is_neg():
                take(host.statistics_at(tensor.data_ptr(), tensor.nbytes, dtype)[0])
            else:
                take(host.statistics(tensors.canonical(tensor), dtype)[0])
            return
        self.staging.figures(tensor, dtype, take)


def resolved(record: Any) -> int:
    """The id of a record; of one that was on its way, when it has arrived."""
    return int(getattr(record, "id", record))


def _resolved(call: Call) -> Call:
    refs: list[Ref] = []
    for ref in call.refs:
        record: Any = ref.record
        if isinstance(record, Pending):
            if is_mutated(ref.slot) and (
                (record.edge and not record.certain) or any(r.record == record.id for r in refs)
            ):
                continue  # looked at because no version tells: it is as it was
            ref = Ref(ref.slot, record.id, ref.edge or record.edge)
        refs.append(ref)
    return msgspec.structs.replace(call, refs=tuple(refs))


_NAMES = tensors.NAMES
_STRIDED, _TENSOR, _PARAMETER = torch.strided, torch.Tensor, torch.nn.Parameter


class _Known(msgspec.Struct, gc=False, eq=False):
    """A tensor object as it was when it was recorded. memory: its bytes, to be read while it lies
    there.
    """

    ref: Any
    seen: SeenTensor
    address: int
    memory: memoryview
    form: tuple[str, tuple[int, ...], tuple[int, ...]]


class KnownTensors:
    """Plain tensors that were recorded, by identity. Keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self,
        tensor: Any,
        seen: SeenTensor,
        address: int,
        memory: memoryview,
        form: tuple[str, tuple[int, ...], tuple[int, ...]],
    ) -> None:
        """Remember a plain tensor that was recorded."""
        self._known[id(tensor)] = _Known(weakref.ref(tensor), seen, address, memory, form)

    def again(self, tensor: Any, keep: bool) -> tuple[Any, str, Any] | None:
        """The sight of a tensor that is the object that was recorded, at the same place, of the
        same version and with the same bytes; None where one look does not tell.
        """
        known = self._known.get(id(tensor))
        if (
            known is None
            or known.ref() is not tensor
            or tensor.data_ptr() != known.address
            or tensor.shape != known.form[1]
            or not tensor.is_contiguous()
        ):
            return None
        seen = known.seen
        version = seen.version
        if (
            seen.replaced
            or (keep and not seen.has_elements)
            or (version is not None and tensor._version != version)
            or hash_of(known.memory) != seen.digest
        ):
            return None
        return seen.id, "content" if version is None else "identity", known.form

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._known = {k: v for k, v in self._known.items() if v.ref() is not None}

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
