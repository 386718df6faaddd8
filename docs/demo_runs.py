#!/usr/bin/env python3
"""Makes the two runs that `whence demo` compares: python docs/demo_runs.py

Captures examples/01-port/serve.py with and without --port, and packs both runs and the script into
src/whence/demo/runs.zip. What names this machine is left out; `whence demo` fills in the folder
that the runs lie in. Needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import xxhash

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "01-port" / "serve.py"
ARCHIVE = ROOT / "src" / "whence" / "demo" / "runs.zip"
RUNS = {"ref": (), "port": ("--port",)}
PROCESS = "rank00000-demo-1"
PUBLIC = {"host": "", "user": "", "boot": "", "cwd": "", "interpreter": "python"}
KEPT_VERSIONS = ("python", "whence", "torch", "numpy")
MADE = (2026, 1, 1, 0, 0, 0)  # of every file: before the runs, so that their script is not newer


def capture(place: Path) -> None:
    """Capture both runs into a folder that holds the script."""
    # the runs name their interpreter as users type it: it is the one that this script runs in
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    for name, words in RUNS.items():
        command = [sys.executable, "-m", "whence", "run", "-o", name, "--", "python", SCRIPT.name]
        subprocess.run([*command, *words], cwd=place, env=environment, check=True)


def plain_json(file: Path) -> bytes:
    """A description of a run, without what names this machine."""
    data = json.loads(file.read_bytes())
    data |= {name: value for name, value in PUBLIC.items() if name in data}
    if "versions" in data:
        data["versions"] = {name: data["versions"][name] for name in KEPT_VERSIONS}
    return json.dumps(data, indent=1).encode()


def of_process(folder: Path, place: Path) -> dict[str, bytes]:
    """The files of one process. Its journal names the script by its name alone, and its status the
    hash of that journal; the index is left out, readers do without.
    """
    journal = (folder / "journal.jsonl").read_bytes().replace(f"{place}/".encode(), b"")
    status = json.loads((folder / "status.json").read_bytes())
    status["journal"] = xxhash.xxh3_128_hexdigest(journal)
    return {
        "process.json": plain_json(folder / "process.json"),
        "journal.jsonl": journal,
        "status.json": json.dumps(status).encode(),
        "shard-00000.safetensors": (folder / "shard-00000.safetensors").read_bytes(),
    }


def pack(place: Path, archive: Path) -> None:
    """Write the archive."""
    files = {SCRIPT.name: SCRIPT.read_bytes()}
    for run in RUNS:
        (process,) = place.glob(f"{run}/rank*")
        files[f"{run}/run.json"] = plain_json(place / run / "run.json")
        for name, content in of_process(process, place).items():
            files[f"{run}/{PROCESS}/{name}"] = content
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, MADE)
            packed.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Make the archive that is shipped."""
    with tempfile.TemporaryDirectory(prefix="whence-demo-") as name:
        place = Path(name).resolve()
        shutil.copy(SCRIPT, place)
        capture(place)
        pack(place, ARCHIVE)
    print(f"written to {ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
