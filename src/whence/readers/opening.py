"""Opens any path as a run: the native format, or a foreign dump with its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from whence.errors import UnreadableRun
from whence.records import Run
from whence.records.marks import FILES_CHANGED
from whence.records.views import ForeignRun

if TYPE_CHECKING:
    from whence.readers.encodings.raw_form import Forms
    from whence.records.lookup import NamedRun


def open_run(path: str, forms: Forms | None = None) -> NamedRun:
    """Opens a run on disk or a dump of another tool (docs/formats.md); elements are read on demand.
    forms: dtypes and shapes of raw bytes in a dump, by name.

    Raises UnreadableRun that describes the path, MissingDependency when a dump needs a package.
    """
    from whence import store

    folder = Path(path)
    if store.is_url(path):
        return store.open_run(path)
    if not folder.exists() or (folder / "run.json").exists() or any(folder.glob(_RANKS)):
        return _changed_dump(folder, folder) or store.open_run(path)

    inside = below(folder)
    if inside is not None:
        return _changed_dump(folder, inside) or store.open_run(inside)
    instead = store.what_instead(folder)
    if instead and not any(folder.glob(f"{_BESIDE}*/run.json")):
        raise UnreadableRun(f"{path} {instead}")
    from whence import readers

    return cast("NamedRun", readers.open_run(path, forms or {}))


def open_to_show(path: str, *, every: bool = True) -> Run:
    """As `open_run`, with figures of a dump's tensors, which are computed when they are displayed.

    every: all will be displayed; then no figures are computed beyond 4 GiB of elements, since
    reading them would take minutes.
    """
    run = open_run(path)
    if not isinstance(run, ForeignRun):
        return run
    from whence.readers.figures import described_when_shown

    return described_when_shown(run, every=every)


_RANKS = "rank[0-9][0-9][0-9][0-9][0-9]-*"
_OF_TOOLS = ("fx", "ge", "msit_torch", "msprobe", "polygraphy", "torch_xray")
"""Readers of dumps that whence writes beside a run, under the names of other tools."""
_ELEMENTS = (".h5", ".npy", ".pt", ".pth")
_LATER_S, _LATER_IN_COPY_S = 2.0, 60.0


def _changed_dump(folder: Path, run: Path) -> NamedRun | None:
    """The dump of another tool beside a run, where its files were changed after the run was
    written, so that the run says nothing about them; None where they were not.

    The run's description is touched when a dump is complete. In a copy it is not the last of the
    run's own files: times say little then.
    """
    description = run / "run.json"
    own = [*run.glob(f"{_RANKS}/*"), *([description] if description.exists() else ())]
    others = [
        file
        for file in folder.rglob("*")
        if file.suffix in _ELEMENTS and file.is_file() and not file.parent.match(_RANKS)
    ]
    if not own or not others:
        return None
    written = max(file.stat().st_mtime for file in own)
    is_copy = not description.exists() or description.stat().st_mtime < written
    limit = written + (_LATER_IN_COPY_S if is_copy else _LATER_S)
    changed = sorted(str(f.relative_to(folder)) for f in others if f.stat().st_mtime > limit)
    if not changed:
        return None
    from whence import readers
    from whence.display import listed
    from whence.records import Note

    try:
        dump = readers.open_run(folder)
    except UnreadableRun:
        return None
    if dump.reader not in _OF_TOOLS:
        return None
    text = f"{listed(changed, 2)} changed after {run} was written: the files are read, not the run"
    dump.notes = (*dump.notes, Note(FILES_CHANGED, text))
    return cast("NamedRun", dump)


_BESIDE = "whence-run"

_BELOW = (
    _BESIDE, "*_dump_*", "torch_tensors/*", "*_dump_*/torch_tensors/*", "dump_*",
    "msit_ge_dump/dump_*", "msit_fx_dump/dump_*", "dump", "proc_*/dump", "xray_debug/proc_*/dump",
    "[a-z]*_[0-9]*", "tensors/*/whence-run", "ait_dump/tensors/*/whence-run", "data_dump",
    "whence-run-*", "ait_dump/whence-run-*",
)  # fmt: skip


def below(folder: Path) -> Path | None:
    """Returns the only run that a `Dump` wrote somewhere below a folder; None where there is none,
    or more than one.
    """
    folders = {place.parent for pattern in _BELOW for place in folder.glob(f"{pattern}/run.json")}
    return folders.pop() if len(folders) == 1 else None
