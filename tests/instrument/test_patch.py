"""A patched call returns the reference's bits and everything after it computes on; a planted fault
is taken out without a trace.
"""

import collections
import dataclasses
from random import Random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from live_torch import captured, process
from torch import nn

import warm
import whence
from whence.errors import UnreadableRun, UsageError
from whence.instrument.patch_points import FAULTS
from whence.instrument.torch import faults

pytestmark = pytest.mark.torch
Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    name: str = "out"


class Many(nn.Module):
    """Returns its input times its factor, in the container asked for."""

    def __init__(self, kind, factor):
        super().__init__()
        self.kind, self.factor = kind, factor

    def forward(self, x):
        x = x * self.factor
        kinds = {
            "tensor": x,
            "tuple": (x, x + 1),
            "list": [x, None],
            "dict": {"a": x, "b": {"c": x + 2}},
            "named": Pair(x, x + 3),
            "dataclass": Out(x),
        }
        return kinds[self.kind]


class Net(nn.Module):
    def __init__(self, kind="tensor", factor=2.0):
        super().__init__()
        self.inner = Many(kind, factor)

    def forward(self, x):
        out = self.inner(x)
        if isinstance(out, Out):
            out = out.hidden
        elif isinstance(out, dict):
            out = out["a"] + out["b"]["c"]
        elif isinstance(out, (list, tuple)):
            out = sum(t for t in out if t is not None)
        return out.tanh()


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5), nn.LayerNorm(5)
    ).eval()


def x(*shape):
    return torch.randn(*(shape or (3, 6)), generator=torch.Generator().manual_seed(1))


def notes(run, kind):
    return [n.text for n in run.notes if n.kind == kind]


def outputs(run, scope, slot="output.0"):
    return [
        run.array(r.record) for c in run.calls if c.scope == scope for r in c.refs if r.slot == slot
    ]


def test_the_call_returns_the_reference_and_the_rest_follows_from_it(tmp_path):
    model, given = net(), x()
    with torch.no_grad():
        captured(model, tmp_path / "ref", lambda m: m(given))
        model[0].weight.mul_(1.5)
        model[3].eps = 0.1
        bare = model(given)
        before = process()
        run = captured(
            model, tmp_path / "patched", lambda m: m(given), patch="2", patch_from=tmp_path / "ref"
        )
        assert process() == before
        assert torch.equal(model(given), bare)
    reference = whence.open_run(str(tmp_path / "ref"))
    (patched,) = outputs(run, "2")
    assert patched.tobytes() == outputs(reference, "2")[0].tobytes()
    # What follows, by hand in float64: the norm with the target's epsilon on the reference's
    # tensor.
    wide = patched.astype(np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(outputs(run, "3")[0], want, rtol=1e-5, atol=1e-6)
    (call,) = [c for c in run.calls if c.scope == "2"]
    assert call.notes == (f"patched from {tmp_path / 'ref'}",)
    assert notes(run, "patch") == ["2: 1 call patched"]
    assert run.info.options["patch"] == ["2"]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "named", "dataclass"])
def test_every_container_keeps_its_class(tmp_path, kind):
    with torch.no_grad():
        want = Net(kind)(x())
        captured(Net(kind), tmp_path / "ref", lambda m: m(x()))
        got = []
        captured(
            Net(kind, 5.0),
            tmp_path / "patched",
            lambda m: got.append(m(x())),
            patch="inner",
            patch_from=tmp_path / "ref",
        )
    assert torch.equal(got[0], want)


def test_one_slot_only(tmp_path):
    with torch.no_grad():
        captured(Net("dict"), tmp_path / "ref", lambda m: m(x()))
        got = []
        use = {"patch": "inner:output.b.c", "patch_from": tmp_path / "ref"}
        captured(Net("dict", 5.0), tmp_path / "patched", lambda m: got.append(m(x())), **use)
    assert torch.equal(got[0], (x() * 5.0 + (x() * 2.0 + 2)).tanh())


