"""What runs of many records cost, each stage in a process of its own: write, open, show, compare
(`answer` without files, `compare` with report.csv and report.json).

    python benchmarks/scale.py --records N [--flat] [--differing SHARE] [--only STAGE]

The run is a tree of modules called again in every step, its leaves with an input, an output and a
parameter, or, with --flat, a line of arrays as `whence.recording` writes them. Each leaf makes one
record of 16 float32. The target is a second run of the same program in which SHARE of these
records, drawn at random, differ in their last bit (0: it is equal in every hash). Seconds are of
the process that is measured and all of its threads, start of Python and imports included; memory is
the largest resident size less what mapped files add to it (`RssAnon`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _processes import cost, python

BLOCKS, LEAVES = 12, ("norm", "q", "k", "v", "o", "up", "down")
WIDTH = 16
STAGES = ("start", "write", "open", "show", "name", "answer", "compare")


def write(path: Path, records: int, differing: float, seed: int, *, flat: bool) -> None:
    """A run of `records` records. seed: of which records differ from those of seed 0."""
    import msgspec
    import numpy as np
    import xxhash

    from whence import store
    from whence.records import RunInfo, Statistics

    chosen = random.Random(seed)
    values = np.arange(WIDTH, dtype=np.float32)

    with store.Writer(store.create(path, RunInfo())) as writer:

        def add(number: int, *, may_differ: bool = True) -> int:
            values[0] = np.float32(number + 1)
            if seed and may_differ and chosen.random() < differing:
                values[0] = np.nextafter(values[0], np.float32(np.inf))
            data = values.view(np.uint8)
            figures = Statistics(WIDTH, 0.0, 9.0, 1.0, 1.0, float(values[0]), 0, 0, 0)
            digest = xxhash.xxh3_128_digest(data)
            return writer.record("float32", (WIDTH,), data, digest, figures, None)

        calls = _flat(records, add) if flat else _tree(records, add)
        clock = random.Random(seed + 1000)
        for call in calls:  # no two runs take the same time
            writer.call(msgspec.structs.replace(call, seconds=clock.random() * 1e-3))


def _flat(records: int, add: Callable[..., int]) -> Iterator[Any]:
    from whence.records import Call, Ref

    for number in range(records):
        refs = (Ref("output.0", add(number)),)
        yield Call(
            number,
            f"h{number % 1000}",
            "",
            number // 1000,
            number,
            kind="label",
            number=str(number),
            leaf=True,
            no_program="a recorded array has no program",
            refs=refs,
        )


def _tree(records: int, add: Callable[..., int]) -> Iterator[Any]:
    """Steps of a chain: model(blocks(leaves)); ids as calls begin, calls as they end."""
    from whence.records import Call, Ref

    weights = [add(number, may_differ=False) for number in range(BLOCKS * len(LEAVES))]
    made, order, step = len(weights), 0, 0

    def call(scope: str, kind: str, at: int, parent: int, place: str, refs: tuple[Any, ...]) -> Any:
        leaf = any(r.slot.startswith("param") for r in refs)
        fields: dict[str, Any] = {"op_type": kind, "parent": parent, "number": place, "leaf": leaf}
        why = "not recorded"
        return Call(at, scope, "Net", step, at, refs=refs, no_program=why, **fields)

    while made < records:
        root, first = order, add(made, may_differ=False)
        made, order, last = made + 1, order + 1, first
        for block in range(BLOCKS):
            top, given = order, last
            order += 1
            for place, leaf in enumerate(LEAVES):
                result = add(made)
                weight = Ref("param.weight", weights[block * len(LEAVES) + place])
                refs = (Ref("input.0", last), weight, Ref("output.0", result))
                scope = f"layers.{block}.{leaf}"
                yield call(scope, "Linear", order, top, f"{block}_{place}", refs)
                made, order, last = made + 1, order + 1, result
            refs = (Ref("input.0", given), Ref("output.0", last))
            yield call(f"layers.{block}", "Block", top, root, str(block), refs)
        yield call("", "Net", root, -1, "0", (Ref("input.0", first), Ref("output.0", last)))
        step += 1


def _inside(stage: str, where: Path, options: argparse.Namespace) -> None:
    """The work of one stage, in the process that is measured."""
    if stage == "start":
        importlib.import_module("whence.store")
        return
    if stage == "write":
        write(where / "a", options.records, 0.0, 0, flat=options.flat)
        return
    if stage == "open":
        from whence import store

        store.open_run(where / "a")
        return
    from whence.cli import main

    words = {
        "show": ["show", str(where / "a")],
        "name": ["show", str(where / "a"), "--name", "h7" if options.flat else "layers.7.q"],
        "answer": ["compare", str(where / "a"), str(where / "b")],
        "compare": ["compare", str(where / "a"), str(where / "b"), "-o", str(where / "out")],
    }[stage]
    sys.argv = ["whence", *words]
    main()


def measure(stage: str, where: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and memory of one stage in a process of its own."""
    command = python(__file__, "--inside", stage, "--where", str(where))
    command += ["--records", str(options.records), *(["--flat"] if options.flat else [])]
    taken = cost(command)
    return {"cpu_s": taken.cpu_s, "wall_s": taken.wall_s, "mb": taken.mb, "exit": taken.exit}


def main() -> None:
    """Run the stages and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--flat", action="store_true", help="arrays in a line, without parents")
    parser.add_argument("--differing", type=float, default=0.0, help="share of records, 0 to 1")
    parser.add_argument("--only", choices=STAGES, action="append", help="only these stages")
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        _inside(options.inside, options.where, options)
        return
    stages = {}
    print(f"{'stage':10}{'CPU s':>9}{'wall s':>9}{'MB':>8}{'us/record':>11}  exit")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if options.only and "write" not in options.only:
            write(where / "a", options.records, 0.0, 0, flat=options.flat)
        for stage in (stage for stage in STAGES if stage in (options.only or STAGES)):
            if stage in ("answer", "compare") and not (where / "b").exists():
                write(where / "b", options.records, options.differing, 1, flat=options.flat)
            stages[stage] = figures = measure(stage, where, options)
            each = figures["cpu_s"] / options.records * 1e6
            print(
                f"{stage:10}{figures['cpu_s']:9.2f}{figures['wall_s']:9.2f}{figures['mb']:8.0f}"
                f"{each:11.1f}  {figures['exit']:.0f}",
                flush=True,
            )
    if options.json:
        said = {"records": options.records, "flat": options.flat, "differing": options.differing}
        Path(options.json).write_text(json.dumps({**said, "stages": stages}, indent=1))


if __name__ == "__main__":
    main()
