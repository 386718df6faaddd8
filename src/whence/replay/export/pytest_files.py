"""Writes a run's operators, or its leaf modules, as pytest files that need pytest and torch only.

A test names the call and its arguments; their elements are in one safetensors file next to it;
`export.support`, copied as `operator_support`, does the work. Names and texts of a run are
untrusted: they enter the files as identifiers of letters and digits, as literals by `repr`, and in
comments without line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence import disk, dtypes
from whence.errors import ElementsMissing, OutputExists, UsageError
from whence.frameworks import operator_names, torch_schema
from whence.records import Call, Run
from whence.replay import stepwise
from whence.replay.export import support
from whence.replay.export.pytest_text import comment_text

FACTORIES = ("load", "random", "special")
SUPPORT = "operator_support"
_FROM_WHENCE = re.compile(
    r"^from whence\.(?:replay\.export\.support|replay|frameworks)(\.\w+)? import", re.MULTILINE
)
OPERATOR = re.compile(r"[A-Za-z_]\w*(\.\w+){2}", re.ASCII)
PLAIN_CLASSES = ("", "Parameter", "Buffer")


@dataclass(frozen=True)
class Written:
    """What was written.

    left_out: reason -> names without a test, each once. nbytes: of the elements.
    """

    folder: str
    tests: int
    files: int
    names: int
    nbytes: int
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Folder:
    """Collects tests and elements, then writes them."""

    def __init__(self, run: Run, samples: int) -> None:
        self.run, self.samples = run, samples
        self.tests = 0
        self.left_out: dict[str, dict[str, None]] = {}
        self._texts: dict[str, list[str]] = {}
        self._titles: dict[str, str] = {}
        self._elements: dict[int, str] = {}
        self._by_content: dict[tuple[str, str], str] = {}
        self._stored: dict[str, int] = {}

    def leave_out(self, reason: str, name: str) -> None:
        """Records a name that gets no test, and the reason."""
        self.left_out.setdefault(reason, {})[name] = None

    def add(self, file: str, title: str, text: str, count: int) -> None:
        """Adds a test function that expands to `count` tests to a file of this name."""
        self._titles[file] = title
        self._texts.setdefault(file, []).append(text)
        self.tests += count

    def taken(self, file: str) -> int:
        """Returns the number of functions in a file so far."""
        return len(self._texts.get(file, ()))

    def element(self, record: int) -> str:
        """Returns the name of a record's elements in the data file, "" when they were not kept.
        Equal tensors are stored once.
        """
        if record not in self._elements:
            tensor = self.run.records[record]
            try:
                self.run.array(record)
                content = (tensor.dtype, tensor.hash or f"record {record}")
                self._elements[record] = self._by_content.setdefault(content, f"r{record}")
                self._stored.setdefault(self._elements[record], record)
            except ElementsMissing:
                self._elements[record] = ""
        return self._elements[record]

    def write(self, path: Path, *, factory: str, cpu_init: bool, force: bool) -> Written:
        """Writes everything into a new folder. Raises OutputExists unless the folder may be
        replaced.
        """
        if path.exists():
            if not force:
                raise OutputExists(
                    f"{path} exists; --force replaces tests that were written before"
                )
            is_ours = (path / SUPPORT).exists() or (path / f"{SUPPORT}.py").exists()
            if not is_ours and (not path.is_dir() or any(path.iterdir())):
                raise OutputExists(
                    f"{path} holds something else than tests written by whence; choose another "
                    "folder"
                )
        with disk.fresh_folder(path) as fresh:
            nbytes = self._fill(fresh, factory, cpu_init)
        left_out = {reason: tuple(names) for reason, names in self.left_out.items()}
        functions = sum(map(len, self._texts.values()))
        return Written(str(path), self.tests, len(self._texts), functions, nbytes, left_out)

    def _fill(self, path: Path, factory: str, cpu_init: bool) -> int:
        """Writes every file into a folder; returns the bytes of the elements."""
        for file, texts in self._texts.items():
            imports = ("import pytest\n" if any("pytest." in t for t in texts) else "") + (
                "import torch\n" if _uses_torch(texts) else ""
            )
            head = (
                f'"""{self._titles[file]}"""\n\n{imports}\nfrom {SUPPORT} import tensor\n'.replace(
                    '"""\n\n\n', '"""\n\n'
                )
            )
            (path / f"{file}.py").write_text("\n\n".join([head, *texts]), encoding="utf-8")
        _copy_support(path / SUPPORT)
        versions = ", ".join(
            f"{k} {v}"
            for k, v in self.run.info.versions.items()
            if k in ("torch", "whence", "python")
        )
        (path / "conftest.py").write_text(
            _CONFTEST.format(versions=comment_text(versions), factory=factory, cpu_init=cpu_init),
            encoding="utf-8",
        )
        return self._write_data(path / "data.safetensors")

    def _write_data(self, path: Path) -> int:
        header: dict[str, Any] = {}
        offset = 0
        for name, record in self._stored.items():
            tensor, kind = self.run.records[record], dtypes.named(self.run.records[record].dtype)
            size = tensor.count * kind.itemsize
            shape = [*tensor.shape, 2] if kind.name == "complex128" else list(tensor.shape)
            header[name] = {
                "dtype": kind.safetensors,
                "shape": shape,
                "data_offsets": [offset, offset + size],
            }
            offset += size
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as out:
            out.write(len(head).to_bytes(8, "little") + head)
            for record in self._stored.values():
                out.write(self.run.array(record).tobytes())
        return offset


_CONFTEST = '''"""Tests of operators as a run called them; `{versions}`.

    pytest . --device cuda:0 --seed 42 --detail_compare_path out.csv

