"""Does a faulty pair ever pass for being damaged, cut off, mixed up or thinned out?

    python benchmarks/false_comfort.py [--pairs 12] [--only REGEX] [--json OUT] [--verbose]

Small models are captured twice, the second time with a fault that begins in the middle of the run,
so that whatever cuts a run off may cut the fault off. Both runs are then damaged: a line of a
journal, a file, a rank, on one side, on both alike, on both otherwise; killed or still being
written at a step; files of one run beside those of the other; or cut down to outputs, to some
calls, to statistics, to 16 bits, to codes. Every damaged pair is compared, and must not be `same`.
The only exception is what a cut down pair cannot show: there the answer's own "could not have seen"
must cover it, which is counted and listed. Exit code 1 where a pair passes otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import torch
from torch import nn

import whence
from whence import store
from whence.errors import WhenceError
from whence.records import MemoryRun, Run
from whence.report.evidence import basis
from whence.store.folder import PROCESS, this_process
from whence.store.status import RUNNING, Ended, write_status

STEPS, FROM = 6, 3
"""Steps of a run, and the first with a fault."""
SIDES = ("reference", "target", "alike", "otherwise")
Damage = Callable[[Path, Path], object]


class Case(NamedTuple):
    """A damaged pair. kind: of damage; damage: does it to copies of both runs, or gives other runs
    in their place.
    """

    kind: str
    name: str
    damage: Damage


class Block(nn.Module):
    """A residual block with a norm, a gate and a softmax over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.gate, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.softmax(self.gate(y), -1) * self.up(y))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)),
    "residual": lambda: nn.Sequential(Block(8), Block(8), nn.LayerNorm(8)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(),
        nn.Linear(32, 4),
    ),
}  # fmt: skip
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda y: y * 1.25,
    "negated": lambda y: torch.cat([-y[..., :1], y[..., 1:]], -1),
    "shifted": lambda y: y + 0.5,
    "rolled": lambda y: y.roll(1, -1),
}


