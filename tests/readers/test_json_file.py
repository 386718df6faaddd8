"""JSON of other tools: what the standard library reads, in less memory."""

import json
import math
import subprocess
import sys

import pytest

from whence.readers.encodings.json_file import json_of

TEXTS = [
    b'{"a": [1, 2.5, "x", null, true], "b": {"c": -0.0}}',
    b'{"max": NaN, "min": -Infinity}',
    b"\xef\xbb\xbf[1]",
    '["\u00fc", "\\ud800"]'.encode(),
    json.dumps({"deep": [[[[]]]]}).encode("utf-16"),
    b'{"twice": 1, "twice": 2}',
    b"[1e400]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_read_as_the_standard_library_reads_it(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text)
    assert repr(json_of(tmp_path / "a.json")) == repr(json.loads(text))


@pytest.mark.parametrize("text", [b"", b"{", b"[1] 2", b"\0" * 100, b"\xff\xff\xff", b"nothing"])
def test_what_is_no_json_is_a_value_error(text, tmp_path):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError, match=r".+"):
        json_of(tmp_path / "a.json")


def test_a_number_that_is_none_stays_one(tmp_path):
    (tmp_path / "a.json").write_text('{"norm": NaN}')
    assert math.isnan(json_of(tmp_path / "a.json")["norm"])


@pytest.mark.parametrize("beginning", [b"", b'{"data": {}}'])
def test_a_file_of_zeros_takes_its_own_size_and_no_more(beginning, tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.write(beginning)
        file.truncate(256 << 20)
    code = (
        "import resource, pathlib\n"
        "from whence.readers.encodings.json_file import json_of\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({400 << 20}, resource.RLIM_INFINITY))\n"
        "try:\n    json_of(pathlib.Path('a.json'))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    place = len(beginning)
    assert out.stdout == f"it holds zeros from byte {place} on: it was not written to its end\n"


def test_a_hole_is_found_without_reading_all_of_it(tmp_path):
    path = tmp_path / "dump.json"
    with path.open("wb") as file:
        file.write(b'{"data": 1')
        file.truncate(1 << 33)
    with pytest.raises(ValueError, match="holds zeros from byte 10 on"):
        json_of(path)
    with path.open("wb") as file:
        file.write('{"data": 1'.encode("utf-16"))
        file.truncate(1 << 33)
    with pytest.raises(ValueError, match="write it in UTF-8"):
        json_of(path)
