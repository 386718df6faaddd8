"""Every format: a run comes back call by call and bit by bit, whatever its dtypes and names; the
same as itself; nothing is left behind.
"""

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import whence
from handmade import net
from whence import api, writers
from whence.api import open_run
from whence.errors import OutputExists, UsageError
from whence.records import MemoryRun
from writers import every_kind

FORMATS = ("msprobe", "npy", "polygraphy", "safetensors", "torch_xray")
RUN = every_kind.run()


@pytest.fixture(scope="module", params=[*FORMATS, "polygraphy.json"])
def converted(request, tmp_path_factory):
    to, _, suffix = request.param.partition(".")
    path = tmp_path_factory.mktemp("converted") / f"dump{suffix and '.json'}"
    return to, path, whence.convert(RUN, path, to=to)


def told(run):
    """What a run says of its calls, by rank in the order in which they began."""
    calls = sorted(run.calls, key=lambda c: (c.rank, c.order))
    fields = "rank step root scope op op_type occurrence kind phase arguments"
    return [
        (
            *(getattr(call, name) for name in fields.split()),
            run.calls[call.parent].scope if call.parent >= 0 else None,
        )
        for call in calls
    ]


def tensors(run):
    """(dtype, shape, bytes) by call and slot."""
    found = {}
    for call in run.calls:
        for ref in call.refs:
            record, array = run.records[ref.record], run.array(ref.record)
            assert array.dtype == np.dtype(array.dtype.newbyteorder("="))
            found[call.rank, call.step, call.scope, call.occurrence, ref.slot] = (
                record.dtype,
                record.shape,
                array.tobytes(),
            )
    return found


def test_there_are_these_formats():
    assert api.formats() == tuple(
        sorted((*FORMATS, "msit_torch"))
    )  # which holds less: test_msit_torch_written


def test_calls_come_back_with_their_names_and_order(converted):
    _, path, _ = converted
    assert told(open_run(str(path))) == told(RUN)


def test_tensors_come_back_bit_by_bit(converted):
    _, path, _ = converted
    back, expected = tensors(open_run(str(path))), tensors(RUN)
    assert back.keys() == expected.keys()
    assert [key for key in back if back[key] != expected[key]] == []
    assert {dtype for dtype, _, _ in back.values()} == set(whence.dtypes.DTYPES)


def test_a_conversion_is_the_same_as_its_run(converted):
    _, path, written = converted
    for pair in ((RUN, path), (path, RUN)):
        result = whence.compare(*pair)
        assert (result.status, set(result.counts), result.unmatched) == ("same", {"identical"}, 0)
    assert written.left_out == {}


def test_it_says_what_it_wrote_and_nothing_lies_elsewhere(converted):
    to, path, written = converted
    assert all(
        file.is_file() and file.resolve().is_relative_to(path.resolve()) for file in written.files
    )
    held = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    assert sorted(held) == sorted(written.files)
    assert list(path.parent.iterdir()) == [path]
    sights = sum(len(call.refs) for call in RUN.calls)
    assert written.tensors == (len(RUN.records) if to in ("npy", "safetensors") else sights)


def test_a_planted_difference_is_found_in_the_converted_dump(tmp_path):
    broken = net(change=lambda name, value: value * 1.01 if name == "h" else value)
    for to in FORMATS:
        whence.convert(broken, tmp_path / to, to=to)
        result = whence.compare(net(), tmp_path / to)
        assert (result.status, [f.name for f in result.findings]) == ("different", ["fc1"]), to


def test_a_dump_of_another_tool_is_converted_too(tmp_path):
    source = (
        Path(__file__).parent.parent / "data" / "torch_xray" / "xpu_globalrank-0_localrank-0.h5"
    )
    for to in FORMATS:
        whence.convert(source, tmp_path / to, to=to)
        one, two = open_run(str(source)), open_run(str(tmp_path / to))
        assert told(two) == told(one), to
        assert tensors(two) == tensors(one), to


