"""The folder of a run: run.json, one sub-folder per process, which process wrote what, and whether
that process is still alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from whence import disk
from whence.disk import write_file
from whence.errors import OutputExists, StoreFailed, UnknownVersion, UnreadableRun
from whence.records import RunInfo
from whence.records.places import refuse_url
from whence.regular_files import regular

FORMAT = 1
"""The version of the run format this code reads and writes (docs/dev/format.md)."""

RUN = "run.json"
PROCESS = "process.json"
JOURNAL = "journal.jsonl"
INDEX = "index.safetensors"
STATUS = "status.json"
PACKED = "packed.json"  # how the shards of a run are packed (`store.packing`)
FOREIGN_SILENCE_S = 60.0
PROCESS_FOLDER = re.compile(r"rank\d{5,}-[^/]+")
_MAX_JSON_BYTES = 64 << 20
_Struct = TypeVar("_Struct")
_DAMAGED = "it is damaged or was cut off: copy the run again, or capture it again"


class ProcessInfo(msgspec.Struct, frozen=True, omit_defaults=False):
    """The process that wrote a process folder.

    boot, pid_started: distinguish a process from a later one with the same pid ("" and 0 where the
    system does not tell). header_bytes: reserved at the front of every shard, including the 8 bytes
    of its length. world_size: number of ranks that its launcher started, 0 where that is not known.
    """

    format: int
    rank: int
    host: str
    pid: int
    started: str = ""
    boot: str = ""
    pid_started: int = 0
    header_bytes: int = 0
    align: int = 64
    hash: str = "xxh3_128"
    byteorder: str = "little"
    world_size: int = 0


def shard_name(shard: int) -> str:
    """Returns the file name of a shard."""
    return f"shard-{shard:05d}.safetensors"


def is_run(path: str | Path) -> bool:
    """Whether `path` is a folder whose run.json identifies a whence run. Cheap: reads one small
    file.
    """
    try:
        return load_json(Path(path) / RUN).get("kind") == "whence"
    except (OSError, ValueError):
        return False


def create(path: str | Path, info: RunInfo, *, force: bool = False, together: bool = False) -> Path:
    """Make the folder of a run, mode 0700, with its run.json, and return its path.

    An empty folder that exists is used. A non-empty one raises OutputExists, unless it is a whence
    run and `force`: then run.json and the process folders in it are deleted, and nothing else that
    lies there. Raises StoreFailed when the medium refuses. together: this process is one of several
    that write one run; the first makes it, the others join it.
    """
    refuse_url(path, "capture into a folder of this machine, then: whence upload RUN URL")
    if together:
        return _create_together(Path(path), info, force)
    run = Path(path)
    is_new = not run.exists()
    try:
        if run.is_symlink() or (run.exists() and not run.is_dir()):
            raise OutputExists(
                f"cannot put a run at {run}: it is a {_kind_of(run)}, not a folder; choose "
                "another output path"
            )
        # the remains of a process that was killed at its start do no harm
        if run.is_dir() and not all(p.match(f"{RUN}.*.tmp") for p in run.iterdir()):
            if not is_run(run):
                raise OutputExists(
                    f"{run} exists, is not empty and is not a whence run (no {RUN} of ours in "
                    "it); nothing was deleted; "
                    "choose another output path (--force only ever replaces a run)"
                )
            if not force:
                raise OutputExists(
                    f"{run} already holds a run; choose another output path or pass --force "
                    "(in Python, force=True) to replace it"
                )
            delete_run(run)
        disk.make_folders(run.parent)
        if not run.exists():
            disk.system.make_folder(run, 0o700)
        # somebody else's empty folder: usable, but not ours to close
        with contextlib.suppress(PermissionError):
            run.chmod(0o700)
        write_file(run / RUN, _encode_info({}, info))
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):
                run.rmdir()
        raise StoreFailed(
            f"cannot create the run {run}: {_reason(error)}; choose an output path in a writable "
            "folder with free space"
        ) from error
    return run


def _create_together(run: Path, info: RunInfo, force: bool) -> Path:
    """Calls `create`, or returns the run of another process of the same launch, if this process has
    no folder in it: of the same parent, created after this one started or still being written.
    """
    try:
        disk.make_folders(run.parent)
        with _alone_in(run.parent):
            launched = {"parent": [os.getppid(), _pid_started(os.getppid())], "at": _since_boot()}
            existing = (
                load_json(run / RUN).get("settings", {}).get("launched") if is_run(run) else None
            )
            started = (_pid_started(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
            of_this_launch = (
                isinstance(existing, dict)
                and existing.get("parent") == launched["parent"]
                and (existing.get("at", 0) >= started or _is_being_written(run))
            )
            own_folders = f"rank*-{os.getpid()}"
            if of_this_launch and not [*run.glob(own_folders), *run.glob(f"{own_folders}-*")]:
                return run
            return create(
                run,
                msgspec.structs.replace(info, settings={**info.settings, "launched": launched}),
                force=force,
            )
    except (OSError, ValueError) as error:
        raise StoreFailed(
            f"cannot create the run {run}: {error}; choose an output path in a writable folder "
            "with free space"
        ) from error


def _is_being_written(run: Path) -> bool:
    """Whether a process of this run still runs."""
    for folder in process_folders(run):
        with contextlib.suppress(UnreadableRun, UnknownVersion):
            if is_writing(folder, load_process(folder)):
                return True
    return False


def _since_boot() -> float:
    """Returns seconds on the clock that measures the start of processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder for the duration of the context."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def update_info(path: str | Path, **fields: Any) -> None:
    """Sets fields of run.json and replaces the file atomically; unknown fields are kept and may be
    set too. Raises UnreadableRun where there is no run, StoreFailed.
    """
    file = Path(path) / RUN
    try:
        old = load_json(file)
    except (OSError, ValueError) as error:
        raise UnreadableRun(f"cannot update {file}: {_reason(error)}") from error
    try:
        write_file(file, indented({**old, **fields}))
    except OSError as error:
        raise StoreFailed(f"cannot update {file}: {_reason(error)}") from error


