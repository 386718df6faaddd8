"""Cost of `whence.label`: without a run, with one, for the first labels and for the twenty
thousandth; beside writing each tensor as .npy.

    python benchmarks/labels.py [--json] [--labels 2500,5000,10000,20000] [--rounds 3]

Each label is a new (4, 64) float32 tensor of torch, alternately of both sides. Microseconds of
process CPU time per label, medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _rounds import machine

import whence


def each(count: int, take: Callable[[int, torch.Tensor], object]) -> float:
    """Microseconds of CPU per call of `take`, on tensors that were made before."""
    tensors = [torch.full((4, 64), float(i)) for i in range(count)]
    start = time.process_time()
    for i, tensor in enumerate(tensors):
        take(i, tensor)
    return (time.process_time() - start) / count * 1e6


def labelled(i: int, tensor: torch.Tensor) -> None:
    whence.label("x", tensor, side="target" if i % 2 else "reference")


def with_run(count: int, folder: Path) -> tuple[float, float]:
    """(of a label, of comparing one) where `count` labels are set into one run."""
    run = folder / "run"
    with whence.recording(run):
        spent = each(count, labelled)
    start = time.process_time()
    result = whence.compare_labels(run, output=folder / "cmp")
    compared = (time.process_time() - start) / count * 1e6
    assert sum(result.counts.values()) == count // 2
    return spent, compared


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--json", action="store_true")
    words.add_argument("--labels", default="2500,5000,10000,20000", metavar="N,...")
    words.add_argument("--rounds", type=int, default=3)
    given = words.parse_args()
    counts = [int(n) for n in given.labels.split(",")]
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        times.setdefault("no run", []).append(each(counts[-1], labelled))
        for count in counts:
            folder = Path(tempfile.mkdtemp())
            try:
                spent, compared = with_run(count, folder)
                times.setdefault(f"label, {count}", []).append(spent)
                times.setdefault(f"compare, {count}", []).append(compared)
                saved = each(
                    count,
                    lambda i, tensor, folder=folder: np.save(folder / f"{i}.npy", tensor.numpy()),
                )
                times.setdefault(f"np.save, {count}", []).append(saved)
            finally:
                shutil.rmtree(folder)
    figures = {name: statistics.median(values) for name, values in times.items()}
    if given.json:
        print(json.dumps({"us": figures, "machine": machine()}, indent=1))
        return
    print(f"without a run       {figures['no run']:8.2f} us a label")
    print("   labels     label   np.save   ratio   compared   us a label")
    for n in counts:
        label, saved = figures[f"label, {n}"], figures[f"np.save, {n}"]
        print(
            f"{n:9d} {label:9.1f} {saved:9.1f} {label / saved:7.2f} "
            f"{figures[f'compare, {n}']:10.1f}"
        )


if __name__ == "__main__":
    main()
