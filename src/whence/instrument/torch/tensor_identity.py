"""Decides whether a tensor of a running program was recorded before, and records it if not.

A tensor counts as already recorded while its storage is alive and its version and bytes are
unchanged. The bytes of a CPU tensor are read in place. A device tensor is copied through the
staging ring, so the decision is made when its bytes arrive on the host.

Most inputs of a steady program are the very Python objects that were recorded earlier; those are
recognised by object identity (`KnownTensors`).
"""

from __future__ import annotations

import array
import functools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.host import memory_at
from whence.frameworks.torch_arrays import TensorSnapshot, address_of, snapshot
from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.call_frames import Looks
from whence.instrument.session import Content, Form, Origin, Session
from whence.instrument.torch import device_figures
from whence.instrument.torch.device_figures import DeviceReader, Layout, stream_of
from whence.instrument.torch.dtensor_placement import placement_of
from whence.instrument.torch.tensor_content import (
    UNSETTLED,
    Bytes,
    Pending,
    PlainForm,
    SeenTensor,
    Sighter,
    content_of,
    expired,
    form_of,
    hash_of,
    increment,
    plain_form,
    sample,
    storage_ref,
)
from whence.records import Call, External, Ref, Sketch, Statistics
from whence.records.slots import is_mutated

FindExternal = Callable[[bytes, str, tuple[int, ...], Bytes], External | None]

_MIN_EXTERNAL_BYTES = 1 << 16  # of a parameter that is worth looking for in a checkpoint

_FEW = 1 << 6
"""Dead tensors are pruned when more than this number, plus twice the number left by the last prune,
are registered. The remains of dead storages lie between live allocations and keep the allocator
from merging freed memory, so they must stay few.
"""

_GRAPH = "a CUDA graph is recorded: the program computes nothing yet, and reading would break it"


class TensorRegistry:
    """Records tensors into a session.

    remembers: recognise a CPU tensor that was recorded before by its version and its memory in
    place (a sample of it above `FULL_BYTES`). Used where every operator is observed: then hardly
    any write goes unseen, and hashing the weights for every operator would cost as much as the rest
    of the capture. find_external: returns where a parameter's bytes already lie in the user's
    checkpoint file, or None. staged: send CPU tensors through the ring too. on_error: called on the
    ring's thread with the exception that stopped it. busy: called on the ring's thread before user
    code may run. looks: tracks when whence's own code runs.
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
        """Pass on a call, after its tensors. settled: its final form, once they are in."""

        def hand_over() -> None:
            arrived = _resolved(call)
            self._session.call(arrived if settled is None else settled(arrived))

        if self.staging.used:
            self.staging.emit(hand_over)
        else:
            self._session.call(call if settled is None else settled(call))

    def prune(self) -> None:
        """Forget dead tensors, once the tables have doubled since the last prune."""
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
        """The record id of this tensor, how it was recognised ("identity", "content", or "" for a
        new record), and its (dtype, shape, stride).

        grows: the object, and the path in it, that held an earlier, shorter version of this tensor
        (a cache). unsettled: a running operator wrote this tensor or made it as a view, so torch
        has not increased its version yet. tried: skip `again`, because it was called before or
        because an operator has just made or written this tensor.
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
        """Whether one check finds the tensor unchanged since this record was made of it. False
        where one check cannot tell.
        """
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
        """Record a new tensor and return the record's id.

        may_refer: the elements may stay in the user's checkpoint file, with a reference in the run.
        grows: as in `record_of`. value: the tensor that the user's on_record function gets.
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
        """(record, edge, form) of a plain CPU tensor that was recorded before and is unchanged;
        None where that is not certain.

        base: for a view that an operator is just making: the tensor whose version the view will
        have.
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
            # The version is unknown (inference tensor) or changed: only all bytes would tell.
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
        """Record only the form of a tensor whose elements cannot be read or have no meaning yet.
        why: the reason, for the run.
        """
        form = form_of(tensor)
        return self._session.unreadable(form, why), "", (form.dtype, form.shape, form.stride)

    def figures(self, tensor: Any, take: Callable[[Statistics], None]) -> None:
        """Call `take` with the statistics of a tensor without recording it; later, on the ring's
        thread, for a device tensor. A tensor that cannot be read is skipped.
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
    """The id of a record. A `Pending` must have arrived before this is called."""
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
    """State of a tensor object when it was recorded. memory: a view of its bytes, valid only while
    the tensor still lies at `address`.
    """

    ref: Any
    seen: SeenTensor
    address: int
    memory: memoryview
    form: tuple[str, tuple[int, ...], tuple[int, ...]]


class KnownTensors:
    """Plain tensors that were recorded, by object identity. Holds weak references only."""

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
        """(record, edge, form) of a tensor that is the very object recorded, at the same address
        with the same version and bytes; None where one check cannot tell.
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


