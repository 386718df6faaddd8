"""The parts of a script that are the same in every script."""

from __future__ import annotations

IMPORTS = """import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
{config}from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
"""
MADE = {
    False: """made = (as_target if side == "target" else as_reference)(inputs())""",
    True: """made = [t for name, t in load(DATA, DTYPES).items() if name.startswith("recorded.")]
    if side != "recorded":
        made = (as_target if side == "target" else as_reference)(inputs())""",
}
EXACT = """
    if side == "target":
        for y, r in zip(wide({bad}, inputs()), right):
            alike = y.shape == r.shape and y.dtype == r.dtype
            if alike and r.numel() and (r.is_floating_point() or r.is_complex()):
                alike = torch.allclose(y, r, rtol=1e-6, atol=1e-6 * float(r.abs().max()), equal_nan=True)
            elif alike:
                alike = torch.equal(y, r)
            print("in float64, without rounding:", "target and reference are the same" if alike else "the target computes something else")
            good &= alike
        print("what differs:", {differs})"""
CHECK = '''DATA = Path(__file__).with_name("repro.safetensors")
SIDE = os.environ.get("SIDE", "{default}")


def inputs():
    """The tensors as they came in, made anew."""
    return {{name: tensor for name, tensor in load(DATA, DTYPES).items() if not name.startswith(("recorded.", "memory."))}}


def check(side):
    """Is what this side gives explained by rounding? Prints why."""
    right = wide({good}, inputs())
    with torch.no_grad():
        noise = {good}(**inputs())
    {made}
    good = True
    for k, (y, r, w) in enumerate(zip(made, right, noise)):
        score, words = beyond_rounding(y, r, w, terms={terms})
        print(f"{{side}}, result {{k}}: {{words}}: {{'WRONG' if score > 1 else 'rounding'}}")
        good &= score <= 1{exact}
    return good


def test_operator():
    assert check(SIDE), f"{{SIDE}}: wrong by more than rounding"'''
MAIN = """if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["target", "reference", "recorded"], default=SIDE)
    side = parser.parse_args().side
    good = check(side)
    print("PASS" if good else "FAIL", f"({side})")
    sys.exit(not good)
"""
