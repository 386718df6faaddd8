"""Who may import whom: packages are layers, and inside the larger ones so are their folders. A new
arrow is a decision made here.
"""

import ast
import functools
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from whence.instrument import FRAMEWORKS
from whence.records.marks import Mark, NoProgram
from whence.records.slots import SlotKind
from whence.results import GUILTY, VerdictKind

SRC = Path(__file__).parent.parent / "src" / "whence"

# Leaves and nouns are open to every package above them.
OPEN = {
    "_version",
    "cache_folders",
    "config_files",
    "disk",
    "display",
    "dtypes",
    "errors",
    "extras",
    "lazy_names",
    "records",
    "regular_files",
    "results",
}
LAYERS = {
    "errors": set(),
    "_version": set(),
    "_python": {"errors"},
    "disk": set(),
    "_kernels": set(),
    "cache_folders": {"errors"},
    "config_files": {"errors"},
    "regular_files": set(),
    "extras": {"errors"},
    "lazy_names": set(),
    "display": {"errors"},
    "dtypes": {"errors", "extras"},
    "records": {"display", "dtypes", "errors"},
    "results": {"records", "display", "dtypes", "errors", "lazy_names"},
    "frameworks": {"_kernels"},
    "store": set(),
    "engines": set(),
    "readers": {"store", "frameworks"},
    "writers": {"frameworks"},
    "metrics": {"_kernels"},
    "align": {"frameworks"},
    "judge": {"metrics"},
    "replay": {"frameworks"},
    "report": set(),
    "instrument": {"frameworks"},
    "comparison": {
        "_kernels",
        "align",
        "engines",
        "metrics",
        "judge",
        "replay",
        "readers",
        "store",
        "frameworks",
    },
    "workflows": {
        "comparison",
        "engines",
        "instrument",
        "align",
        "judge",
        "metrics",
        "replay",
        "readers",
        "store",
        "writers",
        "report",
        "frameworks",
        "_kernels",
    },
    "api": {"workflows", "readers"},
    "cli": {"api", "report", "demo"},
    "compat": {"__init__", "api"},
    "testing": {"api", "report"},
    "demo": {"__init__", "api"},
    "__main__": {"cli"},
    "__init__": {"_python", "api"},
}
# Lowest first. What stands in one group does not import each other.
FOLDERS = {
    "align": [
        {"dims", "module_names", "call_sites", "environment"},
        {"derived_run"},
        {"plan_editor"},
        {"calls"},
        {"values"},
        {"quantised"},
        {"layout"},
        {"batches", "ranks", "tensors"},
        {"user_map"},
        {"apply_map"},
        {"pipeline"},
    ],
    "comparison": [
        {"onnx_files", "prepare", "programs", "ranks"},
        {"replays", "compared_tensors"},
        {"options"},
        {"tasks"},
        {"left_out"},
        {"paired_runs"},
        {"inputs", "views"},
        {"verdicts"},
        {"context"},
        {"answer"},
        {"own_tensors"},
        {"call_columns"},
        {"equal_runs", "kept_calls"},
        {"differing_part"},
        {"pipeline"},
    ],
    "instrument": [
        {"wording", "patch_points", "process_group", "rungs", "arguments", "option_values"},
        {"step_choice"},
        {"options"},
        {"selection"},
        {"session"},
        {"guard", "framework"},
        {"call_frames"},
        {"engines"},
        set(FRAMEWORKS),
        {"labels", "launch"},
    ],
    "instrument/torch": [
        {
            "modes",
            "sources",
            "device_kernel",
            "settings",
            "faults",
            "dtensor_placement",
            "before_steps",
            "list_operators",
            "module_code",
        },
        {"device_figures"},
        {"staging_memory"},
        {"compiled_boundary", "tensor_content", "caller_code", "operand_table"},
        {
            "cast_points",
            "module_info",
            "overload",
            "module_calls",
            "staged_tensors",
            "operator_listener",
            "pool_rows",
        },
        {"random_draws"},
        {"program_writer"},
        {"split_recording"},
        {"operator_call", "tensor_identity", "program_recorder"},
        {"frames", "module_registry", "regions", "sampling"},
        {
            "call_tensors",
            "program_cache",
            "operator_program",
        },
        {"training", "collectives"},
        {"gated_steps"},
        {"modules"},
        {"operators", "logits", "compiled"},
        {"forced_tokens"},
        {"interventions"},
    ],
    "readers": [
        {"encodings"},
        {"source"},
        {"unread"},
        {"assembly"},
        {"ascend", "paddle"},
        {"formats"},
        {"folder"},
        {"figures"},
        {"opening"},
    ],
    "workflows": [
        {"upload", "latest", "notebook_progress", "raw_shapes"},
        {"saved_at_url"},
        {"saved"},
        {
            "capture",
            "query",
            "viewers",
            "faults",
            "convert",
            "maintenance",
            "trigger",
            "operator_tests",
            "tokens",
            "ranges",
            "rounding",
        },
        {"reopen", "rerun", "feeding"},
        {"page", "repro", "repeat"},
        {"compare"},
        {
            "watch",
            "probe",
            "locate",
            "doctor",
            "diverge",
            "export_check",
            "two_models",
            "msit_report",
            "trace",
            "weights",
            "compare_labels",
            "upgrade",
            "pack",
            "commits",
            "check_operators",
            "serving",
            "accept",
            "operator_fuzz",
        },
        {"ladder", "recipe", "layers"},
    ],
}
# What shows itself in a notebook finds the renderer by name, in methods only.
LATE = {
    ("display", "report.notebook"),
    ("display", "report.prompt"),
    ("results.comparison", "report.frames"),
    ("results.comparison", "report.arrow"),
}
# Words, slots and notes that code asks for stand in one file each; elsewhere their members or
# functions are used. Files and packages that still have bare text; the lists may only shrink.
BARE = {
    "words": (("results.verdict", "results.generation", "results.workflows"), set()),
    "slots": (
        ("records.slots",),
        {"replay.export.support.check", "replay.export.support.tensors"},
    ),
    "notes": (("records.marks",), set()),
}
HEAVY = {
    *FRAMEWORKS,
    "onnx",
    "onnxruntime",
    "jax",
    "h5py",
    "transformers",
    "ray",
    "pyarrow",
    "jinja2",
    "plotly",
    "matplotlib",
    "pandas",
    "polars",
}


