"""Every command of the docs is run, page by page, in a folder with programs as the pages mean them.

A page is followed from top to bottom: what its commands write is there for those below. A block
that cannot run here says why in a comment above it: "<!-- not run: REASON -->". The
tutorial, README and the recipes for build servers have tests of their own, which check what they
print too.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

import inside
import warm
import whence
from stories import first_clauses, shown_in_order
from whence import api
from whence.instrument.options import CaptureOptions

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = "not run: "
ELSEWHERE = {
    "README.md": "tests/test_docs.py",
    "CONTRIBUTING.md": ".ci/run",
    "docs/ci.md": "tests/cli/test_recipes.py",
    "docs/paddle.md": "tests/cli/test_paddle_story.py",
    "docs/tutorial.md": "tests/cli/test_tutorial.py",
}
"""Pages of which another test runs the commands."""
AGAIN = {"docs/locate.md"}
"""Pages whose commands run the programs again, as the runs say that they were run."""
PROGRAMS = ("infer.py", "generate.py")
SLOW = {
    *("docs/answer.md", "docs/capture.md", "docs/labels.md", "docs/locate.md"),
    *("docs/onnx.md", "docs/operators.md", "docs/report.md"),
}
"""Pages that start other programs, or draw."""
ANSWERS = (0, 1, 2)
"""What a command may end with: the same, different, cannot tell. All else is an error."""

INFER = """
import contextlib
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make_model():
    torch.manual_seed(0)
    return Net().eval()

def main(words, around=contextlib.nullcontext):
    model = make_model()
    x = torch.linspace(-1, 1, 128).reshape(2, 4, 16)
    if words.get("--dtype", "fp32") != "fp32":
        dtype = {"bf16": torch.bfloat16, "float64": torch.float64}[words["--dtype"]]
        model, x = model.to(dtype), x.to(dtype)
    if "--broken" in words or "--new-kernel" in words:
        model.layers[2].norm.eps = 1e-2
    if "--int8" in words:
        for layer in model.layers:
            weight = layer.mlp.weight.data
            scale = weight.abs().amax(1, keepdim=True) / 127
            layer.mlp.weight.data = (weight / scale).round() * scale
    with torch.no_grad(), around(model):
        for step in range(4):
            model(x * (1 + step))

if __name__ == "__main__":
    main(dict(zip(sys.argv[1:], [*sys.argv[2:], ""])))
"""
GENERATE = """
import contextlib
import sys
import torch
from torch import nn

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.embed(input_ids).cumsum(1)))

def main(words, around=contextlib.nullcontext):
    torch.manual_seed(0)
    model = LM().eval()
    if "--dtype" in words:
        model = model.bfloat16()
    ids = torch.tensor([[3, 7, 1]])
    with torch.no_grad(), around(model):
        for _ in range(6):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)

if __name__ == "__main__":
    main(dict(zip(sys.argv[1:], [*sys.argv[2:], ""])))
"""
TRAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(4, 8)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LABELS = """
import numpy as np
import whence

whence.label("y", np.arange(6.0))
"""
ANSWERED = '{{"src": "a", "output": "rain in spain"}}\n{{"src": "b", "output": "{}"}}\n'
FILES = {
    "infer.py": INFER,
    "generate.py": GENERATE,
    "train.py": TRAIN,
    "reference.py": LABELS,
    "target": f"#!/bin/sh\nexec {warm.TORCH} reference.py\n",
    "run.sh": f"exec {warm.TORCH} infer.py\n",
    "both.py": "",
    **{
        f"{side}{commit}.json": ANSWERED.format("sun" if side == "ref" else "the sun")
        for side in ("ref", "tgt")
        for commit in ("", "_a", "_b")
    },
}
POLICY = """
[[allow]]
module = "layers.*"
op = "Linear"
declare = "quantisation"
weights = { bits = 8, per = "channel" }
min_sqnr = 25
"""
# What a page takes for granted, as lines of commands.
REF, TGT = (
    "whence run -o runs/ref -- python infer.py",
    "whence run -o runs/tgt -- python infer.py --broken",
)
COMPARED = f"{REF}\n{TGT}\nwhence compare runs/ref runs/tgt -o cmp"
BEFORE = {
    "docs/alignment.md": f"{REF}\n{TGT}",
    "docs/convert.md": f"{REF}\nwhence convert runs/ref dump_of_another_tool --to safetensors",
    "docs/labels.md": "",
    "docs/locate.md": f"{REF}\n{TGT}",
    "docs/report.md": COMPARED,
    "docs/operators.md": f"""{COMPARED}
