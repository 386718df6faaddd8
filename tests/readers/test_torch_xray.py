"""torch_xray dumps: order, dtypes, names with and without numbers, the planted GELU, and files that
lead outside of themselves.
"""

import random
from pathlib import Path
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pytest

import whence
from readers.hostile import survives, variants
from whence.api import open_run
from whence.cli import execute
from whence.errors import ElementsMissing, MissingDependency, UnreadableRun
from whence.readers.encodings import hdf5

DATA = Path(__file__).parent.parent / "data" / "torch_xray"
GPU, XPU, NOIDX = (
    DATA / f"{name}_globalrank-0_localrank-0.h5" for name in ("gpu", "xpu", "xpu_noidx")
)
RNG = np.random.default_rng(4)


def written(path, tensors, step="1", dtypes=(), track=True, **options):
    with h5py.File(path, "a", track_order=track) as file:
        group = file.create_group(step, track_order=track) if step else file
        for name, array in tensors.items():
            group.create_dataset(name, data=array, **options)
            if name in dtypes:
                group[name].attrs["dtype"] = dtypes[name]
    return path


def test_tensors_come_in_the_order_of_creation_with_their_elements_bit_by_bit():
    run = open_run(GPU)
    calls = sorted(run.calls, key=lambda c: c.order)
    assert [c.scope for c in calls] == [
        "",
        "pos_embed",
        "blocks.0.norm1",
        "blocks.0.fc1",
        "blocks.0.act_fn",
        "blocks.0.fc2",
        "blocks.1.norm1",
        "blocks.1.fc1",
        "blocks.1.act_fn",
        "blocks.1.fc2",
    ]
    assert [c.op_type for c in calls][1:4] == ["Embedding", "LayerNorm", "Linear"]
    assert [r.slot for r in calls[3].refs] == ["input.0", "param.weight", "param.bias", "output.0"]
    with h5py.File(GPU) as file:
        stored = [file["1"][name][()] for name in file["1"]]
    assert len(stored) == len(run.records) == 31
    for record, expected in zip(run.records, stored):
        np.testing.assert_array_equal(run.array(record.id), expected)
        assert run.array(record.id).dtype == expected.dtype


def test_float32_copies_of_bfloat16_are_bfloat16_again():
    run = open_run(XPU)
    with h5py.File(XPU) as file:
        stored = {name: d[()] for name, d in file["1"].items() if d.dtype.kind == "f"}
    floats = [r for r in run.records if r.dtype == "bfloat16"]
    assert len(floats) == len(stored) == 30
    for record, expected in zip(floats, stored.values()):
        assert run.array(record.id).dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(run.array(record.id).astype(np.float32), expected)


