"""What a comparison with replay costs, against the model's own forwards.

    python benchmarks/comparing.py [--decode STEPS] [--sample auto|all] [--json FILE]

Two captures of one model with random weights, float32 and bfloat16, on the same tokens: five
forwards of 128 tokens through a model of the llama kind (34 M parameters), or with --decode so many
greedy tokens of a model of the shape of SmolLM2-135M with its key/value cache. Then `whence
compare` in a process of its own, three times: CPU seconds of all its threads, start of Python and
imports included, and the most memory of its own. Beside it the same forwards of the reference
without whence, and what merely importing torch costs. Needs transformers for --decode.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _processes import Cost, cost, python
from capture import Model, smollm2
from torch import nn

import whence

FORWARDS, TOKENS, VOCABULARY = 5, 128, 8192
ROUNDS = 3


def forwards(model: nn.Module) -> None:
    """The forwards of the prefill case, on the same tokens every time."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(FORWARDS):
        model(torch.randint(0, VOCABULARY, (1, TOKENS), generator=chance))


def generation(steps: int) -> Callable[[nn.Module], None]:
    """So many tokens behind a prompt of five. The tokens are given, so both dtypes read the same:
    random weights have no opinion about the next one.
    """

    def generate(model: Any) -> None:
        chance = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (1, steps + 4), generator=chance)
        cache = None
        for step in range(steps):
            read = tokens[:, :5] if step == 0 else tokens[:, step + 4 : step + 5]
            cache = model(read, past_key_values=cache, use_cache=True).past_key_values

    return generate


def bare_seconds(model: nn.Module, run: Callable[[nn.Module], None]) -> float:
    """Median CPU seconds of the forwards without whence."""
    run(model)
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run(model)
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def captured(make: Callable[[], nn.Module], run: Callable[[nn.Module], None], work: Path) -> float:
    """Capture both dtypes into `work`. Returns the CPU seconds of the reference's bare forwards."""
    bare = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = make().eval().to(dtype)
        with torch.inference_mode():
            if dtype == torch.float32:
                bare = bare_seconds(model, run)
            quiet = contextlib.redirect_stderr(io.StringIO())
            with quiet, whence.capture(model, work / str(dtype).removeprefix("torch.")):
                run(model)
    return bare


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decode", type=int, metavar="STEPS", help="decode steps of SmolLM2")
    parser.add_argument("--sample", choices=("auto", "all"), default="auto", help="as compare")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make, run = (smollm2, generation(options.decode)) if options.decode else (Model, forwards)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bare = captured(make, run, work)
        stored = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
        runs = [str(work / "float32"), str(work / "bfloat16")]
        command = python("-m", "whence", "compare", *runs, "--sample", options.sample)
        once = {"OMP_NUM_THREADS": "1"}
        rounds: list[Cost] = []
        imports: list[Cost] = []
        for _ in range(ROUNDS):
            imports.append(cost(python("-c", "import torch"), once))
            rounds.append(cost(command, once))
    answer = rounds[0].output.splitlines()
    cpu = statistics.median(c.cpu_s for c in rounds)
    torch_cpu = statistics.median(c.cpu_s for c in imports)
    figures = {
        "stored_mb": stored / 2**20,
        "bare_cpu_s": bare,
        "compare_cpu_s": cpu,
        "compare_wall_s": statistics.median(c.wall_s for c in rounds),
        "compare_mb": max(c.mb for c in rounds),
        "import_torch_cpu_s": torch_cpu,
        "ratio": cpu / bare,
        "ratio_without_import": (cpu - torch_cpu) / bare,
        "answer": answer[0] if answer else "",
        "exit": rounds[0].exit,
    }
    for name, value in figures.items():
        print(f"{name:<22}{value:.2f}" if isinstance(value, float) else f"{name:<22}{value}")
    for line in answer:
        if line.startswith("  how sure"):
            print(line.strip())
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
