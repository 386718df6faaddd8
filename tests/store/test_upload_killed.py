"""A process that writes a run and uploads it is killed: what it acknowledged is in the local run,
the store has a run that opens, and `whence upload` finishes it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from by_hand_store import same

import inside
from whence import store
from whence.errors import UnreadableRun

pytest.importorskip("fsspec")

WRITER = """
import sys
sys.path.insert(0, {tests!r})
import os
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from by_hand_store import add, call, new
from whence import store
from whence.records import Ref
from whence.store import upload
upload.EVERY_S = 0.5
# A store puts a file whole or not at all; a folder does so where files are renamed.
class Whole(LocalFileSystem):
    def put_file(self, local, path, **options):
        super().put_file(local, path + ".part", **options)
        os.replace(self._strip_protocol(path) + ".part", self._strip_protocol(path))

    def pipe_file(self, path, data, **options):
        super().pipe_file(path + ".part", data, **options)
        os.replace(self._strip_protocol(path) + ".part", self._strip_protocol(path))

import fsspec
fsspec.register_implementation("file", Whole, clobber=True)
local = new({local!r})
beside = upload.Upload(local, {url!r})
beside.start()
with store.Writer(local, max_shard_bytes=1 << 20) as writer:
    for number in range(100_000):
        x = np.full(200_000, number, np.float32)
        writer.call(call(number, Ref("output.0", add(writer, x, "float32"))))
        writer.flush()
        print(number, flush=True)
        if number > 8:
            import time
            time.sleep(0.05)
"""


def records_at(url):
    try:
        return len(store.open_run(url).records)
    except UnreadableRun:
        return 0


def test_a_killed_upload_loses_nothing_and_is_finished(tmp_path):
    local, url = tmp_path / "run", f"file://{tmp_path}/bucket/run"
    code = WRITER.format(tests=str(Path(__file__).parent), local=str(local), url=url)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while not records_at(url) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    told = process.communicate()[0].split()
    kept = store.open_run(local)
    assert "killed" in kept.ended
    assert len(kept.records) >= len(told) > 0
    for number in map(int, told):
        assert same(kept.array(number), np.full(200_000, number, np.float32))
    partly = store.open_run(url)
    assert 0 < len(partly.records) <= len(kept.records)
    for record in partly.records:
        assert same(partly.array(record.id), kept.array(record.id))
    done = inside.whence(tmp_path, "upload", local, url, "--force")
    assert done.returncode == 0, done.stderr
    whole = store.open_run(url)
    assert len(whole.records) == len(kept.records)
    assert same(whole.array(len(told) - 1), kept.array(len(told) - 1))
