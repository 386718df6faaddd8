"""ATB dumps: headers in all variants, trees of operators, tokens and ranks, topologies; the traps
that the vendor's tool falls into.
"""

import json
import shutil
from pathlib import Path

import ascend_files as af
import hostile
import numpy as np
import pytest

import whence
from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import open_run

DATA = Path(__file__).parents[1] / "data" / "ascend"
EXPECTED = json.loads((DATA / "expected.json").read_text())


def leaf(run, scope):
    (call,) = [c for c in run.calls if c.scope == scope]
    return call


def output(run, scope):
    return run.array(leaf(run, scope).slots("output")[0].record)


@pytest.mark.parametrize("name", ["f32", "f16", "i8", "i32", "i64", "bool", "bf16"])
def test_elements_of_the_samples(name):
    wanted = EXPECTED[f"atb/{name}"]
    found = output(open_run(DATA / "atb"), name)
    assert list(found.shape) == wanted["shape"]
    np.testing.assert_array_equal(found.astype(np.float64).ravel(), wanted["f64"])
    single = open_run(DATA / "atb" / name / "after" / "outtensor0.bin")
    assert single.array(0).tobytes() == found.tobytes()


def test_variants_of_the_samples():
    run = open_run(DATA / "atb")
    whole = (DATA / "atb" / "trap_newline_in_data" / "after" / "outtensor0.bin").read_bytes()
    assert output(run, "trap_newline_in_data").tobytes() == whole[-16:]
    twice = (DATA / "atb" / "trap_append_twice" / "after" / "outtensor0.bin").read_bytes()
    assert output(run, "trap_append_twice").tobytes() == twice[-24:]
    view = (DATA / "atb" / "tensor_view_variant" / "t.bin").read_bytes()
    assert output(run, "tensor_view_variant_t").tobytes() == view[view.index(b"$End=1\n") + 7 :]
    assert any("holds 2 records" in n.text for n in run.notes)
    for name, why in (
        ("desc_only", "description only"),
        ("stats", "statistics only"),
        ("link", "'2_1_outtensor0.bin', which is not in the dump"),
    ):
        with pytest.raises(ElementsMissing, match=why):
            output(run, name)
    figures = run.records[leaf(run, "stats").refs[0].record].statistics
    assert (figures.count, figures.min, figures.max, figures.mean, figures.norm) == (
        6,
        0,
        5,
        2.5,
        7.416198,
    )


def test_a_value_may_hold_a_sign_of_equality_and_unknown_attributes_are_kept(tmp_path):
    path = tmp_path / "outtensor0.bin"
    path.write_bytes(
        b"$Version=1.0\nnote=a=b=c\ndtype=3\ndims=2\nformat=2\n$End=1\n"
        + np.array([7, 8], "<i4").tobytes()
    )
    np.testing.assert_array_equal(open_run(path).array(0), [7, 8])


def test_a_scalar_and_an_object_that_does_not_begin_at_once(tmp_path):
    raw = b"\xff" * 4 + np.array(2.5, "<f4").tobytes()
    (tmp_path / "outtensor0.bin").write_bytes(
        f"$Version=1.0\n$Object.Count=1\n$Object.Length={len(raw)}\nformat=2\ndtype=0\ndims=\n$Object.data=4,4\n$End=1\n".encode()
        + raw
    )
    found = open_run(tmp_path / "outtensor0.bin").array(0)
    assert found.shape == ()
    assert found == 2.5


def test_names_of_files_of_all_ages_before_and_after(tmp_path):
    a, b, c = (np.full((2, 5), k, np.float32) for k in (1, 2, 3))
    at = tmp_path / "atb_temp" / "tensors" / "cpu_7" / "0" / "0_AddOperation"
    af.atb(at / "before" / "inTensor10.bin", a)
    af.atb(at / "before" / "intensor2_x.bin", b)
    af.atb(at / "after" / "intensor2_x.bin", c)
    af.atb(at / "before" / "outtensor0.bin", a)
    af.atb(at / "after" / "outTensor0_output.bin", b)
    run = open_run(tmp_path)
    call = leaf(run, "AddOperation.0")
    assert [r.slot for r in call.refs] == ["input.2", "input.10", "output.0", "mutated.2"]
    assert [run.array(r.record)[0, 0] for r in call.refs] == [2, 1, 2, 3]


def test_an_input_that_was_not_changed_is_not_said_to_be(tmp_path):
    at = tmp_path / "tensors" / "cpu_7" / "0" / "0_AddOperation"
    for when in ("before", "after"):
        af.atb(at / when / "intensor0.bin", np.arange(9, dtype=np.float32))
    assert [r.slot for r in leaf(open_run(tmp_path), "AddOperation.0").refs] == ["input.0"]


