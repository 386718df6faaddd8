"""What `scrub` leaves of who made a run, where, and with what: nothing, in any byte of any file or
name.
"""

from __future__ import annotations

import json
from pathlib import Path

import by_hand_store as hand
import msgspec
import numpy as np
import pytest

import whence
from whence import store
from whence.records import External, Note, Operation, Program, Ref, RunInfo
from whence.store.scrubbing import Anonymous
from whence.store.status import Ended, leave_status, write_status

HOME = "/home/zoe_planted"
PLANTED = (
    "zoe_planted",
    "planted-node-17",
    "cafe0123beef",
    "Planted_Secret",
    "planted_model",
    "planted_dataset",
    "hidden_project",
)
TEXT = (
    "RuntimeError in /home/zoe_planted/hidden_project/planted_model.py:12 on "
    "planted-node-17.cluster.local (cafe0123beef4567), "
    "run by zoe_planted with --name=Planted_Secret and ~/planted_dataset/train.bin"
)


def planted_run(path: Path) -> Path:
    """Two ranks of two hosts, with something private in every field that is text, one of them
    killed; and a predictor's program.
    """
    info = RunInfo(
        command=(
            "python",
            f"{HOME}/hidden_project/planted_model.py",
            "--name=Planted_Secret",
            "-n",
            "3",
            "planted_dataset/x.bin",
        ),
        user="zoe_planted",
        host="planted-node-17",
        cwd=f"{HOME}/hidden_project",
        git="cafe0123beef4567cafe0123beef4567cafe0123 (dirty)",
        environment={"XLA_FLAGS": "--xla_dump_to=/tmp/planted_dataset"},
        options={"weights": [f"{HOME}/w.safetensors"], "steps": [0, 2]},
        settings={"exit_code": 0, "why": TEXT, "ranks": {"planted-node-17": 0}},
    )
    run = hand.new(path)
    store.folder.update_info(run, **msgspec.to_builtins(info))
    for rank in range(2):
        with store.Writer(run, rank=rank) as writer:
            first = hand.add(writer, hand.bits("float32", (50,), rank), "float32")
            digest = hand.digest(b"abcd") if hasattr(hand, "digest") else b"\1" * 16
            outside = writer.record(
                "float32",
                (1,),
                None,
                digest,
                None,
                None,
                external=External(f"{HOME}/w.safetensors", 0, 4),
            )
            lost = writer.record("float32", (1,), None, b"", None, None, why=TEXT)
            writer.program(
                Program(
                    "p",
                    (Operation("aten.relu.default", ({"in": 0},)),),
                    ("input.0",),
                    (("output.0", {"op": [0, 0]}),),
                    notes=(TEXT,),
                )
            )
            for number, source in enumerate(
                (
                    f"{HOME}/hidden_project/planted_model.py:7",
                    "planted_model.Net",
                    "torch.nn.Linear",
                )
            ):
                call = hand.call(
                    number,
                    Ref("output.0", first),
                    Ref("input.0", outside),
                    Ref("input.1", lost),
                    scope=f"layers.{number}",
                )
                writer.call(
                    msgspec.structs.replace(
                        call,
                        source=source,
                        arguments={"path": f"{HOME}/x.bin", "eps": 1e-5, "mode": "mean"},
                        no_program=TEXT,
                        error=TEXT,
                        notes=(TEXT,),
                        files={"output.0": f"{HOME}/a.npy"},
                        rank=rank,
                    )
                )
            writer.note(
                Note(
                    "settings",
                    json.dumps(
                        {"script": f"{HOME}/hidden_project/planted_model.py", "dtype": "float32"}
                    ),
                )
            )
            writer.note(Note("error", TEXT))
    folders = sorted(f for f in run.iterdir() if f.is_dir())
    for rank, folder in enumerate(folders):
        process = json.loads((folder / "process.json").read_text())
        (folder / "process.json").write_text(
            json.dumps({**process, "host": f"planted-node-17.{rank}", "pid": 400_000 + rank})
        )
        folder.rename(run / f"rank0000{rank}-planted-node-17-{400_000 + rank}")
    first, second = sorted(f for f in run.iterdir() if f.is_dir())
    leave_status(first, Ended("failed", TEXT))
    write_status(second, Ended("running"))
    (second / "index.safetensors").unlink()
    with (second / "journal.jsonl").open("ab") as file:
        file.write(b'{"t":"note","kind":"error","text":"' + TEXT.encode())
    (run / "paddle" / "12-1").mkdir(parents=True)
    (run / "paddle" / "12-1" / "program.json").write_text(
        json.dumps({"op_callstack": [f'File "{HOME}/planted_model.py", line 3'], "ops": ["relu"]})
    )
    (run / "paddle" / "12-1" / "model.pdmodel").write_bytes(b"\x0a\x05" + TEXT.encode() + b"\0relu")
    return run


