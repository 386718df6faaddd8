"""Three models and nine layouts, written after the sets before them and before any was compared: a
vision transformer, a ConvNeXt with downsampling, a temporal network of dilated convolutions.
"""

from __future__ import annotations

import base64
import csv
import datetime
import json
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from _hand_made import PT, SUBJECTS, Subject, Tap, Tensor, attended, to_numpy
from _people_models import _rows, _set, _times
from _people_writers import classes, figures, make
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F


class Heads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.temperature = 4, 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attended(q * self.temperature, k, v, self.heads, causal=False)[0])


class Mlp(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class ViTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Heads(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 2, 2)
        self.places = nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.ModuleList(ViTBlock(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x).flatten(2).mT + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Next(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.pwconv1 = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.pwconv2 = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).movedim(1, -1))
        return x + self.pwconv2(self.act(self.pwconv1(y))).movedim(-1, 1)


class ConvNeXt(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList([
            nn.Conv2d(3, width, 1), nn.Sequential(
                nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2)
            ),
        ])  # fmt: skip
        self.stages = nn.ModuleList([
            nn.Sequential(*(Next(width) for _ in range(3))),
            nn.Sequential(*(Next(2 * width) for _ in range(3))),
        ])  # fmt: skip
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for down, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean((2, 3))))


class Temporal(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation) for _ in range(2)
        )
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.bn, self.slope = nn.BatchNorm1d(width), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.conv1(x))
        y = self.bn(self.relu2(self.conv2(y)))
        return F.leaky_relu(x + y, self.slope)


class TCN(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(24, width, 1)
        self.network = nn.Sequential(*(Temporal(width, d) for d in (1, 2, 2, 1, 1)))
        self.decoder = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.network(self.input_proj(x.flatten(1, 2))).mT)


SUBJECTS |= {
    "vit": Subject(ViT, "blocks.", {
        "patches": "patch_embed.proj", "core": "blocks.10.attn", "tanh": "blocks.2.mlp.act",
        "wide": "blocks.7.mlp.fc1", "eps": "blocks.0.norm2", "head": "head",
    }, {
        "patches": _times(1.004), "core": _set("temperature", 0.97),
        "tanh": _set("approximate", "tanh"), "wide": _rows, "eps": _set("eps", 1e-2),
        "head": _rows,
    }, images=True),
    "convnext": Subject(ConvNeXt, "stages.", {
        "stem": "downsample_layers.0", "depthwise": "stages.0.2.dwconv",
        "down": "downsample_layers.1.1", "narrow": "stages.1.1.pwconv2",
        "norm": "stages.1.2.norm", "head": "head",
    }, {
        "stem": _rows, "depthwise": _times(1.01), "down": _times(-1.0), "narrow": _rows,
        "norm": _set("eps", 1e-2), "head": _times(1.02),
    }, images=True),
    "tcn": Subject(TCN, "network.", {
        "projection": "input_proj", "dilation": "network.1.conv1", "bn": "network.3.bn",
        "slope": "network.0", "weights": "network.4.conv2", "decoder": "decoder",
    }, {
        "projection": _times(0.99), "dilation": _rows, "bn": _set("eps", 1e-1),
        "slope": _set("slope", 0.02), "weights": _times(1.03), "decoder": _rows,
    }, images=True),
}  # fmt: skip


def lists(folder: Path, taps: list[Tap]) -> None:
    """activations[name].append(output) in the hook, and one torch.save after all batches."""
    held: dict[str, list[Tensor]] = defaultdict(list)
    for tap in taps:
        held[tap.name].append(tap.outputs[0])
    PT.write(folder / "all_activations", dict(held))


def pickle_a_step(folder: Path, taps: list[Tap]) -> None:
    """step_00000.pkl, a list of dictionaries with times and forms."""
    held: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        held[tap.step].append({
            "layer_name": tap.name, "layer_type": classes(folder.parent.name)[tap.name],
            "timestamp": 1700000000.5 + tap.number, "output_shape": list(array.shape),
            "output": array,
        })  # fmt: skip
    for step, entries in held.items():
        (make(folder) / f"step_{step:05d}.pkl").write_bytes(pickle.dumps(entries))


