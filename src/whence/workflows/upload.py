"""Uploads runs into an object store: during the capture of a command, or one finished run at a
time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from whence.errors import StoreFailed, UnreadableRun

SPOOL = "WHENCE_SPOOL"
"""Environment variable that names the folder for runs that are being uploaded."""


def upload(run: str | os.PathLike[str], url: str, *, force: bool = False) -> int:
    """Copy a run to an object store, and return of how many files it consists there.

    url: of a folder (s3://bucket/run). force: replace a run that lies there. Raises UnreadableRun,
    OutputExists, StoreFailed, MissingDependency.
    """
    from whence import store
    from whence.store.upload import Upload

    path = Path(os.fspath(run))
    if not store.is_run(path):
        raise UnreadableRun(f"{path} is not a run: there is nothing to upload")
    return Upload(path, url, force=force).finish()


def uploaded(
    url: str, force: bool, capture: Callable[[str], int], tell: Callable[[str], None]
) -> int:
    """Capture into a local folder and upload it during the capture. Returns the exit code of the
    capture.

    capture: captures into the folder that it receives. The folder is deleted after a complete
    upload. Raises OutputExists before anything is started; StoreFailed when the upload fails and
    the command did not.
    """
    from whence import store
    from whence.store.upload import Upload, delete_spool

    spool = spool_folder(url)
    upload = Upload(spool, url, force=force)
    upload.start()
    code = capture(str(spool))
    if not store.is_run(spool):  # nothing was captured, which was told
        return code
    try:
        files = upload.finish()
    except StoreFailed as error:
        if not code:
            raise
        tell(f"whence: {error}")
        return code
    delete_spool(spool)
    tell(f"whence: uploaded to {url}: {files} files")
    return code


def spool_folder(url: str) -> Path:
    """A local folder, not yet created, for what is uploaded to a URL. Raises StoreFailed."""
    from whence.cache_folders import folder

    chosen = os.environ.get(SPOOL)
    parent = Path(chosen) if chosen else folder("spool")
    if parent is None:
        raise StoreFailed(f"no folder can be written to for what goes to {url}: set {SPOOL} to one")
    name = url.rstrip("/").rpartition("/")[2] or "run"
    return parent / f"{name}-{os.getpid()}"
