"""Records the gradients of a backward pass with hooks on the nodes of autograd's graph. The hooks
are added before the pass and removed after it; the graph stays as autograd built it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.forward_calls import (
    Edge,
    ForwardCall,
    NodeOwners,
    behind,
    edge_to,
    first_reads,
    is_passed_on,
)
from whence.instrument.torch.training.sharded_parameters import Held
from whence.records import Placement


class Gradient(NamedTuple):
    """A recorded gradient. record: its record id; edge: how it was recognised, as in `Ref`. turn:
    running number in order of arrival. placement: of a DTensor.
    """

    record: Any
    edge: str
    dtype: str
    turn: int
    placement: Placement | None = None


class _Share:
    """The gradients that several nodes send along one edge, summed in autograd's order.

    call, slot: call and slot of the tensor at the edge. is_own: whether the nodes belong to this
    call (True) or to other calls (False). waiting: number of nodes that have not sent a gradient
    yet.
    """

    __slots__ = ("call", "edge", "is_own", "slot", "total", "waiting")

    def __init__(self, call: ForwardCall, slot: str, edge: Edge, *, is_own: bool) -> None:
        self.call, self.slot, self.edge, self.is_own = call, slot, edge, is_own
        self.waiting = 0
        self.total: Any = None

    def add(self, gradient: Any, seen: SeenGradients) -> None:
        """One node has sent its gradient, or None."""
        self.waiting -= 1
        if gradient is not None:
            with torch.no_grad():  # autograd follows a pass of which the graph is kept
                self.total = gradient if self.total is None else self.total + gradient
        if self.waiting or self.total is None:
            return
        direction = "output" if self.is_own else "input"
        taken = seen.take(self.total, f"{direction}.grad.{self.slot}", self.call)
        self.total = None
        if self.is_own:
            seen.sent.setdefault(self.edge, []).append((self.call, taken))
        else:
            seen.outside[self.call.order, self.edge] = taken


class SeenGradients:
    """The gradients of one backward pass.

    arrived: the total gradient at each edge. outside: by (order of a call, edge of its output), the
    gradient from nodes outside the call, if the call uses the output itself too. sent: by edge, the
    gradients that the nodes of each call sent along it. held: FSDP2 parameters of which each rank
    holds a shard. turns: counter of gradients, shared with the passes nested in this one.
    """

    def __init__(self, registry: TensorRegistry, held: Held, turns: Iterator[int]) -> None:
        self._registry, self.held, self.turns = registry, held, turns
        self.arrived: dict[Edge, Gradient] = {}
        self.outside: dict[tuple[int, Edge], Gradient | None] = {}
        self.sent: dict[Edge, list[tuple[ForwardCall, Gradient]]] = {}

    def met(self, call: ForwardCall) -> bool:
        """Whether a gradient arrived at an output of this call."""
        return any(edge in self.arrived for _, edge in call.outputs)

    def given(self, call: ForwardCall, edge: Edge) -> Gradient | None:
        """The gradient of an output of a call with respect to its uses outside the call, None where
        none was seen.
        """
        key = call.order, edge
        return self.outside[key] if key in self.outside else self.arrived.get(edge)

    def sent_by(self, call: ForwardCall, edge: Edge) -> Gradient | None:
        """The gradient that the call's own nodes sent along an edge, None if they sent none."""
        return next((g for sender, g in self.sent.get(edge, ()) if sender is call), None)

    def sent_below(self, call: ForwardCall, edge: Edge) -> list[Gradient]:
        """The gradients that a call and the calls below it sent along an edge, in order of
        arrival.
        """
        return [g for sender, g in self.sent.get(edge, ()) if call.encloses(sender)]

    def take(self, tensor: Any, slot: str, call: ForwardCall) -> Gradient:
        """Record one gradient."""
        number, edge, form = self._registry.record_of(tensor, slot, call)
        placement = call.placements.pop(slot, None)
        return Gradient(number, edge, form[0], next(self.turns), placement)


