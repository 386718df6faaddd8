"""Shared by all tests: the folder of hand-made runs is importable, and nothing outside the test's
own folder is written.

What costs time without proving more is settled here: one thread for each worker, a
file's tests on one worker, so that what they share is made once, and what takes long runs only
where WHENCE_TESTS=all asks for it, as .ci/run does.
"""

import compileall
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A test run in the background inherits an ignored Ctrl-C, and so would the programs that the tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ALL = os.environ.get("WHENCE_TESTS") == "all"

# Before anything imports torch. Workers share the processors, and a second thread of each spins
# while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise each process that compiles starts others, to see whether the compiler knows the
# instructions of this processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("CXX", str(Path(__file__).parent / "compiling" / "g++"))

# Where no byte code is to be written, every program that a test starts would compile whence's
# sources again.
if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(Path(__file__).parents[1] / "src" / "whence", quiet=2)

# The machine may be busy: how long an example takes says nothing.
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("all", **BUSY)
settings.register_profile("few", max_examples=25, **BUSY)
settings.load_profile("all" if ALL else "few")

SHARED = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ALL:
        return
    later = pytest.mark.skip(reason="takes long: .ci/run runs it, and so does WHENCE_TESTS=all")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(later)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests go to one worker; those that take longest come early in the alphabet and stay
    there.
    """
    if config.getoption("dist") != "load":
        return None  # somebody asked for another
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture
def shared() -> Path:
    """The folder of samples and benchmark models beside the checkout; tests that use it are skipped
    where it is absent.
    """
    if not SHARED.is_dir():
        pytest.skip("the shared samples are not beside this checkout")
    return SHARED
