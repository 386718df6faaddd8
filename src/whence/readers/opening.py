"""Opens any path as a run: the native format, or a foreign dump with its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from whence.errors import UnreadableRun
from whence.records import Run
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
    if (
        not folder.exists()
        or (folder / "run.json").exists()
        or any(folder.glob("rank[0-9][0-9][0-9][0-9][0-9]-*"))
    ):
        return store.open_run(path)

    inside = below(folder)
    if inside is not None:
        return store.open_run(inside)
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