def test_references_to_other_files_are_the_same_tensor(tmp_path):
    base = tmp_path / "msit_dump_20250101_000000" / "tensors" / "npu0_1" / "0"
    made = np.arange(12, dtype=np.float32)
    af.atb(base / "2_Layer" / "1_AddOperation" / "after" / "outtensor0_y.bin", made)
    for name, data in (
        ("3_MulOperation", "2_1_outtensor0.bin"),
        ("4_SubOperation", "3_intensor0.bin"),
        ("5_Loop", "5_intensor0.bin"),
        ("6_Out", "../../x"),
    ):
        path = base / name / "before" / "intensor0.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(
            f"$Version=1.0\n$Object.Count=0\n$Object.Length=0\nformat=2\ndtype=0\ndims=12\ndata={data}\n$End=1\n".encode()
        )
    run = open_run(tmp_path)
    records = [
        leaf(run, s).refs[0].record
        for s in ("Layer.2.AddOperation.1", "MulOperation.3", "SubOperation.4")
    ]
    assert len(set(records)) == 1
    np.testing.assert_array_equal(run.array(records[0]), made)
    for scope in ("Loop.5", "Out.6"):
        with pytest.raises(ElementsMissing, match="not in the dump"):
            run.array(leaf(run, scope).refs[0].record)


def test_operators_are_a_tree_in_the_order_of_their_numbers(tmp_path):
    a = np.arange(9, dtype=np.float32)
    base = tmp_path / "tensors" / "npu1_4" / "0"
    for name in ("10_B", "2_A/11_Y", "2_A/3_X"):
        af.atb(base / name / "after" / "outtensor0.bin", a)
    calls = sorted(open_run(tmp_path).calls, key=lambda c: c.order)
    assert [c.scope for c in calls] == ["", "A.2", "A.2.X.3", "A.2.Y.11", "B.10"]
    assert [c.op_type for c in calls] == ["", "A", "X", "Y", "B"]


def test_devices_are_ranks_and_folders_are_tokens(tmp_path):
    a = np.arange(9, dtype=np.float32)
    for device, pid, token in ((3, 11, 0), (1, 12, 0), (1, 12, 10)):
        af.atb(tmp_path / f"tensors/npu{device}_{pid}/{token}/0_A/after/outtensor0.bin", a)
    assert [(c.rank, c.step) for c in open_run(tmp_path).calls if c.leaf] == [
        (1, 0),
        (3, 0),
        (1, 10),
    ]
    af.atb(tmp_path / "one/tensors/991_992/0_A/after/outtensor0.bin", a)
    assert [(c.rank, c.step, c.scope) for c in open_run(tmp_path / "one").calls if c.leaf] == [
        (0, 0, "A.0")
    ]


def node(name, kind, inputs=(), outputs=(), **more):
    return {
        "opName": name,
        "opType": kind,
        "inTensors": list(inputs),
        "outTensors": list(outputs),
        "param": {"k": 1},
        **more,
    }


def test_a_topology_names_weights_and_settings(tmp_path):
    dump = tmp_path / "msit_dump_1"
    model = {
        "modelName": "M",
        "nodes": [
            node(
                "L_3",
                "Layer",
                nodes=[node("Linear_0", "LinearOperation", ["M_internal_0", "M_weight_7"])],
            )
        ],
    }
    (dump / "model/99").mkdir(parents=True)
    (dump / "model/99/M.json").write_text(json.dumps(model))
    for k in range(2):
        af.atb(
            dump / f"tensors/npu0_99/0/3_Layer/0_LinearOperation/before/intensor{k}.bin",
            np.arange(9, dtype=np.float32) + k,
        )
    call = leaf(open_run(tmp_path), "Layer.3.LinearOperation.0")
    assert [r.slot for r in call.refs] == ["input.0", "param.weight"]
    assert (call.arguments, call.source) == ({"k": 1}, "Linear_0")


@pytest.mark.parametrize(
    ("constant", "slots"), [(True, ["input.0", "param.weight"]), (False, ["input.0", "input.1"])]
)
def test_without_a_topology_a_weight_is_what_stays_the_same(tmp_path, constant, slots):
    for token in range(3):
        at = tmp_path / f"tensors/npu0_99/{token}/0_LinearOperation/before"
        af.atb(at / "intensor0.bin", np.arange(9, dtype=np.float32) + token)
        af.atb(at / "intensor1.bin", np.arange(81, dtype=np.float32) + (0 if constant else token))
    assert {tuple(r.slot for r in c.refs) for c in open_run(tmp_path).calls if c.leaf} == {
        tuple(slots)
    }


