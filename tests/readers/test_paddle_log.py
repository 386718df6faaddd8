"""Logs of Paddle: every form of print against numpy, lines cut by others, steps, edges, comparisons
as a user makes them, damage.
"""

import os
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hostile import survives, variants
from paddle_text import GLOG, Model, operator, printed, vlog_matrix

import warm
import whence
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import open_run

DATA = Path(__file__).parent.parent / "data" / "paddle"
X = np.linspace(-3, 3, 12).reshape(3, 4)


def opened(tmp_path, text, name="x.log"):
    path = tmp_path / name
    path.write_text(text)
    return open_run(path)


def made(run):
    """(calls without the root, their arrays by place)."""
    calls = sorted((c for c in run.calls if c.scope), key=lambda c: c.order)
    return calls, [c.slots("output")[0].record for c in calls]


# ---- prints, as Paddle 3.3.1 made them (tests/data/paddle/tensor_print_formats.txt)

PRINTS = open_run(DATA / "tensor_print_formats.txt")


def of(name, occurrence=0):
    call = next(c for c in PRINTS.calls if c.scope == name and c.occurrence == occurrence)
    return PRINTS.records[call.slots("output")[0].record]


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_every_dtype_is_read_as_numpy_has_it(dtype):
    record = of(f"[3,4] {dtype}")
    wide = {
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
    }
    want = X.astype(np.float32 if dtype.startswith("float8") else np.float64).astype(
        wide.get(dtype, dtype)
    )
    got = PRINTS.array(record.id)
    assert (record.dtype, record.shape, got.dtype) == (dtype, (3, 4), want.dtype)
    exact = dtype in ("float16", "float8_e4m3fn", "float8_e5m2") or want.dtype.kind in "ib"
    assert record.quantum == (0.0 if exact else 1e-8)
    if exact or dtype == "bfloat16":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=5.1e-9 + 2.0**-24 * 3)


@pytest.mark.parametrize(
    ("name", "shape", "values"),
    [
        ("0-d float", (), 3.25),
        ("0-d int", (), 7),
        ("0-d bool", (), True),
        ("0-d bf16", (), 2.5),
        ("[1]", (1,), [1.0]),
        ("empty [0,3]", (0, 3), np.empty((0, 3))),
        ("empty [2,0]", (2, 0), np.empty((2, 0))),
        ("empty[0]", (0,), []),
        ("nan/inf", (4,), [np.nan, np.inf, -np.inf, 1.5]),
        ("only nan/inf", (2,), [np.nan, np.inf]),
        ("big", (3,), [1e10, 1, 2]),
        ("extreme", (2,), [0, np.float32(1e20)]),
        ("f16 max, -0", (2,), [65504, -0.0]),
        ("1000 exactly", (1000,), np.arange(1000)),
        ("[1,1,1]", (1, 1, 1), [[[0]]]),
        ("non-leaf", (2,), [2, 4]),
    ],
)
def test_shapes_and_special_values(name, shape, values):
    record = of(name)
    assert record.shape == shape
    assert record.whole == ()
    np.testing.assert_array_equal(
        PRINTS.array(record.id).astype(np.float64), np.asarray(values, np.float64)
    )


def test_minus_zero_is_kept():
    assert np.signbit(PRINTS.array(of("f16 max, -0").id)).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "whole", "edge"),
    [
        ("[2,1000] summarised", (2, 1000), 3),
        ("1001", (1001,), 3),
        ("4-d summarised", (2, 3, 4, 100), 3),
        ("threshold=5,edge=1,lw=200", (6, 10), 1),
    ],
)
def test_a_summary_is_the_elements_at_the_edges(name, whole, edge):
    record = of(name)
    all_of_it = np.arange(np.prod(whole), dtype=np.float32).reshape(whole) / (
        7 if name[0] in "[4" else 1
    )
    for axis, extent in enumerate(whole):
        if extent > 2 * edge:
            all_of_it = np.take(all_of_it, [*range(edge), *range(extent - edge, extent)], axis)
    assert record.whole == whole
    assert record.shape == all_of_it.shape
    np.testing.assert_allclose(PRINTS.array(record.id), all_of_it, rtol=2.0**-23, atol=1e-8)


