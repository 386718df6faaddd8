"""Names the source tensors that given elements of a joined tensor come from, to locate a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from whence.align import dims as ex
from whence.records import Record
from whence.results import Made

Labels = npt.NDArray[np.int32]


def named(
    tensors: Mapping[int, Made],
    records: Sequence[Record],
    record: int,
    different: npt.NDArray[np.bool_],
) -> tuple[str, ...]:
    """Names of the source tensors that the differing elements of a joined tensor come from; ()
    where these are all sources, or where the tensor is not joined. tensors: how records were made,
    by record. different: a mask of the record's shape.
    """
    names: list[str] = []
    labels = _labels(tensors, records, record, "", names)
    if labels is None or labels.shape != different.shape:
        return ()
    sources = np.unique(labels[different])
    return tuple(names[i] for i in sources) if len(sources) < len(names) else ()


def _labels(
    tensors: Mapping[int, Made], records: Sequence[Record], record: int, name: str, names: list[str]
) -> Labels | None:
    """For every element, the index in `names` of its source tensor; None where elements are
    computed from several. Appends to `names`.
    """
    how = tensors.get(record)
    if how is None:
        names.append(name)
        return np.full(records[record].shape, len(names) - 1, np.int32)
    node = ex.parse(how.dims)
    if not _only_moves(node):
        return None
    bound: dict[str, list[Labels]] = {}
    for operand, ids in how.operands:
        parts = [
            _labels(tensors, records, r, operand if len(ids) == 1 else f"{operand} {i}", names)
            for i, r in enumerate(ids)
        ]
        bound[operand] = [labels for labels in parts if labels is not None]
        if len(bound[operand]) != len(ids):
            return None
    return np.asarray(node.apply(bound), np.int32).reshape(records[record].shape)


def _only_moves(node: ex.Node) -> bool:
    if isinstance(node, ex.Cat):
        return all(_only_moves(part) for part in node.parts)
    if isinstance(node, ex.Name | ex.Star):
        return True
    return not isinstance(node, ex.Sum | ex.Pad) and _only_moves(node.of)
