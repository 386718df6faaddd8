"""`compare(model=...)`: the user's own model judges calls whose program cannot be used."""

import copy
import json
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402
from whence.cli import execute  # noqa: E402
from whence.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.torch

torch.library.define("whence_vendor::rms", "(Tensor x, Tensor weight, float eps) -> Tensor")


@torch.library.impl("whence_vendor::rms", "CPU")
def _rms(x, weight, eps):
    """A vendor's operator: no list knows it, and it has a kernel for float32 only, like many."""
    if x.dtype != torch.float32:
        raise RuntimeError(f"rms: no kernel for {x.dtype}")
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-5

    def forward(self, x):
        return torch.ops.whence_vendor.rms(x.float(), self.weight.float(), self.eps).to(x.dtype)


class Mixer(nn.Module):
    """A leaf that takes everything a call can: keywords, nested tensors, plain values, dtypes,
    None; and returns a dict and a tuple.
    """

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.table = torch.linspace(-1, 1, width)
        self.eps = 1e-5

    def forward(self, x, mask, *, pair, extra, factor=1.0, dtype=None):
        assert mask is None
        a, b = pair
        self.calls += 1
        y = torch.ops.whence_vendor.rms(
            (x @ self.weight.to(x.dtype)).float(), self.table.float(), self.eps
        ).to(dtype)
        return {"mixed": y * factor + a, "rest": (extra["shift"] + b, None)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mixer, self.out = Norm(width), Mixer(width), nn.Linear(width, width)
        self.branch = 1.0

    def forward(self, x):
        made = self.mixer(
            self.norm(x), None, pair=(x, x * 2), extra={"shift": x}, factor=0.5, dtype=x.dtype
        )
        return x + self.branch * self.out(
            made["mixed"] + torch.ops.whence_vendor.rms(x.float(), x.float()[0], 1e-5).to(x.dtype)
        ), made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x


X = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))


def make():
    """As the user would: the reference's code; the weights do not matter."""
    model = Model().eval()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def captured(model, path, x=X, **options):
    dtype = next(model.parameters()).dtype
    with torch.no_grad(), whence.capture(model, path, **options):
        model(x.to(dtype))
    return path


def compared(tmp_path, target, model=make, reference=None, **options):
    ref = captured(reference or Model().eval(), tmp_path / "ref", **options)
    return whence.compare(ref, captured(target, tmp_path / "tgt", **options), model=model)


def reasons(result):
    return [
        v.sentence.partition("no replay: ")[2]
        for v in result.verdicts
        if "no replay: " in v.sentence
    ]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- judged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_target_is_silent_and_every_call_was_replayed(tmp_path, dtype):
    result = compared(tmp_path, Model().eval().bfloat16() if dtype is torch.bfloat16 else shifted())
    assert (result.status, result.findings) == ("same", ())
    assert reasons(result) == []
    assert result.coverage.replayed == result.coverage.replayable == result.coverage.calls == 13
    note = next(n for n in result.notes if n.startswith("model make"))
    assert {f"blocks.*.{name}" in note for name in ("norm (Norm)", "mixer (Mixer)")} == {True}
    assert "blocks.*.out (Linear)" not in note  # has a program, which comes first
    without = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert without.coverage.replayed < 13


def shifted():
    """The reference with rounding of its own: every second element that a linear layer makes is one
    unit off.
    """
    model = Model().eval()
    for block in model.blocks:
        block.out.register_forward_hook(
            lambda m, a, y: torch.nextafter(y, y + (torch.arange(32) % 2))
        )
    return model


def norm(model, eps=1e-3):
    model.blocks[1].norm.eps = eps


def mixer(model, eps=1e-2):
    model.blocks[1].mixer.eps = eps


def branch(model, factor=0.97):
    model.blocks[1].branch = factor


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.float32, {}), (torch.bfloat16, {norm: 0.1, mixer: 0.5, branch: 0.9})],
)
@pytest.mark.parametrize(
    ("fault", "name"), [(mixer, "blocks.1.mixer"), (branch, "blocks.1"), (norm, "blocks.1.norm")]
)
def test_a_fault_where_no_program_can_be_used_is_named(tmp_path, fault, name, dtype, sizes):
    target = Model().eval().to(dtype)
    fault(target, *([sizes[fault]] if sizes else []))
    result = compared(tmp_path, target)
    assert (result.status, result.evidence, [f.name for f in result.findings]) == (
        "different",
        "replay",
        [name],
    )
    without = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert not any(v.evidence == "replay" and v.verdict == "introduced" for v in without.verdicts)


