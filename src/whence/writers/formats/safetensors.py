"""safetensors: `model.safetensors`, or parts of 2 GB with `model.safetensors.index.json`, and an
index (`whence.jsonl`) of the calls.

Tensors have the names of what saw them first; those of several steps or ranks are told apart by
them. complex128, which the format has no code for, is float64 with a last axis of 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from whence import dtypes
from whence._version import __version__
from whence.dtypes import DTYPES
from whence.records import Record, Run
from whence.writers.support import encodings, sidecar_index
from whence.writers.support.job import Tell, Writing, Written, silent

PART_BYTES = 2_000_000_000
_METADATA = "__metadata__"


class _Planned(NamedTuple):
    """A tensor of a part: its name, its record."""

    name: str
    record: Record

    @property
    def nbytes(self) -> int:
        return self.record.count * dtypes.named(self.record.dtype).itemsize


def write(
    run: Run, destination: Path, *, tell: Tell = silent, part_bytes: int = PART_BYTES
) -> Written:
    """Write a run into the folder `destination`, which is made. part_bytes: of elements in one
    file, unless one tensor has more.

    Raises OSError.
    """
    work = Writing(run, tell, len(run.records))
    parts = _parts(_planned(work, run), part_bytes)
    destination.mkdir(parents=True, exist_ok=True)
    places: dict[int, str] = {}
    weights: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = (
            "model.safetensors"
            if len(parts) == 1
            else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        )
        for name, record in _write(work, destination / file, part):
            weights[name] = file
            places[record] = f"{file},{name}"
        work.files.append(destination / file)
    if len(parts) > 1:
        path = destination / "model.safetensors.index.json"
        total = sum(plan.nbytes for part in parts for plan in part if plan.name in weights)
        path.write_bytes(
            orjson.dumps(
                {"metadata": {"total_size": total}, "weight_map": weights},
                option=orjson.OPT_INDENT_2,
            )
        )
        work.files.append(path)
    work.files.append(sidecar_index.write(destination, run, places))
    return work.done()


def _planned(work: Writing, run: Run) -> list[_Planned]:
    """What is to be written, under names that are all different."""
    first_sights = sidecar_index.sights(run)
    ranks, steps = ({call.rank for call in run.calls}, {call.step for call in run.calls})
    names: dict[str, int] = {_METADATA: 0}
    plans = []
    for record in run.records:
        sight = first_sights.get(record.id)
        name = sidecar_index.label(record, sight)
        if record.why or record.dtype not in DTYPES:
            work.array(record.id, name, exact=False)  # notes why there are none
            continue
        moment = (
            [f"rank{sight[0].rank}"] * (len(ranks) > 1)
            + [f"step{sight[0].step}"] * (len(steps) > 1)
            if sight
            else []
        )
        whole = ".".join((*moment, name)).encode("utf-8", "backslashreplace").decode()
        count = names[whole] = names.get(whole, -1) + 1
        if count:
            whole = f"{whole}~{record.id}"
        plans.append(_Planned(whole, record))
    return plans


def _parts(planned: Sequence[_Planned], part_bytes: int) -> list[list[_Planned]]:
    parts: list[list[_Planned]] = [[]]
    size = 0
    for plan in planned:
        if parts[-1] and size + plan.nbytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(plan)
        size += plan.nbytes
    return parts


def _write(work: Writing, path: Path, part: list[_Planned]) -> list[tuple[str, int]]:
    """Write a file, its header last: what cannot be read is not in it. Returns (name, record) of
    what is.
    """
    room = len(_header(part))
    complete: list[_Planned] = []
    with path.open("wb") as file:
        file.write(bytes(8 + room))
        for plan in part:
            array = work.array(plan.record.id, plan.name, exact=False)
            if array is None:
                continue
            for piece in encodings.pieces(array):
                file.write(piece)
            work.wrote(array)
            complete.append(plan)
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _header(complete).ljust(room))
    return [(plan.name, plan.record.id) for plan in complete]


def _header(part: list[_Planned]) -> bytes:
    """The JSON before the elements, to a multiple of 8 bytes."""
    header: dict[str, object] = {_METADATA: {"format": "pt", "written_by": f"whence {__version__}"}}
    offset = 0
    for plan in part:
        code = dtypes.named(plan.record.dtype).safetensors
        shape = (
            [*plan.record.shape, 2] if plan.record.dtype == "complex128" else [*plan.record.shape]
        )
        header[plan.name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [offset, offset + plan.nbytes],
        }
        offset += plan.nbytes
    text = orjson.dumps(header)
    return text.ljust(len(text) + -len(text) % 8)
