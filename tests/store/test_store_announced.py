"""What a comparison says it reads next is fetched ahead of it from an object store, and a run is
opened as it was at one moment.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from by_hand_store import add, call, new, same

import whence
from whence import api, store
from whence.comparison.tasks import measuring
from whence.records import Ref
from whence.store import remote_shard
from whence.store.remote import Place
from whence.store.status import RUNNING, Ended, write_status

fsspec = pytest.importorskip("fsspec")


def written(path, *, tensors, shift=0.0, shard_bytes=1 << 30):
    rng = np.random.default_rng(0)
    with store.Writer(new(path), max_shard_bytes=shard_bytes) as writer:
        for number in range(tensors):
            x = rng.standard_normal(200_000).astype(np.float32) + np.float32(shift)
            refs = (Ref("output.0", add(writer, x, "float32")),)
            writer.call(call(number, *refs, scope=f"layers.{number}"))
    return path


def blocks_of(run):
    return run.readers[0].shard(0)._blocks


def test_announced_tensors_are_on_their_way_before_they_are_looked_at(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=60)
    api.upload(local, f"{bucket}/run")
    run, whole = store.open_run(f"{bucket}/run"), store.open_run(local)
    order = np.random.default_rng(1).permutation(60).tolist()
    blocks = blocks_of(run)
    store.announce(run, order)
    for record in order:
        asked = {block for _, block in blocks._known}
        assert same(run.array(record), whole.array(record))
        start = run.readers[0].shard(0).range(int(run.column("offset")[record]), 4).start
        assert start // remote_shard.BLOCK_BYTES in asked
        assert len(blocks._unused) <= 2 * remote_shard.MOST_AHEAD
    (shard,) = local.glob("rank*/shard-*.safetensors")
    assert sum(stop - start for _, start, stop in blocks.requested) == shard.stat().st_size
    assert len(blocks.requested) < 30  # for 46 blocks, in a random order


def test_what_cannot_be_read_is_announced_without_harm(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=6)
    api.upload(local, f"{bucket}/run")
    run = store.open_run(f"{bucket}/run")
    folder = run.readers[0].folder.name
    fsspec.filesystem("memory").rm(f"{bucket}/run/{folder}/shard-00000.safetensors")
    gone = store.open_run(f"{bucket}/run")
    store.announce(gone, range(6))
    store.announce(store.open_run(local), range(6))  # nothing to fetch


def test_a_comparison_announces_what_it_measures(tmp_path, bucket, monkeypatch):
    for name, shift in (("ref", 0.0), ("tgt", 0.25)):
        written(tmp_path / name, tensors=12, shift=shift)
        api.upload(tmp_path / name, f"{bucket}/{name}")
    announced = []
    whole = remote_shard.Blocks.announce

    def counted(self, ranges):
        ranges = list(ranges)
        announced.append((self._place.url.rpartition("/")[2], len(ranges)))
        whole(self, ranges)

    monkeypatch.setattr(remote_shard.Blocks, "announce", counted)
    far = whence.compare(f"{bucket}/ref", f"{bucket}/tgt", replay=False)
    assert sorted(announced) == [("ref", 12), ("tgt", 12)]
    monkeypatch.setattr(measuring, "announce", lambda *_: None)
    without = whence.compare(f"{bucket}/ref", f"{bucket}/tgt", replay=False)
    assert [row.measured for row in far.rows] == [row.measured for row in without.rows]


def test_blocks_that_were_put_together_are_not_copied_again(tmp_path, bucket):
    local = written(tmp_path / "run", tensors=12)
    api.upload(local, f"{bucket}/run")
    run = store.open_run(f"{bucket}/run")
    for record in range(12):
        assert np.shares_memory(run.array(record), run.array(record))


def test_who_says_that_it_ended_has_a_whole_journal(tmp_path, bucket, monkeypatch):
    """The upload may end between any two requests of who opens the run."""
    local = written(tmp_path / "run", tensors=4)
    api.upload(local, f"{bucket}/run")
    (folder,) = [p for p in local.iterdir() if p.is_dir()]
    journal = (folder / "journal.jsonl").read_bytes()
    place = Place(f"{bucket}/run")
    # As the upload leaves it while the program runs: half of the journal, and no end.
    half = journal[: journal.index(b"\n", len(journal) // 2) + 1]
    whole_status = (folder / "status.json").read_bytes()
    write_status(folder, Ended(RUNNING))
    running = (folder / "status.json").read_bytes()

    for request in range(12):
        place.write(f"{folder.name}/journal.jsonl", half)
        place.write(f"{folder.name}/status.json", running)
        fsspec.filesystem("memory").rm(f"{bucket}/run/{folder.name}/index.safetensors")
        left, lock = [request], threading.Lock()
        tried = Place._tried

        def ends_before(self, work, what, left=left, lock=lock, tried=tried):
            with lock:
                left[0] -= 1
                if left[0] == -1:
                    with monkeypatch.context() as patch:
                        patch.setattr(Place, "_tried", tried)
                        place.write(f"{folder.name}/journal.jsonl", journal)
                        place.write(f"{folder.name}/status.json", whole_status)
            return tried(self, work, what)

        with monkeypatch.context() as patch:
            patch.setattr(Place, "_tried", ends_before)
            run = store.open_run(f"{bucket}/run")
        if run.ended == "":
            assert len(run.calls) == 4, f"cut off before request {request}"
        place.write(f"{folder.name}/index.safetensors", (folder / "index.safetensors").read_bytes())
