"""torchair: a GE configuration against an FX configuration, and one that goes on to torchair
itself.
"""

from pathlib import Path

import numpy as np
import pytest
from scripts import python

from whence import compare, open_run
from whence.cli import execute

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch]

GRAPH = """
import whence.compat.torchair as tng
from whence.compat.msit_llm.dump import torchair_dump

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)).eval()
if BUG:
    with torch.no_grad():
        model[3].weight[2] *= 1.5
make = torchair_dump.get_ge_dump_config if sys.argv[1] == "ge" else torchair_dump.get_fx_dump_config
config = make(dump_path=sys.argv[2]) if len(sys.argv) > 2 else make()
npu_backend = tng.get_npu_backend(compiler_config=config)
plain = model(torch.ones(2, 8))
compiled = torch.compile(model, backend=npu_backend, dynamic=True)
with torch.no_grad():
    out = compiled(torch.ones(2, 8))
torch.testing.assert_close(out, plain)
"""


@pytest.mark.slow
def test_a_ge_configuration_against_an_fx_configuration(tmp_path, monkeypatch, capsys):
    said = python(tmp_path, GRAPH, "fx").stderr
    assert (
        "torchair.get_npu_backend is  whence run --level graph --graph-mode fx -o RUN -- CMD"
        in said
    )
    python(tmp_path, GRAPH, "ge", "mine")
    python(tmp_path, GRAPH, "ge", "wrong", "bug")
    # Where the guide says, with the files that it says.
    (eager,) = (tmp_path / "data_dump" / "1").glob("gm_????????????????????_dump")
    saved = np.load(next(eager.glob("addmm-aten.addmm.default.INPUT.1.????????????????????.npy")))
    np.testing.assert_array_equal(saved, np.ones((2, 8), np.float32))
    (dump,) = (tmp_path / "mine").glob("dump_*")
    assert {p.name.rpartition("_graph_")[0] for p in dump.glob("*.txt")} == {
        "dynamo_original",
        "dynamo_optimized",
    }
    operators = next(p for p in dump.iterdir() if p.name.isdigit() and len(p.name) == 14)
    assert list(operators.glob("0/graph_1/1/0/Addmm.addmm.*.output.0.npy"))
    monkeypatch.chdir(tmp_path)
    (wrong,) = Path("wrong").glob("dump_*")
    for place, code in ((dump, 0), (wrong, 1)):
        line = ["msit", "llm", "compare", "--my-path", str(place), "--golden-path", "data_dump"]
        assert execute(line) == code
        told = capsys.readouterr()
        assert "msit_llm_logger - INFO - Comparing GE with FX\n" in told.err
        assert (
            "msit_llm_logger - INFO - All token ids in my_dump_data: dict_keys([0])\n" in told.err
        )
        assert "msit_llm_logger - INFO - Saved comparing results: ./msit_cmp_report_" in told.err
    found = compare(tmp_path, wrong)
    assert (found.findings[0].name, found.findings[0].slot) == ("3", "param.weight")
    # The tool's own files are a dump of its kind each, also without the run beside them.
    for place, kind, step in ((Path("data_dump"), "fx", "addmm"), (operators, "ge", "addmm")):
        for path in (place / "run.json", *place.glob("rank*")):
            path.rename(tmp_path / f"{kind}-{path.name}") if path.exists() else None
        opened = open_run(str(place))
        assert (opened.info.kind, {call.step for call in opened.calls}) == (kind, {0})
        assert step in {call.scope for call in opened.calls}


def test_torchair_gets_its_own_configuration(tmp_path):
    for name, text in {
        "torchair/__init__.py": "def get_npu_backend(*, compiler_config=None): return 'npu', "
        "compiler_config",
        "torchair/configs/__init__.py": "",
        "torchair/configs/compiler_config.py": """
class Fields:
    path = None
class CompilerConfig:
    def __init__(self):
        self.debug, self.dump_config, self.fusion_config = Fields(), Fields(), Fields()
        self.debug.graph_dump, self.debug.data_dump = Fields(), Fields()
""",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = """
import whence.compat.torchair as tng
from whence.compat.ait_llm.dump import torchair_dump
config = torchair_dump.get_ge_dump_config(dump_path="dump", dump_mode="output", dump_token=[0, 2], dump_layer=["Add", "Mul"])
assert tng.get_npu_backend(compiler_config=config) == ("npu", config)
assert (config.dump_config.enable_dump, config.dump_config.dump_mode) == (True, "output")
assert (config.dump_config.dump_step, config.dump_config.dump_layer) == ("0|2", "Add Mul")
assert config.debug.graph_dump.type == "txt" and config.debug.graph_dump.path.endswith("msit_ge_dump")
assert torchair_dump.get_fx_dump_config().debug.data_dump.type == "npy"
"""
    python(tmp_path, script)


def test_what_is_not_understood_is_an_error(tmp_path):
    from whence.compat import torchair
    from whence.compat.msit_llm.dump.torchair_dump import get_fx_dump_config, get_ge_dump_config
    from whence.errors import UsageError

    assert torchair.get_npu_backend() == "inductor"
    for wrong in (
        lambda: get_ge_dump_config(dump_mode="some"),
        lambda: get_fx_dump_config(compiler_config=3),
        lambda: torchair.get_npu_backend(compiler_config=3),
        lambda: get_ge_dump_config(dump_pth="x"),
    ):
        with pytest.raises(UsageError):
            wrong()