@pytest.mark.parametrize("target", [XPU, NOIDX])
def test_the_gelu_of_block_1_is_named_from_the_command_line(target, capsys, tmp_path):
    assert execute(["compare", str(GPU), str(target), "-o", str(tmp_path / "cmp")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("FAULT              blocks.1.act_fn   GELU")
    assert "computed by tanh where the reference computes by erf" in text


def test_without_the_attribute_the_numbers_tell_that_they_were_bfloat16(tmp_path):
    for name, source in (("reference", GPU), ("target", XPU)):
        with (
            h5py.File(source) as old,
            h5py.File(tmp_path / f"{name}.h5", "w", track_order=True) as new,
        ):
            group = new.create_group("1", track_order=True)
            for key in old["1"]:
                group[key] = old["1"][key][()]
    result = whence.compare(tmp_path / "reference.h5", tmp_path / "target.h5")
    assert [f.name for f in result.findings] == ["blocks.1.act_fn"]
    assert "19 tensors stored in float32 hold numbers of bfloat16" in " ".join(result.notes)


def test_names_with_and_without_numbers_are_one_run():
    result = whence.compare(XPU, NOIDX)
    assert (result.status, result.unmatched, set(result.counts)) == ("same", 0, {"identical"})


def test_stored_bits_big_endian_packed_and_small_things(tmp_path):
    half = RNG.standard_normal((64, 32)).astype(np.float16)
    bits = RNG.standard_normal(40).astype(ml_dtypes.bfloat16)
    f8 = RNG.standard_normal(16).astype(ml_dtypes.float8_e4m3fn)
    path = tmp_path / "x.h5"
    written(
        path,
        {
            "a.X.0.forward_output.0": bits.view(np.uint16),
            "a.X.0.forward_output.1": np.arange(6, dtype=">f4"),
            "a.X.0.forward_output.2": np.array(True),
            "a.X.0.forward_output.3": np.zeros((0, 3), np.int8),
            "a.X.0.forward_output.4": np.array([1 + 2j], np.complex64),
            "a.X.0.forward_output.5": f8.view(np.uint8),
        },
        dtypes={
            "a.X.0.forward_output.0": "torch.bfloat16",
            "a.X.0.forward_output.5": "torch.float8_e4m3fn",
        },
    )
    for i, options in enumerate(
        (
            {"compression": "gzip", "shuffle": True},
            {"compression": "lzf"},
            {"fletcher32": True, "chunks": (7, 5)},
        )
    ):
        written(path, {f"p{i}.X.0.forward_output.0": half}, step=str(i + 2), **options)
    run = open_run(path)
    got = [run.array(r.id) for r in run.records]
    np.testing.assert_array_equal(got[0].view(np.uint16), bits.view(np.uint16))
    np.testing.assert_array_equal(got[1], np.arange(6, dtype=np.float32))
    assert (got[2].shape, got[2].dtype, bool(got[2])) == ((), np.bool_, True)
    assert (got[3].shape, got[3].dtype) == ((0, 3), np.int8)
    assert got[4][0] == 1 + 2j
    np.testing.assert_array_equal(got[5].view(np.uint8), f8.view(np.uint8))
    for packed in got[6:]:
        np.testing.assert_array_equal(packed, half)
    assert [s.step for s in run.steps] == [0, 1, 2, 3]


def test_steps_are_numbers_ranks_are_files_and_missing_groups_do_not_matter(tmp_path):
    for rank in (0, 1):
        path = tmp_path / f"globalrank-{rank}_localrank-{rank}.h5"
        for step in ("10", "2", "1"):
            written(
                path,
                {"m.Linear.0.forward_output.0": np.full(3, 10 * rank + int(step), np.float32)},
                step=step,
            )
    run = open_run(tmp_path)
    found = {
        (c.rank, c.step): run.array(c.slots("output")[0].record)[0] for c in run.calls if c.scope
    }
    assert found == {(r, s - 1): 10 * r + s for r in (0, 1) for s in (1, 2, 10)}
    flat = written(tmp_path / "flat.h5", {"a%2Fb.Linear.forward_output.0": np.ones(3)}, step="")
    assert [c.scope for c in open_run(flat).calls if c.scope] == ["a/b"]
    with h5py.File(tmp_path / "nested.h5", "w") as file:
        file["1/fc1.Linear.0/forward_output.0"] = np.ones(3)
    assert [(c.scope, c.op_type) for c in open_run(tmp_path / "nested.h5").calls if c.scope] == [
        ("fc1", "Linear")
    ]
    with h5py.File(tmp_path / "other_globalrank-0_localrank-3.h5", "w") as file:
        file["x"] = np.ones(3)
    with pytest.raises(UnreadableRun, match="are both rank 0"):
        open_run(tmp_path)


def test_without_an_order_the_place_in_the_file_tells_it(tmp_path):
    names = [f"{name}.Linear.0.forward_output.0" for name in ("z", "m", "a", "q")]
    path = written(tmp_path / "x.h5", {name: np.ones(3, np.float32) for name in names}, track=False)
    with h5py.File(path) as file:
        assert list(file["1"]) == sorted(names)
    assert [c.scope for c in sorted(open_run(path).calls, key=lambda c: c.order) if c.scope] == [
        "z",
        "m",
        "a",
        "q",
    ]


def test_descriptions_that_lie_in_holes_do_not_change_the_order(tmp_path):
    digits = str.maketrans("0123456789", "abcdefghij")
    names = [f"{number * 7 % 64:02d}".translate(digits) for number in range(64)]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number, name in enumerate(names):
            file.create_dataset(name, data=np.full(8 if number % 3 else 700, number, np.float32))
    large = [name for number, name in enumerate(names) if not number % 3]
    read = [call.scope for call in open_run(tmp_path / "x.h5").calls if call.scope in names]
    assert [name for name in read if name in large] == large
    assert [name for name in read if name not in large] == [n for n in names if n not in large]


def test_what_only_has_a_name_holds_nothing(tmp_path):
    """An error begins at what was made first, not at a name that others begin with."""
    names, values = ("a", "b.x", "b.y", "b", "c"), np.linspace(-1, 1, 600, dtype=np.float32)
    for side, sign in (("ref", 1), ("tgt", -1)):
        with h5py.File(tmp_path / f"{side}.h5", "w") as file:
            for name in names:
                file.create_dataset(
                    name, data=values * (1 if name < "b.y" and name != "b" else sign)
                )
    assert len({call.parent for call in open_run(tmp_path / "ref.h5").calls if call.scope}) == 1
    result = whence.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert [finding.name for finding in result.findings] == ["b.y"]


def test_modules_that_hold_others_are_their_parents(tmp_path):
    path = written(
        tmp_path / "x.h5",
        {
            f"{name}.forward_{slot}.0": np.ones(3)
            for name in (
                "b.0.fc.Linear.0",
                "b.0.Block.0",
                "b.1.fc.Linear.1",
                "b.1.Block.1",
                "Net.0",
            )
            for slot in ("input", "output")
        },
    )
    run = open_run(path)
    above = {c.scope: run.calls[c.parent].scope for c in run.calls if c.parent >= 0}
    assert above == {"b.0.fc": "b.0", "b.1.fc": "b.1", "b.0": "", "b.1": ""}


def test_nothing_outside_the_file_is_read(tmp_path):
    np.arange(100, dtype=np.float32).tofile(tmp_path / "secret.bin")
    written(tmp_path / "other.h5", {"s.Linear.0.forward_output.0": np.full(5, 7.0)})
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("1")
        group["a.Linear.0.forward_output.0"] = np.ones(8)
        group["soft.Linear.1.forward_output.0"] = h5py.SoftLink("/1/a.Linear.0.forward_output.0")
        group["link"] = h5py.ExternalLink("other.h5", "/1")
        group["loop"], group["self"] = h5py.SoftLink("/1"), h5py.SoftLink("/1/self")
        group.create_dataset(
            "ext.Linear.2.forward_output.0",
            (100,),
            "f4",
            external=[(str(tmp_path / "secret.bin"), 0, 400)],
        )
        layout = h5py.VirtualLayout((5,), "f8")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "1/s.Linear.0.forward_output.0", (5,))
        group.create_virtual_dataset("virt.Linear.3.forward_output.0", layout)
    run = open_run(path)
    by_scope = {c.scope: c.slots("output")[0].record for c in run.calls if c.scope}
    assert set(by_scope) == {"a", "soft", "ext", "virt"}
    np.testing.assert_array_equal(run.array(by_scope["soft"]), np.ones(8))
    for scope, words in (("ext", "another file"), ("virt", "virtual dataset")):
        with pytest.raises(ElementsMissing, match=words):
            run.array(by_scope[scope])
    notes = " ".join(n.text for n in run.notes)
    assert "leads to another file (other.h5)" in notes and "/1/loop" in notes and "/1/self" in notes


def test_what_asks_for_too_much_is_not_unpacked(tmp_path):
    path = written(
        tmp_path / "x.h5",
        {"a.Linear.0.forward_output.0": np.zeros(1 << 26, np.float64)},
        compression="gzip",
        chunks=(1 << 26,),
    )
    with h5py.File(path, "a") as file:
        file["1"].create_dataset(
            "b.Linear.1.forward_output.0", (1 << 40,), "f4", chunks=(1000,), compression="gzip"
        )
    assert path.stat().st_size < 2 << 20
    with pytest.raises(UnreadableRun, match=r"not one of its tensors can be read: .*unpack"):
        open_run(path)
    with h5py.File(path, "a") as file:
        file["1/c.Linear.2.forward_output.0"] = np.ones(3)
    run = survives("bombs", path)
    bombs = [record for record in run.records if record.count > 3]
    assert len(bombs) == 2
    for record in bombs:
        with pytest.raises(ElementsMissing, match="unpack"):
            run.array(record.id)


def test_an_attribute_that_lies_costs_its_tensor(tmp_path):
    path = written(
        tmp_path / "x.h5",
        {
            "a.X.0.forward_output.0": np.array([1.1], np.float32),
            "b.X.1.forward_output.0": np.ones(2, np.float32),
            "c.X.2.forward_output.0": np.ones(2, np.float32),
        },
        dtypes={
            "a.X.0.forward_output.0": "torch.bfloat16",
            "b.X.1.forward_output.0": "float4_e2m1fn_x2",
        },
    )
    run = open_run(path)
    for record, words in zip(run.records, ("not a bfloat16", "not known"), strict=False):
        with pytest.raises(ElementsMissing, match=words):
            run.array(record.id)


def test_a_dataset_that_was_never_written_is_its_fill_value(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", track_order=True) as file:
        group = file.create_group("1", track_order=True)
        group.create_dataset("a.X.0.forward_output.0", (3, 4), "f4", fillvalue=2.5)
        group.create_dataset("b.X.1.forward_output.0", (6, 5), ">i2", chunks=(2, 5), fillvalue=-3)
        group.create_dataset("c.X.2.forward_output.0", (6, 5), "f8", chunks=(2, 5), fillvalue=7)[
            2:4
        ] = 1.0
        group.create_dataset("d.X.3.forward_output.0", (2,), "?")
        group.create_dataset("e.X.4.forward_output.0", (1 << 40,), "f4", fillvalue=1)
    run = open_run(path)
    got = [run.array(r.id) for r in run.records[:4]]
    np.testing.assert_array_equal(got[0], np.full((3, 4), 2.5, np.float32))
    np.testing.assert_array_equal(got[1], np.full((6, 5), -3, np.int16))
    np.testing.assert_array_equal(got[2], np.repeat([7.0, 1.0, 7.0], 10).reshape(6, 5))
    np.testing.assert_array_equal(got[3], [False, False])
    with pytest.raises(ElementsMissing, match="unpack"):
        run.array(4)


def test_numbers_that_numpy_has_no_name_for_are_converted_and_not_mapped(tmp_path):
    """A float of 32 bits with another exponent bias lies in the file with other bits than its value
    has in numpy.
    """
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(100)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space = h5py.h5s.create_simple((3,))
        dataset = h5py.h5d.create(file.create_group("1").id, b"a.X.0.forward_output.0", kind, space)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1.0, -2.5, 0.125], np.float32))
    run = open_run(tmp_path / "x.h5")
    np.testing.assert_array_equal(run.array(0), [1.0, -2.5, 0.125])


