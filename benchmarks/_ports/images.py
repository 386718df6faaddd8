"""Ports of models that read images: a diffusion step, ConvNeXt, shifted windows, two towers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _ports.pair import (
    Pair,
    Port,
    Ported,
    filled,
    forward,
    linear,
    normal,
    own,
    parameter,
    parameters,
    stacked,
    whole,
)

# A step of diffusion

CHANNELS, GROUPS, TIME = 16, 4, 24


class Residual(nn.Module):
    """Two convolutions and what the time adds between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.GroupNorm(GROUPS, before),
            nn.Conv2d(before, after, 3, padding=1),
        )
        self.time_emb_proj = nn.Linear(TIME, after)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, after), nn.Conv2d(after, after, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: (batch, channels, height, width); time: (batch, TIME)."""
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        h = h + self.time_emb_proj(self.nonlinearity(time))[:, :, None, None]
        h = self.conv2(self.nonlinearity(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Spatial(nn.Module):
    """Attention over places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(GROUPS, width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, channels, height, width)."""
        h = self.group_norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            p(h).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.to_q, self.to_k, self.to_v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.to_out(y).transpose(1, 2).view_as(x)


class TimeEmbedding(nn.Module):
    """Sines of the time through two products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.act, self.linear_2 = (
            nn.Linear(CHANNELS, TIME),
            nn.SiLU(),
            nn.Linear(TIME, TIME),
        )

    def forward(self, time: Tensor) -> Tensor:
        """time: (batch,)."""
        half = CHANNELS // 2
        rates = torch.exp(-math.log(1000.0) * torch.arange(half, dtype=time.dtype) / half)
        angles = time[:, None] * rates
        return self.linear_2(self.act(self.linear_1(torch.cat([angles.cos(), angles.sin()], -1))))


class Denoiser(nn.Module):
    """One way down, one way up."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embedding, self.conv_in = TimeEmbedding(), nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down = Residual(CHANNELS, CHANNELS)
        self.downsample = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.mid, self.attention = Residual(CHANNELS, 2 * CHANNELS), Spatial(2 * CHANNELS)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = Residual(3 * CHANNELS, CHANNELS)
        self.conv_norm_out, self.conv_act = nn.GroupNorm(GROUPS, CHANNELS), nn.SiLU()
        self.conv_out = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """The noise in an image."""
        emb = self.time_embedding(time)
        skip = self.down(self.conv_in(image), emb)
        h = self.attention(self.mid(self.downsample(skip), emb))
        h = self.up(torch.cat([self.upsample(h), skip], 1), emb)
        return self.conv_out(self.conv_act(self.conv_norm_out(h)))


class DenoiserPort(Ported):
    """Functions of tables of numbers; products over places are convolutions of one place."""

    def __init__(self, model: Denoiser, fault: str) -> None:
        super().__init__(fault)
        self.names = {name: name.replace(".", "_") for name, _ in model.named_parameters()}
        for name, tensor in model.named_parameters():
            self.register_parameter(self.names[name], parameter(tensor))

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        return tuple(getattr(self, self.names[f"{name}.{kind}"]) for kind in ("weight", "bias"))

    def grouped(self, x: Tensor, name: str, groups: int = GROUPS, eps: float = 1e-5) -> Tensor:
        """A norm by groups, by hand."""
        parts = x.reshape(len(x), groups, -1)
        spread, mean = torch.var_mean(parts, dim=-1, keepdim=True, unbiased=False)
        weight, bias = self.of(name)
        out = ((parts - mean) / torch.sqrt(spread + eps)).view_as(x)
        return out * weight[None, :, None, None] + bias[None, :, None, None]

    def residual(self, x: Tensor, time: Tensor, name: str) -> Tensor:
        """One residual block."""
        is_mid = name == "mid"

        def has(fault: str) -> bool:
            return is_mid and self.fault == fault

        h = self.grouped(x, f"{name}.norm1", 2 if has("groups") else GROUPS)
        h = F.conv2d(F.silu(h), *self.of(f"{name}.conv1"), padding=1)
        shift = F.linear(
            time if has("time_silu") else F.silu(time), *self.of(f"{name}.time_emb_proj")
        )
        late = has("late")
        h = h if late else h + shift[..., None, None]
        h = self.grouped(h, f"{name}.norm2", eps=1e-1 if has("eps") else 1e-5)
        h = h + shift[..., None, None] if late else h
        h = F.conv2d(h * h.sigmoid(), *self.of(f"{name}.conv2"), padding=1)
        if f"{name}.conv_shortcut.weight" in self.names:
            x = F.conv2d(x, *self.of(f"{name}.conv_shortcut"))
        return x + h

    def spatial(self, x: Tensor) -> Tensor:
        """Attention over places."""
        batch, width = x.shape[:2]
        h = self.grouped(x, "attention.group_norm")
        q, k, v = (
            F.conv2d(h, w[..., None, None], b).reshape(batch, 2, width // 2, -1)
            for w, b in (self.of(f"attention.to_{n}") for n in "qkv")
        )
        scores = torch.einsum("bhci,bhcj->bhij", q, k)
        scores = scores / math.sqrt(width if self.fault == "scale" else width // 2)
        scores = scores.softmax(-2 if self.fault == "softmax" else -1)
        y = torch.einsum("bhij,bhcj->bhci", scores, v).reshape(x.shape)
        weight, bias = self.of("attention.to_out")
        return x + F.conv2d(y, weight[..., None, None], bias)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """The noise in an image."""
        rates = 1000.0 ** (-torch.arange(CHANNELS // 2, dtype=time.dtype) / (CHANNELS // 2))
        angles = torch.outer(time, rates)
        waves = [angles.cos(), angles.sin()]
        waves = waves[::-1] if self.fault == "sines" else waves
        t = F.linear(torch.cat(waves, 1), *self.of("time_embedding.linear_1"))
        t = F.linear(F.silu(t), *self.of("time_embedding.linear_2"))
        skip = self.residual(F.conv2d(image, *self.of("conv_in"), padding=1), t, "down")
        h = F.conv2d(skip, *self.of("downsample"), stride=2, padding=1)
        h = self.spatial(self.residual(h, t, "mid"))
        if self.fault == "bilinear":
            h = F.interpolate(h, scale_factor=2, mode="bilinear")
        else:
            h = h.repeat_interleave(2, 2).repeat_interleave(2, 3)
        both = [skip, h] if self.fault == "skip" else [h, skip]
        h = self.grouped(self.residual(torch.cat(both, 1), t, "up"), "conv_norm_out")
        return F.conv2d(F.silu(h), *self.of("conv_out"), padding=1)


def diffusion(fault: str) -> Pair:
    """A small denoiser."""
    model = filled(Denoiser())
    inputs = normal(2, 3, 8, 8), torch.tensor([3.0, 40.0])
    return Pair(model, DenoiserPort(model, fault), inputs, forward)


# ConvNeXt


class ChannelNorm(nn.LayerNorm):
    """A layer norm of channels that stand before the places."""

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, channels, height, width)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    """A wide convolution by channel, and two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.pwconv1 = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width)
        self.act, self.pwconv2 = nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, channels, height, width)."""
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        h = self.gamma * self.pwconv2(self.act(self.pwconv1(h)))
        return x + h.permute(0, 3, 1, 2)


class Next(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 2, 2), ChannelNorm(12, eps=1e-6))
        self.stage0 = nn.Sequential(NextBlock(12), NextBlock(12))
        self.downsample = nn.Sequential(ChannelNorm(12, eps=1e-6), nn.Conv2d(12, 24, 2, 2))
        self.stage1 = nn.Sequential(NextBlock(24), NextBlock(24))
        self.norm, self.head = nn.LayerNorm(24, eps=1e-6), nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.stage1(self.downsample(self.stage0(self.stem(x))))
        return self.head(self.norm(x.mean((2, 3))))


class NextPort(Ported):
    """Channels first throughout, products as convolutions, the gain drawn into the last of them."""

    def __init__(self, model: Next, fault: str, *, folds: bool = True) -> None:
        super().__init__(fault)
        blocks = [*model.stage0, *model.stage1]
        self.enter, self.reduce = own(model.stem[0]), own(model.downsample[1])
        self.near = nn.ModuleList(own(b.dwconv) for b in blocks)
        self.grow = nn.ModuleList(self.pointwise(b.pwconv1.weight, b.pwconv1.bias) for b in blocks)
        self.folds = folds
        self.shrink = nn.ModuleList()
        for i, b in enumerate(blocks):
            gain = b.gamma if folds and not self.has("gamma", i) else torch.ones_like(b.gamma)
            bias = b.pwconv2.bias * (1 if self.has("bias_gain", i) else gain)
            self.shrink.append(self.pointwise(b.pwconv2.weight * gain[:, None], bias))
        self.gains = parameters([b.gamma for b in blocks] if not folds else [])
        norms = [model.stem[1], *(b.norm for b in blocks), model.downsample[0], model.norm]
        self.scales = parameters([n.weight for n in norms])
        self.shifts = parameters([n.bias for n in norms])
        self.scores = own(model.head)

    @staticmethod
    def pointwise(weight: Tensor, bias: Tensor) -> nn.Conv2d:
        """A product as a convolution of one place."""
        module = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
        module.weight, module.bias = parameter(weight[..., None, None]), parameter(bias)
        return module

    def normed(self, x: Tensor, i: int, eps: float = 1e-6) -> Tensor:
        """A layer norm of the second axis."""
        centred = x - x.mean(1, keepdim=True)
        shape = (-1, *[1] * (x.ndim - 2))
        out = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + eps)
        return out * self.scales[i].view(shape) + self.shifts[i].view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.normed(self.enter(x), 0)
        for i in range(4):
            if i == 2:
                x = self.reduce(x if self.fault == "down_norm" else self.normed(x, 5))
            near = self.near[i]
            if self.has("reflect", i):
                padded = F.pad(
                    x, (3, 3, 3, 3), mode="reflect" if min(x.shape[2:]) > 3 else "circular"
                )
                h = F.conv2d(padded, near.weight, near.bias, groups=x.shape[1])
            else:
                h = near(x)
            h = self.normed(h, i + 1, 1e-1 if self.has("eps", i) else 1e-6)
            h = self.grow[i](h)
            h = self.shrink[i](F.gelu(h, approximate="tanh" if self.has("tanh", i) else "none"))
            if not self.folds and not self.has("gamma", i):
                h = h * self.gains[i][:, None, None]
            x = x + h
        x = x.amax((2, 3)) if self.fault == "pool" else x.mean((2, 3))
        return self.scores(self.normed(x, 6))


def convnext(fault: str) -> Pair:
    """Channels first, with the gain folded."""
    model = filled(Next())
    return Pair(model, NextPort(model, fault), (normal(2, 3, 16, 16),), forward)


def image_step(model: nn.Module, inputs: tuple[Tensor, ...], fault: str) -> Sequence[Tensor]:
    """Two steps of training towards classes."""
    images, labels = inputs
    optimiser = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=fault == "nesterov", foreach=False
    )
    losses = []
    for step in range(2):
        optimiser.zero_grad()
        smoothing = 0.0 if fault == "smoothing" else 0.1
        scores = model(images.roll(step, 0))
        loss = F.cross_entropy(scores, labels.roll(step, 0), label_smoothing=smoothing)
        loss.backward()
        if fault == "halved":
            for tensor in model.parameters():
                tensor.grad.mul_(0.5)
        optimiser.step()
        losses.append(loss.detach())
    return losses


def convnext_training(fault: str) -> Pair:
    """Training steps of ConvNeXt, channels first."""
    model = filled(Next())
    inputs = normal(2, 3, 16, 16), torch.tensor([2, 5])
    pair = Pair(model, NextPort(model, fault, folds=False), inputs, image_step)
    pair.reference.train()
    pair.port.train()
    return pair


# Shifted windows

SIDE, WINDOW, WIDE, HEADS = 8, 4, 24, 3


class WindowAttention(nn.Module):
    """Attention inside windows with a bias of relative places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, HEADS))
        grid = torch.stack(torch.meshgrid(*[torch.arange(WINDOW)] * 2, indexing="ij")).flatten(1)
        apart = (grid[:, :, None] - grid[:, None]) + WINDOW - 1
        self.register_buffer("index", apart[0] * (2 * WINDOW - 1) + apart[1])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (windows, places, width); mask: (windows of one image, places, places)."""
        places = x.shape[1]
        q, k, v = self.qkv(x).reshape(-1, places, 3, HEADS, WIDE // HEADS).permute(2, 0, 3, 1, 4)
        scores = q * (WIDE // HEADS) ** -0.5 @ k.transpose(-2, -1)
        scores = scores + self.relative_position_bias_table[self.index].permute(2, 0, 1)
        if mask is not None:
            scores = scores.unflatten(0, (-1, len(mask))) + mask[:, None]
            scores = scores.flatten(0, 1)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.proj(y)


class SwinBlock(nn.Module):
    """Attention in windows that are shifted or not, and a feed-forward."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.attn = nn.LayerNorm(WIDE), WindowAttention()
        self.norm2 = nn.LayerNorm(WIDE)
        self.mlp = nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE))

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Which places of a shifted window are neighbours."""
        if not self.shift:
            return None
        areas = torch.zeros(1, SIDE, SIDE, 1)
        cuts = slice(0, -WINDOW), slice(-WINDOW, -self.shift), slice(-self.shift, None)
        for number, (rows, columns) in enumerate((r, c) for r in cuts for c in cuts):
            areas[:, rows, columns] = number
        parts = self.windows(areas)[..., 0]
        return (parts[:, None] != parts[:, :, None]).to(dtype) * -100.0

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        """(batch, SIDE, SIDE, c) as (windows, places, c)."""
        count = SIDE // WINDOW
        parts = x.view(len(x), count, WINDOW, count, WINDOW, x.shape[-1])
        return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, SIDE * SIDE, width)."""
        h = self.norm1(x).view(-1, SIDE, SIDE, WIDE)
        h = torch.roll(h, (-self.shift, -self.shift), (1, 2)) if self.shift else h
        h, count = self.attn(self.windows(h), self.mask(x.dtype)), SIDE // WINDOW
        h = h.view(-1, count, count, WINDOW, WINDOW, WIDE).permute(0, 1, 3, 2, 4, 5)
        h = h.reshape(-1, SIDE, SIDE, WIDE)
        h = torch.roll(h, (self.shift, self.shift), (1, 2)) if self.shift else h
        x = x + h.view_as(x)
        return x + self.mlp(self.norm2(x))


