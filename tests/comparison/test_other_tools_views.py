"""Tables as other tools write them: columns, order, every tensor in them, and from the command
line.
"""

import csv
import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import whence
from whence import api
from whence.cli import execute
from whence.errors import UsageError
from whence.readers import Building, ForeignRun, known
from whence.report.views import view_csv

MSIT = (
    "token_id,data_id,golden_data_path,golden_op_type,golden_dtype,golden_shape,golden_max_value,golden_min_value,golden_mean_value,"
    "my_data_path,my_op_type,my_dtype,my_shape,my_max_value,my_min_value,my_mean_value,cosine_similarity,max_relative_error,"
    "mean_relative_error,max_absolute_error,mean_absolute_error,kl_divergence,relative_euclidean_distance,cmp_fail_reason"
)
ACLCMP = (
    "data_id,pta_data_path,pta_dtype,pta_shape,acl_data_path,acl_dtype,acl_shape,cmp_flag,cosine_similarity,max_relative_error,"
    "mean_relative_error,relative_euclidean_distance,cmp_fail_reason"
)
XRAY = "Index,Status,Module (Bench/Target),Cosine,RMSE,IsClose (%),Max Err (t),GtNum"
OWN = "whence_call,whence_verdict,whence_status,whence_rel_l2,whence_max_abs_err,whence_note"


def dump(name, change=1.0, drop=(), more=()):
    run = Building(name, "npy")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    for k, scope in enumerate(("a", "b", *more, "=c")):
        if scope in drop:
            continue
        y = (x * 2 * (change if scope == "b" else 1)).astype(np.float32)
        run.call(
            scope,
            op_type="Mul",
            inputs=[run.array(x, file=f"{scope}.in.npy")],
            outputs=[run.array(y, file=f"{scope}.out.npy")],
            step=0,
        )
        x = y + k
    return ForeignRun(run.run(), "npy")


def table(result, view):
    return list(csv.DictReader(io.StringIO(view_csv(view, result.views[view]))))


@pytest.mark.parametrize(
    ("view", "header"), [("msit", MSIT), ("aclcmp", ACLCMP), ("torch_xray", XRAY)]
)
def test_columns_stand_in_the_tools_order_and_ours_behind_them(view, header):
    result = whence.compare(dump("r"), dump("t", 1.5), view=view)
    assert view_csv(view, result.views[view]).splitlines()[0] == f"{header},{OWN}"
    rows = table(result, view)
    assert [r["whence_call"] for r in rows] == [
        "a.input.0",
        "a.output.0",
        "b.input.0",
        "b.output.0",
        "'=c.input.0",
        "'=c.output.0",
    ]
    assert [r["whence_verdict"] for r in rows][2:4] == ["introduced", "introduced"]
    assert [r["whence_status"] for r in rows] == ["", "", "", "Fail", "", ""]


def test_msit_has_the_files_figures_and_running_numbers(tmp_path):
    (tmp_path / "r").mkdir()
    rows = table(
        whence.compare(dump(tmp_path / "r"), dump(tmp_path / "t.npz", 1.5), view=["msit"]), "msit"
    )
    assert [r["data_id"] for r in rows] == list("012345")
    row = rows[3]
    assert (
        row["golden_data_path"],
        row["my_data_path"],
        row["golden_dtype"],
        row["golden_shape"],
    ) == (
        str(tmp_path / "r" / "b.out.npy"),
        str(tmp_path / "t.npz"),
        "torch.float32",
        "[4, 8]",
    )
    assert float(row["max_relative_error"]) == pytest.approx(0.5)
    assert (float(row["cosine_similarity"]), row["cmp_fail_reason"]) == (1.0, "")
    assert float(row["whence_rel_l2"]) == pytest.approx(0.5, rel=1e-5), (
        "ours shows what the cosine hides"
    )


def test_msit_holds_what_only_moves_elements_against_itself():
    target = Building("t", "ge")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    target.call("a", op_type="Mul", inputs=[target.array(x)], outputs=[target.array(x * 2)])
    target.call(
        "trans_1",
        op_type="TransData",
        inputs=[target.array(x * 2)],
        outputs=[target.array((x * 2).astype(np.float16))],
    )
    reference = Building("r", "fx")
    reference.call(
        "a", op_type="Mul", inputs=[reference.array(x)], outputs=[reference.array(x * 2)]
    )
    result = whence.compare(
        ForeignRun(reference.run(), "fx"),
        ForeignRun(target.run(), "ge"),
        view=("msit", "torch_xray"),
    )
    rows = table(result, "msit")
    assert [r["whence_call"] for r in rows] == ["a.input.0", "a.output.0", "trans_1.input.0"]
    moved = rows[2]
    assert (moved["golden_dtype"], moved["my_dtype"], moved["cmp_fail_reason"]) == (
        "torch.float32",
        "torch.float16",
        "",
    )
    assert 0 < float(moved["max_relative_error"]) <= 2**-11
    assert len(table(result, "torch_xray")) == 4, "other tools do not"


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_a_view_has_the_dtype_that_the_dump_has(tmp_path, kind):
    """FX writes bfloat16 as float32; that it is judged as what it holds is ours."""
    held = np.random.default_rng(0).standard_normal((4, 8)).astype(kind).astype(np.float32)
    for slot in ("INPUT.0", "OUTPUT.0"):
        np.save(
            tmp_path / f"neg-aten.neg.default.{slot}.20251017071211190258.npy",
            held if slot < "O" else -held,
        )
    result = whence.compare(tmp_path, tmp_path, view="msit")
    assert any(f"hold numbers of {np.dtype(kind).name}" in note for note in result.notes)
    assert [(r["golden_dtype"], r["my_dtype"]) for r in table(result, "msit")] == [
        ("torch.float32", "torch.float32")
    ] * 2


