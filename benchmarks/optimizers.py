"""Steps of optimisers that are not torch's own: are they replayed, is whence silent about trainings
that compute the same, and does it name a fault in a step?

    python benchmarks/optimizers.py [--only REGEX] [--json FILE] [-v]

Takes every optimiser of the packages that are installed (timm, pytorch_optimizer, lion-pytorch,
schedulefree, prodigyopt, came-pytorch, torch-optimi, transformers) and can be made from parameters
and a learning rate, and classes made of torch's own. Two small networks train three steps each: one
of linear layers, which set the rules together with the first fault, and one of convolutions, which
did not. Clean: the layers computed in parts, and bfloat16 autocast. What changes no parameter, a
fault by no more than four roundings of it, has "no effect". Exit code 1 where a clean pair has a
finding, a capture changes a training, or something crashes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import whence

STEPS, ROWS, CLASSES = 3, 64, 8
RATE = 1e-3
_ROUNDING = 4 * torch.finfo(torch.float32).eps
Make = Callable[[list[Any]], torch.optim.Optimizer]
Fault = Callable[[Any, Callable[[], None]], None]
"""Runs the step of an optimiser, and something else."""


# ---- optimisers


def optimizers() -> Iterator[tuple[str, Make]]:
    """Name, and what makes it of parameters."""
    for how in ("foreach", "fused", "plain"):
        options = {how: True} if how != "plain" else {}
        made_of = type("OfAdamW", (torch.optim.AdamW,), {})
        yield f"a class of AdamW, {how}", _with_rate(made_of, **options)
    for module, names in (
        ("lion_pytorch", ("Lion",)),
        ("schedulefree", ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")),
        ("prodigyopt", ("Prodigy",)),
        ("came_pytorch", ("CAME",)),
        ("optimi", ("AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW")),
    ):
        package = _imported(module)
        for name in names if package else ():
            yield f"{module} {name}", _with_rate(getattr(package, name))
    if _imported("transformers"):
        of_transformers = importlib.import_module("transformers.optimization").Adafactor
        yield "transformers Adafactor", lambda p: of_transformers(p)
        fixed = {"relative_step": False, "scale_parameter": False, "beta1": 0.9}
        yield "transformers Adafactor, fixed", _with_rate(of_transformers, **fixed)
    if timm := _imported("timm.optim"):
        for name in timm.list_optimizers(exclude_filters=["bnb*", "fused*"]):
            yield f"timm {name}", lambda p, n=name: timm.create_optimizer_v2(p, opt=n, lr=RATE)
    if collected := _imported("pytorch_optimizer"):
        for name in sorted(collected.get_supported_optimizers()):
            yield f"pytorch_optimizer {name}", _with_rate(collected.load_optimizer(name))


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a package that cannot be used is left out
        print(f"without {name}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
        return None


def _with_rate(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, lr=RATE, **options)


# ---- networks


class _Split(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(_Split, self).forward(part) for part in x.split(24)])


class _SplitConvolution(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(_SplitConvolution, self).forward(part) for part in x.split(24)])


_IN_PARTS = {nn.Linear: _Split, nn.Conv2d: _SplitConvolution}


def _linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, CLASSES))


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(), nn.Linear(8 * 4 * 4, CLASSES),
    )  # fmt: skip


NETWORKS = {"linear": (_linear, (16,)), "convolutions": (_convolutions, (3, 8, 8))}


# ---- faults in a step


def _weights(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.ndim > 1]


def _shrinks(optimizer: Any, step: Callable[[], None]) -> None:
    step()
    for p in _weights(optimizer):
        p.mul_(1 - 1e-3)


def _other_gradient(optimizer: Any, step: Callable[[], None]) -> None:
    for p in _weights(optimizer):
        p.grad = torch.where(p.grad > 0, p.grad * 0.8, p.grad)
    step()


def _left_out(optimizer: Any, step: Callable[[], None]) -> None:
    last = _weights(optimizer)[-1]
    before = last.clone()
    step()
    last.copy_(before)


def _half_a_step(optimizer: Any, step: Callable[[], None]) -> None:
    last = _weights(optimizer)[-1]
    before = last.clone()
    step()
    last.lerp_(before, 0.5)


FAULTS: dict[str, Fault] = {
    "weights shrink": _shrinks,
    "positive gradients are damped": _other_gradient,
    "one weight is left out": _left_out,
    "one weight takes half a step": _half_a_step,
}


def _with_fault(optimizer: Any, fault: Fault) -> None:
    kind = type(optimizer)

    class Faulty(kind):  # type: ignore[valid-type, misc]
        def step(self, *args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                fault(self, lambda: super(Faulty, self).step(*args, **kwargs))

    Faulty.__name__, Faulty.__qualname__ = kind.__name__, kind.__qualname__
    Faulty.__module__ = kind.__module__
    optimizer.__class__ = Faulty
    optimizer._patch_step_function()


# ---- trainings


class Way(NamedTuple):
    """How a training differs from the reference."""

    is_in_parts: bool = False
    is_lower: bool = False
    fault: Fault | None = None

    def changes(self, bare: list[Any], after: list[Any]) -> bool:
        """Does it change a parameter: a fault by more than rounding does?"""
        if self.fault is None:
            return not all(map(torch.equal, bare, after))
        pairs = zip(bare, after, strict=True)
        return any(float((a - b).norm() / a.norm()) > _ROUNDING for a, b in pairs if a.any())


BARE = Way()
CLEAN = {"in parts": Way(is_in_parts=True), "autocast": Way(is_lower=True)}


def trained(make: Make, network: str, way: Way = BARE, path: Path | None = None) -> list[Any]:
    """The parameters after a training, captured to `path` where one is given."""
    built, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = built()
    for layer in model:
        if way.is_in_parts:
            layer.__class__ = _IN_PARTS.get(type(layer), type(layer))
    torch.manual_seed(1)
    optimizer = make(list(model.parameters()))
    if way.fault is not None:
        _with_fault(optimizer, way.fault)
    if hasattr(optimizer, "train"):
        optimizer.train()
    draw = torch.Generator().manual_seed(3)

    def run() -> None:
        for _ in range(STEPS):
            x = torch.randn(ROWS, *shape, generator=draw)
            y = torch.randn(ROWS, CLASSES, generator=draw)
            with torch.autocast("cpu", torch.bfloat16, enabled=way.is_lower):
                loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        run()
    else:
        with whence.capture(model, path, force=True):
            run()
    return [p.detach().clone() for p in model.parameters()]


def judged(name: str, make: Make, network: str, folder: Path) -> dict[str, Any] | None:
    """One line of the table, None of an optimiser that does not train such a network."""
    try:
        bare = trained(make, network)
    except Exception as error:  # noqa: BLE001 - needs other arguments, a closure, a graph
        print(f"{name}: left out, {type(error).__name__}: {str(error)[:60]}", file=sys.stderr)
        return None
    began = time.perf_counter()
    seen = trained(make, network, path=folder / "reference")
    run = whence.open_run(folder / "reference")
    steps = [c for c in run.calls if c.phase == "optimizer" and c.op != "gradients" and c.refs]
    reasons = Counter(c.no_program for c in steps if not c.program)
    row: dict[str, Any] = {
        "name": name,
        "network": network,
        "neutral": all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True)),
        "steps": len(steps),
        "programs": sum(bool(c.program) for c in steps),
        "why_none": next(iter(reasons), ""),
    }
    faults = {words: Way(fault=fault) for words, fault in FAULTS.items()}
    for words, way in {**CLEAN, **faults}.items():
        after = trained(make, network, way, folder / "target")
        if not way.changes(bare, after):
            row[words] = "no effect"
            continue
        row[words] = _answer(whence.compare(folder / "reference", folder / "target"), way)
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def _answer(result: Any, way: Way) -> str:
    first = result.findings[0] if result.findings else None
    if way.fault is None:
        where = f", {first.name}: {first.sentence}" if first else ""
        return "silent" if result.status == "same" and not first else f"{result.status}{where}"
    if first is None:
        return str(result.status)
    is_there = first.phase == "optimizer" and first.name.endswith("/weight")
    return "named" if is_there else f"elsewhere: {first.name} ({first.phase or 'forward'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="every optimiser")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, is_wrong = [], False
    for name, make in optimizers():
        for network in NETWORKS if re.search(options.only, name) else ():
            try:
                with tempfile.TemporaryDirectory() as folder:
                    row = judged(name, make, network, Path(folder))
            except Exception:  # noqa: BLE001 - the other optimisers are of interest too
                print(f"{name}, {network}: crashed\n{traceback.format_exc()}")
                is_wrong = True
                continue
            if row is None:
                continue
            rows.append(row)
            flagged = [words for words in CLEAN if row[words].startswith("different")]
            is_wrong = is_wrong or bool(flagged) or not row["neutral"]
            if options.verbose or flagged or not row["neutral"]:
                print(json.dumps(row), flush=True)
    for network in NETWORKS:
        own = [row for row in rows if row["network"] == network]
        print(f"{network}: {len(own)} optimisers")
        whole = sum(row["programs"] == row["steps"] for row in own)
        some = sum(0 < row["programs"] < row["steps"] for row in own)
        print(f"  every step replayed: {whole}; some: {some}; none: {len(own) - whole - some}")
        for words in (*CLEAN, *FAULTS):
            counts = Counter(re.split("[,:]", row[words])[0] for row in own)
            print(f"  {words}: {', '.join(f'{n} {word}' for word, n in counts.most_common())}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
