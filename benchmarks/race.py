"""whence beside the tools that people use for the same, on the same model and the same fault.

    python benchmarks/race.py [--json FILE] [--rounds 3] [--only TOOL] [--python TOOL=PATH]

A model of the llama kind (float32, one thread) is captured by each tool as its documentation says,
once as it is and once with another epsilon in one norm, where torch also runs the kernels of
another processor (ATEN_CPU_CAPABILITY), so that every tensor is rounded otherwise: what a tool has
to tell from the fault. Then each compares its two dumps.

    capture   CPU seconds of a captured forward over those of a bare one in the same process, after
              the first; in brackets the first, which keeps what is kept once (parameters, programs)
    disk      megabytes of the dump of one forward
    compare   CPU and wall seconds of the whole command, times the seconds of reading its two dumps
              (of this machine, in the same run), and the most memory it had of its own
    start     CPU seconds until the tool could begin
    names     what it says is the first divergence, and whether that is the norm with the epsilon

Rounds are interleaved, every job is a process of its own, figures are medians. A tool that is not
installed is listed with the line that installs it; one that lives in another environment is run by
`--python TOOL=PATH`. Some do other work than whence: "differs" says which.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _processes import Cost, cost
from _rounds import machine

WORKER = Path(__file__).with_name("_contestants.py")


class Tool(NamedTuple):
    """package: what must be importable. install: a line of pip. differs: where its work is not that
    of whence. start: a command that does nothing. compare: words behind its Python, from (folder of
    both dumps, folder for the answer); None where `_contestants` does it. named: from the latter
    and from what was printed. right: a part of the right answer's name, by layer.
    """

    package: str
    install: str
    differs: str
    start: Sequence[str]
    compare: Callable[[Path, Path], list[str]] | None
    named: Callable[[Path, str], str]
    right: Callable[[int], str]


def _norm(layer: int) -> str:
    return f"layers.{layer}.post_attention_layernorm"


def _by_whence(folder: Path, out: Path) -> list[str]:
    sides = [str(_inner(folder / side)) for side in ("reference", "target")]
    return ["-m", "whence", "compare", *sides, "-o", str(out)]


def _inner(folder: Path) -> Path:
    """Where the dump itself is: msprobe puts it below folders of step and process."""
    return next((path.parent for path in folder.rglob("dump.json")), folder)


def _named_by_whence(out: Path, _printed: str) -> str:
    findings = json.loads((out / "summary.json").read_text())["findings"]
    return f"{findings[0]['name']}.{findings[0].get('occurrence', 0)}." if findings else ""


def _by_msprobe(folder: Path, out: Path) -> list[str]:
    target, reference = (str(_inner(folder / s) / "dump.json") for s in ("target", "reference"))
    return ["-m", "msprobe.msprobe", "compare", "-tp", target, "-gp", reference, "-o", str(out)]


def _named_by_msprobe(out: Path, _printed: str) -> str:
    import csv

    with next(out.glob("compare_result*.csv")).open(encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    return next((row["NPU Name"] for row in rows if row["Result"] != "pass"), "")


def _by_msit(folder: Path, out: Path) -> list[str]:
    out.mkdir(mode=0o750)
    mine, golden = (
        str(next((folder / side).glob("*/torch_tensors/*"))) for side in ("target", "reference")
    )
    return ["-m", "components", "llm", "compare", "-gp", golden, "-mp", mine, "-o", str(out)]


def _named_in_process(_out: Path, printed: str) -> str:
    return str(_said(printed)["named"])


def _said(printed: str) -> dict[str, Any]:
    """What a job of `_contestants` prints."""
    lines = [line for line in printed.splitlines() if line.startswith("@@")]
    said: dict[str, Any] = json.loads(lines[-1][2:])
    return said


def _nth_addition(layer: int) -> str:
    """The epsilon's, as calls of torch are counted: four a layer, two of them residuals."""
    return f"Tensor.__add__.{4 * layer + 2}."


def _of_whence(differs: str, right: Callable[[int], str] = _norm) -> Tool:
    start = ["-m", "whence", "--version"]
    install = "pip install whence"
    return Tool("whence", install, differs, start, _by_whence, _named_by_whence, right)