def test_precision_is_read_off_the_digits():
    assert of("precision=4").quantum == 1e-4
    assert of("sci_mode=True").quantum == pytest.approx(1e-8)
    assert of("integers as float").quantum == 0.0  # whole numbers are printed to the last digit


@pytest.mark.parametrize(
    ("text", "quantum"), [("[1.25000000e+03, 1.00000000e-02]", 1e-5), ("[1.5e-07]", 1e-8)]
)
def test_the_largest_step_counts_in_scientific_notation(tmp_path, text, quantum):
    count = text.count(",") + 1
    run = opened(
        tmp_path,
        f"a b Tensor(shape=[{count}], dtype=float32, place=Place(cpu), stop_gradient=True,\n     "
        f"  {text})\n",
    )
    assert run.records[0].quantum == pytest.approx(quantum)


def test_a_sparse_tensor_is_listed_with_a_reason():
    with pytest.raises(ElementsMissing, match="sparse"):
        PRINTS.array(of("sparse coo").id)
    assert any("sparse" in n.text for n in PRINTS.notes)


def test_the_printer_of_these_tests_prints_as_paddle_does():
    text = (DATA / "tensor_print_formats.txt").read_text()

    def plain(one):
        return re.sub(r"\s+", "", one)

    for array, name in (
        (X.astype(np.float32), "[3,4] float32"),
        (np.arange(1001, dtype=np.float32), "1001"),
        (np.arange(2400, dtype=np.float32).reshape(2, 3, 4, 100) / 7, "4-d summarised"),
    ):
        assert plain(printed(array)) == plain(
            text.partition(f"## {name}\n")[2].partition("\n##")[0]
        )


# ---- lines


def test_a_real_log_that_cuts_the_hook_line():
    """GLOG_v=4 of the legacy executor: the logger writes between the name and the tensor."""
    run = open_run(DATA / "vlog4_legacy_excerpt.log")
    calls, records = made(run)
    assert [(c.scope, c.op_type) for c in calls] == [("matmul_v2_0.tmp_0", "matmul_v2")]
    assert run.records[records[0]].why == "the print breaks off"  # the excerpt does


def test_pir_names_and_edges():
    run = open_run(DATA / "vlog4_pir_excerpt.log")
    calls, records = made(run)
    assert [(c.scope, c.op_type) for c in calls] == [
        ("inner_var.21", "embedding"),
        ("inner_var.22", "elementwise_pow"),
    ]
    assert [r.record for r in calls[1].slots("input")] == [records[0]]
    assert run.array(records[0])[0, 0, :2].tolist() == [
        np.float32(-0.11941433),
        np.float32(0.01889807),
    ]


BODY = printed(np.float32([[1.5, 2.25], [-3, 4]]))


