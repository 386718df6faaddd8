"""What the capture of an ONNX Runtime session costs, at the levels `io` and `modules`, against the
session alone.

    python benchmarks/onnxruntime_capture.py [--json FILE] [--runs 30] [--rounds 3]

The model has the form of a MiniLM (6 layers of width 384, vocabulary 8,192), with drawn weights.
Needs torch and onnx to make it.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

import whence

WIDTH, HEADS, LAYERS, WORDS = 384, 12, 6, 8192


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.dense = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, -1)
        return self.dense((scores @ v).transpose(1, 2).reshape(batch, tokens, WIDTH))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.first = Attention(), torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.second = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.first(x + self.attention(x))
        return self.second(x + self.down(torch.nn.functional.gelu(self.up(x))))


def encoder():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, WIDTH),
        torch.nn.LayerNorm(WIDTH),
        *(Layer() for _ in range(LAYERS)),
    ).eval()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(1, 8, dtype=torch.long),),
            file,
            dynamo=False,
            input_names=["ids"],
            output_names=["hidden"],
            dynamic_axes={"ids": {0: "batch", 1: "tokens"}},
        )
    return file.getvalue()


def measured(model: bytes, level: str, batch: int, tokens: int, runs: int) -> tuple[float, float]:
    """CPU seconds of a run alone, and how many times that a captured one takes: in turns, each
    with other tokens, so that nothing is known from the step before.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    alone, captured = (
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]) for _ in range(2)
    )
    draw = np.random.default_rng(0)
    times: dict[int, list[float]] = {id(alone): [], id(captured): []}
    with (
        tempfile.TemporaryDirectory() as place,
        whence.capture(captured, str(Path(place) / "run"), level=level),
    ):
        for number in range(-2, runs):
            feeds = {"ids": draw.integers(0, WORDS, (batch, tokens))}
            for session in (alone, captured) if number % 2 else (captured, alone):
                began = time.process_time()
                session.run(None, feeds)
                if number >= 0:
                    times[id(session)].append(time.process_time() - began)
    bare, taken = (statistics.median(times[id(s)]) for s in (alone, captured))
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
