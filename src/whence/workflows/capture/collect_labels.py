"""When a program has ended: labels whose tensors lie in files, and those of programs without
Python, become calls of its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from whence.errors import ElementsMissing, UnreadableRun, UsageError, WhenceError
from whence.instrument.labels.labels import FOLDER, LABELS, NO_PROGRAM, Waiting, complain, described
from whence.instrument.labels.library import anywhere, encoded, load
from whence.instrument.launch.launcher import ENVIRONMENT, LaunchExtras
from whence.records import Call, Ref
from whence.workflows.capture.label_files import FoundLabel, resolved, stored_tensor

WAIT_S = 2.0
"""How long a file that is missing or not whole is waited for once the program has ended: a library
may write behind it.
"""


def gather(
    folder: str,
    *,
    library: Mapping[str, Any] | None = None,
    since: float = 0.0,
    keep: str = "full",
    wait_s: float = WAIT_S,
    ended_only: bool = False,
) -> int:
    """Read what labels of the run at `folder` wait for, add it to the run as calls of kind "label",
    and return how many.

    library: `capture.library.encoded`; None: files lie below the folder in which the label was set.
    since: when the program was started, seconds since 1970; older files are of another run. keep:
    as `CaptureOptions.keep`. ended_only: leave everything as it is while a process that labels
    still runs. Does not raise: what cannot be read is a record with the reason, what cannot be
    written is told on stderr and stays beside the run.
    """
    place = Path(folder) / FOLDER
    try:
        files = sorted(place.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # another rank may remove it
        return 0
    if ended_only and any(_is_running(file) for file in files):
        complain(f"labels in {place} are left out: a process that writes them still runs")
        return 0
    texts = [file for file in files if file.suffix == ".jsonl"]
    waiting = [label for text in texts for label in _waiting(text)]
    waiting.sort(key=lambda label: label.at)
    labels = resolved(waiting, library, since, wait_s, lambda: _shapes(folder))
    binaries = [file for file in files if file.suffix == ".bin"]
    try:
        labels += [label for file in binaries for label in _written(file)]
        _add(folder, sorted(labels, key=lambda label: label.time_ns), keep)
        for file in (*texts, *binaries):
            file.unlink()
    except (WhenceError, OSError) as error:
        complain(f"{len(labels)} labels are left next to the run, in {place}: {error}")
        return 0
    with contextlib.suppress(OSError):
        place.rmdir()
    return len(labels)


def labelled_launch(
    name: str,
    runner: str,
    limit: int | None,
    dump: str,
    environment: Mapping[str, str] | None = None,
) -> LaunchExtras:
    """What labels need of a launched command: variables for it and its library before, files read
    afterwards. Raises UsageError.

    environment: of the command, None for ours; what it already says to the library is left as it
    is.
    """
    if not name and (runner or limit is not None):
        raise UsageError(
            "library-runner and library-max say what a library saves: they need --library"
        )
    library: dict[str, Any] | None = None
    variables: dict[str, str] = {}
    if name:
        variables_of_command = os.environ if environment is None else environment
        loaded = load(
            name, runner=runner, max_tokens=limit, dump=dump, environment=variables_of_command
        )
        library, variables = encoded(loaded), loaded.variables
    elif dump:
        library = encoded(anywhere(str(Path(dump).absolute())))
    began = time.time()

    def prepared(child: dict[str, str], run_path: str) -> dict[str, str]:
        place = left_over(Path(run_path))
        place.mkdir(mode=0o700, exist_ok=True)
        config = {**json.loads(child[ENVIRONMENT]), "library": library}
        return {**child, **variables, ENVIRONMENT: json.dumps(config), LABELS: str(place)}

    def ended(run_path: str, keep: str) -> int:
        return gather(run_path, library=library, since=began, keep=keep)

    return LaunchExtras(prepared, ended, FOLDER)


def left_over(run: Path) -> Path:
    """The folder of labels of a run that begins, without those of the run that it replaces."""
    place = run / FOLDER
    for old in (*place.glob("*.jsonl"), *place.glob("*.bin")):
        old.unlink(missing_ok=True)
    return place


def _is_running(file: Path) -> bool:
    """Does the process still run that a file of labels is named after (host-pid...)?"""
    owner = re.fullmatch(re.escape(socket.gethostname()) + r"-(\d+)(-[0-9a-f]+)?", file.stem)
    if owner is None or int(owner[1]) == os.getpid():
        return False
    try:
        os.kill(int(owner[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _waiting(file: Path) -> Iterable[Waiting]:
    for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a line that a kill tore
            yield Waiting(**json.loads(line))


def _written(file: Path) -> Iterable[FoundLabel]:
    """The labels of `whence_label.h`."""
    from whence.readers.ascend import atb_file

    try:
        tensors = atb_file.tensors(file)
    except (UnreadableRun, OSError) as error:
        complain(f"labels in {file} cannot be read: {error}")
        return
    for tensor in tensors:
        attributes = {
            key.removeprefix("whence."): unquote_to_bytes(
                value.encode("utf-8", "surrogateescape")
            ).decode("utf-8", "replace")
            for key, value in tensor.attributes.items()
            if key.startswith("whence.")
        }
        number = {
            key: int(attributes[key]) if attributes.get(key, "").isdigit() else 0
            for key in ("at", "rank")
        }
        yield FoundLabel(
            attributes.get("name") or "(no name)",
            attributes.get("side", ""),
            attributes.get("id", ""),
            attributes.get("task", ""),
            0,
            number["at"],
            number["rank"],
            "",
            stored_tensor(file, tensor),
        )


def _shapes(folder: str) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """The shapes of the run's labels, by task and id; of none where the run cannot be read."""
    from whence import store

    try:
        run = store.open_run(folder)
    except WhenceError:
        return {}
    return {
        (str(call.arguments.get("task", "")), str(call.arguments["id"])): run.records[
            call.refs[0].record
        ].shape
        for call in run.calls
        if call.kind == "label" and call.arguments.get("id")
    }


