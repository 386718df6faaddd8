"""Models under two releases: a small package in two folders, and transformers with a planted edit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import inside
import warm
from whence import api
from whence.errors import OutputExists, UsageError, WhenceError
from whence.report.upgrade import upgrade_text
from whence.results import Status, Upgrade, Upgraded, UpgradeKind
from whence.workflows.upgrade import environments
from whence.workflows.upgrade.inside import tiny_configs, values, widening
from whence.workflows.upgrade.upgrade import only_generating

pytestmark = pytest.mark.torch

PACKAGE = """
import os, time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return self.gain * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return {"hidden": self.second(x + self.first(x))}

class Summed(nn.Module):
    def forward(self, a, b, c):
        return SUM

class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.NAME = nn.Linear(16, 16)

    def forward(self, x):
        return self.NAME(x)

class Reshaped(Net):
    def forward(self, x):
        return {"hidden": super().forward(x)["hidden"][ROWS]}

class Crashing(Net):
    def forward(self, x):
        CRASH
        return super().forward(x)

class Hanging(Net):
    def forward(self, x):
        HANG
        return super().forward(x)

class Unbuildable(Net):
    def __init__(self):
        super().__init__()
        UNBUILDABLE
"""
CATALOGUE = """
import torch, littlenets

def names():
    return MODELS

def build(name):
    torch.manual_seed(3)
    x = torch.randn(4, 16)
    if name == "summed":
        return littlenets.Summed(), tuple(torch.randn(3, 64, 64))
    if name == "never":
        raise ValueError("no such net")
    kind = "Net" if name in ("net", "added") else name.title()
    return getattr(littlenets, kind)(), {"x": x}
"""
OLD = {
    "EPSILON": "1e-6",
    "SUM": "(a + b + c).sum(0)",
    "NAME": "project",
    "ROWS": ":",
    "CRASH": "pass",
    "HANG": "pass",
    "UNBUILDABLE": "pass",
}
NEW = {
    "EPSILON": "1e-2",
    "SUM": "c.sum(0) + (b.sum(0) + a.sum(0))",
    "NAME": "dense",
    "ROWS": ":1",
    "CRASH": "os.abort()",
    "HANG": "time.sleep(600)",
    "UNBUILDABLE": "raise RuntimeError('no longer')",
}
MODELS = ["summed", "net", "renamed", "reshaped", "crashing", "hanging", "unbuildable", "never"]


def release(folder: Path, name: str, words: dict[str, str]) -> str:
    """A folder with one release of the package."""
    text = PACKAGE
    for word, code in words.items():
        text = text.replace(word, code)
    package = folder / name / "littlenets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return str(folder / name)


def catalogue(folder: Path, models: str) -> str:
    file = folder / "catalogue.py"
    file.write_text(CATALOGUE.replace("MODELS", models))
    return str(file)


def by_name(result: Upgrade) -> dict[str, Upgraded]:
    return {model.name: model for model in result.models}


@pytest.fixture(scope="module", autouse=True)
def forked():
    """The workers of both releases need not import torch anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.TORCH)
        yield


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory):
    """(folder, what an upgrade of the package changes)."""
    folder = tmp_path_factory.mktemp("upgrade")
    listed = f"{MODELS!r} + (['added'] if littlenets.__file__.count('new') else ['removed'])"
    old, new = release(folder, "old", OLD), release(folder, "new", NEW)
    result = api.upgrade(old, new, folder / "up", catalogue=catalogue(folder, listed), limit_s=25.0)
    return folder, result


def test_each_model_becomes_what_was_planted(upgraded):
    _, result = upgraded
    kinds = {name: model.kind for name, model in by_name(result).items()}
    assert kinds == {
        "summed": UpgradeKind.ROUNDING,
        "net": UpgradeKind.DIFFERS,
        "renamed": UpgradeKind.BITWISE,
        "reshaped": UpgradeKind.DIFFERS,
        "crashing": UpgradeKind.FAILS_IN_SECOND,
        "hanging": UpgradeKind.FAILS_IN_SECOND,
        "unbuildable": UpgradeKind.FAILS_IN_SECOND,
        "never": UpgradeKind.CANNOT_BUILD,
        "added": UpgradeKind.ADDED,
        "removed": UpgradeKind.REMOVED,
    }
    assert result.status is Status.DIFFERENT


