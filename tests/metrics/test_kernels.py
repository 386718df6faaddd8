"""How the compiled code is kept: announced once, found again, never in a folder that others may
write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from whence import _kernels, cache_folders

CODE = "from whence import _kernels; print(_kernels.compiled()); print(_kernels.cache_dir())"


def run(code, **environment):
    about = {
        k: v
        for k, v in os.environ.items()
        if k not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "HOME", "TMPDIR")
    } | environment
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=about,
        capture_output=True,
        text=True,
        check=True,
    )


def test_importing_does_not_import_numba():
    run(
        "import sys; from whence import _kernels; _kernels.compiled(); assert 'numba' not in "
        "sys.modules",
        HOME="/nonexistent",
    )


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = _kernels.cache_dir()
    assert folder.parent == tmp_path / "cache" / "whence" and folder.name.startswith(
        _kernels.__version__
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(_kernels, "_folder", _kernels.cache_dir)  # as before the first kernel
    assert not _kernels.compiled()
    for entry in _kernels.ENTRIES:
        _kernels._marker(folder, entry).touch()
    assert _kernels.compiled() and _kernels.compiled("describe")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_folder_others_may_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folders.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    first = _kernels.cache_dir()
    first.chmod(0o777)
    second = _kernels.cache_dir()
    assert second.is_relative_to(tmp_path / "tmp")
    second.chmod(0o770)
    monkeypatch.setattr(_kernels, "_folder", _kernels.cache_dir)
    assert _kernels.cache_dir() is None and not _kernels.compiled()


def test_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    done = run(CODE, HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path / "tmp"))
    assert done.stdout.splitlines()[0] == "False" and Path(
        done.stdout.splitlines()[1]
    ).is_relative_to(tmp_path / "tmp")


def test_compilation_is_announced_and_kept(tmp_path, monkeypatch, capsys):
    """With the compiler replaced by nothing: what is said, and what is written."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_kernels, "_loaded", set())
    monkeypatch.setattr(_kernels, "_marked", [])
    monkeypatch.setattr(_kernels, "_folder", _kernels.cache_dir)
    monkeypatch.setattr(_kernels, "_compile_to_disk", lambda *_: None)
    for entry in _kernels.ENTRIES:
        monkeypatch.setattr(_kernels, entry, lambda *_: None)
    _kernels.load()
    said = capsys.readouterr().err
    assert said.startswith("compiling kernels, once per machine (about ") and said.count("\n") == 1
    assert _kernels.compiled() and _kernels.loaded()
    monkeypatch.setattr(_kernels, "_loaded", set())
    lines = []
    assert _kernels.warmup(report=lines.append) < 5
    assert capsys.readouterr().err == "" and lines == [
        f"kernels were ready in 0.0 s, kept in {_kernels.cache_dir()}"
    ]


def test_numba_settings_are_left_as_they_were():
    run(
        "import numba; before = numba.config.CACHE_DIR\n"
        "from whence import _kernels; _kernels.load('describe', report=str)\n"
        "assert numba.config.CACHE_DIR == before",
        **({"HOME": os.environ["HOME"]} if "HOME" in os.environ else {}),
    )


FIGURES = """
import numpy as np
from whence import metrics
random = np.random.default_rng(0)
codes = random.integers(0, 256, (16, 33), np.uint8)
pairs = [(codes, np.roll(codes, 1)), (codes * np.float32(0.3), codes * np.float32(0.31))]
print(metrics.measure_many(pairs, tier="full", threads=1, kernels=True))
"""


@pytest.mark.slow
def test_the_process_that_compiles_gives_the_figures_of_all_others(tmp_path):
    """It would not if it called what it compiled: copies of inner functions round otherwise."""
    runs = [run(FIGURES, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert "compiling" in runs[0].stderr and "compiling" not in runs[1].stderr
    assert runs[0].stdout == runs[1].stdout


COUNTED = """
import subprocess, sys
from whence import _kernels
original = subprocess.run
def counted(*command, **options):
    if "compile_here" in str(command):
        print("compiles", file=sys.stderr)
    return original(*command, **options)
subprocess.run = counted
_kernels.load("join_units")
"""


def test_processes_that_want_a_kernel_at_once_compile_it_once(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(run, COUNTED, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(3)]
    said = [process.result().stderr for process in started]
    assert sum(text.count("compiles\n") for text in said) == 1
    assert "compiles" not in run(COUNTED, NUMBA_CACHE_DIR=str(tmp_path)).stderr
    # Nor does another environment of this machine.
    shutil.copytree(Path(_kernels.__file__).parent, tmp_path / "other" / "whence")
    (tmp_path / "other" / "whence" / "_kernels.py").touch()
    code = f"{COUNTED}\nassert {str(tmp_path)!r} in _kernels.__file__\nprint(_kernels.join_units.stats)"
    done = run(code, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=str(tmp_path / "other"))
    assert "compiles" not in done.stderr
    assert "cache_misses=Counter()" in done.stdout


def test_a_cache_folder_that_changes_while_a_process_runs(tmp_path):
    """Numba looks where it looked first. A kernel that is only in the new folder would be compiled
    here, and its figures would differ in the last digit from those of other processes.
    """
    run(
        "from whence import _kernels; _kernels.load('describe_many', 'join_units')",
        NUMBA_CACHE_DIR=str(tmp_path / "first"),
    )
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    code = (
        "import os, shutil; from whence import _kernels; _kernels.load('join_units')\n"
        f"os.environ['NUMBA_CACHE_DIR'] = {str(tmp_path / 'second')!r}; {{removed}}\n"
        "_kernels.load('describe_many')\n"
        "print(sum(_kernels.describe_many.stats.cache_misses.values()))"
    )
    for removed in ("", f"shutil.rmtree({str(tmp_path / 'first')!r})"):
        done = run(code.format(removed=removed), NUMBA_CACHE_DIR=str(tmp_path / "first"))
        assert done.stdout == "0\n"


def test_a_process_that_cannot_start_another_compiles_itself(tmp_path):
    code = (
        "import sys; from whence import _kernels; sys.executable = '/nonexistent'; "
        "_kernels.load('join_units'); print(_kernels.loaded('join_units'))"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "True\n"
