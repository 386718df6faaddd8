"""What capture costs a running model, as ratios of process CPU time (writer threads included) to
the bare forward.

    python benchmarks/capture.py [--json FILE] [--rounds 7] [--quick] [--smollm2]

A 34 M-parameter model of the llama kind (101 modules), one thread, prefill (1 x 128 tokens),
decode (1 x 1), every forward on new tokens, float32 and bfloat16. Variants run in turn within a
round, each beside a bare forward of its own round; figures are medians over the rounds.

`whence` is what a user gets: inputs, outputs, parameters, containers, statistics, hashes, journal
and elements. "steady" are the forwards after the first; "whole run" is opening, first step with all
parameters, the forwards and closing, against as many bare forwards. Program recording happens once
per signature, in the first step, and has a line of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rounds import machine
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.demo import torch_tiny


class MLP(nn.Module):
    """SwiGLU with its activation written inline, as many models have it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(torch_tiny.TinyLM):
    """A model of the llama kind with 101 modules, 100 of which are called in a forward."""

    def __init__(self, vocabulary: int = 8192, width: int = 512, hidden: int = 1376) -> None:
        super().__init__(vocabulary, width, heads=8, hidden=hidden, layers=8)
        for layer in self.layers:
            layer.mlp = MLP(width, hidden)


class Hooks:
    """A forward hook on every module."""

    def __init__(self, model: nn.Module, hook: Callable[..., None]) -> None:
        self.handles = [module.register_forward_hook(hook) for module in model.modules()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def saving(folder: Path) -> Callable[..., None]:
    """What many scripts do: torch.save of every output into a file of its own."""
    folder.mkdir()
    count = 0

    def hook(_module: nn.Module, _given: Any, made: Any) -> None:
        nonlocal count
        for tensor in tensors_in(made):
            torch.save(tensor.detach().clone(), folder / f"{count}.pt")
            count += 1

    return hook


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a result; a cache in it is passed over."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def own_memory() -> int:
    """Bytes of memory that are the process's own, mapped files aside; 0 where /proc has no word of
    it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
    return 1024 * int(kilobytes[0]) if kilobytes else 0


def give_back() -> None:
    """Hand memory that an earlier variant left free to the system, so that each begins alike."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def measure(
    model: nn.Module,
    draw: Callable[[], Tensor],
    forwards: int,
    open_variant: Callable[[], Any] | None,
) -> dict[str, float]:
    """CPU seconds: bare (forwards just before), open, first step, steady (forwards after it),
    close; and grown, the bytes of memory taken from the end of bare to the end of steady. Every
    forward gets tokens of its own: what equals an earlier forward is written once, so
    the same tokens again would cost nothing to keep.
    """

    def run(n: int) -> float:
        given = [draw() for _ in range(n)]
        start = time.process_time()
        for tokens in given:
            model(tokens)
        return time.process_time() - start

    give_back()
    bare = run(forwards)
    memory = own_memory()
    if open_variant is None:
        return {
            "bare": bare,
            "open": 0.0,
            "first": bare / forwards,
            "steady": run(forwards),
            "close": 0.0,
            "grown": own_memory() - memory,
        }
    start = time.process_time()
    variant = open_variant()
    variant.__enter__()
    opened = time.process_time() - start
    first = run(1)
    steady = run(forwards)
    grown = own_memory() - memory
    start = time.process_time()
    variant.__exit__(None, None, None)
    return {
        "bare": bare,
        "open": opened,
        "first": first,
        "steady": steady,
        "close": time.process_time() - start,
        "grown": grown,
    }