# Tensors that go through the staging ring. Which record a tensor belongs to is known only when its
# bytes have arrived on the host.
#
# The ring copies device tensors to the host without stopping the program: pinned memory is reused,
# and threads compute digests and figures of what has arrived. For a tensor whose elements nobody
# wants, only the results of a kernel on the device are transferred (`device_figures`).
#
# A tensor is copied into a chunk of pinned memory, after the work already queued on its stream and
# before what the program queues next; the program's thread goes on, and nothing is allocated on the
# device. The tensors in one chunk form one batch: one event, one call without the GIL for all
# digests and figures, then everything is handed over on one thread in order of submission. A thread
# that woke up for every tensor would take the GIL from the program thousands of times in a forward
# pass. The ring is bounded in bytes: `submit` waits when it is full.

_Form = tuple[str, tuple[int, ...], tuple[int, ...]]


class _HandedOn(msgspec.Struct, gc=False, eq=False):
    """State of a device tensor object when it was recorded. The record in `seen` may still change
    when the bytes arrive.
    """

    ref: Any
    seen: SeenTensor
    address: int
    dtype: Any
    whole: Form
    form: _Form

    def is_still(self, tensor: Any, keep: bool) -> bool:
        """Whether `tensor` is the recorded object, at the same address and with the same version.
        keep: whether its elements are wanted.
        """
        seen = self.seen
        version = seen.version
        return (
            self.ref() is tensor
            and not seen.replaced
            and keep == seen.has_elements
            and (version is None or tensor._version == version)
            and tensor.data_ptr() == self.address
            and tensor.dtype is self.dtype
            and tensor.shape == self.form[1]
            and tensor.is_contiguous()
            and not tensor.is_neg()
        )