def load_info(path: Path) -> RunInfo:
    """Returns run.json of the run at `path`. Raises UnreadableRun that describes the path,
    UnknownVersion for a later format.
    """
    if not path.exists():
        where = path.parent
        while not where.exists() and where != where.parent:
            where = where.parent
        raise UnreadableRun(
            f"no run at {path}: the path does not exist ({where} exists); check the spelling"
        )
    if not path.is_dir():
        raise UnreadableRun(
            f"no run at {path}: it is a {_kind_of(path)}; a whence run is a folder with {RUN} in it"
        )
    file = path / RUN
    if not file.exists():
        names = sorted(p.name for p in path.iterdir())
        listing = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
        raise UnreadableRun(
            f"{path} is not a whence run: it has no {RUN} (found: {listing}); make one with "
            f"`whence run -o {path} -- ...`"
        )
    fields = _fields(file)
    if fields.get("kind") != "whence":
        raise UnreadableRun(
            f"{file} is not of a whence run: its kind is {fields.get('kind')!r}, expected 'whence'"
        )
    return _understood(fields, RunInfo, file)


def _fields(file: Path) -> dict[str, Any]:
    """The content of a file of a run. Raises UnreadableRun, UnknownVersion."""
    try:
        fields = load_json(file)
    except (OSError, ValueError) as error:
        raise UnreadableRun(f"cannot read {file}: {_reason(error)}; {_DAMAGED}") from error
    check_format(fields.get("format"), file)
    return fields


def _understood(fields: dict[str, Any], kind: type[_Struct], file: Path) -> _Struct:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise UnreadableRun(f"cannot understand {file}: {error}") from error


def check_format(version: object, file: Path) -> None:
    """Raises UnknownVersion when this whence cannot read `version`, the format number in `file`."""
    if not isinstance(version, int):
        raise UnreadableRun(
            f"{file} states no format number (found {version!r}); the run was not written by "
            "whence or is damaged"
        )
    if version != FORMAT:
        raise UnknownVersion(
            f"{file} has run format {version}, this whence reads format {FORMAT}; "
            + (
                "open it with a newer whence"
                if version > FORMAT
                else "open it with the whence that wrote it"
            )
        )


