"""Pairs: an architecture, a way, a dtype, and a fault or none; built, checked in float64, captured,
compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _stages
import torch

import whence
from _zoo import draw
from _zoo.architectures import ARCHITECTURES, reference
from _zoo.editing import calls, first_call
from _zoo.faults import Planted
from _zoo.faults_ports import FAULTS
from _zoo.sides import NotHere, Side, apart, exact, tensors, widely
from _zoo.ways import Way, load

LEVELS: dict[str, dict[str, Any]] = {
    "modules": {},
    "op": {"level": "op"},
    "dumps": {"programs": False},
}
"""What a capture is told: "dumps" are of modules, without what they ran."""
CLEAR = 1e-3  # least relative effect of a clear fault at its own output
SCRIPT = ("loss", "gradients", "backward")
"""Types of calls that are the script's, at the level of modules."""
EFFECT = 1e-9  # least relative effect of a fault at the outputs, in float64


class Refused(Exception):
    """What the generator built is no clean pair, or a fault without an effect."""


@dataclass(frozen=True)
class Name:
    """way: "" for none beside a fault, "a+b" for two. fault: "" for none."""

    architecture: str
    way: str
    dtype: str
    fault: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.architecture, self.way, self.fault, self.dtype)))

    @property
    def seed(self) -> int:
        """A number that depends on the name."""
        return _number(str(self)) % 1000


@dataclass
class Pair:
    """planted: what whence should name; None of a clean pair."""

    name: Name
    reference: Side
    target: Side
    planted: Planted | None = None
    effect: float = 0.0


def _same(way: str) -> float:
    return max(load()[w].same for w in way.split("+"))


def named(text: str) -> Name:
    """The name that is written so."""
    architecture, *middle, dtype = text.split("/")
    ways = load()
    way = next((m for m in middle if m.partition("+")[0] in ways), "")
    return Name(architecture, way, dtype, next((m for m in middle if m != way), ""))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


# ---- building


