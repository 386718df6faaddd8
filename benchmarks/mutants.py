"""Which tests are needed: seeds small faults into whence, and counts those that the tests catch.

    python benchmarks/mutants.py trace [TESTS ...]       which test executes which line, once
    python benchmarks/mutants.py run [--count 200]       seed faults, run the tests of their lines
    python benchmarks/mutants.py show                    the score, and the faults nobody caught
    python benchmarks/mutants.py tests [--longer 2]      slow tests that caught no fault first

All happens in a copy of the checkout below --place (by default ../mutants). `trace` and `run`
continue where they stopped; the seed settles which faults are drawn. A fault is applied, and the
tests that execute its line run until one fails: those of its package first, then file by file,
cheapest first. It survives when none fails within --budget seconds of tests. `run NAME` takes
single faults, `run --again` those that survived (trace the test files that changed first). Whether
a survivor changes anything at all is for a reader to say: those that change no answer stand in
mutants_equivalent.txt, with the reason, and count for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _mutations import Mutation, mutations

# Before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("align", "instrument", "judge", "metrics", "replay", "store")
"""Packages that faults are seeded into, the same number each."""
SURVIVED = ("survived", "not executed")
BATCHES = (8.0, 25.0, 1000.0)
"""Seconds of tests before the next batch is started in a process of its own."""
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault of one file. name: file::function::kind::number."""

    file: str
    mutation: Mutation

    @property
    def name(self) -> str:
        change = self.mutation
        return f"{self.file}::{change.function}::{change.kind}::{change.number}"

    @property
    def package(self) -> str:
        return self.file.split("/")[2]


def drawn(root: Path, count: int, seed: int) -> list[Mutant]:
    """Faults drawn from every package alike, and from every kind of fault in it alike."""
    mutants = []
    for number, package in enumerate(PACKAGES):
        share = count // len(PACKAGES) + (number < count % len(PACKAGES))
        generator = random.Random(f"{seed} {package}")
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in every(root, package):
            kinds[mutant.mutation.kind].append(mutant)
        for mutants_of_kind in kinds.values():
            generator.shuffle(mutants_of_kind)
        queues = [kinds[kind] for kind in sorted(kinds)]
        while share and any(queues):
            for queue in filter(None, queues):
                if share:
                    mutants.append(queue.pop())
                    share -= 1
    return mutants


def every(root: Path, package: str) -> list[Mutant]:
    """All faults that can be seeded into a package."""
    return [
        Mutant(str(path.relative_to(root)), mutation)
        for path in sorted((root / "src" / "whence" / package).rglob("*.py"))
        for mutation in mutations(path.read_text(encoding="utf-8"))
    ]


# -- the copy ------------------------------------------------------------------


def copied(place: Path) -> Path:
    """The working tree below `place`, brought up to date; files that are the same keep their time,
    so that what was compiled stays valid.
    """
    copy = place / "copy"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    names = {name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        old, new = ROOT / name, copy / name
        if not new.exists() or new.read_bytes() != old.read_bytes():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old, new)
    for path in [*copy.glob("src/**/*.py"), *copy.glob("tests/**/*.py")]:
        if str(path.relative_to(copy)) not in names:
            path.unlink()
    shared = place / "shared"
    if (ROOT.parent / "shared").is_dir() and not shared.exists():
        shared.symlink_to((ROOT.parent / "shared").resolve())
    return copy


def _environment(copy: Path, **more: str) -> None:
    """This process, and those it starts, take whence from the copy."""
    paths = [str(copy / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.update(more)
    if more:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy.parent / "site"), *paths])
    sys.path[:0] = paths
    os.chdir(copy)


