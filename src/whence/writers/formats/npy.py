"""npy: a .npy file a tensor, and an index (`whence.jsonl`) of the calls that they are of.

`step<N>/rank<R>/<record>_<name>.npy`. bfloat16 and float8, of which numpy has no type, are raw
bytes (`np.load(f).view(ml_dtypes.bfloat16)`).
"""

from __future__ import annotations

from pathlib import Path

from whence.records import Run
from whence.writers.support import encodings, sidecar_index
from whence.writers.support.job import Tell, Writing, Written, file_name, silent


def write(run: Run, destination: Path, *, tell: Tell = silent) -> Written:
    """Write a run into the folder `destination`, which is made. Each record is one file, however
    many calls refer to it. Raises OSError.
    """
    work = Writing(run, tell, len(run.records))
    first_sights = sidecar_index.sights(run)
    places: dict[int, str] = {}
    for record in run.records:
        name = sidecar_index.label(record, first_sights.get(record.id))
        array = work.array(record.id, name, exact=False)
        if array is None:
            continue
        call = first_sights[record.id][0] if record.id in first_sights else None
        place = f"step{call.step if call else 0}/rank{call.rank if call else 0}/{record.id:06d}_{file_name(name)}.npy"  # noqa: E501
        path = destination / place
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            encodings.write_numpy(file, array)
        work.wrote(array)
        work.files.append(path)
        places[record.id] = place
    destination.mkdir(parents=True, exist_ok=True)
    work.files.append(sidecar_index.write(destination, run, places))
    return work.done()
