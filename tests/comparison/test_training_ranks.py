"""Trainings of one process against the same on two ranks: clean ones are `same`, and what ranks do
to gradients that they should not is named.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
import whence
from whence.align.dims import parse
from whence.align.ranks.child_numbers import merged
from whence.comparison.verdicts.ranks import sum_in_words
from whence.errors import UsageError
from whence.store import open_run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: of one process, and of two ranks in every layout."""
    folder = tmp_path_factory.mktemp("trained")
    program = Path(__file__).with_name("trained_ranks.py")
    source = str(Path(whence.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [warm.TORCH, program, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "criterion", "fsdp", "tp", "pp"])
def test_a_training_on_ranks_is_the_same_as_on_one(runs, layout):
    result = whence.compare(runs / "one", runs / layout)
    assert (str(result.status), result.findings) == ("same", ())


@pytest.mark.slow
def test_one_tensor_that_is_two_gradients_lies_on_the_ranks_as_each_of_them(runs):
    """A rank has its row of one and a summand of the other."""
    result = whence.compare(runs / "one_placed", runs / "placed")
    assert (str(result.status), result.findings) == ("same", ())


@pytest.mark.slow
def test_the_schedule_of_a_pipeline_is_the_same_as_one_rank(runs):
    result = whence.compare(runs / "one_in_micro_batches", runs / "scheduled")
    assert (str(result.status), result.findings) == ("same", ())
    assert any("4 times the reference's" in note for note in result.notes)


@pytest.mark.slow
def test_gradients_that_a_schedule_does_not_divide_are_a_fault_of_the_loss(runs):
    result = whence.compare(runs / "one_in_micro_batches", runs / "not_scaled")
    assert result.findings[0].name == "Net/loss"
    assert "div" in result.findings[0].sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["task", "scaled_task"])
def test_a_loss_that_is_called_from_outside_its_container_is_one_of_each_rank(runs, kind):
    result = whence.compare(runs / f"one_{kind}", runs / kind)
    assert (str(result.status), result.findings) == ("same", ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("unsynced_criterion", "not reduced over the ranks: it is that of rank 0 alone"),
        ("unsynced", "not reduced over the ranks: it is that of rank 0 alone"),
        ("summed", "the sum over ranks in the place of the mean"),
    ],
)
def test_what_ranks_do_to_gradients_is_named(runs, fault, words):
    first = whence.compare(runs / "one", runs / fault).findings[0]
    assert first.name == "Net/gradients"
    assert words in first.sentence


@pytest.mark.slow
def test_a_rank_against_itself_of_another_layout(runs):
    assert str(whence.compare(runs / "ddp", runs / "fsdp").status) == "same"


@pytest.mark.slow
def test_gradients_of_sharded_parameters_say_where_they_lie(runs):
    calls = [c for c in open_run(str(runs / "fsdp")).calls if c.op == "sum of weight.grad"]
    assert {c.scope for c in calls} >= {"head", "layers.0.up", "layers.1.down"}
    assert all(c.placements["output.grad"].places == ("shard 0",) for c in calls)


@pytest.mark.slow
def test_a_loss_that_is_a_root_of_its_own_is_one_of_each_rank(tmp_path):
    program = Path(__file__).with_name("trained_ranks.py")
    for words in ("program", "program-on-ranks"):
        command = [sys.executable, "-m", "whence", "run", "-o", tmp_path / words, "--"]
        command += [sys.executable, program, words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    result = whence.compare(tmp_path / "program", tmp_path / "program-on-ranks")
    assert (str(result.status), result.findings) == ("same", ())


def test_a_share_is_read_and_shown():
    expression = parse("cat(*ranks, axis=0) / 2")
    assert str(expression) == "cat(*ranks, axis=0) / 2"
    halves = [torch.full((1, 2), 3.0).numpy(), torch.full((1, 2), 5.0).numpy()]
    assert expression.apply({"ranks": halves}).tolist() == [[1.5, 1.5], [2.5, 2.5]]
    assert str(parse("(a + b) / 2")) == "(a + b) / 2"
    with pytest.raises(UsageError, match="a number from 1 on"):
        parse("x / 0")


def test_calls_that_only_some_ranks_make_get_places_between_those_that_all_make():
    assert merged([["a", "0", "1", "z"], ["a", "2", "3", "z"]]) == ["a", "0", "1", "2", "3", "z"]
    assert merged([["0"], ["1", "z"]]) == ["0", "1", "z"]


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([2.0, 2.0], "the sum over ranks in the place of the mean"),
        ([0.5, 0.5], "the mean over ranks is taken twice"),
        ([0.0, 2.0], "not reduced over the ranks: it is that of rank 1 alone"),
        ([2.0, 2.0, 0.0, 0.0], "reduced over another group: it is the mean of ranks 0, 1 alone"),
    ],
)
def test_what_should_be_a_mean_is_told_in_words(factors, words):
    assert sum_in_words(factors, None, of_mean=True).startswith(words)
    assert not sum_in_words(factors, None).startswith(words)
