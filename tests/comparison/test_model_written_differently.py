"""One model written in several ways: fused, rearranged, folded, with the residual apart. Clean
pairs are silent, faults are named.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from layout_models import (  # noqa: E402
    DEPTH,
    HEADS,
    HIDDEN,
    IDS,
    WIDTH,
    WORDS,
    Conv1D,
    Decoder,
    F,
    Pictures,
    Served,
    SiluAndMul,
    conv1d,
    folded,
    fused,
    linear,
    nn,
    paired,
    turned,
)

import whence  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Captures of every way to write the decoder, made when asked for."""
    folder, known = tmp_path_factory.mktemp("ways"), {}
    made = {
        "split": Decoder,
        "fused": lambda: fused(Decoder()),
        "heads": lambda: fused(Decoder(), "heads", turned=True),
        "conv1d fused": lambda: fused(Decoder(), "heads", Conv1D),
        "paired": lambda: paired(Decoder()),
        "conv1d": lambda: conv1d(Decoder()),
        "served": lambda: Served(Decoder()),
    }

    def captured(name, change=None, ids=None):
        ids = (IDS[0] if name == "served" else IDS) if ids is None else ids
        key = name, tuple(ids.shape)
        if change is None and key in known:
            return known[key]
        model = made[name]().eval()
        if change is not None:
            change(model)
        path = folder / f"{len(list(folder.iterdir()))}"
        with torch.no_grad(), whence.capture(model, path):
            model(ids)
        if change is None:
            known[key] = path
        return path

    return captured


def dims(result, run, scope):
    """Dims expressions of a call's slots."""
    calls = whence.open_run(run).calls
    pair = next(p for p in result.plan.pairs if calls[p.reference].scope == scope)
    return {s.reference_slot: s.dims for s in pair.slots if s.dims}, pair


@pytest.mark.parametrize("name", ["fused", "heads", "conv1d fused", "paired", "conv1d"])
@pytest.mark.parametrize("turned_round", [False, True])
def test_another_way_to_write_it_is_the_same_in_both_directions(ways, name, turned_round):
    runs = [ways("split"), ways(name)]
    result = whence.compare(*(runs[::-1] if turned_round else runs))
    assert (result.status, result.findings) == ("same", ())
    assert result.coverage.share == 1.0
    assert result.incomparable == 0
    assert result.without_partner.get("reference") is None


def test_the_plan_says_how_every_part_is_made(ways):
    result = whence.compare(ways("split"), ways("fused"))
    found, pair = dims(result, ways("split"), "layers.1.self_attn.k_proj")
    assert found == {
        "param.weight": "qkv_proj[32:64]",
        "param.bias": "qkv_proj[32:64]",
        "output.0": "qkv_proj[..., 32:64]",
    }
    assert pair.rule == "fused calls"
    assert "96 of 96 rows" in pair.evidence
    assert result.unmatched == 0
    result = whence.compare(ways("fused"), ways("split"))
    found, pair = dims(result, ways("fused"), "layers.1.self_attn.qkv_proj")
    assert found["output.0"] == "cat(q_proj, k_proj, v_proj, axis=-1)"
    assert len(pair.also) == 2
    result = whence.compare(ways("split"), ways("paired"))
    found, _ = dims(result, ways("split"), "layers.1.self_attn.q_proj")
    assert found["param.weight"] == "rearrange(x, '(h p d) j -> (h d p) j', h=4, p=4)"
    result = whence.compare(ways("split"), ways("conv1d"))
    assert dims(result, ways("split"), "layers.1.self_attn.q_proj")[0] == {"param.weight": "x.T"}


def test_a_serving_engine_s_form_is_the_same(ways):
    result = whence.compare(ways("split", ids=IDS[:1]), ways("served"))
    assert (result.status, result.findings, result.coverage.share) == ("same", (), 1.0)
    found, _ = dims(result, ways("split", ids=IDS[:1]), "layers.1.post_attention_layernorm")
    assert found["input.0"] == "rearrange(input_0 + input_1, 'a b -> 1 a b')"


def rows(path, where, factor=1.1):
    def change(model):
        model.get_submodule(path).weight.data[where] *= factor

    return change


def spoilt(path, where, factor=1.05):
    """A layer whose code changes a part of what it makes."""

    def change(model):
        module = model.get_submodule(path)
        inner = module.forward

        def forward(x):
            out = inner(x).clone()
            out[..., where] *= factor
            return out

        module.forward = forward

    return change


