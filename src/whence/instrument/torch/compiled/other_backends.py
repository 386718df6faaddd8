"""Graphs that a backend does not compile but has Python run (`eager`, one's own that returns
`gm.forward`).

What dynamo traced calls functions of torch; it is lowered to operators as AOTAutograd does, without
decompositions, and run node by node where the first execution shows that the bits are the same.
Where they are not, the boundary is all there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from whence.instrument.torch.compiled.observer_effect import Cannot, difference, silently

Take = Callable[[bool, Any], Any]
"""Makes what runs of a lowered graph: (is it a backward graph, the graph)."""
Tell = Callable[[str, str], None]


def python_graph(compiled: Any) -> Any:
    """The graph that what a backend returned runs, None where it is anything else."""
    owner = getattr(compiled, "__self__", compiled)
    runs = compiled is owner or getattr(compiled, "__name__", "") in (
        "forward",
        "_lazy_forward",
        "__call__",
    )
    return owner if isinstance(owner, torch.fx.GraphModule) and runs else None


def shown(
    compiled: Any,
    example_inputs: Sequence[Any],
    name: str,
    take: Take,
    tell: Tell,
    quiet: Callable[[], Any],
) -> Any:
    """To be run instead of what a backend returned; None where that is no graph that Python runs,
    or it cannot be lowered.

    name: of the backend. tell: notes (kind, text) for the run. quiet: a context in which nothing is
    captured.
    """
    from torch._dynamo.backends.common import aot_autograd

    module = python_graph(compiled)
    if module is None:
        return None
    graphs: list[Any] = []

    def taken(backward: bool, gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return take(backward, gm)

    try:
        lower = aot_autograd(
            fw_compiler=functools.partial(taken, False), bw_compiler=functools.partial(taken, True)
        )
        lowered = lower(module, example_inputs)
    except Exception as error:  # noqa: BLE001 - whatever AOTAutograd cannot lower runs as the backend left it
        tell(
            "graph",
            f"a graph of the backend {name} could not be lowered to operators: "
            f"{type(error).__name__}: {str(error)[:200]}",
        )
        return None
    if not graphs:
        return None
    chosen: list[Any] = []

    def run(*inputs: Any) -> Any:
        if not chosen:
            with quiet():
                chosen.append(
                    lowered
                    if _alike(graphs[0], compiled, lowered, inputs, name, tell)
                    else compiled
                )
        return chosen[0](*inputs)

    return run


def _alike(
    graph: Any, compiled: Any, lowered: Any, inputs: Sequence[Any], name: str, tell: Tell
) -> bool:
    """Are the results of both equal bit by bit, and what they left in their inputs? Both run on
    clones.
    """
    places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(inputs[i].requires_grad for i in places):
        problem = (
            "is captured at its boundary: its gradients would come from another graph; under "
            "torch.no_grad() its nodes are captured"
        )
        tell("inside-not-seen", f"a graph of the backend {name} {problem}")
        return False
    try:
        expected, actual = (
            silently(graph, functools.partial(_on, code), inputs, (), places)
            for code in (compiled, lowered)
        )
        changed = difference(expected, actual)
    except Cannot as why:
        changed = str(why)
    except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
        changed = f"{type(error).__name__}: {str(error)[:200]}"
    if changed:
        tell(
            "inside-not-seen",
            f"a graph of the backend {name} is captured at its boundary: run node by node it "
            f"would differ ({changed})",
        )
    else:
        tell(
            "observer",
            f"observer effect: none (graphs of the backend {name} run node by node, against what "
            "it left)",
        )
    return not changed


def _on(code: Any, inputs: Sequence[Any]) -> Any:
    return code(*inputs)