def test_a_changed_constant_is_named_with_both_lines(upgraded):
    folder, result = upgraded
    net = by_name(result)["net"]
    lines = (folder / "old" / "littlenets" / "__init__.py").read_text().splitlines()
    assert net.place.module == "first"
    assert net.place.op_type == "Block"
    assert net.place.cause == "semantic"
    assert "1e-06" in net.place.words and "0.01" in net.place.words
    number = next(n for n, line in enumerate(lines, 1) if "rsqrt" in line)
    assert net.place.second == f"littlenets/__init__.py:{number}"
    assert net.place.first.startswith("littlenets/__init__.py:")
    assert net.largest_wide > 1e-4  # float64 does not make it go away


def test_rounding_goes_away_in_float64(upgraded):
    summed = by_name(upgraded[1])["summed"]
    assert 0 < summed.largest < 1e-4
    assert summed.largest_wide < 1e-12
    assert not summed.script


def test_errors_say_what_happened(upgraded):
    models = by_name(upgraded[1])
    assert "signal 6" in models["crashing"].errors[1]
    assert "longer than 25 s" in models["hanging"].errors[1]
    assert models["unbuildable"].errors == ("", "RuntimeError: no longer")
    assert "no such net" in models["never"].errors[0]
    assert "project.weight" in models["renamed"].benign[0]