QKV, GATE_UP = "layers.1.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"


@pytest.mark.parametrize("name", ["fused", "served"])
@pytest.mark.parametrize(
    ("change", "named", "cause"),
    [
        (rows(QKV, slice(WIDTH, 2 * WIDTH)), "layers.1.self_attn.k_proj", "parameter"),
        (rows(QKV, 2 * WIDTH + 3), "layers.1.self_attn.v_proj", "parameter"),
        (rows(GATE_UP, 5), "layers.1.mlp.gate_proj", "parameter"),
        (rows(GATE_UP, slice(HIDDEN, None)), "layers.1.mlp.up_proj", "parameter"),
        (spoilt(QKV, slice(WIDTH, 2 * WIDTH)), "layers.1.self_attn.k_proj", "semantic"),
        (spoilt(GATE_UP, slice(0, HIDDEN)), "layers.1.mlp.gate_proj", "semantic"),
    ],
)
def test_a_fault_in_a_part_of_a_fused_layer_is_named_as_that_part(ways, name, change, named, cause):
    reference = ways("split", ids=IDS[:1] if name == "served" else IDS)
    result = whence.compare(reference, ways(name, change))
    assert result.status == "different"
    assert [(f.name, f.cause) for f in result.findings] == [(named, cause)]
    part = "qkv_proj[" if "attn" in named else "gate_up_proj["
    assert part in result.findings[0].sentence


def test_a_part_that_is_wrong_in_all_layers_is_still_that_part(ways):
    def change(model):
        for layer in model.layers:
            layer.self_attn.qkv_proj.weight.data[:WIDTH] *= 1.1

    result = whence.compare(ways("split"), ways("fused", change))
    assert [f.name for f in result.findings] == ["layers.0.self_attn.q_proj"]
    assert result.findings[0].also == ("layers.1.self_attn.q_proj", "layers.2.self_attn.q_proj")


@pytest.mark.parametrize(
    "change",
    [rows("layers.1.self_attn.k_proj", 3), spoilt("layers.1.self_attn.k_proj", slice(None))],
)
def test_a_fault_of_one_of_several_that_are_one_in_the_reference_says_which(ways, change):
    result = whence.compare(ways("heads"), ways("split", change))
    assert [f.name for f in result.findings] == ["layers.1.self_attn.qkv_proj"]
    assert result.findings[0].sentence.endswith("; k_proj of the target")


def swapped(layers):
    def change(model):
        for i in layers:
            weight = model.layers[i].mlp.gate_up_proj.weight.data
            weight.copy_(weight.roll(HIDDEN, 0))

    return change


@pytest.mark.parametrize("layers", [(1,), range(DEPTH)])
@pytest.mark.parametrize("name", ["fused", "served"])
def test_halves_that_are_swapped_are_not_explained_away(ways, name, layers):
    """gate and up in the wrong order: in one layer its weights differ from those of its siblings;
    in all, what is computed from them.
    """
    result = whence.compare(
        ways("split", ids=IDS[:1] if name == "served" else IDS), ways(name, swapped(layers))
    )
    assert result.status == "different"
    assert all(f.name.startswith(f"layers.{layers[0]}.mlp") for f in result.findings)


def wrongly_turned(layers):
    def change(model):
        for i in layers:
            for name in ("q_proj", "k_proj"):
                for p in model.layers[i].self_attn.get_submodule(name).parameters():
                    p.data = turned(p.data)

    return change


def transposed(layers):
    def change(model):
        for i in layers:
            weight = model.layers[i].self_attn.o_proj.weight.data
            weight.copy_(weight.T.clone())

    return change


@pytest.mark.parametrize("layers", [(1,), range(DEPTH)])
@pytest.mark.parametrize(("wrong", "name"), [(wrongly_turned, "q_proj"), (transposed, "o_proj")])
def test_a_wrong_order_that_the_code_does_not_know_of_is_a_fault(ways, wrong, name, layers):
    """The same change of order as in the clean pairs above, without the code that goes with it."""
    result = whence.compare(ways("split"), ways("split", wrong(layers)))
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].verdict) == (
        f"layers.{layers[0]}.self_attn.{name}",
        "param-diff",
    )


@pytest.mark.parametrize("name", ["paired", "conv1d"])
def test_a_fault_behind_another_order_is_still_found(ways, name):
    result = whence.compare(ways("split"), ways(name, rows("layers.1.self_attn.k_proj", 3)))
    assert [(f.name, f.verdict) for f in result.findings] == [
        ("layers.1.self_attn.k_proj", "param-diff")
    ]


