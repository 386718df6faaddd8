"""`whence accept` on expectations that moved in public threads: benign drifts are accepted, true
changes refused.

    python benchmarks/accept_cases.py
    python benchmarks/accept_cases.py --only held-out
    python benchmarks/accept_cases.py --only later

Half of the first cases, drawn by name, are held out: no limit was set by them. The later ones were
written after all limits.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _accepted import CASES, Case
from _accepted_later import LATER

from whence import accept
from whence.results import Acceptance
from whence.workflows.rounding.ways import run_once


def drawn(name: str) -> str:
    """The part that a case belongs to."""
    if name in LATER:
        return "later"
    return "held-out" if hashlib.sha256(name.encode()).digest()[0] % 2 else "set"


def asked(case: Case) -> Acceptance:
    """The answer for one case, whose expectation is a file where its numbers are printed."""
    expected = run_once(case.old, case.inputs)
    if not case.digits:
        return accept(expected, program=case.new, inputs=case.inputs, **case.how)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "golden.json")
        printed = {
            name: [f"%{value:.{case.digits}f}%" for value in array.reshape(-1).tolist()]
            for name, array in expected.items()
        }
        path.write_text(json.dumps(printed).replace('"%', "").replace('%"', ""))
        now = {name: a.reshape(-1).tolist() for name, a in run_once(case.new, case.inputs).items()}

        def program(**inputs):
            made = run_once(case.new, inputs or None)
            return {name: a.reshape(-1) for name, a in made.items()}

        return accept(path, now, program=program, inputs=case.inputs, **case.how)


def main() -> None:
    """Prints a line for each case, and what was right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("set", "held-out", "later"))
    only = parser.parse_args().only
    torch.set_num_threads(1)
    right = tried = 0
    for name, case in {**CASES, **LATER}.items():
        if only and only != drawn(name):
            continue
        began = time.perf_counter()
        answer = asked(case)
        is_right = (answer.status == "same") == case.may
        tried, right = tried + 1, right + is_right
        first = answer.values[0]
        times = "" if first.old_times is None else f"old {first.old_times:.3g}"
        mark = "ok   " if is_right else "WRONG"
        took = time.perf_counter() - began
        print(f"{mark} {name:42}{answer.verdict:18}{times:16}{took:5.1f} s")
    print(f"{right} of {tried} right")


if __name__ == "__main__":
    main()
