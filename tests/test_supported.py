"""A Python, a numpy or a torch that is too old is refused at the start, in one sentence."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import whence
from whence import extras
from whence.errors import CaptureError, Unsupported
from whence.instrument.launch import interpreter

SRC = Path(whence.__file__).parent
OLD_PYTHON = "import sys; sys.version_info = (3, 10, 13, 'final', 0); "
OLD_NUMPY = "import numpy; numpy.__version__ = '1.26.4'; "


def ran(code, *words):
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


@pytest.mark.parametrize("file", ["__init__.py", "_python.py", "_version.py", "errors.py"])
def test_old_pythons_can_parse_what_refuses_them(file):
    ast.parse((SRC / file).read_text(), feature_version=(3, 7))


def test_an_old_python_cannot_import_whence():
    done = ran(OLD_PYTHON + "import whence")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("whence.errors.Unsupported: whence needs Python 3.11 or newer, and ")
    assert "is Python 3.10.13: make an environment with a newer one" in last


@pytest.mark.parametrize("name", ["-m", "/some/bin/whence"])
def test_the_command_under_an_old_python_says_so_and_leaves_with_3(name):
    done = ran(f"{OLD_PYTHON}sys.argv[0] = {name!r}; import whence.cli; whence.cli.main()")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert done.stderr.startswith("whence: whence needs Python 3.11 or newer, and ")


def test_an_old_numpy_is_refused_when_a_name_of_whence_is_used():
    done = ran(OLD_NUMPY + "import whence; print('imported'); whence.compare")
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1] == (
        "whence.errors.Unsupported: numpy 1.26.4 is installed, and whence needs numpy 2.0 or "
        "newer: pip install 'numpy>=2.0'"
    )


def test_a_command_with_an_old_numpy_says_so_and_leaves_with_3(tmp_path):
    run = "from whence.cli import main; main(sys.argv[1:])"
    done = ran(f"import sys; {OLD_NUMPY}{run}", "compare", str(tmp_path), str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "whence: numpy 1.26.4 is installed, and whence needs numpy 2.0 or newer: "
        "pip install 'numpy>=2.0'\n"
    )
    assert ran(f"import sys; {OLD_NUMPY}{run}", "--help").returncode == 0


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+git1f", "2.13.0+cpu", "10.0", "built here"])
def test_a_release_that_is_new_enough_passes(version):
    extras.check_release("torch", version)


def test_an_old_torch_is_not_captured_and_no_run_is_left(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    net = torch.nn.Linear(2, 2)
    said = r"torch 2\.5\.1\+cu124 is installed, and whence needs torch 2\.6 or newer: pip install 'torch>=2\.6,<2\.14'"
    with pytest.raises(Unsupported, match=said), whence.capture(net, tmp_path / "run"):
        net(torch.ones(1, 2))
    with pytest.raises(Unsupported, match=said):
        whence.compile(net, tmp_path / "compiled")
    assert list(tmp_path.iterdir()) == []


def test_a_program_with_an_old_torch_runs_on_and_the_command_leaves_with_3(tmp_path):
    pytest.importorskip("torch")
    # What runs once torch is imported and before whence attaches: a torch of another release.
    program = tmp_path / "infer.py"
    program.write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "torch.py").write_text(
        "import importlib.machinery, importlib.util, sys\n"
        "place = [p for p in sys.path if not p.endswith('old')]\n"
        "spec = importlib.machinery.PathFinder.find_spec('torch', place)\n"
        "sys.modules['torch'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.__version__ = '2.5.1'\n"
    )
    words = [sys.executable, "-m", "whence", "run", "-o", str(tmp_path / "run"), "--"]
    program_words = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path / 'old')!r}); exec(open({str(program)!r}).read())",
    ]
    done = subprocess.run([*words, *program_words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "2.0\n"), done.stderr
    assert "torch 2.5.1 is installed, and whence needs torch 2.6 or newer" in done.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('"python": "3.10.13", "error": "whence needs Python 3.11", "versions": {}', "whence needs Python 3.11"),
        ('"python": "3.12.1", "error": "", "whence": "0", "versions": {"numpy": "1.26.4"}', "numpy 1.26.4 is installed"),
    ],
)  # fmt: skip
def test_whence_run_starts_nothing_where_the_program_has_an_old_one(tmp_path, answer, said):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho \'{{"executable": "{python}", {answer}}}\'\n')
    python.chmod(0o755)
    with pytest.raises(CaptureError, match=said) as raised:
        interpreter.check(interpreter.Interpreter(str(python), (), "the command line"), {})
    assert "-m pip install" not in str(raised.value)
