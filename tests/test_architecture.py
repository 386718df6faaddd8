"""What holds for every file of the package and of the tests."""

import ast
from collections import Counter
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "whence"
HEAVY = {
    "torch", "paddle", "onnx", "onnxruntime", "jax", "h5py", "transformers", "ray", "pyarrow", "jinja2", "plotly", "matplotlib", "pandas",
    "polars",
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def modules():
    return [p for p in SRC.rglob("*.py") if p.name != "__init__.py" or p.parent != SRC]


def test_frameworks_are_imported_only_inside_functions():
    wrong = []
    for path in modules():
        tree = ast.parse(path.read_text())
        for node in tree.body:
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            bad = {n.split(".")[0] for n in names} & HEAVY
            if bad and not (path.name.startswith("torch") or room_of(path) == "replay"):
                wrong.append(f"{path.relative_to(SRC)}: {bad}")
    assert wrong == []


def test_no_two_test_files_have_one_name():
    """pytest would collect one of them only."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
