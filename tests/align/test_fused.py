"""One run has fused what the other has apart: members are joined, n against m, both ways; what
nothing faces is held against itself.
"""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

import whence
from whence import cli
from whence.align import align
from whence.align.calls.fused_operators import joined
from whence.readers import Building, ForeignRun, open_run
from whence.readers.figures import with_figures
from whence.records.views import CachedRun

DATA = Path(__file__).parents[1] / "data" / "ascend"


def numbers(k, shape=(4, 4), dtype=np.float32):
    return np.random.default_rng(k).normal(size=shape).astype(dtype)


def run_of(*calls, kind="test"):
    """calls: (scope, inputs, outputs, more). Tensors are numbers of arrays; an array of numbers
    stays as it is.
    """
    building = Building("made", kind)
    records: dict[int, int] = {}

    def record(k):
        if isinstance(k, np.ndarray):
            return building.array(k)
        if k not in records:
            records[k] = building.array(numbers(k))
        return records[k]

    for scope, inputs, outputs, more in calls:
        building.call(
            scope, inputs=[record(k) for k in inputs], outputs=[record(k) for k in outputs], **more
        )
    return building.run()


def pairs(reference, target):
    found = align(reference, target)
    left, right = found.reference.calls, found.target.calls
    return {
        left[p.reference].scope: right[p.target].scope
        for p in found.plan.pairs
        if left[p.reference].scope
    }, found


