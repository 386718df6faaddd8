"""Code between modules is judged like any module: attention cores, masks, residuals, caches; and
calls that show no inside.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Cache:
    """As the caches of transformers: a plain object whose tensors are replaced by longer ones."""

    def __init__(self):
        self.keys = self.values = None

    def update(self, k, v):
        self.keys = k if self.keys is None else torch.cat([self.keys, k], -2)
        self.values = v if self.values is None else torch.cat([self.values, v], -2)
        return self.keys, self.values


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.scale, self.shift = heads, (width // heads) ** -0.5, 0
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, cache=None):
        q, k, v = (
            p(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = cache.update(k, v)
        scores = q @ k.transpose(-1, -2) * self.scale
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(
            k.shape[-2] - q.shape[-2] + self.shift
        )
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.attn, self.norm2 = (
            nn.LayerNorm(width),
            Attention(width),
            nn.LayerNorm(width),
        )
        self.up, self.down, self.drop = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )
        self.branch = 1.0

    def forward(self, x, cache=None):
        x = x + self.drop(self.attn(self.norm1(x), cache=cache))
        h = self.down(nn.functional.silu(self.up(self.norm2(x))))
        if self.branch != 1.0:
            h = h * self.branch
        return x + h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(32)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.25)

    def forward(self, ids, caches=None):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=caches[i] if caches is not None else None)
        return self.norm(x) @ self.embed.weight.T


IDS = torch.arange(3, 17).reshape(2, 7) * 3 % 50


def captured(model, path, *, mode=torch.no_grad, ids=IDS, decode=0):
    with mode(), whence.capture(model, path):
        caches = [Cache() for _ in model.blocks] if decode else None
        model(ids, *([caches] if decode else ()))
        for step in range(decode):
            model(ids[:, step : step + 1], caches)
    return path


def compared(tmp_path, target, *, mode=torch.no_grad, decode=0):
    reference = captured(Model().eval(), tmp_path / "ref", mode=mode, decode=decode)
    return whence.compare(reference, captured(target, tmp_path / "tgt", mode=mode, decode=decode))


def scale(model):
    model.blocks[1].attn.scale *= 1.05


def mask(model):
    model.blocks[1].attn.shift = -1


def residual(model):
    model.blocks[1].branch = 0.97


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "name", "place"),
    [
        (scale, "blocks.1.attn", "between v and o"),
        (mask, "blocks.1.attn", "between v and o"),
        (residual, "blocks.1", "after down"),
    ],
)
def test_a_fault_between_modules_is_a_region_of_its_container(
    tmp_path, fault, name, place, dtype, mode
):
    target = Model().eval().to(dtype)
    fault(target)
    result = compared(tmp_path, target, mode=MODES[mode])
    assert result.status == "different"
    first = result.findings[0]
    assert (first.name, first.cause, [f.name for f in result.findings]) == (
        name,
        "semantic",
        [name],
    )
    assert first.sentence.startswith(place)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_target_is_silent_and_every_call_was_replayed(tmp_path, dtype, mode):
    result = compared(tmp_path, Model().eval().to(dtype), mode=MODES[mode], decode=4)
    assert (result.status, result.findings) == ("same", ())
    assert result.coverage.replayed == result.coverage.replayable == result.coverage.calls == 5 * 36


def test_a_cache_is_an_input_of_the_call_that_reads_it(tmp_path):
    target = Model().eval()
    target.blocks[1].attn.scale *= 1.02
    result = compared(tmp_path, target, decode=4)
    assert [(f.name, f.step) for f in result.findings] == [("blocks.1.attn", 0)]
    run = whence.open_run(tmp_path / "ref")
    steps = [c for c in run.calls if c.scope == "blocks.1.attn"]
    assert [sorted(r.slot for r in c.slots("input")) for c in steps[1:]] == [
        ["input.0", "input.cache.keys", "input.cache.values"]
    ] * 4
    assert result.coverage.replayed == result.coverage.calls


def test_extents_are_known_after_a_few_recordings(tmp_path):
    model = Model().eval()
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        for length in range(2, 12):
            model(torch.arange(2 * length).reshape(2, length) % 50)
    run = whence.open_run(tmp_path / "run")
    spent = next(n.text for n in run.notes if n.kind == "programs")
    assert int(spent.split()[0]) < 10 * 36 / 2
    again = whence.compare(
        tmp_path / "run", captured_lengths(Model().eval().bfloat16(), tmp_path / "bf16")
    )
    assert (again.status, again.coverage.replayed) == ("same", again.coverage.calls)


def captured_lengths(model, path):
    with torch.no_grad(), whence.capture(model, path):
        for length in range(2, 12):
            model(torch.arange(2 * length).reshape(2, length) % 50)
    return path


def test_the_shares_of_an_error_say_whose_it_is(tmp_path):
    captured(Model().eval(), tmp_path / "exact")
    captured(Model().eval().bfloat16(), tmp_path / "rounded")
    for reference, target, none, some in (
        ("exact", "rounded", "reference", "target"),
        ("rounded", "exact", "target", "reference"),
    ):
        result = whence.compare(tmp_path / reference, tmp_path / target)
        assert result.status == "same"
        shares = [
            {k[6:]: v for k, v in verdict.numbers.items() if k.startswith("share_")}
            for verdict in result.verdicts
        ]
        shares = [s for s in shares if s]
        assert len(shares) > 20
        assert all(sum(s.values()) == pytest.approx(1) for s in shares)
        # Beside the rounding of 16 bits that of 32 is nothing.
        assert max(s[none] for s in shares) < 1e-6
        assert max(s[some] for s in shares) > 0.1


# ---- the reference may be the broken one


class Device(TorchDispatchMode):
    """A device whose n-th `addmm` is 1 % too large."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.left -= 1
            return out * 1.01 if self.left == 0 else out
        return out


