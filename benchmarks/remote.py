"""Runs in an object store against runs on disk, at equal bandwidth.

    python benchmarks/remote.py [--json FILE] [--tokens 512] [--mb-per-s 100 300] [--latency-ms 10] [--rounds 3]

Comparing: two captures of a llama (fused against eager attention, float32) are served over HTTP by a
process beside, which answers ranges, waits LATENCY before each answer and sends all answers together
at a fixed rate. "ideal" is what the same bytes cost at best: the larger of the time of the same
comparison from disk (page cache) and of the bytes that were sent over the rate. "disk" is a disk of
that rate that is not read ahead: the sum of both.

Capturing (needs s3fs and moto): a command is run under capture into a folder, and into a bucket of a
server of moto in a process beside. Its rate is measured by copying the finished run with s3fs alone;
"ideal" is the larger of the capture into the folder and of that copy.
"""  # noqa: E501

from __future__ import annotations

import argparse
import http.server
import json
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from packing import capture

import whence
from whence import store

PIECE = 256 << 10


class Rate:
    """Hands out bytes at a fixed rate to all threads together."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._lock, self._free = per_s, threading.Lock(), 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self._per_s
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


def serve(root: str, per_s: float, latency_s: float, port: object, sent: object) -> None:
    """Serve a folder over HTTP with ranges."""
    rate, files = Rate(per_s), Path(root)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as servers of object stores; else 40 ms more an answer

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            time.sleep(latency_s)
            path = files / self.path.strip("/")
            if path.is_dir():
                names = [f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir()]
                base = self.path.rstrip("/")
                page = "".join(f'<a href="{base}/{n}">{n}</a>\n' for n in names).encode()
                self._head(200, len(page))
                self.wfile.write(page if body else b"")
                return
            if not path.is_file():
                self._head(404, 0)
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            stop = min(size, int(asked[2]) + 1) if asked and asked[2] else size
            self._head(
                206 if asked else 200, stop - start,
                {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if asked else {},
            )  # fmt: skip
            if not body:
                return
            with sent.get_lock():
                sent.value += stop - start
            with path.open("rb") as file:
                file.seek(start)
                while start < stop:
                    data = file.read(min(PIECE, stop - start))
                    rate.wait(len(data))
                    self.wfile.write(data)
                    start += len(data)

        def _head(self, code: int, length: int, more: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in {
                "Content-Length": str(length), "Accept-Ranges": "bytes",
                "Content-Type": "text/html" if code == 200 else "application/octet-stream",
                **(more or {}),
            }.items():  # fmt: skip
                self.send_header(name, value)
            self.end_headers()

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as one:
        port.value = one.server_address[1]
        one.serve_forever()


def seconds(work: object) -> float:
    """Wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def comparing(where: Path, rates: list[float], latency_s: float, rounds: int) -> list[dict]:
    """One row a rate."""
    local = [str(where / name) for name in ("ref", "tgt")]
    whence.compare(*local)  # compiles
    disk = statistics.median(seconds(lambda: whence.compare(*local)) for _ in range(rounds))
    rows = []
    for rate in rates:
        port, sent = multiprocessing.Value("i", 0), multiprocessing.Value("q", 0)
        server = multiprocessing.Process(
            target=serve, args=(str(where), rate * 1e6, latency_s, port, sent), daemon=True
        )
        server.start()
        while not port.value:
            time.sleep(0.01)
        far = [f"http://127.0.0.1:{port.value}/{name}" for name in ("ref", "tgt")]
        took, nbytes = [], 0
        for _ in range(rounds):
            before = sent.value
            took.append(seconds(lambda far=far: whence.compare(*far)))
            nbytes = sent.value - before
        server.terminate()
        whole = sum(
            f.stat().st_size for name in ("ref", "tgt") for f in (where / name).rglob("*.*")
        )
        line = nbytes / rate / 1e6
        middle = statistics.median(took)
        rows.append({
            "what": "compare", "MB/s": rate, "disk s": disk, "remote s": middle,
            "sent MB": nbytes / 1e6, "of MB": whole / 1e6, "line s": line,
            "remote / ideal": middle / max(disk, line), "remote / disk": middle / (disk + line),
        })  # fmt: skip
    return rows


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import torch, transformers
torch.set_num_threads(1)
config = transformers.LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=4096)
model = transformers.LlamaForCausalLM(config).eval()
with torch.no_grad():
    for step in range({steps}):
        model(torch.randint(0, 4096, (1, 512)), use_cache=False)
"""


def capturing(where: Path, rounds: int, steps: int) -> list[dict]:
    """A command captured into a folder and into a bucket; [] where moto is not installed."""
    try:
        import moto.server  # noqa: F401 - is it here?
        import s3fs
    except ImportError:
        return []
    code = "import sys; from moto.server import main; main(['-p', sys.argv[1]])"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = (where / "moto.log").open("w")
    server = subprocess.Popen([sys.executable, "-c", code, str(port)], stdout=log, stderr=log)
    variables = {
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "WHENCE_SPOOL": str(where / "spool"),
    }  # fmt: skip
    os.environ.update(variables)
    try:
        for _ in range(100):
            try:
                files = s3fs.S3FileSystem(skip_instance_cache=True)
                files.mkdir("bench")
                break
            except Exception:  # noqa: BLE001 - it is not up yet
                time.sleep(0.2)
        (where / "program.py").write_text(PROGRAM.format(folder=str(where), steps=steps))

        def run(to: str) -> float:
            line = [sys.executable, "-m", "whence", "run", "-o", to, "--force", "--",
                    sys.executable, "program.py"]  # fmt: skip
            return seconds(lambda: subprocess.run(line, cwd=where, check=True, capture_output=True))

        run(str(where / "warm"))
        near, far, copied = [], [], []
        for _ in range(rounds):
            near.append(run(str(where / "near")))
            far.append(run("s3://bench/far"))
            copied.append(
                seconds(lambda: files.put(str(where / "near"), "bench/copy", recursive=True))
            )
            files.rm("bench/copy", recursive=True)
        nbytes = sum(f.stat().st_size for f in (where / "near").rglob("*.*"))
        one, other, line = (statistics.median(took) for took in (near, far, copied))
        return [{
            "what": "capture", "MB": nbytes / 1e6, "MB/s": nbytes / line / 1e6, "disk s": one,
            "remote s": other, "line s": line, "remote / ideal": other / max(one, line),
            "remote / disk": other / (one + line),
        }]  # fmt: skip
    finally:
        server.terminate()
        server.wait()


def shown(rows: list[dict]) -> list[dict]:
    """Print rows, and hand them on."""
    for row in rows:
        cells = [f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()]
        print("  ".join(cells), flush=True)
    return rows


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[100.0, 300.0])
    parser.add_argument("--latency-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for name, variant in (("ref", "sdpa"), ("tgt", "eager")):
            capture(where / name, torch.float32, options.tokens, variant)
            assert store.is_run(where / name)
        rows = shown(comparing(where, options.mb_per_s, options.latency_ms / 1e3, options.rounds))
        shutil.rmtree(where / "ref")
        rows += shown(capturing(where, options.rounds, options.steps))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
