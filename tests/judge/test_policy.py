"""Policy files: what they may say, what they are told when they say it wrongly, and what they
select.
"""

import pytest

from whence.errors import UsageError
from whence.judge import policy
from whence.judge.policy import Scheme, load, parse

TOML = """
[[allow]]
module = "model.layers.*.mlp.*"
op = ["Linear", "/Q.*/"]
declare = "quantisation"
weights = { bits = 4, per = "group", group = 32, symmetric = false }
activations = { bits = 8, per = "token" }
min_sqnr = 20
why = "shipped so"

[[allow]]
op = "GELU"
declare = "fast-gelu"
"""
YAML = """
allow:
  - {module: model.layers.*.mlp.*, op: [Linear, /Q.*/], declare: quantisation, min_sqnr: 20, why: shipped so,
     weights: {bits: 4, per: group, group: 32, symmetric: false}, activations: {bits: 8, per: token}}
  - {op: GELU, declare: fast-gelu}
"""


def test_toml_and_yaml_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yaml").write_text(YAML)
    one, two = load(tmp_path / "a.toml"), load(tmp_path / "a.yaml")
    assert one.entries == two.entries
    entry = one.entries[0]
    assert entry.weights == Scheme(4, "group", 0, 32, False)
    assert (
        str(entry)
        == "quantisation (weights int4 per group of 32 asymmetric, activations dynamic int8 per "
        "token)"
    )


def test_selection():
    entries = load_text(YAML).entries
    assert entries[0].covers("model.layers.11.mlp.up_proj", ("Linear",))
    assert entries[0].covers("model.layers.11.mlp.up_proj", ("Other", "QLinear"))
    assert not entries[0].covers("model.layers.11.self_attn.q_proj", ("Linear",))
    assert not entries[0].covers("model.layers.11.mlp.act", ("SiLU",))
    slots = parse(
        {"allow": [{"op": "X", "slot": "output.1", "declare": "tolerance", "rel_l2": 0.1}]}
    ).entries[0]
    assert slots.covers_slot("output.1")
    assert not slots.covers_slot("output.0")


def load_text(text):
    import yaml

    return parse(yaml.safe_load(text))


def test_kinds_add_up_and_the_last_of_a_kind_counts():
    found = load_text(
        "allow: [{op: '*', declare: tf32}, {op: L, declare: tolerance, rel_l2: 1}, {op: L, "
        "declare: tolerance, rel_l2: 2}]"
    )
    of = found.of("x", ("L",))
    assert (set(of), of["tolerance"].number) == ({"tf32", "tolerance"}, 3)


INT8 = {"op": "Linear", "declare": "quantisation", "weights": {"bits": 8}}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"op": "Linear"}, "says nothing to declare; what can be declared: quantisation, tf32"),
        ({"op": "Linear", "declare": "quantization"}, "did you mean quantisation?"),
        ({**INT8, "modul": "x"}, "unknown key 'modul'; known: module, op, slot, declare"),
        ({**INT8, "weights": {"bit": 8}}, "unknown key 'bit'; known: bits, per"),
        ({**INT8, "weights": {"bits": 9}}, "a whole number from 2 to 8"),
        ({**INT8, "weights": {"bits": True}}, "a whole number from 2 to 8"),
        ({**INT8, "weights": {"per": "row"}}, "one of tensor, channel, group"),
        ({**INT8, "weights": {"per": "group"}}, "needs its size"),
        ({**INT8, "weights": {"group": 32}}, 'group is for per = "group"'),
        ({**INT8, "weights": {"format": "e4m3", "bits": 4}}, "8 for e4m3"),
        ({**INT8, "weights": "none"}, "say weights, activations or both"),
        ({**INT8, "weights": 8}, "must be a table"),
        ({**INT8, "activations": {"mode": "fast"}}, "one of none, static, dynamic"),
        ({"declare": "tf32"}, "selects every call"),
        ({"op": "/(/", "declare": "tf32"}, "is not a regular expression"),
        ({"op": 3, "declare": "tf32"}, "must be a pattern"),
        ({"op": "", "declare": "tf32"}, "must be a pattern"),
        ({"op": ["mm", ""], "declare": "tf32"}, "must be a pattern"),
        ({"op": "x", "declare": "tf32", "rtol": 1}, "unknown key 'rtol'"),
        ({"op": "x", "declare": "tolerance"}, "say one of rel_l2, rtol with atol, or ignore"),
        ({"op": "x", "declare": "tolerance", "rel_l2": 1, "rtol": 1}, "it says rel_l2, rtol, atol"),
        ({"op": "x", "declare": "tolerance", "rel_l2": -1}, "a number of at least 0"),
        ({"op": "x", "declare": "tolerance", "ignore": False}, "ignore = false declares nothing"),
        ({"op": "x", "declare": "fast-gelu", "form": "relu"}, "one of tanh, erf, sigmoid"),
        ({**INT8, "min_sqnr": "high"}, "a finite number"),
        ("x", "is not a table"),
    ],
)
def test_what_is_wrong_is_said(entry, said):
    with pytest.raises(UsageError) as error:
        parse({"allow": [entry]}, path="p.toml")
    assert said in str(error.value)
    assert str(error.value).startswith("p.toml: entry 1")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.json", "{}", "ends in .toml, .yaml or .yml"),
        ("p.toml", "allow = ", "not TOML"),
        ("p.yaml", "allow: [", "not YAML"),
        ("p.yaml", "[1]", "is a table with a list"),
        ("p.yaml", "allow: []", "hold at least one"),
        ("p.yaml", "deny: []", "unknown key 'deny'; known: allow"),
        ("missing.toml", None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_policy(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        load(tmp_path / name)


def test_yaml_runs_nothing(tmp_path):
    (tmp_path / "p.yaml").write_text("allow: !!python/object/apply:os.getcwd []")
    with pytest.raises(UsageError, match="not YAML"):
        load(tmp_path / "p.yaml")


def test_every_entry_must_select_something():
    made = parse({"allow": [INT8, {"op": "Gelu", "declare": "fast-gelu"}]})
    with pytest.raises(
        UsageError, match=r"entry 2 \(fast-gelu\) matches no call(.|\n)*did you mean GELU\?"
    ):
        made.check([("fc", ("Linear",)), ("act", ("GELU",))])
    made = parse({"allow": [INT8, {"op": "GELU", "declare": "fast-gelu"}]})
    made.check([("fc", ("Linear",)), ("act", ("GELU",))])


def test_every_kind_has_its_keys():
    assert set(policy._OWN) == set(policy.KINDS)