def build(name: Name) -> Pair:
    """The pair of that name. Raises NotHere, Refused."""
    with quiet():
        return _faulty(name) if name.fault else _clean(name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries print."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _sides(side: Side, way: str, seed: int) -> tuple[Side, Side]:
    first, _, second = way.partition("+")
    if not way:
        return side, side.copied()
    made = load()[first].make(side.copied(), seed)
    one, other = made if isinstance(made, tuple) else (side, made)
    if second:
        again = load()[second].make(other, seed + 1)
        if isinstance(again, tuple):
            raise NotHere("a way that changes both sides")
        other = again
    return one, other


def _clean(name: Name) -> Pair:
    base = reference(name.architecture)
    with widely():  # weights that a way makes of others are made in float64 too
        one, other = _sides(base.to(torch.float64), name.way, name.seed)
    distance = apart(exact(one), exact(other))
    if not distance < _same(name.way):
        raise Refused(f"{distance:.2g} apart in float64")
    return Pair(name, *_in_dtypes(name, *_sides(base, name.way, name.seed)))


def _in_dtypes(name: Name, one: Side, other: Side) -> tuple[Side, Side]:
    dtype = torch.float32 if name.dtype == "float32" else torch.bfloat16
    return one if name.dtype == "mixed" else one.to(dtype), other.to(dtype)


def _faulty(name: Name) -> Pair:
    fault, base = FAULTS[name.fault], reference(name.architecture)
    if fault.prepare is not None:
        base = fault.prepare(base)
    with widely():
        clean, wrong = base.to(torch.float64), base.to(torch.float64)
        planted = fault.plant(wrong, name.seed)
        one, _ = _sides(clean, name.way, name.seed)
        twin, other = _sides(wrong, name.way, name.seed)
    result = exact(other)
    distance = apart(exact(twin), result)
    if name.way and not distance < _same(name.way):
        raise Refused(f"the way is {distance:.2g} apart beside the fault")
    effect = apart(exact(one), result)
    local = _local(clean, wrong, planted)
    planted = _as_called(clean, planted)
    target = base.copied()
    fault.plant(target, name.seed)
    right, sides = _sides(base, name.way, name.seed), _sides(target, name.way, name.seed)
    sides = right[0], sides[1]
    if planted.rounding:  # the way may have put another kernel in the place of the faulty one
        effect = apart(tensors(right[1].copied().run()), tensors(sides[1].copied().run()))
    if not effect > (1e-5 if planted.rounding else EFFECT):
        raise Refused("the fault has no effect")
    return Pair(name, *_in_dtypes(name, *sides), planted, local or effect)


def _as_called(clean: Side, planted: Planted) -> Planted:
    """With the module that uses the planted one's parameters, where nobody calls that one."""
    called = {name for name, *_ in calls(clean)}
    name = planted.name
    while name and name not in called:
        name = name.rpartition(".")[0]
    if planted.kinds or name == planted.name:
        return planted
    return replace(planted, also=(*planted.also, name))


def _local(clean: Side, wrong: Side, planted: Planted) -> float:
    """The relative effect of the fault at its own output, on equal inputs."""
    try:
        given = first_call(wrong, planted.name)
        return given.against(clean.only(planted.name))
    except Exception:  # noqa: BLE001 - a call that cannot be made again has no figure of its own
        return 0.0


# ---- which pairs


def ways_of(half: str) -> list[Way]:
    """The ways of a half that need no compiler."""
    every = [w for w in load().values() if not w.slow]
    if half == "held":
        return every
    return [w for w in every if not draw.is_held("way", w.name)]


def architectures_of(half: str) -> list[str]:
    """The architectures of a half."""
    if half == "held":
        return list(ARCHITECTURES)
    return [a for a in ARCHITECTURES if not draw.is_held("architecture", a)]


def names(half: str, kind: str, seed: int) -> Iterator[tuple[str, Iterator[Name]]]:
    """Candidates for one pair after the other, of which the first that can be built is taken, each
    with its way (or fault). These take turns, so that each has as many pairs as the others.
    """
    ways = ways_of(half)
    subjects = list(FAULTS)
    if kind in ("clean", "two"):
        subjects = [w.name for w in ways if kind == "clean" or w.kind == "call"]
    subjects.sort(key=lambda s: _number(f"{seed} {s}"))
    candidates = [_candidates(half, kind, seed, subject, ways) for subject in subjects]
    while True:
        for subject, own in zip(subjects, candidates, strict=True):
            yield subject, itertools.islice(own, len(ARCHITECTURES))


def _candidates(half: str, kind: str, seed: int, subject: str, ways: list[Way]) -> Iterator[Name]:
    order = sorted(architectures_of(half), key=lambda a: _number(f"{seed} {subject} {a}"))
    for turn in itertools.count():
        for a in order:
            number = _number(f"{seed} {turn} {subject} {a}")
            name = _name(a, subject, number, kind, ways)
            if half == "setting" or is_held(name):
                yield name


def _name(architecture: str, subject: str, number: int, kind: str, ways: list[Way]) -> Name:
    if kind in ("faults", "beside"):
        return _fault_name(architecture, subject, number, kind, ways)
    dtypes = load()[subject].dtypes
    dtype = dtypes[number % len(dtypes)]
    if kind == "clean":
        return Name(architecture, subject, dtype)
    fitting = [w for w in ways if w.kind == "call" and dtype in w.dtypes and w.name != subject]
    return Name(architecture, f"{subject}+{fitting[number // 7 % len(fitting)].name}", dtype)


def is_held(name: Name) -> bool:
    """Is the architecture or a way of the half that sets nothing?"""
    return draw.is_held("architecture", name.architecture) or any(
        draw.is_held("way", way) for way in name.way.split("+") if way
    )


def _fault_name(architecture: str, fault: str, number: int, kind: str, ways: list[Way]) -> Name:
    own = FAULTS[fault]
    dtype = own.dtypes[number % len(own.dtypes)]
    if kind == "faults":
        return Name(architecture, "", dtype, fault)
    fitting = [w for w in ways if w.kind == own.kind and dtype in w.dtypes]
    return Name(architecture, fitting[number // 7 % len(fitting)].name, dtype, fault)


# ---- running one


def measure(pair: Pair, level: str, keep: str | None = None) -> dict[str, Any]:
    """Capture both sides as a user does, compare, and say what was answered. keep: a folder in
    which both runs stay, `reference` and `target`.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zoo") as scratch:
        folder = keep or scratch
        places = [os.path.join(folder, n) for n in ("reference", "target")]  # noqa: PTH118
        with quiet():
            for side, place in zip((pair.reference, pair.target), places, strict=True):
                with whence.capture(side.model, place, force=bool(keep), **LEVELS[level]):
                    side.run()
            captured = time.perf_counter()
            with _stages.watched() as stages:
                result = whence.compare(*places)
    row: dict[str, Any] = {"verdict": str(result.status), "stages": sorted(stages)}
    if result.findings:
        found = result.findings[0]
        row |= {
            "first": found.name,
            "cause": str(found.cause),
            "confidence": str(found.confidence),
            "operator": found.operator,
            "phase": found.phase,
            "op_type": found.op_type,
            "sentence": found.sentence[:300],
            "others": [n for f in result.findings for n in (f.name, *f.also)][1:],
        }
    if result.undecided is not None:
        row["undecided"] = f"{result.undecided.place}: {result.undecided.why}"[:300]
    if result.headline:
        row["headline"] = result.headline[:300]
    done = time.perf_counter()
    return row | {"capture_s": round(captured - start, 2), "compare_s": round(done - captured, 2)}


def runs(pair: Pair) -> bool:
    """Does torch run both sides while nobody captures them?"""
    with quiet(), contextlib.suppress(Exception):
        for side in (pair.reference, pair.target):
            side.copied().run()
        return True
    return False


def graded(pair: Pair, row: dict[str, Any]) -> str:
    """How good the answer is."""
    verdict = row["verdict"]
    if pair.planted is None:
        return {"same": "silent", "different": "FALSE ALARM"}.get(verdict, "undecided")
    if verdict == "same":
        return "MISSED"
    if verdict != "different" or "first" not in row:
        return "undecided"
    return place_of(row, _with_root(pair), pair.target.touched)


def _with_root(pair: Pair) -> Planted:
    """What is planted, where "" is written as answers write the model itself: by its class."""
    planted, root = pair.planted, type(pair.target.model).__name__
    assert planted is not None
    return replace(planted, name=planted.name or root, also=tuple(a or root for a in planted.also))


def innocents(pair: Pair, row: dict[str, Any]) -> list[str]:
    """Modules that are named and have no fault, nor hold or belong to one that has."""
    if pair.planted is None or pair.planted.kinds or "first" not in row:
        return []
    planted = _with_root(pair)
    wanted = {planted.name, *planted.also}
    return [
        name
        for name in (row["first"], *row["others"])
        if not any(f"{a}.".startswith(f"{b}.") for w in wanted for a, b in ((w, name), (name, w)))
    ]


def place_of(row: dict[str, Any], planted: Planted, touched: set[str]) -> str:
    """Where the first finding is, seen from the planted fault."""
    first, wanted = row["first"], {planted.name, *planted.also}
    if planted.kinds:
        return _training_place(row, planted)
    if first in wanted:
        return "named"
    if planted.name in touched and first.startswith(planted.name + "."):
        return "named"
    if any(first == "" or w.startswith(first + ".") for w in wanted):
        return "container"
    return "INNOCENT WAY" if first in touched else "INNOCENT"


def _training_place(row: dict[str, Any], planted: Planted) -> str:
    """The same of a fault in the script of a training: its loss, gradients, sums or step."""
    if row["op_type"] in planted.kinds:
        return "named"
    is_root = not set("/.") & set(row["first"])
    if is_root and row["op_type"].islower() and row["op_type"] not in SCRIPT:
        return "named"  # an operator of the script: operators are told under the model's name
    # What the loss hands back to the model has no name of its own.
    is_loss = row["phase"] == "backward" and "loss" in planted.kinds
    return "container" if is_root and is_loss else "INNOCENT"


def path_of(folder: str, half: str, kind: str, level: str, seed: int) -> Path:
    """Where the rows of such a run are kept."""
    return Path(folder) / f"{half}-{kind}-{level}-{seed}.jsonl"
