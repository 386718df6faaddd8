"""Other ways to compute the same, on many architectures, and faults beside them: is the answer
right?

    python benchmarks/zoo.py [--half setting|held] [--level modules|op|dumps] [--kind clean|two|faults|beside]
                             [--limit N] [--seed S] [--only REGEX] [--results FOLDER] [--build] [--fresh]
    python benchmarks/zoo.py --pair ARCHITECTURE/WAY/DTYPE [--keep FOLDER]

Every pair is checked in float64 first: a way that does not compute the same is refused. `clean`
pairs differ by a way alone, `two` by two of them, `faults` by a fault alone, `beside` by both. Half
of the ways and architectures, drawn by name (`_zoo/draw.json`), set nothing: `--half held` takes
pairs with one of these, and is for the end. Pairs come in a shuffled order that depends on the
seed, and each is a row of a file, so that a run that ended goes on. --build makes the pairs and
does not compare them; `--level dumps` records no programs; --draw writes the draw down for names
that are new.
"""  # noqa: E501

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _zoo import draw, pairs
from _zoo.architectures import ARCHITECTURES
from _zoo.sides import NotHere
from _zoo.ways import load

GOOD = ("silent", "named")


def row_of(
    name: pairs.Name, level: str, build_alone: bool, keep: str | None = None
) -> dict[str, Any]:
    """What came of one pair; "refused" where there is none. keep: a folder for both runs."""
    start = time.perf_counter()
    row: dict[str, Any] = {
        "name": str(name),
        "architecture": name.architecture,
        "way": name.way,
        "dtype": name.dtype,
        "fault": name.fault,
    }
    try:
        pair = pairs.build(name)
    except (NotHere, pairs.Refused) as error:
        is_elsewhere = isinstance(error, NotHere)
        return row | {"grade": "refused", "why": str(error)[:200], "elsewhere": is_elsewhere}
    except Exception as error:  # noqa: BLE001 - a way that fails on a model is no pair
        return row | {"grade": "refused", "why": f"{type(error).__name__}: {error}"[:200]}
    if pair.planted is not None:
        row |= {
            "planted": pair.planted.name,
            "effect": pair.effect,
            "clear": pair.effect > pairs.CLEAR,
        }
    row["build_s"] = round(time.perf_counter() - start, 2)
    if build_alone:
        return row | {"grade": "built"}
    try:
        answer = pairs.measure(pair, level, keep)
    except Exception:  # noqa: BLE001 - a crash of one pair is its answer
        if not pairs.runs(pair):
            return row | {"grade": "refused", "why": "torch itself fails on it"}
        return row | {"grade": "CRASH", "why": traceback.format_exc()[-1500:]}
    grade = pairs.graded(pair, answer)
    answer["innocents"] = pairs.innocents(pair, answer)
    return row | answer | {"grade": grade, "seconds": round(time.perf_counter() - start, 2)}


def rows(options: argparse.Namespace, file: Path) -> list[dict[str, Any]]:
    """All rows up to the limit, those of the file first asked for."""
    known = {}
    if file.exists() and not options.fresh:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[row["name"]] = row
    out: list[dict[str, Any]] = []
    barren, taken, elsewhere = 0, set(), set()
    wanted = re.compile(options.only)
    with file.open("w" if options.fresh else "a", encoding="utf-8") as stream:
        for subject, offered in pairs.names(options.half, options.kind, options.seed):
            barren += 1
            for name in offered:
                # What has no place in an architecture has none there the next time.
                skipped = str(name) in taken or (subject, name.architecture) in elsewhere
                if skipped or not wanted.search(str(name)):
                    continue
                taken.add(str(name))
                row = known.get(str(name))
                if row is None:
                    row = row_of(name, options.level, options.build)
                    stream.write(json.dumps(row) + "\n")
                    stream.flush()
                    if row["grade"] not in (*GOOD, "refused", "built"):
                        print(told(row), flush=True)
                if row.get("elsewhere") and options.kind not in ("beside", "two"):
                    elsewhere.add((subject, name.architecture))
                if row["grade"] != "refused":
                    out.append(row)
                    barren = 0
                    break
            if len(out) >= options.limit or barren > 1000:
                break
    return out


def told(row: dict[str, Any]) -> str:
    """One line about a pair."""
    what = row.get("undecided") or row.get("sentence") or row.get("headline") or row.get("why", "")
    place = row.get("first", "")
    planted = f" planted {row['planted']} ({row['effect']:.1e})" if row.get("fault") else ""
    words = f"{place} {row.get('cause', '')} {what[-200:]}".replace("\n", " ")
    return f"{row['grade']:12} {row['name']}{planted}: {words}"


def table(made: list[dict[str, Any]]) -> None:
    """The counts."""
    grades = collections.Counter(r["grade"] for r in made)
    total = max(1, len(made))
    for grade, count in grades.most_common():
        print(f"{grade:14} {count:5}  {100 * count / total:5.1f} %")
    clear = [r for r in made if r.get("clear")]
    if clear:
        print(
            f"clear faults named first: {sum(r['grade'] == 'named' for r in clear)} of {len(clear)}"
        )
    if any(r.get("fault") for r in made):
        print(f"pairs with an innocent module named: {sum(bool(r.get('innocents')) for r in made)}")
    seconds = [r["seconds"] for r in made if "seconds" in r]
    if seconds:
        print(f"{len(made)} pairs, {sum(seconds) / len(seconds):.2f} s a pair")


def main(options: argparse.Namespace) -> int:
    """Run, print, and say by the exit code whether all was right."""
    if options.draw:
        draw.write({"architecture": list(ARCHITECTURES), "way": list(load())})
        return 0
    torch.set_num_threads(1)
    if options.pair:
        name = pairs.named(options.pair)
        if pairs.is_held(name) and options.half != "held" and not options.build:
            print(f"{name} is of the half that sets nothing: --half held, at the end")
            return 2
        row = row_of(name, options.level, options.build, options.keep)
        print(json.dumps(row, indent=1))
        return int(row["grade"].isupper())
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    kind = options.kind + ("-built" if options.build else "")
    made = rows(
        options, pairs.path_of(options.results, options.half, kind, options.level, options.seed)
    )
    for row in made:
        if row["grade"] not in (*GOOD, "built"):
            print(told(row))
    table(made)
    return int(any(r["grade"].isupper() for r in made))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--half", choices=("setting", "held"), default="setting")
    parser.add_argument("--level", choices=tuple(pairs.LEVELS), default="modules")
    parser.add_argument("--kind", choices=("clean", "two", "faults", "beside"), default="clean")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--results", default="zoo-results", metavar="FOLDER")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="forget earlier rows")
    parser.add_argument("--pair", metavar="NAME", help="this pair alone, as rows name it")
    parser.add_argument("--keep", metavar="FOLDER", help="with --pair: leave both runs here")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("-j", type=int, default=1, help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