@pytest.mark.parametrize(
    "text",
    [
        f"scale scale_0.tmp_0 {BODY}\n",
        f"scale scale_0.tmp_0 {BODY}\n".replace("\n", "\r\n"),
        f"scale scale_0.tmp_0 {GLOG.format(1, 'memcpy.cc:123')}src: 0x1, dst: 0x2, num: "
        f"768\n{BODY}\n",
        f"scale {GLOG.format(1, 'memcpy.cc:123')}(a)\nscale_0.tmp_0 "
        f"{GLOG.format(2, 'memcpy.cc:123')}b\n{BODY}\n",
        f"scale scale_0.tmp_0{vlog_matrix('qk', np.ones(3))}{BODY}{GLOG.format(3, 'a.cc:1')}done\n",
        "724 scale scale_0.tmp_0 " + BODY.replace("\n", "\n725 ") + "\n",
        "+scale scale_0.tmp_0 " + BODY.replace("\n", "\n+") + "\n",
        f"op: scale name: scale_0.tmp_0 {BODY}\n",
        f"..F.\x1b[32mscale scale_0.tmp_0\x1b[0m {BODY}\n".replace("..F.", ""),
        "scale scale_0.tmp_0 "
        + BODY.replace("2.25000000]", f"2.25000000\n{GLOG.format(3, 'a.cc:1')}in (it)\n]")
        + "\n",
        "scale scale_0.tmp_0 " + BODY.replace("Place(cpu)", "Place(gpu:0)") + "\n",
    ],
    ids=[
        "plain",
        "crlf",
        "cut",
        "cut twice",
        "block",
        "numbered",
        "diff",
        "labelled",
        "colour",
        "cut inside",
        "gpu",
    ],
)
def test_the_name_and_the_elements_survive_what_stands_around(tmp_path, text):
    run = opened(tmp_path, text)
    calls, _ = made(run)
    (call,) = [c for c in calls if c.kind == "operator"]
    assert (call.scope, call.op_type) == ("scale_0.tmp_0", "scale")
    assert run.array(call.slots("output")[0].record).tolist() == [[1.5, 2.25], [-3, 4]]


def test_log_lines_of_gigabytes_before_the_first_tensor_are_passed(tmp_path):
    text = (GLOG.format(0, "a.cc:1") + "loading\n") * 4000 + f"scale scale_0.tmp_0 {BODY}\n"
    assert len(text) > 1 << 16  # more than a reader sees of a file before it decides
    assert len(made(opened(tmp_path, text))[0]) == 1


def test_a_kernels_block_is_a_point_with_label_and_occurrence(tmp_path):
    model = Model(steps=2)
    run = opened(tmp_path, model.log(cut=True))
    calls, _ = made(run)
    blocks = [c for c in calls if c.kind == "label"]
    assert [(c.scope, c.step, c.occurrence) for c in blocks] == [
        ("qk_out", s, o) for s in (0, 1) for o in (0, 1)
    ]
    first = next(v for _, op, _, v in model.made if op == "softmax")
    np.testing.assert_allclose(
        run.array(blocks[0].refs[0].record), (first * 2).ravel()[:10], rtol=1e-7
    )
    assert calls[calls.index(blocks[0]) + 1].scope == "softmax_0.tmp_0"


def test_equal_blocks_prove_nothing_of_what_they_leave_out(tmp_path):
    result = compared(tmp_path, Model().log(cut=True), Model().log(cut=True))
    verdicts = {r.name: r.verdict for r in result.rows}
    assert (verdicts["qk_out"], verdicts["softmax_1.tmp_0"]) == ("undetermined", "identical")
    said = next(v.sentence for v in result.verdicts if v.verdict == "undetermined")
    assert said.startswith("only the first 10 elements were printed")


def test_integers_of_a_block_stay_integers(tmp_path):
    run = opened(
        tmp_path, vlog_matrix("codes", np.int8([1, -128, 5])) + f"scale scale_0.tmp_0 {BODY}\n"
    )
    array = run.array(made(run)[1][0])
    assert (array.dtype, array.tolist()) == (np.int64, [1, -128, 5])


def test_the_tensor_checker_gives_figures():
    run = open_run(DATA / "tensor_checker_worker_cpu_fp32.log")
    calls, records = made(run)
    assert len(calls) == 72
    s = run.records[records[0]].statistics
    assert (calls[0].scope, s.count, s.zero, s.max, s.min, s.mean) == (
        "embedding",
        192,
        0,
        0.1934415,
        -0.1931769,
        -0.008403083,
    )
    with pytest.raises(ElementsMissing, match="figures"):
        run.array(records[0])


def test_the_checkers_errors_keep_their_counts(tmp_path):
    line = (
        "[PRECISION] [ERROR] in [device=cpu, op=divide, tensor=x_0.tmp, dtype=fp32], numel=5, "
        "num_nan=1, num_inf=2, num_zero=1, max=inf, min=-3.0, mean=nan\n"
    )
    run = opened(tmp_path, line)
    (call,), (record,) = made(run)
    s = run.records[record].statistics
    assert (call.scope, s.nan, s.inf, s.zero, s.max, s.min) == ("x_0.tmp", 1, 2, 1, None, -3.0)


