"""Sees every backward pass begin and end.

`torch.autograd.backward` is wrapped, through which `Tensor.backward` goes too. Before it runs,
hooks are put on nodes of the graph that autograd made by itself; after it they are taken off. The
graph, its values and the order in which they are added stay as they are.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.training.backward_calls import BackwardCalls
from whence.instrument.torch.training.checkpoints import (
    CheckpointedCalls,
    Recomputed,
    Rerun,
    running_node,
    shared_casts,
)
from whence.instrument.torch.training.forward_calls import (
    ForwardCall,
    NodeOwners,
    WaitingCalls,
    edge_of,
    next_node,
)
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.gradient_hooks import (
    GradientHooks,
    SeenGradients,
    tensors_to_start_from,
)
from whence.instrument.torch.training.gradient_sums import GradientBefore, GradientSums
from whence.instrument.torch.training.loss_code import LossCode
from whence.instrument.torch.training.sharded_parameters import ShardedParameters


class _Pass(NamedTuple):
    """A backward pass that runs. owners: calls that wait for theirs. checkpointed: calls below
    them that are run again. before: gradients of parameters that were there already. within: the
    passes through what checkpoints ran again.
    """

    hooks: GradientHooks
    seen: SeenGradients
    owners: NodeOwners
    checkpointed: CheckpointedCalls
    before: dict[int, GradientBefore]
    within: list[_PassWithin]

    def met(self) -> list[ForwardCall]:
        """Calls of which a gradient was seen."""
        return [call for call in self.owners.calls if self.seen.met(call)]

    def leaves(self) -> dict[int, weakref.ref[Any]]:
        """The leaves of the graph, by identity."""
        leaves = dict(self.hooks.leaves)
        for part in self.within:
            leaves |= part.hooks.leaves
        return leaves


class _PassWithin(NamedTuple):
    """A pass through what a checkpoint ran again, while another pass runs."""

    hooks: GradientHooks
    seen: SeenGradients
    owners: NodeOwners
    rerun: Rerun


class BackwardPasses:
    """The backward passes of the modules that a listener listens to.

    calls, sums: write what was seen, of modules and of parameters. loss: the code that the passes
    start from. sharded: parameters in pieces. changes: what becomes of gradients behind them.
    """

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        calls: BackwardCalls,
        sums: GradientSums,
        loss: LossCode,
        sharded: ShardedParameters,
        changes: GradientChanges,
    ) -> None:
        self._session, self._frames, self._calls, self._sums = session, frames, calls, sums
        self._loss, self._sharded, self._changes = loss, sharded, changes
        self._waiting, self._recomputed = WaitingCalls(), Recomputed()
        self._previous: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._told = False
        self._running: list[_Pass] = []

    # ---- module calls

    def entered(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """A module is called with these tensors (slot, tensor)."""
        if frame.parent is not None:
            _link_last(frame.parent)
        frame.first_node = next_node()
        frame.input_edges = [
            (slot, edge) for slot, tensor in inputs if (edge := edge_of(tensor)) is not None
        ]

    def left(self, frame: ModuleFrame, program: str, *, failed: bool) -> tuple[str, ...]:
        """A module has returned, and ran this program. failed: it raised. Returns the slots of its
        tensors that have a gradient.
        """
        _link_last(frame)
        call = None
        again = frame.phase == "recompute"
        if frame.first_node >= 0 and not failed:
            call = ForwardCall(frame, next_node(), program)
            if call.outputs and not again:
                self._waiting.add(call, threading.get_ident())
        if again and self._running:
            self._recomputed.add(frame, call)
        if frame.parent is not None:
            frame.parent.called.append(call)
        if call is None or not call.has_graph:
            return ()
        tensors = ((entry.slot, entry.tensor()) for entry in frame.info.entries or ())
        held = [slot for slot, tensor in tensors if tensor is not None and tensor.requires_grad]
        return (*held, *(slot for slot, _ in (*call.inputs, *call.outputs)))

    def run_again(self) -> tuple[int, int] | None:
        """Step and micro-batch of the calls whose nodes a backward pass on this thread runs."""
        node = running_node() if self._running else -1
        if node < 0:
            return None
        around = self._running[-1]
        known = (around.owners, *(part.owners for part in around.within))
        owner = next((call for owners in known if (call := owners.of(node)) is not None), None)
        return (owner.step, owner.micro) if owner is not None else None

    # ---- backward passes

    def install(self) -> None:
        """Begin to look at backward passes."""
        previous = self._previous = torch.autograd.backward

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *further: Any,
            **named: Any,
        ) -> Any:
            begun = self._before(tensors, grad_tensors)
            try:
                return previous(
                    tensors, grad_tensors, retain_graph, create_graph, *further, **named
                )
            finally:
                if begun is not None:
                    self._after(begun, create_graph if retain_graph is None else retain_graph)

        self._wrapper = backward
        torch.autograd.backward = backward

    def remove(self) -> None:
        """Look no more. A wrapper that somebody wrapped in turn stays, and does nothing."""
        if self._previous is not None and torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._previous
        self._waiting.clear()

    def _before(self, tensors: Any, gradients: Any) -> _Pass | _PassWithin | None:
        """A backward pass begins. None where it is not looked at."""
        if torch._C._current_graph_task_id() != -1:
            if not self._running or not self._recomputed.calls:
                return None
            return self._frames.guarded(self._begin_within, tensors, gradients)
        losses = self._loss.stop()
        self._changes.drop("a backward pass begins")
        if not self._waiting or not self._frames.active or inside():
            return None
        return self._frames.guarded(self._begin, tensors, losses)

    def _after(self, begun: _Pass | _PassWithin, kept: bool) -> None:
        """A backward pass is over. kept: another one may come through the same graph."""
        if isinstance(begun, _PassWithin):
            self._frames.guarded(self._end_within, begun)
            return
        self._running.remove(begun)
        self._frames.guarded(self._end, begun, kept)
        self._changes.listen()

    def _begin(self, tensors: Any, losses: Any) -> _Pass | None:
        if self._waiting.several_threads:
            self._tell_threads()
            return None
        roots = tensors_to_start_from(tensors)
        if (call := self._loss.write(losses, roots)) is not None:
            self._waiting.add(call, threading.get_ident())
        checkpointed = CheckpointedCalls(self._waiting)
        owners = NodeOwners([*self._waiting, *checkpointed.outermost])
        seen = SeenGradients(self._calls.registry, self._sharded.held(), itertools.count(1))
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded)
        before = self._sums.before(hooks.leaves)
        self._running.append(_Pass(hooks, seen, owners, checkpointed, before, []))
        return self._running[-1]

    def _begin_within(self, tensors: Any, gradients: Any) -> _PassWithin:
        """A checkpoint has run its calls again, and a pass through them begins."""
        around = self._running[-1]
        calls, self._recomputed.calls = self._recomputed.calls, []
        roots = tensors_to_start_from(tensors)
        seen = SeenGradients(self._calls.registry, self._sharded.held(), around.seen.turns)
        rerun = around.checkpointed.run_again(calls, running_node(), around.owners, roots)
        rerun.begin(roots, tensors_to_start_from(gradients), seen)
        owners = NodeOwners(rerun.calls)
        casts = shared_casts(roots, owners)
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded, casts)
        known = around.leaves()
        new = {identity: leaf for identity, leaf in hooks.leaves.items() if identity not in known}
        around.before.update(self._sums.before(new))
        around.within.append(_PassWithin(hooks, seen, owners, rerun))
        return around.within[-1]

    def _end_within(self, ended: _PassWithin) -> None:
        ended.hooks.remove()
        ended.rerun.end(ended.hooks.leaves, self._calls.registry)

    def _end(self, ended: _Pass, kept: bool) -> None:
        ended.hooks.remove()
        met = ended.met()
        self._recomputed.replace_in(met)
        for part in ended.within:
            part.rerun.take_places(part.seen, ended.seen)
        own = [call for call in met if not call.is_checkpointed]
        passes = [(own, ended.seen), *((part.rerun.calls, part.seen) for part in ended.within)]
        region = self._calls.write(passes)
        if region is not None and region.selected:
            seen = [seen for _, seen in passes]
            self._sums.write(ended.leaves(), ended.before, seen, region)
        self._calls.close()
        if not kept:
            self._waiting.forget(met)

    def _tell_threads(self) -> None:
        if not self._told:
            self._told = True
            text = "models were called on several threads: their backward passes are not recorded"
            self._session.note("inside-not-seen", text)


def _link_last(frame: ModuleFrame) -> None:
    """A module that called others goes on, with what the last of them returned."""
    last = frame.called[-1] if frame.called else None
    if last is not None and last.returned:
        last.link()
