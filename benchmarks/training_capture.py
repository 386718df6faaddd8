"""What the capture of a training step costs, beside the step alone: a small Llama with AdamW, one
thread, in turn, process CPU time.

    python benchmarks/training_capture.py [--steps N] [--json FILE]
    python benchmarks/training_capture.py --device cuda [--shape gpu]

On a device it is wall time, each step followed by a synchronisation. Also: how long the comparison
of two such runs takes, of four micro-batches.

`hashed`: each tensor that a step records is hashed once and nothing else is done; `read`: it is
measured as well; `copied`: it is written to a file as well. No capture that keeps hashes,
statistics or elements costs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import whence
from whence.frameworks import host


class Shape(NamedTuple):
    """Of the model, and of a batch."""

    width: int
    inner: int
    layers: int
    heads: int
    tokens: int
    rows: int


SHAPES = {"small": Shape(256, 688, 4, 8, 128, 4), "gpu": Shape(768, 2048, 8, 12, 512, 4)}
WARM = 2
"""Steps before the ones that count: programs are recorded in the first."""


class Training:
    """A model with its optimiser, and steps of it."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            vocab_size=2000,
        )
        self.model: Any = LlamaForCausalLM(config).train().to(device)
        self._device = device
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 2000, (4, shape.rows, shape.tokens), generator=draw)
        self._ids = ids.to(device)

    def step(self, micro_batches: int = 1) -> float:
        """Seconds of a step: of the processor, or wall time where it runs on a device."""
        start = self._now()
        for micro in range(micro_batches):
            ids = self._ids[micro]
            with torch.autocast(self._device, torch.bfloat16, enabled=self._device != "cpu"):
                loss = self.model(input_ids=ids, labels=ids).loss / micro_batches
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._now() - start

    def _now(self) -> float:
        if self._device == "cpu":
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()


@contextlib.contextmanager
def captured(training: Training, folder: Path, keep: str) -> Iterator[None]:
    """The model captured, unless `keep` is ""."""
    if not keep:
        yield
        return
    with whence.capture(training.model, folder, keep=keep):
        yield


def steps(training: Training, folder: Path, keep: str, count: int) -> list[float]:
    """Seconds of steps, the first ones left out."""
    with captured(training, folder, keep):
        return [training.step() for _ in range(WARM + count)][WARM:]


def passes(folder: Path, count: int) -> tuple[float, float, float]:
    """CPU seconds a step of hashing every tensor that a run of `count` steps recorded; of measuring
    it as well; of writing it to a new file as well.
    """
    run = whence.open_run(folder)
    contents = [
        (np.array(run.array(record.id)), record.dtype)
        for record in run.records
        if record.elements is not None
    ]
    times = [time.process_time()]
    for array, _ in contents:
        host.digest_at(array.ctypes.data, array.nbytes)
    times.append(time.process_time())
    for array, dtype in contents:
        host.statistics_at(array.ctypes.data, array.nbytes, dtype)
    times.append(time.process_time())
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for array, _ in contents:
            file.write(array.data)
    times.append(time.process_time())
    hashed, read, copied = ((end - times[0]) / count for end in times[1:])
    return hashed, read, copied


def compared(folder: Path, shape: Shape, device: str) -> float:
    """CPU seconds of comparing two runs of four micro-batches."""
    for name in ("reference", "target"):
        training = Training(shape, device)
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"": [], "none": [], "stats": [], "full": []}
    least: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for keep, seconds in times.items():
                training = Training(shape, options.device)
                run = Path(folder) / f"{keep}{number}"
                seconds += steps(training, run, keep, options.steps)
                if keep == "full":
                    least.append(passes(run, WARM + options.steps))
                shutil.rmtree(run, ignore_errors=True)
        comparison = compared(Path(folder), SHAPES["small"], options.device)
    bare = statistics.median(times[""])
    figures = {keep or "bare": statistics.median(s) / bare for keep, s in times.items()}
    for name, seconds in zip(("hashed", "read", "copied"), zip(*least, strict=True), strict=True):
        figures[name] = 1 + statistics.median(seconds) / bare
    for name, ratio in figures.items():
        print(f"{name:6} {ratio:.2f} times the bare step")
    print(
        f"comparison of four micro-batches: {comparison:.1f} s, {comparison / bare:.0f} bare steps"
    )
    if options.json:
        options.json.write_text(json.dumps({**figures, "comparison": comparison, "step": bare}))


if __name__ == "__main__":
    main()