@pytest.mark.shared
def test_msits_own_report_of_a_graph_is_reproduced(shared, monkeypatch):
    if not {"ge", "fx"} <= known().keys():
        pytest.skip("no reader of GE and FX dumps")
    monkeypatch.chdir(shared / "samples" / "ascend" / "synthetic")
    ours = table(whence.compare("fx_new", "ge", view="msit"), "msit")
    with Path("expected_msit_ge_fx.csv").open() as file:
        theirs = list(csv.DictReader(file))
    dropped = [r for r in ours if r["whence_note"] == "only the reference has it"]
    assert [r["whence_call"] for r in dropped] == ["topk.input.1"] * 2, (
        "the number k, of which msit says nothing"
    )
    ours = [r for r in ours if r not in dropped]
    assert len(ours) == len(theirs) == 26
    # Numbered otherwise; op types are empty there; KL of equal tensors is rounding there; a fused
    # call's inputs are named by their makers.
    free = {"data_id", "golden_op_type", "my_op_type", "kl_divergence", "golden_data_path"}
    for mine, row in zip(ours, theirs):
        assert float(mine["kl_divergence"]) == pytest.approx(float(row["kl_divergence"]), abs=1e-6)
        for column in row.keys() - free:
            number = column.endswith(("error", "value", "similarity", "distance")) and row[column]
            expected = pytest.approx(float(row[column]), rel=1e-6) if number else row[column]
            assert (float(mine[column]) if number else mine[column]) == expected, (
                mine["whence_call"],
                column,
            )


def test_what_has_no_partner_has_a_row():
    result = whence.compare(dump("r", drop=("a",)), dump("t", more=("extra",)), view=api.views())
    for view in api.views():
        rows = table(result, view)
        alone = {r["whence_call"]: r["whence_note"] for r in rows if r["whence_note"]}
        assert {"a.output.0", "extra.output.0"} <= alone.keys() or any(
            "only the" in note for note in alone.values()
        )
        missing = {f"{name}.{slot}.0" for name in ("b", "'=c") for slot in ("input", "output")} - {
            r["whence_call"] for r in rows
        }
        assert not missing


def test_thresholds_are_the_tools_own():
    result = whence.compare(
        dump("r"), dump("t", 1.0005), view=("torch_xray", "polygraphy", "msprobe")
    )
    assert [r["Status"] for r in table(result, "torch_xray")][:4] == [""] * 4
    assert [r["passed"] for r in table(result, "polygraphy")][:4] == [
        "True",
        "True",
        "True",
        "False",
    ]
    assert {r["Result"] for r in table(result, "msprobe")} == {"pass"}
    worse = whence.compare(dump("r"), dump("t", 1.5), view=("torch_xray", "msprobe"))
    assert table(worse, "torch_xray")[3]["Status"] == "Fail"
    assert table(worse, "msprobe")[3]["Result"] == "error"


def test_the_command_line_writes_a_file_for_every_view(tmp_path, capsys):
    np.savez(tmp_path / "r.npz", a=np.arange(9.0), b=np.ones(3))
    np.savez(tmp_path / "t.npz", a=np.arange(9.0) * 1.1, b=np.ones(3))
    code = execute(
        [
            "compare",
            str(tmp_path / "r.npz"),
            str(tmp_path / "t.npz"),
            "-o",
            str(tmp_path / "cmp"),
            "--view",
            "msit",
            "--view",
            "torch_xray",
        ]
    )
    assert code == 1
    assert {p.name for p in (tmp_path / "cmp").iterdir()} == {
        "summary.json",
        "report.csv",
        "report.json",
        "msit.csv",
        "torch_xray.csv",
    }
    assert (
        execute(["compare", str(tmp_path / "r.npz"), str(tmp_path / "t.npz"), "--view", "excel"])
        == 3
    )
    assert "aclcmp, msit, msprobe, polygraphy, torch_xray" in capsys.readouterr().err
    again = api.load_comparison(tmp_path / "cmp")
    assert view_csv("msit", again.views["msit"]) == (tmp_path / "cmp" / "msit.csv").read_text()


def test_an_unknown_view_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="view 'excel': aclcmp, msit"):
        whence.compare(dump("r"), dump("t"), view="excel")