def traces(run: Path) -> list[str]:
    """Where something that was planted is still found."""
    found = []
    for file in run.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        found += [
            f"{file}: {word}"
            for word in PLANTED
            if word.encode() in data or word in str(file.relative_to(run))
        ]
    return found


def test_nothing_planted_is_left_and_the_run_compares_the_same(tmp_path):
    run, whole = planted_run(tmp_path / "run"), planted_run(tmp_path / "whole")
    assert {trace.rpartition(" ")[2] for trace in traces(run)} == set(PLANTED)
    store.scrub(run, force=True)
    assert traces(run) == []
    assert sorted(f.name for f in run.iterdir() if f.is_dir()) == [
        "paddle",
        "rank00000-scrubbed-1",
        "rank00001-scrubbed-2",
    ]
    before, after = store.open_run(whole), store.open_run(run)
    assert [
        (c.scope, c.rank, c.refs, c.program, c.arguments["eps"], c.arguments["mode"])
        for c in after.calls
    ] == [
        (c.scope, c.rank, c.refs, c.program, c.arguments["eps"], c.arguments["mode"])
        for c in before.calls
    ]
    assert [c.source for c in after.calls][:3] == ["<scrubbed>:7", "<scrubbed>", "torch.nn.Linear"]
    assert [(r.hash, r.shape, r.statistics) for r in after.records] == [
        (r.hash, r.shape, r.statistics) for r in before.records
    ]
    assert after.programs["p"].operations == before.programs["p"].operations
    assert (
        json.loads(next(n.text for n in after.notes if n.kind == "settings"))["dtype"] == "float32"
    )
    same, scrubbed = (
        whence.compare(whole, whole, replay=False),
        whence.compare(run, whole, replay=False),
    )
    assert (scrubbed.status, scrubbed.counts) == (same.status, same.counts)
    data = (run / "paddle" / "12-1" / "model.pdmodel").read_bytes()
    assert len(data) == len(TEXT) + 7 and data.endswith(b"\0relu")
    assert json.loads((run / "paddle" / "12-1" / "program.json").read_text())["ops"] == ["relu"]


