"""What llama-eval-callback prints: nodes, edges and steps, what is left out, older forms of the
text, and damage.
"""

from pathlib import Path

import numpy as np
import pytest

import whence
from readers.hostile import survives, variants
from whence.api import open_run
from whence.cli import execute
from whence.errors import ElementsMissing

DATA = Path(__file__).parent.parent / "data" / "llama_cpp"


def test_nodes_have_sources_shapes_and_steps():
    run = open_run(DATA / "reference.log")
    calls = sorted((c for c in run.calls if c.scope), key=lambda c: c.order)
    assert [(c.scope, c.op_type, c.step) for c in calls[:4]] == [
        ("inp_embd", "GET_ROWS", 0),
        ("norm-0", "RMS_NORM", 0),
        ("attn_norm-0", "MUL", 0),
        ("ffn_out-0", "MUL_MAT", 0),
    ]
    assert {c.step for c in calls} == {0, 1}
    assert calls[1].slots("input")[0].record == calls[0].slots("output")[0].record, (
        "a copy on another device is the tensor it copies"
    )
    assert calls[0].arguments == {
        "input.0": "token_embd.weight [40, 16]",
        "input.1": "inp_tokens [1, 8]",
    }
    embedded = run.records[calls[0].slots("output")[0].record]
    assert (embedded.dtype, embedded.shape, embedded.whole, embedded.quantum) == (
        "float32",
        (6, 6),
        (8, 16),
        1e-4,
    )
    later = run.records[next(c for c in calls if c.step == 1).slots("output")[0].record]
    assert (later.shape, later.whole) == ((1, 6), (1, 16))


def test_values_are_those_of_the_model_to_the_printed_digit():
    rng = np.random.default_rng(3)
    table = rng.standard_normal((40, 16))
    for _ in range(2):
        rng.standard_normal(16), rng.standard_normal((16, 16))
    embedded = table[rng.integers(0, 40, 8)]
    shown = np.r_[0:3, 5:8][:, None], np.r_[0:3, 13:16][None, :]
    run = open_run(DATA / "reference.log")
    record = (
        next(c for c in run.calls if c.scope == "inp_embd" and c.step == 0)
        .slots("output")[0]
        .record
    )
    np.testing.assert_allclose(run.array(record), embedded[shown], atol=0.5001e-4)
    assert run.records[record].columns["sum"] == pytest.approx(embedded.sum(), abs=1e-5)


def test_the_norm_with_another_epsilon_is_named_and_a_text_that_leaves_out_is_never_the_same(
    capsys, tmp_path
):
    assert (
        execute(
            [
                "compare",
                str(DATA / "reference.log"),
                str(DATA / "norm_eps.log"),
                "-o",
                str(tmp_path / "cmp"),
            ]
        )
        == 1
    )
    assert capsys.readouterr().out.startswith("FAULT              norm-1   RMS_NORM")
    result = whence.compare(DATA / "reference.log", DATA / "clean.log")
    assert (result.status, result.findings) == ("undecided", ())


LONE = """ggml_debug:             norm-0 = (f32)       RMS_NORM(inp_embd{{4, 2, 1, 1}}, }}) = {{{ne}}}
                                     [
                                      [
{rows}
                                      ],
                                     ]
"""


@pytest.mark.parametrize(
    ("ne", "rows", "shape", "whole", "quantum"),
    [
        ("4, 2, 1, 1", "[ -0.5, 0.25, nan, inf],\n[ 1.0, 2.0, 3.0, 4.0],", (2, 4), (), 0.01),
        (
            "8, 2, 1, 1",
            "[ -0.6989,   1.0636,   1.0636, ...],\n[ 1.0000, 2.0000, 3.0000, ...],",
            (2, 3),
            (2, 8),
            1e-4,
        ),
        ("3", "[ 1.0000, 2.0000, 3.0000],", (3,), (), 1e-4),
    ],
)
def test_whole_tensors_old_texts_and_what_is_not_finite(tmp_path, ne, rows, shape, whole, quantum):
    (tmp_path / "a.log").write_text(LONE.format(ne=ne, rows=rows))
    run = open_run(tmp_path / "a.log")
    record = run.records[0]
    if len(shape) == 1:  # a matrix of one row is printed for a vector
        assert run.array(0).shape == shape
    assert (record.shape, record.whole, record.quantum) == (shape, whole, pytest.approx(quantum))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("[ 1.0, 2.0, 3.0, 4.0],\n[ 1.0, 2.0],", "different lengths"),
        ("[ 1.0, 2.0, 3.0, 4.0, 5.0],\n[ 1.0, 2.0, 3.0, 4.0, 5.0],", "prints"),
    ],
)
def test_values_that_do_not_fit_cost_their_tensor(tmp_path, rows, why):
    (tmp_path / "a.log").write_text(LONE.format(ne="4, 2, 1, 1", rows=rows))
    run = open_run(tmp_path / "a.log")
    with pytest.raises(ElementsMissing, match=why):
        run.array(0)


