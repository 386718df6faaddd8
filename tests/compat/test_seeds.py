"""The guides' own lines, typed with only the name of the tool or of the import changed; what they
promise is looked at.
"""

import csv
import re
from pathlib import Path

import pytest
from scripts import CHAT, VISION, python, whence

import warm
from whence.cli import execute

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Each line as a guide has it. Here and in test_msquickcmp.py, test_torch_xray_names.py and
# test_torchair.py they are typed with `whence` in front, `whence.compat.` before the import,
# `whence xray` before the commands of torch_xray.
S1 = (
    "from msquickcmp.pta_acl_cmp.compare import set_label, gen_id",
    'set_label("pta", data_id, hidden_states)',
    'ait debug compare aclcmp --exec "bash run_performance.sh '
    'patches/models/modeling_chatglm_model.py"',
    "export ACLTRANSFORMER_SAVE_TENSOR=1",
    "export ACLTRANSFORMER_SAVE_TENSOR_MAX=2",
    "export ACLTRANSFORMER_SAVE_TENSOR_RUNNER=SelfAttentionOpsChatglm6bRunner",
)
S2_IMPORT = "from ait_llm import DumpConfig, register_hook"
S2_CONFIG = 'dump_config = DumpConfig(dump_last_logits=True, dump_path="./torch_dump")'
S2_HOOK = "register_hook(model, dump_config)"
S2_LAYER = 'ait llm dump --exec "bash run.sh" --type layer'
S2_TENSOR = (
    'ait llm dump --exec "bash run.sh" --type model tensor --ids 上一步骤获取的编号 -er 0,1000 '
    "-child False -stp 1"
)
S2_COMPARE = (
    "ait llm compare -gp {DUMP_DIR}/{cuda|cpu}{device_id}_{PID}/ -mp "
    "ait_dump/tensors/{device_id}_{PID}/ -cl token"
)
S2 = (S2_IMPORT, S2_CONFIG, S2_HOOK, S2_LAYER, S2_TENSOR, S2_COMPARE)
S3_IMPORT = "from torch_xray import PrecisionDebugger"
S3_DEBUGGER = (
    'debugger = PrecisionDebugger(dump_path="dump-vision", hook_name="dump", rank=[0], step=[1], '
    "model=self.model.visual, dump_torch_api=False)"
)
S3 = (
    S3_IMPORT,
    S3_DEBUGGER,
    "debugger.start()",
    "summary xxx.h5 sum.txt",
    "compare xpu.h5 gpu.h5 result.csv",
    "from torch_xray import begin_dump, end_dump",
    "begin_dump(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)",
    "end_dump(clear_context=True)",
    "jprof --cpu_init --blacklist --factory=load dump.json",
    "pytest --detail_compare_path=./xxx.csv proc_xxx/pytests/ --seed 42",
    "summary_diff_check  ./xpu.csv ./gpu.csv ./result.csv",
)
S4 = (
    "from msit_llm.dump import torchair_dump",
    "config = torchair_dump.get_ge_dump_config(dump_path=${ge_dump_path})",
    "config = torchair_dump.get_fx_dump_config()",
    "npu_backend = torchair.get_npu_backend(compiler_config=config)",
    "model = torch.compile(model, backend=npu_backend, dynamic=True)",
    "msit llm compare --my-path ${ge_dump_path}/dump_${timestamp} --golden-path ${fx_dump_path}",
)
ELSEWHERE = (
    "msit download",
    "msit install",
    "msit check",
    "ait debug compare aclcmp xx_args",
    "pip install",
)  # of the tool, or a usage line
COMMAND = re.compile(
    r"^(?:ait|msit|summary|compare|jprof|summary_diff_check|pytest|export) "
    r".*[\w)}\"/]$|^.*(?:import|Debugger\(|_dump\(|Config\().*$"
)


