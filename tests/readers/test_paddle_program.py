"""Programs and weights of Paddle: read without it, compared without values, and beside logs."""

import json
import re
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hostile import survives, variants
from paddle_text import Model

import whence
from whence.cli import main
from whence.errors import ElementsMissing, UsageError
from whence.readers import open_run

DATA = Path(__file__).parent.parent / "data" / "paddle"
LEGACY, BUG, PIR = (
    DATA / "tiny_legacy.pdmodel",
    DATA / "tiny_legacy_bug.pdmodel",
    DATA / "tiny_pir_model.json",
)


# ---- a protobuf writer, independent of the reader


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields):
    """(number, int | float | bytes | str): a protobuf message."""
    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def variable(name, shape=(4,), dtype=5, persistable=False):
    tensor = message((1, dtype), *((2, n) for n in shape))
    return message(
        (1, name), (2, message((1, 7), (3, message((1, tensor), (2, 0))))), (3, int(persistable))
    )


def operator(op, inputs, outputs, attributes=()):
    slots = [(1, message((1, slot), *((2, n) for n in names))) for slot, names in inputs.items()]
    slots += [(2, message((1, slot), *((2, n) for n in names))) for slot, names in outputs.items()]
    return message(*slots, (3, op), *((4, attribute) for attribute in attributes))


def program(*blocks):
    """blocks: (variables, operators)."""
    out = b""
    for i, (variables, operators) in enumerate(blocks):
        head = ((1, i), (2, -1 if i == 0 else 0))
        out += message(
            (1, message(*head, *((3, v) for v in variables), *((4, o) for o in operators)))
        )
    return out


def of_model(model):
    """The ProgramDesc of a model of paddle_text."""
    operators = []
    for name, (op, inputs) in model.edges.items():
        attributes = (
            [message((1, "scale"), (2, 1), (4, model.factor if name == "scale_1.tmp_0" else 0.35))]
            if op == "scale"
            else []
        )
        operators.append(
            operator(op, {slot: [one] for slot, one in inputs.items()}, {"Out": [name]}, attributes)
        )
    return program(([variable(name, (-1, 4, 16)) for name in model.edges], operators))


def calls_of(run):
    return sorted((c for c in run.calls if c.scope), key=lambda c: c.order)


# ---- reading


def test_a_legacy_program_is_calls_with_attributes_and_data_flow():
    run = open_run(LEGACY)
    calls = calls_of(run)
    assert len(calls) == 72
    first, scale = calls[0], next(c for c in calls if c.scope == "scale_4.tmp_0")
    assert (first.scope, first.op_type, first.arguments) == (
        "embedding_0.tmp_0",
        "lookup_table_v2",
        {"padding_idx": -1},
    )
    assert scale.arguments["scale"] == 0.35355338
    maker = next(c for c in calls if c.slots("output")[0].record == scale.slots("input")[0].record)
    assert maker.scope == "matmul_v2_8.tmp_0"
    record = run.records[first.slots("param")[0].record]
    assert (record.dtype, record.shape, first.slots("param")[0].slot) == (
        "float32",
        (48, 16),
        "param.embedding_0.w_0",
    )
    with pytest.raises(ElementsMissing, match="a program has no values"):
        run.array(record.id)


def test_a_pir_program_is_named_by_layer_and_operator_and_holds_its_constants():
    calls = calls_of(open_run(PIR))
    assert len(calls) == 40
    assert [c.scope for c in calls[:3]] == [
        "Embedding.embedding_0",
        "Block.RMSNorm.elementwise_pow_0",
        "Block.RMSNorm.mean_0",
    ]
    assert calls[1].arguments == {"input.1": 2.0}
    assert calls[3].arguments["bias"] == 1e-6  # a float32, as short as it goes
    assert [r.slot for r in calls[0].refs if r.slot.startswith("param")] == [
        "param.embedding_0.w_0"
    ]


