"""A model of other modules: what the reference computes in a container that the target does not have
is judged as code of the container around it.
"""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import whence  # noqa: E402
from whence import align  # noqa: E402
from whence.comparison.prepare.opened_containers import with_containers_of_both  # noqa: E402
from whence.records import children  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH, HEADS, LAYERS = 32, 4, 3


class Turn(nn.Module):
    def forward(self, positions):
        rates = 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        angles = torch.outer(positions.float(), rates)
        return angles.cos(), angles.sin()


def turned(x, cos, sin):
    (a, b), cos, sin = x.chunk(2, -1), cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Norm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gain = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def forward(self, x, tables):
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = turned(q, *tables) * self.gain, turned(k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention, self.behind, self.feed = Norm(), Attention(), Norm(), Feed()

    def forward(self, x, tables):
        x = x + self.attention(self.before(x), tables)
        return x + self.feed(self.behind(x))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.turn = nn.Embedding(50, WIDTH), Turn()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(LAYERS)), Norm()

    def forward(self, ids):
        x, tables = self.embed(ids), self.turn(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, tables)
        return self.last(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(WIDTH, 50)

    def forward(self, ids):
        return self.head(self.body(ids))


class Port(nn.Module):
    """The same function as somebody else writes it: products are modules, all else is code."""

    def __init__(self, model, fault=""):
        super().__init__()
        self.fault, self.table, self.scores = fault, model.body.embed, model.head
        self.products = nn.ModuleList(
            m for b in model.body.blocks for m in (*b.attention.children(), b.feed.up, b.feed.down)
        )
        norms = [n.weight for b in model.body.blocks for n in (b.before, b.behind)]
        self.scales = nn.ParameterList([*norms, model.body.last.weight])
        self.gains = nn.ParameterList(b.attention.gain for b in model.body.blocks)

    def norm(self, x, number, eps=1e-5):
        return F.rms_norm(x, (WIDTH,), self.scales[number], eps)

    def forward(self, ids):
        x, length, size = self.table(ids), ids.shape[1], WIDTH // HEADS
        rates = torch.exp(-math.log(100) * torch.linspace(0, 1, size // 2))
        angles = torch.arange(length)[:, None] * rates * (1.1 if self.fault == "turn" else 1)
        tables = angles.cos(), angles.sin()
        for i in range(LAYERS):
            q, k, v, o, up, down = self.products[6 * i : 6 * i + 6]

            def planted(fault, layer=i):
                return layer == 1 and self.fault == fault

            h = self.norm(x, 2 * i, 1e-2 if planted("eps") else 1e-5)
            query, key, value = (
                p(h).view(*h.shape[:2], HEADS, size).transpose(1, 2) for p in (q, k, v)
            )
            query, key = turned(query, *tables), turned(key, *tables)
            query = query if planted("gain") else query * self.gains[i]
            scores = query @ key.mT / (size if planted("scale") else math.sqrt(size))
            hidden = torch.ones(length, length, dtype=torch.bool).triu(2 if planted("mask") else 1)
            y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
            x = x + o(y.transpose(1, 2).reshape(x.shape))
            h = up(self.norm(x, 2 * i + 1))
            x = x + down(F.gelu(h) if planted("activation") else h * h.sigmoid())
        return self.scores(self.norm(x, 2 * LAYERS))


PLANTED = {
    "turn": "body.blocks.0.attention",
    "eps": "body.blocks.1.before",
    "gain": "body.blocks.1.attention",
    "scale": "body.blocks.1.attention",
    "mask": "body.blocks.1.attention",
    "activation": "body.blocks.1.feed.act",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


def captured(model, path, dtype=torch.float32):
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), whence.capture(model.to(dtype), path):
        model(ids)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_other_modules_is_the_same(model, tmp_path, dtype):
    runs = [captured(m, tmp_path / n, dtype) for n, m in (("a", model), ("b", Port(model)))]
    result = whence.compare(*runs)
    assert result.status == "same", result
    assert result.coverage.replayed == result.coverage.calls


@pytest.mark.parametrize("fault", PLANTED)
def test_code_inside_a_container_of_one_run_is_judged(model, tmp_path, fault):
    model.float()
    runs = [captured(m, tmp_path / n) for n, m in (("a", model), ("b", Port(model, fault)))]
    result = whence.compare(*runs)
    assert result.status == "different", result
    assert result.findings[0].name == PLANTED[fault], result


def test_also_the_other_way_round(model, tmp_path):
    model.float()
    runs = [captured(m, tmp_path / n) for n, m in (("a", Port(model, "scale")), ("b", model))]
    result = whence.compare(*runs)
    assert result.status == "different", result
    assert result.findings[0].slot == "9:input.0", (
        result
    )  # what the product `o` of block 1 is given


def test_calls_and_records_keep_their_numbers(model, tmp_path):
    model.float()
    runs = [captured(m, tmp_path / n) for n, m in (("a", model), ("b", Port(model)))]
    aligned = align.align(*map(whence.open_run, runs))
    opened = with_containers_of_both(aligned)
    assert [c.scope for c in opened.reference.calls] == [c.scope for c in aligned.reference.calls]
    root = next(c for c in opened.reference.calls if c.parent == -1)
    assert "param.body.blocks.1.attention.gain" in root.by_slot
    around = {c.scope: c.parent for c in opened.reference.calls}
    assert around["body.blocks.1.attention.q"] == root.id
    kids = children(opened.reference.calls)[root.id]
    program = opened.reference.programs[root.program]
    handed = {slot.split(":")[0] for slot, _ in program.outputs if ":input" in slot}
    products = [
        str(k) for k, kid in enumerate(kids) if opened.reference.calls[kid].op_type == "Linear"
    ]
    assert handed.issuperset(products)
    assert with_containers_of_both(opened) is opened


class Layered(nn.Module):
    """Blocks as modules without a body around them, and without modules inside but products."""

    def __init__(self, model, fault=""):
        super().__init__()
        self.fault, self.embed, self.head = fault, model.body.embed, model.head
        self.last = model.body.last
        self.blocks = nn.ModuleList(
            LayeredBlock(block, fault if i == 1 else "")
            for i, block in enumerate(model.body.blocks)
        )

    def forward(self, ids):
        x, tables = self.embed(ids), Turn()(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, tables)
        return self.head(self.last(x))


class LayeredBlock(nn.Module):
    def __init__(self, block, fault):
        super().__init__()
        self.fault, self.before, self.behind = fault, block.before, block.behind
        self.q, self.k, self.v, self.o = (getattr(block.attention, name) for name in "qkvo")
        self.up, self.down, self.gain = block.feed.up, block.feed.down, block.attention.gain

    def forward(self, x, tables):
        h = self.before(x)
        q, k, v = (
            p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = turned(q, *tables) * self.gain, turned(k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.fault != "mask")
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.up(self.behind(x))
        return x + self.down(F.relu(h) if self.fault == "activation" else F.silu(h))


@pytest.mark.parametrize(
    ("fault", "name"),
    [("", ""), ("mask", "body.blocks.1.attention"), ("activation", "body.blocks.1.feed.act")],
)
def test_a_paired_container_inside_an_opened_one_keeps_its_code(model, tmp_path, fault, name):
    """The body is opened, the blocks inside it are paired and hold opened containers."""
    model.float()
    runs = [captured(m, tmp_path / n) for n, m in (("a", model), ("b", Layered(model, fault)))]
    result = whence.compare(*runs)
    assert result.status == ("different" if fault else "same"), result
    assert [f.name for f in result.findings][:1] == [name] * bool(fault)
    assert result.coverage.replayed == result.coverage.calls
    opened = with_containers_of_both(align.align(*map(whence.open_run, runs))).reference
    kids = children(opened.calls)
    blocks = [c.id for c in opened.calls if c.op_type == "Block"]
    root = next(c.id for c in opened.calls if c.parent == -1 and c.op_type == "Model")
    assert len(blocks) == LAYERS and set(blocks) <= set(kids[root])