@pytest.mark.parametrize(("start", "lines"), [("001", S1), ("002", S2), ("003", S3), ("004", S4)])
def test_every_line_of_the_guides_is_typed_by_a_test(shared, start, lines):
    (guide,) = (shared / "seeds").glob(f"{start}_*.txt")
    text = guide.read_text(encoding="utf-8")
    assert [line for line in lines if line not in text] == []
    blocks = [
        line.strip()
        for block in re.findall(r"```[a-z]*\s*\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    known = ("import torch", "git ", "self.", "class ", "def ", "#")
    typed = [
        line for line in blocks if COMMAND.match(line) and not line.startswith((*ELSEWHERE, *known))
    ]
    assert [line for line in typed if not any(one in line for one in lines)] == []


def of_whence(line):
    return line.replace("from ", "from whence.compat.", 1)


def words(line):
    """A command of ait as arguments of whence; a quoted one stays one word."""
    import shlex

    return shlex.split(line)


def test_logits_of_torch_against_the_last_layer_of_a_library(tmp_path, monkeypatch, capsys):
    """S2: three steps, each by its own line."""
    snippet = "\n".join((of_whence(S2_IMPORT), S2_CONFIG, S2_HOOK, "generate(4)"))
    python(tmp_path, CHAT + snippet)
    (golden,) = (tmp_path / "torch_dump").glob("cpu*_*")
    assert sorted(p.name for p in golden.iterdir() if p.name.isdigit()) == list("0123")
    (tmp_path / "run.sh").write_text("python script.py\n")
    (tmp_path / "mine.py").write_text(
        (tmp_path / "script.py").read_text().replace(snippet, "generate(4)")
    )
    (tmp_path / "run.sh").write_text('"$PYTHON" mine.py bug\n')

    monkeypatch.setenv("PYTHON", warm.TORCH)
    said = whence(tmp_path, *words(S2_LAYER)).stderr
    (layers,) = (tmp_path / "ait_dump" / "layer").iterdir()
    last = max(int(file.stem.rpartition("_")[2]) for file in layers.iterdir())
    assert f"the last layer has number {last}" in said
    whence(tmp_path, *words(S2_TENSOR.replace("上一步骤获取的编号", str(last))))
    (mine,) = (tmp_path / "ait_dump" / "tensors").iterdir()
    assert [
        len(list(mine.glob(f"{token}/{last}_Linear/after/outtensor0.bin"))) for token in range(4)
    ] == [1] * 4
    monkeypatch.chdir(tmp_path)
    line = S2_COMPARE.replace(
        "{DUMP_DIR}/{cuda|cpu}{device_id}_{PID}", f"torch_dump/{golden.name}"
    ).replace("{device_id}_{PID}", mine.name)
    assert execute(words(line)) == 1
    assert "not whole" not in capsys.readouterr().out
    (report,) = tmp_path.glob("ait_cmp_report_??????????????.csv")
    rows = list(csv.DictReader(report.read_text().splitlines()))
    assert [row["token_id"] for row in rows] == list("0123")
    for row in rows:
        token = row["token_id"]
        assert Path(row["golden_data_path"]) == Path(
            "torch_dump", golden.name, token, "root.head", "output.pth"
        )
        file = Path("ait_dump", "tensors", mine.name, token, f"{last}_Linear/after/outtensor0.bin")
        assert Path(row["my_data_path"]) == file and file.exists()
    for row in rows[:1]:
        a = (
            torch.load(golden / row["token_id"] / "root.head" / "output.pth", weights_only=True)[
                :, -1
            ]
            .double()
            .ravel()
        )
        file = mine / row["token_id"] / f"{last}_Linear" / "after" / "outtensor0.bin"
        b = torch.frombuffer(
            bytearray(file.read_bytes().partition(b"$End=1\n")[2]), dtype=torch.float32
        )[-a.numel() :].double()
        similar = torch.nn.functional.cosine_similarity(a, b, dim=0)
        assert float(row["cosine_similarity"]) == pytest.approx(float(similar), abs=1e-6)


RUNNER = (
    VISION
    + f"""
{of_whence(S3_IMPORT)}


class VLM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.lm = model, torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.lm(self.visual(x).mean(1))


class Runner:
    def __init__(self):
        self.model = VLM().eval()

    def execute_model(self, x):
        {S3_DEBUGGER}
        debugger.start()
        return self.model(x)


runner = Runner()
with torch.no_grad():
    for step in range(3):
        runner.execute_model(torch.full((1, 3, 8, 8), 0.25 + step))
"""
)


def test_a_vision_module_dumped_where_it_is_called(tmp_path, monkeypatch):
    """S3: the snippet, then summary and compare."""
    h5py = pytest.importorskip("h5py")
    dumps = {}
    for side, arguments in (("gpu", ()), ("xpu", ("bug",))):
        (tmp_path / side).mkdir()
        assert "whence: nothing" not in python(tmp_path / side, RUNNER, *arguments).stderr
        folder = tmp_path / side / "dump-vision"
        assert (folder / "globalrank-0_localrank-0_summary.csv").exists()
        dumps[side] = tmp_path / f"{side}.h5"
        (folder / "globalrank-0_localrank-0.h5").rename(dumps[side])
    with h5py.File(dumps["gpu"]) as file:
        assert list(file) == ["1"]
        assert (
            float(file["1"]["patch.Conv2d.0.forward_input.0"][0, 0, 0, 0]) == 0.25
        )  # the first inference
    monkeypatch.chdir(tmp_path)
    assert execute(["xray", "summary", "gpu.h5", "sum.txt"]) == 0
    rule, head, _, first, *_ = Path("sum.txt").read_text().splitlines()
    assert re.fullmatch(r"(\+-+){8}\+", rule)
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "Index",
        "Step",
        "Rank",
        "Module",
        "Min",
        "Max",
        "Mean",
        "Std",
    ]
    assert [cell.strip() for cell in first.strip("|").split("|")][:4] == [
        "0",
        "1",
        "0",
        "patch.Conv2d.0.forward_params.weight",
    ]
    assert execute(["xray", "compare", "gpu.h5", "gpu.h5", "same.csv"]) == 0
    assert {row["Status"] for row in csv.DictReader(Path("same.csv").read_text().splitlines())} == {
        ""
    }
    assert execute(["xray", *["compare", "xpu.h5", "gpu.h5", "result.csv"]]) == 1
    rows = list(csv.DictReader(Path("result.csv").read_text().splitlines()))
    assert {row["Status"] for row in rows} <= {"", "Fail"}
    assert {
        row["Status"]
        for row in rows
        if row["Module (Bench/Target)"].startswith(("patch", "blocks.0"))
    } == {""}
