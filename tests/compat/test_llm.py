"""ait_llm and msit_llm: dumps of scripts as the guides have them, and `ait|msit llm
dump|compare`.
"""

import csv
import json

import numpy as np
import pytest
from scripts import CHAT, HEAD, python, whence

import warm
from whence import compare, open_run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DUMP = (
    CHAT
    + """
from whence.compat.TOOL_llm import DumpConfig, register_hook, seed_all
seed_all(seed=2024)
register_hook(model, DumpConfig(dump_path=sys.argv[1], OPTIONS))
logits = []
model.register_forward_hook(lambda m, i, o: logits.append(o))
ids = generate(4)
import glob
assert glob.glob(sys.argv[1] + "/**/model_tree.json", recursive=True)  # as soon as the last token that is wanted is there
torch.save((ids, logits, torch.get_rng_state()), sys.argv[1] + ".pt")
"""
)


def dumped(folder, options, tool="ait", sides=("golden", "mine")):
    """Dump both sides; the folders that the tool would have made."""
    text = DUMP.replace("TOOL", tool).replace("OPTIONS", options)
    for side, words in zip(sides, ((), ("bug",)), strict=True):
        python(folder, text, side, *words)
    where = (
        "cpu_*" if tool == "ait" else "msit_dump_*/torch_tensors/cpu_*"
    )  # as the guides of each say
    return [next((folder / side).glob(where)) for side in sides]


def test_the_last_logits_of_a_generation(tmp_path):
    golden, mine = dumped(tmp_path, "token_range=[0, 1, 3], dump_last_logits=True")
    ids, logits, state = torch.load(tmp_path / "golden.pt")
    assert sorted(p.name for p in golden.iterdir() if p.name.isdigit()) == ["0", "1", "3"]
    for token in (0, 1, 3):
        saved = torch.load(golden / str(token) / "root.head" / "output.pth", weights_only=True)
        assert torch.equal(saved[0, -1], logits[token][0, -1])
    plain = "".join(
        f"{line}\n"
        for line in DUMP.replace("TOOL", "ait").splitlines()
        if "OPTIONS" not in line and "glob" not in line
    )
    python(tmp_path, plain, "plain")
    other = torch.load(tmp_path / "plain.pt")
    assert torch.equal(ids, other[0])
    assert torch.equal(state, other[2])
    said = whence(
        tmp_path,
        "ait",
        "llm",
        "compare",
        "-gp",
        golden,
        "-mp",
        mine,
        "-cl",
        "token",
        "-o",
        "out",
        code=1,
    )
    assert "TOKENS" in said.stdout
    assert "ait llm compare is  whence compare" in said.stderr
    (report,) = (tmp_path / "out").glob("ait_cmp_report_??????????????.csv")
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert [row["token_id"] for row in rows] == ["0", "1", "3"]
    wrong = torch.load(tmp_path / "mine.pt")[1][0][0, -1]
    similar = torch.nn.functional.cosine_similarity(
        logits[0][0, -1].double(), wrong.double(), dim=0
    )
    assert float(rows[0]["cosine_similarity"]) == pytest.approx(float(similar), abs=1e-6)
    found = compare(tmp_path / "golden", tmp_path / "mine")
    assert (found.status, found.generation.logits_only) == ("different", True)