whence run --level op -o runs/first -- python train.py
whence ops generate runs/first -o first
pytest first --detail_compare_path ref.csv
pytest first --detail_compare_path tgt.csv""",
    "docs/policy.md": f"{REF}\nwhence run -o runs/int8 -- python infer.py --int8",
}


def pages():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT).as_posix()
        found = [block for block in BLOCK.findall(page.read_text()) if block[1] == "sh"]
        if found and name not in ELSEWHERE:
            yield pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip("\n"))
    for name in ("int8.toml", "quantised.toml"):
        (tmp_path / name).write_text(POLICY)
    (tmp_path / "target").chmod(0o755)
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path


def words_of(line):
    """A line of a page as it runs here: this Python, and the processor where a GPU is meant."""
    here = {"python": warm.TORCH, "cuda": "cpu", "cuda:0": "cpu"}
    words = shlex.split(line, comments=True)
    return [here.get(word.rpartition("/")[2] if "bin/" in word else word, word) for word in words]


def in_this_process(command, run_path, **options):
    """What `whence run` does with one of the programs above, without a process for it."""
    import torch

    _, program, *words = command
    values = runpy.run_path(program)
    of_capture = {k: v for k, v in options.items() if k in CaptureOptions.__struct_fields__}
    state = torch.random.get_rng_state()
    values["main"](
        dict(zip(words, [*words[1:], ""], strict=False)),
        lambda model: whence.capture(model, run_path, **of_capture),
    )
    torch.random.set_rng_state(state)
    return 0


def run(folder, line):
    """Run a line, and give its exit code and what it said of an error."""
    program, *words = words_of(line)
    if Path(program).name == "pytest":
        program, words = warm.TORCH, ["-m", "pytest", "-p", "no:cacheprovider", *words]
    if Path(program).name != "whence":
        done = subprocess.run(
            [program, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    done = (inside.whence if {*PROGRAMS} & {*words} else inside.or_outside)(folder, *words)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", [*pages()])
def test_the_commands_of_a_page_run(name, folder, monkeypatch):
    launched = api.run_command
    monkeypatch.setattr(
        api,
        "run_command",
        lambda command, *how, **options: (
            in_this_process if command[1] in PROGRAMS and name not in AGAIN else launched
        )(command, *how, **options),
    )
    for line in BEFORE.get(name, "").splitlines():
        assert run(folder, line)[0] in ANSWERS, line
    for remark, kind, body in BLOCK.findall((ROOT / name).read_text()):
        if remark.startswith("file: "):
            (folder / remark.removeprefix("file: ")).write_text(body)
        elif kind == "sh" and not remark.startswith(NOT_RUN):
            for line in body.replace("\\\n", " ").splitlines():
                code, told = run(folder, line)
                assert code in ANSWERS, f"{line}: exit code {code}\n{told}"


SAMPLES = {
    "docs/formats.md": {
        "reference.log": "llama_cpp/reference.log",
        "norm_eps.log": "llama_cpp/norm_eps.log",
    }
}
"""What the commands of a page are about that shows them with their answers."""


def test_an_answer_shown_beside_its_command_is_the_one_given(tmp_path):
    shown = [
        (page.relative_to(ROOT).as_posix(), body)
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for remark, kind, body in BLOCK.findall(page.read_text())
        if kind == "console" and not remark.startswith(NOT_RUN)
    ]
    assert {name for name, _ in shown} == {*SAMPLES}
    for name, body in shown:
        for file, sample in SAMPLES[name].items():
            source = ROOT / "tests" / "data" / sample
            if source.is_dir():
                shutil.copytree(source, tmp_path / file, dirs_exist_ok=True)
            else:
                shutil.copy(source, tmp_path / file)
        command, _, answer = body.removeprefix("$ whence ").partition("\n")
        done = inside.whence(tmp_path, *shlex.split(command))
        shown_in_order(first_clauses(answer), first_clauses(done.stdout))


def test_blocks_that_are_not_run_are_few_and_say_why():
    reasons = [
        (page.name, remark.removeprefix(NOT_RUN))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if str(page.relative_to(ROOT)) not in ELSEWHERE
        for remark, _, _ in BLOCK.findall(page.read_text())
        if remark.startswith(NOT_RUN)
    ]
    assert [entry for entry in reasons if len(entry[1].split()) < 4] == []
    assert len(reasons) <= 20, reasons


def test_pages_with_a_test_of_their_own_are_named_there():
    for page, test in ELSEWHERE.items():
        if test.endswith(".py") and page != "README.md":
            assert Path(page).name in (ROOT / test).read_text(), (page, test)
    assert [page for page in (*ELSEWHERE, *SLOW, *BEFORE) if not (ROOT / page).exists()] == []
