"""What recording operators costs, per operator, beside torch's DebugMode with the hashes it offers
to compare two runs.

    python benchmarks/op_capture.py [--json FILE] [--rounds 7] [--steps 8] [--layers 4] [--width 128]

A small transformer, torch on one thread, forward and backward; variants run in turn within a round.
The figure is the process CPU time over that of a bare step, per operator: in all, with what it
takes to begin and to end (a run gets its index then), and while the steps run. `stats` is `--level
op --keep stats`: inputs, outputs and mutations with statistics and hashes, arguments, aliases,
source lines, modules, journal. DebugMode keeps strings in memory: "outputs" hashes what comes out
("norm": the L1 norm in float64), "inputs too" what goes in as well, as a comparison needs it; "as
much" a norm and a hash of both, with stack traces and modules, which is about what `stats` records;
"bare" hashes nothing.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rounds import interleave, machine
from capture import Model

import whence


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps of a variant in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(512, given.width, given.layers, 4)

    def step() -> None:
        model.zero_grad()
        tokens = torch.randint(
            0, 512, (1, given.tokens)
        )  # others each time: equal activations would be known by their hashes
        model(tokens).logsumexp(-1).mean().backward()

    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "run")
        with (
            contextlib.redirect_stderr(io.StringIO()),
            whence.capture(model, path, level="op", keep="stats"),
        ):
            step()
        count = sum(call.kind == "operator" for call in whence.open_run(path).calls)

        running: dict[str, list[float]] = {}

        def around(name: str, make: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.redirect_stderr(io.StringIO()), make():
                    start = time.process_time()
                    for _ in range(given.steps):
                        step()
                    running.setdefault(name, []).append(time.process_time() - start)

            return run

        def captured(**options: Any) -> Callable[[], Any]:
            return lambda: whence.capture(model, path, level="op", **options)

        variants: dict[str, Callable[[], Any]] = {
            "bare": contextlib.nullcontext,
            "stats": captured(keep="stats"),
            "stats, dedup": captured(keep="stats", dedup=True),
            "full": captured(),
            "DebugMode bare": lambda: _debug(None),
            "DebugMode outputs": lambda: _debug(False),
            "DebugMode inputs too": lambda: _debug(True),
            "DebugMode as much": lambda: _debug(
                True, "norm", "hash_tensor", record_stack_trace=True, record_nn_module=True
            ),
        }

        times = interleave(
            {name: around(name, make) for name, make in variants.items()}, given.rounds
        )
    calls = count * given.steps
    each, while_running = (
        {
            name: statistics.median(
                (a - b) / calls for a, b in zip(spent, table["bare"], strict=True)
            )
            * 1e6
            for name, spent in table.items()
            if name != "bare"
        }
        for table in (times, {name: spent[-given.rounds :] for name, spent in running.items()})
    )
    print(
        f"{'us an operator':22} {'in all':>8} {'running':>8}   DebugMode outputs, inputs too, as "
        "much, over it: in all | running"
    )
    for name in each:
        figures = "  |  ".join(
            " ".join(
                f"{table[f'DebugMode {other}'] / table[name]:5.2f} x"
                for other in ("outputs", "inputs too", "as much")
            )
            for table in (each, while_running)
        )
        print(f"{name:22} {each[name]:8.1f} {while_running[name]:8.1f}   {figures}")
    print(f"{count} operators a step")
    if given.json:
        found = {
            "machine": machine(),
            "operators": count,
            "us_per_operator": each,
            "us_while_running": while_running,
        }
        Path(given.json).write_text(json.dumps(found, indent=1))


@contextlib.contextmanager
def _debug(inputs: bool | None, *hashes: str, **how: bool) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    chosen: Any = list(hashes) or "norm"
    with (
        DebugMode(**how) as mode,
        contextlib.nullcontext()
        if inputs is None
        else mode.log_tensor_hashes(chosen, hash_inputs=inputs),
    ):
        yield


if __name__ == "__main__":
    main()
