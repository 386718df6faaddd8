"""msprobe.pytorch: the debugger of a config.json, as its guide has it."""

import json

import pytest
from scripts import python

from whence import compare, open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINING = """
from whence.compat.msprobe.pytorch import PrecisionDebugger, save, seed_all

seed_all()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(approximate="tanh" if BUG else "none"), torch.nn.Linear(16, 8))
debugger = PrecisionDebugger(config_path="./config.json", dump_path=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.0)  # so that a fault stays where it is
kept = []
model[1].register_forward_hook(lambda m, i, o: kept.append(o.detach().clone()))
for step in range(3):
    debugger.start(model)
    x = torch.randn(2, 8, requires_grad=True)
    save(x, "batch")
    loss = model(x).sum() + model(x + 1).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    debugger.stop()
    debugger.step()
torch.save((kept, loss.detach(), torch.get_rng_state()), sys.argv[1] + ".pt")
"""


def config(folder, **settings):
    (folder / "config.json").write_text(
        json.dumps(
            {"rank": [], "step": [], "level": "L0", "task": "tensor", "async_dump": False}
            | settings
        )
    )


def dumped(folder, step="step1"):
    found = json.loads((folder / step / "rank0" / "dump.json").read_text())
    return found, found["data"]


@pytest.mark.slow
def test_modules_of_chosen_steps(tmp_path):
    config(tmp_path, step=[1, "2-2"], tensor={"scope": [], "list": [], "data_mode": ["all"]})
    said = python(tmp_path, TRAINING, "golden").stderr
    assert said.count("msprobe.PrecisionDebugger is  whence run -o RUN -- CMD") == 1
    assert sorted(p.name for p in (tmp_path / "golden").glob("step*")) == ["step1", "step2"]
    _, data = dumped(tmp_path / "golden")
    kept, loss, state = torch.load(tmp_path / "golden.pt")
    for call in (0, 1):  # both calls of the module in the second step
        (leaf,) = data[f"Module.1.GELU.forward.{call}"]["output"]
        saved = torch.load(
            tmp_path / "golden" / "step1" / "rank0" / "dump_tensor_data" / leaf["data_name"],
            weights_only=True,
        )
        assert torch.equal(saved, kept[2 + call])
    plain = "".join(
        f"{line}\n"
        for line in TRAINING.splitlines()
        if "debugger" not in line and "save(x" not in line
    )
    python(tmp_path, plain, "plain")
    (_, other, other_state) = torch.load(tmp_path / "plain.pt")
    assert torch.equal(loss, other)
    assert torch.equal(state, other_state)
    python(tmp_path, TRAINING, "mine", "bug")
    for part in ("", "step1"):
        found = compare(tmp_path / "golden" / part, tmp_path / "mine" / part)
        assert (found.status, found.findings[0].name) == ("different", "1")
    assert any(
        call.kind == "label" and call.scope == "batch"
        for call in open_run(str(tmp_path / "golden")).calls
    )
    assert any(
        call.kind == "label" and call.scope == "batch_grad"
        for call in open_run(str(tmp_path / "golden")).calls
    )


@pytest.mark.parametrize(("level", "kinds"), [("L1", {"Aten"}), ("mix", {"Aten", "Module"})])
def test_operators(tmp_path, level, kinds):
    config(tmp_path, level=level, step=[0])
    python(tmp_path, TRAINING, "golden")
    _, data = dumped(tmp_path / "golden", "step0")
    assert {name.partition(".")[0] for name in data} == kinds
    assert any(name.endswith(".backward") or ".backward." in name for name in data)


def test_statistics_and_lists(tmp_path):
    config(
        tmp_path,
        task="statistics",
        statistics={"list": ["Module.1.GELU.forward.0"], "summary_mode": "md5"},
    )
    said = python(tmp_path, TRAINING, "golden").stderr
    assert (
        "config.json, statistics(summary_mode=...) changes nothing: statistics and a hash are "
        "always there" in said
    )
    found, data = dumped(tmp_path / "golden", "step0")
    assert found["task"] == "statistics"
    assert set(data) == {"Module.1.GELU.forward.0", "Module.1.GELU.forward.1"}
    (leaf,) = data["Module.1.GELU.forward.0"]["output"]
    kept = torch.load(tmp_path / "golden.pt")[0][0]
    assert (leaf["Max"], leaf["Min"]) == (
        pytest.approx(kept.max().item()),
        pytest.approx(kept.min().item()),
    )
    assert "data_name" not in leaf


@pytest.mark.slow
def test_switched_off_and_debug_points(tmp_path):
    config(tmp_path, dump_enable=False)
    assert "dump_enable is false" in python(tmp_path, TRAINING, "golden").stderr
    assert not (tmp_path / "golden").exists()
    config(tmp_path, level="debug")
    python(tmp_path, TRAINING, "points")
    run = open_run(str(tmp_path / "points"))
    assert {call.scope for call in run.calls if call.refs} == {"batch", "batch_grad"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "acc_check"}, "task 'acc_check' is not there"),
        ({"level": "L2"}, "level 'L2' is not there"),
        ({"stepp": [0]}, "no option 'stepp'; did you mean step"),
        ({"step": ["a"]}, "not a number"),
        ({"tensor": {"data_mode": ["some"]}}, "data_mode 'some'"),
        ({"tensor": {"lst": ["a"]}}, "no option 'lst'; did you mean list"),
    ],
)
def test_what_is_not_understood_is_an_error(tmp_path, settings, said):
    from whence.compat.msprobe.pytorch import PrecisionDebugger
    from whence.errors import UsageError

    config(tmp_path, **settings)
    debugger = None
    with pytest.raises(UsageError, match=said):
        debugger = PrecisionDebugger(config_path=tmp_path / "config.json")
    assert debugger is None