def test_tables_of_operators_are_counted(tmp_path):
    table = (
        "<------- Op Name ------ | -- FP16 Calls --- | -- BF16 Calls --- | --- FP32 Calls--- "
        "| -- Other Calls -->\n  pow | 0 | 0 | 4 | 0\n"
    )
    run = opened(tmp_path, table + line("a"))
    assert [n.text[:8] for n in run.notes] == ["1 tables"]
    with pytest.raises(UnreadableRun, match="no tensor in it"):
        opened(tmp_path, table)


# ---- steps


def line(name, op="scale"):
    return f"{op} {name} {BODY}\n"


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        ("abcabc", [0, 0, 0, 1, 1, 1]),
        ("abcdabc", [0, 0, 0, 0, 1, 1, 1]),  # killed in the second step
        ("xabxcdxabxcd", [0] * 6 + [1] * 6),  # the first name is written twice in a step
        ("abcd", [0] * 4),
        ("abbbc", [0] * 5),  # a loop
        ("abbbcabbbc", [0] * 5 + [1] * 5),
    ],
)
def test_a_name_that_comes_again_begins_a_step(tmp_path, names, steps):
    run = opened(tmp_path, "".join(map(line, names)))
    assert [c.step for c in made(run)[0]] == steps


def test_marks_of_steps_are_believed(tmp_path):
    run = opened(tmp_path, f"=== step 1 ===\n{line('a')}{line('a')}--- step 2 ---\n{line('a')}")
    assert [(c.step, c.occurrence) for c in made(run)[0]] == [(0, 0), (0, 1), (1, 0)]


def test_edges_lead_past_operators_that_were_not_printed(tmp_path):
    text = (
        line("a")
        + operator("mul", {"X": "a"}, {"Out": "hidden"})
        + operator("scale", {"X": "hidden", "Y": "w_0"}, {"Out": "b"})
    )
    run = opened(tmp_path, text + line("b"))
    calls, records = made(run)
    assert [r.record for r in calls[1].slots("input")] == [records[0]]


def test_who_hands_on_what_a_loop_made_is_not_said_to_read_what_went_in(tmp_path):
    """The executor names a loop's first inputs only; a fault inside must not look as if the loop
    had made it.
    """

    def text(factor):
        x = np.linspace(-2, 2, 64).astype(np.float32)
        y = np.float32(factor) * x
        lines = [line("x").replace(BODY, printed(x))]
        for _ in range(2):
            lines += [
                operator("scale", {"X": "0x1body_block_arg_1"}, {"Out": "tmp_7"}),
                f"scale tmp_7 {printed(y)}\n",
            ]
            y = y * np.float32(factor)
        z = y * np.float32(0.5)
        lines += [
            operator("while_instruction", {"X": "x"}, {"Out": "z"}),
            f"while_instruction z {printed(y)}\n",
        ]
        lines += [operator("mul", {"X": "z"}, {"Out": "end"}), f"mul end {printed(z)}\n"]
        return "".join(lines)

    run = opened(tmp_path, text(0.9))
    calls, records = made(run)
    assert [[r.record for r in c.slots("input")] for c in calls] == [[], [], [], [], [records[3]]]
    result = compared(tmp_path, text(0.9), text(0.91))
    assert [f.name for f in result.findings] == ["tmp_7"]


def test_a_change_of_layout_is_the_tensor_itself(tmp_path):
    body = printed(np.float32([1.5, 2.25]))
    text = (
        f"onednn_op.mean:2 0x1_inner_var_5 {body}\npd_op.onednn_to_paddle_layout:3 "
        f"0x1_inner_var_6 {body}\n"
    )
    calls, _ = made(opened(tmp_path, text))
    assert [(c.scope, c.op_type, c.notes) for c in calls] == [
        ("inner_var.6", "mean", ("laid out anew as inner_var.6",))
    ]
    other = printed(np.float32([1.5, 2.5]))
    calls, _ = made(opened(tmp_path, text.replace(f"6 {body}", f"6 {other}")))
    assert len(calls) == 2  # it did more


