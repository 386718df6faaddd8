"""Operators grouped by signature, on runs made by hand, and the listing of a real one."""

import csv
import io
import json
import sys

import msgspec
import numpy as np
import pytest

from handmade import record
from whence import api, cli
from whence.errors import UsageError
from whence.records import Call, MemoryRun, Note, Ref


def made(calls, notes=()):
    """A run of operator calls (op, scope, inputs, outputs, arguments, seconds); arrays by slot."""
    records, arrays, built = [], {}, []
    for number, (op, scope, inputs, outputs, arguments, seconds) in enumerate(calls):
        refs = []
        for slot, array in (*inputs.items(), *outputs.items()):
            arrays[len(records)] = array
            refs.append(Ref(slot, len(records)))
            records.append(record(len(records), array))
        built.append(
            Call(
                number,
                scope,
                "Net",
                0,
                number,
                op=op,
                op_type=op.split(".")[1],
                kind="operator",
                refs=tuple(refs),
                arguments=arguments,
                seconds=seconds,
                source=f"net.py:{number + 1}",
            )
        )
    return MemoryRun(built, records, arrays, notes=notes)


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([-2, np.nan, np.inf, 4], np.float64)
CALLS = [
    ("aten.mul.Scalar", "fc1", {"input.self": A}, {"output.0": A * 2}, {"other": 2.0}, 0.25),
    (
        "aten.mul.Scalar",
        "fc2",
        {"input.self": A + 1},
        {"output.0": A * 2 + 2},
        {"other": 2.0},
        0.25,
    ),
    ("aten.mul.Scalar", "fc2", {"input.self": A}, {"output.0": A * 3}, {"other": 3.0}, 0.125),
    ("aten.sin.default", "", {"input.self": B}, {"output.0": B}, {}, 1.0),
]


def test_calls_of_one_signature_are_one_group():
    first, second, third = api.signatures(made(CALLS))
    assert (first.op, first.count, first.calls, first.with_elements, first.seconds) == (
        "aten.mul.Scalar",
        2,
        [0, 1],
        [0, 1],
        0.5,
    )
    assert (second.arguments, second.count) == ({"other": 3.0}, 1)
    assert (first.scopes, first.source) == ({"fc1": 1, "fc2": 1}, "net.py:1")
    assert (first.ranges["input.self"].min, first.ranges["input.self"].max) == (0, 6)
    seen = third.ranges["output.0"]
    assert (seen.min, seen.max, seen.nan, seen.inf) == (-2, 4, 1, 1)
    assert [t.slot for t in third.inputs] == ["input.self"]
    assert [(t.slot, t.dtype, t.shape) for t in third.outputs] == [("output.0", "float64", (4,))]


def test_counts_of_calls_that_were_not_written_come_from_notes():
    def note(count, low):
        entry = {
            "op": "aten.mul.Scalar",
            "tensors": [["input.self", "float32", [2, 3], []]],
            "arguments": {"other": 2.0},
            "count": count,
            "seconds": 0.5,
            "scopes": {"fc1": count},
            "phases": {"forward": count},
            "ranges": {"output.0": [low, 9.0, 1, 0]},
        }
        return Note("operators", msgspec.json.encode([entry]).decode())

    group, *_ = api.signatures(made(CALLS[:1], [note(3, -1.0), note(4, -5.0)]))
    assert (group.count, group.seconds, group.scopes, group.calls) == (7, 1.0, {"fc1": 7}, [0])
    assert (
        group.ranges["output.0"].min,
        group.ranges["output.0"].max,
        group.ranges["output.0"].nan,
    ) == (-5, 9, 2)


def test_choosing_and_sorting():
    groups = api.signatures(made(CALLS))
    assert [g.op for g in api.chosen_operators(groups)] == [
        "aten.sin.default",
        "aten.mul.Scalar",
        "aten.mul.Scalar",
    ]
    assert [g.count for g in api.chosen_operators(groups, sort="count")] == [2, 1, 1]
    assert [g.op for g in api.chosen_operators(groups, sort="name")][-1] == "aten.sin.default"
    for pattern in ("sin", "aten.sin", "aten.s*", "re:.*sin.*"):
        assert [g.op for g in api.chosen_operators(groups, include=[pattern])] == [
            "aten.sin.default"
        ]
    assert {g.op for g in api.chosen_operators(groups, exclude=["mul"])} == {"aten.sin.default"}
    with pytest.raises(UsageError, match="no operator is left of 2"):
        api.chosen_operators(groups, include=["cos"])
    with pytest.raises(UsageError, match="regular expression"):
        api.chosen_operators(groups, include=["re:("])


@pytest.mark.torch
def test_the_listing(tmp_path, capsys):
    import torch

    import whence

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with whence.capture(model, tmp_path / "run", level="op"):
        model(torch.ones(2, 4)).sum().backward()
    capsys.readouterr()

    def listed(*more):
        assert cli.execute(["ops", "list", str(tmp_path / "run"), *more]) == 0
        return capsys.readouterr().out

    text = listed("--include", "addmm")
    assert "aten.addmm.default" in text
    assert "float32[4] float32[2,4] float32[4,4]:[1,4]" in text
    assert "1 operator, 1 signature, 2 calls" in text
    rows = list(csv.DictReader(io.StringIO(listed("--format", "csv", "--sort", "name"))))
    assert [r["op"] for r in rows] == sorted(r["op"] for r in rows)
    addmm = next(r for r in rows if r["op"] == "aten.addmm.default")
    assert (addmm["count"], addmm["where"]) == ("2", "0:1 1:1")
    assert sum(float(r["share"]) for r in rows) == pytest.approx(1, abs=1e-3)
    whole = json.loads(listed("--format", "json"))
    assert next(g for g in whole if g["op"] == "aten.addmm.default")["phases"] == {"forward": 2}
    with whence.capture(model, tmp_path / "none"):
        model(torch.ones(2, 4))
    assert cli.execute(["ops", "list", str(tmp_path / "none")]) == 0
    assert "--level op" in capsys.readouterr().out


@pytest.mark.torch
def test_whence_run_records_operators(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\nopt = torch.optim.SGD(model.parameters(), "
        "0.1)\n"
        "for _ in range(3):\n    model(torch.ones(2, 4)).sum().backward()\n    opt.step()\n    "
        "opt.zero_grad()\n"
    )
    path = str(tmp_path / "run")
    code = cli.execute(
        [
            "run",
            "-o",
            path,
            "--level",
            "op",
            "--samples",
            "1",
            "--dedup",
            "--",
            sys.executable,
            str(script),
        ]
    )
    assert code == 0
    groups = {g.op: g for g in api.signatures(api.open_run(path))}
    assert (groups["aten.addmm.default"].count, groups["aten.addmm.default"].source) == (
        3,
        f"{script}:5",
    )
    assert groups["aten.mm.default"].phases == {"backward": 3}
    assert "optimizer" in {p for g in groups.values() for p in g.phases}
    assert groups["aten.addmm.default"].with_elements
