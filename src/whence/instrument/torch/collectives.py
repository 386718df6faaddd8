"""Collectives and messages of a program: one line for each, written when it is issued, so that it
is there when the job hangs in it.

What torch sends to other processes, with somebody looking on.

Every way to a process group (functions of `torch.distributed`, functional collectives, DTensors,
FSDP, the reducer of DDP, pipelines) goes through operators of one library of the dispatcher. They
get a kernel under a key that comes right before those of devices and that these operators leave
free: it tells the watchers of the arguments and hands them on to the kernel of the device. Nothing
is sent, copied or waited for, nothing is kept, and the interpreter's lock is free while the
device's kernel runs: a worker thread of a group may need it to go on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from whence.errors import StoreFailed
from whence.frameworks.torch_arrays import NAMES
from whence.instrument.call_frames import CallFrames, count
from whence.instrument.session import Session
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.sources import source_here
from whence.records import Collective, CollectiveKind

_KINDS = {
    "allreduce_": CollectiveKind.ALL_REDUCE,
    "allreduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "reduce_": CollectiveKind.REDUCE,
    "broadcast_": CollectiveKind.BROADCAST,
    "allgather_": CollectiveKind.ALL_GATHER,
    "_allgather_base_": CollectiveKind.ALL_GATHER,
    "allgather_coalesced_": CollectiveKind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": CollectiveKind.ALL_GATHER,
    "reduce_scatter_": CollectiveKind.REDUCE_SCATTER,
    "_reduce_scatter_base_": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": CollectiveKind.REDUCE_SCATTER,
    "alltoall_": CollectiveKind.ALL_TO_ALL,
    "alltoall_base_": CollectiveKind.ALL_TO_ALL,
    "gather_": CollectiveKind.GATHER,
    "scatter_": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
    "monitored_barrier_": CollectiveKind.BARRIER,
    "send": CollectiveKind.SEND,
    "recv_": CollectiveKind.RECEIVE,
    "recv_any_source_": CollectiveKind.RECEIVE,
}
_IN_PLACE = ("tensors", "tensor")
_GIVEN = ("inputs", "input", "input_tensors", "input_tensor", "input_list", *_IN_PLACE)
_TAKEN = ("outputs", "output", "output_tensors", "output_tensor", "output_lists", *_IN_PLACE)
_ROOTED = {
    "broadcast_": "root_rank",
    "reduce_": "root_rank",
    "gather_": "root_rank",
    "scatter_": "root_rank",
    "send": "dst",
    "recv_": "src",
}

_ISSUERS = (
    ("/nn/parallel/distributed.py", "DDP"),
    ("/distributed/fsdp/_fully_shard/", "FSDP2"),
    ("/distributed/fsdp/", "FSDP"),
    ("/distributed/pipelining/", "pipelining"),
    ("/distributed/checkpoint/", "checkpoint"),
    ("/distributed/tensor/", "DTensor"),
    ("/distributed/optim/", "optimizer"),
    ("/distributed/device_mesh.py", "device mesh"),
    ("/nn/modules/_functions.py", "SyncBatchNorm"),
)
"""Files of torch that send by themselves."""


class _Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    purpose: str


class Collectives:
    """Records what a process sends while installed. roots: of models, by name."""

    def __init__(
        self, session: Session, frames: CallFrames, roots: Mapping[str, ModuleRoot]
    ) -> None:
        self._session, self._frames, self._roots = session, frames, roots
        self._numbers: dict[str, int] = {}
        self._installed = False

    def install(self) -> None:
        """Begin to listen. A torch that does not hand out its kernels is left alone."""
        if _can_watch() and not self._installed:
            _start_watching(self._issued)
            self._installed = True

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        if self._installed:
            self._installed = False
            _stop_watching(self._issued)

    def _issued(self, operator: str, arguments: dict[str, Any]) -> None:
        """An operator that sends is about to run. Whatever fails here ends the capture alone."""
        frames, session = self._frames, self._session
        if session.failed or not (frames.active or frames.asleep):
            return
        try:
            kind, group = _KINDS.get(operator), _group(arguments["process_group"])
            if kind is None:
                return
            peer = _peer(operator, arguments, group.ranks)
            counted = f"{group.name} {kind} {peer}" if kind.is_message else group.name
            number = count(self._numbers, counted)
            if frames.active and session.begin():
                self._write(operator, arguments, kind, group, peer, number)
        except StoreFailed as error:
            session.fail(str(error))
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            frames.give_up(error)

    def _write(
        self,
        operator: str,
        arguments: dict[str, Any],
        kind: CollectiveKind,
        group: _Group,
        peer: int,
        number: int,
    ) -> None:
        given = list(_tensors(arguments, _GIVEN)) if kind != CollectiveKind.RECEIVE else []
        taken = list(_tensors(arguments, _TAKEN)) if kind != CollectiveKind.SEND else []
        moved = given or taken
        splits = tuple(
            tuple(arguments.get(name) or ()) for name in ("input_split_sizes", "output_split_sizes")
        )
        root, scope, step, micro, phase = self._place()
        session = self._session
        sink = session.sink()
        sink.collective(
            Collective(
                kind=kind,
                rank=session.rank,
                order=session.next_order(),
                number=number,
                group=group.name,
                ranks=group.ranks,
                purpose=group.purpose,
                op=_op(arguments.get("reduce_op")),
                dtype="" if not moved or kind == "barrier" else NAMES.get(moved[0].dtype, ""),
                given=tuple(tuple(t.shape) for t in given if kind != CollectiveKind.BARRIER),
                taken=tuple(tuple(t.shape) for t in taken if kind != CollectiveKind.BARRIER),
                splits=splits if any(splits) else (),
                nbytes=sum(t.numel() * t.element_size() for t in moved if kind != "barrier"),
                peer=peer,
                root=root,
                scope=scope,
                step=step,
                micro=micro,
                phase=phase,
                source=source_here(),
                by=_issuer(),
                waits=not arguments.get("async_op", True),
                at=time.time(),
            )
        )
        # a library that fails in a thread of its own ends the process at once
        sink.flush()

    def _place(self) -> tuple[str, str, int, int, str]:
        """(root, scope, step, micro-batch, phase) that the program is in."""
        stack = self._frames.thread.stack
        if stack:
            frame = stack[-1]
            return frame.root.name, frame.scope, frame.step, frame.micro, frame.phase
        trained = [root for root in self._roots.values() if root.trained]
        root = next(iter(trained or self._roots.values()), None)
        if root is None:
            return "", "", -1, 0, ""
        phase = "backward" if torch._C._current_graph_task_id() != -1 else ""
        return root.name, "", root.steps.get("", 0), max(root.micro - 1, 0), phase


def _group(boxed: Any) -> _Group:
    from torch.distributed import distributed_c10d

    group = distributed_c10d.ProcessGroup.unbox(boxed)
    world: Any = distributed_c10d._world
    ranks = world.pg_group_ranks.get(group)
    if ranks is None:  # the name stands for the group, where another object does
        ranks = next(
            (world.pg_group_ranks[g] for g, n in world.pg_names.items() if n == group.group_name),
            {},
        )
    return _Group(group.group_name, tuple(sorted(ranks, key=ranks.get)), group.group_desc)


def _peer(operator: str, arguments: dict[str, Any], ranks: tuple[int, ...]) -> int:
    """The rank of the job that an operator names by its place in the group; -1 where it names
    none.
    """
    place = arguments.get(_ROOTED.get(operator, ""), -1)
    return ranks[place] if 0 <= place < len(ranks) else -1


def _tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        if name in arguments:
            yield from _flat(arguments[name])


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _op(boxed: Any) -> str:
    if boxed is None or not boxed._has_method("op"):
        return ""
    from torch.distributed import ReduceOp

    return str(ReduceOp.RedOpType(boxed._get_method("op")()).name).lower()


def _issuer() -> str:
    """What of torch issues what runs now, "" where the program does it by itself."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        for part, name in _ISSUERS:
            if part in file:
                return name
        if file.endswith(("/autograd/graph.py", "/optim/optimizer.py")):
            break
        frame = frame.f_back
    return ""


