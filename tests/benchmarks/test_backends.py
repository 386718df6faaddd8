"""The scoring of the backend matrix: what counts as right, what a comparison is reduced to, which
regions count as usable.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def backends():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(
            "whence_benchmark_backends", FOLDER / "backends.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.mark.parametrize(
    ("status", "replayed", "findings", "clean", "fault", "unseen"),
    [
        ("same", 1.0, [], True, False, False),
        ("same", 0.89, [], False, False, False),
        ("different", 1.0, ["a"], False, True, False),
        ("different", 1.0, ["b", "a"], False, False, False),
        ("undecided", 0.0, [], False, False, True),
        ("undecided", 0.0, ["a"], False, False, False),
    ],
)
def test_what_is_right(backends, status, replayed, findings, clean, fault, unseen):
    row = {"status": status, "replayed": replayed, "findings": findings}
    side = backends.Side()
    kinds = [
        backends.Pair("m", "w", side, side),
        backends.Pair("m", "w", side, side, "a"),
        backends.Pair("m", "w", side, side, unseen=True),
    ]
    assert [backends.right(kind, row) for kind in kinds] == [clean, fault, unseen]


def test_every_pair_has_a_line_and_every_fault_is_there(backends):
    pairs = [*backends.clean(), *backends.faults()]
    assert len({p.title for p in pairs}) == len(pairs)
    assert {p.model for p in pairs} <= set(backends.SUBJECTS)
    assert all(bool(p.target.fault) == bool(p.name) for p in pairs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.two(self.drop(self.one(x).tanh()))


def captured(model, path, dtype=torch.float32):
    with torch.no_grad(), whence.capture(model.to(dtype), path):
        model(torch.linspace(-1, 1, 64).reshape(8, 8).to(dtype))
    return path


def test_an_answer_in_plain_values(backends, tmp_path):
    faulty = Net().eval()
    faulty.two.forward = lambda x: (
        nn.functional.linear(x, faulty.two.weight, faulty.two.bias) * 1.05
    )
    reference = captured(Net().eval(), tmp_path / "0")
    row = backends.answer(whence.compare(reference, captured(faulty, tmp_path / "1")))
    assert (row["status"], row["findings"], row["calls"], row["replayed"]) == (
        "different",
        ["two"],
        4,
        1.0,
    )
    assert row["where"] == "two" and row["score"] > 1


def test_regions_with_a_usable_program(backends, tmp_path):
    def usable(model, name):
        runs = [
            captured(model(), tmp_path / f"{name}{k}", d)
            for k, d in enumerate((torch.float32, torch.bfloat16))
        ]
        return {
            (r.call, r.stretch): why
            for r, why in backends._usable(*(whence.open_run(str(run)) for run in runs))
        }

    found = usable(lambda: Net().eval(), "eval")
    assert len(found) == 5 and not any(found.values())  # one, tanh, the idle dropout, two, the sum
    drawn = usable(lambda: Net().train(), "train")  # what dropout drew is an input of its program
    assert len(drawn) == 5 and not any(drawn.values())