def test_attributes_that_are_no_short_text_are_not_read(tmp_path):
    path = written(
        tmp_path / "x.h5", {f"{n}.X.0.forward_output.0": np.ones(2, np.float32) for n in "abcd"}
    )
    with h5py.File(path, "a", libver="latest") as file:
        for name, value in zip(
            "abcd",
            (
                "torch.float32" * 10_000,
                np.arange(5),
                np.array(["float32"] * 3, "S"),
                b"torch.float32",
            ),
        ):
            file[f"1/{name}.X.0.forward_output.0"].attrs["dtype"] = value
    run = open_run(path)
    assert [r.dtype for r in run.records] == ["float32"] * 4
    assert [bool(c.notes) for c in run.calls if c.scope] == [True, True, True, False]


# What stands for libhdf5 in a process that it ends, or that it never comes back from.
DEADLY = """
import os, resource, signal, sys
import importlib.util
spec = importlib.util.spec_from_file_location("worker", {worker!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
real_tensor, real_read = worker._tensor, worker._read
def spoil(dataset):
    if "segv" in dataset.name: os.kill(os.getpid(), signal.SIGSEGV)
    if "abrt" in dataset.name: os.abort()
    if "memory" in dataset.name: bytearray(1 << 36)
    if "endless" in dataset.name:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
        while True: pass
def tensor(dataset):
    spoil(dataset)
    return real_tensor(dataset)
def read(pipe, dataset):
    if "late" in dataset.name: os.kill(os.getpid(), signal.SIGSEGV)
    return real_read(pipe, dataset)
worker._tensor, worker._read = tensor, read
worker.main()
"""


