"""The lines of other tools' guides, typed with whence in front: dumps of scripts, their commands,
their tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from _golden.place import DATA, ROOT, Answers, Case, Place, interpreter

HEAD = """
import sys

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
BUG = "bug" in sys.argv
"""
CHAT = f"""{HEAD}
class Chat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, input_ids):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)

model = Chat().eval()
if BUG:
    with torch.no_grad():
        model.layers[1].weight[3] *= 1.5

def generate(tokens):
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
"""
VISION = f"""{HEAD}
class Vision(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 8, 4, 4)
        self.norm, self.up = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)
        self.act, self.down = torch.nn.GELU(), torch.nn.Linear(16, 8)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        return h + self.down(self.act(self.up(self.norm(h))))

model = Vision().eval()
if BUG:
    model.act.approximate = "tanh"
"""
LLM = f"""{CHAT}
from whence.compat.TOOL_llm import DumpConfig, register_hook, seed_all
seed_all(seed=2024)
register_hook(model, DumpConfig(dump_path=sys.argv[1], OPTIONS))
generate(2)
"""
XRAY = f"""{VISION}
from whence.compat.torch_xray import PrecisionDebugger
debugger = PrecisionDebugger(
    dump_path=sys.argv[1], hook_name="dump", rank=[0], step=[1], model=model, dump_torch_api=False
)
with torch.no_grad():
    for step in range(2):
        debugger.start()
        model(torch.full((1, 3, 8, 8), 0.25 + step))
"""
BEGIN = f"""{VISION}
from whence.compat.torch_xray import begin_dump, end_dump
begin_dump(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)
model(torch.ones(1, 3, 8, 8))
end_dump(clear_context=True)
"""
MSPROBE = f"""{VISION}
from whence.compat.msprobe.pytorch import PrecisionDebugger, save, seed_all
seed_all()
debugger = PrecisionDebugger(config_path="./config.json", dump_path=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.0)
for step in range(2):
    debugger.start(model)
    x = torch.full((1, 3, 8, 8), 0.25 + step, requires_grad=True)
    save(x, "batch")
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    debugger.stop()
    debugger.step()
"""
CONFIG = {"rank": [], "step": [1], "level": "L0", "task": "tensor", "async_dump": False,
          "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}  # fmt: skip
LABELS = f"""{HEAD}
import numpy as np
from whence.compat.msquickcmp.pta_acl_cmp.compare import gen_id, set_label, set_task_id
weight = torch.eye(8)
for turn in range(2):
    set_task_id()
    x = torch.arange(32.0).reshape(4, 8)
    data_id = gen_id()
    set_label(data_src="pta", data_id=data_id, data_val=x @ weight)
    set_label(data_src="acl", data_id=data_id, data_val=x @ weight * (2 if BUG and turn else 1))
    data_id, path = gen_id(), f"0_LinearOperation_{{turn}}.npy"
    set_label("acl", data_id, tensor_path=path)
    set_label("pta", data_id, x.float())
    np.save(path, x.float().numpy())
"""
GRAPH = f"""{HEAD}
import whence.compat.torchair as tng
from whence.compat.msit_llm.dump import torchair_dump
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).eval()
if BUG:
    with torch.no_grad():
        model[2].weight[2] *= 1.5
name = sys.argv[1]
config = getattr(torchair_dump, f"get_{{name}}_dump_config")(dump_path=sys.argv[2])
compiled = torch.compile(model, backend=tng.get_npu_backend(compiler_config=config), dynamic=True)
with torch.no_grad():
    compiled(torch.ones(2, 8))
