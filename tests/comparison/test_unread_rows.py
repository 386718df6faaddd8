"""Queries that a mask lets see nothing: each way to write attention gives something else for them,
and nobody reads it. What is wrong beside them is found.
"""

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402

nn = torch.nn
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
REAL = torch.arange(6)[None] >= torch.tensor([[0], [2], [3]])  # padded on the left
NOTE = "padding (5 of 18 positions) differs and is left out"


class Attention(nn.Module):
    """way: "fused" gives zeros where nothing is seen, "mean" the mean of all values, "nan" NaN."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (
            part(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.way == "fused":
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            fill = float("-inf") if self.way == "nan" else torch.finfo(q.dtype).min
            scores = torch.where(mask, q @ k.transpose(2, 3) / 8**0.5, fill)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = nn.ModuleList(Attention(way) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask):
        real = attention_mask.bool()
        causal = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril()
        mask = real[:, None, None, :] & causal
        x = self.embed(input_ids)
        for attention in self.attention:
            x = x + attention(x, mask)
        return self.head(self.norm(x)[:, -1])


def captured(path, way, *, change=lambda net: None, real=REAL, level="modules"):
    torch.manual_seed(0)
    net = Net(way).eval()
    ids = torch.randint(1, 50, real.shape, generator=torch.Generator().manual_seed(1))
    change(net)
    with torch.no_grad(), whence.capture(net, path, level=level):
        net(ids * REAL, attention_mask=real.long())
    return path


@pytest.mark.parametrize("level", ["modules", "op"])
@pytest.mark.parametrize(
    "ways", [("mean", "fused"), ("fused", "mean"), ("fused", "nan"), ("nan", "mean")]
)
def test_what_padded_queries_give_is_a_note(tmp_path, ways, level):
    runs = [captured(tmp_path / way, way, level=level) for way in ways]
    result = whence.compare(*runs)
    assert (result.status, result.findings) == ("same", ())
    # Operators of one kind on both sides are judged one by one; each passes on what it was given.
    if level == "modules" or "fused" in ways:
        assert any(NOTE in note for note in result.notes)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_fault_in_rows_that_are_read_is_found(tmp_path, layer):
    def scaled(net):
        weight = net.attention[layer].out.weight
        net.attention[layer].out.forward = lambda x: nn.functional.linear(
            x * torch.where(torch.arange(6) == 5, 1.01, 1.0)[:, None],
            weight,
            net.attention[layer].out.bias,
        )

    result = whence.compare(
        captured(tmp_path / "mean", "mean"), captured(tmp_path / "fused", "fused", change=scaled)
    )
    assert result.status == "different"
    assert result.findings[0].name == f"attention.{layer}.out"


def test_a_fault_of_attention_itself_is_not_excused(tmp_path):
    def sharper(net):
        inside = net.attention[0]

        def forward(x, mask):
            q, k, v = (
                part(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
                for part in (inside.query, inside.key, inside.value)
            )
            attend = nn.functional.scaled_dot_product_attention
            return inside.out(
                attend(q, k, v, attn_mask=mask, scale=0.36).transpose(1, 2).reshape(x.shape)
            )

        inside.forward = forward

    result = whence.compare(
        captured(tmp_path / "mean", "mean"), captured(tmp_path / "fused", "fused", change=sharper)
    )
    assert result.status == "different"
    assert result.findings[0].name == "attention.0"
    assert not any(NOTE in note and "attention.0" in note for note in result.notes)


def test_rows_that_only_one_mask_hides_are_not_excused(tmp_path):
    real = REAL.clone()
    real[0, 0] = False
    result = whence.compare(
        captured(tmp_path / "mean", "mean"), captured(tmp_path / "fused", "fused", real=real)
    )
    assert result.status != "same"


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_model_of_transformers_that_returns_all_positions(tmp_path, use_cache):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    ids = torch.randint(3, 64, REAL.shape, generator=torch.Generator().manual_seed(1))
    for way in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        model.set_attn_implementation(way)
        with torch.no_grad(), whence.capture(model, tmp_path / way):
            model(ids, attention_mask=REAL.long(), use_cache=use_cache)
    for runs in (("eager", "sdpa"), ("sdpa", "eager")):
        result = whence.compare(*(tmp_path / way for way in runs))
        assert (result.status, result.findings) == ("same", ())


def test_a_mask_is_paired_in_its_own_form_where_it_is_made(tmp_path):
    class Masked(nn.Module):
        def __init__(self, additive):
            super().__init__()
            self.additive, self.attend = additive, Attend()

        def forward(self, x, attention_mask):
            mask = attention_mask.bool()[:, None, None, :] & torch.ones(6, 6).tril().bool()
            if self.additive:
                mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min)
            return self.attend(x, mask)

    class Attend(nn.Module):
        def forward(self, x, mask):
            q = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
            if mask.dtype == torch.bool:
                return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return (q @ q.transpose(2, 3) / 8**0.5 + mask).softmax(-1) @ q

    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    for additive in (True, False):
        net = Masked(additive)
        with torch.no_grad(), whence.capture(net, tmp_path / str(additive), level="op"):
            net(x, REAL.flip(1).long())
    for runs in (("True", "False"), ("False", "True")):
        result = whence.compare(*(tmp_path / name for name in runs))
        assert (result.status, result.findings) == ("same", ())


@pytest.mark.parametrize("fault", [False, True])
def test_a_cache_with_room_and_its_wider_mask(tmp_path, fault):
    """The same keys with room behind them, as a static cache has: the mask is another tensor, the
    recorded code does not serve, and padded rows are the mean of more values.
    """

    class Roomy(Attention):
        def forward(self, x, mask):
            room = mask.shape[-1] - x.shape[1]
            q, k, v = (
                part(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            k, v = (nn.functional.pad(part, (0, 0, 0, room)) for part in (k, v))
            scores = torch.where(mask, q @ k.transpose(2, 3) / 8**0.5, -3e38)
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    class RoomyNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Embedding(50, 16), Roomy("mean")
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask
            if mask.ndim == 2:
                mask = mask.bool()[:, None, None, :] & torch.ones(6, 6).tril().bool()
            return self.head(self.attention(self.embed(input_ids), mask)[:, -1])

    wide = nn.functional.pad(REAL[:, None, None, :] & torch.ones(6, 6).tril().bool(), (0, 4))
    ids = torch.randint(1, 50, REAL.shape, generator=torch.Generator().manual_seed(1))
    for name, mask in (("plain", REAL.long()), ("wide", wide)):
        torch.manual_seed(0)
        net = RoomyNet().eval()
        if fault and name == "wide":
            net.attention.out.weight.data *= 1.01
        with torch.no_grad(), whence.capture(net, tmp_path / name):
            net(ids, attention_mask=mask)
    result = whence.compare(tmp_path / "plain", tmp_path / "wide")
    assert result.inputs_differ == ()
    if fault:
        assert (result.status, result.findings[0].name) == ("different", "attention.out")
    else:
        assert (result.status, result.findings) == ("same", ())


class LooksAway(nn.Module):
    """Attention whose mask is True where nothing is to be seen: the last query hides no key."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.out = factor, nn.Linear(16, 16)

    def forward(self, x, attention_mask):
        scores = (x @ x.transpose(1, 2))[:, None].masked_fill(attention_mask, -3e38)
        y = (scores.softmax(-1) @ x[:, None])[:, 0]
        return self.out(y * torch.where(torch.arange(6) == 5, self.factor, 1.0)[:, None])


def test_a_mask_that_says_where_not_to_look_excuses_no_row(tmp_path):
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    future = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(3, 1, 6, 6).contiguous()
    for factor in (1.0, 1.01):
        torch.manual_seed(0)
        net = nn.ModuleDict({"attention": LooksAway(factor)})
        net.forward = lambda x, mask, net=net: net["attention"](x, attention_mask=mask)
        with torch.no_grad(), whence.capture(net, tmp_path / str(factor)):
            net(x, future)
    result = whence.compare(tmp_path / "1.0", tmp_path / "1.01")
    assert (result.status, result.findings[0].name) == ("different", "attention")
