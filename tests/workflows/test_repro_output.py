"""Where the script of a finding may be written."""

import pytest

from whence.errors import OutputExists
from whence.replay.export.script import LIMITS
from whence.workflows.repro import repro

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["repro.py", "repro.safetensors"])
def test_force_replaces_no_file_of_somebody_else(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputExists, match="not of a script that whence wrote"):
        repro._check(tmp_path, force=True)
    (tmp_path / "repro.py").write_text(f'"""A script."""{LIMITS}1')
    repro._check(tmp_path, force=True)