def smollm2() -> nn.Module:
    """A model of the shape of SmolLM2-135M, with random weights. Needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape)


def case(
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    shape: tuple[int, int],
    forwards: int,
    rounds: int,
    work: Path,
) -> dict[str, Any]:
    """All variants on one model, dtype and shape."""
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    chance = torch.Generator().manual_seed(1)
    names = iter(range(10**6))

    def draw() -> Tensor:
        return torch.randint(0, 8192, shape, generator=chance)

    def whence_capture(**options: Any) -> Callable[[], Any]:
        return lambda: whence.capture(model, work / f"run{next(names)}", **options)

    variants: dict[str, Callable[[], Any] | None] = {
        "bare again": None,
        "empty hooks": lambda: Hooks(model, lambda *_: None),
        "whence": whence_capture(),
        "whence --no-programs": whence_capture(programs=False),
        "whence --keep stats": whence_capture(keep="stats", programs=False),
        "torch.save per output": lambda: Hooks(model, saving(work / f"saved{next(names)}")),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with torch.inference_mode():
        with contextlib.redirect_stderr(io.StringIO()):
            measure(model, draw, 2, variants["whence"])  # kernels, caches, lazy imports
        for n in range(rounds):
            for name in list(variants)[:: 1 if n % 2 == 0 else -1]:
                with contextlib.redirect_stderr(io.StringIO()):
                    taken[name].append(measure(model, draw, forwards, variants[name]))
                for left in work.iterdir():
                    shutil.rmtree(left)

    def median(name: str, figure: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(figure(t) for t in taken[name])

    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": "x".join(map(str, shape)),
        "forwards": forwards,
        "parameters": sum(p.numel() for p in model.parameters()),
        "modules": sum(1 for _ in model.modules()),
        "bare_ms": 1e3 * median("bare again", lambda t: t["bare"]) / forwards,
        "variants": {},
    }
    for name in variants:
        result["variants"][name] = {
            "steady_x": median(name, lambda t: t["steady"] / t["bare"]),
            "whole_run_x": median(
                name,
                lambda t: (
                    (t["open"] + t["first"] + t["steady"] + t["close"])
                    / (t["bare"] * (forwards + 1) / forwards)
                ),
            ),
            "open_ms": 1e3 * median(name, lambda t: t["open"]),
            "first_ms": 1e3 * median(name, lambda t: t["first"]),
            "close_ms": 1e3 * median(name, lambda t: t["close"]),
            "grown_mb": 1e-6 * median(name, lambda t: t["grown"]),
        }
    with_programs, without = (
        result["variants"][n]["first_ms"] for n in ("whence", "whence --no-programs")
    )
    result["program_recording_ms"] = with_programs - without
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="float32 only, three rounds")
    parser.add_argument("--smollm2", action="store_true", help="that shape, 64 tokens, float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if given.quick else given.rounds
    make, dtypes, shapes = Model, (torch.float32, torch.bfloat16), (((1, 128), 6), ((1, 1), 30))
    if given.smollm2:
        make, dtypes, shapes = smollm2, dtypes[:1], (((1, 64), 4),)
    results = []
    with tempfile.TemporaryDirectory(prefix="whence-bench-") as folder:
        for dtype in dtypes[:1] if given.quick else dtypes:
            for shape, forwards in shapes:
                result = case(make, dtype, shape, forwards, rounds, Path(folder))
                results.append(result)
                print(
                    f"\n{result['dtype']} {result['tokens']}: {result['parameters'] / 1e6:.0f} M "
                    f"parameters, {result['modules']} modules, "
                    f"bare forward {result['bare_ms']:.1f} ms CPU, {forwards} forwards a run, "
                    f"{rounds} rounds"
                )
                print(
                    f"{'':<24}{'steady':>9}{'whole run':>11}{'open ms':>9}{'first ms':>10}{'close ms':>10}{'grown MB':>10}"  # noqa: E501
                )
                for name, v in result["variants"].items():
                    print(
                        f"{name:<24}{v['steady_x']:>8.3f}x{v['whole_run_x']:>10.3f}x{v['open_ms']:>9.1f}{v['first_ms']:>10.1f}{v['close_ms']:>10.1f}{v['grown_mb']:>10.1f}"
                    )
                print(
                    f"{'program recording, once':<24}{result['program_recording_ms']:>38.1f} ms",
                    flush=True,
                )
    if given.json:
        Path(given.json).write_text(
            json.dumps(
                {
                    "machine": machine(),
                    "torch": torch.__version__,
                    "python": sys.version.split()[0],
                    "results": results,
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
