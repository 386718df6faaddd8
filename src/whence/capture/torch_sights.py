"""One tensor of a running program: is it one that was seen before, and if not, its record.

A tensor is the same as at its last sight while its storage lives and its version and bytes are equal. Bytes of a CPU tensor are looked
at where they lie; a device tensor goes through the staging ring, and which record it is shows when its bytes have arrived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from whence.arrays import host
from whence.arrays import torch as tensors
from whence.capture.session import Session
from whence.capture.torch_known import UNSETTLED, Pending, Seen, StorageRef, address_of
from whence.capture.torch_objects import Watched
from whence.capture.torch_staging import Ring
from whence.records import Call, External, Ref, Statistics

FindExternal = Callable[[bytes, str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]], External | None]


class Sighter(Protocol):
    """The call that sees a tensor. keep: whether elements were wanted when it began."""

    scope: str
    keep: bool

    @property
    def op_type(self) -> str: ...


class Sights:
    """Records tensors into a session.

    sampled: of a CPU tensor with a version that was seen before, a sample of the bytes tells whether it is the same. Where every operator
    is seen there is hardly another way to write it, and hashing the inputs of each would cost as much as all the rest.
    find_external: where a parameter's bytes may already lie in the user's checkpoint file. staged: send CPU tensors through the ring
    too. on_error: called with what failed on the ring's thread. busy: called there before anything of the user's may run.
    """

    def __init__(
        self, session: Session, *, find_external: FindExternal | None, staged: bool, on_error: Callable[[Exception], None],
        busy: Callable[[], None], sampled: bool = False,
    ) -> None:  # fmt: skip
        self._session, self._find_external, self._staged = session, find_external, staged
        self._on_error, self._busy, self._sampled = on_error, busy, sampled
        self.ring: Ring | None = None
        self._live: dict[tuple[Any, ...], Seen] = {}

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
        self._live = {k: s for k, s in self._live.items() if s.alive()}

    def close(self) -> None:
        """Wait for what is on its way and forget everything."""
        if self.ring is not None:
            self.ring.close()
        self._live.clear()

    def abandon(self) -> None:
        """In a forked child: the ring's thread is not here."""
        self.ring = None

    def sight(
        self,
        tensor: Any,
        slot: str,
        frame: Sighter,
        *,
        parameter: bool = False,
        grows: tuple[Watched, str] | None = None,
        unsettled: bool = False,
        new: bool = False,
    ) -> tuple[Any, str, Any]:
        """The record of this tensor, how it was known again ("identity", "content" or "" for new), and its (dtype, shape, stride).

        unsettled: an operator that is still running wrote it or made a view of it, so torch has not counted its version yet.
        new: an operator made it just now.
        """
        kind = type(tensor)
        if self._sampled and not (new or unsettled) and (kind is torch.Tensor or kind is torch.nn.Parameter) and tensor.is_cpu:
            found = self._again(tensor, frame.keep)
            if found is not None:
                return found
        session = self._session
        subclass = ""
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            inner = tensors.plain(tensor)
            subclass = "" if kind is torch.nn.Buffer else kind.__name__
            if inner is None or len(inner) != 1:
                why = f"tensor of class {kind.__name__} holds {'no readable elements' if inner is None else f'{len(inner)} tensors'}"
                return self.unreadable(tensor, why)
            tensor = inner[0][1]
        elif (
            not tensor.is_cpu or tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ) and not tensors.readable(tensor):
            return self.unreadable(tensor, f"no elements to read ({tensor.device.type}, {tensor.layout})")
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
        look = (dtype, shape, stride)
        if pointer:
            key: tuple[Any, ...] = (pointer, look)
        elif tensor.numel():
            return self.unreadable(tensor, f"no memory of its own to read ({kind.__name__})")
        else:
            key = (tensor.untyped_storage()._cdata, look)
        known = self._live.get(key)
        if self._staged or not tensor.is_cpu:
            return *self._sight_staged(tensor, look, version, key, known, slot, frame, subclass, parameter, grows, unsettled), look
        probe = _probe(pointer, tensor) if self._sampled and pointer and version is not None else b""
        data = None
        if contiguous and dtype[0] != "c" and not tensor.is_neg():
            nbytes = tensor.nbytes
            digest = host.digest_at(pointer, nbytes)
        else:
            data = tensors.canonical(tensor)
            pointer, nbytes = data.__array_interface__["data"][0], data.size
            digest = host.digest(data)
        if known is not None and known.digest == digest and known.agrees(version, frame.keep):
            if unsettled:
                known.version = UNSETTLED
            return known.id, "content" if version is None else "identity", look
        base = tail = external = None
        if grows is not None:
            base, tail = self._increment(grows, tensor, dtype, shape)
        if data is None:
            data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), np.uint8) if nbytes else _EMPTY
        if parameter and self._find_external is not None and session.elements_on and nbytes >= 1 << 16:
            external = self._find_external(digest, dtype, shape, data)
        number = session.record(
            dtype, shape, data, digest, scope=frame.scope, slot=slot, op_type=frame.op_type, value=tensor, stride=stride,
            storage_offset=tensor.storage_offset(), subclass=subclass, base=base, tail=tail, external=external, address=pointer,
            keep=frame.keep,
        )  # fmt: skip
        self._live[key] = Seen(number, digest, UNSETTLED if unsettled else version, StorageRef(tensor), frame.keep, probe)
        if grows is not None:
            grows[0].grown[grows[1]] = (number, digest, shape, dtype)
        return number, "", look

    def _again(self, tensor: Any, keep: bool) -> tuple[Any, str, Any] | None:
        """The sight of a plain CPU tensor that was seen before, None where that is not certain."""
        try:
            version, pointer = tensor._version, tensor.data_ptr()
            look = (_NAMES[tensor.dtype], tensor.shape, () if tensor.is_contiguous() else tensor.stride())
            known = self._live.get((pointer, look))
            if known is None or not known.probe or known.probe != _probe(pointer, tensor) or not known.agrees(version, keep):
                return None
        except (RuntimeError, KeyError, ValueError, NotImplementedError):  # of inference, without memory, of another layout
            return None
        return known.id, "identity", look

    def unreadable(self, tensor: Any, why: str) -> tuple[Any, str, Any]:
        """A record of the shape of a tensor whose elements cannot be read, or say nothing."""
        dtype = tensors.dtype_name(tensor) or str(tensor.dtype).removeprefix("torch.")
        shape = () if tensor.is_nested else tuple(tensor.shape)
        kind = type(tensor).__name__
        subclass = "" if kind in ("Tensor", "Parameter") else kind
        stride: tuple[int, ...] = ()
        offset = 0
        if tensor.layout is torch.strided and not tensor.is_nested:
            stride, offset = () if tensor.is_contiguous() else tensor.stride(), tensor.storage_offset()
        number = self._session.unreadable(
            dtype, shape, why, device=str(tensor.device), subclass=subclass, stride=stride, storage_offset=offset
        )
        return number, "", (dtype, shape, stride)

    def figures(self, tensor: Any, take: Callable[[Statistics], None]) -> None:
        """Hand the figures of a tensor to `take`, without a record; of one that cannot be read, nothing. Of a device tensor later."""
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
            self.ring = Ring(on_error=self._on_error)
        self.ring.submit(tensor, lambda data, _: take(host.statistics(data, dtype)[0]))

    def _increment(
        self, grows: tuple[Watched, str], tensor: Any, dtype: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, int] | None, np.ndarray[Any, np.dtype[np.uint8]] | None]:
        """A cache that grew along one axis: (record, axis) and the bytes of what was added, if the old part is unchanged bit by bit."""
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
        return (old[0], axis), tensors.canonical(tensor.narrow(axis, old[2][axis], shape[axis] - old[2][axis]))

    def _sight_staged(
        self, tensor: Any, look: tuple[str, tuple[int, ...], tuple[int, ...]], version: int | None, key: tuple[Any, ...],
        known: Seen | None, slot: str, frame: Sighter, subclass: str, parameter: bool, grows: tuple[Watched, str] | None,
        unsettled: bool,
    ) -> tuple[Pending, str]:  # fmt: skip
        """A device tensor: cloned on its stream, copied by the ring; which record it is shows when its bytes have arrived.

        It is copied at every sight: a kernel that wrote it may have left the version as it was.
        """
        if self.ring is None:
            self.ring = Ring(on_error=self._on_error)
        session, op_type, device, keep = self._session, frame.op_type, str(tensor.device), frame.keep
        scope, offset, (dtype, shape, stride) = frame.scope, tensor.storage_offset(), look
        earlier = known if known is not None and known.agrees(version, frame.keep) else None
        pending = Pending()
        storage = earlier.storage if earlier is not None else StorageRef(tensor)
        now = self._live[key] = Seen(pending, b"", UNSETTLED if unsettled else version, storage, frame.keep)

        def arrived(data: np.ndarray[Any, np.dtype[np.uint8]], copied: Any) -> None:
            self._busy()  # of the ring's thread: a module that on_record calls is not the program's
            now.digest = digest = host.digest(data)
            if earlier is not None and earlier.digest == digest:
                pending.id, pending.edge = earlier.id.id, "content" if version is None else "identity"
                return
            base = tail = external = None
            if grows is not None:
                base, tail = self._increment(grows, copied, dtype, shape)
            if parameter and self._find_external is not None and keep and data.size >= 1 << 16:
                external = self._find_external(digest, dtype, shape, data)
            pending.id = session.record(
                dtype, shape, data, digest, scope=scope, slot=slot, op_type=op_type, value=copied, stride=stride,
                storage_offset=offset, device=device, subclass=subclass, base=base, tail=tail, external=external, keep=keep,
            )  # fmt: skip
            if grows is not None:
                grows[0].grown[grows[1]] = (pending.id, digest, shape, dtype)

        self.ring.submit(tensor, arrived)
        return pending, ""


def _resolved(call: Call) -> Call:
    refs: list[Ref] = []
    for ref in call.refs:
        record: Any = ref.record
        if isinstance(record, Pending):
            if ref.slot.startswith("mutated") and ((record.edge and not record.certain) or any(r.record == record.id for r in refs)):
                continue  # looked at because no version tells: it is as it was
            ref = Ref(ref.slot, record.id, ref.edge or record.edge)
        refs.append(ref)
    return msgspec.structs.replace(call, refs=tuple(refs))


def _probe(pointer: int, tensor: Any) -> bytes:
    """Some bytes from the middle of its memory: what a write of all its elements changes."""
    if tensor.is_contiguous():
        nbytes = tensor.nbytes
        return _read(pointer + nbytes // 2 - 32, 64) if nbytes > 64 else _read(pointer, nbytes)
    return _read(pointer, tensor.element_size()) if tensor.numel() else b""


_NAMES = tensors.NAMES
_read = ctypes.string_at
_EMPTY: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)
