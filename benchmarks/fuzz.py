"""Spoilt files for all that reads files of others: it may succeed, or raise whence's own errors.

    python benchmarks/fuzz.py                                   # 1000 inputs for each reader
    python benchmarks/fuzz.py --inputs 1000000 --total --processes 2 --state FOLDER --write
    python benchmarks/fuzz.py --only map --inputs 5000
    python benchmarks/fuzz.py --again TARGET NUMBER             # one input again, with its error

Input NUMBER of a target is the same each time: seed file and changes follow from the number. What
an input must not do: raise anything but a `WhenceError`, take more than 10 s of a processor or 768
MiB, start a program, open a connection, run or import code, read a file that a name in it points to
outside its folder, or write outside it. An input that does is made smaller by taking changes away,
and kept in FOLDER/failures. With --state the command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata  # noqa: F401 - Python itself imports it for a name of a character in a header
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import _file_mutations as mutations
import _fuzz_targets as fuzz_targets
import _reliability_page as page

from whence.errors import WhenceError

SECONDS = 10
MEMORY = 768 << 20
BATCH = 50
# In memory: on a disk, making and removing an input's files takes longer than reading them.
IN_MEMORY = Path("/dev/shm")


class Hang(BaseException):
    """An input takes too long."""


class Watch:
    """What is done while an input is read, by the audit events of Python."""

    FORBIDDEN = frozenset(
        {"os.system", "os.exec", "os.fork", "os.forkpty", "socket.connect"}
        | {"socket.bind", "socket.getaddrinfo", "exec", "compile", "pickle.find_class"}
        | {"ctypes.dlopen", "marshal.loads", "code.__new__", "urllib.Request", "webbrowser.open"}
    )
    STARTS = ("subprocess.Popen", "os.posix_spawn")  # one start is both since Python 3.13
    CHANGES = frozenset(
        {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
        | {"os.truncate", "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile"}
    )

    def __init__(self, scratch: Path, canary: Path) -> None:
        self.scratch, self.canary = str(scratch), str(canary)
        # whence's own, for what is compiled once
        self.cache = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "whence")
        # asked for once: it writes a file the first time, under a lock the hook would wait for
        self.temporary = tempfile.gettempdir() + "/whence-"
        self.armed = False
        self.said: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.armed:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT
            )
            if isinstance(path, int):
                return
            path = os.fsdecode(path)
            if writes and not self._inside(path) and path != os.devnull:
                self.said.append(f"opens {path} to write")
            elif (
                path.endswith("outside/canary")
                or path == self.canary
                or path.startswith("/etc/passwd")
            ):
                self.said.append(f"reads {path}")
        elif event == "compile" and arguments[1] == "<unknown>":
            return  # `ast.parse`: a tree, not code; running it is an event of its own
        elif event in ("exec", "marshal.loads", "compile") and _imports():
            return  # a part of a package that is there, on first use; "import" says which
        elif event in self.FORBIDDEN:
            self.said.append(f"{event} {str(arguments)[:200]}")
        elif event in self.STARTS and "hdf5_worker" not in str(arguments):
            self.said.append(f"starts {str(arguments)[:200]}")
        elif event == "import" and arguments[0].partition(".")[0] not in sys.modules:
            self.said.append(f"imports {arguments[0]}")
        elif event in self.CHANGES and not self._inside(
            os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else self.scratch
        ):
            self.said.append(f"{event} {str(arguments)[:200]}")

    def _inside(self, path: str) -> bool:
        full = os.path.abspath(path)  # noqa: PTH100 - a link is not followed
        return full.startswith((self.scratch, self.temporary, self.cache))


def _imports() -> bool:
    """Is Python about to import a module?"""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def files_of(place: Path) -> list[Path]:
    return sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]


class Fuzzer:
    """Inputs of all targets in one process, with a folder of its own."""

    def __init__(self, only: str = "") -> None:
        parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=parent))
        (self.folder / "seeds").mkdir()
        (self.folder / "outside").mkdir()
        self.canary = self.folder / "outside" / "canary"
        self.canary.write_bytes(b"secret")
        self.scratch = self.folder / "scratch" / "in"
        every = fuzz_targets.targets(self.folder / "seeds")
        self.targets = {name: t for name, t in every.items() if only in name}
        warnings.simplefilter("ignore")
        if "run, compared" in self.targets:  # loads torch, where it is there
            fuzz_targets.compared(fuzz_targets.GOLDEN / "modules_fault")
        for target in self.targets.values():  # what is imported first is no input's doing
            for seed in list(target.seeds):
                self._fresh(seed)
                try:
                    target.read(self.scratch / seed.name)
                except WhenceError:  # a sample of a damaged dump
                    target.seeds.remove(seed)
        self.watch = Watch(self.folder / "scratch", self.canary)
        for moment in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(moment, self._too_long)
        self.tracing = resource.getrlimit(resource.RLIMIT_DATA)

    def _too_long(self, number: int, _: object) -> None:
        waits = number == signal.SIGALRM
        raise Hang(f"{10 * SECONDS} s" if waits else f"{SECONDS} s of a processor")

    def _fresh(self, seed: Path) -> Path:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        place = self.scratch / seed.name
        if seed.is_dir():
            shutil.copytree(seed, place)
            for beside in seed.parent.glob("weights.safetensors"):
                shutil.copy(beside, self.scratch)
        else:
            shutil.copyfile(seed, place)
        return place

    def spoilt(self, name: str, number: int, steps: list[int] | None = None) -> tuple[Path, int]:
        """(the input, of how many changes)."""
        draw = random.Random(f"{name}:{number}")
        seed = draw.choice(self.targets[name].seeds)
        place = self._fresh(seed)
        return place, mutations.mutate(draw, files_of(place), self.canary, steps)

    def read(self, name: str, number: int, steps: list[int] | None = None) -> str:
        """What is wrong with how an input is read, "" where nothing is."""
        place, _ = self.spoilt(name, number, steps)
        if not place.exists() and not place.is_symlink():
            return ""
        if place.is_fifo() or (place.is_symlink() and "/dev/" in str(place.readlink())):
            return ""  # named by the user: it is read as it comes
        if place.is_symlink():
            return ""  # and so is what a link of the user's points to
        return self.judged(self.targets[name].read, place)

    def judged(self, read, place: Path) -> str:
        """What is wrong with how a file or folder is read."""
        watch = self.watch
        watch.said.clear()
        watch.armed = True
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
        try:
            read(place)
        except WhenceError as error:
            if any(word in str(error) for word in ("MemoryError", "RecursionError: maximum")):
                watch.said.append(f"says {str(error)[:300]}")
        except Hang as hang:
            watch.said.append(f"takes more than {hang}")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            where = traceback.extract_tb(error.__traceback__)
            ours = [f for f in where if "whence" in f.filename and "benchmarks" not in f.filename]
            last = ours[-1] if ours else where[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            watch.said.append(f"{type(error).__name__} at {place}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            watch.armed = False
        return "; ".join(dict.fromkeys(watch.said))

    def smallest(self, name: str, number: int) -> list[int]:
        """The changes without which an input does no harm."""
        _, count = self.spoilt(name, number)
        steps = list(range(count))
        for step in list(steps):
            fewer = [s for s in steps if s != step]
            if fewer and self.read(name, number, fewer):
                steps = fewer
        return steps

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _limited() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, resource.RLIM_INFINITY))


def _work(asked: argparse.Namespace, todo, done) -> None:
    fuzzer = Fuzzer(asked.only)
    _limited()
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    while (job := todo.get()) is not None:
        name, start, stop = job
        begun = time.perf_counter()
        for number in range(start, stop):
            done.put(("at", os.getpid(), name, number))
            wrong = fuzzer.read(name, number)
            if wrong:
                steps = fuzzer.smallest(name, number)
                wrong = fuzzer.read(name, number, steps) or wrong
                kept = ""
                if asked.state:
                    fuzzer.spoilt(name, number, steps)
                    kept = str(
                        Path(asked.state) / "failures" / name.replace(" ", "_") / str(number)
                    )
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(
                        fuzzer.scratch,
                        kept,
                        symlinks=True,
                        ignore_dangling_symlinks=True,
                        ignore=lambda d, ns: [n for n in ns if (Path(d) / n).is_fifo()],
                    )
                done.put(("wrong", name, number, wrong, kept))
        done.put(("done", name, start, stop, time.perf_counter() - begun))
    fuzzer.close()
    done.put(("left",))


def jobs(asked: argparse.Namespace, finished: Counter) -> list[tuple[str, int, int]]:
    """Batches that are still to be done, targets in turn by their share."""
    probe = Fuzzer(asked.only)
    shares = {name: target.share for name, target in probe.targets.items()}
    probe.close()
    per_share = asked.inputs / sum(shares.values()) if asked.total else asked.inputs / 10
    wanted = {name: int(per_share * share) for name, share in shares.items()}
    if not asked.total:
        wanted = {
            name: asked.inputs if share >= 10 else asked.inputs * share // 10
            for name, share in shares.items()
        }
    out = []
    for name, count in wanted.items():
        out += [(name, at, min(at + BATCH, count)) for at in range(finished[name], count, BATCH)]
    random.Random(0).shuffle(out)
    return sorted(out, key=lambda job: job[1] // (BATCH * 40))


def main() -> int:
    """Read the inputs; print failures and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--total", action="store_true", help="inputs of all targets together")
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--state", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/dev/reliability.*")
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "NUMBER"))
    asked = parser.parse_args()
    if asked.again:
        fuzzer = Fuzzer(asked.again[0])
        print(fuzzer.read(asked.again[0], int(asked.again[1])) or "nothing wrong")
        fuzzer.close()
        return 0
    state = Path(asked.state) / "done.json" if asked.state else None
    spans: dict[str, list[list[int]]] = (
        json.loads(state.read_text()) if state and state.exists() else {}
    )
    rows, failures = run_all(asked, spans, state)
    print(f"{sum(row['inputs'] for row in rows)} inputs, {len(failures)} failures")
    if asked.write:
        page.write(inputs=rows)
    return int(bool(failures))


