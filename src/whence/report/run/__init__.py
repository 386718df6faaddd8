"""One run, shown: what was run, its calls and records, the tree of modules, or one record in full.
Computes no comparison.

Every function yields lines and reads the run lazily; every name that comes from a run is cleaned
before it is shown.
"""

from whence.report.run.choice import Choice, find, other_meaning
from whence.report.run.heading import heading
from whence.report.run.listing import table, text, tree
from whence.report.run.machine import csv, json, one_json
from whence.report.run.record import corners, histogram, one

__all__ = [
    "Choice",
    "corners",
    "csv",
    "find",
    "heading",
    "histogram",
    "json",
    "one",
    "one_json",
    "other_meaning",
    "table",
    "text",
    "tree",
]
