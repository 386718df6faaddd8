"""Three models and eight layouts that set nothing: written after all that they are judged by, and
compared once. A decoder with experts, a network of depthwise convolutions, an encoder of speech.
"""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from _hand_made import PT, SUBJECTS, VOCABULARY, RMSNorm, Subject, Tap, Tensor, attended, to_numpy
from _people_models import _rows, _set, _times
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.w2 = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., k : k + 1] * e(x) for k, e in enumerate(self.experts))  # type: ignore[return-value]


class Grouped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.q_norm, self.o_proj = RMSNorm(width), nn.Linear(width, width, bias=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        return self.o_proj(attended(self.scale * self.q_norm(q), k, v, 4, causal=True)[0])


class Sparse(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(width), Grouped(width)
        self.post_attention_layernorm, self.block_sparse_moe = RMSNorm(width), Mixture(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class Experts(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.model.layers = nn.ModuleList(Sparse(width) for _ in range(5))
        self.model.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.Hardswish(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width), nn.Hardswish(),
            nn.Conv2d(2 * width, width, 1),
        )  # fmt: skip
        self.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return x + y * self.se(y)


class Mobile(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Hardswish())
        self.features = nn.Sequential(stem, *(Inverted(width) for _ in range(5)))
        self.classifier = nn.Sequential(nn.Linear(width, 16), nn.Hardswish(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Conformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.q_proj = nn.LayerNorm(width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.out_proj, self.depthwise_conv = (
            nn.Linear(width, width), nn.Conv1d(width, width, 3, padding=1, groups=width)
        )  # fmt: skip
        self.final_layer_norm, self.fc1 = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.activation_fn, self.fc2 = nn.GELU(), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n = self.self_attn_layer_norm(x)
        mixed, _ = attended(self.q_proj(n), self.k_proj(n), self.v_proj(n), 2, causal=False)
        x = x + self.out_proj(mixed)
        x = x + self.depthwise_conv(x.mT).mT
        return x + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))


class Speech(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(24, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.layers = nn.ModuleList(Conformer(width) for _ in range(4))
        self.layer_norm, self.ctc_proj = nn.LayerNorm(width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x.flatten(1, 2))))).mT
        for layer in self.layers:
            x = layer(x)
        return self.ctc_proj(self.layer_norm(x))


SUBJECTS |= {
    "moe": Subject(Experts, "model.layers.", {
        "embedding": "model.embed_tokens", "scale": "model.layers.2.self_attn",
        "expert": "model.layers.3.block_sparse_moe.experts.1.w2",
        "router": "model.layers.1.block_sparse_moe.gate", "norm": "model.norm", "head": "lm_head",
    }, {
        "embedding": _times(1.01), "scale": _set("scale", 0.9), "expert": _times(1.05),
        "router": _rows, "norm": _set("eps", 1e-2), "head": _times(0.99),
    }),
    "mobile": Subject(Mobile, "features.", {
        "stem": "features.0.0", "batch norm": "features.2.conv.1", "depthwise": "features.3.conv.3",
        "squeeze": "features.4.se.1", "project": "features.5.conv.5", "head": "classifier.2",
    }, {
        "stem": _rows, "batch norm": _set("eps", 1e-1), "depthwise": _times(1.01),
        "squeeze": _times(-1.0), "project": _rows, "head": _times(1.003),
    }, images=True),
    "speech": Subject(Speech, "layers.", {
        "front end": "conv1", "key": "layers.0.k_proj", "tanh": "layers.2.activation_fn",
        "eps": "layers.3.final_layer_norm", "wide": "layers.1.fc1", "head": "ctc_proj",
    }, {
        "front end": _times(0.98), "key": _rows, "tanh": _set("approximate", "tanh"),
        "eps": _set("eps", 1e-2), "wide": _times(1.01), "head": _rows,
    }, images=True),
}  # fmt: skip


def _place(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def torch_appended(folder: Path, taps: list[Tap]) -> None:
    """np.save of one array behind another into one file, names in a list beside it."""
    with (_place(folder) / "acts.npy").open("wb") as file:
        for tap in taps:
            np.save(file, to_numpy(tap.outputs[0]))
    (folder / "names.json").write_text(json.dumps([tap.name for tap in taps]))


def summary(folder: Path, taps: list[Tap]) -> None:
    """{name: {"shape": ..., "norm": ..., "mean": ..., "data": tensor}} with figures beside them."""
    PT.write(folder / "summary", {
        tap.name: {
            "shape": tuple(tap.outputs[0].shape), "norm": tap.outputs[0].float().norm().item(),
            "mean": tap.outputs[0].float().mean().item(), "data": tap.outputs[0],
        } for tap in taps
    })  # fmt: skip


def by_rows(folder: Path, taps: list[Tap]) -> None:
    """A file a sample of the batch: sample_0/name.npy."""
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        for row, values in enumerate(array):
            np.save(_place(folder / f"sample_{row}") / f"{tap.name}.npy", values)


def stages(folder: Path, taps: list[Tap]) -> None:
    """One .npz a module, with input_0, output and the class's name as a text."""
    for tap in taps:
        np.savez(
            _place(folder) / f"{tap.name.replace('.', '_')}.npz", input_0=to_numpy(tap.inputs[0]),
            output=to_numpy(tap.outputs[0]), module=np.array(type(tap).__name__),
        )  # fmt: skip


def tabs(folder: Path, taps: list[Tap]) -> None:
    """Name, then all numbers of a tensor, parted by tabs, with no header."""
    with (_place(folder) / "dump.tsv").open("w") as file:
        for tap in taps:
            numbers = "\t".join(f"{x:.9g}" for x in to_numpy(tap.outputs[0]).ravel().tolist())
            file.write(f"{tap.name}\t{numbers}\n")


def norms(folder: Path, taps: list[Tap]) -> None:
    """print(f"{name:40s} | norm {x.norm():.6f} | absmax {...} | sum {...}")."""
    with (_place(folder) / "train.log").open("w") as file:
        for tap in taps:
            x = tap.outputs[0].double()
            file.write(
                f"[rank{tap.rank}] {tap.name:40s} | norm {x.norm():.6f} | absmax "
                f"{x.abs().max():.6f} | sum {x.sum():.6f} | mean {x.mean():.8f}\n"
            )


def buffers(folder: Path, taps: list[Tap]) -> None:
    """{name: bytes of torch.save}, pickled: tensors that went over a socket."""
    import pickle

    held = {}
    for tap in taps:
        buffer = io.BytesIO()
        torch.save(tap.outputs[0], buffer)
        held[tap.name] = buffer.getvalue()
    (_place(folder) / "received.pkl").write_bytes(pickle.dumps(held))


def phases(folder: Path, taps: list[Tap]) -> None:
    """forward.pt with {step: [(name, out), ...]}, names without their layer, layers as numbers."""
    held = defaultdict(list)
    for tap in taps:
        number = re.search(r"\.(\d+)(?=\.|$)", tap.name)
        held[tap.step].append((
            int(number[1]) if number else -1,
            tap.name.replace(number[0], "", 1) if number else tap.name, tap.outputs[0],
        ))  # fmt: skip
    PT.write(folder / "forward", dict(held))


def phase_name(_subject: str, name: str) -> str:
    """layers.mlp of layer 3 as people would read it: 3.layers.mlp."""
    number = re.search(r"\.(\d+)(?=\.|$)", name)
    return f"{number[1]}.{name.replace(number[0], '', 1)}" if number else name
