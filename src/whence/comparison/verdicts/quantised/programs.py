"""Runs the programs of a quantised layer on the target's inputs: the reference's program, with the
target's weights or its own, and the target's own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whence import dtypes
from whence.comparison.replays.side import ReplaySource
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.judge.limits import CODES_BY_TABLES, CODES_NOT_NEAREST, FLOAT_KERNELS, U32
from whence.records import Call, Run
from whence.records.quantised import Coded, Member, QuantisedLayer, measured, numbers
from whence.records.slots import is_param

_WIDE = "float64"
TABLES = frozenset(("QLinearSoftmax",))
"""Nodes whose kernels look exponentials up by their codes."""


class LayerPrograms:
    """Runs quantised layers of the reference and of the target."""

    def __init__(self, reference: ReplaySource, target: ReplaySource) -> None:
        self.reference, self.target = reference, target

    def right(
        self,
        call: Call,
        layer: QuantisedLayer,
        params: Mapping[str, Array],
        *,
        given: Mapping[int, Array] | None = None,
        rounds: bool = False,
    ) -> list[Array]:
        """The outputs of the reference's program on the target's inputs, in order.

        params: by slot, values that replace the reference's parameters. given: by record of the
        target, values that replace its inputs. rounds: whether inputs that the target quantises
        inside are rounded to codes too. Raises ReplayRefused, ElementsMissing.
        """
        loaded = self.reference.load(call)
        reads = {f"input.{k}": coded for k, coded in enumerate(layer.reads)}
        of_reference = call.quantised
        records = _records(call, of_reference)
        run = self.reference.run
        inputs: dict[str, Array] = {}
        for slot in loaded.program.inputs:
            if slot not in reads:
                raise ReplayRefused(f"the target has no tensor for {slot}")
            shape = run.records[records[slot]].shape
            value = self._read(reads[slot], given or {})
            if rounds and reads[slot].is_measured:
                codes, scale, zero = measured(value)
                value = numbers(codes, np.asarray(scale, np.float64), np.asarray(zero, np.float64))
            value = with_shape(value, shape)
            inputs[slot] = _as_reads(run, of_reference, slot, value)
        values = {
            slot: params[slot] if slot in params else run.array(records[slot])
            for slot in loaded.program.params
        }
        made = loaded.run(inputs, values, working=_WIDE)
        return [
            _shown(run, of_reference, k, made[ref.slot])
            for k, ref in enumerate(call.slots("output"))
            if ref.slot in made
        ]

    def _read(self, coded: Coded, given: Mapping[int, Array]) -> Array:
        """The numbers behind an input of a layer."""
        array = self.target.run.array
        if coded.record in given:
            return given[coded.record]
        if coded.of in given and coded.grid is not None:
            return coded.grid.rounded(array, given[coded.of])
        return array(coded.record)

    def own(
        self, layer: QuantisedLayer, moved: Callable[[int, Array], Array] = lambda _, array: array
    ) -> list[Array]:
        """The outputs, as numbers, of the target's own nodes on its own inputs, in order. moved:
        (record, array) of every tensor that the nodes compute or hold -> the array to use in its
        place. Raises ReplayRefused, ElementsMissing.
        """
        made: dict[int, Array] = {}
        for member in layer.members:
            results = self._node(member, made, moved)
            made |= {record: moved(record, array) for record, array in results.items()}
        records = [layer.own[f"output.{k}"] for k in range(len(layer.makes))]
        return [_shown(self.target.run, layer, k, made[r]) for k, r in enumerate(records)]

    def broken_node(self, layer: QuantisedLayer) -> Member | None:
        """The first node whose recorded output differs from its program's on the recorded inputs;
        None if there is none. Raises ReplayRefused, ElementsMissing.
        """
        run = self.target.run
        for member in layer.members:
            for record, array in self._node(member, {}).items():
                produced = run.array(record).astype(np.float64)
                off = np.abs(produced - array.astype(np.float64))
                if dtypes.is_floating(run.records[record].dtype):
                    limit = FLOAT_KERNELS * max(float(np.abs(array).max(initial=0.0)), 1e-30)
                    is_off = not bool((off <= limit).all())  # NaN is off too
                else:
                    few = max(3, int(CODES_NOT_NEAREST * off.size))
                    is_off = bool((off > 1).any()) or int(np.count_nonzero(off)) > few
                    if member.kind in TABLES:
                        is_off = bool((off > CODES_BY_TABLES).any())
                    if is_off and member.kind == "QuantizeLinear":
                        is_off = not self._lies_between(member, record, produced)
                if is_off:
                    return member
        return None

    def _lies_between(self, member: Member, record: int, codes: Array) -> bool:
        """Whether codes are the nearest to numbers as far from a node's input as the quotient by
        the scale rounds: sums of two numbers of one grid all lie in the middle of two codes.
        """
        given = member.slots["input.0"]
        value = self.target.run.array(given).astype(np.float64)
        ends = [self._node(member, {given: value * (1 + way * 4 * U32)})[record] for way in (-1, 1)]
        return bool(((np.minimum(*ends) <= codes) & (codes <= np.maximum(*ends))).all())

    def _node(
        self,
        member: Member,
        made: Mapping[int, Array],
        moved: Callable[[int, Array], Array] = lambda _, array: array,
    ) -> dict[int, Array]:
        """The outputs of one node, by record. made: outputs of earlier nodes, by record."""
        run = self.target.run
        program = run.programs.get(member.program)
        if program is None:
            raise ReplayRefused(f"{member.name} has no program")
        loaded = self.target.edited(program)

        def held(slot: str) -> Array:
            record = member.slots[slot]
            if record in made:
                return made[record]
            return moved(record, run.array(record)) if is_param(slot) else run.array(record)

        lost = [s for s in (*program.inputs, *program.params) if s not in member.slots]
        if lost:
            raise ReplayRefused(f"{member.name}: {lost[0]} was not captured")
        results = loaded.run(
            {slot: held(slot) for slot in program.inputs},
            {slot: held(slot) for slot in program.params},
            working=_WIDE,
        )
        return {member.slots[s]: np.asarray(v) for s, v in results.items() if s in member.slots}


def with_shape(array: Array, shape: tuple[int, ...]) -> Array:
    """The array reshaped to `shape` if only its leading axes are merged or split, its axes moved if
    these stand in another order; else as it is.
    """
    left, wanted = ([n for n in extents if n != 1] for extents in (array.shape, shape))
    if left != wanted and sorted(left) == sorted(wanted):
        array = array.reshape(left)
        order = []
        for extent in wanted:
            order.append(left.index(extent))
            left[order[-1]] = 0
        return array.transpose(order).reshape(shape)
    is_alike = array.size == int(np.prod(shape)) and array.shape[-1:] == shape[-1:]
    return array.reshape(shape) if is_alike else array


def _records(call: Call, layer: QuantisedLayer | None) -> Mapping[str, int]:
    """The records of the slots of a call's program."""
    return layer.own if layer is not None else call.by_slot


