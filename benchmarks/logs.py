"""Speed of reading Paddle's logs: opening one, and parsing every number in it, against reading its
lines and against numpy's parser alone.

    python benchmarks/logs.py [--json] [--megabytes 30] [--rounds 5]

Hook lines of tensors of 64 to 3072 elements in two steps; medians of process CPU time, in MB of
text a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from whence import readers


def printed(array: np.ndarray) -> str:
    """A 2-d float32 tensor as Paddle prints it, six numbers a line."""
    rows = []
    for row in array:
        texts = [f"{v: .8f}" for v in row]
        rows.append(
            "["
            + ",\n         ".join(", ".join(texts[i : i + 6]) for i in range(0, len(texts), 6))
            + "]"
        )
    body = ",\n        ".join(rows)
    return (
        f"Tensor(shape={list(array.shape)}, dtype=float32, place=Place(cpu), "
        f"stop_gradient=True,\n       [{body}])\n"
    )


def write(path: Path, nbytes: int) -> list[str]:
    """Write a log of that size, two steps of the same names; returns its prints."""
    draw = np.random.default_rng(0)
    prints = [printed(draw.normal(size=(4, n)).astype(np.float32)) for n in (16, 48, 64, 256, 768)]
    step: list[str] = []
    size, number = 0, 0
    while 2 * size < nbytes:
        one = prints[number % len(prints)]
        step.append(f"matmul_v2 matmul_v2_{number}.tmp_0 {one}")
        size, number = size + len(step[-1]), number + 1
    path.write_text("".join(step * 2))
    return [prints[i % len(prints)] for i in range(number)] * 2


def elements(path: Path) -> int:
    """Open the log and read every tensor; how many numbers there were."""
    run = readers.open_run(path)
    return sum(run.array(r.id).size for r in run.records)


def lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def numpy_alone(bodies: list[bytes]) -> int:
    """What any reader has to do at least: text that is nothing but numbers, through numpy's
    parser.
    """
    return sum(np.fromstring(body, sep=" ").size for body in bodies)


def rate(nbytes: int, work: Callable[[], object], rounds: int) -> float:
    """MB of text a second."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return nbytes / statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.log"
        prints = write(path, given.megabytes * 1_000_000)
        bodies = [
            p.partition("\n")[2].translate(str.maketrans("[](),\n", "      ")).encode()
            for p in prints
        ]
        nbytes = path.stat().st_size
        found = {
            "megabytes": nbytes / 1e6,
            "tensors": len(prints),
            "open_mb_s": rate(nbytes, lambda: readers.open_run(path), given.rounds),
            "open_and_parse_mb_s": rate(nbytes, lambda: elements(path), given.rounds),
            "lines_mb_s": rate(nbytes, lambda: lines(path), given.rounds),
            "numpy_alone_mb_s": rate(nbytes, lambda: numpy_alone(bodies), given.rounds),
        }
    found["of_numpy_alone"] = found["open_and_parse_mb_s"] / found["numpy_alone_mb_s"]
    print(
        json.dumps(found)
        if given.json
        else "\n".join(f"{key:<22} {value:.4g}" for key, value in found.items())
    )


if __name__ == "__main__":
    main()
