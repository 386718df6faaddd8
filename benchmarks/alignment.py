"""Speed of pairing: two runs of some 100 000 records, by metadata alone.

    python benchmarks/alignment.py [--json FILE] [--layers 5600]

Modules by layers and steps, with common names and without; "flat": all calls below one root;
"less": the target lacks ten layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from pathlib import Path

from whence import align
from whence.records import Call, MemoryRun, Record, Ref, Sketch, Statistics

INSIDE = ["q", "k", "v", "o", "norm", "gate", "up", "down", "act"]


def run(
    layers: int, steps: int, *, renamed: bool = False, flat: bool = False, less: int = 0
) -> MemoryRun:
    """A chain of layers with nine modules each; parameters and outputs have figures, no elements.
    less: layers left out.
    """
    records: list[Record] = []
    calls: list[Call] = []
    known: dict[tuple[int, int], int] = {}

    def record(what: tuple[int, ...], shape: tuple[int, ...]) -> int:
        rng = random.Random(hash(what))
        count, norm = shape[0] * shape[1], rng.uniform(5, 9)
        figures = Statistics(
            count, -1.0, 1.0, rng.uniform(-0.1, 0.1), norm / count**0.5, norm, 0, 0, 0
        )
        sketch = Sketch(rng.getrandbits(64), norm * 3, 0.0, 1.0)
        records.append(
            Record(
                len(records),
                "float32",
                shape,
                hash=f"{rng.getrandbits(128):032x}",
                statistics=figures,
                sketch=sketch,
            )
        )
        return len(records) - 1

    gone = set(random.Random(7).sample(range(layers), less))
    kept = [layer for layer in range(layers) if layer not in gone]
    root = ("Other" if renamed else "Net") + ("Flat" if flat else "")
    for step in range(steps):
        order = len(calls)
        top = order + len(kept) * (len(INSIDE) + (not flat))
        first = at = record((step,), (16, 64))
        for place, layer in enumerate(kept):
            scope = f"stack.b{place}" if renamed else f"layers.{place}"
            above, given = len(calls) + len(INSIDE), at
            for k, inside in enumerate(INSIDE):
                weight = known.get((layer, k))
                if weight is None:
                    weight = known[layer, k] = record((layer, k), (64, 64))
                made = record((step, layer, k), (16, 64))
                refs = (Ref("param.weight", weight), Ref("input.0", at), Ref("output.0", made))
                name = f"{scope}.{'x' * (k + 1) if renamed else inside}"
                number = len(calls)
                calls.append(
                    Call(
                        number,
                        name,
                        root,
                        step,
                        number + 2,
                        op_type="Linear",
                        parent=top if flat else above,
                        leaf=True,
                        refs=refs,
                    )
                )
                at = made
            if not flat:
                refs = (Ref("input.0", given), Ref("output.0", at))
                calls.append(
                    Call(
                        above,
                        scope,
                        root,
                        step,
                        above - len(INSIDE) + 1,
                        op_type="Layer",
                        parent=top,
                        refs=refs,
                    )
                )
        calls.append(
            Call(
                top,
                "",
                root,
                step,
                order,
                op_type="Net",
                refs=(Ref("input.0", first), Ref("output.0", at)),
            )
        )
    return MemoryRun(calls, records, {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=5600)
    options = parser.parse_args()
    rows = []
    for name, layers, steps, how, left_out in (
        ("20 steps, common names", options.layers // 20, 20, {}, 0),
        ("20 steps, no name in common", options.layers // 20, 20, {"renamed": True}, 0),
        ("1 step, common names", options.layers, 1, {}, 0),
        ("1 step, no name in common", options.layers, 1, {"renamed": True}, 0),
        ("1 step, no name in common, less", options.layers, 1, {"renamed": True}, 10),
        ("1 step, flat, no name in common", options.layers, 1, {"renamed": True, "flat": True}, 0),
        ("the same, less", options.layers, 1, {"renamed": True, "flat": True}, 10),
    ):
        flat = how.get("flat", False)
        left, right = run(layers, steps, flat=flat), run(layers, steps, less=left_out, **how)
        gc.set_threshold(200_000, 50, 100)  # as the command line does
        started = time.perf_counter()
        plan = align.align(left, right).plan
        took = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        row = {
            "runs": name,
            "calls": len(left.calls),
            "records": len(left.records),
            "pairs": len(plan.pairs),
            "s": took,
            "peak_gb": peak,
        }
        counts = (
            f"{len(left.calls):>7} calls {len(left.records):>7} records {len(plan.pairs):>7} pairs"
        )
        print(f"{name:<34} {counts} {took:6.1f} s {peak:5.2f} GB")
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
