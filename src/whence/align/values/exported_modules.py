"""The values that torch modules returned, found in the nodes that an exporter labels with module
paths.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from whence.align.values.value_graph import ValueGraph, is_move
from whence.records import Call, Record
from whence.records.marks import Mark, mark_value


class ModuleValues(NamedTuple):
    """The outputs of a module, in order, and the parameters that are read inside it."""

    values: Sequence[int]
    parameters: Sequence[Record]

    def may_be(self, other: ModuleValues) -> bool:
        """Whether two modules may be the same module.

        A module whose norm, bias or activation was fused into another operator reads other
        parameters in one of the graphs. Of the parameters with equal sizes, at least one must hold
        the same elements; a convolution with a norm folded into it does not pass. A module that has
        only vectors (a norm, the frequencies of a rotary embedding) has nothing folded into it
        without a further parameter, so its own parameter may be wrong.
        """
        sizes, other_sizes = (Counter(p.count for p in m.parameters) for m in (self, other))
        if len(self.values) != len(other.values) or sizes != other_sizes:
            return False
        sums, other_sums = ({_sum(p) for p in m.parameters} for m in (self, other))
        return not sums or bool(sums & other_sums) or self._has_only_vectors()

    def _has_only_vectors(self) -> bool:
        return all(sum(extent > 1 for extent in p.shape) <= 1 for p in self.parameters)


def module_values(graph: ValueGraph) -> dict[str, ModuleValues]:
    """By path, for modules that are called once: the values that they make for others, and their
    parameters.
    """
    modules = defaultdict[str, list[Call]](list)
    for call in graph.calls:
        for path in _with_those_around(mark_value(call, Mark.OF_MODULE)):
            modules[path].append(call)
    if modules:
        readers = _readers(graph)
        results = (
            (path, calls, _read_outside(graph, calls, readers)) for path, calls in modules.items()
        )
        return {
            path: ModuleValues(values, _parameters(graph, calls))
            for path, calls, values in results
            if values
        }
    called = Counter(call.scope for call in graph.calls if call.kind == "module")
    return {
        call.scope: ModuleValues([ref.record for ref in refs], _parameters(graph, [call]))
        for call in graph.calls
        if call.kind == "module" and call.scope and called[call.scope] == 1
        for refs in (call.slots("output"),)
        if refs
    }


def _with_those_around(path: str) -> Iterator[str]:
    """The path of a module, then the paths of its enclosing modules."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _readers(graph: ValueGraph) -> dict[int, set[int]]:
    """By value, the ids of the calls that compute with it; the root's id where the model returns
    it.
    """
    readers = defaultdict[int, set[int]](set)
    for call in graph.calls:
        for ref in () if is_move(call) else call.slots("input"):
            readers[graph.source(ref.record)].add(call.id)
    for ref in graph.root.slots("output"):
        readers[graph.source(ref.record)].add(graph.root.id)
    return readers


def _read_outside(
    graph: ValueGraph, calls: Sequence[Call], readers: Mapping[int, set[int]]
) -> list[int]:
    """The values made by a module's calls that other calls read or the model returns."""
    inside = {call.id for call in calls}
    own = (ref.record for call in calls for ref in call.slots("output"))
    return [
        value
        for value in own
        if graph.makers[value].id in inside and readers.get(value, set()) - inside
    ]


def _parameters(graph: ValueGraph, calls: Sequence[Call]) -> list[Record]:
    """The parameters of these calls, each distinct content once: a rotary embedding holds its
    frequencies twice. Moves are left out; their parameters are shapes or axes.
    """
    read = [record for call in calls if not is_move(call) for record in graph.parameters(call)]
    sums = [_sum(record) for record in read]
    return [record for k, record in enumerate(read) if sums[k] is None or sums[k] not in sums[:k]]


def _sum(parameter: Record) -> int | None:
    """A checksum of the parameter's elements in any order."""
    return parameter.sketch.checksum if parameter.sketch is not None else None