# ---- comparisons


def compared(tmp_path, one, other, **how):
    (tmp_path / "a.log").write_text(one)
    (tmp_path / "b.log").write_text(other)
    return whence.compare(tmp_path / "a.log", tmp_path / "b.log", **how)


@pytest.mark.parametrize("edges", [False, True])
def test_a_wrong_factor_is_named(tmp_path, edges):
    result = compared(tmp_path, Model().log(edges=edges), Model(factor=0.36).log(edges=edges))
    assert (result.status, result.evidence) == ("different", "text")
    assert (result.findings[0].name, result.findings[0].step) == ("scale_1.tmp_0", 0)
    assert len(result.findings) == 1
    assert result.unmatched == 0


def test_rounding_is_no_fault(tmp_path):
    result = compared(tmp_path, Model().log(), Model(noise=1e-7).log())
    assert (result.status, result.findings) == ("same", ())


def test_half_precision_prints_with_lines_cut_by_kernels(tmp_path):
    result = compared(
        tmp_path,
        Model(dtype="float16").log(cut=True),
        Model(factor=0.36, dtype="float16").log(cut=True),
    )
    assert (result.status, [f.name for f in result.findings]) == ("different", ["scale_1.tmp_0"])
    assert result.unmatched == 0


def _halves(folder, factor, *, seen=lambda value: value, **how):
    """Two float16 logs, of which the second has another factor; their kernels log. seen: what the
    target's kernel logs of each value.
    """
    for name, by in (("a", 0.35), ("b", factor)):
        model = Model(factor=by, dtype="float16", **how)
        text = model.log(cut=True)
        if name == "b":
            for step, op, made, value in model.made:
                del step, made
                if op == "softmax":
                    text = text.replace(
                        vlog_matrix("", value * 2).split("\n")[1],
                        vlog_matrix("", seen(value) * 2).split("\n")[1],
                    )
        (folder / f"{name}.log").write_text(text)
    return whence.compare(folder / "a.log", folder / "b.log")


@pytest.mark.parametrize("factor", [0.3517, 0.36, 0.34, 0.25])
def test_what_a_kernel_logs_is_no_call_with_equal_inputs(tmp_path, factor):
    result = _halves(tmp_path, factor)
    assert [f.name for f in result.findings] == ["scale_1.tmp_0"]
    assert {row.verdict for row in result.rows if row.op_type == "VLOGMatrix"} <= {
        "inherited",
        "noise",
        "identical",
        "undetermined",
    }


def test_a_log_of_a_kernel_alone_names_no_fault(tmp_path):
    result = _halves(tmp_path, 0.35, seen=lambda value: value * 1.5)
    assert (result.status, result.findings) == ("undecided", ())
    said = {v.sentence for v in result.verdicts if v.verdict == "undetermined"}
    assert any("logged by the kernel of softmax_0.tmp_0 (softmax)" in s for s in said)


def test_calls_alike_that_are_equal_hold_half_precision_to_its_rounding(tmp_path):
    """0.4 % of a scale is less than ten roundings of float16; that the other scale is equal to the
    bit speaks against another kernel.
    """
    found = _halves(tmp_path, 0.35 * 1.004).findings
    assert [f.name for f in found] == ["scale_1.tmp_0"]
    assert "the same bits on both sides" in found[0].sentence
    model = Model(
        factor=0.35 * 1.004, dtype="float16", noise=2.0**-11
    )  # kernels that round otherwise everywhere
    (tmp_path / "b.log").write_text(model.log(cut=True))
    assert whence.compare(tmp_path / "a.log", tmp_path / "b.log").findings == ()