class StagedTensors:
    """Copies tensors to the host through a staging ring and records them when they arrive. The ring
    is created for the first tensor.

    on_error: called on the ring's thread with the exception that stopped it. busy: called on the
    ring's thread before user code may run. looks: tracks when whence's own code runs.
    """

    def __init__(
        self,
        session: Session,
        on_error: Callable[[Exception], None],
        busy: Callable[[], None],
        looks: Looks,
    ) -> None:
        self._session, self._on_error, self._busy, self._looks = session, on_error, busy, looks
        self._ring: StagingRing | None = None
        self._known: dict[int, _HandedOn] = {}
        self._told = False

    def __len__(self) -> int:
        return len(self._known)

    # ---- the ring

    @property
    def used(self) -> bool:
        """Whether any tensor was sent through the ring."""
        return self._ring is not None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors on their way to the sink."""
        return self._ring.waiting_bytes if self._ring is not None else 0

    def emit(self, action: Callable[[], None]) -> None:
        """Run `action` after all tensors submitted so far have arrived."""
        if self._ring is not None and self._ring.pending:
            self._ring.then(action)
        else:
            action()

    def begin_step(self, root: str) -> None:
        """Begin a step of a root. Waits for pending tensors only where their bytes decide whether
        the elements of the step still fit.
        """
        session = self._session
        if session.step_fits(root, self.waiting_bytes):
            self.emit(lambda: session.begin_step(root))
        else:
            self.drain()
            session.begin_step(root)

    def flush(self) -> None:
        """Start handing over all tensors submitted so far."""
        if self._ring is not None:
            self._ring.flush()

    def drain(self) -> None:
        """Wait until all tensors submitted so far have arrived."""
        if self._ring is not None:
            self._ring.drain()

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._known = {k: v for k, v in self._known.items() if v.ref() is not None}

    def close(self) -> None:
        """Wait for what is on its way and forget everything."""
        if self._ring is not None:
            self._ring.close()
        self._known.clear()

    def abandon(self) -> None:
        """Drop the ring in a forked child without freeing its memory: the ring's threads do not
        exist there.
        """
        self._abandoned, self._ring = self._ring, None

    def _submit(
        self,
        tensor: Any,
        arrived: Callable[[Arrival], None],
        dtype: str,
        *,
        known: bool = False,
        wants_bytes: bool = True,
        canonical: bool = False,
    ) -> None:
        """Send a tensor through the ring.

        dtype: of the requested figures, "" for a dtype without a name. known: the tensor may be one
        already recorded, so figures are taken in transit only if its bytes are not copied;
        otherwise they can be computed from the bytes later. canonical: the memory of the tensor is
        known to hold its canonical bytes.
        """
        ring = self._ring
        if ring is None:
            ring = self._ring = StagingRing(on_error=self._on_error, looks=self._looks)
        if not self._session.measures:
            dtype = ""
        if not wants_bytes and self._may_read(ring, tensor.device):
            if not canonical:
                tensor, canonical = _canonical_on_device(tensor), True
            layout = device_figures.layout(tensor, dtype)
            if layout is not None:
                ring.describe(tensor, arrived, dtype, layout)
                return
        ring.submit(tensor, arrived, "" if known else dtype, canonical=canonical)

    def _may_read(self, ring: StagingRing, device: Any) -> bool:
        reads = ring.reader.reads(device)
        if ring.reader.problem and not self._told:
            self._told = True
            self._session.note(
                "device",
                f"statistics of tensors on {device} are taken on the processor, which takes "
                f"longer: the Triton kernel did not run there ({ring.reader.problem})",
            )
        return reads

    # ---- tensors

    def record(
        self,
        tensor: Any,
        look: TensorSnapshot,
        previous: SeenTensor | None,
        keep: bool,
        unsettled: bool,
        write: Callable[[Content, Any], int],
        wants_bytes: bool,
    ) -> tuple[SeenTensor, Pending]:
        """Send a tensor to the host. Returns what is remembered to recognise it later, and its
        pending record.

        write: makes the record on arrival if the bytes differ from those of `previous`.
        wants_bytes: whether `write` needs the elements. The tensor is copied at every sight, since
        a kernel that wrote it may have left its version unchanged.
        """
        version = look.version
        earlier = previous if previous is not None and previous.may_be(version, keep) else None
        if previous is not None:
            previous.replaced = True
        pending = Pending()
        storage = earlier.storage if earlier is not None else storage_ref(tensor)
        now = SeenTensor(pending, b"", UNSETTLED if unsettled else version, storage, keep)

        def arrived(got: Arrival) -> None:
            now.digest = digest = got.digest
            if earlier is not None and earlier.digest == digest:
                edge = "content" if version is None else "identity"
                pending.id, pending.edge = earlier.id.id, edge
            else:
                pending.id = self._written(got, write)

        self._submit(
            tensor,
            arrived,
            look.form[0],
            known=earlier is not None,
            wants_bytes=wants_bytes or self._session.shows_values,
        )
        return now, pending

    def know(self, tensor: Any, seen: SeenTensor, whole: Form, form: _Form) -> None:
        """Remember the object of a plain tensor that was recorded and whose memory holds its
        canonical bytes.
        """
        self._known[id(tensor)] = _HandedOn(
            weakref.ref(tensor), seen, tensor.data_ptr(), tensor.dtype, whole, form
        )

    def again(
        self, tensor: Any, slot: str, frame: Sighter, write: Callable[..., int]
    ) -> tuple[Pending, str, _Form] | None:
        """(pending record, edge, form) of an object that was recorded before: like `record`, but
        without taking a new snapshot of the tensor. None for any other object.
        """
        known, ring = self._known.get(id(tensor)), self._ring
        if (
            known is None
            or ring is None
            or not known.is_still(tensor, frame.keep)
            or is_recorded_as_graph(tensor.device)
        ):
            return None
        seen, whole, pending = known.seen, known.whole, Pending()
        scope, op_type, keep = frame.scope, frame.op_type, frame.keep

        def arrived(got: Arrival) -> None:
            if got.digest == seen.digest:
                pending.id = seen.id.id
                pending.edge = "content" if seen.version is None else "identity"
                return
            seen.digest, seen.id = got.digest, pending
            origin = Origin(scope, slot, op_type, keep)
            pending.id = self._written(
                got, lambda content, value: write(whole, origin, False, None, content, value)
            )

        wants_bytes = keep or self._session.shows_values
        dtype = known.form[0]
        self._submit(tensor, arrived, dtype, known=True, wants_bytes=wants_bytes, canonical=True)
        return pending, "", known.form

    def _written(self, got: Arrival, write: Callable[[Content, Any], int]) -> int:
        self._busy()  # of the ring's thread: a module that on_record calls is not the program's
        content = Content(got.digest, got.address, got.nbytes, known=got.figures)
        return write(content, got.copied.clone() if self._session.shows_values else got.copied)

    def figures(self, tensor: Any, dtype: str, take: Callable[[Statistics], None]) -> None:
        """Call `take` with the statistics of a tensor when it has arrived."""

        def arrived(got: Arrival) -> None:
            take((got.figures or host.statistics_at(got.address, got.nbytes, dtype))[0])

        self._submit(tensor, arrived, dtype, wants_bytes=False)


def is_recorded_as_graph(device: Any) -> bool:
    """Whether the current stream of this device is being captured into a CUDA graph, so that
    kernels are recorded and not executed.
    """
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


_RING_BYTES = 512 << 20
"""Upper limit of pinned memory in bytes; it is allocated when first needed."""
CHUNK_BYTES = 32 << 20
"""Size in bytes of one pinned allocation (16 ms each); a larger tensor gets a chunk of its own."""
_BATCH_ENTRIES = 512
"""Most entries in one batch; larger batches wake the threads less often."""
SHARED_BYTES = 1 << 20
"""Batches of at least this many bytes are described by a helper thread, not by the thread that
hands them over.
"""
_HELPERS = 8
AGE_S = 0.25
"""Seconds after which an open batch is handed over although it is not full, for example because the
program hangs.
"""
_ALIGNED = 64


class StagingRing:
    """Copies device tensors to the host and runs actions after them, in order of submission, on one
    thread.

    limit_bytes: most bytes that may wait (a larger tensor waits alone). on_error: called once, from
    the ring's thread, with the first exception; nothing runs after it. The methods may be called
    from several threads, but not from the ring's own.
    """

    def __init__(
        self,
        on_error: Callable[[Exception], None],
        limit_bytes: int = _RING_BYTES,
        looks: Looks | None = None,
    ) -> None:
        # Batches not handed over yet, in order; only the last one may be open. A Ctrl-C can come
        # between any two steps of `submit`, so no separate count is kept that could become wrong.
        self._batches: deque[Batch] = deque()
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._limit = limit_bytes
        self._chunk_bytes = min(CHUNK_BYTES, -(-limit_bytes // _ALIGNED) * _ALIGNED)
        self._free: list[Chunk] = []
        self._on_error = on_error
        self._looks = looks or Looks()
        self._looks.finish = self._read
        self.reader = DeviceReader()
        self._dead = self._closed = False
        self._tasks: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._work, name="whence-staging", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether any entry is not handed over yet."""
        return any(batch.entries or batch.sealed for batch in tuple(self._batches))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors not yet handed over."""
        return sum([batch.nbytes for batch in tuple(self._batches)])

    def submit(
        self,
        tensor: Any,
        arrived: Callable[[Arrival], None],
        dtype: str = "",
        *,
        canonical: bool = False,
    ) -> None:
        """Queue a copy of `tensor` to the host and return at once; `arrived` is called later with
        the result, on the ring's thread.

        tensor: strided, readable, on any device. dtype: whence's name of the dtype where figures
        are wanted. canonical: the memory of the tensor is known to hold its canonical bytes. Raises
        what torch raises when there is no memory for the copy.
        """
        nbytes = tensor.nbytes
        with self._lock:
            batch = self._with_room(nbytes)
            if batch is None:
                return
            address, copied = 0, None
            if batch.chunk is not None and nbytes:
                offset = batch.end
                # Reserve the room before filling it, since a Ctrl-C may come in between.
                batch.end += (nbytes + _ALIGNED - 1) & -_ALIGNED
                address, copied = batch.chunk.copy(
                    tensor.detach() if canonical else _canonical_on_device(tensor),
                    offset,
                    batch.events,
                )
            else:
                copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            batch.entries.append(Arrival(address, nbytes, dtype, copied, arrived))
            batch.nbytes += nbytes
            if len(batch.entries) >= _BATCH_ENTRIES:
                self._seal()

    def describe(
        self, tensor: Any, arrived: Callable[[Arrival], None], dtype: str, layout: Layout
    ) -> None:
        """Like `submit`, for a tensor whose bytes nobody wants: a kernel reads it on its device,
        and `arrived` gets only its digest and figures. The kernel is launched before whence's own
        code returns to the program.

        tensor: its memory holds its canonical bytes, on a device that `reader` can read. layout:
        how the kernel reads it.
        """
        with self._lock:
            batch = self._with_room(layout.nbytes, layout.pieces)
            if batch is None:
                return
            assert batch.chunk is not None
            out = batch.chunk.address + batch.end
            batch.end += (layout.nbytes + _ALIGNED - 1) & -_ALIGNED
            key = tensor.device, stream_of(tensor.device)
            device_figures.add_rows(batch.unread.setdefault(key, []), tensor, layout, out)
            batch.rows += layout.pieces
            batch.read_soon.append(tensor)
            batch.entries.append(Arrival(out, tensor.nbytes, dtype, None, arrived))
            batch.nbytes += layout.nbytes
            self._looks.pending = True
            if len(batch.entries) >= _BATCH_ENTRIES:
                self._seal()
            elif not self._looks.deferred:
                self._read()

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` after everything submitted so far has arrived."""
        with self._lock:
            if not (self._dead or self._closed):
                batch = self._open() or self._new_batch()
                batch.entries.append(action)
                if len(batch.entries) >= _BATCH_ENTRIES:
                    self._seal()

    def flush(self) -> None:
        """Begin to hand over everything submitted so far."""
        with self._lock:
            self._seal()

    def drain(self) -> None:
        """Wait until everything submitted so far has been handed over, or the ring died."""
        with self._lock:
            self._seal()
            sealed = [batch for batch in self._batches if batch.sealed]
            while sealed and sealed[-1] in self._batches and not self._dead:
                self._room.wait()

    def close(self) -> None:
        """Wait until everything has been handed over, then end the threads. Idempotent; what is
        submitted later is dropped.
        """
        with self._lock:
            self._closed = True
            self._seal()
            self._room.notify_all()
        self._thread.join()
        for _ in self._helpers:
            self._tasks.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()
        self._free.clear()

    # ---- everything below until `_work` runs under the lock

    def _open(self) -> Batch | None:
        last = self._batches[-1] if self._batches else None
        return None if last is None or last.sealed else last

    def _new_batch(self) -> Batch:
        batch = Batch()
        self._batches.append(batch)
        return batch

    def _read(self) -> None:
        """Launch the pending kernels of the open batch."""
        with self._lock:
            self._looks.pending = False
            if (batch := self._open()) is not None and batch.unread:
                batch.read(self.reader)

    def _with_room(self, nbytes: int, rows: int = 0) -> Batch | None:
        """The open batch with room for `nbytes` bytes and `rows` rows of the kernel's table; None
        once the ring is closed or dead.
        """
        while not (self._dead or self._closed):
            batch = self._open()
            if batch is not None and not batch.has_room(nbytes, rows):
                self._seal()
                batch = None
            if batch is None:
                batch = self._new_batch()
            if batch.chunk is None and nbytes:
                batch.chunk = self._chunk(nbytes)
            if batch.chunk is not None or not nbytes:
                return batch
            self._seal()
            self._room.wait()
        return None

    def _chunk(self, nbytes: int) -> Chunk | None:
        """A free chunk of at least `nbytes` bytes, None while all allowed memory is in use."""
        large = nbytes > self._chunk_bytes
        size = 1 << (nbytes - 1).bit_length() if large else self._chunk_bytes
        for chunk in self._free:
            if chunk.nbytes == size:
                self._free.remove(chunk)
                return chunk
        in_use = sum([b.chunk.nbytes for b in self._batches if b.chunk is not None])
        if in_use and in_use + size > self._limit:
            return None
        while self._free and in_use + size + sum([c.nbytes for c in self._free]) > self._limit:
            self._free.pop(0)
        return Chunk(size)

    def _seal(self) -> None:
        """Close the open batch, so that it is handed over next in order."""
        batch = self._open()
        if batch is None or not batch.entries:
            return
        if batch.unread:
            batch.read(self.reader)
        batch.sealed = True
        if batch.nbytes >= SHARED_BYTES and len(self._batches) > 1:
            self._tasks.put(batch)
            if len(self._helpers) < min(_HELPERS, len(self._batches) - 1, _processors() - 1):
                helper = threading.Thread(target=self._help, name="whence-figures", daemon=True)
                self._helpers.append(helper)
                helper.start()
        self._room.notify_all()

    # ---- the threads

    def _help(self) -> None:
        """Compute digests and figures of batches, in any order (helper thread)."""
        while (batch := self._tasks.get()) is not None:
            if not batch.is_claimed():
                batch.describe()

    def _next(self) -> Batch | None:
        """The next batch to hand over, None once the ring is closed and empty. Waits for it."""
        with self._room:
            while True:
                first = self._batches[0] if self._batches else None
                if first is not None and first.sealed:
                    return first
                if self._closed:  # all that had entries was sealed before
                    return None
                seen = len(first.entries) if first is not None else 0
                if not self._room.wait(AGE_S) and seen and self._may_end(first):
                    self._seal()

    def _may_end(self, batch: Batch | None) -> bool:
        """Whether this is the open batch and no kernel still has to read a tensor of it."""
        return batch is not None and batch is self._open() and not batch.unread

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if not self._dead:
                try:
                    self._hand_over(batch)
                except Exception as error:  # noqa: BLE001 - anything here ends the capture, never the program
                    with self._room:
                        self._dead = True
                        # a thread that waits for room would wait forever
                        self._room.notify_all()
                    self._on_error(error)
            batch.entries.clear()
            with self._room:
                self._batches.popleft()
                if batch.chunk is not None and not self._closed:
                    self._free.append(batch.chunk)
                del batch
                self._room.notify_all()

    def _hand_over(self, batch: Batch) -> None:
        if batch.is_claimed():
            batch.described.wait()
        else:
            batch.describe()
        if batch.error is not None:
            raise batch.error
        for entry in batch.entries:
            if type(entry) is Arrival:
                entry.arrived(entry)
            else:
                entry()  # type: ignore[operator]


