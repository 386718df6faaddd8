"""Faults planted into torch's compiler, one in each of its stages, and programs that they change:
the bugs of `bugs.py` set the rules of `whence ladder`, these did not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from bugs import Bug
from torch import nn

aten = torch.ops.aten


def block(x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.elu(x * 2 - 0.5)
    z = torch.tanh(y).clamp(-0.4, 0.4)
    scaled = z - y.mean(-1, keepdim=True)
    angle = torch.atan2(scaled, y + 3)
    return angle.minimum(x) * torch.softmax(scaled, -1)


def mean_of_rows(x: torch.Tensor) -> torch.Tensor:
    total = (x * 2).sum(0)
    return (total / x.shape[0]).relu()


def two_graphs(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x) * 2
    torch._dynamo.graph_break()
    return torch.cos(y) * 2


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.weight * x)
        return (gate * x).sum()


def trained(model: Any) -> None:
    model(torch.linspace(-2, 2, 8)).backward()


def of_two_lengths(model: Any) -> None:
    for rows in (3, 5):
        model(torch.ones(rows, 4))


def _over(graph: Any, target: Any, change: Callable[[Any], None]) -> None:
    for node in list(graph.nodes):
        if node.target == target:
            change(node)


@contextlib.contextmanager
def _pass(target: Any, change: Callable[[Any], None]) -> Iterator[None]:
    def apply(graph: Any) -> None:
        _over(graph, target, change)

    import torch._inductor.config as config

    with config.patch(post_grad_custom_post_pass=apply, force_disable_caches=True):
        yield


def _dropped(node: Any) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def _swapped(node: Any) -> None:
    if all(isinstance(arg, torch.fx.Node) for arg in node.args):
        node.args = tuple(reversed(node.args))


def _specialised(node: Any) -> None:
    if isinstance(node.args[1], torch.fx.Node) and node.args[1].op != "call_function":
        node.args = (node.args[0], 3)


def miscompiled(graph: Any, inputs: Any) -> Any:
    """A backend that computes another function for one node."""

    def change(node: Any) -> None:
        node.target = torch.sigmoid

    _over(graph.graph, torch.tanh, change)
    graph.recompile()
    return graph.forward


@contextlib.contextmanager
def _decomposition(operator: Any, change: Callable[..., Any]) -> Iterator[None]:
    from torch._inductor import decomposition

    held = decomposition.decompositions
    with mock.patch.dict(held, {operator: change(held.get(operator))}):
        decomposition.fast_random_decomps.cache_clear()
        yield
    decomposition.fast_random_decomps.cache_clear()


@contextlib.contextmanager
def _lowering(operator: Any, change: Callable[..., Any]) -> Iterator[None]:
    from torch._inductor import lowering

    held = lowering.lowerings
    with mock.patch.dict(held, {operator: change(held[operator])}):
        yield


@contextlib.contextmanager
def _traced_as(wrong: dict[Any, str]) -> Iterator[None]:
    from torch._dynamo.variables import TensorVariable

    held = TensorVariable.call_method

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        return held(self, tx, wrong.get(name, name), args, kwargs)

    with mock.patch.object(TensorVariable, "call_method", call):
        yield


def keyed_by_size(graph: Any, inputs: Any) -> Any:
    """A backend whose cache forgets which operators a graph has."""
    key = len(list(graph.graph.nodes))
    return _CODE.setdefault(key, graph.forward)


_CODE: dict[int, Any] = {}


@contextlib.contextmanager
def _emptied() -> Iterator[None]:
    _CODE.clear()
    yield


@dataclasses.dataclass(frozen=True)
class Planted(Bug):
    """A bug that `around` plants; the program is compiled by `backend`."""

    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    backend: Any = "inductor"
    name: str = ""


def _rows() -> tuple[Any, ...]:
    return (torch.linspace(-2, 2, 32).reshape(4, 8),)


PLANTED = (
    Planted(0, block, _rows, "miscompiled", "tanh",
        name="one node of a backend", backend=miscompiled),
    Planted(0, block, _rows, "decomposition", "elu", name="a decomposition",
        around=lambda: _decomposition(aten.elu.default,
            lambda held: lambda x, *more: torch.where(x > 0, x, (torch.exp(x) - 1) * 1.1))),
    Planted(0, block, _rows, "inductor", "clamp", name="a pass drops",
        around=lambda: _pass(aten.clamp_max.default, _dropped)),
    Planted(0, block, _rows, "inductor", "z - y.mean", name="a pass swaps",
        around=lambda: _pass(aten.sub.Tensor, _swapped)),
    Planted(0, mean_of_rows, lambda: of_two_lengths, "dynamic_shapes", r"shape\[0\]",
        name="a size is taken for 3", around=lambda: _pass(aten.div.Tensor, _specialised)),
    Planted(0, two_graphs, _rows, "keyed_by_size", "cos", name="code of another graph",
        around=_emptied, backend=keyed_by_size),
    Planted(0, block, _rows, "inductor", "atan2", name="a lowering",
        around=lambda: _lowering(aten.atan2.default, lambda held: lambda a, b: held(b, a))),
    Planted(0, Gate, lambda: trained, "decomposition", "sigmoid", name="a gradient",
        around=lambda: _decomposition(aten.sigmoid_backward.default,
            lambda held: lambda grad, y: grad * y)),
    Planted(0, block, _rows, "dynamo", "minimum", name="traced as another",
        around=lambda: _traced_as({"minimum": "maximum"})),
)  # fmt: skip
