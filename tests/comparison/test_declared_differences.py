"""Declared differences and quantised targets, from live models to the answer."""

import importlib.util
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence import api
from whence.cli import execute
from whence.comparison.verdicts.declared.tolerances import allows
from whence.errors import UsageError
from whence.judge.policy import Entry, parse
from whence.report.answer import answer
from whence.report.summary import summary_data

pytestmark = pytest.mark.torch


class Int8Linear(nn.Module):
    """Weights in int8, one scale a row; the product in the activation's dtype, as written by hand a
    thousand times.
    """

    def __init__(self, linear, bits=8):
        super().__init__()
        top = 2 ** (bits - 1) - 1
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / top
        self.register_buffer("weight", torch.round(linear.weight.detach() / scale).to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


class Dynamic(Int8Linear):
    """Activations in int8 too, a scale for each token."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(x / scale).clamp(-128, 127)
        return (
            nn.functional.linear(codes, self.weight.to(x.dtype)) * scale * self.weight_scale[:, 0]
            + self.bias
        )


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 48), nn.Linear(48, 32)]
    return nn.Sequential(*layers).eval()


def quantised(m, kind=Int8Linear, **given):
    for name, child in list(m.named_children()):
        if isinstance(child, nn.Linear):
            setattr(m, name, kind(child, **given))
    return m


def run(m, place, x=None):
    torch.set_num_threads(1)
    x = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(1)) if x is None else x
    with torch.no_grad(), whence.capture(m, place):
        m(x)
    return place


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(model(), tmp_path_factory.mktemp("runs") / "ref")


@pytest.fixture
def compared(reference, tmp_path):
    number = itertools.count()

    def compare(target, policy=None, **given):
        place = run(target, tmp_path / f"tgt{next(number)}")
        return whence.compare(
            reference, place, policy=parse(policy) if isinstance(policy, dict) else policy, **given
        )

    return compare


def allow(*entries):
    return {"allow": [*entries]}


INT8 = {"op": "Linear", "declare": "quantisation", "weights": {"bits": 8, "per": "channel"}}
W8A8 = {**INT8, "activations": {"bits": 8, "per": "token"}}


def change(m, name, f):
    with torch.no_grad():
        f(dict(m.named_buffers())[name])
    return m


# ---- quantised layers


def test_declared_and_right_is_silent_with_its_sqnr(compared, reference):
    result = compared(quantised(model()), allow(INT8))
    assert (result.status, result.findings, result.counts["declared"]) == ("same", (), 3)
    (said,) = result.declared
    assert (said.declared, said.calls, said.names) == (True, 3, ("0", "3", "4"))
    losses = {v.numbers["sqnr_db"] for v in result.verdicts if v.verdict == "declared"}
    assert min(losses) == said.sqnr_db
    # Oracle: the first layer's loss, in float64 by hand.
    m, x = model(), torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(1)).double()
    right = nn.functional.linear(x, m[0].weight.double(), m[0].bias.double())
    made = Int8Linear(m[0])(x.float()).double()
    by_hand = 10 * torch.log10((right**2).sum() / ((right - made) ** 2).sum()).detach()
    first = next(v for v in result.verdicts if v.verdict == "declared")
    assert first.numbers["sqnr_db"] == pytest.approx(float(by_hand), abs=0.01)
    text = answer(result)
    assert (
        "DECLARED           3 Linear calls, quantisation (weights int8 per channel): SQNR from "
        f"{said.sqnr_db:.1f} dB" in text
    )


def test_undeclared_is_one_statement_and_its_snippet_declares_it(compared, tmp_path):
    target = quantised(model(), Dynamic)
    result = compared(target)
    assert (result.status, result.findings, result.counts["precision"]) == ("same", (), 3)
    (said,) = result.declared
    assert said.what == "weights int8 per channel, activations dynamic int8 per token"
    assert not said.declared
    assert "PRECISION LOSS     3 quantised Linear layers, not declared" in answer(result)
    policy = tmp_path / "policy.yaml"
    policy.write_text(said.snippet)
    again = whence.compare(result.reference, result.target, policy=policy)
    assert (again.status, again.counts["declared"], again.declared[0].sqnr_db) == (
        "same",
        3,
        said.sqnr_db,
    )
    assert whence.compare(result.reference, result.target, strict=True).status == "different"


@pytest.mark.parametrize("policy", [None, allow(INT8)])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda s: s.mul_(1.02), "scale x1.02 in the whole tensor"),
        (lambda s: s[7].mul_(0.98), "scale x0.98 in row 7"),
        (lambda s: s.copy_(s.roll(1, 0)), "scales shifted by +1 channel"),
    ],
)
def test_a_wrong_scale_is_named(compared, policy, fault, words):
    result = compared(change(quantised(model()), "3.weight_scale", fault), policy)
    assert (result.status, result.findings[0].name, result.findings[0].verdict) == (
        "different",
        "3",
        "param-diff",
    )
    assert words in result.findings[0].sentence
    assert len(result.findings) == 1


def test_a_wrong_code_is_named(compared):
    result = compared(
        change(quantised(model()), "4.weight", lambda w: w[3, 5].add_(2)), allow(INT8)
    )
    assert result.findings[0].name == "4"
    assert "1 of 1536 codes" in result.findings[0].sentence
    assert "[3, 5]" in result.findings[0].sentence


def test_faults_of_other_operators_are_still_named(compared):
    target = quantised(model(), Dynamic)
    target[2].eps = 1e-2
    result = compared(target, allow(W8A8))
    assert (result.status, [f.name for f in result.findings], result.counts["declared"]) == (
        "different",
        ["2"],
        3,
    )


def test_a_wrong_kernel_under_right_weights_is_named(compared):
    class Off(Int8Linear):
        def forward(self, x):
            return super().forward(x) * 1.001

    target = quantised(model())
    target[3] = Off(model()[3])
    result = compared(target, allow(INT8))
    assert (result.findings[0].name, result.findings[0].verdict) == ("3", "introduced")
    assert (
        "beyond what is declared (quantisation (weights int8 per channel))"
        in result.findings[0].sentence
    )


def test_another_scheme_than_the_declared_one_is_a_difference(compared):
    result = compared(quantised(model()), allow({**INT8, "weights": {"bits": 4}}))
    assert "has codes of 8 bits, declared are 4" in result.findings[0].sentence
    result = compared(
        quantised(model(), bits=4), allow({**INT8, "weights": {"per": "group", "group": 16}})
    )
    assert "declared are scales per group of 16" in result.findings[0].sentence


def test_undeclared_activations_are_not_explained_by_declared_weights(compared):
    result = compared(quantised(model(), Dynamic), allow(INT8))
    assert result.status == "different"
    assert {f.verdict for f in result.findings} == {"introduced"}


def test_weights_that_only_lie_on_a_grid(compared):
    """Fake quantisation: the target keeps floats. Silent when declared, one statement when not, a 2
    % scale is named.
    """

    def target(factor=1.0):
        m = model()
        for layer in (m[0], m[3], m[4]):
            with torch.no_grad():
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                layer.weight.copy_(
                    torch.round(layer.weight / scale) * scale * (factor if layer is m[3] else 1.0)
                )
        return m

    assert compared(target(), allow(INT8)).counts["declared"] == 3
    said = compared(target()).declared[0]
    assert (said.what, said.declared) == ("weights int8 per channel", False)
    for policy in (allow(INT8), None):
        found = compared(target(1.02), policy).findings
        assert [f.name for f in found] == ["3"]
        assert "scale x1.02 in the whole tensor" in found[0].sentence


def test_weights_that_the_target_does_not_show(compared):
    class Hidden(nn.Module):
        def __init__(self, linear, factor=1.0):
            super().__init__()
            self.inner, self.bias = [Int8Linear(linear), factor], linear.bias

        def forward(self, x):
            weight = self.inner[0].weight.to(x.dtype) * self.inner[0].weight_scale * self.inner[1]
            return nn.functional.linear(x, weight, self.bias)

    def target(factor):
        m = model()
        m[3] = Hidden(m[3], factor)
        return m

    entry = {**INT8, "module": "3"}
    assert compared(target(1.0), allow(entry)).counts["declared"] == 1
    wrong = compared(target(1.02), allow(entry))
    assert (wrong.status, wrong.findings[0].name, wrong.findings[0].verdict) == (
        "different",
        "3",
        "introduced",
    )


@pytest.mark.parametrize("shown", [True, False])
def test_static_activations(compared, shown):
    class Static(Int8Linear):
        def __init__(self, linear, factor=1.0):
            super().__init__(linear)
            self.factor = factor
            if shown:
                self.register_buffer("input_scale", torch.tensor(0.03))

        def forward(self, x):
            codes = torch.round(x / 0.03).clamp(-128, 127)
            return nn.functional.linear(
                codes * (0.03 * self.factor), self.weight.to(x.dtype) * self.weight_scale, self.bias
            )

    activations = {"mode": "static"} if shown else {"mode": "static", "scale": 0.03}
    entry = {**INT8, "module": "4", "activations": activations}
    right, wrong = model(), model()
    right[4], wrong[4] = Static(right[4]), Static(wrong[4], 1.02)
    assert compared(right, allow(entry)).counts["declared"] == 1
    assert [f.name for f in compared(wrong, allow(entry)).findings] == ["4"]


def test_a_least_sqnr_is_held(compared):
    target = quantised(model(), bits=4)
    result = compared(target, allow({**INT8, "weights": {"bits": 4}, "min_sqnr": 40}))
    assert result.status == "different"
    assert "with an SQNR of at least 40 dB; it is" in result.findings[0].sentence
    assert (
        compared(target, allow({**INT8, "weights": {"bits": 4}, "min_sqnr": 10})).status == "same"
    )


def test_without_replay_the_weights_are_checked_and_the_loss_is_the_band(compared):
    assert compared(quantised(model()), allow(INT8), replay=False).status == "same"
    wrong = compared(
        change(quantised(model()), "3.weight_scale", lambda s: s.mul_(1.02)),
        allow(INT8),
        replay=False,
    )
    assert "scale x1.02" in wrong.findings[0].sentence


@pytest.mark.parametrize("same_precision", [True, False])
def test_bfloat16(tmp_path, same_precision):
    class Half(Int8Linear):
        def forward(self, x):
            return (
                nn.functional.linear(x, self.weight.to(x.dtype)) * self.weight_scale[:, 0]
                + self.bias
            )

    x = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    reference = (
        run(model().bfloat16(), tmp_path / "a", x)
        if same_precision
        else run(model(), tmp_path / "a", x.float())
    )
    target = run(quantised(model().bfloat16(), Half), tmp_path / "b", x)
    result = whence.compare(reference, target, policy=parse(allow(INT8)))
    assert (result.status, result.counts["declared"]) == ("same", 3)
    broken = quantised(model().bfloat16(), Half)
    change(broken, "3.weight_scale", lambda s: s.mul_(1.03))
    wrong = whence.compare(reference, run(broken, tmp_path / "c", x), policy=parse(allow(INT8)))
    assert [(f.name, f.verdict) for f in wrong.findings] == [("3", "param-diff")]


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "what"),
    [
        (lambda q: q.Int8WeightOnlyConfig(), "weights int8 per channel"),
        (
            lambda q: q.Int8DynamicActivationInt8WeightConfig(),
            "weights int8 per channel, activations dynamic int8 per token",
        ),
        (
            lambda q: q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(16)),
            "weights int4 per group of 16",
        ),
        (
            lambda q: q.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=torch.int4, weight_granularity=q.PerGroup(16)
            ),
            "weights int4 per group of 16, activations dynamic int8 per token asymmetric",
        ),
        (lambda q: q.Float8WeightOnlyConfig(), "weights float8 e4m3 per channel"),
    ],
)
def test_torchao(compared, config, what, tmp_path):
    import torchao.quantization as q

    target = model()
    q.quantize_(target, config(q))
    result = compared(target)
    assert (result.status, [d.what for d in result.declared]) == ("same", [what])
    policy = tmp_path / "policy.yaml"
    policy.write_text(result.declared[0].snippet)
    assert whence.compare(result.reference, result.target, policy=policy).counts["declared"] == 3
    broken = model()
    q.quantize_(broken, config(q))
    with torch.no_grad():
        broken[3].weight.scale.mul_(1.02)
    found = compared(broken, policy).findings
    assert [f.name for f in found] == ["3"]
    assert "scale x1.02 in the whole tensor" in found[0].sentence


@pytest.mark.skipif(
    not importlib.util.find_spec("optimum") or not importlib.util.find_spec("optimum.quanto"),
    reason="no quanto",
)
@pytest.mark.filterwarnings("ignore")
def test_quanto(compared):
    from optimum.quanto import freeze, qint4, qint8, quantize

    for kind, what in (
        (qint8, "weights int8 per channel"),
        (qint4, "weights int4 per channel asymmetric"),
    ):
        target = model()
        quantize(target, weights=kind)
        freeze(target)
        result = compared(target)
        assert (result.status, [d.what for d in result.declared]) == ("same", [what])


# ---- the other declarations


def test_fast_gelu(compared):
    target = model()
    target[1].approximate = "tanh"
    assert compared(target).findings[0].name == "1"
    result = compared(target, allow({"op": "GELU", "declare": "fast-gelu"}))
    assert (result.status, result.counts["declared"]) == ("same", 1)
    target = model()
    target[1] = nn.SiLU()
    wrong = compared(target, allow({"module": "1", "declare": "fast-gelu"}))
    assert (wrong.status, wrong.findings[0].name) == ("different", "1")


class WrittenOut(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Quick(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def test_fast_gelu_the_reverse_and_written_out(tmp_path):
    def made(gelu):
        m = model()
        m[1] = gelu
        return m

    reference = run(made(WrittenOut()), tmp_path / "ref")
    exact, quick = run(made(nn.GELU()), tmp_path / "exact"), run(made(Quick()), tmp_path / "quick")
    entry = {"module": "1", "declare": "fast-gelu"}
    assert whence.compare(reference, exact).status == "different"
    assert whence.compare(reference, exact, policy=parse(allow(entry))).counts["declared"] == 1
    assert whence.compare(reference, quick, policy=parse(allow(entry))).status == "different"
    assert (
        whence.compare(reference, quick, policy=parse(allow({**entry, "form": "sigmoid"}))).counts[
            "declared"
        ]
        == 1
    )


def to_tf32(x, how):
    bits = x.contiguous().view(torch.int32)
    if how == "even":
        bits = bits + 0x0FFF + ((bits >> 13) & 1)
    elif how == "away":
        bits = bits + 0x1000
    return (bits & ~0x1FFF).view(torch.float32)


class TF32Linear(nn.Linear):
    how, gain = "even", 1.0

    def forward(self, x):
        return (
            nn.functional.linear(to_tf32(x, self.how), to_tf32(self.weight, self.how), self.bias)
            * self.gain
        )


def tf32(how, gain=1.0):
    m = model()
    for layer in (m[0], m[3], m[4]):
        layer.__class__ = type(
            "Linear", (TF32Linear,), {"how": how, "gain": gain if layer is m[3] else 1.0}
        )
    return m


@pytest.mark.parametrize("how", ["even", "away", "truncate"])
def test_tf32(compared, how):
    assert compared(tf32(how)).status == "different"
    result = compared(tf32(how), allow({"op": "Linear", "declare": "tf32"}))
    assert (result.status, result.counts["declared"]) == ("same", 3)
    wrong = compared(tf32(how, 1.0003), allow({"op": "Linear", "declare": "tf32"}))
    assert [f.name for f in wrong.findings] == ["3"]


class Norm(nn.Module):
    """In float32, or with its factor rounded in between."""

    def __init__(self, low, gain=1.0):
        super().__init__()
        self.low, self.gain = low, gain

    def forward(self, x):
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * self.gain
        return (x * inverse.to(x.dtype)) if self.low else (x.float() * inverse).to(x.dtype)


class Core(nn.Module):
    """A container that multiplies in its own code."""

    def __init__(self, how=None, gain=1.0):
        super().__init__()
        self.query, self.key, self.how, self.gain = nn.Linear(48, 32), nn.Linear(48, 32), how, gain

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        if self.how:
            q, k = to_tf32(q, self.how), to_tf32(k, self.how)
        return (q @ k.mT) * self.gain


def test_tf32_between_modules(tmp_path):
    def made(name, *given):
        torch.manual_seed(0)
        return run(Core(*given).eval(), tmp_path / name)

    reference, target, wrong = made("a"), made("b", "truncate"), made("c", "truncate", 1.0003)
    policy = parse(allow({"op": "Core", "declare": "tf32"}))
    assert whence.compare(reference, target).status == "different"
    result = whence.compare(reference, target, policy=policy)
    assert (result.status, result.counts["declared"], result.declared[0].names) == (
        "same",
        1,
        ("Core",),
    )
    assert 40 < result.declared[0].sqnr_db < 90
    assert [f.name for f in whence.compare(reference, wrong, policy=policy).findings] == ["Core"]


@pytest.mark.parametrize("low_is_target", [True, False])
def test_fused_rounding(tmp_path, low_is_target):
    x = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(1)).bfloat16()

    def made(name, low, gain=1.0):
        torch.manual_seed(0)
        return run(
            nn.Sequential(nn.Linear(48, 64), nn.Tanh(), Norm(low, gain), nn.Linear(64, 8))
            .bfloat16()
            .eval(),
            tmp_path / name,
            x,
        )

    reference, target = made("a", not low_is_target), made("b", low_is_target)
    policy = parse(allow({"op": "Norm", "declare": "fused-rounding"}))
    plain, declared = (
        whence.compare(reference, target),
        whence.compare(reference, target, policy=policy),
    )
    assert plain.status == ("different" if low_is_target else "same")
    assert (declared.status, declared.counts.get("declared", 0)) == ("same", int(low_is_target))
    wrong = whence.compare(reference, made("c", low_is_target, 1.02), policy=policy)
    assert [f.name for f in wrong.findings] == ["2"]


@pytest.mark.parametrize(
    ("bound", "status"),
    [
        ({"rel_l2": 2e-2}, "same"),
        ({"rel_l2": 2e-3}, "different"),
        ({"rtol": 1.01e-2}, "same"),
        ({"rtol": 1e-3, "atol": 1e-4}, "different"),
    ],
)
def test_tolerance_bounds_the_error_on_the_same_inputs(compared, bound, status):
    class Off(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1.01

    target = model()
    target[3].__class__ = type("Linear", (Off,), {})
    result = compared(target, allow({"module": "3", "declare": "tolerance", **bound}))
    assert result.status == status
    assert result.counts.get("declared", 0) == (status == "same")


def test_what_is_ignored_is_listed(compared):
    target = model()
    target[3].weight.data.mul_(1.3)
    result = compared(
        target, allow({"module": "3", "declare": "tolerance", "ignore": True, "why": "retrained"})
    )
    assert (result.status, result.counts["declared"]) == ("same", 1)
    text = answer(result)
    assert "IGNORED            1 Linear call, as declared: 3" in text
    assert "because          retrained" in text
    assert summary_data(result)["declared"][0]["ignored"] is True


class Masked(nn.Module):
    def __init__(self, junk):
        super().__init__()
        self.inner, self.junk = nn.Linear(48, 24), junk

    def forward(self, x, keep):
        return Tail(self.junk)(self.inner(x), keep)


class Tail(nn.Module):
    def __init__(self, junk):
        super().__init__()
        self.junk = junk

    def forward(self, x, keep):
        out = torch.tanh(x)
        return torch.where(keep[..., None].bool(), out, out * 0 + self.junk)


def masked(place, junk, off=0.0):
    torch.manual_seed(0)
    m = Masked(junk).eval()
    x = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    if off:
        m.inner.register_forward_hook(lambda module, args, out: out + off * mask[..., None])
    with torch.no_grad(), whence.capture(m, place):
        m(x, keep=mask)
    return place


def test_masked_rows_are_left_out_and_only_they(tmp_path):
    reference, target = masked(tmp_path / "a", 0.0), masked(tmp_path / "b", 7.0)
    entry = {"module": "*", "declare": "skip-masked-rows", "mask": "keep"}
    assert whence.compare(reference, target).status == "different"
    assert whence.compare(reference, target, policy=parse(allow(entry))).status == "same"
    wrong = masked(tmp_path / "c", 7.0, off=0.01)
    result = whence.compare(reference, wrong, policy=parse(allow(entry)))
    assert (result.status, result.findings[0].name) == ("different", "inner")


# ---- from outside


def test_on_the_command_line(reference, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = run(quantised(model()), tmp_path / "tgt")
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[[allow]]\nop = "Linear"\ndeclare = "quantisation"\nweights = { bits = 8, per = '
        '"channel" }\n'
    )
    assert (
        execute(["compare", str(reference), str(target), "--policy", str(policy), "-o", "cmp"]) == 0
    )
    assert "DECLARED" in capsys.readouterr().out
    assert json.loads((tmp_path / "cmp" / "summary.json").read_text())["declared"][0]["calls"] == 3
    assert whence.load_comparison(tmp_path / "cmp").declared[0].calls == 3
    policy.write_text(policy.read_text().replace("Linear", "Linaer"))
    assert (
        execute(["compare", str(reference), str(target), "--policy", str(policy), "-o", "cmp2"])
        == 3
    )
    assert "matches no call" in (err := capsys.readouterr().err)
    assert "did you mean Linear?" in err


def test_an_entry_that_concerns_none_of_its_calls_is_a_note(compared):
    result = compared(quantised(model()), allow(INT8, {"op": "Linear", "declare": "fast-gelu"}))
    assert any(
        "policy entry 2 (fast-gelu): none of the 3 differing calls it selects computes a GELU" in n
        for n in result.notes
    )


def test_an_entry_that_selects_nothing_is_an_error(compared):
    with pytest.raises(UsageError, match=r"entry 1 .* matches no call that both runs have"):
        compared(model(), allow({**INT8, "module": "encoder.*"}))


def test_load_policy(tmp_path):
    (tmp_path / "p.yml").write_text("allow: [{op: Linear, declare: tf32}]")
    assert api.load_policy(tmp_path / "p.yml").entries[0].declare == "tf32"


def test_a_clean_pair_is_as_before(compared):
    assert compared(model(), allow(INT8)).counts == {"identical": 6}
    assert compared(model()).declared == ()


@pytest.mark.parametrize("bound", [{"rtol": 1.0, "atol": 1.0}, {"rel_l2": 1.0}])
def test_a_tolerance_allows_nothing_that_is_not_a_number(bound):
    right = np.ones((2, 3), np.float32)
    produced = right.copy()
    entry = Entry(1, "tolerance", **bound)
    assert allows(entry, produced, right)
    produced[0, 1] = np.nan
    assert not allows(entry, produced, right)
    assert not allows(entry, right[:1], right)
