"""What either run lacks: never `same`, unless the caller says to do without it."""

import json

import msgspec
import pytest

from handmade import net
from whence import api
from whence.records import Lack, MemoryRun, Missing
from whence.report.answer import answer
from whence.report.ranks import ranks_text
from whence.report.summary import summary
from whence.results.ranks import RankCheck, RankCheckKind, RankReport, RankVerdict
from whence.workflows.repeat.repeat import Repetition


def lacking(*missing, **changes):
    """A run made by hand that lacks something."""
    run = net(**changes)
    run.missing = missing
    return run


CUT = Missing(Lack.CUT, "rank00000-a-1", "rank 0 was killed in step 3; capture again")
UNREAD = Missing(Lack.UNREAD, "taps/a.pt", "taps/a.pt may hold tensors and was not read")
DAMAGED = Missing(Lack.DAMAGED, "b.npy", "b.npy is cut off; copy it again")
FOREIGN = Missing(Lack.FOREIGN, "shard", "the elements are not those that the journal names")


@pytest.mark.parametrize("lacks", [("reference",), ("target",), ("reference", "target")])
def test_a_run_that_is_not_whole_is_the_same_as_none(lacks):
    runs = [lacking(CUT) if side in lacks else net() for side in ("reference", "target")]
    result = api.compare(*runs)
    assert result.status == "undecided"
    assert [one.side for one in result.missing] == list(lacks)
    assert CUT.text in result.headline
    assert all(side in answer(result) for side in lacks)
    assert [one["where"] for one in json.loads(summary(result))["missing"]] == [CUT.where] * len(
        lacks
    )
    accepted = api.compare(*runs, partial=True)
    assert accepted.status == "same"
    assert all(one.accepted for one in accepted.missing)
    assert "in what is there" in answer(accepted)
    assert "leaves out" in answer(accepted)


def test_a_fault_in_what_is_there_stays_a_fault():
    wrong = lacking(CUT, change=lambda n, v: v * 1.5 if n == "h" else v)
    assert api.compare(net(), wrong).status == "different"


@pytest.mark.parametrize(
    ("missing", "options", "accepted"),
    [
        (UNREAD, {"partial": True}, False),
        (UNREAD, {"ignore": ["*.pt"]}, True),
        (UNREAD, {"ignore": ["*.npy"]}, False),
        (DAMAGED, {"ignore": ["b.*"]}, True),
        (DAMAGED, {"partial": True}, True),
        (DAMAGED, {"min_coverage": 0.0}, False),
        (CUT, {"ignore": ["*"]}, False),
        (FOREIGN, {"partial": True, "ignore": ["*"]}, False),
    ],
)
def test_what_is_accepted_is_said_in_so_many_words(missing, options, accepted):
    result = api.compare(net(), lacking(missing), **options)
    assert (result.status == "same") is accepted


def test_a_run_that_cannot_say_it_and_ended_early_lacks_its_end():
    run = net()
    part = MemoryRun(run.calls, run.records, run._arrays, ended="killed in step 3")
    result = api.compare(net(), part)
    assert (result.status, result.missing[0].kind) == ("undecided", Lack.CUT)


def test_no_other_answer_passes_a_run_that_is_not_whole():
    fine = RankCheck(RankCheckKind.REPLICAS, RankVerdict.FINE, "2 tensors agree")
    report = RankReport("run", (0, 1), 1, (), (), (), (fine,))
    assert report.verdict == RankVerdict.FINE
    cut = msgspec.structs.replace(report, ended=CUT.text)
    assert cut.verdict == RankVerdict.UNKNOWN
    assert "CANNOT TELL" in ranks_text(cut) and CUT.text in ranks_text(cut)
    repeated = Repetition([net(), lacking(CUT)]).result()
    assert (repeated.status, repeated.why) == ("undecided", (f"run 2: {CUT.text}",))
