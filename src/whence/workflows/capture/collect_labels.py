"""After a program has ended, turns its labels into calls of its run.

This concerns labels whose tensors lie in files of a library, and labels set by programs without
Python.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np

from whence.display import listed
from whence.dtypes import Array
from whence.errors import ElementsMissing, UnreadableRun, UsageError, WhenceError
from whence.instrument.labels.labels import (
    FOLDER,
    LABELS,
    NO_PROGRAM,
    Waiting,
    complain,
    described,
    left_over,
)
from whence.instrument.labels.library import anywhere, decoded, encoded, load
from whence.instrument.launch.launcher import ENVIRONMENT, LaunchExtras
from whence.records import Call, Ref

if TYPE_CHECKING:
    from whence.readers.ascend.atb_file import Stored

WAIT_S = 2.0
"""Seconds to wait, after the program has ended, for a file that is missing or incomplete: a library
may write it late.
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
    """Prepare labels of a launched command: its variables and its library before the launch, its
    files afterwards.

    environment: of the command, None for that of this process; its settings for the library are
    kept. Raises UsageError.
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


def _is_running(file: Path) -> bool:
    """Whether the process that a file of labels is named after (host-pid...) is still running."""
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
    """The labels that `whence_label.h` wrote into a file."""
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
            _stored_tensor(file, tensor),
        )


def _shapes(folder: str) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """The shapes of the run's labels, by task and id; empty when the run cannot be read."""
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
    """Write the labels as calls, one shard a rank. Raises StoreFailed."""
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
                    arguments=described(label.task, label.label_id, label.time_ns, file)
                    | ({"named": label.file} if label.file else {}),
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


_OLDER_S = 2.0  # file systems' clocks
_CLOCK_NS = 10_000_000  # so much later than its stamp says a file may have been written

_COUNTER = re.compile(r"^\d+_")
"""Matches the number in front of a path, which may count tokens."""

_Shapes = Callable[[], Mapping[tuple[str, str], tuple[int, ...]]]
"""The shapes of labels with a tensor, by task and id."""


