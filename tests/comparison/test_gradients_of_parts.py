"""One run takes a batch in two parts and sums their gradients: that is another form. Where the sum
is not that of the whole batch, the answer says by how much, behind forward passes that are right.
"""

import pytest

import whence

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.torch
ROWS, LENGTH, TOKENS = 4, 10, 40
IDS = torch.randint(TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, 1)
UNEVEN = LABELS.masked_fill(
    torch.arange(LENGTH) >= torch.tensor([[3], [5], [10], [10]]), -100
)  # rows of other lengths


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, 24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(24, TOKENS)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)


def mean(scores, labels, parts):
    return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten()) / parts


def trained(folder, parts, loss=mean, *, labels=LABELS, autocast=False, dropout=0.0, skip=None):
    """A step of training on the whole batch, or on parts of it. skip: a part without gradients."""
    torch.manual_seed(0)
    net = Net(dropout).train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, foreach=False)
    torch.manual_seed(parts)
    with whence.capture(net, folder):
        for number, (x, y) in enumerate(zip(IDS.chunk(parts), labels.chunk(parts), strict=True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(net(x), y, parts)
            if number != skip:
                value.backward()
        optimizer.step()
    return folder


def compared(folder, loss=mean, *, skip=None, **options):
    reference = trained(folder / "whole", 1, **options)
    return whence.compare(reference, trained(folder / "parts", 2, loss, skip=skip, **options))


@pytest.mark.parametrize("autocast", [False, True])
def test_parts_that_are_summed_are_another_form(autocast, tmp_path):
    result = compared(tmp_path, autocast=autocast)
    assert (result.status, list(result.findings)) == ("same", [])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("loss", "skip", "words"),
    [
        (lambda *given: 2 * mean(*given), None, "are 2 times the reference's"),
        (mean, 1, "gradients that the optimiser takes are not the reference's"),
    ],
    ids=["not divided", "a part without gradients"],
)
def test_a_wrong_sum_is_named(autocast, loss, skip, words, tmp_path):
    result = compared(tmp_path, loss, skip=skip, autocast=autocast)
    assert result.status == "different"
    first = result.findings[0]
    assert (first.op_type, first.confidence) == ("loss", "likely")
    assert words in first.sentence


def test_a_mean_of_means_over_rows_of_other_lengths_is_named(tmp_path):
    def over_all(scores, labels, parts):
        total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (UNEVEN != -100).sum()

    assert compared(tmp_path / "right", over_all, labels=UNEVEN).status == "same"
    result = compared(tmp_path / "wrong", labels=UNEVEN)
    assert result.status == "different"
    assert result.findings[0].op_type == "loss"


def test_a_scale_below_the_rounding_of_one_gradient_shows_in_all_of_them(tmp_path):
    """1 %, under autocast."""
    result = compared(tmp_path, lambda *given: 1.01 * mean(*given), autocast=True)
    assert result.status != "same"


def test_parts_that_draw_other_random_numbers_are_no_fault(tmp_path):
    assert compared(tmp_path, dropout=0.2).status == "undecided"
