"""Tensors that go through the staging ring: when its bytes have arrived, it shows which record a
tensor is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from whence.frameworks import host
from whence.frameworks.torch_arrays import TensorSnapshot
from whence.instrument.call_frames import Looks
from whence.instrument.session import Content, Form, Origin, Session
from whence.instrument.torch import device_figures
from whence.instrument.torch.staging import StagingRing, canonical_on_device
from whence.instrument.torch.staging_memory import Arrival
from whence.instrument.torch.tensor_content import UNSETTLED, Pending, SeenTensor, storage_ref
from whence.records import Statistics

_Form = tuple[str, tuple[int, ...], tuple[int, ...]]


class _Sighter(Protocol):
    """The call that sees a tensor."""

    scope: str
    keep: bool
    op_type: str


class _HandedOn(msgspec.Struct, gc=False, eq=False):
    """A tensor object as it was when it was recorded; what it was found to be then may change when
    its bytes arrive.
    """

    ref: Any
    seen: SeenTensor
    address: int
    dtype: Any
    whole: Form
    form: _Form

    def is_still(self, tensor: Any, keep: bool) -> bool:
        """Is this the object, at the same place and of the same version? keep: whether elements of
        it are wanted.
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
    """Sends tensors through a ring, made for the first one, and records them when they arrive.

    on_error: called with what failed on the ring's thread. busy: called there before anything of
    the user's may run. looks: of the listener's own code.
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
        """Did any tensor go through it?"""
        return self._ring is not None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors on their way to the sink."""
        return self._ring.waiting_bytes if self._ring is not None else 0

    def emit(self, action: Callable[[], None]) -> None:
        """Do it after everything that was sighted so far has arrived."""
        if self._ring is not None and self._ring.pending:
            self._ring.then(action)
        else:
            action()

    def begin_step(self, root: str) -> None:
        """Begin a step of a root. What is on its way is waited for only where it decides whether
        the step's elements are kept.
        """
        session = self._session
        if session.step_fits(root, self.waiting_bytes):
            self.emit(lambda: session.begin_step(root))
        else:
            self.drain()
            session.begin_step(root)

    def flush(self) -> None:
        """Begin to bring in what was sighted so far."""
        if self._ring is not None:
            self._ring.flush()

    def drain(self) -> None:
        """Wait until everything that was sighted so far has arrived."""
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
        """In a forked child: the ring's threads are not here, and its memory is not to be freed."""
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

        dtype: of its figures, "" of one that has no name. known: figures are wanted only where its
        bytes are not, for they can be taken of them later. canonical: its memory is known to be its
        canonical bytes.
        """
        ring = self._ring
        if ring is None:
            ring = self._ring = StagingRing(on_error=self._on_error, looks=self._looks)
        if not self._session.measures:
            dtype = ""
        if not wants_bytes and self._may_read(ring, tensor.device):
            if not canonical:
                tensor, canonical = canonical_on_device(tensor), True
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
        """A tensor with what is to be remembered of it. write: records it when it has arrived and
        is not what `previous` was; wants_bytes: and looks at its elements.

        It is copied at every sight: a kernel that wrote it may have left the version as it was.
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
        """Remember the very object that was recorded: a plain one whose memory is its canonical
        bytes.
        """
        self._known[id(tensor)] = _HandedOn(
            weakref.ref(tensor), seen, tensor.data_ptr(), tensor.dtype, whole, form
        )

    def again(
        self, tensor: Any, slot: str, frame: _Sighter, write: Callable[..., int]
    ) -> tuple[Pending, str, _Form] | None:
        """The sight of an object that was recorded, as `record` without a second look at what it
        is; None of any other.
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
        """Hand the figures of a tensor to `take` when it has arrived."""

        def arrived(got: Arrival) -> None:
            take((got.figures or host.statistics_at(got.address, got.nbytes, dtype))[0])

        self._submit(tensor, arrived, dtype, wants_bytes=False)


def is_recorded_as_graph(device: Any) -> bool:
    """Is what the program does on this device recorded as a CUDA graph now, and not done?"""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())