Without pytest: `python -m operator_support`, here, with the same options.
Each operator runs on the device, and on the CPU in float64 and in its own dtype; operator_support says how they are compared.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import operator_support as support

DEFAULTS = support.Settings(Path(__file__).parent, factory="{factory}", cpu_init={cpu_init})


def pytest_addoption(parser):
    support.add_options(parser, DEFAULTS)


def pytest_configure(config):
    support.configure(config)


@pytest.fixture
def check(request):
    return support.check_for(request)
'''


def _uses_torch(texts: Sequence[str]) -> bool:
    return any(
        "torch." in line
        for text in texts
        for line in text.splitlines()
        if not line.lstrip().startswith("#")
    )


def spread_over(ids: Sequence[int], count: int) -> list[int]:
    """Returns at most `count` of them: the first, the last, and others evenly between."""
    if len(ids) <= count:
        return list(ids)
    return [ids[round(k * (len(ids) - 1) / max(1, count - 1))] for k in range(count)]


def _copy_support(folder: Path) -> None:
    """Copies the support package, which finds its own files beside it."""
    folder.mkdir()
    shared = [Path(str(m.__file__)) for m in (operator_names, torch_schema, stepwise)]
    for file in (*Path(str(support.__file__)).parent.glob("*.py"), *shared):
        text = _FROM_WHENCE.sub(rf"from {SUPPORT}\1 import", file.read_text(encoding="utf-8"))
        (folder / file.name).write_text(text, encoding="utf-8")


def checked(factory: str, samples: int) -> None:
    """Raises UsageError for an unknown factory, or fewer samples than one."""
    if factory not in FACTORIES:
        raise UsageError(f"factory {factory!r} is none of {', '.join(FACTORIES)}")
    if samples < 1:
        raise UsageError(f"{samples} samples of a signature: at least 1")


def leaves(calls: Sequence[Call]) -> Iterator[Call]:
    """Returns the calls of modules that call no module; operators recorded inside them do not
    count.
    """
    parents = {c.parent for c in calls if c.kind == "module"}
    yield from (c for c in calls if c.kind == "module" and c.id not in parents)
