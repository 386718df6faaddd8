"""Roots that no dump held: a dump that ends with a layer against one that ends with the block
around it.
"""

import numpy as np
import pytest

import whence
from whence.readers import Building, ForeignRun

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((2, 8, 8)).astype(np.float32)


def dump(name, *, blocks=True, root=False, change=1.0):
    """Two blocks x + fc(x). blocks: are they in the dump, or only their layers? root: is the model
    itself?
    """
    run = Building(name, name)
    x = X
    above = run.call("", kind="module", op_type="Net", inputs=[run.array(x)]) if root else -1
    for i, weight in enumerate(W):
        block = (
            run.call(
                f"blocks.{i}", kind="module", op_type="Block", inputs=[run.array(x)], parent=above
            )
            if blocks
            else above
        )
        y = (x @ weight * (change if i else 1)).astype(np.float32)
        run.call(
            f"blocks.{i}.fc",
            kind="module",
            op_type="Linear",
            parent=block,
            inputs=[run.array(x)],
            outputs=[run.array(y)],
            params={"weight": run.array(weight)},
        )
        x = x + y
        if blocks:
            run.fill(block, outputs=[run.array(x)])
    if root:
        run.fill(above, outputs=[run.array(x)])
    return ForeignRun(run.run(), name)


@pytest.mark.parametrize("root", [False, True])
def test_the_last_of_one_dump_is_not_the_last_of_another(root):
    whole, layers = dump("whole", root=root), dump("layers", blocks=False)
    ahead = whence.compare(layers, whole)
    assert (ahead.status, ahead.findings, set(ahead.counts)) == ("same", (), {"identical"})
    behind = whence.compare(whole, layers)
    assert (behind.status, behind.findings, set(behind.counts)) == ("undecided", (), {"identical"})
    assert "not every output of the model could be measured" in behind.headline


@pytest.mark.parametrize("root", [False, True])
def test_a_fault_is_named_once_in_either_direction(root):
    for pair in (
        (dump("layers", blocks=False), dump("whole", root=root, change=1.1)),
        (dump("whole", root=root), dump("layers", blocks=False, change=1.1)),
    ):
        result = whence.compare(*pair)
        assert (result.status, [f.name for f in result.findings]) == ("different", ["blocks.1.fc"])
