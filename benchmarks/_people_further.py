"""Two models and nine layouts, written after the sets before them and before any was compared: a
state space model and a diffusion transformer, with faults, rounding and a batch in another order.
"""

from __future__ import annotations

import base64
import datetime
import functools
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _hand_made import (
    PT,
    SUBJECTS,
    VOCABULARY,
    RMSNorm,
    Subject,
    Tap,
    Tensor,
    attended,
    inputs_of,
    layer_of,
    model_of,
    to_numpy,
)
from _people_models import _rows, _set, _times
from _people_writers import classes, figures, make
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 4 * width, bias=False)
        self.conv1d = nn.Conv1d(2 * width, 2 * width, 3, padding=2, groups=2 * width)
        self.x_proj = nn.Linear(2 * width, 2 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(2, 2 * width)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(2 * width, 1))
        self.D, self.out_proj = nn.Parameter(torch.ones(2 * width)), nn.Linear(2 * width, width)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.in_proj(x).chunk(2, -1)
        inner = F.silu(self.conv1d(inner.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(inner).split([2, 4, 4], -1)
        dt = F.softplus(self.dt_proj(dt))
        state, seen = torch.zeros_like(dt[:, 0, :, None] * b[:, 0, None]), []
        for t in range(x.shape[1]):
            kept = torch.exp(-dt[:, t, :, None] * self.A_log.exp())
            state = kept * state + (dt[:, t] * inner[:, t])[..., None] * b[:, t, None]
            seen.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(seen, 1) + self.D * inner
        return self.out_proj(y * F.silu(self.gain * gate))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(width), Mixer(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class StateSpace(nn.Module):
    def __init__(self, width: int = 12, layers: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(VOCABULARY, width)
        self.backbone.layers = nn.ModuleList(Residual(width) for _ in range(layers))
        self.backbone.norm_f = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.backbone.embedding(tokens)
        for layer in self.backbone.layers:
            x = layer(x)
        return self.lm_head(self.backbone.norm_f(x))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Fused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attended(q * self.sharpness, k, v, 4, causal=False)[0])


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn, self.mlp = Fused(width), Feed(width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, -1)
        x = x + gate1[:, None] * self.attn(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(_modulated(self.norm2(x), shift2, scale2))


class Final(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False)
        self.linear = nn.Linear(width, 12)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, -1)
        return self.linear(_modulated(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Its moment of diffusion comes from its image, so that one tensor is all of its input."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(3, width, 2, 2)
        self.t_embedder = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.places = nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(layers))
        self.final_layer = Final(width)

    def forward(self, x: Tensor) -> Tensor:
        moment = x.mean((1, 2, 3))[:, None] * torch.arange(1, 5, dtype=x.dtype)
        c = self.t_embedder(torch.cat([moment.sin(), moment.cos()], -1))
        x = self.x_embedder(x).flatten(2).mT + self.places
        for block in self.blocks:
            x = block(x, c)
        return self.final_layer(x, c)


_BENIGN = ("bfloat16", "kernel", "shuffled")
SUBJECTS |= {
    "ssm": Subject(StateSpace, "backbone.layers.", {
        "embedding": "backbone.embedding", "convolution": "backbone.layers.1.mixer.conv1d",
        "step size": "backbone.layers.2.mixer.dt_proj", "gate": "backbone.layers.3.mixer",
        "norm": "backbone.norm_f",
    }, {
        "embedding": _times(1.01), "convolution": _rows, "step size": _times(1.05),
        "gate": _set("gain", 1.05), "norm": _set("eps", 1e-2),
    }, benign=_BENIGN),
    "dit": Subject(DiT, "blocks.", {
        "patches": "x_embedder", "modulation": "blocks.1.adaLN_modulation.1",
        "attention": "blocks.2.attn", "tanh": "blocks.3.mlp.act", "head": "final_layer.linear",
    }, {
        "patches": _times(0.99), "modulation": _rows, "attention": _set("sharpness", 1.05),
        "tanh": _set("approximate", "tanh"), "head": _rows,
    }, images=True, benign=_BENIGN),
}  # fmt: skip


def step_and_name(folder: Path, taps: list[Tap]) -> None:
    """torch.save({(step, name): (inputs, output)})."""
    PT.write(folder / "trace", {(t.step, t.name): (t.inputs, t.outputs[0]) for t in taps})


def below_classes(folder: Path, taps: list[Tap]) -> None:
    """Linear/blocks.0.mlp.fc1/out_0001.npy: folders of classes with folders of modules inside."""
    for tap in taps:
        place = make(folder / classes(folder.parent.name)[tap.name] / tap.name)
        np.save(place / f"out_{tap.step:04d}.npy", to_numpy(tap.outputs[0]))


_PARTS = {"qkv": ("q", "k", "v"), "in_proj": ("in_x", "in_z")}


def layer_and_name(subject: str, name: str) -> str:
    """layer03.mixer_in_proj of backbone.layers.3.mixer.in_proj."""
    layer, inner = layer_of(name)
    if not name.startswith(SUBJECTS[subject].layer):
        return name.replace(".", "_")
    return f"layer{int(layer.removeprefix('layer_')):02d}.{inner.replace('.', '_')}"


def divided(folder: Path, taps: list[Tap]) -> None:
    """rank0_layer03.npz; what one side computes in one product, the other keeps in parts."""
    files: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        layer, _, short = layer_and_name(folder.parent.name, tap.name).rpartition(".")
        array, file = to_numpy(tap.outputs[0]), f"rank{tap.rank}{layer and '_'}{layer}"
        parts = _PARTS.get(tap.name.rpartition(".")[2], ()) if folder.name != "ref" else ()
        if parts:
            stem = short.rpartition("_")[0] if "qkv" in short else short.removesuffix("_in_proj")
            for part, piece in zip(parts, np.split(array, len(parts), -1), strict=True):
                files[file][f"{stem}_{part}"] = piece
        else:
            files[file][short] = array
    for file, arrays in files.items():
        np.savez(make(folder) / f"{file}.npz", **arrays)


def npy_in_base64(folder: Path, taps: list[Tap]) -> None:
    """A line of JSON a tensor: base64 of what np.save writes."""
    with (make(folder) / "acts.jsonl").open("w") as file:
        for tap in taps:
            buffer = io.BytesIO()
            np.save(buffer, to_numpy(tap.outputs[0]))
            text = base64.b64encode(buffer.getvalue()).decode()
            file.write(json.dumps({"step": tap.step, "layer": tap.name, "npy_b64": text}) + "\n")


def names_beside(folder: Path, taps: list[Tap]) -> None:
    """np.savez(*arrays), and a line a name in names.txt."""
    np.savez(make(folder) / "acts.npz", *(to_numpy(tap.outputs[0]) for tap in taps))
    (folder / "names.txt").write_text("".join(f"{tap.name}\n" for tap in taps))


@functools.cache
def _gradients(subject: str, change: str) -> dict[str, Tensor]:
    model = model_of(subject, "" if change == "ref" else change)
    x = inputs_of(subject, 0, change)
    model(x).float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def with_gradients(folder: Path, taps: list[Tap]) -> None:
    """act_NAME_20250301-104500-000123.pt of what comes out, and grad_NAME_... of parameters."""
    begin = datetime.datetime(2025, 3, 1, 10, 45, len(folder.name), tzinfo=datetime.UTC)
    gradients = reversed(_gradients(folder.parent.name, folder.name).items())
    files = [*((f"act_{tap.name}", tap.outputs[0]) for tap in taps),
             *((f"grad_{name}", tensor) for name, tensor in gradients)]  # fmt: skip
    for number, (name, tensor) in enumerate(files):
        moment = begin + datetime.timedelta(milliseconds=number * (3 + len(folder.name) % 4))
        PT.write(folder / f"{name}_{moment:%Y%m%d-%H%M%S-%f}", tensor)


def line_of_text(folder: Path, taps: list[Tap]) -> None:
    """What C++ writes: a line with the name, the type and the shape, then the elements."""
    for tap in taps:
        array = to_numpy(tap.outputs[0]).astype("<f4")
        header = f"{tap.name} float32 {array.ndim} {' '.join(map(str, array.shape))}\n"
        stem = f"{tap.number:03d}_{tap.name.replace('.', '_')}"
        (make(folder) / f"{stem}.bin").write_bytes(header.encode() + array.tobytes())


def ruled(folder: Path, taps: list[Tap]) -> None:
    """A table that tabulate prints, with four statistics a layer."""
    with (make(folder) / "stats.log").open("w") as file:
        wide = max(len(tap.name) for tap in taps)
        rule = f"+-{'-' * wide}-+-----------------+------------+------------+------------+\n"
        file.write(f"Using device: cpu\nForward pass, step 0\n{rule}| {'layer':<{wide}} | shape"
                   f"           | mean       | std        | absmax     |\n{rule}")  # fmt: skip
        for tap in taps:
            x = figures(tap.outputs[0])
            most = max(abs(x["min"]), abs(x["max"]))
            shape = str(tuple(tap.outputs[0].shape))
            file.write(f"| {tap.name:<{wide}} | {shape:<15} | {x['mean']:>10.6f} "
                       f"| {x['std']:>10.6f} | {most:>10.6f} |\n")  # fmt: skip
        file.write(rule)


def axes_of_frameworks(folder: Path, taps: list[Tap]) -> None:
    """NCHW on one side and NHWC on the other; [batch, time, width] against [time, batch, width]."""
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        if folder.name != "ref" and array.ndim > 2:
            array = np.moveaxis(array, 1, -1) if array.ndim == 4 else array.swapaxes(0, 1)
        stem = f"{tap.number:02d}-{tap.name}"
        np.save(make(folder) / f"{stem}.npy", np.ascontiguousarray(array))
