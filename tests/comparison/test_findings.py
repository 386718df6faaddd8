"""Guilt along the data flow, on calls made by hand."""

from whence import align
from whence.comparison.verdicts.findings import findings, order_and_taint, remarks
from whence.comparison.verdicts.status import Gaps, decide
from whence.records import Call, Ref, regions
from whence.results import Coverage, Finding, Plan, Undecided, Verdict


def chain(n=4, *, scopes=None, steps=1):
    """root( c0 -> c1 -> ... ), every child reads what the one before wrote."""
    calls = []
    record = 0
    for step in range(steps):
        root = len(calls)
        first = record
        children = []
        for i in range(n):
            scope = scopes[i] if scopes else f"c{i}"
            children.append(
                Call(
                    root + 1 + i,
                    scope,
                    "M",
                    step,
                    root + 1 + i,
                    op_type="Linear",
                    parent=root,
                    leaf=True,
                    refs=(Ref("input.0", record), Ref("output.0", record + 1)),
                )
            )
            record += 1
        calls.append(
            Call(
                root,
                "",
                "M",
                step,
                root,
                op_type="M",
                refs=(Ref("input.0", first), Ref("output.0", record)),
            )
        )
        calls += children
        record += 1
    return calls


def found(calls, verdicts):
    judged = order_and_taint(calls, list(regions(calls)), verdicts)
    return findings(judged, calls, Plan(()), align.starred)


def introduced(evidence="replay", score=9.0, confidence="certain", stretch=-1, cause=""):
    return Verdict(0, "introduced", stretch, evidence, confidence, score, cause)


def test_the_verdict_of_a_container_as_a_whole_is_heard():
    (finding,) = found(chain(), {(0, -1): introduced("two dumps", confidence="likely")})
    assert finding.op_type == "M"


def test_the_first_is_named_and_its_consequences_are_not():
    calls = chain()
    verdicts = {
        (2, -1): introduced("two dumps", 3.0, "likely"),
        (3, -1): introduced("two dumps", 2.0, "likely"),
    }
    assert [f.name for f in found(calls, verdicts)] == ["c1"]


def test_a_later_one_that_replay_convicts_on_its_own_inputs_is_named_second():
    calls = chain(scopes=["a", "b", "c", "d"])
    verdicts = {(4, -1): introduced(), (2, -1): introduced()}
    assert [f.name for f in found(calls, verdicts)] == ["b", "d"]


def test_siblings_are_one_finding():
    calls = chain(scopes=[f"layers.{i}.norm" for i in range(4)])
    result = found(calls, {(i, -1): introduced() for i in range(1, 5)})
    assert [(f.name, f.also) for f in result] == [
        ("layers.0.norm", ("layers.1.norm", "layers.2.norm", "layers.3.norm"))
    ]


def test_modules_of_one_type_with_one_change_of_code_are_one_finding():
    """An eps that every norm was given is one fault, whatever the norms are called."""
    calls = chain(scopes=["stem", "layers.0.norm1", "layers.0.norm2", "final"])
    eps = introduced(cause="semantic").replace(reason="eps is 1e-05 in the reference, 0.01 in ..")
    result = found(calls, {(i, -1): eps for i in range(1, 5)})
    assert [(f.name, f.also) for f in result] == [
        ("stem", ("layers.0.norm1", "layers.0.norm2", "final"))
    ]
    other = eps.replace(reason="eps is 1e-05 in the reference, 0.1 in ..")
    unknown = eps.replace(reason="")
    kernel = eps.replace(cause="kernel")
    verdicts = {(1, -1): eps, (2, -1): other, (3, -1): unknown, (4, -1): kernel}
    assert [f.name for f in found(calls, verdicts)] == [c.scope for c in calls[1:]]


def test_from_two_dumps_the_largest_growth_is_the_answer():
    # Two branches from one input: neither depends on the other.
    calls = [
        Call(0, "", "M", 0, 0, refs=(Ref("input.0", 0), Ref("output.0", 1), Ref("output.1", 2))),
        Call(
            1,
            "a",
            "M",
            0,
            1,
            op_type="A",
            parent=0,
            leaf=True,
            refs=(Ref("input.0", 0), Ref("output.0", 1)),
        ),
        Call(
            2,
            "b",
            "M",
            0,
            2,
            op_type="B",
            parent=0,
            leaf=True,
            refs=(Ref("input.0", 0), Ref("output.0", 2)),
        ),
    ]
    verdicts = {
        (1, -1): introduced("two dumps", 2.0, "likely"),
        (2, -1): introduced("two dumps", 30.0, "likely"),
    }
    assert [f.name for f in found(calls, verdicts)] == ["b", "a"]


def test_the_next_step_depends_on_the_outputs_of_the_one_before():
    calls = chain(2, steps=2)
    verdicts = {
        (1, -1): introduced("two dumps", 3.0, "likely"),
        (5, -1): introduced("two dumps", 3.0, "likely"),
    }
    assert [(f.name, f.step) for f in found(calls, verdicts)] == [("c0", 0)]


def test_a_stretch_is_named_by_its_container_and_its_neighbours():
    calls = [
        Call(0, "", "M", 0, 0, refs=(Ref("input.0", 0), Ref("output.0", 4))),
        Call(
            1,
            "attn",
            "M",
            0,
            1,
            op_type="A",
            parent=0,
            leaf=True,
            refs=(Ref("input.0", 0), Ref("output.0", 1)),
        ),
        Call(
            2,
            "mlp",
            "M",
            0,
            2,
            op_type="B",
            parent=0,
            leaf=True,
            refs=(Ref("input.0", 2), Ref("output.0", 3)),
        ),
    ]
    result = found(calls, {(0, 1): introduced("two dumps", 3.0, "likely", stretch=1)})
    assert result[0].name == "M"
    assert result[0].sentence.startswith("between attn and mlp")


