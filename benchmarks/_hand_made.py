"""Dumps as people make them by hand: small models with faults, and ways to write their tensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
BATCH, TOKENS, VOCABULARY = 4, 6, 97


class Tap(NamedTuple):
    """What a hook saw: number counts the calls of a step."""

    name: str
    step: int
    rank: int
    number: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


# ---- models


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The mixed values and the weights of attention."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, -1e9)
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, weights = attended(self.q_proj(x), self.k_proj(x), self.v_proj(x), 2, causal=True)
        return self.o_proj(mixed), weights


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.act_fn, self.down_proj = nn.SiLU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(width), SelfAttention(width)
        self.post_attention_layernorm, self.mlp = RMSNorm(width), GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, width: int = 16, layers: int = 11) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(layers))
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ConvNet(nn.Module):
    def __init__(self, channels: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.stages = nn.ModuleList(Bottleneck(channels) for _ in range(blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(2), nn.Linear(4 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))


class BertSelf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return attended(self.query(x), self.key(x), self.value(x), 2, causal=False)[0]


class BertOutput(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, out), nn.LayerNorm(out)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self, self.output = BertSelf(width), BertOutput(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class BertIntermediate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.intermediate = BertAttention(width), BertIntermediate(width)
        self.output = BertOutput(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class Embeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, width)
        self.position_embeddings, self.LayerNorm = nn.Embedding(32, width), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.LayerNorm(self.word_embeddings(tokens) + self.position_embeddings(places))


class Encoder(nn.Module):
    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.embeddings = Embeddings(width)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(BertLayer(width) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.encoder.layer:
            x = layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


BENIGN = ("bfloat16", "batch size", "kernel", "repeated")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model. layer: what the scopes of its layers begin with; faults: where each is planted.

    broken: how a module comes to a fault that is no change of what it returns. images: of inputs.
    benign: the changes that are no fault.
    """

    build: Callable[[], nn.Module]
    layer: str
    faults: dict[str, str]
    broken: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    images: bool = False
    benign: tuple[str, ...] = BENIGN


SUBJECTS = {
    "decoder": Subject(Decoder, "layers.", {
        "negated": "layers.2.self_attn.o_proj", "scaled": "layers.3.mlp.gate_proj",
        "rows": "layers.2.self_attn.v_proj", "norm": "layers.4.post_attention_layernorm",
        "rolled": "layers.2.mlp.down_proj", "shifted": "layers.9.mlp.up_proj",
    }),
    "conv": Subject(ConvNet, "stages.", {
        "negated": "stages.1.conv1", "scaled": "stages.2.conv2", "rows": "stages.1.conv2",
        "norm": "stages.2.bn1", "rolled": "stages.1.bn2", "shifted": "stages.3.conv2",
    }, images=True),
    "encoder": Subject(Encoder, "encoder.layer.", {
        "negated": "encoder.layer.1.attention.output.dense",
        "scaled": "encoder.layer.2.intermediate.dense",
        "rows": "encoder.layer.1.attention.self.value",
        "norm": "encoder.layer.2.attention.output.LayerNorm",
        "rolled": "encoder.layer.1.output.dense", "shifted": "encoder.layer.2.attention.self.query",
    }),
}  # fmt: skip
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda y: -y,
    "scaled": lambda y: y * 1.5,
    "rows": lambda y: torch.cat([-y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]], 1),
    "norm": lambda y: y / (1 + y.abs().mean()),
    "rolled": lambda y: y.roll(1, -1),
    "shifted": lambda y: y + 1.0,
}


def model_of(subject: str, change: str = "") -> nn.Module:
    """The model with a fault, or computed otherwise."""
    torch.manual_seed(0)
    model = SUBJECTS[subject].build().eval()
    broken = SUBJECTS[subject].broken
    if change in SUBJECTS[subject].faults:
        place = model.get_submodule(SUBJECTS[subject].faults[change])
        if change in broken:
            broken[change](place)
        else:
            place.register_forward_hook(lambda _module, _inputs, output: FAULTS[change](output))
    if change == "kernel":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, m=module: _in_halves(x, m)  # type: ignore[method-assign]
    return model.bfloat16() if change == "bfloat16" else model


def _in_halves(x: Tensor, linear: nn.Linear) -> Tensor:
    half = x.shape[-1] // 2
    product = x[..., half:] @ linear.weight[:, half:].T + x[..., :half] @ linear.weight[:, :half].T
    return product if linear.bias is None else product + linear.bias


def batch_of(subject: str, seed: int) -> Tensor:
    """Inputs of a step."""
    chance = torch.Generator().manual_seed(seed)
    if SUBJECTS[subject].images:
        return torch.randn(BATCH, 3, 8, 8, generator=chance)
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=chance)


def inputs_of(subject: str, seed: int, change: str) -> Tensor:
    """The inputs of a step, as the changed side has them."""
    x = batch_of(subject, seed)
    if change == "bfloat16" and x.is_floating_point():
        x = x.bfloat16()
    return x[[2, 0, 3, 1]] if change == "shuffled" else x