def forked(work: Callable[[], object], log: Path, seconds: float) -> str:
    """Call `work` in a process forked from this one, which has imported torch. Returns "" when it
    came to its end, else what ended it.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            limit = int(seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the exit code says it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    # Others may use the processors, so the clock is given more time than the process.
    until = time.monotonic() + 60 + 8 * seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until:
            status = signal.SIGXCPU
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests left running
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "time" if number in (signal.SIGXCPU, signal.SIGKILL) else f"signal {number}"
    return "" if os.WEXITSTATUS(status) == 0 else "error"


def _pytest(arguments: Sequence[str], plugin: object) -> None:
    import pytest

    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    pytest.main(words, plugins=[plugin])


# -- which test executes which line --------------------------------------------


def trace(place: Path, names: Sequence[str]) -> None:
    """Run test files, all when none is named, and write which line each test executes."""
    import _traced

    copy, out = copied(place), place / "trace"
    out.mkdir(parents=True, exist_ok=True)
    (place / "children").mkdir(exist_ok=True)
    _traced.prepare(place / "site")
    sources = os.pathsep.join(str(copy / "src" / "whence" / p / "*") for p in PACKAGES)
    _preload()
    chosen = names or sorted(str(p.relative_to(copy)) for p in copy.glob("tests/**/test_*.py"))
    for name in chosen:
        written = out / f"{name.replace('/', '-')}.json"
        if written.exists() and not names:
            continue
        for old in (place / "children").glob("*.json"):
            old.unlink()

        def work(name: str = name, written: Path = written) -> None:
            about = {_traced.SOURCES: sources, _traced.OUT: str(place / "children")}
            _environment(copy, **about)
            tracer = _traced.Tracer()
            _pytest([name], tracer)
            found = tracer.result()
            for child in (place / "children").glob("*.json"):
                known = json.loads(child.read_text())
                lines = found["contexts"].setdefault(known["test"], {})
                for file, bits in known["lines"].items():
                    lines[file] = f"{int(lines.get(file, '0'), 16) | int(bits, 16):x}"
            written.write_text(json.dumps(found))

        start = time.monotonic()
        ended = forked(work, place / "trace.log", 1200)
        tests = len(json.loads(written.read_text())["tests"]) if written.exists() else 0
        print(f"{time.monotonic() - start:7.1f} s {tests:5} tests  {name}  {ended}", flush=True)


def _preload() -> None:
    """What every test process needs, imported once, before it is forked."""
    import scipy  # noqa: F401
    import torch  # noqa: F401


@dataclasses.dataclass
class Tests:
    """What `trace` wrote."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    lines: dict[str, dict[str, int]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    """File -> test -> the lines it executes."""
    imported: dict[str, int] = dataclasses.field(default_factory=dict)
    """File -> the lines that only its import executes."""

    @classmethod
    def read(cls, place: Path) -> Tests:
        """Everything traced so far."""
        tests = cls()
        for path in sorted((place / "trace").glob("*.json")):
            traced = json.loads(path.read_text())
            contexts = {
                name: {file.partition("/copy/")[2]: int(bits, 16) for file, bits in lines.items()}
                for name, lines in traced["contexts"].items()
            }
            for file, bits in contexts.pop("", {}).items():
                tests.imported[file] = tests.imported.get(file, 0) | bits
            for test, about in traced["tests"].items():
                if about["outcome"] != "passed":
                    continue
                tests.seconds[test] = about["seconds"]
                for context in (test, *about["shared"]):
                    for file, bits in contexts.get(context, {}).items():
                        tests.lines[file][test] = tests.lines[file].get(test, 0) | bits
        return tests

    def of(self, mutant: Mutant) -> list[str]:
        """Tests that execute the first line of a fault; where its import does, those that execute
        anything in its file.
        """
        lines = self.lines.get(mutant.file, {})
        bit = 1 << mutant.mutation.line
        executing = [test for test, bits in lines.items() if bits & bit]
        if not executing and self.imported.get(mutant.file, 0) & bit:
            executing = [test for test, bits in lines.items() if bits]
        return executing


def ordered(tests: Iterable[str], seconds: dict[str, float], package: str) -> list[list[str]]:
    """Tests by file: the package's own first, then cheap before dear."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)

    def cost(item: tuple[str, list[str]]) -> tuple[bool, float]:
        return not item[0].startswith(f"tests/{package}/"), sum(seconds[test] for test in item[1])

    return [
        sorted(several, key=lambda test: seconds[test])
        for _, several in sorted(files.items(), key=cost)
    ]


# -- seeding faults ------------------------------------------------------------