def _canonical_on_device(tensor: Any) -> Any:
    """The tensor itself if its memory holds its canonical bytes, else a canonical copy on the same
    device.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Host memory that serves one batch at a time, and the batch: the tensors in it are described in one
# call.


class Arrival(msgspec.Struct, gc=False, eq=False):
    """A submitted tensor as it arrives on the host: `nbytes` canonical bytes at `address`, a memory
    that the tensor `copied` shares. Valid until `arrived` returns.

    copied: None where a kernel read the tensor on its device; then its bytes are not on the host.
    dtype: of the requested figures, "" for none. figures: None where they were not computed during
    the transfer.
    """

    address: int
    nbytes: int
    dtype: str
    copied: Any
    arrived: Callable[[Arrival], None]
    digest: bytes = b""
    figures: tuple[Statistics, Sketch] | None = None

    @property
    def is_in_units(self) -> bool:
        """Whether the memory at `address` holds the results that a kernel computed per unit,
        instead of the tensor's bytes.
        """
        return self.copied is None and self.nbytes >= host.DIGEST_BYTES


class Chunk:
    """Host memory that serves one batch at a time, pinned where there is an accelerator."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):  # written in any mode later
            self._memory = torch.empty(
                nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.accelerator.is_available()
            )
        self.nbytes, self.address = nbytes, self._memory.data_ptr()
        self._views: dict[Any, Any] = {}
        self._events: dict[Any, Any] = {}
        self._table: Any = None
        self._table_address = 0

    def copy(self, tensor: Any, offset: int, events: dict[Any, Any]) -> tuple[int, Any]:
        """Copy a detached, canonical tensor to byte `offset` of the chunk. Returns the address and
        the copy. events: gets the event to wait for before the copy is read, one event for each
        stream.
        """
        dtype, device = tensor.dtype, tensor.device
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = _viewed(self._memory, dtype)
        copied = view.as_strided(tensor.shape, tensor.stride(), offset // dtype.itemsize)
        background = copies_in_the_background(device)
        copied.copy_(tensor, non_blocking=background)
        if background:
            self.mark(device, stream_of(device), events)
        return self.address + offset, copied

    def mark(self, device: Any, stream: Any, events: dict[Any, Any]) -> None:
        """Record an event after the work queued so far on the current stream of a device, and add
        it to `events`.
        """
        key = device, stream
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = torch.Event(device, blocking=True)
        event.record()
        events[key] = event

    def write_rows(self, first: int, rows: list[int]) -> int:
        """Write numbers into the kernel's table after the `first` numbers that are there. Returns
        their address.
        """
        if self._table is None:
            with torch.inference_mode(False):
                table = torch.empty(
                    device_figures.TABLE_ROWS * len(device_figures.COLUMNS),
                    dtype=torch.int64,
                    device="cpu",
                    pin_memory=self._memory.is_pinned(),
                )
            self._table = memoryview(table.numpy()).cast("B").cast("q")
            self._table_address = table.data_ptr()
        self._table[first : first + len(rows)] = array.array("q", rows)
        return int(self._table_address + 8 * first)


class Batch:
    """Entries that are handed over together: arrivals, and actions between them. sealed: nothing
    more is added. described: set once digests and figures are computed or `error` is set.
    """

    def __init__(self) -> None:
        self.chunk: Chunk | None = None
        self.entries: list[Arrival | Callable[[], None]] = []
        self.events: dict[Any, Any] = {}
        self.nbytes = self.end = 0
        # The tables that kernels read: rows in all, numbers already written, and by (device,
        # stream) the rows of tensors still to be read, with these tensors.
        self.rows = self.written = 0
        self.unread: dict[tuple[Any, Any], list[int]] = {}
        self.read_soon: list[Any] = []
        self.sealed = False
        self.described = threading.Event()
        self.error: Exception | None = None
        self._claim = threading.Lock()

    def has_room(self, nbytes: int, rows: int = 0) -> bool:
        """Whether `nbytes` more bytes and `rows` more rows of the kernel's table fit into this
        batch.
        """
        return self.rows + rows <= device_figures.TABLE_ROWS and (
            self.chunk is None or self.end + nbytes <= self.chunk.nbytes
        )

    def read(self, reader: DeviceReader) -> None:
        """Launch the kernel for all tensors of this batch that are still to be read."""
        unread, self.unread = self.unread, {}
        for (device, stream), rows in unread.items():
            if device_figures.is_current(device, stream):
                self._launch(reader, device, stream, rows)
            else:
                with device_figures.made_current(device, stream):
                    self._launch(reader, device, stream, rows)
        self.read_soon.clear()

    def _launch(self, reader: DeviceReader, device: Any, stream: Any, rows: list[int]) -> None:
        assert self.chunk is not None
        table = self.chunk.write_rows(self.written, rows)
        self.written += len(rows)
        reader.launch(device, stream, table, len(rows) // len(device_figures.COLUMNS))
        if copies_in_the_background(device):
            self.chunk.mark(device, stream, self.events)

    def is_claimed(self) -> bool:
        """Whether another thread has claimed the description of this batch. If not, the caller
        claims it.
        """
        return not self._claim.acquire(blocking=False)

    def describe(self) -> None:
        """Wait for the copies, then compute digests and figures of all arrivals."""
        try:
            for event in self.events.values():
                event.synchronize()
            arrivals = [e for e in self.entries if type(e) is Arrival]
            for describe, in_units in ((host.describe_many, False), (host.join_units, True)):
                some = [e for e in arrivals if e.is_in_units is in_units]
                described = describe([(e.address, e.nbytes, e.dtype) for e in some])
                for arrival, (digest, figures) in zip(some, described):
                    arrival.digest, arrival.figures = digest, figures
        except Exception as error:  # noqa: BLE001 - raised again by the thread that hands over
            self.error = error
        self.described.set()


def _viewed(memory: Any, dtype: Any) -> Any:
    with torch.inference_mode(False):
        return memory.view(dtype)


def copies_in_the_background(device: Any) -> bool:
    """Whether the device is the current accelerator, whose copies into pinned memory run
    asynchronously.
    """
    if device not in _background:
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        _background[device] = accelerator is not None and accelerator.type == device.type
    return _background[device]


_background: dict[Any, bool] = {}
