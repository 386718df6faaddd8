"""Mode deep: an operator that only looks behind each node of the graph that inductor lowers. It
keeps a value from being fused away, and that may round it.
"""

from __future__ import annotations

from typing import Any

import torch

from whence.instrument.torch.compiled.collected import Collected, Site, compiling, find, seen
from whence.instrument.torch.compiled.fx_nodes import is_value, named, origin_of, reads_of


def taps(previous: Any, collected: Collected) -> Any:
    """A pass that puts a tap behind every node with a value of its own, after the pass that the
    user set.
    """
    _define_tap()
    base = find("torch._inductor.custom_graph_pass", "CustomGraphPass") or object

    class Taps(base):  # type: ignore[misc, valid-type]
        def __call__(self, graph: Any) -> None:
            if previous is not None:
                previous(graph)
            # not of the graphs of patterns and constants that are lowered on the way
            if compiling.collected is not None:
                put_taps(graph, collected)

        def uuid(self) -> Any:
            return None  # no cache may keep it

    return Taps()


def put_taps(graph: Any, collected: Collected) -> None:
    """Put a tap behind every node with a value of its own, and note what it is."""
    collected.sites.clear()
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node in list(graph.nodes):
        if not is_value(node):
            continue
        name = named(node)
        collected.sites[node.name] = Site(
            name, "", "", (node.name,), reads_of(node), node.meta["val"].shape
        )
        with graph.inserting_before(_after(node, last)):
            tap = graph.call_function(
                torch.ops.whence.tap.default, (node, f"{collected.key}:{node.name}")
            )
            tap.meta["val"] = None


def _after(node: Any, last: Any) -> Any:
    following = node.next
    while (
        following is not last
        and origin_of(following) is origin_of(node)
        and following.op == "call_function"
    ):
        following = following.next  # the results of one operator stay together
    return following


_tap: list[Any] = []


def _define_tap() -> None:
    if _tap:
        return
    library = torch.library.Library("whence", "FRAGMENT")
    tags = tuple(
        getattr(torch.Tag, n)
        for n in ("cudagraph_unsafe", "flexible_layout")
        if hasattr(torch.Tag, n)
    )
    library.define("tap(Tensor value, str name) -> ()", tags=tags)
    library.impl("tap", _look, "CompositeExplicitAutograd")
    library.impl("tap", lambda value, name: None, "Meta")
    torch.fx.node.has_side_effect(torch.ops.whence.tap.default)
    _tap.append(library)


def _look(value: Any, name: str) -> None:
    key, _, node = name.partition(":")
    seen(key, node, value)