@pytest.mark.parametrize(
    ("field", "value", "code", "want"),
    [
        (3, -7, 0, -7),
        (4, 0.1, 1, 0.1),
        (5, "text", 2, "text"),
        (10, 1, 6, True),
        (13, -(1 << 40), 9, -(1 << 40)),
        (6, b"\x01\x02", 3, [1, 2]),
        (7, struct.pack("<2f", 0.5, 2), 4, [0.5, 2.0]),
        (11, b"\x01\x00", 7, [True, False]),
        (8, "one", 5, ["one"]),
        (15, varint(-3), 11, [-3]),
        (16, struct.pack("<d", 0.1), 12, [0.1]),
        (19, b"", 3, []),
    ],
)
def test_attributes_of_every_type(tmp_path, field, value, code, want):
    """Repeated numbers packed, as some writers do; empty lists have no entry."""
    given = message((1, "a"), (2, code), *([] if value == b"" else [(field, value)]))
    (tmp_path / "x.pdmodel").write_bytes(
        program(([variable("y")], [operator("op", {}, {"Out": ["y"]}, [given])]))
    )
    (call,) = calls_of(open_run(tmp_path / "x.pdmodel"))
    assert call.arguments == {"a": want}
    assert [type(one) for one in np.atleast_1d(np.array(call.arguments["a"], object)).tolist()] == [
        type(one) for one in np.atleast_1d(np.array(want, object)).tolist()
    ]


def test_repeated_numbers_that_are_not_packed(tmp_path):
    given = message((1, "axis"), (2, 3), (6, 1), (6, -2))
    (tmp_path / "x.pdmodel").write_bytes(
        program(([variable("y")], [operator("op", {}, {"Out": ["y"]}, [given])]))
    )
    assert calls_of(open_run(tmp_path / "x.pdmodel"))[0].arguments == {"axis": [1, -2]}


def test_a_name_written_twice_is_two_tensors_and_blocks_are_inside_their_operator(tmp_path):
    inner = ([variable("z")], [operator("increment", {"X": ["y"]}, {"Out": ["y"]})])
    outer = [
        operator("feed", {"X": ["feed"]}, {"Out": ["x"]}),
        operator("mul", {"X": ["x"]}, {"Out": ["y"]}),
        operator(
            "while", {"X": ["y"]}, {"Out": ["y"]}, [message((1, "sub_block"), (2, 8), (12, 1))]
        ),
        operator("relu", {"X": ["y"]}, {"Out": ["z"]}),
        operator("fetch", {"X": ["z"]}, {"Out": ["fetch"]}),
    ]
    (tmp_path / "x.pdmodel").write_bytes(
        program(([variable("x"), variable("y"), variable("z")], outer), inner)
    )
    run = open_run(tmp_path / "x.pdmodel")
    calls = {c.op_type: c for c in calls_of(run)}
    assert list(calls) == ["mul", "while", "increment", "relu"]
    assert run.calls[calls["increment"].parent] == calls["while"]
    last = calls["relu"].slots("input")[0].record
    assert (
        last
        == calls["increment"].slots("output")[0].record
        != calls["mul"].slots("output")[0].record
    )


# ---- two programs


def test_two_programs_differ_in_exactly_one_attribute():
    result = whence.compare(LEGACY, BUG)
    (finding,) = result.findings
    assert (result.status, result.evidence, finding.name, finding.confidence) == (
        "different",
        "program",
        "scale_4.tmp_0",
        "certain",
    )
    assert finding.sentence == "scale of scale_4.tmp_0: 0.35355338 against 0.355"
    assert any("exactly one attribute differs" in note for note in result.notes)


