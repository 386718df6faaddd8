"""Runs as files of other tools: one file a format, streamed a tensor at a time, bitwise.

A writer is a file `writers/NAME.py` (or a module behind an entry point of the group
`whence.writers`) with

    def write(run: Run, destination: Path, *, tell: Tell = silent) -> Written

which fills `destination` (that is not there yet) and says what the format could not hold. Names of
a run are untrusted: none becomes a path as it is. `parts` holds what several formats share.
"""

from whence.writers.registry import Writer, known, named
from whence.writers.support.job import Tell, Writing, Written, moved, silent

__all__ = ["Tell", "Writer", "Writing", "Written", "known", "moved", "named", "silent"]