def make_process_folder(run: Path, rank: int, info: ProcessInfo) -> Path:
    """Creates a new folder for this process in `run`, with process.json. Raises OSError."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", info.host)[:64] or "host"
    name = f"rank{rank:05d}-{host}-{info.pid}"
    for attempt in range(10_000):
        folder = run / (name if attempt == 0 else f"{name}.{attempt}")
        try:
            disk.system.make_folder(folder, 0o700)
        except FileExistsError:
            continue
        write_file(folder / PROCESS, indented(msgspec.to_builtins(info)))
        return folder
    raise FileExistsError(f"{run / name} and 9999 folders after it exist")


def process_folders(run: Path) -> list[Path]:
    """Returns the folders of the processes of a run, unsorted."""
    return [p for p in run.iterdir() if PROCESS_FOLDER.fullmatch(p.name) and p.is_dir()]


def load_process(folder: Path) -> ProcessInfo:
    """Returns process.json of a process folder. Raises UnreadableRun, UnknownVersion."""
    file = folder / PROCESS
    if folder.is_symlink():
        raise UnreadableRun(f"{folder} is a link, which is not followed; copy the folder itself")
    fields = _fields(file)
    return _understood(fields, ProcessInfo, file)


def this_process(rank: int, started: str, header_bytes: int) -> ProcessInfo:
    """Returns the ProcessInfo of the running process."""
    pid, size = os.getpid(), os.environ.get("WORLD_SIZE", "")
    return ProcessInfo(
        FORMAT,
        rank,
        socket.gethostname(),
        pid,
        started,
        _boot(),
        _pid_started(pid) or 0,
        header_bytes,
        world_size=int(size) if size.isdecimal() and len(size) < 8 else 0,
    )


def is_writing(folder: Path, info: ProcessInfo) -> bool:
    """Whether the process that made `folder` still runs; for a process on another host, whether it
    wrote within the last minute.
    """
    if info.host != socket.gethostname():
        try:
            return time.time() - (folder / JOURNAL).stat().st_mtime < FOREIGN_SILENCE_S
        except OSError:
            return False
    if (info.boot and info.boot != _boot()) or info.pid <= 0:
        return False
    started = _pid_started(info.pid)
    if started is not None and info.pid_started:
        return started == info.pid_started
    try:
        os.kill(info.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def delete_run(run: Path) -> None:
    """Deletes the files of a run that whence wrote, and keeps its folder. Raises OSError."""
    for folder in process_folders(run):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    for leftover in run.glob(f"{RUN}.*.tmp"):
        leftover.unlink()
    (run / PACKED).unlink(missing_ok=True)
    # last: an interrupted deletion is still recognised as a run and can be forced again
    (run / RUN).unlink()


def load_json(file: Path) -> dict[str, Any]:
    size = file.lstat()
    if not regular(size):
        raise ValueError("not a regular file on a disk, or a link, which is not followed")
    if size.st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{size.st_size} bytes, more than the {_MAX_JSON_BYTES} allowed")
    fields = orjson.loads(file.read_bytes())
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {type(fields).__name__}")
    try:
        orjson.dumps(fields)
    except TypeError as error:  # it reads deeper nesting than it writes
        raise ValueError("nested too deeply to be written again") from error
    return fields


def _encode_info(old: dict[str, Any], info: RunInfo) -> bytes:
    # kind and format are what a reader looks for, so they are written although they equal their
    # defaults
    return indented({**old, "kind": info.kind, "format": info.format, **msgspec.to_builtins(info)})


def indented(fields: Any) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)


def _kind_of(path: Path) -> str:
    if path.is_symlink():
        return "symbolic link"
    return "file" if path.is_file() else "special file"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_started(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since boot; 0 when it ended, None where the
    system does not tell.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0 if Path("/proc/self/stat").exists() else None
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return 0
    return int(fields[19])