def test_steps_and_occurrences(tmp_path):
    shared = nn.Linear(6, 6)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = shared

        def forward(self, x):
            return self.fc(self.fc(x))

    model = Twice().eval()
    with torch.no_grad():
        captured(model, tmp_path / "ref", lambda m: [m(x()) for _ in range(3)])
        shared.weight.mul_(1.1)
        use = {"patch": "fc@1.1", "patch_from": tmp_path / "ref"}
        run = captured(model, tmp_path / "patched", lambda m: [m(x()) for _ in range(3)], **use)
    reference = whence.open_run(str(tmp_path / "ref"))
    same = [
        a.tobytes() == b.tobytes() for a, b in zip(outputs(reference, "fc"), outputs(run, "fc"))
    ]
    assert same == [False, False, False, True, False, False]


def test_another_shape_is_refused_and_the_program_goes_on(tmp_path):
    with torch.no_grad():
        captured(net(8), tmp_path / "ref", lambda m: m(x()))
        wide = net(9)
        want, got = wide(x()), []
        run = captured(
            wide,
            tmp_path / "patched",
            lambda m: got.append(m(x())),
            patch="1",
            patch_from=tmp_path / "ref",
        )
    assert torch.equal(got[0], want)
    assert notes(run, "patch-refused") == [
        "1 at step 0 was not patched: output.0 has shape [3, 8] in the reference and [3, 9] here"
    ]
    result = whence.compare(tmp_path / "ref", tmp_path / "patched")
    assert any("was not patched" in n for n in result.notes)


def test_a_call_the_reference_has_not_and_elements_it_did_not_keep(tmp_path):
    model = net()
    with torch.no_grad():
        captured(model, tmp_path / "ref", lambda m: m(x()))
        captured(model, tmp_path / "stats", lambda m: m(x()), keep="stats")
        run = captured(
            model,
            tmp_path / "more",
            lambda m: [m(x()), m(x())],
            patch="0",
            patch_from=tmp_path / "ref",
        )
        empty = captured(
            model, tmp_path / "none", lambda m: m(x()), patch="0", patch_from=tmp_path / "stats"
        )
    assert notes(run, "patch-refused") == [
        "0 at step 1 was not patched: the reference has no call of this step and occurrence"
    ]
    assert "statistics only" in notes(empty, "patch-refused")[0]


def test_a_target_in_another_dtype_gets_the_rounded_reference(tmp_path):
    with torch.no_grad():
        captured(net(), tmp_path / "ref", lambda m: m(x()))
        use = {"patch": "2", "patch_from": tmp_path / "ref"}
        run = captured(net().bfloat16(), tmp_path / "patched", lambda m: m(x().bfloat16()), **use)
    want = torch.from_numpy(
        outputs(whence.open_run(str(tmp_path / "ref")), "2")[0].copy()
    ).bfloat16()
    assert outputs(run, "2")[0].tobytes() == want.view(torch.int16).numpy().tobytes()


def test_gradients_flow_through_a_patched_call(tmp_path):
    model = net()
    captured(model, tmp_path / "ref", lambda m: m(x()))
    with torch.no_grad():
        model[2].weight.mul_(1.5)
    captured(
        model,
        tmp_path / "patched",
        lambda m: m(x()).square().sum().backward(),
        patch="0",
        patch_from=tmp_path / "ref",
    )
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model(
        x()
    ).square().sum().backward()  # the first layer is the reference's own, so nothing was different
    assert torch.equal(got, model[0].weight.grad)


def test_a_cache_is_not_replaced_and_the_run_says_so(tmp_path):
    class Cache:
        def __init__(self):
            self.held = torch.zeros(1)

    class Cached(nn.Module):
        def forward(self, x, cache):
            cache.held = cache.held + x.sum()
            return x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Cached()

        def forward(self, x, cache):
            return self.inner(x, cache) + cache.held

    with torch.no_grad():
        captured(Outer(), tmp_path / "ref", lambda m: m(x(), Cache()))
        run = captured(
            Outer(),
            tmp_path / "patched",
            lambda m: m(x(), Cache()),
            patch="inner",
            patch_from=tmp_path / "ref",
        )
    assert (
        notes(run, "patch")[0]
        == "inner: what it changes in place (a cache, a buffer) is not replaced, only what it "
        "returns"
    )