def _of_msprobe(differs: str, right: Callable[[int], str]) -> Tool:
    install = "pip install mindstudio-probe"
    start = ["-m", "msprobe.msprobe", "--version"]
    return Tool("msprobe", install, differs, start, _by_msprobe, _named_by_msprobe, right)


def _with_torch(package: str, install: str, differs: str) -> Tool:
    start = ["-c", f"import {package}"]
    return Tool(package, install, differs, start, None, _named_in_process, _norm)


MSPROBE_L1, ON_MSPROBE = "msprobe L1", "whence on msprobe L1"
TOOLS: dict[str, Tool] = {
    "whence": _of_whence("inputs, outputs, parameters, programs; replays each call to judge it"),
    "whence, statistics": _of_whence("no elements: hashes, statistics and sketches"),
    "whence, operators": _of_whence("--level op"),
    ON_MSPROBE: _of_whence("reads and judges the dump of msprobe", _nth_addition),
    "msprobe L0": _of_msprobe("inputs, outputs and parameters of modules", _norm),
    "msprobe L0, statistics": _of_msprobe("max, min, mean, norm of them", _norm),
    MSPROBE_L1: _of_msprobe(
        "inputs and outputs of calls of torch; weights are dumped in each call",
        _nth_addition,
    ),
    "msit": Tool(
        "msit_llm",
        "pip download --no-deps msit; unzip; pip install --no-deps . ./components/llm; "
        "pip install pandas openpyxl tqdm",
        "inputs and outputs of modules; a table of figures, in no order, without a verdict",
        ["-m", "components", "--help"],
        _by_msit,
        lambda _out, _printed: "",
        _norm,
    ),
    "Polygraphy": _with_torch(
        "polygraphy",
        "pip install polygraphy",
        "outputs only, handed to it by hooks: it captures engines, not torch; fixed tolerances",
    ),
    "torch.save, allclose": _with_torch(
        "torch", "pip install torch", "outputs only, and stops at the first that is not close"
    ),
    "torch DebugMode": _with_torch(
        "torch",
        "pip install torch",
        "a norm of each output, kept in memory and compared for equality in one process, so "
        "without other kernels; names a kind of operator, not which of them",
    )._replace(right=lambda _layer: "add"),
}


