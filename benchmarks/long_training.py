"""A training of 10^5 steps under a capture that never ends: how memory goes, what a step costs
beside the bare step, and whether the operator that made a NaN at a random step is named.

    python benchmarks/long_training.py [--steps N] [--only KIND] [--seed N] [--json FILE]
    python benchmarks/long_training.py --spikes

Three trainings of one tiny model, each in a process of its own: bare; with statistics of one step
in `--every`; with every step's statistics in a ring of the last steps, which is written when loss
or norm are not finite or stand out, and a NaN planted at a random step. And the cost of a step and
of a module call while nothing is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from whence.instrument.step_choice.conditions import Quantity, Watcher, parse_condition

WIDTH, ROWS = 16, 8
POINTS = 10
"""Memory is looked at so many times."""


class Root(nn.Module):
    """Makes a NaN where it is given a negative number, which happens at the step that is spoilt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.root, self.down = nn.Linear(WIDTH, WIDTH), Root(), nn.Linear(WIDTH, 1)
        self.shift = 100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.root(self.up(x) + self.shift))


def resident() -> float:
    """MB of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return math.nan


class Training:
    """A model, its optimiser and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = Net().train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, *, spoilt: bool = False) -> None:
        """One step. spoilt: the input of one operator is out of its domain."""
        self.model.shift = -100.0 if spoilt else 100.0
        x = torch.randn(ROWS, WIDTH)
        loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def trained(folder: str, count: int, bad: int, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of one training. options: of the capture, {} for none."""
    training = Training()
    for _ in range(20):
        training.step()
    memory, seconds = [], []
    captured = whence.capture(training.model, folder, **options) if options else None
    with captured or contextlib.nullcontext():
        for part in range(POINTS):
            start = time.process_time()
            for step in range(part * count // POINTS, (part + 1) * count // POINTS):
                training.step(spoilt=step == bad)
            seconds.append((time.process_time() - start) * POINTS / count)
            memory.append(resident())
            done = f"{(part + 1) * count // POINTS} steps, {memory[-1]:.0f} MB, "
            print(f"{done}{seconds[-1] * 1e6:.0f} us a step", file=sys.stderr, flush=True)
    out: dict[str, Any] = {"memory": memory, "seconds": statistics.mean(seconds[1:])}
    if options:
        files = [file.stat() for file in Path(folder).rglob("*") if file.is_file()]
        out["disk"] = sum(min(f.st_size, 512 * f.st_blocks) for f in files) / 1e6
    return out


def named(folder: str) -> str:
    """The operator that `whence nans` names, and the step."""
    first = whence.nans(folder).first
    return "none" if first is None else f"{first.scope} at step {first.step}"


def asleep() -> dict[str, float]:
    """Seconds that a capture adds to a module call and to a step that it does not record."""
    layer, x, calls = nn.Identity(), torch.ones(1), 100_000
    inner = nn.Sequential(*[layer] * calls)

    def timed(call: Any) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    training = Training()

    def some() -> None:
        for _ in range(500):
            training.step()

    some()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        bare = min(timed(lambda: inner(x)) for _ in range(5))
        with whence.capture(inner, f"{folder}/calls", steps="1000000:"):
            call = min(timed(lambda: inner(x)) for _ in range(5))
    step: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        step[False].append(timed(some))
        with (
            tempfile.TemporaryDirectory() as folder,
            whence.capture(training.model, f"{folder}/steps", when=["nan", "spike"]),
        ):
            step[True].append(timed(some))
    return {
        "call": (call - bare) / calls,
        "step": (min(step[True]) - min(step[False])) / 500,
        "ratio": min(step[True]) / min(step[False]),
    }


LOSSES: dict[str, Callable[[random.Random, int], float]] = {
    "noise of 2 %": lambda d, n: 3 + 0.06 * d.gauss(0, 1),
    "noise of 20 %": lambda d, n: 3 + 0.6 * d.gauss(0, 1),
    "falling, noise of 5 %": lambda d, n: (
        (2 + 8 * math.exp(-n / 2000)) * (1 + 0.05 * d.gauss(0, 1))
    ),
    "rising in every epoch": lambda d, n: 2 + 0.3 * ((n % 500) / 500) + 0.05 * d.gauss(0, 1),
    "log-normal, 0.3": lambda d, n: math.exp(0.3 * d.gauss(0, 1)),
    "log-normal, 0.7": lambda d, n: math.exp(0.7 * d.gauss(0, 1)),
    "squares of eight": lambda d, n: sum(d.gauss(0, 1) ** 2 for _ in range(8)),
}
"""Losses as trainings have them: what a draw makes of the number of the step."""


def spikes_of(values: list[float]) -> list[int]:
    """Steps that `--when spike` finds."""
    watcher, found = Watcher([parse_condition("spike")]), []
    for step, value in enumerate(values):
        watcher.saw(Quantity.LOSS, value)
        if watcher.step_ended():
            found.append(step)
    return found


def spikes(steps: int = 20_000, planted: int = 200) -> None:
    """Print how often a spike is found where there is none, and where a loss is 1.5 to 5 times
    itself.
    """
    draw = random.Random(5)
    for kind, loss in LOSSES.items():
        losses = [loss(draw, n) for n in range(steps)]
        false, hits = len(spikes_of(losses)), []
        for times in (1.5, 2, 3, 5):
            places = [draw.randrange(300, steps) for _ in range(planted)]
            runs = [[*losses[p - 300 : p], losses[p] * times] for p in places]
            hits.append(f"{sum(300 in spikes_of(run) for run in runs) / planted:.0%}")
        print(f"{kind:22} {false} of {steps} steps; found: {', '.join(hits)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--ring", type=int, default=4)
    parser.add_argument("--only", choices=["bare", "every", "ring"], action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spikes", action="store_true", help="how good is --when spike?")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.spikes:
        spikes()
        return
    draw = random.Random(given.seed)
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "bare": (-1, {}),
        "every": (-1, {"keep": "stats", "every": given.every}),
        "ring": (
            draw.randrange(given.steps // 2, given.steps - 10),
            {"keep": "stats", "ring": given.ring, "for_steps": 1},
        ),
    }
    figures: dict[str, Any] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        for kind, (bad, options) in kinds.items():
            if given.only and kind not in given.only:
                continue
            with spawn.Pool(1) as pool:
                figures[kind] = pool.apply(trained, (f"{place}/{kind}", given.steps, bad, options))
            curve = " ".join(f"{mb:.0f}" for mb in figures[kind]["memory"])
            step = figures[kind]["seconds"]
            ratio = step / figures["bare"]["seconds"] if "bare" in figures else math.nan
            print(f"{kind:6} {step * 1e6:7.0f} us a step, {ratio:.3f} times bare")
            print(f"       memory in MB, ten times: {curve}", flush=True)
            if options:
                print(f"       run on disk: {figures[kind]['disk']:.1f} MB")
            if bad >= 0:
                figures[kind]["planted"], figures[kind]["named"] = bad, named(f"{place}/{kind}")
                print(f"       NaN planted at step {bad}; named: {figures[kind]['named']}")
    figures["asleep"] = idle = asleep()
    print(
        f"not recorded: {idle['call'] * 1e9:.0f} ns a module call, {idle['step'] * 1e6:.0f} us a "
        f"step that is watched ({idle['ratio']:.3f} times bare)"
    )
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
