"""Dumps of any format once they are put together: places, roots, data flow by content, and what is
judged where only outputs are there.
"""

import math

import numpy as np
import pytest

import whence
from whence.errors import ElementsMissing
from whence.readers import GATHERED, Building, ForeignRun
from whence.readers.figures import MeasuredRun, with_figures
from whence.readers.opening import open_to_show
from whence.records import Statistics
from whence.report import run as show

RNG = np.random.default_rng(5)
WEIGHTS = [RNG.standard_normal((16, 16)) / 4 for _ in range(5)]
INPUT = RNG.standard_normal((6, 16))


def chain(
    dtype=np.float32,
    *,
    change=None,
    inputs=True,
    weights=WEIGHTS,
    steps=1,
    text=None,
    shown=None,
    jitter=0.0,
):
    """A dump of five products in a row. change(step, k, value). text: digits after the point that
    are printed; shown: rows of them.
    """
    run, noise = Building("dump", "test"), np.random.default_rng(7)
    for step in range(steps):
        x = (INPUT + step).astype(dtype)
        for k, w in enumerate(weights):
            w = w.astype(dtype)
            y = np.tanh(x.astype(np.float64) @ w.astype(np.float64)) * (
                1 + jitter * noise.standard_normal((6, 16))
            )
            y = (change(step, k, y) if change else y).astype(dtype)
            given = {}
            seen = y
            if text is not None:
                seen, given = (
                    np.round(y.astype(np.float64), text).astype(dtype)[:shown],
                    {"quantum": 10.0**-text},
                )
                if shown is not None:
                    given["whole"] = (6, 16)
            read = [run.array(x.copy()), run.array(w)] if inputs else []
            run.call(
                f"op{k}",
                op_type="matmul",
                inputs=read,
                outputs=[run.array(seen, **given)],
                step=step,
            )
            x = y
    return ForeignRun(run.run(), "test")


def test_places_parents_and_roots():
    run = Building("dump", "test")
    block = run.call("block", kind="module")
    inner = run.call("block.fc", kind="module", parent=block, inputs=[run.array(np.ones(3))])
    run.fill(inner, inputs=[run.array(np.zeros(3))], outputs=[run.array(np.arange(3))])
    run.call("last", outputs={"logits": run.array(np.ones(2))})
    run.call("last", outputs=[run.array(np.ones(2))])
    made = run.run()
    assert [(c.scope, c.number, c.leaf, c.occurrence) for c in made.calls] == [
        ("block.fc", "0_0_0", True, 0),
        ("block", "0_0", False, 0),
        ("last", "0_1", True, 0),
        ("last", "0_2", True, 1),
        ("", "0", False, 0),
    ]
    assert all(c.id == i for i, c in enumerate(made.calls))
    assert [made.calls[c.parent].scope for c in made.calls[:-1]] == ["block", "", "", ""]
    assert made.calls[-1].notes == (GATHERED,)
    assert [r.slot for r in made.calls[0].refs] == ["input.0", "input.1", "output.0"]
    assert made.calls[2].refs[0].slot == "output.logits"


def test_a_dump_with_a_root_of_its_own_gets_none():
    run = Building("dump", "test")
    root = run.call("", kind="module", inputs=[run.array(np.ones(3))])
    run.call("fc", kind="module", parent=root)
    assert [c.scope for c in run.run().calls] == ["fc", ""]


def test_elements_are_checked_and_a_damaged_tensor_costs_itself_only():
    def broken():
        raise OSError("the disk ate it")

    run = Building("dump", "test")
    run.tensor("float32", (2,), broken)
    run.tensor("float32", (2,), lambda: np.ones(3, np.float32))
    run.tensor("float4_unheard_of", (2,), lambda: np.ones(2))
    run.array(np.ones(2))
    made = run.run()
    for record, said in (
        (0, "the disk ate it"),
        (1, r"\(3,\), not float32 \(2,\)"),
        (2, "float4_unheard_of"),
    ):
        with pytest.raises(ElementsMissing, match=said):
            made.array(record)
    assert not made.array(3).flags.writeable
    with pytest.raises(ValueError, match="neither elements nor a reason"):
        run.tensor("float32", (2,))


def test_equal_content_is_one_tensor_and_tells_the_data_flow():
    run = with_figures(chain())
    assert isinstance(run, MeasuredRun)
    by_name = {c.scope: c for c in run.calls}
    for k in range(4):
        assert by_name[f"op{k + 1}"].refs[0].record == by_name[f"op{k}"].slots("output")[0].record
        assert by_name[f"op{k + 1}"].refs[0].edge == "content"
    assert by_name[""].slots("output")[0].record == by_name["op4"].slots("output")[0].record
    array = run.array(by_name["op2"].slots("output")[0].record)
    figures = run.records[by_name["op2"].slots("output")[0].record].statistics
    assert math.isclose(figures.norm, np.linalg.norm(array.astype(np.float64)), rel_tol=1e-12)


def test_small_and_constant_tensors_are_not_taken_for_one():
    run = Building("dump", "test")
    run.call("a", outputs=[run.array(np.ones(100)), run.array(np.arange(4))])
    run.call("b", inputs=[run.array(np.ones(100)), run.array(np.arange(4))])
    calls = with_figures(ForeignRun(run.run(), "test")).calls
    assert [r.record for c in calls[:2] for r in c.refs] == [0, 1, 2, 3]


def fault(step, k, value):
    return value * np.where(np.arange(16) < 8, 1.02, 1.0) if k == 2 else value


