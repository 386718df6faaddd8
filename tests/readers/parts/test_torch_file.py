"""Files of torch.save, read without torch; torch itself is the oracle."""

import collections
import contextlib
import io
import pickle
import zipfile
from os import open as os_open

import numpy as np
import pytest

import counting
from readers import hostile
from readers.mapped import is_mapped
from whence.errors import ElementsMissing, UnreadableRun, WhenceError
from whence.readers.encodings import archive, torch_file
from whence.readers.encodings.archive import MAPPED_FROM
from whence.readers.encodings.pickle_values import TorchTensor, Unknown

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def saved(value, *, new=True, protocol=2):
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    return out.getvalue()


def bits(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def storage_of(tensor):
    return torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )


FORMATS = [(new, protocol) for new in (True, False) for protocol in (2, 4, 5)]
BASE = torch.arange(24.0).reshape(2, 3, 4)
CASES = {
    "plain": BASE,
    "sliced": BASE[:, 1:, ::2],
    "turned": BASE.transpose(0, 2),
    "expanded": torch.arange(3.0).reshape(1, 3).expand(5, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
    "bool": torch.tensor([True, False, True]),
    **{
        str(dtype).removeprefix("torch."): torch.randn(7).mul(3).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.complex64,
            torch.complex128,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
        )
    },
    **{
        str(dtype).removeprefix("torch."): torch.arange(7).to(dtype)
        for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    },
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    CASES["float8_e8m0fnu"] = torch.tensor([0.5, 1.0, 4.0]).to(torch.float8_e8m0fnu)


@pytest.mark.parametrize(("new", "protocol"), FORMATS)
def test_every_dtype_and_layout_comes_back_bit_by_bit(new, protocol, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(saved(CASES, new=new, protocol=protocol))
    tree = torch_file.load(path)
    assert list(tree) == list(CASES)
    for name, tensor in CASES.items():
        found = tree[name]
        assert isinstance(found, TorchTensor), name
        assert (found.dtype, found.shape) == (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        ), name
        assert np.ascontiguousarray(found.array()).tobytes() == bits(tensor), name
    assert not tree["turned"].is_contiguous
    assert tree["turned"].stride == tuple(BASE.transpose(0, 2).stride())


def test_elements_of_a_stored_file_are_memory_mapped(tmp_path):
    path = tmp_path / "x.pt"
    large = torch.arange(MAPPED_FROM, dtype=torch.int8)
    path.write_bytes(saved(large))
    array = torch_file.load(path).array()
    assert is_mapped(array)
    assert array.tobytes() == bits(large)


def test_a_tensor_costs_few_calls_and_opens_of_its_file(tmp_path, monkeypatch):
    path, opened = tmp_path / "x.pt", []
    path.write_bytes(saved(BASE))
    torch_file.load(path)
    monkeypatch.setattr(archive.os, "open", lambda *given: opened.append(given) or os_open(*given))
    with counting.counted() as work:
        torch_file.load(path).array()
    assert work.calls < 1100, "a pickle of 60 operations and a directory of 6 entries"
    assert len(opened) <= 7


@pytest.mark.parametrize(("new", "protocol"), FORMATS)
def test_tensors_are_found_in_containers_modules_and_unknown_objects(new, protocol):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    marked = torch.ones(2)
    marked.note = "kept"
    tree = {
        "state": module.state_dict(),
        "module": module,
        "list": [1, (BASE, "x")],
        "attribute": marked,
        "default": collections.defaultdict(list, {"k": torch.zeros(1)}),
        "cell": _Cell(torch.ones(4)),
    }
    found = dict(torch_file.tensors(torch_file.load(saved(tree, new=new, protocol=protocol))))
    assert list(found) == [
        "state.0.weight",
        "state.0.bias",
        "module.0.weight",
        "module.0.bias",
        "list.1.0",
        "attribute",
        "default.k",
        "cell.value",
    ]
    assert found["module.0.weight"].array().tobytes() == bits(module[0].weight)


class _Cell:
    def __init__(self, value):
        self.value = value


def test_shared_storages_are_one():
    base = torch.arange(4.0)
    tree = torch_file.load(saved({"a": base, "b": base[2:]}))
    assert tree["a"].storage.key == tree["b"].storage.key
    assert tree["b"].array().tolist() == [2.0, 3.0]


def test_a_view_of_a_legacy_storage_is_cut_out_of_it():
    tree = torch_file.load(saved({"a": BASE[1], "b": BASE}, new=False))
    assert tree["a"].array().tolist() == BASE[1].tolist()


def test_a_file_of_a_big_endian_machine(tmp_path):
    values = {
        "f": torch.tensor([1.5, -2.0]),
        "b": torch.tensor([1.5, -3.0]).bfloat16(),
        "c": torch.tensor([1 + 2j]),
    }
    little, out = zipfile.ZipFile(io.BytesIO(saved(values))), io.BytesIO()
    turned = {"0": ">u4", "1": ">u2", "2": ">u4"}
    with zipfile.ZipFile(out, "w") as big:
        for name in little.namelist():
            data = little.read(name)
            last = name.rsplit("/", 1)[1]
            if "/data/" in name:
                data = (
                    np.frombuffer(data, turned[last].replace(">", "<"))
                    .astype(turned[last])
                    .tobytes()
                )
            big.writestr(name, b"big" if last == "byteorder" else data)
    tree = torch_file.load(out.getvalue())
    assert {name: tensor.array().tolist() for name, tensor in tree.items()} == {
        name: t.tolist() for name, t in values.items()
    }


def test_numpy_arrays_scalars_and_plain_pickles():
    values = {
        "c": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.float32(2.5),
        "size": torch.Size((2, 3)),
        "bytes": b"ab",
    }
    for data in (saved(values), *(pickle.dumps(values, protocol) for protocol in range(6))):
        tree = torch_file.load(data)
        assert np.array_equal(tree["c"].array(), values["c"])
        assert np.array_equal(tree["f"].array(), values["f"])
        assert tree["big"].array().tolist() == [0, 1, 2]
        assert (tree["scalar"], tree["size"], tree["bytes"]) == (2.5, (2, 3), b"ab")


def test_what_cannot_be_read_is_an_unknown_that_bears_its_name():
    class Quantised:  # as torch writes a tensor of qint8
        def __reduce__(self):
            return torch._utils._rebuild_qtensor, (
                storage_of(torch.ones(2)),
                0,
                (2,),
                (1,),
                (),
                False,
                {},
            )

    tree = torch_file.load(saved({"a": _Cell(1), "q": Quantised(), "t": BASE}))
    assert isinstance(tree["a"], Unknown)
    assert tree["a"].name.endswith("_Cell")
    found = dict(torch_file.tensors(tree))
    assert found["q"].name == "torch._utils._rebuild_qtensor"
    assert np.array_equal(found["t"].array(), BASE.numpy())


def test_a_tensor_of_the_meta_device_has_no_elements():
    tensor = torch_file.load(saved({"t": torch.empty(3, device="meta")}))["t"]
    with pytest.raises(ElementsMissing, match="meta device"):
        tensor.array()


@pytest.mark.parametrize("new", [True, False])
def test_a_storage_cut_short_costs_the_tensors_in_it(new, tmp_path):
    class Cut:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (
                storage_of(torch.arange(4.0)),
                2,
                (3,),
                (1,),
                False,
                {},
            )

    tree = torch_file.load(saved({"cut": Cut(), "whole": BASE}, new=new))
    with pytest.raises(ElementsMissing, match="needs 20 bytes"):
        tree["cut"].array()
    assert np.array_equal(tree["whole"].array(), BASE.numpy())


def test_an_expanded_tensor_is_not_spread_without_bound():
    class Wide:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (
                storage_of(torch.ones(1)),
                0,
                (1 << 40,),
                (0,),
                False,
                {},
            )

    with pytest.raises(ElementsMissing, match="unpack"):
        torch_file.load(saved(Wide())).array()


def test_nothing_in_a_pickle_is_called(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "made"), "w")

    for data in (
        saved({"e": Evil(), "t": BASE}),
        saved({"e": Evil(), "t": BASE}, new=False),
        pickle.dumps(Evil()),
    ):
        tree = torch_file.load(data)
        evil = tree["e"] if isinstance(tree, dict) else tree
        assert isinstance(evil, Unknown)
        assert evil.name.endswith(".open")
    assert not list(tmp_path.iterdir())


def test_trees_that_grow_without_end_are_refused():
    node = [BASE]
    for _ in range(60):
        node = [node, node]
    with pytest.raises(UnreadableRun, match="nodes"):
        list(torch_file.tensors(torch_file.load(saved(node))))
    circle = [BASE]
    circle.append(circle)
    assert [name for name, _ in torch_file.tensors(torch_file.load(saved(circle)))] == ["0"]
    # the same as a shape, as the key of a storage and as a key of a dict, where it must not be
    # written out or hashed
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"(h" + bytes([i]) + b"h" + bytes([i]) + b"lq" + bytes([i + 1]) for i in range(80)
    )
    for use in (
        b"ctorch\nSize\nh\x50\x85R.",
        b"h\x50Q.",
        b"ctorch\ndevice\nh\x50\x85R.",
        b"}h\x50K\x01s.",
    ):
        with contextlib.suppress(UnreadableRun):
            torch_file.load(laughs + use)


