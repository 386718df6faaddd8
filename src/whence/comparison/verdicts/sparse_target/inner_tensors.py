"""What the programs of a run give inside its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from whence.align import Inner
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.records import Run

_MAX_BYTES = 1 << 30
_MAX_CALLS = 2_000


def inside(run: Run, allow: Sequence[str] = ()) -> Callable[[int, frozenset[int]], Iterator[Inner]]:
    """What the programs of a run give inside its calls, on its own inputs: for `align.align`.
    Bounded to 1 GiB and 2 000 calls.
    """
    side = ReplaySource(run, allow)

    def tensors(step: int, counts: frozenset[int]) -> Iterator[Inner]:
        size = calls = 0
        for call in run.calls:
            if call.step != step or not call.program or size > _MAX_BYTES or calls > _MAX_CALLS:
                continue
            arrays: dict[int, Array] = {}

            def keep(operation: int, array: Array, arrays: dict[int, Array] = arrays) -> None:
                if array.size in counts:
                    arrays[operation] = array

            calls += 1
            try:
                loaded = side.trusted(call)
                slots = side.records(call, (*loaded.program.inputs, *loaded.program.params))
                inputs, strides = side.arrays(slots)
                loaded.run(
                    inputs,
                    inputs,
                    working="recorded",
                    strides=strides,
                    outputs=loaded.determined(slots),
                    trace=keep,
                )
            except (ReplayRefused, ElementsMissing):
                continue
            for operation, array in arrays.items():
                size += array.nbytes
                yield Inner(call.id, operation, loaded.program.operations[operation].name, array)

    return tensors