@pytest.fixture
def deadly(tmp_path, monkeypatch):
    script = tmp_path / "deadly.py"
    script.write_text(DEADLY.format(worker=hdf5.hdf5_worker.__file__))
    monkeypatch.setattr(hdf5, "hdf5_worker", SimpleNamespace(__file__=str(script)))


def test_what_ends_libhdf5_costs_its_tensor(deadly, tmp_path):
    names = ("a", "segv", "b", "abrt", "c", "memory", "d", "late", "e")
    path = written(
        tmp_path / "x.h5",
        {f"{n}.X.0.forward_output.0": np.full((4, 4), 3.0) for n in names},
        chunks=(2, 2),
    )
    run = open_run(path)
    said = {}
    for call in run.calls:
        for ref in call.slots("output") if call.scope else ():
            try:
                np.testing.assert_array_equal(run.array(ref.record), np.full((4, 4), 3.0))
                said[call.scope] = ""
            except ElementsMissing as error:
                said[call.scope] = str(error)
    assert [n for n in names if not said[n]] == ["a", "b", "c", "d", "e"]
    assert (
        "libhdf5 ended with SIGSEGV" in said["segv"]
        and "libhdf5 ended with SIGABRT" in said["abrt"]
    )
    assert (
        "is damaged" in said["memory"]
        and "cannot be read: libhdf5 ended with SIGSEGV" in said["late"]
    )


