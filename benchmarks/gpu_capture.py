"""What capture costs a model on a GPU: wall time of a forward with and without it, and memory.

    python benchmarks/gpu_capture.py [--json FILE] [--rounds 5] [--model smollm2|llama1b|tiny]
                                     [--variant NAME]
    python benchmarks/gpu_capture.py --device cpu --model tiny    # does the script run?

Random weights in bfloat16; prefill (1 x 512 tokens) and decode (1 x 1), each forward on new tokens
and followed by a synchronisation. Variants run in turn within a round, each beside bare forwards of
its own round; figures are medians over the rounds. "closed" is as "steady", with the time that
closing takes: all that was on its way is written then. "equal": the logits of a forward that is
captured, of one before the capture and of one after it are bitwise the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from capture import Hooks, saving
from torch import nn

import whence

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "groups": 2, "words": 512},
    "smollm2": {
        "layers": 30,
        "width": 576,
        "hidden": 1536,
        "heads": 9,
        "groups": 3,
        "words": 49152,
    },
    "llama1b": {
        "layers": 16,
        "width": 2048,
        "hidden": 8192,
        "heads": 32,
        "groups": 8,
        "words": 32000,
    },
}


def make(name: str, device: str) -> nn.Module:
    """A model of the llama kind with random weights in bfloat16. Needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape["words"],
        hidden_size=shape["width"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["groups"],
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


class Timed:
    """Forwards of one model on new tokens, each timed to the end of the device's work."""

    def __init__(self, model: nn.Module, tokens: int, words: int, device: str) -> None:
        self.model, self.tokens, self.words, self.device = model, tokens, words, device
        self._chance = torch.Generator().manual_seed(1)

    def draw(self) -> torch.Tensor:
        """New tokens on the device."""
        return torch.randint(0, self.words, (1, self.tokens), generator=self._chance).to(
            self.device
        )

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def forwards(self, count: int) -> float:
        """Seconds of so many forwards."""
        batches = [self.draw() for _ in range(count)]
        self.wait()
        start = time.perf_counter()
        for tokens in batches:
            self.model(tokens)
            self.wait()
        return time.perf_counter() - start


def measure(timed: Timed, forwards: int, variant: Callable[[], Any] | None) -> dict[str, float]:
    """Seconds: bare, open, first, steady, close; peak: bytes of device memory that the steady
    forwards took beyond those of the bare ones.
    """
    timed.forwards(1)
    peaks = [_peak(lambda: timed.forwards(forwards), timed.device)]
    bare, opened, first, closed = peaks[0][0], 0.0, 0.0, 0.0
    if variant is None:
        peaks.append(_peak(lambda: timed.forwards(forwards), timed.device))
    else:
        start = time.perf_counter()
        context = variant()
        context.__enter__()
        opened = time.perf_counter() - start
        first = timed.forwards(1)
        peaks.append(_peak(lambda: timed.forwards(forwards), timed.device))
        start = time.perf_counter()
        context.__exit__(None, None, None)
        closed = time.perf_counter() - start
    return {
        "bare": bare,
        "open": opened,
        "first": first,
        "steady": peaks[1][0],
        "close": closed,
        "peak": peaks[1][1] - peaks[0][1],
    }


def _peak(run: Callable[[], float], device: str) -> tuple[float, float]:
    """Seconds of `run`, and the most bytes that were allocated on the device meanwhile."""
    if device != "cuda":
        return run(), 0.0
    torch.cuda.reset_peak_memory_stats()
    return run(), float(torch.cuda.max_memory_allocated())


def case(
    name: str,
    device: str,
    tokens: int,
    forwards: int,
    rounds: int,
    work: Path,
    wanted: list[str] | None,
) -> dict[str, Any]:
    """The variants that are wanted, by default all, on one model and one number of tokens."""
    model = make(name, device)
    timed = Timed(model, tokens, SHAPES[name]["words"], device)
    names = iter(range(10**6))

    def captured(**options: Any) -> Callable[[], Any]:
        return lambda: whence.capture(model, work / f"run{next(names)}", **options)

    variants: dict[str, Callable[[], Any] | None] = {
        "bare again": None,
        "empty hooks": lambda: Hooks(model, lambda *_: None),
        "whence": captured(),
        "whence --no-programs": captured(programs=False),
        "whence --keep stats": captured(keep="stats", programs=False),
        "torch.save per output": lambda: Hooks(model, saving(work / f"saved{next(names)}")),
    }
    if wanted:
        variants = {k: v for k, v in variants.items() if k in wanted or v is None}
    taken: dict[str, list[dict[str, float]]] = {key: [] for key in variants}
    silence = contextlib.redirect_stderr(io.StringIO())
    with torch.inference_mode(), silence:
        same = _is_neutral(timed, captured())
        for number in range(rounds):
            for key in list(variants)[:: 1 if number % 2 == 0 else -1]:
                taken[key].append(measure(timed, forwards, variants[key]))
                for left in work.iterdir():
                    shutil.rmtree(left)

    def median(key: str, figure: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(figure(t) for t in taken[key])

    return {
        "model": name,
        "tokens": tokens,
        "forwards": forwards,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_ms": 1e3 * median("bare again", lambda t: t["bare"]) / forwards,
        "equal": same,
        "variants": {
            key: {
                "steady_x": median(key, lambda t: t["steady"] / t["bare"]),
                "closed_x": median(key, lambda t: (t["steady"] + t["close"]) / t["bare"]),
                "steady_ms": 1e3 * median(key, lambda t: t["steady"]) / forwards,
                "open_ms": 1e3 * median(key, lambda t: t["open"]),
                "first_ms": 1e3 * median(key, lambda t: t["first"]),
                "close_ms": 1e3 * median(key, lambda t: t["close"]),
                "peak_mb": 1e-6 * median(key, lambda t: t["peak"]),
            }
            for key in variants
        },
    }


def _is_neutral(timed: Timed, variant: Callable[[], Any]) -> bool:
    """Are the logits bitwise equal before, during and after a capture?"""
    tokens = timed.draw()
    before = timed.model(tokens).logits.clone()
    with variant():
        during = timed.model(tokens).logits.clone()
    after = timed.model(tokens).logits
    return bool(torch.equal(before, during) and torch.equal(before, after))


def main() -> None:
    """Print a table per model and number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=SHAPES, help="repeatable")
    parser.add_argument("--variant", action="append", help="only these, by name; repeatable")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="whence-bench-") as folder:
        for name in chosen.model or ("smollm2", "llama1b"):
            for tokens, forwards in ((512, 8), (1, 16)):
                result = case(
                    *(name, chosen.device, tokens, forwards, chosen.rounds, Path(folder)),
                    chosen.variant,
                )
                results.append(result)
                print(
                    f"\n{name}, {result['parameters'] / 1e6:.0f} M parameters, bfloat16, {tokens} "
                    f"tokens: bare forward {result['bare_ms']:.1f} ms; logits bitwise "
                    f"{'equal' if result['equal'] else 'DIFFERENT'} with capture"
                )
                columns = "steady", "closed", "ms", "open ms", "first ms", "close ms", "device MB"
                print(f"{'':<24}" + "".join(f"{column:>10}" for column in columns))
                for key, v in result["variants"].items():
                    figures = (v["steady_ms"], v["open_ms"], v["first_ms"], v["close_ms"])
                    print(
                        f"{key:<24}{v['steady_x']:>9.2f}x{v['closed_x']:>9.2f}x"
                        + "".join(f"{figure:>10.1f}" for figure in (*figures, v["peak_mb"])),
                        flush=True,
                    )
    if chosen.json:
        device = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
        Path(chosen.json).write_text(
            json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