def run_all(asked, spans, state):
    """(a row for each target, the failures)."""
    finished = {
        (name, *span) for name, all_spans in spans.items() for span in map(tuple, all_spans)
    }
    todo_list = [job for job in jobs(asked, Counter()) if job not in finished]
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    todo.cancel_join_thread()  # with --seconds, nobody takes what is left
    for job in todo_list:
        todo.put(job)
    for _ in range(asked.processes):
        todo.put(None)
    workers = [
        context.Process(target=_work, args=(asked, todo, done)) for _ in range(asked.processes)
    ]
    for worker in workers:
        worker.start()
    failures, seconds, last, left = [], Counter(), {}, 0
    deadline = time.monotonic() + asked.seconds
    while left < asked.processes and time.monotonic() < deadline:
        try:
            kind, *rest = done.get(timeout=SECONDS)
        except Exception:  # noqa: BLE001 - nothing for a while: has one of them crashed?
            for n, worker in enumerate(workers):
                if not worker.is_alive() and worker.exitcode not in (0, None):
                    name, number = last.get(worker.pid, ("?", -1))
                    failures.append((name, number, f"the process ended with {worker.exitcode}", ""))
                    print("CRASH", failures[-1], flush=True)
                    workers[n] = context.Process(target=_work, args=(asked, todo, done))
                    workers[n].start()
            continue
        if kind == "at":
            last[rest[0]] = rest[1:]
        elif kind == "wrong":
            failures.append(tuple(rest))
            print("WRONG", *rest, flush=True)
        elif kind == "left":
            left += 1
        else:
            name, start, stop, spent = rest
            spans.setdefault(name, []).append([start, stop])
            seconds[name] += spent
            if state is not None:
                state.parent.mkdir(parents=True, exist_ok=True)
                state.write_text(json.dumps(spans))
    for worker in workers:
        worker.terminate()
    rows = [
        {
            "target": name,
            "inputs": sum(b - a for a, b in done_spans),
            "failures": sum(f[0] == name for f in failures),
        }
        for name, done_spans in sorted(spans.items())
    ]
    return rows, failures


if __name__ == "__main__":
    sys.exit(main())
