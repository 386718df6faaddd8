"""A small decoder and the same decoder as serving engines and converted checkpoints write it."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, DEPTH, HIDDEN, WORDS = 32, 4, 3, 48, 50
IDS = torch.arange(3, 17).reshape(2, 7) * 3 % WORDS


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def attend(q, k, v):
    """(batch, tokens, width) each; heads of width // HEADS, the first half of a head's channels
    turned against the second.
    """
    b, t, _ = q.shape
    q, k, v = (x.view(b, t, HEADS, -1).transpose(1, 2) for x in (q, k, v))
    half = q.shape[-1] // 2
    angle = torch.arange(t)[:, None] / 10.0 ** (torch.arange(half) / half)
    cos, sin = angle.cos().repeat(1, 2).to(q.dtype), angle.sin().repeat(1, 2).to(q.dtype)
    q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4)
        )

    def forward(self, x):
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(WIDTH, HIDDEN, bias=False),
        )
        self.act_fn, self.down_proj = nn.SiLU(), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp = (
            Norm(),
            Attention(),
            Norm(),
            Mlp(),
        )

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.2)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


# ---- the same, written otherwise


class Conv1D(nn.Module):
    """A linear layer that keeps its weight as [in, out], as GPT-2 does."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().T.contiguous())
        self.bias = nn.Parameter(bias.detach().clone()) if bias is not None else None

    def forward(self, x):
        out = x @ self.weight
        return out + self.bias if self.bias is not None else out


def linear(weight, bias=None):
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    out.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        out.bias = nn.Parameter(bias.detach().clone())
    return out


class FusedAttention(nn.Module):
    """q, k and v in one projection: one after another, or for every head its q, k and v
    ("heads").
    """

    def __init__(self, old, order="parts", kind=linear):
        super().__init__()
        self.order, self.o_proj = order, old.o_proj
        parts = [old.q_proj, old.k_proj, old.v_proj]
        weight, bias = (torch.cat([getattr(p, n) for p in parts]) for n in ("weight", "bias"))
        if order == "heads":
            weight, bias = (
                torch.stack(
                    [
                        getattr(p, n).view(HEADS, WIDTH // HEADS, *getattr(p, n).shape[1:])
                        for p in parts
                    ],
                    1,
                ).flatten(0, 2)
                for n in ("weight", "bias")
            )
        self.qkv_proj = kind(weight, bias)

    def forward(self, x):
        qkv = self.qkv_proj(x)
        if self.order == "heads":
            q, k, v = (p.flatten(2) for p in qkv.view(*qkv.shape[:2], HEADS, 3, -1).unbind(3))
        else:
            q, k, v = qkv.chunk(3, -1)
        return self.o_proj(attend(q, k, v))


class FusedMlp(nn.Module):
    """gate and up in one projection, the activation and the product written inline."""

    def __init__(self, old, turned=False):
        super().__init__()
        self.turned, self.down_proj = turned, old.down_proj
        weights = [old.gate_proj.weight, old.up_proj.weight]
        self.gate_up_proj = linear(torch.cat(weights[::-1] if turned else weights))

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)[:: -1 if self.turned else 1]
        return self.down_proj(F.silu(gate) * up)


def fused(model, order="parts", kind=linear, turned=False):
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.self_attn, layer.mlp = (
            FusedAttention(layer.self_attn, order, kind),
            FusedMlp(layer.mlp, turned),
        )
    return model


class DualNorm(nn.Module):
    """Adds the residual in place and hands on both, as serving engines do."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.scale = old.weight, 1.0

    def forward(self, x, residual=None):
        if residual is None:
            return Norm.forward(self, x)
        residual.add_(x, alpha=self.scale)
        return Norm.forward(self, residual), residual


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Core(nn.Module):
    def forward(self, q, k, v):
        return attend(q[None], k[None], v[None])[0]


class ServedAttention(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.qkv_proj, self.o_proj, self.attn = FusedAttention(old).qkv_proj, old.o_proj, Core()

    def forward(self, x):
        return self.o_proj(self.attn(*self.qkv_proj(x).chunk(3, -1)))


class ServedMlp(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = (
            FusedMlp(old).gate_up_proj,
            SiluAndMul(),
            old.down_proj,
        )

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class ServedLayer(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            DualNorm(old.input_layernorm),
            DualNorm(old.post_attention_layernorm),
        )
        self.self_attn, self.mlp = ServedAttention(old.self_attn), ServedMlp(old.mlp)

    def forward(self, x, residual):
        if residual is None:
            residual = x.clone()
            x = self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x), residual)
        return self.mlp(x), residual


class Served(nn.Module):
    """As a serving engine runs it: one sequence, tokens without a batch axis, fused projections,
    the residual carried apart.
    """

    def __init__(self, old):
        super().__init__()
        old = copy.deepcopy(old)
        self.embed, self.lm_head = old.embed, old.lm_head
        self.layers, self.norm = (
            nn.ModuleList(ServedLayer(layer) for layer in old.layers),
            DualNorm(old.norm),
        )

    def forward(self, ids):
        x, residual = self.embed(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        x, _ = self.norm(x, residual)
        return self.lm_head(x)


# ---- parameters in another order


def turned(weight):
    """Rows of every head as pairs (0, n/2, 1, n/2 + 1, ...) instead of halves, as converted
    checkpoints have them.
    """
    return weight.view(HEADS, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class PairedAttention(nn.Module):
    """q and k with channels as pairs; back to halves before they are used."""

    def __init__(self, old):
        super().__init__()
        self.q_proj, self.k_proj = (
            linear(turned(p.weight.detach()), turned(p.bias.detach()))
            for p in (old.q_proj, old.k_proj)
        )
        self.v_proj, self.o_proj = old.v_proj, old.o_proj

    def forward(self, x):
        def back(y):
            return y.view(*y.shape[:2], HEADS, -1, 2).transpose(-1, -2).flatten(2)

        return self.o_proj(attend(back(self.q_proj(x)), back(self.k_proj(x)), self.v_proj(x)))


def paired(model):
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.self_attn = PairedAttention(layer.self_attn)
    return model


def conv1d(model):
    """Every linear layer of the attention keeps its (square) weight transposed."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        for name, old in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Conv1D(old.weight, old.bias))
    return model


class Pictures(nn.Module):
    """Convolutions with batch norms; folded: the norm is in the convolution before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.stem_bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv, self.bn, self.head = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.act = nn.ReLU()
        for bn in (self.stem_bn, self.bn):
            for p in (bn.weight, bn.running_var):
                nn.init.uniform_(p, 0.5, 2)
            for p in (bn.bias, bn.running_mean):
                nn.init.normal_(p)

    def forward(self, x):
        x = self.act(self.stem_bn(self.stem(x)))
        return self.head(self.act(self.bn(self.conv(x))).mean((2, 3)))


def folded(model, gone=True):
    model = copy.deepcopy(model).eval()
    for conv, bn in (("stem", "stem_bn"), ("conv", "bn")):
        joined = nn.utils.fusion.fuse_conv_bn_eval(getattr(model, conv), getattr(model, bn))
        setattr(model, conv, joined)
        setattr(model, bn, nn.Identity() if gone else nn.Sequential())
    return model
