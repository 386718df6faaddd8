"""A recorded call of a run as a kernel: its program, on inputs like those that it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import dtypes, extras
from whence.dtypes import Array
from whence.errors import UsageError
from whence.workflows.operator_fuzz.forms import Extent, Form
from whence.workflows.operator_fuzz.kernels import Kernel

if TYPE_CHECKING:
    from whence.records import Call, Run

_SHOWN = 8


@dataclass(frozen=True)
class RecordedCall:
    """A call. words: how the user wrote it. inputs: what its program reads, by slot; equal sizes
    are one dimension. sizes: of each dimension as recorded.
    """

    words: str
    program: Any
    inputs: tuple[Form, ...]
    sizes: Mapping[str, int]

    def kernel(self) -> Kernel:
        """The program as a kernel, in the dtype of the inputs that it gets."""
        recorded = next((f.dtype for f in self.inputs if f.is_floating), "")

        def call(inputs: Mapping[str, Array]) -> Any:
            kinds = [dtypes.of(array) for array in inputs.values()]
            working = next((kind.name for kind in kinds if kind.is_floating), recorded)
            if working == recorded:
                working = "recorded"
            return self.program.run(inputs, inputs, working=working, lenient=True)

        return Kernel(self.words, call, False)


def is_recorded(words: Any) -> bool:
    """Whether RUN:CALL is written, with a run that is there."""
    return isinstance(words, str) and Path(words.rpartition(":")[0] or " ").is_dir()


def recorded_call(words: str) -> RecordedCall:
    """The first call of a module or operator that can be run again, written RUN:NAME.

    Raises UsageError, UnreadableRun, ReplayRefused, MissingDependency without torch.
    """
    from whence.comparison.replays.side import ReplaySource
    from whence.readers.opening import open_run

    extras.needed("torch", "a recorded call as a kernel")
    path, _, name = words.rpartition(":")
    run = open_run(path)
    named = [c for c in run.calls if name == c.scope or (name and name in (c.op, c.op_type))]
    if not named:
        known = dict.fromkeys(call.op or call.scope for call in run.calls if call.program)
        raise UsageError(
            f"{path} has no call {name!r}; some of those that can be run again: "
            + ", ".join([n for n in known if n][:_SHOWN])
        )
    call = next((call for call in named if call.program), named[0])
    program = ReplaySource(run).load(call)
    slots = [*program.program.inputs, *program.program.params]
    inputs, sizes = _forms(run, call, slots)
    return RecordedCall(words, program, inputs, sizes)


def _forms(run: Run, call: Call, slots: Sequence[str]) -> tuple[tuple[Form, ...], dict[str, int]]:
    """The forms of these tensors, and the size of each dimension as recorded.

    Sizes 0 and 1 stay: what they are broadcast to may vary.
    """
    records = {ref.slot: run.records[ref.record] for ref in call.refs}
    if missing := [slot for slot in slots if slot not in records]:
        raise UsageError(
            f"{call.scope or call.op} calls other modules ({', '.join(missing)}): name one of them"
        )
    sizes = {f"d{n}": n for slot in slots for n in records[slot].shape if n > 1}
    forms = []
    for slot in slots:
        record = records[slot]
        extents = tuple(Extent(1, f"d{n}") if n > 1 else Extent(n) for n in record.shape)
        below = ""
        if not dtypes.is_floating(record.dtype) and record.statistics is not None:
            highest = record.statistics.max or 0
            below = min((n for n in sizes if sizes[n] > highest), key=sizes.__getitem__, default="")
        forms.append(Form(slot, record.dtype, extents, below))
    return tuple(forms), sizes