class Race:
    """Runs the jobs of tools and keeps what they cost. pythons: of tools by package."""

    def __init__(self, where: Path, options: dict[str, Any], pythons: dict[str, str]) -> None:
        self.where, self.options, self.pythons = where, options, pythons
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.named: dict[str, str] = {}
        self.ceiling: list[float] = []

    def python(self, tool: Tool) -> str:
        return self.pythons.get(tool.package, sys.executable)

    def is_here(self, tool: Tool) -> bool:
        return cost([self.python(tool), "-c", f"import {tool.package}"]).exit == 0

    def _job(self, job: str, name: str, folder: Path, **more: Any) -> Cost:
        side = more.get("side", "")
        variables = {"ATEN_CPU_CAPABILITY": "default"} if side == "target" else {}
        options = json.dumps({**self.options, **more})
        words = [self.python(TOOLS[name]), str(WORKER), job, name, str(folder), options]
        return _checked(name, cost(words, {"OMP_NUM_THREADS": "1", **variables}))

    def run(self, name: str) -> None:
        """One round of one tool."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        tool, folder = TOOLS[name], self.where / "dumps"
        by = MSPROBE_L1 if name == ON_MSPROBE else name
        row: dict[str, Any] = {}
        if by == name:
            said = _said(self._job("cost", name, self.where).output)
            row["capture"] = said["captured"] / said["bare"]
            row["first"] = said["first"] / said["bare"]
        for side in ("reference", "target"):
            self._job("dump", by, folder, side=side)
        row["mb"] = _bytes(folder / "reference") / 1e6
        out = self.where / "out"
        start = [self.python(tool), *tool.start]
        row["start"] = _checked(name, cost(start)).cpu_s
        if tool.compare is None:
            taken = self._job("compare", name, folder)
        else:
            taken = cost([self.python(tool), *tool.compare(folder, out)])
            if taken.exit not in (0, 1):
                _checked(name, taken)
        reading = (_bytes(folder / "reference") + _bytes(folder / "target")) / self.ceiling[-1]
        row |= {"cpu_s": taken.cpu_s, "wall_s": taken.wall_s, "peak": taken.mb}
        row["over_reading"] = taken.cpu_s / reading if reading else 0.0
        self.named[name] = tool.named(out, taken.output)
        self.rows.setdefault(name, []).append(row)
        for left in self.where.iterdir():
            shutil.rmtree(left)


def _checked(name: str, taken: Cost) -> Cost:
    if taken.exit:
        sys.exit(f"{name} ended with {taken.exit}:\n{taken.output[-2000:]}")
    return taken


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ceiling() -> float:
    """Bytes a second at which one core reads memory."""
    import time

    import numpy as np
    from kernels import reader

    words, xor, best = np.ones(1 << 24, np.uint64), reader(), 0.0
    for _ in range(5):
        start = time.process_time()
        xor(words)
        best = max(best, words.nbytes / (time.process_time() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forwards", type=int, default=7, help="timed forwards of a round")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", action="append", choices=TOOLS, help="only these tools")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PACKAGE=PATH", help="who has a tool"
    )
    parser.add_argument("--json", help="also write the figures here")
    given = parser.parse_args()
    width = given.width
    shape = {"layers": given.layers, "width": width, "heads": 8, "hidden": width * 11 // 4}
    shape |= {"vocabulary": 8192, "tokens": given.tokens}
    with tempfile.TemporaryDirectory() as folder:
        options = {"shape": shape, "forwards": given.forwards}
        race = Race(Path(folder), options, dict(word.split("=", 1) for word in given.python))
        chosen = [name for name in TOOLS if not given.only or name in given.only]
        here = [name for name in chosen if race.is_here(TOOLS[name])]
        if ON_MSPROBE in here and not race.is_here(TOOLS[MSPROBE_L1]):
            here.remove(ON_MSPROBE)
        for number in range(given.rounds):
            race.ceiling.append(ceiling())
            for name in here[:: 1 if number % 2 == 0 else -1]:
                race.run(name)
    answer = table(race, chosen, given.layers // 2)
    if given.json:
        about = {"machine": machine(), "options": options, "read_ceiling": race.ceiling}
        Path(given.json).write_text(json.dumps({**about, "tools": answer}, indent=1))


def table(race: Race, chosen: Sequence[str], layer: int) -> dict[str, dict[str, Any]]:
    """Print the medians of all rounds; returns them by tool."""
    answer: dict[str, dict[str, Any]] = {}
    print(f"read ceiling {statistics.median(race.ceiling) / 1e9:.1f} GB/s")
    print(f"{'tool':24}{'capture':>16}{'disk MB':>9}{'CPU s':>8}{'wall':>7}", end="")
    print(f"{'reading':>9}{'MB':>7}{'start':>7}  names")
    for name in chosen:
        if name not in race.rows:
            answer[name] = {"install": TOOLS[name].install}
            print(f"{name:24}not installed: {TOOLS[name].install}")
            continue
        rows = race.rows[name]
        row = {key: statistics.median(r[key] for r in rows) for key in rows[0]}
        named = race.named[name]
        is_right = TOOLS[name].right(layer) in named
        told = f"{named.rstrip('.')}: {'right' if is_right else 'wrong'}" if named else "names none"
        answer[name] = {**row, "named": named, "right": is_right, "differs": TOOLS[name].differs}
        taken = f"{row['capture']:.2f} ({row['first']:.1f})" if "capture" in row else ""
        print(
            f"{name:24}{taken:>16}{row['mb']:9.0f}{row['cpu_s']:8.2f}{row['wall_s']:7.2f}", end=""
        )
        print(f"{row['over_reading']:9.0f}{row['peak']:7.0f}{row['start']:7.2f}  {told}")
        print(f"{'':24}{TOOLS[name].differs}")
    return answer


if __name__ == "__main__":
    main()