@pytest.mark.parametrize("path", [LEGACY, PIR])
def test_equal_programs_are_undecided_since_nothing_was_measured(path, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        main(["compare", str(path), str(path), "-o", str(tmp_path / "cmp")])
    text = capsys.readouterr().out
    assert done.value.code == 2
    assert re.search(
        r"^UNDECIDED +the programs are equal: \d+ operators with \d+ attributes; nothing was run",
        text,
    )


def changed(tmp_path, change):
    tree = json.loads(PIR.read_text())
    ops = tree["program"]["regions"][0]["blocks"][0]["ops"]
    change(ops)
    (tmp_path / "b.json").write_text(json.dumps(tree, separators=(",", ":")))
    return whence.compare(PIR, tmp_path / "b.json")


def test_a_constant_of_a_pir_program_that_differs(tmp_path):
    def change(ops):
        full = [op for op in ops if op["#"] == "1.full"][1]
        next(a for a in full["A"] if a["N"] == "value")["AT"]["D"] = 0.9

    result = changed(tmp_path, change)
    (finding,) = result.findings
    assert finding.name == "Block.RMSNorm.scale_0"
    assert finding.sentence == "input.1 of Block.RMSNorm.scale_0: 1.0 against 0.9"


def test_an_operator_that_only_one_program_runs(tmp_path):
    def change(ops):
        at = next(i for i, op in enumerate(ops) if op["#"] == "1.silu")
        one, after = (
            ops[at]["O"][0],
            {
                **ops[at],
                "#": "1.relu",
                "I": [{"%": ops[at]["O"][0]["%"]}],
                "O": [{**ops[at]["O"][0], "%": 9999}],
            },
        )
        ops.insert(at + 1, after)
        for op in ops[at + 2 :]:
            op["I"] = [{"%": 9999} if given.get("%") == one["%"] else given for given in op["I"]]

    result = changed(tmp_path, change)
    assert [f.sentence for f in result.findings] == [
        "only the target runs relu",
        "its input.0 comes from another operator in the target",
    ]
    assert (
        result.without_partner == {"target": ("Block.FFN.relu_0",)}
        or "relu_0" in result.without_partner["target"][0]
    )


def test_inputs_in_another_order(tmp_path):
    def change(ops):
        multiply = [op for op in ops if op["#"] == "1.multiply"][-3]
        multiply["I"] = multiply["I"][::-1]

    result = changed(tmp_path, change)
    assert result.status == "different"
    assert "comes from another operator" in result.findings[0].sentence


def test_a_program_has_nothing_to_face_a_log():
    with pytest.raises(UsageError, match="--program"):
        whence.compare(DATA / "pir_run_a.log", PIR)


# ---- beside logs


@pytest.fixture
def logged(tmp_path):
    """Logs and programs of a model and of one whose second scale has another factor."""
    for name, factor in (("a", 0.35), ("b", 0.36)):
        model = Model(factor=factor)
        (tmp_path / f"{name}.log").write_text(model.log())
        (tmp_path / f"{name}.pdmodel").write_bytes(of_model(model))
    return tmp_path


def test_programs_beside_logs_give_data_flow_and_the_attribute(logged, capsys):
    a, b, *programs = (str(logged / name) for name in ("a.log", "b.log", "a.pdmodel", "b.pdmodel"))
    with pytest.raises(SystemExit) as done:
        main(
            [
                "compare",
                a,
                b,
                "--program",
                programs[0],
                "--program",
                programs[1],
                "-o",
                str(logged / "cmp"),
            ]
        )
    text = capsys.readouterr().out
    assert done.value.code == 1
    assert text.startswith(
        "PROGRAMS           exactly one attribute differs: scale of scale_1.tmp_0: 0.35 against "
        "0.36\n"
    )
    assert re.search(r"^FAULT +scale_1\.tmp_0 ", text, re.MULTILINE)
    assert re.search(r"^ +inputs +bitwise equal", text, re.MULTILINE)
    assert "scale of scale_1.tmp_0: 0.35 against 0.36" in text


def test_data_flow_tells_two_faults_from_one(logged):
    """Two branches go wrong apart from each other: without data flow the second may be the first's
    doing.
    """
    model = Model(factor=0.36)
    (logged / "b.log").write_text(model.log())
    run = whence.compare(logged / "a.log", logged / "b.log", program=logged / "a.pdmodel")
    assert [f.name for f in run.findings] == ["scale_1.tmp_0"]
    verdicts = {r.name: r.verdict for r in run.rows if r.step == 0}
    assert verdicts["softmax_1.tmp_0"] == "inherited"
    slots = {(r.name, r.reference_slot) for r in run.rows}
    assert ("tmp_1", "input.softmax_1.tmp_0") in slots
    assert ("tmp_1", "input.tmp_0") in slots


def test_what_a_program_tells_by_place_alone_names_no_innocent_call(tmp_path):
    """The program exported before passes has other wiring than what ran, and a log of PIR has no
    names that say so.
    """
    for name, factor in (("a", 0.35), ("b", 0.36)):
        model = Model(factor=factor)
        text = model.log()
        for number, made in enumerate(dict.fromkeys(made for _, _, made, _ in model.made)):
            text = text.replace(f" {made} ", f" 0x12ab_inner_var_{number} ")
        (tmp_path / f"{name}.log").write_text(text)
        model.edges["tmp_1"] = ("elementwise_add", {})
        (tmp_path / f"{name}.pdmodel").write_bytes(of_model(model))
    names = [made for _, _, made, _ in model.made]
    programs = [str(tmp_path / "a.pdmodel"), str(tmp_path / "b.pdmodel")]
    for replay in (True, False):
        result = whence.compare(
            tmp_path / "a.log", tmp_path / "b.log", program=programs, replay=replay
        )
        assert [f.name for f in result.findings] == [f"inner_var.{names.index('scale_1.tmp_0')}"]


def test_one_program_for_both_runs_says_nothing_of_the_targets_attributes(logged):
    pytest.importorskip("torch")
    (found,) = whence.compare(
        logged / "a.log", logged / "b.log", program=logged / "a.pdmodel"
    ).findings
    assert found.cause == ""


def test_what_neither_log_printed_is_passed(logged):
    for name, factor in (("a", 0.35), ("b", 0.36)):
        model = Model(factor=factor)
        model.made = [one for one in model.made if one[1] != "matmul_v2"]
        (logged / f"{name}.log").write_text(model.log())
    result = whence.compare(logged / "a.log", logged / "b.log", program=logged / "a.pdmodel")
    rows = {(r.name, r.reference_slot): r.reference_record for r in result.rows if r.step == 0}
    assert rows["scale_0.tmp_0", "input.embedding_0.tmp_0"] == rows["embedding_0.tmp_0", "output.0"]
    assert [f.name for f in result.findings] == ["scale_1.tmp_0"]


def test_what_one_log_passes_and_the_other_shows_is_not_held_against_each_other(logged):
    """Fused operators: the scale of one log reads the product that the other log does not have."""
    fused = Model(noise=1e-7)
    fused.made = [one for one in fused.made if one[1] != "matmul_v2"]
    (logged / "b.log").write_text(fused.log())
    for pair in (("a.log", "b.log"), ("b.log", "a.log")):
        result = whence.compare(
            *(logged / name for name in pair), program=logged / "a.pdmodel", min_coverage=0.5
        )
        assert (result.status, result.findings, result.incomparable) == ("same", (), 0)
        assert not any(
            r.name == "scale_0.tmp_0" and r.reference_slot.startswith("input") for r in result.rows
        )


def test_a_log_with_data_flow_against_one_without(logged):
    (logged / "b.log").write_text(Model(factor=0.36).log(edges=True))
    for pair in (("a.log", "b.log"), ("b.log", "a.log")):
        result = whence.compare(*(logged / name for name in pair))
        assert [f.name for f in result.findings] == ["scale_1.tmp_0"]


@pytest.mark.parametrize(
    ("program", "known"),
    [
        (PIR, 39),  # all but the embedding, which reads the model's input
        (LEGACY, 36),  # has other names of types, and no constants of its own
    ],
)
def test_a_program_is_laid_on_a_pir_log_in_order(program, known):
    log = DATA / "pir_run_a.log"
    result = whence.compare(log, log, program=program)
    names = {r.name for r in result.rows if r.reference_slot.startswith("input")}
    assert (result.status, len(names)) == ("same", known)


def test_the_wrong_program_is_refused(logged):
    with pytest.raises(
        UsageError, match=r"is not the program of .*: it writes 6 of its 20 tensors"
    ):
        whence.compare(logged / "a.log", logged / "b.log", program=PIR)
    with pytest.raises(UsageError, match=r"one .* or two"):
        whence.compare(logged / "a.log", logged / "b.log", program=[PIR] * 3)
    with pytest.raises(UsageError, match="is not a program"):
        whence.compare(logged / "a.log", logged / "b.log", program=logged / "a.log")


@pytest.mark.shared
def test_samples_with_their_programs(shared):
    folder = shared / "samples" / "paddle"
    result = whence.compare(
        folder / "s0_legacy_a.log", folder / "s0_legacy_b_scale_attr.log", program=(LEGACY, BUG)
    )
    assert [f.name for f in result.findings] == ["scale_4.tmp_0"]
    words = "scale is 0.35355338 in the reference, 0.355 in the target"
    assert words in result.findings[0].sentence
    assert result.findings[0].cause == "semantic"
    same = whence.compare(
        folder / "s0_legacy_a.log", folder / "s0_legacy_d_ulp.log", program=LEGACY
    )
    assert (same.status, same.findings) == ("same", ())


# ---- weights

CODES = {"bool": 0, "int16": 1, "int32": 2, "int64": 3, "float16": 4, "float32": 5, "float64": 6, "uint8": 20, "int8": 21, "bfloat16": 22,
         "complex64": 23, "complex128": 24, "float8_e4m3fn": 32, "float8_e5m2": 33}  # fmt: skip


def stream(array, code, lod=()):
    desc = message((1, code), *((2, n) for n in array.shape))
    levels = b"".join(struct.pack("<Q", len(one)) + one for one in lod)
    return (
        struct.pack("<IQ", 0, len(lod))
        + levels
        + struct.pack("<Ii", 0, len(desc))
        + desc
        + array.tobytes()
    )


def weights(path, change=None):
    """The weights of the sample program, made by hand in the order of their names."""
    draw = np.random.default_rng(0)
    arrays = {}
    run = open_run(LEGACY)
    for call in run.calls:
        for ref in call.slots("param"):
            arrays[ref.slot[6:]] = draw.normal(size=run.records[ref.record].shape).astype(
                np.float32
            )
    if change:
        change(arrays)
    path.write_bytes(b"".join(stream(arrays[name], 5) for name in sorted(arrays)))
    return arrays


def test_weights_have_the_names_of_the_program_beside_them(tmp_path):
    arrays = weights(tmp_path / "m.pdiparams")
    shutil.copy(LEGACY, tmp_path / "m.pdmodel")
    run = open_run(tmp_path / "m.pdiparams")
    got = {
        f"{c.scope}.{r.slot[6:]}": run.array(r.record) for c in run.calls for r in c.slots("param")
    }
    assert sorted(got) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("dtype", CODES)
def test_weights_of_every_dtype(tmp_path, dtype):
    kind = (
        np.dtype(getattr(ml_dtypes, dtype))
        if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
        else np.dtype(dtype)
    )
    array = (
        np.arange(6).reshape(2, 3) % 2 if dtype == "bool" else np.arange(6).reshape(2, 3)
    ).astype(kind)
    blob = (
        stream(array, CODES[dtype])
        + stream(array[:0], CODES[dtype])
        + stream(array[0, 0], CODES[dtype], lod=[b"\0" * 16])
    )
    (tmp_path / "x.pdiparams").write_bytes(blob)
    run = open_run(tmp_path / "x.pdiparams")
    assert [(r.dtype, r.shape) for r in run.records] == [
        (dtype, (2, 3)),
        (dtype, (0, 3)),
        (dtype, ()),
    ]
    np.testing.assert_array_equal(run.array(0), array)
    assert run.array(0).dtype == kind
    assert run.array(2) == array[0, 0]


def test_a_weight_that_differs_is_named(tmp_path):
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        shutil.copy(LEGACY, tmp_path / side / "m.pdmodel")
    weights(tmp_path / "a" / "m.pdiparams")

    def change(arrays):
        arrays["create_parameter_4.w_0"][3, 5] += 1

    weights(tmp_path / "b" / "m.pdiparams", change)
    result = whence.compare(tmp_path / "a" / "m.pdiparams", tmp_path / "b" / "m.pdiparams")
    (finding,) = result.findings
    assert (result.status, finding.name, finding.verdict) == (
        "different",
        "create_parameter_4",
        "param-diff",
    )
    assert "[3, 5]" in finding.sentence
    assert (
        whence.compare(tmp_path / "a" / "m.pdiparams", tmp_path / "a" / "m.pdiparams").status
        == "same"
    )


def test_the_program_of_other_weights_gives_no_names(tmp_path):
    (tmp_path / "m.pdiparams").write_bytes(stream(np.ones(3, np.float32), 5))
    shutil.copy(LEGACY, tmp_path / "m.pdmodel")
    run = open_run(tmp_path / "m.pdiparams")
    assert [c.scope for c in run.calls if c.slots("param")] == ["tensor"]
    assert "other weights" in run.notes[0].text


def test_weights_that_break_off(tmp_path):
    blob = stream(np.ones(3, np.float32), 5) + stream(np.ones(4, np.float32), 5)[:-1]
    (tmp_path / "m.pdiparams").write_bytes(blob)
    run = open_run(tmp_path / "m.pdiparams")
    assert run.array(0).tolist() == [1, 1, 1]
    with pytest.raises(ElementsMissing, match="needs 16 bytes, 15 are left"):
        run.array(1)


# ---- damage


@pytest.mark.parametrize("path", [LEGACY, PIR], ids=["pdmodel", "json"])
def test_damaged_programs(tmp_path, path):
    for what, spoilt in variants(path, tmp_path):
        survives(what, spoilt)


def test_damaged_weights(tmp_path):
    (tmp_path / "work").mkdir()
    weights(tmp_path / "m.pdiparams")
    for what, spoilt in variants(tmp_path / "m.pdiparams", tmp_path / "work"):
        survives(what, spoilt)


def test_blocks_that_run_each_other_end(tmp_path):
    """Each of 30 blocks runs the next one twice, and the last the first: a tree of a billion
    operators.
    """

    def runs(*blocks):
        return message((1, "sub_block"), (2, 10), *((14, b) for b in blocks))

    blocks = [
        ([variable("y")], [operator("while", {}, {"Out": ["y"]}, [runs((i + 1) % 30)])] * 2)
        for i in range(30)
    ]
    (tmp_path / "x.pdmodel").write_bytes(program(*blocks))
    run = survives("", tmp_path / "x.pdmodel")
    assert run is not None
    assert len(run.calls) < 100