def test_what_has_no_elements_is_left_out_by_name(tmp_path):
    whole = net()
    records = [
        msgspec.structs.replace(r, why="statistics only") if r.id == 3 else r for r in whole.records
    ]
    run = MemoryRun(whole.calls, records, {i: whole.array(i) for i in range(6) if i != 3})
    for to in FORMATS:
        written = whence.convert(run, tmp_path / to, to=to)
        ((why, names),) = written.left_out.items()
        assert "elements are missing (statistics only)" in why, to
        assert "fc1.output.0" in names[0] or "fc1.Linear.0.forward_output.0" in names[0], names
        back = open_run(str(tmp_path / to))
        held = [
            r.record
            for c in back.calls
            if c.scope == "fc1"
            for r in c.slots("output")
            if not back.records[r.record].why
        ]
        assert held == [], to
        result = whence.compare(whole, tmp_path / to)
        assert result.status != "same" or result.evidence == "statistics", to


@pytest.mark.parametrize("to", FORMATS)
def test_an_existing_destination_stays_unless_forced(to, tmp_path):
    path = tmp_path / "dump"
    whence.convert(net(), path, to=to)
    before = {f: f.read_bytes() for f in path.rglob("*") if f.is_file()}
    with pytest.raises(OutputExists, match="--force replaces it"):
        whence.convert(net(seed=1), path, to=to)
    assert {f: f.read_bytes() for f in path.rglob("*") if f.is_file()} == before
    whence.convert(net(seed=1), path, to=to, force=True)
    assert whence.compare(net(seed=1), path).status == "same"
    (path / "thesis.odt").write_text("mine")
    with pytest.raises(OutputExists, match="nothing was deleted"):
        whence.convert(net(), path, to=to, force=True)
    assert (path / "thesis.odt").read_text() == "mine"


def test_a_run_is_never_replaced_nor_written_into(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"kind": "whence"}')
    with pytest.raises(OutputExists, match="a conversion never replaces one"):
        whence.convert(net(), tmp_path / "run", to="npy", force=True)
    whence.convert(net(), tmp_path / "dump", to="npy")
    for inside in ("dump", "dump/below", "."):
        with pytest.raises(UsageError, match="are inside each other"):
            whence.convert(tmp_path / "dump", tmp_path / inside, to="npy", force=True)
    with pytest.raises(UsageError, match="no writer for 'hdf'; there are msit_torch, msprobe, npy"):
        whence.convert(net(), tmp_path / "x", to="hdf")


