"""Prints the layers of whence as the imports in its code make them, lowest last.

python docs/layers.py             the table
python docs/layers.py --write     into CONTRIBUTING.md, between its markers
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "whence"
MARKS = "<!-- layers -->", "<!-- end of layers -->"
LATE = {"display", "results"}
"""Packages that find what lies above them by name, inside methods only."""


def packages() -> dict[str, list[Path]]:
    """The files of every folder and module right below the package."""
    found: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def imported(name: str) -> set[str]:
    """The packages that a package imports, inside functions and for types too."""
    everything = packages()
    names: set[str] = set()
    for path in everything[name]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                full = [alias.name for alias in node.names]
            else:
                continue
            names |= {f.split(".")[1] for f in full if f.startswith("whence.")}
    names &= everything.keys() - {name}
    return names - {"report"} if name in LATE else names


@cache
def height(name: str) -> int:
    """How many layers lie below a package."""
    return 1 + max(map(height, imported(name)), default=-1)


def subject(name: str) -> str:
    """The first sentence of a package's docstring."""
    path = SOURCE / name / "__init__.py"
    path = path if path.is_file() else SOURCE / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def table() -> str:
    """A row for every layer, highest first: its packages, and the subject of each."""
    layers: dict[int, list[str]] = {}
    for name in packages():
        layers.setdefault(height(name), []).append(name)
    rows = ["| layer | package | subject |", "|---|---|---|"]
    for number in sorted(layers, reverse=True):
        for name in sorted(layers[number]):
            rows.append(f"| {number} | `{name}` | {subject(name)} |")  # noqa: PERF401
    return "\n".join(rows)


def main() -> None:
    """Print the table, or write it."""
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    path = ROOT / "CONTRIBUTING.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
