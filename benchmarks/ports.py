"""Models written anew by somebody else, beside their references: is the answer right?

    python benchmarks/ports.py [--only REGEX] [--dtype DTYPE ...] [--results FILE] [--check]

A port divides a model into other modules: products fused or split, norms and attention in code,
other names, other axes. Each is compared clean and with every fault of its list, one at a time. A
clean pair should be silent; of a fault the module has to be named that computes what is wrong, as
the list says (`around`: a container around it is named). A fault that moves the outputs by less
than three times what the clean pair differs by, and is not found, is `faint` and does not count.
--check compares nothing: it looks in float64 whether every clean port computes what its reference
computes, and whether every fault changes it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _ports import images, older, sequences
from _ports.pair import Pair, Port
from torch import Tensor

import whence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAME = 1e-6
"""By how much a clean port may differ in float64: weights are folded in float32 before."""
CLEAR = 3.0
GOOD = ("silent", "named", "around", "faint")


def ports() -> tuple[Port, ...]:
    """All of them; those of transformers only where it is installed."""
    plain = (*sequences.PORTS, *images.PORTS, *older.PORTS)
    try:
        from _ports import published
    except ImportError:
        return plain
    return (*plain, *published.PORTS)


def ran(pair: Pair, fault: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What both models leave, captured nowhere."""
    with torch.set_grad_enabled(pair.reference.training):
        wanted = pair.drive(pair.reference, pair.inputs, "")
        return wanted, pair.drive(pair.port, pair.inputs, fault)


def distance(wanted: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """The largest relative distance of two lists of tensors."""
    pairs = zip(wanted, outputs, strict=True)
    return max(float((a - b).double().norm() / a.double().norm()) for a, b in pairs)


def apart(port: Port, fault: str, dtype: torch.dtype = torch.float64) -> float:
    """How far a port is from its reference."""
    return distance(*ran(port.build(fault).to(dtype), fault))


def compared(pair: Pair, fault: str, folder: Path) -> Any:
    """The answer of whence about a pair."""
    runs = folder / "reference", folder / "port"
    sides = (pair.reference, ""), (pair.port, fault)
    for (model, planted), run in zip(sides, runs, strict=True):
        with torch.set_grad_enabled(pair.reference.training), whence.capture(model, run):
            pair.drive(model, pair.inputs, planted)
    return whence.compare(*runs)


def row_of(port: Port, fault: str, dtype: str, clean: float) -> dict[str, Any]:
    """What came of one pair. clean: how far the clean port is from its reference in this dtype."""
    start = time.perf_counter()
    row: dict[str, Any] = {"port": port.name, "fault": fault, "dtype": dtype}
    effect = apart(port, fault, DTYPES[dtype])
    row["effect"] = effect
    try:
        with tempfile.TemporaryDirectory() as folder:
            pair = port.build(fault).to(DTYPES[dtype])
            result = compared(pair, fault, Path(folder))
            row["status"] = result.status
            findings = result.findings
            row["places"] = [f"{f.name} {f.slot}" for f in findings[:4]]
            row["sentence"] = str(result).splitlines()[:6]
            place = _place(findings[0].name, pair.reference) if findings else ""
    except Exception:  # noqa: BLE001 - a crash of one pair is its answer
        return row | {"grade": "CRASH", "why": traceback.format_exc()[-1500:]}
    row["grade"] = graded(port.faults.get(fault, ""), row["status"], place, effect, clean)
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _place(name: str, reference: torch.nn.Module) -> str:
    """What a finding names, as the lists of faults write it: "loss" of any, "." of the whole."""
    root = type(reference).__name__
    return "." if name == root else name.removeprefix(f"{root}/")


def graded(wanted: str, status: str, place: str, effect: float, clean: float) -> str:
    """How good the answer is. wanted: of a fault the modules that may be named, "" of a clean pair.
    place: what is named, "." for the whole model.
    """
    if not wanted:
        return {"same": "silent", "different": "FALSE ALARM"}.get(status, "undecided")
    if status == "different":
        names = wanted.split()
        if wanted == "*" or place in names:
            return "named"
        is_around = any(place == "." or name.startswith(f"{place}.") for name in names)
        return "around" if is_around else "elsewhere"
    if effect < CLEAR * clean:
        return "faint"
    return "MISSED" if status == "same" else "undecided"


def check(chosen: Sequence[Port]) -> int:
    """Whether the list is right in itself."""
    wrong = 0
    for port in chosen:
        clean = apart(port, "")
        faint = [f for f in port.faults if not port.trains and apart(port, f) < 1e-6]
        wrong += clean > SAME or bool(faint)
        print(f"{port.name:20} {clean:.1e} {' '.join(faint)}", flush=True)
    return int(wrong > 0)


def told(row: dict[str, Any]) -> str:
    """One line about a pair."""
    where = row.get("why", "")[-200:] or "; ".join(row.get("places", ()))
    name = f"{row['port']}/{row['fault'] or 'clean'}/{row['dtype']}"
    return f"{row['grade']:12} {name:40} {row.get('effect', 0):.1e} {where}"


def main(options: argparse.Namespace) -> int:
    """Compare, print, and say by the exit code whether all was right."""
    torch.set_num_threads(1)
    chosen = [port for port in ports() if re.search(options.only, port.name)]
    if options.check:
        return check(chosen)
    rows: list[dict[str, Any]] = []
    for port in chosen:
        for dtype in options.dtype:
            clean = apart(port, "", DTYPES[dtype])
            for fault in ("", *port.faults):
                row = row_of(port, fault, dtype, clean)
                print(told(row), flush=True)
                rows.append(row)
                if options.results:
                    with Path(options.results).open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(row) + "\n")
    for grade, count in collections.Counter(row["grade"] for row in rows).most_common():
        print(f"{grade:12} {count:4}")
    return int(any(row["grade"] not in GOOD for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--results", default="", metavar="FILE", help="a row of JSON for each pair")
    parser.add_argument("--check", action="store_true")
    sys.exit(main(parser.parse_args()))
