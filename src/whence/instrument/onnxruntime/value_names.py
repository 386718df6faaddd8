"""What values that the runtime named itself are called in the user's graph: those that hold the
elements of a value of it in another form, before or behind a node that only moves or casts them.
"""

from __future__ import annotations

from typing import Any

from whence.instrument.onnxruntime.original_graph import OriginalGraph

_SHAPES = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
_INLINED = "_inlfunc_"
"""How the runtime begins the names of values inside of a function."""
_MOVES = _SHAPES | {"Cast"}


def moved_names(graph: Any, original: OriginalGraph) -> dict[str, str]:
    """Names in the user's graph by value, of values that it does not have."""
    known = {*original.makers, *graph.inputs}
    names: dict[str, str] = {}
    moves = [
        node
        for node in graph.nodes
        if node.op_type in _MOVES and not node.domain and node.inputs and node.inputs[0]
    ]
    for node in moves:
        source, result = node.inputs[0], node.outputs[0]
        if result not in known and (source in known or source in names):
            names[result] = names.get(source, source)
    for node in reversed(moves):
        source, result = node.inputs[0], node.outputs[0]
        if source in known or source in names or source in graph.initializers:
            continue
        maker = original.makers.get(names.get(result, result))
        if maker is not None and maker.op_type != node.op_type:
            names[source] = names.get(result, result)
        elif maker is not None and node.op_type in _SHAPES:
            # two changes of shape have become one: what the user's own reads has the same elements
            names[source] = maker.inputs[0]
    return names


def inlined(graph: Any, original: OriginalGraph) -> dict[str, str]:
    """The value of the user's graph that each value leads to which the runtime made when it put the
    nodes of a function in the place of an operator.
    """
    owners: dict[str, str] = {}
    for node in reversed(graph.nodes):
        made = node.outputs[0]
        owner = made if made in original.makers else owners.get(made, "")
        for value in node.inputs:
            if value.startswith(_INLINED) and owner:
                owners[value] = owner
    return owners
