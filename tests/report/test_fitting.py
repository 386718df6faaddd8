"""Tables for a terminal: as wide as it is where that can be, and whole where there is none."""

import hypothesis.strategies as st
from hypothesis import given

from handmade import net
from whence import api
from whence.report import run, tables
from whence.report.answer import answer
from whence.report.operators import operators
from whence.report.tables import HEAD, TAIL, fitted, shortened

ROWS = [
    ("no", "name", "why"),
    ("1", "model.layers.11.mlp.down_proj", "it computes something else than the reference does"),
]


def test_nothing_is_cut_without_a_terminal():
    assert list(tables.columns(ROWS)) == [
        "no  name                           why",
        f"1   {ROWS[1][1]}  {ROWS[1][2]}",
    ]


def test_columns_give_way_to_what_tells_most():
    lines = list(tables.columns(ROWS, width=50, give={1: TAIL, 2: HEAD}))
    assert max(map(len, lines)) == 50
    assert lines[1].startswith("1   …")
    assert "down_proj  it computes " in lines[1]
    assert lines[1].endswith("…")


def test_columns_that_can_be_spared_go_in_their_order():
    rows, gone = fitted([["name", "1" * 20, "2" * 20]], 30, drop=(2, 1))
    assert (rows, gone) == ([["name", "1" * 20, "2" * 20]], {2})
    assert list(tables.columns([["name", "1" * 20, "2" * 20]], width=30, drop=(2, 1))) == [
        "name  " + "1" * 20
    ]


@given(st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=5), st.integers(52, 120))
def test_any_table_fits(lengths, width):
    """Three columns that give way to 16 characters each need 52."""
    rows = [["a" * length for length in row] for row in lengths]
    assert all(
        len(line) <= width
        for line in tables.columns(rows, width=width, give=dict.fromkeys(range(3), HEAD))
    )
    whole, _ = fitted(rows, None)
    assert whole == rows


@given(st.text(max_size=40), st.integers(2, 30), st.sampled_from([HEAD, TAIL]))
def test_what_is_cut_says_so(text, width, keep):
    short = shortened(text, width, keep)
    assert len(short) <= width
    assert short == text or (len(text) > width and (short[-1] if keep == HEAD else short[0]) == "…")


@given(st.lists(st.text("ab ", max_size=80), max_size=4).map("\n".join), st.integers(20, 60))
def test_folding_loses_no_word(text, width):
    assert tables.folded(text, width, 19).split() == text.split()


def test_an_answer_is_as_wide_as_the_terminal():
    result = api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))
    wide, narrow = answer(result), answer(result, width=70)
    assert max(map(len, wide.splitlines())) > 100
    assert max(map(len, narrow.splitlines())) <= 70
    assert narrow.split() == wide.split()
    at = narrow.splitlines().index(
        next(line for line in narrow.splitlines() if line.startswith("  evidence"))
    )
    assert narrow.splitlines()[at + 1].startswith(" " * 19)


def test_a_run_leaves_figures_out_before_names():
    lines = list(run.text(net(), run.Choice(), width=110))
    tensor = next(line for line in lines if "param.weight" in line)
    assert len(tensor) <= 110
    assert ("min" in tensor, "max" in tensor, "norm" in tensor, "nan 0" in tensor) == (
        True,
        True,
        False,
        True,
    )
    assert "norm" in next(line for line in run.text(net(), run.Choice()) if "param.weight" in line)


def test_a_list_of_operators_is_capped_in_a_table_and_whole_in_csv():
    from whence.records import Call, MemoryRun, Ref
    from whence.workflows.operator_tests.operators import signatures

    made = net()
    places = [f"model.layers.{i}.self_attention.projection" for i in range(9)]
    how = {
        "op": "aten.mm.default",
        "op_type": "aten.mm.default",
        "kind": "operator",
        "refs": (Ref("input.0", 1), Ref("output.0", 3)),
    }
    calls = [Call(i, place, "Net", 0, i, **how) for i, place in enumerate(places)]
    groups = signatures(MemoryRun(calls, made.records, {}))
    table = list(operators(groups, "table"))
    assert "and 6 more" not in table[1]  # of three places that are longer together than the cap
    assert table[1].endswith("…")
    assert all(place in "\n".join(operators(groups, "csv")) for place in places)
    narrow = list(operators(groups, "table", 80))
    assert max(map(len, narrow)) <= 80