class _NodeHook:
    """What to record at one node. outputs: (edge, slot, call that made the output); inputs: (index
    of the gradient, share it is added to).
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.outputs: list[tuple[Edge, str, ForwardCall]] = []
        self.inputs: list[tuple[int, _Share]] = []

    def fired(self, seen: SeenGradients, into: Any, out_of: Any) -> None:
        """Record at a node that has run. into: gradients of the node's inputs; out_of: gradients of
        its outputs.
        """
        for edge, slot, call in self.outputs:
            gradient = out_of[edge.place] if edge.place < len(out_of) else None
            if gradient is not None:
                seen.arrived[edge] = seen.take(gradient, f"input.grad.{slot}", call)
        for place, share in self.inputs:
            share.add(into[place] if place < len(into) else None, seen)


class GradientHooks:
    """The hooks of one backward pass.

    guarded: runs a function of whence so that no exception of it reaches the program. shared: cast
    nodes that several calls share; the gradients of these calls are attributed to the tensor before
    the cast. leaves: weak references to the leaves of the graph, by identity.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        owners: NodeOwners,
        seen: SeenGradients,
        guarded: Callable[..., Any],
        shared: Collection[Any] = (),
    ) -> None:
        self._owners, self._seen, self._guarded, self._shared = owners, seen, guarded, shared
        self._handles: list[Any] = []
        self.leaves: dict[int, weakref.ref[Any]] = {}
        self._hooks: dict[Any, _NodeHook] = {}
        self._outputs: dict[int, dict[Edge, tuple[str, ForwardCall]]] = {}
        # Innermost calls first: a gradient is named by the slot of the innermost call.
        for call in sorted(owners.calls, key=lambda c: c.nodes[0] - c.nodes[1]):
            for slot, edge in call.outputs:
                if call.made(edge):
                    self._outputs.setdefault(edge.node, {}).setdefault(edge, (slot, call))
        self._reads: dict[int, dict[Edge, str]] = {}
        self._shares: dict[tuple[int, Edge], _Share] = {}
        self._senders: dict[Edge, list[tuple[Any, int]]] = {}
        for node, followers in nodes_behind(roots):
            self._look_at(node, followers)
        self._separate_inner_uses()
        for node, hook in self._hooks.items():
            self._handles.append(node.register_hook(self._listening(hook)))
        # Drop all references to nodes: they belong to the program and must be freed as they run.
        self._hooks, self._senders, self._shared = {}, {}, ()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_of(self, node: Any) -> _NodeHook:
        hook = self._hooks.get(node)
        if hook is None:
            hook = self._hooks[node] = _NodeHook()
        return hook

    def _look_at(self, node: Any, followers: Any) -> None:
        """Decide what to record at a node, given the nodes that receive its gradients."""
        if is_passed_on(node) or node in self._shared:
            return
        number = node._sequence_nr()
        outputs = self._outputs.get(number)
        if outputs is not None:
            self._hook_of(node).outputs = [(edge, *named) for edge, named in outputs.items()]
        owner = self._owners.of(number)
        reads: dict[Edge, str] = {}
        if owner is not None:
            known = self._reads.get(owner.order)
            reads = known if known is not None else first_reads(owner, self._seen.held)
            self._reads[owner.order] = reads
        for place, following in enumerate(followers):
            follower, result = behind(*following)
            if follower in self._shared:
                follower, result = behind(*follower.next_functions[0])
            if follower is None:
                continue
            edge = edge_to(follower, result)
            if edge.node < 0:
                leaf = self._seen.held.get(edge.place, follower.variable)
                edge = Edge(-1, id(leaf))
                if edge.place not in self.leaves:
                    self.leaves[edge.place] = weakref.ref(leaf)
            if edge.node in self._outputs:
                self._senders.setdefault(edge, []).append((node, place))
            if owner is not None and (slot := reads.get(edge)) is not None:
                self._add(node, place, owner, slot, edge, is_own=True)

    def _separate_inner_uses(self) -> None:
        """Sum the outside gradients separately, for each output that its own call uses as well."""
        for call in self._owners.calls:
            for slot, edge in call.outputs:
                senders = self._senders.get(edge, ())
                outer = [s for s in senders if not call.made(Edge(s[0]._sequence_nr(), 0))]
                if not call.made(edge) or len(outer) == len(senders):
                    continue
                self._seen.outside[call.order, edge] = None
                for node, place in outer:
                    self._add(node, place, call, slot, edge, is_own=False)

    def _add(
        self, node: Any, place: int, call: ForwardCall, slot: str, edge: Edge, *, is_own: bool
    ) -> None:
        share = self._shares.get((call.order, edge))
        if share is None:
            share = _Share(call, slot, edge, is_own=is_own)
            self._shares[call.order, edge] = share
        share.waiting += 1
        self._hook_of(node).inputs.append((place, share))

    def _listening(self, hook: _NodeHook) -> Callable[..., None]:
        guarded, seen = self._guarded, self._seen

        def fired(into: Any, out_of: Any) -> None:
            guarded(hook.fired, seen, into, out_of)

        return fired


def tensors_to_start_from(tensors: Any) -> list[Any]:
    """The tensors that a backward pass starts from, as a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for t in tensors or () if isinstance(t, torch.Tensor)]


def nodes_behind(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Every node of the graph behind these tensors once, and the nodes that it passes gradients to
    (node, number of its input).
    """
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited = set(todo)
    while todo:
        node = todo.pop()
        followers = node.next_functions
        for follower, _ in followers:
            if follower is not None and follower not in visited:
                visited.add(follower)
                todo.append(follower)
        yield node, followers
