"""Sees every backward pass begin and end.

`torch.autograd.backward` is wrapped, through which `Tensor.backward` goes too. Before it runs,
hooks are put on nodes of the graph that autograd made by itself; after it they are taken off. The
graph, its values and the order in which they are added stay as they are.

Calls that a backward pass runs again, as checkpoints do.

A checkpoint that is not reentrant keeps the graph of the first run, and of the second only values.
A reentrant one runs its calls without a graph; its own node stands for them in the graph of the
pass, and when the pass comes there, it runs them again and a pass of their own through what they
made. The first run says whose children the calls are, the second one what they computed.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import inside
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.backward_calls import BackwardCalls
from whence.instrument.torch.training.forward_calls import (
    Edge,
    EndedCall,
    ForwardCall,
    NodeOwners,
    WaitingCalls,
    edge_of,
    next_node,
)
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.gradient_hooks import (
    Gradient,
    GradientHooks,
    SeenGradients,
    tensors_to_start_from,
)
from whence.instrument.torch.training.gradient_sums import GradientsBefore, GradientSums
from whence.instrument.torch.training.loss_code import LossCode
from whence.instrument.torch.training.sharded_parameters import ShardedParameters
from whence.records import Ref


class _Pass(NamedTuple):
    """A backward pass that runs. owners: calls that wait for theirs. checkpointed: calls below
    them that are run again. before: gradients of parameters that were there already. within: the
    passes through what checkpoints ran again.
    """

    hooks: GradientHooks
    seen: SeenGradients
    owners: NodeOwners
    checkpointed: _CheckpointedCalls
    before: GradientsBefore
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
        self._waiting, self._recomputed = WaitingCalls(), _Recomputed()
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
        node = _running_node() if self._running else -1
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
        checkpointed = _CheckpointedCalls(self._waiting)
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
        rerun = around.checkpointed.run_again(calls, _running_node(), around.owners, roots)
        rerun.begin(roots, tensors_to_start_from(gradients), seen)
        owners = NodeOwners(rerun.calls)
        casts = _shared_casts(roots, owners)
        hooks = GradientHooks(roots, owners, seen, self._frames.guarded, casts)
        known = around.leaves()
        new = {identity: leaf for identity, leaf in hooks.leaves.items() if identity not in known}
        around.before.each.update(self._sums.before(new).each)
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


_ABOVE = 1
"""A checkpoint's node is numbered before the calls that it runs, and they number none."""
_CAST = "ToCopyBackward0"


class _Recomputed:
    """What calls read and wrote when a backward pass ran them again: autograd differentiates them
    there, not where they ran first. calls: those of them that made a graph, since the last pass
    through one of those.
    """

    def __init__(self) -> None:
        self._refs: dict[tuple[Any, ...], list[Sequence[Ref]]] = {}
        self.calls: list[ForwardCall] = []

    def add(self, frame: EndedCall, call: ForwardCall | None) -> None:
        """A call has run again, whole or as far as the backward pass needed it."""
        self._refs.setdefault(_place(frame), []).append(frame.refs)
        if call is not None and call.outputs:
            self.calls.append(call)

    def replace_in(self, calls: Iterable[ForwardCall]) -> None:
        """Have calls that ran again refer to the tensors of that second time; nothing of it is kept
        then. A module that was called several times in a step stays as it was: which of its calls
        ran again is not known.
        """
        self.calls.clear()
        if not self._refs:
            return
        by_place: dict[tuple[Any, ...], list[ForwardCall]] = {}
        for call in calls:
            by_place.setdefault(_place(call), []).append(call)
        for place, first in by_place.items():
            again = self._refs.get(place, ())
            if len(first) == len(again) == 1:
                refs = {ref.slot: ref for ref in again[0]}
                first[0].refs = [refs.get(ref.slot, ref) for ref in first[0].refs]
        self._refs.clear()


def _place(call: EndedCall | ForwardCall) -> tuple[Any, ...]:
    return call.root.name, call.scope, call.op, call.step, call.micro


