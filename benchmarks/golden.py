"""Golden answers: what whence answers for a fixed set of cases, to hold a change to the same bytes.

    python benchmarks/golden.py record FOLDER     record the runs of all cases and keep every answer
    python benchmarks/golden.py compare FOLDER    ask the same again of the code as it is now
    python benchmarks/golden.py held FOLDER       write what was recorded to tests/data/answers
    python benchmarks/golden.py ablation FOLDER   which step of a comparison changes which answers
    python benchmarks/golden.py list              the cases

`record` runs before a change, `compare` after it, on one machine: recorded numbers depend on the
kernels that a processor picks. `compare` opens the runs that `record` recorded, so it also shows
that old runs open and compare to the same bytes. FOLDER/golden and FOLDER/now hold a folder a case;
exit code 1 when any byte differs. `held` leaves out every figure that depends on rounding:
tests/benchmarks/test_golden.py holds these words on any processor. `--only REGEX` takes the cases
KIND/NAME that match.

The cases are in benchmarks/_golden, a file a kind. They type commands and call what `whence` lists
as public, nothing below: so they outlive a change of structure.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from _golden.masks import held, plain
from _golden.place import DATA, ROOT, Case, Place, share_builders

HELD = DATA / "answers"
WIDTH, LINES = 240, 12
"""Columns of a line, and lines of a difference, that are shown."""
NOT_HELD = (".json", ".csv", ".here.txt")
"""Ends of the parts of which no words are held: tables, and what depends on the processor."""


def cases(only: str = "") -> dict[str, Case]:
    """All cases by KIND/NAME."""
    folder = Path(__file__).parent / "_golden"
    kinds = sorted(
        p.stem for p in folder.glob("[a-z]*.py") if p.stem not in ("masks", "nets", "place")
    )
    return {name: case for kind in kinds for name, case in _of(kind) if re.search(only, name)}


def _of(kind: str) -> Iterator[tuple[str, Case]]:
    module = importlib.import_module(f"_golden.{kind}")
    for name, case in module.CASES.items():
        yield f"{kind}/{name}", case


def answers(name: str, case: Case, folder: Path) -> dict[str, str]:
    """Every part of what one case says; where it fails, why."""
    place = Place(folder / "runs" / name)
    place.clear()
    parts = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, text in case(place):
                parts[part.replace("/", "_")] = plain(text, place.folder, ROOT)
    except Exception:  # noqa: BLE001 - a case that fails is told as its answer
        parts["failed.txt"] = traceback.format_exc()
    return parts


def recorded(place: Path) -> dict[str, str]:
    """The parts of an answer that `write` wrote."""
    files = sorted(place.iterdir()) if place.exists() else []
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def words(parts: dict[str, str]) -> str:
    """What of an answer is held on every processor."""
    said = [
        f"==== {part}\n{held(text)}"
        for part, text in sorted(parts.items())
        if not part.endswith(NOT_HELD)
    ]
    return "".join(said)


def write(folder: Path, place: Path, only: str) -> bool:
    """Every answer as files below `place`, a folder a case. False where a case fails."""
    good = True
    for name, case in cases(only).items():
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir(parents=True)
        began = sum(os.times()[:4])
        parts = answers(name, case, folder)
        if "failed.txt" in parts:
            print(f"{name} FAILED\n{parts['failed.txt']}", flush=True)
            good = False
        for part, text in parts.items():
            (place / name / part).write_text(text, encoding="utf-8")
        if "-v" in sys.argv:
            print(f"{sum(os.times()[:4]) - began:6.2f} s  {name}", flush=True)
    return good


def differences(golden: Path, now: Path) -> dict[str, list[str]]:
    """Unified differences by case, a text a file; a file that only one side has counts."""
    files = {p.relative_to(place) for place in (golden, now) for p in place.rglob("*.*")}
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        before, after = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (golden / file, now / file)
        )
        lines = list(difflib.unified_diff(before, after, "golden", "now", n=1, lineterm=""))[2:]
        if lines:
            shown = [f"  {file.name}", *(f"    {line[:WIDTH]}" for line in lines[:LINES])]
            found.setdefault(str(file.parent), []).append("\n".join(shown))
    return found


def compare(folder: Path, only: str) -> int:
    """0 when every answer is what it was."""
    shutil.rmtree(folder / "now", ignore_errors=True)
    good = write(folder, folder / "now", only)
    recorded = [folder / "golden" / name for name in cases(only)]
    found = {
        name: texts
        for name, texts in differences(folder / "golden", folder / "now").items()
        if re.search(only, name)
    }
    for name, texts in found.items():
        print(f"{name}\n" + "\n".join(texts))
    print(f"{len(found)} of {len(recorded)} cases answer otherwise than they did")
    return int(bool(found) or not good)


def hold(folder: Path, only: str) -> int:
    """Write the words of recorded answers where the tests look for them."""
    lacking = []
    for name in cases(only):
        parts = recorded(folder / "golden" / name)
        if not parts or "failed.txt" in parts:
            lacking.append(name)
            continue
        path = HELD / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(parts), encoding="utf-8")
    print("\n".join(f"{name} has no answer" for name in lacking))
    return int(bool(lacking))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("record", "compare", "held", "ablation", "list"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "-v", action="store_true", help="say how many seconds of processors each case takes"
    )
    chosen = parser.parse_args()
    share_builders()
    if chosen.verb == "list":
        print("\n".join(cases(chosen.only)))
        return 0
    if chosen.folder is None:
        parser.error("a FOLDER is needed")
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    torch.set_num_threads(1)
    if chosen.verb == "record":
        for name in cases(chosen.only):
            shutil.rmtree(folder / "runs" / name, ignore_errors=True)
        return int(not write(folder, folder / "golden", chosen.only))
    if chosen.verb == "compare":
        return compare(folder, chosen.only)
    if chosen.verb == "held":
        return hold(folder, chosen.only)
    from _golden._ablation import table

    print(table(cases(chosen.only), folder, answers, recorded))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
