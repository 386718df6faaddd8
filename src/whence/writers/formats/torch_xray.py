"""torch_xray: one HDF5 file a rank, a group a step, a dataset a tensor, in the order in which calls
ended; beside it a table of figures.

`globalrank-<g>_localrank-<l>.h5` and `globalrank-<g>_localrank-<l>_summary.csv`. A dataset is
called `<module path>.<Class>.<n>.forward_{params.<name>|input.<i>|output.<i>}`; n counts the calls
of a class in its step, steps count from 1. What HDF5 has no type for (bfloat16, float8) lies there
as its bits, uint16 or uint8, and the attribute `dtype` names it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from whence import dtypes, extras
from whence._version import __version__
from whence.records import Call, Run, Statistics
from whence.records.slots import split_slot
from whence.writers.support import job
from whence.writers.support.encodings import has_numpy_type
from whence.writers.support.job import Tell, Writing, Written, cell, plain, silent, text
from whence.writers.support.sidecar_index import Marks

COLUMNS = ("Step", "Rank", "Module", "Min", "Max", "Mean", "Std")
_KINDS = {"param": "params", "input": "input", "output": "output"}
_NAME_CHARS = 4000
_MARK_BYTES = 48_000  # HDF5 holds attributes of less than 64 KiB


def write(
    run: Run,
    destination: Path,
    *,
    tell: Tell = silent,
    leaves: bool = False,
    append: bool = False,
    local_ranks: Mapping[int, int] = {},
) -> Written:
    """Write a run into the folder `destination`, which is made.

    leaves: only modules that call no other, as the tool itself dumps; else every call. append: of
    files that are there, keep the steps they hold and add those that they do not, so that a run may
    be written step by step while it grows. local_ranks: rank -> rank on its machine, itself where
    it is not told. Raises MissingDependency without h5py, OSError.
    """
    try:
        import h5py
    except ImportError as error:
        raise extras.missing("h5py", "writing HDF5", error) from error
    moments = job.by_moment(call for call in run.calls if not leaves or _is_leaf(call))
    work = Writing(run, tell, sum(len(call.refs) for calls in moments.values() for call in calls))
    destination.mkdir(parents=True, exist_ok=True)
    for rank in dict.fromkeys(rank for rank, _ in moments):
        stem = f"globalrank-{rank}_localrank-{local_ranks.get(rank, rank)}"
        path, table = destination / f"{stem}.h5", destination / f"{stem}_summary.csv"
        grows = append and path.exists()
        with (
            h5py.File(
                path, "a" if grows else "w", track_order=True, libver=("earliest", "v110")
            ) as file,
            table.open("a" if grows else "w", encoding="utf-8", newline="") as out,
        ):
            rows = csv.writer(out, lineterminator="\n")
            if not grows:
                rows.writerow(COLUMNS)
                file.attrs.update(
                    {"format": "torch_xray", "version": 1, "tool": f"whence {__version__}"}
                )
                file.attrs.update(
                    {
                        "rank": rank,
                        "world": len({owner for owner, _ in moments}),
                        "created": run.info.started,
                    }
                )
            for step in (
                step for owner, step in moments if owner == rank and str(step + 1) not in file
            ):
                _step(work, file, step, moments[rank, step], rows, rank)
        work.files += [path, table]
    for call in run.calls if leaves else ():
        if not _is_leaf(call):
            work.leave("not a leaf module", job.name(call))
    return work.done()


def _is_leaf(call: Call) -> bool:
    return call.leaf and call.kind == "module"


def _step(work: Writing, file: Any, step: int, calls: list[Call], rows: Any, rank: int) -> None:
    """One group, which has its name only when all is in it."""
    unfinished = f"{step + 1}.unfinished"
    if unfinished in file:
        del file[unfinished]
    group = file.create_group(unfinished, track_order=True)
    table, marks = [], Marks(work.run, calls)
    for number, (call, prefix) in enumerate(_prefixed(calls)):
        for ref in job.refs(call):
            kind, slot = split_slot(ref.slot)
            tensor_name = (
                f"{prefix}_{_KINDS[kind]}.{slot}"
                if kind in _KINDS
                else f"{prefix}_output.{ref.slot}"
            )
            array = work.array(ref.record, tensor_name)
            table.append(
                (step + 1, rank, cell(tensor_name), *_figures(work.figures(ref.record, array)))
            )
            if array is None:
                continue
            # of types that HDF5 does not know, their bits
            data = array if has_numpy_type(array) else array.view(f"u{array.dtype.itemsize}")
            dataset = group.create_dataset(plain(tensor_name), data=data)
            dataset.attrs.update(
                {
                    "dtype": f"torch.{dtypes.of(array).name}",
                    "seq": number,
                    "kind": _KINDS.get(kind, kind),
                }
            )
            dataset.attrs.update(
                {
                    "module": text(call.scope)[-_NAME_CHARS:],
                    "cls": text(call.op_type)[-_NAME_CHARS:],
                    "occurrence": call.occurrence,
                }
            )
            mark = msgspec.json.encode(fields := marks.of(call, ref.slot))
            if len(mark) > _MARK_BYTES:
                work.leave("arguments too long for an attribute", tensor_name)
                for card in (fields.get("card", {}), *fields.get("also", ())):
                    card.pop("arguments", None)
                mark = msgspec.json.encode(fields)
            dataset.attrs["whence"] = mark.decode()
            work.wrote(array)
    for call in marks.untold():
        work.leave("a call without tensors", job.name(call))
    file.move(unfinished, str(step + 1))
    rows.writerows(table)


def _prefixed(calls: list[Call]) -> Iterator[tuple[Call, str]]:
    """Calls with what the names of their datasets begin with, which is another for each."""
    counts, prefixes = Counter[tuple[str, str]](), set[str]()
    for call in calls:
        cls = call.op_type if call.op_type.isidentifier() and not call.op else ""
        words = ".".join(part for part in (call.scope, call.op, cls) if part) or call.root
        phase = "backward" if call.phase == "backward" else "forward"
        while True:
            counted = cls or words, phase
            prefix = f"{words[-_NAME_CHARS:]}.{counts[counted]}.{phase}"
            counts[counted] += 1
            if plain(prefix) not in prefixes:
                break
        prefixes.add(plain(prefix))
        yield call, prefix


def _figures(statistics: Statistics | None) -> tuple[str, ...]:
    """Min, max, mean, std over the finite elements; empty where there is none."""
    if statistics is None:
        return ("", "", "", "")
    return tuple(
        "" if v is None else repr(v)
        for v in (statistics.min, statistics.max, statistics.mean, statistics.std)
    )
