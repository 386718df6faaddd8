"""What engines make of a comparison of much data that differs: one worker against several, the
answers byte for byte, and a worker that is killed in the middle.

    python benchmarks/engines.py [--gb 4] [--workers 2] [--rounds 3] [--engine NAME ...]

Two runs of float32 tensors of 8 MB that differ in rounding, --gb of both together. Each comparison
is made by a process of its own, twice: the first one reads the files into the page cache, starts
Ray's workers and lets them import; the second one counts. `wall` is its time in seconds, `driver`
and `workers` the CPU seconds of the process that compares and of each worker. Where other programs
take part of the cores, `wall` says little: `ratio` of the last lines is that of wall times, `by
CPU` is

    (driver + worker) with one worker / (driver + busiest worker) with several

which is what an idle machine with a core for each would give, contention for memory included as far
as it shows in CPU time.
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
TICK = os.sysconf("SC_CLK_TCK")


def write(path: Path, tensors: int, *, noise: bool) -> None:
    """A run of `tensors` tensors of 8 MB, one layer each. noise: with rounding on top."""
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
            refs, name, at = (Ref("output.0", record),), f"layers.{number}", number + 1
            how: dict[str, Any] = {"parent": 0, "leaf": True, "no_program": "not recorded"}
            writer.call(Call(at, name, "Net", 0, at, number=str(number), refs=refs, **how))
        writer.call(Call(0, "", "Net", 0, 0, refs=refs, no_program="not recorded"))


class Sampler:
    """CPU seconds of the workers below this process, as long as they are there."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.own_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.look()
            self.own_s = time.thread_time()

    def look(self) -> None:
        """Take note of what each worker has used so far."""
        for pid, words in below(os.getpid()):
            if is_worker(words):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                self.seconds[pid] = (int(fields[11]) + int(fields[12])) / TICK

    def stop(self) -> None:
        """No more looks."""
        self._stop.set()
        self._thread.join()


def is_worker(words: str) -> bool:
    """Is this the command line of a worker?"""
    return "whence.engines.worker" in words or words.startswith(("ray::_answer", "ray::IDLE"))


def inside(engine: str, workers: int, where: Path) -> None:
    """Two comparisons, of which the second counts; prints what it took as JSON."""
    import whence

    if engine == "ray":
        import ray

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    how: dict[str, Any] = {"replay": False, "force": True, "output": where / "out"}
    if engine != "local":
        how |= {"engine": engine, "workers": workers}
    whence.compare(where / "a", where / "b", **how)
    sampler = Sampler()
    sampler.look()
    before, own = dict(sampler.seconds), time.process_time()
    start = time.perf_counter()
    result = whence.compare(where / "a", where / "b", **how)
    wall, driver = time.perf_counter() - start, time.process_time() - own
    sampler.stop()
    driver -= sampler.own_s
    used = [now - before.get(pid, 0.0) for pid, now in sampler.seconds.items()]
    figures: dict[str, Any] = {"wall_s": wall, "driver_s": driver}
    figures["measure_s"] = result.timing["measure_s"]
    figures["workers_s"] = sorted((s for s in used if s > 0.05), reverse=True)
    print(json.dumps(figures))


def compare(where: Path, engine: str, workers: int) -> dict[str, Any]:
    """What a comparison takes."""
    command = [sys.executable, __file__, "--inside", engine, "--workers", str(workers)]
    done = subprocess.run(
        [*command, "--where", str(where)], capture_output=True, text=True, check=False, env=_env()
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {"engine": engine, "workers": workers, **figures, "answer": digest(where / "out")}


def killed(where: Path, engine: str, workers: int) -> dict[str, Any]:
    """The command, of which a worker is killed once it works."""
    out = where / "killed"
    words = ["--no-replay", "--engine", engine, "--workers", str(workers), "-o", str(out)]
    command = [sys.executable, "-m", "whence", "compare", str(where / "a"), str(where / "b")]
    process = subprocess.Popen([*command, *words, "--force"], stdout=subprocess.DEVNULL, env=_env())
    pids: list[int] = []
    while process.poll() is None and not pids:
        time.sleep(0.5)
        pids = [pid for pid, w in below(process.pid) if is_worker(w) and "IDLE" not in w]
    for pid in pids[:1]:
        os.kill(pid, signal.SIGKILL)
    code = process.wait()
    return {"engine": engine, "killed": len(pids[:1]), "exit": code, "answer": digest(out)}


def _env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


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


def by_cpu(one: dict[str, Any]) -> float:
    """Seconds on an idle machine with a core for each worker."""
    return float(one["driver_s"] + max(one["workers_s"], default=0.0))


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", action="append", choices=["processes", "ray"])
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options.workers, options.where)
        return
    engines = options.engine or ["processes", "ray"]
    tensors = max(1, round(options.gb * 1e9 / (2 * ELEMENTS * 4)))
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for name in ("a", "b"):
            write(where / name, tensors, noise=name == "b")
        compare(where, "local", 1)  # compiles the kernels where they are not
        local = compare(where, "local", 1)
        print(f"{'engine':10}{'workers':>8}{'wall':>8}{'driver':>8}  {'workers':20} as local")
        for _ in range(options.rounds):
            for engine, number in [(e, n) for e in engines for n in (1, options.workers)]:
                figures.append(one := compare(where, engine, number))
                each = " ".join(f"{seconds:.2f}" for seconds in one["workers_s"])
                print(
                    f"{engine:10}{number:8}{one['wall_s']:8.2f}{one['driver_s']:8.2f}  {each:20} "
                    f"{one['answer'] == local['answer']}",
                    flush=True,
                )
        print(f"local, threads: wall {local['wall_s']:.2f}, CPU {local['driver_s']:.2f}")
        for engine in engines:
            one, several = (
                [f for f in figures if (f["engine"], f["workers"]) == (engine, number)]
                for number in (1, options.workers)
            )
            ratios = [
                statistics.median(map(how, one)) / statistics.median(map(how, several))
                for how in (lambda f: f["wall_s"], by_cpu)
            ]
            words = f"ratio {ratios[0]:.2f}, by CPU {ratios[1]:.2f}"
            print(f"{engine}, {options.workers} workers: {words}")
            died = killed(where, engine, options.workers)
            print(
                f"{engine}, {died['killed']} worker killed: exit {died['exit']}, as local: "
                f"{died['answer'] == local['answer']}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps([local, *figures], indent=1))


if __name__ == "__main__":
    main()
