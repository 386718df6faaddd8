"""What is made of a comparison or a run: every format of the answer, the page, scripts, other
tools' files, smaller runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from _golden.nets import captured, language, seeded
from _golden.place import DATA, Answers, Case, Place
from _golden.training import trained


def _eps(model: object) -> None:
    model.layers[1].input_norm.eps = 0.25  # type: ignore[attr-defined]


class _Small(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(8, 16), nn.GELU()
        self.norm, self.down = nn.LayerNorm(16, eps=eps), nn.Linear(16, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.act(self.up(x))))


def small_pair(place: Place, **how: str) -> None:
    place.once("ref", captured(_Small, lambda: (seeded(4, 8),), **how))
    place.once("tgt", captured(lambda: _Small(0.25), lambda: (seeded(4, 8),), **how))


def _lines(*lines: Sequence[str], level: str = "modules") -> Case:
    """Commands about a comparison that is made first."""

    def case(place: Place) -> Answers:
        small_pair(place, level=level)
        place.whence("compare", "ref", "tgt", "-o", "out/cmp")
        for number, words in enumerate(lines):
            yield f"{number}.txt", place.whence(*words)

    return case


def _formats(place: Place) -> Answers:
    small_pair(place)
    for name in ("text", "json", "csv", "markdown", "github"):
        said = place.whence("compare", "ref", "tgt", "--format", name)
        yield f"{name}.{'here.txt' if name in ('json', 'csv') else 'txt'}", said
    place.whence("compare", "ref", "tgt", "-o", "out/cmp", "--junit", "out/junit.xml")
    yield from place.read("out/junit.xml")


def _payload(file: Path) -> Iterator[tuple[str, str]]:
    """What a page shows, as the page holds it, and a digest of the rest of it."""
    text = file.read_text(encoding="utf-8")
    held = re.findall(r"<script[^>]*type=\"application/json\"[^>]*>(.*?)</script>", text, re.DOTALL)
    for number, one in enumerate(held):
        found = json.loads(one.replace("<\\/", "</"))
        yield f"payload{number}.json", json.dumps(found, indent=1, sort_keys=True)
        yield f"payload{number}.txt", "\n".join(_shape(found)) + "\n"
    bare = re.sub(r"<script[^>]*application/json[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    yield (
        "page.here.txt",
        f"{len(held)} parts of data, {hashlib.sha256(bare.encode()).hexdigest()}\n",
    )


def _shape(item: object, path: str = "") -> Iterator[str]:
    """The names of the fields of a document, and their words."""
    if isinstance(item, dict):
        for name, value in item.items():
            yield from _shape(value, f"{path}.{name}")
    elif isinstance(item, list):
        yield f"{path}: list"
        for value in item[:1]:
            yield from _shape(value, f"{path}[]")
    else:
        yield f"{path}: {type(item).__name__}"


def _page(place: Place) -> Answers:
    small_pair(place, level="op")
    yield (
        "page.txt",
        place.whence("compare", "ref", "tgt", "-o", "out/cmp", "--html", "out/page.html"),
    )
    yield from _payload(place.folder / "out/page.html")
    yield "report.txt", place.whence("report", "out/cmp", "-o", "out/report.html", "--details", "2")


def _page_of_training(place: Place) -> Answers:
    place.once("ref", trained())
    place.once("tgt", trained(lambda t: t.model.head.weight.data.mul_(1.25)))
    place.whence("compare", "ref", "tgt", "-o", "out/cmp")
    yield "report.txt", place.whence("report", "out/cmp", "-o", "out/page.html")
    yield from _payload(place.folder / "out/page.html")


def _plots(place: Place) -> Answers:
    small_pair(place)
    place.whence("compare", "ref", "tgt", "-o", "out/cmp")
    yield "plots.txt", place.whence("report", "out/cmp", "--plots", "out/plots")
    yield (
        "files.txt",
        "".join(f"{p.name}\n" for p in sorted((place.folder / "out/plots").iterdir())),
    )


def _query(place: Place) -> Answers:
    small_pair(place)
    place.whence("compare", "ref", "tgt", "-o", "out/cmp")
    yield "tables.txt", place.whence("query", "out/cmp", "--tables")
    asked = "select name, verdict from pairs order by all"
    yield "pairs.txt", place.whence("query", "out/cmp", asked)
    yield "csv.txt", place.whence("query", "out/cmp", "select name, cause from findings", "--csv")
    yield "parquet.txt", place.whence("report", "out/cmp", "--parquet", "out/pairs.parquet")


def _repro(place: Place) -> Answers:
    small_pair(place)
    place.whence("compare", "ref", "tgt", "-o", "out/cmp")
    yield "repro.txt", place.whence("repro", "out/cmp", "-o", "out/repro")
    yield from place.read("out/repro/repro.py")


def _repro_of_training(place: Place) -> Answers:
    """A finding in a backward pass, and one in a step of the optimiser."""
    from _golden.training import _adamw, _own_backward

    place.once("ref", trained(_own_backward(2.0)))
    place.once("tgt", trained(_own_backward(2.25), _adamw(eps=1e-3)))
    place.whence("compare", "ref", "tgt", "-o", "out/cmp")
    for number in ("1", "2"):
        words = ("repro", "out/cmp", "--finding", number, "-o", f"out/{number}", "--no-run")
        yield f"{number}.txt", place.whence(*words)
        file = place.folder / "out" / number / "repro.py"
        if file.exists():
            yield f"{number}.py.txt", file.read_text(encoding="utf-8")


def _operators(place: Place) -> Answers:
    small_pair(place, level="op")
    yield "list.txt", place.whence("ops", "list", "ref")
    yield "generate.txt", place.whence("ops", "generate", "ref", "-o", "out/tests")
    for file in sorted((place.folder / "out/tests").glob("*.py")):
        yield f"{file.name}.txt", file.read_text(encoding="utf-8")
    yield (
        "random.txt",
        place.whence(
            "ops",
            "generate",
            "ref",
            "-o",
            "out/random",
            "--factory",
            "special",
            "--level",
            "module",
        ),
    )


def _converted(place: Place) -> Answers:
    """Runs in every format that whence writes, read again and compared."""
    place.once("run", captured(language()))
    for name in ("npy", "safetensors", "torch_xray", "msprobe", "polygraphy"):
        yield f"{name}.txt", place.whence("convert", "run", f"out/{name}", "--to", name)
        yield f"{name}.show.txt", place.whence("show", f"out/{name}")
        yield from place.compare("run", f"out/{name}", to=f"from_{name}")


def _packed(place: Place) -> Answers:
    small_pair(place)
    yield "pack.txt", place.whence("pack", "tgt", "--against", "ref", "-o", "out/packed")
    yield "alone.txt", place.whence("pack", "ref", "-o", "out/alone")
    yield from place.compare("ref", "out/packed")
    yield "unpack.txt", place.whence("unpack", "out/packed", "-o", "out/again")
    yield from place.compare("tgt", "out/again", to="unpacked")
    yield (
        "keep.txt",
        place.whence("pack", "tgt", "--against", "ref", "--keep", "differing", "-o", "out/small"),
    )
    yield from place.compare("ref", "out/small", to="kept")


def _scrubbed(place: Place) -> Answers:
    small_pair(place)
    shutil.copytree(place.folder / "tgt", place.folder / "out/private")
    yield "scrub.txt", place.whence("scrub", "out/private", "--name", "up")
    yield from place.compare("ref", "out/private")


def _killed(place: Place) -> Answers:
    """A run whose capture did not end."""
    small_pair(place)

    shutil.copytree(place.folder / "ref", place.folder / "out/cut")
    for journal in (place.folder / "out/cut").rglob("journal.jsonl"):
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        journal.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    yield "show.txt", place.whence("show", "out/cut")
    yield "recover.txt", place.whence("recover", "out/cut")
    yield from place.compare("ref", "out/cut")
    yield "partial.txt", place.whence("compare", "ref", "out/cut", "--partial")


def _maps(place: Place) -> Answers:
    """A map that pairs, edited and followed."""

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            small = _Small()
            self.wide, self.gelu, self.scale, self.narrow = (
                small.up,
                small.act,
                small.norm,
                small.down,
            )
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.scale(self.gelu(self.wide(x))))

    small_pair(place)
    place.once("renamed", captured(Renamed, lambda: (seeded(4, 8),)))
    yield "align.txt", place.whence("align", "ref", "renamed", "-o", "out/map.yaml")
    yield "map.txt", (place.folder / "out/map.yaml").read_text(encoding="utf-8")
    yield from place.compare("ref", "renamed", "--map", "out/map.yaml")
    yield "plan.txt", place.whence("compare", "ref", "renamed", "--plan")
    yield "weights.txt", place.whence("map-weights", "ref", "renamed")


def _golden_runs(place: Place) -> Answers:
    """Runs that an earlier version wrote."""
    runs = sorted(p for p in (DATA / "golden" / "0.1.0").iterdir() if p.is_dir())
    for run in runs:
        yield f"{run.name}.txt", place.whence("show", run, "--tree")


CASES: dict[str, Case] = {
    "formats": _formats,
    "page": _page,
    "page_of_training": _page_of_training,
    "plots": _plots,
    "query": _query,
    "trace": _lines(("trace", "out/cmp"), ("trace", "out/cmp", "down"), level="op"),
    "repro": _repro,
    "repro_of_training": _repro_of_training,
    "show": _lines(
        ("show", "ref"),
        ("show", "ref", "--tree"),
        ("show", "ref", "norm"),
        ("show", "ref", "norm:input.0", "--step", "0"),
        ("show", "ref", "--format", "table"),
        ("show", "ref", "--format", "csv"),
        ("show", "ref", "--name", "u*"),
    ),
    "operators": _operators,
    "converted": _converted,
    "packed": _packed,
    "scrubbed": _scrubbed,
    "killed": _killed,
    "maps": _maps,
    "runs_of_an_earlier_version": _golden_runs,
}