def test_the_score_is_that_of_the_program(tmp_path):
    """The same operators run, so the same figures come out, also of what calls contain between
    their children.
    """

    def model(eps):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Linear(16, 32),
            nn.LayerNorm(32),
            nn.GELU(),
            nn.MultiheadAttention(32, 4),
            nn.LSTM(32, 8),
        ).eval()
        made[1].eps = eps
        return Straight(made)

    for name, programs in (("with", True), ("without", False)):
        for side, eps in (("ref", 1e-5), ("tgt", 1e-3)):
            captured(
                model(eps),
                tmp_path / name / side,
                torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)),
                programs=programs,
            )
    program = whence.compare(tmp_path / "with" / "ref", tmp_path / "with" / "tgt")
    borrowed = whence.compare(
        tmp_path / "without" / "ref", tmp_path / "without" / "tgt", model=lambda: model(1e-5)
    )
    assert program.coverage.replayed == borrowed.coverage.replayed == 6
    scores = [
        {(v.pair, v.stretch): v.score for v in r.verdicts if v.evidence == "replay"}
        for r in (program, borrowed)
    ]
    assert len(scores[0]) >= 5
    assert max(scores[0].values()) > 100
    assert scores[1] == pytest.approx(scores[0], rel=1e-3, abs=1e-3)


class Straight(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        linear, norm, gelu, attention, lstm = self.parts
        x = gelu(norm(linear(x))) * 1.5
        y, _ = attention(x, x, x, need_weights=False)
        return lstm(x + y)[0]


def test_a_call_whose_inside_only_the_reference_shows_is_run_with_its_children(tmp_path):
    class Alone(nn.Module):
        """The same computation, without a module inside."""

        def __init__(self, block, branch=1.0):
            super().__init__()
            self.branch, self.inner = branch, [block]

        def forward(self, x):
            with torch._C._ExcludeDispatchKeyGuard(
                torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
            ):
                inner = self.inner[0]
                made = inner.mixer.forward(
                    inner.norm.forward(x),
                    None,
                    pair=(x, x * 2),
                    extra={"shift": x},
                    factor=0.5,
                    dtype=x.dtype,
                )
                vendor = torch.ops.whence_vendor.rms(x.float(), x.float()[0], 1e-5).to(x.dtype)
                return x + self.branch * inner.out.forward(made["mixed"] + vendor), made

    for factor, status in ((1.0, "same"), (1.01, "different")):
        target = Model().eval()
        target.blocks[1] = Alone(target.blocks[1], factor)
        target.blocks[0].out.register_forward_hook(lambda m, a, y: torch.nextafter(y, y + 1))
        folder = tmp_path / status
        result = compared(folder, target)
        assert (result.status, [f.name for f in result.findings]) == (
            status,
            [] if factor == 1.0 else ["blocks.1"],
        )
        assert result.coverage.inside == 3


def test_compiled_code_is_run_as_it_is_written(tmp_path):
    class Compiled(nn.Module):
        def __init__(self, eps=1e-5, how=lambda f: torch.compile(f, backend="eager")):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.weight, self.eps = (
                nn.Linear(16, 16),
                nn.Parameter(torch.randn(16)),
                eps,
            )
            self.core = how(self.plain)

        def plain(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

        def forward(self, x):
            return self.core(self.first(x))

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for name, made in (
        ("ref", Compiled()),
        ("tgt", Compiled(1e-2)),
        ("plain", Compiled(1e-2, lambda f: f)),
    ):
        captured(made.eval(), tmp_path / name, x)
    assert (
        "compiled (core): inside not seen"
        in reasons(whence.compare(tmp_path / "ref", tmp_path / "tgt"))[-1]
    )
    # Whether the code or the kernel is at fault, the target's own program tells, where it has one.
    made = Compiled().eval()
    nn.init.ones_(made.weight)
    for target, cause in (("tgt", ""), ("plain", "semantic")):
        result = whence.compare(tmp_path / "ref", tmp_path / target, model=made)
        assert [(f.name, f.verdict, f.cause) for f in result.findings] == [
            ("Compiled", "introduced", cause)
        ]
        assert result.evidence == "replay"


def test_running_statistics_are_written_in_the_copy(tmp_path):
    def model(eps=1e-5):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16, eps=eps), nn.Linear(16, 8)
        ).train()

    for name, eps in (("ref", 1e-5), ("same", 1e-5), ("tgt", 1e-2)):
        made = model(eps)
        if name == "same":
            made[0].register_forward_hook(lambda m, a, y: torch.nextafter(y, y + 1))
        with torch.no_grad(), whence.capture(made, tmp_path / name, programs=False):
            made(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)))
    given = model()
    for name, found in (("same", []), ("tgt", ["1"])):
        result = whence.compare(tmp_path / "ref", tmp_path / name, model=given)
        assert ([f.name for f in result.findings], result.coverage.replayed) == (found, 4)
    assert torch.equal(given[1].running_mean, torch.zeros(16))
    assert reasons(result) == []


