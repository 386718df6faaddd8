"""What the capture of a training step costs, beside the step alone: a small Llama with AdamW, one
thread, in turn, process CPU time.

    python benchmarks/training_capture.py [--steps N] [--json FILE]

Also: how long the comparison of two such runs takes, of four micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import whence

WIDTH, LAYERS, TOKENS, ROWS = 256, 4, 128, 4
WARM = 2
"""Steps before the ones that count: programs are recorded in the first."""


class Training:
    """A model with its optimiser, and steps of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=688,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            vocab_size=2000,
        )
        self.model: Any = LlamaForCausalLM(config).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, 2000, (4, ROWS, TOKENS), generator=draw)

    def step(self, micro_batches: int = 1) -> float:
        """CPU seconds of a step."""
        start = time.process_time()
        for micro in range(micro_batches):
            ids = self._ids[micro]
            (self.model(input_ids=ids, labels=ids).loss / micro_batches).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - start


@contextlib.contextmanager
def captured(training: Training, folder: Path, keep: str) -> Iterator[None]:
    """The model captured, unless `keep` is ""."""
    if not keep:
        yield
        return
    with whence.capture(training.model, folder, keep=keep):
        yield


def steps(folder: Path, keep: str, count: int) -> list[float]:
    """CPU seconds of steps, the first ones left out."""
    training = Training()
    with captured(training, folder, keep):
        return [training.step() for _ in range(WARM + count)][WARM:]


def compared(folder: Path) -> float:
    """CPU seconds of comparing two runs of four micro-batches."""
    for name in ("reference", "target"):
        training = Training()
        if name == "target":
            training.model.config._attn_implementation = "eager"
        with whence.capture(training.model, folder / name):
            training.step(4)
    start = time.process_time()
    status = whence.compare(folder / "reference", folder / "target").status
    seconds = time.process_time() - start
    assert status == "same", status
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"": [], "none": [], "stats": [], "full": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for keep, seconds in times.items():
                seconds += steps(Path(folder) / f"{keep}{number}", keep, options.steps)
        comparison = compared(Path(folder))
    bare = statistics.median(times[""])
    figures = {keep or "bare": statistics.median(s) / bare for keep, s in times.items()}
    for name, ratio in figures.items():
        print(f"{name:6} {ratio:.2f} times the bare step")
    print(
        f"comparison of four micro-batches: {comparison:.1f} s, {comparison / bare:.0f} bare steps"
    )
    if options.json:
        options.json.write_text(json.dumps({**figures, "comparison": comparison, "step": bare}))


if __name__ == "__main__":
    main()
