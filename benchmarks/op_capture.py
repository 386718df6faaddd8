"""What recording operators costs, per operator, beside torch's DebugMode with the hashes it offers to compare two runs.

    python benchmarks/op_capture.py [--json FILE] [--rounds 7] [--layers 4] [--width 128]

A small transformer, torch on one thread, forward and backward; variants run in turn within a round. The figure is the process CPU time
over that of a bare step, per operator. `stats` is `--level op --keep stats`: inputs, outputs and mutations with statistics and hashes,
arguments, aliases, source lines, modules, journal. DebugMode keeps strings in memory: "outputs" hashes what comes out ("norm": the
L1 norm in float64), "inputs too" what goes in as well, as a comparison needs it; "as much" a norm and a hash of both, with stack traces and
modules, which is about what `stats` records; "bare" hashes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rounds import interleave, machine

import whence
from capture import Model


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(512, given.width, given.layers, 4)
    tokens = torch.randint(0, 512, (1, given.tokens))

    def step() -> None:
        model.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()

    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "run")
        with contextlib.redirect_stderr(io.StringIO()), whence.capture(model, path, level="op", keep="stats"):
            step()
        count = sum(call.kind == "operator" for call in whence.open_run(path).calls)

        def around(make: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                with contextlib.redirect_stderr(io.StringIO()), make():
                    for _ in range(given.steps):
                        step()

            return run

        def captured(**options: Any) -> Callable[[], None]:
            def run() -> None:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.redirect_stderr(io.StringIO()), whence.capture(model, path, level="op", **options):
                    for _ in range(given.steps):
                        step()

            return run

        times = interleave(
            {
                "bare": around(contextlib.nullcontext),
                "stats": captured(keep="stats"),
                "stats, dedup": captured(keep="stats", dedup=True),
                "full": captured(),
                "DebugMode bare": around(lambda: _debug(None)),
                "DebugMode outputs": around(lambda: _debug(False)),
                "DebugMode inputs too": around(lambda: _debug(True)),
                "DebugMode as much": around(lambda: _debug(True, "norm", "hash_tensor", record_stack_trace=True, record_nn_module=True)),
            },
            given.rounds,
        )
    calls = count * given.steps
    each = {
        name: statistics.median((a - b) / calls for a, b in zip(spent, times["bare"], strict=True)) * 1e6
        for name, spent in times.items() if name != "bare"
    }  # fmt: skip
    for name, spent in each.items():
        ratios = "  ".join(f"{each[f'DebugMode {other}'] / spent:5.2f} x" for other in ("outputs", "inputs too", "as much"))
        print(f"{name:22} {spent:8.1f} us an operator   {ratios}")
    print(f"{count} operators a step; the ratios are DebugMode with hashes of outputs, of inputs too, and as much, over each line")
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "operators": count, "us_per_operator": each}, indent=1))


@contextlib.contextmanager
def _debug(inputs: bool | None, *hashes: str, **how: bool) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    chosen: Any = list(hashes) or "norm"
    with DebugMode(**how) as mode, contextlib.nullcontext() if inputs is None else mode.log_tensor_hashes(chosen, hash_inputs=inputs):
        yield


if __name__ == "__main__":
    main()
