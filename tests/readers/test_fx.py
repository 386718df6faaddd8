"""FX dumps of torchair: layouts of all ages, base of the steps, order of the nodes, arguments that
are no tensors.
"""

import shutil
from pathlib import Path

import hostile
import ml_dtypes
import numpy as np
import pytest

import whence
from whence.errors import ElementsMissing
from whence.readers import open_run
from whence.readers.assembly.call_order import ordered
from whence.records import Lack

DATA = Path(__file__).parents[1] / "data" / "ascend"
TS = "20251017071211190258"


def leaves(run):
    return [c for c in run.calls if c.leaf]


@pytest.mark.parametrize("age", ["fx_new", "fx_old"])
def test_the_samples(age):
    run = open_run(DATA / age)
    assert run.reader == "fx"
    names = [
        "add_1",
        "mm",
        "mul",
        "_to_copy",
        "topk",
    ]  # as the program ran them; neither their names nor their times say so
    assert [(c.step, c.scope) for c in leaves(run)] == [(t, n) for t in (0, 1) for n in names]
    for call in leaves(run):
        for ref in call.refs:
            record = run.records[ref.record]
            np.testing.assert_array_equal(run.array(ref.record), np.load(DATA / age / record.file))
            kind, place = ref.slot.split(".")
            assert f"/{call.scope}-{call.op_type}.{kind.upper()}.{place}." in record.file
    topk = leaves(run)[4]
    assert topk.arguments == {"input.1": 3}


@pytest.mark.parametrize(
    ("folder", "first"),
    [
        ("msit_fx_dump/worldsize1_global_rank0/graph_1/{}", 0),
        ("msit_fx_dump/data_dump/{}/gm_20240125031118787351_dump", 1),
        ("data_dump/{}/gm_20240125031118787351_dump", 1),
        ("gm_20240125031118787351_dump/{}", 1),
    ],
)
def test_steps_count_from_0_whatever_the_age(tmp_path, folder, first):
    for step in (0, 1, 10):
        at = tmp_path / folder.format(step + first)
        at.mkdir(parents=True)
        np.save(at / f"mm-aten.mm.default.OUTPUT.0.{TS}.npy", np.full(9, step, np.float32))
    run = open_run(tmp_path)
    assert [(c.root, c.step, run.array(c.refs[0].record)[0]) for c in leaves(run)] == [
        ("graph_1", s, s) for s in (0, 1, 10)
    ]


def test_a_dump_that_has_a_step_0_counts_from_0(tmp_path):
    for step in (0, 1):
        at = tmp_path / f"data_dump/{step}/gm_20240125031118787351_dump"
        at.mkdir(parents=True)
        np.save(at / "mm-aten.mm.default.OUTPUT.0.npy", np.ones(9, np.float32))
    assert [c.step for c in leaves(open_run(tmp_path))] == [0, 1]


def test_older_graphs_are_told_apart_by_their_nodes_not_by_their_times(tmp_path):
    for step, time, node in ((1, 1, "embed"), (2, 2, "mm"), (3, 3, "mm")):
        at = tmp_path / f"data_dump/{step}/gm_2024012503111878735{time}_dump"
        at.mkdir(parents=True)
        np.save(at / f"{node}-aten.{node}.default.OUTPUT.0.npy", np.ones(9, np.float32))
    assert [(c.root, c.step) for c in leaves(open_run(tmp_path))] == [
        ("graph_1", 0),
        ("graph_2", 1),
        ("graph_2", 2),
    ]


def test_ranks_and_places_sort_as_numbers(tmp_path):
    for rank in (0, 11, 2):
        at = tmp_path / f"worldsize12_global_rank{rank}/graph_1/0"
        at.mkdir(parents=True)
        for k in (0, 10, 2):
            np.save(at / f"cat-aten.cat.default.INPUT.0.{k}.{TS}.npy", np.full(9, k, np.float32))
        np.save(at / f"cat-aten.cat.default.INPUT.1.{TS}.npy", np.array(["dim"]))
        np.save(at / f"cat-aten.cat.default.INPUT.2.{TS}.npy", np.array(0.5))
    run = open_run(tmp_path)
    assert [c.rank for c in leaves(run)] == [0, 2, 11]
    call = leaves(run)[0]
    assert [r.slot for r in call.refs] == ["input.0.0", "input.0.2", "input.0.10", "input.2"]
    assert call.arguments == {"input.1": "not a tensor: <U3", "input.2": 0.5}


def test_times_decide_the_order_where_they_differ(tmp_path):
    for k, node in enumerate("cab"):
        np.save(
            tmp_path / f"{node}-aten.x.default.OUTPUT.0.2025101707121119025{k}.npy",
            np.ones(9, np.float32),
        )
    assert [c.scope for c in leaves(open_run(tmp_path))] == ["c", "a", "b"]


def test_order_of_flow():
    reads = {"a": ["y"], "b": [], "c": ["x"], "d": ["x", "z"]}
    assert ordered("abcd", reads, {"b": ["x"], "c": ["y"], "d": []}) == ["b", "c", "a", "d"]
    assert ordered("ab", {"a": ["y"], "b": ["x"]}, {"a": ["x"], "b": ["y"]}) == [
        "a",
        "b",
    ]  # a circle: as given
    assert ordered("ab", {"a": ["x"], "b": ["x"]}, {"a": ["x"], "b": ["x"]}) == [
        "a",
        "b",
    ]  # what several make, the first made


def test_bfloat16_as_raw_bytes_and_lost_tensors(tmp_path):
    raw = np.arange(9).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "a-aten.x.OUTPUT.0.npy", raw)
    (tmp_path / "a-aten.x.OUTPUT.1.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "other.npy").write_bytes(b"")
    run = open_run(tmp_path)
    assert run.array(0).tobytes() == raw.tobytes()
    with pytest.raises(ElementsMissing, match=r"a-aten.x.OUTPUT.1.npy is no .npy file"):
        run.array(1)
    assert {m.where: m.kind for m in run.missing} == {
        "a-aten.x.OUTPUT.1.npy": Lack.DAMAGED,
        "other.npy": Lack.DAMAGED,
    }


def test_hostile(tmp_path):
    sample = tmp_path / "sample"
    shutil.copytree(DATA / "fx_new", sample)
    shutil.rmtree(next(sample.rglob("graph_1")) / "1")
    (tmp_path / "work").mkdir()
    for what, dump in hostile.variants(
        sample, tmp_path / "work", among=lambda f: "/topk-aten.topk.default.INPUT.1" in f
    ):
        hostile.survives(what, dump)


@pytest.mark.parametrize("fault", [False, True])
def test_bfloat16_that_was_written_as_float32_is_judged_as_bfloat16(tmp_path, fault):
    bf16 = np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(4)
    held = rng.normal(size=(32, 32)).astype(bf16)
    other = np.where(rng.random(held.shape) < 0.2, (held.view(np.uint16) + 1).view(bf16), held)
    if fault:
        other[3, 3] += bf16.type(8)
    for side, made in (("a", held), ("b", other)):
        at = tmp_path / side / "worldsize1_global_rank0/graph_1/0"
        at.mkdir(parents=True)
        np.save(at / f"mm-aten.mm.default.INPUT.0.{TS}.npy", held.T.astype(np.float32))
        np.save(at / f"mm-aten.mm.default.OUTPUT.0.{TS}.npy", made.astype(np.float32))
    found = whence.compare(tmp_path / "a", tmp_path / "b")
    assert found.status == ("different" if fault else "same"), found.headline
    assert any("stored in float32 hold numbers of bfloat16" in note for note in found.notes)
