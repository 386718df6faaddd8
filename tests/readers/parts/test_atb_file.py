"""Tensor files of ATB, written here by hand: kinds of headers, records behind each other, what is
missing or torn.
"""

import re

import ml_dtypes
import numpy as np
import pytest

from whence.errors import ElementsMissing, UnreadableRun
from whence.readers.ascend import atb_file

CODES = {
    0: np.float32,
    1: np.float16,
    2: np.int8,
    3: np.int32,
    9: np.int64,
    12: np.bool_,
    16: np.complex64,
    27: ml_dtypes.bfloat16,
}


def written(array, code, *, extra="", count=1):
    data = array.tobytes()
    dims = ",".join(map(str, array.shape))
    head = f"$Version=1.0\n$Object.Count={count}\n$Object.Length={len(data)}\nformat=2\ndtype={code}\ndims={dims}\n{extra}"
    return f"{head}$Object.data=0,{len(data)}\n$End=1\n".encode() + data


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (10,)])
def test_elements_of_each_type(tmp_path, code, shape):
    array = (np.arange(int(np.prod(shape))) % 11).astype(CODES[code]).reshape(shape)
    (tmp_path / "x").write_bytes(written(array, code, extra="unheard=of=this\n"))
    (found,) = atb_file.tensors(tmp_path / "x")
    read = atb_file.elements(tmp_path / "x", found)
    assert read.tobytes() == array.tobytes()
    assert (read.dtype, read.shape, found.attributes["unheard"]) == (array.dtype, shape, "of=this")


def test_records_behind_each_other_and_elements_that_look_like_a_header(tmp_path):
    tricky = np.frombuffer(b"$End=1\n$Version=1.0\n....", np.float32)
    arrays = [
        np.arange(6, dtype=np.float32),
        tricky,
        np.zeros(0, np.float32),
        np.arange(3, dtype=np.float32),
    ]
    (tmp_path / "x").write_bytes(b"".join(written(a, 0) for a in arrays))
    assert [
        atb_file.elements(tmp_path / "x", t).tobytes() for t in atb_file.tensors(tmp_path / "x")
    ] == [a.tobytes() for a in arrays]


def test_a_file_without_object_lines(tmp_path):
    a = np.arange(6, dtype=np.float16)
    (tmp_path / "x").write_bytes(b"dtype=1\ndims=2,3\n$End=1\n" + a.tobytes())
    (found,) = atb_file.tensors(tmp_path / "x")
    assert atb_file.elements(tmp_path / "x", found).tolist() == a.reshape(2, 3).tolist()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (written(np.ones(4, np.float32), 0)[:-3], "x has 13 of 16 bytes: the file was cut short"),
        (
            b"$Version=1.0\n$Object.Count=0\n$Object.Length=0\ndtype=0\ndims=2\n$End=1\n",
            "the dump holds its description only",
        ),
        (written(np.ones(4, np.float32), 13), "elements of string are not read"),
        (written(np.ones(4, np.float32), 99), "data type 99"),
        (b"dtype=0\ndims=2,x\n$End=1\n", "'x' is not a number"),
        (b"dtype=0\ndims=-2\n$End=1\n", "not a shape"),
        (
            b"$Object.Length=4\ndtype=0\ndims=1000000000,1000000000\n$End=1\n1234",
            "has 4 of 4000000000000000000 bytes",
        ),
    ],
)
def test_what_holds_no_elements_says_why(tmp_path, data, why):
    (tmp_path / "x").write_bytes(data)
    found = atb_file.tensors(tmp_path / "x")[-1]
    assert why in found.why
    with pytest.raises(ElementsMissing, match=re.escape(why)):
        atb_file.elements(tmp_path / "x", found)


def test_a_reference_to_another_file_is_told(tmp_path):
    (tmp_path / "x").write_bytes(
        b"$Version=1.0\n$Object.Count=0\n$Object.Length=0\ndtype=0\ndims=2\ndata=2_1_outtensor0.bin\n$End=1\n"
    )
    assert [t.data for t in atb_file.tensors(tmp_path / "x")] == ["2_1_outtensor0.bin"]


@pytest.mark.parametrize(
    "data", [b"", b"text\n", b"\x00" * 100, b"a=1\n" * 5000, b"dtype=0\ndims=2"]
)
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UnreadableRun, match="not a tensor file of ATB"):
        atb_file.tensors(tmp_path / "x")
