"""GE dumps: every byte where it belongs, device layouts as logical tensors, names, graphs, and what
damage does.
"""

import json
import shutil
from pathlib import Path

import ascend_files as af
import hostile
import ml_dtypes
import numpy as np
import pytest

from whence.errors import ElementsMissing, UnreadableRun
from whence.readers import Place, open_run
from whence.readers.ascend.graph_text import graphs
from whence.readers.formats import ge
from whence.records import missing_of

DATA = Path(__file__).parents[1] / "data" / "ascend"
TIME = 1706596912161941
FILE = f"Add.Add_1.4.6.{TIME}"


def arrays(run):
    return {
        f"{c.scope}.{r.slot}": run.array(r.record) for c in run.calls if c.scope for r in c.refs
    }


def one(tmp_path, *, inputs=(), outputs=(), name=FILE, **how):
    """The tensors of a dump of one operator, and its run."""
    af.ge(tmp_path / "dump" / name, inputs, outputs, **how)
    run = open_run(tmp_path / "dump")
    assert run.reader == "ge"
    return run


def test_inputs_lie_before_outputs_though_their_fields_come_later(tmp_path):
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=(3, n)).astype(np.float32) for n in (2, 5, 4))
    run = one(
        tmp_path,
        inputs=[af.plain("input", a), af.plain("input", b, packed=False)],
        outputs=[af.plain("output", c)],
        name="X.y.z.4.6.1706596912161941",
    )
    found = arrays(run)
    assert run.calls[0].scope == "y.z"
    assert run.calls[0].op_type == "X"
    for slot, wanted in (("input.0", a), ("input.1", b), ("output.0", c)):
        np.testing.assert_array_equal(found[f"y.z.{slot}"], wanted)
    assert [r.file for r in run.records] == [
        f"X.y.z.4.6.1706596912161941,{s}" for s in ("inputs,0", "inputs,1", "outputs,0")
    ]


