"""Words for calls and faults that are changed on purpose."""

import pytest

from whence.errors import UsageError
from whence.instrument.options import make
from whence.instrument.patch_points import (
    FAULTS,
    Fault,
    Point,
    check_points,
    outputs_of,
    parse_fault,
    parse_point,
)
from whence.instrument.torch import faults
from whence.records import Call, Ref


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("layers.3.mlp", Point("", "layers.3.mlp", None, None, "")),
        ("layers.3.mlp@2", Point("", "layers.3.mlp", 2, None, "")),
        ("Net#1/layers.*@2.1:output.logits", Point("Net#1", "layers.*", 2, 1, "output.logits")),
    ],
)
def test_points(text, point):
    assert parse_point(text) == point


@pytest.mark.parametrize("text", ["", "a@x", "a@1.", "a:input.0", "a/b/c", "@1", "a:param.weight"])
def test_what_is_no_point(text):
    with pytest.raises(UsageError, match="only outputs can be replaced"):
        parse_point(text)


def test_which_calls_fit():
    point = parse_point("Net/layers.*.mlp@1")
    assert point.fits("Net", "layers.3.mlp", 1, 7)
    assert not point.fits("Net", "layers.3.mlp", 0, 0)
    assert not point.fits("Other", "layers.3.mlp", 1, 0)
    assert not point.fits("Net", "layers.3.mlp.up", 1, 0)
    assert parse_point("Net").fits("Net", "", 0, 0)
    assert parse_point("a@0.1").fits("Net", "a", 0, 1)
    assert not parse_point("a@0.1").fits("Net", "a", 0, 0)


def test_faults():
    assert parse_fault("scale@layers.3.mlp=1.02") == Fault("scale", "", "layers.3.mlp", 1.02)
    assert parse_fault("eps@Net/norm") == Fault("eps", "Net", "norm", None)
    assert set(faults.DEFAULTS) == set(FAULTS)
    for text in ("scale", "sclae@a", "scale@a=b", "scale@a=1e", "scale@"):
        with pytest.raises(UsageError, match="kinds: scale, weight"):
            parse_fault(text)


def call(scope, *slots, step=0):
    return Call(0, scope, "Net", step, 0, refs=tuple(Ref(s, i) for s, i in slots))


def test_state_is_no_output():
    assert outputs_of(
        call("a", ("output.0", 1), ("output.cache.0", 2), ("mutated.cache.0", 2))
    ) == ("output.0",)


def test_a_point_of_no_call_is_told_with_the_nearest():
    calls = [call("layers.3.mlp", ("output.0", 1)), call("", ("output.0", 2)), call("drop")]
    check_points(["layers.3.mlp", "Net", "layers.*@0:output.0"], calls, "REF")
    with pytest.raises(
        UsageError, match=r"no output of a call layers\.3\.mlq; nearest: layers\.3\.mlp"
    ):
        check_points(["layers.3.mlq"], calls, "REF")
    with pytest.raises(UsageError, match=r"layers\.3\.mlp at step 4 \(the module is there"):
        check_points(["layers.3.mlp@4"], calls, "REF")
    with pytest.raises(UsageError, match=r"has no output\.1; it has output\.0"):
        check_points(["layers.3.mlp:output.1"], calls, "REF")
    with pytest.raises(UsageError, match="no output of a call drop"):
        check_points(["drop"], calls, "REF")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"patch": "a"}, "one needs the other"),
        ({"patch_from": "runs/ref"}, "one needs the other"),
        ({"patch": "a:b", "patch_from": "runs/ref"}, "is not"),
        ({"inject": "nothing"}, "kinds:"),
    ],
)
def test_options(given, said):
    with pytest.raises(UsageError, match=said):
        make(**given)


def test_the_run_to_patch_from_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = make(patch=["a", "b@1"], patch_from="runs/ref", inject="scale@a")
    assert chosen.patch == ("a", "b@1")
    assert chosen.patch_from == str(tmp_path / "runs" / "ref")
