"""Comparisons that are written to an object store and opened from there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from by_hand_store import add, call, new

import whence
from whence import api, store
from whence.errors import OutputExists, StoreFailed, UnreadableRun, UsageError
from whence.records import Ref
from whence.store import remote
from whence.store.remote import Place

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket(bucket, tmp_path, monkeypatch):
    """The same, with a folder of its own for what goes there."""
    monkeypatch.setenv("WHENCE_SPOOL", str(tmp_path / "spool"))
    return bucket


@pytest.fixture
def runs(tmp_path):
    """The paths of two runs that differ."""
    for name, shift in (("ref", 0.0), ("tgt", 0.25)):
        rng = np.random.default_rng(0)
        with store.Writer(new(tmp_path / name)) as writer:
            for number in range(3):
                x = rng.standard_normal(500).astype(np.float32) + np.float32(shift)
                refs = (Ref("output.0", add(writer, x, "float32")),)
                writer.call(call(number, *refs, scope=f"layers.{number}"))
    return str(tmp_path / "ref"), str(tmp_path / "tgt")


def test_a_comparison_is_written_to_a_url_and_opened_there(tmp_path, bucket, runs):
    url = f"{bucket}/cmp"
    near = whence.compare(*runs, output=tmp_path / "near")
    whence.compare(*runs, output=url)
    files = Place(url).names()
    assert files.keys() == {file.name for file in (tmp_path / "near").iterdir()}
    assert Place(url).read("report.csv") == (tmp_path / "near/report.csv").read_bytes()
    assert not list((tmp_path / "spool").iterdir())
    for place in (url, f"{url}/report.json"):
        saved = whence.load_comparison(place)
        assert saved.rows == whence.load_comparison(tmp_path / "near").rows
        assert saved.status == near.status
    # the commands that take it further name the URL
    assert saved.next == near.in_folder(url).next
    whence.report_html(url, tmp_path / "page.html")
    assert "could not be read again" not in (tmp_path / "page.html").read_text()


def test_what_lies_there_is_kept(bucket, runs):
    url = f"{bucket}/cmp"
    whence.compare(*runs, output=url)
    with pytest.raises(OutputExists, match="--force"):
        whence.compare(*runs, output=url)
    whence.compare(*runs, output=url, force=True)
    api.upload(runs[0], f"{bucket}/run")
    with pytest.raises(OutputExists, match="holds a run"):
        whence.compare(*runs, output=f"{bucket}/run", force=True)
    with pytest.raises(UnreadableRun, match="is a run, not a comparison"):
        whence.load_comparison(f"{bucket}/run")


def test_nothing_is_lost_where_the_upload_fails(tmp_path, bucket, runs, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    files = type(fsspec.filesystem("memory"))
    whole = files.put_file

    def cut(self, local, path, **more):
        if path.endswith("report.json"):
            raise ConnectionResetError("the line was cut")
        return whole(self, local, path, **more)

    monkeypatch.setattr(files, "put_file", cut)
    with pytest.raises(StoreFailed, match="all of it is at"):
        whence.compare(*runs, output=f"{bucket}/cmp")
    (kept,) = (tmp_path / "spool").iterdir()
    assert len(whence.load_comparison(kept).rows) == 3
    with pytest.raises(UnreadableRun):  # its report.json goes last
        whence.load_comparison(f"{bucket}/cmp")


def test_the_commands_take_a_url(tmp_path, runs):
    """Each is a process of its own: a store that is a folder."""
    pytest.importorskip("fsspec.implementations.local")
    url = f"file://{tmp_path}/store/cmp"

    def command(*words):
        return subprocess.run(
            [sys.executable, "-m", "whence", *words],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    done = command("compare", *runs, "-o", url)
    assert f"written to {url}" in done.stdout, done.stderr
    assert (tmp_path / "store/cmp/report.json").is_file()
    page = command("report", url)
    assert page.returncode == 0, page.stderr
    assert (tmp_path / "report.html").is_file()
    again = command("compare", *runs, "-o", url)
    assert again.returncode == 3
    assert "--force" in again.stderr


def test_what_is_written_here_refuses_a_url(runs):
    result = whence.compare(*runs, replay=False)
    with pytest.raises(UsageError, match="plots are written to a folder of this machine"):
        api.plots(result, "memory://plots")
    with pytest.raises(UsageError, match="a Parquet file is written to this machine"):
        api.to_parquet(result, "memory://pairs.parquet")