@pytest.mark.parametrize("inputs", [True, False])
def test_a_planted_fault_is_named_and_what_follows_is_not(inputs):
    result = whence.compare(chain(inputs=inputs), chain(inputs=inputs, change=fault))
    assert (result.status, [f.name for f in result.findings]) == ("different", ["op2"])


@pytest.mark.parametrize("inputs", [True, False])
def test_rounding_that_grows_is_same(inputs):
    result = whence.compare(
        chain(inputs=inputs, steps=3), chain(inputs=inputs, steps=3, jitter=1e-7)
    )
    assert (result.status, result.findings) == ("same", ())


def test_a_wrong_weight_is_found_where_it_comes_in():
    weights = [w.copy() for w in WEIGHTS]
    weights[3] *= 1.01
    result = whence.compare(chain(), chain(weights=weights))
    assert (result.status, [f.name for f in result.findings]) == ("different", ["op3"])
    assert "comes in here" in result.findings[0].sentence


def test_printed_text_is_judged_by_its_digits():
    same = whence.compare(chain(inputs=False, text=4), chain(inputs=False, text=4, jitter=2e-5))
    assert (same.status, same.evidence) == ("same", "text")
    wrong = whence.compare(chain(inputs=False, text=4), chain(inputs=False, text=4, change=fault))
    assert (wrong.status, [f.name for f in wrong.findings]) == ("different", ["op2"])


def test_a_truncated_print_is_never_called_equal():
    one = chain(inputs=False, text=8, shown=4)
    result = whence.compare(one, one)
    assert (result.status, result.findings) == ("undecided", ())
    assert {row.verdict for row in result.rows} == {"undetermined"}
    assert "64 of 96 elements were printed" in result.verdicts[0].sentence
    wrong = whence.compare(one, chain(inputs=False, text=8, shown=4, change=fault))
    assert (wrong.status, [f.name for f in wrong.findings]) == ("different", ["op2"])


def test_digests_alone_show_what_is_equal_and_no_more():
    def digests(changed=()):
        run = Building("dump", "test")
        for k in range(4):
            digest = f"md5:{k}{'x' if k in changed else ''}"
            run.call(
                f"op{k}", outputs=[run.tensor("float32", (9,), why="digests only", digest=digest)]
            )
        return ForeignRun(run.run(), "test")

    assert whence.compare(digests(), digests()).status == "same"
    result = whence.compare(digests(), digests((2,)))
    assert result.status == "undecided"
    assert {row.name: row.verdict for row in result.rows if row.name} | {"": ""} == {
        "op0": "identical",
        "op1": "identical",
        "op2": "incomparable",
        "op3": "identical",
        "model": "identical",
        "": "",
    }


def test_statistics_alone_name_a_fault():
    def figures(scale=1.0):
        run = Building("dump", "test")
        for k in range(4):
            x = RNG_FIXED[k] * (scale if k == 2 else 1.0)
            s = Statistics(x.size, x.min(), x.max(), x.mean(), x.std(), np.linalg.norm(x), 0, 0, 0)
            run.call(
                f"op{k}",
                outputs=[run.tensor("float32", x.shape, why="statistics only", statistics=s)],
            )
        return ForeignRun(run.run(), "test")

    result = whence.compare(figures(), figures(1.05))
    assert (result.status, result.evidence, [f.name for f in result.findings]) == (
        "different",
        "statistics",
        ["op2"],
    )


RNG_FIXED = np.random.default_rng(3).standard_normal((4, 50))


def test_a_record_says_which_file_of_the_dump_keeps_it():
    building = Building("dump", "npy")
    building.call(
        "linear", outputs=[building.array(np.ones((2, 3), np.float32), file="0/linear.npy")]
    )
    assert [r.file for r in building.run().records] == ["0/linear.npy"]


def test_the_root_that_stands_for_the_whole_is_not_counted():
    result = whence.compare(chain(steps=2), chain(steps=2, change=fault))
    assert (result.coverage.calls, result.coverage.paired, result.coverage.measured) == (10, 10, 10)
    assert sum(result.counts.values()) == 10


def test_show_looks_at_a_dump(tmp_path):
    np.savez(tmp_path / "dump.npz", fc1=np.arange(6.0).reshape(2, 3), fc2=np.ones(4, np.float32))
    text = "\n".join(show.text(open_to_show(str(tmp_path / "dump.npz")), show.Choice()))
    assert "2 tensors, 64 B; elements of 64 B are kept" in text
    assert "max 5" in text
    assert "mean 2.5" in text
    assert "program" not in text
    one = "\n".join(
        show.one(open_to_show(str(tmp_path / "dump.npz"), every=False), "fc1", show.Choice())
    )
    assert "48 B in the dump" in one
    printed = "\n".join(show.text(chain(text=4, shown=2), show.Choice()))
    assert "[2, 16] of [6, 16]" in printed


def test_operators_that_only_one_dump_has_and_that_hand_on_are_no_gap():
    def run(views, other=False):
        made, x = Building("dump", "test"), INPUT.astype(np.float32)
        for k, w in enumerate(WEIGHTS):
            y = (x @ w.astype(np.float32)).astype(np.float32)
            made.call(f"mm{k}", op_type="mm", inputs=[made.array(x)], outputs=[made.array(y)])
            if views:
                shown = y.reshape(2, 3, 16) if not other else -y
                made.call(
                    f"view{k}",
                    op_type="aten.view.default",
                    inputs=[made.array(y)],
                    outputs=[made.array(shown)],
                )
            x = y
        return ForeignRun(made.run(), "test")

    same = whence.compare(run(True), run(False))
    assert (same.status, same.coverage.calls, same.unmatched) == ("same", 5, 5)
    assert whence.compare(run(True, other=True), run(False)).status == "undecided"
