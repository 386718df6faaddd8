"""A training with reentrant checkpoints against the same without: what a checkpoint runs again in a
backward pass of its own stands where it stands in the graph of the other.
"""

import functools

import pytest

import whence

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

WIDTH = 8
again = functools.partial(checkpoint, use_reentrant=True)


def at_once(function, *args):
    return function(*args)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.is_cut = False

    def forward(self, x):
        inner = torch.tanh(self.up(self.norm(x)))
        return x + self.down(inner.detach() if self.is_cut else inner)


class Layer(nn.Module):
    """run: calls its code. whole: all of it or what is before the norm."""

    def __init__(self, run, *, whole):
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.run, self.whole = run, whole

    def before(self, x, y):
        return (x + self.scale * self.block(x)) * y

    def code(self, x, y):
        return self.norm(self.before(x, y))

    def forward(self, x, y):
        if self.whole:
            return self.run(self.code, x, y)
        return self.norm(self.run(self.before, x, y))


class Net(nn.Module):
    """inside: from the tensors of the first layer and its gate to those of the last."""

    def __init__(self, parts, inside):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts, self.head = nn.ModuleList(parts()), nn.Linear(WIDTH, 3)
        self.inside = inside

    def forward(self, x):
        return self.head(self.inside(self.parts, self.first(x), torch.sigmoid(self.gate(x))))


def blocks(number=2):
    return lambda: [Block() for _ in range(number)]


def one_by_one(run):
    def inside(parts, x, y):
        for part in parts:
            x = run(part, x)
        return x

    return inside


def together(run):
    return lambda parts, x, y: run(lambda x: parts[1](parts[0](x)), x)


def thrice(run):
    def inside(parts, x, y):
        for _ in range(3):
            x = run(parts[0], x)
        return x

    return inside


def with_gate(parts, x, y):
    for part in parts:
        x = part(x, y)
    return x


def frozen_first(run):
    def inside(parts, x, y):
        with torch.no_grad():
            seen = parts[0](x)
        return run(parts[1], x + seen)

    return inside


def in_another(run):
    def inside(parts, x, y):
        return run(lambda x: parts[1](run(parts[0], x)), x)

    return inside


def in_segments(run):
    def inside(parts, x, y):
        sequence = nn.Sequential(*parts)
        return (
            checkpoint_sequential(sequence, 2, x, use_reentrant=True)
            if run is again
            else sequence(x)
        )

    return inside


def layers(run, *, whole):
    return lambda: [Layer(run, whole=whole) for _ in range(2)]


SHAPES = {
    "layer by layer": lambda run: Net(blocks(), one_by_one(run)),
    "two in one": lambda run: Net(blocks(), together(run)),
    "one layer thrice": lambda run: Net(blocks(1), thrice(run)),
    "code of a layer": lambda run: Net(layers(run, whole=True), with_gate),
    "part of that code": lambda run: Net(layers(run, whole=False), with_gate),
    "behind a frozen one": lambda run: Net(blocks(), frozen_first(run)),
    "in another": lambda run: Net(blocks(), in_another(run)),
    "in segments": lambda run: Net(blocks(4), in_segments(run)),
    "with dropout": lambda run: Net(
        lambda: [nn.Sequential(Block(), nn.Dropout(0.3))], one_by_one(run)
    ),
}


def train(net, micro_batches):
    draw = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(2):
        torch.manual_seed(step)
        batches = [torch.randn(4, WIDTH, generator=draw) for _ in range(micro_batches)]
        losses = [net(x).square().mean() / micro_batches for x in batches]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def captured(make, run, folder, micro_batches=1, change=None):
    """Captures a training, which ends with the parameters that it has without a capture."""

    def net():
        net = make(run).train()
        if change is not None:
            change(net)
        return net

    bare = train(net(), micro_batches)
    model = net()
    with whence.capture(model, folder):
        seen = train(model, micro_batches)
    assert all(map(torch.equal, bare, seen))
    return folder


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_change_nothing(shape, micro_batches, tmp_path):
    """Two micro-batches: both forward passes come before the first backward pass."""
    make = SHAPES[shape]
    plain = captured(make, at_once, tmp_path / "plain", micro_batches)
    result = whence.compare(plain, captured(make, again, tmp_path / "again", micro_batches))
    assert result.findings == ()
    if shape != "in another":  # what a checkpoint within one runs again is not all paired
        assert str(result.status) == "same"
        assert (
            result.coverage.replayed
            >= (0.96 if shape == "in segments" else 1) * result.coverage.calls
        )


@pytest.mark.parametrize(
    "shape", ["layer by layer", "one layer thrice", "code of a layer", "part of that code"]
)
def test_what_is_detached_in_a_checkpoint_is_named_as_without_one(shape, tmp_path):
    def cut(net):
        next(m for m in net.modules() if isinstance(m, Block)).is_cut = True

    make, findings = SHAPES[shape], []
    plain = captured(make, at_once, tmp_path / "plain")
    for run in (at_once, again):
        faulted = captured(make, run, tmp_path / f"faulted{len(findings)}", change=cut)
        findings.append(whence.compare(plain, faulted).findings[0])
    names = {(finding.name, finding.sentence, finding.confidence) for finding in findings}
    assert len(names) == 1
    assert "down has a gradient in the reference only" in findings[0].sentence


@pytest.mark.parametrize("shape", ["layer by layer", "code of a layer", "part of that code"])
def test_a_gradient_that_is_scaled_in_a_checkpoint_is_named(shape, tmp_path):
    """A fault of the second run alone: the first one has no graph."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.01

    def scale(net):
        block = next(m for m in net.modules() if isinstance(m, Block))
        block.forward = lambda x: x + block.down(Scaled.apply(torch.tanh(block.up(block.norm(x)))))

    make = SHAPES[shape]
    plain = captured(make, at_once, tmp_path / "plain")
    faulted = captured(make, again, tmp_path / "faulted", change=scale)
    assert "parts.0" in whence.compare(plain, faulted).findings[0].name


def test_what_runs_again_counts_for_its_micro_batch(tmp_path):
    run = whence.open_run(captured(SHAPES["layer by layer"], again, tmp_path / "run", 2))
    micro = [
        c.micro
        for c in run.calls
        if c.phase == "recompute" and c.scope == "parts.0" and c.step == 0
    ]
    assert micro == [0, 1]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradients_that_a_checkpoint_adds_in_16_bits_are_a_loss_of_precision(tmp_path):
    """Query, key and value read the checkpoint's input, which is a leaf: autocast casts it once."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=80,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(0, 80, (2, 8), generator=torch.Generator().manual_seed(0))
    for name in ("plain", "again"):
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config).train()
        if name == "again":
            model.gradient_checkpointing_enable({"use_reentrant": True})
        with whence.capture(model, tmp_path / name):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    result = whence.compare(tmp_path / "plain", tmp_path / "again")
    assert result.coverage.replayed == result.coverage.calls
    assert result.status == "same", result.headline
    lost = [v.sentence for v in result.verdicts if v.verdict == "precision"]
    assert lost and all("in float64 both programs are one function" in words for words in lost)
