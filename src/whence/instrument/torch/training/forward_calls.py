"""Module calls whose backward pass may come, as far as a backward pass needs to know them.

Only numbers are kept: torch numbers the nodes of its graph as they are made, so the nodes of a call
are those with a number between its entry and its return. Nothing of the program is kept alive.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from whence.instrument.torch.module_info import HeldTensor, ModuleRoot
from whence.instrument.torch.training.sharded_parameters import Held
from whence.records import Placement, Ref

next_node = torch.autograd._get_sequence_nr
"""The number that the next node of this thread's graph gets."""

_MOST_CALLS = 1 << 15
"""So many calls wait for their backward pass; of a program that never runs one, no more are kept.
"""


class Edge(NamedTuple):
    """Where a gradient arrives: the number of a node and which of its results, or for a leaf of the
    graph -1 and the identity of the tensor.
    """

    node: int
    place: int


def edge_of(tensor: Any) -> Edge | None:
    """Where the gradient of a tensor arrives, None for one that gets none."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return Edge(-1, id(tensor))
    if is_passed_on(node):
        node, place = behind(node, tensor.output_nr)
        return edge_to(node, place) if node is not None else None
    return Edge(node._sequence_nr(), tensor.output_nr)


_PASSES_ON = "RegisterPostBackwardFunctionBackward"
"""What FSDP2 puts before a module to learn that its backward pass is over: it changes nothing."""


def is_passed_on(node: Any) -> bool:
    """Does a node hand its gradients on as they are, as no code of the program?"""
    return type(node).__name__ == _PASSES_ON


def behind(node: Any, place: int) -> tuple[Any, int]:
    """The node that gets this result's gradient, behind nodes that hand it on; (None, 0) where none
    does.
    """
    while node is not None and is_passed_on(node):
        node, place = node.next_functions[place]
    return node, place


def edge_to(node: Any, place: int) -> Edge:
    """The edge that leads to a node of the graph."""
    leaf = getattr(node, "variable", None)
    return Edge(node._sequence_nr(), place) if leaf is None else Edge(-1, id(leaf))


class HoldsTensors(Protocol):
    """What is known of a module: where its class is, and the tensors that it holds."""

    @property
    def source(self) -> str: ...
    @property
    def entries(self) -> Sequence[HeldTensor] | None: ...


class EndedCall(Protocol):
    """A call that has returned: of a module, or of code outside of all modules. results: (slot,
    tensor) of what it returned. first_node, input_edges, called: as of `ModuleFrame`.
    """

    scope: str
    op: str
    op_type: str
    number: str
    occurrence: int
    step: int
    micro: int
    order: int
    keep: bool
    training: bool
    first_node: int
    root: Any
    refs: list[Ref]
    arguments: dict[str, Any]
    results: list[tuple[str, Any]]
    input_edges: list[tuple[str, Any]]
    called: list[Any]

    @property
    def info(self) -> HoldsTensors: ...


class ForwardCall:
    """One module call that made nodes of the graph, or handed gradients on.

    nodes: numbers of its first node and of the first behind it. inputs, outputs: (slot, edge) of
    the tensors with a gradient. children: its calls, in order, None for one that is not known.
    refs: records of what it read and wrote. program: id of the program that it ran. has_graph:
    False under `no_grad`; then `returned` is what it returned, and `linked` the edges of that once
    the caller had it, where a function around the call made a node for it. is_checkpointed: a
    checkpoint's node stands for it.
    """

    __slots__ = (
        "arguments", "children", "has_graph", "info", "inputs", "is_checkpointed", "keep", "linked",
        "micro", "nodes", "number", "occurrence", "op", "op_type", "order", "outputs", "placements",
        "program", "refs", "returned", "root", "scope", "step", "training",
    )  # fmt: skip
    children: list[ForwardCall | None]
    linked: list[tuple[str, Edge]]

    def __init__(self, frame: EndedCall, last: int, program: str) -> None:
        self.nodes = frame.first_node, last
        self.inputs = frame.input_edges
        self.has_graph = torch.is_grad_enabled()
        edges = [(slot, edge_of(t)) for slot, t in frame.results if self.has_graph]
        self.outputs = [(slot, edge) for slot, edge in edges if edge is not None]
        self.children = frame.called
        self.info: HoldsTensors = frame.info
        self.root: ModuleRoot = frame.root
        self.refs: Sequence[Ref] = frame.refs
        self.program, self.order, self.scope = program, frame.order, frame.scope
        self.op = frame.op
        self.step, self.micro, self.occurrence = frame.step, frame.micro, frame.occurrence
        self.op_type, self.number, self.training = frame.op_type, frame.number, frame.training
        self.arguments, self.keep = frame.arguments, frame.keep
        self.placements: dict[str, Placement] = {}
        self.is_checkpointed, self.linked = False, []
        self.returned: list[tuple[str, weakref.ref[Any]]] = (
            []
            if self.has_graph
            else [(slot, weakref.ref(tensor)) for slot, tensor in frame.results]
        )

    def link(self) -> None:
        """The caller has what the call returned, and goes on. It is linked to a function around it
        that read nothing else.
        """
        returned = [(slot, tensor) for slot, ref in self.returned if (tensor := ref()) is not None]
        self.returned.clear()
        own = {edge for _, edge in self.inputs}
        for slot, tensor in returned:
            edge, node = edge_of(tensor), tensor.grad_fn
            if edge is None or node is None:
                continue
            read = (behind(*following) for following in node.next_functions)
            if all(edge_to(*reader) in own for reader in read if reader[0] is not None):
                self.linked.append((slot, edge))

    def take_place_of(self, first: ForwardCall) -> None:
        """Count as another run of the same code, which was recorded where the program called it."""
        self.root, self.order, self.number = first.root, first.order, first.number
        self.step, self.micro, self.occurrence = first.step, first.micro, first.occurrence

    def made(self, edge: Edge) -> bool:
        """Is it one of the nodes of this call, or of the calls below it?"""
        return self.nodes[0] <= edge.node < self.nodes[1]

    def encloses(self, call: ForwardCall) -> bool:
        """Is it this call or one below it?"""
        return self.nodes[0] <= call.nodes[0] and call.nodes[1] <= self.nodes[1]

    def known_children(self) -> Iterator[tuple[int, ForwardCall]]:
        """Its calls that stand in the graph, each with its place among all."""
        for place, child in enumerate(self.children):
            if child is not None and (child.has_graph or child.is_checkpointed):
                yield place, child

    def params(self) -> dict[int, str]:
        """Slot of each tensor that the module holds, by identity."""
        return {
            id(tensor): entry.slot
            for entry in self.info.entries or ()
            if (tensor := entry.tensor()) is not None
        }


def first_reads(call: ForwardCall, held: Held) -> dict[Edge, str]:
    """First slot of each tensor with a gradient that a call reads. held: parameters in pieces."""
    edges: dict[Edge, str] = {}
    for slot, edge in call.inputs:
        edges.setdefault(edge, slot)
    for identity, slot in call.params().items():
        piece = held.get(identity)
        edges.setdefault(Edge(-1, identity if piece is None else id(piece)), slot)
    return edges


class WaitingCalls:
    """Calls whose backward pass has not come yet."""

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._threads: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def several_threads(self) -> bool:
        """Do calls of several threads wait? Each thread numbers its nodes by itself."""
        return len(self._threads) > 1

    def add(self, call: ForwardCall, thread: int) -> None:
        """A call has returned on this thread."""
        if len(self._calls) >= _MOST_CALLS:
            del self._calls[: _MOST_CALLS // 2]
        self._calls.append(call)
        self._threads.add(thread)

    def forget(self, calls: Iterable[ForwardCall]) -> None:
        """These calls have had their backward pass."""
        gone = {id(call) for call in calls}
        self._calls = [call for call in self._calls if id(call) not in gone]
        if not self._calls:
            self._threads.clear()

    def clear(self) -> None:
        """No backward pass of these calls comes any more."""
        self._calls.clear()
        self._threads.clear()

    def __iter__(self) -> Iterator[ForwardCall]:
        return iter(self._calls)


class NodeOwners:
    """Which of some nested calls made a node of the graph, by the node's number."""

    def __init__(self, calls: Sequence[ForwardCall]) -> None:
        self.calls = sorted(calls, key=lambda call: (call.nodes[0], -call.nodes[1], call.order))
        self._starts: list[int] = []
        self._owners: list[ForwardCall | None] = []
        stack: list[ForwardCall] = []
        for call in self.calls:
            while stack and stack[-1].nodes[1] <= call.nodes[0]:
                self._leave(stack)
            stack.append(call)
            self._begin(call.nodes[0], call)
        while stack:
            self._leave(stack)

    def _leave(self, stack: list[ForwardCall]) -> None:
        ended = stack.pop()
        self._begin(ended.nodes[1], stack[-1] if stack else None)

    def _begin(self, start: int, owner: ForwardCall | None) -> None:
        if self._starts and self._starts[-1] == start:
            self._owners[-1] = owner
        else:
            self._starts.append(start)
            self._owners.append(owner)

    def of(self, node: int) -> ForwardCall | None:
        """The innermost call that made the node of this number, None for none of them."""
        place = bisect.bisect_right(self._starts, node) - 1
        return self._owners[place] if place >= 0 else None
