"""Runs an FX graph node by node, without inductor's code: the reference that a compiled run is
compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from whence.instrument.torch.compiled.fx_nodes import origin_of
from whence.instrument.torch.operator_call import OperatorCall
from whence.instrument.torch.operator_program import program_of
from whence.records import Program
from whence.records.program import identified


class MadeInGraph(OperatorCall):
    """An operator of a graph. Its inputs are numbered in schema order ("input.0", ...), like those
    of a kernel.
    """

    __slots__ = ("_forms",)

    def take(self) -> None:
        args, kwargs = self.called
        self._forms = {
            name: self._take(name, value)
            for name, value in (*zip(self.overload.positional, args), *kwargs.items())
        }

    def form_of(self, name: str) -> Any:
        return self._forms[name]

    def _tensor(self, slot: str, tensor: Any) -> dict[str, str]:
        return super()._tensor(f"input.{len(self.inputs)}", tensor)

    def picked(self, out: Any, place: int | None) -> tuple[Program | None, str]:
        """The program of this operator, reduced to the result at index `place` if the operator has
        several; or the reason why there is none.
        """
        program, why = program_of(self, out)
        if program is None or place is None:
            return program, why
        for slot, operand in program.outputs:
            if slot == f"output.{place}":
                outputs = (("output.0", operand),)
                return identified(msgspec.structs.replace(program, outputs=outputs)), ""
        return None, f"has no result {place}"


def interpreted(gm: Any, look: Callable[[Any, Any, Any, Any, Any], None]) -> Callable[[Any], Any]:
    """Returns a function that runs the graph on a list of inputs, which it empties. After each
    operator it calls look(node, args, kwargs, out, value).

    args, kwargs, out: of the operator that ran; value: of the node, which may be one of several
    results.
    """
    last: dict[Any, list[Any]] = {}
    used_later: set[Any] = set()
    for node in reversed(gm.graph.nodes):
        used = [n for n in (*node.all_input_nodes, origin_of(node)) if n not in used_later]
        used_later.update(used)
        last[node] = used
    frozen = tuple(gm.graph.nodes)

    def run(inputs: Any) -> Any:
        values = iter(list(inputs))
        if isinstance(inputs, list):
            inputs.clear()
        env: dict[Any, Any] = {}
        results: dict[Any, tuple[Any, Any, Any]] = {}
        with torch.no_grad(), torch._C._DisableAutocast():
            for node in frozen:
                if node.op == "placeholder":
                    env[node] = next(values)
                elif node.op == "get_attr":
                    env[node] = functools.reduce(getattr, str(node.target).split("."), gm)
                else:
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                    if node.op == "output":
                        return args[0]
                    if node.op != "call_function":
                        raise RuntimeError(
                            f"a graph with a {node.op} node cannot be run node by node "
                            f"({node.target})"
                        )
                    env[node] = node.target(*args, **kwargs)
                    maker = origin_of(node)
                    if maker is node:
                        results[node] = args, kwargs, env[node]
                    if maker in results:
                        look(node, *results[maker], env[node])
                for old in last[node]:
                    if old is not node:
                        env.pop(old, None)
                        results.pop(old, None)
        raise RuntimeError("the graph has no output")

    return run