def test_modules_their_weights_and_statistics(tmp_path):
    golden, mine = dumped(
        tmp_path, 'layer_name="root.layers*", dump_weight=True, dump_statistics_mode=2', "msit"
    )
    assert {p.name for p in (golden / "0").iterdir()} == {"root.layers.0", "root.layers.1"}
    assert {p.name for p in golden.iterdir() if p.name.isdigit()} == {
        "0"
    }  # token_range is [0] when it is not given
    weight = torch.load(golden / "weights" / "root.layers.1.weight.pth", weights_only=True)
    wrong = torch.load(mine / "weights" / "root.layers.1.weight.pth", weights_only=True)
    assert torch.equal(weight[3] * 1.5, wrong[3])
    made = torch.load(golden / "0" / "root.layers.1" / "output.pth", weights_only=True)
    rows = csv.DictReader((golden / "statistics.csv").read_text().splitlines())
    row = next(r for r in rows if (r["NodeName"], r["InputOutput"]) == ("root.layers.1", "output"))
    assert [float(row[k]) for k in ("Max", "Min")] == [made.max().item(), made.min().item()]
    tree = json.loads((golden / "model_tree.json").read_text())
    assert (tree["name"], [kid["name"] for kid in tree["children"]]) == ("root", ["root.layers"])
    # The folder that the user knows, the run in it, and the tool's own files alone.
    for path in ((tmp_path / "golden", tmp_path / "mine"), (golden, mine)):
        found = compare(*path)
        assert (found.status, found.findings[0].name, found.findings[0].slot) == (
            "different",
            "layers.1",
            "param.weight",
        )
    assert not list((tmp_path / "golden").glob("cpu_*"))
    for side in (golden, mine):
        (side / "run.json").unlink()
        (process,) = side.glob("rank*")
        process.rename(side.parent / f"{process.name}-{side.parent.parent.parent.name}")
    found = compare(golden, mine)
    assert (found.status, found.findings[0].name, found.findings[0].slot) == (
        "different",
        "layers.1",
        "param.weight",
    )


@pytest.mark.slow
def test_operators_and_parts(tmp_path):
    golden, mine = dumped(tmp_path, 'mode=["module", "api"], api_list=["addmm"], token_range=[0]')
    names = {p.name for p in (golden / "0").iterdir()}
    assert {"root", "root.head", "root.head.addmm.0"} <= names
    assert not any("tanh" in name for name in names)
    assert any(call.op == "aten.tanh.default" for call in open_run(str(golden)).calls)
    whence(
        tmp_path,
        "msit",
        "llm",
        "compare",
        "--golden-path",
        golden,
        "--my-path",
        mine,
        "-cl",
        "api",
        "-o",
        "out",
        code=1,
    )
    (report,) = (tmp_path / "out").glob("msit_cmp_report_*.csv")
    assert "addmm" in {
        row["golden_op_type"] for row in csv.DictReader(report.read_text().splitlines())
    }
    only = dumped(
        tmp_path,
        "tensor_part=1, module_list=[torch.nn.Linear], dump_statistics_mode=1, seed=1",
        sides=("a", "b"),
    )[0]
    run = open_run(str(only))
    assert {call.op_type for call in run.calls if call.refs} == {"Linear"}
    assert not any(ref.slot.startswith("input") for call in run.calls for ref in call.refs)
    assert all(record.elements is None for record in run.records)


def test_what_is_not_understood_is_an_error():
    from whence.compat.msit_llm import DumpConfig, register_hook
    from whence.errors import UsageError

    for wrong in (
        {"tensor_part": 3},
        {"mode": "kernel"},
        {"tokenrange": [0]},
        {"dump_statistics_mode": 5},
        {"token_range": ["a"]},
        {"dump_last_logits": True, "layer_name": "root"},
    ):
        with pytest.raises(UsageError):
            DumpConfig(**wrong)
    with pytest.raises(UsageError, match="did you mean token_range"):
        DumpConfig(token_rnage=[0])
    assert DumpConfig(token_range=5).steps == {5}
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module, not a int"):
        register_hook(3, DumpConfig())
    with pytest.raises(UsageError, match="takes a DumpConfig"):
        register_hook(torch.nn.Linear(1, 1), {"dump_path": "."})


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "infer.py").write_text(HEAD + CHAT + "generate(3)\n")
    for side, word in (("golden", ""), ("mine", " bug")):
        options = [
            "--type",
            "model",
            "layer",
            "tensor",
            "-ids",
            "-er",
            "0,1000",
            "-child",
            "False",
            "-stp",
            "1",
            "-o",
        ]
        said = whence(
            folder,
            "ait",
            "llm",
            "dump",
            "--exec",
            f"{warm.TORCH} infer.py{word}",
            *options,
            side,
        )
    return folder, said.stderr


