"""A loss that is given rows in another order is another form; one with another value is not, even
where its gradient has the right size.
"""

import pytest
import torch
from torch import nn

import whence

ROWS, TOKENS = 7, 24
ORDER = torch.arange(ROWS).roll(2)


def trained(path, change=lambda loss: loss, *, given=slice(None), labelled=slice(None)):
    """One step on a batch of rows, taken in the order `given`, with their labels in the order
    `labelled`. change: the loss.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, TOKENS)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ids = torch.randint(TOKENS, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(1, 1)
    with whence.capture(net, path):
        scores = net(ids[given])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels[labelled].flatten())
        change(loss).backward()
        optimizer.step()
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("loss") / "reference")


def answer(reference, folder, *change, **orders):
    return whence.compare(reference, trained(folder / "target", *change, **orders))


def test_rows_and_labels_in_another_order_are_another_form(reference, tmp_path):
    found = answer(reference, tmp_path, given=ORDER, labelled=ORDER)
    assert (found.status, list(found.findings)) == ("same", [])


def test_rows_without_their_labels_are_not(reference, tmp_path):
    assert answer(reference, tmp_path, given=ORDER).status == "different"


@pytest.mark.parametrize("orders", [{}, {"given": ORDER, "labelled": ORDER}], ids=["same", "other"])
@pytest.mark.parametrize(
    "change",
    [lambda loss: loss + 1e-3, lambda loss: loss + 0.01 * loss.detach()],
    ids=["constant", "detached"],
)
def test_a_value_whose_gradient_is_right_is_named(reference, tmp_path, change, orders):
    """No step takes a constant back: it has no gradient."""
    found = answer(reference, tmp_path, change, **orders)
    assert found.status == "different"
    assert found.findings[0].op_type == "loss"