_Watcher = Callable[[str, dict[str, Any]], None]
"""(name of the operator, its arguments by name). Called before the operator runs."""

_LIBRARY = "c10d"
_KEY = "BackendSelect"
_UNWATCHED = ("check_for_nan",)
_lock = threading.Lock()
_watchers: tuple[_Watcher, ...] = ()
_installed: Any = None


def _can_watch() -> bool:
    """Can this torch join processes?"""
    return bool(torch.distributed.is_available())


def _start_watching(watcher: _Watcher) -> None:
    """Tell a watcher of everything that is sent from now on, by any thread."""
    global _watchers, _installed
    with _lock:
        if _installed is None:
            _installed = _with_kernels()
        _watchers = (*_watchers, watcher)


def _stop_watching(watcher: _Watcher) -> None:
    """Tell it no more. With the last one the kernels go."""
    global _watchers, _installed
    with _lock:
        _watchers = tuple(one for one in _watchers if one != watcher)
        if not _watchers and _installed is not None:
            library, _installed = _installed, None
            library._destroy()


def _with_kernels() -> Any:
    library = torch.library.Library(_LIBRARY, "IMPL")
    for whole in torch._C._dispatch_get_all_op_names():
        space, _, name = whole.partition("::")
        taken = torch._C._dispatch_has_kernel_for_dispatch_key(whole, _KEY)
        if space == _LIBRARY and name not in _UNWATCHED and not taken:
            library.impl(name, _telling(name), _KEY, with_keyset=True)
    return library


def _telling(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = tuple(argument.name for argument in operator._schema.arguments)
    below = torch._C._dispatch_keyset_full_after(torch._C._parse_dispatch_key(_KEY))

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers:
            watcher(name, dict(zip(names, args)) | kwargs)
        return operator.redispatch(keys & below, *args, **kwargs)

    return call