class _CheckpointedCalls:
    """Calls that reentrant checkpoints ran without a graph, below calls that wait for their
    backward pass. outermost: those that a checkpoint ran and nothing else.
    """

    def __init__(self, waiting: Iterable[ForwardCall]) -> None:
        self.outermost: list[ForwardCall] = []
        self._by_node: dict[int, ForwardCall] = {}
        for call in waiting:
            for child in call.children:
                if child is not None and child.linked:
                    self._link(call, child)

    def _link(self, caller: ForwardCall, child: ForwardCall) -> None:
        """Take the node of a checkpoint for that of the only call in it, where this is one."""
        edges = child.linked
        nodes = {edge.node for _, edge in edges}
        if len(nodes) != 1 or not caller.made(edges[0][1]):
            return
        (node,) = nodes
        if not child.is_checkpointed and node != child.nodes[0] - _ABOVE:
            return
        child.outputs, child.nodes, child.is_checkpointed = edges, (node, node + 1), True
        self.outermost.append(child)
        self._by_node[node] = child

    def run_again(
        self, again: Sequence[ForwardCall], node: int, owners: NodeOwners, roots: Sequence[Any]
    ) -> Rerun:
        """Calls that ran again for the node of a checkpoint, by the places of their first run.
        roots: where the pass through them begins.
        """
        owner, only = owners.of(node), self._by_node.get(node)
        first = [only] if only is not None else owner.children if owner is not None else ()
        by_module: dict[tuple[str, str], deque[ForwardCall]] = defaultdict(deque)
        for call in _without_graph(first):
            by_module[call.scope, call.op].append(call)
        second: dict[int, ForwardCall] = {}
        for call in sorted(again, key=lambda call: call.order):
            if same := by_module[call.scope, call.op]:
                second[id(same[0])] = call
                call.take_place_of(same.popleft())
        if owner is None:
            return Rerun(list(again))
        if only is not None:
            pairs = [(only, second[id(only)])] if id(only) in second else []
            return Rerun(list(again), only, pairs)
        code = copy.copy(owner)
        code.nodes, code.placements = (0, next_node()), {}
        code.children = [second.get(id(child), child) for child in owner.children]
        code.outputs = [("", edge) for root in roots if (edge := edge_of(root)) is not None]
        code.inputs = [("", Edge(-1, identity)) for identity in _inputs_behind(roots)]
        return _RerunOfCode([*again, code], owner, code, node)


class Rerun:
    """Calls that a checkpoint ran again, for the pass through them.

    pairs: first and second runs of the calls that read the checkpoint's inputs; the checkpoint's
    node stands for `sender`.
    """

    def __init__(
        self,
        calls: list[ForwardCall],
        sender: ForwardCall | None = None,
        pairs: Sequence[tuple[ForwardCall, ForwardCall]] = (),
    ) -> None:
        self.calls, self._sender, self._pairs = calls, sender, pairs
        self._given: dict[Edge, Gradient] = {}
        self._nonzero: dict[Edge, Any] = {}

    def begin(self, roots: Sequence[Any], gradients: Sequence[Any], seen: SeenGradients) -> None:
        """The pass begins at these tensors, with these gradients."""
        if self._sender is None or len(roots) != len(gradients):
            return
        for root, gradient in zip(roots, gradients, strict=True):
            if (edge := edge_of(root)) is not None:
                self._given[edge] = seen.take(gradient, "input.grad.output", self._sender)
                if type(gradient) is torch.Tensor:
                    self._nonzero[edge] = torch.count_nonzero(gradient)

    def end(self, leaves: Mapping[int, weakref.ref[Any]], registry: TensorRegistry) -> None:
        """The pass is over, and autograd goes on with the gradients of these leaves."""

    def take_places(self, seen: SeenGradients, around: SeenGradients) -> None:
        """Have the second run stand for the first one, in place of the sum that the checkpoint's
        node sent. seen, around: the gradients of the pass and of the one around it.
        """
        if self._sender is None:
            return
        for first, second in self._pairs:
            for _, edge in second.outputs:  # code below may use what it returns, too
                if edge in self._given:
                    seen.outside[second.order, edge] = self._given[edge]
            inner = dict(second.inputs)
            for slot, edge in first.inputs:
                if slot in inner and (parts := seen.sent.get(inner[slot])):
                    others = [
                        (call, gradient)
                        for call, gradient in around.sent.get(edge, ())
                        if call is not first and call is not self._sender
                    ]
                    own = [(self._sender, gradient) for _, gradient in parts]
                    around.sent[edge] = [*others, *own]