def test_with_a_selection_the_call_is_patched_all_the_same(tmp_path):
    model = net()
    with torch.no_grad():
        want = model(x())
        captured(model, tmp_path / "ref", lambda m: m(x()))
        model[0].weight.mul_(2)
        use = {"patch": "0", "patch_from": tmp_path / "ref", "max_depth": 0}
        run = captured(model, tmp_path / "patched", lambda m: m(x()), **use)
    assert outputs(run, "")[0].tobytes() == want.numpy().tobytes()


def test_what_cannot_be_meant_is_said_before_anything_is_written(tmp_path):
    with torch.no_grad():
        captured(net(), tmp_path / "ref", lambda m: m(x()))
    for given, error, said in (
        ({"patch": "7", "patch_from": tmp_path / "ref"}, UsageError, "no output of a call 7"),
        ({"patch": "0", "patch_from": tmp_path / "nowhere"}, UnreadableRun, "no run at"),
    ):
        with pytest.raises(error, match=said), whence.capture(net(), tmp_path / "new", **given):
            pytest.fail("entered")
    assert not (tmp_path / "new").exists()
    with (
        pytest.raises(UsageError, match="is the run that is to be written"),
        whence.capture(net(), tmp_path / "ref", patch="0", patch_from=tmp_path / "ref", force=True),
    ):
        pytest.fail("entered")
    assert outputs(whence.open_run(str(tmp_path / "ref")), "0")


def test_a_patched_call_and_what_it_calls_are_declared(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), nn.Linear(6, 6)).eval()
    with torch.no_grad():
        captured(model, tmp_path / "ref", lambda m: m(x()))
        model[0][0].weight.mul_(1.5)
        captured(model, tmp_path / "bad", lambda m: m(x()))
        captured(
            model, tmp_path / "patched", lambda m: m(x()), patch="0", patch_from=tmp_path / "ref"
        )
    assert [f.name for f in whence.compare(tmp_path / "ref", tmp_path / "bad").findings] == ["0.0"]
    result = whence.compare(tmp_path / "ref", tmp_path / "patched")
    assert (result.status, result.findings) == ("same", ())
    assert result.counts["declared"] >= 1
    assert any(n.startswith("target: patched with outputs of") for n in result.notes)


# ---- faults

SITES = {"eps": 3, "weight": 0, "row": 0, "bias": 2}


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "drop-residual"])
def test_a_fault_is_captured_named_and_taken_out(tmp_path, fault):
    model = net(32)
    site = str(SITES.get(fault, 2))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    given = x(16, 6)
    with torch.no_grad():
        clean = model(given)
        captured(model, tmp_path / "ref", lambda m: m(given))
        run = captured(model, tmp_path / "bad", lambda m: m(given), inject=f"{fault}@{site}")
        assert torch.equal(model(given), clean)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    assert not any("forward" in vars(m) for m in model.modules())
    assert model[3].eps == 1e-5
    assert notes(run, "fault")[0].startswith(f"{fault} planted in {site}: ")
    result = whence.compare(tmp_path / "ref", tmp_path / "bad")
    assert (result.status, result.findings[0].name) == ("different", site)
    assert f"target: a fault was planted in it: {fault}@{site}" in result.notes


@pytest.mark.parametrize(
    ("fault", "strength", "oracle"),
    [
        ("scale", None, lambda y, b: y * 1.01),
        ("scale", 3.0, lambda y, b: y * 3),
        ("bias", None, lambda y, b: y - b.reshape(-1, 1, 1)),
        ("bias", 0.25, lambda y, b: y - 0.75 * b.reshape(-1, 1, 1)),
        ("constant", None, lambda y, b: y + 0.01 * np.sqrt((y**2).mean())),
        ("stale", None, lambda y, b: np.concatenate([y[..., :-1], y[..., -2:-1]], -1)),
    ],
)
def test_what_a_fault_does_to_the_output(fault, strength, oracle):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1)
    given = x(2, 3, 8, 8)
    with torch.no_grad():
        clean = conv(given).double().numpy()
        with faults.planted(nn.Sequential(conv), "0", fault, strength, Random(0)):
            got = conv(given).double().numpy()
    np.testing.assert_allclose(
        got, oracle(clean, conv.bias.detach().double().numpy()), rtol=1e-5, atol=1e-6
    )


