"""Finds the module that a graph belongs to, by the parameters it gets or the code that runs."""

from __future__ import annotations

import sys
from typing import Any

import torch

from whence.frameworks.torch_arrays import address_of
from whence.instrument.call_frames import CallFrames
from whence.instrument.torch.compiled import fx_nodes as nodes
from whence.instrument.torch.compiled.graph import Graph
from whence.instrument.torch.module_registry import ModuleRegistry


class ModulePaths:
    """Paths of the modules that graphs belong to."""

    def __init__(self, frames: CallFrames, modules: ModuleRegistry) -> None:
        self._thread, self._modules = frames.thread, modules

    def of_variables(self, gm: Any) -> dict[str, str]:
        """Variable name -> path of the module that it held when dynamo traced the graph; "" -> path
        of the module whose code this is.
        """
        by_local = {"": self._module_on_the_stack()}
        paths: dict[int, str] | None = None
        for node in getattr(getattr(gm, "graph", None), "nodes", ()):
            source_of_input = node.meta.get("grapharg") if node.op == "placeholder" else None
            source, tensor = (
                getattr(source_of_input, "source", None),
                getattr(source_of_input, "example", None),
            )
            if source is None or not isinstance(tensor, torch.Tensor):
                continue
            name = source.name() if callable(source.name) else source.name
            tail, local = nodes.module_path(str(name))
            if not tail or local in by_local:
                continue
            paths = paths if paths is not None else self._paths()
            path = paths.get(address_of(tensor), "")
            if path == tail or path.endswith("." + tail):
                by_local[local] = path[: len(path) - len(tail)].rstrip(".")
        return by_local

    def _paths(self) -> dict[int, str]:
        """Address -> path of every parameter and buffer of the roots, with the root that is being
        called first.
        """
        stack = self._thread.stack
        roots = [stack[0].root] if stack else []
        roots += [r for r in self._modules.roots.values() if r not in roots]
        paths: dict[int, str] = {}
        for root in roots:
            module = root.ref()
            if module is None:
                continue
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if address := address_of(tensor):
                    paths.setdefault(address, _plain(name))
        return paths

    def _module_on_the_stack(self) -> str:
        """The path of the innermost known module whose method is running, found by the first
        argument of the frame.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount and code.co_filename != __file__:
                first = frame.f_locals.get(code.co_varnames[0])
                if (
                    isinstance(first, torch.nn.Module)
                    and (info := self._modules.get(first)) is not None
                ):
                    return _plain(info.scope)
            frame = frame.f_back
        return _plain(self._thread.stack[-1].scope) if self._thread.stack else ""

    def of_inputs(self, graph: Graph, inputs: Any) -> dict[int, str]:
        """Input index -> path of the parameter that it is. Also notes in the graph which module it
        serves now.
        """
        addresses = {
            i: address_of(value)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
        }
        if graph.slots and all(addresses.get(i) == address for i, address in graph.places.items()):
            if not graph.places and graph.phase == "forward":
                graph.moved = graph.modules.get("", ""), self._module_on_the_stack()
            return {i: graph.slots[i][6:] for i in graph.places}
        paths = self._paths()
        names = {i: paths[address] for i, address in addresses.items() if address in paths}
        if not graph.places:
            graph.first = names
        graph.places = {i: addresses[i] for i in names}
        first = graph.first
        graph.moved = next(
            (_moved(first[i], names[i]) for i in names if i in first and first[i] != names[i]),
            ("", ""),
        )
        return names


def _plain(path: str) -> str:
    """A module path without the wrapper that torch.compile puts around a model."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _moved(old: str, new: str) -> tuple[str, str]:
    """The prefixes in which two paths differ: ("blocks.0", "blocks.1") for "blocks.0.fc.weight" and
    "blocks.1.fc.weight".
    """
    a, b = old.split("."), new.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return ".".join(a), ".".join(b)