def test_the_tar_format_is_named():
    head = b"sys_info" + b"\0" * 249 + b"ustar\x0000" + b"\0" * 2000
    with pytest.raises(UnreadableRun, match="tar archive of torch"):
        torch_file.load(head)


def test_files_are_recognised_by_their_first_bytes():
    assert torch_file.recognised(saved(BASE)[:300])
    assert torch_file.recognised(saved(BASE, new=False)[:300])
    assert not torch_file.recognised(b"PK\x03\x04" + b"\0" * 300)
    assert not torch_file.recognised(b"\x93NUMPY")


@pytest.mark.parametrize(("new", "protocol"), [(True, 2), (False, 2), (False, 5)])
def test_spoilt_files_cost_tensors_or_are_refused(new, protocol, tmp_path):
    sample = tmp_path / "sample.pt"
    small = {"w": BASE, "b": torch.ones(3).bfloat16(), "c": {"d": np.arange(4)}}
    sample.write_bytes(saved(small, new=new, protocol=protocol))
    (tmp_path / "work").mkdir()
    for what, path in hostile.variants(sample, tmp_path / "work"):
        try:
            for _, tensor in torch_file.tensors(torch_file.load(path)):
                if isinstance(tensor, TorchTensor):
                    tensor.array()
        except WhenceError as error:
            assert str(error), what


def test_keys_of_several_parts_are_joined_and_a_text_names_an_input_and_an_output():
    tree = torch_file.load(saved({(3, "attn.o"): BASE}))
    assert [name for name, _ in torch_file.tensors(tree)] == ["3.attn.o"]
    tree = torch_file.load(saved(("layers.1.fc", BASE, BASE + 1)))
    names = dict(torch_file.tensors(tree))
    assert list(names) == ["layers.1.fc.input", "layers.1.fc.output"]
    assert np.array_equal(names["layers.1.fc.output"].array(), (BASE + 1).numpy())