def coverage(**changes):
    base = {
        "calls": 10,
        "paired": 10,
        "measured": 10,
        "replayed": 0,
        "replayable": 0,
        "root_outputs_measured": True,
    }
    return Coverage(**{**base, **changes})


def finding(confidence):
    return Finding("a", "Linear", "", "introduced", confidence, 0, 0, "replay")


def test_status_table():
    assert decide([], [], coverage(), Gaps(), inputs_differ=False)[0] == "same"
    assert decide([finding("likely")], [], coverage(), Gaps(), inputs_differ=True)[0] == "different"
    assert (
        decide([finding("suspect")], [], coverage(), Gaps(), inputs_differ=False)[0] == "undecided"
    )
    assert (
        decide([finding("suspect")], [], coverage(), Gaps(), inputs_differ=False, strict=True)[0]
        == "different"
    )
    assert decide([], [], coverage(paired=0), Gaps(), inputs_differ=False)[0] == "undecided"
    assert decide([], [], coverage(), Gaps(), inputs_differ=True)[0] == "undecided"
    assert (
        decide([], [], coverage(root_outputs_measured=False), Gaps(), inputs_differ=False)[0]
        == "undecided"
    )
    assert decide([], [], coverage(measured=8), Gaps(), inputs_differ=False)[0] == "undecided"
    assert (
        decide([], [], coverage(measured=8), Gaps(), inputs_differ=False, min_coverage=0.7)[0]
        == "same"
    )
    precision = Verdict(0, "precision")
    assert decide([], [precision], coverage(), Gaps(), inputs_differ=False)[0] == "same"
    assert (
        decide([], [precision], coverage(), Gaps(), inputs_differ=False, strict=True)[0]
        == "different"
    )
    assert (
        decide(
            [],
            [Verdict(0, "undetermined", numbers={"e_out": 0.1})],
            coverage(),
            Gaps(),
            inputs_differ=False,
        )[0]
        == "undecided"
    )


def test_an_open_answer_names_the_tensor_and_what_is_missing():
    def why(verdicts=(), gaps=None, findings=(), inputs_differ=False, **changes):
        gaps = gaps or Gaps(
            (4, 2),
            Undecided("fc1", "Linear", "output.0", why="cut"),
            Undecided("net", "Net", "output.0", why="shape"),
            about=lambda pair: Undecided(f"call {pair}", "Linear"),
        )
        status, text, about = decide(
            findings, verdicts, coverage(**changes), gaps, inputs_differ=inputs_differ
        )
        assert status == "undecided"
        asked.append(about)
        return text

    asked = []

    assert why(paired=0) == "no call could be paired (4 against 2)"
    assert asked.pop() is None
    assert "the inputs of the model differ" in why(inputs_differ=True)
    assert why(root_outputs_measured=False) == (
        "not every output of the model could be measured: net output.0 (shape)"
    )
    assert asked.pop().place == "net output.0"
    assert why(measured=8) == (
        "only 8 of 10 calls could be measured (80%, --min-coverage 90%); the first that could not: "
        "fc1 output.0 (cut)"
    )
    assert why(findings=[finding("suspect")]).startswith("a is beyond its limit for noise")
    unknown = Verdict(3, "undetermined", numbers={"e_out": 0.1}, sentence="differs")
    assert why([unknown]) == "call 3 could not be judged: differs"
    assert why([unknown, Verdict(5, "undetermined", numbers={"e_out": None})]) == (
        "2 regions could not be judged; the first is call 3: differs"
    )
    assert (asked[-1].name, asked[-1].why, asked[-1].others, asked[-1].pair) == (
        "call 3",
        "differs",
        1,
        3,
    )


def noise():
    return Verdict(0, "noise", evidence="replay", score=0.1)


def remarked(calls, verdicts):
    judged = order_and_taint(calls, list(regions(calls)), verdicts)
    return remarks(judged, calls, findings(judged, calls, Plan(()), align.starred), align.starred)


def test_precision_losses_of_siblings_are_one_remark_with_their_names():
    calls = chain(3, scopes=["layers.0.proj", "layers.1.proj", "head"])
    lossy = Verdict(0, "precision", evidence="replay", score=3.0, sentence="rounded to 8 bits")
    (remark,) = remarked(calls, {(1, -1): lossy, (2, -1): lossy, (3, -1): noise()})
    assert (remark.kind, remark.name, remark.also) == (
        "precision",
        "layers.0.proj",
        ("layers.1.proj",),
    )
    assert remark.sentence == "rounded to 8 bits"


def test_a_pass_close_to_its_limit_is_a_remark_and_counts_with_strict_only():
    calls = chain(2)
    close = Verdict(0, "noise", evidence="replay", confidence="suspect", score=0.9)
    (remark,) = remarked(calls, {(1, -1): close, (2, -1): noise()})
    assert (remark.kind, remark.name) == ("suspect", "c0")
    assert decide([], [close], coverage(), Gaps(), inputs_differ=False)[0] == "same"
    assert (
        decide([], [close], coverage(), Gaps(), inputs_differ=False, strict=True)[0] == "different"
    )


def test_a_finding_is_no_remark_beside():
    calls = chain(2)
    guilty = introduced(confidence="suspect")
    assert remarked(calls, {(1, -1): guilty, (2, -1): noise()}) == []
