"""Layouts from what a program says of its ranks: pieces that numpy cuts as DTensors are cut, put
together again.
"""

import itertools
import math

import numpy as np
import pytest

from whence.align.ranks.groups import is_known, joined_array, layouts
from whence.records import Placement

RNG = np.random.default_rng(11)


def placed(shape, mesh, places, ranks=None, nested=()):
    return Placement(shape, mesh, tuple(ranks or range(math.prod(mesh))), places, nested=nested)


def cut(whole, placement):
    """What each rank of a mesh holds, by rank: cut dimension by dimension, in the order that
    `nested` says.
    """
    order = dict(placement.nested)
    held = {}
    for number, at in enumerate(itertools.product(*map(range, placement.mesh))):
        piece = whole
        for axis in range(whole.ndim):
            dims = [d for d, place in enumerate(placement.places) if place == f"shard {axis}"]
            for dim in order.get(axis, dims):
                step = -(
                    -piece.shape[axis] // placement.mesh[dim]
                )  # as torch.chunk: the last ones are shorter, or empty
                keys = [slice(None)] * whole.ndim
                keys[axis] = slice(at[dim] * step, (at[dim] + 1) * step)
                piece = piece[tuple(keys)]
        held[placement.ranks[number]] = piece
    for dim in (d for d, place in enumerate(placement.places) if place == "sum"):
        parts = RNG.standard_normal((placement.mesh[dim], *whole.shape))
        parts[-1] = whole - parts[:-1].sum(0)
        for number, at in enumerate(itertools.product(*map(range, placement.mesh))):
            own = Placement(
                placement.shape,
                placement.mesh,
                placement.ranks,
                tuple(p if p != "sum" else "replicate" for p in placement.places),
            )
            held[placement.ranks[number]] = cut(parts[at[dim]], own)[placement.ranks[number]]
    return held


CASES = [
    placed((6, 4), (2,), ("shard 0",)),
    placed((5, 4), (4,), ("shard 0",)),  # 2, 2, 1, 0
    placed((3, 8), (4,), ("shard 1",)),
    placed((4, 4), (2,), ("replicate",)),
    placed((4, 3), (3,), ("sum",)),
    placed((4, 6), (2, 2), ("shard 0", "shard 1")),
    placed((4, 6), (2, 3), ("replicate", "shard 1")),
    placed((4, 6), (2, 2), ("sum", "shard 0")),
    placed((7, 2), (2, 2), ("shard 0", "shard 0")),
    placed(
        (8, 2), (2, 2), ("shard 0", "shard 0"), nested=((0, (1, 0)),)
    ),  # fully sharded tensor parallel weights
    placed((12, 2), (2, 3), ("shard 0", "shard 0"), nested=((0, (1, 0)),)),
    placed((8, 2), (2, 2, 2), ("replicate", "shard 0", "shard 0"), nested=((0, (2, 1)),)),
    placed((4, 6), (2, 2), ("shard 0", "shard 1"), ranks=(0, 2, 1, 3)),  # the grid turned
    placed((4, 6), (1, 2), ("shard 1", "shard 0")),
    placed((6,), (3,), ("shard 0",), ranks=(4, 5, 6)),
]


@pytest.mark.parametrize("placement", CASES, ids=str)
def test_the_whole_comes_out(placement):
    whole = RNG.standard_normal(placement.shape)
    held = cut(whole, placement)
    ranks = sorted(held)
    [(layout, shape)] = layouts([placement] * len(ranks), ranks, [held[r].shape for r in ranks])
    assert shape == whole.shape
    np.testing.assert_allclose(
        joined_array(layout, [held[r] for r in ranks]), whole, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
def test_several_meshes_leave_open_how_they_lie_to_each_other(groups):
    """Each data parallel replica has rows of the batch of its own, cut along its channels by tensor
    parallelism.
    """
    whole = RNG.standard_normal((4, 6))
    said, held = {}, {}
    for rows, ranks in zip(np.split(whole, 2), groups, strict=True):
        placement = placed((2, 6), (2,), ("shard 1",), ranks=ranks)
        held |= cut(rows, placement)
        said |= dict.fromkeys(ranks, placement)
    found = layouts([said[r] for r in range(4)], range(4), [held[r].shape for r in range(4)])
    assert len(found) > 1
    joined = [
        joined_array(layout, [held[r] for r in range(4)])
        for layout, shape in found
        if shape == whole.shape
    ]
    assert any(np.array_equal(made, whole) for made in joined)


@pytest.mark.parametrize(
    ("placements", "ranks"),
    [
        ([placed((4,), (2,), ("P(avg)",))] * 2, (0, 1)),  # no sum
        (
            [placed((4,), (2,), ("shard 0",)), placed((4,), (2,), ("replicate",))],
            (0, 1),
        ),  # ranks that disagree
        ([placed((4,), (2,), ("shard 0",))] * 2, (0, 5)),  # a rank that the mesh does not have
        (
            [placed((8,), (2, 2), ("shard 0", "shard 0"), ranks=(0, 3, 1, 2))] * 4,
            (0, 1, 2, 3),
        ),  # no grid
        (
            [placed((4,), (2,), ("shard 0",), ranks=r) for r in ((0, 3), (1, 2), (1, 2), (0, 3))],
            (0, 1, 2, 3),
        ),  # meshes that lie neither behind nor between each other
        (
            [placed((8, 2), (2, 2, 2), ("shard 0", "shard 1", "shard 0"), nested=((0, (2, 0)),))]
            * 8,
            tuple(range(8)),
        ),
    ],
)
def test_what_is_not_said_in_a_known_form_gives_nothing(placements, ranks):
    assert (
        layouts(placements, ranks, [(2,) if len(placements[0].shape) == 1 else (2, 1)] * len(ranks))
        == []
    )


def test_a_mean_cannot_be_put_together():
    assert is_known(CASES[4])
    assert not is_known(placed((4,), (2,), ("P(avg)",)))