def files():
    """{dotted name below the package: file}; a package is the name of its folder."""
    named = {}
    for path in SRC.rglob("*.py"):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        named[name.removesuffix(".__init__")] = path
    return named


class Read(NamedTuple):
    """What the tests look at in a file, from one walk over its syntax tree."""

    top: list[ast.stmt]
    imports: list[ast.Import | ast.ImportFrom]
    calls: list[ast.Call]
    texts: list[str]  # without docstrings


@functools.cache
def read():
    return {name: _read(path) for name, path in files().items()}


def _read(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reading, documented = Read(tree.body, [], [], []), set()
    for node in ast.walk(tree):  # a statement comes before what it consists of
        if isinstance(node, ast.Import | ast.ImportFrom):
            reading.imports.append(node)
        elif isinstance(node, ast.Call):
            reading.calls.append(node)
        elif isinstance(node, ast.Expr):
            documented.add(id(node.value))
        elif isinstance(node, ast.Constant) and id(node) not in documented:
            reading.texts.append(str(node.value))
    return reading


@functools.cache
def imports():
    """(file, file that it imports) by dotted names, imports inside functions and for types
    counted.
    """
    named, arrows = files(), set()
    for name in named:
        for node in read()[name].imports:
            imported = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias}" for alias in imported if not node.level]
            for full in imported:
                if full.split(".")[0] != "whence":
                    continue
                inner = full.removeprefix("whence").removeprefix(".")
                while inner and inner not in named:
                    inner = inner.rpartition(".")[0]
                target = inner or "__init__"
                if target != name and (name, target) not in LATE:
                    arrows.add((name, target))
    return sorted(arrows)


def package(name):
    return name.split(".")[0]


def test_every_package_is_a_layer():
    assert {package(name) for name in files()} == set(LAYERS)


def test_layers_import_downwards():
    wrong = {
        f"{name} -> {target}"
        for name, target in imports()
        if package(target) != package(name)
        and package(target) not in LAYERS[package(name)]
        and not (package(target) in OPEN and package(name) not in OPEN)
    }
    assert sorted(wrong) == []


def test_folders_of_a_package_import_downwards():
    wrong = set()
    for folder, groups in FOLDERS.items():
        prefix = folder.replace("/", ".") + "."
        level = {name: number for number, group in enumerate(groups) for name in group}
        for name, target in imports():
            if not (name.startswith(prefix) and target.startswith(prefix)):
                continue
            above, below = (n.removeprefix(prefix).split(".")[0] for n in (name, target))
            if above != below and level[below] >= level[above]:
                wrong.add(f"{name} -> {target}")
    assert sorted(wrong) == []


def test_no_circle_between_files():
    edges = {}
    for name, target in imports():
        edges.setdefault(name, set()).add(target)
    # A file that no circle goes through can be taken away once nothing is left that it imports.
    left = set(files())
    while free := {name for name in left if not edges.get(name, set()) & left}:
        left -= free
    while unused := {name for name in left if not any(name in edges.get(n, ()) for n in left)}:
        left -= unused
    assert sorted(left) == []


def test_frameworks_are_imported_only_inside_functions():
    wrong = []
    for name, reading in read().items():
        if "torch" in name or package(name) == "replay":
            continue
        for node in reading.top:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if heavy := {n.split(".")[0] for n in names} & HEAVY:
                wrong.append(f"{name}: {heavy}")
    assert wrong == []