def test_inputs_of_joined_calls_are_in_the_order_of_their_partner():
    """A fused kernel may take first what its members read last, in another shape."""
    reordered = numbers(2).reshape(2, 8) * np.float32(1 + 1e-6)
    apart = run_of(("turn", [1], [6], {}), ("scores", [2, 6], [7], {}))
    whole = run_of(("fused", [reordered, numbers(1)], [7], {"origins": ("turn", "scores")}))

    def inputs(reference, target):
        measured = (with_figures(ForeignRun(run, "test")) for run in (reference, target))
        found = joined(*measured)
        ((a, b, _),) = found.pairs
        return [
            [run.array(r.record).reshape(-1) for r in run.calls[k].slots("input")]
            for run, k in ((found.reference, a), (found.target, b))
        ]

    for sides in ((apart, whole), (whole, apart)):
        for one, other in zip(*inputs(*sides), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    # both inputs are like the first one: nothing says which is which
    alike = run_of(("turn", [1], [6], {}), ("scores", [numbers(1) + 0, 6], [7], {}))
    kept, _ = inputs(alike, whole)
    assert (kept[0] == numbers(1).reshape(-1)).all()


APART = [("mul", [1, 2], [3], {}), ("cast", [3], [4], {}), ("top", [4], [5], {})]
FUSED = [
    ("MulCast", [1, 2], [4], {"origins": ("mul", "cast")}),
    ("Top", [4], [5], {"origins": ("top",)}),
]


def test_members_are_one_call_with_what_goes_in_and_comes_out():
    found, whole = pairs(run_of(*APART), run_of(*FUSED))
    assert found == {"mul+cast": "MulCast", "top": "Top"}
    (call,) = [c for c in whole.reference.calls if c.scope == "mul+cast"]
    arrays = {r.slot: whole.reference.array(r.record) for r in call.refs}
    assert list(arrays) == ["input.0", "input.1", "output.0"]
    for slot, k in (("input.0", 1), ("input.1", 2), ("output.0", 4)):
        np.testing.assert_array_equal(arrays[slot], numbers(k))
    inner = [c for c in whole.reference.calls if c.parent == call.id]
    assert [c.scope for c in inner] == ["mul", "cast"]  # what lies between stays to be seen
    np.testing.assert_array_equal(
        whole.reference.array(inner[0].slots("output")[0].record), numbers(3)
    )
    assert whole.plan.notes == (
        "mul and cast of the reference are taken together: in the other run, MulCast does it",
    )
    assert all(c.id == i for i, c in enumerate(whole.reference.calls))


def test_the_other_way_round():
    found, whole = pairs(run_of(*FUSED), run_of(*APART))
    assert found == {"MulCast": "mul+cast", "Top": "top"}
    assert not whole.plan.unmatched_reference
    assert not whole.plan.unmatched_target


def test_n_against_m():
    left = run_of(("a", [1], [2], {}), ("b", [2], [3], {}), ("c", [3], [4], {}))
    right = run_of(
        ("X", [1], [9], {"origins": ("a", "b")}), ("Y", [9], [4], {"origins": ("b", "c")})
    )
    assert pairs(left, right)[0] == {"a+b+c": "X+Y"}


def test_several_operators_of_one_node_are_joined():
    left = run_of(("softmax", [1], [4], {}), ("mm", [4], [5], {}))
    right = run_of(
        *(("Op" + str(k), [k], [k + 1], {"origins": ("softmax",)}) for k in (1, 2, 3)),
        ("MatMul", [4], [5], {"origins": ("mm",)}),
    )
    assert pairs(left, right)[0] == {"softmax": "Op1+Op2+Op3", "mm": "MatMul"}


def test_names_that_are_put_together_are_cut_where_the_flow_agrees():
    left = run_of(("Add_1", [1], [2], {}), ("Mul", [2], [3], {}), ("Add", [3], [4], {}))
    right = run_of(("Add_1Mul", [1], [3], {}), ("Add", [3], [4], {}))
    assert pairs(left, right)[0] == {"Add_1+Mul": "Add_1Mul", "Add": "Add"}
    assert pairs(right, left)[0] == {"Add_1Mul": "Add_1+Mul", "Add": "Add"}
    apart = run_of(
        ("Add_1", [1], [2], {}), ("Mul", [7], [3], {}), ("Add", [3], [4], {})
    )  # nothing goes from one to the other
    assert "Add_1+Mul" not in pairs(apart, right)[0]


@pytest.mark.parametrize("texts", ["both", "fused", "unfused", "none"])
def test_a_fused_graph_against_an_unfused_one_whoever_has_texts_beside_it(texts):
    of = {"Add_1": ("add",), "Mul": ("mul",), "Add": ("add_1",), "Add_1Mul": ("add", "mul")}

    def said(name, side):
        return {"origins": of[name]} if texts in ("both", side) else {}

    left = run_of(
        *((n, [k], [k + 1], said(n, "unfused")) for k, n in enumerate(("Add_1", "Mul", "Add")))
    )
    right = run_of(
        ("Add_1Mul", [0], [2], said("Add_1Mul", "fused")), ("Add", [2], [3], said("Add", "fused"))
    )
    assert pairs(left, right)[0] == {"Add_1+Mul": "Add_1Mul", "Add": "Add"}
    assert pairs(right, left)[0] == {"Add_1Mul": "Add_1+Mul", "Add": "Add"}


def test_runs_that_share_their_names_stay_as_they_are():
    left, right = run_of(*APART), run_of(*APART)
    found = joined(left, right)
    assert (found.reference, found.target, found.pairs) == (left, right, ())
    both = run_of(*FUSED), run_of(*FUSED)
    assert pairs(*both)[0] == {"MulCast": "MulCast", "Top": "Top"}


OUTPUT = ("output.0", "output.0")


def test_numbers_among_the_inputs_do_not_shift_the_tensors():
    scalar = np.array(0.5)
    other = numbers(8, (3, 2))
    left = run_of(("add", [scalar, 1, np.array(3), other], [3], {}))
    right = run_of(("Add", [1, other], [3], {"origins": ("add",)}))
    _, whole = pairs(left, right)
    (pair,) = [p for p in whole.plan.pairs if whole.reference.calls[p.reference].scope == "add"]
    assert [(s.reference_slot, s.target_slot) for s in pair.slots] == [
        ("input.1", "input.0"),
        ("input.3", "input.1"),
        ("output.0", "output.0"),
    ]
    assert pair.only_reference == ("input.0", "input.2")
    _, whole = pairs(right, left)
    (pair,) = [p for p in whole.plan.pairs if whole.reference.calls[p.reference].scope == "Add"]
    assert [(s.reference_slot, s.target_slot) for s in pair.slots] == [
        ("input.0", "input.1"),
        ("input.1", "input.3"),
        ("output.0", "output.0"),
    ]


@pytest.mark.parametrize("harmed", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_an_operator_that_only_moves_is_held_against_what_it_was_given(harmed, back):
    moved = numbers(3) * (1.1 if harmed else 1.0)
    left = run_of(("mul", [1, 2], [3], {}), ("top", [3], [5], {}))
    right = run_of(
        ("Mul", [1, 2], [3], {"origins": ("mul",)}),
        ("trans_1", [3], [moved], {"op_type": "TransData"}),
        ("Top", [moved], [5], {"origins": ("top",)}),
    )
    found = whence.compare(*((right, left) if back else (left, right)))
    assert found.unmatched == 0
    if harmed:
        assert (found.status, found.findings[0].name) == ("different", "trans_1")
    else:
        assert found.status == "same", found.headline


# ---- the synthetic dumps: GE graph mode against FX


@pytest.mark.parametrize("age", ["fx_new", "fx_old"])
@pytest.mark.parametrize("back", [False, True])
def test_the_planted_fault_is_named(age, back):
    sides = [DATA / age, DATA / "ge"]
    found = whence.compare(*(sides[::-1] if back else sides))
    assert (found.status, found.unmatched, found.incomparable) == ("different", 0, 0)
    assert [(f.name, f.op_type, f.step) for f in found.findings] == [
        ("MatMul", "MatMulV2", 1) if back else ("mm", "aten.mm.default", 1)
    ]
    assert found.findings[0].worst_index == (3, 5)
    assert abs(found.findings[0].worst_target - found.findings[0].worst_reference) == pytest.approx(
        8, abs=0.01
    )
    assert {r.verdict for r in found.rows if r.step == 0 and r.name != "graph_1"} <= {
        "identical",
        "noise",
    }


def test_rows_are_those_of_the_vendors_report():
    """The pairs of the vendor's own matcher, in its order. It holds a TransData against its own
    input, which is here its partner's.
    """

    def name(path):
        return path.removeprefix("fx_new/").removeprefix("ge/")

    with (DATA / "expected_msit_ge_fx.csv").open() as file:
        report = [r for r in csv.DictReader(file) if "TransData" not in r["my_data_path"]]
    sides = [CachedRun(with_figures(open_run(DATA / side))) for side in ("fx_new", "ge")]
    found = align(*sides)
    rows = []
    for pair in found.plan.pairs:
        one, other = found.reference.calls[pair.reference], found.target.calls[pair.target]
        if pair.rule == "original operators" and other.op_type != "TransData":
            for slot in pair.slots:
                files = [
                    call.files.get(s) or run.records[r].file
                    for call, run, s, r in (
                        (one, found.reference, slot.reference_slot, slot.reference_record),
                        (other, found.target, slot.target_slot, slot.target_record),
                    )
                ]
                rows.append((str(one.step), *files))
    assert rows == [
        (r["token_id"], name(r["golden_data_path"]), name(r["my_data_path"])) for r in report
    ]


def test_clean_dumps_are_the_same(tmp_path):
    for name in ("fx_new", "ge"):
        shutil.copytree(DATA / name, tmp_path / name)
    shutil.rmtree(next((tmp_path / "fx_new").rglob("graph_1")) / "1")
    shutil.rmtree(next((tmp_path / "ge").rglob("graph_1_0")) / "1" / "1")
    for sides in (("fx_new", "ge"), ("ge", "fx_new")):
        found = whence.compare(*(tmp_path / s for s in sides))
        assert (found.status, found.unmatched, found.coverage.measured) == (
            "same",
            0,
            found.coverage.calls,
        )


def test_on_the_command_line(tmp_path, capsys):
    assert (
        cli.execute(
            ["compare", str(DATA / "fx_old"), str(DATA / "ge"), "-o", str(tmp_path / "cmp")]
        )
        == 1
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:3] == ["FAULT", "mm", "aten.mm.default"]
    assert any(
        "mul and _to_copy of the reference are taken together: in the other run, MulCast_9 does it"
        in line
        for line in said
    )


def test_a_fused_graph_against_an_unfused_one(tmp_path):
    """Both GE; the unfused run has no texts beside it, and its operators the names that the fused
    one's is made of.
    """
    run = open_run(DATA / "ge")
    calls, arrays = [], {}
    for call in run.calls:
        if call.leaf and call.step == 0:
            arrays[call.scope] = {r.slot: run.array(r.record) for r in call.refs}
    add, mm, both = (arrays[n] for n in ("Add_2", "MatMul", "MulCast_9"))
    product = (both["input.0"] * both["input.1"]).astype(np.float16)
    calls = [
        ("Add_2", [add["input.0"], add["input.1"]], [add["output.0"]], {}),
        ("MatMul", [mm["input.0"], mm["input.1"]], [mm["output.0"]], {}),
        ("Mul", [both["input.0"], both["input.1"]], [product], {}),
        ("Cast_9", [product], [both["output.0"]], {}),
    ]
    fused = [*calls[:2], ("MulCast_9", [both["input.0"], both["input.1"]], [both["output.0"]], {})]
    found = whence.compare(ForeignRun(run_of(*calls), "test"), ForeignRun(run_of(*fused), "test"))
    assert (found.status, found.unmatched) == ("same", 0)


def test_a_repetition_is_no_fusion():
    left = run_of(("mm", [1], [2], {}), ("mm", [2], [3], {}), ("top", [3], [4], {}))
    right = run_of(("mm", [1], [2], {}), ("top", [2], [4], {"origins": ("top",)}))
    assert {c.scope for c in joined(left, right).reference.calls} == {"", "mm", "top"}
    twice = run_of(*(("MatMul", [k], [k + 1], {"origins": ("mm",)}) for k in (1, 1)))
    assert {c.scope for c in joined(run_of(("mm", [1], [2], {})), twice).target.calls} == {
        "",
        "MatMul",
    }


@pytest.mark.parametrize("first", [0, 1, 2])
def test_steps_that_count_from_another_number(first):
    """Moved where what comes in says so; never where it does not."""

    def steps(base, at):
        return run_of(
            *(
                (n, [base + 10 * t], [base + 10 * t + 1], {"step": t + at})
                for t in range(3)
                for n in ("mm",)
            )
        )

    left, right = (
        with_figures(ForeignRun(run, "test")) for run in (steps(100, 0), steps(100, first))
    )
    found = align(left, right)
    assert [
        n.startswith(f"steps of model of the target are moved by -{first}")
        for n in found.plan.notes
    ] == [True] * bool(first)
    one, other = found.reference, found.target
    inputs = {
        (
            one.calls[p.reference].step,
            bool(np.array_equal(one.array(s.reference_record), other.array(s.target_record))),
        )
        for p in found.plan.pairs
        for s in p.slots
        if s.reference_slot.startswith("input")
    }
    assert inputs == {(t, True) for t in range(3)}


@pytest.mark.parametrize("seen", [100, 7], ids=["rounded", "another"])
def test_a_warm_up_call_is_told_by_what_comes_in_once_rounded(seen):
    """A target in half precision is given the reference's numbers, rounded."""

    def run(*calls, dtype=np.float32):
        arrays = [[numbers(n).astype(dtype) for n in (k, k + 1)] for k in calls]
        made = (("mm", [a], [b], {"step": t}) for t, (a, b) in enumerate(arrays))
        return with_figures(ForeignRun(run_of(*made), "test"))

    found = align(run(100), run(50, seen, dtype=np.float16))
    is_moved = any("of the target are moved by -1" in note for note in found.plan.notes)
    assert is_moved == (seen == 100)


def test_a_fused_call_keeps_what_it_was_fused_of_where_another_call_has_its_name():
    """A softmax written out, and a cast of its name behind it, against a softmax; where another name
    is called more often on one side, the order of all calls is asked.
    """
    node = {"kind": "operator", "parent": 0}
    apart, whole = Building("made", "test"), Building("made", "test")
    for building in (apart, whole):
        building.call("")
    tensors = [numbers(k) for k in range(4)]
    x, exp, made, cast = map(apart.array, tensors)
    apart.call("exp", inputs=[x], outputs=[exp], origins=("softmax",), op_type="Exp", **node)
    apart.call("softmax", inputs=[exp], outputs=[made], origins=("softmax",), op_type="Div", **node)
    apart.call("softmax", inputs=[made], outputs=[cast], op_type="Cast", **node)
    apart.call("pad", inputs=[cast], outputs=[apart.array(numbers(5))], op_type="Pad", **node)
    apart.call("pad", inputs=[cast], outputs=[apart.array(numbers(6))], op_type="Pad", **node)
    x, made = whole.array(tensors[0]), whole.array(tensors[3])
    whole.call("softmax", inputs=[x], outputs=[made], op_type="Softmax", **node)
    whole.call("pad", inputs=[made], outputs=[whole.array(numbers(5))], op_type="Pad", **node)
    found = align(apart.run(), whole.run())
    (pair,) = (p for p in found.plan.pairs if found.target.calls[p.target].op_type == "Softmax")
    assert found.reference.calls[pair.reference].scope == "exp+softmax"