class _RerunOfCode(Rerun):
    """Calls that a checkpoint ran again, with code of the module around them, which was not called
    itself.

    around: the call of that module. code: the second run of its code, in the checkpoint. Its slots
    are known once both passes are over, by the gradients that one handed to the other.
    """

    def __init__(
        self, calls: list[ForwardCall], around: ForwardCall, code: ForwardCall, node: int
    ) -> None:
        sender = copy.copy(around)
        sender.nodes = (node, node + 1)
        super().__init__(calls, sender, [(around, code)])
        self._around, self._code, self._node = around, code, node
        self._sent: dict[Edge, Any] = {}

    def end(self, leaves: Mapping[int, weakref.ref[Any]], registry: TensorRegistry) -> None:
        """The pass is over, and autograd goes on with the gradients of these leaves."""
        for _, edge in self._code.inputs:
            leaf = leaves[edge.place]() if edge.place in leaves else None
            if leaf is not None and leaf.grad is not None:
                taken = registry.record_of(leaf.grad, "output.grad.input", self._code)
                self._sent[edge] = taken[0]

    def take_places(self, seen: SeenGradients, around: SeenGradients) -> None:
        """Give the code the slots of its module, and have the second run stand for the first."""
        code, first = self._code, self._around
        came = self._slots_given(around)
        read = {
            sent.record: slot
            for slot, edge in first.inputs
            if (sent := around.sent_by(first, edge)) is not None
        }
        code.outputs = [
            (came[gradient.record], edge)
            for edge, gradient in self._given.items()
            if gradient.record in came
        ]
        known = {edge for _, edge in code.outputs}
        # What nobody uses gets zeros from autograd.
        others = [self._nonzero.get(edge, True) for edge in self._given if edge not in known]
        code.inputs = [
            (read[record], edge) for edge, record in self._sent.items() if record in read
        ]
        if not known or any(others):
            self.calls.remove(code)  # the call keeps what it has of its own
            return
        if first.nodes == (self._node, self._node + 1):
            first.is_checkpointed = True
        super().take_places(seen, around)

    def _slots_given(self, around: SeenGradients) -> dict[Any, str]:
        """Slots of the gradients that came to the checkpoint's node, by record: of outputs of the
        module, and of what its later calls read.
        """
        given: dict[Any, str] = {}
        for slot, edge in self._around.outputs:
            if edge.node == self._node and (gradient := around.given(self._around, edge)):
                given[gradient.record] = slot
        for place, child in self._around.known_children():
            for slot, edge in child.inputs:
                if edge.node == self._node:
                    sent = around.sent_below(child, edge)
                    given |= {gradient.record: f"{place}:{slot}" for gradient in sent}
        return given


def _running_node() -> int:
    """The number of the node that a backward pass on this thread runs, -1 for none."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def _without_graph(calls: Iterable[ForwardCall | None]) -> Iterator[ForwardCall]:
    """Those of these calls that ran without a graph, and the calls below them, in order."""
    for call in calls:
        if call is not None and not call.has_graph:
            yield call
            yield from _without_graph(call.children)


def _nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph behind these tensors, once."""
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for follower, _ in node.next_functions:
            if follower is not None and follower not in visited:
                visited.add(follower)
                todo.append(follower)


def _inputs_behind(roots: Iterable[Any]) -> Iterator[int]:
    """Identities of the leaves of a graph that are no parameters."""
    for node in _nodes_behind(roots):
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            yield id(leaf)


def _shared_casts(roots: Sequence[Any], owners: NodeOwners) -> set[Any]:
    """Nodes that cast an input for several calls: autocast keeps the casts of leaves, and the
    inputs of what runs again are leaves. The gradients of the calls meet there.
    """
    inputs = set(_inputs_behind(roots))
    casts = {
        node: owners.of(node._sequence_nr())
        for node in _nodes_behind(roots)
        if type(node).__name__ == _CAST
        and any(id(getattr(leaf, "variable", None)) in inputs for leaf, _ in node.next_functions)
    }
    return {
        follower
        for node in (_nodes_behind(roots) if casts else ())
        for follower, _ in node.next_functions
        if follower in casts and owners.of(node._sequence_nr()) is not casts[follower]
    }