WRITES = {
    "writers": "into a folder that `convert` moves to its place when it is whole",
    "workflows.probe.probe": "questions for a process of its own, in a folder that is deleted",
    "workflows.upgrade": "what the environments of a comparison of releases need, made again",
    "workflows.capture.collect_labels": "labels that other processes left",
    "instrument": "copies of graphs for engines, and what torch.compile prints",
    "replay.export.support": "goes into the tests that are written, without whence",
    "replay.export.pytest_files": "into a folder that `disk.fresh_folder` moves to its place",
    "cli._help": "on the terminal",
    "cli.completion": "adds a line to a file of the shell",
    "disk": "does it",
    "readers.encodings.hdf5_worker": "answers on its own standard output",
}
"""Who writes files by other means than `disk`, and why that leaves no half file."""
WRITING = {"write_text", "write_bytes", "tofile", "pwrite", "fsync", "ftruncate"}


def test_files_are_written_whole_by_one_module():
    wrong = set()
    for name, reading in read().items():
        for call in reading.calls:
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
            opens = method == "open" and any(str(m)[:1] in ("w", "a", "x") for m in modes)
            if method in WRITING or opens:
                wrong.add(name)
    wrong = {n for n in wrong if not any(f"{n}.".startswith(f"{w}.") for w in WRITES)}
    assert sorted(wrong) == []


def _bare(kind, reading):
    """Does the file have bare text of this kind?"""
    if kind == "words":
        return any(text in ASKED for text in reading.texts)
    if kind == "notes":
        return any(text.startswith(NOTES) or text in ENDS for text in reading.texts)
    return any(_asks_for_a_slot(call) for call in reading.calls)


def _asks_for_a_slot(call):
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method not in ("startswith", "removeprefix") or not call.args:
        return False
    kinds = set(SlotKind)
    return any(
        isinstance(text, ast.Constant) and str(text.value).rstrip(".") in kinds
        for text in getattr(call.args[0], "elts", call.args[:1])
    )


ASKED = {*GUILTY, "two dumps", "three-way", "amplified", "nondeterministic", "undetermined"} - {
    VerdictKind.STRUCTURAL  # a cause is called so too
}
"""Words of verdicts that nothing else is called."""
NOTES = tuple(kind.value for kind in Mark if len(kind) > 10 and kind is not Mark.HIDDEN)
ENDS = {Mark.HIDDEN.value, NoProgram.RANDOM.value}


@pytest.mark.parametrize("kind", BARE)
def test_words_slots_and_notes_are_asked_for_in_one_way(kind):
    own, still = BARE[kind]
    wrong = {name for name, reading in read().items() if name not in own and _bare(kind, reading)}
    excused = {entry: [n for n in wrong if f"{n}.".startswith(f"{entry}.")] for entry in still}
    assert sorted(wrong.difference(*excused.values())) == []
    assert [entry for entry, names in excused.items() if not names] == []


LINES = 1200


def test_no_file_is_too_long_to_find_a_thought_in():
    """A file is as long as its subject; classes and functions have no limit but their complexity."""
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in files().items()}
    assert [name for name, count in lines.items() if count > LINES] == []


def test_no_two_test_files_have_one_name():
    """pytest would collect one of them only."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def _loaded(code):
    """The modules that a Python which runs this code has imported in the end."""
    code = f"import sys; sys.argv = ['whence']\n{code}\nprint('', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_list_of_verbs_loads_no_stage():
    """A command starts with what it needs: the list of verbs loads none of them."""
    loaded = {m.split(".")[1] for m in _loaded("import whence.api") if m.startswith("whence.")}
    assert not loaded & {"align", "judge", "metrics", "comparison", "replay", "readers"}


def test_each_name_that_is_listed_is_there():
    """What is imported for type checkers is what a program gets."""
    for module in (importlib.import_module(f"whence.{name}") for name in ("api", "align")):
        assert all(getattr(module, name) is not None for name in module.__all__)
        # A submodule would stand in the place of a listed name once it is imported.
        inside = {file.name for file in pkgutil.iter_modules(getattr(module, "__path__", []))}
        assert not inside & {*module.__all__}
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            module.no_such_name


def test_equal_runs_and_show_load_no_stage():
    """Runs that say the same are answered, and a run is shown, without what judges and replays."""
    runs = Path(__file__).parent / "data" / "golden" / "0.1.0" / "modules"
    command = "from whence.cli import execute; execute({!r})"
    heavy = {"yaml", "numpy.ma", "importlib.metadata", "whence.judge", "whence.align.pipeline"}
    heavy |= {"whence.comparison.pipeline", "whence.comparison.replays.replayer", "torch"}
    heavy |= {"whence.readers.folder", "whence.workflows.probe", "whence.store.upload"}
    for words in (["show", str(runs)], ["compare", "--no-replay", str(runs), str(runs)]):
        loaded = _loaded(command.format(words))
        assert "whence.store.reader" in loaded
        assert not loaded & heavy
