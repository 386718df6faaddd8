"""Programs with odd ways (`_odd_ways.py`), each bare and captured at every level: what they print,
the files they leave, and how they end must be the same, and no byte of a run lie in a file of
theirs. Prints what differs, and how each run says it ended.

    python benchmarks/odd_programs.py [--levels modules,op,graph,logits] [NAME ...]

`--levels` takes ring and stats too. A program that lists its handlers sees that of
`--ring`, which writes before SIGTERM ends it.

Every run is a process that is forked from this one, which has imported everything.
"""

import argparse
import atexit
import contextlib
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import _odd_ways
import torch

from whence import store
from whence.instrument.options import make
from whence.workflows.capture.capture import attach
from whence.workflows.capture.setup import process_info

LEVELS = ("modules", "op", "graph", "logits")
OTHERS = {"ring": {"ring": 3}, "stats": {"keep": "stats"}}
"""Ways to capture modules that are no levels, for --levels too."""
TIMEOUT_S = 120
ADDRESS = re.compile(rb"0x[0-9a-f]+|line \d+|pid \d+|process \d+")


class Answer(NamedTuple):
    """What came of a program. ended: exit code, or minus the signal."""

    ended: int
    printed: bytes
    told: bytes
    files: dict


def run(name, level, place):
    """The answer of one program, and what its run says: None without a capture."""
    home, out, path = place / "home", place / "out", place / "run"
    home.mkdir(parents=True)
    out.mkdir()
    for folder in (place, home):  # another user must reach them
        folder.chmod(0o755)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what this process has left over is not for the child to collect, and to report
    child = os.fork()
    if child == 0:
        _child(name, level, home, out, path)
    gc.unfreeze()
    watch = threading.Timer(TIMEOUT_S, os.kill, (child, signal.SIGKILL))
    watch.start()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    watch.cancel()
    files = {
        file.relative_to(home).as_posix(): file.read_bytes() if file.is_file() else b""
        for file in sorted(home.rglob("*"))
    }
    told = b"\n".join(
        ADDRESS.sub(b"?", line)
        for line in (out / "err").read_bytes().splitlines()
        if not line.startswith((b"whence:", b"compiling kernels", b"  File", b"    "))
    )
    return Answer(ended, (out / "out").read_bytes(), told, files), _said(path) if level else None


def _said(path):
    try:
        opened = store.open_run(path)
    except Exception as error:  # noqa: BLE001 - it is what the table says
        return f"no run: {error}"
    return f"{len(opened.calls)} calls" + (f"; not whole: {opened.ended}" if opened.ended else "")


def _child(name, level, home, out, path):
    code = 1
    try:
        for number, file in ((1, "out"), (2, "err")):
            os.dup2(os.open(out / file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        os.closerange(3, 4096)
        os.chdir(home)
        if level:
            options = make(**OTHERS.get(level, {"level": level}))
            store.create(path, process_info(options))
            attach(options, str(path), "torch")
        try:
            _odd_ways.PROGRAMS[name]()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the child ends here
        code = 99
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def differs(bare, captured):
    """In what two answers differ."""
    fields = [f for f in Answer._fields if getattr(bare, f) != getattr(captured, f)]
    if "files" in fields:
        names = [
            n
            for n in bare.files.keys() | captured.files.keys()
            if bare.files.get(n) != captured.files.get(n)
        ]
        fields[fields.index("files")] = f"files {', '.join(sorted(names)[:4])}"
    return fields


def _changed(answer, bare, captured, field):
    """The end of what an answer has in a field; of its files, those that differ."""
    value = getattr(answer, field)
    if field == "files":
        names = bare.files.keys() | captured.files.keys()
        value = {
            n: value.get(n, b"")[-240:]
            for n in sorted(names)
            if bare.files.get(n) != captured.files.get(n)
        }
        return str(value)[:2000]
    return str(value)[-240:]


def compared(name, place, levels, counts):
    """Compare a program with itself, then at each level; how many levels differ."""
    bare, _ = run(name, None, place / "bare")
    again, _ = run(name, None, place / "again")
    if unsteady := differs(bare, again):
        print(f"{name:40} differs from itself: {unsteady}", flush=True)
        counts["not steady"] += 1
        return 0
    wrong = 0
    for level in levels:
        captured, said = run(name, level, place / level)
        found = differs(bare, captured)
        wrong += bool(found)
        counts["no run"] += said.startswith("no run")
        counts["differ" if found else "alike"] += 1
        counts["runs that say they are not whole"] += "not whole" in said
        if not found and "not whole" not in said and "no run" not in said:
            continue
        how = f"DIFFERS in {', '.join(found)}" if found else "alike"
        print(f"{name:40} {level:8} {how}; {said[:160]}", flush=True)
        for field in Answer._fields:
            if getattr(bare, field) != getattr(captured, field):
                for side, answer in (("bare", bare), ("captured", captured)):
                    print(f"    {side}: {_changed(answer, bare, captured, field)}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--levels", default=",".join(LEVELS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in _odd_ways.PROGRAMS if not chosen.names or any(c in n for c in chosen.names)]
    counts, wrong = Counter(), 0
    for name in names:
        # no TemporaryDirectory: the exit of a forked child would delete it
        place = Path(tempfile.mkdtemp(prefix="odd"))
        place.chmod(0o755)
        try:
            wrong += compared(name, place, chosen.levels.split(","), counts)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{len(names)} programs:", ", ".join(f"{v} {k}" for k, v in counts.items()))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
