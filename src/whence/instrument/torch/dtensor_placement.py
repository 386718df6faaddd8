"""Reads how a tensor that several processes hold together (DTensor) is distributed. Nothing is sent
and no elements are read.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from whence.records import Placement

HALF = "loss_parallel computes this together with the operator that reads it"

_Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]
_meshes: weakref.WeakKeyDictionary[Any, _Mesh] = weakref.WeakKeyDictionary()


def placement_of(tensor: Any) -> Placement | None:
    """The placement of a DTensor; None for any other tensor and for an unknown kind of
    placement.
    """
    if not hasattr(type(tensor), "placements") or not hasattr(type(tensor), "device_mesh"):
        return None
    try:
        mesh, placements = _mesh(tensor.device_mesh), tensor.placements
        return Placement(
            tuple(tensor.shape),
            mesh[0],
            mesh[1],
            tuple(map(_word, placements)),
            mesh[2],
            _nested(tensor, placements, mesh[0]),
        )
    except Exception:  # noqa: BLE001 - releases differ in what they call these; the tensor itself is recorded all the same
        return None


def is_half(operator: str) -> bool:
    """Whether `loss_parallel` is on and changes the meaning of this operator on DTensors, which the
    next operator corrects.
    """
    if not operator.startswith(("aten.nll_loss_backward", "aten.nll_loss2d_backward")):
        return False
    api = sys.modules.get("torch.distributed.tensor")
    handlers = getattr(
        getattr(getattr(api, "DTensor", None), "_op_dispatcher", None), "_custom_op_handlers", {}
    )
    return any(str(handled) == operator for handled in handlers)


def _mesh(mesh: Any) -> _Mesh:
    """(extents, ranks, names) of a device mesh."""
    text = _meshes.get(mesh)
    if text is None:
        ranks = mesh.mesh
        text = _meshes[mesh] = (
            tuple(ranks.shape),
            tuple(ranks.flatten().tolist()),
            tuple(mesh.mesh_dim_names or ()),
        )
    return text


def _word(placement: Any) -> str:
    kind = type(placement).__name__
    if kind == "Replicate":
        return "replicate"
    if kind in ("Shard", "_StridedShard"):
        return f"shard {placement.dim}"
    # Subclasses of Partial (of masked embeddings, of norms) are not plain sums.
    return "sum" if kind == "Partial" and placement.reduce_op == "sum" else str(placement)


def _nested(
    tensor: Any, placements: Sequence[Any], mesh: tuple[int, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(axis, order of mesh dimensions) of each axis that several mesh dimensions cut in another
    order than first to last.
    """
    cut: dict[int, list[int]] = {}
    for dim, placement in enumerate(placements):
        if type(placement).__name__ in ("Shard", "_StridedShard"):
            cut.setdefault(placement.dim, []).append(dim)
    by_axis = {
        entry.tensor_dim: tuple(entry.mesh_dims)
        for entry in getattr(tensor._spec, "shard_order", None) or ()
    }
    orders = (
        (axis, by_axis.get(axis) or _coarsest_first(placements, dims, mesh))
        for axis, dims in cut.items()
        if len(dims) > 1
    )
    return tuple((axis, order) for axis, order in orders if order != tuple(cut[axis]))


def _coarsest_first(
    placements: Sequence[Any], dims: Sequence[int], mesh: tuple[int, ...]
) -> tuple[int, ...]:
    """The order in which mesh dimensions cut an axis. A strided shard comes after the dimensions
    whose pieces multiply to its split factor.
    """
    strided = [d for d in dims if type(placements[d]).__name__ == "_StridedShard"]
    order = [d for d in dims if d not in strided]
    for dim in reversed(strided):
        pieces, count = 1, 0
        while count < len(order) and pieces < placements[dim].split_factor:
            pieces *= mesh[order[count]]
            count += 1
        if pieces != placements[dim].split_factor:
            raise ValueError(
                f"a split factor of {placements[dim].split_factor} on a mesh of {mesh}"
            )
        order.insert(count, dim)
    return tuple(order)
