"""The scenes of a demo: a clean pair, whose result must be "same", and a planted fault, which must
be found.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from whence.demo.players import Player, make, stage
from whence.errors import OutputExists, UsageError

if TYPE_CHECKING:
    from whence.results import Comparison

# From strong to weak: the first that leaves the generated text unchanged is used.
STRENGTHS = {
    "eps": (1000.0, 100.0, 10.0),  # times the epsilon there was
    "weight": (16.0, 8.0, 4.0),  # standard deviations of the weight added to one element
    "scale": (1.01, 1.003, 1.001),  # times the output
    "drop-residual": (0.0, 0.5, 0.9, 0.99),  # times the branch
}
FAULTS = tuple(STRENGTHS)
_TRIES = 12


@dataclass(frozen=True)
class Scene:
    """One part of a demo.

    lines: text before the answer. comparison: the answer, when there is one. closing: text after
    it. output: folder of its files. expected: False when whence did not give the answer that it had
    to give.
    """

    lines: tuple[str, ...]
    comparison: Comparison | None = None
    closing: tuple[str, ...] = ()
    output: str = ""
    expected: bool = True


@dataclass(frozen=True)
class Planted:
    """A fault that leaves the generated text unchanged."""

    site: str
    fault: str
    strength: float
    draw: str
    words: str
    text: str


def play(
    *,
    plant: str = "",
    fault: str | None = None,
    seed: int = 0,
    model: str = "tiny",
    folder: str | None = None,
) -> Iterator[Scene]:
    """The scenes of one demo, each computed when the iterator reaches it.

    plant: pattern on the names of the modules a fault may be planted in ("" for all). fault: one of
    FAULTS, None to draw it. seed: what is drawn. model: tiny or smollm2. folder: where the runs are
    kept, None for a folder that is removed. Raises UsageError for a pattern that matches no site,
    OutputExists for a folder with files in it, MissingDependency.
    """
    if fault is not None and fault not in FAULTS:
        raise UsageError(f"fault {fault!r}: one of {', '.join(FAULTS)}")
    if folder is not None and (
        Path(folder).is_file() or (Path(folder).is_dir() and any(Path(folder).iterdir()))
    ):
        raise OutputExists(
            f"{folder} is there already; the demo writes only into a new or empty folder"
        )
    with stage(model):
        player = make(model)
        candidates = draw(player.model, plant, fault, seed)
        with _place(folder) as place:
            yield from _scenes(player, candidates, seed, place, keep=folder is not None)


def draw(model: Any, plant: str, fault: str | None, seed: int) -> list[tuple[str, str]]:
    """Candidates (site, fault) in the order that the seed determines.

    Raises UsageError with the nearest sites when there is none.
    """
    from whence import api

    order = [fault] if fault is not None else Random(f"fault {seed}").sample(FAULTS, len(FAULTS))
    candidates: list[tuple[str, str]] = []
    every: dict[str, None] = {}
    for kind in order:
        names = api.fault_sites(model, kind)
        every.update(dict.fromkeys(names))
        fitting = [n for n in names if not plant or _matches(plant, n)]
        candidates += [
            (n, kind) for n in Random(f"site {kind} {seed}").sample(fitting, len(fitting))
        ]
    if not candidates:
        near = (
            difflib.get_close_matches(plant.strip("*"), list(every), n=3, cutoff=0.3)
            or list(every)[:3]
        )
        kind_words = f" for {fault}" if fault is not None else ""
        raise UsageError(
            f"--plant {plant!r} matches none of the {len(every)} sites{kind_words}; nearest: "
            f"{', '.join(near)}"
        )
    return candidates


def find(player: Player, candidates: list[tuple[str, str]], seed: int, text: list[int]) -> Planted:
    """The first site, and the largest strength of the fault at which the model still writes the
    same text.

    Raises UsageError when there is none.
    """
    from whence import api

    for site, fault in candidates[:_TRIES]:
        for strength in STRENGTHS[fault]:
            key = f"{fault} {site} {seed}"
            with api.planted(player.model, site, fault, strength, Random(key)) as words:
                tokens = player.generate(player.model)
            if tokens == text:
                return Planted(site, fault, strength, key, words, player.words(tokens))
    tried = min(len(candidates), _TRIES)
    raise UsageError(
        f"each of the {tried} sites tried changes the text at every strength; another --seed, "
        "--fault or --plant may not"
    )


def _scenes(
    player: Player, candidates: list[tuple[str, str]], seed: int, place: Path, *, keep: bool
) -> Iterator[Scene]:
    import whence
    from whence import api

    def compare(name: str) -> tuple[Comparison, str]:
        output = str(place / f"compare-{name}") if keep else ""
        runs = str(place / "reference"), str(place / name)
        return whence.compare(*runs, output=output or None), output

    with whence.capture(player.model, place / "reference"):
        reference = player.generate(player.model)
    about = f"The reference, float32, goes on from {player.prompt!r}:"
    yield Scene((f"The model: {player.about}.", about, f"  {player.words(reference)}"))
    rounded = player.in_bfloat16()
    with whence.capture(rounded, place / "bfloat16"):
        tokens = player.generate(rounded)
    del rounded
    same_text, other_text = "the same text", "the text differs"
    comment = same_text if tokens == reference else f"{other_text}; the answer says why"
    result, output = compare("bfloat16")
    yield Scene(
        (
            "1. A clean pair: the same weights in bfloat16 against float32. There is no fault to "
            "find.",
            f"  {player.words(tokens)}  ({comment})",
        ),
        result,
        output=output,
        expected=result.status == "same",
    )

    planted = find(player, candidates, seed, reference)
    fault = planted.site, planted.fault, planted.strength
    with (
        api.planted(player.model, *fault, Random(planted.draw)),
        whence.capture(player.model, place / "planted"),
    ):
        tokens = player.generate(player.model)
    result, output = compare("planted")
    comment = same_text if tokens == reference else other_text
    is_named, verdict = _verdict(result, planted.site)
    yield Scene(
        (
            "2. A fault is planted: both sides float32, the same weights and the same text. The "
            "text does not show it.",
            f"  {player.words(tokens)}  ({comment})",
        ),
        result,
        (
            f"planted (seed {seed}, fault {planted.fault}): {planted.site}: {planted.words}.",
            f"{verdict}.",
        ),
        output,
        is_named,
    )
    if keep:
        runs = f"Kept in {place}: runs reference, bfloat16, planted"
        yield Scene((f"{runs}; try  whence show {place / 'planted'} --tree",))


def _verdict(result: Comparison, site: str) -> tuple[bool, str]:
    """(whether the planted site is named first, that in words)."""
    first = result.findings[0].name if result.findings else ""
    if result.status == "different" and first == site:
        return True, "whence named it first"
    if site in {f.name for f in result.findings}:
        return False, f"whence named it, but {first} before it"
    answer = ", ".join(filter(None, (result.status, first)))
    return False, f"whence did NOT name it (its answer: {answer})"


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise UsageError(f"--plant {pattern!r} is not a regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)


@contextmanager
def _place(folder: str | None) -> Iterator[Path]:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="whence-demo-") as temporary:
        yield Path(temporary)
