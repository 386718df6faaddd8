"""Runs in object stores: read by ranges, uploaded while they are written, and told when the line is
cut.
"""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from by_hand_store import add, call, new, same

import inside
import whence
from whence import api, store
from whence.errors import ElementsMissing, OutputExists, StoreFailed, UnreadableRun, UsageError
from whence.records import Ref
from whence.store import remote, remote_shard
from whence.store.remote import Failed, Place
from whence.store.upload import Upload

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def quick(monkeypatch):
    """Tries follow each other at once."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)


def written(path, *, tensors=12, size=200_000, shift=0.0, shard_bytes=2 << 20):
    rng = np.random.default_rng(0)
    with store.Writer(new(path), max_shard_bytes=shard_bytes) as writer:
        for number in range(tensors):
            x = rng.standard_normal(size).astype(np.float32) + np.float32(shift)
            refs = (Ref("output.0", add(writer, x, "float32")),)
            writer.call(call(number, *refs, scope=f"layers.{number}"))
    return path


def test_only_a_url_is_one():
    assert store.is_url("s3://bucket/run")
    assert store.is_url("memory://a")
    for path in ("runs/ref", "/a/b", "C:\\runs\\ref", "c://x", "s3:/x", "", "://x", "a b://c"):
        assert not store.is_url(path)


def test_a_url_is_refused_where_a_folder_is_wanted(tmp_path, bucket):
    """Rather than a folder "s3:" being made."""
    with pytest.raises(UsageError, match="whence upload"), whence.recording(f"{bucket}/run"):
        pass
    local = written(tmp_path / "run", tensors=1)
    with pytest.raises(UsageError, match="file of this machine"):
        whence.report_html(whence.compare(str(local), str(local)), f"{bucket}/page.html")
    with pytest.raises(UsageError, match="folder of this machine"):
        next(iter(whence.watch(str(local), str(local), output=f"{bucket}/cmp")))
    with pytest.raises(UsageError, match="copy it here"):
        api.pack(f"{bucket}/run")
    for path in (tmp_path / "a:b", "a:/b", "/x/y:/z", None):
        store.refuse_url(path, "")
    assert not [p for p in Path().iterdir() if p.name.startswith("memory:")]


def test_a_run_is_read_where_it_lies(tmp_path, bucket):
    local = written(tmp_path / "run")
    assert api.upload(local, f"{bucket}/run") == len([p for p in local.rglob("*") if p.is_file()])
    run, whole = api.open_run(f"{bucket}/run"), store.open_run(local)
    assert run.path == f"{bucket}/run"
    assert list(run.calls) == list(whole.calls)
    assert list(run.notes) == list(whole.notes)
    assert run.ended == whole.ended == ""
    for record in whole.records:
        found = run.array(record.id)
        assert same(found, whole.array(record.id))
        assert not found.flags.writeable
    again = pickle.loads(pickle.dumps(run))  # noqa: S301
    assert again.path == run.path
    assert same(again.array(3), whole.array(3))


def test_a_few_tensors_are_a_few_blocks(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=40, shard_bytes=1 << 30)
    api.upload(local, f"{bucket}/run")
    run = store.open_run(f"{bucket}/run")
    for record in (30, 3, 17):
        assert same(run.array(record), store.open_run(local).array(record))
    requested = run.readers[0].shard(0)._blocks.requested
    assert sum(stop - start for _, start, stop in requested) <= 8 * remote_shard.BLOCK_BYTES
    assert len(requested) <= 8


def test_reading_on_is_read_ahead_and_no_byte_twice(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=40, shard_bytes=1 << 30)
    api.upload(local, f"{bucket}/run")
    run, whole = store.open_run(f"{bucket}/run"), store.open_run(local)
    for record in range(40):
        assert same(run.array(record), whole.array(record))
    requested = run.readers[0].shard(0)._blocks.requested
    (shard,) = local.glob("rank*/shard-*.safetensors")
    assert sum(stop - start for _, start, stop in requested) == shard.stat().st_size
    assert len(requested) < 40 * 0.8  # 0.8 MB each


def test_kept_blocks_have_a_limit(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(remote_shard, "KEPT_BYTES", 4 << 20)
    local = written(tmp_path / "run", tensors=40, shard_bytes=1 << 30)
    api.upload(local, f"{bucket}/run")
    run, whole = store.open_run(f"{bucket}/run"), store.open_run(local)
    for record in [*range(0, 40, 3), *range(40)]:
        assert same(run.array(record), whole.array(record))
        kept = run.readers[0].shard(0)._blocks._known
        assert len(kept) <= 4 + 2 + remote_shard.MOST_AHEAD


def test_a_comparison_is_the_same_and_its_runs_are_found_again(tmp_path, bucket):
    for name, shift in (("ref", 0.0), ("tgt", 0.25)):
        written(tmp_path / name, tensors=4, size=5000, shift=shift)
        api.upload(tmp_path / name, f"{bucket}/{name}")
    near = whence.compare(str(tmp_path / "ref"), str(tmp_path / "tgt"))
    far = inside.whence(tmp_path, "compare", f"{bucket}/ref", f"{bucket}/tgt", "-o", "cmp")
    assert far.returncode == {"same": 0, "different": 1}.get(near.status, 2), far.stderr
    saved = whence.load_comparison(tmp_path / "cmp")
    assert saved.reference == f"{bucket}/ref"
    assert saved.counts == near.counts
    assert [row.measured for row in saved.rows] == [row.measured for row in near.rows]
    page = inside.whence(tmp_path, "report", "cmp", "-o", "page.html")
    assert page.returncode == 0, page.stderr
    assert "could not be read again" not in (tmp_path / "page.html").read_text()
    shown = inside.whence(tmp_path, "show", f"{bucket}/ref", "layers.2")
    assert shown.returncode == 0, shown.stderr
    assert "layers.2" in shown.stdout


def test_a_packed_run_is_read_where_it_lies(tmp_path, bucket):
    pytest.importorskip("numcodecs")
    local = written(tmp_path / "run", tensors=3)
    api.pack(local, tmp_path / "small")
    api.upload(tmp_path / "small", f"{bucket}/small")
    run, whole = store.open_run(f"{bucket}/small"), store.open_run(local)
    for record in whole.records:
        assert same(run.array(record.id), whole.array(record.id))


def test_what_is_not_there_is_told(tmp_path, bucket):
    with pytest.raises(UnreadableRun, match="nothing is there; check the spelling"):
        store.open_run(f"{bucket}/none")
    Place(f"{bucket}/other").write("x.txt", b"1")
    with pytest.raises(UnreadableRun, match=r"no run\.json"):
        api.open_run(f"{bucket}/other")
    with pytest.raises(UnreadableRun, match="cannot open"):
        api.open_run("nothingknown://bucket/run")
    written(tmp_path / "run", tensors=2)
    api.upload(tmp_path / "run", f"{bucket}/run")
    (name,) = [n for n in Place(f"{bucket}/run").names() if n.startswith("rank")]
    fsspec.filesystem("memory").rm(f"{bucket}/run/{name}/shard-00000.safetensors")
    run = store.open_run(f"{bucket}/run")
    with pytest.raises(ElementsMissing, match="not there"):
        run.array(0)
    assert any("cannot be read" in note.text for note in run.notes)


class Cut:
    """Requests that fail: the first so many of each name."""

    def __init__(self, monkeypatch, name, times):
        self.left = times
        files = fsspec.filesystem("memory")
        whole = getattr(type(files), name)

        def cut(files, *args, **more):
            if self.left:
                self.left -= 1
                raise ConnectionResetError("the line was cut")
            return whole(files, *args, **more)

        monkeypatch.setattr(type(files), name, cut)


def test_a_cut_line_is_tried_again(tmp_path, bucket, monkeypatch, quick):
    local = written(tmp_path / "run", tensors=4)
    Cut(monkeypatch, "pipe_file", remote.TRIES - 1)
    Cut(monkeypatch, "put_file", remote.TRIES - 1)
    api.upload(local, f"{bucket}/run")
    run, whole = store.open_run(f"{bucket}/run"), store.open_run(local)
    Cut(monkeypatch, "cat_file", remote.TRIES - 1)
    assert same(run.array(1), whole.array(1))


def test_a_line_that_stays_cut_is_told_and_may_come_back(tmp_path, bucket, monkeypatch, quick):
    local = written(tmp_path / "run", tensors=4)
    api.upload(local, f"{bucket}/run")
    run, whole = store.open_run(f"{bucket}/run"), store.open_run(local)
    cut = Cut(monkeypatch, "cat_file", 10**6)
    with pytest.raises(ElementsMissing, match=r"the line was cut.*4 tries.*check the connection"):
        run.array(1)
    cut.left = 0
    assert same(run.array(1), whole.array(1))


def test_nothing_is_lost_where_the_upload_fails(tmp_path, bucket, monkeypatch, quick):
    local = written(tmp_path / "run", tensors=4)
    cut = Cut(monkeypatch, "put_file", 10**6)
    with pytest.raises(StoreFailed, match=f"all of it is still at {local}: whence upload {local} "):
        api.upload(local, f"{bucket}/run")
    cut.left = 0
    api.upload(local, f"{bucket}/run", force=True)
    assert same(store.open_run(f"{bucket}/run").array(1), store.open_run(local).array(1))


def test_a_run_that_lies_there_is_kept(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=1)
    api.upload(local, f"{bucket}/run")
    with pytest.raises(OutputExists, match="--force"):
        api.upload(local, f"{bucket}/run")
    other = written(tmp_path / "other", tensors=2)
    api.upload(other, f"{bucket}/run", force=True)
    assert len(store.open_run(f"{bucket}/run").calls) == 2
    with pytest.raises(UnreadableRun, match="nothing to upload"):
        api.upload(tmp_path, f"{bucket}/x")


def test_at_every_moment_the_store_has_a_run_that_opens(tmp_path, bucket, monkeypatch):
    """Whatever was uploaded when the machine went away."""
    local = new(tmp_path / "run")
    rng = np.random.default_rng(0)
    upload = Upload(local, f"{bucket}/run")
    seen = []

    def check():
        if not Place(f"{bucket}/run").exists("run.json"):
            return
        try:
            run = store.open_run(f"{bucket}/run")
        except UnreadableRun as error:
            assert "empty run" in str(error)  # no journal yet
            return
        for record in run.records:
            assert same(run.array(record.id), arrays[record.id])
        seen.append(len(run.records))

    whole = Upload._put

    def checked(self, *args, **more):
        done = whole(self, *args, **more)
        check()
        return done

    arrays = []
    with store.Writer(local, max_shard_bytes=2 << 20) as writer:
        for number in range(12):
            arrays.append(rng.standard_normal(200_000).astype(np.float32))
            refs = (Ref("output.0", add(writer, arrays[-1], "float32")),)
            writer.call(call(number, *refs))
            writer.flush()
            upload._round()
            check()
    monkeypatch.setattr(Upload, "_put", checked)
    upload.finish()
    assert seen == sorted(seen)
    assert 0 < seen[0] < 12
    assert seen[-1] == 12
    run = store.open_run(f"{bucket}/run")
    assert run.ended == ""


def test_an_upload_goes_on_beside_the_writer(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr("whence.store.upload.EVERY_S", 0.01)
    local = new(tmp_path / "run")
    upload = Upload(local, f"{bucket}/run")
    upload.start()
    with store.Writer(local, max_shard_bytes=1 << 20) as writer:
        for number in range(6):
            x = np.full(200_000, number, np.float32)
            writer.call(call(number, Ref("output.0", add(writer, x, "float32"))))
            writer.flush()
            time.sleep(0.05)
        until = time.monotonic() + 10
        while not Place(f"{bucket}/run").exists("run.json") and time.monotonic() < until:
            time.sleep(0.01)
        assert Place(f"{bucket}/run").exists("run.json")  # before it ended
    upload.finish()
    assert len(store.open_run(f"{bucket}/run").records) == 6
    assert not [t for t in threading.enumerate() if t.name == "whence-upload"]


def test_a_capture_goes_to_the_store(tmp_path, bucket, monkeypatch):
    """The command is one that needs no framework: the spool is what it writes."""
    monkeypatch.setenv("WHENCE_SPOOL", str(tmp_path / "spool"))
    from whence.workflows.upload import uploaded

    told = []

    def capture(path):
        written(tmp_path / "made", tensors=2)
        (tmp_path / "spool").mkdir(exist_ok=True)
        shutil.move(tmp_path / "made", path)
        return 7

    assert uploaded(f"{bucket}/run", False, capture, told.append) == 7
    assert f"uploaded to {bucket}/run" in told[-1]
    assert not list((tmp_path / "spool").iterdir())
    assert len(store.open_run(f"{bucket}/run").calls) == 2
    with pytest.raises(OutputExists):
        uploaded(f"{bucket}/run", False, capture, told.append)
    with monkeypatch.context() as patch:
        patch.setattr(remote, "FIRST_WAIT_S", 0.0)
        Cut(patch, "put_file", 10**6)
        assert uploaded(f"{bucket}/two", False, capture, told.append) == 7
        assert "all of it is still at" in told[-1]
    (kept,) = (tmp_path / "spool").iterdir()
    assert inside.whence(tmp_path, "upload", kept, f"{bucket}/two").returncode == 0
    assert len(store.open_run(f"{bucket}/two").calls) == 2


def test_a_request_that_is_answered_short_is_told(tmp_path, bucket, monkeypatch):
    local = written(tmp_path / "run", tensors=2)
    api.upload(local, f"{bucket}/run")
    run = store.open_run(f"{bucket}/run")
    whole = Place.read
    monkeypatch.setattr(Place, "read", lambda *args: whole(*args)[:-5])
    with pytest.raises(ElementsMissing, match="changed while it was read"):
        run.array(0)
    assert Failed is not None