def test_lines_about_missing_tensors_are_told(tmp_path):
    text = Model().log()
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("softmax softmax_0.tmp_0"))
    absent = GLOG.format(7, "block_multi_head_attention_kernel.cu:212") + "qkv_out is nullptr\n"
    inside = GLOG.format(8, "block_attn.h:9") + "***fmha_buf pos1*** initialized\n"
    whole = [
        *lines[:at],
        absent,
        "***key_cache_out*** nullptr\n",
        lines[at],
        inside,
        *lines[at + 1 :],
        absent,
    ]
    (tmp_path / "a.log").write_text(text)
    (tmp_path / "b.log").write_text("".join(whole))
    result = whence.compare(tmp_path / "a.log", tmp_path / "b.log")
    assert set(result.counts) == {"identical"}
    (note,) = [n for n in result.notes if "hold no numbers" in n]
    assert "qkv_out nullptr (2 times)" in note
    assert "key_cache_out nullptr" in note


def test_names_decide_where_operators_were_fused(tmp_path):
    fused = Model(noise=1e-7)
    fused.made = [
        (s, "fused_matmul" if op == "scale" else op, n, v)
        for s, op, n, v in fused.made
        if op != "matmul_v2"
    ]
    result = compared(tmp_path, Model().log(), fused.log())
    assert result.status == "same" or "could be measured" in result.headline
    assert result.findings == ()
    assert result.without_partner["reference"] == ("matmul_v2_0.tmp_0", "matmul_v2_1.tmp_0")
    assert any(p.evidence == "scale against fused_matmul" for p in result.plan.pairs)


def test_a_truncated_pair_is_never_equal(tmp_path):
    text = Model().log(threshold=10, edge=1)
    result = compared(tmp_path, text, text)
    assert result.status == "undecided"
    assert set(result.counts) <= {"undetermined", "identical"}
    assert result.counts["undetermined"] > 10


def test_a_truncated_print_still_shows_a_fault(tmp_path):
    result = compared(
        tmp_path, Model().log(threshold=10, edge=1), Model(factor=0.4).log(threshold=10, edge=1)
    )
    assert (result.status, result.findings[0].name) == ("different", "scale_1.tmp_0")


@pytest.mark.parametrize("other", [{}, {"threshold": 10, "edge": 2}])
@pytest.mark.parametrize("turned", [False, True])
def test_a_summary_against_a_print_that_shows_more(tmp_path, other, turned):
    few, more = Model().log(threshold=10, edge=1), Model(factor=0.4).log(**other)
    result = compared(tmp_path, *((more, few) if turned else (few, more)))
    assert (result.status, result.findings[0].name, result.incomparable) == (
        "different",
        "scale_1.tmp_0",
        0,
    )
    same = compared(tmp_path, few, Model().log(**other))
    assert (same.status, same.incomparable) == ("undecided", 0)
    row = next(r for r in same.rows if r.name == "softmax_0.tmp_0")
    assert (row.reference_shape, row.target_shape, row.measured.identical, row.verdict) == (
        (2, 2),
        (2, 2),
        True,
        "undetermined",
    )


def test_why_a_log_of_summaries_is_undecided_is_said(tmp_path):
    text = f"relu relu_0.tmp_0 {printed(np.linspace(-3, 3, 2000).reshape(50, 40))}\n"
    found = compared(tmp_path, text, text)
    assert (found.status, found.headline) == (
        "undecided",
        "no fault in what was printed, but 1 tensor was printed in part: print all elements to know",
    )


