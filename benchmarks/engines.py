"""What engines make of a comparison of much data that differs: one worker against several, the
answers byte for byte, and a worker that is killed in the middle.

    python benchmarks/engines.py [--gb 4] [--workers 2] [--rounds 3] [--engine NAME ...]

Two runs of float32 tensors of 8 MB that differ in rounding, --gb of both together. Every engine
compares them with one worker and with --workers, in turn, --rounds times; the pages of the runs are
read before, so that a disk is not what is measured. `ratio` is the wall time of one worker by that
of several. Where other programs take part of the cores, that is less than the engine can do:
`cores` is the CPU time that the comparison (its workers included) got in each second of wall time,
of which `--workers` is the most there can be. `bound` is the ratio without other programs: CPU time
of one worker by what each of several has to do, plus what only the comparison itself does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ELEMENTS = 2 << 20


def write(path: Path, tensors: int, *, noise: bool) -> None:
    """A run of `tensors` tensors of 8 MB, one call each. noise: with rounding on top."""
    import numpy as np
    import xxhash

    from whence import store
    from whence.records import Call, Ref, RunInfo

    random = np.random.default_rng(0)
    values = random.standard_normal(ELEMENTS, np.float32)
    rounding = np.float32(1) + random.standard_normal(ELEMENTS, np.float32) * np.float32(1e-7)
    with store.Writer(store.create(path, RunInfo())) as writer:
        for number in range(tensors):
            tensor = values * np.float32(1 + number / tensors)
            if noise:
                tensor *= rounding
            data = tensor.view(np.uint8)
            digest = xxhash.xxh3_128_digest(data)
            record = writer.record("float32", (ELEMENTS // 512, 512), data, digest, None, None)
            why, refs = "not recorded", (Ref("output.0", record),)
            call = Call(number, f"layers.{number}", "Net", 0, number, leaf=True, no_program=why)
            writer.call(_with(call, refs))


def _with(call: Any, refs: tuple[Any, ...]) -> Any:
    import msgspec

    return msgspec.structs.replace(call, refs=refs)


def compare(where: Path, engine: str, workers: int, *, kill: bool = False) -> dict[str, Any]:
    """One comparison in a process of its own. kill: a worker dies in the middle of it."""
    out = where / f"out-{engine}-{workers}-{kill}"
    words = ["--no-replay", "--engine", engine, "-o", str(out), "--force"]
    if engine != "local":
        words += ["--workers", str(workers)]
    command = [sys.executable, "-m", "whence", "compare", str(where / "a"), str(where / "b")]
    before, start = os.times(), time.perf_counter()
    process = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, env=_one_thread())
    if kill:
        threading.Thread(target=_kill_a_worker, args=(process.pid, out), daemon=True).start()
    code = process.wait()
    wall, after = time.perf_counter() - start, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    return {"engine": engine, "workers": workers, "wall_s": wall, "cpu_s": cpu, "exit": code,
            "answer": digest(out)}  # fmt: skip


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def _kill_a_worker(pid: int, out: Path) -> None:
    """Kill one worker once a first task is done."""
    while not (out / "unfinished.journal").exists():
        time.sleep(0.02)
    workers = [p for p in below(pid) if "whence.engines.worker" in p[1] or "ray::" in p[1]]
    if workers:
        os.kill(workers[-1][0], signal.SIGKILL)


def below(pid: int) -> list[tuple[int, str]]:
    """(pid, command line) of the processes that a process started, theirs too."""
    parents: dict[int, list[int]] = {}
    words: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        todo += (kids := parents.get(todo.pop(), []))
        found += [(kid, words[kid]) for kid in kids]
    return found


def digest(out: Path) -> str:
    """Of the files of a comparison, but for how long it took and where it was written."""
    report = json.loads((out / "report.json").read_text())
    report.pop("timing", None)
    text = json.dumps(report).replace(str(out), "OUT")
    return hashlib.sha256(text.encode() + (out / "report.csv").read_bytes()).hexdigest()


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", action="append", choices=["processes", "ray"])
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    engines = options.engine or ["processes", "ray"]
    tensors = max(1, round(options.gb * 1e9 / (2 * ELEMENTS * 4)))
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for name in ("a", "b"):
            write(where / name, tensors, noise=name == "b")
        local = compare(where, "local", 1)  # reads the pages, compiles the kernels
        for _ in range(options.rounds):
            for engine in engines:
                figures += [compare(where, engine, n) for n in (1, options.workers)]
        figures += [compare(where, engine, options.workers, kill=True) for engine in engines]
    print(f"{'engine':12}{'workers':>8}{'wall s':>9}{'CPU s':>9}{'cores':>7}  exit  as local")
    for one in [local, *figures]:
        print(
            f"{one['engine']:12}{one['workers']:8}{one['wall_s']:9.2f}{one['cpu_s']:9.2f}"
            f"{one['cpu_s'] / one['wall_s']:7.2f}  {one['exit']:4}  "
            f"{one['answer'] == local['answer']}"
        )
    for engine in engines:
        alone, several = (
            statistics.median(
                one["wall_s"] for one in figures[: -len(engines)]
                if (one["engine"], one["workers"]) == (engine, number)
            )
            for number in (1, options.workers)
        )  # fmt: skip
        print(f"{engine}: ratio {alone / several:.2f} with {options.workers} workers")
    if options.json:
        Path(options.json).write_text(json.dumps([local, *figures], indent=1))


if __name__ == "__main__":
    main()
