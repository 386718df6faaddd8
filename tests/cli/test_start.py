"""What starting costs, counted: modules that a command imports, and passes of the garbage collector
while it does.
"""

import gc
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from whence import store
from whence.lazy_names import importing
from whence.records import Call, Ref, RunInfo, Statistics

PROGRAM = """
import sys
from whence.cli import _execute
_execute(sys.argv[1:])
print("MODULES", *sys.modules)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    data = np.arange(6, dtype=np.float32).view(np.uint8)
    figures = Statistics(6, 0.0, 5.0, 2.5, 1.7, 7.4, 0, 0, 1)
    for name in ("a", "b"):
        with store.Writer(store.create(folder / name, RunInfo())) as writer:
            digest = xxhash.xxh3_128_digest(data)
            record = writer.record("float32", (2, 3), data, digest, figures, None)
            writer.call(Call(0, "", "model", 0, 0, refs=(Ref("output.0", record),)))
    return folder


def imported(folder, *words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    answer, _, modules = done.stdout.rpartition("MODULES ")
    assert answer
    return set(modules.split())


@pytest.mark.parametrize(
    ("words", "most"), [(("show", "a"), 80), (("compare", "a", "b"), 125)], ids=["show", "equal"]
)
def test_a_command_imports_what_it_needs(runs, words, most):
    modules = imported(runs, *words)
    assert not modules & {"torch", "scipy", "yaml", "html", "asyncio"}
    assert sum(name.startswith("whence") for name in modules) <= most


def test_results_of_other_verbs_are_not_imported(runs):
    assert not any(name.startswith("whence.results") for name in imported(runs, "show", "a"))


def test_nothing_is_collected_while_modules_are_imported():
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_program_without_a_collector_keeps_none():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
