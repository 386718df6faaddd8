"""Sees every backward pass begin and end.

`torch.autograd.backward` is wrapped, through which `Tensor.backward` goes too. Before it runs,
hooks are put on nodes of the graph that autograd made by itself; after it they are taken off. The
graph, its values and the order in which they are added stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.training.backward_calls import BackwardCalls
from whence.instrument.torch.training.forward_calls import (
    ForwardCall,
    Recomputed,
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
    """A backward pass that runs. calls: those that wait for theirs. before: gradients of parameters
    that were there already.
    """

    hooks: GradientHooks
    seen: SeenGradients
    calls: list[ForwardCall]
    before: dict[int, GradientBefore]


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

    # ---- module calls

    def entered(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """A module is called with these tensors (slot, tensor)."""
        frame.first_node = next_node()
        frame.input_edges = [
            (slot, edge) for slot, tensor in inputs if (edge := edge_of(tensor)) is not None
        ]

    def left(self, frame: ModuleFrame, program: str, *, failed: bool) -> tuple[str, ...]:
        """A module has returned, and ran this program. failed: it raised. Returns the slots of its
        tensors that have a gradient.
        """
        call = None
        again = frame.phase == "recompute"
        if again:
            self._recomputed.add(frame)
        if frame.first_node >= 0 and not failed:
            call = ForwardCall(frame, next_node(), program)
            if call.outputs and not again:
                self._waiting.add(call, threading.get_ident())
        if frame.parent is not None:
            frame.parent.called.append(call)
        if call is None:
            return ()
        tensors = ((entry.slot, entry.tensor()) for entry in frame.info.entries or ())
        held = [slot for slot, tensor in tensors if tensor is not None and tensor.requires_grad]
        return (*held, *(slot for slot, _ in (*call.inputs, *call.outputs)))

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
            hooks = None
            losses = self._loss.stop()
            self._changes.drop("a backward pass begins")
            if self._waiting and self._frames.active and not inside():
                hooks = self._frames.guarded(self._begin, tensors, losses)
            try:
                return previous(
                    tensors, grad_tensors, retain_graph, create_graph, *further, **named
                )
            finally:
                if hooks is not None:
                    kept = create_graph if retain_graph is None else retain_graph
                    self._frames.guarded(self._end, hooks, kept)
                    self._changes.listen()

        self._wrapper = backward
        torch.autograd.backward = backward

    def remove(self) -> None:
        """Look no more. A wrapper that somebody wrapped in turn stays, and does nothing."""
        if self._previous is not None and torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._previous
        self._waiting.clear()

    def _begin(self, tensors: Any, losses: Any) -> _Pass | None:
        if self._waiting.several_threads:
            self._tell_threads()
            return None
        roots = tensors_to_start_from(tensors)
        if (call := self._loss.write(losses, roots)) is not None:
            self._waiting.add(call, threading.get_ident())
        owners = self._waiting.owners()
        seen = SeenGradients(self._calls.registry, self._sharded.held())
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded)
        return _Pass(hooks, seen, owners.calls, self._sums.before(hooks.leaves))

    def _end(self, ended: _Pass, kept: bool) -> None:
        ended.hooks.remove()
        met = [call for call in ended.calls if ended.seen.met(call)]
        self._recomputed.replace_in(met)
        region = self._calls.write(met, ended.seen)
        if region is not None and region.selected:
            self._sums.write(ended.hooks.leaves, ended.before, ended.seen, region)
        self._calls.close()
        if not kept:  # else another pass may come through the same graph
            self._waiting.forget(met)

    def _tell_threads(self) -> None:
        if not self._told:
            self._told = True
            text = "models were called on several threads: their backward passes are not recorded"
            self._session.note("inside-not-seen", text)