@pytest.mark.parametrize("broken", ["ref", "tgt"])
def test_a_broken_kernel_is_named_on_the_side_where_it_is(tmp_path, broken):
    model = Model().eval()
    for name in ("ref", "tgt"):
        with (
            torch.no_grad(),
            Device(8 if name == broken else 0),
            whence.capture(model, tmp_path / name),
        ):
            model(IDS)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert [(f.name, f.cause, f.side) for f in result.findings] == [
        ("blocks.1.attn.k", "kernel", "reference" if broken == "ref" else "target")
    ]
    if broken == "tgt":
        assert result.findings[0].operator == "aten.addmm.default"
    else:
        assert "introduced by the reference" in result.findings[0].sentence


# ---- which operator inside


def test_a_flagged_region_is_drilled_down_to_its_operator(tmp_path):
    target = Model().eval()
    scale(target)
    finding = compared(tmp_path, target).findings[0]
    assert finding.operator == "aten.mul.Tensor"
    assert "mul.Tensor (operator" in finding.sentence
    target = Model().eval()
    residual(target)
    (tmp_path / "2").mkdir()
    finding = compared(tmp_path / "2", target).findings[0]
    assert (finding.operator, "runs only in the target" in finding.sentence) == (
        "aten.mul.Tensor",
        True,
    )


