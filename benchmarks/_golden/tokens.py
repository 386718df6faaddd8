"""Generated tokens, their scores, texts, and labelled tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import whence
from _golden.nets import Record, captured
from _golden.place import Answers, Case, Place, interpreter, pair

PROMPTS = ((5, 9, 2), (7, 1, 30, 12, 4), (11, 3))


def _generation(
    run: Callable[[Any], Any],
    change: Callable[[Any], object] | None = None,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Record:
    def record(path: Path) -> None:
        import generating

        net = generating.model(dtype)
        if change is not None:
            change(net)
        with whence.capture(net, path, **({"logits": True} | how)):
            run(net)

    return record


def _batch(net: Any) -> None:
    import generating

    generating.generate(net, PROMPTS, 4)


def _one_by_one(net: Any) -> None:
    import generating

    for prompt in PROMPTS:
        generating.loop(net, prompt, 4)


def _without_cache(net: Any) -> None:
    import generating

    for prompt in PROMPTS[:2]:
        generating.loop(net, prompt, 4, cached=False)


def _late(net: Any) -> None:
    import generating

    generating.from_step(net, "model.layers.1.mlp", 2, 3.0)


def _other(net: Any) -> None:
    net.lm_head.weight.data[7] += 1.0


class _Scores(nn.Module):
    """Small, so that what it generates is quick to tell."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.body, self.lm_head = (
            nn.Embedding(24, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 24),
        )
        self.scale = scale
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.relu(self.body(self.embed(input_ids).cumsum(1)))) * self.scale


def _logits(scale: float = 1.0, gain: float = 1.0, **how: Any) -> Record:
    def build() -> nn.Module:
        model = _Scores(scale)
        model.body.weight.data[:4] *= gain
        return model

    def generate(model: Any) -> None:
        ids = torch.tensor([[5, 17, 11, 3]])
        for _ in range(3):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)

    return captured(build, drive=generate, level="logits", **how)


# ---- texts


def _texts(outputs: list[Any]) -> str:
    rows = ({"src": f"prompt {n}", "tgt": "", "output": o} for n, o in enumerate(outputs))
    return "".join(json.dumps(row) + "\n" for row in rows)


def _files(place: Place) -> Answers:
    good = [f"the answer number {n} is long" for n in range(8)]
    wrong = ["no" if n < 3 else text for n, text in enumerate(good)]
    ids = [[n, n + 1, n + 2, n + 3] for n in range(8)]
    other = [[n, n + 1, n + (2 if n % 2 else 5), n + 3] for n in range(8)]
    for name, rows in (("ref", good), ("bad", wrong), ("ids", ids), ("other", other)):
        (place.folder / f"{name}.json").write_text(_texts(rows))
    yield "same.txt", place.whence("tokens", "ref.json", "ref.json")
    yield "different.txt", place.whence("tokens", "ref.json", "bad.json")
    yield "ids.txt", place.whence("tokens", "ids.json", "other.json", "--rows", "3")
    yield "csv.txt", place.whence("tokens", "ids.json", "other.json", "--format", "csv")
    yield "json.txt", place.whence("tokens", "ref.json", "bad.json", "--format", "json")
    commits = ("--before", "ref.json", "ref.json", "--after", "ref.json", "bad.json")
    yield "commits.txt", place.whence("tokens", *commits)
    (place.folder / "found.json").write_text(
        place.whence("tokens", "ref.json", "bad.json", "--format", "json")
        .partition("\n")[2]
        .rpartition("exit code")[0]
    )
    yield "page.txt", place.whence("report", "found.json", "-o", "out/tokens.html")


# ---- labels


def _labels(path: Path, factor: float, side: str = "") -> None:
    """Tensors labelled in code, of both sides or of one."""
    draw = np.random.default_rng(0).integers(-8, 8, size=(2, 3, 4)).astype(np.float32)
    with whence.recording(path):
        for turn in range(2):
            with whence.task(f"turn {turn}"):
                for number, x in enumerate(draw):
                    if side in ("", "reference"):
                        whence.label(f"layer {number}", x, side="reference")
                    if side in ("", "target"):
                        value = x * np.float32(factor if turn else 1)
                        whence.label(f"layer {number}", value, side="target")


def _labelled(factor: float) -> Case:
    def case(place: Place) -> Answers:
        place.once("both", lambda path: _labels(path, factor))
        yield "labels.txt", place.whence("labels", "both", "-o", "out/cmp")
        place.once("ref", lambda path: _labels(path, factor, "reference"))
        place.once("tgt", lambda path: _labels(path, factor, "target"))
        yield "two.txt", place.whence("labels", "ref", "tgt")
        yield "json.txt", place.whence("labels", "both", "--format", "json")

    return case


LABELS = """
import sys
import numpy as np
import whence

weights = np.eye(8, dtype=np.float32) * 2
for turn in range(2):
    with whence.task(f"turn {turn}"):
        x = y = np.arange(16, dtype=np.float32).reshape(2, 8)
        for number in range(3):
            x = x @ weights
            whence.label("layer", x, side="reference")
            y = y @ (weights * (1.5 if number == 1 and "bad" in sys.argv else 1))
            whence.label("layer", y, side="target")
"""


def _labels_of_a_program(place: Place) -> Answers:
    (place.folder / "both.py").write_text(LABELS)
    program = ("--", interpreter(), "both.py")
    yield "same.txt", place.whence("run", "--compare", "-o", "out/same", *program)
    yield "bad.txt", place.whence("run", "--compare", "-o", "out/bad", *program, "bad")


CASES: dict[str, Case] = {
    "generated": pair(_generation(_batch), _generation(_batch)),
    "generated_one_by_one": pair(_generation(_batch), _generation(_one_by_one)),
    "generated_without_cache": pair(_generation(_one_by_one), _generation(_without_cache)),
    "generated_bf16": pair(_generation(_batch), _generation(_batch, dtype=torch.bfloat16)),
    "generated_fault": pair(_generation(_batch), _generation(_batch, _late)),
    "generated_scores": pair(
        _generation(_batch, level="logits"), _generation(_batch, _other, level="logits")
    ),
    "logits": pair(_logits(), _logits()),
    "logits_gain": pair(_logits(), _logits(gain=1.25)),
    "logits_scaled": pair(_logits(), _logits(scale=0.0625)),
    "texts": _files,
    "labels": _labelled(1.0),
    "labels_fault": _labelled(1.5),
    "labels_of_a_program": _labels_of_a_program,
}