@pytest.mark.parametrize("executor", ["legacy", "pir"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [0, 8, 16])
def test_elements_that_onednn_has_in_another_order_are_the_same(tmp_path, block, turned, executor):
    draw = np.random.default_rng(1)
    x, w = draw.normal(size=(2, 32, 5, 7)), draw.normal(size=(2, 3))

    def memory(a):
        if block == 0:
            return a.transpose(0, 2, 3, 1).reshape(a.shape)
        return a.reshape(2, 32 // block, block, 5, 7).transpose(0, 1, 3, 4, 2).reshape(a.shape)

    def log(lay, kind, fault=0.0):
        made = [("conv2d", x), ("relu", np.maximum(x, 0) + fault * (x > 2))]
        names = [
            f"{op}_{i}.tmp_0" if executor == "legacy" else f"0x55f_inner_var_{i}"
            for i, (op, _) in enumerate(made)
        ]
        kind = "" if executor == "legacy" else kind
        lines = [
            f"{kind}{op}{':1' if kind else ''} {name} {printed(lay(a), threshold=10**6)}"
            for (op, a), name in zip(made, names)
        ]
        return "\n".join(
            [*lines, f"{kind}mean{':1' if kind else ''} mean_0.tmp_0 {printed(w + fault)}", ""]
        )

    sides = [log(lambda a: a, "pd_op."), log(memory, "onednn_op.")]
    found = compared(tmp_path, *(sides[::-1] if turned else sides))
    assert (found.status, found.counts) == ("same", {"identical": 3})
    wrong = compared(tmp_path, sides[0], log(memory, "onednn_op.", fault=0.05))
    assert [f.op_type for f in wrong.findings] == ["relu"]
    assert wrong.findings[0].verdict == "introduced"


def test_pir_names_of_two_processes_meet(tmp_path):
    text = (DATA / "pir_run_a.log").read_text()
    other = text.replace(
        "0x55f544995d201795193189025014752_inner", "0x7f00000000019999999999999999999_inner"
    )
    assert other != text
    result = compared(tmp_path, text, other)
    assert (result.status, result.counts, result.unmatched) == ("same", {"identical": 40}, 0)


def test_pir_numbers_that_shifted_are_not_believed(tmp_path):
    """A pass that adds an operator gives all variables behind it other numbers."""
    text = (DATA / "pir_run_a.log").read_text()
    head, mark, rest = text.partition("pd_op.mean:2 ")
    shifted = re.sub(
        r"_inner_var_(\d+)", lambda found: f"_inner_var_{int(found[1]) + 1}", mark + rest
    )
    extra = (
        f"onednn_op.onednn_to_paddle_layout:2 0x1_inner_var_23 {printed(np.float32([5, 6, 7]))}\n"
    )
    result = compared(tmp_path, text, head + extra + shifted)
    assert (result.status, result.findings) == ("same", ())
    assert result.without_partner == {"target": ("inner_var.23",)}


def test_from_the_command_line(tmp_path):
    (tmp_path / "a.log").write_text(Model().log())
    (tmp_path / "b.log").write_text(Model(factor=0.36).log())
    command = [warm.PADDLE, "-m", "whence", "compare", "a.log", "b.log", "-o", "cmp"]
    source = {**os.environ, "PYTHONPATH": str(Path(whence.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"^FAULT +scale_1\.tmp_0 +scale", done.stdout)


# ---- the samples of the vendor's own tool


SAMPLES = [
    ("s0_legacy_a.log", "s0_legacy_b_scale_attr.log", "different", 52),
    ("s0_legacy_a.log", "s0_legacy_d_ulp.log", "same", 48),
    ("pir_run_a.log", "pir_run_b.log", "same", 0),
]


@pytest.mark.shared
@pytest.mark.parametrize(("one", "other", "status", "differ"), SAMPLES)
def test_samples(shared, one, other, status, differ):
    folder = shared / "samples" / "paddle"
    result = whence.compare(folder / one, folder / other)
    rows = {
        (r.step, r.name)
        for r in result.rows
        if r.name != "model" and not r.measured.identical and r.reference_slot == "output.0"
    }
    assert (result.status, result.unmatched, len(rows)) == (status, 0, differ)
    if status == "different":
        (finding,) = result.findings
        assert (finding.name, finding.step, finding.numbers["e_in"]) == ("scale_4.tmp_0", 0, 0.0)
        assert finding.numbers["rel_l2"] == pytest.approx(4.09e-3, rel=0.01)


# ---- damage


@pytest.mark.parametrize(
    "name",
    [
        "pir_run_a.log",
        "tensor_print_formats.txt",
        "vlog4_pir_excerpt.log",
        "tensor_checker_worker_cpu_fp32.log",
    ],
)
def test_damaged_logs(tmp_path, name):
    for what, path in variants(DATA / name, tmp_path):
        survives(what, path)


@pytest.mark.parametrize(
    "text",
    [
        "a b Tensor(shape=[4], dtype=float32, place=Place(cpu), stop_gradient=True,\n" * 4000,
        "a b Tensor(shape=[99999999999999999999, 4], dtype=float32, place=Place(cpu), "
        "stop_gradient=True,\n       [1.])\n",
        "a b Tensor(shape=[1000000000, 1000000000], dtype=float32, place=Place(cpu), "
        "stop_gradient=True,\n       [1., ..., 2.])\n",
        "a b Tensor(shape=[3], dtype=float32, place=Place(cpu), stop_gradient=True,\n       [1., "
        "2.])\n",
        line("a") + "a b Tensor(shape=[2], dtype=float32, place=Place(cpu), stop_gradient=True,\n"
        "       [1., os.system('x')])\n",
        line("a") + "a b Tensor(shape=[2], dtype=int8, place=Place(cpu), stop_gradient=True,\n"
        "       [1, 999])\n",
        "a b Tensor(shape=[2], dtype=string, place=Place(cpu), stop_gradient=True,\n       [1, "
        "9])\n",
        line("a") + (operator("x", {"X": "a"}, {"Out": "b"}).rstrip() * 20_000) + "\n" + line("b"),
        line("a")
        + "x Op(f), inputs:{"
        + "a:" * 500_000
        + "}, outputs:{"
        + "b:[" * 100_000
        + "}\n"
        + line("b"),
        line("a") + "===>: " + " " * 500_000 + "\n" + "1, " * 200_000 + "\n" + line("b"),
        line("a") + "I1121 10:00:00.1  1 " + "x" * 500_000 + "\n" + line("b"),
        line("../../../etc/passwd") + line("x" * 5000) + line("\x1b[31mred\x1b[0m"),
    ],
    ids=[
        "no ends",
        "huge extent",
        "huge shape",
        "too few",
        "no number",
        "out of range",
        "dtype",
        "many edges",
        "long edge",
        "long label",
        "long log line",
        "names",
    ],
)
def test_harmful_logs(tmp_path, text):
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "x.log").write_text(text)
    assert survives("", folder / "x.log") is not None


def test_a_finding_names_the_lines_of_both_logs(tmp_path):
    """Of prints and of blocks, whatever stands before, between and inside them."""
    import whence

    other = printed(np.float32([[1.5, 2.25], [-3, 5]]))
    head = f"{GLOG.format(1, 'a.cc:1')}begins\n\nscale a {BODY}\nscale b {BODY}\r\n"
    ref, tgt = tmp_path / "ref.log", tmp_path / "tgt.log"
    ref.write_text(f"{head}{vlog_matrix('qk', np.ones(3))}\nscale c {BODY}\n")
    tgt.write_text(f"one line more\n{head}{vlog_matrix('qk', np.ones(3))}\nscale c {other}\n")
    run = open_run(tgt)
    files = {c.scope: run.records[c.slots("output")[0].record].file for c in run.calls if c.scope}
    lines = tgt.read_text().split("\n")
    for name, mark in (("a", "scale a"), ("b", "scale b"), ("qk", "1.0"), ("c", "scale c")):
        file, row = files[name].split(",")
        assert file == "tgt.log" and mark in lines[int(row) - 1].replace("1,", "1.0,"), name
    (finding,) = whence.compare(ref, tgt).findings
    row = int(finding.printed_at[0].rpartition(":")[2])
    assert finding.printed_at == (f"ref.log:{row}", f"tgt.log:{row + 1}")