def test_a_channel_of_a_convolution_is_axis_one():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    with torch.no_grad(), faults.planted(nn.Sequential(conv), "0", "channel", None, Random(0)):
        zero = (conv(x(2, 3, 8, 8)) == 0).all(dim=(0, 2, 3))
    assert zero.sum() == 1


class Attention(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Block(nn.Module):
    """A pre-norm block, its branches linear."""

    def __init__(self):
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(6), nn.LayerNorm(6)
        self.attention, self.mlp = Attention(6, 6), nn.Linear(6, 6)

    def forward(self, x, mask):
        x = x + self.attention(self.input_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("eps", ["1", "3.input_norm", "3.mlp_norm"]),
        ("bias", ["0", "3.attention", "3.mlp"]),
        ("weight", ["0", "2", "3.attention", "3.mlp"]),
        ("drop-residual", ["3"]),
    ],
)
def test_a_fault_has_its_places_in_the_models_order(fault, expected):
    plain = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), plain, Block(), nn.ReLU())
    assert faults.sites(model, fault) == expected
    tied = nn.Sequential(plain, nn.Sequential(plain, nn.Linear(6, 6)))
    tied[1][1].weight = plain.weight
    assert faults.sites(tied, "weight") == [], "a weight that two modules hold has two names"


@pytest.mark.parametrize("strength", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(4))
def test_a_branch_is_left_out_of_the_residual_sum_or_weakened(strength, seed):
    torch.manual_seed(3)
    block = Block().double()
    x, mask = torch.randn(4, 6).double(), torch.full((1,), 0.5).double()
    weakened = Random(seed).choice(("attention", "mlp"))
    by = {"attention": 1.0, "mlp": 1.0, weakened: strength}
    with torch.no_grad():
        attended = x + by["attention"] * block.attention(block.input_norm(x), mask)
        expected = attended + by["mlp"] * block.mlp(block.mlp_norm(attended))
        with faults.planted(
            nn.Sequential(block), "0", "drop-residual", strength, Random(seed)
        ) as words:
            torch.testing.assert_close(block(x, mask), expected)
    what = "left out of" if strength == 0 else "times 0.25 in"
    assert words == f"the {weakened} branch {what} the residual sum, between the modules"
    assert "forward" not in vars(block)


def test_a_fault_without_a_place_is_told(tmp_path):
    model = net()
    with torch.no_grad():
        for inject, said in (
            ("eps@0", "eps was not planted: Linear has no epsilon"),
            ("bias@1", "bias was not planted: ReLU has no bias"),
            ("weight@1", "weight was not planted: ReLU has no weight matrix"),
            ("scale@nowhere", "scale was not planted: no module nowhere was called"),
        ):
            run = captured(
                model, tmp_path / inject.partition("@")[0], lambda m: m(x()), inject=inject
            )
            assert notes(run, "fault-refused") == [said]


def test_a_forked_child_has_the_fault_once(tmp_path):
    """The child captures into a folder of its own and plants anew: the parent's fault must not be
    under it.
    """
    import subprocess

    script = tmp_path / "fork.py"
    script.write_text(
        "import os, torch\n"
        "torch.set_num_threads(1)\n"
        "m, x = torch.nn.Sequential(torch.nn.Identity()), torch.ones(4)\n"
        "with torch.no_grad():\n"
        "    m(x)\n"
        "    if (pid := os.fork()) == 0:\n"
        "        print(m(x)[0].item(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    line = [
        warm.TORCH,
        "-m",
        "whence",
        "run",
        "-o",
        str(tmp_path / "run"),
        "--inject",
        "scale@0=3",
        "--",
        warm.TORCH,
        str(script),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
