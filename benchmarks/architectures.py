"""Every architecture of the installed transformers: is a clean pair silent, a fault named?

    python benchmarks/architectures.py [--only REGEX] [--ways REGEX] [--limit N] [--seed N]
                                       [--results FILE]

The small models are those that `whence upgrade` builds. Each is run as it is, and in these ways:
weights in bfloat16, the reference in float64, another attention, twice as many rows, rows in
another order; and with one fault, which the seed chooses. A type that cannot be built or run in a
way does not count. --limit draws types by seed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import whence
from whence.workflows.upgrade.inside import transformers_models as models

LIMIT_S = 240
Inputs = dict[str, Tensor]


class NotHere(Exception):
    """A way that a model does not have."""


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs.items()}


def rows(inputs: Inputs) -> int:
    """The number of rows that all inputs have."""
    counts = {v.shape[0] if v.dim() else 0 for v in inputs.values()}
    if len(counts) != 1 or 0 in counts:
        raise NotHere("the inputs have no batch in common")
    return counts.pop()


def in_bfloat16(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    return model.bfloat16(), cast(inputs, torch.bfloat16)


def another_attention(model: Any, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    now = getattr(model.config, "_attn_implementation", "eager")
    try:
        model.set_attn_implementation("eager" if now != "eager" else "sdpa")
    except (AttributeError, ValueError, ImportError) as error:
        raise NotHere(str(error)) from error
    return model, inputs


def twice_the_rows(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    rows(inputs)
    return model, {n: torch.cat([v, v.flip(0)]) for n, v in inputs.items()}


def rows_turned(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    if rows(inputs) < 2:
        raise NotHere("one row has one order")
    return model, {n: v.flip(0) for n, v in inputs.items()}


WAYS: dict[str, Callable[[Any, Inputs], tuple[nn.Module, Inputs]]] = {
    "bfloat16": in_bfloat16,
    "attention": another_attention,
    "twice-the-rows": twice_the_rows,
    "rows-turned": rows_turned,
}


def scaled(module: Any) -> None:
    module.weight.mul_(1.02)


def one_row_zero(module: Any) -> None:
    module.weight[len(module.weight) // 2] = 0


def bias_moved(module: Any) -> None:
    module.bias[len(module.bias) // 2] += module.bias.abs().mean() + 0.02


def bias_forgotten(module: Any) -> None:
    module.bias.zero_()


FAULTS = scaled, one_row_zero, bias_moved, bias_forgotten


def planted(model: nn.Module, inputs: Inputs, chance: random.Random) -> tuple[str, str]:
    """Plants a fault into a module that runs and matters; its kind and the module's name."""
    ran: dict[str, nn.Module] = {}
    hooks = [
        module.register_forward_hook(lambda m, *_, name=name: ran.update({name: m}))
        for name, module in model.named_modules()
        if not list(module.children()) and not isinstance(module, nn.Embedding)
    ]
    before = outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    trials = [(fault, name) for name in ran for fault in FAULTS]
    chance.shuffle(trials)
    for fault, name in trials[:20]:
        module: Any = ran[name]
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is None or weight.dim() < 2 or ("bias" in fault.__name__ and bias is None):
            continue
        kept = {n: p.detach().clone() for n, p in module.named_parameters()}
        fault(module)
        if any(off(a, b) > 1e-3 for a, b in zip(before, outputs(model, inputs))):
            return fault.__name__, name
        for n, p in module.named_parameters():
            p.copy_(kept[n])
    raise NotHere("no fault that matters")


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    held = model(**inputs)
    values = held.values() if hasattr(held, "values") else held
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm()) if a.shape == b.shape and a.norm() > 0 else 0.0


def capture(model: nn.Module, inputs: Inputs, path: Path) -> None:
    torch.manual_seed(0)
    with whence.capture(model, path, force=True):
        model(**inputs)


def answers(name: str, ways: str, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """What whence says of each way of one architecture."""
    with models.quiet():
        first = models.build(name)
    inputs = {n: torch.from_numpy(v) for n, v in first.inputs.items()}
    for way in filter(re.compile(ways).search, ("float64", *WAYS, "fault")):
        row: dict[str, Any] = {"type": name, "way": way}
        try:
            with models.quiet(), torch.no_grad():
                model, wide = (models.build(name, first.chosen).model for _ in range(2))
                reference, given = (
                    (wide.double(), cast(inputs, torch.float64))
                    if way == "float64"
                    else (first.model, inputs)
                )
                target, changed = WAYS[way](model, inputs) if way in WAYS else (model, inputs)
                if way == "fault":
                    chance = random.Random(f"{seed} {name}")
                    row["kind"], row["planted"] = planted(target, inputs, chance)
                capture(reference, given, folder / "reference")
                capture(target, changed, folder / "target")
        except Exception as error:  # noqa: BLE001 - whatever a model raises in this way
            yield row | {"grade": "not here", "words": f"{type(error).__name__}: {error}"[:200]}
            continue
        result = whence.compare(folder / "reference", folder / "target")
        names = [finding.name for finding in result.findings]
        yield row | {"grade": grade(row, result.status, names), "names": names[:3]}


def grade(row: dict[str, Any], status: str, names: list[str]) -> str:
    if "planted" not in row:
        return {"same": "silent", "different": "FALSE ALARM"}.get(status, status)
    if not names:
        return "MISSED" if status == "same" else status
    near = names[0] == row["planted"] or row["planted"].startswith(f"{names[0]}.")
    return "named" if near else "INNOCENT"


def in_a_process(name: str, ways: str, seed: int) -> Iterator[dict[str, Any]]:
    """The answers of one type; a crash or an endless run costs this type alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers"
        child = os.fork()
        if not child:
            try:
                with file.open("w") as out:
                    for row in answers(name, ways, seed, Path(folder)):
                        print(json.dumps(row), file=out, flush=True)
            except BaseException as error:  # noqa: BLE001 - the next type goes on
                with file.open("a") as out:
                    words = f"{type(error).__name__}: {error}"[:300]
                    print(
                        json.dumps({"type": name, "grade": "not built", "words": words}), file=out
                    )
            os._exit(0)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        yield from map(json.loads, file.read_text().splitlines() if file.exists() else ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern of types")
    parser.add_argument("--ways", default="", help="a pattern of ways")
    parser.add_argument("--limit", type=int, default=0, help="so many types, drawn by seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a file of JSON lines, which is gone on with")
    options = parser.parse_args()
    names = [name for name in models.names() if re.search(options.only, name)]
    random.Random(options.seed).shuffle(names)
    known = (
        options.results.read_text().splitlines()
        if options.results and options.results.exists()
        else []
    )
    table = [json.loads(line) for line in known]
    for name in names[: options.limit or None]:
        if any(row["type"] == name for row in table):
            continue
        for row in in_a_process(name, options.ways, options.seed):
            table.append(row)
            if row["grade"] not in ("silent", "named", "not here", "not built"):
                print(*row.values(), flush=True)
            if options.results:
                with options.results.open("a") as out:
                    print(json.dumps(row), file=out)
    counts = collections.Counter((row.get("way", "built"), row["grade"]) for row in table)
    for (way, result), count in sorted(counts.items()):
        print(f"{way:<16} {result:<12} {count}")


if __name__ == "__main__":
    sys.exit(main())
