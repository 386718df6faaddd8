"""Sizes in a recorded program that follow the extents of its inputs, and extents that may not
change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from whence.frameworks.torch_schema import OperatorSchema
from whence.instrument.torch.operand_table import OperandTable
from whence.records.slots import is_of_child, split_child

# Arguments that hold sizes: the only places where a number may follow an input's extent.
_SIZE_ARGUMENTS = {
    "size",
    "sizes",
    "shape",
    "start",
    "end",
    "length",
    "split_sizes",
    "split_size",
    "output_size",
    "repeats",
    "self_size",
}


class ProgramSizes:
    """calls: (number, operations before it) of the calls of other modules."""

    def __init__(self, table: OperandTable, calls: Sequence[tuple[int, int]]) -> None:
        self._table, self._calls = table, calls

    @staticmethod
    def takes_sizes(facts: OperatorSchema | None) -> bool:
        return facts is not None and any(n in _SIZE_ARGUMENTS for n in facts.positional)

    def known_at(self, place: int) -> set[int]:
        """The inputs that are there when the operation at this place runs: not what calls after it
        are given and leave.
        """
        entered = {k for k, position in self._calls if position <= place}
        return {
            k
            for k, slot in enumerate(self._table.inputs)
            if not is_of_child(slot) or split_child(slot)[0] in entered
        }

    def sized(
        self, facts: OperatorSchema | None, args: Any, kwargs: Any, present: set[int]
    ) -> tuple[Any, Any]:
        if facts is None:
            return args, kwargs

        def one(name: str, value: Any) -> Any:
            return self._follow(value, present) if name in _SIZE_ARGUMENTS else self._scalar(value)

        sized = tuple(one(name, value) for name, value in zip(facts.positional, args))
        return (*sized, *args[len(sized) :]), {
            name: one(name, value) for name, value in kwargs.items()
        }

    def _follow(self, value: Any, present: set[int]) -> Any:
        """A size as the extent of an input that is known by then, or the product of two, where only
        one reading is possible.

        Extents that are equal in the recording must be equal on replay (`_agreements`), so which of
        them is named does not matter.
        """
        if isinstance(value, list):
            return [self._follow(item, present) for item in value]
        if type(value) is not int or value < 2 or value >= 1 << 40:
            return value
        places = [
            (k, axis)
            for k, shape in enumerate(self._table.shapes)
            for axis, n in enumerate(shape)
            if n == value
        ]
        pairs = [
            (k, a, b)
            for k, shape in enumerate(self._table.shapes)
            for a, b in itertools.combinations(range(len(shape)), 2)
            if shape[a] * shape[b] == value and shape[a] > 1 < shape[b]
        ]
        if value not in self._table.param_extents:
            early = [(k, axis) for k, axis in places if k in present]
            if early:
                return {"dim": list(early[0])}
            products = [(k, a, b) for k, a, b in pairs if k in present and not places]
            if (
                len(
                    {
                        tuple(sorted((self._table.shapes[k][a], self._table.shapes[k][b])))
                        for k, a, b in products
                    }
                )
                == 1
            ):
                k, a, b = products[0]
                return {"mul": [{"dim": [k, a]}, {"dim": [k, b]}]}
        self._table.fixed.update((k, axis, value) for k, axis in places)
        if not places:
            self._table.fixed.update(
                (k, axis, self._table.shapes[k][axis]) for k, a, b in pairs for axis in (a, b)
            )
        return value

    def agreements(self, among: set[int] | None) -> set[tuple[int, int, int, int]]:
        """Extents that were equal: code that cuts one input to the length of another leaves no
        operator where they agree already.

        among: inputs to look at, None for all.
        """
        first: dict[int, tuple[int, int]] = {}
        equal = set()
        for k, shape in enumerate(self._table.shapes):
            if among is not None and k not in among:
                continue
            for axis, n in enumerate(shape):
                if n > 1 and first.setdefault(n, (k, axis)) != (k, axis):
                    equal.add((*first[n], k, axis))
        return equal

    def _scalar(self, value: Any) -> Any:
        """A plain number that equals an extent may have been taken from it (`x.sum(1) /
        x.shape[1]`): that extent may not change.
        """
        if type(value) in (int, float) and value >= 3:
            self._table.fixed.update(
                (k, a, n)
                for k, shape in enumerate(self._table.shapes)
                for a, n in enumerate(shape)
                if n == value
            )
        return value

    def fixed_extents(self, sizes: bool) -> set[tuple[int, int, int]]:
        """Extents a replay must share. An extent of 1 broadcasts, so where sizes are written down
        it may not grow.
        """
        ones = (
            {
                (k, a, 1)
                for k, shape in enumerate(self._table.shapes)
                for a, n in enumerate(shape)
                if n == 1
            }
            if sizes
            else set()
        )
        return self._table.fixed | ones