def test_a_program_that_does_not_serve_the_inputs_of_the_target(tmp_path):
    class Gate(nn.Module):
        def forward(self, x):
            return x * (1.5 if x[0, 0].item() > 0 else 1.0)

    class Two(nn.Module):
        def __init__(self, eps=1e-5, gate=None):
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(8, eps=eps), gate or Gate()

        def forward(self, x):
            return self.gate(self.norm(x))

    class Wrong(Gate):
        def forward(self, x):
            return super().forward(x) * 1.001

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    for name, made in (("ref", Two()), ("tgt", Two(1e-3)), ("both", Two(1e-3, Wrong()))):
        captured(made.eval().requires_grad_(False), tmp_path / name, x)
    assert "guard" in reasons(whence.compare(tmp_path / "ref", tmp_path / "tgt"))[0]
    for name, found in (("tgt", ["norm"]), ("both", ["norm", "gate"])):
        result = whence.compare(tmp_path / "ref", tmp_path / name, model=Two)
        assert reasons(result) == []
        assert [f.name for f in result.findings] == found


def test_the_model_is_never_changed(tmp_path):
    model = Model().eval()
    before = copy.deepcopy(model.state_dict())
    attributes = {
        name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()
    }
    tensors = {
        name: t.data_ptr() for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    target = Model().eval()
    mixer(target)
    state = torch.get_rng_state()
    assert compared(tmp_path, target, model=model).status == "different"
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32
    assert all(
        torch.equal(before[k].view(torch.uint8), v.view(torch.uint8))
        for k, v in model.state_dict().items()
    )
    assert attributes == {
        name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()
    }
    assert tensors == {
        name: t.data_ptr() for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def test_a_model_without_memory_serves_too(tmp_path):
    def shell():
        with torch.device("meta"):
            model = Model().eval()
        for block in model.blocks:
            block.mixer.table = torch.linspace(-1, 1, 32)
        return model

    target = Model().eval()
    mixer(target)
    result = compared(tmp_path, target, model=shell)
    assert [f.name for f in result.findings] == ["blocks.1.mixer"]


# ---- refused


def broken(change):
    def made():
        model = make()
        change(model)
        return model

    return made


def other_width(model):
    model.blocks[1].norm.weight = nn.Parameter(torch.ones(8))


def further_parameter(model):
    model.blocks[1].norm.bias = nn.Parameter(torch.ones(32))


def other_name(model):
    model.blocks[1].norm.scale = model.blocks[1].norm.weight
    del model.blocks[1].norm.weight


def other_code(model):
    model.blocks[1].norm.eps = 0.5


def raising(model):
    model.blocks[1].norm.eps = None


def gone(model):
    model.blocks[1].norm = None


def closure(model):
    kept = model.blocks[1].norm
    kept.forward = lambda x: Norm.forward(kept, x)


def random(model):
    model.blocks[1].norm.register_forward_hook(lambda m, a, y: y + 0 * torch.rand(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_width, "weight of the model's Norm has shape (8,), the recording's (32,)"),
        (further_parameter, "the model's Norm has bias, for which nothing was recorded"),
        (other_name, "the model's Norm has no weight, which the recording has"),
        (
            other_code,
            "the model's Norm does not reproduce its own recording: output.0: replay does not "
            "reproduce the recording",
        ),
        (raising, "the model's Norm failed: RuntimeError"),
        (gone, "the model has no module blocks.1.norm"),
        (closure, "it reads the model's own weights past what it holds"),
        (random, "the model's Norm draws random numbers"),
    ],
)
def test_another_module_is_refused_with_the_reason(tmp_path, change, words):
    target = Model().eval()
    norm(target)
    result = compared(tmp_path, target, model=broken(change))
    index = next(
        i
        for i, p in enumerate(result.plan.pairs)
        if whence.open_run(tmp_path / "ref").calls[p.reference].scope == "blocks.1.norm"
    )
    verdict = next(v for v in result.verdicts if v.pair == index)
    assert verdict.evidence == "two dumps"
    assert words in verdict.sentence
    assert (
        "is not on the list of replayable operators" in verdict.sentence
    )  # and why there is no program


def test_a_container_that_reaches_past_its_children_is_refused(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mid = nn.Embedding(20, 16), nn.Linear(16, 16)

        def forward(self, ids):
            return self.mid(self.embed(ids)) @ self.embed.weight.T

    target = Tied().eval()
    target.mid.register_forward_hook(lambda m, a, y: torch.nextafter(y, y + 1))
    for name, model in (("ref", Tied().eval()), ("tgt", target)):
        with torch.no_grad(), whence.capture(model, tmp_path / name, programs=False):
            model(torch.arange(12))
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt", model=Tied)
    assert any(
        "uses a weight of a module below it without calling that module" in why
        for why in reasons(result)
    )


def raises():
    raise ValueError("no such checkpoint")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("infer", "written module:factory"),
        ("nowhere_at_all:make", "importing nowhere_at_all failed: ModuleNotFoundError"),
        ("given_model:made", "given_model has no made; callable there: make"),
        ("failing_model:make", "importing failing_model failed: ZeroDivisionError"),
        ("leaving_model:make", "importing leaving_model failed: SystemExit: 0"),
        ("given_model:NUMBER", "a int is neither a torch.nn.Module nor a function"),
        ("given_model:number", "number() returned a int, not a torch.nn.Module"),
        (raises, "raises() raised ValueError: no such checkpoint"),
    ],
)
def test_what_is_no_model_is_said_before_anything_is_compared(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given_model.py").write_text(
        "NUMBER = 3\n\ndef make():\n    pass\n\ndef number():\n    return 3\n"
    )
    (tmp_path / "failing_model.py").write_text("1 / 0\n")
    (tmp_path / "leaving_model.py").write_text("import sys\nsys.exit(0)\n")
    captured(nn.Linear(32, 2), tmp_path / "run")
    monkeypatch.delitem(sys.modules, "given_model", raising=False)
    with pytest.raises(UsageError) as error:
        whence.compare("run", "run", model=model)
    assert words in str(error.value)
    with pytest.raises(UsageError, match="switched off"):
        whence.compare("run", "run", model=model, replay=False)


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target = Model().eval()
    mixer(target)
    captured(Model().eval(), tmp_path / "ref")
    captured(target, tmp_path / "tgt")
    (tmp_path / "users_model.py").write_text(
        "print('hello')\ndef make():\n    from tests_model import make\n    return make()\n"
    )
    monkeypatch.setitem(sys.modules, "tests_model", sys.modules[__name__])
    assert (
        execute(
            [
                "compare",
                "ref",
                "tgt",
                "--model",
                "users_model:make",
                "--format",
                "json",
                "-o",
                "cmp",
            ]
        )
        == 1
    )
    assert [f["name"] for f in json.loads(capsys.readouterr().out)["findings"]] == [
        "blocks.1.mixer"
    ]
    assert execute(["compare", "ref", "tgt", "--model", "users_model:nobody"]) == 3
    assert "users_model has no nobody" in capsys.readouterr().err
    assert str(tmp_path) not in sys.path