def capture(path: Path, model: str, seed: int, fault: str = "") -> Path:
    """A run of `STEPS` steps; a leaf in the middle has the fault from `FROM` on."""
    torch.manual_seed(seed)
    net = MODELS[model]().eval()
    leaves = [m for m in net.modules() if not [*m.children()] and [*m.parameters()]]
    place, step = leaves[len(leaves) // 2], 0
    kind = type(place)

    def forward(self: nn.Module, *arguments: object) -> torch.Tensor:
        y = kind.forward(self, *arguments)
        return FAULTS[fault](y) if fault and step >= FROM else y

    own = {"forward": forward, "__module__": kind.__module__}
    place.__class__ = type(kind.__name__, (kind,), own)
    with whence.capture(net, path), torch.no_grad():
        for step in range(STEPS):  # noqa: B007 - read by forward
            net(torch.randn(3, 8))
    return path


# ---- damage to files


def folder_of(run: Path, rank: int = 0) -> Path:
    """The folder of the process of a rank."""
    return next(run.glob(f"rank{rank:05d}-*"))


def on(side: str, run: Callable[[Path, int], object]) -> Damage:
    """The damage done to one side, or to both. run: is given the folder of a run, and 1 where
    what it does to it should differ from what it does to the other.
    """

    def damage(reference: Path, target: Path) -> None:
        if side != "target":
            run(reference, 0)
        if side != "reference":
            run(target, int(side == "otherwise"))

    return damage


def lines_of(run: Path) -> list[bytes]:
    """The journal of a run of one process."""
    return (folder_of(run) / "journal.jsonl").read_bytes().splitlines(keepends=True)


def without_line(place: int, how: str) -> Callable[[Path, int], None]:
    """The journal cut before, or in, a line, without it, or with it twice. At odd places the index
    is gone too.
    """

    def damage(run: Path, other: int) -> None:
        lines = lines_of(run)
        at = min(place + 2 * other, len(lines) - 1)
        kept = {
            "cut": lines[:at],
            "torn": [*lines[:at], lines[at][: len(lines[at]) // 2]],
            "gone": [*lines[:at], *lines[at + 1 :]],
            "twice": [*lines[: at + 1], *lines[at:]],
        }[how]
        (folder_of(run) / "journal.jsonl").write_bytes(b"".join(kept))
        if place % 2:
            (folder_of(run) / "index.safetensors").unlink()

    return damage


def spoilt(name: str, how: str) -> Callable[[Path, int], None]:
    """A file emptied, cut or removed."""

    def damage(run: Path, other: int) -> None:
        file = next(run.rglob(name))
        size = file.stat().st_size
        if how == "removed":
            file.unlink()
        else:
            file.write_bytes(b"" if how == "emptied" else file.read_bytes()[: size // (2 + other)])

    return damage


def stopped(step: int, how: str) -> Callable[[Path, int], None]:
    """A process that was killed, or still writes, as a step had just ended."""

    def damage(run: Path, other: int) -> None:
        folder, kept, ended = folder_of(run), [], 0
        for line in lines_of(run):
            kept.append(line)
            ended += line.startswith(b'{"t":"step"')
            if ended > step - other:
                break
        (folder / "journal.jsonl").write_bytes(b"".join(kept))
        (folder / "index.safetensors").unlink()
        write_status(folder, Ended(RUNNING))
        alive = msgspec.to_builtins(this_process(0, "", 0))
        rewrite(folder / PROCESS, **(alive if how == "running" else {"pid_started": 1}))
        if how == "recovered":
            store.recover(run)

    return damage


def rewrite(file: Path, **fields: object) -> None:
    """Set fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))


def exchanged(names: tuple[str, ...], back: bool) -> Damage:
    """Files of the reference beside those of the target, or the other way round."""

    def damage(reference: Path, target: Path) -> None:
        source, place = (target, reference) if back else (reference, target)
        for name in names:
            shutil.copy(folder_of(source) / name, folder_of(place) / name)

    return damage


FILES = ("journal.jsonl", "shard-00000.safetensors", "status.json", "process.json", "run.json")
GROUPS = (
    ("journal.jsonl",),
    ("journal.jsonl", "index.safetensors"),
    ("journal.jsonl", "index.safetensors", "status.json"),
    ("shard-00000.safetensors",),
)


def two_ranks(reference: Path, target: Path) -> None:
    """Both runs become runs of two ranks; rank 0 is the reference's in both."""
    for run in (reference, target):
        second = folder_of(run).rename(run / folder_of(run).name.replace("rank00000", "rank00001"))
        rewrite(second / PROCESS, rank=1, world_size=2)
    first = shutil.copytree(folder_of(reference, 1), reference / "rank00000-a-1")
    rewrite(first / PROCESS, rank=0)
    shutil.copytree(first, target / "rank00000-a-1")


def without_rank(how: str, side: str) -> Damage:
    """Rank 1, which has the fault, is gone, or its files are."""

    def lose(run: Path, _: int) -> None:
        folder = folder_of(run, 1)
        if how == "folder":
            shutil.rmtree(folder)
        else:
            (folder / how).unlink()

    def damage(reference: Path, target: Path) -> None:
        two_ranks(reference, target)
        on(side, lose)(reference, target)

    return damage


# ---- runs that are cut down


def cut_down(how: str) -> Callable[[Path, Path], tuple[Run, Run]]:
    """Both runs as dumps that hold less."""

    def damage(reference: Path, target: Path) -> tuple[Run, Run]:
        runs = store.open_run(reference), store.open_run(target)
        return less(runs[0], how), less(runs[1], how)

    return damage


def less(run: Run, how: str) -> Run:
    """A run in memory without some calls, without elements, or with coarser ones."""
    calls = [c for n, c in enumerate(run.calls) if _stays(how, n, c.parent)]
    places = {call.id: n for n, call in enumerate(calls)}
    calls = [
        msgspec.structs.replace(
            c, id=n, parent=places.get(c.parent, -1), program="",
            refs=c.slots("output") if how == "outputs" else c.refs,
        )
        for n, c in enumerate(calls)
    ]  # fmt: skip
    records, arrays = [], {}
    for record in run.records:
        array = _coarser(run.array(record.id), how)
        if how != "statistics":
            arrays[record.id] = array
        kept = record.statistics if array.dtype == np.float32 else None
        records.append(
            msgspec.structs.replace(
                record, dtype=array.dtype.name, elements=None, hash="", statistics=kept,
                sketch=None, why="statistics only" if how == "statistics" else "",
            )
        )  # fmt: skip
    return MemoryRun(calls, records, arrays, path=run.path, steps=run.steps)


def _stays(how: str, number: int, parent: int) -> bool:
    return parent == -1 if how == "outputs" else how != "thinned" or parent == -1 or not number % 3


def _coarser(array: np.ndarray, how: str) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    if how == "codes":
        return np.clip(np.rint(array * 16), -127, 127).astype(np.int8)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    return array.astype(kinds[how]) if how in kinds else array


REDUCED = ("outputs", "thinned", "statistics", "bfloat16", "float16", "codes")


# ---- all of it


def cases(lines: int, draw: random.Random) -> Iterator[Case]:
    """Ways to damage a pair whose journals have so many lines."""
    for how in ("cut", "torn", "gone", "twice"):
        for place in sorted(draw.sample(range(1, lines), 6)):
            side = draw.choice(SIDES)
            yield Case("journal line", f"{how} {place} {side}", on(side, without_line(place, how)))
    for name in FILES:
        for how in ("emptied", "cut", "removed"):
            side = draw.choice(SIDES)
            yield Case("file", f"{name} {how} {side}", on(side, spoilt(name, how)))
    for how in ("killed", "running", "recovered"):
        for side in SIDES:
            step = draw.randrange(1, STEPS - 1)
            yield Case(how, f"step {step} {side}", on(side, stopped(step, how)))
    for names in GROUPS:
        for back in (False, True):
            to = "into the reference" if back else "into the target"
            yield Case("mixed", f"{' '.join(names)} {to}", exchanged(names, back))
    for how in ("folder", "journal.jsonl", "shard-00000.safetensors", "status.json"):
        for side in SIDES[:3]:
            yield Case("rank", f"{how} {side}", without_rank(how, side))
    for how in REDUCED:
        yield Case("cut down", how, cut_down(how))


def judged(case: Case, reference: Path, target: Path, scratch: Path) -> tuple[str, str]:
    """(status, or "refused" and "covered", what the answer says) of a damaged pair."""
    shutil.rmtree(scratch, ignore_errors=True)
    copies = [Path(shutil.copytree(run, scratch / run.name)) for run in (reference, target)]
    try:
        runs = case.damage(*copies)
        result = whence.compare(*(runs if isinstance(runs, tuple) else copies))
    except WhenceError as error:
        return "refused", str(error)
    said = basis(result)
    if result.status == "same" and case.kind == "cut down" and "could not have seen" in said:
        return "covered", said
    return str(result.status), result.headline or said


def main() -> int:
    """Damage pairs, compare them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=len(MODELS) * len(FAULTS))
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    table: dict[str, Counter[str]] = defaultdict(Counter)
    passed: list[str] = []
    covered: list[str] = []
    planted = [(model, fault) for fault in FAULTS for model in MODELS][: options.pairs]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for seed, (model, fault) in enumerate(planted):
            reference = capture(place / f"ref-{seed}", model, seed)
            target = capture(place / f"tgt-{seed}", model, seed, fault)
            whole = whence.compare(reference, target)
            assert whole.status == "different", (model, fault, whole.headline)
            draw = random.Random(seed)
            for case in cases(len(lines_of(reference)), draw):
                name = f"{model} {fault}: {case.kind}: {case.name}"
                if not re.search(options.only, name):
                    continue
                status, said = judged(case, reference, target, place / "scratch")
                table[case.kind][status] += 1
                if status in ("same", "covered"):
                    (passed if status == "same" else covered).append(f"{name}: {said}")
                if options.verbose:
                    print(f"{status:<10} {name}: {said[:160]}", flush=True)
    total = sum(sum(counts.values()) for counts in table.values())
    columns = ("different", "undecided", "refused", "covered", "same")
    print(f"{'damage':<14}" + "".join(f"{column:>11}" for column in columns))
    for kind, counts in table.items():
        print(f"{kind:<14}" + "".join(f"{counts[column]:>11}" for column in columns))
    print(f"{total} damaged pairs, {len(passed)} same, {len(covered)} covered by the answer")
    for line in (*passed, *covered):
        print(f"  {line}")
    if options.json is not None:
        options.json.write_text(json.dumps({"table": table, "same": passed, "covered": covered}))
    return int(bool(passed))


if __name__ == "__main__":
    sys.exit(main())
