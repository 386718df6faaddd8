"""Which optimisers changed the graph of a session. The runtime tells it in its log alone, which it
writes to the file descriptor of stderr.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from typing import IO, Any

from whence.instrument.onnxruntime import native_sessions

_CHANGED = re.compile(rb"GraphTransformer (\w+) modified: 1 ")
_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ \[[VIWEF]:onnxruntime:")
_INFO = 1
_STDERR = 2
_lock = threading.Lock()


def changing_optimizers(python_session: Any, disabled: set[str]) -> list[str]:
    """Names of optimisers that change the graph of a session, in the order in which they first do.
    A second session is made like it, and its log is read. Raises whatever the runtime raises.
    """
    with _lock, tempfile.TemporaryFile() as log:
        native_sessions.logging_alike(python_session, disabled, _Redirected(log), _INFO)
        log.seek(0)
        lines = log.read().splitlines(keepends=True)
    others = b"".join(line for line in lines if not _LINE.match(line))
    if others:  # of other threads
        os.write(_STDERR, others)
    found = (_CHANGED.search(line) for line in lines)
    return list(dict.fromkeys(match[1].decode() for match in found if match))


class _Redirected:
    """A block in which file descriptor 2 is a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._kept = -1

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._kept = os.dup(_STDERR)
        os.dup2(self._file.fileno(), _STDERR)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, _STDERR)
        os.close(self._kept)