def taps_of(subject: str, change: str, steps: int, ranks: int) -> list[Tap]:
    """What hooks on every module see, in the order in which they fire."""
    model, taps = model_of(subject, change), list[Tap]()
    now = [0, 0]

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        def see(_module: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            kept = [tuple(t.detach().clone() for t in side) for side in (inputs, outputs)]
            taps.append(Tap(name, *now, 0, *kept))

        return see

    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) and (name or not subject):
            module.register_forward_hook(hook(name))
    for step in range(steps):
        for rank in range(ranks):
            now[:] = step, rank
            x, begin = inputs_of(subject, 10 * step + rank, change), len(taps)
            with torch.no_grad():
                for part in x.split(1) if change == "batch size" else [x]:
                    model(part)
            seen = _gathered(taps[begin:], BATCH if change == "batch size" else 1)
            taps[begin:] = [tap._replace(number=n) for n, tap in enumerate(seen)]
    return taps


def _gathered(taps: list[Tap], parts: int) -> list[Tap]:
    """The taps of a batch that was computed in parts, joined."""
    many = len(taps) // parts
    joined = []
    for same in zip(*(taps[k * many : (k + 1) * many] for k in range(parts)), strict=True):
        sides = (
            tuple(torch.cat(t) if t[0].shape[0] == 1 else t[0] for t in zip(*side, strict=True))
            for side in ([t.inputs for t in same], [t.outputs for t in same])
        )
        joined.append(Tap(*same[0][:4], *sides))
    return joined if parts > 1 else taps


def gradients_of(subject: str, change: str) -> dict[str, Tensor]:
    """The gradients of one batch by parameter. change: "micro", "order", "bfloat16" or a fault."""
    model = model_of(subject, change if change in FAULTS or change == "bfloat16" else "").train()
    x, width = batch_of(subject, 0), {"decoder": VOCABULARY, "conv": 10, "encoder": 5}[subject]
    goal = torch.randint(0, width, x.shape if subject == "decoder" else (BATCH,),
                         generator=torch.Generator().manual_seed(5))  # fmt: skip
    if change == "order":
        x, goal = x.flip(0), goal.flip(0)
    parts = 2 if change == "micro" and subject != "conv" else 1  # a norm of batches sees the batch
    if change == "bfloat16" and x.is_floating_point():
        x = x.bfloat16()
    for part, part_goal in zip(x.chunk(parts), goal.chunk(parts), strict=True):
        scores = model(part).float().flatten(0, -2)
        (F.cross_entropy(scores, part_goal.flatten()) / parts).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# ---- files


def to_numpy(tensor: Tensor, dtype: str = "") -> np.ndarray:
    """An array; what numpy lacks becomes float32."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array = tensor.numpy()
    return array.astype(dtype) if dtype and array.dtype.kind == "f" else array


@dataclass(frozen=True, slots=True)
class Way:
    """How files are written. kind: pt, npz, npy, safetensors, h5 or pkl. dtype: of storage."""

    kind: str
    dtype: str = ""

    def of(self, tensor: Tensor) -> Any:
        """The tensor as it is stored."""
        if self.kind in ("pt", "safetensors"):
            wanted = {"float16": torch.float16, "float32": torch.float32, "": tensor.dtype}
            return (
                tensor.to(wanted[self.dtype]) if tensor.is_floating_point() else tensor
            ).contiguous()
        return to_numpy(tensor, self.dtype)

    def write(self, stem: Path, value: Any) -> None:
        """A file of a tensor, or of a structure of tensors that are stored already."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        path = stem.with_name(f"{stem.name}.{self.kind}")
        if self.kind == "pt":
            torch.save(value, path)
        elif self.kind == "npy":
            np.save(path, value)
        elif self.kind == "npz":
            np.savez(path, **value) if isinstance(value, dict) else np.savez(path, value)
        elif self.kind == "safetensors":
            save_file(value if isinstance(value, dict) else {"tensor": value}, str(path))
        elif self.kind == "pkl":
            path.write_bytes(pickle.dumps(value))
        else:
            with h5py.File(path, "w") as file:
                for name, array in value.items():
                    file.create_dataset(name, data=array)


