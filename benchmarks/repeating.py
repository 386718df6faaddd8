"""Is `whence repeat` silent about trainings that repeat, and does it name what in one does not?

    python benchmarks/repeating.py [--only REGEX] [--json FILE]

Four small models (Llama, Mixtral, ViT, ResNet of transformers, random weights) train two steps of
two micro-batches, twice in one process: as they are, and with something that is another in the
second run. A clean training must be equal bit for bit. Of a planted difference the first source
must be of its kind and at its place. Needs transformers. Exit code 1 where one is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _training import training as loops
from _training.subjects import batches
from _training.training import Training, train, training_of
from torch import nn

import whence
from whence.results import SourceKind
from whence.workflows.repeat.repeat import Repetition

MODELS = ("llama", "mixtral", "vit", "resnet")
Twist = Callable[[Training, int], None]


class Case(NamedTuple):
    """What differs in the run of number 1, and what must be said of it; kind None: nothing.

    phase: of the source. place: a pattern for its module, "" for any.
    """

    title: str
    twist: Twist
    kind: SourceKind | None = None
    phase: str = "forward"
    place: str = ""


def middle(training: Training) -> tuple[str, nn.Module]:
    """The linear layer or convolution in the middle of a model."""
    kinds = (nn.Linear, nn.Conv2d)
    named = [(n, m) for n, m in training.model.named_modules() if isinstance(m, kinds)]
    return named[len(named) // 2]


def _wrapped(change: Callable[[Any, int], Any]) -> Twist:
    """The output of the layer in the middle, changed inside its own call."""

    def twist(training: Training, run: int) -> None:
        _, module = middle(training)
        forward = module.forward
        module.forward = lambda x: change(forward(x), run)  # type: ignore[method-assign]

    return twist


def _dropout(training: Training, run: int) -> None:
    def dropped(out: Any, number: int) -> Any:
        if not training.model.__dict__.setdefault("drawn", 0):
            torch.manual_seed(5 + number)
        training.model.__dict__["drawn"] = 1
        return nn.functional.dropout(out, 0.2)

    _wrapped(dropped)(training, run)


class _Own(torch.autograd.Function):
    """The identity; its backward is off by as much as `run` says."""

    @staticmethod
    def forward(ctx: Any, x: Any, run: int) -> Any:
        ctx.run = run
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (1 + 1e-6 * ctx.run), None


def _numpy(out: Any, run: int) -> Any:
    rows = out.detach().flatten(1).numpy()[:: -1 if run else 1]
    return out + 0 * out + float(rows.sum(dtype="float32")) * 1e-3 * (1 + run * 1e-6)


def _weights(training: Training, run: int) -> None:
    if run:
        with torch.no_grad():
            middle(training)[1].weight.mul_(1.0000002)  # type: ignore[operator, union-attr]


def _before_step(training: Training, run: int) -> None:
    def noisy(_: Training) -> None:
        grads = [p.grad for p in training.model.parameters() if p.grad is not None]
        grads[len(grads) // 2].mul_(1 + run * 1e-5)

    training.before_step = noisy


def _learning_rate(training: Training, run: int) -> None:
    training.options["lr"] *= 1 + run * 1e-6


def _nothing(training: Training, run: int) -> None:
    pass


CASES = (
    Case("clean", _nothing),
    Case("seeded dropout", lambda training, run: _dropout(training, 0)),
    Case("own backward that is right", lambda t, r: _wrapped(lambda o, n: _Own.apply(o, 0))(t, r)),
    Case("dropout", _dropout, SourceKind.RANDOM, place="middle"),
    Case("a number", _wrapped(lambda o, n: o * (1 + n * 1e-6)), SourceKind.CODE, place="middle"),
    Case(
        "order of a sum",
        _wrapped(lambda o, n: o + sum(o.unbind(-1)[:: -1 if n else 1])[..., None] * 1e-3),
        SourceKind.CODE,
        place="middle",
    ),
    Case(
        "backward", _wrapped(lambda o, n: _Own.apply(o, n)), SourceKind.OPERATOR, "backward",
        "middle",
    ),
    Case("outside torch", _wrapped(_numpy), None, place="middle"),
    Case("weights", _weights, SourceKind.STATE, place="middle"),
    Case("gradients before the step", _before_step, SourceKind.OPERATOR, "optimizer", "gradients"),
    Case("learning rate", _learning_rate, SourceKind.ARGUMENT, "optimizer"),
    Case("order of batches", _nothing, SourceKind.INPUT),
    Case("other labels", _nothing, SourceKind.INPUT),
)  # fmt: skip


def _batches(title: str, run: int) -> Callable[[str], Any]:
    def given(name: str) -> Any:
        made = [dict(batch) for batch in batches(name)]
        if title == "order of batches" and run:
            made.reverse()
        if title == "other labels" and run:
            labels = made[0]["labels"]
            made[0]["labels"] = labels.roll(1) if labels.ndim == 1 else labels.roll(1, 0)
        return made

    return given


def judged(case: Case, model: str, folder: Path) -> dict[str, Any]:
    """A line of the table."""
    runs, place, began = [], "", time.perf_counter()
    for run in range(2):
        training = training_of(model, "adamw" if model in ("llama", "vit") else "sgd")
        place = {"middle": middle(training)[0], "gradients": "gradients"}.get(case.place, "")
        case.twist(training, run)
        loops.batches = _batches(case.title, run)  # type: ignore[assignment]
        with contextlib.redirect_stderr(io.StringIO()):
            runs.append(whence.open_run(str(train(training, folder / f"run-{run}"))))
    trained = time.perf_counter()
    result = Repetition(runs).result()
    first = result.first
    is_clean = case.kind is None and not case.place
    if is_clean or first is None:
        right = is_clean and first is None and not result.uncompared
    else:
        right = (
            case.kind in (None, first.kind) and first.phase == case.phase and place in first.scope
        )
    return {
        "case": f"{case.title}, {model}",
        "clean": is_clean,
        "right": right,
        "first": None if first is None else [first.kind, first.scope, first.phase, first.words],
        "share": None if result.gradient is None else result.gradient.share,
        "tensors": result.tensors,
        "seconds": time.perf_counter() - trained,
        "trained": trained - began,
    }


def main() -> int:
    """Run what is asked for and print a line each."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="cases whose title matches")
    arguments.add_argument("--json", type=Path, help="the table as JSON")
    given = arguments.parse_args()
    rows = []
    for case in CASES:
        for model in MODELS:
            if not re.search(given.only, f"{case.title}, {model}"):
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = judged(case, model, Path(folder))
            rows.append(row)
            mark = "ok   " if row["right"] else "WRONG"
            print(mark, row["case"], row["first"], f"{row['seconds']:.1f} s", flush=True)
    clean = [row for row in rows if row["clean"]]
    planted = [row for row in rows if not row["clean"]]
    print(f"clean: {sum(r['right'] for r in clean)} of {len(clean)} repeat")
    print(f"planted: {sum(r['right'] for r in planted)} of {len(planted)} named")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