class _Stopped:
    """A run whose fourth tensor never comes."""

    def __init__(self, error):
        self.run, self.error, self.asked = net(), error, 0

    def __getattr__(self, name):
        return getattr(self.run, name)

    def array(self, record):
        self.asked += 1
        if self.asked > 3:
            raise self.error
        return self.run.array(record)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_interrupted_leaves_nothing(to, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        whence.convert(_Stopped(KeyboardInterrupt()), tmp_path / "dump", to=to)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write_is_an_error(tmp_path):
    with pytest.raises(
        UsageError, match=r"nothing of .* can be written as npy: elements are missing"
    ):
        whence.convert(net(keep=False), tmp_path / "dump", to="npy")
    assert list(tmp_path.iterdir()) == []


def test_statistics_alone_become_a_dump_of_statistics_of_msprobe(tmp_path):
    run = net(keep=False)
    written = whence.convert(run, tmp_path / "dump", to="msprobe")
    assert (written.tensors, written.described) == (0, 9)
    dump = json.loads((tmp_path / "dump" / "step0" / "rank0" / "dump.json").read_text())
    assert dump["task"] == "statistics"
    leaf = dump["data"]["Module.fc1.Linear.forward.0"]["parameters"]["weight"]
    weight = net().array(2).astype(np.float64)
    figures = [leaf[name] for name in ("Max", "Min", "Mean", "Norm")]
    np.testing.assert_allclose(
        figures, [weight.max(), weight.min(), weight.mean(), np.linalg.norm(weight)], rtol=1e-12
    )
    assert "data_name" not in leaf
    result = whence.compare(run, tmp_path / "dump")
    assert (result.status, result.evidence) == ("same", "statistics")


def test_no_name_in_a_table_is_a_formula(tmp_path):
    pytest.importorskip("h5py")
    whence.convert(RUN, tmp_path / "dump", to="torch_xray")
    for table in (tmp_path / "dump").glob("*.csv"):
        with table.open(newline="") as text:
            names = [row["Module"] for row in csv.DictReader(text)]
        assert any("cmd|" in name for name in names)
        assert not any(name.startswith(("=", "+", "-", "@")) for name in names)


def test_safetensors_parts_are_those_of_a_checkpoint(tmp_path):
    from safetensors import safe_open

    run = net()
    written = writers.named("safetensors").write(run, tmp_path / "parts", part_bytes=1500)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = {f.name for f in written.files if f.suffix == ".safetensors"}
    assert set(index["weight_map"].values()) == files and len(files) == 4
    assert index["metadata"]["total_size"] == written.nbytes
    with safe_open(tmp_path / "parts" / index["weight_map"]["fc1.weight"], "np") as file:
        np.testing.assert_array_equal(file.get_tensor("fc1.weight"), run.array(2))
    assert whence.compare(run, tmp_path / "parts").status == "same"


def test_numpy_itself_reads_what_it_has_types_for(tmp_path):
    import ml_dtypes

    whence.convert(RUN, tmp_path / "dump", to="npy")
    arrays = {tuple(p.name.split("_", 1)): np.load(p) for p in (tmp_path / "dump").rglob("*.npy")}
    assert len(arrays) == len(RUN.records)
    for (number, _), array in arrays.items():
        expected = RUN.array(int(number))
        assert array.view(expected.dtype).tobytes() == expected.tobytes()
        assert array.dtype == expected.dtype or array.dtype.kind == "V"
    bf16 = next(r.id for r in RUN.records if r.dtype == "bfloat16")
    assert (
        arrays[next(key for key in arrays if int(key[0]) == bf16)].view(ml_dtypes.bfloat16).dtype
        == ml_dtypes.bfloat16
    )


def test_an_index_that_lies_is_refused_or_costs_the_tensor(tmp_path):
    whence.convert(net(), tmp_path / "dump", to="npy")
    index = tmp_path / "dump" / "whence.jsonl"
    lines = index.read_text().splitlines()
    index.write_text(
        "\n".join(line.replace("step0/rank0/000001", "../../../000001") for line in lines)
    )
    run = open_run(str(tmp_path / "dump"))
    with pytest.raises(whence.errors.ElementsMissing, match="is outside"):
        run.array(1)
    index.write_text("\n".join(lines[:-1])[:-10])
    # The arrays are read without it, and the run is not whole.
    assert "whence.jsonl" in {m.where for m in open_run(str(tmp_path / "dump")).missing}


def test_the_table_beside_the_h5_has_each_dataset(tmp_path):
    h5py = pytest.importorskip("h5py")
    written = whence.convert(net(), tmp_path / "dump", to="torch_xray")
    with h5py.File(written.files[0]) as file, written.files[1].open(newline="") as text:
        rows = list(csv.DictReader(text))
        assert list(rows[0]) == ["Step", "Rank", "Module", "Min", "Max", "Mean", "Std"]
        assert [row["Module"] for row in rows] == list(file["1"])
        weight = file["1/fc1.Linear.0.forward_params.weight"][()].astype(np.float64)
        row = next(row for row in rows if row["Module"] == "fc1.Linear.0.forward_params.weight")
        figures = [float(row[name]) for name in ("Min", "Max", "Mean", "Std")]
        np.testing.assert_allclose(
            figures, [weight.min(), weight.max(), weight.mean(), weight.std()], rtol=1e-12
        )


def test_leaves_alone_and_step_by_step_as_the_tool_dumps(tmp_path):
    h5py = pytest.importorskip("h5py")
    write = writers.named("torch_xray").write
    early = every_kind.run(ranks=(0,), steps=(0,))
    write(early, tmp_path, leaves=True, append=True)
    with h5py.File(tmp_path / "globalrank-0_localrank-0.h5", "a") as file:
        assert list(file) == ["1"]
        file.attrs["mark"] = 7
    both = every_kind.run(ranks=(0,), steps=(0, 1))
    written = write(both, tmp_path, leaves=True, append=True)
    with h5py.File(tmp_path / "globalrank-0_localrank-0.h5") as file:
        assert (list(file), file.attrs["mark"]) == (["1", "2"], 7)
        assert not any(name.startswith("Net.") for name in file["1"])
    assert written.left_out == {"not a leaf module": ("Net", "Net")}
    back = open_run(str(tmp_path))
    expected = {key: value for key, value in tensors(both).items() if key[2]}
    assert {key: value for key, value in tensors(back).items() if key[2]} == expected
    table = (tmp_path / "globalrank-0_localrank-0_summary.csv").read_text()
    assert table.count("Step,Rank,Module") == 1


def test_numbers_out_of_a_print_are_never_passed_for_exact_ones(tmp_path):
    whole = net()
    for change in ({"quantum": 1e-4}, {"whole": (100, 32)}):
        records = [msgspec.structs.replace(r, **change) if r.id == 3 else r for r in whole.records]
        run = MemoryRun(whole.calls, records, {i: whole.array(i) for i in range(6)})
        for to in FORMATS:
            written = whence.convert(run, tmp_path / to, to=to, force=True)
            back = open_run(str(tmp_path / to))
            made = [
                r.record
                for c in back.calls
                if c.scope == "fc1"
                for r in c.slots("output")
                if not back.records[r.record].why
            ]
            if to in ("npy", "safetensors"):
                assert [(back.records[n].quantum, back.records[n].whole) for n in made] == [
                    (records[3].quantum, records[3].whole)
                ]
            else:
                assert (made, len(written.left_out)) == ([], 1)


def test_names_that_become_one_name_stay_apart(tmp_path):
    built = every_kind.Builder()
    names = (
        "x/y",
        "x%2Fy",
        "Model",
        "model",
        "a.B",
        "A" * 200 + "x",
        "B" + "A" * 199 + "x",
        "p.0",
        "p",
    )
    for i, name in enumerate(names):
        built.call(name, {"output.0": np.full(9, i, np.int32)}, op_type="", root="Model")
    built.call(
        "a",
        {"output.0": np.full(9, 99, np.int32), "param.output.0": np.full(9, 98, np.int32)},
        op_type="B",
        root="Model",
    )
    run = built.run()
    for to in FORMATS:
        whence.convert(run, tmp_path / to, to=to)
        assert {k: v for k, v in tensors(open_run(str(tmp_path / to))).items() if k[2]} == tensors(
            run
        ), to


def test_calls_without_tensors_come_back(tmp_path):
    built = every_kind.Builder()
    for step in range(2):
        top = built.call("", {}, step=step, op_type="Net")
        for i in range(30):
            inner = built.call(f"block.{i}", {}, parent=top, step=step, leaf=False)
            if i % 10 == 0:
                built.call(
                    f"block.{i}.fc",
                    {"output.0": np.arange(9.0) + i + step},
                    parent=inner,
                    step=step,
                )
    run = built.run()
    for to in FORMATS:
        written = whence.convert(run, tmp_path / to, to=to)
        assert (written.left_out, told(open_run(str(tmp_path / to)))) == ({}, told(run)), to


def test_programs_stay_where_there_is_room_for_them(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model, broken = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU("tanh")),
    )
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, one in (("ref", model), ("tgt", broken)):
            with whence.capture(one, tmp_path / name):
                one(torch.linspace(-3, 3, 16).reshape(2, 8))
    expected = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert (expected.status, expected.evidence) == ("different", "replay")
    for to in ("npy", "safetensors"):
        whence.convert(tmp_path / "ref", tmp_path / to, to=to)
        result = whence.compare(tmp_path / to, tmp_path / "tgt")
        assert (result.status, result.evidence, [f.name for f in result.findings]) == (
            "different",
            "replay",
            ["1"],
        )
