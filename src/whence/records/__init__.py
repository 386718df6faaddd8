"""What a run is: calls, records, programs, regions, and the protocols `Run` and `Sink`."""

from whence.records.collective import Collective, CollectiveKind
from whence.records.marks import MEMORY_ORDER, OVERWRITTEN, PATCHED, PATCHED_AS
from whence.records.missing import Lack, Missing, files_of, missing_of
from whence.records.program import Operation, Program
from whence.records.region import Region, children, in_order, regions
from whence.records.run import (
    Call,
    Key,
    Note,
    Placement,
    Record,
    Ref,
    Run,
    RunInfo,
    Sink,
    Step,
    collectives_of,
)
from whence.records.storage import Dumped, Elements, External, Increment, Kept, Sketch, Statistics
from whence.records.views import Looked, MemoryRun, Over

__all__ = [
    "MEMORY_ORDER",
    "OVERWRITTEN",
    "PATCHED",
    "PATCHED_AS",
    "Call",
    "Collective",
    "CollectiveKind",
    "Dumped",
    "Elements",
    "External",
    "Increment",
    "Kept",
    "Key",
    "Lack",
    "Looked",
    "MemoryRun",
    "Missing",
    "Note",
    "Operation",
    "Over",
    "Placement",
    "Program",
    "Record",
    "Ref",
    "Region",
    "Run",
    "RunInfo",
    "Sink",
    "Sketch",
    "Statistics",
    "Step",
    "children",
    "collectives_of",
    "files_of",
    "in_order",
    "missing_of",
    "regions",
]
