"""Reads dumps of files that hold logits and nothing else, be it a file a token, a file a prompt or
one file for all, as one call of the model for each token of each prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.readers.assembly.spoken_names import NumberInName, numbers_in
from whence.records import Call, Over, Record, Ref, Run
from whence.records.slots import is_output

_LOGITS = re.compile(r"logit|lm_?head", re.IGNORECASE)
_LEAST = 16  # entries of a vocabulary


class _Place(NamedTuple):
    """Where the logits of one token are. at: indices into the axes of the record."""

    prompt: int
    token: int
    record: int
    at: tuple[int, ...] = ()


class PromptLogits(Over):
    """A dump of logits as calls of the model, `Call.step` being the token and `Call.rank` the
    number of the prompt; each returns (1, vocabulary) or what a file of one token holds.
    """

    def __init__(self, base: Run, places: Sequence[_Place]) -> None:
        self._places = sorted(places)
        root = base.calls[0].root
        records, calls = [], []
        for n, place in enumerate(self._places):
            record = base.records[place.record]
            shape = (1, record.shape[-1]) if place.at else record.shape
            records.append(Record(n, record.dtype, shape, elements=record.elements, why=record.why))
            calls.append(
                Call(
                    n, "", root, place.token, n, rank=place.prompt, op_type=root, leaf=True,
                    refs=(Ref("output.logits", n),),
                )
            )  # fmt: skip
        super().__init__(base, calls, records)

    def array(self, record: int) -> Array:
        """Elements of a record."""
        place = self._places[record]
        array = self.base.array(place.record)
        if not place.at:
            return array
        vector: Array = array.reshape(_squeezed(array.shape))[place.at]
        return vector[None]

    def below(self, record: int) -> tuple[Run, int] | None:
        """As `Over.below`."""
        place = self._places[record]
        return None if place.at else (self.base, place.record)


def of_run(run: Run) -> Run | None:
    """The run as one call of the model a token if its files hold logits and nothing else; the run
    itself where it has one tensor a step already. None for every other run.

    What tells logits: every tensor is an output, all have one last axis, which is the longest, and
    each name, or that of the only file, says logits, lm_head, a token or a prompt.
    """
    tensors = _outputs(run)
    if not tensors or not _are_of_one_vocabulary([run.records[record] for record in tensors]):
        return None
    names = [
        f"{run.records[record].file or PurePosixPath(run.path).name}/{call.scope}"
        for record, call in tensors.items()
    ]
    if not all(map(_says_logits, names)):
        return None
    places = _places(run, list(tensors), names) or []
    is_whole = any(place.prompt or place.at for place in places)
    steps = {(call.rank, call.step) for call in tensors.values()}
    if len(steps) == len(tensors) > 1 and not is_whole:
        return run
    is_clear = len({(place.prompt, place.token) for place in places}) == len(places)
    return PromptLogits(run, places) if places and is_clear else None


def _outputs(run: Run) -> Mapping[int, Call]:
    """By record, the innermost call that returned it; empty where the run holds anything else."""
    out: dict[int, Call] = {}
    if run.programs:
        return {}
    for call in run.calls:
        for ref in call.refs:
            if call.phase != "forward" or not is_output(ref.slot):
                return {}
            if ref.record not in out or call.scope:
                out[ref.record] = call
    return out


def _says_logits(name: str) -> bool:
    return bool(_LOGITS.search(name)) or any(n.is_prompt or n.is_token for n in numbers_in(name))


def _are_of_one_vocabulary(records: Sequence[Record]) -> bool:
    extents = {record.shape[-1] for record in records if record.shape}
    others = [extent for record in records for extent in record.shape[:-1]]
    return (
        len(extents) == 1
        and min(extents) >= _LEAST
        and min(extents) > max(others, default=1)
        and all(r.shape and r.count and dtypes.is_floating(r.dtype) for r in records)
    )


def _places(run: Run, records: Sequence[int], names: Sequence[str]) -> list[_Place] | None:
    """The places of the logits of all tokens; None where the numbers in the names do not say what
    they count.
    """
    shapes = [_squeezed(run.records[record].shape) for record in records]
    columns = _columns(names)
    if columns is None or len(columns) > 2:
        return None
    if not columns:
        return _of_one_file(records[0], shapes[0]) if len(records) == 1 else None
    columns.sort(key=lambda column: not column[0].is_prompt)
    first, last = columns[0], columns[-1]
    if len(columns) == 2:
        counted = zip(first, last, records, strict=True)
        return [_Place(prompt.number, token.number, record) for prompt, token, record in counted]
    rows = max(shape[0] for shape in shapes)
    is_of_prompts = first[0].is_prompt or (rows > 1 and not first[0].is_step and first[0].word)
    if not is_of_prompts:
        return [_Place(0, c.number, record) for c, record in zip(first, records, strict=True)]
    if any(len(shape) > 2 for shape in shapes):
        return None
    return [
        _Place(prompt.number, token, record, (token,))
        for prompt, record, shape in zip(first, records, shapes, strict=True)
        for token in range(shape[0])
    ]


def _columns(names: Sequence[str]) -> list[tuple[NumberInName, ...]] | None:
    """The numbers of prompts, and those that differ from name to name, without those of ranks and,
    beside counters of prompts and tokens, of unknown words. None where names have unequally many.
    """
    rows = [[c for c in numbers_in(name) if not c.is_rank] for name in names]
    if len({len(row) for row in rows}) > 1:
        return None
    # A file's name may be the tensor's too.
    by_numbers = {tuple(c.number for c in column): column for column in zip(*rows, strict=True)}
    columns = [
        column
        for numbers, column in by_numbers.items()
        if len(set(numbers)) > 1 or column[0].is_prompt
    ]
    known = [column for column in columns if column[0].is_prompt or column[0].is_token]
    return known or columns


def _of_one_file(record: int, shape: tuple[int, ...]) -> list[_Place] | None:
    """The tokens of a file with axes (prompts, tokens, vocabulary) or (tokens, vocabulary)."""
    if len(shape) > 3:
        return None
    return [
        _Place(index[0] if len(index) > 1 else 0, index[-1], record, index)
        for index in np.ndindex(shape[:-1])
    ]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with two axes at least and no axes of one entry in front of these."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape if len(shape) > 1 else (1, *shape)
