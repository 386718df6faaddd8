"""Trainings of a model and of a port that names and holds its parameters otherwise."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import whence  # noqa: E402

WIDTH, WORDS = 16, 11


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(self.act(self.up(self.before(x))))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for cell in self.cells:
            x = cell(x)
        return self.head(x)


class Port(nn.Module):
    """Without cells; gains in a list, places as a table."""

    def __init__(self, model: Reader, fault: str) -> None:
        super().__init__()
        self.fault = fault
        of = [*model.cells]
        self.table, self.scores = model.embed, model.head
        self.low = nn.ModuleList(c.down for c in of)
        self.high = nn.ModuleList(c.up for c in of)
        self.gains = nn.ParameterList(c.gain for c in of)
        self.norms = nn.ModuleList(c.before for c in of)
        self.places = nn.Parameter(model.place.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places[: ids.shape[1]]
        for i in range(3):
            h = self.low[i](F.gelu(self.high[i](self.norms[i](x))))
            gain = self.gains[0 if self.fault == "gain" and i == 1 else i]
            x = x + h * gain
        return self.scores(x)


def trained(model: nn.Module, run, ids: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model.train()
    with whence.capture(model, run):
        for step in range(2):
            optimiser.zero_grad()
            scores = model(ids.roll(step, 0))
            F.cross_entropy(
                scores[:, :-1].flatten(0, 1), ids.roll(step, 0)[:, 1:].flatten()
            ).backward()
            optimiser.step()


def compared(folder, dtype, fault: str = ""):
    import copy

    torch.manual_seed(2)
    model = Reader().to(dtype)
    port = Port(copy.deepcopy(model), fault)
    ids = torch.randint(0, WORDS, (3, 7))
    runs = folder / "model", folder / "port"
    for one, run in zip((model, port), runs, strict=True):
        trained(one, run, ids)
    return whence.compare(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_taken_for_that_of_another_parameter(tmp_path, dtype):
    answer = compared(tmp_path, dtype)
    assert not [f for f in answer.findings if f.slot.startswith("gradients")]
    wrong = [
        (slot.reference_slot, slot.target_slot)
        for pair in answer.plan.pairs
        for slot in pair.slots
        if slot.reference_slot.endswith(".gain") and ".gains." not in slot.target_slot
    ]
    assert not wrong


def test_the_gain_of_another_cell_is_a_fault(tmp_path):
    assert compared(tmp_path, torch.bfloat16, "gain").status == "different"