@pytest.mark.parametrize("dtype", sorted(af.GE))
def test_every_element_type(tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(1).integers(
        0, 2 if dtype == "bool" else 256, (4 * 6 * kind.itemsize,), np.uint8
    )
    array = raw.view(kind).reshape(4, 6)
    found = arrays(one(tmp_path, outputs=[af.plain("output", array)]))["Add_1.output.0"]
    assert found.dtype == kind
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("code", "kind", "bits"),
    [
        (28, ml_dtypes.int4, 4),
        (30, ml_dtypes.int2, 2),
        (31, ml_dtypes.uint2, 2),
        (37, ml_dtypes.float6_e3m2fn, 6),
        (38, ml_dtypes.float6_e2m3fn, 6),
        (39, ml_dtypes.float4_e2m1fn, 4),
        (29, None, 1),
    ],
)
def test_types_of_less_than_a_byte_have_their_first_element_in_the_lowest_bits(
    tmp_path, code, kind, bits
):
    codes = np.random.default_rng(2).integers(0, 1 << bits, 13)
    packed = sum(int(c) << (k * bits) for k, c in enumerate(codes)).to_bytes(
        -(-13 * bits // 8), "little"
    )
    message = af.tensor("output", np.zeros(13, np.uint8), code=code, size=len(packed))
    found = arrays(one(tmp_path, outputs=[(message, packed)]))["Add_1.output.0"]
    wanted = codes if kind is None else codes.astype(np.uint8).view(kind)
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def test_complex32_and_raw_bytes(tmp_path):
    half = np.arange(8, dtype=np.float16)
    message = af.tensor("output", half, code=32, stored=(4,))
    found = arrays(
        one(
            tmp_path,
            outputs=[
                (message, half.tobytes()),
                (af.tensor("output", half, code=0, stored=(16,)), half.tobytes()),
            ],
        )
    )
    np.testing.assert_array_equal(found["Add_1.output.0"], half[::2] + 1j * half[1::2])
    np.testing.assert_array_equal(found["Add_1.output.1"], half.view(np.int8))


@pytest.mark.parametrize(
    ("code", "name"), [(13, "string"), (33, "hifloat8"), (40, "float4_e1m2"), (99, "data type 99")]
)
def test_types_without_elements_say_so(tmp_path, code, name):
    odd = (af.tensor("output", np.zeros(4, np.int8), code=code), bytes(4))
    with pytest.raises(UnreadableRun, match=f"can be read: elements of {name} are not read"):
        one(tmp_path / "alone", outputs=[odd])
    whole = (af.tensor("output", np.zeros(4, np.int8)), bytes(4))
    run = one(tmp_path / "with another", outputs=[odd, whole])
    with pytest.raises(ElementsMissing, match=f"elements of {name} are not read"):
        run.array(0)


def _nz(a, c0=16):
    """(..., H, W) -> (..., W/c0, H/16, 16, c0), zeros around: written as the definition says,
    element by element.
    """
    *front, h, w = a.shape
    out = np.zeros((*front, -(-w // c0), -(-h // 16), 16, c0), a.dtype)
    for index in np.ndindex(*a.shape):
        *f, y, x = index
        out[(*f, x // c0, y // 16, y % 16, x % c0)] = a[index]
    return out


def _blocks(a, c0=16):
    """(N, C, [D,] H, W) -> (N, [D,] C1, H, W, C0)."""
    n, c, *deep, h, w = a.shape
    out = np.zeros((n, *deep, -(-c // c0), h, w, c0), a.dtype)
    for index in np.ndindex(*a.shape):
        i, k, *d, y, x = index
        out[(i, *d, k // c0, y, x, k % c0)] = a[index]
    return out


def _fractal_z(a, c0=16):
    """(N, C, H, W) -> (C1*H*W, N1, 16, C0)."""
    n, c, h, w = a.shape
    out = np.zeros((-(-c // c0) * h * w, -(-n // 16), 16, c0), a.dtype)
    for i, k, y, x in np.ndindex(*a.shape):
        out[((k // c0) * h + y) * w + x, i // 16, i % 16, k % c0] = a[i, k, y, x]
    return out


def _rand(*extents):
    return np.random.default_rng(3).normal(size=extents).astype(np.float16)


@pytest.mark.parametrize(
    ("layout", "logical", "lies"),
    [
        (29, _rand(20, 37), _nz),
        (29, _rand(2, 3, 20, 37), _nz),
        (29, _rand(16, 16), _nz),
        (29, _rand(1, 1), _nz),
        (29, _rand(20, 37), lambda a: _nz(a, 32)),
        (3, _rand(2, 20, 3, 5), _blocks),
        (3, _rand(2, 20, 3, 5), lambda a: _blocks(a, 32)),
        (32, _rand(2, 20, 4, 3, 5), _blocks),
        (4, _rand(18, 20, 3, 2), _fractal_z),
        (4, _rand(3, 5, 1, 1), _fractal_z),
    ],
)
def test_device_layouts_are_brought_to_logical_axes(tmp_path, layout, logical, lies):
    stored = lies(logical)
    run = one(tmp_path, outputs=[af.plain("output", stored, layout=layout, original=logical.shape)])
    assert run.records[0].shape == logical.shape
    np.testing.assert_array_equal(run.array(0), logical)


def test_a_vector_in_blocks(tmp_path):
    a = _rand(1, 37)
    run = one(tmp_path, outputs=[af.plain("output", _nz(a), layout=29, original=(37,))])
    np.testing.assert_array_equal(run.array(0), a[0])


def test_channels_that_were_last_are_last_again(tmp_path):
    a = _rand(2, 20, 3, 5)
    run = one(tmp_path, outputs=[af.plain("output", _blocks(a), layout=3, original=(2, 3, 5, 20))])
    np.testing.assert_array_equal(run.array(0), a.transpose(0, 2, 3, 1))


def test_blocks_without_a_logical_shape_keep_their_padding_and_odd_layouts_are_told(tmp_path):
    a = _rand(20, 37)
    run = one(
        tmp_path,
        outputs=[
            af.plain("output", _nz(a), layout=29),
            af.plain("output", _rand(4, 4), layout=38, original=(2, 8)),
        ],
    )
    np.testing.assert_array_equal(run.array(0)[:20, :37], a)
    assert run.records[0].shape == (32, 48)
    assert [n.text for n in run.notes] == [
        f"{FILE}: output.1: FRACTAL_ZN_LSTM [4, 4] of logical [2, 8] is kept as it is on the device"
    ]


def test_sizes_that_are_padded_short_or_nothing(tmp_path):
    a = np.arange(6, dtype=np.float32)
    outputs = [
        (af.tensor("output", a, size=64), a.tobytes() + bytes(40)),
        (af.tensor("output", np.zeros((0, 3), np.float32)), b""),
        (af.tensor("output", a, stored=()), a.tobytes()),
        (af.tensor("output", a), a.tobytes()[:-4]),
    ]
    run = one(tmp_path, outputs=outputs)
    np.testing.assert_array_equal(run.array(0), a)
    assert run.array(1).shape == (0, 3)
    np.testing.assert_array_equal(run.array(2), a)
    with pytest.raises(
        ElementsMissing, match=r"20 of the 24 bytes of output.3: the file was cut short"
    ):
        run.array(3)


def test_very_old_files_hold_elements_in_the_header(tmp_path):
    a, b = np.arange(6, dtype=np.float32), np.arange(4, dtype=np.int32)
    run = one(
        tmp_path,
        inputs=[(af.tensor("input", a, data=a.tobytes()), b"")],
        outputs=[af.plain("output", b)],
    )
    np.testing.assert_array_equal(run.array(0), a)
    np.testing.assert_array_equal(run.array(1), b)


def test_attributes_are_no_workspaces_and_buffers_are_told(tmp_path):
    a = np.arange(4, dtype=np.float32)
    attribute, workspace = (
        af.field(7, af.field(1, b"axis") + af.field(2, b"1")),
        af.field(7, af.field(1, 1) + af.field(3, 8)),
    )
    run = one(
        tmp_path,
        outputs=[af.plain("output", a)],
        extra=attribute + workspace + af.field(5, af.field(3, 4)),
        tail=bytes(12),
    )
    np.testing.assert_array_equal(run.array(0), a)
    assert [n.text for n in run.notes] == [f"{FILE}: buffer 0 of 4 bytes, workspace 0 of 8 bytes"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("MatMulV2.MatMul.45.6.1706596912161951", ("MatMulV2", "MatMul", 45, 1706596912161951)),
        ("Add.a.b.c.45.6.1706596912161951", ("Add", "a.b.c", 45, 1706596912161951)),
        ("Add.x.45.6.1706596912161951.0.12.3.4", ("Add", "x", 45, 1706596912161951)),
        ("Conv2D.x.45.1706596912161951", ("Conv2D", "x", 45, 1706596912161951)),
        ("ConcatV2D.concatv2.0.0.550288648", ("ConcatV2D", "concatv2", 0, 550288648)),
        ("notes.txt", None),
        ("model.v1.2.3.4", None),
        ("1706596912161951", None),
    ],
)
def test_names_of_files(name, wanted):
    assert ge.named(name) == wanted


def test_numbers_for_names_are_looked_up(tmp_path):
    a = np.arange(4, dtype=np.float32)
    af.ge(tmp_path / "1234567890123456", outputs=[af.plain("output", a)])
    af.ge(tmp_path / "2234567890123456", outputs=[af.plain("output", a)])
    (tmp_path / "mapping.csv").write_text(f"1234567890123456,{FILE}\n")
    run = open_run(tmp_path)
    assert [c.scope for c in run.calls if c.leaf] == ["2234567890123456", "Add_1"] or [
        c.scope for c in run.calls if c.leaf
    ] == [
        "Add_1",
        "2234567890123456",
    ]
    assert [n.text for n in run.notes] == [
        "2234567890123456 is in no mapping.csv beside it, so its operator is unknown"
    ]


def test_folders_say_rank_graph_and_token(tmp_path):
    a = np.arange(4, dtype=np.float32)
    base = "msit_ge_dump/worldsize2_global_rank1/20251010083826/3/graph_2_0/1"
    for token in (0, 10, 2):
        af.ge(tmp_path / base / str(token) / FILE, outputs=[af.plain("output", a)])
    af.ge(
        tmp_path / "dump_1/20251010083826/5/graph_2_0/1/0" / FILE, outputs=[af.plain("output", a)]
    )
    calls = [c for c in open_run(tmp_path).calls if c.leaf]
    assert [(c.rank, c.root, c.step) for c in calls] == [
        (1, "graph_2", 0),
        (5, "graph_2", 0),
        (1, "graph_2", 2),
        (1, "graph_2", 10),
    ]
    (alone,) = [c for c in open_run(tmp_path / base / "10").calls if c.leaf]
    assert (alone.rank, alone.root, alone.step) == (1, "graph_2", 10)


def test_an_operator_that_ran_twice_is_two_calls_in_order_of_time(tmp_path):
    for k, time in enumerate((1706596912161999, 1706596912161941)):
        af.ge(
            tmp_path / f"Add.x.1.6.{time}", outputs=[af.plain("output", np.full(4, k, np.float32))]
        )
    run = open_run(tmp_path)
    calls = [c for c in run.calls if c.leaf]
    assert [(c.scope, c.occurrence, run.array(c.refs[0].record)[0]) for c in calls] == [
        ("x", 0, 1),
        ("x", 1, 0),
    ]


def test_files_that_were_converted_to_npy(tmp_path):
    a = np.arange(4, dtype=np.float32)
    for slot in ("input.0", "input.10", "input.2", "output.0"):
        np.save(tmp_path / f"{FILE}.{slot}.npy", a + len(slot))
    run = open_run(tmp_path)
    assert run.reader == "ge"
    (call,) = [c for c in run.calls if c.leaf]
    assert [r.slot for r in call.refs] == ["input.0", "input.2", "input.10", "output.0"]


def test_the_synthetic_dump():
    run = open_run(DATA / "ge")
    calls = [c for c in run.calls if c.leaf]
    assert [(c.step, c.scope, c.origins) for c in calls[:5]] == [
        (0, "Add_2", ("add_1",)),
        (0, "trans_TransData_7", ()),
        (0, "MatMul", ("mm",)),
        (0, "MulCast_9", ("mul", "_to_copy")),
        (0, "TopK", ("topk",)),
    ]
    assert [c.step for c in calls] == [0] * 5 + [1] * 5
    exact = arrays(open_run(DATA / "ge" / "msit_ge_dump" / "worldsize1_global_rank0"))
    np.testing.assert_array_equal(
        exact["trans_TransData_7.input.0"], exact["trans_TransData_7.output.0"]
    )


@pytest.mark.shared
def test_a_real_nano_dump(shared):
    run = open_run(shared / "samples/ascend/msprobe_nano")
    one, two, both = (run.array(k) for k in range(3))
    assert (one.shape, two.shape, both.dtype) == ((1, 14652), (1, 30), np.float16)
    np.testing.assert_array_equal(np.concatenate([one, two], axis=1), both)
    assert open_run(next((shared / "samples/ascend/msprobe_nano").iterdir())).records[2].shape == (
        1,
        14682,
    )


@pytest.mark.shared
def test_real_graphs(shared):
    folder = shared / "samples/ascend"
    assert [len(g.nodes) for g in graphs(folder / "oam_ge_proto/ge_proto_00000001_Build.txt")] == [
        5,
        3,
        2,
        6,
        2,
    ]
    (graph,) = graphs(folder / "oam_ge_proto/ge_proto_00056_Build.txt")
    assert [n.name for n in graph.nodes.values() if n.origins] == ["GatherV2"]
    (model,) = graphs(folder / "msit_om_json/model.json")
    known = json.loads((folder / "msit_om_json/model.json").read_text())["graph"][0]["op"]
    assert list(model.nodes) == [op["name"] for op in known]
    assert model.nodes["PartitionedCall_Gather_1221_gatherv2_3"].origins == ("Gather_1221",)
    assert model.nodes["trans_Cast_0"].origins == ()
    assert model.feeds("Concat_1211", "Slice_1218")


def test_names_of_an_offline_model_come_from_its_json(tmp_path):
    a = np.arange(4, dtype=np.float32)
    model = {
        "graph": [
            {
                "name": "g",
                "op": [
                    {
                        "name": "a/b",
                        "type": "Gather",
                        "attr": [
                            {
                                "key": "_datadump_original_op_names",
                                "value": {"list": {"s": ["x", "y"]}},
                            }
                        ],
                    },
                    {"name": "z", "type": "Add", "input": ["a/b:0", "a/b:-1"]},
                ],
            }
        ]
    }
    (tmp_path / "model.json").write_text(json.dumps(model))
    for name, said in (("a_b", ""), ("z", "")):
        af.ge(
            tmp_path / f"Op.{name}.1.6.1706596912161941",
            outputs=[af.plain("output", a, origin=said)],
        )
    af.ge(
        tmp_path / "Op.other.2.6.1706596912161942", outputs=[af.plain("output", a, origin="conv")]
    )
    assert {c.scope: c.origins for c in open_run(tmp_path).calls if c.leaf} == {
        "a_b": ("x", "y"),
        "z": (),
        "other": ("conv",),
    }


def test_a_graph_that_cannot_be_read_is_told_and_the_tensors_are_there(tmp_path):
    dump = tmp_path / "ge"
    shutil.copytree(DATA / "ge", dump)
    text = next(dump.rglob("dynamo_original*"))
    text.write_text('name: "g"\nop { name: "x"')
    run = open_run(dump)
    assert len(run.records) == 28
    assert any("dynamo_original" in n.text for n in run.notes)


def test_a_graph_that_torch_printed_is_no_damage(tmp_path):
    run = one(tmp_path, outputs=[af.plain("output", _rand(2, 3))])
    name = "dynamo_original_graph_model__0_inference_0_rank_0_pid_1_ts_1.txt"
    (tmp_path / "dump" / name).write_text(
        "class <lambda>(torch.nn.Module):\n    def forward(self, x):\n"
    )
    assert missing_of(open_run(tmp_path / "dump")) == missing_of(run) == ()


def test_graph_text_with_marks_in_strings(tmp_path):
    path = tmp_path / "dynamo_original_graph_1_rank_0_x.txt"
    path.write_text(
        'name: "g" # {\nop { name: "a: { b" type: "T\\"\\n\\101" input: "p:3" input: "c:-1"\n'
        "attr { key: \"k\" value { list { i: [1, 2] s: 'x' } } }\n"
        'output_desc { attr < key: "_fx_tensor_name" value { s: "mm-aten" ".mm.default.OUTPUT.0" '
        "} > } }"
    )
    (graph,) = graphs(path)
    (node,) = graph.nodes.values()
    assert node == ("a: { b", 'T"\nA', (("p", 3),), ("mm-aten.mm.default.OUTPUT.0",), None)


def test_operators_of_one_fx_node_share_its_name_and_inputs_of_the_graph_have_none(tmp_path):
    path = tmp_path / "dynamo_original_graph_1_rank_0_x.txt"
    path.write_text(
        'op { name: "d" type: "Data" } op { name: "c" type: "Cast" input: "d:0" } op { name: "s" '
        'type: "Softmax" input: "c:0" }'
        'op { name: "e" type: "Cast" input: "s:0" output_desc { attr { key: "_fx_tensor_name" '
        'value { s: "softmax-aten.x.OUTPUT.0" } } } }'
        'op { name: "f" type: "Add" input: "e:0" input: "n:0"'
        'output_desc { attr { key: "_fx_tensor_name" value { s: "add-aten.x.OUTPUT.0" } } } }'
        'op { name: "n" type: "Neg" input: "n:0" }'
    )
    (graph,) = graphs(path)
    assert graph.fx_names == {"c": "softmax", "s": "softmax", "e": "softmax", "f": "add"}


@pytest.mark.parametrize(
    "name",
    [
        "MatMulV2.MatMul.45.6.1706596912161951",
        "dynamo_original_graph_1_rank_0_pid_421214_ts_20251010083825327878.txt",
    ],
)
def test_hostile(tmp_path, name):
    sample = tmp_path / "sample"
    shutil.copytree(DATA / "ge", sample)
    (tmp_path / "work").mkdir()
    shutil.rmtree(next(sample.rglob("graph_1_0/1/1")))
    for what, dump in hostile.variants(
        sample, tmp_path / "work", among=lambda file: file.endswith(name)
    ):
        hostile.survives(what, dump)


@pytest.mark.shared
def test_hostile_nano(tmp_path, shared):
    data = next((shared / "samples/ascend/msprobe_nano").iterdir())
    path = tmp_path / data.name
    whole = data.read_bytes()
    for what, changed in (*hostile.truncations(whole), *hostile.flips(whole, 200)):
        path.write_bytes(changed)
        if ge.sniff(Place(path)):
            hostile.survives(what, path)