class Chosen:
    """A pytest plugin: runs these tests in this order, and says which failed first."""

    def __init__(self, tests: Sequence[str], verdict: Path) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.verdict = verdict

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.verdict.exists():
            self.verdict.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.verdict.exists():
            self.verdict.write_text(f"collecting {report.nodeid}")


class Seeding:
    """Applies faults one after another and keeps what became of them."""

    def __init__(self, place: Path, budget: float) -> None:
        self.place, self.budget = place, budget
        self.copy = place / "copy"
        self.path = place / "results.json"
        self.results: dict[str, Json] = (
            json.loads(self.path.read_text()) if self.path.exists() else {}
        )
        self.failing: set[str] = set()
        """Tests that fail without a fault: they catch nothing."""
        self.passing: set[str] = set()

    def keep(self, mutant: Mutant, result: Json) -> None:
        """Write what became of a fault."""
        change = mutant.mutation
        about = {"package": mutant.package, "line": change.line}
        about |= {"before": change.before, "after": change.after}
        self.results[mutant.name] = about | result
        self.path.write_text(json.dumps(self.results, indent=1))

    def seed(self, mutant: Mutant, tests: Tests) -> Json:
        """Run the tests of a fault until one fails."""
        executing = tests.of(mutant)
        if not executing:
            return {"status": "not executed", "tests": 0}
        start = time.monotonic()
        with self._replaced(mutant.file, mutant.mutation.applied):
            ended, by, ran = self._caught(mutant, executing, tests.seconds)
        status = {"": "survived", "time": "timed out"}.get(ended, "killed")
        result = {"status": status, "by": by, "tests": len(executing), "ran": ran}
        return result | {"seconds": round(time.monotonic() - start, 1)}

    @contextlib.contextmanager
    def _replaced(self, file: str, change: Callable[[str], str]) -> Iterator[None]:
        """A file of the copy with other text, and a time of its own: byte code is kept by time."""
        path = self.copy / file
        source, times = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(change(source), encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, time.time_ns()))
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _caught(
        self, mutant: Mutant, executing: list[str], seconds: dict[str, float]
    ) -> tuple[str, str, int]:
        """(how it ended, by which test, how many tests ran)."""
        rest, ran, spent = ordered(executing, seconds, mutant.package), 0, 0.0
        for size in BATCHES:
            batch, expected = _batch(rest, seconds, min(size, self.budget - spent))
            batch = [test for test in batch if test not in self.failing]
            ended, by = self._run(batch, expected) if batch else ("", "")
            while by in seconds and not self._passes(by, mutant.file):
                batch.remove(by)
                ended, by = self._run(batch, expected) if batch else ("", "")
            ran, spent = ran + len(batch), spent + expected
            if ended:
                return ended, by, ran
        return "", "", ran

    def _run(self, batch: Sequence[str], expected: float) -> tuple[str, str]:
        """("failed" and the test, "time" and "", or "" twice)."""
        verdict = self.place / "verdict"
        verdict.unlink(missing_ok=True)

        def work() -> None:
            _environment(self.copy)
            _pytest(["-x", *dict.fromkeys(t.partition("::")[0] for t in batch)], chosen)

        chosen = Chosen(batch, verdict)
        ended = forked(work, self.place / "run.log", 40 + 4 * expected)
        if verdict.exists():
            return "failed", verdict.read_text()
        return ended, ""

    def _passes(self, test: str, file: str) -> bool:
        """Does a test pass in the copy without the fault of a file?"""
        if test not in self.passing and test not in self.failing:
            clean = (ROOT / file).read_text(encoding="utf-8")
            with self._replaced(file, lambda _: clean):
                ended, _ = self._run([test], 60)
            (self.failing if ended else self.passing).add(test)
        return test in self.passing


def _batch(
    rest: list[list[str]], seconds: dict[str, float], size: float
) -> tuple[list[str], float]:
    """Take tests worth `size` seconds off the front, and say what they are expected to take."""
    batch: list[str] = []
    expected = 0.0
    while rest and expected < size:
        test = rest[0].pop(0)
        batch.append(test)
        expected += seconds[test]
        if not rest[0]:
            rest.pop(0)
    return batch, expected