class Gelu(SiluAndMul):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up


def activation(model):
    for layer in model.layers:
        layer.mlp.act_fn = Gelu()


def residual(model):
    model.norm.scale = 0.95


@pytest.mark.parametrize(("change", "name"), [(activation, "layers.0.mlp"), (residual, "norm")])
def test_faults_of_what_only_the_serving_engine_has(ways, change, name):
    result = whence.compare(ways("split", ids=IDS[:1]), ways("served", change))
    assert (result.status, [f.name for f in result.findings]) == ("different", [name])


def more_words(model, value=0.3):
    for module in (model.embed, model.lm_head):
        module.weight = nn.Parameter(
            torch.cat([module.weight.detach(), torch.full((64 - WORDS, WIDTH), value)])
        )


def test_a_padded_vocabulary_is_cut_and_told(ways):
    result = whence.compare(ways("split"), ways("split", more_words))
    assert result.status == "same"
    assert dims(result, ways("split"), "lm_head")[0] == {
        "param.weight": "x[0:50]",
        "output.0": "x[..., 0:50]",
    }
    assert (
        "lm_head.weight of the target is [64, 32], of the reference [50, 32]: the rest was left out"
        in result.plan.notes
    )


# ---- convolutions


class Hwio(nn.Module):
    """A convolution of channels-last frameworks."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(old.weight.detach().permute(2, 3, 1, 0).contiguous()),
            old.bias,
        )

    def forward(self, x):
        return (
            F.conv2d(x.permute(0, 3, 1, 2), self.weight.permute(3, 2, 0, 1), self.bias)
            .permute(0, 2, 3, 1)
            .contiguous()
        )


class Stack(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), last
        if last:
            self.one, self.two = Hwio(self.one), Hwio(self.two)

    def forward(self, x):
        return self.two(self.one(x).relu()).mean((1, 2) if self.last else (2, 3))


def captured(model, path, x):
    with torch.no_grad(), whence.capture(model.eval(), path):
        model(x)
    return path


def test_channels_last_faces_channels_first(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    reference = captured(Stack(), tmp_path / "ref", x)
    clean, bad = Stack(True), Stack(True)
    bad.two.weight.data[..., 3] *= 1.1
    result = whence.compare(
        reference, captured(clean, tmp_path / "tgt", x.permute(0, 2, 3, 1).contiguous())
    )
    assert result.status == "same"
    assert dims(result, reference, "two")[0]["param.weight"] == "rearrange(x, 'a b c d -> d c a b')"
    result = whence.compare(
        reference, captured(bad, tmp_path / "bad", x.permute(0, 2, 3, 1).contiguous())
    )
    assert [(f.name, f.verdict) for f in result.findings] == [("two", "param-diff")]
    assert "in row 3" in result.findings[0].sentence


def test_batch_norms_folded_into_convolutions(tmp_path):
    x = torch.randn(2, 3, 10, 10)
    model = Pictures().eval()
    reference = captured(model, tmp_path / "ref", x)
    for gone in (True, False):
        result = whence.compare(
            reference, captured(folded(model, gone), tmp_path / f"folded{gone}", x)
        )
        assert (result.status, result.coverage.share, result.unmatched) == ("same", 1.0, 0)
        assert "2 batch norms of the reference are folded" in result.plan.notes[0]
    bad = folded(model)
    bad.conv.weight.data[2] *= 1.2
    result = whence.compare(reference, captured(bad, tmp_path / "bad", x))
    assert [f.name for f in result.findings] == ["conv"]
    other = copy.deepcopy(model)
    other.bn.weight.data *= 1.1
    result = whence.compare(reference, captured(other, tmp_path / "other", x))
    assert [(f.name, f.verdict) for f in result.findings] == [("bn", "param-diff")]


class Core(nn.Module):
    def __init__(self, heads_first):
        super().__init__()
        self.heads_first = heads_first

    def forward(self, q, k, v):
        if self.heads_first:
            return F.scaled_dot_product_attention(q, k, v)
        return (
            F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
            .transpose(1, 2)
            .contiguous()
        )


class Heads(nn.Module):
    def __init__(self, heads_first, forget=False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.core, self.heads_first, self.forget = Core(heads_first), heads_first, forget

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], HEADS, -1) for p in (self.q, self.k, self.v))
        if self.heads_first:
            q, k, v = (y.transpose(1, 2).contiguous() for y in (q, k, v))
        out = self.core(q, k, v)
        return self.o((out.transpose(1, 2) if self.heads_first != self.forget else out).flatten(2))


@pytest.mark.parametrize("tokens", [7, HEADS])
def test_heads_before_or_after_tokens(tmp_path, tokens):
    """(b, h, q, d) against (b, q, h, d); with as many tokens as heads the shapes are equal."""
    x = torch.randn(2, tokens, WIDTH)
    reference = captured(Heads(True), tmp_path / "ref", x)
    result = whence.compare(reference, captured(Heads(False), tmp_path / "tgt", x))
    assert result.status == "same"
    assert set(dims(result, reference, "core")[0].values()) == {
        "rearrange(x, 'a b c d -> a c b d')"
    }


def test_a_forgotten_transposition_is_not_undone(tmp_path):
    x = torch.randn(2, HEADS, WIDTH)
    reference = captured(Heads(True), tmp_path / "ref", x)
    result = whence.compare(reference, captured(Heads(False, forget=True), tmp_path / "tgt", x))
    assert result.status == "different"
    assert result.findings[0].name == "Heads"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (None, []),
        (rows("layers.1.self_attn.k_proj", 3), ["layers.1.self_attn.qkv_proj"]),
        (rows("layers.2.mlp.up_proj", 3), ["layers.2.mlp.gate_up_proj"]),
        (rows("layers.1.post_attention_layernorm", 3), ["layers.1.post_attention_layernorm"]),
        (spoilt("layers.1.mlp.down_proj", slice(None)), ["layers.1.mlp.down_proj"]),
    ],
)
def test_a_serving_engine_as_the_reference(ways, change, named):
    """Its residual is apart, so that what it is given faces tensors of several calls of the
    target.
    """
    result = whence.compare(ways("served"), ways("split", change, ids=IDS[:1]))
    assert result.status == ("different" if named else "same")
    assert [f.name for f in result.findings] == named


def test_low_precision_of_another_form(ways):
    """The target's rows are the reference's rounded, and its two streams are rounded apart."""
    reference = ways("split", ids=IDS[:1])
    result = whence.compare(reference, ways("served", lambda model: model.bfloat16()))
    assert (result.status, result.findings) == ("same", ())
    result = whence.compare(
        reference,
        ways("served", lambda model: rows(QKV, slice(WIDTH, 2 * WIDTH))(model.bfloat16())),
    )
    assert [f.name for f in result.findings] == ["layers.1.self_attn.k_proj"]


# ---- neurons and heads in another order, in weights before and after


def shuffled(model):
    """Every layer has its own order of neurons; all have one of heads."""
    heads = torch.arange(WIDTH).view(HEADS, -1)[[2, 0, 3, 1]].flatten()
    for i, layer in enumerate(model.layers):
        order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(i))
        for name in ("gate_proj", "up_proj"):
            layer.mlp.get_submodule(name).weight.data = layer.mlp.get_submodule(name).weight.data[
                order
            ]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, order].contiguous()
        for name in ("q_proj", "k_proj", "v_proj"):
            for p in layer.self_attn.get_submodule(name).parameters():
                p.data = p.data[heads]
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data[
            :, heads
        ].contiguous()


def test_neurons_and_heads_in_another_order(ways):
    result = whence.compare(ways("split"), ways("split", shuffled))
    assert (result.status, result.coverage.share) == ("same", 1.0)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("mlp.down_proj", "layers.1.mlp.down_proj"),
        ("self_attn.o_proj", "layers.1.self_attn.o_proj"),
    ],
)
def test_an_order_that_one_weight_does_not_share_is_a_fault(ways, module, named):
    """All others of the model are shuffled: this one reads its inputs in the old order."""

    def change(model):
        old = model.layers[1].get_submodule(module).weight.data.clone()
        shuffled(model)
        model.layers[1].get_submodule(module).weight.data = old

    result = whence.compare(ways("split"), ways("split", change))
    assert result.status == "different"
    assert result.findings[0].name == named


# ---- torch's attention keeps its projections in one parameter of its own


class Encoder(nn.Module):
    def __init__(self, apart=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attn, self.out = (
            nn.LayerNorm(WIDTH),
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            nn.Linear(WIDTH, WIDTH),
        )
        nn.init.normal_(self.attn.in_proj_bias)
        if apart:
            self.attn = ThreeProjections(self.attn)

    def forward(self, x):
        y = self.norm(x)
        return self.out(x + self.attn(y, y, y, need_weights=False)[0])


class ThreeProjections(nn.Module):
    def __init__(self, old):
        super().__init__()
        weights, biases = old.in_proj_weight.chunk(3), old.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (linear(w, b) for w, b in zip(weights, biases))
        self.out_proj = linear(old.out_proj.weight, old.out_proj.bias)

    def forward(self, q, k, v, need_weights=False):
        q, k, v = (
            p(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for p, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        return self.out_proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        ), None


@pytest.mark.parametrize("apart", [True, False])
def test_projections_that_are_parameters_of_a_call_itself(tmp_path, apart):
    x = torch.randn(2, 5, WIDTH)
    reference = captured(Encoder(not apart), tmp_path / "ref", x)
    result = whence.compare(reference, captured(Encoder(apart), tmp_path / "tgt", x))
    assert (result.status, result.coverage.share, result.unmatched) == ("same", 1.0, 0)
    bad = Encoder(apart)
    (bad.attn.k.weight if apart else bad.attn.in_proj_weight).data[3 if apart else WIDTH + 3] *= 1.2
    result = whence.compare(reference, captured(bad, tmp_path / "bad", x))
    assert [f.name for f in result.findings] == ["attn"]
    if apart:
        assert result.findings[0].verdict == "param-diff"
        assert result.findings[0].sentence.endswith("; k of the target")


class Square(nn.Module):
    """Images as high as wide, a residual: turned ones look much like turned ones for many layers
    on.
    """

    def __init__(self, turn):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), Pool(turn)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.stem(x))
        for conv in self.convs:
            x = torch.relu(x + 0.3 * conv(x))
        return self.head(x.mean((2, 3)))


class Pool(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, x):
        out = torch.nn.functional.max_pool2d(x, 2)
        return out.transpose(2, 3).contiguous() if self.turn else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_turned_image_is_a_fault_where_it_is_turned(tmp_path, dtype):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    reference = captured(Square(False), tmp_path / "ref", x)
    result = whence.compare(
        reference, captured(Square(True).to(dtype), tmp_path / "tgt", x.to(dtype))
    )
    assert (result.status, [f.name for f in result.findings]) == ("different", ["pool"])


class Cells(nn.Module):
    def __init__(self, swap):
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = (
            nn.ModuleList(nn.LSTMCell(12, 12) for _ in range(2)),
            nn.Linear(12, 5),
        )
        if swap:
            cell = self.cells[0]
            for p in cell.parameters():
                p.data = p.data.view(4, 12, *p.shape[1:])[[0, 3, 1, 2]].reshape(p.shape)

    def forward(self, x):
        state = [(torch.zeros(len(x), 12), torch.zeros(len(x), 12)) for _ in self.cells]
        for t in range(x.shape[1]):
            out = x[:, t]
            for i, cell in enumerate(self.cells):
                state[i] = cell(out, state[i])
                out = state[i][0]
        return self.head(out)


def test_gates_in_another_order_are_a_fault_of_the_parameters(tmp_path):
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    result = whence.compare(
        captured(Cells(False), tmp_path / "ref", x), captured(Cells(True), tmp_path / "tgt", x)
    )
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].verdict) == ("cells.0", "param-diff")
    assert "another order" in result.findings[0].sentence


class Wrapped(nn.Module):
    """Hands on what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_layer_is_paired_with_the_layer_and_not_with_what_holds_it(tmp_path):
    """A wrapped block is the one child of its wrapper, as attention is a child of the block."""
    transformers = pytest.importorskip("transformers")
    runs = []
    for name in ("plain", "wrapped"):
        torch.manual_seed(0)
        config = transformers.MptConfig(
            d_model=32, n_heads=4, n_layers=2, vocab_size=50, max_seq_len=128, expansion_ratio=2
        )
        model = transformers.MptForCausalLM(config).eval()
        if name == "wrapped":
            model.transformer.blocks = nn.ModuleList(map(Wrapped, model.transformer.blocks))
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(torch.arange(24).reshape(2, 12), use_cache=False)
        runs.append(tmp_path / name)
    result = whence.compare(*runs)
    assert (result.status, result.findings) == ("same", ())
    assert not result.without_partner  # the inner one is opened: its code is that of the block
    calls = whence.open_run(runs[1]).calls
    scopes = {calls[pair.target].scope for pair in result.plan.pairs}
    assert {f"transformer.blocks.{k}" for k in range(2)} <= scopes
