"""Golden comparisons: what whence answers for a fixed set of pairs, to hold a change of structure
to the same bytes.

    python benchmarks/golden.py record FOLDER     capture the pairs and keep every answer
    python benchmarks/golden.py check FOLDER      compare the same pairs with the code as it is now

`record` runs before a change, `check` after it, on one machine: captured numbers depend on the
kernels that a processor picks. `check` opens the runs that `record` captured, so it also shows that
old runs open and compare to the same bytes. An answer is the text, `summary.json`, the CSV files,
`whence show` of both sides and the help of every command. Times are left out. Exit code 1 when any
byte differs; the new answers are then in FOLDER/now, beside FOLDER/golden.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import whence
from whence import cli
from whence.demo import torch_tiny

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
DUMPS = {
    "msprobe": ("msprobe/reference", "msprobe/eps"),
    "torch_xray": (
        "torch_xray/gpu_globalrank-0_localrank-0.h5",
        "torch_xray/xpu_globalrank-0_localrank-0.h5",
    ),
    "polygraphy": ("polygraphy/ref.json", "polygraphy/bad.json"),
    "llama_cpp": ("llama_cpp/reference.log", "llama_cpp/norm_eps.log"),
    "llama_cpp_clean": ("llama_cpp/reference.log", "llama_cpp/clean.log"),
    "hf_debugger": ("hf_debugger/ref_files", "hf_debugger/bad_files"),
    "hf_debugger_text": ("hf_debugger/ref_text", "hf_debugger/bad_text"),
    "sglang": ("sglang/dumper_ref", "sglang/dumper_bad"),
    "onnx": ("onnx/test_data_set_0", "onnx/test_data_set_1"),
    "ge_against_fx": ("ascend/fx_new", "ascend/ge"),
    "fx_against_fx": ("ascend/fx_new", "ascend/fx_old"),
    "paddle_log": ("paddle/pir_run_a.log", "paddle/pir_run_a.log"),
    "paddle_programs": ("paddle/tiny_legacy.pdmodel", "paddle/tiny_legacy_bug.pdmodel"),
}
"""Samples of other tools' dumps, reference and target, below tests/data."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "bf16_two_dumps": ("--no-replay",),
    "eps_strict": ("--strict",),
    "msprobe": ("--view", "msprobe"),
    "torch_xray": ("--view", "torch_xray"),
    "ge_against_fx": ("--view", "msit"),
}
DIGITS = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
"""A float, kept to nine digits. Later ones depend on how numpy happens to align an array."""
WIDTH = 240
"""Columns of a line that is shown."""
TIMES = re.compile(r'("timing":\s*)\{[^}]*\}|("(?:\w+_s|seconds)":\s*)[\d.e-]+|\b\d+(?:\.\d+)? s\b')