# ---- into the run


def _add(folder: str, labels: list[FoundLabel], keep: str) -> None:
    """Write labels as calls, by rank. Raises StoreFailed."""
    from whence import store

    by_rank: dict[int, list[FoundLabel]] = defaultdict(list)
    for label in labels:
        by_rank[label.rank].append(label)
    for rank, of_rank in by_rank.items():
        with store.Writer(folder, rank) as writer:
            for order, label in enumerate(of_rank):
                record = _record(writer, label, keep)
                file = str(label.source.path) if label.source is not None and label.code else ""
                call = Call(
                    order,
                    label.name,
                    label.side,
                    label.number,
                    order,
                    rank=rank,
                    kind="label",
                    source=label.code,
                    number=str(order),
                    leaf=True,
                    no_program=NO_PROGRAM,
                    refs=(Ref("output.0", record),),
                    arguments=described(label.task, label.label_id, label.time_ns, file),
                )
                writer.call(call)


def _record(writer: Any, label: FoundLabel, keep: str) -> int:
    from whence.frameworks import host

    source, why = label.source, label.why
    if source is not None and not why:
        try:
            array = source.load()
        except (ElementsMissing, OSError, ValueError) as error:
            why = str(error)
    if source is None or why:
        dtype, shape = (source.dtype, source.shape) if source is not None else ("", ())
        return int(writer.record(dtype, shape, None, b"", None, None, why=why))
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if keep == "none":
        return int(
            writer.record(
                source.dtype,
                source.shape,
                None,
                host.digest(data),
                None,
                None,
                why="topology only (--keep none)",
            )
        )
    statistics, sketch = host.statistics(data, source.dtype)
    elements = data if keep == "full" else None
    words = "" if keep == "full" else "statistics only (--keep stats)"
    return int(
        writer.record(
            source.dtype, source.shape, elements, host.digest(data), statistics, sketch, why=words
        )
    )
