"""One tensor of a running program: is it one that was seen before, and if not, its record.

A tensor is the same as at its last sight while its storage lives and its version and bytes are
equal. Bytes of a CPU tensor are looked at where they lie; a device tensor goes through the staging
ring, and which record it is shows when its bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_trees import ObjectSnapshot
from whence.instrument.session import Session
from whence.instrument.torch.dtensor_placement import placement_of
from whence.instrument.torch.staging import StagingRing
from whence.instrument.torch.weak_registry import (
    FULL_BYTES,
    UNSETTLED,
    Pending,
    SeenTensor,
    address_of,
    expired,
    sample,
    span_of,
    storage_ref,
)
from whence.records import Call, External, Placement, Ref, Statistics

FindExternal = Callable[
    [bytes, str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]], External | None
]


class Sighter(Protocol):
    """The call that sees a tensor. keep: whether elements were wanted when it began. placements: of
    its slots, filled as they are seen.
    """

    scope: str
    keep: bool
    placements: dict[str, Placement]

    @property
    def op_type(self) -> str: ...


class TensorRegistry:
    """Records tensors into a session.

    again: a CPU tensor that was seen before is known again by its version and its memory where it
    lies, of more than `FULL_BYTES` by a sample. Where every operator is seen there is hardly
    another way to write it, and hashing the weights for each would cost as much as all the rest.
    find_external: where a parameter's bytes may already lie in the user's checkpoint file. staged:
    send CPU tensors through the ring too. on_error: called with what failed on the ring's thread.
    busy: called there before anything of the user's may run.
    """

    def __init__(
        self,
        session: Session,
        *,
        find_external: FindExternal | None,
        staged: bool,
        on_error: Callable[[Exception], None],
        busy: Callable[[], None],
        again: bool = False,
    ) -> None:
        self._session, self._find_external, self._staged = session, find_external, staged
        self._on_error, self._busy, self._remembers = on_error, busy, again
        self.ring: StagingRing | None = None
        self._live: dict[tuple[Any, ...], SeenTensor] = {}

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors on their way to the sink."""
        return self.ring.waiting_bytes if self.ring is not None else 0

    def emit(self, action: Callable[[], None]) -> None:
        """Do it after everything that was sighted so far has arrived."""
        if self.ring is not None and self.ring.pending:
            self.ring.then(action)
        else:
            action()

    def call(self, call: Call) -> None:
        """Hand over a finished call, behind its tensors."""
        if self.ring is None:
            self._session.call(call)
        else:
            self.emit(lambda: self._session.call(_resolved(call)))

    def drain(self) -> None:
        """Wait until everything that was sighted so far has arrived."""
        if self.ring is not None:
            self.ring.drain()

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._live = {k: s for k, s in self._live.items() if not expired(s.storage.cdata)}

    def close(self) -> None:
        """Wait for what is on its way and forget everything."""
        if self.ring is not None:
            self.ring.close()
        self._live.clear()

    def abandon(self) -> None:
        """In a forked child: the ring's thread is not here."""
        self.ring = None

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

        unsettled: an operator that is still running wrote it or made a view of it, so torch has not
        counted its version yet. tried: `again` is not to be asked: it was, or an operator made or
        wrote this just now.
        """
        kind = type(tensor)
        if self._remembers and not tried:
            found = self.again(tensor, frame.keep)
            if found is not None:
                return found
        session = self._session
        subclass = ""
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            inner = tensors.plain(tensor)
            subclass = "" if kind is torch.nn.Buffer else kind.__name__
            if (placement := placement_of(tensor)) is not None:
                frame.placements[slot] = placement
            if inner is None or len(inner) != 1:
                why = (
                    f"tensor of class {kind.__name__} holds "
                    f"{'no readable elements' if inner is None else f'{len(inner)} tensors'}"
                )
                return self.unreadable(tensor, why)
            tensor = inner[0][1]
        elif (
            not tensor.is_cpu or tensor.layout is not _STRIDED or _is_transformed(tensor)
        ) and not tensors.readable(tensor):
            return self.unreadable(
                tensor, f"no elements to read ({tensor.device.type}, {tensor.layout})"
            )
        if tensor.is_nested:
            return self.unreadable(tensor, "several tensors of different lengths")
        dtype = tensors.NAMES.get(tensor.dtype)
        if dtype is None:
            return self.unreadable(tensor, f"dtype {tensor.dtype} has no host form")
        shape = tuple(tensor.shape)
        version = None if tensor.is_inference() else tensor._version
        contiguous = tensor.is_contiguous()
        stride = () if contiguous else tensor.stride()
        pointer = address_of(tensor)
        form = (dtype, shape, stride)
        if pointer:
            key: tuple[Any, ...] = (pointer, form)
        elif tensor.numel():
            return self.unreadable(tensor, f"no memory of its own to read ({kind.__name__})")
        else:
            key = (tensor.untyped_storage()._cdata, form)
        known = self._live.get(key)
        if self._staged or not tensor.is_cpu:
            return *self._record_staged(
                tensor,
                form,
                version,
                key,
                known,
                slot,
                frame,
                subclass,
                parameter,
                grows,
                unsettled,
            ), form
        data, probe, span, memory = None, b"", 0, None
        if contiguous and dtype[0] != "c" and not tensor.is_neg():
            nbytes = tensor.nbytes
            if self._remembers and nbytes:
                span = nbytes
                if nbytes > FULL_BYTES:
                    digest, probe = host.digest_at(pointer, nbytes), sample(pointer, nbytes)
                else:
                    memory = host.memory_at(pointer, nbytes)
                    digest = probe = _hash(memory)
            else:
                digest = host.digest_at(pointer, nbytes)
        else:
            if self._remembers and pointer and not (tensor.is_neg() or tensor.is_conj()):
                span = span_of(tensor)
                memory = host.memory_at(pointer, span) if 0 < span <= FULL_BYTES else None
                probe = sample(pointer, span) if memory is None else _hash(memory)
            if dtype[0] == "c" or tensor.is_neg():
                data = tensors.canonical(tensor)
                pointer, nbytes = data.__array_interface__["data"][0], data.size
            else:
                copy = tensor.detach().contiguous()
                pointer, nbytes = copy.data_ptr(), copy.nbytes
            digest = host.digest_at(pointer, nbytes)
        if known is not None and known.digest == digest and known.agrees(version, frame.keep):
            if unsettled:
                known.version = UNSETTLED
            return known.id, "content" if version is None else "identity", form
        base = tail = external = None
        if grows is not None:
            base, tail = self._increment(grows, tensor, dtype, shape)
        if (
            parameter
            and self._find_external is not None
            and session.elements_on
            and nbytes >= 1 << 16
        ):
            external = self._find_external(
                digest, dtype, shape, host.bytes_at(pointer, nbytes) if data is None else data
            )
        number = session.record(
            dtype,
            shape,
            data,
            digest,
            scope=frame.scope,
            slot=slot,
            op_type=frame.op_type,
            value=tensor,
            stride=stride,
            storage_offset=tensor.storage_offset(),
            subclass=subclass,
            base=base,
            tail=tail,
            external=external,
            address=pointer,
            nbytes=nbytes,
            keep=frame.keep,
        )
        self._live[key] = SeenTensor(
            number,
            digest,
            UNSETTLED if unsettled else version,
            storage_ref(tensor),
            frame.keep,
            probe,
            span,
            memory,
        )
        if grows is not None:
            grows[0].grown[grows[1]] = (number, digest, shape, dtype)
        return number, "", form

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
            form = (
                _NAMES[tensor.dtype],
                tensor.shape,
                () if tensor.is_contiguous() else tensor.stride(),
            )
        except (
            RuntimeError,
            KeyError,
            ValueError,
            NotImplementedError,
        ):  # without memory, of a dtype without a name, nested
            return None
        known = self._live.get((pointer, form))
        if (
            known is None
            or not known.span
            or (keep and not known.kept)
            or expired(known.storage.cdata)
        ):
            return None
        holder = tensor if base is None else base
        version = None if holder.is_inference() else holder._version
        if known.memory is None:
            # The first look after an operator wrote it, or one by content alone, is at all of it.
            if (
                known.version is None
                or known.version != version
                or sample(pointer, known.span) != known.probe
            ):
                return None
        elif _hash(known.memory) != known.probe:
            return None
        elif known.version != version:
            if known.version != UNSETTLED:
                return None
            known.version = version
        if tensor.is_neg() or tensor.is_conj():
            return None
        return known.id, "identity" if version is not None else "content", form

    def unreadable(self, tensor: Any, why: str) -> tuple[Any, str, Any]:
        """A record of the shape of a tensor whose elements cannot be read, or say nothing."""
        dtype = tensors.dtype_name(tensor) or str(tensor.dtype).removeprefix("torch.")
        shape = () if tensor.is_nested else tuple(tensor.shape)
        kind = type(tensor).__name__
        subclass = "" if kind in ("Tensor", "Parameter") else kind
        stride: tuple[int, ...] = ()
        offset = 0
        if tensor.layout is torch.strided and not tensor.is_nested:
            stride, offset = (
                () if tensor.is_contiguous() else tensor.stride(),
                tensor.storage_offset(),
            )
        number = self._session.unreadable(
            dtype,
            shape,
            why,
            device=str(tensor.device),
            subclass=subclass,
            stride=stride,
            storage_offset=offset,
        )
        return number, "", (dtype, shape, stride)

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
        if self.ring is None:
            self.ring = StagingRing(on_error=self._on_error)
        self.ring.submit(tensor, lambda data, _: take(host.statistics(data, dtype)[0]))

    def _increment(
        self, grows: tuple[ObjectSnapshot, str], tensor: Any, dtype: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, int] | None, np.ndarray[Any, np.dtype[np.uint8]] | None]:
        """A cache that grew along one axis: (record, axis) and the bytes of what was added, if the
        old part is unchanged bit by bit.
        """
        old = grows[0].grown.get(grows[1])
        if old is None or old[3] != dtype or len(old[2]) != len(shape):
            return None, None
        axes = [i for i, (a, b) in enumerate(zip(old[2], shape)) if a != b]
        if len(axes) != 1 or old[2][axes[0]] >= shape[axes[0]] or old[2][axes[0]] == 0:
            return None, None
        axis, tensor = axes[0], tensor.detach()
        before = tensors.canonical(tensor.narrow(axis, 0, old[2][axis]))
        if host.digest(before) != old[1]:
            return None, None
        return (old[0], axis), tensors.canonical(
            tensor.narrow(axis, old[2][axis], shape[axis] - old[2][axis])
        )

    def _record_staged(
        self,
        tensor: Any,
        form: tuple[str, tuple[int, ...], tuple[int, ...]],
        version: int | None,
        key: tuple[Any, ...],
        known: SeenTensor | None,
        slot: str,
        frame: Sighter,
        subclass: str,
        parameter: bool,
        grows: tuple[ObjectSnapshot, str] | None,
        unsettled: bool,
    ) -> tuple[Pending, str]:
        """A device tensor: cloned on its stream, copied by the ring; which record it is shows when
        its bytes have arrived.

        It is copied at every sight: a kernel that wrote it may have left the version as it was.
        """
        if self.ring is None:
            self.ring = StagingRing(on_error=self._on_error)
        session, op_type, device, keep = (
            self._session,
            frame.op_type,
            str(tensor.device),
            frame.keep,
        )
        scope, offset, (dtype, shape, stride) = frame.scope, tensor.storage_offset(), form
        earlier = known if known is not None and known.agrees(version, frame.keep) else None
        pending = Pending()
        storage = earlier.storage if earlier is not None else storage_ref(tensor)
        now = self._live[key] = SeenTensor(
            pending, b"", UNSETTLED if unsettled else version, storage, frame.keep
        )

        def arrived(data: np.ndarray[Any, np.dtype[np.uint8]], copied: Any) -> None:
            self._busy()  # of the ring's thread: a module that on_record calls is not the program's
            now.digest = digest = host.digest(data)
            if earlier is not None and earlier.digest == digest:
                pending.id, pending.edge = (
                    earlier.id.id,
                    "content" if version is None else "identity",
                )
                return
            base = tail = external = None
            if grows is not None:
                base, tail = self._increment(grows, copied, dtype, shape)
            if parameter and self._find_external is not None and keep and data.size >= 1 << 16:
                external = self._find_external(digest, dtype, shape, data)
            pending.id = session.record(
                dtype,
                shape,
                data,
                digest,
                scope=scope,
                slot=slot,
                op_type=op_type,
                value=copied,
                stride=stride,
                storage_offset=offset,
                device=device,
                subclass=subclass,
                base=base,
                tail=tail,
                external=external,
                keep=keep,
            )
            if grows is not None:
                grows[0].grown[grows[1]] = (pending.id, digest, shape, dtype)

        self.ring.submit(tensor, arrived)
        return pending, ""


def _resolved(call: Call) -> Call:
    refs: list[Ref] = []
    for ref in call.refs:
        record: Any = ref.record
        if isinstance(record, Pending):
            if ref.slot.startswith("mutated") and (
                (record.edge and not record.certain) or any(r.record == record.id for r in refs)
            ):
                continue  # looked at because no version tells: it is as it was
            ref = Ref(ref.slot, record.id, ref.edge or record.edge)
        refs.append(ref)
    return msgspec.structs.replace(call, refs=tuple(refs))


_NAMES = tensors.NAMES
_STRIDED, _TENSOR, _PARAMETER = torch.strided, torch.Tensor, torch.nn.Parameter
_hash = xxhash.xxh3_128_digest
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
