"""The table of allowed arrows between rooms (DESIGN section 2). A new arrow is a decision made here."""

import ast
from collections import Counter
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "whence"
NOUNS = {
    "errors",
    "dtypes",
    "records",
    "results",
    "_plugins",
    "_kernels",
    "segments",
    "cards",
    "pages",
    "display",
    "configs",
    "caches",
    "frameworks",
}
ROOMS = {
    "arrays": set(),
    "capture": {"arrays"},
    "store": set(),
    "readers": set(),
    "writers": {"arrays"},
    "align": set(),
    "metrics": set(),
    "judge": {"metrics"},
    "locate": set(),
    "replay": {"arrays"},
    "report": set(),
    "engine": set(),
    "api": {"arrays", "capture", "store", "readers", "writers", "align", "metrics", "judge", "locate", "replay", "report", "engine"},
    "cli": {"api", "report", "demo"},
    # other tools' names are users of the api
    "compat": {"api"},
    # what tests of users import, and the pytest plugin
    "testing": {"api", "report"},
    # nouns import each other downwards
    "errors": set(),
    "_kernels": {"caches"},
    "caches": set(),
    "segments": set(),
    "configs": set(),
    "dtypes": {"errors"},
    "frameworks": {"errors"},
    "records": {"dtypes", "errors", "display"},
    "results": {"records", "dtypes", "errors", "display"},
    "cards": {"records"},
    "pages": {"results"},
    # in methods only: a result shows itself with the words of the report
    "display": {"report"},
    "_plugins": {"errors"},
    # the demo is a user of the api, reached from the command line
    "demo": {"api"},
}
HEAVY = {
    "torch", "paddle", "onnx", "onnxruntime", "jax", "h5py", "transformers", "ray", "pyarrow", "jinja2", "plotly", "matplotlib", "pandas",
    "polars",
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def modules():
    return [p for p in SRC.rglob("*.py") if p.name != "__init__.py" or p.parent != SRC]


def test_every_room_has_a_place_in_the_table():
    assert {room_of(p) for p in modules()} - {"__main__"} <= set(ROOMS)


def test_arrows():
    wrong = []
    for path in modules():
        room = room_of(path)
        if room == "__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{a.name}" if node.module == "whence" else node.module for a in node.names]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] != "whence" or len(parts) < 2:
                    continue
                other = parts[1]
                if other in ("__version__", room) or other in ROOMS[room]:
                    continue
                if other in NOUNS and room not in NOUNS:
                    continue
                wrong.append(f"{path.relative_to(SRC)}: {room} -> {other}")
    assert wrong == []


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
