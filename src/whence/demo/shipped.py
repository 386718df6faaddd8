"""The demo that needs no framework.

It uses a pair of small runs that comes with whence (made by docs/demo_runs.py) with one fault, and
shows the answer and the page.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from whence import disk
from whence.demo.scenes import Scene
from whence.errors import OutputExists, StoreFailed

RUNS = Path(__file__).with_name("runs.zip")
FAULTY = "layers.1.mlp.act"
"""The module of the shipped pair that computes a different result."""
_SCRIPT = "serve.py"
_LINES = (
    "A small language model (serve.py), and a port of it that adds up in another order, which is "
    "rounding,",
    "and has one fault. Both write the same text. The two runs come with whence and are compared "
    "without torch.",
)


def play(folder: str) -> Iterator[Scene]:
    """The only scene: the runs are copied into `folder`, compared, and shown on a page.

    folder: new, empty, or left by this demo before. Raises OutputExists for any other, StoreFailed.
    """
    import whence
    from whence import api

    place = Path(folder)
    _check(place)
    try:
        _lay_out(place)
    except OSError as error:
        raise StoreFailed(f"cannot write {place}: {error.strerror or error}") from error
    runs, output = (str(place / "ref"), str(place / "port")), str(place / "cmp")
    page = place / "report.html"
    # The same with and without torch, and no time is spent on loading it.
    result = whence.compare(*runs, replay=False).in_folder(output)
    api.write(result, output)
    whence.report_html(output, page, force=True)
    first = result.findings[0].name if result.findings else ""
    is_named = (result.status, first) == ("different", FAULTY)
    closing: tuple[str, ...] = (
        f"the page       {page}   # open it in a browser",
        "with torch     "
        f"whence compare {runs[0]} {runs[1]}   # runs each operator again: the cause, and certain",
        "your script    whence run -o runs/ref -- python YOUR-SCRIPT.py   # then as it differs",
    )
    if not is_named:
        closing = (f"whence did NOT name {FAULTY}, where the fault is.", *closing)
    yield Scene(_LINES, result, closing, output, is_named)


def _check(place: Path) -> None:
    if place.is_file() or (place.is_dir() and any(place.iterdir()) and not _is_ours(place)):
        raise OutputExists(
            f"{place} is there already, and not of this demo; name a new folder with -o"
        )


def _is_ours(place: Path) -> bool:
    with zipfile.ZipFile(RUNS) as packed:
        script = place / _SCRIPT
        return script.is_file() and script.read_bytes() == packed.read(_SCRIPT)


def _lay_out(place: Path) -> None:
    """Write the script and both runs as if they had been captured in this folder."""
    with zipfile.ZipFile(RUNS) as packed:
        for entry in packed.infolist():
            content, file = packed.read(entry), place / entry.filename
            if file.name == "run.json":
                here = {"cwd": str(place.resolve())}
                content = json.dumps({**json.loads(content), **here}).encode()
            disk.make_folders(file.parent)
            disk.write_file(file, content)
            written_at = datetime(*entry.date_time).timestamp()
            os.utime(file, (written_at, written_at))