def test_a_text_that_was_cut_loses_its_last_tensor_only(tmp_path):
    text = (DATA / "reference.log").read_text()
    (tmp_path / "cut.log").write_text(text[: int(len(text) * 0.52)])
    run = open_run(tmp_path / "cut.log")
    assert [bool(r.why) for r in run.records] == [False] * (len(run.records) - 1) + [True]
    assert "ends within" in run.records[-1].why


def test_damaged_texts_open_or_are_refused(tmp_path):
    for what, path in variants(DATA / "norm_eps.log", tmp_path):
        survives(what, path, "llama_cpp")


def test_lines_without_end_are_read_in_time(tmp_path):
    for name, text in (
        ("long", "x" * 5_000_000),
        ("almost", "ggml_debug: " + "a = (f32) " * 200_000 + ") = {"),
        ("open", "[\n" * 200_000),
    ):
        path = tmp_path / f"{name}.log"
        path.write_text("ggml_debug:  n = (f32) ADD(a{1}, }) = {1}\n" + text)
        survives(name, path, "llama_cpp")


def printed(folder, name, *, rope=1.0):
    """Two layers that write what they made into a cache and read it again; of 32 columns 6 are
    shown.
    """
    rng, lines = np.random.default_rng(7), []

    def node(name, op, of, value):
        value = np.atleast_2d(value)
        shown = np.r_[0:3, value.shape[1] - 3 : value.shape[1]]
        rows = "".join(
            f"   [ {', '.join(f'{v:.4f}' for v in row[shown][:3])}, ..., "
            f"{', '.join(f'{v:.4f}' for v in row[shown][3:])} ],\n"
            for row in value
        )
        sources = (
            ", ".join(f"{s}{{32, 4, 1, 1}}" for s in of)
            if len(of) > 1
            else f"{of[0]}{{32, 4, 1, 1}}, "
        )
        lines.append(
            f"ggml_debug: {name} = (f32) {op}({sources}}}) = {{32, 4, 1, 1}}\n [\n  [\n{rows}  "
            f"],\n ]\n sum = {value.sum():f}\n"
        )
        return value

    x = node("embd", "GET_ROWS", ["token_embd.weight", "inp_tokens"], rng.standard_normal((4, 32)))
    for layer in range(2):
        turned = node(
            f"Kcur-{layer}",
            "ROPE",
            ["embd" if layer == 0 else "out-0", "inp_pos"],
            np.roll(x, 1, 1) * (rope if layer == 0 else 1),
        )
        node(f"cache_k_l{layer} (view)", "SET_ROWS", [f"Kcur-{layer}", "idxs"], turned)
        turned = node(f"cache_k_l{layer} (view)", "VIEW", [f"cache_k_l{layer}"], turned)
        x = node(
            f"out-{layer}",
            "MUL_MAT",
            ["blk.weight", f"cache_k_l{layer} (view)"],
            turned @ rng.standard_normal((32, 32)),
        )
    (folder / name).write_text("".join(lines))
    return folder / name


def test_a_cache_is_what_was_written_into_it(tmp_path):
    base = printed(tmp_path, "reference.log")
    result = whence.compare(base, printed(tmp_path, "rope.log", rope=1.5))
    assert [f.name for f in result.findings] == ["Kcur-0"]