def _as_reads(run: Run, layer: QuantisedLayer | None, slot: str, value: Array) -> Array:
    """Numbers as the program of a call takes them: as its own codes, where it reads codes."""
    coded = _coded(layer, slot)
    if coded is None or coded.grid is None:
        return value
    grid = coded.grid
    if grid.channels_last and value.ndim > 2:
        value = np.moveaxis(value, 1, -1)
    if coded.codes < 0:
        return value
    scale, zero = grid.steps(run.array, value.ndim)
    codes = np.clip(np.rint(value.astype(np.float64) / scale + zero), *grid.ends)
    out: Array = codes.astype(dtypes.named(grid.dtype).numpy)
    return out


def _coded(layer: QuantisedLayer | None, slot: str) -> Coded | None:
    place = slot.rpartition(".")[2]
    if layer is None or is_param(slot) or not place.isdigit() or int(place) >= len(layer.reads):
        return None
    return layer.reads[int(place)]


def _shown(run: Run, layer: QuantisedLayer | None, place: int, value: Any) -> Array:
    """What a program made, as numbers in the order of axes of ONNX."""
    array: Array = np.asarray(value)
    coded = layer.makes[place] if layer is not None else None
    if coded is None or coded.grid is None:
        return array
    if coded.codes >= 0:
        array = numbers(array, *coded.grid.steps(run.array, array.ndim))
    return np.moveaxis(array, -1, 1) if coded.grid.channels_last and array.ndim > 2 else array