class StoredTensor(NamedTuple):
    """A tensor in a file. why: the reason when it has no elements."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]
    why: str


@dataclass(slots=True)
class FoundLabel:
    """A label and what is known about its tensor."""

    name: str
    side: str
    label_id: str
    task: str
    number: int
    time_ns: int
    rank: int
    code: str
    source: StoredTensor | None = None
    why: str = ""
    late: bool = False
    overwritten: bool = False
    file: str = ""


def resolved(
    waiting: list[Waiting],
    library: Mapping[str, Any] | None,
    since: float,
    wait_s: float,
    shapes: _Shapes = dict,
) -> list[FoundLabel]:
    """The labels with the tensors of their files; waits up to `wait_s` seconds for files written
    late.

    shapes: of the labels that they are paired with, as far as these are known.
    """
    until = time.monotonic() + wait_s
    while True:
        labels = _looked_up(waiting, library, since, shapes)
        if not any(label.late for label in labels) or time.monotonic() >= until:
            return labels
        time.sleep(0.1)


def _looked_up(
    waiting: list[Waiting], library: Mapping[str, Any] | None, since: float, shapes: _Shapes
) -> list[FoundLabel]:
    chosen_library = decoded(library) if library is not None else None
    out: list[FoundLabel] = []
    of_file: dict[tuple[Path, ...], list[FoundLabel]] = defaultdict(list)
    for label in waiting:
        found_label = FoundLabel(
            label.name,
            label.side,
            label.id,
            label.task,
            label.number,
            label.at,
            label.rank,
            label.source,
            file=label.file,
        )
        out.append(found_label)
        where = chosen_library or anywhere("", label.cwd)
        tried = where.places(label)
        files = next((m for pattern in tried if (m := _matches(pattern))), [])
        fresh = [file for file in files if file.stat().st_mtime >= since - _OLDER_S]
        if fresh:
            of_file[tuple(fresh)].append(found_label)
            continue
        found_label.late = True
        if files:
            found_label.why = f"{files[-1]} is older than this run"
        else:
            also = (
                f", nor at {len(tried) - 1} other places of {where.name or 'this name'}"
                if len(tried) > 1
                else ""
            )
            found_label.why = (
                f"{where.hides(label.file)}{label.file} never appeared (not at {tried[-1]}{also})"
            )
    limit = chosen_library.limit if chosen_library is not None else None
    for files_, labels in of_file.items():
        _share(files_, labels, shapes, limit[1] if limit is not None else len(labels))
    if limit is not None:
        _tell_limit(out, *limit)
    return out


def _tell_limit(labels: Sequence[FoundLabel], variable: str, most: int) -> None:
    """Tell labels without a tensor that the library's token limit hides it, where that is the
    reason. Labels of one line and one file follow each other token by token.
    """
    places = [(label.code, _COUNTER.sub("", label.file)) for label in labels]
    tokens, before = Counter(places), Counter[tuple[str, str]]()
    for label, place in zip(labels, places, strict=True):
        if label.source is None and not label.overwritten and before[place] >= most:
            label.why = (
                f"{variable}={most} hides it: this line was reached {tokens[place]} times, "
                f"set {variable}={tokens[place]}; {label.why}"
            )
        before[place] += 1


def _matches(pattern: str) -> list[Path]:
    """Files that match a pattern, sorted by path; numbers in paths are sorted by value."""
    root = Path(pattern).anchor
    files = [p for p in Path(root).glob(pattern[len(root) :]) if p.is_file()]
    return sorted(
        files,
        key=lambda p: [
            (int(n), "") if n.isdigit() else (-1, n) for n in re.split(r"(\d+)", str(p))
        ],
    )


def _share(files: tuple[Path, ...], labels: list[FoundLabel], shapes: _Shapes, most: int) -> None:
    """Assign the tensors of these files to the labels that refer to them.

    most: of so many tokens the library writes; labels of later ones have no tensor.

    A library overwrites one file, appends to it, uses a folder for each token, or writes once. If
    the number in front of a folder counts tokens, every label names the folder of the first token.
    """
    for label in labels[most:]:
        label.why = f"{files[0]} is of an earlier token: nothing was written there for this label"
        label.late = False
    labels = labels[:most]
    sources: list[StoredTensor] = []
    try:
        if len(files) == 1 < len(labels):
            files = _of_each_token(files[0], labels) or files
        for file in files:
            sources += _sources(file)
    except (UnreadableRun, OSError, ValueError) as error:
        for label in labels:
            label.why, label.late = str(error), True
        return
    words = listed([*map(str, files)], 1)
    pairs: list[tuple[FoundLabel, StoredTensor]] = []
    if len(sources) == 1 < len(labels):
        pairs = _given_alone(files[0], sources[0], labels, shapes())
    elif len(files) == 1 and len(sources) > len(labels):
        pairs = list(zip(reversed(labels), reversed(sources)))
    elif len(sources) == len(labels) or _are_counted(files, labels):
        for label in labels:
            label.why = f"{words} hold {len(sources)} tokens, and this label is of a later one"
        pairs = list(zip(labels, sources))
    else:
        for label in labels:
            label.why = (
                f"{words} hold {len(sources)} tensors for {len(labels)} labels of that "
                "name: which is whose is not known"
            )
    for label, source in pairs:
        label.source, label.why, label.late = source, "", "cut short" in source.why


def _of_each_token(file: Path, labels: Sequence[FoundLabel]) -> tuple[Path, ...]:
    """The files of all tokens when the number in front of a folder in the path counts tokens.

    The k-th file must be written after the label before it, in the order of the numbers. ()
    otherwise.
    """
    parts = file.parts
    for place, part in enumerate(parts[:-1]):
        if not part.startswith("0_"):
            continue
        counted = [file]
        while len(counted) < len(labels):
            folder = f"{len(counted)}_{part.removeprefix('0_')}"
            following = Path(*parts[:place], folder, *parts[place + 1 :])
            if not following.is_file():
                break
            counted.append(following)
        if _are_counted(counted, labels):
            return tuple(counted)
    return ()


def _are_counted(files: Sequence[Path], labels: Sequence[FoundLabel]) -> bool:
    """Whether each file was written after the previous label and before the next label."""
    times = [file.stat().st_mtime_ns for file in files]
    return (
        1 < len(files) <= len(labels)
        and all(time + _CLOCK_NS >= label.time_ns for time, label in zip(times[1:], labels))
        and all(time <= label.time_ns for time, label in zip(times, labels[1:]))
    )


def _given_alone(
    file: Path,
    source: StoredTensor,
    labels: Sequence[FoundLabel],
    shapes: Mapping[tuple[str, str], tuple[int, ...]],
) -> list[tuple[FoundLabel, StoredTensor]]:
    """Assign one tensor to one of several labels.

    A program labels what it just computed: the first label set after the file was written, whose
    partner has as many elements, gets the tensor. The last label gets it when none follows the
    file.
    """
    known = {id(label): shapes.get((label.task, label.label_id)) for label in labels}
    fit = [
        label
        for label in labels
        if (shape := known[id(label)]) is None or math.prod(shape) == math.prod(source.shape)
    ] or labels
    written = file.stat().st_mtime_ns
    behind = [label for label in fit if label.time_ns >= written]
    # Within the tick of the file system's clock the last one: it is written again and again.
    near = [label for label in behind if label.time_ns < written + _CLOCK_NS]
    if len(near) == len(behind):
        owner = (near or fit)[-1]
    else:
        owner = behind[0]
    place = next(n for n, label in enumerate(labels) if label is owner)
    for label in labels[:place]:
        label.why, label.overwritten = f"written over: {file} holds what came later", True
    for label in labels[place + 1 :]:
        label.why = f"{file} is of an earlier token: nothing was written there for this label"
    return [(owner, source)]


def _sources(file: Path) -> list[StoredTensor]:
    if file.suffix == ".npy":
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            return [
                StoredTensor(file, "", (), lambda: np.zeros(0), f"cut short or no array: {error}")
            ]
        from whence import dtypes

        name, why = str(array.dtype), ""
        try:
            name = dtypes.of(array).name
        except KeyError as error:
            why = str(error.args[0])
        return [StoredTensor(file, name, tuple(array.shape), lambda: array, why)]
    from whence.readers.ascend import atb_file

    return [_stored_tensor(file, tensor) for tensor in atb_file.tensors(file)]


def _stored_tensor(file: Path, tensor: Stored) -> StoredTensor:
    from whence.readers.ascend import atb_file

    if tensor.data:
        tensor = tensor._replace(
            why=f"refers to {tensor.data[:80]}, where the same elements were saved before"
        )
    return StoredTensor(
        file,
        tensor.type.dtype or tensor.type.name,
        tensor.shape,
        lambda: atb_file.elements(file, tensor),
        tensor.why,
    )
