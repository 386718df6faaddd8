"""FSDP2 parameters, of which each rank holds a shard. While modules run, the gathered parameter is
a leaf of autograd's graph; the optimiser steps the shard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from whence.instrument.torch.module_info import ModuleRoot

Held = Mapping[int, Any]
"""Maps the identity of a gathered parameter to the shard that the module holds between its
calls.
"""


class ShardedParameters:
    """The gathered parameters of the roots that a listener has met. roots: by name."""

    def __init__(self, roots: Mapping[str, ModuleRoot]) -> None:
        self._roots = roots
        self._groups: dict[str, list[Any]] = {}

    def held(self) -> Held:
        """The parameters that are gathered now, with their shards. Empty where no root is
        sharded.
        """
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
    """The parameter groups of a model. The attribute that holds them differs between torch
    releases.
    """
    for module in model.modules():
        if isinstance(module, sharded):
            state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = getattr(state, "_fsdp_param_groups", None)
            alone = getattr(state, "_fsdp_param_group", None)
            yield from groups if groups is not None else [alone] if alone is not None else []
