"""What the capture of a model of OpenVINO costs, at the levels `io` and `modules`, against the
model alone.

    python benchmarks/openvino_capture.py [--json FILE] [--runs 30] [--rounds 3]

The model is that of `onnxruntime_capture.py`. Needs torch, onnx and onnxruntime to make it.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import openvino
from onnxruntime_capture import WORDS, encoder

import whence

CONFIG = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}


def measured(model: bytes, level: str, batch: int, tokens: int, runs: int) -> tuple[float, float]:
    """CPU seconds of an inference alone, and how many times that a captured one takes: in turns,
    each with other tokens.
    """
    core = openvino.Core()
    source = core.read_model(model)
    alone = core.compile_model(core.read_model(model), "CPU", CONFIG)
    draw = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as place,
        whence.capture(source, str(Path(place) / "run"), level=level),
    ):
        captured = core.compile_model(source, "CPU", CONFIG)
        times: dict[int, list[float]] = {id(alone): [], id(captured): []}
        for number in range(-2, runs):
            feeds = {"ids": draw.integers(0, WORDS, (batch, tokens))}
            for compiled in (alone, captured) if number % 2 else (captured, alone):
                began = time.process_time()
                compiled(feeds)
                if number >= 0:
                    times[id(compiled)].append(time.process_time() - began)
    bare, taken = (statistics.median(times[id(m)]) for m in (alone, captured))
    return bare, taken / bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    model = encoder()
    rows = []
    for batch, tokens in ((1, 32), (1, 128), (8, 128)):
        row: dict[str, object] = {"batch": batch, "tokens": tokens}
        for level in ("io", "modules"):
            rounds = [
                measured(model, level, batch, tokens, chosen.runs) for _ in range(chosen.rounds)
            ]
            row["ms alone"] = round(1e3 * statistics.median(bare for bare, _ in rounds), 2)
            row[level] = [round(ratio, 3) for _, ratio in sorted(rounds, key=lambda r: r[1])]
        rows.append(row)
        print(*(f"{name} {value}" for name, value in row.items()), sep="   ", flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
