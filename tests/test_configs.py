"""Files that a user writes: nesting, numbers and aliases beyond measure end in one sentence."""

import numpy as np
import pytest

from whence import config_files
from whence.cli import execute

LONG = "9" * 1_000_000
BOMB = "a0: &a0 [x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
YAML = {
    "deep": "[" * 100_000,
    "deep maps": "\n".join(" " * i + "a:" for i in range(2000)),
    "number": f"allow: {LONG}",
    "bomb": BOMB,
    "part of itself": "allow: &a [*a]",
    "date": "allow: 2026-13-45",
    "bool": "allow: !!bool maybe",
    "time": "allow: !!timestamp never",
    "base 60": "allow: 1" + ":59" * 100_000,
    "float": f"allow: 1.{LONG}",
    "hexadecimal": "allow: 0x" + "f" * 4000,
    "object": "!!python/object/apply:os.getcwd []",
    "control": "\0",
}
TOML = {
    "deep": "a = " + "[" * 100_000,
    "number": f"a = {LONG}",
    "hexadecimal": "a = [{b = 0x" + "f" * 4000 + "}]",
    "keys": ".".join("a" * 20_000) + " = 1",
    "table": "[" + ".".join("a" * 9_000) + "]",
    "inline": "a = " + "{b = " * 5000,
    "date": "a = 2026-13-45",
}


@pytest.mark.parametrize("what", YAML)
def test_yaml_beyond_measure_is_refused(what):
    with pytest.raises(config_files.NotConfig) as refused:
        config_files.yaml_value(YAML[what])
    assert 3 < len(str(refused.value)) < 400


@pytest.mark.parametrize("what", TOML)
def test_toml_beyond_measure_is_refused(what):
    with pytest.raises(config_files.NotConfig) as refused:
        config_files.toml_value(TOML[what])
    assert 3 < len(str(refused.value)) < 400


def test_what_people_write_is_read():
    text = "a: 1\nb: [x, 2.5, true, null]\nc: &c {d: 2026-01-02}\ne: *c\n"
    value = config_files.yaml_value(text)
    assert (value["a"], value["b"], value["e"]) == (1, ["x", 2.5, True, None], value["c"])
    assert config_files.yaml_value("") is None
    assert config_files.toml_value('a.b.c = 1\n"x.y" = "' + "." * 500 + '"\n') == {
        "a": {"b": {"c": 1}},
        "x.y": "." * 500,
    }


@pytest.mark.parametrize(
    ("option", "name"), [("--map", "m.yaml"), ("--policy", "p.yaml"), ("--policy", "p.toml")]
)
def test_the_command_says_so_and_ends_with_3(option, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.ones(3))
    for text in (TOML if name.endswith("toml") else YAML).values():
        (tmp_path / name).write_text(text)
        assert execute(["compare", "a.npy", "a.npy", option, name]) == 3
        said = capsys.readouterr().err
        assert name in said and "unexpected" not in said and len(said) < 500


def test_json_beyond_measure_is_no_comparison(tmp_path, capsys):
    for text in ('{"a":' * 100_000, "[" * 100_000, f'{{"a": {LONG}}}'):
        (tmp_path / "report.json").write_text(text)
        assert execute(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 3
        assert "is not a comparison that this whence can read" in capsys.readouterr().err