def test_what_keeps_libhdf5_busy_for_ever_is_refused(deadly, tmp_path, capsys):
    path = written(tmp_path / "x.h5", {"endless.X.0.forward_output.0": np.ones(3)})
    assert execute(["show", str(path)]) == 3
    assert "libhdf5 does not come to an end with it, at /1/endless" in capsys.readouterr().err


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    path, worker = tmp_path / "x.h5", hdf5.Worker()
    for value in (1.0, 2.0):
        path.unlink(missing_ok=True)
        written(path, {"a.X.0.forward_output.0": np.full(4, value)}, chunks=(2,))
        assert (
            worker.read(path, "/1/a.X.0.forward_output.0", 32).view(np.float64).tolist()
            == [value] * 4
        )


def test_mutated_files_are_refused_or_lose_tensors(tmp_path, monkeypatch):
    """Bytes overwritten anywhere, in files with every filter and layout; one process reads them
    all, as long as it lives.
    """
    tensors = {
        f"l{i}.Linear.{i}.forward_output.0": RNG.standard_normal((9, 7)).astype(np.float32)
        for i in range(6)
    }
    packed = [
        {},
        {"compression": "gzip", "shuffle": True},
        {"compression": "lzf"},
        {"fletcher32": True},
        {"scaleoffset": 3},
    ]
    bases = []
    for i, options in enumerate(packed):
        path = written(
            tmp_path / f"base{i}.h5",
            tensors,
            dtypes=dict.fromkeys(tensors, "torch.float32"),
            **options,
        )
        bases.append(path.read_bytes())
    worker = hdf5.Worker()
    monkeypatch.setattr(hdf5, "Worker", lambda: worker)
    draw, path, opened = random.Random(7), tmp_path / "x.h5", 0
    for i in range(250):
        data = bytearray(bases[i % len(bases)])
        for _ in range(draw.choice((1, 3, 20))):
            place, width = (
                draw.randrange(min(len(data), draw.choice((512, 4096, 1 << 20)))),
                draw.choice((1, 4, 8)),
            )
            data[place : place + width] = draw.choice(
                (bytes(width), b"\xff" * width, draw.randbytes(width))
            )
        path.write_bytes(bytes(data))
        opened += survives(f"mutation {i}", path, "torch_xray") is not None
    assert 10 < opened < 250


def test_the_files_that_ended_the_process_are_read_or_refused(shared):
    for name in ("segv.h5", "bigmem.h5"):
        survives(name, shared / "repros" / "hdf5" / name)


def test_without_h5py_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingDependency, match=r"pip install 'h5py>=3\.11'"):
        open_run(GPU)


def test_damaged_files_are_refused_or_lose_tensors(tmp_path, monkeypatch):
    worker = hdf5.Worker()
    monkeypatch.setattr(hdf5, "Worker", lambda: worker)
    for what, path in variants(GPU, tmp_path):
        survives(what, path, "torch_xray")
