"""`whence.doctor`: healthy where whence is right, and not where it is made blind, trigger-happy or
the program draws lots.
"""

import textwrap

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import warm
import whence
from whence import api
from whence.errors import CaptureError, UsageError
from whence.instrument.torch import faults
from whence.report.doctor import checkup

pytestmark = pytest.mark.torch
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 8)).eval()


GIVEN = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


def test_a_healthy_checkup(tmp_path):
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    result = whence.doctor(model, GIVEN, faults=8, dtype=torch.bfloat16, keep=tmp_path / "kept")
    assert result.healthy
    assert [(c.name, c.status) for c in result.clean] == [
        ("the same again", "same"),
        ("one thread", "same"),
        ("bfloat16", "same"),
    ]
    assert [c.identical for c in result.clean] == [True, True, False]
    assert len({p.fault for p in result.planted}) == 8
    assert {(p.outcome, p.size_class) for p in result.planted} == {("named first", "clear")}
    assert all(p.named == p.site and p.size > 6 for p in result.planted)
    assert (result.calls, result.replayable, result.not_replayable) == (12, 12, {})
    assert result.disk_bytes > 0
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    kept = {p.name for p in (tmp_path / "kept").iterdir()}
    assert {"reference", "again", "one-thread", "bfloat16"} < kept
    assert len(kept) == 12
    text = checkup(result, output="kept")
    assert text.startswith(
        "HEALTHY            0 of 3 clean runs flagged; 8 of 8 clear faults named first"
    )
    assert "bitwise identical" in text
    assert "12 calls; 100% can be replayed" in text


def test_the_size_of_a_fault_is_its_error_over_the_operators_own_rounding(monkeypatch):
    monkeypatch.setattr("whence.workflows.doctor._NORMAL", ("scale",))
    (one,) = whence.doctor(net(), GIVEN, faults=1).planted
    # A scale of 1.01 is a relative error of 0.01; the rounding of these operators in float32 is
    # some 1e-8 to 1e-6.
    assert 0.01 / 1e-6 < one.size < 0.01 / 1e-8


def test_the_seed_draws_the_faults():
    drawn = [
        [(p.fault, p.site) for p in whence.doctor(net(), GIVEN, faults=2, seed=s).planted]
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_fault_below_rounding_is_not_missed(monkeypatch):
    monkeypatch.setattr("whence.workflows.doctor._NORMAL", ("scale", "eps"))
    monkeypatch.setitem(faults.DEFAULTS, "scale", 1 + 2e-8)
    monkeypatch.setitem(faults.DEFAULTS, "eps", 1.0)
    result = whence.doctor(net(), GIVEN, faults=2)
    assert {p.outcome for p in result.planted} <= {"below rounding", "no effect"}
    assert {p.size_class for p in result.planted} == {"below rounding"}
    assert result.healthy
    assert "0 of 0 clear faults" in checkup(result)


def test_a_blind_comparison_is_not_healthy(monkeypatch):
    see = api.compare
    monkeypatch.setattr(
        "whence.workflows.compare.compare",
        lambda reference, target, **given: see(reference, reference, **given),
    )
    result = whence.doctor(net(), GIVEN, faults=2)
    # The same blind comparison cannot measure a fault either: what it calls small is not taken for
    # found.
    assert {p.outcome for p in result.planted} == {"no effect"}
    monkeypatch.setattr("whence.workflows.doctor._Doctor._size", lambda self, call, result: 1e3)
    result = whence.doctor(net(), GIVEN, faults=2)
    assert {p.outcome for p in result.planted} == {"missed"}
    assert not result.healthy
    assert checkup(result).startswith("NOT HEALTHY")
    assert "times its own rounding" in checkup(result)


def test_a_program_that_draws_lots_is_told():
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(16, 16), 0

        def forward(self, x):
            self.calls += 1
            return self.fc(x) + 0.1 * self.calls

    result = whence.doctor(Drawn().eval(), GIVEN, faults=0)
    assert not result.healthy
    assert result.clean[0].status == "different"
    assert result.clean[0].nondeterministic == ("Drawn",)
    text = checkup(result)
    assert "FALSE ALARM: Drawn" in text
    assert "differ between two equal runs on equal inputs: Drawn" in text


def test_every_way_to_give_inputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x, y):
            return self.fc(x) + y

    for inputs in ((GIVEN, GIVEN), {"x": GIVEN, "y": GIVEN}, lambda m: m(GIVEN, y=GIVEN)):
        assert whence.doctor(Named(), inputs, faults=1).healthy


def test_few_places_for_faults():
    result = whence.doctor(nn.Sequential(nn.ReLU()), GIVEN, faults=8)
    assert len(result.planted) < 8
    assert "faults found a place" in result.notes[0]


def test_what_cannot_be_meant():
    with pytest.raises(UsageError, match="takes a torch"):
        whence.doctor([1], GIVEN)
    with pytest.raises(UsageError, match="faults -1"):
        whence.doctor(net(), GIVEN, faults=-1)
    with pytest.raises(CaptureError, match="cannot be run as asked: RuntimeError"):
        whence.doctor(net(), torch.ones(2, 3))


SCRIPT = """
    import sys, torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = torch.nn
    model = n.Sequential(n.Linear(16, 32), n.GELU(), n.LayerNorm(32), n.Linear(32, 8)).eval()
    with torch.no_grad():
        print(model(torch.randn(6, 16)).sum().item())
"""


@pytest.mark.slow
def test_a_command(tmp_path, capfd):
    (tmp_path / "infer.py").write_text(textwrap.dedent(SCRIPT))
    said = []
    result = api.doctor_command(
        [warm.TORCH, str(tmp_path / "infer.py")],
        faults=2,
        keep=tmp_path / "kept",
        tell=said.append,
    )
    assert result.healthy
    assert [p.outcome for p in result.planted] == ["named first"] * 2
    assert capfd.readouterr().out == ""
    assert said[0] == "running it without a capture"
    run = whence.open_run(str(next((tmp_path / "kept").glob("fault-01-*"))))
    assert (
        run.info.options["inject"]
        == f"{result.planted[0].fault}@Sequential/{result.planted[0].site}"
    )


def test_a_command_that_fails(tmp_path):
    (tmp_path / "infer.py").write_text("import sys\nprint('why', file=sys.stderr)\nsys.exit(5)\n")
    with pytest.raises(CaptureError, match=r"exit code 5; its last lines:\n  \| why"):
        api.doctor_command([warm.TORCH, str(tmp_path / "infer.py")])
