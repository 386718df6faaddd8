"""Compiled programs with caches, CUDA graphs, C++ wrappers, packages, autotuning: does a captured
one compute what it computes without a capture, and where it does not, does the run say so?

    python benchmarks/compiled_settings.py [--json FILE] [--level graph] [--graph-mode exact] [NAME ...]

Each program of `_compiled/programs.py` prints a digest of all that it computes; it runs without a
capture and with one. `results` is whether both digests are equal, `says` what the run says of it
(`whence.records.observed`). WRONG is a program whose captured results differ and whose run says
that they do not. Takes some minutes: everything is compiled twice.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from whence.records.observed import Effect, observed
from whence.store import open_run

_PROGRAMS = Path(__file__).parent / "_compiled" / "programs.py"
_GIVEN = "2.0\n"  # what each finds in its standard input


def main() -> None:
    """Measure and print."""
    sys.path.insert(0, str(_PROGRAMS.parent))
    import programs

    every = [n for n, f in vars(programs).items() if callable(f) and _is_program(f)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--level", default="graph", choices=["graph", "modules", "op"])
    parser.add_argument("--graph-mode", default="exact", choices=["exact", "deep"])
    given = parser.parse_args()
    options = ["--level", given.level]
    if given.level == "graph":
        options += ["--graph-mode", given.graph_mode]
    print(f"{'program':22}{'results':10}{'says':20}")
    found = []
    for name in given.names or every:
        row = _tried(name, options)
        found.append(row)
        print(f"{name:22}{row['results']:10}{row['says']:20}{row['why']}", flush=True)
    wrong = [row["program"] for row in found if row["wrong"]]
    equal = sum(row["results"] == "equal" for row in found)
    print(f"{len(found)} programs: {equal} bit-equal, WRONG: {', '.join(wrong) or 'none'}")
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


def _is_program(function: Any) -> bool:
    return (
        getattr(function, "__module__", "") == "programs"
        and not isinstance(function, type)
        and not function.__name__.startswith("_")
        and function.__name__ != "main"
    )


def _tried(name: str, options: list[str]) -> dict[str, Any]:
    program = [sys.executable, str(_PROGRAMS), name]
    bare = _digest(program)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        whence = [sys.executable, "-m", "whence", "run", "-o", str(path), *options, "--"]
        captured = _digest([*whence, *program])
        run = open_run(str(path)) if path.exists() else None
        seen = observed(run) if run is not None else None
    equal = bare == captured
    says = (
        "nothing captured"
        if run is None
        else "nothing switched"
        if seen is None
        else seen.effect.name.lower()
    )
    trusted = run is not None and (seen is None or seen.effect == Effect.NONE)
    return {
        "program": name,
        "results": "equal" if equal else "DIFFER" if captured else "FAILED",
        "says": says,
        "why": "" if seen is None else seen.why,
        "wrong": not equal and (trusted or not captured),
    }


def _digest(command: list[str]) -> str:
    done = subprocess.run(command, input=_GIVEN, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("digest ")]
    if not lines:
        print("\n".join(done.stderr.splitlines()[-4:]), file=sys.stderr)
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main()
