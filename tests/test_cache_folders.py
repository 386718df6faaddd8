"""Folders of whence's own."""

import os

import pytest

from whence import cache_folders


def test_a_folder_of_ours_is_taken(tmp_path):
    assert cache_folders.private(tmp_path / "whence" / "kernels")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="has no owners of folders")
def test_every_folder_above_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert not cache_folders.private(tmp_path / "open" / "whence" / "kernels")
    (tmp_path / "open").chmod(0o1777)  # as /tmp is
    assert cache_folders.private(tmp_path / "open" / "whence" / "kernels")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="has no owners of folders")
def test_a_folder_above_that_another_user_made_is_refused(tmp_path, monkeypatch):
    made = tmp_path / "whence" / "kernels"
    assert cache_folders.private(made)
    lstat = type(tmp_path).lstat

    def of_another(path):
        about = list(lstat(path))
        if path == tmp_path / "whence":
            about[4] = os.getuid() + 1
        return os.stat_result(about)

    monkeypatch.setattr(type(tmp_path), "lstat", of_another)
    assert not cache_folders.private(made)