def test_scrubbing_again_changes_nothing_and_finishes_what_was_interrupted(tmp_path, monkeypatch):
    run = planted_run(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(
            Path,
            "rename",
            lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        with pytest.raises(whence.errors.StoreFailed, match="scrub it again"):
            store.scrub(run, force=True)
    store.scrub(run, force=True)
    assert traces(run) == []
    before = {
        f.relative_to(run): f.read_bytes()
        for f in run.rglob("*")
        if f.is_file() and f.suffix != ".safetensors"
    }
    store.scrub(run, force=True)
    assert {
        f.relative_to(run): f.read_bytes()
        for f in run.rglob("*")
        if f.is_file() and f.suffix != ".safetensors"
    } == before


@pytest.mark.torch
@pytest.mark.parametrize("level", ["modules", "op", "logits", "recorded"])
def test_captures_of_every_level_hold_nothing_of_their_place(level, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    place = tmp_path / "zoe_planted" / "hidden_project"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("TF_VAR_db_pass", "Planted_Secret")
    code = compile(
        "def forward(self, x):\n    return self.fc(x) + x\n",
        str(place / "planted_model.py"),
        "exec",
    )
    names = {}
    exec(code, names)  # noqa: S102 - operators are to come from this file
    net = type(
        "Net", (torch.nn.Module,), {"forward": names["forward"], "__module__": "planted_model"}
    )()
    net.fc = torch.nn.Linear(4, 4)
    if level == "recorded":
        with whence.recording("run") as run:
            run.add("x", np.ones(3))
    else:
        with whence.capture(net, "run", level=level):
            net(torch.ones(2, 4))
            whence.label("t", torch.ones(3))
    store.folder.update_info(place / "run", cwd=str(place), user="zoe_planted")
    store.scrub(place / "run")
    assert traces(place / "run") == []
    assert str(tmp_path).encode() not in b"".join(
        f.read_bytes() for f in (place / "run").rglob("*") if f.is_file()
    )
    assert len(store.open_run(place / "run").calls) > 0


def test_what_is_nobodys_stays():
    anonymous = Anonymous(
        RunInfo(
            command=("python", "infer.py", "--dtype", "bfloat16", "linear"),
            user="ann",
            host="gpu",
            cwd="/srv/app",
        ),
        (),
    )
    for text in (
        "linear in bfloat16, rank 0/1",
        "input.0 is float32/bfloat16",
        "aten.add.Tensor",
        "annotated gpus",
        "1/2 of 3/4",
    ):
        assert anonymous.text(text) == text
    assert (
        anonymous.text("/usr/lib/python3.11/site-packages/torch/nn/functional.py:3 on gpu")
        == "torch/nn/functional.py:3 on <scrubbed>"
    )
    assert (
        anonymous.text("cannot open /srv/app/data by ann") == "cannot open <scrubbed> by <scrubbed>"
    )


def test_call_stacks_of_a_paddle_program_keep_no_line_of_source():
    lines = [
        b'  File "model.py", line 7, in forward',
        b"    h = relu(secret_scale * x)" + b" " * 200,
        b"",
    ]
    entries = b"".join(
        b"\x42"
        + (bytes([len(x)]) if len(x) < 128 else bytes([len(x) & 127 | 128, len(x) >> 7]))
        + x
        for x in lines
    )
    before, after = b"\x1a\x04relu", b"\x22\x09fc_0.w_0\x00"
    cleaned = Anonymous(RunInfo(), []).file(
        before + b"\x0a\x0cop_callstack\x10\x05" + entries + after
    )
    assert len(cleaned) == len(before) + 16 + len(entries) + len(after)
    assert cleaned.startswith(before) and cleaned.endswith(after) and b"op_callstack" in cleaned
    assert not any(word in cleaned for word in (b"model.py", b"forward", b"secret_scale"))


def test_call_stacks_of_a_program_in_json_keep_no_line_of_source():
    stack = [
        '  File "model.py", line 7, in forward',
        '    h = relu(secret_scale["a}{\\"] * x)  # {"N": "op_callstack"}',
        "    über_geheim(x)",
        "",
    ]
    texts = [{"#": "0.a_str", "D": line} for line in stack]
    attributes = [
        {"AT": {"#": "0.a_str", "D": "fc_0.w_0"}, "N": "name"},
        {"AT": {"#": "0.a_array", "D": texts}, "N": "op_callstack"},
        {"AT": {"#": "0.a_f32", "D": 1e-05}, "N": "scale"},
    ]
    block = {"ops": [{"#": "1.relu", "A": attributes, "O": [{"%": 1}]}], "#": "block_0"}
    program = {"base_code": {"magic": "pir"}, "program": {"regions": [{"blocks": [block] * 2}]}}
    for options in ({}, {"separators": (",", ":"), "ensure_ascii": False}, {"indent": 1}):
        data = json.dumps(program, **options).encode()
        cleaned = Anonymous(RunInfo(), []).file(data)
        assert len(cleaned) == len(data)
        words = ("model.py", "forward", "secret_scale", "geheim", "\\u00fc", "über")
        assert not any(word.encode() in cleaned for word in words)
        shown = json.loads(cleaned)
        for was, now in zip(
            program["program"]["regions"][0]["blocks"], shown["program"]["regions"][0]["blocks"]
        ):
            before, after = was["ops"][0]["A"], now["ops"][0]["A"]
            assert (after[0], after[2], now["#"]) == (before[0], before[2], was["#"])
            assert after[1]["N"] == "op_callstack"
            assert all(set(text["D"]) <= {"x"} for text in after[1]["AT"]["D"])


def test_a_program_in_json_without_call_stacks_stays_as_it_is():
    data = b'{"ops":[{"A":[{"AT":{"#":"0.a_str","D":"op_callstack"},"N":"name"}]}]}'
    assert Anonymous(RunInfo(), []).file(data) == data
    assert Anonymous(RunInfo(), []).file(data[:-3]) == data[:-3]
