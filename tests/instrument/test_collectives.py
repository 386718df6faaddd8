"""What processes send to each other is recorded, in every way that torch sends, and unchanged."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import warm
import whence
from whence.records import CollectiveKind as Kind

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which two ranks send in every way."""
    folder = tmp_path_factory.mktemp("sent") / "run"
    program = Path(__file__).with_name("sending.py")
    source = str(Path(whence.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [warm.TORCH, program, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return whence.open_run(folder)


def test_every_way_to_send_is_recorded_on_every_rank(run):
    for rank in (0, 1):
        own = [c for c in run.collectives if c.rank == rank]
        kinds = Counter(c.kind for c in own)
        assert kinds[Kind.ALL_REDUCE] == 4  # two of the program, a functional one, DDP's
        assert kinds[Kind.REDUCE_SCATTER] == kinds[Kind.ALL_TO_ALL] == kinds[Kind.BARRIER] == 1
        assert kinds[Kind.SEND] == kinds[Kind.RECEIVE] == 1
        assert kinds[Kind.ALL_GATHER] >= 1
        assert kinds[Kind.BROADCAST] >= 2  # that of the program, and DDP's
        numbers = [c.number for c in own if not c.kind.is_message]
        assert numbers == list(range(len(numbers)))


def test_a_collective_says_what_is_sent_by_whom(run):
    own = [c for c in run.collectives if c.rank == 1]
    first, second, _ = (c for c in own if c.kind == Kind.ALL_REDUCE and c.given == ((2, 4),))
    assert (first.op, first.dtype, first.nbytes, first.ranks) == ("sum", "float32", 32, (0, 1))
    assert (second.op, first.waits, second.waits) == ("max", True, False)
    assert "sending.py" in first.source
    assert any(c.by == "DDP" for c in own if c.kind == Kind.BROADCAST)
    assert any(c.phase == "backward" for c in own if c.kind == Kind.ALL_REDUCE)
    assert {c.peer for c in own if c.kind == Kind.SEND} == {0}


def test_ranks_of_such_a_run_agree(run):
    checks = {check.kind: check.verdict for check in whence.ranks(run.path).checks}
    assert checks["collectives"] == "fine"