@pytest.mark.slow
def test_a_command_is_dumped_and_compared(commands):
    folder, said = commands
    assert "ait llm dump is  whence run -o " in said
    assert "--steps 0:1001 --slots output" in said
    run = open_run(str(folder / "golden"))
    assert {call.step for call in run.calls} == {0, 1, 2}
    assert not any(ref.slot.startswith("input") for call in run.calls for ref in call.refs)
    (tensors,) = (folder / "golden" / "ait_dump" / "tensors").iterdir()
    assert tensors.name.startswith("0_")
    (binary,) = (tensors / "2").glob(
        "4_Linear/after/outtensor0.bin"
    )  # the head is the fourth that the model calls
    assert not list(tensors.glob("*/*/before"))
    last = open_run(str(folder / "golden"))
    head = next(c for c in last.calls if (c.scope, c.step) == ("head", 2))
    np.testing.assert_array_equal(
        open_run(str(binary)).array(0), last.array(head.slots("output")[0].record)
    )
    layers = sorted(p.name for p in (folder / "golden" / "ait_dump").glob("layer/*/*.json"))
    assert layers == ["Embedding_1.json", "Linear_2.json", "Linear_3.json", "Linear_4.json"]
    wanted = {"token": 3, "logits": 3, "layer": 3 * 2 * 3, "module": None}
    for level, rows in wanted.items():
        whence(
            folder,
            "msit",
            "llm",
            "compare",
            "-gp",
            "golden",
            "-mp",
            "mine",
            "-cl",
            level,
            "-o",
            level,
            code=1,
        )
        (report,) = (folder / level).glob("msit_cmp_report_*.csv")
        names = [row["whence_call"] for row in csv.DictReader(report.read_text().splitlines())]
        if level == "layer":
            assert {name.split(".")[0] for name in names} == {"layers"}
        elif rows is not None:
            assert len(names) == rows
        else:
            assert len(names) > 18
    whence(folder, "ait", "llm", "compare", "-gp", "golden", "-mp", "golden", "-o", "same")
    assert (
        "nothing at level api"
        in whence(
            folder, "ait", "llm", "compare", "-gp", "golden", "-mp", "mine", "-cl", "api", code=3
        ).stderr
    )


def test_register_hook_twice(tmp_path):
    script = """
from whence.compat.ait_llm import DumpConfig, register_hook
config = DumpConfig(dump_path="dump", dump_last_logits=True)
other = torch.nn.Linear(4, 4)
for one in (model, model, other):
    register_hook(one, config)
generate(2), other(torch.ones(1, 4))
"""
    said = python(tmp_path, CHAT + script).stderr
    assert "this model is dumped already" in said
    (first,) = (p for p in (tmp_path / "dump").iterdir() if not p.name.endswith("-2"))
    assert {p.name for p in first.iterdir() if p.name.isdigit()} == {"0", "1"}
    assert (
        tmp_path / "dump" / f"{first.name}-2" / "run.json"
    ).exists()  # a place of its own for each model: nothing is deleted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-er", "5,1"], "pairs of a first and a last token"),
        (["-er", "x"], "pairs of"),
        (["-config", "a.json"], "cannot be changed while"),
        (["--type", "tensors"], "is not one of"),
        ([], ""),
    ],
)
def test_options_of_dump(tmp_path, words, said):
    command = f"{warm.TORCH} -c 'print(1)'"
    got = whence(
        tmp_path, "ait", "llm", "dump", "--exec", command, *words, code=3
    )  # the last: nothing was captured
    assert said in got.stderr


def test_the_answer_is_printed_before_the_table_is_written(tmp_path, capsys):
    from whence import capture
    from whence.cli import main

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    for side in ("golden", "mine"):
        with torch.no_grad(), capture(model, tmp_path / side):
            model(torch.ones(2, 4))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "ait",
                "llm",
                "compare",
                "-gp",
                f"{tmp_path}/golden",
                "-mp",
                f"{tmp_path}/mine",
                "-o",
                f"{tmp_path}/file/in",
            ]
        )
    said = capsys.readouterr()
    assert said.out.startswith(("IDENTICAL", "SAME")) and "written to" not in said.out
    assert (ended.value.code, "cannot write" in said.err) == (3, True)
