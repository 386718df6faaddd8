"""The thin thread: six hand-made records through plan, measure, judge and locate, without torch."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from handmade import bfloat16, net, record
from whence import api
from whence.records import Call, MemoryRun, Ref
from whence.report.answer import answer


def plant(name, f):
    return lambda n, value: f(value) if n == name else value


def test_a_run_against_itself_is_the_same():
    result = api.compare(net(), net())
    assert result.status == "same"
    assert result.counts == {"identical": 3}
    assert result.coverage.share == 1.0
    assert result.first_difference is None
    assert "bitwise identical" in answer(result)


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_rounding_is_not_a_fault(dtype):
    result = api.compare(net(), net(dtype))
    assert result.status == "same", answer(result)
    assert result.findings == ()
    assert result.evidence == "two dumps"


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_an_operator_that_adds_an_error_is_named(dtype):
    result = api.compare(net(), net(dtype, change=plant("h", lambda h: h * 1.2)))
    assert result.status == "different"
    assert result.findings[0].name == "fc1"
    assert result.findings[0].evidence == "two dumps"
    assert [f.name for f in result.findings] == ["fc1"]


def test_the_last_operator_is_named():
    result = api.compare(net(), net(change=plant("y", lambda y: y + 0.5)))
    assert [f.name for f in result.findings] == ["fc2"]
    assert result.findings[0].worst_index is not None


def test_one_changed_weight_is_a_parameter_finding():
    def change(w):
        w = w.copy()
        w[3, 5] += 0.25
        return w

    result = api.compare(net(), net(change=plant("w2", change)))
    finding = result.findings[0]
    assert (result.status, finding.name, finding.cause, finding.confidence) == (
        "different",
        "fc2",
        "parameter",
        "certain",
    )
    assert "[3, 5]" in finding.sentence
    assert "1 of 256" in finding.sentence


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda w: w * 1.01, "scaled by 1.01"),
        (lambda w: -w, "sign flipped"),
        (lambda w: w * 0, "all zero"),
        (lambda w: w[::-1], "back to front along axis 0"),
    ],
)
def test_what_happened_to_a_weight_is_said(how, words):
    assert words in api.compare(net(), net(change=plant("w1", how))).findings[0].sentence


def test_differing_inputs_are_the_headline_and_prove_nothing():
    def change(ids):
        ids = ids.copy()
        ids[3] = 9
        return ids

    result = api.compare(net(), net(change=plant("ids", change)))
    assert result.status == "undecided"
    assert result.inputs_differ == ("Net step 0: 0 at [3]: 3 against 9 (1 of 5 differ)",)
    assert "INPUTS DIFFER" in answer(result)


def test_statistics_alone_see_a_gross_fault_and_say_what_they_rest_on():
    clean = api.compare(net(keep=False), net(bfloat16, keep=False))
    assert (clean.status, clean.evidence) == ("same", "statistics")
    assert "could not have seen" in answer(clean)
    broken = api.compare(net(keep=False), net(keep=False, change=plant("h", lambda h: h * 3)))
    assert broken.findings[0].name == "fc1"


def test_nothing_in_common_is_undecided():
    other = net(root="Other")
    backward = [msgspec.structs.replace(c, phase="backward") for c in other.calls]
    result = api.compare(net(), MemoryRun(backward, other.records, other._arrays))
    assert result.status == "undecided"
    assert result.unmatched == 6


def test_low_coverage_is_undecided_and_names_both_numbers():
    result = api.compare(net(), net(drop=("fc1",)))
    assert result.status == "undecided"
    assert "2 of 3" in result.headline
    assert api.compare(net(), net(drop=("fc1",)), min_coverage=0.5).status == "same"


def test_a_shape_mismatch_is_structural():
    result = api.compare(net(), net(change=plant("y", lambda y: y[:, :4])))
    assert result.findings[0].verdict == "structural"
    assert "shape (5, 8) against (5, 4)" in result.findings[0].sentence


def test_nan_only_in_the_target_is_found_where_it_is_born():
    def change(h):
        h = h.copy()
        h[0, 0] = np.nan
        return h

    result = api.compare(net(), net(change=plant("h", change)))
    assert [f.name for f in result.findings] == ["fc1"]


def test_a_comparison_survives_json(tmp_path):
    result = api.compare(net(), net(bfloat16), output=tmp_path / "cmp")
    assert api.load_comparison(tmp_path / "cmp").counts == result.counts
    assert (tmp_path / "cmp" / "summary.json").exists()


def in_a_new_process(code, before=""):
    """What code prints that compares runs made by hand. before: what runs before the imports."""
    start = (
        f"import sys; sys.path.insert(0, 'tests')\n{before}\n"
        "from handmade import net, bfloat16\nfrom whence import api\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True,
        text=True,
        cwd=str(__import__("pathlib").Path(__file__).parents[2]),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_not_imported_where_nothing_can_be_replayed():
    code = "print(api.compare(net(), net(bfloat16)).status, 'torch' in sys.modules)"
    assert in_a_new_process(code).split() == ["same", "False"]


def test_no_torch_is_loaded():
    code = "print(api.compare(net(), net(bfloat16)).status)"
    assert in_a_new_process(code, before="sys.modules['torch'] = None") == "same\n"


def test_calls_that_were_given_nothing_in_common_are_no_structural_fault():
    """Two programs that share a name: outputs of other shapes prove nothing."""

    def program(root, slot, shape):
        arrays = {0: np.ones(shape, np.float32), 1: np.ones((*shape, 2), np.float32)}
        refs = (Ref(slot, 0), Ref("output.0", 1))
        calls = [
            Call(0, "", root, 0, 0, op_type=root, refs=refs),
            Call(1, "attn", root, 0, 1, op_type="Attention", parent=0, leaf=True, refs=refs),
        ]
        return MemoryRun(calls, [record(i, a) for i, a in arrays.items()], arrays)

    result = api.compare(program("A", "input.x", (2, 3)), program("A", "input.mask.y", (5,)))
    assert (result.status, result.findings) == ("undecided", ())


def trained(*, added_up=False, left_is=1.0, reread=1.0):
    """fc1 makes a gradient, which `AccumulateGrad` leaves and an optimiser's step reads.

    added_up: of several ranks: what is left is a tensor of its own, off by rounding as what it is
    made of is. left_is: it is that many times what it is made of. reread: what the step reads is
    that many times what was left.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    h, y = x * np.float32(0.5), x * np.float32(0.25)
    arrays = {0: x, 1: h, 2: y}
    left = taken = 1
    if added_up:
        off = rng.choice([-1, 1], x.shape) * 8e-7
        arrays[0], arrays[1] = (a * (1 + off).astype(np.float32) for a in (x, h))
        arrays[3] = (h * (1 + off * 1.01) * left_is).astype(np.float32)
        left = taken = 3
    if reread != 1.0:
        arrays[4], taken = arrays[left] * np.float32(reread), 4
    calls = [
        Call(0, "", "Net", 0, 0, op_type="Net", refs=(Ref("input.0", 0), Ref("output.0", 1))),
        _child(1, 0, "fc1", Ref("input.0", 0), Ref("output.0", 1)),
        _child(2, 0, "left", Ref("input.0", 1), Ref("output.0", left)),
        Call(3, "", "Step", 0, 3, op_type="Step", refs=(Ref("output.0", 2),)),
        _child(4, 3, "taken", Ref("input.0", taken), Ref("output.0", 2), root="Step"),
    ]
    return MemoryRun(calls, [record(i, a) for i, a in sorted(arrays.items())], arrays)


def _child(number, parent, name, *refs, root="Net"):
    return Call(
        number, name, root, 0, number, op_type=name, parent=parent, number="1", leaf=True, refs=refs
    )


def test_a_tensor_that_a_call_made_anew_is_judged_there_and_not_where_it_is_read():
    target = trained(added_up=True)
    result = api.compare(trained(), target)
    assert not [f for f in result.findings if f.root == "Step"], answer(result)
    wrong = api.compare(trained(), trained(added_up=True, reread=1.01))
    assert [f for f in wrong.findings if f.root == "Step"], answer(wrong)
    assert api.compare(trained(), trained(added_up=True, left_is=1.01)).status == "different"