Names = Callable[[Tap], str]


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to keep taps. name: says all of it. write: puts taps into a folder. keep: which taps
    (`leaves`, `layers`, `all`). touched: how the times of files come about: "written", "equal" or
    "sorted" (a copy). own: what it calls a module of a subject, if not by its name.
    """

    name: str
    write: Callable[[Path, list[Tap]], None]
    keep: str | Callable[[Tap], bool] = "all"
    steps: int = 1
    ranks: int = 1
    touched: str = "written"
    gradients: bool = False
    own: Callable[[str, str], str] = lambda _subject, name: name

    def make(self, folder: Path, subject: str, change: str) -> None:
        """The dump of a model."""
        taps = self._kept(taps_of(subject, change, self.steps, self.ranks), subject)
        self.write(folder, taps)
        self._touch(folder)

    def make_gradients(self, folder: Path, subject: str, change: str) -> None:
        """The dump of a model's gradients."""
        gradients = gradients_of(subject, change).items()
        self.write(folder, [Tap(name, 0, 0, n, (), (g,)) for n, (name, g) in enumerate(gradients)])
        self._touch(folder)

    def _kept(self, taps: list[Tap], subject: str) -> list[Tap]:
        layer = SUBJECTS[subject].layer
        if callable(self.keep):
            return [t for t in taps if self.keep(t)]
        if self.keep == "layers":
            return [t for t in taps if t.name.startswith(layer) and t.name[len(layer) :].isdigit()]
        if self.keep == "leaves":
            names = [t.name for t in taps]
            return [t for t in taps if not any(n.startswith(f"{t.name}.") for n in names)]
        return taps

    def _touch(self, folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        if self.touched == "written":
            return
        for place, path in enumerate(sorted(files)):
            moment = 1_700_000_000 + (place if self.touched == "sorted" else 0)
            os.utime(path, (moment, moment))


def each(
    way: Way, name: Names, value: Callable[[Way, Tap], Any]
) -> Callable[[Path, list[Tap]], None]:
    """One file a tap."""

    def write(folder: Path, taps: list[Tap]) -> None:
        for tap in taps:
            way.write(folder / name(tap), value(way, tap))

    return write


def sides(way: Way, input_names: Names, output_names: Names) -> Callable[[Path, list[Tap]], None]:
    """One file a tensor: inputs and outputs. Names have {} where the place in the tuple goes."""

    def write(folder: Path, taps: list[Tap]) -> None:
        for tap in taps:
            for names, tensors in ((input_names, tap.inputs), (output_names, tap.outputs)):
                for place, tensor in enumerate(tensors):
                    stem = names(tap).replace("{}", str(place))
                    if place == 0 or "{}" in names(tap):
                        way.write(folder / stem, way.of(tensor))

    return write


def grouped(
    way: Way, file: Names, entries: Callable[[Way, Tap], dict[str, Any]],
    form: Callable[[dict[str, Any]], Any] = dict,
) -> Callable[[Path, list[Tap]], None]:  # fmt: skip
    """One file for the taps of one name. form: what the file holds."""

    def write(folder: Path, taps: list[Tap]) -> None:
        files: dict[str, dict[str, Any]] = {}
        for tap in taps:
            files.setdefault(file(tap), {}).update(entries(way, tap))
        for name, held in files.items():
            way.write(folder / name, form(held))

    return write


def first(way: Way, tap: Tap) -> Any:
    """The output of a tap."""
    return way.of(tap.outputs[0])


def both(way: Way, tap: Tap) -> Any:
    """A dictionary of the input and the output."""
    return {"input": way.of(tap.inputs[0]), "output": way.of(tap.outputs[0])}


def entry(key: Names) -> Callable[[Way, Tap], dict[str, Any]]:
    """An entry of the output."""
    return lambda way, tap: {key(tap): first(way, tap)}


def in_and_out(input_names: Names, output_names: Names) -> Callable[[Way, Tap], dict[str, Any]]:
    """Entries of the input and the output."""
    return lambda way, tap: {
        input_names(tap): way.of(tap.inputs[0]),
        output_names(tap): way.of(tap.outputs[0]),
    }


def dotted(tap: Tap) -> str:
    return tap.name


def lined(tap: Tap) -> str:
    return tap.name.replace(".", "_")


def named(text: str) -> Names:
    """Names with {name}, {line}, {step}, {rank}, {number} and so on in them."""

    def name(tap: Tap) -> str:
        layer, inner = layer_of(tap.name)
        return text.format(
            name=tap.name, line=lined(tap), step=tap.step, rank=tap.rank, number=tap.number,
            layer=layer, inner=inner, next=tap.step + 1, hashes="{}",
        )  # fmt: skip

    return name


def layer_of(name: str) -> tuple[str, str]:
    """(layer_10 or the first part of a name, the rest of it)."""
    parts = name.split(".")
    digit = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    if digit is None or parts[0] == "stem":
        return parts[0], ".".join(parts[1:]) or "out"
    return f"layer_{parts[digit]}", ".".join(parts[digit + 1 :]) or "out"


def ranked(held: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "tensor": tensor} for name, tensor in held.items()]


def paired(held: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(held.items())


def ordered_by_name(held: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(held.items()))


def model_output(held: dict[str, Any]) -> Any:
    """What transformers returns, with the layers as a tuple."""
    from transformers.modeling_outputs import BaseModelOutput

    tensors = tuple(held.values())
    return BaseModelOutput(last_hidden_state=tensors[-1], hidden_states=tensors)


PT, NPZ, NPY = Way("pt"), Way("npz"), Way("npy")
SAFE, H5, PKL = Way("safetensors"), Way("h5"), Way("pkl")
