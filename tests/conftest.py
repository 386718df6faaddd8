"""Shared by all tests: the folder of hand-made runs is importable, and nothing outside the test's own folder is written."""

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A test run in the background inherits an ignored Ctrl-C, and so would the programs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine may be busy: how long an example takes says nothing.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """The folder of samples and benchmark models beside the checkout; tests that use it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared samples are not beside this checkout")
    return SHARED