def seed(place: Path, options: argparse.Namespace) -> None:
    """Seed what was drawn, or what was named, and has no result yet."""
    copied(place)
    seeding = Seeding(place, options.budget)
    tests = Tests.read(place)
    if options.names or options.again:
        wanted = set(options.names)
        if options.again:
            survived = {n for n, r in seeding.results.items() if r["status"] in SURVIVED}
            wanted |= survived - equivalent()
        mutants = [m for p in PACKAGES for m in every(ROOT, p) if m.name in wanted]
    else:
        mutants = [
            mutant
            for mutant in drawn(ROOT, options.count, options.seed)
            if mutant.name not in seeding.results and mutant.package in options.packages
        ]
    _preload()
    for mutant in mutants:
        result = seeding.seed(mutant, tests)
        seeding.keep(mutant, result)
        print(f"{result['status']:12} {result.get('seconds', 0):6} s  {mutant.name}", flush=True)


# -- what it shows -------------------------------------------------------------


def equivalent() -> set[str]:
    """Faults that somebody read and found to change no answer."""
    path = Path(__file__).with_name("mutants_equivalent.txt")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return {line for line in lines if line and not line.startswith("#")}


def show(place: Path) -> None:
    """Print the score of each package, and the faults that no test caught."""
    left_out = equivalent()
    results: dict[str, Json] = json.loads((place / "results.json").read_text())
    scores: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for name, result in results.items():
        status = "equivalent" if name in left_out else result["status"]
        scores[result["package"]][status] += 1
    print(f"{'package':12} {'faults':>6} {'caught':>6} {'missed':>6} {'equivalent':>10}  score")
    for package, score in [*scores.items(), ("all", sum(scores.values(), Counter()))]:
        caught = sum(score[status] for status in ("killed", "timed out"))
        missed = sum(score[status] for status in SURVIVED)
        share = f"{caught / (caught + missed):6.1%}" if caught + missed else "     -"
        counts = f"{score.total():6} {caught:6} {missed:6} {score['equivalent']:10}"
        print(f"{package:12} {counts} {share}")
    for name, result in results.items():
        if result["status"] in SURVIVED and name not in left_out:
            ran = f"{result.get('ran', 0)} of {result['tests']} tests ran"
            print(f"\n{result['status']}: {name} (line {result['line']}, {ran})")
            print(f"  - {result['before']}\n  + {result['after']}")


def slow(place: Path, longer: float) -> None:
    """Print the tests that take longest and were the first to catch nothing, with how many lines no
    other test executes.
    """
    tests = Tests.read(place)
    results: dict[str, Json] = json.loads((place / "results.json").read_text())
    caught = Counter(result.get("by", "") for result in results.values())
    alone: Counter[str] = Counter()
    for lines in tests.lines.values():
        once = twice = 0
        for bits in lines.values():
            once, twice = once | bits, twice | (once & bits)
        for test, bits in lines.items():
            alone[test] += (bits & ~twice).bit_count()
    for test, seconds in sorted(tests.seconds.items(), key=lambda item: -item[1]):
        if seconds > longer and not caught[test]:
            print(f"{seconds:7.1f} s  {alone[test]:4} lines of its own  {test}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--place", type=Path, default=ROOT.parent / "mutants")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("trace").add_argument("names", nargs="*", metavar="TEST_FILE")
    running = commands.add_parser("run")
    running.add_argument("names", nargs="*", metavar="FAULT")
    running.add_argument("--again", action="store_true")
    running.add_argument("--count", type=int, default=200)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--budget", type=float, default=60.0)
    running.add_argument("--packages", nargs="+", default=PACKAGES, choices=PACKAGES)
    commands.add_parser("show")
    commands.add_parser("tests").add_argument("--longer", type=float, default=2.0)
    options = parser.parse_args()
    place = options.place.resolve()
    if options.command == "trace":
        trace(place, options.names)
    elif options.command == "run":
        seed(place, options)
    elif options.command == "show":
        show(place)
    else:
        slow(place, options.longer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