class Gate(nn.Module):
    """A function of x, times x; the target scales the function first."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        gate = torch.tanh(x)
        if self.factor != 1:
            gate = gate * self.factor
        return gate * x + 1


def test_an_inserted_operator_is_told_from_one_of_its_name_beside_it(tmp_path):
    for name, factor in (("a", 1), ("b", 1.02)):
        model = nn.Sequential(nn.Linear(8, 8), Gate(factor)).eval()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(torch.linspace(-1, 1, 32).reshape(4, 8))
    (finding,) = whence.compare(tmp_path / "a", tmp_path / "b").findings
    assert (finding.name, finding.operator) == ("1", "aten.mul.Tensor")
    assert finding.sentence.startswith("mul.Tensor (operator 2 of 4) runs only in the target; ")


# ---- calls that show no inside


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


def test_a_target_that_shows_no_inside_is_replayed_as_a_whole(tmp_path):
    result = compared(tmp_path, compiled(Model().eval()))
    assert (result.status, result.findings) == ("same", ())
    assert (
        result.coverage.calls,
        result.coverage.paired,
        result.coverage.inside,
        result.coverage.replayed,
    ) == (36, 1, 35, 36)
    assert result.unmatched == 0


class Headed(nn.Module):
    """A model in a model, as transformers has it: the outer one's own operators never see the
    cache.
    """

    def __init__(self):
        super().__init__()
        self.model, self.head = Model(), nn.Linear(50, 8)

    @property
    def blocks(self):
        return self.model.blocks

    def forward(self, ids, caches=None):
        return self.head(self.model(ids, caches))


def test_decode_steps_with_a_cache_are_replayed_as_a_whole(tmp_path):
    """Only calls inside read the cache; what hangs in it comes from the step before, as the target
    had it.
    """
    reference = captured(Headed().eval(), tmp_path / "ref", decode=3)
    target = captured(compiled(Headed().eval().bfloat16()), tmp_path / "tgt", decode=3)
    result = whence.compare(reference, target)
    assert (result.status, result.findings) == ("same", ())
    assert [v.evidence for v in result.verdicts] == ["replay"] * 4
    assert (result.coverage.calls, result.coverage.paired, result.coverage.replayed) == (
        4 * 38,
        4,
        4 * 38,
    )


def test_a_fault_inside_is_seen_at_the_ends(tmp_path):
    target = Model().eval()
    scale(target)
    result = compared(tmp_path, compiled(target))
    assert [(f.name, f.confidence) for f in result.findings] == [("Model", "certain")]
    assert "rounding in all the calls inside" in result.findings[0].sentence


def test_a_wrong_parameter_inside_is_named_where_it_is(tmp_path):
    target = Model().eval()
    with torch.no_grad():
        target.blocks[1].up.weight[3, 5] += 0.05
    result = compared(tmp_path, compiled(target))
    assert [(f.name, f.cause) for f in result.findings] == [("blocks.1.up", "parameter")]
    assert "row 3" in result.findings[0].sentence


def test_parts_of_a_model_may_show_no_inside(tmp_path):
    torch._dynamo.reset()
    target = Model().eval()
    for block in target.blocks:
        block.compile(backend="eager")
    result = compared(tmp_path, target)
    assert (result.status, result.coverage.inside, result.coverage.replayed) == ("same", 3 * 10, 36)
    faulty = copy.deepcopy(Model().eval())
    residual(faulty)
    torch._dynamo.reset()
    for block in faulty.blocks:
        block.compile(backend="eager")
    (tmp_path / "2").mkdir()
    result = compared(tmp_path / "2", faulty)
    assert [f.name for f in result.findings] == ["blocks.1"]


# ---- many steps, little time


def captured_steps(model, path, steps, fault=None):
    with torch.no_grad(), whence.capture(model, path):
        for step in range(steps):
            if fault is not None and fault[0] == step:
                fault[1](model)
            model((IDS + step) % 50)
    return path


def test_of_many_steps_three_are_replayed_and_what_stands_out(tmp_path):
    reference = captured_steps(Model().eval(), tmp_path / "ref", 20)
    target = captured_steps(Model().eval().bfloat16(), tmp_path / "tgt", 20)
    result = whence.compare(reference, target)
    assert result.status == "same"
    assert 3 * 36 <= result.coverage.replayed < 10 * 36
    assert any("steps 0, 10, 19 of 20" in note for note in result.notes)
    assert any("not among the sampled steps (0, 10, 19)" in v.sentence for v in result.verdicts)
    everything = whence.compare(reference, target, sample="all")
    assert (everything.status, everything.coverage.replayed, everything.notes) == (
        "same",
        20 * 36,
        (),
    )


def test_a_fault_in_a_step_that_is_not_sampled_stands_out(tmp_path):
    def change(model):
        model.blocks[1].norm2.eps = 0.1

    reference = captured_steps(Model().eval(), tmp_path / "ref", 20)
    target = captured_steps(Model().eval(), tmp_path / "tgt", 20, fault=(13, change))
    result = whence.compare(reference, target)
    assert [(f.name, f.step) for f in result.findings] == [("blocks.1.norm2", 13)]
    # It was looked at in every step from there on, and the steps before are as they were.
    assert sum(v.verdict == "introduced" for v in result.verdicts) == 7


def test_without_time_the_dumps_must_do(tmp_path):
    reference = captured(Model().eval(), tmp_path / "ref")
    target = Model().eval()
    residual(target)
    result = whence.compare(reference, captured(target, tmp_path / "tgt"), budget=0)
    assert (result.status, result.evidence) == ("different", "two dumps")
    assert result.coverage.replayed < result.coverage.calls
    assert "the time budget was spent" in result.notes[0]
    assert result.findings[0].name == "blocks.1"


def test_unknown_ways_to_sample_are_refused(tmp_path):
    path = captured(Model().eval(), tmp_path / "ref")
    for given, text in (({"sample": "some"}, "auto or all"), ({"budget": -1.0}, "0 or more")):
        with pytest.raises(whence.errors.UsageError, match=text):
            whence.compare(path, path, **given)
