"""Dumps that people make by hand: does the answer name the fault, and is it silent otherwise?

    python benchmarks/layouts.py [--half SET] [--share N] [--only REGEX] [--json FILE] [-v]

Three small models are dumped in many layouts (`_layout_table.py`): containers, names, orders,
steps, ranks and dtypes, with six faults and with pairs that differ by rounding. `held` was drawn by
name before anything was set; the sets behind it came later, each written before any of it was
compared. An answer is `named` (the module with the fault first), `region` (its layer first, or as
what is not known), `innocent`, `undecided`, `SAME`; of a benign pair `silent`, `ALARM` or
`undecided`. Exit code 1 where a fault passes or one is made up.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _hand_made import SUBJECTS, Layout, layer_of, taps_of
from _layout_table import SUBJECTS_OF, TABLE

import whence
from whence.errors import WhenceError

_GRADIENTS = ("micro", "order", "bfloat16")


def drawn(name: str) -> int:
    """A number by chance, the same for the same name."""
    return hashlib.sha256(f"pair {name}".encode()).digest()[0]


def squashed(name: str) -> str:
    """A name without what stands between its parts."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_named(layout: Layout, said: str, planted: str, subject: str) -> bool:
    """Does a name of the answer mean the module with the fault?"""
    layer, inner = layer_of(planted)
    names = {planted, f"{layer}.{inner}", layout.own(subject, planted)}
    if layout.keep == "layers":
        number = layer.removeprefix("layer_")
        names = {
            layer,
            f"hidden_states_{number}",
            f"hidden_states.{number}",
            f"第{number}层",
            f"1.{number}",
            layout.own(subject, planted),
        }
        return any(_squashed_words(said) == _squashed_words(name) for name in names)
    bare = f"{layer.removeprefix('layer_')}.{inner}"  # of a dictionary by the number of the layer
    return said == bare or any(squashed(name) in squashed(said) for name in names)


def _squashed_words(name: str) -> str:
    return re.sub(r"[^a-z0-9\u4e00-\u9fff]", "", name.lower()).removesuffix("output0")


def is_region(layout: Layout, said: str, planted: str, subject: str) -> bool:
    """Does a name of the answer mean the layer of the fault, or a part of it that has the fault?"""
    layer = SUBJECTS[subject].layer
    if not planted.startswith(layer):
        return squashed(said) == squashed(planted.split(".")[0])
    number = planted[len(layer) :].split(".")[0]
    dots = re.finditer(r"\.", planted[len(layer) :])
    names = {planted[: len(layer) + dot.start()] for dot in dots}
    wholes = {squashed(name) for name in names}
    wholes |= {squashed(layout.own(subject, name)) for name in names if name.count(".")}
    wholes |= {squashed(f"{layer}{number}"), f"layer{number}"}
    # of the name of the run in front, or of names of classes
    return any(squashed(said).endswith(whole) for whole in wholes)


def graded(layout: Layout, subject: str, change: str, result: Any) -> tuple[str, str]:
    """(grade, what the answer says first)."""
    said = [finding.name for finding in result.findings]
    faults = SUBJECTS[subject].faults
    if change not in faults or layout.gradients:
        if layout.gradients and change in faults:
            return ("named" if result.status != "same" else "SAME"), result.headline
        grade = {"same": "silent", "different": "ALARM"}.get(result.status, "undecided")
        return grade, (said or [result.headline])[0]
    planted = faults[change]
    shown = first_shown(layout, subject, change)
    if callable(layout.keep):
        planted = shown
    elif layout.keep == "layers" and not planted.startswith(SUBJECTS[subject].layer):
        planted = f"{SUBJECTS[subject].layer}0"
    if result.status == "same":
        return "SAME" if planted else "named", result.headline
    if result.status == "different":
        places = {planted, shown if shown.startswith(f"{planted}.") else planted}
        if any(is_named(layout, said[0], place, subject) for place in places):
            return "named", said[0]
        return ("region" if is_region(layout, said[0], planted, subject) else "innocent"), said[0]
    return "undecided", result.headline