def _tiny(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return torch_tiny.TinyLM(40, width=64, hidden=96, layers=3).eval().to(dtype)


class _Conv(nn.Module):
    """A stem, a residual block and a head, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(
        self, image: torch.Tensor
    ) -> torch.Tensor:  # (batch, 3, height, width) -> (batch, 5)
        hidden = torch.relu(self.norm(self.stem(image)))
        return self.head((hidden + torch.relu(self.conv(hidden))).mean((2, 3)))


def _language(change: Callable[[Any], object] | None = None, **how: Any) -> Callable[[Path], None]:
    def capture(path: Path) -> None:
        model = _tiny(how.get("dtype", torch.float32))
        if change is not None:
            change(model)
        ids = torch.arange(24).reshape(2, 12) % 40
        with torch.no_grad(), whence.capture(model, path, level=how.get("level", "modules")):
            model(ids)

    return capture


def _images(weight: float = 1.0) -> Callable[[Path], None]:
    def capture(path: Path) -> None:
        torch.manual_seed(0)
        model = _Conv().eval()
        with torch.no_grad():
            model.conv.weight.mul_(weight)
            with whence.capture(model, path):
                for step in range(3):
                    torch.manual_seed(step + 1)
                    model(torch.randn(2, 3, 8, 8))

    return capture


def _training(scale: float = 1.0, level: str = "modules") -> Callable[[Path], None]:
    def capture(path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with whence.capture(model, path, level=level):
            for step in range(2):
                torch.manual_seed(step + 1)
                optimizer.zero_grad()
                (model(torch.randn(6, 12)).square().mean() * scale).backward()
                optimizer.step()

    return capture


def _arrays(offset: float = 0.0) -> Callable[[Path], None]:
    def record(path: Path) -> None:
        torch.manual_seed(0)
        model = _Conv().eval()
        image = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            stem = model.stem(image) + offset
            whence.record(path, {"image": image, "stem": stem, "out": model(image)})

    return record


def _set(name: str, attribute: str, value: object) -> Callable[[Any], object]:
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def _scaled(name: str, factor: float) -> Callable[[Any], object]:
    return lambda model: model.get_submodule(name).weight.data.mul_(factor)


PAIRS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "same": (_language(), _language()),
    "bf16": (_language(), _language(dtype=torch.bfloat16)),
    "bf16_two_dumps": (_language(), _language(dtype=torch.bfloat16)),
    "eps": (_language(), _language(_set("layers.1.input_norm", "eps", 1e-2))),
    "eps_strict": (
        _language(),
        _language(_set("layers.1.input_norm", "eps", 1e-2), dtype=torch.bfloat16),
    ),
    "weight": (_language(), _language(_scaled("layers.2.mlp.down_proj", 1.02))),
    "operators": (
        _language(level="op"),
        _language(_set("layers.0.input_norm", "eps", 1e-2), level="op"),
    ),
    "images": (_images(), _images()),
    "images_weight": (_images(), _images(1.03)),
    "training": (_training(), _training()),
    "training_scale": (_training(), _training(1.1)),
    "training_operators": (_training(level="op"), _training(1.1, level="op")),
    "arrays": (_arrays(), _arrays()),
    "arrays_offset": (_arrays(), _arrays(0.1)),
}
"""Pairs captured here: what captures the reference, what captures the target."""


def _run(*words: str) -> str:
    """What a command line prints, and its exit code."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = cli.execute(list(words))
    return f"{text.getvalue()}exit code {code}\n"


def _answers(name: str, reference: Path, target: Path, place: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of everything whence says about one pair."""
    output = place / "comparison"
    shutil.rmtree(output, ignore_errors=True)
    words = ("compare", str(reference), str(target), "-o", str(output), *OPTIONS.get(name, ()))
    yield f"{name}.txt", _run(*words)
    for file in sorted(output.rglob("*")):
        if file.suffix in (".json", ".csv"):
            yield f"{name}.{file.name}", file.read_text(encoding="utf-8")
    yield f"{name}.reference.txt", _run("show", str(reference))
    yield f"{name}.target.txt", _run("show", str(target))


def _helps(command: click.Command, words: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    yield f"help.{'.'.join(words) or 'whence'}.txt", _run(*words, "--help")
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _helps(child, (*words, name))


def _all(folder: Path) -> Iterator[tuple[str, str]]:
    yield from _helps(cli.group)
    for name, (reference, target) in DUMPS.items():
        yield from _answers(name, DATA / reference, DATA / target, folder)
    for name in PAIRS:
        yield from _answers(
            name, folder / "runs" / name / "ref", folder / "runs" / name / "tgt", folder
        )


def _plain(text: str) -> str:
    """The text without times, without the place of the checkout, floats at nine digits."""
    text = text.replace(str(DATA), "tests/data")
    text = DIGITS.sub(lambda match: f"{float(match.group()):.9g}", text)
    if text.startswith("{"):  # JSON in one line: a line a value, so that a difference can be read
        text = text.replace(",", ",\n")
    return TIMES.sub(lambda match: f"{match.group(1) or match.group(2) or ''}<time>", text)


def write(folder: Path, place: Path) -> None:
    """Every answer as a file below `place`."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, text in _all(folder):
        (place / name.replace("/", "_")).write_text(_plain(text), encoding="utf-8")


def record(folder: Path) -> None:
    """Capture the pairs, and keep what whence says now as golden."""
    for name, sides in PAIRS.items():
        for side, capture in zip(("ref", "tgt"), sides, strict=True):
            path = folder / "runs" / name / side
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            capture(path)
    write(folder, folder / "golden")


def differences(golden: Path, now: Path) -> list[str]:
    """Unified differences, a file each; a file that only one side has counts."""
    names = {path.name for place in (golden, now) for path in place.iterdir()}
    texts = []
    for name in sorted(names):
        before, after = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (golden / name, now / name)
        )
        lines = list(difflib.unified_diff(before, after, f"golden/{name}", f"now/{name}", n=1))
        if lines:
            texts.append("\n".join(line[:WIDTH] for line in lines[:12]))
    return texts


def check(folder: Path) -> int:
    """0 when every answer is what it was."""
    write(folder, folder / "now")
    texts = differences(folder / "golden", folder / "now")
    count = len(list((folder / "golden").iterdir()))
    print("\n".join(texts) or f"{count} answers, byte for byte as before")
    return bool(texts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "check"):
        sys.exit(__doc__)
    chosen = Path(sys.argv[2]).resolve()
    if sys.argv[1] == "record":
        record(chosen)
    else:
        sys.exit(check(chosen))