def test_prefill_and_decoding_in_one_folder_are_tokens_apart(tmp_path):
    a = np.arange(9, dtype=np.float32)
    for name, first in (("Prefill", 0), ("Decode", 2)):
        (tmp_path / "model/5").mkdir(parents=True, exist_ok=True)
        nodes = [node(f"L_{first + k}", "Layer") for k in range(2)]
        (tmp_path / f"model/5/{name}.json").write_text(
            json.dumps({"modelName": name, "nodes": nodes})
        )
    for folder, operators in (("0", (0, 1, 2, 3)), ("1", (0, 1, 2, 3)), ("2", (2, 3))):
        for k in operators:
            af.atb(tmp_path / f"tensors/npu0_5/{folder}/{k}_Layer/after/outtensor0.bin", a)
    run = open_run(tmp_path)
    assert [(c.step, c.scope) for c in run.calls if c.leaf] == [
        (t, f"Layer.{k}") for t, k in ((0, 0), (0, 1), (1, 2), (1, 3), (2, 2), (2, 3))
    ]
    assert any("warm-up" in n.text for n in run.notes)


@pytest.mark.shared
def test_a_real_topology_is_read(tmp_path, shared):
    source = shared / "samples/ascend/msit_atb_topology/Bloom7BFlashAttentionModel.json"
    model = json.loads(source.read_text())
    (tmp_path / "model/1").mkdir(parents=True)
    shutil.copy(source, tmp_path / "model/1")
    first, inner = model["nodes"][0], model["nodes"][0]["nodes"][0]
    for k, _ in enumerate(inner["inTensors"]):
        af.atb(
            tmp_path
            / f"tensors/npu0_1/0/3_{first['opType']}/0_{inner['opType']}/before/intensor{k}.bin",
            np.arange(9, dtype=np.float32) + k,
        )
    call = leaf(open_run(tmp_path), f"{first['opType']}.3.{inner['opType']}.0")
    assert [r.slot for r in call.refs] == ["input.0", "param.weight", "param.bias"]
    assert call.arguments == inner["param"]


# ---- section 3 of the format's description: what the vendor's comparison gets wrong


def pair(tmp_path, golden, mine):
    for side, array in (("golden", golden), ("mine", mine)):
        at = tmp_path / side / "tensors/npu0_1/0/0_AddOperation"
        af.atb(at / "before/intensor0.bin", np.arange(32, dtype=np.float32))
        af.atb(at / "after/outtensor0.bin", array)
    return whence.compare(tmp_path / "golden", tmp_path / "mine")


def row(found):
    (one,) = [
        r
        for r in found.rows
        if r.reference_slot.startswith("output") and r.name == "AddOperation.0"
    ]
    return one


F = np.float32
DRAW = np.random.default_rng(5).normal(size=(8, 8)).astype(F)


@pytest.mark.parametrize(
    ("golden", "mine"),
    [
        (np.zeros(64, F), np.ones(64, F)),
        (np.where(np.arange(64) % 2, 1e-8, -1e-8).astype(F), np.full(64, 1e-8, F)),
        (np.tile([True, False], 16), np.ones(32, bool)),
        (np.array([1 << 24] * 16, np.int64) + 1, np.array([1 << 24] * 16, np.int64)),
        (np.full(16, 1e300), np.full(16, 2e300)),
        (np.full(16, 1 + 1j, np.complex64), np.full(16, 1 - 1j, np.complex64)),
        (DRAW, 2 * DRAW),
        (np.ones(64, F), np.zeros(64, F)),
        (np.full(64, 70000, F), np.full(64, 65504, F)),
    ],
    ids=[
        "zeros",
        "tiny values of wrong sign",
        "bool",
        "int64 beyond float32",
        "float64 beyond float32",
        "imaginary part",
        "scaled",
        "shifted",
        "saturated",
    ],
)
def test_what_differs_is_different(tmp_path, golden, mine):
    found = pair(tmp_path, golden, mine)
    assert found.status == "different", found.headline
    assert found.findings[0].name == "AddOperation.0"


def test_shapes_are_compared(tmp_path):
    found = pair(tmp_path, np.arange(6, dtype=F).reshape(2, 3), np.arange(6, dtype=F).reshape(3, 2))
    assert found.status != "same"


def test_infinities_at_the_same_places_are_equal_and_elsewhere_are_not(tmp_path):
    mask = np.where(DRAW > 0, -np.inf, DRAW).astype(F)
    assert pair(tmp_path, mask, mask.copy()).status == "same"
    other = mask.copy()
    other[np.isfinite(mask).nonzero()[0][0], np.isfinite(mask).nonzero()[1][0]] = -np.inf
    assert pair(tmp_path / "b", mask, other).status == "different"


