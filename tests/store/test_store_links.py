"""Files of a run that are links, and files that lie on no disk."""

from pathlib import Path

import pytest

from whence.errors import UnreadableRun
from whence.store.folder import load_json, load_process
from whence.store.shards import map_file


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text('{"key": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="is a link, which is not followed"):
        map_file(tmp_path / "link")
    with pytest.raises(ValueError, match="or a link, which is not followed"):
        load_json(tmp_path / "link")
    assert bytes(map_file(tmp_path / "secret")) == b'{"key": 1}'


def test_a_folder_of_a_process_is_no_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank00000-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableRun, match="is a link"):
        load_process(tmp_path / "rank00000-1")


def test_what_the_kernel_makes_up_is_no_file_of_a_run():
    with pytest.raises(OSError, match="is not a regular file"):
        map_file("/proc/self/status")
    with pytest.raises(ValueError, match="not a regular file on a disk"):
        load_json(Path("/proc/self/status"))