def npz_a_layer(folder: Path, taps: list[Tap]) -> None:
    """layer_7.npz with what is inside by its short name; what is in no layer in other.npz."""
    files: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        number = re.search(r"(?:^|\.)(?:blocks|network)\.(\d+)(?:\.(.+))?$", tap.name)
        number = number or re.search(r"(?:^|\.)(stages\.\d+\.\d+)(?:\.(.+))?$", tap.name)
        stem = f"layer_{number[1].replace('.', '_')}" if number else "other"
        short = ((number[2] or "block") if number else tap.name).replace(".", "_")
        files[stem] |= {f"{short}_in": to_numpy(tap.inputs[0])}
        files[stem] |= {f"{short}_out": to_numpy(tap.outputs[0])}
    for stem, arrays in files.items():
        np.savez(make(folder) / f"{stem}.npz", **arrays)


def tuples(folder: Path, taps: list[Tap]) -> None:
    """torch.save([(name, inputs, output), ...])."""
    PT.write(folder / "trace", [(tap.name, tap.inputs, tap.outputs[0]) for tap in taps])


def tree_of_hdf5(folder: Path, taps: list[Tap]) -> None:
    """A group a module, as deep as the names, with attributes and both sides."""
    with h5py.File(make(folder) / "model_trace.h5", "w") as file:
        file.attrs["created"] = datetime.datetime(2025, 3, 1, tzinfo=datetime.UTC).isoformat()
        for tap in taps:
            group = file.require_group(f"step_{tap.step}/{tap.name.replace('.', '/')}")
            group.attrs["class"] = classes(folder.parent.name)[tap.name]
            group["input"], group["output"] = (
                to_numpy(t[0]) for t in (tap.inputs, tap.outputs)
            )  # fmt: skip


def safetensors_a_step(folder: Path, taps: list[Tap]) -> None:
    """acts-step3.safetensors with NAME:in and NAME:out."""
    held: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for tap in taps:
        held[tap.step][f"{tap.name}:in"] = tap.inputs[0].contiguous().clone()
        held[tap.step][f"{tap.name}:out"] = tap.outputs[0].contiguous().clone()
    for step, tensors in held.items():
        save_file(tensors, str(make(folder) / f"acts-step{step}.safetensors"))


def base64_lines(folder: Path, taps: list[Tap]) -> None:
    """A line of JSON a tensor, its bytes in base64."""
    with (make(folder) / "dump.jsonl").open("w") as file:
        for tap in taps:
            array = to_numpy(tap.outputs[0])
            file.write(json.dumps({
                "seq": tap.number, "name": tap.name, "dtype": str(array.dtype),
                "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode(),
            }) + "\n")  # fmt: skip


def table_of_sides(folder: Path, taps: list[Tap]) -> None:
    """csv.DictWriter with figures of both sides, as output_mean and input_mean."""
    with (make(folder) / "activation_stats.csv").open("w", newline="") as file:
        writer = None
        for tap in taps:
            row: dict[str, Any] = {
                "idx": tap.number, "module": tap.name,
                "type": classes(folder.parent.name)[tap.name],
                "output_shape": str(tuple(tap.outputs[0].shape)),
            }  # fmt: skip
            for side, tensor in (("input", tap.inputs[0]), ("output", tap.outputs[0])):
                row |= {f"{side}_{k}": v for k, v in figures(tensor).items() if k != "abs_mean"}
            writer = writer or csv.DictWriter(file, list(row))
            if tap is taps[0]:
                writer.writeheader()
            writer.writerow(row)


def logged(folder: Path, taps: list[Tap]) -> None:
    """logger.debug of a name, a shape, the first values and the sum of what came out."""
    with (make(folder) / "debug.log").open("w") as file:
        for tap in taps:
            x = tap.outputs[0].float()
            seen = ", ".join(f"{v:.6f}" for v in x.flatten()[:8].tolist())
            file.write(
                f"2025-03-01 10:00:00,{tap.number:03d} - hooks - DEBUG - {tap.name} | "
                f"{tuple(x.shape)} | sum={x.double().sum():.6f} | abs_max={x.abs().max():.6f} | "
                f"first8=[{seen}]\n"
            )


def layer_name(_subject: str, name: str) -> str:
    """layer_7.mlp_fc1 of blocks.7.mlp.fc1."""
    number = re.search(r"(?:^|\.)(?:blocks|network)\.(\d+)(?:\.(.+))?$", name)
    number = number or re.search(r"(?:^|\.)(stages\.\d+\.\d+)(?:\.(.+))?$", name)
    if not number:
        return name
    return f"layer_{number[1]}.{number[2] or 'block'}".replace(".", "_")
