"""The same against a server that speaks S3 (moto), and a capture of a command into it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import numpy as np
import pytest
from by_hand_store import call, same

import whence
from whence import api, store
from whence.errors import ElementsMissing, UnreadableRun
from whence.records import Ref
from whence.store import remote

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install s3fs")
server = pytest.importorskip(
    "moto.server", reason="moto is not installed: pip install 'moto[server]'"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
with torch.no_grad():
    for _ in range(3):
        model(torch.randn(8, 64))
"""


@pytest.fixture
def s3(monkeypatch):
    """The URL of a bucket of a server on this machine, and what stops it."""
    import s3fs

    one = server.ThreadedMotoServer(port=0)
    one.start()
    host, port = one.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec_config = pytest.importorskip("fsspec.config")
    fsspec_config.set_conf_env(fsspec_config.conf)
    bucket = f"bucket-{uuid.uuid4().hex}"  # moto keeps what an earlier server had
    s3fs.S3FileSystem().mkdir(bucket)
    stopped = []

    def stop():
        if not stopped:
            stopped.append(True)
            one.stop()

    yield f"s3://{bucket}", stop
    stop()
    fsspec_config.conf.pop("s3", None)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_command_is_captured_into_a_bucket_and_compared_from_it(s3, tmp_path):
    url, _ = s3
    (tmp_path / "infer.py").write_text(PROGRAM)
    for name in (f"{url}/ref", str(tmp_path / "near")):
        done = subprocess.run(
            [sys.executable, "-m", "whence", "run", "-o", name, "--", sys.executable, "infer.py"],
            cwd=tmp_path,
            env={**os.environ, "WHENCE_SPOOL": str(tmp_path / "spool")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "spool").iterdir())
    far, near = api.open_run(f"{url}/ref"), api.open_run(str(tmp_path / "near"))
    assert far.ended == ""
    assert [r.hash for r in far.records] == [r.hash for r in near.records]
    for record in near.records:
        assert same(far.array(record.id), near.array(record.id))
    assert whence.compare(f"{url}/ref", str(tmp_path / "near")).status == "same"


def test_large_shards_go_in_parts_and_a_server_that_stops_is_told(s3, tmp_path, monkeypatch):
    url, stop = s3
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    with store.Writer(store.create(tmp_path / "run", _info())) as writer:
        data = np.random.default_rng(0).integers(0, 256, 60 << 20, dtype=np.uint8)
        for start in range(0, data.size, 12 << 20):
            part = data[start : start + (12 << 20)]
            writer.record("uint8", (part.size,), part, b"", None, None)
    api.upload(tmp_path / "run", f"{url}/large")  # s3fs cuts what is larger than 50 MB
    run = store.open_run(f"{url}/large")
    assert run.array(4).tobytes() == data[48 << 20 :].tobytes()
    stop()
    with pytest.raises(ElementsMissing, match="tries"):
        run.array(0)


def test_a_comparison_lies_in_a_bucket(s3, tmp_path, monkeypatch):
    url, stop = s3
    monkeypatch.setenv("WHENCE_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    for name, shift in (("ref", 0.0), ("tgt", 0.5)):
        with store.Writer(store.create(tmp_path / name, _info())) as writer:
            data = np.arange(1000, dtype=np.float32) + np.float32(shift)
            record = writer.record("float32", data.shape, data.view(np.uint8), b"", None, None)
            writer.call(call(0, Ref("output.0", record), scope="layer"))
        api.upload(tmp_path / name, f"{url}/{name}")
    made = whence.compare(f"{url}/ref", f"{url}/tgt", output=f"{url}/cmp")
    assert whence.load_comparison(f"{url}/cmp").status == made.status
    whence.report_html(f"{url}/cmp", tmp_path / "page.html")
    with pytest.raises(UnreadableRun, match=r"no comparison at .*it has no report\.json"):
        whence.load_comparison(f"{url}/none")
    with pytest.raises(UnreadableRun, match="is a run, not a comparison"):
        whence.load_comparison(f"{url}/ref")
    with pytest.raises(UnreadableRun, match="is a comparison, not a run"):
        api.open_run(f"{url}/cmp")
    stop()
    with pytest.raises(UnreadableRun, match="tries"):
        whence.load_comparison(f"{url}/cmp")


def _info():
    from whence.records import RunInfo

    return RunInfo(command=("python", "x.py"))
