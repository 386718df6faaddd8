"""Kernels under fuzz: sound ones must be silent, faults that pass `allclose` at one shape named.

    python benchmarks/fuzzed_kernels.py
    python benchmarks/fuzzed_kernels.py --only held-out

Half of the kernels, drawn by name, are held out: no limit was set by them.
"""

import argparse
import hashlib
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from whence import fuzz
from whence.workflows.operator_fuzz.forms import form
from whence.workflows.operator_fuzz.fuzz import Case, arrays

NORM = ("x: float32[rows, cols]", "w: float32[cols]")
ROWS = ("x: float32[rows, cols]",)
ATTENTION = ("q: float32[n, dim]", "k: float32[keys, dim]", "v: float32[keys, dim]")
SOUND = {
    "tiled_rms_norm": ("rms_norm", NORM, {"eps": 1e-6}),
    "two_pass_layer_norm": ("layer_norm", NORM, {"eps": 1e-5}),
    "online_softmax": ("softmax", ROWS, {}),
    "numba_log_sum_exp": ("log_sum_exp", ROWS, {}),
    "tiled_product": ("product", ("a: float32[m, k]", "b: float32[k, n]"), {}),
    "numba_row_sum": ("row_sum", ROWS, {}),
    "halving_row_sum": ("row_sum", ROWS, {}),
    "fused_gelu": ("gelu", ("x: float32[n]",), {}),
    "fused_swiglu": ("swiglu", ("x: bfloat16[rows, 2*cols]",), {}),
    "row_gather": ("gather", ("table: float16[words, dim]", "index: int64[n] < words"), {}),
    "blocked_prefix_sum": ("prefix_sum", ROWS, {}),
    "welford_variance": ("variance", ROWS, {}),
    "flash_attention": ("attention", ATTENTION, {}),
    "half_rotary": ("rotary", ("x: float32[n, 2*half]", "angle: float32[n, half]"), {}),
    "numba_axpy": ("axpy", ("x: float32[n]", "y: float32[n]"), {"a": 1.5}),
    "picked_cross_entropy": (
        "cross_entropy",
        ("x: float32[rows, cols]", "t: int64[rows] < cols"),
        {},
    ),
}
FAULTY = {
    "drops_the_tail": ("row_sum", ROWS, {}),
    "softmax_without_maximum": ("softmax", ROWS, {}),
    "one_pass_variance": ("variance", ROWS, {}),
    "sum_in_half": ("row_sum", ROWS, {}),
    "padded_softmax": ("softmax", ROWS, {}),
    "strides_of_a_square": ("row_max", ROWS, {}),
    "keeps_its_scale": ("rms_norm", NORM, {"eps": 1e-6}),
    "epsilon_outside": ("rms_norm", NORM, {"eps": 1e-6}),
    "maximum_from_zero": ("row_max", ROWS, {}),
    "scales_in_place": ("axpy", ("x: float32[n]", "y: float32[n]"), {"a": 1.5}),
    "tanh_gelu": ("gelu", ("x: float32[n]",), {}),
    "last_key_masked": ("attention", ATTENTION, {}),
}
SIZES = {"rows": 16, "cols": 64, "n": 64, "keys": 64, "dim": 32}


def held_out(name: str) -> bool:
    """Half of all names."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def passes_one_shape(name: str) -> bool:
    """Does `allclose` with common tolerances pass at one shape, on ordinary values?"""
    reference, inputs, arguments = FAULTY[name]
    forms = [form(text) for text in inputs]
    made = arrays(forms, Case(tuple(SIZES.items())))
    kernel = getattr(importlib.import_module("_fuzzed.faulty"), name)
    right = getattr(importlib.import_module("_fuzzed.references"), reference)
    is_numba = name == "maximum_from_zero"
    tensors = [torch.from_numpy(a.copy()) for a in made.values()]
    got = kernel(*(made.values() if is_numba else [t.clone() for t in tensors]), **arguments)
    got = torch.from_numpy(got) if is_numba else got
    return torch.allclose(got, right(*tensors, **arguments), rtol=1e-2, atol=1e-2)


def main() -> None:
    """Prints a line for each kernel, and what was right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("set", "held-out"))
    parser.add_argument("--tests", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    right = tried = 0
    for module, kernels in (("sound", SOUND), ("faulty", FAULTY)):
        for name, (reference, inputs, arguments) in kernels.items():
            if asked.only and held_out(name) != (asked.only == "held-out"):
                continue
            if asked.names and name not in asked.names:
                continue
            began = time.process_time()
            result = fuzz(
                f"_fuzzed.{module}:{name}", f"_fuzzed.references:{reference}", inputs,
                arguments=arguments, tests=asked.tests,
            )  # fmt: skip
            took = time.process_time() - began
            is_right = (result.status == "same") == (module == "sound")
            tried, right = tried + 1, right + is_right
            words = "; ".join(f"{f.kind}: {f.words} ({f.case})" for f in result.faults)
            first = "" if module == "sound" or passes_one_shape(name) else "  [no allclose]"
            mark = "ok   " if is_right else "WRONG"
            print(
                f"{mark} {name:26}{took:5.1f} s {result.cases:4} cases  {words}{first}", flush=True
            )
    print(f"{right} of {tried} right")


if __name__ == "__main__":
    main()
