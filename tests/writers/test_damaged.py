"""What whence wrote, damaged or made to do harm: it is refused or costs a tensor, and its cards and
index are trusted no further.
"""

import json

import msgspec
import numpy as np
import pytest

import whence
from handmade import Builder, net
from readers import hostile
from whence.api import open_run
from whence.records import missing_of

SPOILT = {  # one file of each kind
    "npy": ("whence.jsonl", "step0/rank0/000003_fc1.output.0.npy"),
    "safetensors": ("whence.jsonl", "model.safetensors"),
    "msprobe": (
        "step0/rank0/dump.json",
        "step0/rank0/dump_tensor_data/Module.fc1.Linear.forward.0.output.0.pt",
    ),
    "polygraphy": ("0000000000.json",),
    "torch_xray": ("globalrank-0_localrank-0.h5",),
}


@pytest.mark.parametrize("to", SPOILT)
def test_a_damaged_file_is_refused_or_costs_a_tensor(to, tmp_path):
    whence.convert(net(), tmp_path / "dump", to=to)
    (tmp_path / "work").mkdir()
    tried = 0
    for what, path in hostile.variants(
        tmp_path / "dump", tmp_path / "work", among=lambda name: name in SPOILT[to]
    ):
        hostile.survives(what, path, to)
        tried += 1
    assert tried > 40 * len(SPOILT[to])


def edited(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.mark.parametrize("place", hostile.ESCAPES)
@pytest.mark.parametrize("to", ["npy", "safetensors"])
def test_an_index_leads_nowhere(to, place, tmp_path):
    whence.convert(net(), tmp_path / "dump", to=to)

    def change(line):
        if line["t"] == "record":
            line["elements"]["file"] = f"{place},fc1.weight"

    edited(tmp_path / "dump" / "whence.jsonl", change)
    run = hostile.survives(place, tmp_path / "dump")
    if run is None or any(m.where == "whence.jsonl" for m in missing_of(run)):
        return  # the file of tensors is read without its index
    for record in run.records:
        with pytest.raises(whence.errors.ElementsMissing):
            run.array(record.id)


@pytest.mark.parametrize(
    "change",
    [{"parent": 1}, {"id": 0}, {"order": -5}, {"refs": [["output.0", 99, ""]]}, {"rank": -1}],
)
def test_calls_of_an_index_that_make_no_sense(change, tmp_path):
    whence.convert(net(), tmp_path / "dump", to="npy")
    edited(
        tmp_path / "dump" / "whence.jsonl",
        lambda line: line.update(change if line["t"] == "call" else {}),
    )
    hostile.survives(str(change), tmp_path / "dump")


def test_a_card_names_and_holds_no_numbers(tmp_path):
    """Elements that were changed in the file are the changed ones, whatever was known of them
    before.
    """
    whence.convert(net(), tmp_path / "dump", to="npy")
    path = tmp_path / "dump" / "step0" / "rank0" / "000003_fc1.output.0.npy"
    np.save(path, np.load(path) * np.float32(1.01))
    result = whence.compare(net(), tmp_path / "dump")
    assert (result.status, [f.name for f in result.findings][:1]) == ("different", ["fc1"])


def test_cards_of_some_tensors_only_are_passed_over(tmp_path):
    h5py = pytest.importorskip("h5py")
    whence.convert(net(), tmp_path / "dump", to="torch_xray")
    with h5py.File(tmp_path / "dump" / "globalrank-0_localrank-0.h5", "a") as file:
        file["1/extra.Linear.9.forward_output.0"] = np.arange(12.0)
    found = {call.scope for call in open_run(str(tmp_path / "dump")).calls}
    assert {"extra", "fc1", "fc2"} <= found


def test_very_many_arguments_do_not_break_an_attribute(tmp_path):
    pytest.importorskip("h5py")
    built = Builder()
    built.call("fc", {"output.0": np.arange(12.0)})
    built.calls[0] = msgspec.structs.replace(
        built.calls[0], arguments={f"input.{i}": "x" * 100 for i in range(2000)}
    )
    written = whence.convert(built.run(), tmp_path / "dump", to="torch_xray")
    assert written.left_out == {
        "arguments too long for an attribute": ("fc.Linear.0.forward_output.0",)
    }
    (call,) = (call for call in open_run(str(tmp_path / "dump")).calls if call.scope == "fc")
    assert (call.op_type, call.arguments) == ("Linear", {})
