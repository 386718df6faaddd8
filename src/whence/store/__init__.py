"""Our own run on disk: writer (a Sink), lazy reader (a Run). The format is specified in
docs/dev/format.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whence.lazy_names import lazily

if TYPE_CHECKING:
    from whence.records.places import is_url, refuse_url
    from whence.store.discarding import discard, reasons
    from whence.store.external import Candidates
    from whence.store.folder import FORMAT, ProcessInfo, create, is_run, update_info
    from whence.store.mistaken import what_instead
    from whence.store.packing import Packed, is_packed, pack, packing_state, relocate, unpack
    from whence.store.reader import StoredRun, announce, open_run, some_calls, some_records
    from whence.store.recovering import Recovered, is_written, recover
    from whence.store.same_lines import differing_tensors, say_the_same
    from whence.store.scrubbing import Scrubbed, scrub
    from whence.store.set_aside import SetAside
    from whence.store.writer import Writer
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "FORMAT",
    "Candidates",
    "Packed",
    "ProcessInfo",
    "Recovered",
    "Scrubbed",
    "SetAside",
    "StoredRun",
    "Writer",
    "announce",
    "create",
    "differing_tensors",
    "discard",
    "is_packed",
    "is_run",
    "is_url",
    "is_written",
    "open_run",
    "pack",
    "packing_state",
    "reasons",
    "recover",
    "refuse_url",
    "relocate",
    "say_the_same",
    "scrub",
    "some_calls",
    "some_records",
    "unpack",
    "update_info",
    "what_instead",
]
