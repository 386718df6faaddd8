"""Finds the module and the parameter name of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.training.sharded_parameters import ShardedParameters


class ParameterName(NamedTuple):
    """A parameter of a root: scope and class of the module that holds it, and its name there."""

    root: ModuleRoot
    scope: str
    op_type: str
    name: str
    tensor: weakref.ref[Any]

    @property
    def path(self) -> str:
        """Its name in the model."""
        return f"{self.scope}.{self.name}" if self.scope else self.name


class ParameterNames:
    """Names of parameters, found by the identity of the tensor. roots: by name, as they are met.
    sharded: FSDP2 parameters.
    """

    def __init__(self, roots: Mapping[str, ModuleRoot], sharded: ShardedParameters) -> None:
        self._roots, self._sharded = roots, sharded
        self._names: dict[int, ParameterName] = {}

    def of(self, tensor: Any) -> ParameterName | None:
        """The name of a parameter, None for a tensor that no root holds."""
        known = self._names.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            self._learn()
            known = self._names.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _learn(self) -> None:
        self._names.clear()
        held = self._sharded.held()
        for root in self._roots.values():
            model = root.ref()
            for scope, module in model.named_modules() if model is not None else ():
                for name, entry in module._parameters.items():
                    tensor = held.get(id(entry), entry)
                    if tensor is not None and id(tensor) not in self._names:
                        self._names[id(tensor)] = ParameterName(
                            root, scope, type(module).__name__, name, weakref.ref(tensor)
                        )