"""


def _ran(place: Place, text: str, *words: str) -> str:
    """What a script says; it lies beside its dumps, made anew."""
    (place.folder / "out/script.py").write_text(text)
    return place.started(
        interpreter(), "script.py", *words, folder="out", PYTHONPATH=str(ROOT / "src")
    )


def _llm(place: Place) -> Answers:
    """Both kinds of dumps of both tools, and every level of comparison."""
    for tool, options, levels in (
        ("ait", "token_range=[0, 1], dump_last_logits=True", ("token", "logits")),
        ("msit", 'layer_name="root.layers*", dump_weight=True, dump_statistics_mode=2', ("layer",)),
        ("ait", 'mode=["module", "api"], api_list=["addmm"], token_range=[0]', ("module", "api")),
    ):
        place.clear()
        text = LLM.replace("TOOL", tool).replace("OPTIONS", options)
        name = f"{tool}_{levels[0]}"
        yield f"{name}.golden.txt", _ran(place, text, "golden")
        yield f"{name}.mine.txt", _ran(place, text, "mine", "bug")
        where = "cpu_*" if tool == "ait" else "msit_dump_*/torch_tensors/cpu_*"
        golden, mine = (
            next((place.folder / "out" / side).glob(where)) for side in ("golden", "mine")
        )
        for level in levels:
            words = (tool, "llm", "compare", "-gp", golden, "-mp", mine, "-cl", level)
            yield f"{name}.{level}.txt", place.whence(*words, "-o", f"out/{level}")
            yield from _tables(place, f"{name}.{level}", f"out/{level}")


def _tables(place: Place, name: str, folder: str) -> Answers:
    for file in sorted((place.folder / folder).rglob("*.csv")):
        yield f"{name}.table.csv", file.read_text(encoding="utf-8-sig")


def _llm_dump(place: Place) -> Answers:
    """A command that is dumped as it is."""
    (place.folder / "infer.py").write_text(f"{CHAT}\ngenerate(2)\n")
    words = ("--type", "model", "layer", "tensor", "-er", "0,1000", "-child", "False", "-stp", "1")
    for side, bug in (("golden", ""), ("mine", " bug")):
        command = f"{interpreter()} infer.py{bug}"
        dumped = ("ait", "llm", "dump", "--exec", command, *words, "-o", f"out/{side}")
        yield f"{side}.txt", place.whence(*dumped)
    for level in ("token", "layer", "module"):
        compared = ("msit", "llm", "compare", "-gp", "out/golden", "-mp", "out/mine", "-cl", level)
        yield f"{level}.txt", place.whence(*compared, "-o", f"out/{level}")


def _aclcmp(place: Place) -> Answers:
    (place.folder / "chat.py").write_text(LABELS)
    for side, bug in (("same", ""), ("bad", " bug")):
        command = f"{interpreter()} chat.py{bug}"
        words = ("ait", "debug", "compare", "aclcmp", "--exec", command, "-o", f"out/{side}")
        yield f"{side}.txt", place.whence(*words)
        yield from _tables(place, side, f"out/{side}")


def _xray(place: Place) -> Answers:
    for side, bug in (("gpu", ()), ("xpu", ("bug",))):
        yield f"{side}.said.txt", _ran(place, XRAY, side, *bug)
    gpu, xpu = (f"out/{side}/globalrank-0_localrank-0.h5" for side in ("gpu", "xpu"))
    yield "summary.txt", place.whence("xray", "summary", gpu, "out/sum.txt")
    yield from place.read("out/sum.txt")
    yield "compare.txt", place.whence("xray", "compare", xpu, gpu, "out/result.csv")
    yield from place.read("out/result.csv")
    yield "begin.txt", _ran(place, BEGIN)


def _xray_samples(place: Place) -> Answers:
    gpu, xpu = (
        DATA / "torch_xray" / f"{side}_globalrank-0_localrank-0.h5" for side in ("gpu", "xpu")
    )
    yield "compare.txt", place.whence("xray", "compare", gpu, xpu, "out/result.csv")
    yield from place.read("out/result.csv")


def _msprobe(place: Place) -> Answers:
    (place.folder / "out/config.json").write_text(json.dumps(CONFIG))
    for side, bug in (("golden", ()), ("mine", ("bug",))):
        yield f"{side}.txt", _ran(place, MSPROBE, side, *bug)
    words = ("-gp", "out/golden/step1", "-tp", "out/mine/step1", "-o", "out/cmp")
    yield "compare.txt", place.whence("msprobe", "compare", *words)
    yield from _tables(place, "cmp", "out/cmp")


def _torchair(place: Place) -> Answers:
    yield "fx.txt", _ran(place, GRAPH, "fx", "golden")
    yield "ge.txt", _ran(place, GRAPH, "ge", "mine", "bug")
    (mine,) = (place.folder / "out/mine").glob("dump_*")
    words = ("msit", "llm", "compare", "--my-path", mine, "--golden-path", "out/golden")
    yield "compare.txt", place.whence(*words, "-o", "out/cmp")
    yield from _tables(place, "cmp", "out/cmp")


def _views(place: Place) -> Answers:
    """Every table of another tool, of one pair."""
    from _golden.reports import small_pair

    small_pair(place)
    views = [
        word
        for name in ("aclcmp", "msit", "msprobe", "polygraphy", "torch_xray")
        for word in ("--view", name)
    ]
    yield from place.compare("ref", "tgt", *views)


def _shown(*paths: str, words: Sequence[str] = ()) -> Case:
    def case(place: Place) -> Answers:
        for number, path in enumerate(paths):
            yield f"{number}.txt", place.whence("show", DATA / path, *words)

    return case


CASES: dict[str, Case] = {
    "llm": _llm,
    "llm_dump": _llm_dump,
    "aclcmp": _aclcmp,
    "xray": _xray,
    "xray_samples": _xray_samples,
    "msprobe": _msprobe,
    "torchair": _torchair,
    "views": _views,
    "msprobe_shown": _shown(
        "msprobe/mix_structure", "msprobe/L1_md5", "msprobe/L1_xor", "msprobe/debug_save",
        words=("--tree",),
    ),
    "others_shown": _shown(
        "ascend/atb", "onnx/types.onnx", "polygraphy/inputs.json", "sglang/hook_ref",
        "paddle/tiny_pir_model.json", "paddle/vlog4_pir_excerpt.log",
        "paddle/vlog4_legacy_excerpt.log", "paddle/tensor_checker_worker_cpu_fp32.log",
        "torch_xray/xpu_noidx_globalrank-0_localrank-0.h5",
    ),
}  # fmt: skip
