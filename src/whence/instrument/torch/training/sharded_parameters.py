"""Parameters of which each rank holds a piece (FSDP2), and which are whole while modules run: the
whole one is a leaf of autograd's graph, the piece is what an optimiser steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from whence.instrument.torch.module_info import ModuleRoot

Held = Mapping[int, Any]
"""By identity of a whole parameter, the one that the module holds between its calls."""


class ShardedParameters:
    """The whole parameters of the roots that a listener met, by name."""

    def __init__(self, roots: Mapping[str, ModuleRoot]) -> None:
        self._roots = roots
        self._groups: dict[str, list[Any]] = {}

    def held(self) -> Held:
        """What is whole by now. Empty where no root is in pieces."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if getattr(fsdp, "FSDPModule", None) is None:
            return {}
        return {
            id(whole): parameter.sharded_param
            for name, root in self._roots.items()
            for group in self._groups_of(name, root.ref(), fsdp)
            for parameter in group.fsdp_params
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None
        }

    def _groups_of(self, name: str, model: Any, fsdp: Any) -> list[Any]:
        if name not in self._groups:
            self._groups[name] = list(_groups(model, fsdp.FSDPModule)) if model is not None else []
        return self._groups[name]


def _groups(model: Any, sharded: type) -> Iterator[Any]:
    """The groups of parameters of a model. Releases of torch differ in what they call them."""
    for module in model.modules():
        if isinstance(module, sharded):
            state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = getattr(state, "_fsdp_param_groups", None)
            alone = getattr(state, "_fsdp_param_group", None)
            yield from groups if groups is not None else [alone] if alone is not None else []
