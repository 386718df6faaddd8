"""A renamed target, compared: what is wrong in it is named as if it had the same names."""

import copy
import json

import pytest
import torch
from torch import nn

import whence
from whence.cli import execute
from whence.errors import UsageError
from whence.report.answer import answer

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Zweig(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.runter, self.knick, self.rauf, self.mitte = block.down, block.act, block.up, block.norm

    def forward(self, x):
        return x + self.runter(self.knick(self.rauf(self.mitte(x))))


class Baum(nn.Module):
    """The same model: every name is another, attributes stand in another order."""

    def __init__(self, model):
        super().__init__()
        self.krone, self.zweige = model.head, nn.ModuleList(Zweig(b) for b in model.layers)

    def forward(self, x):
        for zweig in self.zweige:
            x = zweig(x)
        return self.krone(x)


def captured(model, path):
    torch.set_num_threads(1)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), whence.capture(model.eval(), path):
        model(x)
    return str(path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for layer in model.layers:
            layer.act.approximate = "none"
    return model, captured(model, tmp_path_factory.mktemp("match") / "ref")


def test_a_renamed_model_is_the_same(reference, tmp_path):
    model, ref = reference
    result = whence.compare(ref, captured(Baum(copy.deepcopy(model)), tmp_path / "tgt"))
    assert (result.status, result.counts) == ("same", {"identical": 32})
    assert {row.rule for row in result.rows} == {"normalised name", "order"}


@pytest.mark.parametrize(
    ("plant", "name", "cause"),
    [
        (lambda m: m.zweige[3].rauf.weight.data.mul_(1.01), "layers.3.up", "parameter"),
        (lambda m: setattr(m.zweige[2].knick, "approximate", "tanh"), "layers.2.act", "semantic"),
        (lambda m: setattr(m.zweige[4].mitte, "eps", 1e-2), "layers.4.norm", "semantic"),
    ],
    ids=["weight", "gelu", "eps"],
)
def test_a_fault_in_a_renamed_model_is_named_first(reference, tmp_path, plant, name, cause):
    model, ref = reference
    target = Baum(copy.deepcopy(model))
    plant(target)
    result = whence.compare(ref, captured(target, tmp_path / "tgt"))
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].cause) == (name, cause)


def test_layers_in_another_order_are_not_paired_into_agreement(reference, tmp_path):
    model, ref = reference
    target = Baum(copy.deepcopy(model))
    target.zweige.insert(4, target.zweige.pop(1))
    result = whence.compare(ref, captured(target, tmp_path / "tgt"))
    assert (result.status, len(result.plan.pairs)) == ("different", 32)
    assert {f.name for f in result.findings} == {"Model"}  # whose code calls them in this order


def test_exact_pairs_nothing_here_and_says_what_comes_nearest(reference, tmp_path, capsys):
    model, ref = reference
    target = captured(Baum(copy.deepcopy(model)), tmp_path / "tgt")
    result = whence.compare(ref, target, match="exact")
    assert (result.status, result.coverage.paired) == ("undecided", 0)
    near = {n.name: (n.candidate, n.why) for n in result.nearest}
    assert near["layers.2.down"][0] == "zweige.2.runter"
    assert "parameters equal (528 elements)" in near["layers.2.down"][1]
    assert "nearest" in answer(result)
    code = execute(
        [
            "compare",
            ref,
            target,
            "--match",
            "exact",
            "--format",
            "json",
            "-o",
            str(tmp_path / "cmp"),
        ]
    )
    out = capsys.readouterr().out
    assert code == 2
    assert json.loads(out)["nearest"][0]["side"] == "reference"


def test_line_by_line_from_the_command_line(reference, tmp_path, capsys):
    model, ref = reference
    target = captured(Baum(copy.deepcopy(model)), tmp_path / "tgt")
    assert execute(["compare", ref, target, "--match", "order", "-o", str(tmp_path / "cmp")]) == 0
    short = copy.deepcopy(model)
    del short.layers[5]
    assert (
        execute(
            [
                "compare",
                ref,
                captured(short, tmp_path / "short"),
                "--match",
                "order",
                "-o",
                str(tmp_path / "cmp2"),
            ]
        )
        == 3
    )
    assert "line 26 disagrees (32 calls against 27)" in capsys.readouterr().err


def test_another_word_is_refused(reference):
    with pytest.raises(UsageError, match="match 'fuzzy': auto, exact, names or order"):
        whence.compare(reference[1], reference[1], match="fuzzy")


class Attention(torch.nn.Module):
    """Three projections of one input, square. other: under other names, and run the other way
    round.
    """

    def __init__(self, other):
        super().__init__()
        torch.manual_seed(0)
        q, k, v, out = (torch.nn.Linear(32, 32) for _ in range(4))
        self.other = other
        if other:
            self.gamma, self.beta, self.alpha, self.mix = v, k, q, out
        else:
            self.q, self.k, self.v, self.out = q, k, v, out

    def forward(self, x):
        if self.other:
            v, k, q, out = self.gamma(x), self.beta(x), self.alpha(x), self.mix
        else:
            q, k, v, out = self.q(x), self.k(x), self.v(x), self.out
        return out((q @ k.mT / 6).softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_siblings_in_another_order_and_dtype_are_told_by_their_parameters(tmp_path, dtype):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    for name, model, given in (
        ("a", Attention(False), x),
        ("b", Attention(True).to(dtype), x.to(dtype)),
    ):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(given)
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert (result.status, result.findings) == ("same", ())
    faces = {row.name: row.rule for row in result.rows}
    assert [faces[n] for n in "qkv"] == ["content"] * 3 or faces["k"] == "order"