def test_float64_values_beyond_float32_are_compared_in_float64(tmp_path):
    assert pair(tmp_path, np.full(16, 1e300), np.full(16, 1e300)).status == "same"


def test_empty_tensors_do_not_end_the_comparison(tmp_path):
    found = pair(tmp_path, np.zeros((0, 4), F), np.zeros((0, 4), F))
    assert found.status == "same"


def test_a_transposed_order_in_memory_is_told(tmp_path):
    found = pair(tmp_path, DRAW, np.ascontiguousarray(DRAW.T))
    assert found.status == "different"
    assert row(found).measured.values["permuted"] == 1


def test_odd_names_and_open_folders_are_read(tmp_path):
    dump = tmp_path / "my dump (1), ünï&co"
    af.atb(dump / "tensors/npu0_1/0/0_AddOperation/after/outtensor0.bin", DRAW)
    dump.chmod(0o777)
    assert output(open_run(dump), "AddOperation.0").tobytes() == DRAW.tobytes()


def test_a_file_beyond_2_gb_is_mapped_not_loaded(tmp_path):
    path = tmp_path / "outtensor0.bin"
    count = 600_000_000
    with path.open("wb") as file:
        file.write(
            f"$Version=1.0\n$Object.Count=1\n$Object.Length={count * 4}\nformat=2\ndtype=0\ndims={count}\n"
            f"$Object.data=0,{count * 4}\n$End=1\n".encode()
        )
        start = file.tell()
        file.seek(start + 4 * (count - 1))
        file.write(np.float32(7).tobytes())
    found = open_run(path).array(0)
    assert found.shape == (count,)
    assert found[-1] == 7


def test_rows_are_in_the_order_of_execution_every_time(tmp_path):
    for side in ("golden", "mine"):
        for k in (10, 2, 1, 33):
            af.atb(
                tmp_path / side / f"tensors/npu0_1/0/{k}_AddOperation/after/outtensor0.bin",
                DRAW + k,
            )
    orders = {
        tuple(r.name for r in whence.compare(tmp_path / "golden", tmp_path / "mine").rows)
        for _ in range(2)
    }
    (order,) = orders
    assert [n for n in order if n.startswith("Add")] == [
        f"AddOperation.{k}" for k in (1, 2, 10, 33)
    ]


def test_damage_is_told(tmp_path):
    path = tmp_path / "tensors/npu0_1/0/0_AddOperation/after/outtensor0.bin"
    af.atb(path, DRAW)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UnreadableRun, match="246 of 256 bytes: the file was cut short"):
        open_run(tmp_path)
    af.atb(tmp_path / "tensors/npu0_1/0/1_MulOperation/after/outtensor0.bin", DRAW)
    with pytest.raises(ElementsMissing, match="246 of 256 bytes: the file was cut short"):
        output(open_run(tmp_path), "AddOperation.0")
    path.write_bytes(path.read_bytes().replace(b"dims=8,8", b"dims=8,x"))
    run = open_run(tmp_path)
    assert [n.kind for n in run.notes] == ["error"]
    with pytest.raises(ElementsMissing, match="'x' is not a number"):
        output(run, "AddOperation.0")
    (tmp_path / "alone.bin").write_bytes(b"$Version=1.0\n" + b"x=y\n" * 100_000)
    with pytest.raises((UnreadableRun, ElementsMissing)):
        open_run(tmp_path / "alone.bin").array(0)


def test_hostile(tmp_path):
    sample = tmp_path / "sample"
    for k in range(2):
        af.atb(sample / f"tensors/npu0_1/0/{k}_AddOperation/before/intensor0.bin", DRAW)
        af.atb(sample / f"tensors/npu0_1/0/{k}_AddOperation/after/outtensor0.bin", DRAW)
    (sample / "model/1").mkdir(parents=True)
    (sample / "model/1/M.json").write_text(
        json.dumps({"modelName": "M", "nodes": [node("A_0", "AddOperation", ["x"])]})
    )
    (tmp_path / "work").mkdir()
    for what, dump in hostile.variants(
        sample,
        tmp_path / "work",
        among=lambda f: f.endswith(".json") or f.startswith("tensors/npu0_1/0/0_"),
    ):
        hostile.survives(what, dump)


def test_hostile_references(tmp_path):
    for k, name in enumerate(hostile.ESCAPES):
        path = tmp_path / f"d{k}/tensors/npu0_1/0/0_AddOperation/after/outtensor0.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(f"format=2\ndtype=0\ndims=4\ndata={name}\n$End=1\n".encode())
        with pytest.raises(
            UnreadableRun, match=r"can be read: it is said to be in .*not in the dump"
        ):
            open_run(tmp_path / f"d{k}")