@functools.cache
def first_shown(layout: Layout, subject: str, change: str) -> str:
    """The first tap of a layout that shows a fault."""
    sides = (taps_of(subject, what, 1, 1) for what in ("", change))
    kept = zip(*(layout._kept(taps, subject) for taps in sides), strict=True)
    return next((a.name for a, b in kept if not torch.equal(a.outputs[0], b.outputs[0])), "")


def changes(layout: Layout, subject: str) -> tuple[str, ...]:
    """What the second side may differ by."""
    return (
        (*_GRADIENTS, "scaled")
        if layout.gradients
        else (*SUBJECTS[subject].faults, *SUBJECTS[subject].benign)
    )


def rows(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row a pair."""
    for layout in TABLE[options.half]:
        for subject in SUBJECTS_OF[options.half]:
            for change in changes(layout, subject):
                name = f"{layout.name}/{subject}/{change}"
                if re.search(options.only, name) and drawn(name) % options.share == 0:
                    yield row(layout, subject, change, folder, options.keep) | {"name": name}


def row(
    layout: Layout, subject: str, change: str, scratch: Path, keep: Path | None
) -> dict[str, Any]:
    """What came of one pair."""
    place = (keep or scratch) / squashed(layout.name) / subject
    dump = layout.make_gradients if layout.gradients else layout.make
    for side, what in (("ref", ""), (change, change)):
        if not (place / side).exists():
            dump(place / side, subject, what)
    began = time.process_time()
    try:
        result = whence.compare(place / "ref", place / change)
        grade, said = graded(layout, subject, change, result)
        said = f"{said} | {result.findings[0].sentence}" if result.findings else said
    except WhenceError as error:
        grade, said = "refused", str(error).partition("\n")[0]
    return {
        "layout": layout.name, "subject": subject, "change": change,
        "grade": grade, "said": said[:300],
        "seconds": time.process_time() - began,
    }  # fmt: skip


COLUMNS = ("named", "region", "innocent", "undecided", "refused", "SAME", "silent", "ALARM")


def table(pairs: list[dict[str, Any]]) -> None:
    """Counts, of each layout and of all."""
    faults: dict[str, Counter[str]] = defaultdict(Counter)
    for item in pairs:
        is_fault = item["change"] not in (*SUBJECTS[item["subject"]].benign, *_GRADIENTS)
        faults[item["layout"]][item["grade"] if is_fault else f"{item['grade']} "] += 1
        faults["all"][item["grade"] if is_fault else f"{item['grade']} "] += 1
    shown = ["named", "region", "innocent", "undecided", "refused", "SAME"]
    shown += ["silent ", "ALARM ", "undecided ", "refused "]
    print(f"{'':44}{'faults':<54}  benign pairs")
    print(f"{'layout':<44}" + "".join(f"{c.strip():>10}" for c in shown))
    for layout, counts in sorted(faults.items(), key=lambda item: item[0] == "all"):
        print(f"{layout:<44}" + "".join(f"{counts[c] or '':>10}" for c in shown))
    print(f"{sum(item['seconds'] for item in pairs):.0f} s of CPU for comparing {len(pairs)} pairs")


def main() -> int:
    """Make, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--half",
        choices=tuple(TABLE),
        default="setting",
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=int, default=1, help="one pair in so many, drawn by name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the dumps")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for item in rows(options, Path(folder)):
            pairs.append(item)
            if options.verbose or item["grade"] not in ("named", "silent"):
                print(f"{item['grade']:<10} {item['name']}: {item['said']}", flush=True)
    table(pairs)
    if options.json is not None:
        options.json.write_text(json.dumps(pairs, indent=1))
    return int(any(item["grade"] in ("innocent", "SAME", "ALARM") for item in pairs))


if __name__ == "__main__":
    sys.exit(main())