def test_the_script_shows_the_difference(upgraded):
    folder, result = upgraded
    script = folder / "up" / by_name(result)["net"].script
    printed = [
        subprocess.run(
            [sys.executable, script, side],
            env={**os.environ, "PYTHONPATH": str(folder / name), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for side, name in (("first", "old"), ("second", "new"))
    ]
    assert printed[0].startswith("hidden") and printed[1].startswith("hidden")
    assert printed[0] != printed[1]


def test_a_second_call_goes_on(upgraded, monkeypatch):
    """Lines that are there are taken; half a line, of a call that was killed, is tried again."""
    folder, before = upgraded
    file = folder / "up" / "results.jsonl"
    whole = file.read_bytes()
    kept = [line for line in whole.splitlines() if b'"renamed"' not in line]
    file.write_bytes(b"\n".join([*kept, b'{"name":"renamed","ki']) + b"\n")
    tried = []
    from whence.workflows.upgrade import upgrade

    judge = upgrade.Pair.judge
    monkeypatch.setattr(
        upgrade.Pair, "judge", lambda self, name: tried.append(name) or judge(self, name)
    )
    words = ("upgrade", "-o", "up", "--catalogue", "catalogue.py", "--format", "json")
    done = inside.whence(folder, *words, before.first.given, before.second.given)
    assert tried == ["renamed"]
    assert done.returncode == 1
    again = msgspec.json.decode(done.stdout, type=Upgrade)
    assert {n: m.kind for n, m in by_name(again).items()} == {
        n: m.kind for n, m in by_name(before).items()
    }
    with pytest.raises(OutputExists, match="asked otherwise"):
        api.upgrade(before.first.given, before.first.given, folder / "up")


def test_the_table_shows_what_is_not_the_same(upgraded):
    text = upgrade_text(upgraded[1])
    assert text.startswith("DIFFERENT")
    assert repr(upgraded[1]).startswith("DIFFERENT")
    assert "1  same within rounding" in text
    assert "\n  net\n" in text and "\n  summed" not in text
    assert "\n  summed" in upgrade_text(upgraded[1], everything=True)


def test_a_budget_leaves_the_rest_for_the_next_call(tmp_path):
    old = release(tmp_path, "old", OLD)
    listed = catalogue(tmp_path, "['net']")
    result = api.upgrade(old, old, tmp_path / "up", catalogue=listed, budget_s=0.0)
    assert result.untried == ("net",)
    assert result.status is Status.UNDECIDED


def test_training_and_a_program_of_the_user(tmp_path):
    old, new = release(tmp_path, "old", OLD), release(tmp_path, "new", OLD | {"EPSILON": "1e-3"})
    listed = catalogue(tmp_path, "['net']")
    trained = api.upgrade(old, new, tmp_path / "up", catalogue=listed, train=True)
    assert trained.models[0].kind is UpgradeKind.DIFFERS
    assert trained.models[0].output.startswith("gradient of first.")
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch, littlenets\ntorch.manual_seed(0)\n"
        "print(littlenets.Net()(torch.ones(2, 16)))\n"
    )
    result = api.upgrade(old, old, tmp_path / "same", command=("python", str(script)))
    assert [model.kind for model in result.models] == [UpgradeKind.BITWISE]
    assert result.status is Status.SAME


def test_environments_that_cannot_be_made(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        api.upgrade(str(tmp_path / "nowhere"), "x==1", tmp_path / "a")
    wheel = tmp_path / "little-1-py3-none-any.whl"
    wheel.write_text("no archive")
    with pytest.raises(WhenceError, match="pip cannot install"):
        api.upgrade(str(wheel), "x==1", tmp_path / "b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(OutputExists):
        api.upgrade("x==1", "x==2", tmp_path / "full")


def edited_transformers(folder: Path) -> str:
    """The installed transformers, by links, with one edited file; and the number of the line."""
    import transformers

    real = Path(transformers.__file__).parent
    copy = folder / "site" / "transformers"
    edited = Path("models", "mistral", "modeling_mistral.py")
    for place in (Path(), edited.parent.parent, edited.parent):
        (copy / place).mkdir(parents=True)
        for entry in (real / place).iterdir():
            if entry.name not in ("__pycache__", *edited.parts):
                (copy / place / entry.name).symlink_to(entry)
    text = (real / edited).read_text()
    line = "return self.weight * hidden_states.to(input_dtype)"
    assert text.count(line) == 1
    (copy / edited).write_text(text.replace(line, f"{line} * 1.001"))
    return str(folder / "site")


def distribution(folder, name, version="1.0", requires=()):
    """A folder as pip leaves it, without code."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (place / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")


def unmet(folder, *wanted):
    done = subprocess.run(
        [sys.executable, str(environments.INSIDE / "requirements.py"), *wanted],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_requirements_of_extras_are_met_too(tmp_path):
    """As torch asks for `cuda-toolkit[cufile]`, whose libraries are requirements of the extra."""
    distribution(tmp_path, "frame", requires=["toolkit[file]>=2; python_version > '3'"])
    assert unmet(tmp_path, "frame") == ["toolkit[file]>=2"]
    distribution(tmp_path, "toolkit", "2.1", ["filelib; extra == 'file'", "other; extra == 'x'"])
    assert unmet(tmp_path, "frame") == ["filelib"]
    assert unmet(tmp_path, "toolkit[file]") == ["filelib"] and not unmet(tmp_path, "toolkit")
    distribution(tmp_path, "filelib")
    assert unmet(tmp_path, "frame", "toolkit[file]", "not-there") == []


def test_folders_that_distributions_share_are_laid_over_each_other(tmp_path):
    for folder, files in (
        ("round", ["shared/b/lib.so", "shared/same.txt", "new.py"]),
        ("place", ["shared/a/lib.so", "shared/same.txt"]),
    ):
        for file in files:
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).write_text(folder)
    environments._lay_over(tmp_path / "round", tmp_path / "place")
    found = {
        str(file.relative_to(tmp_path)): file.read_text()
        for file in tmp_path.rglob("*")
        if file.is_file()
    }
    assert found == {
        "place/shared/a/lib.so": "place",
        "place/shared/b/lib.so": "round",
        "place/shared/same.txt": "round",
        "place/new.py": "round",
    }


def test_an_edit_in_one_file_of_transformers_is_named(tmp_path):
    """Other architectures are the same bit for bit; they run on the installed release as it is."""
    pytest.importorskip("transformers")
    import transformers

    site = edited_transformers(tmp_path)
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "transformers").symlink_to(Path(transformers.__file__).parent)
    models = "mistral,bert,vit"
    result = api.upgrade(str(installed), site, tmp_path / "up", models=models)
    found = by_name(result)
    assert found["bert"].kind is found["vit"].kind is UpgradeKind.BITWISE
    mistral = found["mistral"]
    assert mistral.kind is UpgradeKind.DIFFERS
    assert mistral.place.op_type == "MistralRMSNorm"
    assert "1.001" in mistral.place.words
    assert mistral.place.second.startswith("transformers/models/mistral/modeling_mistral.py:")


def test_numbers_are_made_from_names_alone():
    assert (values.weight("a.b.weight", (3, 4)) == values.weight("a.b.weight", (3, 4))).all()
    assert (values.weight("a.b.weight", (3, 4)) != values.weight("a.c.weight", (3, 4))).any()


def test_code_that_asks_for_float32_gets_float64():
    import torch

    with widening.everything_in_float64():
        x = torch.ones(3, dtype=torch.float32)
        assert x.dtype == x.float().dtype == x.to(torch.float32).dtype == torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
    assert torch.ones(3).float().dtype == torch.float32


def test_a_configuration_is_made_small_with_each_kind_of_layer():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig()
    chosen = tiny_configs.small(config, "small")
    assert chosen["hidden_size"] == 64 and chosen["num_hidden_layers"] == 2
    gemma = transformers.Gemma2Config()
    kinds = tiny_configs.small(gemma, "small")["layer_types"]
    assert set(kinds) == set(gemma.layer_types) and len(kinds) < len(gemma.layer_types)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, ""),
        ({"generate, step 2": "b", "generate, step 3": "b"}, "differs only in `generate`, step 2"),
        ({"logits": "b", "generate, step 2": "b"}, ""),
    ],
)
def test_what_differs_in_generation_alone_is_named_with_its_step(second, words):
    first = dict.fromkeys(("logits", *(f"generate, step {n}" for n in (1, 2, 3))), "a")
    differs = Upgraded("net", UpgradeKind.DIFFERS)
    named = only_generating(differs, {"outputs": first}, {"outputs": {**first, **second}})
    assert (named.place.words if named.place else "") == words


class _Widths:
    """A configuration of two widths that have to be equal, under a name that no rule knows."""

    model_type = "widths"

    def __init__(self, hidden_size=4096, adapter_input=4096, num_attention_heads=32, spare=None):
        self.hidden_size, self.adapter_input = hidden_size, adapter_input
        self.num_attention_heads, self.spare = num_attention_heads, spare


def test_widths_that_have_to_be_equal_become_smaller_together():
    tried = []

    def failure(arguments):
        config = tiny_configs.smaller(_Widths(), arguments)
        tried.append(arguments)
        return "" if config.hidden_size == config.adapter_input else "they must be equal"

    chosen = tiny_configs.searched(_Widths(), failure)
    assert chosen["hidden_size"] == chosen["adapter_input"] == 256
    assert len(tried) < 10


def test_a_model_that_lacks_an_input_is_made_small_as_far_as_it_fails_alike():
    def failure(arguments):
        config = tiny_configs.smaller(_Widths(), arguments)
        return "no pixels" if config.hidden_size == config.adapter_input else "they must be equal"

    assert tiny_configs.searched(_Widths(), failure)["adapter_input"] == 256


def test_parts_of_a_rotation_become_as_long_as_what_they_split():
    config = _Widths(spare={"sections": [8, 12, 12]})
    error = RuntimeError(
        "split_with_sizes expects split_sizes to sum exactly to 8 (input tensor's size at "
        "dimension -1), but got split_sizes=[8, 12, 12]"
    )
    assert tiny_configs.scaled_parts(error, config)
    assert config.spare == {"sections": [2, 3, 3]}
    assert not tiny_configs.scaled_parts(RuntimeError("another"), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["detr", "qwen2_5_vl_vision", "jamba", "codegen", "depth_anything", "blip_2_qformer"],
)
def test_architectures_that_do_not_run_as_they_are_are_built(name):
    pytest.importorskip("transformers")
    from whence.workflows.upgrade.inside import transformers_models as models

    if name not in models.names():
        pytest.skip(f"this release of transformers has no {name}")
    with models.quiet():
        built = models.build(name)
        again = models.build(name, built.chosen)
    assert again.settings == built.settings
    assert {k: v.tolist() for k, v in again.inputs.items()} == {
        k: v.tolist() for k, v in built.inputs.items()
    }