class Merging(nn.Module):
    """Four neighbours as one place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduction = (
            nn.LayerNorm(4 * WIDE),
            nn.Linear(4 * WIDE, 2 * WIDE, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, SIDE * SIDE, width)."""
        x = x.view(-1, SIDE, SIDE, WIDE)
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(corners, -1).flatten(1, 2)))


class Swin(nn.Module):
    """Patches, three blocks, a merge."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDE, 2, 2)
        self.blocks = nn.ModuleList(SwinBlock(shift) for shift in (0, WINDOW // 2, 0))
        self.merge, self.norm = Merging(), nn.LayerNorm(2 * WIDE)
        self.head = nn.Linear(2 * WIDE, 6)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.merge(x)).mean(1))


class SwinPort(Ported):
    """One attention over all places, where a mask leaves the windows; patches by a product."""

    def __init__(self, model: Swin, fault: str) -> None:
        super().__init__(fault)
        self.patch = linear(model.patch_embed.weight.flatten(1), model.patch_embed.bias)
        attentions = [b.attn for b in model.blocks]
        parts = [(a.qkv.weight.chunk(3), a.qkv.bias.chunk(3)) for a in attentions]
        self.q, self.k, self.v = (
            nn.ModuleList(linear(w[j], b[j]) for w, b in parts) for j in range(3)
        )
        self.o = nn.ModuleList(own(a.proj) for a in attentions)
        self.table = parameters([a.relative_position_bias_table for a in attentions])
        self.n1 = nn.ModuleList(own(b.norm1) for b in model.blocks)
        self.n2 = nn.ModuleList(own(b.norm2) for b in model.blocks)
        self.up = nn.ModuleList(own(b.mlp[0]) for b in model.blocks)
        self.down = nn.ModuleList(own(b.mlp[2]) for b in model.blocks)
        self.four, self.two = own(model.merge.norm), own(model.merge.reduction)
        self.end, self.classes = own(model.norm), own(model.head)

    def bias(self, i: int, shift: int) -> Tensor:
        """What is added to the scores of all places with all: (heads, places, places)."""
        y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        sign = -1 if self.has("direction", i) else 1
        y, x = (((t - sign * shift) % SIDE).flatten() for t in (y, x))
        dy, dx = y[:, None] - y[None], x[:, None] - x[None]
        dy, dx = (dx, dy) if self.has("transposed", i) else (dy, dx)
        near = (y[:, None] // WINDOW == y[None] // WINDOW) & (
            x[:, None] // WINDOW == x[None] // WINDOW
        )
        if shift and not self.has("unmasked", i):
            wraps = [(t >= SIDE - shift)[:, None] == (t >= SIDE - shift)[None] for t in (y, x)]
            near = near & wraps[0] & wraps[1]
        index = (dy.clamp(1 - WINDOW, WINDOW - 1) + WINDOW - 1) * (2 * WINDOW - 1)
        index = index + dx.clamp(1 - WINDOW, WINDOW - 1) + WINDOW - 1
        added = self.table[i][index].permute(2, 0, 1)
        return added.masked_fill(~near, -1e4)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.patch(F.unfold(image, 2, stride=2).transpose(1, 2))
        for i in range(3):
            h = self.n1[i](x)
            q, k, v = (
                p[i](h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
            )
            shift = WINDOW // 2 if i == 1 and self.fault != "unshifted" else 0
            scale = 1.0 if self.has("scale", i) else (WIDE // HEADS) ** -0.5
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(i, shift), scale=scale)
            x = x + self.o[i](y.transpose(1, 2).flatten(2))
            h = self.up[i](self.n2[i](x))
            x = x + self.down[i](F.relu(h) if self.has("relu", i) else F.gelu(h))
        x = x.unflatten(1, (SIDE // 2, 2, SIDE // 2, 2))
        order = (0, 1, 3, 2, 4, 5) if self.fault == "merge" else (0, 1, 3, 4, 2, 5)
        x = self.four(x.permute(order).flatten(3).flatten(1, 2))
        return self.classes(self.end(self.two(x)).mean(1))


def swin(fault: str) -> Pair:
    """Shifted windows by one mask."""
    model = filled(Swin())
    return Pair(model, SwinPort(model, fault), (normal(2, 3, 2 * SIDE, 2 * SIDE),), forward)


# Two towers

BROAD, TEXT_HEADS, WORDS, END = 32, 4, 40, 39


class TowerAttention(nn.Module):
    """Attention with a mask or without."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(BROAD, BROAD) for _ in range(4)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Of (batch, tokens, width)."""
        q, k, v = (
            p(x).unflatten(-1, (TEXT_HEADS, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT * (BROAD // TEXT_HEADS) ** -0.5
        scores = scores if mask is None else scores + mask
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class QuickGelu(nn.Module):
    """An approximation by a sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x * torch.sigmoid(1.702 * x)


class TowerFeed(nn.Module):
    """A feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = (
            nn.Linear(BROAD, 64),
            QuickGelu(),
            nn.Linear(64, BROAD),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape that ends with the width."""
        return self.fc2(self.activation_fn(self.fc1(x)))


class TowerLayer(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm1, self.self_attn = nn.LayerNorm(BROAD), TowerAttention()
        self.layer_norm2, self.mlp = nn.LayerNorm(BROAD), TowerFeed()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Of (batch, tokens, width)."""
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class ImageTower(nn.Module):
    """A vector of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, BROAD, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(BROAD))
        self.position_embedding = nn.Embedding(10, BROAD)
        self.pre_layrnorm = nn.LayerNorm(BROAD)
        self.layers = nn.ModuleList(TowerLayer() for _ in range(2))
        self.post_layernorm = nn.LayerNorm(BROAD)

    def forward(self, image: Tensor) -> Tensor:
        """Of (batch, 3, 12, 12)."""
        x = self.patch_embedding(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1)
        x = self.pre_layrnorm(x + self.position_embedding(torch.arange(10)))
        for layer in self.layers:
            x = layer(x, None)
        return self.post_layernorm(x[:, 0])


class TextTower(nn.Module):
    """A vector of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(WORDS, BROAD)
        self.position_embedding = nn.Embedding(8, BROAD)
        self.layers = nn.ModuleList(TowerLayer() for _ in range(2))
        self.final_layer_norm = nn.LayerNorm(BROAD)

    def forward(self, ids: Tensor) -> Tensor:
        """Of (batch, tokens)."""
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
        mask = torch.full((ids.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_layer_norm(x)[torch.arange(len(x)), (ids == END).int().argmax(1)]


class Towers(nn.Module):
    """How well texts and images agree."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model, self.text_model = ImageTower(), TextTower()
        self.visual_projection = nn.Linear(BROAD, 16, bias=False)
        self.text_projection = nn.Linear(BROAD, 16, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        """(texts, images)."""
        seen = self.visual_projection(self.vision_model(image))
        read = self.text_projection(self.text_model(ids))
        seen, read = (t / t.norm(dim=-1, keepdim=True) for t in (seen, read))
        return read @ seen.T * self.logit_scale.exp()


class TowersPort(Ported):
    """torch's own attention, tokens before the batch, one stack of layers for both towers."""

    def __init__(self, model: Towers, fault: str) -> None:
        super().__init__(fault)
        see, read = model.vision_model, model.text_model
        self.patch = linear(see.patch_embedding.weight.flatten(1))
        self.cls = parameter(see.class_embedding)
        self.see_at, self.read_at = (parameter(t.position_embedding.weight) for t in (see, read))
        self.words, self.enter = own(read.token_embedding), own(see.pre_layrnorm)
        layers = [*see.layers, *read.layers]
        self.attention = nn.ModuleList()
        for layer in layers:
            a = layer.self_attn
            fused = stacked(a.q_proj, a.k_proj, a.v_proj)
            module = nn.MultiheadAttention(BROAD, TEXT_HEADS)
            module.in_proj_weight, module.in_proj_bias = fused.weight, fused.bias
            module.out_proj.load_state_dict(a.out_proj.state_dict())
            self.attention.append(module)
        self.ln1 = nn.ModuleList(own(layer.layer_norm1) for layer in layers)
        self.ln2 = nn.ModuleList(own(layer.layer_norm2) for layer in layers)
        self.fc = nn.ModuleList(own(layer.mlp.fc1) for layer in layers)
        self.pr = nn.ModuleList(own(layer.mlp.fc2) for layer in layers)
        self.seen, self.read = own(see.post_layernorm), own(read.final_layer_norm)
        self.to_seen = parameter(model.visual_projection.weight.T)
        self.to_read = parameter(model.text_projection.weight.T)
        self.scale = parameter(model.logit_scale)

    def stack(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        """The layers of one tower on (tokens, batch, width)."""
        for i in range(start, start + 2):
            h = self.ln1[i](x)
            x = x + self.attention[i](h, h, h, attn_mask=mask, need_weights=False)[0]
            h = self.fc[i](self.ln2[i](x))
            h = F.gelu(h) if i == 1 and self.fault == "gelu" else h * torch.sigmoid(1.702 * h)
            x = x + self.pr[i](h)
        return x

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        """(texts, images)."""
        patches = self.patch(F.unfold(image, 4, stride=4).permute(2, 0, 1))
        x = torch.cat([self.cls.expand(1, len(image), -1), patches]) + self.see_at[:, None]
        x = x if self.fault == "enter" else self.enter(x)
        x = self.stack(x, 0, None)
        seen = self.seen(x[0] if self.fault != "pooled" else x.mean(0)) @ self.to_seen
        length = ids.shape[1]
        mask = torch.triu(torch.full((length, length), -math.inf), 1).to(x.dtype)
        y = self.words(ids.T) + self.read_at[:length, None]
        y = self.stack(y, 2, None if self.fault == "causal" else mask)
        at = torch.full((len(ids),), length - 1) if self.fault == "end" else ids.argmax(1)
        read = self.read(y[at, torch.arange(len(ids))]) @ self.to_read
        seen = F.normalize(seen, dim=1)
        read = read if self.fault == "unit" else F.normalize(read, dim=1)
        return (self.scale if self.fault == "scale" else self.scale.exp()) * (read @ seen.mT)


def towers(fault: str) -> Pair:
    """Images against texts."""
    model = filled(Towers())
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
    ids = whole(3, 8, below=END)
    ids[torch.arange(3), torch.tensor([7, 4, 5])] = END
    inputs = normal(3, 3, 12, 12), ids
    return Pair(model, TowersPort(model, fault), inputs, forward)


_NEXT = "stage0.1"
_WINDOWS = "blocks.1 blocks.1.attn"
PORTS = (
    Port(
        "diffusion",
        diffusion,
        {
            "groups": "mid.norm1",
            "time_silu": "mid mid.nonlinearity",
            "late": "mid mid.norm2",
            "eps": "mid.norm2",
            "scale": "attention",
            "softmax": "attention",
            "sines": "time_embedding",
            "bilinear": ". upsample",
            "skip": ". up",
        },
    ),
    Port(
        "convnext",
        convnext,
        {
            "gamma": f"{_NEXT} {_NEXT}.pwconv2",
            "bias_gain": f"{_NEXT} {_NEXT}.pwconv2",
            "down_norm": "downsample downsample.0",
            "reflect": f"{_NEXT}.dwconv",
            "eps": f"{_NEXT}.norm",
            "tanh": f"{_NEXT}.act",
            "pool": ".",
        },
    ),
    Port(
        "convnext, training",
        convnext_training,
        {
            "smoothing": "loss",
            "nesterov": "*",
            "halved": "gradients",
            "gamma": _NEXT,
            "eps": f"{_NEXT}.norm",
            "tanh": f"{_NEXT}.act",
        },
        trains=True,
    ),
    Port(
        "swin",
        swin,
        {
            "unshifted": _WINDOWS,
            "direction": _WINDOWS,
            "transposed": _WINDOWS,
            "unmasked": _WINDOWS,
            "scale": _WINDOWS,
            "relu": "blocks.1.mlp blocks.1.mlp.1",
            "merge": "merge",
        },
    ),
    Port(
        "two towers",
        towers,
        {
            "gelu": "vision_model.layers.1.mlp vision_model.layers.1.mlp.activation_fn",
            "enter": "vision_model vision_model.pre_layrnorm",
            "pooled": "vision_model vision_model.post_layernorm",
            "causal": "text_model text_model.layers.0.self_attn",
            "end": "text_model",
            "unit": ".",
            "scale": ".",
        },
    ),
)
