"""A captured command is held against the same command without a capture, and the run says how they
stand.
"""

import msgspec
import pytest

from whence.comparison.answer.runs import not_there
from whence.comparison.options import CompareOptions
from whence.instrument.options import make
from whence.instrument.torch.compiled import what_returned
from whence.instrument.torch.compiled.what_returned import Execution, Returned
from whence.records import Lack, Note, RunInfo
from whence.records.observed import SETTING, SWITCHED, Effect, Observed, observed
from whence.workflows.capture.bare import Bare, _are_equal, _first_difference

CACHES = "the caches of whole graphs"


def returned(*digests, rank=0, switched=(), problem=""):
    executions = tuple(Execution(i, False, d) for i, d in enumerate(digests))
    graphs = tuple(f"{i}/0 (model.py:{i + 1})" for i in range(len(digests)))
    return Returned(rank, graphs, executions, len(digests), "".join(digests), switched, problem)


class Measured(Bare):
    """What the command would return, the captured one first; with something off, `off`."""

    def __init__(self, captured, *bare, off=None, options=None, wanted=True):
        self.said = []
        super().__init__(["x"], options or make(), {}, self.said.append, wanted=wanted)
        self._answers, self._with_off, self.tried = list(bare), off, []
        for number, one in enumerate(captured):
            path = self._folder("captured") / f"{number}.json"
            path.write_bytes(msgspec.json.encode(one))

    def _run(self, exit_code, off=()):
        self.tried.append(off)
        return self._with_off if off else self._answers.pop(0)


def test_equal_results_are_no_effect():
    with Measured([returned("a", "b")], [returned("a", "b")]) as bare:
        assert bare._observed(0) == Observed(
            Effect.NONE, "2 results of graphs are bit-equal without a capture"
        )
    assert "--no-bare leaves this out" in bare.said[0]


def test_other_results_that_repeat_are_an_effect_and_what_was_switched_is_named():
    wrong = [returned("a", "x")]
    with Measured(
        [returned("a", "b", switched=("CUDA graphs", CACHES))],
        wrong,
        wrong,
        off=[returned("a", "b")],
    ) as bare:
        seen = bare._observed(0)
    assert seen.effect == Effect.CHANGED
    assert seen.why.startswith("CUDA graphs are off while graphs are captured")
    assert seen.why.endswith("execution 2 of a graph: graph 1/0 (model.py:2), what it returned")
    with Measured([returned("a", "b", switched=(CACHES,))], wrong, wrong, off=wrong) as bare:
        seen = bare._observed(0)
    assert (seen.effect, bare.tried) == (Effect.CHANGED, [(), (), (CACHES,)])
    assert seen.why.startswith("without a capture the command computes something else, first in")


def test_what_does_not_repeat_is_not_measured():
    with Measured([returned("a")], [returned("b")], [returned("c")]) as bare:
        seen = bare._observed(0)
    assert seen.effect == Effect.UNMEASURED
    assert "does not compute the same twice (in execution 1 of a graph: " in seen.why
    assert "--seed N" in seen.why


@pytest.mark.parametrize(
    ("options", "wanted", "why"),
    [
        (make(), False, "left out by --no-bare"),
        (make(inject="scale@fc"), True, "the captured program was changed on purpose"),
    ],
)
def test_what_is_not_asked_for_is_not_run(options, wanted, why):
    with Measured([returned("a")], options=options, wanted=wanted) as bare:
        assert bare._observed(0) == Observed(Effect.UNMEASURED, why)
    assert bare.tried == []


def test_a_process_that_left_nothing_is_not_measured():
    with Measured([]) as bare:
        assert bare._observed(0).effect == Effect.UNMEASURED


def test_several_threads_may_compute_in_any_order_but_no_fewer_times():
    assert _are_equal([returned("a", "b")], [returned("b", "a")])
    assert not _are_equal([returned("a", "b")], [returned("a")])
    assert not _are_equal([returned("a"), returned("a", rank=1)], [returned("a")])
    assert "number of executions of graphs (2 against 1)" in _first_difference(
        [returned("a", "b")], [returned("a")]
    )
    assert "number of processes that compile (1 against 2)" in _first_difference(
        [returned("a")], [returned("a"), returned("a", rank=1)]
    )
    ranks = [returned("a"), returned("b", rank=1)]
    assert "of rank 1" in _first_difference(ranks, [returned("a"), returned("c", rank=1)])


def test_processes_leave_what_they_returned_in_a_folder(tmp_path):
    assert what_returned.asked({}) is None
    variables = what_returned.environment(tmp_path, (CACHES,))
    assert what_returned.asked(variables) == (tmp_path, (CACHES,))
    for number, one in enumerate((returned("b", rank=1), returned("a"))):
        (tmp_path / f"{number}.json").write_bytes(msgspec.json.encode(one))
    assert [r.rank for r in what_returned.read(tmp_path)] == [0, 1]


class Captured:
    ended, calls = "", ()

    def __init__(self, seen=None, *, switched=False, interpreter="/usr/bin/python"):
        settings = {} if seen is None else {SETTING: msgspec.to_builtins(seen)}
        self.info = RunInfo(settings=settings, interpreter=interpreter)
        self.notes = [Note(SWITCHED, f"{CACHES} are off")] if switched else []


@pytest.mark.parametrize("is_target", [True, False])
@pytest.mark.parametrize("effect", [Effect.CHANGED, Effect.UNMEASURED])
def test_no_answer_is_same_where_being_watched_may_have_changed_the_result(effect, is_target):
    runs = [Captured(), Captured(Observed(effect, "why"), switched=True)]
    (lack,) = not_there(*(runs if is_target else reversed(runs)), CompareOptions(partial=True))
    assert lack.side == ("target" if is_target else "reference")
    assert (lack.kind, lack.text, lack.accepted) == (Lack.WATCHED, f"{effect}: why", False)


def test_what_was_measured_as_equal_or_never_switched_stands_in_the_way_of_nothing():
    none = Captured(Observed(Effect.NONE, "2 results"), switched=True)
    in_code = Captured(switched=True, interpreter="")
    options = CompareOptions()
    assert not [*not_there(none, in_code, options), *not_there(Captured(), Captured(), options)]
    assert observed(in_code).effect == Effect.OUT_OF_REACH
    assert observed(Captured(switched=True)).effect == Effect.UNMEASURED
    assert observed(Captured()) is None
    broken = Captured()
    broken.info.settings[SETTING] = {"effect": "other"}
    assert observed(broken).is_doubt
