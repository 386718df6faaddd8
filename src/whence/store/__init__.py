"""Our own run on disk: writer (a Sink), lazy reader (a Run). The format is specified in docs/format.md."""

from __future__ import annotations

from whence.store.folder import FORMAT, ProcessInfo, create, is_run, update_info
from whence.store.reader import StoredRun, open_run
from whence.store.writer import Writer

__all__ = ["FORMAT", "ProcessInfo", "StoredRun", "Writer", "create", "is_run", "open_run", "update_info"]
