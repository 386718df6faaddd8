"""An index out of bounds raises before a kernel reads it, where torch on the processor raises."""

import pytest
import torch
import torch.nn.functional as F

from whence.workflows.probe.torch.subject import CheckedIndices

pytestmark = pytest.mark.torch
X = torch.arange(12.0).reshape(4, 3)


def index_put(index):
    return X.clone().index_put_((index,), torch.zeros(len(index), 3))


READS = {
    "embedding": lambda i: F.embedding(i, X),
    "index": lambda i: X[i],
    "second axis": lambda i: X[:, i.clamp(max=2) + (i > 3) * 9],
    "behind a mask": lambda i: X[None][torch.ones(1, 4, dtype=torch.bool)][i],
    "index_put": index_put,
    "index_select": lambda i: X.index_select(0, i),
    "gather": lambda i: X.gather(0, i[:, None]),
    "scatter": lambda i: torch.zeros(4).scatter(0, i, 1.0),
    "scatter_add": lambda i: torch.zeros(4).scatter_add(0, i, torch.ones(len(i))),
    "index_add": lambda i: torch.zeros(4).index_add(0, i, torch.ones(len(i))),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("indices", [[0, 3], [4, 0], [0, -5], [-1, 2], []])
def test_it_raises_where_the_processor_does(name, indices):
    index = torch.tensor(indices, dtype=torch.int64)
    try:
        expected = READS[name](index)
    except (IndexError, RuntimeError):
        expected = None
    with CheckedIndices():
        if expected is None:
            with pytest.raises(IndexError, match=r"index -?\d+ is out of bounds, with \d places"):
                READS[name](index)
        else:
            assert torch.equal(READS[name](index), expected)
