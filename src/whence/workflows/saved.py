"""Comparisons and policies on disk: where they are written, and how they are read."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from whence import disk
from whence.errors import OutputExists, StoreFailed, UnreadableRun
from whence.readers.opening import open_run
from whence.records import Run

if TYPE_CHECKING:
    from whence.judge.policy import Policy
    from whence.results import Comparison

AnyPath = str | os.PathLike[str]
AnyRun = AnyPath | Run
"""A run, or where one lies."""
AnyComparison: TypeAlias = "AnyPath | Comparison"
"""A comparison, or the folder or URL that it was written to."""
_LONG_NUMBER = re.compile(rb"(?<![\w.])-?\d{19}")  # digits that 64 bits may not hold


@contextmanager
def storing(what: str, advice: str = "") -> Iterator[None]:
    """Convert an OSError in the block to StoreFailed: "cannot WHAT" with the reason and what to do
    next.
    """
    try:
        yield
    except OSError as error:
        raise StoreFailed(f"cannot {what}: {error.strerror or error}{advice}") from error


def as_run(run: AnyRun) -> Run:
    """The run; a path is opened. Raises UnreadableRun."""
    return open_run(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else run


def as_comparison(comparison: AnyComparison) -> Comparison:
    """The comparison; a path is read. Raises UnreadableRun."""
    from whence.results import Comparison

    return comparison if isinstance(comparison, Comparison) else load_comparison(comparison)


def write_file(
    path: AnyPath, parts: str | bytes | disk.Parts, what: str = "", advice: str = ""
) -> None:
    """Write a file and create its parent folders. what: names the file in the error. Raises
    StoreFailed.
    """
    file = Path(path)
    with storing(f"write {what}{file}", advice):
        disk.make_folders(file.parent)
        disk.write_file(file, parts, through_link=True)


def load_policy(path: AnyPath) -> Policy:
    """A policy file (TOML or YAML, docs/policy.md), read and checked. Raises UsageError with the
    entry and the known keys.
    """
    from whence.judge.policy import load

    return load(path)


def views() -> tuple[str, ...]:
    """Names of the views that `compare` takes (docs/convert.md)."""
    from whence.report.views import names as views

    return views()


def free_output(base: str) -> Path:
    """`base` in the current folder, or base-2, base-3 ... when it exists."""
    path, n = Path(base), 1
    while path.exists():
        n += 1
        path = Path(f"{base}-{n}")
    return path


def check_output(output: str | Path, force: bool) -> None:
    """Raise OutputExists when a comparison cannot go into this folder, or to this URL; called
    before anything is computed.
    """
    from whence import store

    if isinstance(output, str) and store.is_url(output):
        from whence.workflows.saved_at_url import check_output_at

        check_output_at(output, force=force)
        return
    folder = Path(output)
    store.refuse_url(folder, "what this command compares is written to a folder of this machine")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputExists(
            f"cannot write a comparison to {folder}: it is a file; choose another -o"
        )
    if any(folder.iterdir()) and not force:
        if (folder / "summary.json").exists():
            raise OutputExists(
                f"{folder} already holds a comparison; --force replaces it, or choose another -o"
            )
        raise OutputExists(
            f"{folder} already holds files; --force writes beside them, or choose another -o"
        )
    if strange := _of_others(folder):
        raise OutputExists(
            f"{strange} is not of a comparison that whence wrote, and --force replaces nothing "
            "else; choose another -o"
        )


def _of_others(folder: Path) -> Path | None:
    """A file that whence did not write, at the path of one of the comparison's files; None without
    one.
    """
    from whence.report.own_files import is_own

    files = [folder / f"{name}.csv" for name in ("report", "generation", "layers", *views())]
    files += [folder / "summary.json", folder / "report.json"]
    there = [file for file in files if os.path.lexists(file)]
    return there[0] if there and not is_own(files[-1]) else None


def write(result: Comparison, output: str | Path) -> None:
    """Write a comparison's files into a folder, or to a URL of an object store. Raises StoreFailed
    saying which could not be written and why.
    """
    from whence import store

    result = result.in_folder(str(output))
    if isinstance(output, str) and store.is_url(output):
        from whence.workflows.saved_at_url import write_at

        write_at(output, functools.partial(_write_files, result))
    else:
        _write_files(result, Path(output))


def _write_files(result: Comparison, folder: Path) -> None:
    from whence.report.files import everything_json, layers_csv, table_csv
    from whence.report.generation import generation_csv
    from whence.report.summary import summary
    from whence.report.views import view_csv

    with storing(f"write the comparison to {folder}", "; choose another -o"):
        disk.make_folders(folder)
        parts: dict[str, Iterable[str | bytes]] = {
            "summary.json": [summary(result)],
            "report.csv": table_csv(result),
        }
        if result.generation is not None:
            parts["generation.csv"] = [generation_csv(result)]
        if result.layer_costs:
            parts["layers.csv"] = [layers_csv(result)]
        parts |= {f"{view}.csv": [view_csv(view, rows)] for view, rows in result.views.items()}
        # written last, because a comparison is read from it
        disk.write_together(folder, parts | {"report.json": everything_json(result)})


def load_comparison(path: AnyPath) -> Comparison:
    """A comparison written before (its folder or its report.json, or the URL of either). Raises
    UnreadableRun.
    """
    from whence import store

    if isinstance(path, str) and store.is_url(path):
        from whence.workflows.saved_at_url import report_here

        with report_here(path) as copy:
            return decoded_report(copy, path)
    place = Path(path)
    file = place / "report.json" if place.is_dir() else place
    try:
        return decoded_report(file, str(path))
    except OSError as error:
        raise UnreadableRun(_no_comparison(place, error)) from error


def decoded_report(file: Path, path: str) -> Comparison:
    """The comparison in a `report.json`. path: as the user named it.

    Raises UnreadableRun when the file is no comparison, and OSError.
    """
    try:
        return _decoded(file.read_bytes())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError) as error:
        raise UnreadableRun(not_readable(path, error)) from error


def not_readable(path: str, error: Exception) -> str:
    """The error text for a `report.json` that cannot be decoded. path: as the user named it."""
    reason = "it is larger than memory" if isinstance(error, MemoryError) else error
    why = f"{path} is not a comparison that this whence can read: {reason}"
    if path.endswith(".json") or Path(path).is_file():
        return f"{why}; give a folder that `whence compare -o` wrote, or its report.json"
    return f"{why}; compare again: whence compare REF TGT -o {path} --force"


def is_comparison(path: str) -> bool:
    """Whether a saved comparison, and not a run, is at a path or URL.

    Raises UnreadableRun when an object store does not answer.
    """
    from whence import store

    if store.is_url(path):
        from whence.workflows.saved_at_url import holds_comparison

        return holds_comparison(path)
    place = Path(path)
    if place.name == "report.json":
        return place.is_file()
    return (place / "report.json").is_file() and not (place / "run.json").exists()


def _decoded(report: bytes) -> Comparison:
    """The comparison in the bytes of a `report.json`.

    Whole numbers of more than 64 bits, which JSON writers do not accept, are refused here. Raises
    MsgspecError, RecursionError, UnicodeDecodeError.
    """

    from whence.results import Comparison

    comparison = msgspec.json.decode(report, type=Comparison)
    if _LONG_NUMBER.search(report):
        import orjson

        try:
            orjson.dumps(msgspec.json.decode(report))
        except TypeError as error:
            raise msgspec.ValidationError(str(error)) from error
    return comparison


def _no_comparison(place: Path, error: OSError) -> str:
    """The error text for a place without a comparison, and what to do."""
    from whence import store

    if not place.exists():
        return (
            f"no comparison at {place}: {error.strerror}; check the spelling, or make one: "
            f"whence compare REF TGT -o {place}"
        )
    if place.is_dir() and store.is_run(place):
        return (
            f"{place} is a run, not a comparison; compare it with another run: whence compare "
            f"{place} TGT -o CMP"
        )
    if place.is_dir() and not (place / "report.json").exists():
        inner = sorted(file.parent for file in place.glob("*/report.json"))
        if inner:
            names = ", ".join(map(str, inner[:4])) + (" ..." if inner[4:] else "")
            return f"{place} is a folder of comparisons; give one of them: {names}"
        return (
            f"no comparison in {place}: it has no report.json, which whence compare REF TGT -o CMP "
            "writes"
        )
    return f"cannot read {place}: {error.strerror or error}; give a folder that may be read"
