"""What a backward pass needs to know of the module calls before it.

Only numbers are kept: torch numbers the nodes of its graph in order of creation, so the nodes of a
call are those numbered between its entry and its return. No tensor or node is kept alive.
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
"""Most calls that wait for their backward pass; in a program that never runs one, the oldest half
is then dropped.
"""


class Edge(NamedTuple):
    """Where a gradient arrives: (number of a node, index of the node's output), or (-1, identity of
    the tensor) for a leaf of the graph.
    """

    node: int
    place: int


def edge_of(tensor: Any) -> Edge | None:
    """The edge at which the gradient of a tensor arrives, None for a tensor without gradient."""
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
"""Node that FSDP2 inserts before a module to learn when its backward pass is over; it leaves
gradients unchanged.
"""


def is_passed_on(node: Any) -> bool:
    """Whether a node passes its gradients on unchanged and is not code of the program."""
    return type(node).__name__ == _PASSES_ON


def behind(node: Any, place: int) -> tuple[Any, int]:
    """(node, output index) that receives the gradient after all pass-through nodes are skipped;
    (None, 0) where there is none.
    """
    while node is not None and is_passed_on(node):
        node, place = node.next_functions[place]
    return node, place


def edge_to(node: Any, place: int) -> Edge:
    """The edge that leads to a node of the graph."""
    leaf = getattr(node, "variable", None)
    return Edge(node._sequence_nr(), place) if leaf is None else Edge(-1, id(leaf))


class HoldsTensors(Protocol):
    """What is known of a module: the source of its class, and the tensors that it holds."""

    @property
    def source(self) -> str: ...
    @property
    def entries(self) -> Sequence[HeldTensor] | None: ...


class EndedCall(Protocol):
    """A call that has returned, of a module or of code outside all modules. results: (slot, tensor)
    of what it returned. first_node, input_edges, called: as in `ModuleFrame`.
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
    """One module call that made nodes of the graph or passed gradients on.

    nodes: number of its first node, and of the first node after it. inputs, outputs: (slot, edge)
    of the tensors with a gradient. children: the calls it made, in order, None for an unknown one.
    refs: records that it read and wrote. program: id of its program. has_graph: False under
    `no_grad`; then `returned` holds what it returned, and `linked` the edges of these tensors once
    a function around the call has made a node for them. is_checkpointed: the node of a checkpoint
    represents this call.
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
        """Called when the caller continues after this call. If a function around the call made a
        node for its results and read nothing else, that node's edges are stored in `linked`.
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
        """Take over root, order and step of `first`, an earlier run of the same code that the
        program itself called.
        """
        self.root, self.order, self.number = first.root, first.order, first.number
        self.step, self.micro, self.occurrence = first.step, first.micro, first.occurrence

    def made(self, edge: Edge) -> bool:
        """Whether the node of this edge was made by this call or by a call below it."""
        return self.nodes[0] <= edge.node < self.nodes[1]

    def encloses(self, call: ForwardCall) -> bool:
        """Whether `call` is this call or one below it."""
        return self.nodes[0] <= call.nodes[0] and call.nodes[1] <= self.nodes[1]

    def known_children(self) -> Iterator[tuple[int, ForwardCall]]:
        """(index among all children, call) of the children that appear in the graph."""
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
    """Maps the edge of each tensor with a gradient that a call reads to the first slot that reads
    it. held: FSDP2 parameters.
    """
    edges: dict[Edge, str] = {}
    for slot, edge in call.inputs:
        edges.setdefault(edge, slot)
    for identity, slot in call.params().items():
        piece = held.get(identity)
        edges.setdefault(Edge(-1, identity if piece is None else id(piece)), slot)
    return edges


class WaitingCalls:
    """Calls whose backward pass has not run yet."""

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._threads: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def several_threads(self) -> bool:
        """Whether calls of several threads wait. Each thread numbers its nodes separately."""
        return len(self._threads) > 1

    def add(self, call: ForwardCall, thread: int) -> None:
        """Add a call that has returned. thread: the id of its thread."""
        if len(self._calls) >= _MOST_CALLS:
            del self._calls[: _MOST_CALLS // 2]
        self._calls.append(call)
        self._threads.add(thread)

    def forget(self, calls: Iterable[ForwardCall]) -> None:
        """Remove calls whose backward pass is over."""
        gone = {id(call) for call in calls}
        self._calls = [call for call in self._calls if id(call) not in gone]
        if not self._calls:
            self._threads.clear()

    def clear(self) -> None:
        """Remove all calls."""
        self._calls.clear()
        self._threads.clear()

    def __iter__(self) -> Iterator[ForwardCall]:
        return iter(self._calls)


class NodeOwners:
    """Finds the innermost of some nested calls that made a node, given the node's number."""

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
        """The innermost call that made the node with this number, None if none of the calls did."""
        place = bisect.bisect_right(self._starts, node) - 1
        return self._owners[place] if place >= 0 else None
