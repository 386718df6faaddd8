"""Wires the rooms: what code and the command line call. This room alone knows the order of the stages.

Importing it loads no framework and no stage; each function imports what it needs when it is called.
"""

from whence.api.capturing import attach, capture
from whence.api.results import compare, free_output, load_comparison, load_policy
from whence.api.runs import open_run, recover, run_command, scrub, warmup

__all__ = [
    "attach",
    "capture",
    "compare",
    "free_output",
    "load_comparison",
    "load_policy",
    "open_run",
    "recover",
    "run_command",
    "scrub",
    "warmup",
]
