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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np

from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun, UsageError, WhenceError
from whence.instrument.labels.labels import FOLDER, LABELS, NO_PROGRAM, Waiting, complain, described
from whence.instrument.labels.library import anywhere, decoded, encoded, load
from whence.instrument.launch.launcher import ENVIRONMENT, LaunchExtras
from whence.records import Call, Ref

if TYPE_CHECKING:
    from whence.readers.ascend.atb_file import Stored

WAIT_S = 2.0
"""How long a file that is missing or not whole is waited for once the program has ended: a library
may write behind it.
"""
_OLDER_S = 2.0  # file systems' clocks


class _Source(NamedTuple):
    """A tensor in a file. why: there are no elements."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]
    why: str


@dataclass(slots=True)
class _Found:
    """A label and what is known of its tensor."""

    name: str
    side: str
    given: str
    task: str
    number: int
    at: int
    rank: int
    code: str
    source: _Source | None = None
    why: str = ""
    late: bool = False


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
    if not place.is_dir():
        return 0
    if ended_only and any(_is_running(file) for file in place.iterdir()):
        complain(f"labels in {place} are left out: a process that writes them still runs")
        return 0
    texts = sorted(place.glob("*.jsonl"))
    waiting = [label for text in texts for label in _waiting(text)]
    waiting.sort(key=lambda label: label.at)
    found = _resolved(waiting, library, since, wait_s)
    binaries = sorted(place.glob("*.bin"))
    try:
        found += [label for file in binaries for label in _written(file)]
        _add(folder, sorted(found, key=lambda label: label.at), keep)
        for file in (*texts, *binaries):
            file.unlink()
    except (WhenceError, OSError) as error:
        complain(f"{len(found)} labels stay beside the run, in {place}: {error}")
        return 0
    with contextlib.suppress(OSError):
        place.rmdir()
    return len(found)


def labelled_launch(
    name: str,
    runner: str,
    most: int | None,
    dump: str,
    environment: Mapping[str, str] | None = None,
) -> LaunchExtras:
    """What labels need of a launched command: variables for it and its library before, files read
    afterwards. Raises UsageError.

    environment: of the command, None for ours; what it already says to the library is left as it
    is.
    """
    if not name and (runner or most is not None):
        raise UsageError(
            "library-runner and library-max say what a library saves: they need --library"
        )
    library: dict[str, Any] | None = None
    variables: dict[str, str] = {}
    if name:
        given = os.environ if environment is None else environment
        loaded = load(name, runner=runner, max_tokens=most, dump=dump, environment=given)
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

    return LaunchExtras(prepared, ended)


def left_over(run: Path) -> Path:
    """The folder of labels of a run that begins, without those of the run that it replaces."""
    place = run / FOLDER
    for old in (*place.glob("*.jsonl"), *place.glob("*.bin")):
        old.unlink(missing_ok=True)
    return place


def _is_running(file: Path) -> bool:
    """Does the process still run that a file of labels is named after (host-pid...)?"""
    found = re.fullmatch(re.escape(socket.gethostname()) + r"-(\d+)(-[0-9a-f]+)?", file.stem)
    if found is None or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _waiting(file: Path) -> Iterable[Waiting]:
    for line in file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a line that a kill tore
            yield Waiting(**json.loads(line))


def _written(file: Path) -> Iterable[_Found]:
    """The labels of `whence_label.h`."""
    from whence.readers.ascend import atb_file

    try:
        tensors = atb_file.tensors(file)
    except (UnreadableRun, OSError) as error:
        complain(f"labels in {file} cannot be read: {error}")
        return
    for tensor in tensors:
        said = {
            key.removeprefix("whence."): unquote_to_bytes(
                value.encode("utf-8", "surrogateescape")
            ).decode("utf-8", "replace")
            for key, value in tensor.attributes.items()
            if key.startswith("whence.")
        }
        number = {
            key: int(said[key]) if said.get(key, "").isdigit() else 0 for key in ("at", "rank")
        }
        yield _Found(
            said.get("name") or "(no name)",
            said.get("side", ""),
            said.get("id", ""),
            said.get("task", ""),
            0,
            number["at"],
            number["rank"],
            "",
            _source(file, tensor),
        )


# ---- files of a library


def _resolved(
    waiting: list[Waiting], library: Mapping[str, Any] | None, since: float, wait_s: float
) -> list[_Found]:
    until = time.monotonic() + wait_s
    while True:
        found = _looked_up(waiting, library, since)
        if not any(label.late for label in found) or time.monotonic() >= until:
            return found
        time.sleep(0.1)


def _looked_up(
    waiting: list[Waiting], library: Mapping[str, Any] | None, since: float
) -> list[_Found]:
    given = decoded(library) if library is not None else None
    out: list[_Found] = []
    of_file: dict[tuple[Path, ...], list[_Found]] = defaultdict(list)
    for label in waiting:
        one = _Found(
            label.name,
            label.side,
            label.id,
            label.task,
            label.number,
            label.at,
            label.rank,
            label.source,
        )
        out.append(one)
        where = given or anywhere("", label.cwd)
        tried = where.places(label)
        files = next((m for pattern in tried if (m := _matches(pattern))), [])
        fresh = [file for file in files if file.stat().st_mtime >= since - _OLDER_S]
        if fresh:
            of_file[tuple(fresh)].append(one)
            continue
        one.late = True
        if files:
            one.why = f"{files[-1]} is older than this run"
        else:
            also = (
                f", nor at {len(tried) - 1} other places of {where.name or 'this name'}"
                if len(tried) > 1
                else ""
            )
            one.why = f"{label.file} never appeared (not at {tried[-1]}{also})"
    for files_, labels in of_file.items():
        _share(files_, labels)
    return out


def _matches(pattern: str) -> list[Path]:
    """Files that a pattern fits; numbers in their paths in the order of their values."""
    root = Path(pattern).anchor
    found = [p for p in Path(root).glob(pattern[len(root) :]) if p.is_file()]
    return sorted(
        found,
        key=lambda p: [
            (int(n), "") if n.isdigit() else (-1, n) for n in re.split(r"(\d+)", str(p))
        ],
    )


def _share(files: tuple[Path, ...], labels: list[_Found]) -> None:
    """Give the tensors of these files to the labels that mean them, in order.

    A file is written again and again, or behind itself, or in a folder per token: one tensor for
    many labels is the last one's.
    """
    sources: list[_Source] = []
    for file in files:
        try:
            sources += _sources(file)
        except (UnreadableRun, OSError, ValueError) as error:
            for label in labels:
                label.why, label.late = str(error), True
            return
    words = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    if len(sources) == 1 or (len(files) == 1 and len(sources) > len(labels)):
        for label in labels:
            label.why = f"written over: {words} holds what came last"
        pairs = list(zip(reversed(labels), reversed(sources)))
    elif len(sources) == len(labels):
        pairs = list(zip(labels, sources))
    else:
        pairs = []
        for label in labels:
            label.why = (
                f"{words} hold {len(sources)} tensors for {len(labels)} labels of that "
                "name: which is whose is not known"
            )
    for label, source in pairs:
        label.source, label.why, label.late = source, "", "cut short" in source.why


def _sources(file: Path) -> list[_Source]:
    if file.suffix == ".npy":
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            return [_Source(file, "", (), lambda: np.zeros(0), f"cut short or no array: {error}")]
        from whence import dtypes

        try:
            return [_Source(file, dtypes.of(array).name, tuple(array.shape), lambda: array, "")]
        except KeyError as error:
            return [
                _Source(
                    file, str(array.dtype), tuple(array.shape), lambda: array, str(error.args[0])
                )
            ]
    from whence.readers.ascend import atb_file

    return [_source(file, tensor) for tensor in atb_file.tensors(file)]


def _source(file: Path, tensor: Stored) -> _Source:
    from whence.readers.ascend import atb_file

    if tensor.data:
        tensor = tensor._replace(
            why=f"refers to {tensor.data[:80]}, where the same elements were saved before"
        )
    return _Source(
        file,
        tensor.type.dtype or tensor.type.name,
        tensor.shape,
        lambda: atb_file.elements(file, tensor),
        tensor.why,
    )


# ---- into the run


def _add(folder: str, labels: list[_Found], keep: str) -> None:
    """Write labels as calls, by rank. Raises StoreFailed."""
    from whence import store

    by_rank: dict[int, list[_Found]] = defaultdict(list)
    for label in labels:
        by_rank[label.rank].append(label)
    for rank, found in by_rank.items():
        with store.Writer(folder, rank) as writer:
            for order, label in enumerate(found):
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
                    arguments=described(label.task, label.given, label.at, file),
                )
                writer.call(call)


def _record(writer: Any, label: _Found, keep: str) -> int:
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
    kept = data if keep == "full" else None
    words = "" if keep == "full" else "statistics only (--keep stats)"
    return int(
        writer.record(
            source.dtype, source.shape, kept, host.digest(data), statistics, sketch, why=words
        )
    )
