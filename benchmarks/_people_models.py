"""Three more models for hand-made dumps, with faults large and small, from the first layer to the
head: a decoder with fused projections, a U-Net with skips, an encoder with a decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from _hand_made import SUBJECTS, VOCABULARY, RMSNorm, Subject, Tensor, attended
from torch import nn
from torch.nn import functional as F


class FusedAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj(attended(q * self.sharpness, k, v, 4, causal=True)[0])


class WideMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), FusedAttention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), WideMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Writer(nn.Module):
    def __init__(self, width: int = 24, layers: int = 6) -> None:
        super().__init__()
        self.transformer = Stack(width, layers)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens))


class Resnet(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, wide), nn.Conv2d(wide, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(inner)))


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(4, width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        flat = self.group_norm(x).flatten(2).mT
        mixed, _ = attended(self.to_q(flat), self.to_k(flat), self.to_v(flat), 2, causal=False)
        return x + self.to_out[1](self.to_out[0](mixed)).mT.unflatten(2, x.shape[2:])


class Down(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(wide, out), Resnet(out, out)])
        self.downsample = nn.Conv2d(out, out, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for resnet in self.resnets:
            x = resnet(x)
        return self.downsample(x), x


class Up(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.upsample = nn.Conv2d(wide, wide, 3, padding=1)
        self.resnets = nn.ModuleList([Resnet(2 * wide, out), Resnet(out, out)])

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([self.upsample(F.interpolate(x, scale_factor=2.0)), skip], 1)
        for resnet in self.resnets:
            x = resnet(x)
        return x


class Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(width, width), Resnet(width, width)])
        self.attentions = nn.ModuleList([Mixing(width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down_blocks = nn.ModuleList([Down(width, width), Down(width, 2 * width)])
        self.mid_block = Middle(2 * width)
        self.up_blocks = nn.ModuleList([Up(2 * width, width), Up(width, width)])
        self.conv_norm_out, self.conv_act = nn.GroupNorm(4, width), nn.SiLU()
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.conv_in(x), list[Tensor]()
        for down in self.down_blocks:
            x, skip = down(x)
            skips.append(skip)
        x = self.mid_block(x)
        for up in self.up_blocks:
            x = up(x, skips.pop())
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))


class Relative(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.causal = False

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        return self.o(attended(q, k, v, 2, causal=self.causal)[0])


class SelfLayer(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.SelfAttention, self.layer_norm = Relative(width), RMSNorm(width)
        self.SelfAttention.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        return x + self.SelfAttention(normed, normed)


class CrossLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.EncDecAttention, self.layer_norm = Relative(width), RMSNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.EncDecAttention(self.layer_norm(x), memory)


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi(x)))


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.DenseReluDense, self.layer_norm = Dense(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class SideBlock(nn.Module):
    def __init__(self, width: int, decodes: bool) -> None:
        super().__init__()
        inner = [CrossLayer(width)] if decodes else []
        self.layer = nn.ModuleList([SelfLayer(width, decodes), *inner, DenseLayer(width)])

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, memory) if isinstance(layer, CrossLayer) else layer(x)
        return x


class Side(nn.Module):
    def __init__(self, width: int, layers: int, decodes: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(SideBlock(width, decodes) for _ in range(layers))
        self.final_layer_norm = RMSNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.block:
            x = block(x, memory)
        return self.final_layer_norm(x)


class Translator(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder, self.decoder = Side(width, layers, False), Side(width, layers, True)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(tokens)
        memory = self.encoder(x, x)
        return self.lm_head(self.decoder(self.shared(tokens.roll(1, 1)), memory))


def _set(name: str, value: Any) -> Any:
    return lambda module: setattr(module, name, value)


def _moved(module: nn.Module) -> None:
    """What comes in is one too large."""
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


def _rows(module: nn.Module) -> None:
    """Two channels of what a module computes are exchanged."""
    with torch.no_grad():
        module.weight[[1, 2]] = module.weight[[2, 1]]  # type: ignore[index]


def _times(factor: float) -> Any:
    def change(module: nn.Module) -> None:
        with torch.no_grad():
            module.weight *= factor  # type: ignore[operator]

    return change


# What is expected of each was written before anything was compared: the module named here, or,
# where a layout does not keep it, the first module that it keeps and that differs.
PEOPLE = {
    "gpt": Subject(Writer, "transformer.h.", {
        "positions": "transformer.wpe", "attention core": "transformer.h.1.attn",
        "tanh": "transformer.h.3.mlp.act", "eps": "transformer.h.4.ln_2",
        "channels": "transformer.h.2.attn.c_proj", "head": "lm_head",
    }, {
        "positions": _moved, "attention core": _set("sharpness", 1.03),
        "tanh": _set("approximate", "tanh"), "eps": _set("eps", 1e-2), "channels": _rows,
        "head": _times(1.01),
    }),
    "unet": Subject(UNet, "down_blocks.", {
        "stem": "conv_in", "eps": "down_blocks.0.resnets.1.norm2",
        "query": "mid_block.attentions.0.to_q", "channels": "up_blocks.0.resnets.0.conv1",
        "groups": "up_blocks.1.resnets.1.norm1", "head": "conv_out",
    }, {
        "stem": _times(1.002), "eps": _set("eps", 1e-1), "query": _times(-1.0),
        "channels": _rows, "groups": _set("num_groups", 2), "head": _times(0.5),
    }, images=True),
    "t5": Subject(Translator, "encoder.block.", {
        "embedding": "shared", "causal": "encoder.block.1.layer.0.SelfAttention",
        "memory": "decoder.block.0.layer.1.EncDecAttention.k",
        "wide": "decoder.block.1.layer.2.DenseReluDense.wi",
        "norm": "encoder.final_layer_norm", "head": "lm_head",
    }, {
        "embedding": _times(1.005), "causal": _set("causal", True), "memory": _rows,
        "wide": _times(1.02), "norm": _set("eps", 1e-1), "head": _rows,
    }),
}  # fmt: skip
SUBJECTS.update(PEOPLE)
